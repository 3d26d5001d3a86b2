"""A placement of tables: the contents and load of each rank, with reasons."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.json_codec import DataError, decode, encode
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.storage_options import (
    Item,
    Objective,
    Split,
    StorageOption,
)
from whalejax.planner.tables.table import Ranks, Table, range_edges


_BAR: Final = 24
_MOST_LINES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """Part of a table on one rank.

    Attributes:
        table: Name of the table.
        rank: Rank that stores the shard.
        split: Split of the table.
        index, shards: Index of the shard, and number of shards of the table.
        hashed: Whether a row shard has the rows ``index``, ``index + shards``, …
            instead of one range.
        rows: First row, and the row after the last one; all rows if hashed. In the
            numbers of a cached table, the rows on the device come first.
        columns: First column, and the column after the last one.
    """

    table: str
    rank: int
    split: Split
    index: int
    shards: int
    hashed: bool
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """Number of stored rows."""
        first, last = self.rows
        return (
            len(range(first + self.index, last, self.shards))
            if self.hashed
            else (last - first)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablePlacement:
    """Placement of tables on ranks; ``print`` shows the load of each rank.

    Attributes:
        tables: Tables in the given order.
        ranks: Devices.
        batch_size: Number of samples of a global batch.
        objective: Objective that was minimised; see ``place_tables``.
        shards: Shards by table, then by number.
        loads: Load of each rank, ``[ranks, measures]``. A measure is seconds of a step,
            stored elements, or elements looked up per sample, as ``objective`` says.
        memory_bytes, host_bytes: Stored bytes on each rank, and in its host memory.
        exchange_bytes: Bytes that each rank sends in all-to-alls per step.
        bound: Lower bound on the largest load of any placement, divided by ``mean``.
        gap: Largest load divided by that bound, minus 1.
        is_optimal: Whether no placement is better. If not, ``gap`` bounds the gain.
        items: Tables that were placed together, with all ways to store them.
        chosen: Index of the chosen way of each of ``items``.
        mean: Smallest possible mean load of a rank, by measure.
        hottest: Sorted rows of cached tables that are on the device, by name of the
            table. A cached table without an entry has its first rows there.
    """

    tables: tuple[Table, ...]
    ranks: Ranks
    batch_size: int
    objective: Objective
    shards: tuple[TableShard, ...]
    loads: np.ndarray
    memory_bytes: np.ndarray
    host_bytes: np.ndarray
    exchange_bytes: np.ndarray
    bound: float
    gap: float
    is_optimal: bool
    items: tuple[Item, ...]
    chosen: tuple[int, ...]
    mean: np.ndarray
    hottest: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def imbalance(self) -> float:
        """Largest load of a rank divided by the mean load, in the worst measure."""
        return float(np.max(self.loads.max(0) / np.maximum(self.loads.mean(0), 1e-300)))

    @property
    def padding(self) -> float:
        """Bytes of an exchange, padded to the fullest rank, over the mean bytes."""
        mean = float(self.exchange_bytes.mean())
        return float(self.exchange_bytes.max()) / mean if mean else 1.0

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of shards that each rank exchanges; replicas do not count."""
        held = [shard.rank for shard in self.shards if shard.split != "replicate"]
        return tuple(np.bincount(held, minlength=self.ranks.count).tolist())

    def shards_of(self, table: str) -> tuple[TableShard, ...]:
        """Returns the shards of one table.

        Args:
            table: Name of the table.

        Raises:
            PlanError: There is no such table.
        """
        found = tuple(shard for shard in self.shards if shard.table == table)
        if not found:
            names = ", ".join(t.name for t in self.tables[:8])
            raise PlanError(f"no table is named {short_repr(table)}; there are {names}")
        return found

    def way_of(self, table: str) -> StorageOption:
        """Returns the way in which a table is stored and exchanged.

        Args:
            table: Name of one of the tables.
        """
        number = next(i for i, t in enumerate(self.tables) if t.name == table)
        place = next(i for i, item in enumerate(self.items) if number in item.tables)
        way, tables = (
            self.items[place].ways[self.chosen[place]],
            self.items[place].tables,
        )
        return way.of_tables[tables.index(number)] if way.of_tables else way

    def why(self, table: str) -> str:
        """Returns where a table is stored and why, with the cost of other ways.

        Args:
            table: Name of the table.

        Raises:
            PlanError: There is no such table.
        """
        shards = self.shards_of(table)
        number = next(i for i, t in enumerate(self.tables) if t.name == table)
        place = next(i for i, item in enumerate(self.items) if number in item.tables)
        item, chosen = self.items[place], self.chosen[place]
        subject = self.tables[number]
        lines = [
            f"{table}: {subject.rows:,} rows × {subject.width}, "
            f"{gigabytes(subject.nbytes)} with its optimizer state, "
            f"{subject.lookups_per_sample:g} lookups per sample",
            f"stored {_where(shards, is_counted=table in self.hottest)}",
        ]
        if len(item.tables) > 1:
            others = [self.tables[i].name for i in item.tables if i != number]
            lines.append(f"together with {', '.join(others)}, as you fixed it")
        if item.rank is not None:
            lines.append(f"on rank {item.rank}, as you fixed it")
        mean = ", ".join(self._amount(k, x) for k, x in enumerate(self.mean))
        way = self.way_of(table)
        if way.distinct_rows:
            lines.append(_request_text(way))
        lines.append(f"an even share of all tables is {mean} a rank; of one shard:")
        for n, way in enumerate(item.ways):
            name = f"{way.split} × {way.shards}" if way.shards > 1 else way.split
            name += f" {way.cached_rows:,} rows" if way.cached_rows else ""
            cost = ", ".join(self._amount(k, x) for k, x in enumerate(way.loads))
            mark = "  ← chosen" if n == chosen else ""
            if way.memory_bytes > self.ranks.memory_bytes:
                mark = f"  (does not fit: {gigabytes(way.memory_bytes)})"
            lines.append(f"  {name:<15} {cost}{mark}")
        return "\n".join(lines)

    def _amount(self, measure: int, load: float) -> str:
        if self.objective == "time":
            return milliseconds(load)
        if self.objective == "rows" or (self.objective == "both" and measure == 0):
            return f"{load:.3g} elements stored"
        return f"{load:.3g} elements looked up"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ranks = self.ranks
        yield (
            f"{count_text(len(self.tables), 'table')} in "
            f"{count_text(len(self.shards), 'shard')} on "
            f"{count_text(ranks.count, 'rank')}; {self._quality()}"
        )
        largest = np.maximum(self.loads.max(0), 1e-300)
        for rank in range(min(ranks.count, _MOST_LINES)):
            part = float(np.max(self.loads[rank] / largest))
            bar = "█" * max(1, round(part * _BAR)) if part > 0 else ""
            load = ", ".join(self._amount(k, x) for k, x in enumerate(self.loads[rank]))
            held = sorted({s.table for s in self.shards if s.rank == rank})
            names = ", ".join(held[:3]) + (f" + {len(held) - 3}" if held[3:] else "")
            yield (
                f"  {rank:>3} {bar:<{_BAR}} {load}, "
                f"{gigabytes(self.memory_bytes[rank])}  {names}"
            )
        if ranks.count > _MOST_LINES:
            yield f"  … and {ranks.count - _MOST_LINES} more ranks"
        if ranks.count > 1:
            most = gigabytes(float(self.exchange_bytes.max()))
            yield f"  a rank exchanges at most {most} of ids, vectors and gradients"
        for table in self.tables:
            way = self.way_of(table.name)
            if way.distinct_rows:
                yield f"  {table.name}: {_request_text(way)}"

    def _quality(self) -> str:
        text = f"the most loaded rank has {self.imbalance:.3f} of the mean"
        if self.is_optimal:
            return f"{text}, and no placement is better"
        return f"{text}; a better placement gains at most {self.gap:.1%}"


