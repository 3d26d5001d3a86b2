"""Copies tables to the processes of the sparse section, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from whalejax.sections.pipeline import Pipeline
from whalejax.sections.row_service import width_arrays
from whalejax.tables.layout import BufferKey, TableLayout, collect_tables
from whalejax.tables.programs import TableArrays
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.tables.store import TableStore
from whalejax.wire.section_messages import Begin


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["beside"], meta_fields=["number"]
)
@dataclass(frozen=True, slots=True)
class RemoteTables:
    """Handle of tables in other processes, with the tables on this process's devices.

    Attributes:
        number: Index of the state among the states that were started in the processes.
        beside: Tables on the dense part's devices, or None.
    """

    number: int
    beside: TableArrays | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteStore:
    """Store of tables in processes, with the methods of ``TableStore``.

    Attributes:
        layout: Buffers of the placement.
        optimizer: Update rule of rows, which defines their state.
        dtype: Element type of all tables.
        pipeline: Pipeline with the processes.
        begun: Number of states that were started there, as a list of one element.
        beside: Store of the tables on the dense part's devices, or None.
        forget: Function without arguments, called when rows are reset.
    """

    layout: TableLayout
    optimizer: SparseOptimizer
    dtype: Any
    pipeline: Pipeline
    begun: list[int]
    beside: TableStore | None = None
    forget: Callable[[], None] = lambda: None

    def by_row(self, kind: str) -> bool:
        """Returns whether a state array has one number for each row.

        Args:
            kind: Name of the state array.
        """
        return self.optimizer.state_width(kind, 2) == 1

    def makes_on_devices(self, name: str) -> bool:
        """Returns whether a table is on the devices, where ``create`` can make it.

        Args:
            name: Path of the table.
        """
        return self.beside is not None and self.beside.makes_on_devices(name)

    def create(
        self, tables: RemoteTables, name: str, make: Callable[[Any], Any], key: Any
    ) -> RemoteTables:
        """Makes a table on the devices; see ``TableStore.create``.

        Args:
            tables: All tables.
            name, make, key: Arguments of ``TableStore.create``, unchanged.
        """
        assert self.beside is not None and tables.beside is not None
        arrays = self.beside.create(tables.beside, name, make, key)
        return dataclasses.replace(tables, beside=arrays)

    def empty(self) -> RemoteTables:
        """Resets rows to zeros and the initial state."""
        self.forget()
        self.pipeline.clear()
        self.begun[0] += 1
        beside = None if self.beside is None else self.beside.empty()
        return RemoteTables(self.begun[0], beside)

    def write(
        self, tables: RemoteTables, name: str, values: np.ndarray, kind: str | None
    ) -> RemoteTables:
        """Writes a table, or a state array of its rows, and returns the tables.

        Args:
            tables: All tables.
            name: Path of the table.
            values: Complete table, or complete state array.
            kind: Name of the state array, or None for the table.
        """
        if self.beside is not None and name in self.beside.shapes:
            assert tables.beside is not None
            arrays = self.beside.write(tables.beside, name, values, kind)
            return dataclasses.replace(tables, beside=arrays)
        by_row = kind is not None and self.by_row(kind)
        for each in self.layout.stored[name]:
            columns = slice(0, 1) if by_row else slice(*each.shard.columns)
            rows = np.ascontiguousarray(values[each.row_numbers, columns])
            self.pipeline.put_rows(
                each.shard.rank, each.width, kind or "", each.base, rows
            )
        return tables

    def collect(self, tables: RemoteTables, kind: str | None) -> dict[str, np.ndarray]:
        """Returns all complete tables, or their state arrays, on the host by path.

        Args:
            tables: All tables, after ``Pipeline.flush``.
            kind: Name of the state array, or None for the tables.
        """
        buffers: dict[BufferKey, np.ndarray] = {}
        itemsize = np.dtype(self.dtype).itemsize
        for key, each in self.layout.widths.items():
            width = key.width
            columns = self.optimizer.state_width(kind, width) if kind else width
            parts = [
                self.pipeline.get_rows(
                    rank, width, kind or "", each.rows, columns * itemsize
                )
                for rank in range(self.layout.ranks)
            ]
            buffers[key] = np.concatenate(parts)
        by_row = kind is not None and self.by_row(kind)
        found = collect_tables(self.layout, buffers, by_row)
        if self.beside is not None and tables.beside is not None:
            found |= self.beside.collect(tables.beside, kind)
        return found

    def each(
        self, tables: RemoteTables, kind: str | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the items of ``collect``."""
        yield from self.collect(tables, kind).items()


def begin_message(
    layout: TableLayout,
    optimizer: SparseOptimizer,
    dtype: Any,
    rank: int,
    staleness: int,
    job: tuple[str, Mapping[str, Any], int] | None,
) -> Begin:
    """Returns the first message to the process of a rank.

    Args:
        layout: Buffers of the placement.
        optimizer: Update rule of rows.
        dtype: Element type of all tables.
        rank: Rank of the process.
        staleness: Maximum number of newest updates that a lookup may miss.
        job: Name, settings and batch size of a job whose batches the process makes, or
            None.
    """
    model, settings, batch_size = job or ("", {}, -1)
    widths = layout.widths.values()
    return Begin(
        staleness=staleness,
        optimizer=dataclasses.asdict(optimizer),
        dtype=np.dtype(dtype).name,
        widths=[(w.width, w.rows, w.slots, w.offset, w.first_id) for w in widths],
        restores=False,
        model=model,
        settings=dict(settings),
        batch_size=batch_size,
        arrays=tuple(x for each in widths for x in width_arrays(each, rank)),
    )


def rank_ids(layout: TableLayout, ids: np.ndarray) -> list[np.ndarray]:
    """Returns the ids of a batch that each rank looks up, ``int32[samples, columns]``.

    Args:
        layout: Buffers and columns.
        ids: Concatenated ids of all lookups, ``int32[samples, ids]``.
    """
    from whalejax.tables.recognize import NO_ID

    none = np.full((len(ids), 1), NO_ID, ids.dtype)
    padded = np.concatenate([ids, none], axis=1)
    sources = [each.source for each in layout.widths.values()]
    source = np.concatenate(sources, axis=1)
    return [np.ascontiguousarray(padded[:, source[r]]) for r in range(layout.ranks)]
