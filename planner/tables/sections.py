"""Two sections that run in parallel: tables on CPUs, and the dense part.

A batch takes t_s seconds of generation, lookups and updates in one process, t_w seconds
of messages, and t_d seconds of the dense part. With n processes and lookups that lack
at most s updates, s + 1 batches overlap. A step then takes

    max(t_s / n, t_w, t_d, (t_s / n + t_w + t_d) / (s + 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import count_text, milliseconds
from whalejax.planner.tables.table import ID_BYTES, Table


WIRE_BYTES_PER_SECOND: Final = 0.4e9
"""Assumed seconds per byte of encrypted transfers between two processes of one machine,
with transfers in both directions. Measured times of a run (``times=``) replace it.
"""

_WIRE_LATENCY: Final = 1e-3
"""Assumed latency of a message, in seconds."""
ENOUGH: Final = 1.01
"""Factor by which a step may be longer if it needs fewer processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTimes:
    """Seconds of each part of a step, if each runs alone.

    Attributes:
        sparse_seconds: Seconds of a batch's lookups and updates in one process.
        wire_seconds: Seconds of transfers of a batch's ids, vectors and gradients.
        dense_seconds: Seconds of the dense part for one batch.
        batch_seconds: Seconds to generate a batch in a process of the sparse section; 0
            if batches are given.
        tables: Names of the tables in the sparse section; None for all. Other tables
            are in the dense section.
    """

    sparse_seconds: float
    wire_seconds: float
    dense_seconds: float
    batch_seconds: float = 0.0
    tables: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        problems = Arguments("SectionTimes")
        for name in (*self.__slots__,)[:-1]:
            problems.number(name, getattr(self, name), least=0)
        problems.raise_if_any()

    def loads(self, processes: int) -> dict[str, float]:
        """Returns the seconds of a step in which each section is busy, by its name.

        Args:
            processes: Number of processes of the sparse section.
        """
        sparse = (self.sparse_seconds + self.batch_seconds) / processes
        return {
            "sparse": sparse,
            "wire": self.wire_seconds,
            "dense": self.dense_seconds,
        }

    def step_seconds(self, processes: int, staleness: int) -> float:
        """Returns the seconds of a step.

        Args:
            processes: Number of processes of the sparse section.
            staleness: Number of updates that a lookup may lack.

        >>> times = SectionTimes(sparse_seconds=2.0, wire_seconds=0.5,
        ...                      dense_seconds=1.0)
        >>> times.step_seconds(2, 0), times.step_seconds(2, 1), times.step_seconds(2, 4)
        (2.5, 1.25, 1.0)
        """
        loads = self.loads(processes).values()
        return max(*loads, sum(loads) / (staleness + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """Number of processes, staleness and queue depth of the two sections.

    Attributes:
        staleness: Number of newest updates that a lookup may lack.
        processes: Number of processes of the sparse section.
        most_processes: Number of processes that the cluster offers.
        queue_depth: Largest number of batches under way, including one that waits.
        times: Seconds of each part of a step.
        is_measured: Whether ``times`` were measured instead of predicted.
    """

    staleness: int
    processes: int
    most_processes: int
    queue_depth: int
    times: SectionTimes
    is_measured: bool

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.times.step_seconds(self.processes, self.staleness)

    @property
    def alone_seconds(self) -> float:
        """Seconds of a step if one process did all parts one after the other."""
        times = self.times
        return times.sparse_seconds + times.batch_seconds + times.dense_seconds

    def __str__(self) -> str:
        loads = self.times.loads(self.processes)
        step = max(self.step_seconds, 1e-12)
        busy = ", ".join(
            f"{name} {milliseconds(seconds)} ({seconds / step:.0%})"
            for name, seconds in loads.items()
        )
        how = "as measured" if self.is_measured else "as predicted"
        late = (
            "synchronous"
            if not self.staleness
            else f"rows lack the newest {count_text(self.staleness, 'update')}"
        )
        return (
            f"processes of the sparse section: {self.processes} of "
            f"{self.most_processes}; {late}; batches on the way: at most "
            f"{self.queue_depth}\n"
            f"a step takes {milliseconds(step)} {how}; busy: {busy}\n"
            f"in one process, one part after the other, it would take "
            f"{milliseconds(self.alone_seconds)}"
        )


def choose_sections(
    times: SectionTimes,
    most_processes: int,
    staleness: int,
    *,
    is_measured: bool,
    least_processes: int = 1,
) -> Sections:
    """Chooses the fewest processes that are about as fast as all, and the queue depth.

    Args:
        times: Seconds of each part of a step.
        most_processes: Number of available processes.
        staleness: Number of updates that a lookup may lack.
        is_measured: Whether ``times`` were measured.
        least_processes: Smallest number of processes; default: 1.

    >>> times = SectionTimes(sparse_seconds=2.0, wire_seconds=0.1, dense_seconds=1.1)
    >>> chosen = choose_sections(times, 8, 4, is_measured=True)
    >>> chosen.processes, chosen.queue_depth
    (2, 3)
    """
    best = times.step_seconds(most_processes, staleness)
    processes = next(
        n
        for n in range(least_processes, most_processes + 1)
        if times.step_seconds(n, staleness) <= best * ENOUGH
    )
    loads = times.loads(processes).values()
    # The queue keeps the slowest section busy, and has one more batch that waits.
    hiding = math.ceil(round(sum(loads) / max(*loads, 1e-12), 6))
    return Sections(
        staleness=staleness,
        processes=processes,
        most_processes=most_processes,
        queue_depth=min(staleness + 1, hiding) + 1,
        times=times,
        is_measured=is_measured,
    )


_WORTH: Final = 0.8
"""Largest fraction of the vectors' bytes at which distinct rows are sent instead."""


def process_seconds(
    table: Table, batch_size: int, read_seconds: float
) -> tuple[float, float]:
    """Returns the seconds per step of a table in one process, and of its messages.

    Args:
        table: The table.
        batch_size: Number of samples of a global batch.
        read_seconds: Seconds to read or write one byte of memory.
    """
    lookups = batch_size * table.lookups_per_sample
    row = table.width * table.element_bytes
    state = row + table.optimizer_bytes_per_row
    distinct = table.distinct_rows(lookups)
    moved = lookups * row + 2 * distinct * state
    vectors = batch_size * table.vectors_per_sample
    if vectors == lookups and distinct < _WORTH * vectors:
        # Each distinct row is requested and sent once.
        lookups = vectors = distinct
    sent = lookups * ID_BYTES + 2 * vectors * row
    return moved * read_seconds, sent / WIRE_BYTES_PER_SECOND


def wire_latency(tables: Sized) -> float:
    """Returns the latency of a step's messages, without the time of their bytes.

    Args:
        tables: Tables in processes; without tables there are no messages.
    """
    return 2 * _WIRE_LATENCY if len(tables) else 0.0
