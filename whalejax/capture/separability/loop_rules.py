"""Rules for values that a loop along the batch carries: sums, and the loop's index.

A loop that adds a value of each sample to its carry computes the sum over the samples.
Such a carry may be used for additions only; any other use of it couples samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.elementwise_rules import check_sum_dtype
from whalejax.capture.separability.separability_rules import apply_rule
from whalejax.capture.separability.shape_rules import TAKES
from whalejax.capture.separability.values import (
    Along,
    Atom,
    CoupledError,
    Dependence,
    Dim,
    LoopPlace,
    PairedEquation,
    Reason,
    RunningSum,
    Value,
    equal_dim,
    fact_of,
    fixed,
    is_samples,
    size_of,
)


def place_in_loop(count: tuple[int, int], reason: Reason) -> Value:
    """Returns the index of a loop, which may be used only to look up its sample.

    Args:
        count: Number of iterations in both traces.
        reason: Reason to report if the index is used in another way.
    """
    fact = LoopPlace(count=count, times=1)
    return Value(kind=Dependence.COUPLED, fact=fact, reason=reason)


# The index.


def _same_place(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows the index as one element of another shape or integer type."""
    value = equation.values[0]
    place = fact_of(value, LoopPlace)
    shapes, wide = equation.shapes(), _is_wide(equation.result_dtype)
    if place is None or not wide or any(n != 1 for shape in shapes for n in shape):
        return None
    return [replace(value, dims=((),) * len(shapes[0]))]


def _is_wide(dtype: Any) -> bool:
    return not _compat.is_inexact(dtype) and np.dtype(dtype).itemsize >= 4