def _request_text(way: StorageOption) -> str:
    return (
        "a rank requests each distinct row of a shard once, at most "
        f"{way.distinct_rows:,}; a shard exchanges {gigabytes(way.exchange_bytes)}, "
        f"instead of {gigabytes(way.sample_bytes)} by sample"
    )


def _where(shards: Sequence[TableShard], *, is_counted: bool) -> str:
    first = shards[0]
    which = "most read" if is_counted else "first"
    listed = sorted({shard.rank for shard in shards})
    ranks = "rank " if len(listed) == 1 else "ranks "
    ranks += ", ".join(str(rank) for rank in listed[:16])
    ranks += f" and {len(listed) - 16} more" if listed[16:] else ""
    rows = "hashed rows" if first.hashed else "row ranges"
    return {
        "whole": f"whole on {ranks}",
        "rows": f"as {first.shards} shards of {rows} on {ranks}",
        "node_rows": f"as {first.shards} shards of {rows} within a node, on {ranks}",
        "columns": f"as {first.shards} column shards on {ranks}",
        "replicate": "on every rank: its gradient is so small that its reduction costs "
        "less than an exchange of lookups",
        "host": f"in the host memory of {ranks}",
        "cached": f"in the host memory of {ranks}, with the {which} "
        f"{first.rows[1] - first.rows[0]:,} rows on the device",
    }[first.split]


