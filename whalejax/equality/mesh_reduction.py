"""Fewer devices, micro-batches and layers for a plan, with all its axes.

Every axis above 1 stays above 1. Ranks with unequal shares and stages with unequal
numbers of layers stay unequal; only the numbers are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.equality.check_errors import CheckError
from whalejax.planner.plan.plan import Plan


OWN_DEVICES: Final = 8
"""Number of devices up to which a plan keeps its own axis sizes."""

MOST_DEVICES: Final = 32
"""Virtual devices of one process; with more, compilation takes over a minute."""

MOST_MICRO_BATCHES: Final = 4
"""Above this number, micro-batches only repeat others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReduction:
    """The reduced counts of a plan.

    Attributes:
        sizes: Size of each mesh axis that changes.
        num_devices: Total number of devices.
        num_micro_batches: Number of micro-batches in a step.
        shares: Micro-batches of each rank of ``data``; empty if ranks are equal.
        ranks: Ranks of ``data`` that are kept, if each has its own plan or share.
        stage_layers: Layers of each part of a lockstep pipeline.
    """

    sizes: Mapping[str, int]
    num_devices: int
    num_micro_batches: int
    shares: tuple[int, ...]
    ranks: tuple[int, ...]
    stage_layers: tuple[int, ...]

    def axes(self, axes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """Returns the reduced axes of a plan, or of one of its stages."""
        return tuple((axis, self.sizes.get(axis, size)) for axis, size in axes)


def reduced_mesh(plan: Plan, multiple: int) -> MeshReduction:
    """Returns reduced counts of devices, micro-batches and layers.

    Args:
        plan: A runnable plan.
        multiple: Elements per device along a dimension: 2, or 3 for odd extents.

    Raises:
        CheckError: There are too many devices even with two along every axis.
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
    parts = [plan, *plan.stage_plans, *plan.pipelines]
    parts += [stage for pipeline in plan.pipelines for stage in pipeline.stage_plans]
    axes = {axis for part in parts for axis, size in part.axes if size > 1}
    return dict.fromkeys(axes - {"stage"}, 2)


def _kept_ranks(plan: Plan, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ranks of ``data`` that are kept: those that differ most."""
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
    """Returns shares that differ as before, with few micro-batches each."""
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
    # A part without layers stays without.
    return tuple(
        min(layers, 1 if layers == least else 2) for layers in plan.stages.layers
    )
