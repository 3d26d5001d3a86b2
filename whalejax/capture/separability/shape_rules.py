"""Rules for operations that move, cut, repeat and join dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from whalejax.capture.separability.alignment import (
    align_dim,
    align_dims,
    check_one_batch,
    merged_atoms,
    regroup_dims,
)
from whalejax.capture.separability.values import (
    SIZE,
    Along,
    ArithmeticSteps,
    Atom,
    CoupledError,
    Dependence,
    Dim,
    Filled,
    PairedEquation,
    Places,
    Rule,
    Value,
    combined_kind,
    equal_dim,
    fact_of,
    fixed,
    has_own_places,
    is_one,
    is_samples,
    plain_dim,
    same_ratio,
    size_of,
)


TAKES: Final = "takes some of the samples by their position in the batch"


def _iota(equation: PairedEquation) -> list[Value]:
    (along,) = equation.equal_params("dimension")
    pairs = [*zip(*equation.shapes(), strict=True)]
    dims = [
        plain_dim(*sizes) if i == along else equal_dim(*sizes)
        for i, sizes in enumerate(pairs)
    ]
    fact: Any = ArithmeticSteps() if along == len(pairs) - 1 else None
    if pairs[along][0] != pairs[along][1]:
        fact = Places(dim=along)
    if np.dtype(equation.result_dtype).itemsize < 4:  # Its range may be too small.
        fact = None
    return [Value(kind=Dependence.FIXED, dims=tuple(dims), fact=fact)]


def _broadcast(equation: PairedEquation) -> list[Value]:
    (where,) = equation.equal_params("broadcast_dimensions")
    value = equation.values[0]
    dims = [equal_dim(*sizes) for sizes in zip(*equation.shapes(), strict=True)]
    for dim, place in enumerate(where):
        if size_of(value.dims[dim]) == size_of(dims[place]):
            dims[place] = value.dims[dim]
        elif size_of(value.dims[dim]) != (1, 1):
            raise CoupledError(f"repeats a piece that {SIZE}")
    broadcast = value.shaped(dims)
    last = len(dims) - 1
    if (
        fact_of(value, ArithmeticSteps)
        and where[-1] == last
        and value.dims[-1] == dims[last]
    ):
        return [replace(broadcast, fact=value.fact)]
    if value.numbers is not None:
        return [replace(broadcast, fact=Filled(value.numbers))]
    places = fact_of(value, Places)
    return [
        broadcast if places is None else _moved_places(broadcast, where[places.dim])
    ]


def _moved_places(value: Value, dim: int) -> Value:
    return Value(
        kind=value.kind, dims=value.dims, ratio=value.ratio, fact=Places(dim=dim)
    )


def _reshape(equation: PairedEquation) -> list[Value]:
    value = equation.values[0]
    (order,) = equation.equal_params("dimensions")
    if order is not None:
        value = value.shaped([value.dims[i] for i in order])
    part, whole = equation.shapes()
    reshape = value.shaped(regroup_dims(value.dims, part, whole))
    places = fact_of(value, Places)
    alone = [d for d, dim in enumerate(reshape.dims) if dim]
    if places is not None and len(alone) == 1 and sum(map(bool, value.dims)) == 1:
        reshape = _moved_places(reshape, alone[0])
    return [reshape]


def _expand(equation: PairedEquation) -> list[Value]:
    where = equation.equal_params("dimensions")[0]
    dims = iter(equation.values[0].dims)
    rank = len(equation.shapes()[0])
    kept = [i for i in range(rank) if i not in where]
    expand = equation.values[0].shaped(
        [next(dims) if i in kept else () for i in range(rank)]
    )
    places = fact_of(equation.values[0], Places)
    return [expand if places is None else _moved_places(expand, kept[places.dim])]


def _squeeze(equation: PairedEquation) -> list[Value]:
    (gone,) = equation.equal_params("dimensions")
    value = equation.values[0]
    squeeze = value.shaped([d for i, d in enumerate(value.dims) if i not in gone])
    places = fact_of(value, Places)
    if places is None:
        return [squeeze]
    return [_moved_places(squeeze, places.dim - sum(i < places.dim for i in gone))]


def _transpose(equation: PairedEquation) -> list[Value]:
    (order,) = equation.equal_params("permutation")
    value = equation.values[0]
    return [value.shaped([value.dims[i] for i in order])]


def _rev(equation: PairedEquation) -> list[Value]:
    (turned,) = equation.equal_params("dimensions")
    dims = equation.values[0].dims
    if any(has_own_places(dims[i]) for i in turned):
        raise CoupledError("reverses the samples")
    return [equation.values[0].plain]


def _slice(equation: PairedEquation) -> list[Value]:
    value, result = equation.values[0], []
    params = [e.params for e in (equation.part, equation.whole)]
    shapes = equation.operand_shapes(0)
    for i, dim in enumerate(value.dims):
        cuts = [
            (
                p["start_indices"][i],
                p["limit_indices"][i],
                (p["strides"] or [1] * len(value.dims))[i],
            )
            for p in params
        ]
        sizes = shapes[0][i], shapes[1][i]
        result.append(cut_dim(dim, sizes, cuts))
    return [value.shaped(result)]


def cut_dim(
    dim: Dim, sizes: tuple[int, int], cuts: Sequence[tuple[int, int, int]]
) -> Dim:
    """Returns a dimension after a slice.

    Args:
        dim: Dimension that is cut.
        sizes: Sizes of the dimension in both traces.
        cuts: Start, end and stride in both traces.

    Raises:
        CoupledError: The slice takes some of the samples and leaves others.
    """
    if all(cut == (0, n, 1) for cut, n in zip(cuts, sizes, strict=True)):
        return dim
    taken = [len(range(*cut)) for cut in cuts]
    if not has_own_places(dim):
        plain = any(a.along is Along.PLAIN for a in dim)
        if not plain or cuts[0][::2] == cuts[1][::2]:
            along = dim[0].along if len({a.along for a in dim}) == 1 else Along.PLAIN
            return merged_atoms([Atom(along, taken[0], taken[1])])
        raise CoupledError(f"takes a piece that {SIZE}")
    inner = dim[-1]
    if cuts[0][2] > 1 and all(
        (n % cut[2], cut[0] // cut[2], len(range(*cut))) == (0, 0, n // cut[2])
        for n, cut in zip(sizes, cuts, strict=True)
    ):  # The slice takes one of every ``stride`` neighbours.
        stride = cuts[0][2]
        if cuts[0][2] != cuts[1][2] or cuts[0][0] != cuts[1][0]:
            raise CoupledError(TAKES)
        if inner.along is not Along.SAMPLES and inner.part % stride == 0:
            if inner.grows:
                raise CoupledError(f"takes a piece that {SIZE}")
            per = inner.part // stride
            return merged_atoms([*dim[:-1], inner.sized(per, per)])
        if inner.along is Along.SAMPLES:
            raise CoupledError(TAKES, group=stride)
    # Several runs of all samples were concatenated, and the slice takes full runs.
    outer = dim[0]
    run = [n // a for n, a in zip(sizes, (outer.part, outer.whole), strict=True)]
    if outer.along is Along.PLAIN and not outer.grows and is_samples(dim[1:]):
        starts = {cut[0] / n for cut, n in zip(cuts, run, strict=True)}
        counts = {(cut[1] - cut[0]) / n for cut, n in zip(cuts, run, strict=True)}
        strides = {cut[2] for cut in cuts}
        if len(starts) == len(counts) == 1 and strides == {1}:
            start, count = starts.pop(), counts.pop()
            if start == int(start) and count == int(count):
                return merged_atoms([outer.sized(int(count), int(count)), *dim[1:]])
    raise CoupledError(TAKES, runs=_runs(dim, sizes, cuts))


def _runs(
    dim: Dim, sizes: tuple[int, int], cuts: Sequence[tuple[int, int, int]]
) -> int:
    """Returns the number of equal runs of which a slice takes some; 0 otherwise."""
    if not (dim and is_samples(dim[:1])) or any(cut[2] != 1 for cut in cuts):
        return 0
    pairs = [*zip(sizes, cuts, strict=True)]
    shares = {Fraction(cut[1] - cut[0], n) for n, cut in pairs}
    starts = {Fraction(cut[0], n) for n, cut in pairs}
    if len(shares) > 1 or len(starts) > 1:
        return 0
    runs = math.lcm(shares.pop().denominator, starts.pop().denominator)
    return runs if runs > 1 and dim[0].part % runs == 0 else 0


def _split(equation: PairedEquation) -> list[Value]:
    value, (axis,) = equation.values[0], equation.equal_params("axis")
    sizes = tuple(s[axis] for s in equation.operand_shapes(0))
    starts, result = [0, 0], []
    for pair in zip(
        equation.part.params["sizes"], equation.whole.params["sizes"], strict=True
    ):
        cuts = [(a, a + n, 1) for a, n in zip(starts, pair, strict=True)]
        dims = list(value.dims)
        dims[axis] = cut_dim(dims[axis], (sizes[0], sizes[1]), cuts)
        result.append(value.shaped(dims))
        starts = [a + n for a, n in zip(starts, pair, strict=True)]
    return result


def _dynamic_slice(equation: PairedEquation) -> list[Value]:
    value, *starts = equation.values
    pieces = (equation.part.params["slice_sizes"], equation.whole.params["slice_sizes"])
    shapes, dims = equation.operand_shapes(0), []
    deciding = []  # Starts of full slices are always 0, and decide nothing.
    for i, (dim, start) in enumerate(zip(value.dims, starts, strict=True)):
        sizes, taken = (shapes[0][i], shapes[1][i]), (pieces[0][i], pieces[1][i])
        if taken == sizes:
            dims.append(dim)
            continue
        if start.numbers is not None:
            cuts = [
                (int(a), int(a) + n, 1)
                for a, n in zip(start.numbers, taken, strict=True)
            ]
            dims.append(cut_dim(dim, sizes, cuts))
        elif has_own_places(dim):
            raise CoupledError(TAKES)
        else:
            dims.append(plain_dim(*taken))
        deciding.append(start)
    if any(v.kind is Dependence.SUM or not is_one(v.ratio) for v in deciding):
        raise CoupledError("slices at a position that depends on all samples")
    kind, within = combined_kind([value, *deciding])
    return [Value(kind=kind, dims=tuple(dims), ratio=value.ratio, within=within)]


def _dynamic_update_slice(equation: PairedEquation) -> list[Value]:
    value, update, *starts = equation.values
    shapes, pieces = equation.operand_shapes(0), equation.operand_shapes(1)
    moving = [
        any(p[i] != s[i] for p, s in zip(pieces, shapes, strict=True))
        for i in range(len(starts))
    ]
    starts = [v for v, moves in zip(starts, moving, strict=True) if moves]
    if any(v.kind is Dependence.SUM or not is_one(v.ratio) for v in starts):
        raise CoupledError("writes to a position that depends on all samples")
    dims = []
    for i, (dim, other) in enumerate(zip(value.dims, update.dims, strict=True)):
        if (shapes[0][i], shapes[1][i]) == (pieces[0][i], pieces[1][i]):
            dims.append(align_dim(dim, other))
        elif has_own_places(dim) or has_own_places(other):
            raise CoupledError("writes to some of the samples by their position")
        elif pieces[0][i] != pieces[1][i]:
            raise CoupledError(f"writes a piece that {SIZE}")
        else:
            dims.append(plain_dim(shapes[0][i], shapes[1][i]))
    check_one_batch(tuple(dims))
    kind, within = combined_kind([value, update, *starts])
    ratio = same_ratio([value, update])
    return [Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)]


def _pad(equation: PairedEquation) -> list[Value]:
    value, filler = equation.values
    (config,) = equation.equal_params("padding_config")
    dims, shapes = [], equation.shapes()
    for i, (dim, edges) in enumerate(zip(value.dims, config, strict=True)):
        if tuple(edges) == (0, 0, 0):
            dims.append(dim)
        elif has_own_places(dim):
            raise CoupledError("pads the batch, or shifts samples in it")
        else:
            dims.append(plain_dim(shapes[0][i], shapes[1][i]))
    kind, within = combined_kind([value, filler])
    ratio = same_ratio([value, filler])
    return [Value(kind=kind, dims=tuple(dims), ratio=ratio, within=within)]


def _concatenate(equation: PairedEquation) -> list[Value]:
    (axis,) = equation.equal_params("dimension")
    values = equation.values
    others = [v.dims[:axis] + v.dims[axis + 1 :] for v in values]
    concatenate = list(align_dims(others))
    concatenate.insert(
        axis, _concatenated_dim([v.dims[axis] for v in values], equation.shapes(), axis)
    )
    check_one_batch(tuple(concatenate))
    kind, within = combined_kind(values)
    ratio = same_ratio(values)
    return [Value(kind=kind, dims=tuple(concatenate), ratio=ratio, within=within)]


def _concatenated_dim(
    dims: Sequence[Dim], shapes: tuple[tuple[int, ...], tuple[int, ...]], axis: int
) -> Dim:
    sizes = shapes[0][axis], shapes[1][axis]
    if any(a.grows for d in dims for a in d):
        each = dims[0]
        for dim in dims[1:]:
            if size_of(dim) != size_of(each):
                if not any(map(is_samples, dims)):
                    raise CoupledError(f"joins a piece that {SIZE} with others")
                raise CoupledError("joins samples with others")
            each = align_dim(each, dim)
        return merged_atoms([Atom(Along.PLAIN, len(dims), len(dims)), *each])
    return plain_dim(*sizes)


def _tile(equation: PairedEquation) -> list[Value]:
    value = equation.values[0]
    times = [e.params["reps"] for e in (equation.part, equation.whole)]
    dims = [
        merged_atoms([Atom(Along.EQUAL, *reps), *d])
        for d, *reps in zip(value.dims, *times, strict=True)
    ]
    return [value.shaped(dims)]


def _stack(equation: PairedEquation) -> list[Value]:
    (axis,) = equation.equal_params("axis")
    stack = list(align_dims([v.dims for v in equation.values]))
    stack.insert(axis, plain_dim(len(equation.values), len(equation.values)))
    kind, within = combined_kind(equation.values)
    ratio = same_ratio(equation.values)
    return [Value(kind=kind, dims=tuple(stack), ratio=ratio, within=within)]


def _unstack(equation: PairedEquation) -> list[Value]:
    (axis,) = equation.equal_params("axis")
    value = equation.values[0]
    if has_own_places(value.dims[axis]):
        raise CoupledError(TAKES)
    dims = value.dims[:axis] + value.dims[axis + 1 :]
    return [value.shaped(dims)] * len(equation.part.outvars)


def _empty(equation: PairedEquation) -> list[Value]:
    part, whole = equation.shapes()
    dims = [equal_dim(*sizes) for sizes in zip(part, whole, strict=True)]
    return [fixed(tuple(dims), None)]


RULES: Final[dict[str, Any | Rule]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "expand_dims": _expand,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "tile": _tile,
    "stack": _stack,
    "unstack": _unstack,
    "empty": _empty,
    "empty2": _empty,
    "zeros_like": _empty,
}
