"""Loops along the samples: maps, and sums that are carried from sample to sample.

The results of an iteration may depend only on its own sample. It may carry values that
no iteration changes, running sums, the iteration's index, and random keys made from the
loss's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.separability.alignment import align_dims
from whalejax.capture.separability.derivatives import TraceFollower
from whalejax.capture.separability.elementwise_rules import check_sum_dtype
from whalejax.capture.separability.equations import combined_kind, number
from whalejax.capture.separability.facts import (
    Carry,
    LoopPlace,
    Places,
    RunningSum,
    fact_of,
)
from whalejax.capture.separability.loop_rules import place_in_loop
from whalejax.capture.separability.random_rules import FIXED_KEY, FOREIGN
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.values import (
    SIZE,
    Along,
    Atom,
    CoupledError,
    Dependence,
    Dim,
    Reason,
    Value,
    is_samples,
    same_ratio,
    size_of,
)


PLACES_USED: Final = "uses the places of samples in the batch"
LOOPS: Final = "loops along the samples"
CARRIES: Final = (
    "loops along the samples, and carries from one to the next what is no plain sum"
)


@dataclass(slots=True, kw_only=True)
class SampleLoop:
    """A scan whose iterations are the samples, or groups of them, one by one.

    Attributes:
        follower: Follower of the body.
        part, whole: The scan, in both traces.
        given: Facts about its operands.
        reason: Reason to report if a carry is used for more than a sum.
        lead: Samples, as a dimension of the stacked results.
        drawn: Whether an iteration may draw its own random numbers.
    """

    follower: TraceFollower
    part: Any
    whole: Any
    given: Sequence[Value]
    reason: Reason
    lead: Dim = ()
    drawn: bool = False

    def results(self) -> list[Value]:
        """Returns facts about the results.

        Raises:
            CoupledError: The loop couples samples.
        """
        sizes = (_compat.scan_parts(self.part), _compat.scan_parts(self.whole))
        first = sizes[0].num_consts
        carries = first + sizes[0].num_carries
        counts = sizes[0].length, sizes[1].length
        inside = self._slices(carries, counts)
        if not self.lead:
            places = any(fact_of(v, LoopPlace) for v in inside)
            if not sizes[0].num_carries and not places:
                return self._without_samples(inside)
            self.lead = (Atom(Along.SAMPLES, *counts),)
        start = list(self.given[first:carries])
        states = [self._state(n, v, counts) for n, v in enumerate(start)]
        consts = [_of_outside(v, self.reason) for v in self.given[:first]]
        (inner,), (other,) = map(_compat.inner_jaxprs, (self.part, self.whole))
        results = self.follower.run(inner, other, [*consts, *states, *inside])
        dtypes = [atom.aval.dtype for atom in self.part.outvars]
        ends = [
            self._end(before, state, after, dtype, counts)
            for before, state, after, dtype in zip(
                start, states, results, dtypes, strict=False
            )
        ]
        return [*ends, *(self._stack_iterations(v) for v in results[len(start) :])]

    def _without_samples(self, inside: Sequence[Value]) -> list[Value]:
        coupled = next((v for v in inside if v.coupled), None)
        if coupled is None:
            raise CoupledError(f"loops as often as {SIZE}")
        return [replace(coupled, dims=()) for _ in self.part.outvars]

    # Inputs of an iteration.

    def _slices(self, first: int, counts: tuple[int, int]) -> list[Value]:
        given = zip(self.given[first:], self.part.invars[first:], strict=True)
        return [self._slice(value, atom, counts) for value, atom in given]

    def _slice(self, value: Value, atom: Any, counts: tuple[int, int]) -> Value:
        if fact_of(value, Places) and len(value.dims) == 1:
            return place_in_loop(counts, replace(self.reason, why=PLACES_USED))
        value = _of_outside(value, self.reason)
        if value.coupled:
            return value.shaped(value.dims[1:])
        here = value.dims[0]
        own = is_samples(here)
        if own and len(here) == 1:
            self.lead = here
        elif own or any(a.along is Along.PLAIN for a in here):
            key = _compat.is_key_dtype(atom.aval.dtype) or value.key == FIXED_KEY
            raise CoupledError(FOREIGN if key else LOOPS)
        self.drawn |= any(a.along is Along.DRAWN for a in here)
        result = value.shaped(value.dims[1:])
        if not own:
            return result
        return replace(result, within=value.kind is Dependence.SAMPLE)

    def _state(self, place: int, start: Value, counts: tuple[int, int]) -> Value:
        bodies = [_body(e) for e in (self.part, self.whole)]
        slot = _compat.scan_parts(self.part).num_consts + place
        pairs = [(b, b.invars[slot], b.outvars[place]) for b in bodies]
        if all(before is after for _, before, after in pairs):
            return _of_outside(start, self.reason)
        if _starts_at_zero(start) and all(_counts(*pair) for pair in pairs):
            if not any(e.params["reverse"] for e in (self.part, self.whole)):
                return place_in_loop(counts, replace(self.reason, why=PLACES_USED))
        if start.key == "rng" and _compat.is_key_dtype(pairs[0][1].aval.dtype):
            self.drawn |= not start.coupled
            return _of_outside(start, self.reason)
        if _compat.is_key_dtype(pairs[0][1].aval.dtype):
            raise CoupledError(FOREIGN)
        why = replace(self.reason, why=CARRIES)
        fact = RunningSum(carry=Carry())
        return Value(kind=Dependence.COUPLED, dims=start.dims, fact=fact, reason=why)

    # Results of the loop.

    def _end(
        self,
        start: Value,
        state: Value,
        found: Value,
        dtype: Any,
        counts: tuple[int, int],
    ) -> Value:
        if fact_of(state, LoopPlace):
            return number(*counts)
        running, before = fact_of(found, RunningSum), fact_of(state, RunningSum)
        if before is None:
            if found == state:
                return start.plain
            if found.key == "rng" and found.kind is Dependence.FIXED:
                return start.plain
            raise CoupledError(CARRIES)
        if running is None or running.carry is not before.carry:
            if found.coupled:
                return found.plain
            raise CoupledError(CARRIES)
        if running.added is None or start.coupled:
            return start.plain
        added = self._stack_iterations(running.added)
        total = with_sum(added, added.dims[:1], added.dims[1:])
        kind, _ = combined_kind([start, total])
        if kind is Dependence.SUM:
            check_sum_dtype(dtype)
            if np.dtype(dtype).kind == "u":  # Differences wrap.
                raise CoupledError(f"adds samples up in {dtype}, one after the other")
        dims = align_dims([start.dims, total.dims])
        return Value(kind=kind, dims=dims, ratio=same_ratio([start, total]))

    def _stack_iterations(self, value: Value) -> Value:
        if value.coupled:
            return value.plain
        if value.kind is Dependence.SAMPLE and value.within:
            return replace(value.shaped((self.lead, *value.dims)), within=False)
        if value.kind is not Dependence.FIXED:
            raise CoupledError(LOOPS)
        along = Along.DRAWN if self.drawn else Along.EQUAL
        return value.shaped(((Atom(along, *size_of(self.lead)),), *value.dims))


def _of_outside(value: Value, reason: Reason) -> Value:
    """Returns an outer value; one of an outer loop belongs to another sample."""
    around = value.within or isinstance(value.fact, LoopPlace | RunningSum)
    if not around:
        return value
    why = replace(reason, why="compares a sample with the others")
    return Value(kind=Dependence.COUPLED, dims=value.dims, reason=why)


def _body(equation: Any) -> Any:
    (inner,) = _compat.inner_jaxprs(equation)
    return _compat.open_jaxpr(inner)[0]


def _starts_at_zero(value: Value) -> bool:
    return value.numbers is not None and not any(np.any(n) for n in value.numbers)


def _counts(body: Any, before: Any, after: Any) -> bool:
    dtype = before.aval.dtype
    if _compat.is_inexact(dtype) or np.dtype(dtype).itemsize < 4:  # The count may wrap.
        return False
    made = [e for e in body.eqns if after in e.outvars]
    if len(made) != 1 or made[0].primitive.name != "add":
        return False
    one, other = made[0].invars
    if _compat.is_literal(one):
        one, other = other, one
    return one is before and _compat.is_literal(other) and other.val == 1