def _multiple(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows the first index of a chunk, a multiple of the loop's index."""
    for value, more in (equation.values, equation.values[::-1]):
        place, numbers = fact_of(value, LoopPlace), more.numbers
        if place is not None and numbers is not None and numbers[0] == numbers[1]:
            times = place.times * int(numbers[0])
            return [replace(value, fact=replace(place, times=times))]
    return None


def _key_of_place(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows a key of the loss's rng folded with the index: a key for each sample."""
    key, place = equation.values
    if key.key != "rng" or key.coupled or fact_of(place, LoopPlace) is None:
        return None
    if key.kind is Dependence.SUM or key.dims:
        return None
    return [Value(kind=Dependence.SAMPLE, within=True, key="rng")]


def _own_slice(equation: PairedEquation, _: Reason) -> list[Value] | None:
    operand, *starts = equation.values
    along = [i for i, v in enumerate(starts) if fact_of(v, LoopPlace)]
    if operand.coupled or len(along) != 1:
        return None
    axis = along[0]
    pieces = [e.params["slice_sizes"] for e in (equation.part, equation.whole)]
    for i, sizes in enumerate(zip(*equation.operand_shapes(0), strict=True)):
        if i != axis and (pieces[0][i], pieces[1][i]) != sizes:
            return None
    sizes = (pieces[0][axis], pieces[1][axis])
    dim = _at_place(operand.dims[axis], starts[axis].fact, sizes)
    return [_looked_up(operand, axis, [dim])]


def _own_element(equation: PairedEquation, _: Reason) -> list[Value] | None:
    operand, index = equation.values
    place = fact_of(index, LoopPlace)
    if place is None or operand.coupled:
        return None
    numbers = equation.equal_params("dimension_numbers")[0]
    pieces = [e.params["slice_sizes"] for e in (equation.part, equation.whole)]
    axes = tuple(map(int, numbers.start_index_map))
    plain = len(axes) == 1 and tuple(map(int, numbers.collapsed_slice_dims)) == axes
    plain &= not numbers.operand_batching_dims
    plain &= tuple(numbers.offset_dims) == tuple(range(len(operand.dims) - 1))
    if not plain or any(size != 1 for size in index_sizes(equation)):
        return None
    for i, sizes in enumerate(zip(*equation.operand_shapes(0), strict=True)):
        if i != axes[0] and (pieces[0][i], pieces[1][i]) != sizes:
            return None
    _at_place(operand.dims[axes[0]], place, (1, 1))
    return [_looked_up(operand, axes[0], [])]


def index_sizes(equation: PairedEquation) -> list[int]:
    """Returns the sizes of a lookup's indices in both traces."""
    return [n for shape in equation.operand_shapes(1) for n in shape]


def _at_place(dim: Dim, place: LoopPlace, sizes: tuple[int, int]) -> Dim:
    """Returns the dimension of a loop's slice; raises ``CoupledError`` for others."""
    if all(a.along is Along.EQUAL for a in dim):
        return equal_dim(*sizes)
    if sizes != (place.times, place.times):
        raise CoupledError(TAKES)
    outer, inner = dim[:1], dim[1:]
    along = outer[0].along
    if along is Along.DRAWN and size_of(dim) == place.count and sizes == (1, 1):
        return ()
    if along is Along.SAMPLES and size_of(outer) == place.count:
        if size_of(inner) == sizes:
            return inner
    chunks = tuple(n * place.times for n in place.count)
    if dim == (Atom(Along.SAMPLES, *chunks),) and place.times > 1:
        raise CoupledError(TAKES, group=place.times)
    raise CoupledError(TAKES)


def _looked_up(operand: Value, axis: int, dims: Sequence[Dim]) -> Value:
    looked_up = operand.shaped([*operand.dims[:axis], *dims, *operand.dims[axis + 1 :]])
    if all(a.along is Along.EQUAL for a in operand.dims[axis]):
        return looked_up
    others = operand.within or any(map(is_samples, looked_up.dims))
    if others or operand.kind is Dependence.SUM:
        raise CoupledError("compares a sample with the others")
    return replace(looked_up, kind=Dependence.SAMPLE, within=True)


# The sum.


def _added_to(equation: PairedEquation, _: Reason) -> list[Value] | None:
    state, more = equation.values
    if equation.name == "add" and fact_of(state, RunningSum) is None:
        state, more = more, state
    running = fact_of(state, RunningSum)
    if running is None or fact_of(more, RunningSum):
        return None
    if more.coupled:  # Not the sum, but the added value couples samples.
        return [replace(more.plain, dims=state.dims)]
    added = fixed(more.dims, ratio=None) if running.added is None else running.added
    return [_with_added(state, _result(equation, [added, more]))]


def _cast_sum(equation: PairedEquation, _: Reason) -> list[Value] | None:
    state = equation.values[0]
    running = fact_of(state, RunningSum)
    if running is None:
        return None
    before, after = equation.dtype(0), equation.result_dtype
    exact = _compat.is_inexact(before) and _compat.is_inexact(after)
    if not exact and not (_is_wide(before) and _is_wide(after)):
        return None
    check_sum_dtype(after)
    if running.added is None:
        return [state]
    return [_with_added(state, _result(equation, [running.added]))]


def _chosen_sum(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows a selection between a running sum before and after an addition."""
    which, *cases = equation.values
    sums = [fact_of(v, RunningSum) for v in cases]
    first = next((s for s in sums if s is not None), None)
    if first is None or which.coupled:
        return None
    if any(s is None or s.carry is not first.carry for s in sums):
        return None
    dims = tuple(equal_dim(*pair) for pair in zip(*equation.shapes(), strict=True))
    zero = fixed(dims, ratio=None)
    given = [which, *(s.added or zero for s in sums if s is not None)]
    return [_with_added(cases[0], _result(equation, given))]


def _scattered_sum(equation: PairedEquation, _: Reason) -> list[Value] | None:
    state, *more = equation.values
    running = fact_of(state, RunningSum)
    if running is None or any(v.coupled for v in more):
        return None
    added = running.added
    if added is None:
        shapes = equation.operand_shapes(0)
        dims = tuple(equal_dim(*pair) for pair in zip(*shapes, strict=True))
        added = fixed(dims, ratio=None)
    return [_with_added(state, _result(equation, [added, *more]))]


def _result(equation: PairedEquation, values: Sequence[Value]) -> Value:
    inside = PairedEquation(part=equation.part, whole=equation.whole, values=values)
    return apply_rule(inside)[0].plain


def _with_added(state: Value, added: Value) -> Value:
    return replace(state, fact=replace(state.fact, added=added))


LoopRule = Callable[[PairedEquation, Reason], list[Value] | None]

LOOP_RULES: Final[dict[str, tuple[LoopRule, ...]]] = {
    **dict.fromkeys("reshape broadcast_in_dim squeeze copy".split(), (_same_place,)),
    "convert_element_type": (_same_place, _cast_sum),
    "mul": (_multiple,),
    "random_fold_in": (_key_of_place,),
    "dynamic_slice": (_own_slice,),
    "gather": (_own_element,),
    "add": (_added_to,),
    "add_any": (_added_to,),
    "sub": (_added_to,),
    "select_n": (_chosen_sum,),
    "scatter-add": (_scattered_sum,),
    "scatter_add": (_scattered_sum,),
}
