"""Rules based on facts: batch indices, and experts' tokens sorted and put back.

They apply before the other rules, and return None if no fact decides. A value in the
order of a sort (``Sorted``) is represented by the value in the samples' order, while
operations treat each row separately.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.elementwise_rules import (
    RULES as ELEMENTWISE_RULES,
)
from whalejax.capture.separability.loop_rules import LOOP_RULES
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.separability_rules import apply_rule
from whalejax.capture.separability.values import (
    Along,
    AlwaysFalse,
    ArithmeticSteps,
    Counter,
    CoupledError,
    Dependence,
    Dim,
    Filled,
    IdCounts,
    Ids,
    IndexColumns,
    LoopPlace,
    Numbered,
    OneHot,
    Order,
    PairedEquation,
    Places,
    Reason,
    Sorted,
    Sorting,
    Value,
    equal_dim,
    fact_of,
    has_own_places,
    is_one,
    is_samples,
    product_ratio,
    size_of,
)


FactRule = Callable[[PairedEquation, Reason], list[Value] | None]
"""Function that returns facts about an equation's results, or None.

Some results may be used only as their fact allows. The reason is reported if such a
result is used in another way.
"""

_ROW_WISE: Final = frozenset(ELEMENTWISE_RULES) | frozenset(
    "gather dot_general convert_element_type broadcast_in_dim transpose select_n clamp "
    "integer_pow ragged_dot_general ragged_dot reduce_sum reduce_max reduce_min "
    "squeeze expand_dims reshape argmax top_k slice split".split()
)


def apply_fact_rule(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Returns the facts about an equation's results; None if no rule applies.

    Args:
        equation: The equation.
        reason: Reason to report if the results are used in another way.

    Raises:
        CoupledError: The equation couples samples.
    """
    facts = any(v.fact is not None for v in equation.values)
    if not facts and equation.name not in ("sort", "rev"):
        return _new_ids(equation)
    rules = *_RULES.get(equation.name, ()), *LOOP_RULES.get(equation.name, ())
    for rule in rules:
        fact_rule = rule(equation, reason)
        if fact_rule is not None:
            return fact_rule
    if any(fact_of(v, Sorted) for v in equation.values):
        return _row_wise(equation, reason)
    return None


def with_fact(value: Value, fact: Any, reason: Reason) -> Value:
    """Returns a value that may be used only as a fact allows."""
    return Value(kind=Dependence.COUPLED, dims=value.dims, fact=fact, reason=reason)


# Positions, and indices that may count from the end.


def _literal(value: Value) -> Any:
    """Returns a number that is the same in both traces, or None."""
    if value.numbers is None or not np.array_equal(*value.numbers):
        return None
    return value.numbers[0]


def _is_natural(value: Value) -> bool:
    numbered, here = fact_of(value, Numbered), fact_of(value, LoopPlace)
    return bool(
        (here and here.times >= 0)
        or fact_of(value, Places)
        or fact_of(value, Order)
        or (numbered and numbered.ids.natural and not numbered.wrapped)
    )


