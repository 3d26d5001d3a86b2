"""Tables that are looked up, as a compiler writes them where memory has lanes.

A row is taken and added to where it lies in memory as one, so that the columns of what
is gathered and of the gradient fill whole lanes, however few there are. Lookups wait
for nothing, nor does what follows their gradients: compilers have all tables there at
once. Tables as they are stored lie with their rows in lanes, and grow by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.sharding.leaf_shard_counts import LeafShardCounts
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafGroup
from whalejax.planner.sharding.shard_counts import ShardCounts


_SUBLANES = 8
"""The other side of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Bytes on one device of the tables that are looked up, by case.

    Attributes:
        groups: For each group of parameters, whether it holds such tables that stand
            unsharded after their gradients are made.
        gathered: Bytes of all tables that are gathered for their lookups, as they are
            and with their columns in lanes.
        largest: Bytes of the largest gradient of those that storage shards, as it is
            made.
        gradients: Bytes of all gradients of the others.
        updated: Bytes of the tables and their state during the update, where that has
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
    """Finds the tables; None where there are none.

    Args:
        facts: The parameters.
        cuts: Shard counts of each of their groups.
        counts: For each group and case, how many lie on a device.
        gathered: For each group, of one that is put together; 0 where none is.
        whole: For each group, of one gradient as it is made.
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
            # Rows are added up where they lie: no other form is needed.
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
    """Returns the temporaries of an update beside a table and its stored state.

    It is made in the form in which rows were added up, and copied back. Tables that lie
    apart are updated one by one, and all wait to be copied; what stacked tables and
    their state become takes the place of the gradient, if that is no narrower.

    Args:
        group: Group of equal parameters.
        sizes: Sizes of one of them on a device.
        gradient: Bytes of its gradient there.
        lanes: Lanes of the compiler.

    Returns:
        Bytes for each table, and bytes for one at a time.
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
    """Each dimension on one device."""
    return [-(-size // parts) for size, parts in zip(shape, cut.per_dim, strict=True)]


def _padding(sizes: Sequence[Any], lanes: int) -> Any:
    """Returns the factor by which a table grows with its columns in lanes."""
    return -(-sizes[-1] // lanes) * lanes / np.maximum(1, sizes[-1])


def _forms(sizes: Sequence[Any], lanes: int, *, copied: Any) -> Any:
    """Returns the number of copies of a gradient: its sum, and of stacked tables one
    more.

    These are one long table when rows are added to it. Where the rows of each fill
    whole tiles, that is what the array is with rows in lanes; it is copied back all the
    same, with the tables in the other side of a tile, where storage cuts it or the
    table that it is added to lies otherwise.
    """
    padding = _padding(sizes, lanes)
    if len(sizes) == 2:
        return padding
    stacked = _tiled(sizes[0]) + np.where(sizes[-2] % lanes != 0, padding, 1.0)
    return np.where((padding == 1.0) & np.logical_not(copied), padding, stacked)


def _tiled(tables: Any) -> Any:
    """Returns the factor by which stacked tables grow in the other dimension
    of a tile.
    """
    tiles = -(-tables // _SUBLANES) * _SUBLANES / tables
    return np.where(tables <= _SUBLANES, 1.0, tiles)
