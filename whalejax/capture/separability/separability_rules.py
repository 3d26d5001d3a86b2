"""Rules for products and lookups, and the table of all rules by primitive.

Products are matrix products, products of rows grouped by expert, and convolutions. A
lookup or a scattered write couples no samples if the index of a sample is computed from
its own data. An index that selects among samples couples them, unless each sample's
index is its own position.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from whalejax import _compat
from whalejax.capture.separability import (
    elementwise_rules,
    random_rules,
    reduction_rules,
    shape_rules,
)
from whalejax.capture.separability.alignment import (
    align_dim,
    align_dims,
    check_one_batch,
)
from whalejax.capture.separability.elementwise_rules import (
    check_sum_dtype,
    check_unsigned_sum,
)
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.shape_rules import TAKES, cut_dim
from whalejax.capture.separability.values import (
    SIZE,
    CoupledError,
    Dependence,
    Dim,
    IndexColumns,
    PairedEquation,
    Places,
    Rule,
    Value,
    combined_kind,
    equal_dim,
    fact_of,
    fixed,
    is_one,
    is_samples,
    plain_dim,
    product_ratio,
    same_ratio,
    size_of,
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
    """Follows a product of grouped rows whose groups depend on no sample.

    ``fact_rules`` handles other groups.
    """
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


PRODUCT_RULES: Final[dict[str, Any | Rule]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "ragged_dot": _ragged_dot,
    "conv_general_dilated": _conv,
}


def columns_of(indices: Value, count: int) -> list[Value] | None:
    """Returns the index arrays that were concatenated, if they are known."""
    columns = fact_of(indices, IndexColumns)
    if columns is not None:
        return list(columns.columns)
    return [indices] if count == 1 else None


def _index_dims(indices: Value, columns: Sequence[Value] | None) -> list[Dim]:
    """Returns the dimensions of index arrays, without the one that numbers them.

    Positions of samples are described as copies, which align with any dimension.
    """
    if columns is None:
        return list(indices.dims[:-1])
    dims = []
    for column in columns:
        own = list(column.dims[:-1])
        places = fact_of(column, Places)
        if places is not None:
            own[places.dim] = equal_dim(*size_of(own[places.dim]))
        dims.append(tuple(own))
    return list(align_dims(dims))


def _check_indices(values: Sequence[Value]) -> None:
    if any(v.kind is Dependence.SUM for v in values):
        raise CoupledError("looks up by a sum over the samples")
    if any(v.coupled for v in values):
        raise CoupledError("looks up by an index that depends on other samples")
    if not all(is_one(v.ratio) for v in values):
        raise CoupledError("looks up by an index that depends on the number of samples")


def _gather(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    operand, indices = equation.values
    pieces = equation.part.params["slice_sizes"], equation.whole.params["slice_sizes"]
    mapped = [int(i) for i in numbers.start_index_map]
    columns = columns_of(indices, len(mapped))
    _check_indices(columns or [indices])
    own = _index_dims(indices, columns)
    for o, i in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        own[i] = align_dim(operand.dims[o], own[i])
    looked_up: set[int] = set()
    for slot, d in enumerate(mapped):
        sizes = size_of(operand.dims[d])
        column = None if columns is None else columns[slot]
        places = None if column is None else fact_of(column, Places)
        if (pieces[0][d], pieces[1][d]) == sizes and places is None:
            continue
        looked_up.add(d)
        if places is not None and any(a.grows for a in operand.dims[d]):
            if size_of(own[places.dim]) != sizes or pieces[0][d] != 1:
                raise CoupledError(TAKES)
            own[places.dim] = align_dim(operand.dims[d], own[places.dim])
        elif places is not None:
            own[places.dim] = plain_dim(*size_of(own[places.dim]))
        elif any(a.grows for a in operand.dims[d]):
            raise CoupledError(TAKES)
    collapsed = {int(i) for i in numbers.collapsed_slice_dims}
    gone = collapsed | {int(i) for i in numbers.operand_batching_dims}
    behind: list[Dim] = []
    for d, dim in enumerate(operand.dims):
        if d in gone:
            continue
        sizes, taken = size_of(dim), (pieces[0][d], pieces[1][d])
        if taken == sizes:
            behind.append(dim)
        elif d in looked_up:
            behind.append(plain_dim(*taken))
        else:
            behind.append(cut_dim(dim, sizes, [(0, n, 1) for n in taken]))
    offsets = {int(i) for i in numbers.offset_dims}
    front, rest = iter(own), iter(behind)
    rank = len(equation.shapes()[0])
    dims = tuple(next(rest) if i in offsets else next(front) for i in range(rank))
    check_one_batch(dims)
    kind, within = combined_kind([operand, *(columns or [indices])])
    ratio = same_ratio([operand, _filler(equation)])
    return [Value(kind=kind, dims=dims, ratio=ratio, within=within)]


def _filler(equation: PairedEquation) -> Value:
    """Returns a lookup's fill value; with ratio None if it is 0, NaN or not used."""
    value = equation.params.get("fill_value")
    filled = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not filled or (value is None and _compat.is_inexact(equation.result_dtype)):
        return fixed(ratio=None)
    return fixed(ratio=None if value == 0 else 1.0)


