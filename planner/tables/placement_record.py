"""A placement as plain data for files, and the checked inverse."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.json_codec import DataError, decode, encode
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.placement import TablePlacement, TableShard
from whalejax.planner.tables.ranks import Ranks
from whalejax.planner.tables.storage_options import Item, Objective
from whalejax.planner.tables.table import Table


_MOST_BYTES = 1 << 30
"""Largest size of the rows of a table in a file, when they are decompressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """A table without the counts of its rows; see ``Table``."""

    name: str
    rows: int
    width: int
    element_bytes: int
    optimizer_bytes_per_row: int
    lookups_per_sample: float
    pooled: bool
    vectors: float | None
    splits_columns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """A placement; see ``TablePlacement``."""

    tables: tuple[TableRecord, ...]
    ranks: Ranks
    batch_size: int
    objective: Objective
    shards: tuple[TableShard, ...]
    loads: tuple[tuple[float, ...], ...]
    memory_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    exchange_bytes: tuple[float, ...]
    bound: float
    gap: float
    is_optimal: bool
    items: tuple[Item, ...]
    chosen: tuple[int, ...]
    mean: tuple[float, ...]
    hottest: tuple[tuple[str, str], ...] = field(
        default=(), metadata={"unless_default": True}
    )


_ARRAYS = ("loads", "memory_bytes", "host_bytes", "exchange_bytes", "mean")


def placement_data(placement: TablePlacement) -> dict[str, Any]:
    """Returns a placement as JSON data.

    Args:
        placement: Placement; the counts of its tables are dropped.
    """
    names = PlacementRecord.__slots__
    values = {name: getattr(placement, name) for name in names}
    values |= {name: np.asarray(values[name]).tolist() for name in _ARRAYS}
    hottest = placement.hottest.items()
    values["hottest"] = tuple((name, _rows_text(rows)) for name, rows in hottest)
    if not placement.hottest:
        values.pop("hottest")
    values["tables"] = tuple(
        TableRecord(**{name: getattr(t, name) for name in TableRecord.__slots__})
        for t in placement.tables
    )
    data: dict[str, Any] = {name: encode(value) for name, value in values.items()}
    return data


def placement_of(data: Any) -> TablePlacement:
    """Returns the placement that ``placement_data`` wrote.

    Args:
        data: JSON data.

    Raises:
        PlanError: The data are no placement, or its shards do not match its tables.
    """
    try:
        record: PlacementRecord = decode(PlacementRecord, data, "tables.placement")
        tables = tuple(
            Table(**{name: getattr(t, name) for name in TableRecord.__slots__})
            for t in record.tables
        )
    except (DataError, WhaleError) as error:
        raise PlanError(f"the tables of this plan cannot be read: {error}") from None
    problems = Problems("shards that no placement has", PlanError)
    for text in (*_wrong_lengths(record), *_wrong_shards(tables, record)):
        problems.add(text)
    problems.raise_if_any()
    values = {name: getattr(record, name) for name in PlacementRecord.__slots__}
    values |= {name: np.asarray(values[name], float) for name in _ARRAYS}
    values["hottest"] = {name: _rows_of(text) for name, text in record.hottest}
    return TablePlacement(**{**values, "tables": tables})


def _rows_text(rows: np.ndarray) -> str:
    """Returns sorted rows as text: compressed differences."""
    differences = np.diff(rows, prepend=0).astype("<i4")
    return base64.b64encode(zlib.compress(differences.tobytes())).decode()


def _rows_of(text: str) -> np.ndarray:
    """Returns the rows of ``_rows_text``; raises ``ValueError`` without rows."""
    try:
        inflating = zlib.decompressobj()
        data = inflating.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflating.eof:
        raise ValueError(f"its rows are cut off, or have over {_MOST_BYTES} bytes")
    return np.cumsum(np.frombuffer(data, "<i4"), dtype=np.int64)


def _wrong_hottest(record: PlacementRecord) -> Iterator[str]:
    """Yields cached rows that no table has on its device."""
    cached = {
        shard.table: shard.rows[1]
        for shard in record.shards
        if shard.split == "cached" and shard.index == 0
    }
    sizes = {table.name: table.rows for table in record.tables}
    for name, text in record.hottest:
        try:
            rows = _rows_of(text)
        except ValueError:
            rows = np.zeros(0, np.int64)
        inside = len(rows) and 0 <= rows[0] and rows[-1] < sizes.get(name, 0)
        if not inside or len(rows) != cached.get(name) or (np.diff(rows) <= 0).any():
            yield f"{len(rows):,} rows of {name!r} on a device"


def _wrong_lengths(record: PlacementRecord) -> Iterator[str]:
    """Yields arrays that have no number for each rank, or for each term of its load."""
    count, terms = record.ranks.count, len(record.mean)
    if not terms or record.batch_size < 1:
        yield f"{terms} means of the loads of {record.batch_size} samples"
    for name in ("loads", "memory_bytes", "host_bytes", "exchange_bytes"):
        if len(getattr(record, name)) != count:
            yield f"{name} of {len(getattr(record, name))} ranks, of {count}"
    for rank, loads in enumerate(record.loads):
        if len(loads) != terms:
            yield f"{len(loads)} loads on rank {rank}, and means of {terms}"


def _wrong_shards(tables: tuple[Table, ...], record: PlacementRecord) -> Iterator[str]:
    count = record.ranks.count
    sizes = {table.name: (table.rows, table.width) for table in tables}
    stored = dict.fromkeys(sizes, 0.0)
    for shard in record.shards:
        rows, width = sizes.get(shard.table, (0, 0))
        inside = 0 <= shard.rows[0] <= shard.rows[1] <= rows
        inside &= 0 <= shard.columns[0] < shard.columns[1] <= width
        if not inside or not 0 <= shard.rank < count:
            yield f"a shard of {shard.table!r} on rank {shard.rank}"
            continue
        if not 0 <= shard.index < shard.shards:
            yield f"shard {shard.index} of {shard.shards} of {shard.table!r}"
            continue
        copies = count if shard.split == "replicate" else 1
        columns = shard.columns[1] - shard.columns[0]
        stored[shard.table] += shard.num_rows * columns / copies
    for name, (rows, width) in sizes.items():
        if stored[name] != rows * width:
            yield f"{stored[name]:,.0f} of {rows * width:,} elements of {name!r}"
    yield from _wrong_hottest(record)
    numbers = {n for item in record.items for n in item.tables}
    ways = [len(item.ways) for item in record.items]
    if numbers != set(range(len(tables))) or len(record.chosen) != len(ways):
        yield "ways of other tables"
    elif any(not 0 <= way < n for way, n in zip(record.chosen, ways, strict=True)):
        yield "a choice of no way"
