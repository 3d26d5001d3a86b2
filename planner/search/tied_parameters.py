"""Bytes of parameters that several stages read, such as tied embedding tables.

The first stage that reads such a parameter stores it. Once in a step, the other stages
get copies and send their gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.planner.pipeline.program_cut import Division
from whalejax.planner.search.stage_models import StageLayout
from whalejax.planner.sharding.layout import shards


def copied_bytes(division: Division, chosen: Sequence[StageLayout]) -> list[int]:
    """Returns the bytes of other stages' parameters on one device of each stage.

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
    facts = laid.scored.facts
    paths = [tensor.path for tensor in laid.analysed.graph.params]
    place = facts.group_of[paths.index(path)]
    layout = laid.scored.layouts[place]
    group = facts.groups[place][0]
    return float(group.nbytes / shards(layout.param, laid.scored.mesh))
