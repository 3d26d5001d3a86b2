"""Copies of states with tables, in parts that any placement can read.

A process writes the rows of its devices, with the numbers of the rows. Later it reads
the rows that its devices then need. No process needs memory for a complete table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from whalejax.runtime.table_step import TablesState, TableStep
from whalejax.state.checkpoint_record import Leaf
from whalejax.state.shard_copies import (
    BadCopies,
    CopiedPart,
    CopiedParts,
    Part,
    arrays_of,
    shards_of,
)
from whalejax.state.table_checkpoint import leaf_of
from whalejax.tables.row_ranges import Rows, common_rows


_NUMBERS = "row numbers"
"""Section of the row numbers of shards whose rows are not consecutive."""


class CopiedTableStates:
    """States of a step with tables; see ``CopiedStates`` for the methods."""

    def __init__(self, step: TableStep) -> None:
        """Prepares copies of the states of a step.

        Args:
            step: Step of the states, with all tables on its devices.
        """
        self._step = step

    def parts(self, state: TablesState) -> list[Part]:
        """Returns this process's part of each leaf, in host memory.

        Args:
            state: State to copy, which is not donated.
        """
        found = shards_of(self._dense_leaves(state))
        store = self._step.store
        for section, kind in self._sections():
            for name, rows, columns, values in store.own_parts(state.tables, kind):
                about: dict[str, Any] = {
                    "leaf": ["tables", section, name],
                    "columns": [columns.start, columns.stop],
                }
                if isinstance(rows, slice):
                    about["rows"] = [rows.start, rows.stop, rows.step or 1]
                else:
                    at = [_NUMBERS, f"{jax.process_index()}.{len(found)}"]
                    about |= {"numbers": at, "count": len(rows)}
                    found.append(({"leaf": at}, np.asarray(rows, np.int64)))
                found.append((about, np.array(values, copy=True)))
        return found

    def read(self, found: CopiedParts) -> TablesState:
        """Returns a state in this process's layout.

        Args:
            found: Parts of all processes.

        Raises:
            BadCopies: The parts belong to another state, or are damaged.
        """
        step, store = self._step, self._step.store
        abstract = step._abstract_state()
        leaves = self._dense_leaves(abstract)
        dense = arrays_of(found, leaves)
        arrays = store.empty()
        for section, kind in self._sections():
            for name in step.plan.tables:
                parts = found.get(("tables", section, name), ())
                rows = _CopiedRows(parts, found, store.dtype)
                arrays = store.write(arrays, name, rows.values, kind)
        without = dataclasses.replace(abstract, tables=())
        state: TablesState = jax.tree.unflatten(jax.tree.structure(without), dense)
        return dataclasses.replace(state, tables=arrays)

    def _sections(self) -> list[tuple[str, str | None]]:
        """Returns (name, state array or None) for each copied array of a table."""
        states = self._step.plan.rows.state_names
        return [("rows", None), *((f"rows.{kind}", kind) for kind in states)]

    def _dense_leaves(self, state: TablesState) -> list[tuple[Leaf, Any]]:
        without = dataclasses.replace(state, tables=())
        flat, _ = jax.tree_util.tree_flatten_with_path(without)
        return [
            (leaf_of("dense", jax.tree_util.keystr(path), array), array)
            for path, array in flat
        ]


class _CopiedRows:
    def __init__(
        self, parts: Sequence[CopiedPart], found: CopiedParts, dtype: Any
    ) -> None:
        self._parts = [(part, *_extent(part, found)) for part in parts]
        self._dtype = np.dtype(dtype)
        self._read: dict[int, np.ndarray] = {}

    def values(self, rows: Rows, columns: slice) -> np.ndarray:
        """Returns some rows and columns; raises ``BadCopies`` if they are missing."""
        missing = np.ones((_count(rows), columns.stop - columns.start), bool)
        result = np.empty(missing.shape, self._dtype)
        for number, (part, theirs, (first, last)) in enumerate(self._parts):
            low, high = max(first, columns.start), min(last, columns.stop)
            here, there = common_rows(rows, theirs)
            if low >= high or not _count(here):
                continue
            if number not in self._read:
                shape = _count(theirs), last - first
                self._read[number] = part.values(shape, self._dtype)
            own = slice(low - columns.start, high - columns.start)
            copied = self._read[number][there, low - first : high - first]
            result[here, own], missing[here, own] = copied, False
        if missing.any():
            what = self._parts[0][0].name if self._parts else "a table"
            raise BadCopies(f"of {what}, {int(missing.sum())} numbers were not copied")
        return result


def _extent(part: CopiedPart, found: CopiedParts) -> tuple[Rows, tuple[int, int]]:
    first, last = part.about["columns"]
    if "rows" in part.about:
        return slice(*part.about["rows"]), (first, last)
    (numbers,) = found[tuple(part.about["numbers"])]
    return numbers.values((part.about["count"],), np.dtype(np.int64)), (first, last)


def _count(rows: Rows) -> int:
    if isinstance(rows, slice):
        return len(range(rows.start, rows.stop, rows.step or 1))
    return len(rows)
