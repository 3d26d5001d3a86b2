"""A run of a fixed number of processes: the first failure ends all.

This is the policy of ``whalejax launch N``, as ``react`` is that of elastic runs. It
touches no process, pipe or clock. Its inputs are exit statuses, reports and states of
the processes; its results are whether the run is over, and which process failed first.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    BlameReport,
    DeviceReport,
    Joining,
)
from whalejax.membership.exit_status import signal_name


SOON_SECONDS: Final = 1.0
"""Processes that fail within this time after the first may have failed before it."""

LOOK_SECONDS: Final = 1.0
"""Time between two checks for frozen processes."""

STOPPED_LOOKS: Final = 20
"""Number of checks after which a process stopped by a signal counts as failed."""

_FOR_ANOTHER: Final = (ENDS_FOR_ANOTHER, -signal.SIGABRT)
_STOPPED: Final = "T"
_GIVEN_UP: Final = 1


@dataclass(slots=True, kw_only=True)
class FixedRun:
    """Processes of a fixed run, by rank.

    Attributes:
        processes: Number of processes.
        stops: Whether any failure ends all; if not, only a failure of rank 0 does.
        exit_seconds: Seconds of silence, after others have ended, after which a process
            counts as stuck.
        now: Start time; later, time of the newest end of a process.
        reports: Devices that each process reported.
        over: Ranks that have ended, or were given up.
        failed: Exit statuses of the failed ranks, in the order of their failures.
    """

    processes: int
    stops: bool
    exit_seconds: float
    now: float
    reports: dict[int, DeviceReport] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    failed: dict[int, int] = field(default_factory=dict)
    _blamed: dict[int, str] = field(default_factory=dict)
    _joining: set[int] = field(default_factory=set)
    _stopped_looks: dict[int, int] = field(default_factory=dict)
    _ends_at: float = math.inf

    def hear(self, rank: int, said: DeviceReport | BlameReport | Joining) -> bool:
        """Records a report of a process; returns False if it cannot be true."""
        match said:
            case Joining():
                self._joining.add(rank)
            case DeviceReport():
                self.reports[rank] = said
            case BlameReport(rank=other, why=why):
                if other == rank or other >= self.processes:
                    return False
                self._blamed.setdefault(other, why)
        return True

    def end(self, now: float, rank: int, status: int) -> None:
        """Records the end of a process; a status below 0 means a signal."""
        if rank in self.over:
            return
        self.over.add(rank)
        self.now = now
        if status:
            self.failed[rank] = status
            if self.stops or rank == 0:
                self._ends_at = min(self._ends_at, now + SOON_SECONDS)

    def look(
        self, now: float, state: Callable[[int], str], heard_at: Mapping[int, float]
    ) -> None:
        """Gives up processes for which others wait in vain.

        Args:
            now: The time.
            state: Function that returns Linux's letter for the state of a rank.
            heard_at: Time of the last output of each rank.
        """
        for rank in self.running_ranks():
            looks = self._stopped_looks.get(rank, 0) + 1
            self._stopped_looks[rank] = looks if state(rank) == _STOPPED else 0
            if self._stopped_looks[rank] >= STOPPED_LOOKS:
                self._give_up(now, rank, _IS_STOPPED)
        for rank in sorted(self.over - self.reports.keys() - self.failed.keys()):
            if self._joining - self.reports.keys() - self.over:
                self._give_up(now, rank, _ENDED_EARLY)
        left = self.running_ranks()
        silent = now - max([self.now, *(heard_at[rank] for rank in left)])
        if left and self.over and self.stops and silent > self.exit_seconds:
            why = (
                f"has not ended {self.exit_seconds:.0f} s after others had, and has "
                "said nothing in this time: it stands still at its exit (one that "
                "works on there needs a longer --exit-timeout)"
            )
            self._give_up(now, left[0], why)

    def _give_up(self, now: float, rank: int, why: str) -> None:
        self._blamed.setdefault(rank, why)
        self.over.discard(rank)
        self.end(now, rank, _GIVEN_UP)

    def running_ranks(self) -> list[int]:
        """Returns the ranks that still run."""
        return [rank for rank in range(self.processes) if rank not in self.over]

    def seconds_left(self, now: float) -> float:
        """Returns the seconds until the run is over; 0 if it is, inf if unknown."""
        return max(0.0, self._ends_at - now) if self.running_ranks() else 0.0

    def who_failed(self, state: Callable[[int], str]) -> tuple[int, str]:
        """Returns the rank that failed first, and text that says how.

        Args:
            state: Function that returns Linux's letter for the state of a rank.
        """
        if not self._blamed and {*self.failed.values()} <= {*_FOR_ANOTHER}:
            # All ended because of another one, and none could name it.
            for rank in self.running_ranks():
                if state(rank) == _STOPPED:
                    self._blamed[rank] = _IS_STOPPED
        first = next(iter(self.failed))
        # A process that ends because of another reports it; JAX aborts processes whose
        # service has gone.
        own = [r for r, status in self.failed.items() if status not in _FOR_ANOTHER]
        killed = [rank for rank in own if self.failed[rank] < 0]
        rank = next(iter((*killed, *self._blamed, *own, first)))
        if rank in self._blamed and rank not in killed:
            ended = "" if first == rank else f" (rank {first} ended for it)"
            return rank, self._blamed[rank] + ended
        status = self.failed[rank]
        name = f"signal {signal_name(-status)}" if status < 0 else f"status {status}"
        return rank, f"failed first, with {name}"

    @property
    def status(self) -> int:
        """Shell status of the first rank that failed; 0 if none did."""
        status = next(iter(self.failed.values()), 0)
        return status if status >= 0 else 128 - status


_IS_STOPPED: Final = "is stopped by a signal (SIGSTOP or SIGTSTP) and stands still"
_ENDED_EARLY: Final = (
    "ended with exit status 0 before it had joined the others, which wait for it in "
    "init_distributed"
)
