"""What storage costs: gathering sharded parameters, and the optimizer's pass.

Separate from the rows of the model because it is about leaves, once for each of them,
and because part of it happens once a step and not once a micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster, CompilerProfile
from whalejax.planner.cost.collectives import axis_parts, runs_as, torus_reduces_whole
from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.entries import Collective, CollectiveKind
from whalejax.planner.sharding.layout import Spec, Table, shards
from whalejax.planner.sharding.leaf_shard_counts import (
    LeafShardCounts,
    layout_shard_counts,
)
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup, LeafLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCollectives:
    """Collectives that sharded storage causes.

    Attributes:
        in_micro_batch: repeated in every micro-batch.
        in_update: once in a step.
    """

    in_micro_batch: tuple[Collective, ...]
    in_update: tuple[Collective, ...]


def storage_collectives(
    facts: LeafFacts, layouts: Sequence[LeafLayout], s: Setting, cast_bytes: float
) -> StorageCollectives:
    """Gathers of parameters that storage shards beyond the computation.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        s: mesh and micro-batches.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
    """
    during: Counter[tuple[tuple[str, ...], int]] = Counter()
    update: Counter[tuple[tuple[str, ...], int]] = Counter()
    for (group, count), layout in zip(facts.groups, layouts, strict=True):
        axes = _added(layout.compute, layout.param)
        if axes:
            moved = group.moved_bytes(s.cluster.compiler, layout.has_sharded_rows)
            moved *= cast_bytes * group.narrowed
            payload = int(moved / shards(layout.compute, s.mesh) / group.slices)
            during[axes, payload] += group.gathers * group.slices * count
        axes = _added(layout.param, layout.optimizer)
        if axes:
            update[axes, int(group.nbytes / shards(layout.param, s.mesh))] += count
    return StorageCollectives(
        in_micro_batch=_gathers(during, "forward"),
        in_update=_gathers(update, "update"),
    )


GATHER_TURNS, CUT_TURNS = 1, 2
"""By how many turns XLA's CPU compiler is priced for an array whose last dimension is
gathered, and one that an update cuts into shards of its last dimension and gathers.

