"""Computes the gain of placing tables anew, by counts of how often rows are read.

Popularity moves: ranges of rows that were read equally often are not any more, and
tables whose bags fill up are read more. The present placement and the best one are both
priced by the counts, so that what is won is known before anything moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.meshes.units import milliseconds
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.placement import TablePlacement, TableShard
from whalejax.planner.tables.storage_options import Split, StorageOption, list_ways
from whalejax.planner.tables.table import Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replacement:
    """A placement for what was counted, beside the present one.

    Attributes:
        placement: The new one.
        planned_seconds: Load of the most loaded rank, as was planned.
        present_seconds: The same of the present placement, by the counts.
        new_seconds: The same of the new placement, by the counts.
    """

    placement: TablePlacement
    planned_seconds: float
    present_seconds: float
    new_seconds: float

    @property
    def gain(self) -> float:
        """Part of the most loaded rank's time that the new placement saves."""
        return max(0.0, 1.0 - self.new_seconds / max(self.present_seconds, 1e-300))

    def __str__(self) -> str:
        return (
            f"the most loaded rank takes {milliseconds(self.present_seconds)} by what "
            f"was counted ({milliseconds(self.planned_seconds)} planned); placing "
            f"tables anew makes it {milliseconds(self.new_seconds)}, {self.gain:.0%} "
            "less"
        )


def place_again(
    placement: TablePlacement, counts: Mapping[str, np.ndarray], samples: int
) -> Replacement:
    """The best placement for what was counted, and what it wins.

    What was fixed stays so: the ways of dividing tables, those that stay together, and
    ranks.

    Args:
        placement: The present one, of the objective ``"time"``.
        counts: Number of reads of each row, by the name of its table.
        samples: Number of samples that were counted.
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
    """The pin that gave these ways of one table."""
    if ways[0].cached_rows and len(ways) == 1:
        return f"cached:{ways[0].cached_rows / table.rows!r}"
    return ways[0].split


def counted_loads(placement: TablePlacement, tables: tuple[Table, ...]) -> np.ndarray:
    """Seconds of a step on each rank, by how often its rows were read.

    Args:
        placement: Placement of the tables.
        tables: The tables, with counts.
    """
    loads = np.zeros(placement.ranks.count)
    for table in tables:
        shards = placement.shards_of(table.name)
        cached = shards[0].rows[1] if shards[0].split == "cached" else 0
        ways = list_ways(
            table,
            placement.ranks,
            batch_size=placement.batch_size,
            objective="time",
            splits=(shards[0].split,),
            cached_part=cached / table.rows if cached else None,
        )
        even = next(
            w.loads[0]
            for w in ways
            if w.cached_rows == cached and (cached or w.shards == shards[0].shards)
        )
        for shard in shards[:1] if cached else shards:
            loads[shard.rank] += even * _busyness(shard, table)
    return loads


def _busyness(shard: TableShard, table: Table) -> float:
    """Reads of a shard's rows over an even share of those of all shards."""
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
