"""The verdict on a loss: a mean of independent samples, or the reason why not.

A part of the batch computes the same as the whole if the loss is a sum over samples,
and its coefficient times the number of samples is the same for both. The program is
traced with both numbers of samples. The traces are compared, so its numbers need no
rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from whalejax import _compat
from whalejax.capture.separability.facts import Counter, fact_of
from whalejax.capture.separability.interpret import (
    UNKNOWN_FACTOR,
    Interpreter,
)
from whalejax.capture.separability.single_sample import single_sample_reason
from whalejax.capture.separability.values import (
    Along,
    Atom,
    Dependence,
    Dim,
    Reason,
    Value,
    is_one,
    plain_dim,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """One flat input of a traced loss.

    Attributes:
        axis: Dimension that holds the samples; None if there is none.
        key: Source of the random key: ``"rng"``, ``"foreign"``, or empty for none.
        state: Name of the state that samples change, or empty.
    """

    axis: int | None = None
    key: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPrograms:
    """Programs from which the independence of samples is proven.

    Attributes:
        at: Returns the loss's jaxpr for a number of samples, whose results are
            total, weight and the state that samples may change.
        inputs: Every flat input.
        state: Names of the state, in the order of the results.
        weighted: Whether the loss is a ``WeightedLoss``.
    """

    at: Callable[[int], Any]
    inputs: Sequence[LossInput]
    state: Sequence[str]
    weighted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Separability:
    """Verdict on whether parts of a batch compute the same as the whole.

    Attributes:
        group: Number of neighbours that must stay together; 1 if none.
        runs: Number of equal runs of the batch; a part must hold the same indices of
            each, as with chosen and then rejected samples; 1 if there are none.
        reason: Reason why the parts differ from the whole; None if they do not.
        sums: Whether the loss sums its samples and is no mean.
        in_weight: Whether the reason is about the weight of a ``WeightedLoss``.
    """

    group: int = 1
    runs: int = 1
    reason: Reason | None = None
    sums: bool = False
    in_weight: bool = False

    @property
    def proven(self) -> bool:
        """Whether parts compute the same as the whole."""
        return self.reason is None


MOST_GROUPS: Final = 4
"""Maximum number of group sizes that are tried, if reshapes require larger groups."""


def prove(
    programs: LossPrograms, part: int, whole: int, group: int | None = None
) -> Separability:
    """Decides whether parts of a batch compute the same as the whole.

    Args:
        programs: Programs of the loss.
        part, whole: Number of samples of a part, and of the whole batch.
        group: Number of samples that stay together; None takes 1, or what reshapes of
            the batch require.

    Returns:
        The verdict; its reason if the loss cannot be traced with both sizes.
    """
    if part == whole:
        return Separability(group=group or 1)
    tried, first = (group or 1, 1), None
    for _ in range(MOST_GROUPS):
        result = _prove(programs, part, whole, *tried)
        first = first or result
        if result.reason is None:
            return result
        wanted = result.reason.group or tried[0], result.reason.runs or tried[1]
        if wanted == tried or (group is not None and wanted[0] != group):
            break
        if any(n % math.prod(wanted) for n in (part, whole)):
            break
        tried = wanted
    assert first is not None
    return first


def _prove(
    programs: LossPrograms, part: int, whole: int, group: int, runs: int
) -> Separability:
    unit = group * runs
    if part % unit or whole % unit:
        why = f"{part} samples are no whole groups of {unit}"
        return _refuse(Reason(operation="", line="", why=why))
    small, large = part, whole
    if part == unit:  # One group has no dimension; the proof needs more.
        small, large = 2 * unit, whole if whole > 2 * unit else 4 * unit
    try:
        pair = programs.at(small), programs.at(large)
        if small != part:
            sizes = part, small, large
            unlike = single_sample_reason(programs.at(part), pair, sizes)
            if unlike is not None:
                return _refuse(unlike)
    except Exception as error:  # Raised by the user's loss.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = f"cannot be traced with another number of samples ({text:.120})"
        return _refuse(Reason(operation="", line="", why=why))
    share = small / large
    inputs = known_inputs(programs.inputs, pair, share, group=group, runs=runs)
    scale = UNKNOWN_FACTOR if programs.weighted else 1.0
    follower = Interpreter(share=share, group=group, runs=runs, scale=scale)
    total, weight, *state = follower.run(*pair, inputs)
    verdict = _verdict(total, weight, share, weighted=programs.weighted)
    for name, value in zip(programs.state, state, strict=True):
        if verdict.proven:
            verdict = _of_state(name, value)
    return replace(verdict, group=group, runs=runs)


def known_inputs(
    inputs: Sequence[LossInput],
    pair: Sequence[Any],
    share: float,
    *,
    group: int = 1,
    runs: int = 1,
) -> list[Value]:
    """Returns facts about the inputs of a loss, traced with two numbers of samples.

    Args:
        inputs: Every flat input.
        pair: Jaxprs with fewer and with more samples.
        share: Ratio of the first one's samples to the second one's.
        group, runs: Fields of ``Separability``, unchanged.
    """
    bodies = [_compat.open_jaxpr(p)[0].invars for p in pair]
    return [
        _input(one, a.aval.shape, b.aval.shape, group, runs, share)
        for one, a, b in zip(inputs, *bodies, strict=True)
    ]


def _refuse(reason: Reason, *, sums: bool = False) -> Separability:
    return Separability(reason=reason, sums=sums)


def _input(
    one: LossInput,
    part: Sequence[int],
    whole: Sequence[int],
    group: int,
    runs: int,
    share: float,
) -> Value:
    dims: list[Dim] = [plain_dim(a, b) for a, b in zip(part, whole, strict=True)]
    if one.state:
        why = f"reads {one.state}, which every micro-batch changes"
        return Value(
            kind=Dependence.COUPLED,
            dims=tuple(dims),
            fact=Counter(name=one.state, share=share),
            reason=Reason(operation="", line="", why=why),
        )
    if one.axis is None:
        return Value(kind=Dependence.FIXED, dims=tuple(dims), key=one.key)
    unit, axis = group * runs, one.axis
    samples = Atom(Along.SAMPLES, part[axis] // unit, whole[axis] // unit)
    dims[axis] = (*plain_dim(runs, runs), samples, *plain_dim(group, group))
    return Value(kind=Dependence.SAMPLE, dims=tuple(dims))


def _verdict(
    total: Value, weight: Value, share: float, *, weighted: bool
) -> Separability:
    for value in (total, weight) if weighted else (total,):
        if value.coupled:
            assert value.reason is not None
            of_weight = value is weight and weighted
            return replace(_refuse(value.reason), in_weight=of_weight)
        if value.kind is Dependence.SAMPLE:
            why = "is of one sample, whatever the others are"
            return _refuse(Reason(operation="", line="", why=why))
    over = weight.ratio if weighted else 1.0
    ratio = total.ratio
    if ratio is None:
        return Separability()
    if over and math.isfinite(ratio) and math.isclose(ratio, over, rel_tol=1e-5):
        return Separability()
    if weighted or not ratio > 0:
        why = "is divided by a number that does not grow as the samples do"
        if not weighted:
            why = "has a coefficient that is zero or changes its sign"
        return _refuse(Reason(operation="", line="", why=why))
    if math.isclose(ratio, share, rel_tol=1e-5):
        return _refuse(Reason(operation="", line="", why=SUM), sums=True)
    why = (
        "has a coefficient that does not fall as the number of samples grows: on a "
        f"part, the mean is {ratio:.4g} times that of the whole"
    )
    return _refuse(Reason(operation="", line="", why=why), sums=True)


SUM: Final = "adds its samples up and divides by no number of them"


def _of_state(name: str, value: Value) -> Separability:
    counter = fact_of(value, Counter)
    if counter is not None and counter.name == name:
        return Separability()
    if value.coupled:
        assert value.reason is not None
        why = f"makes {name} of several samples: it {value.reason.why}"
        return _refuse(replace(value.reason, why=why))
    if value.kind is not Dependence.FIXED or not is_one(value.ratio):
        why = f"makes {name} of several samples"
        return _refuse(Reason(operation="", line="", why=why))
    return Separability()