It gathers along the first dimension and turns the result round in memory. Beyond what
arrays of 0.3 to 9 MB took along other dimensions, gathers took 0.6 to 0.8 times what
turning them takes as calibration finds it (two shapes of seven, with a power of two in
each dimension, 1.7 and 4.3 times), and updates by SGD and Adam 0.8 to 2.5 times;
the 102 MB of a ResNet-50 took 270 ms along the third dimensions and 959 along the last
where there was a choice."""


def turning_seconds(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    s: Setting,
    cast_bytes: float,
    num_micro_batches: int,
) -> float:
    """Time of a step in which gathered parameters are turned round in memory.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        s: mesh and cluster.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
        num_micro_batches: of the step.
    """
    if s.cluster.platform != "cpu":
        return 0.0
    seconds = 0.0
    for (group, count), layout in zip(facts.groups, layouts, strict=True):
        moved = (
            group.moved_bytes(s.cluster.compiler, layout.has_sharded_rows)
            * cast_bytes
            * group.narrowed
        )
        times = GATHER_TURNS * group.turns * count * num_micro_batches
        seconds += times * _turning(layout.compute, layout.param, moved, s)
        once = _turning(layout.param, layout.optimizer, float(group.nbytes), s)
        seconds += CUT_TURNS * count * once
    return seconds


def _turning(before: Spec, after: Spec, nbytes: float, s: Setting) -> float:
    """To turn an array round once, if storage shards its last dimension."""
    last = len(after) - 1
    if last < 1 or not set(after[last]) & set(_added(before, after)):
        return 0.0
    payload = nbytes / shards(before, s.mesh)
    return float(s.cluster.slowest.turned_seconds(payload))


def whole_shares(
    facts: LeafFacts, layouts: Sequence[LeafLayout], s: Setting, cast_bytes: float
) -> tuple[float, float]:
    """Which parts of the gradients are reduced whole where others are scattered.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        s: mesh and cluster.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.

    Returns:
        Of those that storage shards, what the compiler reduces whole for their tiles
        (see ``CompilerProfile.scatters_odd_tiles``); of all, what storage leaves whole.
    """
    odd = _odd_share(facts, layouts, s, cast_bytes)
    return odd, _kept_share(facts, layouts, s)


def _odd_share(
    facts: LeafFacts, layouts: Sequence[LeafLayout], s: Setting, cast_bytes: float
) -> float:
    if s.cluster.compiler.scatters_odd_tiles:
        return 0.0
    sharded = odd = 0.0
    for (group, count), layout in zip(facts.groups, layouts, strict=True):
        if not _added(layout.compute, layout.gradient):
            continue
        nbytes = group.gradient_bytes * count / shards(layout.compute, s.mesh)
        sharded += nbytes
        (cuts,) = layout_shard_counts((layout,), s.mesh)
        odd += nbytes * bool(_odd(group, cuts, s.cluster.compiler, cast_bytes))
    return odd / max(1.0, sharded)


def _kept_share(facts: LeafFacts, layouts: Sequence[LeafLayout], s: Setting) -> float:
    total = kept = 0.0
    for (group, count), layout in zip(facts.groups, layouts, strict=True):
        nbytes = group.gradient_bytes * count / shards(layout.compute, s.mesh)
        nbytes *= group.uses
        total += nbytes
        if not _added(layout.compute, layout.gradient):
            kept += nbytes
    return kept / max(1.0, total)


def _odd(
    group: LeafGroup,
    cuts: LeafShardCounts,
    compiler: CompilerProfile,
    cast_bytes: float,
) -> Any:
    """Scattering a gradient leaves an odd number of tiles of the last dimension."""
    if compiler.scatters_odd_tiles or len(group.shape) < 2 or not group.nbytes:
        return False
    itemsize = group.nbytes * cast_bytes * group.narrowed / math.prod(group.shape)
    if itemsize != 2:
        return False
    last = cuts.gradient.per_dim[-1]
    length = group.shape[-1] // last
    tiles, over = length // compiler.lanes, length % compiler.lanes
    return (last > cuts.compute.per_dim[-1]) & (over == 0) & (tiles % 2 == 1)


def _at_once(axes: Sequence[str], compiler: CompilerProfile) -> bool:
    """Gradients are reduced whole over all of several axes, whichever shard them."""
    return len(axes) > 1 and not compiler.reduces_in_parts


def reduced_whole(
    group: LeafGroup, cuts: LeafShardCounts, table: Table, s: Setting, cast_bytes: float
) -> Any:
    """Whether a sharded gradient is reduced whole and cut, rather than scattered.

    Args:
        group: the parameter.
        cuts: how it is cut.
        table: compute table of the TaskGraph that reads it first.
        s: meshes and cluster.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
    """
    compiler = s.cluster.compiler
    if not compiler.reduce_scatter:
        return True
    whole = _odd(group, cuts, compiler, cast_bytes) | _torus_reduces_whole(cuts, s)
    if compiler.reduces_in_parts:
        return whole
    summed: Any = 0
    for axis, roles in table.items():
        if set(roles) & s.batch_roles:
            own = np.logical_not(cuts.compute.shards(axis))
            summed = summed + ((s.mesh[axis] > 1) & own)
    return whole | (summed > 1)


def _torus_reduces_whole(cuts: LeafShardCounts, s: Setting) -> Any:
    """Whether links make the reduction that scatters a gradient one of all of it."""
    if not any(level.torus for level in s.cluster.levels):
        return False
    after, before = cuts.gradient.axes, cuts.compute
    added = {
        axis: np.logical_and(here, np.logical_not(before.shards(axis)))
        for axis, here in after.items()
    }
    if not s.has_unlike_meshes:
        axes = tuple(axis for axis, here in added.items() if here)
        parts = axis_parts(axes, s.mesh, s.cluster)
        return runs_as("reduce-scatter", parts, s.cluster) == "all-reduce"
    return torus_reduces_whole(added, s.mesh, s.cluster)


def combined_gradients(
    gradients: Sequence[Collective],
    zero: int,
    mesh: Mapping[str, int],
    cluster: Cluster,
    odd: float = 0.0,
    kept: float = 0.0,
) -> tuple[Collective, ...]:
    """Gradient reductions as the compiler runs them: one for each set of axes.

    XLA combines the all-reduces of a step's end into one. Where it can reduce-scatter
    and gradients are stored in shards, the axes that shard them take half the traffic
    and the others reduce what is left; or, by the compiler, all axes reduce at once.

    Args:
        gradients: one reduction for each parameter and use, over the batch axes.
        zero: ZeRO level over ``data``.
        mesh: axis sizes.
        cluster: the machine.
        odd, kept: from ``whole_shares``.
    """
    totals: Counter[tuple[str, ...]] = Counter()
    for c in gradients:
        totals[c.axes] += c.payload_bytes * c.count
    sharding = {"fsdp", "data"} if zero >= 2 else {"fsdp"}
    found: list[Collective] = []
    for axes, payload in totals.items():
        scattered = tuple(a for a in axes if a in sharding)
        compiler = cluster.compiler
        if _at_once(axes, compiler) or not (compiler.reduce_scatter and scattered):
            found.append(_reduction("all-reduce", axes, payload))
            continue
        left = tuple(a for a in axes if a not in sharding)
        unsharded = int(payload * kept)
        payload -= unsharded
        whole = int(payload * odd)
        found.append(_reduction("reduce-scatter", scattered, payload - whole))
        if left:
            parts = math.prod(mesh[a] for a in scattered)
            found.append(_reduction("all-reduce", scattered, whole))
            found.append(_reduction("all-reduce", left, payload // parts))
            whole = 0
        found.append(_reduction("all-reduce", axes, unsharded + whole))
    return tuple(c for c in found if c.payload_bytes)


def _reduction(
    kind: CollectiveKind, axes: tuple[str, ...], payload_bytes: int
) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        phase="backward",
        what="gradient",
        payload_bytes=payload_bytes,
        count=1,
    )


def _added(before: Spec, after: Spec) -> tuple[str, ...]:
    old = {axis for axes in before for axis in axes}
    return tuple(axis for axes in after for axis in axes if axis not in old)


def _gathers(
    counted: Mapping[tuple[tuple[str, ...], int], int], phase: str
) -> tuple[Collective, ...]:
    return tuple(
        Collective(
            kind="all-gather",
            axes=axes,
            phase=phase,
            what="parameter",
            payload_bytes=payload_bytes,
            count=count,
        )
        for (axes, payload_bytes), count in counted.items()
    )


def update_seconds(
    facts: LeafFacts, layouts: Sequence[LeafLayout], cluster: Cluster, s: Setting
) -> float:
    """Time of the optimizer."""
    moved = operations = 0.0
    for (group, count), layout in zip(facts.groups, layouts, strict=True):
        parts = shards(layout.optimizer, s.mesh)
        moved += count * group.updated_bytes / parts
        operations += count * group.operations / parts
    return float(cluster.slowest.elementwise_seconds(moved, operations))
