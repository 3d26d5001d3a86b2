"""The ways to store a table, and the cost of each for the ranks that store it.

Let a global batch have N samples, with R ranks, q bytes per element, L lookups per
sample and E columns.

- The owner of an undivided table reads N·L·E·q bytes. It exchanges N·L ids and, in each
  pass, N·E·q bytes, times L if lookups are not pooled (Naumov et al.,
  arXiv:1906.00091). It reads and writes the rows that occur, with their optimizer
  state.
- Each of c column shards has E/c columns and all ids.
- Each of c row shards has 1/c of the lookups, and sends a partial sum of full size.
- A replicated table exchanges nothing, and all-reduces a gradient of its own size.
- If rows are divided within a node, sums are made there, and 1/ranks of a node goes to
  other nodes.
- Rows of a table in host memory pass over the host's link. A cached table has some rows
  on the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from whalejax.planner.tables.table import ID_BYTES, LEAST_COLUMNS, Ranks, Table


Split = Literal["whole", "rows", "columns", "node_rows", "replicate", "host", "cached"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)

Objective = Literal["time", "rows", "lookups", "both"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

_CACHED_PARTS: Final = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
_BOTH_MEMORIES: Final[tuple[Split, ...]] = ("whole", "host")
_SPARE: Final = 0.1
_WORTH: Final = 0.8
_ROW_SHARDS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256)


PIN_WORDS: Final = (
    f"one of {', '.join(SPLITS)}, or cached:0.25 with the fraction of its rows on the "
    "device"
)
"""Text on the expected values of a pin that names a way."""


def read_pin(pin: Any) -> tuple[Split, float | None] | None:
    """Returns the split of a pin, and the cached fraction of the rows if the pin has
    it.

    Args:
        pin: Value of ``pins``; the result is None if it is not a way.

    >>> read_pin("cached:0.25"), read_pin("rows"), read_pin("cached:2")
    (('cached', 0.25), ('rows', None), None)
    """
    name, colon, text = pin.partition(":") if isinstance(pin, str) else ("", "", "")
    if name not in SPLITS:
        return None
    if not colon:
        return name, None
    try:
        part = float(text)
    except ValueError:
        return None
    return ("cached", part) if name == "cached" and 0 < part < 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOption:
    """One way to store an item: tables that stay together, usually one table.

    Attributes:
        split: Split of the tables.
        shards: Number of shards. A rank can store several. All ranks store a replica.
        slots: Number of shards that the exchange counts for one shard; 0 if replicated.
        loads: Load of one shard in each measure of the objective.
        exchange_bytes: Bytes that a rank sends in all-to-alls for one shard.
        memory_bytes, host_bytes: Bytes of one shard on a rank, and on its host.
        cached_rows: Number of rows on the device, if the others are in host memory.
        distinct_rows: Largest number of distinct rows of one shard that a rank
            requests, if this moves fewer bytes than vectors by sample. 0 if vectors are
            exchanged.
        sample_bytes: Bytes that a rank would send in all-to-alls for vectors by sample.
        of_tables: Way of each table if several stay together, else empty.
    """

    split: Split
    shards: int
    slots: int
    loads: tuple[float, ...]
    exchange_bytes: float
    memory_bytes: float
    host_bytes: float = 0.0
    cached_rows: int = 0
    distinct_rows: int = 0
    sample_bytes: float = 0.0
    of_tables: tuple[StorageOption, ...] = field(
        default=(), metadata={"unless_default": True}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Tables that are placed together, with the possible ways to store them.

    Attributes:
        tables: Indices of the tables.
        ways: Possible ways, at least one.
        rank: Rank that the user fixed, or None.
    """

    tables: tuple[int, ...]
    ways: tuple[StorageOption, ...]
    rank: int | None = None


def rank_groups(
    way: StorageOption, ranks: Ranks, fixed: int | None
) -> Sequence[Sequence[int]]:
    """Returns the groups of ranks that a way may use: single ranks, nodes, or all
    ranks.

    Args:
        way: Way to store the tables.
        ranks: All ranks.
        fixed: Rank that the user fixed, or None.
    """
    if way.split == "replicate":
        return [range(ranks.count)]
    if way.split == "node_rows":
        size = ranks.per_node
        return [range(i, i + size) for i in range(0, ranks.count, size)]
    return [[rank] for rank in (range(ranks.count) if fixed is None else [fixed])]


