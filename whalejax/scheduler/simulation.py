"""Simulates the decisions of a scheduler under a virtual clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from whalejax.scheduler.job_table import NOWHERE, JobError, Place, ScheduledJob
from whalejax.scheduler.schedule import Decide, JobSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Period in which a job held the same devices.

    Attributes:
        place: Device kind and number of devices.
        begin, end: Seconds from the start.
    """

    place: Place
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Times of one simulated job.

    Attributes:
        job: The job.
        intervals: Periods in which it held devices, in order.
        end: Time of its end, in seconds from the start.
    """

    job: ScheduledJob
    intervals: tuple[Interval, ...]
    end: float

    @property
    def completion(self) -> float:
        """Seconds from its arrival to its end."""
        return self.end - self.job.arrival

    @property
    def waited(self) -> float:
        """Seconds from its arrival until it first holds devices."""
        return self.intervals[0].begin - self.job.arrival

    @property
    def resizes(self) -> int:
        """Number of changes of its devices after its start."""
        return len(self.intervals) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSimulation:
    """Result of a simulation.

    Attributes:
        records: Records of the jobs, in the order of their arrivals.
        devices: Number of devices of the cluster.
    """

    records: tuple[JobRecord, ...]
    devices: int

    @property
    def mean_completion(self) -> float:
        """Mean seconds from a job's arrival to its end."""
        return sum(record.completion for record in self.records) / len(self.records)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last end."""
        first = min(record.job.arrival for record in self.records)
        return max(record.end for record in self.records) - first

    @property
    def utilisation(self) -> float:
        """Fraction of the device time in which jobs held devices."""
        intervals = (i for record in self.records for i in record.intervals)
        held = sum((i.end - i.begin) * i.place[1] for i in intervals)
        return held / max(self.makespan * self.devices, 1e-9)

    @property
    def starved(self) -> int:
        """Number of jobs that waited longer than a limit.

        The limit is the longest time for which any job held devices, times one plus the
        number of jobs ahead. Jobs ahead were unfinished at the job's arrival, or have a
        higher priority and arrived while it waited.
        """
        longest = max(o.end - o.intervals[0].begin for o in self.records)
        result = 0
        for record in self.records:
            arrival, start = record.job.arrival, record.intervals[0].begin
            ahead = sum(
                1
                for other in self.records
                if other is not record
                and other.end > arrival
                and (
                    other.job.arrival <= arrival
                    or (
                        other.job.priority > record.job.priority
                        and other.job.arrival < start
                    )
                )
            )
            result += start - arrival > (ahead + 1) * longest
        return result


@dataclass(slots=True)
class _Running:
    """A job during the simulation.

    ``course`` has, in order, pairs of an end time and the progress per second until it.
    """

    job: ScheduledJob
    left: float
    place: Place = NOWHERE
    since: float = 0.0
    course: list[tuple[float, float]] = field(default_factory=lambda: [(math.inf, 0.0)])
    intervals: list[Interval] = field(default_factory=list)

    def end(self, now: float) -> float:
        left = self.left
        for until, progress in self.course:
            span = max(0.0, until - now)
            if progress and left <= span * progress:
                return now + left / progress
            if progress:
                left -= span * progress
            now = max(now, until)
        return math.inf

    def advance(self, before: float, now: float) -> None:
        for until, progress in self.course:
            span = max(0.0, min(until, now) - before)
            self.left = max(0.0, self.left - span * progress)
            before = max(before, min(until, now))
        while self.course[0][0] <= now:
            del self.course[0]

    def move(self, place: Place, now: float) -> None:
        before, progress = self.place, self.course[0][1]
        self.leave(now)
        self.place, self.since = place, now
        joins, still = self.job.change_seconds(before, place)
        self.course = [
            (now + joins, progress),
            (now + joins + still, 0.0),
            (math.inf, self.job.progress(place)),
        ]

    def leave(self, now: float) -> None:
        if self.place != NOWHERE and now > self.since:
            held = Interval(place=self.place, begin=self.since, end=now)
            self.intervals.append(held)
        self.place = NOWHERE


def simulate(
    jobs: Sequence[ScheduledJob],
    devices: Mapping[str, int],
    decide: Decide,
    *,
    every: float = 60.0,
    count_ended: Callable[[int], None] = lambda number: None,
) -> JobSimulation:
    """Simulates jobs until all have ended.

    Args:
        jobs: Jobs with their arrivals.
        devices: Number of devices by kind.
        decide: Function that chooses the places of all jobs that wait or run.
        every: Seconds between decisions without an arrival or an end.
        count_ended: Function that receives the number of ended jobs after each end.

    Raises:
        JobError: A decision uses more devices than there are, or no job ever runs.
    """
    order = sorted(jobs, key=lambda job: (job.arrival, job.name))
    if not order:
        raise JobError("there is no job to simulate")
    # Large numbers, such as Unix times, have too little precision for short jobs.
    zero = order[0].arrival
    coming = [dataclasses.replace(job, arrival=job.arrival - zero) for job in order]
    schedule = JobSchedule(devices, decide, every=every)
    running: dict[str, _Running] = {}
    ended: dict[str, tuple[list[Interval], float]] = {}
    now = 0.0
    while coming or running:
        if not running:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            job = coming.pop(0)
            running[job.name] = _Running(job=job, left=job.samples)
            schedule.add(job, job.samples)
        for move in schedule.decide(now):
            running[move.name].move(move.after, now)
        if all(one.place == NOWHERE for one in running.values()) and not coming:
            raise JobError(
                f"no job gets devices, and none will end: {', '.join(running)}"
            )
        following = min(one.end(now) for one in running.values())
        if coming:
            following = min(following, coming[0].arrival)
        after = min(following, schedule.next_at)
        for name, one in running.items():
            if one.end(now) <= after:
                one.left = 0.0
            one.advance(now, after)
            schedule.update(name, one.left)
        now = max(after, math.nextafter(now, math.inf))
        for name, one in [*running.items()]:
            if one.left <= 1e-9 * one.job.samples:
                del running[name]
                schedule.remove(name)
                one.leave(now)
                ended[name] = one.intervals, now
                count_ended(len(ended))
    records = tuple(_record(job, *ended[job.name], zero) for job in order)
    return JobSimulation(records=records, devices=sum(devices.values()))


def _record(
    job: ScheduledJob, intervals: Sequence[Interval], end: float, zero: float
) -> JobRecord:
    moved = (
        dataclasses.replace(
            interval, begin=interval.begin + zero, end=interval.end + zero
        )
        for interval in intervals
    )
    return JobRecord(job=job, intervals=tuple(moved), end=end + zero)
