"""Counts the lookups of each row during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whalejax.tables.recognize import NO_ID


class LookupCounts:
    """Number of lookups of each row in some batches.

    Attributes:
        batches: Number of batches that were counted.
        by_table: Number of lookups of each row, ``int64[rows]``, by name of the table.
    """

    def __init__(self) -> None:
        """Creates counts of zero."""
        self.batches = 0
        self.by_table: dict[str, np.ndarray] = {}

    def add(
        self, names: Sequence[str], rows: Sequence[int], ids: Sequence[Any]
    ) -> None:
        """Counts one batch.

        Args:
            names: Name of the table of each lookup.
            rows: Number of rows of the table of each lookup.
            ids: Ids of each lookup; ids without a row are not counted.
        """
        self.batches += 1
        for name, size, own in zip(names, rows, ids, strict=True):
            known = np.asarray(own).ravel()
            known = known[(known != NO_ID) & (known >= 0) & (known < size)]
            counted = np.bincount(known, minlength=size)
            held = self.by_table.get(name)
            self.by_table[name] = counted if held is None else held + counted
