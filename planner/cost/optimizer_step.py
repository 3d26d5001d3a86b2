"""Costs of storage: gathers of sharded parameters, and the optimizer's update.

These costs are per parameter, while other costs are per operation. Some of them occur
once in a step, not once per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster, CompilerProfile
from whalejax.planner.cost.collectives import (
    axis_parts,
    may_reduce_whole,
    runs_as,
    torus_reduces_whole,
)
from whalejax.planner.cost.operation_cost import CostSetting, whole_bytes
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup
from whalejax.planner.sharding.shard_counts import (
    LeafShardCounts,
    ShardCounts,
    added_axes,
    axis_sets,
)


def storage_gathers(
    facts: LeafFacts,
    cuts: Sequence[LeafShardCounts],
    mesh: Mapping[str, np.ndarray],
    compiler: CompilerProfile,
    cast_bytes: float,
) -> Iterator[tuple[np.ndarray, Collective]]:
    """Yields the gathers of parameters before their use and after their update.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        mesh: Array of sizes of each axis.
        compiler: Compiler that gathers parameters for the computation.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.

    Yields:
        Indices of cases, and a collective whose payload is an array over them. Gathers
        of phase ``"forward"`` run in every micro-batch, those of ``"update"`` once in a
        step.
    """
    pairs = [*zip(facts.groups, cuts, strict=True)]
    for (group, count), cut in pairs:
        moved = group.moved_bytes(compiler, cut.has_sharded_rows)
        moved = moved * cast_bytes * group.narrowed
        payload = np.floor(moved / cut.compute.num_shards / group.slices)
        times = group.gathers * group.slices * count
        yield from _gathers(cut.compute, cut.param, mesh, payload, times, "forward")
    for (group, count), cut in pairs:
        payload = np.floor(group.nbytes / cut.param.num_shards)
        yield from _gathers(cut.param, cut.optimizer, mesh, payload, count, "update")


def _gathers(
    before: ShardCounts,
    after: ShardCounts,
    mesh: Mapping[str, np.ndarray],
    payload: Any,
    count: int,
    phase: str,
) -> Iterator[tuple[np.ndarray, Collective]]:
    number = len(next(iter(mesh.values())))
    payload = np.broadcast_to(payload, number)
    for axes, rows in axis_sets(added_axes(before, after), number):
        if axes and count:
            yield (
                rows,
                Collective(
                    kind="all-gather",
                    axes=axes,
                    phase=phase,
                    what="parameter",
                    payload_bytes=payload[rows],
                    count=count,
                ),
            )


GATHER_TURNS, CUT_TURNS = 1, 2
"""Number of transposes that XLA's CPU compiler adds to gathers and to updates.

The compiler gathers along the first dimension and transposes the result in memory. The
first number is for arrays that are gathered along the last dimension. The second is for
arrays whose last dimension an update shards and gathers.

Measured times were compared with those along other dimensions, for seven shapes of 0.3
to 9 MB. The added time is in multiples of the calibrated time of the transpose:

- gathers: 0.6 to 0.8; two shapes with powers of two in each dimension: 1.7 and 4.3
- updates by SGD and Adam: 0.8 to 2.5