def _scatter(equation: PairedEquation) -> list[Value]:
    (numbers,) = equation.equal_params("dimension_numbers")
    operand, indices, updates = equation.values
    _check_applied(equation)
    mapped = [int(i) for i in numbers.scatter_dims_to_operand_dims]
    columns = columns_of(indices, len(mapped))
    _check_indices(columns or [indices])
    windows = [int(i) for i in numbers.update_window_dims]
    scattered = [i for i in range(len(updates.dims)) if i not in windows]
    own = [
        align_dim(updates.dims[u], dim)
        for u, dim in zip(scattered, _index_dims(indices, columns), strict=True)
    ]
    scatter, met = list(operand.dims), set[int]()
    for o, i in zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    ):
        scatter[o] = align_dim(scatter[o], own[i])
        met.add(i)
    inserted = {int(i) for i in numbers.inserted_window_dims}
    outside = inserted | {int(i) for i in numbers.operand_batching_dims}
    inner = [d for d in range(len(scatter)) if d not in outside]
    window = dict(zip(inner, windows, strict=True))
    for slot, d in enumerate(mapped):
        if d in window and size_of(scatter[d]) == size_of(updates.dims[window[d]]):
            continue
        places = None if columns is None else fact_of(columns[slot], Places)
        if places is not None and size_of(own[places.dim]) == size_of(scatter[d]):
            if places.dim in met:
                raise CoupledError("writes to a diagonal of the samples")
            scatter[d] = align_dim(scatter[d], own[places.dim])
            met.add(places.dim)
        elif places is not None or any(a.grows for a in scatter[d]):
            raise CoupledError("writes to samples by an index")
        else:
            scatter[d] = plain_dim(*size_of(scatter[d]))
    for d, u in window.items():
        if size_of(scatter[d]) == size_of(updates.dims[u]):
            scatter[d] = align_dim(scatter[d], updates.dims[u])
        elif any(a.grows for a in (*scatter[d], *updates.dims[u])):
            raise CoupledError("writes to some of the samples by their position")
        else:
            scatter[d] = plain_dim(*size_of(scatter[d]))
    gone = [dim for i, dim in enumerate(own) if i not in met]
    check_one_batch((*scatter, *gone))
    return [
        _scatter_value(equation, (operand, indices, updates), columns, gone, scatter)
    ]


def _check_applied(equation: PairedEquation) -> None:
    """Refuses in-place functions that have constants or read sums over samples."""
    combiner = equation.params.get("update_jaxpr")
    operand = equation.values[0]
    if equation.name != "scatter" or combiner is None:
        return
    body, constants = _compat.open_jaxpr(combiner)
    plain = body.outvars == [body.invars[1]]
    if not plain and (constants or equation.params.get("update_consts")):
        raise CoupledError("applies a function at some positions")
    if not plain and (operand.kind is Dependence.SUM or not is_one(operand.ratio)):
        raise CoupledError("applies a function to a sum over the samples")


