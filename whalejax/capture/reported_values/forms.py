"""Forms of values: how a whole batch's value follows from its micro-batches'.

Every value of a program has a form: it is the same for all samples, has a row for each
sample, or is a sum, a mean, a maximum or a minimum over them. This module derives the
form of an operation's result from those of its operands. It is separate from
``batch_combination``, which goes through the program: a rule here needs only one
operation.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from whalejax.planner.model.graph import LOOKUPS


class Kind(enum.IntEnum):
    """Kinds of values, from the simplest."""

    SAME = 0
    """Depends on no sample."""
    NOISE = 1
    """Depends on random numbers, or on state that every micro-batch changes."""
    PLACE = 2
    """Indices of the samples in the batch."""
    ROWS = 3
    """Rows, each of one sample."""
    ADDED = 4
    """Linear in a sum over the samples."""
    WEIGHED = 5
    """A mean over the samples with the loss's own weights."""
    MOST = 6
    """Non-decreasing function of the maximum over the samples alone."""
    LEAST = 7
    """The same for the minimum."""
    MIXED = 8
    """Anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """Form of one value.

    Attributes:
        kind: Kind of the value.
        power: Power of the number of micro-batches by which the whole batch's value is
            larger than the mean of its parts; None for zero, for which any power holds.
        sources: Operations that mixed the samples; ``APART`` if no operation did.
    """

    kind: Kind = Kind.SAME
    power: int | None = 0
    sources: frozenset[int] = frozenset()


APART: Final = -1
"""Replaces the source if no operation over samples is the reason."""

SAME: Final = ValueForm()
MIXED: Final = ValueForm(kind=Kind.MIXED, sources=frozenset((APART,)))
_ENDS: Final = frozenset((Kind.MOST, Kind.LEAST))
_TAKEN: Final = frozenset((Kind.ADDED, Kind.WEIGHED)) | _ENDS
_PLAIN: Final = (Kind.SAME, Kind.NOISE, Kind.ROWS)

LINEAR: Final = frozenset(
    "add add_any sub neg copy copy_p name reduce_sum reshape squeeze expand_dims "
    "broadcast_in_dim transpose slice concatenate pad split rev real imag complex conj "
    "stop_gradient optimization_barrier sharding_constraint reduce_precision "
    "device_put cumsum convert_element_type gather dynamic_slice stack unstack "
    "tile".split()
)
"""Operations that are linear in all of their operands, except indices."""

_MOVES: Final = frozenset(
    "copy copy_p name reshape squeeze expand_dims broadcast_in_dim transpose slice "
    "concatenate split rev stop_gradient optimization_barrier sharding_constraint "
    "reduce_precision device_put convert_element_type gather dynamic_slice "
    "stack unstack tile".split()
)
"""Operations that move elements, or round each to a type with fewer bits."""

_RISES: Final = frozenset("add add_any exp tanh logistic floor ceil max min".split())
"""Operations whose result does not decrease when an operand increases."""

_FIRST: Final = {"reduce_max": Kind.MOST, "reduce_min": Kind.LEAST}
"""Reductions of samples to the greatest or the least."""

_PRODUCTS: Final = frozenset(("mul", "dot_general", "conv_general_dilated"))


def mixed(forms: Iterable[ValueForm], *sources: int) -> ValueForm:
    """Returns the form of a value in which some operations mixed samples."""
    behind = frozenset[int]().union(*(form.sources for form in forms))
    return ValueForm(kind=Kind.MIXED, sources=behind | frozenset(sources or (APART,)))


def join_forms(forms: Sequence[ValueForm]) -> ValueForm:
    """Returns the form of a value that is linear in several, or one of several.

    The carry of a loop, for example, is one of several values.
    """
    if not forms:
        return SAME
    powers = {form.power for form in forms} - {None}
    kind = max(form.kind for form in forms)
    sources = frozenset[int]().union(*(form.sources for form in forms))
    kinds = {form.kind for form in forms if form.power is not None} or {kind}
    if kind == Kind.MIXED:
        return ValueForm(kind=kind, sources=sources)
    if len(powers) > 1 or (kind >= Kind.ADDED and kinds - {Kind.SAME, kind}):
        return mixed(forms)
    if Kind.PLACE in kinds and len(kinds) > 1:
        return mixed(forms)
    if kind == Kind.WEIGHED and powers - {0}:
        return mixed(forms)
    return ValueForm(kind=kind, power=next(iter(powers), None), sources=sources)


def passed(kind: str, forms: Sequence[ValueForm]) -> ValueForm:
    """Returns the form of a result whose operation does not mix samples.

    Args:
        kind: Kind of the operation.
        forms: Forms of its operands, scalar literals included.
    """
    kinds = {form.kind for form in forms}
    if Kind.MIXED in kinds or (Kind.PLACE in kinds and kinds - {Kind.PLACE, Kind.SAME}):
        return mixed(forms, *_behind(forms))
    if Kind.ROWS in kinds and kinds & _TAKEN:
        return mixed(forms, *_behind(forms))
    if kind in LOOKUPS and any(form.kind in _TAKEN for form in forms[1:]):
        return mixed(forms)
    if kinds & _ENDS:
        return _end(kind, forms)
    if kind in _PRODUCTS and len(forms) > 1:
        return _product(forms)
    if kind == "div" and len(forms) == 2 and forms[1].kind <= Kind.ROWS:
        under = forms[1]
        if under.kind == Kind.ROWS and under.power is None:
            return mixed(forms)
        power = -(under.power or 0)
        return _product((forms[0], replace(under, power=power)))
    if kind in LINEAR:
        return join_forms(forms)
    if kinds & _TAKEN:
        return mixed(forms, *_behind(forms))
    if any(form.power not in (0, None) for form in forms):
        # The larger of two keeps their power, if both powers are equal.
        same = kind in ("max", "min", "reduce_max", "reduce_min", "abs", "sign")
        return join_forms(forms) if same else mixed(forms)
    return ValueForm(kind=max(kinds, default=Kind.SAME))


def added(kind: str, forms: Sequence[ValueForm], index: int) -> ValueForm:
    """Returns the form of a result whose operation reduces over samples.

    Args:
        kind: Kind of the operation.
        forms: Forms of its operands.
        index: Index of the operation.
    """
    plain = all(form.kind in _PLAIN for form in forms)
    if plain and kind in _FIRST and forms[0].power in (0, None):
        return ValueForm(kind=_FIRST[kind], sources=frozenset((index,)))
    if plain and kind == "scatter-add" and len(forms) == 3 and forms[0].power is None:
        forms = forms[2:]  # Added to zeros, at indices that each sample gives.
    elif not plain or kind not in ("reduce_sum", "dot_general"):
        return mixed(forms, index, *_behind(forms))
    product = _product(forms)
    if product.kind == Kind.MIXED:
        return product
    power = None if product.power is None else product.power + 1
    return ValueForm(kind=Kind.ADDED, power=power, sources=frozenset((index,)))


def _end(kind: str, forms: Sequence[ValueForm]) -> ValueForm:
    """Returns the form of an operation on maxima or minima over the samples."""
    places = [n for n, form in enumerate(forms) if form.kind in _ENDS]
    own = {forms[n].kind for n in places}
    rest = [form for n, form in enumerate(forms) if n not in places]
    fixed = all(form.kind == Kind.SAME and form.power in (0, None) for form in rest)
    (end, *others) = own
    result = ValueForm(kind=end, sources=_behind(forms))
    if others or not fixed:
        return mixed(forms, *result.sources)
    alike = {"max": Kind.MOST, "min": Kind.LEAST, **_FIRST}.get(kind) == end
    if kind in _MOVES or alike:
        return result
    if len(places) == 1 and (kind in _RISES or (kind == "sub" and places == [0])):
        return result
    if kind in ("neg", "not") or (kind == "sub" and places == [1]):
        return replace(result, kind=Kind.LEAST if end == Kind.MOST else Kind.MOST)
    return mixed(forms, *result.sources)


def _product(forms: Sequence[ValueForm]) -> ValueForm:
    kinds = [form.kind for form in forms]
    sums = [kind for kind in kinds if kind in _TAKEN]
    if sums and (len(sums) > 1 or set(kinds) - {Kind.SAME, sums[0]}):
        return mixed(forms, *_behind(forms))
    powers = [form.power for form in forms]
    known = [power for power in powers if power is not None]
    power = sum(known) if len(known) == len(powers) else None
    sources = frozenset[int]().union(*(form.sources for form in forms))
    return ValueForm(kind=max(kinds), power=power, sources=sources)


def _behind(forms: Iterable[ValueForm]) -> frozenset[int]:
    return frozenset[int]().union(*(form.sources for form in forms))
