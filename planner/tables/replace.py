"""Computes the gain of another placement, from counts of the reads of rows.

Popularity changes: rows that were read equally often no longer are, and tables with
more lookups per sample are read more. The counts evaluate both the present placement
and the best one, so the gain is known before any table moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.meshes.units import milliseconds
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.placement import TablePlacement, TableShard
from whalejax.planner.tables.storage_options import (
    Split,
    StorageOption,
    cached_option,
    list_ways,
)
from whalejax.planner.tables.table import Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replacement:
    """Best placement for the counted reads, compared with the present placement.

    Attributes:
        placement: Best placement for the counted reads.
        planned_seconds: Load of the most loaded rank when the present placement was
            made.
        present_seconds: Load of the most loaded rank of the present placement, by the
            counts.
        new_seconds: Load of the most loaded rank of ``placement``, by the counts.
    """

    placement: TablePlacement
    planned_seconds: float
    present_seconds: float
    new_seconds: float

    @property
    def gain(self) -> float:
        """Fraction of the most loaded rank's time that the best placement saves."""
        return max(0.0, 1.0 - self.new_seconds / max(self.present_seconds, 1e-300))

    def __str__(self) -> str:
        return (
            f"the most loaded rank takes {milliseconds(self.present_seconds)} by the "
            f"counts ({milliseconds(self.planned_seconds)} planned); placing tables "
            f"again makes it {milliseconds(self.new_seconds)}, {self.gain:.0%} less"
        )


def place_again(
    placement: TablePlacement, counts: Mapping[str, np.ndarray], samples: int
) -> Replacement:
    """Returns the best placement for the counted reads, and its gain.

    Ways to store tables, tables that stay together, and ranks are kept where the user
    fixed them.

    Args:
        placement: Present placement, with the objective ``"time"``.
        counts: Number of reads of each row, by name of the table.
        samples: Number of counted samples.
    """
    tables = tuple(
        dataclasses.replace(
            table,
            counts=counts[table.name],
            lookups_per_sample=float(np.sum(counts[table.name])) / samples,
        )
        for table in placement.tables
    )
    splits: set[Split] = {way.split for item in placement.items for way in item.ways}
    names = [table.name for table in tables]
    pins: dict[str, int | str] = {}
    for item in placement.items:
        kinds = {way.split for way in item.ways}
        if item.rank is not None:
            pins[names[item.tables[0]]] = item.rank
        elif len(kinds) == 1 and len(item.tables) == 1:
            pins[names[item.tables[0]]] = _pin(item.ways, tables[item.tables[0]])
    found = place_tables(
        tables,
        placement.ranks,
        batch_size=placement.batch_size,
        splits=sorted(splits),
        together=[
            [names[n] for n in item.tables]
            for item in placement.items
            if len(item.tables) > 1
        ],
        pins=pins,
    )
    return Replacement(
        placement=found,
        planned_seconds=float(placement.loads.max()),
        present_seconds=float(counted_loads(placement, tables).max()),
        new_seconds=float(counted_loads(found, tables).max()),
    )


def _pin(ways: Sequence[StorageOption], table: Table) -> str:
    if ways[0].cached_rows and len(ways) == 1:
        return f"cached:{ways[0].cached_rows / table.rows!r}"
    return ways[0].split


def counted_loads(placement: TablePlacement, tables: tuple[Table, ...]) -> np.ndarray:
    """Returns the seconds of a step on each rank, by the counted reads of its rows.

    Args:
        placement: Placement of the tables.
        tables: Tables with counts.
    """
    loads = np.zeros(placement.ranks.count)
    for table in tables:
        shards = placement.shards_of(table.name)
        if shards[0].split == "cached":
            loads[shards[0].rank] += _cached_seconds(placement, table, shards[0])
            continue
        ways = list_ways(
            table,
            placement.ranks,
            batch_size=placement.batch_size,
            objective="time",
            splits=(shards[0].split,),
        )
        even = next(w.loads[0] for w in ways if w.shards == shards[0].shards)
        for shard in shards:
            loads[shard.rank] += even * _busyness(shard, table)
    return loads


def _cached_seconds(
    placement: TablePlacement, table: Table, shard: TableShard
) -> float:
    """Returns the seconds of a table whose present cached rows are read as counted."""
    count = shard.rows[1]
    share = table.share_of(placement.hottest.get(table.name), count)
    way = cached_option(
        *(table, placement.ranks, placement.batch_size, "time", count, share)
    )
    return way.loads[0]


def _busyness(shard: TableShard, table: Table) -> float:
    counts = table.counts
    if shard.split not in ("rows", "node_rows") or counts is None:
        return 1.0
    counts = np.asarray(counts, float)
    first, last = shard.rows
    own = counts[first:last]
    if shard.hashed:
        own = own[shard.index :: shard.shards]
    total = float(counts.sum())
    return float(own.sum()) * shard.shards / total if total else 1.0
