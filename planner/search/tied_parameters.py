"""Costs of parameters that several stages read, such as tied tables.

The first stage that reads such a parameter stores it. Once in a step, the parameter is
copied to the others, and their gradients are sent back.
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
    """Returns the bytes of other stages' parameters on a device of each stage.

    Args:
        division: Division of the model into parts.
        chosen: Layout of each stage.
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

    A stage needs its copies when its first micro-batch starts. It has their gradients
    when its last micro-batch ends.

    Args:
        table: Pipeline schedule.
        line: Timeline of the schedule.
        ahead: Seconds of a forward pass on each virtual stage.
        copied: Seconds to transfer the copies to each stage; their gradients take the
            same time.
    """
    before = after = 0.0
    for stage, seconds in enumerate(copied):
        rows = zip(table.rows, line.ends_seconds, strict=True)
        ends = [end for row, end in rows if row.stage == stage]
        before = max(before, seconds - (min(ends) - ahead[stage]))
        after = max(after, seconds - (line.step_seconds - max(ends)))
    return TimeTerms(parameter_seconds=before, gradient_seconds=after)
