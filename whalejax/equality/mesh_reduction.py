"""Reduces the numbers of devices, micro-batches and layers of a plan.

Mesh axes above 1 stay above 1. Unequal shares of ranks, and unequal numbers of layers
of stages, stay unequal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.equality.check_errors import CheckError
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan


OWN_DEVICES: Final = 8
"""Largest number of devices for which a plan keeps its axis sizes."""

MOST_DEVICES: Final = 32
"""Largest number of virtual devices; with more, compilation takes over a minute."""

MOST_MICRO_BATCHES: Final = 4
"""Largest number of micro-batches; more would only repeat others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReduction:
    """Reduced numbers of devices, micro-batches and layers of a plan.

    Attributes:
        sizes: Reduced size of each mesh axis that changes.
        num_devices: Total number of devices.
        num_micro_batches: Number of micro-batches in a step.
        shares: Number of micro-batches of each rank of ``data``; empty if equal.
        ranks: Ranks of ``data`` that run, if each rank has a separate plan or share.
        stage_layers: Number of layers of each virtual stage of a lockstep pipeline.
    """

    sizes: Mapping[str, int]
    num_devices: int
    num_micro_batches: int
    shares: tuple[int, ...]
    ranks: tuple[int, ...]
    stage_layers: tuple[int, ...]

    def axes(self, axes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """Returns the axes of a plan, or of one of its stages, with reduced sizes."""
        return tuple((axis, self.sizes.get(axis, size)) for axis, size in axes)


def reduced_mesh(plan: Plan, multiple: int) -> MeshReduction:
    """Returns reduced numbers of devices, micro-batches and layers.

    Args:
        plan: A runnable plan.
        multiple: Number of elements per device along a dimension: 2, or 3 if odd.

    Raises:
        CheckError: Even with size 2 of each axis, there are too many devices.
    """
    sizes = {} if plan.num_devices <= OWN_DEVICES else _halved(plan)
    ranks = _kept_ranks(plan, sizes)
    shares = _shares([plan.shares[rank] for rank in ranks]) if plan.shares else ()
    mesh = MeshReduction(
        sizes=sizes,
        num_devices=_devices(plan, sizes, ranks),
        num_micro_batches=sum(shares) if shares else _micro_batches(plan, multiple),
        shares=shares,
        ranks=ranks,
        stage_layers=_stage_layers(plan),
    )
    if mesh.num_devices > MOST_DEVICES:
        raise CheckError(
            f"with size 2 of each of its {len(plan.axes)} mesh axes, the plan needs "
            f"{count_text(mesh.num_devices, 'virtual device')}; expected at most "
            f"{MOST_DEVICES}. Check a plan with fewer stages or axes"
        )
    return mesh


def _halved(plan: Plan) -> dict[str, int]:
    parts = [plan, *plan.stage_plans, *plan.pipelines]
    parts += [stage for pipeline in plan.pipelines for stage in pipeline.stage_plans]
    axes = {axis for part in parts for axis, size in part.axes if size > 1}
    return dict.fromkeys(axes - {"stage"}, 2)


def _kept_ranks(plan: Plan, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ranks of ``data`` to run, those that differ most."""
    if not plan.shares:
        return ()
    every = range(len(plan.shares))
    if "data" not in sizes:
        return tuple(every)
    most = max(every, key=lambda rank: plan.shares[rank])
    least = min((r for r in every if r != most), key=lambda rank: plan.shares[rank])
    return tuple(sorted((most, least)))


def _devices(plan: Plan, sizes: Mapping[str, int], ranks: Sequence[int]) -> int:
    if plan.pipelines:
        return sum(_devices(plan.pipelines[rank], sizes, ()) for rank in ranks)
    if plan.stage_plans:
        return sum(_devices(stage, sizes, ()) for stage in plan.stage_plans)
    return math.prod(sizes.get(axis, size) for axis, size in plan.axes)


def _shares(shares: Sequence[int]) -> tuple[int, ...]:
    """Reduces many micro-batches to shares of 1, where least, and 2 elsewhere."""
    if sum(shares) <= 2 * MOST_MICRO_BATCHES:
        return tuple(shares)
    least = min(shares)
    return tuple(1 if share == least else 2 for share in shares)


def _micro_batches(plan: Plan, multiple: int) -> int:
    count = plan.num_micro_batches
    if plan.stages is None:
        return min(count, multiple if count > MOST_MICRO_BATCHES else count)
    # A schedule repeats itself after one micro-batch per stage.
    stages = len(plan.stage_plans) or plan.axis_sizes.get("stage", 1)
    return min(count, max(2 * stages, MOST_MICRO_BATCHES))


def _stage_layers(plan: Plan) -> tuple[int, ...]:
    if plan.stages is None or not plan.stages.layers or plan.stage_plans:
        return ()
    least = min(plan.stages.layers)
    # A virtual stage without layers gets none.
    return tuple(
        min(layers, 1 if layers == least else 2) for layers in plan.stages.layers
    )
