"""Answers requests for the rows of one process of the sparse section."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from whalejax.sections.snapshots import (
    clear_snapshots,
    read_snapshot,
    write_snapshot,
)
from whalejax.sections.sparse_rows import (
    MissingIdsError,
    SparseRows,
    WrongVersionError,
)
from whalejax.tables.layout import WidthLayout
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.wire.messages import Message, dtype_of
from whalejax.wire.section_messages import (
    Begin,
    BeginAnswer,
    Commit,
    GetRows,
    LookUp,
    MadeBatch,
    MakeBatch,
    PutRows,
    RowsChunk,
    RowsPut,
    Save,
    Saved,
    Update,
    Updated,
    Vectors,
)
from whalejax.wire.service import Handlers, RefusedRequestError


BatchMaker: TypeAlias = Callable[[int], Sequence[np.ndarray]]
"""Function from a step number to its batch's leaves, and the ids of all lookups."""

MakerFinder: TypeAlias = Callable[[str, Mapping[str, Any], int], BatchMaker]
"""Function from the name, settings and batch size of a job to its ``BatchMaker``."""


def width_arrays(each: WidthLayout, rank: int) -> list[np.ndarray]:
    """Returns one rank's arrays of a layout, for ``width_layout``.

    Args:
        each: Layout of a buffer on all ranks.
        rank: Rank of the process.
    """
    names = "modulus", "residue", "low", "high", "base", "slot"
    return [getattr(each, name)[rank : rank + 1] for name in names]


def width_layout(
    sizes: tuple[int, int, int, int, int], arrays: Sequence[np.ndarray]
) -> WidthLayout:
    """Returns the layout of a buffer on one rank.

    Args:
        sizes: Width, rows, slots, offset and first id.
        arrays: Result of ``width_arrays``.
    """
    width, rows, slots, offset, first_id = sizes
    modulus, residue, low, high, base, slot = arrays
    return WidthLayout(
        width=width,
        rows=rows,
        slots=slots,
        source=np.zeros_like(modulus),
        modulus=modulus,
        residue=residue,
        low=low,
        high=high,
        base=base,
        slot=slot,
        offset=offset,
        first_id=first_id,
    )


class RowService:
    """Service for the rows of one process."""

    def __init__(self, folder: Path, find_maker: MakerFinder) -> None:
        """Starts without rows.

        Args:
            folder: Folder of this process's snapshots.
            find_maker: Function that finds the ``BatchMaker`` of a job.
        """
        self._folder, self._find_maker = folder, find_maker
        self._rows: SparseRows | None = None
        self._asked: Begin | None = None
        self._maker: BatchMaker | None = None
        self._writing = threading.Lock()

    @property
    def handlers(self) -> Handlers:
        """Handler of each kind of question."""
        return {
            Begin: self._begin,
            PutRows: self._put,
            GetRows: self._get,
            Commit: self._commit,
            Save: lambda asked: self._save(asked.kept),
            LookUp: self._look_up,
            Update: self._update,
            MakeBatch: self._make_batch,
        }

    @property
    def rows(self) -> SparseRows:
        """Rows of this process.

        Raises:
            RefusedRequestError: The process has no rows yet.
        """
        if self._rows is None:
            raise RefusedRequestError("stale", "no rows were begun with")
        return self._rows

    def _begin(self, asked: Begin) -> Message:
        widths = {
            sizes[0]: width_layout(sizes, asked.arrays[6 * n : 6 * n + 6])
            for n, sizes in enumerate(asked.widths)
        }
        optimizer = SparseOptimizer(**asked.optimizer)
        rows = SparseRows(widths, optimizer, dtype_of(asked.dtype), asked.staleness)
        version = -1
        if asked.restores:
            found = read_snapshot(self._folder, asked.version)
            if found is None:
                raise RefusedRequestError(
                    "missing", f"{self._folder} holds no whole snapshot"
                )
            rows.load(found)
            version = rows.version
        else:
            clear_snapshots(self._folder)
        self._rows, self._asked, self._maker = rows, asked, None
        return BeginAnswer(version=version)

    def _put(self, asked: PutRows) -> Message:
        (array,) = asked.arrays
        self.rows.write(asked.width, asked.state, asked.first, array)
        return RowsPut()

    def _get(self, asked: GetRows) -> Message:
        found = self.rows.read(asked.width, asked.state, asked.first, asked.count)
        return RowsChunk(arrays=(found,))

    def _commit(self, asked: Commit) -> Message:
        try:
            self.rows.commit(asked.version, is_fresh=asked.fresh)
        except WrongVersionError as error:
            raise RefusedRequestError("stale", str(error)) from None
        return self._save(asked.kept)

    def _save(self, kept: int) -> Message:
        with self._writing:
            arrays = self.rows.copy()
            write_snapshot(self._folder, arrays, kept)
            return Saved(version=int(arrays["version"]))

    def _look_up(self, asked: LookUp) -> Message:
        try:
            read = self.rows.look_up(asked.step, asked.arrays)
        except WrongVersionError as error:
            raise RefusedRequestError("stale", str(error)) from None
        return Vectors(version=read.version, seconds=read.seconds, arrays=read.vectors)

    def _update(self, asked: Update) -> Message:
        rows = self.rows
        count = len(rows.widths)
        gradients, ids = asked.arrays[:count], asked.arrays[count:] or None
        try:
            seconds = rows.update(asked.step, gradients, ids, asked.received)
        except MissingIdsError as error:
            raise RefusedRequestError("missing", str(error)) from None
        return Updated(version=rows.version, seconds=seconds)

    def _make_batch(self, asked: MakeBatch) -> Message:
        begun, said = time.perf_counter(), self._asked
        if said is None or not said.model:
            raise RefusedRequestError(
                "stale", "no job was named whose batches could be made"
            )
        if self._maker is None:
            size = said.batch_size
            self._maker = self._find_maker(said.model, said.settings, size)
        arrays = tuple(self._maker(asked.step))
        return MadeBatch(seconds=time.perf_counter() - begun, arrays=arrays)
