"""Checks whether a batch may be split: for plans, shares, stages, runs and swarms.

A loss may not be proven to treat samples independently. Its batch is then split only if
the user asks for each part's own loss: ``per_micro_batch=True``. All code that splits a
batch asks here, and refuses with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from whalejax.capture.separability.interpret import ORDER, OTHER_OPERATION
from whalejax.capture.separability.proof import Separability
from whalejax.capture.separability.random_rules import FOREIGN
from whalejax.capture.separability.values import OTHER_RATIO, Reason
from whalejax.capture.trace import Captured
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


class DependentSamplesError(PlanError):
    """A batch would be split although its samples are not proven independent.

    Attributes:
        unit: Number of samples that the loss takes together, of which the size of each
            part should be a multiple; 0 if unknown.
    """

    unit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBatch:
    """A batch that is computed in parts.

    Attributes:
        whole: Number of samples of the batch.
        part: Number of samples of a part.
        what: Name of a part in messages.
        asked: The user's option that asks for parts, such as ``"num_micro_batches=4"``;
            empty if the plan asks for them.
    """

    whole: int
    part: int
    what: str = "micro-batches"
    asked: str = ""

    def __str__(self) -> str:
        return f"{self.what} of {self.part} of the batch's {self.whole} samples"


def samples_of(captured: Captured) -> int:
    """Returns the number of samples of the global batch that a loss was traced for."""
    return captured.graph.batch_size * captured.graph.num_micro_batches


def split_of(plan: Plan, whole: int) -> SplitBatch:
    """Returns the parts in which a plan computes its batch.

    Args:
        plan: Any plan.
        whole: Number of samples of its batch.
    """
    count = plan.num_micro_batches
    ranks = 1 if plan.combine == "mean" else plan.axis_sizes.get("data", 1)
    if ranks == 1:
        return SplitBatch(whole=whole, part=whole // count)
    what = f'parts of ranks that combine by "{plan.combine}",'
    return SplitBatch(whole=whole, part=whole // (count * ranks), what=what)


def check_split(captured: Captured, plan: Plan, whole: int | None = None) -> None:
    """Refuses a plan that splits a batch whose samples are not independent.

    Args:
        captured: The loss, traced with any number of samples in a micro-batch.
        plan: Plan to run.
        whole: Number of samples of the plan's batch, if the loss was traced for another
            number.

    Raises:
        DependentSamplesError: An operation combines samples; the message names it, its
            line and the remedy. The error is also raised if a part would divide samples
            that the loss takes together.
    """
    split = split_of(plan, whole or samples_of(captured))
    if split.part % plan.group_size:
        raise DependentSamplesError(
            f"group_size is {plan.group_size}, and the plan has {split}, which are "
            "not whole groups. Plan again, with this group_size"
        )
    if plan.per_micro_batch or split.part == split.whole:
        return
    result = captured.independence(split.part, split.whole, None)
    if not result.proven:
        raise refusal(result, split, weighted=captured.graph.weighted)
    if result.group > 1 and plan.group_size % result.group:
        raise DependentSamplesError(
            f"the loss takes groups of {result.group} neighbouring samples together, "
            f"and the plan's micro-batches keep groups of {plan.group_size}. Plan "
            f"again, with group_size={result.group}"
        )
    if result.runs > 1 and plan.combine != "mean":
        raise DependentSamplesError(
            f"the loss divides the batch into {result.runs} equal runs, such as two "
            f'halves, but ranks that combine by "{plan.combine}" have neighbouring '
            "samples. Leave combine out"
        )


def refusal(
    found: Separability, split: SplitBatch, *, weighted: bool, tried: str = ""
) -> DependentSamplesError:
    """Returns the error for a batch that may not be split.

    Args:
        found: Failed proof of independence, with its reason.
        split: Split that was asked for.
        weighted: Whether the loss is a ``WeightedLoss``.
        tried: Reason why the whole batch at once fails too, if that was tried.
    """
    assert found.reason is not None
    asked = f"{split.asked}: " if split.asked else ""
    lines = [
        f"{asked}the loss is not proven to be a mean of independent samples, and "
        f"{split} would train something else than the whole batch: "
        f"{reason_text(found.reason)}.",
        _remedy(found, split, weighted=weighted, whole_fits=not tried),
    ]
    if tried:
        lines.append(f"With the whole batch at once, {tried}")
    error = DependentSamplesError(" ".join(lines))
    error.unit = _unit(found.reason)
    return error


def _unit(reason: Reason) -> int:
    return reason.group * max(1, reason.runs) or reason.runs


def reason_text(reason: Reason) -> str:
    """Describes the operation that combines samples, with its source line.

    >>> reason_text(Reason(operation="sort", line="model.py:3", why="sorts samples"))
    'sort (model.py:3) sorts samples'
    """
    if not reason.operation:
        return f"the loss {reason.why}"
    return f"{reason.operation} ({reason.line}) {reason.why}"


_CONSENT: Final = (
    "per_micro_batch=True (--per-micro-batch) to use each part's own loss, as gradient "
    "accumulation on one device does"
)


def _remedy(
    found: Separability, split: SplitBatch, *, weighted: bool, whole_fits: bool
) -> str:
    assert found.reason is not None
    group = _unit(found.reason)
    if found.sums:
        return (
            "Return the mean over the samples (.mean()), or wh.WeightedLoss(total, "
            f"weight); or give {_CONSENT}."
        )
    if group > 1 and split.whole % group == 0 and split.part % group:
        return (
            f"Parts of whole groups are possible: give micro-batches of a multiple of "
            f"{group} samples, or num_micro_batches=1; or {_CONSENT}."
        )
    mean = ""
    operation, why = found.reason.operation, found.reason.why
    counts = operation in _COUNTS and "sum over" in why
    if (counts or (operation == "add" and why == OTHER_RATIO)) and not weighted:
        mean = (
            ", wh.WeightedLoss(total, weight) with the plain sum as weight if it "
            "is the number of counted items"
        )
    one = f"num_micro_batches=1{mean}, or " if whole_fits else ""
    give = f"Give {one}{_CONSENT}."
    helps = _WEIGHT if found.in_weight else _HELPS.get(why, "")
    if weighted and operation == "add" and why == OTHER_RATIO and not found.in_weight:
        helps = _PENALTY
    return f"{helps} Otherwise: {give}" if helps else give


_COUNTS: Final = ("div", "max", "clamp", "integer_pow", "gt", "ge", "lt", "eq", "ne")
_WEIGHT: Final = (
    "Give the plain sum over the samples as the weight, without a maximum, a choice or "
    "an added number. The weights of all micro-batches are summed before the division, "
    "so a micro-batch of weight 0 counts for nothing. If the weight of a whole batch "
    "may be 0, which gives NaN, add a small number to each sample's own weight."
)
_PENALTY: Final = (
    "Multiply terms that are no sum over the samples, such as a regulariser, by the "
    "weight: wh.WeightedLoss(total + weight * penalty, weight)."
)
_HELPS: Final[Mapping[str, str]] = {
    OTHER_OPERATION: "Use jax.vmap where Python loops over the samples.",
    ORDER: (
        "Give einsum the order, such as optimize=False from left to right, or take "
        "products of two operands each."
    ),
    FOREIGN: (
        "Split the keys from the rng that is the third argument of a loss: "
        "loss(model, batch, rng)."
    ),
}


def split_note(captured: Captured, plan: Plan, whole: int) -> list[str]:
    """Returns notes on how a plan splits its batch; none if it does not.

    Args:
        captured: The loss.
        plan: The plan.
        whole: Number of samples of the batch.
    """
    split = split_of(plan, whole)
    notes: list[str] = []
    if split.part == split.whole:
        return notes
    if plan.group_size > 1:
        notes.append(
            f"micro-batches hold whole groups of {plan.group_size} neighbouring samples"
        )
    if plan.per_micro_batch:
        result = captured.independence(split.part, split.whole, None)
        if result.reason is not None:
            notes.append(
                f"per_micro_batch=True: each of the {split} computes its own loss, as "
                "gradient accumulation on one device does, because "
                f"{reason_text(result.reason)}"
            )
    return notes


def largest_part(whole: int, unit: int = 1) -> int:
    """Returns the largest size of a part when a batch is divided into equal parts.

    There are at least two parts, and each consists of whole groups.

    Args:
        whole: Number of samples of the batch.
        unit: Number of samples of a group.

    Returns:
        Number of samples of a part; ``whole`` if the batch cannot be divided so.

    >>> largest_part(16), largest_part(15, 5), largest_part(7, 7)
    (8, 5, 7)
    """
    parts = (whole // n for n in range(2, whole // unit + 1) if whole % n == 0)
    return next((part for part in parts if part % unit == 0), whole)


def unit_of(found: Separability) -> int:
    """Returns the number of which a micro-batch's samples must be a multiple."""
    return found.group * found.runs
