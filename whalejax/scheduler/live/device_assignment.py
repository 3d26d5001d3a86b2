"""Devices, handed from job to job as it was decided.

What is decided is where jobs are to be; this brings them there. A device is another
job's only when the process that had it has ended, and a job that is to have more waits
until there are as many. Nothing is remembered between two turns but what is in the
journals, so that it does not matter where a scheduler was killed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

from whalejax.membership.exit_status import Ending
from whalejax.scheduler.batch_choice import rate_factor
from whalejax.scheduler.live.job_book import (
    CANCELLED,
    COMPLETE,
    FAILED,
    REFUSED,
    JobBook,
    LiveJob,
)
from whalejax.scheduler.live.job_devices import JobDevices
from whalejax.scheduler.live.job_run import JobRun


MOST_LAUNCHES: Final = 6
"""Starts of a run without a new step between them, after which its job has failed."""

MOST_FAILURES: Final = 3
"""Processes in a row that end on a device before they are ready for steps."""

_ERRORS: Final = (1, 2)
"""Status of a supervisor that could not be started."""

_ENDS: Final[Mapping[Ending, str]] = {
    Ending.COMPLETE: COMPLETE,
    Ending.FAILED: FAILED,
    Ending.REFUSED: REFUSED,
    Ending.LOST: FAILED,
}
"""Endings of a run that end its job; of others it starts again."""


class Placing:
    """Starts runs, resizes them and ends them, and says which jobs have ended.

    Attributes:
        failed: Devices that are used no more, as one process after the other fails on
            them while others of the same job do not, and why.
    """

    def __init__(
        self,
        book: JobBook,
        runs: Mapping[str, JobRun],
        devices: JobDevices,
    ) -> None:
        """Starts without a change of devices.

        Args:
            book: The jobs, with the numbers of devices that they are to have.
            runs: Their runs by name.
            devices: The devices.
        """
        self._book, self._runs = book, runs
        self._devices = devices
        self.failed: dict[str, str] = {}

    def turn(self, *, may_start: bool) -> None:
        """Brings every job nearer to where it is to be.

        Args:
            may_start: Processes may be started: what happened is written down.
        """
        order = sorted(
            self._book.unfinished(),
            key=lambda job: (-job.request.priority, job.added_at),
        )
        # What gives devices up comes first.
        for job in sorted(order, key=lambda job: job.target >= len(job.devices)):
            run = self._runs[job.name]
            if not run.is_alive:
                run.poll()  # What it wrote before it ended.
            self._end(job, run)
            if job.how:
                continue
            if not run.is_alive and not run.reader.held_slots:
                self._begin(job, run, may_start=may_start)
            elif not run.is_alive:
                if may_start:  # Members wait for a supervisor: it takes them back.
                    self._start(job, run, max(run.reader.size, job.request.devices[0]))
            elif run.has_opened and run.reader.ending is None:
                self._find_failed(job, run)
                self._resize(job, run)
            self._release(job, run)

    def free(self) -> list[str]:
        """Devices that no job has, and that can be used."""
        taken = {name for job in self._book.jobs.values() for name in job.devices}
        return [name for name in self.usable() if name not in taken]

    def usable(self) -> list[str]:
        """Devices that have not failed, and whose hosts are there."""
        lost = self.lost_devices()
        return [name for name in self._devices.names if name not in lost]

    def lost_devices(self) -> dict[str, str]:
        """Devices that failed or whose host is away, and why."""
        lost, now = dict(self.failed), time.time()
        hosts = self._devices.hosts
        for job in self._book.unfinished() if hosts else ():
            run = self._runs[job.name]  # It has an agent on every host.
            for host in run.reader.away_hosts(hosts, now) if run.is_alive else ():
                why = f"{host} has no agent of {job.name}"
                for name in self._devices.of_host(host):
                    lost.setdefault(name, why)
        return lost

    def _candidates(self, job: LiveJob) -> list[str]:
        """Devices that a job may have: its own first, then those on its own hosts, and
        on the hosts with the most that are free.
        """
        own = self._healthy_devices(job)
        return own + self._devices.near(own, self.free())

    def _find_failed(self, job: LiveJob, run: JobRun) -> None:
        """A device fails where others of the same job do not: else the job does."""
        does_well = run.reader.members > 0
        for slot, count in run.reader.failures.items():
            if count >= MOST_FAILURES and does_well and slot < len(job.devices):
                why = f"{count} processes of {job.name} in a row ended before a step"
                self.failed.setdefault(job.devices[slot], why)

    # Ends.

    def _end(self, job: LiveJob, run: JobRun) -> None:
        if run.is_alive or run.reader.held_slots:
            return
        ending = run.reader.ending if run.has_opened else None
        if ending is not None and (how := _ENDS.get(ending[0])) is not None:
            self._end_job(job, how, ending[1])
        elif job.cancelled:
            self._end_job(job, CANCELLED, "it was cancelled")
        elif not run.has_opened and run.status() in _ERRORS:
            why = f"its supervisor did not start: {run.end_of_log()}"
            self._end_job(job, FAILED, why)
        elif job.launches >= MOST_LAUNCHES and job.target:
            why = f"it was started {job.launches} times without a new step"
            last = run.refusal or run.end_of_log()
            self._end_job(job, FAILED, f"{why}: {last}")

    def _end_job(self, job: LiveJob, how: str, why: str) -> None:
        self._book.record("ended", name=job.name, how=how, why=why[-5000:])

    # Starts and resizes.

    def _begin(self, job: LiveJob, run: JobRun, *, may_start: bool) -> None:
        """Starts a run that has no process, once there are devices for it."""
        if job.devices and not job.target:
            self._set_devices(job, [])
        if not (job.target and may_start):
            return
        free = self._candidates(job)
        if len(free) >= job.target:
            self._set_devices(job, free[: job.target])
            batch, (_, efficiency) = job.wanted_batch, job.wanted
            step = run.reader.step
            more = math.ceil(job.remaining(step) / (batch * efficiency) - 1e-9)
            self._book.record(
                "launched",
                name=job.name,
                batch=batch,
                efficiency=efficiency,
                step=step,
                steps=step + more,
            )
            run.reader.record_launch(time.time(), batch)
            self._start(job, run, job.target)

    def _start(self, job: LiveJob, run: JobRun, size: int) -> None:
        least, most = job.request.devices
        most = max(least, min(most, len(self._devices.names)))
        rate = 1.0
        if job.request.rate_rule:
            rate = rate_factor(job.run_batch, job.batch, job.request.rate_rule)
        try:
            run.start(
                least,
                most,
                min(max(size, least), most),
                self._mask(job),
                batch=job.run_batch,
                steps=job.run_steps,
                rate=rate,
            )
        except OSError as error:  # No room for a process, or its folder is gone.
            run.refusal = f"its supervisor cannot be started ({error})"

    def _resize(self, job: LiveJob, run: JobRun) -> None:
        size = run.reader.size
        if not size or run.is_asking or run.reader.drains:
            return
        # With another batch the run starts again from a checkpoint.
        target = 0 if job.changes_batch else self._without_failed(job, run)
        if target < size:
            run.resize(target, self._mask(job)[:target])
        elif job.target > size and not job.changes_batch:
            free = self._candidates(job)
            if len(free) >= job.target:
                self._set_devices(job, free[: job.target])
                run.resize(job.target, self._mask(job))

    def _without_failed(self, job: LiveJob, run: JobRun) -> int:
        """Number of members up to the first on a failed device, from which it grows."""
        lost = self.lost_devices()
        there = [n for n, name in enumerate(job.devices) if name in lost]
        first = min(there, default=job.target)
        return min(job.target, first if first >= job.request.devices[0] else 0)

    def _release(self, job: LiveJob, run: JobRun) -> None:
        """Takes devices back that no process of a job has, or is to have."""
        if run.is_asking or (run.is_alive and not run.has_opened):
            return
        slots, target = run.reader.held_slots, self._without_failed(job, run)
        kept = max([run.reader.size, target, *(slot + 1 for slot in slots)])
        if not run.is_alive and not slots:
            kept = target
        if kept < len(job.devices):
            self._set_devices(job, job.devices[:kept])

    def _set_devices(self, job: LiveJob, names: list[str]) -> None:
        if names != job.devices:
            self._book.record("devices", name=job.name, devices=names)

    def _healthy_devices(self, job: LiveJob) -> list[str]:
        lost = self.lost_devices()
        return [name for name in job.devices if name not in lost]

    def _mask(self, job: LiveJob) -> list[str]:
        return self._devices.masks(job.devices)
