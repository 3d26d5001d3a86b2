"""Embedding tables to place, and the devices that may store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from whalejax.meshes.checks import Arguments
from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import (
    AxisPart,
    axis_parts,
    collective_seconds,
)
from whalejax.planner.plan_entries import CollectiveKind
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Equal devices, each of which stores tables and computes a part of the batch.

    Attributes:
        count: Number of ranks.
        per_node: Number of ranks of one node; it divides ``count``.
        memory_bytes: Bytes for tables on each rank.
        host_bytes: Bytes of host memory for the tables of each rank; 0 without.
        read_seconds: Seconds to read or write one byte of device memory.
        host_seconds: Seconds to move one byte between host memory and device.
        exchange_seconds: Seconds per byte that a rank sends in an all-to-all.
        reduce_seconds: Seconds per byte of an all-reduce over all ranks.
        node_reduce_seconds: Seconds per byte of a reduce-scatter within a node.
        cross_seconds: Seconds per byte of an all-to-all between nodes only.
    """

    count: int
    per_node: int
    memory_bytes: float
    host_bytes: float = 0.0
    read_seconds: float = 1e-12
    host_seconds: float = 1e-11
    exchange_seconds: float = 1e-11
    reduce_seconds: float = 2e-11
    node_reduce_seconds: float = 1e-11
    cross_seconds: float = 1e-11

    def __post_init__(self) -> None:
        problems = Arguments("Ranks")
        both = [
            problems.whole("count", self.count, least=1),
            problems.whole("per_node", self.per_node, least=1),
        ]
        if all(both) and self.count % self.per_node:
            problems.add(
                f"per_node is {self.per_node}, which does not divide count {self.count}"
            )
        problems.raise_if_any()

    @classmethod
    def of(cls, cluster: Cluster, *, used_bytes: float = 0.0) -> Ranks:
        """Returns the ranks of a cluster, each as fast as the slowest device.

        Args:
            cluster: Devices and links of the cluster.
            used_bytes: Bytes of device memory that are not for tables; default: 0.
        """
        kinds, count = cluster.kinds, cluster.num_devices
        counts = {node.count for node in cluster.nodes}
        per_node = counts.pop() if len(counts) == 1 else 1
        whole = axis_parts(("data",), {"data": count}, cluster)
        mesh = {"node": count // per_node, "data": per_node}
        inside = axis_parts(("data",), mesh, cluster)
        across = axis_parts(("node",), mesh, cluster)
        hosted = all(
            k.host_memory_bytes and k.host_link_bytes_per_second for k in kinds
        )
        links = [k.host_link_bytes_per_second or 1.0 for k in kinds]
        return cls(
            count=count,
            per_node=per_node,
            memory_bytes=max(0.0, cluster.memory_bytes - used_bytes),
            host_bytes=min(k.host_memory_bytes or 0 for k in kinds) if hosted else 0.0,
            read_seconds=1.0 / min(k.memory_bytes_per_second for k in kinds),
            host_seconds=1.0 / min(links) if hosted else 1.0,
            exchange_seconds=_seconds_per_byte("all-to-all", whole),
            reduce_seconds=_seconds_per_byte("all-reduce", whole),
            node_reduce_seconds=_seconds_per_byte("reduce-scatter", inside),
            cross_seconds=_seconds_per_byte("all-to-all", across),
        )


def _seconds_per_byte(kind: CollectiveKind, parts: tuple[AxisPart, ...]) -> float:
    many = 1e9
    base = collective_seconds(kind, 0.0, parts)
    return (collective_seconds(kind, many, parts) - base) / many


ID_BYTES: Final = 4
"""Bytes of an id (int32) in an exchange between ranks."""

LEAST_COLUMNS: Final = 16
"""Number of columns of the narrowest shard: one cache line of float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Embedding table.

    Attributes:
        name: Name of the table; unique among tables that are placed together.
        rows: Number of rows.
        width: Number of elements of a row.
        element_bytes: Bytes of an element; default: 4.
        optimizer_bytes_per_row: Bytes of optimizer state per row; default: 4, as for
            row-wise Adagrad.
        lookups_per_sample: Mean number of rows that a sample reads; default: 1.
        pooled: Whether the rows of a sample are summed before the exchange. If not,
            every row that is looked up is exchanged.
        vectors: Number of vectors that are exchanged per sample, for a table with
            several lookups. Default: None, which means 1 if ``pooled``, else
            ``lookups_per_sample``.
        splits_columns: Whether columns may be stored separately. False if the
            optimizer's state belongs to full rows, as in row-wise Adagrad.
        counts: Number of lookups of each row in a part of the data; None if unknown.
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
                f"the counts of table {self.name!r} have shape {counts.shape}, but the "
                f"table has {self.rows:,} rows; expected one count per row. Are these "
                "the counts of another table?"
            )
        if counts.dtype.kind not in "iuf":
            raise PlanError(
                f"the counts of table {self.name!r} are {counts.dtype}; expected "
                "numbers, 0 or more"
            )
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise PlanError(
                f"the counts of table {self.name!r} are {counts.min()} to "
                f"{counts.max()}; expected finite numbers, 0 or more"
            )
        object.__setattr__(self, "counts", counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its optimizer state."""
        row = self.width * self.element_bytes + self.optimizer_bytes_per_row
        return self.rows * row

    @property
    def vectors_per_sample(self) -> float:
        """Number of vectors that a sample needs from another rank."""
        if self.vectors is not None:
            return self.vectors
        return 1.0 if self.pooled else self.lookups_per_sample

    def distinct_rows(self, lookups: float) -> float:
        """Returns the expected number of distinct rows in a number of lookups.

        Args:
            lookups: Number of lookups of all samples of a batch. Without ``counts``,
                ids are assumed to be uniform, which gives the most distinct rows.

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
        """Returns the most frequent rows, in ascending order.

        Args:
            count: Number of rows. Of equally frequent rows, the first are returned.

        Returns:
            ``int64[count]``, or None for the first rows, as without ``counts``.

        >>> Table(name="a", rows=4, width=4, counts=[1, 5, 2, 5]).hottest_rows(2)
        array([1, 3])
        """
        if self.counts is None or not np.sum(self.counts):
            return None
        order = np.argsort(-np.asarray(self.counts, float), kind="stable")
        found = np.sort(order[:count])
        return None if np.array_equal(found, np.arange(count)) else found

    def share_of(self, rows: np.ndarray | None, count: int) -> float:
        """Returns the fraction of lookups that read some rows.

        Without ``counts``, this is the fraction of rows.

        Args:
            rows: The rows; None for the first rows.
            count: Number of rows.
        """
        if self.counts is None or not np.sum(self.counts):
            return count / self.rows
        counts = np.asarray(self.counts, float)
        own = counts[:count] if rows is None else counts[rows]
        return float(own.sum() / counts.sum())

    def range_imbalance(self, parts: int) -> float:
        """Returns the lookups of the busiest of several row ranges, over their mean.

        Args:
            parts: Number of row ranges; see ``range_edges``.

        Returns:
            Ratio of at least 1; infinity without counts.
        """
        if self.counts is None or not np.sum(self.counts):
            return float("inf")
        edges = range_edges(self.rows, parts)
        cumulative = np.concatenate([[0.0], np.cumsum(self.counts, dtype=float)])
        loads = np.diff(cumulative[list(edges)])
        return float(loads.max() * parts / cumulative[-1])


def range_edges(rows: int, parts: int) -> tuple[int, ...]:
    """Returns the edges of nearly equal row ranges; the first ranges have one row more.

    >>> range_edges(10, 3)
    (0, 4, 7, 10)
    """
    size, longer = divmod(rows, parts)
    return tuple(i * size + min(i, longer) for i in range(parts + 1))