Parameters of a ResNet-50 (102 MB) took 270 ms along the third dimensions and 959 ms
along the last, where both were possible.
"""


def turning_seconds(
    facts: LeafFacts,
    cuts: Sequence[LeafShardCounts],
    cluster: Cluster,
    cast_bytes: float,
    num_micro_batches: Any,
) -> Any:
    """Returns the seconds of a step's transposes of gathered parameters, by case.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        cluster: Devices and their compiler.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.
        num_micro_batches: Number of micro-batches of the step.
    """
    if cluster.platform != "cpu":
        return 0.0
    seconds: Any = 0.0
    for (group, count), cut in zip(facts.groups, cuts, strict=True):
        moved = group.moved_bytes(cluster.compiler, cut.has_sharded_rows)
        moved = moved * cast_bytes * group.narrowed
        times = GATHER_TURNS * group.turns * count * num_micro_batches
        seconds = seconds + times * _turning(cut.compute, cut.param, moved, cluster)
        once = _turning(cut.param, cut.optimizer, float(group.nbytes), cluster)
        seconds = seconds + CUT_TURNS * count * once
    return seconds


def _turning(
    before: ShardCounts, after: ShardCounts, nbytes: Any, cluster: Cluster
) -> Any:
    """Returns the seconds of a transpose if storage shards the last dimension."""
    last = len(after.per_dim) - 1
    if last < 1:
        return 0.0
    turns = after.per_dim[last] > before.per_dim[last]
    return turns * cluster.slowest.turned_seconds(nbytes / before.num_shards)


def whole_shares(
    facts: LeafFacts,
    cuts: Sequence[LeafShardCounts],
    compiler: CompilerProfile,
    cast_bytes: float,
) -> tuple[Any, Any]:
    """Returns the fractions of gradients that are all-reduced instead of scattered.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        compiler: Compiler of the step.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.

    Returns:
        Two fractions of bytes by case. The first is the part of sharded gradients that
        is all-reduced because of tiles (see ``CompilerProfile.scatters_odd_tiles``).
        The second is the part of all gradients that is unsharded in storage.
    """
    sharded: Any = 0.0
    odd: Any = 0.0
    total: Any = 0.0
    kept: Any = 0.0
    for (group, count), cut in zip(facts.groups, cuts, strict=True):
        nbytes = group.gradient_bytes * count / cut.compute.num_shards
        scatters = cut.gradient.num_shards > cut.compute.num_shards
        sharded = sharded + nbytes * scatters
        odd = odd + nbytes * scatters * _odd(group, cut, compiler, cast_bytes)
        total = total + nbytes * group.uses
        kept = kept + nbytes * group.uses * np.logical_not(scatters)
    return odd / np.maximum(1.0, sharded), kept / np.maximum(1.0, total)


def _odd(
    group: LeafGroup,
    cuts: LeafShardCounts,
    compiler: CompilerProfile,
    cast_bytes: float,
) -> Any:
    if len(group.shape) < 2:
        return False
    before, after = cuts.compute.per_dim[-1], cuts.gradient.per_dim[-1]
    return has_odd_tiles(group, before, after, compiler, cast_bytes)


def has_odd_tiles(
    group: LeafGroup,
    before: Any,
    after: Any,
    compiler: CompilerProfile,
    cast_bytes: float,
) -> Any:
    """Returns whether scattering a 16-bit gradient leaves an odd number of tiles.

    Args:
        group: Parameters of at least two dimensions.
        before, after: Shards of the last dimension in computation, and after
            scattering; arrays have one number per case.
        compiler: Compiler of the step.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.
    """
    if compiler.scatters_odd_tiles or not group.nbytes:
        return False
    itemsize = group.nbytes * cast_bytes * group.narrowed / math.prod(group.shape)
    if itemsize != 2:
        return False
    length = group.shape[-1] // after
    tiles, over = length // compiler.lanes, length % compiler.lanes
    return (after > before) & (over == 0) & (tiles % 2 == 1)


def _at_once(axes: Sequence[str], compiler: CompilerProfile) -> bool:
    return len(axes) > 1 and not compiler.reduces_in_parts


def reduced_whole(
    group: LeafGroup,
    cuts: LeafShardCounts,
    table: Table,
    s: CostSetting,
    cast_bytes: float,
) -> Any:
    """Returns whether a sharded gradient is all-reduced and sliced, not scattered.

    Args:
        group: Group of the parameter.
        cuts: Shard counts of the gradient.
        table: Compute table of the first TaskGraph that reads the parameter.
        s: Meshes and cluster.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.
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


def _torus_reduces_whole(cuts: LeafShardCounts, s: CostSetting) -> Any:
    if not may_reduce_whole(s.cluster):
        return False
    added = added_axes(cuts.compute, cuts.gradient)
    if not s.has_unlike_meshes:
        axes = tuple(axis for axis, here in added.items() if here)
        parts = axis_parts(axes, s.mesh, s.cluster)
        return runs_as("reduce-scatter", parts, s.cluster) == "all-reduce"
    return torus_reduces_whole(added, s.mesh, s.cluster)


def reduced_gradients(
    axes: tuple[str, ...],
    payload: Any,
    mesh: Mapping[str, Any],
    compiler: CompilerProfile,
    *,
    over_data: bool,
    odd: Any = 0.0,
    kept: Any = 0.0,
) -> Iterator[Collective]:
    """Yields the compiler's reductions of all gradients over one set of axes.

    XLA combines the all-reduces at the end of a step into one. If it can
    reduce-scatter, the axes that shard stored gradients carry half the traffic, and the
    other axes reduce the shards. Some compilers reduce over all axes together.

    Args:
        axes: Mesh axes.
        payload: Bytes of the gradients on one device; arrays have one number per case.
        mesh: Sizes of the axes.
        compiler: Compiler of the step.
        over_data: Whether ``data`` also shards gradients.
        odd, kept: Results of ``whole_shares``.

    Yields:
        At least one collective, which may have zero bytes.
    """
    sharding = {"fsdp", "data"} if over_data else {"fsdp"}
    scattered = tuple(a for a in axes if a in sharding)
    if _at_once(axes, compiler) or not (compiler.reduce_scatter and scattered):
        yield _reduction("all-reduce", axes, payload)
        return
    left = tuple(a for a in axes if a not in sharding)
    unsharded = whole_bytes(payload * kept)
    payload = payload - unsharded
    whole = whole_bytes(payload * odd)
    yield _reduction("reduce-scatter", scattered, payload - whole)
    if left:
        parts = math.prod(mesh[a] for a in scattered)
        yield _reduction("all-reduce", scattered, whole)
        yield _reduction("all-reduce", left, payload // parts)
        whole = 0
    yield _reduction("all-reduce", axes, unsharded + whole)


def _reduction(
    kind: CollectiveKind, axes: tuple[str, ...], payload_bytes: Any
) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        phase="backward",
        what="gradient",
        payload_bytes=payload_bytes,
        count=1,
    )


def update_seconds(
    facts: LeafFacts, cuts: Sequence[LeafShardCounts], cluster: Cluster
) -> Any:
    """Returns the seconds of the optimizer's update, by case.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        cluster: Devices, of which the slowest counts.
    """
    moved: Any = 0.0
    operations: Any = 0.0
    for (group, count), cut in zip(facts.groups, cuts, strict=True):
        parts = cut.optimizer.num_shards
        moved = moved + count * group.updated_bytes / parts
        operations = operations + count * group.operations / parts
    return cluster.slowest.elementwise_seconds(moved, operations)