def times_chosen(way: StorageOption) -> int:
    """Returns the number of ``rank_groups`` that a way uses."""
    return 1 if way.split in ("replicate", "node_rows") else way.shards


def list_ways(
    table: Table,
    ranks: Ranks,
    *,
    batch_size: int,
    objective: Objective,
    splits: Collection[str],
    cached_part: float | None = None,
) -> Iterator[StorageOption]:
    """Yields the ways to store one table, by split in the order of ``SPLITS``.

    Args:
        table: The table.
        ranks: Devices that may store it.
        batch_size: Number of samples of a global batch.
        objective: Objective to minimise; see ``place_tables``.
        splits: Allowed splits.
        cached_part: Fraction of a cached table's rows on the device; default: any.
    """
    parts = _CACHED_PARTS if cached_part is None else (cached_part,)
    for split in SPLITS:
        if split not in splits:
            continue
        if split == "cached":
            yield from _cached_ways(table, ranks, batch_size, objective, parts)
            continue
        for shards in _shard_numbers(split, table, ranks, batch_size):
            way = _storage_option(
                split, shards, table, ranks, batch_size, objective, True
            )
            is_by_rows = split in ("rows", "whole") and "columns" in splits
            if way.distinct_rows and is_by_rows and table.splits_columns:
                # Column shards move as much as the undivided table would by sample.
                apart = _storage_option(
                    "whole", 1, table, ranks, batch_size, objective, False
                )
                if way.shards * way.exchange_bytes > _WORTH * apart.exchange_bytes:
                    way = _storage_option(
                        split, shards, table, ranks, batch_size, objective, False
                    )
            yield way


def _shard_numbers(
    split: Split, table: Table, ranks: Ranks, batch_size: int
) -> Sequence[int]:
    if split == "columns":
        most = table.width // LEAST_COLUMNS if table.splits_columns else 0
        fine = range(2, min(most, max(2, 2 * ranks.count)) + 1)
        return [c for c in fine if table.width % c == 0]
    if split == "rows":
        most = min(table.rows, max(2, 2 * ranks.count))
        numbers = {*_ROW_SHARDS, ranks.count, 2 * ranks.count}
        return sorted(c for c in numbers if 1 < c <= most)
    if split == "node_rows":
        several = 1 < ranks.per_node < ranks.count and table.rows >= ranks.per_node
        return [ranks.per_node] if several else []
    if split == "replicate":
        cheap = table.rows * ranks.count < batch_size
        return [ranks.count] if ranks.count > 1 and cheap else []
    return [1] if split == "whole" or ranks.host_bytes > 0 else []


def _cached_ways(
    table: Table,
    ranks: Ranks,
    batch_size: int,
    objective: Objective,
    parts: Sequence[float],
) -> Iterator[StorageOption]:
    """Yields ways with the table in host memory and its hottest rows on the device."""
    if not ranks.host_bytes:
        return
    for part in parts:
        count = max(1, round(table.rows * part))
        if count < table.rows:
            share = table.share_of(table.hottest_rows(count), count)
            yield cached_option(table, ranks, batch_size, objective, count, share)


def cached_option(
    table: Table,
    ranks: Ranks,
    batch_size: int,
    objective: Objective,
    count: int,
    share: float,
) -> StorageOption:
    """Returns the way with some rows on the device and the others in host memory.

    Args:
        table, ranks, batch_size, objective: Arguments of ``list_ways``, unchanged.
        count: Number of rows on the device.
        share: Fraction of the lookups that read these rows.
    """
    ways = {
        split: _storage_option(split, 1, table, ranks, batch_size, objective, False)
        for split in _BOTH_MEMORIES
    }
    loads = zip(ways["whole"].loads, ways["host"].loads, strict=True)
    extra = ways["whole"].exchange_bytes * ranks.exchange_seconds
    exact = extra if objective == "time" else 0.0
    return StorageOption(
        split="cached",
        shards=1,
        slots=1,
        loads=tuple(share * here + (1 - share) * far + exact for here, far in loads),
        exchange_bytes=2 * ways["whole"].exchange_bytes,
        memory_bytes=table.nbytes * count / table.rows,
        host_bytes=table.nbytes * (table.rows - count) / table.rows,
        cached_rows=count,
    )


