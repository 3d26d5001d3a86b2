"""Rules for operations that combine elements along dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from whalejax.capture.separability.alignment import align_dims, check_one_batch
from whalejax.capture.separability.values import (
    SIZE,
    Along,
    CoupledError,
    Dependence,
    Dim,
    Dims,
    PairedEquation,
    Rule,
    Value,
    combined_kind,
    is_one,
    is_samples,
    plain_dim,
    same_ratio,
)


OWN_PLACES: Final = f"adds up values of positions whose number {SIZE}"


def summed(value: Value, axes: Sequence[int], dims: Sequence[Dim]) -> Value:
    """Returns facts about a sum over some dimensions.

    Args:
        value: Facts about the operand.
        axes: Dimensions over which the sum runs.
        dims: Dimensions of the result.

    Raises:
        CoupledError: The number of terms, or the terms themselves, depend on more than
            the samples.
    """
    return with_sum(value, [value.dims[i] for i in axes], dims)


def with_sum(value: Value, gone: Sequence[Dim], dims: Sequence[Dim]) -> Value:
    """Returns facts about a value after a sum over some dimensions; see ``summed``."""
    kind, ratio = value.kind, value.ratio
    atoms = [a for dim in gone for a in dim]
    over_samples = False
    for atom in atoms:
        if not atom.grows and atom.along is not Along.SAMPLES:
            continue
        share = atom.part / atom.whole
        if atom.along is Along.PLAIN:
            raise CoupledError(OWN_PLACES)
        if atom.along is Along.DRAWN and (kind is Dependence.SAMPLE or over_samples):
            raise CoupledError("compares samples with what is drawn for others")
        over_samples |= atom.along is not Along.EQUAL
        ratio = None if ratio is None else ratio * share
    if over_samples:
        kind = Dependence.SUM
    if value.kind is Dependence.SUM and over_samples:
        raise CoupledError("combines draws with a sum over the samples")
    return Value(kind=kind, dims=tuple(dims), ratio=ratio, within=value.within)


def _remaining_dims(dims: Dims, axes: Sequence[int]) -> list[Dim]:
    return [d for i, d in enumerate(dims) if i not in axes]


def _reduce_sum(equation: PairedEquation) -> list[Value]:
    (axes,) = equation.equal_params("axes")
    value = equation.values[0]
    return [summed(value, axes, _remaining_dims(value.dims, axes))]


def _check_apart(equation: PairedEquation, value: Value, axes: Sequence[int]) -> None:
    """Refuses an operation along the samples, or on sums over them."""
    if value.kind is Dependence.SUM:
        raise CoupledError(f"applies {equation.name} to a sum over the samples")
    for i in axes:
        if is_samples(value.dims[i]):
            raise CoupledError(f"applies {equation.name} along the samples")
        if any(a.grows and a.along is not Along.EQUAL for a in value.dims[i]):
            raise CoupledError(f"applies {equation.name} along what {SIZE}")


def _reduce_end(equation: PairedEquation) -> list[Value]:
    """Follows a maximum or a minimum, which commute with a positive factor."""
    (axes,) = equation.equal_params("axes")
    value = equation.values[0]
    _check_apart(equation, value, axes)
    _check_positive(value)
    return [value.shaped(_remaining_dims(value.dims, axes))]


def _check_positive(value: Value) -> None:
    if value.ratio is not None and not value.ratio > 0:
        raise CoupledError(SIZE)


def _reduce_other(equation: PairedEquation) -> list[Value]:
    (axes,) = equation.equal_params("axes")
    value = equation.values[0]
    _check_apart(equation, value, axes)
    if any(a.grows for i in axes for a in value.dims[i]):
        raise CoupledError(f"applies {equation.name} along what {SIZE}")
    if not is_one(value.ratio):
        raise CoupledError(f"applies {equation.name} to a value that {SIZE}")
    return [value.shaped(_remaining_dims(value.dims, axes)).scale_by(1.0)]


def _reduce_truth(equation: PairedEquation) -> list[Value]:
    (axes,) = equation.equal_params("axes")
    value = equation.values[0]
    _check_apart(equation, value, axes)
    if not is_one(value.ratio):
        raise CoupledError(f"applies {equation.name} to a value that {SIZE}")
    return [value.shaped(_remaining_dims(value.dims, axes))]


def _hardened(dim: Dim) -> Dim:
    part = whole = 1
    for atom in dim:
        part, whole = part * atom.part, whole * atom.whole
    return plain_dim(part, whole)


def _along_axis(*, linear: bool = False) -> Rule:
    def rule(equation: PairedEquation) -> list[Value]:
        (axis,) = equation.equal_params("axis")
        value = equation.values[0]
        if value.kind is Dependence.SUM and linear:
            pass
        else:
            _check_apart(equation, value, [axis])
        if any(a.grows for a in value.dims[axis]):
            raise CoupledError(f"applies {equation.name} along what {SIZE}")
        if not linear and not is_one(value.ratio):
            raise CoupledError(f"applies {equation.name} to a value that {SIZE}")
        dims = list(value.dims)
        dims[axis] = _hardened(dims[axis])
        return [
            value.shaped(dims) if linear else replace(value.shaped(dims), ratio=1.0)
        ]

    return rule


def _sort(equation: PairedEquation) -> list[Value]:
    (axis,) = equation.equal_params("dimension")
    values = equation.values
    for value in values:
        _check_apart(equation, value, [axis])
        if any(a.grows for a in value.dims[axis]):
            raise CoupledError(f"sorts what {SIZE}")
    kind, within = combined_kind(values)
    dims = list(align_dims([v.dims for v in values]))
    dims[axis] = _hardened(dims[axis])
    if not all(is_one(v.ratio) for v in values):
        raise CoupledError(f"sorts what {SIZE}")
    return [Value(kind=kind, dims=tuple(dims), within=within)] * len(values)


_APPROXIMATION: Final = (
    "reduction_dimension",
    "recall_target",
    "is_max_k",
    "reduction_input_size_override",
    "aggregate_to_topk",
)
"""Parameters of ``approx_top_k`` that affect its choice in each row."""


def _approx_top_k(equation: PairedEquation) -> list[Value]:
    axis, *_ = equation.equal_params(*_APPROXIMATION)
    return _largest(equation, axis)


def _top_k(equation: PairedEquation) -> list[Value]:
    return _largest(equation, equation.params.get("axis", -1))


def _largest(equation: PairedEquation, axis: int) -> list[Value]:
    value = equation.values[0]
    axis %= len(value.dims)
    _check_apart(equation, value, [axis])
    if any(a.grows for a in value.dims[axis]):
        raise CoupledError(f"takes the largest of what {SIZE}")
    dims, pairs = list(value.dims), [*zip(*equation.shapes(), strict=True)]
    dims[axis] = plain_dim(*pairs[axis])
    _check_positive(value)
    largest = value.shaped(dims)
    return [largest, replace(largest, ratio=1.0)]


def _windows(equation: PairedEquation) -> list[Value]:
    """Follows operations on windows, which must not span several samples."""
    window, strides = equation.equal_params("window_dimensions", "window_strides")
    dilated = [
        equation.equal_params(name)[0] or [1] * len(window)
        for name in ("base_dilation", "window_dilation")
    ]
    padding = equation.equal_params("padding")[0]
    linear = "sum" in equation.name
    shapes, dims = equation.shapes(), []
    values = equation.values
    operands = align_dims([v.dims for v in values if len(v.dims) == len(window)])
    for i, dim in enumerate(operands):
        still = (window[i], strides[i], *(d[i] for d in dilated)) == (1, 1, 1, 1)
        if still and tuple(padding[i]) == (0, 0):
            dims.append(dim)
        elif any(a.grows for a in dim) or is_samples(dim):
            raise CoupledError(f"applies {equation.name} along the samples")
        else:
            dims.append(plain_dim(shapes[0][i], shapes[1][i]))
    kind, within = combined_kind(values)
    ratio = same_ratio(values[:1])
    if "sum" not in equation.name:
        _check_positive(values[-1])
    decides = values[-1] if "gather" in equation.name else None
    if (not linear and kind is Dependence.SUM) or _is_sum(decides):
        raise CoupledError(f"applies {equation.name} to a sum over the samples")
    one = Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)
    return [one] * len(equation.part.outvars)


def _is_sum(value: Value | None) -> bool:
    return value is not None and value.kind is Dependence.SUM


def _select_and_scatter_add(equation: PairedEquation) -> list[Value]:
    source, operand = equation.values
    _check_positive(operand)
    if _is_sum(operand):
        raise CoupledError(f"applies {equation.name} to a sum over the samples")
    window, strides = equation.equal_params("window_dimensions", "window_strides")
    (padding,) = equation.equal_params("padding")
    dims = []
    for i, (dim, other) in enumerate(zip(operand.dims, source.dims, strict=True)):
        if (window[i], strides[i]) == (1, 1) and tuple(padding[i]) == (0, 0):
            dims.append(align_dims([(dim,), (other,)])[0])
        elif any(a.grows for a in (*dim, *other)):
            raise CoupledError("applies a window along the samples")
        else:
            dims.append(_hardened(dim))
    kind, within = combined_kind([source, operand])
    return [Value(kind=kind, dims=tuple(dims), ratio=source.ratio, within=within)]


def _matrices(equation: PairedEquation) -> list[Value]:
    values = [v for v in equation.values if len(v.dims) >= 2]
    front: list[Dims] = []
    for value in equation.values:
        _check_matrix(equation, value)
    for value in values:
        if any(a.grows for dim in value.dims[-2:] for a in dim):
            raise CoupledError(f"applies {equation.name} along the samples")
        front.append(value.dims[:-2])
    leading = align_dims(front)
    kind, within = combined_kind(equation.values)
    matrices = []
    for number in range(len(equation.part.outvars)):
        part, whole = equation.shapes(number)
        behind = [
            plain_dim(a, b) for a, b in [*zip(part, whole, strict=True)][len(leading) :]
        ]
        matrices.append(Value(kind=kind, dims=(*leading, *behind), within=within))
    return matrices


def _check_matrix(equation: PairedEquation, value: Value) -> None:
    if value.kind is Dependence.SUM:
        raise CoupledError(f"applies {equation.name} to a sum over the samples")
    if not is_one(value.ratio):
        raise CoupledError(f"applies {equation.name} to a value that {SIZE}")


def _triangular_solve(equation: PairedEquation) -> list[Value]:
    """Follows solves for several right-hand sides, which may be samples."""
    (left,) = equation.equal_params("left_side")
    matrix, sides = equation.values
    row = len(sides.dims) - (2 if left else 1)
    _check_matrix(equation, matrix)
    if any(a.grows for dim in (*matrix.dims[-2:], sides.dims[row]) for a in dim):
        raise CoupledError(f"applies {equation.name} along the samples")
    dims = [*align_dims([matrix.dims[:-2], sides.dims[:-2]]), *sides.dims[-2:]]
    dims[row] = _hardened(dims[row])
    check_one_batch(tuple(dims))
    kind, within = combined_kind(equation.values)
    return [Value(kind=kind, dims=tuple(dims), ratio=sides.ratio, within=within)]


def _fft(equation: PairedEquation) -> list[Value]:
    equation.equal_params("fft_type", "fft_lengths")
    value, shapes = equation.values[0], equation.shapes()
    count = len(equation.params["fft_lengths"])
    first = len(value.dims) - count
    if any(a.grows for dim in value.dims[first:] for a in dim):
        raise CoupledError("transforms along the samples")
    behind = [plain_dim(a, b) for a, b in [*zip(*shapes, strict=True)][first:]]
    return [value.shaped([*value.dims[:first], *behind])]


def _over_places(equation: PairedEquation) -> list[Value]:
    """Follows collectives over an axis that ``vmap`` binds, here a dimension."""
    (axes,) = equation.equal_params("axes")
    if not all(isinstance(axis, int) for axis in axes):
        raise CoupledError(f"calls {equation.name} over {axes}")
    over_places = []
    for value in equation.values:
        kept = _remaining_dims(value.dims, axes)
        if equation.name != "psum":
            _check_apart(equation, value, axes)
        sums = equation.name == "psum"
        over_places.append(summed(value, axes, kept) if sums else value.shaped(kept))
    return over_places


_MATRICES: Final = (
    "cholesky eigh eig lu lu_solve qr geqrf householder_product svd schur "
    "tridiagonal_solve tridiagonal hessenberg lu_pivots_to_permutation"
).split()

RULES: Final[dict[str, Any | Rule]] = {
    "reduce_sum": _reduce_sum,
    "reduce_max": _reduce_end,
    "reduce_min": _reduce_end,
    "reduce_prod": _reduce_other,
    "reduce_xor": _reduce_other,
    "reduce_or": _reduce_truth,
    "reduce_and": _reduce_truth,
    "argmax": _reduce_other,
    "argmin": _reduce_other,
    "cumsum": _along_axis(linear=True),
    "cumlogsumexp": _along_axis(),
    "cummax": _along_axis(),
    "cummin": _along_axis(),
    "cumprod": _along_axis(),
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _approx_top_k,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "select_and_gather_add": _windows,
    "select_and_scatter_add": _select_and_scatter_add,
    "fft": _fft,
    "psum": _over_places,
    "pmax": _over_places,
    "pmin": _over_places,
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(_MATRICES, _matrices),
}
