"""Functions with a derivative of their own, whose rule may couple samples too.

A loss that is a sum over samples has a gradient that is a sum too, if derivatives are
JAX's. A user's rule may do anything, such as normalise its inputs over the batch. So
the rule itself is traced, for a part and for the whole, and its results must be those
that a mean over samples requires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import jax

from whalejax import _compat
from whalejax.capture.separability.facts import RunningSum, Sorted, fact_of
from whalejax.capture.separability.values import (
    Along,
    CoupledError,
    Dependence,
    Value,
)


class TraceFollower(Protocol):
    """Follower of a program in two traces; see ``Interpreter``."""

    share: float
    scale: float

    def run(self, part: Any, whole: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns facts about a program's results."""


RULE: Final = (
    "has a derivative rule of its own that combines samples, or is not linear in what "
    "it is given"
)


def check_derivative(
    follower: TraceFollower,
    part: Any,
    whole: Any,
    given: Sequence[Value],
    found: Sequence[Value],
) -> list[Value]:
    """Refuses a derivative rule that is not that of a mean over samples.

    Args:
        follower: Follower of the traced rule.
        part, whole: The call, in both traces.
        given: Facts about its operands.
        found: Facts about its results.

    Returns:
        Facts about its results; a zero result may have a gradient that is not zero.

    Raises:
        CoupledError: The rule couples samples.
    """
    if _compat.is_ruled_by_jax(part):
        return list(found)
    if all(map(_is_lost, found)):  # The rule hides a loop's running sum.
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
    """Whether a value is coupled and not a row of a sort."""
    return value.coupled and fact_of(value, Sorted) is None


def _traced_rule(equation: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
    """Traces a call from operands and cotangents to results and gradients."""
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
    "has a derivative rule of its own whose results are of other samples than without "
    "derivatives"
)


def _check_alike(value: Value, ruled: Value) -> None:
    """Refuses a rule's results that combine samples unlike the function's."""
    if fact_of(value, Sorted) and fact_of(ruled, Sorted):
        value, ruled = value.fact.base, ruled.fact.base
    if value.coupled or ruled.ratio is None:
        return
    same = math.isclose(ruled.ratio, value.ratio or 1.0, rel_tol=1e-5)
    if ruled.kind is not value.kind and ruled.kind is not Dependence.FIXED or not same:
        raise CoupledError(FORWARD)


def _cotangent(value: Value, follower: TraceFollower) -> Value:
    """Returns facts about the cotangent of a value under a mean over samples."""
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