def _scatter_value(
    equation: PairedEquation,
    values: tuple[Value, Value, Value],
    columns: Sequence[Value] | None,
    gone: Sequence[Dim],
    dims: Sequence[Dim],
) -> Value:
    operand, indices, updates = values
    index = list(columns or [indices])
    kind, within = combined_kind([updates, *index])
    if equation.name not in ("scatter-add", "scatter_add"):
        if any(a.grows for dim in gone for a in dim) or any(map(is_samples, gone)):
            raise CoupledError("writes samples over each other")
        if equation.name != "scatter":
            _check_combined(equation, operand, updates)
        kind, within = combined_kind([operand, updates, *index])
        ratio = same_ratio([operand, updates])
        return Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)
    added = Value(kind=kind, ratio=updates.ratio, within=within)
    added = with_sum(added, gone, dims)
    kind, within = combined_kind([operand, added])
    ratio = same_ratio([operand, added])
    return Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)


def _check_combined(equation: PairedEquation, operand: Value, updates: Value) -> None:
    sums = sum(v.kind is Dependence.SUM for v in (operand, updates))
    product = equation.name in ("scatter-mul", "scatter_mul")
    if sums > product:
        raise CoupledError(f"applies {equation.name} to sums over the samples")
    if updates.kind is Dependence.SUM and not equation.params["unique_indices"]:
        raise CoupledError("may multiply sums over the samples at one position")
    if not is_one(product_ratio([operand, updates])):
        raise CoupledError("multiplies values that depend on the number of samples")


INDEXING_RULES: Final[dict[str, Any | Rule]] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "scatter_add": _scatter,
    "scatter_mul": _scatter,
    "scatter_min": _scatter,
    "scatter_max": _scatter,
}


RULES: Final[dict[str, Rule]] = {
    **elementwise_rules.RULES,
    **shape_rules.RULES,
    **reduction_rules.RULES,
    **PRODUCT_RULES,
    **INDEXING_RULES,
    **random_rules.RULES,
}


def apply_rule(equation: PairedEquation) -> list[Value]:
    """Returns facts about an equation's results.

    Raises:
        CoupledError: The equation couples samples, or reads samples and has no rule.
    """
    _check_switches(equation)
    rule = RULES.get(equation.name)
    result = _opaque(equation) if rule is None else rule(equation)
    for value, variable in zip(result, equation.part.outvars, strict=True):
        if value.kind is Dependence.SUM:
            check_sum_dtype(variable.aval.dtype)
            check_unsigned_sum(equation)
    return result


def _check_switches(equation: PairedEquation) -> None:
    for name, value in equation.part.params.items():
        kind = isinstance(value, bool | str | enum.Enum | np.dtype)
        if kind and value != equation.whole.params.get(name):
            raise CoupledError(f"{name} {SIZE}")


def _opaque(equation: PairedEquation) -> list[Value]:
    if equation.part.effects:
        raise CoupledError(f"calls {equation.name}, which may keep samples for later")
    if any(
        v.kind is not Dependence.FIXED or not is_one(v.ratio) for v in equation.values
    ):
        raise CoupledError(f"calls {equation.name}, which may do anything with samples")
    if any(a.grows for v in equation.values for dim in v.dims for a in dim):
        raise CoupledError(f"calls {equation.name} with a shape that {SIZE}")
    opaque = []
    for n in range(len(equation.part.outvars)):
        part, whole = equation.shapes(n)
        if part != whole:
            raise CoupledError(f"calls {equation.name} for a shape that {SIZE}")
        dims = tuple(plain_dim(a, b) for a, b in zip(part, whole, strict=True))
        opaque.append(Value(kind=Dependence.FIXED, dims=dims))
    return opaque
