"""Time terms of a step that has several parts: pipeline stages, or unequal replicas.

``StepTime`` predicts each part alone. Only this module combines the terms of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whalejax.planner.cost_terms import TimeTerms
from whalejax.planner.pipeline.schedules import Schedule
from whalejax.planner.pipeline.simulate import ScheduleTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCost:
    """Time of one micro-batch on one part, and of the part's work once per step.

    Attributes:
        ahead: Time of the forward pass.
        both: Time of the forward and the backward pass.
        once: Time of the update, allocations and offloads.
        weight_share: Fraction of the backward pass that computes gradients of
            parameters, which a schedule can postpone.
    """

    ahead: TimeTerms
    both: TimeTerms
    once: TimeTerms
    weight_share: float

    def measured(self, ratio: float) -> MicroBatchCost:
        """Returns a copy whose micro-batch times are multiplied by a measured ratio."""
        ahead, both = self.ahead * ratio, self.both * ratio
        return replace(self, ahead=ahead, both=both)

    def spared(self, seconds: float) -> MicroBatchCost:
        """Returns a copy with fewer compute seconds, over both passes together."""
        return replace(self, both=self.both.plus(compute_seconds=-seconds))


def micro_batch_cost(
    step: TimeTerms,
    count: int,
    *,
    forward: Mapping[str, float],
    forward_shares: Mapping[str, float],
    weight_share: float,
) -> MicroBatchCost:
    """Returns the costs of one micro-batch of a step.

    Args:
        step: Time of a step of one part alone.
        count: Number of micro-batches of the step.
        forward: Seconds of those time terms of a forward pass that are known, by name.
        forward_shares: Fraction of each other time term in the forward pass, by name.
        weight_share: Fraction of the backward pass that can be postponed.
    """
    once = step.once
    both = (step - once) * (1 / count)
    sent = {name: getattr(both, name) * part for name, part in forward_shares.items()}
    return MicroBatchCost(
        ahead=(both * 0.0).plus(**{**forward, **sent}),
        both=both,
        once=once,
        weight_share=weight_share,
    )


def lockstep_step(
    turn: MicroBatchCost,
    behind: TimeTerms,
    *,
    count: int,
    turns: tuple[int, int, int],
    handed_seconds: float,
    once_seconds: Mapping[str, float],
) -> TimeTerms:
    """Returns the step time of a lockstep pipeline.

    Turns without a micro-batch are the bubble.

    Args:
        turn: Costs of one micro-batch on the slowest stage.
        behind: Time of the backward pass of one micro-batch.
        count: Number of micro-batches in a step.
        turns: Numbers of forward turns, backward turns and transfers.
        handed_seconds: Seconds of a transfer between stages.
        once_seconds: Seconds of the collectives between stages that run once in a step,
            by name of the time term.
    """
    ahead, back, transfers = turns

    def passes(forward: int, backward: int, handings: int) -> TimeTerms:
        both = turn.ahead * forward + behind * backward
        return both.plus(border_seconds=handed_seconds * handings)

    useful = passes(count, count, count)
    waited = passes(ahead, back, transfers).step_seconds - useful.step_seconds
    return (useful + turn.once).plus(bubble_seconds=waited, **once_seconds)


def scheduled_step(
    turns: Sequence[MicroBatchCost],
    table: Schedule,
    line: ScheduleTimeline,
    *,
    ahead: Sequence[float],
    copied: Sequence[float],
) -> TimeTerms:
    """Returns the time of the slowest stage, including its idle time.

    A stage needs its copies of shared parameters before its first micro-batch, and has
    their gradients after its last.

    Args:
        turns: Costs of one micro-batch on each stage.
        table: Pipeline schedule.
        line: Timeline of the schedule.
        ahead: Seconds of a forward pass on each virtual stage.
        copied: Seconds to transfer copies of shared parameters to each stage. The
            transfer of their gradients takes as long.
    """
    slowest = max(turns, key=lambda turn: turn.both.step_seconds)
    useful = slowest.both * table.num_micro_batches
    once = max((turn.once for turn in turns), key=lambda terms: terms.step_seconds)
    before = after = 0.0
    for stage, seconds in enumerate(copied):
        rows = zip(table.rows, line.ends_seconds, strict=True)
        ends = [end for row, end in rows if row.stage == stage]
        before = max(before, seconds - (min(ends) - ahead[stage]))
        after = max(after, seconds - (line.step_seconds - max(ends)))
    return (useful + once).plus(
        bubble_seconds=max(0.0, line.step_seconds - useful.step_seconds),
        parameter_seconds=before,
        gradient_seconds=after,
    )


def replicas_step(
    part: TimeTerms,
    pace_seconds: float,
    *,
    update_seconds: float,
    exchange_seconds: float,
    gather_seconds: float = 0.0,
) -> TimeTerms:
    """Returns the step time of replicas with unequal shares of the samples.

    Args:
        part: Time of a step of the replica that ends last.
        pace_seconds: Seconds of that replica's micro-batches, without the update.
        update_seconds: Seconds of the optimizer's update.
        exchange_seconds: Seconds in which replicas reduce their gradients.
        gather_seconds: Seconds in which replicas gather updated parameters; default: 0.
    """
    own = replace(part, update_seconds=0.0)
    paced = own * (pace_seconds / max(own.step_seconds, 1e-30))
    return paced.plus(
        update_seconds=update_seconds,
        gradient_seconds=exchange_seconds,
        parameter_seconds=gather_seconds,
    )
