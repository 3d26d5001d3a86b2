"""Schedule of jobs that share devices, independent of the clock.

Simulations drive it by a virtual clock, and the scheduler of live jobs drives it by the
machine's clock. Both report events to it, and carry out its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.units import count_text
from whalejax.scheduler.allocation import JobState, Objective, allocate
from whalejax.scheduler.job_table import NOWHERE, JobError, Place, ScheduledJob


Decide = Callable[[Sequence[JobState]], Mapping[str, Place]]
"""Function that returns the places of all jobs that wait or run, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMove:
    """Change of a job's place.

    Attributes:
        name: Name of the job.
        before, after: Places before and after; ``NOWHERE`` if it waits.
    """

    name: str
    before: Place
    after: Place


class JobSchedule:
    """Jobs that wait or run, and the times of decisions about them.

    A decision is due when a job arrives, ends or pauses, when the devices change, and
    after ``every`` seconds.
    """

    def __init__(
        self, devices: Mapping[str, int], decide: Decide, *, every: float
    ) -> None:
        """Starts without a job.

        Args:
            devices: Number of devices by kind.
            decide: Function that chooses the places of all jobs that wait or run.
            every: Seconds between decisions without an event.
        """
        self.devices, self.every = dict(devices), every
        self._decide = decide
        self._states: dict[str, JobState] = {}
        self._has_changed = False
        self._decided_at = -math.inf

    # Events.

    def add(self, job: ScheduledJob, left: float, place: Place = NOWHERE) -> None:
        """Adds a job that has a table.

        Args:
            job: The job.
            left: Number of remaining samples.
            place: Current place of a job that runs.
        """
        self._states[job.name] = JobState(job=job, left=left, place=place)
        self._has_changed = True

    def remove(self, name: str) -> None:
        """Removes a job that has ended or no longer needs devices."""
        if self._states.pop(name, None) is not None:
            self._has_changed = True

    def set_devices(self, devices: Mapping[str, int]) -> None:
        """Sets the devices that later decisions divide.

        Args:
            devices: Number of devices by kind.
        """
        if devices != self.devices:
            self.devices, self._has_changed = dict(devices), True

    def update(
        self, name: str, left: float, job: ScheduledJob | None = None
    ) -> JobState:
        """Records the progress of a job; makes no decision due.

        Args:
            name: Name of the job.
            left: Number of remaining samples.
            job: Job with a newer table; None if the table is unchanged.
        """
        known = self._states[name]
        self._states[name] = JobState(
            job=known.job if job is None else job, left=left, place=known.place
        )
        return self._states[name]

    # Decisions.

    @property
    def next_at(self) -> float:
        """Time of the next decision, in seconds; in the past if one is due."""
        return -math.inf if self._has_changed else self._decided_at + self.every

    def places(self) -> dict[str, Place]:
        """Returns the place of every job, by name."""
        return {name: one.place for name, one in self._states.items()}

    def decide(self, now: float) -> list[JobMove]:
        """Decides where every job runs; returns the moves that free devices first.

        Args:
            now: The time, in seconds.

        Raises:
            JobError: The decision uses more devices than there are.
        """
        self._has_changed, self._decided_at = False, now
        places = self._decide([*self._states.values()])
        self._check(places)
        moves = []
        for name, one in self._states.items():
            after = places.get(name, NOWHERE)
            if after != one.place:
                moves.append(JobMove(name=name, before=one.place, after=after))
                self._states[name] = JobState(job=one.job, left=one.left, place=after)
        return sorted(moves, key=lambda move: move.after[1] - move.before[1])

    def _check(self, places: Mapping[str, Place]) -> None:
        for kind, count in self.devices.items():
            taken = sum(n for k, n in places.values() if k == kind)
            if taken > count:
                there = f"{count_text(count, 'device')} {kind}".strip()
                raise JobError(f"a decision takes {taken} of {there}")


def elastic(devices: Mapping[str, int], objective: Objective, horizon: float) -> Decide:
    """Returns a rule that divides the devices anew among all jobs.

    Args:
        devices: Number of devices by kind.
        objective, horizon: Arguments of ``allocate``.
    """

    def decide(states: Sequence[JobState]) -> Mapping[str, Place]:
        return allocate(states, devices, objective=objective, horizon=horizon)

    return decide


def first_come_first_served(devices: Mapping[str, int]) -> Decide:
    """Returns a rule that gives each job its requested devices until it ends.

    Args:
        devices: Number of devices by kind.
    """

    def decide(states: Sequence[JobState]) -> Mapping[str, Place]:
        result = {state.job.name: state.place for state in states}
        free = dict(devices)
        for kind, count in result.values():
            if count:
                free[kind] -= count
        waiting = [state for state in states if state.place == NOWHERE]
        for one in sorted(waiting, key=lambda one: (one.job.arrival, one.job.name)):
            kind, count = one.job.asked
            if count > free.get(kind, 0):
                break
            free[kind] -= count
            result[one.job.name] = one.job.asked
        return result

    return decide
