"""Fewer devices, micro-batches and layers for a plan, with all its axes kept.

Every axis above 1 stays above 1, ranks with unlike shares stay unlike, and so do stages
with unlike numbers of layers; only how many there are is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.equality.check_errors import CheckError
from whalejax.planner.plan.plan import Plan


OWN_DEVICES: Final = 8
"""Up to so many devices a plan keeps the sizes of its own axes."""

MOST_DEVICES: Final = 32
"""Virtual devices of one process; with more, compiling takes longer than a minute."""

MOST_MICRO_BATCHES: Final = 4
"""Above it micro-batches repeat what fewer of them do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReduction:
    """The reduced counts of a plan.

    Attributes:
        sizes: Size of each mesh axis that changes.
        num_devices: Devices in all.
        num_micro_batches: Micro-batches in a step.
        shares: Micro-batches of each rank of ``data``; empty where ranks are alike.
        ranks: Ranks of ``data`` that are kept, where each has a plan or shares of its
            own.
        stage_layers: Layers of each part of a pipeline in lockstep.
    """

    sizes: Mapping[str, int]
    num_devices: int
    num_micro_batches: int
    shares: tuple[int, ...]
    ranks: tuple[int, ...]
    stage_layers: tuple[int, ...]

    def axes(self, axes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """The axes of a plan, or of one of its stages, reduced."""
        return tuple((axis, self.sizes.get(axis, size)) for axis, size in axes)


def reduced_mesh(plan: Plan, multiple: int) -> MeshReduction:
    """Reduced counts of devices, micro-batches and layers.

    Args:
        plan: A runnable plan.
        multiple: Parts of a device along a dimension: 2, or 3 for odd extents.

    Raises:
        CheckError: Even with two devices along every axis there are too many.
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
            f"the plan's {len(plan.axes)} mesh axes and its stages take "
            f"{mesh.num_devices} devices with two along each axis; expected at most "
            f"{MOST_DEVICES} virtual ones. Check a plan with fewer stages or axes"
        )
    return mesh


def _halved(plan: Plan) -> dict[str, int]:
    """Returns sizes of two along every axis but the stages, whose number is kept."""
    parts = [plan, *plan.stage_plans, *plan.pipelines]
    parts += [stage for pipeline in plan.pipelines for stage in pipeline.stage_plans]
    axes = {axis for part in parts for axis, size in part.axes if size > 1}
    return dict.fromkeys(axes - {"stage"}, 2)


def _kept_ranks(plan: Plan, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks of ``data`` that are kept: with fewer, those that differ most."""
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
    """Shares as unlike as before, of few micro-batches each."""
    if sum(shares) <= 2 * MOST_MICRO_BATCHES:
        return tuple(shares)
    least = min(shares)
    return tuple(1 if share == least else 2 for share in shares)


def _micro_batches(plan: Plan, multiple: int) -> int:
    count = plan.num_micro_batches
    if plan.stages is None:
        return min(count, multiple if count > MOST_MICRO_BATCHES else count)
    # A schedule repeats itself after as many micro-batches as there are stages.
    stages = len(plan.stage_plans) or plan.axis_sizes.get("stage", 1)
    return min(count, max(2 * stages, MOST_MICRO_BATCHES))


def _stage_layers(plan: Plan) -> tuple[int, ...]:
    if plan.stages is None or not plan.stages.layers or plan.stage_plans:
        return ()
    least = min(plan.stages.layers)
    # A part may have no layer at all, which stays so.
    return tuple(
        min(layers, 1 if layers == least else 2) for layers in plan.stages.layers
    )
