"""Moves devices between jobs, as the schedule decides.

A device goes to another job only after the process that used it has ended. A job that
should grow waits until enough devices are free. All state between two turns is in the
journals, so the scheduler may be killed at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from whalejax.membership.exit_status import Ending
from whalejax.meshes.units import count_text
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
"""Number of starts of a run without a new step after which its job fails."""

MOST_FAILURES: Final = 3
"""Number of failures in a row after which a device counts as failed.

A failure is the loss of a process before it is ready for steps.
"""

_MOST_FAILED_STARTS: Final = 2
"""Number of failed starts of a supervisor after which its job fails.

A single start may fail because its port is in use or the disk is full.
"""

_STARTING_SECONDS: Final = 10.0
_ERRORS: Final = (1, 2)
"""Exit statuses of a supervisor that could not start."""

_ENDS: Final[Mapping[Ending, str]] = {
    Ending.COMPLETE: COMPLETE,
    Ending.FAILED: FAILED,
    Ending.REFUSED: REFUSED,
}
"""Outcomes of a run that also end its job.

After other outcomes the run starts again. Then it was asked to end, or it lost its
hosts while no scheduler could replace them.
"""


class Placing:
    """Starts, resizes and ends runs, and records the jobs that have ended.

    Attributes:
        failed: Devices that are no longer used, with the reasons. Their processes fail
            repeatedly, while others of the same job do not.
        refused: Hosts that the engine refuses to allocate, with its reasons. They are
            no longer requested.
    """

    def __init__(
        self,
        book: JobBook,
        runs: Mapping[str, JobRun],
        devices: JobDevices,
    ) -> None:
        """Stores its arguments; changes nothing yet.

        Args:
            book: Jobs with their target numbers of devices.
            runs: Runs of the jobs, by name.
            devices: Devices to divide.
        """
        self._book, self._runs = book, runs
        self._devices = devices
        self.failed: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._away: dict[str, str] | None = None
        self._given: set[str] = set()
        self._began_at = time.time()

    def turn(self, *, may_start: bool) -> None:
        """Moves every job nearer to its target number of devices.

        Args:
            may_start: Whether processes may be started, because the journal is on disk.
        """
        self._find_refused()
        self._away = self._away_devices()
        # Jobs that give up devices come first.
        for job in sorted(
            self._in_order(), key=lambda job: job.target >= len(job.devices)
        ):
            run = self._runs[job.name]
            if not run.is_alive:
                run.poll()  # reads the last events
            self._end(job, run)
            if job.how:
                continue
            if not run.is_alive and not run.reader.held_slots:
                self._begin(job, run, may_start=may_start)
            elif not run.is_alive:
                if may_start:  # The members wait for another supervisor.
                    self._start(job, run, max(run.reader.size, job.request.devices[0]))
            elif run.has_opened and run.reader.ending is None:
                if run.lacks_front and may_start:
                    self._start(job, run, max(run.reader.size, job.request.devices[0]))
                self._find_failed(job, run)
                self._give_back(job)
                self._resize(job, run)
            self._release(job, run)
            self._want_hosts(job)
        self._away = None

    def _in_order(self) -> list[LiveJob]:
        return sorted(
            self._book.unfinished(),
            key=lambda job: (-job.request.priority, job.added_at),
        )

    def free(self) -> list[str]:
        """Returns the usable devices that no job holds."""
        taken = {name for job in self._book.jobs.values() for name in job.devices}
        return [name for name in self.usable() if name not in taken]

    def usable(self) -> list[str]:
        """Returns the devices that have not failed and whose hosts have an agent."""
        lost = self.lost_devices()
        return [name for name in self._devices.names if name not in lost]

    def lost_devices(self) -> dict[str, str]:
        """Returns reasons for the devices that failed or whose host has no agent."""
        lost, devices = dict(self.failed), self._devices
        if devices.engine is not None:  # An engine allocates whole hosts.
            for failed, why in self.failed.items():
                for name in devices.of_host(*devices.hosts_of([failed])):
                    lost.setdefault(name, why)
        for host, why in self.refused.items():
            lost.update(dict.fromkeys(devices.of_host(host), why))
        away = self._away_devices() if self._away is None else self._away
        return {**away, **lost}

    def _away_devices(self) -> dict[str, str]:
        now, devices, away = time.time(), self._devices, dict[str, str]()
        for job in self._book.unfinished() if devices.has_hosts else ():
            for host in self._away_hosts(job, now):
                why = f"{host} has no agent of {job.name}"
                for name in devices.of_host(host):
                    away.setdefault(name, why)
        return away

    def _away_hosts(self, job: LiveJob, now: float) -> list[str]:
        """Returns the hosts of a job that have had no agent for a while.

        It returns none while a job waits in an engine's queue for its minimum of hosts.
        """
        run, devices = self._runs[job.name], self._devices
        if not run.is_alive:
            return []
        if devices.engine is not None and not self._has_fewest(job):
            return []
        return run.reader.away_hosts(run.wanted_hosts, now)

    def _has_fewest(self, job: LiveJob) -> bool:
        devices, agents = self._devices, self._runs[job.name].reader.agents
        hosts = agents.intersection(devices.hosts_of(job.devices))
        there = sum(len(devices.of_host(host)) for host in hosts)
        return there >= job.request.devices[0]

    # Hosts that an engine does not allocate.

    def _find_refused(self) -> None:
        """Excludes the hosts that an engine refuses.

        All hosts of the same request are excluded too, unless the engine has allocated
        one of them.
        """
        if self._devices.engine is None:
            return
        runs = [self._runs[job.name] for job in self._book.unfinished()]
        self._given.update(host for run in runs for host in run.reader.agents)
        for run in runs:
            for host, why in run.refused_hosts().items():
                alike = run.alike_hosts(host)
                for name in [host] if self._given.intersection(alike) else alike:
                    self.refused.setdefault(name, why)

    def _refusal_of(self, job: LiveJob) -> str:
        devices = self._devices
        refused = {name for host in self.refused for name in devices.of_host(host)}
        counts = devices.counts(n for n in devices.names if n not in refused)
        if any(count <= counts.get(kind, 0) for kind, count in job.options):
            return ""
        *_, why = self.refused.values()
        return (
            f"{devices.engine} refuses its nodes ({why}). Start jobs serve again with "
            f"other options of --{devices.engine}, and resume the job"
        )

    def _give_back(self, job: LiveJob) -> None:
        """Lets a job give its nodes back if an earlier job waits for nodes too.

        If neither has enough nodes to run, they could wait for each other forever.
        """
        has_some = self._runs[job.name].reader.agents
        if job.behind or not (has_some and self._waits_long(job)):
            return
        for earlier in self._in_order():
            if earlier is job:
                return
            if earlier.place[0] == job.place[0] and self._waits_long(earlier):
                self._book.record("gave_back", name=job.name, to=earlier.name)
                return

    def _waits_long(self, job: LiveJob) -> bool:
        """Whether a job has waited for its minimum number of hosts for a while."""
        run = self._runs[job.name]
        if self._devices.engine is None or not (job.target and run.is_alive):
            return False
        is_away = run.reader.away_hosts(run.wanted_hosts, time.time())
        return bool(is_away) and not self._has_fewest(job)

    def _is_behind(self, job: LiveJob) -> bool:
        """Whether an earlier job still needs the nodes that this job gave back."""
        earlier = self._book.jobs.get(job.behind)
        if earlier is None or not (earlier.wants_devices and earlier.target):
            return False
        return not (self._runs[earlier.name].is_alive and self._has_fewest(earlier))

    def _want_hosts(self, job: LiveJob) -> None:
        """Keeps agents on a job's hosts, and on hosts that it waits for."""
        run = self._runs[job.name]
        if self._devices.has_hosts:
            away = self._away_hosts(job, time.time())
            run.want_hosts([*self._devices.hosts_of(job.devices), *away])

    def _candidates(self, job: LiveJob) -> list[str]:
        own, hosts = self._healthy_devices(job), self._runs[job.name].wanted_hosts
        names = own + self._devices.near(hosts, self.free())
        return [name for name in names if self._devices.kinds.get(name) == job.place[0]]

    def _find_failed(self, job: LiveJob, run: JobRun) -> None:
        """Records devices on which processes fail while other members are ready.

        If no member gets ready, the job is at fault.
        """
        does_well = run.reader.members > 0
        for slot, count in run.reader.failures.items():
            if count >= MOST_FAILURES and does_well and slot < len(job.devices):
                why = (
                    f"{count_text(count, 'process')} of {job.name} in a row ended "
                    "before a step"
                )
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
        elif self.refused and job.wants_devices and (why := self._refusal_of(job)):
            self._book.record("paused", name=job.name, why=why)
        elif (
            not run.has_opened
            and run.status() in _ERRORS
            and job.launches >= _MOST_FAILED_STARTS
        ):
            log = run.end_of_log() or f"it ended with status {run.status()}"
            why = f"its supervisor did not start: {log}"
            self._end_job(job, FAILED, why)
        elif job.launches >= MOST_LAUNCHES and job.target:
            why = f"it was started {job.launches} times without a new step"
            last = run.refusal or run.end_of_log()
            self._end_job(job, FAILED, f"{why}: {last}")

    def _end_job(self, job: LiveJob, how: str, why: str) -> None:
        self._book.record(
            "ended",
            name=job.name,
            how=how,
            why=why[-5000:],
            run=self._runs[job.name].reader.summary(),
        )

    # Starts and resizes.

    def _begin(self, job: LiveJob, run: JobRun, *, may_start: bool) -> None:
        if job.devices and not job.target:
            self._set_devices(job, [])
        if not (job.target and may_start) or self._is_behind(job):
            return
        if self._may_be_starting(job):
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
                kind=job.place[0],
            )
            if self._book.problem:  # A launch must be on the disk before its start.
                return
            run.reader.record_launch(time.time(), batch, job.place[0])
            self._start(job, run, job.target)

    def _may_be_starting(self, job: LiveJob) -> bool:
        """Whether an earlier scheduler may have just started the job's process.

        That process may not have locked the job's folder yet.
        """
        at = job.launched_at[-1][0] if job.launched_at else -math.inf
        return at < self._began_at and time.time() - at < _STARTING_SECONDS

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
                platform=self._devices.platform(job.devices[0]) if job.devices else "",
            )
        except OSError as error:
            run.refusal = f"its supervisor cannot be started ({error})"

    def _resize(self, job: LiveJob, run: JobRun) -> None:
        size = run.reader.size
        if not size or run.is_asking or run.reader.drains:
            return
        if self._devices.engine is not None and not run.reader.held_slots:
            lost = self.lost_devices()  # Lost devices go to the end.
            order = sorted(job.devices, key=lambda name: name in lost)
            self._set_devices(job, order)
        # A change of the batch or the kind restarts the run from a checkpoint.
        ends = job.changes_batch or bool(job.behind)
        target = 0 if ends else self._without_failed(job)
        if target < size:
            run.resize(target, self._mask(job)[:target])
        elif job.target > size and not ends:
            free = self._candidates(job)
            if len(free) >= job.target:
                self._set_devices(job, free[: job.target])
                if not self._book.problem:
                    run.resize(job.target, self._mask(job))

    def _without_failed(self, job: LiveJob) -> int:
        """Returns the number of members before the first one on a lost device.

        It is 0 if these are too few, or on another kind of device than the target.
        """
        if any(self._devices.kinds.get(name) != job.place[0] for name in job.devices):
            return 0
        lost = self.lost_devices()
        there = [n for n, name in enumerate(job.devices) if name in lost]
        if there and self._waits_in_queue(job, [job.devices[n] for n in there]):
            return self._size_with_queued(job, lost)
        first = min(there, default=job.target)
        return min(job.target, first if first >= job.request.devices[0] else 0)

    def _waits_in_queue(self, job: LiveJob, names: Sequence[str]) -> bool:
        """Whether a job has devices on nodes that an engine has yet to allocate."""
        if self._devices.engine is None:
            return False
        away = self._away_hosts(job, time.time())
        return {*self._devices.hosts_of(names)} <= {*away}

    def _size_with_queued(self, job: LiveJob, lost: Mapping[str, str]) -> int:
        """Returns the size of a run whose first nodes may still be queued.

        Their slots are filled when the engine allocates the nodes.
        """
        members = [n for n, name in enumerate(job.devices, 1) if name not in lost]
        wanted = min(job.target, len(members))
        return members[wanted - 1] if wanted else 0

    def _release(self, job: LiveJob, run: JobRun) -> None:
        """Takes back devices that no process of a job uses or will use."""
        if run.is_asking or (run.is_alive and not run.has_opened):
            return
        slots, target = run.reader.held_slots, self._without_failed(job)
        kept = max([run.reader.size, target, *(slot + 1 for slot in slots)])
        if not run.is_alive and not slots:
            kept = target
        if kept < len(job.devices):
            self._set_devices(job, job.devices[:kept])

    def _set_devices(self, job: LiveJob, names: list[str]) -> None:
        if names != job.devices:
            self._book.record("devices", name=job.name, devices=names)
            self._want_hosts(job)

    def _healthy_devices(self, job: LiveJob) -> list[str]:
        lost = self.lost_devices()
        return [name for name in job.devices if name not in lost]

    def _mask(self, job: LiveJob) -> list[str]:
        return self._devices.masks(job.devices)
