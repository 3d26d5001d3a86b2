"""Bytes of lookup tables in the memory of compilers with lanes.

Rows are read and updated where they are contiguous. So the columns of gathered tables
and of their gradients are padded to full lanes, however few they are. Lookups and
updates of different tables are independent, so compilers hold all tables at once.
Stored tables have their rows in lanes and need no padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup
from whalejax.planner.sharding.shard_counts import LeafShardCounts, ShardCounts


_SUBLANES = 8
"""Size of a tile in the dimension that is not in lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Bytes of lookup tables on one device, by case.

    Attributes:
        groups: Whether each group of parameters has tables whose gradients stay in
            their compute sharding.
        gathered: Bytes of all tables that are gathered for lookups, with columns padded
            to lanes, and also as gathered if these forms differ.
        largest: Bytes of the largest gradient that storage shards, before sharding.
        gradients: Bytes of all gradients that storage does not shard.
        updated: Bytes of tables and their state during the update, if the update has
            the form of the gradients.
    """

    groups: np.ndarray
    gathered: np.ndarray
    largest: np.ndarray
    gradients: np.ndarray
    updated: np.ndarray


def tables_of(
    facts: LeafFacts,
    cuts: Sequence[LeafShardCounts],
    counts: np.ndarray,
    gathered: np.ndarray,
    whole: np.ndarray,
    s: CostSetting,
) -> Tables | None:
    """Returns the bytes of lookup tables; None if the program has none.

    Args:
        facts: Parameters of the model.
        cuts: Shard counts of each group of parameters.
        counts: Number of parameters on a device, by group and case.
        gathered: Bytes of one gathered parameter of each group; 0 if none is gathered.
        whole: Bytes of one gradient of each group before it is sharded.
        s: Meshes and compiler.
    """
    lanes, number = s.cluster.compiler.lanes, gathered.shape[1]
    looked_up = np.array([g.looked_up and g.trained for g, _ in facts.groups], bool)
    if lanes == 1 or not looked_up.any():
        return None
    groups = np.zeros(gathered.shape, bool)
    counts = np.broadcast_to(counts, gathered.shape)
    taken, largest, gradients, updated, largest_update = (
        np.zeros(number) for _ in range(5)
    )
    alone = counts[looked_up].sum(axis=0) == 1.0
    for place in np.flatnonzero(looked_up).tolist():
        (group, _), cut, count = facts.groups[place], cuts[place], counts[place]
        sizes = _local_sizes(group.shape, cut.compute)
        padding = _padding(sizes, lanes)
        taken += count * gathered[place] * (padding + (padding > 1.0))
        unsharded = cut.compute.num_shards == cut.param.num_shards
        gradient = whole[place] * _forms(sizes, lanes, copied=np.logical_not(unsharded))
        groups[place] = unsharded
        gradients += np.where(unsharded, count * gradient, 0.0)
        here = np.where(np.logical_not(unsharded) & (count > 0), gradient, 0.0)
        largest = np.maximum(largest, here)
        there, passing = _updated(group, sizes, whole[place], lanes)
        whole_update = cut.optimizer.num_shards == cut.compute.num_shards
        applies = unsharded & whole_update & (count > 0)
        if len(sizes) == 2:
            # Rows are summed in place, without another form.
            applies = applies & ~(alone & (sizes[0] % lanes == 0))
        updated += np.where(applies, count * there, 0.0)
        largest_update = np.maximum(largest_update, np.where(applies, passing, 0.0))
    return Tables(
        groups=groups,
        gathered=taken,
        largest=largest,
        gradients=gradients,
        updated=updated + largest_update,
    )


def _updated(
    group: LeafGroup, sizes: Sequence[Any], gradient: Any, lanes: int
) -> tuple[Any, Any]:
    """Returns a table's temporaries until all tables are updated, and in its update.

    The update has the form of the summed rows, and is copied back to the stored table
    and state. Separate tables are updated one by one, and all results are live until
    the copy. Stacked tables and their state reuse the gradient's memory if the gradient
    is not narrower.
    """
    part = math.prod(sizes) / math.prod(group.shape)
    table, state = group.nbytes * part, group.optimizer_bytes * part
    if len(sizes) == 2:
        padding = _padding(sizes, lanes)
        grows = padding > 1.0
        there = np.where(grows, padding * table, 0.0)
        return there, np.where(grows, padding * (state + gradient), 0.0)
    wide = np.where(gradient < table, group.gradient_bytes * part, 0.0)
    there = _tiled(sizes[0]) * (table + state + wide)
    return np.where(sizes[-2] % lanes != 0, there, 0.0), 0.0


def _local_sizes(shape: Sequence[int], cut: ShardCounts) -> list[Any]:
    return [-(-size // parts) for size, parts in zip(shape, cut.per_dim, strict=True)]


def _padding(sizes: Sequence[Any], lanes: int) -> Any:
    return -(-sizes[-1] // lanes) * lanes / np.maximum(1, sizes[-1])


def _forms(sizes: Sequence[Any], lanes: int, *, copied: Any) -> Any:
    """Returns the size of a gradient's forms, divided by the gradient's size.

    Stacked tables have one more form, as they are one long table while rows are summed.
    If the columns fill the lanes, both forms are the same array, unless storage shards
    the gradient.
    """
    padding = _padding(sizes, lanes)
    if len(sizes) == 2:
        return padding
    stacked = _tiled(sizes[0]) + np.where(sizes[-2] % lanes != 0, padding, 1.0)
    return np.where((padding == 1.0) & np.logical_not(copied), padding, stacked)


def _tiled(tables: Any) -> Any:
    tiles = -(-tables // _SUBLANES) * _SUBLANES / tables
    return np.where(tables <= _SUBLANES, 1.0, tiles)