def _below_zero(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows ``index < 0`` for an index that is never negative."""
    index, zero = equation.values
    literal = _literal(zero)
    if literal is None or literal != 0 or not _is_natural(_unsorted(index)):
        return None
    dims = tuple(equal_dim(*size_of(d)) for d in index.dims)
    return [Value(kind=Dependence.FIXED, dims=dims, fact=AlwaysFalse())]


def _unsorted(value: Value) -> Value:
    ordered = fact_of(value, Sorted)
    return value if ordered is None else ordered.base


def _first_case(equation: PairedEquation, _: Reason) -> list[Value] | None:
    which, first = equation.values[:2]
    return [first] if fact_of(which, AlwaysFalse) else None


def _pass_fact(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    value = equation.values[0]
    if not isinstance(value.fact, Places | Order | Numbered | ArithmeticSteps | Filled):
        return None
    if equation.name == "convert_element_type" and not _is_wide(equation):
        return None
    if isinstance(value.fact, Order):
        dims = [d for d in value.dims if d]
        shapes = equation.shapes()
        pairs = [p for p in zip(*shapes, strict=True) if p != (1, 1)]
        if len(dims) == 1 and pairs == [size_of(dims[0])]:
            pass_fact = [
                dims[0] if p != (1, 1) else () for p in zip(*shapes, strict=True)
            ]
            return [
                with_fact(replace(value, dims=tuple(pass_fact)), value.fact, reason)
            ]
        return None
    (found_value,) = apply_rule(equation)
    moves = equation.name in _MOVING and not isinstance(value.fact, Numbered)
    return [found_value if moves else replace(found_value, fact=value.fact)]


def _is_wide(equation: PairedEquation) -> bool:
    dtype = equation.result_dtype
    return not _compat.is_inexact(dtype) and np.dtype(dtype).itemsize >= 4


def _as_they_are(equation: PairedEquation, _: Reason) -> list[Value]:
    return list(equation.values)


def _columns(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows a concatenation of indices, one of which is a position."""
    axis = equation.params["dimension"]
    values = equation.values
    last = len(equation.shapes()[0]) - 1
    narrow = all(v.dims[axis] == () for v in values)
    if axis != last or not narrow or not any(fact_of(v, Places) for v in values):
        return None
    if any(v.coupled for v in values):
        return None
    shapes = equation.shapes()
    dims = tuple(equal_dim(*sizes) for sizes in zip(*shapes, strict=True))
    value = Value(kind=Dependence.FIXED, dims=dims)
    return [with_fact(value, IndexColumns(columns=tuple(values)), reason)]


def _by_columns(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows a lookup or a write at each sample's own position."""
    values = equation.values
    known = fact_of(values[1], IndexColumns) is not None
    if not known or any(v.coupled for i, v in enumerate(values) if i != 1):
        return None
    return apply_rule(equation)


# Integers whose identity is known.


def _new_ids(equation: PairedEquation) -> list[Value] | None:
    """Follows new numbers of experts, such as the index of the largest score."""
    if equation.name not in ("argmax", "top_k", "argmin"):
        return None
    new_ids = apply_rule(equation)
    last = new_ids[-1]
    if last.kind is not Dependence.SAMPLE:
        return new_ids
    return [*new_ids[:-1], replace(last, fact=Numbered(ids=Ids(natural=True)))]


def _wrapped(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows a number plus a constant, as for indices that count from the end."""
    value, more = equation.values
    numbered = fact_of(value, Numbered)
    if numbered is None or _literal(more) is None or not numbered.ids.natural:
        return None
    (result,) = apply_rule(equation)
    return [replace(result, fact=Numbered(ids=numbered.ids, wrapped=True))]


def _at_least(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows a maximum with 0, which natural numbers pass unchanged."""
    for value, least in (equation.values, equation.values[::-1]):
        numbered, literal = fact_of(value, Numbered), _literal(least)
        if numbered is None or literal is None or literal > 0:
            continue
        (result,) = apply_rule(equation)
        if numbered.ids.natural and not numbered.wrapped:
            return [replace(result, fact=numbered)]
    return None


def _one_hot(equation: PairedEquation, _: Reason) -> list[Value] | None:
    for value, other in (equation.values, equation.values[::-1]):
        numbered = fact_of(value, Numbered)
        if numbered is not None and not numbered.wrapped:
            (result,) = apply_rule(equation)
            apart = fact_of(other, ArithmeticSteps) is not None and not value.dims[-1]
            return [replace(result, fact=OneHot(ids=numbered.ids))] if apart else None
    return None


def _count_fact(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Returns the fact about sums of one-hot rows, which count numbers."""
    value = equation.values[0]
    one_hot = fact_of(value, OneHot)
    if one_hot is None:
        return None
    fact = apply_rule(equation)
    if not _counts_exactly(equation):
        return fact
    if equation.name == "convert_element_type":
        return [replace(fact[0], fact=one_hot)]
    rows = set(range(len(value.dims) - 1))
    if set(equation.params["axes"]) == rows and not _repeated(value.dims[:-1]):
        return [replace(fact[0], fact=IdCounts(ids=one_hot.ids))]
    return fact


def _counts_exactly(equation: PairedEquation) -> bool:
    return bool(np.dtype(equation.result_dtype).itemsize >= 4)


def _repeated(dims: Sequence[Dim]) -> bool:
    return any(a.along is Along.EQUAL for dim in dims for a in dim)


def _histogram(equation: PairedEquation, _: Reason) -> list[Value] | None:
    operand, indices, updates = equation.values
    numbered = fact_of(indices, Numbered)
    if (
        numbered is None
        or numbered.wrapped
        or operand.ratio is not None
        or operand.kind is not Dependence.FIXED
    ):
        return None
    filled = fact_of(updates, Filled)
    one = _literal(
        updates if filled is None else replace(updates, numbers=filled.numbers)
    )
    ones = one is not None and one == 1 and not _repeated(indices.dims)
    (histogram,) = apply_rule(equation)
    return [replace(histogram, fact=IdCounts(ids=numbered.ids)) if ones else histogram]


def _cast_counts(equation: PairedEquation, _: Reason) -> list[Value] | None:
    counts = fact_of(equation.values[0], IdCounts)
    if counts is None:
        return None
    (result,) = apply_rule(equation)
    exact = not _compat.is_inexact(equation.result_dtype)
    return [replace(result, fact=counts if exact else None)]


def _counts_on(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows a state to which each sample adds a value."""
    for state, more in (equation.values, equation.values[::-1]):
        counter = fact_of(state, Counter)
        if counter is None or more.coupled or more.batched:
            continue
        added = more.ratio is None or math.isclose(more.ratio, counter.share)
        if added and not any(a.grows for dim in more.dims for a in dim):
            return [with_fact(state, counter, reason)]
    return None


# Rows sorted by expert and put back.


def _sort(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows a sort along the samples, or the sort that inverts it."""
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    values = equation.values
    first = values[0]
    order = fact_of(first, Order)
    if order is not None:
        undone = order.divided == 1 and not order.inverse and len(values) == 2
        if undone and fact_of(values[1], Places):
            inverse = Order(sorting=order.sorting, inverse=True)
            return [
                with_fact(first, None, reason),
                with_fact(first, inverse, reason),
            ]
        return None
    if keys != 1 or len(first.dims) != 1 or not is_samples(first.dims[axis]):
        return None
    numbered = fact_of(first, Numbered)
    ids = None
    if numbered is not None and not numbered.wrapped and not _repeated(first.dims):
        ids = numbered.ids
    sorting = Sorting(dim=first.dims[axis], ids=ids)
    result = []
    for value in values:
        if fact_of(value, Places):
            fact: Any = Order(sorting=sorting)
            result.append(with_fact(replace(value, dims=first.dims), fact, reason))
        elif value.coupled or value.kind is Dependence.SUM or value.dims != first.dims:
            return None
        else:
            fact = Sorted(sorting=sorting, base=value)
            result.append(with_fact(value, fact, reason))
    return result


@functools.lru_cache(maxsize=64)
def _backwards(dim: Dim) -> Sorting:
    """Returns the order from the last sample to the first, the same for all values."""
    return Sorting(dim=dim)


def _reversed(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows a reversal of the samples, which leaves sums over them unchanged."""
    value = equation.values[0]
    (turned,) = equation.equal_params("dimensions")
    if 0 not in turned or any(is_samples(value.dims[i]) for i in turned if i):
        return None
    ordered = fact_of(value, Sorted)
    base = value if ordered is None else ordered.base
    if base.coupled or len(base.dims[0]) != 1 or not is_samples(base.dims[0]):
        return None
    sorting = _backwards(base.dims[0])
    if any(has_own_places(base.dims[i]) for i in turned if i):
        return None
    if ordered is not None:
        return [base.plain] if ordered.sorting is sorting else None
    why = replace(reason, why="reverses the samples")
    return [with_fact(value, Sorted(sorting=sorting, base=value.plain), why)]


def divided_order(
    call: Any, values: Sequence[Value], reason: Reason
) -> list[Value] | None:
    """Follows a floor division of sorted indices, which maps choices to their tokens.

    Args:
        call: Call of a function, in either trace.
        values: Operands of the call.
        reason: Reason to report if the result is used in another way.

    Returns:
        Facts about the result; None if the call is another function.
    """
    if len(values) != 2:
        return None
    order, literal = fact_of(values[0], Order), _literal(values[1])
    if order is None or literal is None or order.inverse or int(literal) < 1:
        return None
    if not _compat.is_floor_division(call):
        return None
    fact = replace(order, divided=order.divided * int(literal))
    return [with_fact(values[0], fact, reason)]


def _inner_size(dim: Dim) -> int | None:
    if not dim or not is_samples(dim[:1]):
        return None
    return int(np.prod([a.part for a in dim[1:]]))


def _taken_in_order(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows rows into the order of a sort, or back."""
    operand, indices = equation.values
    order = fact_of(indices, Order)
    numbers = equation.params["dimension_numbers"]
    rows = tuple(map(int, numbers.start_index_map)) == (0,)
    rows &= tuple(map(int, numbers.collapsed_slice_dims)) == (0,)
    rows &= not numbers.operand_batching_dims and len(indices.dims) == 2
    rows &= tuple(numbers.offset_dims) == tuple(range(1, len(operand.dims)))
    if order is None or not rows:
        return None
    if not all(
        equation_params["slice_sizes"][1:] == shape[1:]
        for equation_params, shape in zip(
            (equation.part.params, equation.whole.params),
            equation.operand_shapes(0),
            strict=True,
        )
    ):
        return None
    ordered = fact_of(operand, Sorted)
    if order.inverse:
        if ordered is None or not _has_rows(ordered, order.sorting):
            return None
        return [ordered.base]
    if operand.coupled or operand.kind is Dependence.SUM:
        return None
    dim = order.sorting.dim
    inner = _inner_size(dim)
    if order.divided == 1 and operand.dims[0] == dim:
        base = operand
    elif inner is not None and _merged_choices(operand.dims[0], dim, order.divided):
        base = operand.shaped([dim, *operand.dims[1:]])
    else:
        return None
    base = base.plain
    return [with_fact(base, Sorted(sorting=order.sorting, base=base), reason)]


def _has_rows(ordered: Sorted, sorting: Sorting) -> bool:
    return ordered.sorting is sorting and ordered.base.dims[0] == sorting.dim


def _merged_choices(tokens: Dim, choices: Dim, divided: int) -> bool:
    if size_of(choices) != tuple(n * divided for n in size_of(tokens)):
        return False
    first = [tokens[:1], choices[:1]]
    return is_samples(tokens[:1]) and first[0] == first[1]


def _added_in_order(equation: PairedEquation, _: Reason) -> list[Value] | None:
    """Follows sorted rows that are written or added at their source positions."""
    operand, indices, updates = equation.values
    order, ordered = fact_of(indices, Order), fact_of(updates, Sorted)
    if order is None or ordered is None or not _has_rows(ordered, order.sorting):
        return None
    numbers = equation.params["dimension_numbers"]
    rows = tuple(map(int, numbers.scatter_dims_to_operand_dims)) == (0,)
    rows &= tuple(map(int, numbers.inserted_window_dims)) == (0,)
    if not rows or order.inverse or operand.kind is not Dependence.FIXED:
        return None
    if operand.ratio is not None and not is_one(product_ratio([operand])):
        return None
    base = ordered.base
    adds = "add" in equation.name
    if any(a.grows and a.along.value == "plain" for d in operand.dims for a in d):
        return None
    if order.divided == 1 and (not adds or operand.ratio is None):
        return (
            [base.plain] if size_of(operand.dims[0]) == size_of(base.dims[0]) else None
        )
    if not adds or operand.ratio is not None or _inner_size(base.dims[0]) is None:
        return None
    return [_over_choices(base, order, size_of(operand.dims[0]))]


def _over_choices(base: Value, order: Order, tokens: tuple[int, int]) -> Value:
    dim = base.dims[0]
    if size_of(dim) != tuple(n * order.divided for n in tokens):
        raise CoupledError("adds rows up at places of other samples")
    inner = [a for a in dim[1:]]
    per = int(np.prod([a.part for a in inner])) // order.divided
    kept = [dim[0], *([inner[0].sized(per, per)] if per > 1 else [])]
    gone = inner[0].sized(order.divided, order.divided)
    return with_sum(base, [(gone,)], [tuple(kept), *base.dims[1:]])


def _ragged(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows rows sorted by expert, times the matrix of each expert."""
    left, right, sizes = equation.values[:3]
    ordered, counts = fact_of(left, Sorted), fact_of(sizes, IdCounts)
    if ordered is None or counts is None or ordered.sorting.ids is not counts.ids:
        return None
    (numbers,) = equation.equal_params("ragged_dot_dimension_numbers")
    dot = numbers.dot_dimension_numbers
    plain = tuple(map(tuple, dot[0])) == ((1,), (1,)) and dot[1] == ((), ())
    plain &= tuple(numbers.lhs_ragged_dimensions) == (0,)
    plain &= tuple(numbers.rhs_group_dimensions) == (0,)
    plain &= _has_rows(ordered, ordered.sorting)
    if not plain or right.kind is not Dependence.FIXED:
        return None
    base = ordered.base
    ratio = product_ratio([base, right])
    dims = (base.dims[0], right.dims[2])
    result = Value(kind=base.kind, dims=dims, ratio=ratio, within=base.within)
    return [with_fact(result, Sorted(sorting=ordered.sorting, base=result), reason)]


def _row_wise(equation: PairedEquation, reason: Reason) -> list[Value] | None:
    """Follows an operation that treats sorted rows separately."""
    facts = [fact_of(v, Sorted) for v in equation.values]
    orders = {id(f.sorting) for f in facts if f is not None}
    others = [v for v, f in zip(equation.values, facts, strict=True) if f is None]
    alone = all(v.kind is Dependence.FIXED for v in others)
    elementwise = equation.name in _ROW_WISE
    atoms = [a for v in others for dim in v.dims if _grows(dim) for a in dim]
    alone &= not any(a.along is Along.PLAIN for a in atoms)
    if len(orders) != 1 or not alone or not elementwise:
        return None
    sorting = next(f.sorting for f in facts if f is not None)
    bases = [
        v if f is None else f.base for v, f in zip(equation.values, facts, strict=True)
    ]
    inside = PairedEquation(part=equation.part, whole=equation.whole, values=bases)
    result = apply_fact_rule(inside, reason) or apply_rule(inside)
    results = []
    for value in result:
        where = [d for d in value.dims if is_samples(d)]
        if value.kind is Dependence.SUM or value.kind is Dependence.FIXED:
            results.append(value)
        elif where != [sorting.dim] or value.coupled:
            return None
        else:
            fact = Sorted(sorting=sorting, base=value)
            results.append(with_fact(value, fact, reason))
    return results


def _grows(dim: Dim) -> bool:
    return any(a.grows for a in dim)


_KEEPING: Final = (
    "convert_element_type reshape squeeze expand_dims broadcast_in_dim copy "
    "sharding_constraint"
).split()
_MOVING: Final = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
"""Operations whose own rules change the dimension of a fact."""

_RULES: Final[dict[str, tuple[FactRule, ...]]] = {
    **{name: (_pass_fact,) for name in _KEEPING},
    "convert_element_type": (_count_fact, _cast_counts, _pass_fact),
    "optimization_barrier": (_as_they_are,),
    "reduce_sum": (_count_fact,),
    "lt": (_below_zero,),
    "select_n": (_first_case,),
    "concatenate": (_columns,),
    "add": (_counts_on, _wrapped),
    "max": (_at_least,),
    "eq": (_one_hot,),
    "sort": (_sort,),
    "rev": (_reversed,),
    "gather": (_taken_in_order, _by_columns),
    "scatter": (_added_in_order, _by_columns),
    "scatter-add": (_added_in_order, _histogram, _by_columns),
    "scatter_add": (_added_in_order, _histogram, _by_columns),
    "ragged_dot_general": (_ragged,),
    "ragged_dot": (_ragged,),
}
