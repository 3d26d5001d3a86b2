"""Copies tables to the devices and back, one at a time.

Buffers are created in the memory of their placement. Tables are written into them, and
read from them, one by one. So host memory needs room for only one full table, except in
``collect``, which returns all. All processes with devices of the mesh must call the
same methods in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.lowering.global_arrays import put_global, run_alone
from whalejax.tables.host_rows import HOST_KIND, read_rows, write_rows
from whalejax.tables.layout import BufferKey, StoredShard, TableLayout, collect_tables
from whalejax.tables.programs import TableArrays
from whalejax.tables.row_ranges import Rows, common_rows
from whalejax.tables.sparse_optimizers import SparseOptimizer


_PIECE_BYTES: Final = 2**28
"""Largest number of bytes of rows per device in one write to a buffer, or one read."""

RowSource: TypeAlias = Callable[[Rows, slice], np.ndarray]
"""Function from rows and columns of a table to their values."""

_Turn: TypeAlias = Mapping[int, StoredShard]
"""Shards of a buffer, at most one on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableStore:
    """Store of tables, and of the state of their rows, on the devices.

    Attributes:
        layout: Layout of the buffers.
        optimizer: Update rule of rows, which defines their state.
        mesh: Mesh of the devices.
        axes: Mesh axes along which the ranks are numbered.
        shapes: Shape of each table, by its path.
        dtype: Dtype of all tables.
    """

    layout: TableLayout
    optimizer: SparseOptimizer
    mesh: Mesh
    axes: tuple[str, ...]
    shapes: Mapping[str, tuple[int, int]]
    dtype: Any

    def by_row(self, kind: str) -> bool:
        """Returns whether a state array has one number per row.

        Args:
            kind: Name of the state array.
        """
        return self.optimizer.state_width(kind, 2) == 1

    def abstract_arrays(self) -> TableArrays:
        """Returns the shapes and shardings of all tables and their state."""
        layout, names = self.layout, self.optimizer.state_names
        single = NamedSharding(self.mesh, PartitionSpec())

        def shape(rows: int, width: int, sharding: NamedSharding) -> Any:
            return jax.ShapeDtypeStruct((rows, width), self.dtype, sharding=sharding)

        def states(rows: int, width: int, sharding: NamedSharding) -> dict[str, Any]:
            widths = {kind: self.optimizer.state_width(kind, width) for kind in names}
            return {kind: shape(rows, own, sharding) for kind, own in widths.items()}

        rows = {key: layout.ranks * each.rows for key, each in layout.widths.items()}
        whole = {name: self.shapes[name] for name in layout.replicated}
        return TableArrays(
            buffers={k: shape(n, k.width, self.sharding(k)) for k, n in rows.items()},
            states={k: states(n, k.width, self.sharding(k)) for k, n in rows.items()},
            replicated={name: shape(*s, single) for name, s in whole.items()},
            replicated_states={name: states(*s, single) for name, s in whole.items()},
        )

    def empty(self) -> TableArrays:
        """Returns buffers of zeros, and the initial state of all rows.

        Arrays in host memory are created there, as they may not fit on a device.
        """
        shapes = self.abstract_arrays()

        def states(by_kind: Mapping[str, Any]) -> dict[str, Any]:
            return {
                kind: _filled(leaf, self.optimizer.initial_value(kind))
                for kind, leaf in by_kind.items()
            }

        def tables(leaves: Mapping[Any, Any]) -> dict[Any, Any]:
            return {key: _filled(leaf, 0.0) for key, leaf in leaves.items()}

        return TableArrays(
            buffers=tables(shapes.buffers),
            states={key: states(each) for key, each in shapes.states.items()},
            replicated=tables(shapes.replicated),
            replicated_states={
                name: states(each) for name, each in shapes.replicated_states.items()
            },
        )

    def sharding(self, key: BufferKey) -> NamedSharding:
        """Returns the sharding of a buffer by rows, with its memory.

        Args:
            key: Key of the buffer.
        """
        kind = {"memory_kind": HOST_KIND} if key.memory == "host" else {}
        return NamedSharding(self.mesh, PartitionSpec(self.axes, None), **kind)

    def write(
        self,
        arrays: TableArrays,
        name: str,
        values: np.ndarray | RowSource,
        kind: str | None,
    ) -> TableArrays:
        """Writes a table, or a state array of its rows, into the arrays.

        Args:
            arrays: All tables; replaced arrays are donated.
            name: Path of the table.
            values: Full table or state array, or a function that returns some of its
                rows and columns.
            kind: Name of the state array; None for the table.
        """
        source = values if callable(values) else _rows_of(values)
        if name in self.layout.replicated:
            rows, width = self.shapes[name]
            columns = slice(0, 1 if kind and self.by_row(kind) else width)
            single = NamedSharding(self.mesh, PartitionSpec())
            whole = put_global(source(slice(0, rows), columns), single)
            return self._replaced_whole(arrays, name, whole, kind)
        for key, turn in self._turns(name):
            held = self._buffer(arrays, key, kind)
            written = self._write_shards(held, turn, source, kind, key)
            arrays = _replaced(arrays, key, written, kind)
        return arrays

    def _buffer(self, arrays: TableArrays, key: BufferKey, kind: str | None) -> Any:
        return arrays.states[key][kind] if kind else arrays.buffers[key]

    def _turns(self, name: str) -> Iterator[tuple[BufferKey, _Turn]]:
        by_rank: dict[tuple[BufferKey, int], list[StoredShard]] = defaultdict(list)
        for each in self.layout.stored[name]:
            by_rank[each.key, each.shard.rank].append(each)
        for key in dict.fromkeys(key for key, _ in by_rank):
            of_key = {r: held for (k, r), held in by_rank.items() if k == key}
            for number in range(max(map(len, of_key.values()))):
                yield (
                    key,
                    {r: held[number] for r, held in of_key.items() if held[number:]},
                )

    def _replaced_whole(
        self, arrays: TableArrays, name: str, whole: Any, kind: str | None
    ) -> TableArrays:
        if kind is None:
            tables = arrays.replicated | {name: whole}
            return dataclasses.replace(arrays, replicated=tables)
        states = arrays.replicated_states[name] | {kind: whole}
        every = arrays.replicated_states | {name: states}
        return dataclasses.replace(arrays, replicated_states=every)

    def _places(self, buffer: Any, turn: _Turn) -> Iterator[tuple[int, int, Any]]:
        """Divides shards into parts that are small enough to be copied at once.

        Yields (first row in the shards, number of rows, rows of the buffer).
        """
        ranks, end = self.layout.ranks, buffer.shape[0] // self.layout.ranks
        most = max(each.shard.num_rows for each in turn.values())
        row_bytes = buffer.shape[1] * buffer.dtype.itemsize
        # It is a power of two, so that shards of similar sizes share compiled programs.
        size = min(_power_of_two(most), max(1, _PIECE_BYTES // row_bytes))
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        for first in range(0, most, size):
            places = np.full((ranks, size), end, np.int32)
            for rank, each in turn.items():
                count = max(0, min(size, each.shard.num_rows - first))
                places[rank, :count] = each.base + first + np.arange(count)
            yield first, size, put_global(places.reshape(-1), sharding)

    def _write_shards(
        self,
        buffer: Any,
        turn: _Turn,
        source: RowSource,
        kind: str | None,
        key: BufferKey,
    ) -> Any:
        ranks, width = self.layout.ranks, buffer.shape[1]
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        written = _writer(self.sharding(key), key.memory == "host")
        for first, size, places in self._places(buffer, turn):

            def part(index: Any, first: int = first, size: int = size) -> np.ndarray:
                rank = index[0].indices(ranks * size)[0] // size
                rows = np.zeros((size, width), self.dtype)
                if rank in turn:
                    each = turn[rank]
                    own = source(each.some_rows(first, size), self._columns(each, kind))
                    rows[: len(own)] = own
                return rows

            shape = ranks * size, width
            parts = jax.make_array_from_callback(shape, sharding, part)
            buffer = run_alone(written, (buffer, places, parts), self.mesh)
        return buffer

    def makes_on_devices(self, name: str) -> bool:
        """Returns whether ``create`` can make a table.

        It can if all shards of the table are on devices; a replicated table has none.

        Args:
            name: Path of the table.
        """
        shards = self.layout.stored.get(name, ())
        return bool(shards) and all(each.key.memory != "host" for each in shards)

    def create(
        self, arrays: TableArrays, name: str, make: Callable[[Any], Any], key: Any
    ) -> TableArrays:
        """Makes a table on the devices, by equal ranges of rows, and distributes it.

        No memory stores the full table.

        Args:
            arrays: All tables; replaced arrays are donated.
            name: Path of the table.
            make: Function from a random key to the full table.
            key: Random key on all devices.
        """
        count, (rows, width) = self.layout.ranks, self.shapes[name]
        row_bytes = count * width * np.dtype(self.dtype).itemsize
        most = _power_of_two(max(1, _PIECE_BYTES // row_bytes) + 1) // 2
        size = min(_power_of_two(-(-rows // count)), most)
        each_rows = -(-rows // (count * size)) * size
        by_rows = NamedSharding(self.mesh, PartitionSpec(self.axes))

        def padded(key: Any) -> Any:
            return jnp.pad(make(key), ((0, count * each_rows - rows), (0, 0)))

        table = run_alone(jax.jit(padded, out_shardings=by_rows), key, self.mesh)
        for buffer_key, turn in self._turns(name):
            buffer, move = arrays.buffers[buffer_key], _mover(by_rows, size)
            columns = np.zeros(count, np.int32)
            for rank, each in turn.items():
                columns[rank] = each.shard.columns[0]
            start = put_global(columns, by_rows)
            for first in range(0, each_rows, size):
                sources = [
                    range(at, min(at + size, rows))
                    for at in range(first, count * each_rows, each_rows)
                ]
                places = self._destinations(buffer, turn, sources, size)
                at = put_global(np.full(count, first, np.int32), by_rows)
                given = buffer, table, at, put_global(places, by_rows), start
                buffer = run_alone(move, given, self.mesh)
            arrays = _replaced(arrays, buffer_key, buffer, None)
        return arrays

    def _destinations(
        self, buffer: Any, turn: _Turn, sources: Sequence[range], size: int
    ) -> np.ndarray:
        """Returns where each rank stores the rows that every device sends to all.

        ``sources`` are the table rows that each device sends, padded to ``size``. A row
        that a rank does not store has an index beyond the rank's buffer.
        """
        ranks, end = self.layout.ranks, buffer.shape[0] // self.layout.ranks
        places = np.full((ranks, len(sources), size), end, np.int32)
        for rank, each in turn.items():
            for number, rows in enumerate(sources):
                here, there = common_rows(rows, each.row_numbers)
                if isinstance(there, slice):
                    there = np.arange(there.start, there.stop, there.step)
                places[rank, number, here] = each.base + there
        return places.reshape(-1)

    def _columns(self, each: StoredShard, kind: str | None) -> slice:
        by_row = kind is not None and self.by_row(kind)
        return slice(0, 1) if by_row else slice(*each.shard.columns)

    def collect(self, arrays: TableArrays, kind: str | None) -> dict[str, np.ndarray]:
        """Returns the full tables, or one state array of each, as NumPy arrays.

        Args:
            arrays: All tables.
            kind: Name of the state array; None for the tables.
        """
        if self.mesh.is_multi_process:
            return dict(self.each(arrays, kind))
        if kind is None:
            buffers, whole = arrays.buffers, arrays.replicated
        else:
            buffers = {key: held[kind] for key, held in arrays.states.items()}
            whole = {name: x[kind] for name, x in arrays.replicated_states.items()}
        host = {key: np.asarray(array) for key, array in buffers.items()}
        by_row = kind is not None and self.by_row(kind)
        found = collect_tables(self.layout, host, by_row)
        return found | {name: np.asarray(x) for name, x in whole.items()}

    def each(
        self, arrays: TableArrays, kind: str | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (path, values) of each table of ``collect``, one at a time.

        Args:
            arrays: All tables.
            kind: Name of the state array; None for the tables.
        """
        for name in self.shapes:
            yield name, self.gather(arrays, name, kind)

    def gather(
        self,
        arrays: TableArrays,
        name: str,
        kind: str | None,
        rows: range | None = None,
    ) -> np.ndarray:
        """Returns rows of one table, or of a state array, in this process's memory.

        Args:
            arrays: All tables.
            name: Path of the table.
            kind: Name of the state array; None for the table.
            rows: Rows to return, which may differ between processes; default: all.
        """
        rows = range(self.shapes[name][0]) if rows is None else rows
        if name in self.layout.replicated:
            whole = arrays.replicated[name]
            whole = arrays.replicated_states[name][kind] if kind else whole
            return np.asarray(whole)[rows.start : rows.stop]
        width = self.shapes[name][1]
        width = 1 if kind is not None and self.by_row(kind) else width
        found = np.zeros((len(rows), width), self.dtype)
        for key, turn in self._turns(name):
            buffer = self._buffer(arrays, key, kind)
            read = _reader(self.sharding(key), key.memory == "host")
            for first, size, places in self._places(buffer, turn):
                parts = run_alone(read, (buffer, places), self.mesh)
                parts = np.asarray(parts).reshape(self.layout.ranks, size, -1)
                for rank, each in turn.items():
                    here, there = common_rows(rows, each.some_rows(first, size))
                    found[here, self._columns(each, kind)] = parts[rank][there]
        return found

    def own_parts(
        self, arrays: TableArrays, kind: str | None
    ) -> Iterator[tuple[str, Rows, slice, np.ndarray]]:
        """Yields (table, rows, columns, values) of this process's part of all tables.

        Exactly one process yields each value. Processes exchange nothing.

        Args:
            arrays: All tables.
            kind: Name of the state array; None for the tables.
        """
        for name in self.layout.replicated:
            whole = arrays.replicated[name]
            whole = arrays.replicated_states[name][kind] if kind else whole
            for shard in whole.addressable_shards:
                if shard.replica_id == 0:
                    values = np.asarray(shard.data)
                    yield name, slice(0, len(values)), slice(0, values.shape[1]), values
        for key, width in self.layout.widths.items():
            for shard in self._buffer(arrays, key, kind).addressable_shards:
                if shard.replica_id:
                    continue
                held = np.asarray(shard.data)
                rank = (shard.index[0].start or 0) // width.rows
                for each in self._stored_on(key, rank):
                    values = held[each.base :][: each.shard.num_rows]
                    columns = self._columns(each, kind)
                    yield each.shard.table, each.row_numbers, columns, values

    def _stored_on(self, key: BufferKey, rank: int) -> Iterator[StoredShard]:
        for shards in self.layout.stored.values():
            for each in shards:
                if each.key == key and each.shard.rank == rank:
                    yield each


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _rows_of(values: np.ndarray) -> RowSource:
    return lambda rows, columns: values[rows, columns]


@functools.cache
def _writer(sharding: NamedSharding, on_host: bool) -> Callable[[Any], Any]:
    """Returns the program that writes some rows of each rank into a buffer.

    Its arguments are the buffer, rows of the buffer, and their values.
    """
    axes = PartitionSpec(sharding.spec[0])
    mapped = jax.shard_map(
        functools.partial(write_rows, on_host=on_host),
        mesh=sharding.mesh,
        in_specs=(axes, axes, axes),
        out_specs=axes,
    )
    write = jax.jit(mapped, donate_argnums=0, out_shardings=sharding)
    return lambda arrays: write(*arrays)


@functools.cache
def _mover(sharding: NamedSharding, size: int) -> Callable[[Any], Any]:
    """Returns the program that copies rows of a table, in ranges, into a buffer.

    Its arguments are the buffer, the table, the first row to copy in each device's part
    of the table, the rows of the buffer for them, and the first column of each rank's
    shard. Each device copies ``size`` rows.
    """
    axes = sharding.spec

    def move(buffer: Any, table: Any, first: Any, places: Any, column: Any) -> Any:
        own = jax.lax.dynamic_slice_in_dim(table, first[0], size)
        rows = jax.lax.all_gather(own, axes[0], tiled=True)
        rows = jax.lax.dynamic_slice_in_dim(rows, column[0], buffer.shape[1], 1)
        return write_rows(buffer, places, rows, on_host=False)

    mapped = jax.shard_map(
        move, mesh=sharding.mesh, in_specs=(axes,) * 5, out_specs=axes, check_vma=False
    )
    moved = jax.jit(mapped, donate_argnums=0)
    return lambda arrays: moved(*arrays)


@functools.cache
def _reader(sharding: NamedSharding, on_host: bool) -> Callable[[Any], Any]:
    """Returns the program that returns some rows of each rank on all processes.

    Its arguments are the buffer and rows of the buffer.
    """
    axes = PartitionSpec(sharding.spec[0])
    mapped = jax.shard_map(
        functools.partial(read_rows, on_host=on_host),
        mesh=sharding.mesh,
        in_specs=(axes, axes),
        out_specs=axes,
    )
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    read = jax.jit(mapped, out_shardings=whole)
    return lambda arrays: read(*arrays)


def _filled(leaf: Any, value: float) -> Any:
    """Returns an array of one value, created in the memory of its sharding."""
    if leaf.sharding.memory_kind != HOST_KIND:
        return jnp.full(leaf.shape, value, leaf.dtype, device=leaf.sharding)

    def part(index: Any) -> np.ndarray:
        sizes = (
            len(range(*i.indices(n))) for i, n in zip(index, leaf.shape, strict=True)
        )
        return np.full(tuple(sizes), value, leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _replaced(
    arrays: TableArrays, key: BufferKey, written: Any, kind: str | None
) -> TableArrays:
    if kind is None:
        return dataclasses.replace(arrays, buffers=arrays.buffers | {key: written})
    states = arrays.states | {key: arrays.states[key] | {kind: written}}
    return dataclasses.replace(arrays, states=states)