def table_shards(
    table: Table, way: StorageOption, ranks: Sequence[int]
) -> Iterator[TableShard]:
    """Yields the shards of a table that is stored in one way.

    Args:
        table: The table.
        way: Way to store the table.
        ranks: Rank of each shard; all ranks if the table is replicated.
    """
    split, shards = way.split, way.shards
    if split == "cached":
        for index, rows in enumerate(
            ((0, way.cached_rows), (way.cached_rows, table.rows))
        ):
            yield TableShard(
                table=table.name,
                rank=ranks[0],
                split=split,
                index=index,
                shards=2,
                hashed=False,
                rows=rows,
                columns=(0, table.width),
            )
        return
    by_rows = split in ("rows", "node_rows")
    hashed = by_rows and not table.range_imbalance(shards) <= 1.05
    edges = range_edges(table.rows, shards) if by_rows and not hashed else ()
    columns = table.width // shards if split == "columns" else table.width
    for index, rank in enumerate(sorted(ranks)):
        first = index * columns if split == "columns" else 0
        yield TableShard(
            table=table.name,
            rank=rank,
            split=split,
            index=index,
            shards=shards,
            hashed=hashed,
            rows=(edges[index], edges[index + 1]) if edges else (0, table.rows),
            columns=(first, first + columns),
        )


def gap_over(load: float, bound: float) -> float:
    """Returns the excess of a load over a bound, as a fraction of at least 0."""
    return max(0.0, load / bound - 1.0) if math.isfinite(bound) and bound > 0 else 0.0


_MOST_BYTES = 1 << 30
"""Largest number of bytes of a table's rows in a file after decompression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """Table in a file, without the counts of its rows; see ``Table``."""

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
    """Placement in a file; see ``TablePlacement``."""

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
        placement: Placement to write; the counts of its tables are left out.
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
    """Returns the placement of JSON data that ``placement_data`` returned.

    Args:
        data: JSON data.

    Raises:
        PlanError: The data are not a placement, or shards do not match their tables.
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
    """Returns sorted rows as text: their differences, compressed."""
    differences = np.diff(rows, prepend=0).astype("<i4")
    return base64.b64encode(zlib.compress(differences.tobytes())).decode()


def _rows_of(text: str) -> np.ndarray:
    """Returns the rows of ``_rows_text``; raises ``ValueError`` if they are damaged."""
    try:
        inflating = zlib.decompressobj()
        data = inflating.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflating.eof:
        raise ValueError(f"its rows are cut off, or have over {_MOST_BYTES} bytes")
    return np.cumsum(np.frombuffer(data, "<i4"), dtype=np.int64)


def _wrong_hottest(record: PlacementRecord) -> Iterator[str]:
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
