"""A placement as arrays: one buffer for each width, padded to the fullest rank.

All shards of one width in one memory are in one buffer, where the shards of a rank are
consecutive. All lookups of a rank are columns of ids, so every rank runs the same
program with other numbers. Exchanges are padded to the size of the largest. Rows that a
node stores jointly are in separate buffers. Their exchange has two levels: it sums
inside the node, then sends vectors between nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from whalejax.planner.tables.placement import TablePlacement, TableShard
from whalejax.planner.tables.table import ID_BYTES
from whalejax.tables.recognize import Lookup


Memory: TypeAlias = Literal["device", "host", "node"]
"""Memory of a buffer: each device's, the host's, or that of all devices of a node.

The devices of a node store parts of the same rows.
"""


class BufferKey(NamedTuple):
    """Width and memory of a buffer, which identify it."""

    width: int
    memory: Memory


def memory_of(shard: TableShard) -> Memory:
    """Returns the memory that stores a shard."""
    if shard.split == "node_rows":
        return "node"
    is_hosted = shard.split == "host" or (shard.split == "cached" and shard.index)
    return "host" if is_hosted else "device"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WidthLayout:
    """Layout of all shards of one width in one memory.

    Attributes:
        width: Number of columns.
        rows: Number of rows of the buffer on each rank.
        slots: Number of vectors that a rank sends for each sample.
        source: Column of a sample's ids that a rank receives, ``[ranks, ids]``; the
            number of columns for none.
        modulus, residue, low, high: Rows of each column's shard: ids with this residue
            by ``modulus``, from ``low`` to ``high`` - 1.
        base: Row of the buffer at which the shard begins.
        slot: Slot to which the column's row is added.
        offset: Offset of the buffer's vectors in a rank's result for a sample.
        first_id: Offset of the buffer's columns among the sent ids.
        memory: Memory of the buffer.
    """

    width: int
    rows: int
    slots: int
    source: np.ndarray
    modulus: np.ndarray
    residue: np.ndarray
    low: np.ndarray
    high: np.ndarray
    base: np.ndarray
    slot: np.ndarray
    offset: int
    first_id: int
    memory: Memory = "device"

    @property
    def num_ids(self) -> int:
        """Number of ids that a rank looks up for each sample."""
        return int(self.source.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredShard:
    """Position of a shard in a buffer.

    Attributes:
        shard: The shard.
        key: Key of the buffer.
        base: First row of the shard in the rank's part of the buffer.
        numbers: Rows of the table in the shard; None for a range or every n-th row.
    """

    shard: TableShard
    key: BufferKey
    base: int
    numbers: np.ndarray | None = None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.key.width

    @property
    def row_numbers(self) -> slice | np.ndarray:
        """Rows of the table in the shard."""
        if self.numbers is not None:
            return self.numbers
        first, last = self.shard.rows
        if self.shard.hashed:
            return slice(first + self.shard.index, last, self.shard.shards)
        return slice(first, last)

    def some_rows(self, first: int, count: int) -> slice | np.ndarray:
        """Returns the rows of the table in a part of the shard.

        Args:
            first: First row of the part in the shard.
            count: Largest number of rows.
        """
        numbers = self.row_numbers
        if not isinstance(numbers, slice):
            return numbers[first : first + count]
        part = range(numbers.start, numbers.stop, numbers.step or 1)
        part = part[first : first + count]
        return slice(part.start, part.stop, part.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedVectors:
    """Position of a lookup's vectors in one rank's result.

    Attributes:
        rank: Index of the rank; of its node if the node sums the vectors.
        start: Offset of the first element, for each sample.
        count: Number of vectors.
        columns: Columns of the table in these vectors.
        by_node: Whether a node sums and sends the vectors.
    """

    rank: int
    start: int
    count: int
    columns: tuple[int, int]
    by_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredShard:
    """Shard that is sent in full to all ranks, once for all of its lookups.

    Attributes:
        stored: Position of the shard in a buffer.
        first: Offset of its rows among the buffer's rows that are sent in full.
    """

    stored: StoredShard
    first: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistinctTable:
    """Some columns of a table of which a rank receives each needed row once.

    Attributes:
        key: Key of the columns' buffer.
        columns: First column, and the column after the last one.
        ranks, bases: Rank of each shard, and its first row in the buffer there.
        firsts: First row of each shard, if shards are ranges.
        hashed: Whether shards have every n-th row.
    """

    key: BufferKey
    columns: tuple[int, int]
    ranks: np.ndarray
    bases: np.ndarray
    firsts: np.ndarray
    hashed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableLayout:
    """Buffers of a placement, and the position of each lookup's rows.

    Attributes:
        ranks: Number of ranks.
        per_node: Number of ranks of one node.
        widths: Layout of each buffer.
        stored: Positions of the shards, by the name of their table.
        replicated: Names of the tables that every rank stores.
        received: Positions of each lookup's vectors; empty if the table is replicated.
        vector_elements: Number of elements that a rank sends for each sample.
        node_elements: Number of elements that a node sends for each sample.
        id_columns: Number of ids that are sent to a rank for each sample.
        gathered: Shards that are sent in full, by name of the table. They have fewer
            rows than a rank's samples need vectors.
        blocks: Rows of these shards in each buffer, ``[ranks, rows]``, padded with the
            number of the buffer's rows.
        distinct: Tables whose distinct rows are sent once, by name: groups of columns,
            each with all rows.
        requests: Largest number of rows that a rank requests from another, by buffer.
        hottest: Sorted rows of cached tables on the device, by name. A cached table
            without an entry has its first rows there.
    """

    ranks: int
    per_node: int
    widths: Mapping[BufferKey, WidthLayout]
    stored: Mapping[str, tuple[StoredShard, ...]]
    replicated: frozenset[str]
    received: tuple[tuple[ReceivedVectors, ...], ...]
    vector_elements: int
    node_elements: int
    id_columns: int
    gathered: Mapping[str, tuple[GatheredShard, ...]]
    blocks: Mapping[BufferKey, np.ndarray]
    distinct: Mapping[str, tuple[DistinctTable, ...]]
    requests: Mapping[BufferKey, int]
    hottest: Mapping[str, np.ndarray]

    def widths_in(self, *, nodes: bool) -> dict[BufferKey, WidthLayout]:
        """Returns the buffers of single ranks, or those that nodes store jointly.

        Args:
            nodes: Whether to return the buffers of nodes.
        """
        return {
            key: each
            for key, each in self.widths.items()
            if (each.memory == "node") == nodes
        }

    def block_elements(self, beside: int) -> int:
        """Returns the number of elements of the rows that a rank sends in full.

        Args:
            beside: Number of further elements that are sent with each row.
        """
        sizes = ((key.width, x.shape[1]) for key, x in self.blocks.items())
        return sum(rows * (width + beside) for width, rows in sizes)

    @property
    def request_elements(self) -> int:
        """Largest number of row elements that a rank requests from another."""
        return sum(key.width * room for key, room in self.requests.items())

    def id_bytes(self, samples: int) -> int:
        """Returns the bytes of ids that all ranks send to others.

        Args:
            samples: Number of samples of a global batch.
        """
        asked = self.ranks * sum(self.requests.values())
        return (samples * self.id_columns + asked) * ID_BYTES * (self.ranks - 1)

    def exchanged_bytes(
        self, samples: int, element_bytes: int, *, backward: bool = False
    ) -> int:
        """Returns the bytes that all ranks send to others in one exchange of vectors.

        They are (N · V + R · (F + D)) · q · (R - 1), with N samples, R ranks, at most V
        elements per sample from one rank, F elements of rows that are sent in full, D
        elements of requested rows and q bytes per element. In the backward pass, each
        row that is sent in full has its number of lookups with it.

        Args:
            samples: Number of samples of a global batch.
            element_bytes: Bytes of an element.
            backward: Whether gradients are exchanged; default: False.
        """
        rows = self.block_elements(1 if backward else 0) + self.request_elements
        elements = samples * self.vector_elements + self.ranks * rows
        return elements * element_bytes * (self.ranks - 1)


def make_layout(
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples_per_rank: int = 0,
) -> TableLayout:
    """Returns the positions of a placement's shards in buffers.

    Args:
        placement: Placement of the tables.
        lookups: All lookups of the loss.
        names: Name of the table of each lookup.
        samples_per_rank: Number of samples of each rank. If that moves fewer bytes than
            vectors by sample, shards are sent in full, or each distinct row once. With
            0 (the default), vectors are always sent by sample.
    """
    ranks = placement.ranks.count
    given = placement, lookups, names
    if not samples_per_rank or ranks == 1:
        return _layout(*given, 0, asks=False)
    samples = ranks * samples_per_rank

    def moved_bytes(layout: TableLayout) -> int:
        vectors = (
            layout.exchanged_bytes(samples, 4, backward=b) for b in (False, True)
        )
        return layout.id_bytes(samples) + sum(vectors)

    found = [
        _layout(*given, whole, asks=asks)
        for whole in (0, samples_per_rank)
        for asks in (False, True)
    ]
    return min(found, key=moved_bytes)


def without_requests(
    layout: TableLayout,
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples_per_rank: int,
) -> TableLayout:
    """Returns the layout of the same buffers, with vectors by sample, not requests.

    Args:
        layout: Result of ``make_layout``.
        placement, lookups, names, samples_per_rank: Arguments of ``make_layout``.
    """
    whole = samples_per_rank if layout.gathered else 0
    return _layout(placement, lookups, names, whole, asks=False)


def _layout(
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples: int,
    *,
    asks: bool,
) -> TableLayout:
    ranks = placement.ranks.count
    replicated = frozenset(s.table for s in placement.shards if s.split == "replicate")
    shards = [s for s in placement.shards if s.table not in replicated]
    stored, rows = _stored(shards, ranks, placement.hottest)
    gathered, blocks = _choose_gathered(stored, rows, ranks, lookups, names, samples)
    distinct, requests = _distinct(placement, stored, gathered) if asks else ({}, {})
    tasks = _Tasks(ranks)
    firsts = np.cumsum([0, *(one.num_ids for one in lookups)])
    per_node = placement.ranks.per_node
    for number, (lookup, name) in enumerate(zip(lookups, names, strict=True)):
        apart = name in replicated or name in gathered or name in distinct
        for each in () if apart else stored[name]:
            tasks.add(number, lookup, each, int(firsts[number]))
    widths: dict[BufferKey, WidthLayout] = {}
    offsets, first_id = {False: 0, True: 0}, 0
    for key in sorted(rows):
        by_node = key.memory == "node"
        starts = offsets[by_node], first_id
        layout = tasks.layout(key, rows[key], int(firsts[-1]), *starts)
        widths[key] = layout
        offsets[by_node] += layout.slots * key.width
        first_id += layout.num_ids
    return TableLayout(
        ranks=ranks,
        per_node=per_node,
        widths=widths,
        stored=stored,
        replicated=replicated,
        received=tuple(
            tuple(tasks.received(number, widths, per_node))
            for number in range(len(lookups))
        ),
        vector_elements=offsets[False],
        node_elements=offsets[True],
        id_columns=first_id,
        gathered=gathered,
        blocks=blocks,
        distinct=distinct,
        requests=requests,
        hottest=placement.hottest,
    )


def _distinct(
    placement: TablePlacement,
    stored: Mapping[str, Sequence[StoredShard]],
    gathered: Mapping[str, object],
) -> tuple[dict[str, tuple[DistinctTable, ...]], dict[BufferKey, int]]:
    found: dict[str, tuple[DistinctTable, ...]] = {}
    rooms: dict[BufferKey, np.ndarray] = {}
    for name, shards in stored.items():
        room = placement.way_of(name).distinct_rows
        if not room or name in gathered or shards[0].key.memory != "device":
            continue
        by_columns: dict[tuple[int, int], list[StoredShard]] = {}
        for each in sorted(shards, key=lambda each: each.shard.index):
            by_columns.setdefault(each.shard.columns, []).append(each)
        found[name] = tuple(
            _distinct_table(columns, by_columns[columns])
            for columns in sorted(by_columns)
        )
        for table in found[name]:
            own = rooms.setdefault(table.key, np.zeros(placement.ranks.count, int))
            np.add.at(own, table.ranks, room)
    return found, {key: int(own.max()) for key, own in rooms.items()}


def _distinct_table(
    columns: tuple[int, int], shards: Sequence[StoredShard]
) -> DistinctTable:
    return DistinctTable(
        key=shards[0].key,
        columns=columns,
        ranks=np.array([each.shard.rank for each in shards], np.int32),
        bases=np.array([each.base for each in shards], np.int32),
        firsts=np.array([each.shard.rows[0] for each in shards], np.int32),
        hashed=shards[0].shard.hashed,
    )


def _choose_gathered(
    stored: Mapping[str, Sequence[StoredShard]],
    rows: Mapping[BufferKey, int],
    ranks: int,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples: int,
) -> tuple[dict[str, tuple[GatheredShard, ...]], dict[BufferKey, np.ndarray]]:
    wanted = dict.fromkeys(stored, 0)
    for lookup, name in zip(lookups, names, strict=True):
        if name in wanted:
            wanted[name] += samples * lookup.num_vectors
    sent: dict[BufferKey, list[list[int]]] = {}
    found: dict[str, tuple[GatheredShard, ...]] = {}
    for name, shards in stored.items():
        if any(each.key.memory != "device" for each in shards):
            continue
        if max(each.shard.num_rows for each in shards) >= wanted[name]:
            continue
        placed = []
        for each in shards:
            by_rank = sent.setdefault(each.key, [[] for _ in range(ranks)])
            own = by_rank[each.shard.rank]
            placed.append(GatheredShard(stored=each, first=len(own)))
            own.extend(range(each.base, each.base + each.shard.num_rows))
        found[name] = tuple(placed)
    return found, {key: _padded(by_rank, rows[key]) for key, by_rank in sent.items()}


def _padded(by_rank: Sequence[Sequence[int]], none: int) -> np.ndarray:
    most = max(map(len, by_rank))
    return np.array([[*own, *[none] * (most - len(own))] for own in by_rank], np.int32)


def _stored(
    shards: Sequence[TableShard], ranks: int, hottest: Mapping[str, np.ndarray]
) -> tuple[dict[str, tuple[StoredShard, ...]], dict[BufferKey, int]]:
    filled: dict[BufferKey, list[int]] = {}
    stored: dict[str, list[StoredShard]] = {}
    for shard in shards:
        key = BufferKey(shard.columns[1] - shard.columns[0], memory_of(shard))
        rows = filled.setdefault(key, [0] * ranks)
        place = StoredShard(
            shard=shard,
            key=key,
            base=rows[shard.rank],
            numbers=_numbers(shard, hottest.get(shard.table)),
        )
        rows[shard.rank] += shard.num_rows
        stored.setdefault(shard.table, []).append(place)
    most = {key: max(rows) for key, rows in filled.items()}
    return {name: tuple(each) for name, each in stored.items()}, most


def _numbers(shard: TableShard, hottest: np.ndarray | None) -> np.ndarray | None:
    """Returns the rows of a cached table in a shard; None for a range."""
    if hottest is None or shard.split != "cached":
        return None
    if shard.index == 0:
        return hottest
    return np.delete(np.arange(shard.rows[1]), hottest)


class _Tasks:
    """Lookups of each rank, in the order of its columns of ids and its slots."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.columns: dict[BufferKey, list[list[tuple[int, ...]]]] = {}
        self.slots: dict[BufferKey, list[int]] = {}
        self.given: dict[int, list[tuple[StoredShard, int, int]]] = {}

    def add(self, number: int, lookup: Lookup, each: StoredShard, first: int) -> None:
        """Adds a lookup to the rank of a shard.

        ``first`` is the first column of the lookup among the ids of a sample.
        """
        shard, rank = each.shard, each.shard.rank
        columns = self.columns.setdefault(each.key, [[] for _ in range(self.ranks)])
        slots = self.slots.setdefault(each.key, [0] * self.ranks)
        modulus, residue = (shard.shards, shard.index) if shard.hashed else (1, 0)
        # The row in the buffer is base + id // modulus - (first row of a range).
        base = each.base - (0 if shard.hashed else shard.rows[0])
        for i in range(lookup.num_ids):
            slot = slots[rank] + (0 if lookup.pooled else i)
            columns[rank].append((first + i, modulus, residue, *shard.rows, base, slot))
        self.given.setdefault(number, []).append(
            (each, slots[rank], lookup.num_vectors)
        )
        slots[rank] += lookup.num_vectors

    def layout(
        self, key: BufferKey, rows: int, none: int, offset: int, first_id: int
    ) -> WidthLayout:
        columns = self.columns.get(key, [[] for _ in range(self.ranks)])
        slots = max(self.slots.get(key, [0]))
        most = max(len(each) for each in columns)
        padding = (none, 1, 0, 0, 0, 0, max(slots - 1, 0))
        table = np.full((self.ranks, most, len(padding)), padding, np.int32)
        for rank, each in enumerate(columns):
            if each:
                table[rank, : len(each)] = each
        source, modulus, residue, low, high, base, slot = np.moveaxis(table, 2, 0)
        return WidthLayout(
            width=key.width,
            memory=key.memory,
            rows=rows,
            slots=slots,
            source=source,
            modulus=modulus,
            residue=residue,
            low=low,
            high=high,
            base=base,
            slot=slot,
            offset=offset,
            first_id=first_id,
        )

    def received(
        self, number: int, widths: Mapping[BufferKey, WidthLayout], per_node: int
    ) -> Iterator[ReceivedVectors]:
        """Yields the positions of a lookup's vectors in results of ranks and nodes."""
        for each, slot, count in self.given.get(number, []):
            by_node, rank = each.key.memory == "node", each.shard.rank
            if by_node and rank % per_node:
                continue  # The node sends one sum.
            yield ReceivedVectors(
                rank=rank // per_node if by_node else rank,
                start=widths[each.key].offset + slot * each.width,
                count=count,
                columns=each.shard.columns,
                by_node=by_node,
            )


def collect_tables(
    layout: TableLayout, buffers: Mapping[BufferKey, np.ndarray], by_row: bool
) -> dict[str, np.ndarray]:
    """Assembles tables, or their state arrays, from the shards.

    Args:
        layout: Layout of the shards.
        buffers: Buffers in host memory, ``[ranks · rows, columns]``.
        by_row: Whether the arrays have one number per row.
    """
    found: dict[str, np.ndarray] = {}
    for name, shards in layout.stored.items():
        rows = max(each.shard.rows[1] for each in shards)
        width = 1 if by_row else max(each.shard.columns[1] for each in shards)
        whole = np.zeros((rows, width), buffers[shards[0].key].dtype)
        for each in shards:
            start = each.shard.rank * layout.widths[each.key].rows + each.base
            columns = slice(0, 1) if by_row else slice(*each.shard.columns)
            part = buffers[each.key][start : start + each.shard.num_rows]
            whole[each.row_numbers, columns] = part
        found[name] = whole
    return found
