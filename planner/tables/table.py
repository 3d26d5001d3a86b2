"""An embedding table for placement: its size and its read frequency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from whalejax.meshes.checks import Arguments
from whalejax.planner.plan_errors import PlanError


ID_BYTES: Final = 4
"""Bytes of one id in an exchange between ranks: int32."""

LEAST_COLUMNS: Final = 16
"""Columns of the narrowest shard: one cache line of float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """One embedding table.

    Attributes:
        name: Name, unique among tables that are placed together.
        rows: Number of rows.
        width: Elements of a row.
        element_bytes: Bytes of an element; 4 by default.
        optimizer_bytes_per_row: Bytes of optimizer state per row; 4 by default, as for
            row-wise Adagrad.
        lookups_per_sample: Mean number of rows that a sample reads; 1 by default.
        pooled: Whether the rows of a sample are summed before they are exchanged.
            Otherwise every row that is looked up is exchanged.
        vectors: Vectors exchanged per sample, if ``pooled`` does not determine them, as
            with several lookups; None follows ``pooled``.
        splits_columns: Whether columns may be stored separately. False if the
            optimizer's state belongs to a full row, as in row-wise Adagrad.
        counts: Number of lookups of each row in a sample of the data, or None.
    """

    name: str
    rows: int
    width: int
    element_bytes: int = 4
    optimizer_bytes_per_row: int = 4
    lookups_per_sample: float = 1.0
    pooled: bool = True
    vectors: float | None = None
    splits_columns: bool = True
    counts: Sequence[int] | np.ndarray | None = None

    def __post_init__(self) -> None:
        problems = Arguments(f"Table {self.name!r}")
        problems.words("name", self.name)
        for name in ("rows", "width", "element_bytes"):
            problems.whole(name, getattr(self, name), least=1)
        problems.whole("optimizer_bytes_per_row", self.optimizer_bytes_per_row)
        problems.number("lookups_per_sample", self.lookups_per_sample, least=0)
        problems.switch("pooled", self.pooled)
        problems.number("vectors", self.vectors, least=0, none=True)
        problems.switch("splits_columns", self.splits_columns)
        problems.raise_if_any()
        if self.counts is None:
            return
        counts = np.asarray(self.counts)
        if counts.shape != (self.rows,):
            raise PlanError(
                f"the counts of table {self.name!r} have shape {counts.shape}, and the "
                f"table has {self.rows:,} rows; expected one count a row. Are these "
                "the counts of another table?"
            )
        if counts.dtype.kind not in "iuf" or (counts < 0).any():
            raise PlanError(
                f"the counts of table {self.name!r} are {counts.dtype}, least "
                f"{counts.min()}; expected numbers, 0 or more"
            )
        object.__setattr__(self, "counts", counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its optimizer state."""
        row = self.width * self.element_bytes + self.optimizer_bytes_per_row
        return self.rows * row

    @property
    def vectors_per_sample(self) -> float:
        """Vectors of the table's width that a sample needs from another rank."""
        if self.vectors is not None:
            return self.vectors
        return 1.0 if self.pooled else self.lookups_per_sample

    def distinct_rows(self, lookups: float) -> float:
        """Returns the expected number of distinct rows among some lookups.

        Args:
            lookups: Lookups of all samples of a batch. Without counts, ids are assumed
                uniform, which gives the most distinct rows.

        >>> round(Table(name="a", rows=10, width=4).distinct_rows(10), 2)
        6.51
        """
        if self.counts is None or not np.sum(self.counts):
            if self.rows == 1:
                return min(1.0, lookups)
            return float(-self.rows * np.expm1(lookups * np.log1p(-1.0 / self.rows)))
        share = np.asarray(self.counts, float) / float(np.sum(self.counts))
        return float(np.sum(-np.expm1(-lookups * share)))

    def hottest_rows(self, count: int) -> np.ndarray | None:
        """Returns the rows that were looked up most, sorted; the first ones if unknown.

        Args:
            count: Number of rows; of equally frequent ones the first are taken.

        Returns:
            ``int64[count]``; None if these are the first rows.

        >>> Table(name="a", rows=4, width=4, counts=[1, 5, 2, 5]).hottest_rows(2)
        array([1, 3])
        """
        if self.counts is None or not np.sum(self.counts):
            return None
        order = np.argsort(-np.asarray(self.counts, float), kind="stable")
        found = np.sort(order[:count])
        return None if np.array_equal(found, np.arange(count)) else found

    def share_of(self, rows: np.ndarray | None, count: int) -> float:
        """Returns the part of the lookups in some rows; in proportion if unknown.

        Args:
            rows: The rows, or None for the first ones.
            count: Number of rows.
        """
        if self.counts is None or not np.sum(self.counts):
            return count / self.rows
        counts = np.asarray(self.counts, float)
        own = counts[:count] if rows is None else counts[rows]
        return float(own.sum() / counts.sum())

    def range_imbalance(self, parts: int) -> float:
        """Returns the busiest row range's lookups over the mean; inf if unknown."""
        if self.counts is None or not np.sum(self.counts):
            return float("inf")
        edges = range_edges(self.rows, parts)
        cumulative = np.concatenate([[0.0], np.cumsum(self.counts, dtype=float)])
        loads = np.diff(cumulative[list(edges)])
        return float(loads.max() * parts / cumulative[-1])


def range_edges(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the edges of row ranges; the first ranges are longer by one row.

    >>> range_edges(10, 3)
    (0, 4, 7, 10)
    """
    size, longer = divmod(rows, parts)
    return tuple(i * size + min(i, longer) for i in range(parts + 1))
