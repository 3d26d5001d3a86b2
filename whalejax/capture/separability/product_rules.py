"""Rules for products: matrices, groups of rows by expert, and convolutions."""

from __future__ import annotations

from typing import Any, Final

from whalejax.capture.separability.alignment import align_dim, check_one_batch
from whalejax.capture.separability.equations import (
    PairedEquation,
    Rule,
    combined_kind,
)
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Dim,
    Value,
    is_one,
    is_samples,
    plain_dim,
    product_ratio,
)


def _check_factors(values: Any) -> None:
    if sum(v.kind is Dependence.SUM for v in values) > 1:
        raise CoupledError("multiplies sums over the samples")


def _dot_general(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    (contracted, batch), (left, right) = numbers, equation.values[:2]
    _check_factors((left, right))
    dims: list[Dim] = [
        align_dim(left.dims[i], right.dims[j]) for i, j in zip(*batch, strict=True)
    ]
    for value, own, other in (
        (left, contracted[0], batch[0]),
        (right, contracted[1], batch[1]),
    ):
        dims += [d for i, d in enumerate(value.dims) if i not in (*own, *other)]
    gone = [
        align_dim(left.dims[i], right.dims[j]) for i, j in zip(*contracted, strict=True)
    ]
    check_one_batch((*dims, *gone))
    kind, within = combined_kind((left, right))
    ratio = product_ratio((left, right))
    product = Value(kind=kind, dims=(), ratio=ratio, within=within)
    return [with_sum(product, gone, dims)]


def _ragged_dot(equation: PairedEquation) -> list[Value]:
    """Follows rows by group with fixed groups; ``fact_rules`` handles others."""
    left, right, sizes = equation.values[:3]
    every = (*left.dims, *right.dims, *sizes.dims)
    if _grows(*every) or sizes.kind is not Dependence.FIXED or not is_one(sizes.ratio):
        raise CoupledError("groups rows of all samples")
    _check_factors((left, right))
    return [_plain_result(equation, (left, right, sizes))]


def _plain_result(equation: PairedEquation, values: Any) -> Value:
    kind, within = combined_kind(values)
    part, whole = equation.shapes()
    if part != whole:
        raise CoupledError(SIZE)
    dims = tuple(plain_dim(a, b) for a, b in zip(part, whole, strict=True))
    return Value(kind=kind, dims=dims, ratio=product_ratio(values), within=within)


def _conv(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    equation.equal_params("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    equation.equal_params("batch_group_count")
    left, right = equation.values
    _check_factors((left, right))
    kind, within = combined_kind((left, right))
    shapes = equation.shapes()
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims: list[Dim] = [
        plain_dim(shapes[0][i], shapes[1][i]) for i in range(len(shapes[0]))
    ]
    samples, features = (left.dims[specs[0][i]] for i in (0, 1))
    filters = right.dims[specs[1][0]]
    places = [left.dims[i] for i in specs[0][2:]]
    places += [right.dims[i] for i in (*specs[1][1:],)]
    if _grows(*places):
        raise CoupledError("convolves along the samples")
    if equation.params["batch_group_count"] != 1:
        return [_grouped_batch(equation, left, right)]
    if _grows(features) or _grows(filters):
        dims[specs[2][1]] = _grouped_features(equation, features, filters, shapes)
    else:
        equation.equal_params("feature_group_count")
    dims[specs[2][0]] = samples
    check_one_batch(tuple(dims))
    ratio = product_ratio((left, right))
    return [Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)]


def _grows(*dims: Dim) -> bool:
    return any(a.grows for dim in dims for a in dim) or any(map(is_samples, dims))


def _grouped_features(
    equation: PairedEquation, features: Dim, filters: Dim, shapes: Any
) -> Dim:
    """Follows channels of several samples, each convolved with its own filters."""
    groups = [e.params["feature_group_count"] for e in (equation.part, equation.whole)]
    for dim in (features, filters):
        lead = dim[0] if dim else None
        if lead is None or not lead.grows:
            raise CoupledError("convolves over the samples")
        if (groups[0] % lead.part, groups[1] % lead.whole) != (0, 0):
            raise CoupledError("convolves over the samples")
    lead = align_dim(features[:1], filters[:1])[0]
    place = equation.params["dimension_numbers"].out_spec[1]
    sizes = shapes[0][place] // lead.part, shapes[1][place] // lead.whole
    return (lead, *plain_dim(*sizes))


def _grouped_batch(equation: PairedEquation, left: Value, right: Value) -> Value:
    if any(map(is_samples, (*left.dims, *right.dims))):
        raise CoupledError("convolves over the samples")
    return _plain_result(equation, (left, right))


RULES: Final[dict[str, Any | Rule]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "ragged_dot": _ragged_dot,
    "conv_general_dilated": _conv,
}
