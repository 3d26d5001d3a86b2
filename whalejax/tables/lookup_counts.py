"""Counts of each row's lookups during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whalejax.tables.recognize import NO_ID


class LookupCounts:
    """Lookups of some batches.

    Attributes:
        batches: Number of batches that were counted.
        by_table: ``int64[rows]`` by the name of each table.
    """

    def __init__(self) -> None:
        """Starts without counts."""
        self.batches = 0
        self.by_table: dict[str, np.ndarray] = {}

    def add(
        self, names: Sequence[str], rows: Sequence[int], ids: Sequence[Any]
    ) -> None:
        """Counts one batch.

        Args:
            names: Name of the table of each lookup.
            rows: Number of rows of that table.
            ids: Ids of each lookup; ids without a row are not counted.
        """
        self.batches += 1
        for name, size, own in zip(names, rows, ids, strict=True):
            known = np.asarray(own).ravel()
            known = known[(known != NO_ID) & (known >= 0) & (known < size)]
            counted = np.bincount(known, minlength=size)
            held = self.by_table.get(name)
            self.by_table[name] = counted if held is None else held + counted