def _storage_option(
    split: Split,
    shards: int,
    table: Table,
    ranks: Ranks,
    batch_size: int,
    objective: Objective,
    asks: bool,
) -> StorageOption:
    parts = 1 if split == "replicate" else shards
    row_parts = parts if split in ("rows", "node_rows") else 1
    memory = table.nbytes / parts
    lookups = table.lookups_per_sample * table.width / parts
    exchange = _exchange(
        *(split, parts, row_parts, table, ranks, batch_size),
        asks=asks and objective == "time",
    )
    exchanged = exchange.nbytes
    seconds = _seconds(split, parts, table, ranks, batch_size, exchange)
    measures: dict[str, tuple[float, ...]] = {
        "time": (seconds,),
        "rows": (table.rows * table.width / parts,),
        "lookups": (lookups / (ranks.count if split == "replicate" else 1),),
    }
    measures["both"] = (*measures["rows"], *measures["lookups"])
    hosted = split == "host"
    return StorageOption(
        split=split,
        shards=shards,
        slots=0 if split == "replicate" else 1,
        loads=measures[objective],
        exchange_bytes=exchanged,
        memory_bytes=0.0 if hosted else memory,
        host_bytes=memory if hosted else 0.0,
        distinct_rows=exchange.distinct_rows,
        sample_bytes=exchange.sample_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Bytes that a rank sends in all-to-alls for one shard, and how rows are sent."""

    nbytes: float
    sample_bytes: float
    distinct_rows: int = 0


def _exchange(
    split: Split,
    parts: int,
    row_parts: int,
    table: Table,
    ranks: Ranks,
    batch_size: int,
    *,
    asks: bool,
) -> _Exchange:
    """Chooses vectors by sample, or distinct rows if they move at least a fifth less.

    Buffers of requested rows exceed the expected number by a tenth or by four standard
    deviations. A shard with fewer rows than its buffer is sent in full, without ids, if
    that moves fewer bytes.
    """
    if split == "replicate" or ranks.count == 1:
        return _Exchange(0.0, 0.0)
    element = table.width * table.element_bytes
    lookups = batch_size * table.lookups_per_sample
    vectors = batch_size * table.vectors_per_sample * element * row_parts / parts
    ids = lookups * ID_BYTES
    if split == "node_rows":
        crossing = ids + 2 * vectors / ranks.per_node
        return _Exchange(crossing, crossing)
    by_sample = ids + 2 * vectors
    if split == "host":
        return _Exchange(by_sample, by_sample)
    own = lookups / ranks.count
    rows = math.ceil(table.rows / row_parts)
    wide = element * row_parts / parts
    whole = ranks.count * rows * (2 * wide + table.element_bytes)
    if not asks:
        return _Exchange(by_sample, by_sample)
    best = min(by_sample, whole)
    expected = table.distinct_rows(own) / row_parts
    room = math.ceil(expected + max(_SPARE * expected, 4 * math.sqrt(expected)))
    room = min(room, rows, math.ceil(own))
    asked = ranks.count * room * (ID_BYTES + 2 * wide)
    if asked < _WORTH * best:
        return _Exchange(asked, by_sample, room)
    return _Exchange(best, by_sample)


def _seconds(
    split: Split,
    parts: int,
    table: Table,
    ranks: Ranks,
    batch_size: int,
    exchange: _Exchange,
) -> float:
    element = table.width * table.element_bytes
    lookups = batch_size * table.lookups_per_sample
    distinct = table.distinct_rows(lookups)
    state = element + table.optimizer_bytes_per_row
    moved = lookups * element / parts + 2 * distinct * state / parts
    if split == "replicate":
        local = lookups * element / ranks.count + 2 * distinct * state
        gradient = table.rows * element
        return local * ranks.read_seconds + gradient * ranks.reduce_seconds
    if split == "node_rows":
        vectors = batch_size * table.vectors_per_sample * element
        seconds = 2 * vectors * ranks.node_reduce_seconds
        return (
            seconds + exchange.nbytes * ranks.cross_seconds + moved * ranks.read_seconds
        )
    speed = ranks.host_seconds if split == "host" else ranks.read_seconds
    return moved * speed + exchange.nbytes * ranks.exchange_seconds
