"""Parameters that several stages read: copied once in a step, and gradients back.

They lie on the first stage that reads them; a tied table is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.planner.cost_terms import TimeTerms
from whalejax.planner.pipeline.program_cut import Division
from whalejax.planner.pipeline.schedules import Schedule
from whalejax.planner.pipeline.simulate import ScheduleTimeline
from whalejax.planner.search.stage_models import StageLayout
from whalejax.planner.sharding.layout import shards


def copied_bytes(division: Division, chosen: Sequence[StageLayout]) -> list[int]:
    """Bytes that each device of every stage is given of other stages' parameters.

    Args:
        division: Division of the model into parts.
        chosen: The layout of each stage.
    """
    stages = len(chosen)
    result = [0.0] * stages
    units = division.units
    numbers = [*range(len(units.params)), *sorted(units.frozen)]
    for number, path in zip(numbers, map(units.path, numbers), strict=True):
        owner = division.owner(number, stages)
        readers = {
            place % stages
            for place, part in enumerate(division.parts)
            if number in part.inputs
        }
        for stage in readers - {owner}:
            result[stage] += _device_bytes(chosen[stage], path)
    return [int(nbytes) for nbytes in result]


def _device_bytes(laid: StageLayout, path: str) -> float:
    """Returns the bytes of a parameter on one device of a stage."""
    facts = laid.scored.facts
    paths = [tensor.path for tensor in laid.analysed.graph.params]
    place = facts.group_of[paths.index(path)]
    layout = laid.scored.layouts[place]
    group = facts.groups[place][0]
    return float(group.nbytes / shards(layout.param, laid.scored.mesh))


def exposed(
    table: Schedule,
    line: ScheduleTimeline,
    ahead: Sequence[float],
    copied: Sequence[float],
) -> TimeTerms:
    """Returns a step's waits for copies of parameters, and for their gradients at its
    end.

    A stage needs its copies when its first micro-batch comes, and is done with their
    gradients when its last one has gone.

    Args:
        table: The schedule.
        line: The same in time.
        ahead: Seconds of a forward pass at each place along the pipeline.
        copied: Seconds in which what every stage is given reaches it, and as many
            for the gradients to go back.
    """
    before = after = 0.0
    for stage, seconds in enumerate(copied):
        rows = zip(table.rows, line.ends_seconds, strict=True)
        ends = [end for row, end in rows if row.stage == stage]
        before = max(before, seconds - (min(ends) - ahead[stage]))
        after = max(after, seconds - (line.step_seconds - max(ends)))
    return TimeTerms(parameter_seconds=before, gradient_seconds=after)
