"""Loops along the samples: maps, and sums that are carried from sample to sample.

The results of an iteration may depend on its own sample alone. An iteration may carry
values that no iteration changes, running sums, the index of the loop, and random keys
made from the loss's own.

A function with a custom derivative rule may couple samples in that rule too. With JAX's
own rules, the gradient of a sum over samples is a sum. A user's rule may do anything,
such as normalise cotangents over the batch. So ``check_derivative`` traces the rule
itself, for a part and for the whole of the batch. The rule's results must be those that
a mean over samples requires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import jax
import numpy as np

from whalejax import _compat
from whalejax.capture.separability.alignment import align_dims
from whalejax.capture.separability.elementwise_rules import check_sum_dtype
from whalejax.capture.separability.loop_rules import place_in_loop
from whalejax.capture.separability.random_rules import FIXED_KEY, FOREIGN
from whalejax.capture.separability.reduction_rules import with_sum
from whalejax.capture.separability.values import (
    SIZE,
    Along,
    Atom,
    Carry,
    CoupledError,
    Dependence,
    Dim,
    LoopPlace,
    Places,
    Reason,
    RunningSum,
    Sorted,
    Value,
    combined_kind,
    fact_of,
    is_samples,
    number,
    same_ratio,
    size_of,
)


class TraceFollower(Protocol):
    """Follower of a program in two traces, as ``Interpreter`` is."""

    share: float
    scale: float

    def run(self, part: Any, whole: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns facts about a program's results."""
        ...


RULE: Final = (
    "has a derivative rule of its own that combines samples, or is not linear in its "
    "cotangents"
)


def check_derivative(
    follower: TraceFollower,
    part: Any,
    whole: Any,
    given: Sequence[Value],
    found: Sequence[Value],
) -> list[Value]:
    """Refuses a derivative rule that no mean over samples has.

    Args:
        follower: Follower of the traced rule.
        part: The call in the trace of the part.
        whole: The call in the trace of the whole.
        given: Facts about the operands of the call.
        found: Facts about the results of the call.

    Returns:
        Facts about the results. A result of zero is described like any other, as its
        gradient may not be zero.

    Raises:
        CoupledError: The rule couples samples.
    """
    if _compat.is_ruled_by_jax(part):
        return list(found)
    if all(map(_is_lost, found)):  # A loop's running sum is hidden behind the rule.
        return [v.plain if fact_of(v, RunningSum) else v for v in found]
    found = [replace(v, ratio=1.0) if v.ratio is None else v for v in found]
    inputs = _compat.differentiable_operands(part)
    outputs = [
        n for n, v in enumerate(part.outvars) if _compat.is_inexact(v.aval.dtype)
    ]
    if not inputs or not outputs:
        return found
    rules = [_traced_rule(e, inputs, outputs) for e in (part, whole)]
    cotangents = [_cotangent(found[n], follower) for n in outputs]
    operands = [v if fact_of(v, Sorted) else v.plain for v in given]
    results = follower.run(rules[0], rules[1], [*operands, *cotangents])
    for place, value in zip(outputs, results, strict=False):
        _check_alike(found[place], value)
    for place, gradient in zip(inputs, results[len(outputs) :], strict=True):
        if fact_of(given[place], Sorted) and fact_of(gradient, Sorted):
            _check(given[place].fact.base, gradient.fact.base, follower)
        else:
            _check(given[place], gradient, follower)
    return found


def _is_lost(value: Value) -> bool:
    return value.coupled and fact_of(value, Sorted) is None


def _traced_rule(equation: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
    """Traces a call: from operands and cotangents to results and gradients."""
    avals = [atom.aval for atom in equation.invars]
    count = len(avals)

    def gradients(*leaves: Any) -> list[Any]:
        operands = list(leaves[:count])

        def call(*moved: Any) -> list[Any]:
            values = list(operands)
            for place, value in zip(inputs, moved, strict=True):
                values[place] = value
            results = _compat.bind(equation, values)
            return [results[n] for n in outputs]

        results, pull = jax.vjp(call, *(operands[i] for i in inputs))
        return [*results, *pull(list(leaves[count:]))]

    given = [_compat.abstract(a.shape, a.dtype) for a in avals]
    given += [
        _compat.abstract(equation.outvars[n].aval.shape, equation.outvars[n].aval.dtype)
        for n in outputs
    ]
    return _compat.pruned(_compat.trace(gradients, given))


FORWARD: Final = (
    "has a derivative rule of its own whose results depend on other samples than the "
    "function's"
)


def _check_alike(value: Value, ruled: Value) -> None:
    if fact_of(value, Sorted) and fact_of(ruled, Sorted):
        value, ruled = value.fact.base, ruled.fact.base
    if value.coupled or ruled.ratio is None:
        return
    same = math.isclose(ruled.ratio, value.ratio or 1.0, rel_tol=1e-5)
    if ruled.kind is not value.kind and ruled.kind is not Dependence.FIXED or not same:
        raise CoupledError(FORWARD)


def _cotangent(value: Value, follower: TraceFollower) -> Value:
    ordered = fact_of(value, Sorted)
    if ordered is not None:
        base = _cotangent(ordered.base, follower)
        return replace(value, fact=replace(ordered, base=base))
    if value.coupled:
        raise CoupledError(RULE)
    ratio = value.ratio or 1.0
    share, ratio = follower.share, ratio / follower.scale
    if any(a.grows and a.along is not Along.SAMPLES for d in value.dims for a in d):
        raise CoupledError(RULE)
    if value.kind is Dependence.SAMPLE:
        return replace(value.plain, ratio=1 / (share * ratio))
    kind = Dependence.FIXED if value.kind is Dependence.SUM else Dependence.SUM
    return replace(value.plain, kind=kind, ratio=1 / ratio)


def _check(value: Value, gradient: Value, follower: TraceFollower) -> None:
    if gradient.ratio is None:
        return
    if gradient.coupled or value.coupled:
        raise CoupledError(RULE)
    ratio = (value.ratio or 1.0) / follower.scale
    if value.kind is Dependence.SAMPLE or gradient.within:
        right = gradient.kind is Dependence.SAMPLE
        expected = 1 / (follower.share * ratio)
    else:
        right = gradient.kind in (Dependence.FIXED, Dependence.SUM)
        right &= value.kind is Dependence.FIXED or gradient.kind is Dependence.FIXED
        expected = 1 / ratio
    if not right or not math.isclose(gradient.ratio, expected, rel_tol=1e-5):
        raise CoupledError(RULE)


PLACES_USED: Final = "uses the positions of samples in the batch"
LOOPS: Final = "loops along the samples"
CARRIES: Final = "loops along the samples, and carries values that are no plain sums"


@dataclass(slots=True, kw_only=True)
class SampleLoop:
    """A scan with one iteration for each sample, or for each group of samples.

    Attributes:
        follower: Follower of the body.
        part: The scan in the trace of the part.
        whole: The scan in the trace of the whole.
        given: Facts about the operands of the scan.
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
        """Returns facts about the results of the scan.

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
            raise CoupledError(f"has a number of iterations that {SIZE}")
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
    """Returns a value from outside the loop, as its iterations see it.

    A value of an outer loop's iteration belongs to another sample, so it is coupled.
    """
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
