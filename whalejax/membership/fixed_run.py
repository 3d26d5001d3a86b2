"""A run of a fixed number of processes, which ends at a failure.

This is the policy of ``whalejax launch --processes N``. It touches no process, pipe or
clock: events bring exit statuses, and ``hear`` receives the processes' reports. Its
effects start each process once, and end the run. Then ``failure`` names the process
that failed first.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from whalejax.distributed.launch_env import (
    ENDS_FOR_ANOTHER,
    BlameReport,
    DeviceReport,
    Joining,
)
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending, shell_status, signal_name
from whalejax.membership.lease import Lease


SOON_SECONDS: Final = 1.0
"""Seconds after the first noticed failure in which others are collected. The order of
exits is not that of failures.
"""

STOPPED_SECONDS: Final = 20.0
"""Time after which a process stopped by a signal counts as failed."""

_LONGEST_TURN_SECONDS: Final = 5.0
_FOR_ANOTHER: Final = (ENDS_FOR_ANOTHER, -signal.SIGABRT)
_STOPPED: Final = "T"
_GIVEN_UP: Final = 1


def rank_name(rank: int) -> str:
    """Returns the name of the process of a rank.

    >>> rank_name(2)
    'rank-2'
    """
    return f"rank-{rank}"


@dataclass(slots=True, kw_only=True)
class FixedRun:
    """Processes of a fixed run, by rank.

    Attributes:
        processes: Number of processes.
        stops: Whether any failure ends all; if not, only a failure of rank 0 does.
        exit_seconds: Seconds without output of any process after which one that still
            runs counts as stuck, if another one has ended and ``stops`` is true.
        now: Start time; later, time at which a process last ended.
        reports: Devices that each process reported.
        written_at: Time of the last output of each rank. The caller sets it.
        states: Linux's letter for the state of each process, by name. The caller sets
            it before each ``Tick``.
        over: Ranks that have ended, or were given up.
        failed: Exit statuses of the failed ranks, as ``subprocess`` reports them, or 1
            if they were given up, in the order of their failures.
        failure: Rank that failed first, and text that says how; None if none failed.
    """

    processes: int
    stops: bool
    exit_seconds: float
    now: float
    reports: dict[int, DeviceReport] = field(default_factory=dict)
    written_at: dict[int, float] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    failed: dict[int, int] = field(default_factory=dict)
    failure: tuple[int, str] | None = None
    _blamed: dict[int, str] = field(default_factory=dict)
    _joining: set[int] = field(default_factory=set)
    _going: Lease[int] = field(
        default_factory=lambda: Lease(STOPPED_SECONDS, _LONGEST_TURN_SECONDS)
    )
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

    def react(self, now: float, event: ev.Event) -> list[ev.Effect]:
        """Applies an event, and returns its effects: starts, and the end.

        Args:
            now: The time, in seconds.
            event: Event that happened.
        """
        match event:
            case ev.StartsAllowedEvent():
                return [ev.StartEffect(rank) for rank in range(self.processes)]
            case ev.Terminate(number=number):
                return [ev.End(Ending.INTERRUPTED, "", 128 + number)]
            case ev.ProcessExitEvent(name=name, status=status):
                assert status is not None  # All processes are children of the loop.
                self._on_end(now, int(name.rpartition("-")[2]), status)
            case ev.NotStarted(slot=slot, why=why):
                self._give_up(now, slot, f"cannot be started: {why}")
            case ev.Tick():
                self._look(now)
        if self.running_ranks() and now < self._ends_at:
            return []
        if not self.failed:
            return [ev.End(Ending.COMPLETE, "")]
        self.failure = self._first_failure()
        status = next(iter(self.failed.values()))
        return [ev.End(Ending.FAILED, "", shell_status(status))]

    def _on_end(self, now: float, rank: int, status: int) -> None:
        if rank in self.over:
            return
        self.over.add(rank)
        self.now = now
        if status:
            self.failed[rank] = status
            if self.stops or rank == 0:
                self._ends_at = min(self._ends_at, now + SOON_SECONDS)

    def _look(self, now: float) -> None:
        """Gives up processes for which others wait in vain."""
        self._going.turn(now)
        for rank in self.running_ranks():
            is_stopped = self.states.get(rank_name(rank)) == _STOPPED
            if not is_stopped or rank not in self._going.heard_at:
                self._going.renew(rank, now)
        for rank in self._going.overdue(now):
            if rank not in self.over:
                self._give_up(now, rank, _IS_STOPPED)
        for rank in sorted(self.over - self.reports.keys() - self.failed.keys()):
            if self._joining - self.reports.keys() - self.over:
                self._give_up(now, rank, _ENDED_EARLY)
        left = self.running_ranks()
        written = [self.written_at.get(rank, 0.0) for rank in left]
        silent = now - max([self.now, *written])
        if left and self.over and self.stops and silent > self.exit_seconds:
            why = (
                f"has not ended {self.exit_seconds:.0f} s after others had, and has "
                "said nothing in this time: it stands still at its exit (if it "
                "still works there, give a longer --exit-timeout)"
            )
            self._give_up(now, left[0], why)

    def _give_up(self, now: float, rank: int, why: str) -> None:
        self._blamed.setdefault(rank, why)
        self.over.discard(rank)
        self._on_end(now, rank, _GIVEN_UP)

    def running_ranks(self) -> list[int]:
        """Returns the ranks that still run."""
        return [rank for rank in range(self.processes) if rank not in self.over]

    @property
    def is_unconnected(self) -> bool:
        """Whether none of several processes has asked to join the others."""
        return self.processes > 1 and not (self._joining or self.reports)

    def _first_failure(self) -> tuple[int, str]:
        if not self._blamed and {*self.failed.values()} <= {*_FOR_ANOTHER}:
            # All ended because another process failed, and none could name it.
            for rank in self.running_ranks():
                if self.states.get(rank_name(rank)) == _STOPPED:
                    self._blamed[rank] = _IS_STOPPED
        first = next(iter(self.failed))
        # A process that ends because of another one reports that. JAX aborts processes
        # whose coordination service is gone.
        own = [r for r, status in self.failed.items() if status not in _FOR_ANOTHER]
        killed = [rank for rank in own if self.failed[rank] < 0]
        rank = next(iter((*killed, *self._blamed, *own, first)))
        if rank in self._blamed and rank not in killed:
            ended_for_it = first != rank and self.failed[first] in _FOR_ANOTHER
            ended = f" (rank {first} ended for it)" if ended_for_it else ""
            return rank, self._blamed[rank] + ended
        status = self.failed[rank]
        name = f"signal {signal_name(-status)}" if status < 0 else f"status {status}"
        return rank, f"failed first, with {name}"


_IS_STOPPED: Final = "is stopped by a signal (SIGSTOP or SIGTSTP) and stands still"
_ENDED_EARLY: Final = (
    "ended with exit status 0 before it had joined the others, which wait for it in "
    "init_distributed"
)
