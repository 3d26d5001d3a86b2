"""A placement as arrays: one buffer a column width, padded to the fullest rank.

All shards of one width lie in one buffer, those of a rank one behind the other, and all
lookups of a rank are columns of ids, so that every rank runs the same program with
other numbers in it. Exchanges are padded to the rank that has most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.planner.tables.placement import TablePlacement, TableShard
from whalejax.planner.tables.table import ID_BYTES
from whalejax.tables.recognize import Lookup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WidthLayout:
    """The shards of one width.

    Attributes:
        width: Columns.
        rows: Rows of the buffer on each rank.
        slots: Vectors that a rank gives for each sample.
        source: ``[ranks, ids]``: column of the sample's ids that is sent to a rank, or
            the number of columns for none.
        modulus, residue, low, high: The rows of each column's shard: ids of that
            residue between two limits.
        base: Row of the buffer at which the shard begins.
        slot: Slot that the column's row is added to.
        offset: Offset of the width's vectors in a rank's result for a sample.
        first_id: Offset of its columns among the ids that are sent.
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

    @property
    def num_ids(self) -> int:
        """Ids that a rank takes for each sample."""
        return int(self.source.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """Position of a shard in a buffer.

    Attributes:
        shard: The shard.
        width: Columns, which name the buffer.
        base: First row in the rank's part of the buffer.
    """

    shard: TableShard
    width: int
    base: int

    @property
    def row_numbers(self) -> slice:
        """Rows of the table that it holds."""
        first, last = self.shard.rows
        if self.shard.hashed:
            return slice(first + self.shard.index, last, self.shard.shards)
        return slice(first, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedVectors:
    """Position of a lookup's vectors in one rank's result.

    Attributes:
        rank: The rank.
        start: First element, for each sample.
        count: Number of vectors.
        columns: Columns of the table that they have.
    """

    rank: int
    start: int
    count: int
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredShard:
    """A shard that is sent whole to all ranks, once for all of its lookups.

    Attributes:
        stored: Position of the shard in a buffer.
        first: First of its rows among those of its width that its rank sends so.
    """

    stored: StoredShard
    first: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableLayout:
    """Buffers of a placement, and where each lookup finds its rows.

    Attributes:
        ranks: Number of ranks.
        widths: Layout of each buffer, by its width.
        stored: Positions of the shards, by the name of their table.
        replicated: Names of tables that every rank holds.
        received: For each lookup, where its vectors are; empty if replicated.
        vector_elements: Elements that a rank gives for each sample.
        id_columns: Ids that are sent to a rank for each sample.
        gathered: Shards of the tables that are sent whole, by the name of the table:
            those with fewer rows than a rank's samples need vectors of it.
        blocks: Rows of the buffer that each rank sends whole, ``[ranks, rows]`` by
            width; the number of rows for none.
    """

    ranks: int
    widths: Mapping[int, WidthLayout]
    stored: Mapping[str, tuple[StoredShard, ...]]
    replicated: frozenset[str]
    received: tuple[tuple[ReceivedVectors, ...], ...]
    vector_elements: int
    id_columns: int
    gathered: Mapping[str, tuple[GatheredShard, ...]]
    blocks: Mapping[int, np.ndarray]

    def block_elements(self, beside: int) -> int:
        """Elements of the rows that a rank sends whole.

        Args:
            beside: Elements that are sent beside each row.
        """
        return sum(x.shape[1] * (width + beside) for width, x in self.blocks.items())

    def exchanged_bytes(
        self, samples: int, element_bytes: int, *, backward: bool = False
    ) -> int:
        """Bytes that all ranks send to others in one exchange of vectors.

        With N samples, R ranks, at most V elements a sample from one rank and F of rows
        that are sent whole: (N · V + R · F) · q · (R - 1). Backward each of these rows
        has the number of its lookups beside it.

        Args:
            samples: Samples of a global batch.
            element_bytes: Bytes of an element.
            backward: Gradients are exchanged.
        """
        whole = self.ranks * self.block_elements(1 if backward else 0)
        elements = samples * self.vector_elements + whole
        return elements * element_bytes * (self.ranks - 1)


def make_layout(
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples_per_rank: int = 0,
) -> TableLayout:
    """Lays the shards of a placement out in buffers.

    Args:
        placement: Placement of the tables.
        lookups: All lookups of the loss.
        names: Name of the table of each lookup.
        samples_per_rank: Samples of each rank, where shards may be sent whole if that
            moves less; else 0.
    """
    plain = _layout(placement, lookups, names, 0)
    ranks = placement.ranks.count
    if not samples_per_rank or ranks == 1:
        return plain
    whole = _layout(placement, lookups, names, samples_per_rank)
    samples = ranks * samples_per_rank

    def moved(layout: TableLayout) -> int:
        ids = samples * layout.id_columns * ID_BYTES * (ranks - 1)
        vectors = (
            layout.exchanged_bytes(samples, 4, backward=b) for b in (False, True)
        )
        return ids + sum(vectors)

    return whole if moved(whole) < moved(plain) else plain


def _layout(
    placement: TablePlacement,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples: int,
) -> TableLayout:
    ranks = placement.ranks.count
    replicated = frozenset(s.table for s in placement.shards if s.split == "replicate")
    shards = [s for s in placement.shards if s.table not in replicated]
    stored, rows = _stored(shards, ranks)
    gathered, blocks = _gathered(stored, rows, ranks, lookups, names, samples)
    tasks = _Tasks(ranks)
    firsts = np.cumsum([0, *(one.num_ids for one in lookups)])
    for number, (lookup, name) in enumerate(zip(lookups, names, strict=True)):
        apart = name in replicated or name in gathered
        for each in () if apart else stored[name]:
            tasks.add(number, lookup, each, int(firsts[number]))
    widths: dict[int, WidthLayout] = {}
    offset = first_id = 0
    for width in sorted(rows):
        layout = tasks.layout(width, rows[width], int(firsts[-1]), offset, first_id)
        widths[width] = layout
        offset += layout.slots * width
        first_id += layout.num_ids
    return TableLayout(
        ranks=ranks,
        widths=widths,
        stored=stored,
        replicated=replicated,
        received=tuple(
            tuple(tasks.received(number, widths)) for number in range(len(lookups))
        ),
        vector_elements=offset,
        id_columns=first_id,
        gathered=gathered,
        blocks=blocks,
    )


def _gathered(
    stored: Mapping[str, Sequence[StoredShard]],
    rows: Mapping[int, int],
    ranks: int,
    lookups: Sequence[Lookup],
    names: Sequence[str],
    samples: int,
) -> tuple[dict[str, tuple[GatheredShard, ...]], dict[int, np.ndarray]]:
    """Shards that are sent whole since that moves less, and their rows by rank."""
    wanted = dict.fromkeys(stored, 0)
    for lookup, name in zip(lookups, names, strict=True):
        if name in wanted:
            wanted[name] += samples * lookup.num_vectors
    sent: dict[int, list[list[int]]] = {}
    found: dict[str, tuple[GatheredShard, ...]] = {}
    for name, shards in stored.items():
        if max(each.shard.num_rows for each in shards) >= wanted[name]:
            continue
        placed = []
        for each in shards:
            by_rank = sent.setdefault(each.width, [[] for _ in range(ranks)])
            own = by_rank[each.shard.rank]
            placed.append(GatheredShard(stored=each, first=len(own)))
            own.extend(range(each.base, each.base + each.shard.num_rows))
        found[name] = tuple(placed)
    return found, {w: _padded(by_rank, rows[w]) for w, by_rank in sent.items()}


def _padded(by_rank: Sequence[Sequence[int]], none: int) -> np.ndarray:
    most = max(map(len, by_rank))
    return np.array([[*own, *[none] * (most - len(own))] for own in by_rank], np.int32)


def _stored(
    shards: Sequence[TableShard], ranks: int
) -> tuple[dict[str, tuple[StoredShard, ...]], dict[int, int]]:
    """Returns the positions of shards, and the number of rows of each buffer
    on a rank.
    """
    filled: dict[int, list[int]] = {}
    stored: dict[str, list[StoredShard]] = {}
    for shard in shards:
        width = shard.columns[1] - shard.columns[0]
        rows = filled.setdefault(width, [0] * ranks)
        place = StoredShard(shard=shard, width=width, base=rows[shard.rank])
        rows[shard.rank] += shard.num_rows
        stored.setdefault(shard.table, []).append(place)
    most = {width: max(rows) for width, rows in filled.items()}
    return {name: tuple(each) for name, each in stored.items()}, most


class _Tasks:
    """Lookups of each rank, in the order of its columns of ids and of its slots."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.columns: dict[int, list[list[tuple[int, ...]]]] = {}
        self.slots: dict[int, list[int]] = {}
        self.given: dict[int, list[tuple[StoredShard, int, int]]] = {}

    def add(self, number: int, lookup: Lookup, each: StoredShard, first: int) -> None:
        """Lets a shard's rank do a lookup.

        Args:
            number: Number of the lookup.
            lookup: The lookup.
            each: The shard.
            first: Its first column among the ids of a sample.
        """
        shard, rank = each.shard, each.shard.rank
        columns = self.columns.setdefault(each.width, [[] for _ in range(self.ranks)])
        slots = self.slots.setdefault(each.width, [0] * self.ranks)
        modulus, residue = (shard.shards, shard.index) if shard.hashed else (1, 0)
        # Local row: base + id // modulus - (first row of a range).
        base = each.base - (0 if shard.hashed else shard.rows[0])
        for i in range(lookup.num_ids):
            slot = slots[rank] + (0 if lookup.pooled else i)
            columns[rank].append((first + i, modulus, residue, *shard.rows, base, slot))
        self.given.setdefault(number, []).append(
            (each, slots[rank], lookup.num_vectors)
        )
        slots[rank] += lookup.num_vectors

    def layout(
        self, width: int, rows: int, none: int, offset: int, first_id: int
    ) -> WidthLayout:
        """The padded columns of one width."""
        columns = self.columns.get(width, [[] for _ in range(self.ranks)])
        slots = max(self.slots.get(width, [0]))
        most = max(len(each) for each in columns)
        padding = (none, 1, 0, 0, 0, 0, max(slots - 1, 0))
        table = np.full((self.ranks, most, len(padding)), padding, np.int32)
        for rank, each in enumerate(columns):
            if each:
                table[rank, : len(each)] = each
        source, modulus, residue, low, high, base, slot = np.moveaxis(table, 2, 0)
        return WidthLayout(
            width=width,
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
        self, number: int, widths: Mapping[int, WidthLayout]
    ) -> Iterator[ReceivedVectors]:
        """Yields the positions of a lookup's vectors in the ranks' results."""
        for each, slot, count in self.given.get(number, []):
            start = widths[each.width].offset + slot * each.width
            yield ReceivedVectors(
                rank=each.shard.rank,
                start=start,
                count=count,
                columns=each.shard.columns,
            )


def collect_tables(
    layout: TableLayout, buffers: Mapping[int, np.ndarray], by_row: bool
) -> dict[str, np.ndarray]:
    """Whole tables, or state arrays of them, from the shards.

    Args:
        layout: Layout of the shards.
        buffers: Buffers by width, ``[ranks · rows, columns]`` in host memory.
        by_row: The arrays have one number a row.
    """
    found: dict[str, np.ndarray] = {}
    for name, shards in layout.stored.items():
        rows = max(each.shard.rows[1] for each in shards)
        width = 1 if by_row else max(each.shard.columns[1] for each in shards)
        whole = np.zeros((rows, width), buffers[shards[0].width].dtype)
        for each in shards:
            start = each.shard.rank * layout.widths[each.width].rows + each.base
            columns = slice(0, 1) if by_row else slice(*each.shard.columns)
            part = buffers[each.width][start : start + each.shard.num_rows]
            whole[each.row_numbers, columns] = part
        found[name] = whole
    return found
