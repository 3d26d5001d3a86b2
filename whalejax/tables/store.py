"""Copies tables to the devices and back, one at a time.

Buffers are created in the devices' memory, and every shard of a table is written into
them, so that host memory holds one complete table at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.tables.host_rows import HOST_KIND, write_rows
from whalejax.tables.layout import BufferKey, StoredShard, TableLayout, collect_tables
from whalejax.tables.programs import TableArrays
from whalejax.tables.sparse_optimizers import SparseOptimizer


_PIECE_BYTES: Final = 2**28
"""Maximum bytes of rows per device in one write to a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableStore:
    """Store of tables and the state of their rows on the devices.

    Attributes:
        layout: Buffers of the placement.
        optimizer: Update rule of rows, which defines their state.
        mesh: Devices.
        axes: Mesh axes along which the ranks are numbered.
        shapes: Shape of each table, by its path.
        dtype: Element type of all tables.
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
        """Returns the sharding of a buffer by rows, and its memory.

        Args:
            key: Key of the buffer.
        """
        kind = {"memory_kind": HOST_KIND} if key.memory == "host" else {}
        return NamedSharding(self.mesh, PartitionSpec(self.axes, None), **kind)

    def write(
        self, arrays: TableArrays, name: str, values: np.ndarray, kind: str | None
    ) -> TableArrays:
        """Writes a table, or a state array of its rows, into the arrays.

        Args:
            arrays: All tables; replaced arrays are donated.
            name: Path of the table.
            values: The complete table, or the state array.
            kind: Name of the state array, or None for the table.
        """
        if name in self.layout.replicated:
            whole = jax.device_put(values, NamedSharding(self.mesh, PartitionSpec()))
            return self._replaced_whole(arrays, name, whole, kind)
        by_rank: dict[tuple[BufferKey, int], list[StoredShard]] = defaultdict(list)
        for each in self.layout.stored[name]:
            by_rank[each.key, each.shard.rank].append(each)
        for key in dict.fromkeys(key for key, _ in by_rank):
            of_key = {r: held for (k, r), held in by_rank.items() if k == key}
            for number in range(max(map(len, of_key.values()))):
                turn = {r: held[number] for r, held in of_key.items() if held[number:]}
                held = arrays.states[key][kind] if kind else arrays.buffers[key]
                written = self._write_shards(held, turn, values, kind, key)
                arrays = _replaced(arrays, key, written, kind)
        return arrays

    def _replaced_whole(
        self, arrays: TableArrays, name: str, whole: Any, kind: str | None
    ) -> TableArrays:
        if kind is None:
            tables = arrays.replicated | {name: whole}
            return dataclasses.replace(arrays, replicated=tables)
        states = arrays.replicated_states[name] | {kind: whole}
        every = arrays.replicated_states | {name: states}
        return dataclasses.replace(arrays, replicated_states=every)

    def _write_shards(
        self,
        buffer: Any,
        turn: Mapping[int, StoredShard],
        values: np.ndarray,
        kind: str | None,
        key: BufferKey,
    ) -> Any:
        """Writes at most one shard of each rank into a buffer, some rows at a time."""
        ranks, axes = self.layout.ranks, PartitionSpec(self.axes)
        sharding, width = NamedSharding(self.mesh, axes), buffer.shape[1]
        by_row = kind is not None and self.by_row(kind)
        most = max(each.shard.num_rows for each in turn.values())
        pieces = max(1, -(-most * width * buffer.dtype.itemsize // _PIECE_BYTES))
        size = -(-most // pieces)
        mapped = jax.shard_map(
            functools.partial(write_rows, on_host=key.memory == "host"),
            mesh=self.mesh,
            in_specs=(axes, axes, axes),
            out_specs=axes,
        )
        written = jax.jit(mapped, donate_argnums=0, out_shardings=self.sharding(key))
        for first in range(0, most, size):
            places = np.full((ranks, size), buffer.shape[0] // ranks, np.int32)
            for rank, each in turn.items():
                count = max(0, min(size, each.shard.num_rows - first))
                places[rank, :count] = each.base + first + np.arange(count)

            def part(index: Any, first: int = first) -> np.ndarray:
                rank = index[0].indices(ranks * size)[0] // size
                rows = np.zeros((size, width), self.dtype)
                if rank in turn:
                    each = turn[rank]
                    columns = slice(0, 1) if by_row else slice(*each.shard.columns)
                    own = values[each.some_rows(first, size), columns]
                    rows[: len(own)] = own
                return rows

            shape = ranks * size, width
            parts = jax.make_array_from_callback(shape, sharding, part)
            place = jax.device_put(places.reshape(-1), sharding)
            buffer = written(buffer, place, parts)
        return buffer

    def collect(self, arrays: TableArrays, kind: str | None) -> dict[str, np.ndarray]:
        """Returns the complete tables, or one state array of each, as NumPy arrays.

        Args:
            arrays: All tables.
            kind: Name of the state array, or None for the tables.
        """
        if kind is None:
            buffers, whole = arrays.buffers, arrays.replicated
        else:
            buffers = {key: held[kind] for key, held in arrays.states.items()}
            whole = {name: x[kind] for name, x in arrays.replicated_states.items()}
        host = {key: np.asarray(array) for key, array in buffers.items()}
        by_row = kind is not None and self.by_row(kind)
        found = collect_tables(self.layout, host, by_row)
        return found | {name: np.asarray(x) for name, x in whole.items()}


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
    """Returns the arrays with one buffer, or one state array of it, replaced."""
    if kind is None:
        return dataclasses.replace(arrays, buffers=arrays.buffers | {key: written})
    states = arrays.states | {key: arrays.states[key] | {kind: written}}
    return dataclasses.replace(arrays, states=states)
