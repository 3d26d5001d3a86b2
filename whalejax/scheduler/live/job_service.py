"""The scheduler's process: it accepts jobs and divides the devices among them.

Its folder has its journal and all files of the jobs. If it is killed, the jobs go on,
and a scheduler that is restarted in the same folder takes them over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from whalejax.distributed.standard_streams import say_in_background
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import handled_signals
from whalejax.scheduler.allocation import Objective
from whalejax.scheduler.batch_choice import LEAST_GAIN, options_with_batches
from whalejax.scheduler.job_table import (
    NOWHERE,
    JobError,
    JobOption,
    Place,
    ScheduledJob,
    with_measured,
)
from whalejax.scheduler.live import requests
from whalejax.scheduler.live.device_assignment import Placing
from whalejax.scheduler.live.job_book import JobBook, LiveJob
from whalejax.scheduler.live.job_devices import job_devices
from whalejax.scheduler.live.job_hosts import JobHosts
from whalejax.scheduler.live.job_planning import PlannedJob, Planning
from whalejax.scheduler.live.job_run import JobRun
from whalejax.scheduler.live.local_socket import SOCKET, LocalSocket, make_private
from whalejax.scheduler.live.remote_socket import KEY, RemoteSocket
from whalejax.scheduler.live.reports import report_of
from whalejax.scheduler.live.requests import (
    Add,
    Answer,
    JobChange,
    RequestDone,
    RequestRefused,
    ShowJobs,
)
from whalejax.scheduler.live.run_reader import ChangeCosts
from whalejax.scheduler.schedule import JobSchedule, elastic
from whalejax.state.folder_lock import FolderLock


_TURN_SECONDS: Final = 0.2
_ASKING_THREADS: Final = 4
_LEAST_FREE_BYTES: Final = 16_000_000
"""Minimum free space in its folder for the start of a run."""

_MEMBERS_GO_ON_SECONDS: Final = 0.4
"""Assumed seconds without steps when the number of members changes, until measured."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Resources of a scheduler, and its rules.

    Attributes:
        folder: Folder of its journal, its socket and the jobs.
        cluster: Cluster, as text.
        objective: Quantity to maximise.
        every: Seconds between decisions without an arrival or end of a job.
        resize: Assumed seconds of a start or a growth, until measured.
        horizon: Seconds within which a change has to gain more than it costs.
        hosts: Hosts of the cluster's nodes; None for this machine.
        listen: Host and port for commands with the scheduler's key; None accepts
            commands at the local socket only.
    """

    folder: Path
    cluster: str
    objective: Objective = "throughput"
    every: float = 60.0
    resize: float = 31.0
    horizon: float = 600.0
    hosts: JobHosts | None = None
    listen: str | None = None


class JobService:
    """The scheduler, whose jobs go on if it ends."""

    def __init__(self, settings: ServeSettings) -> None:
        """Finds the devices; starts nothing yet.

        Raises:
            WhaleError: The cluster is invalid, or cannot be divided among jobs.
        """
        self._settings = settings
        self._cluster = parse_cluster(settings.cluster)
        self._file = _bytes_of(settings.cluster)
        hosts = self._hosts = settings.hosts
        names, engine = ((), None) if hosts is None else (hosts.names, hosts.engine)
        self._devices_of_jobs = job_devices(self._cluster, names, engine)
        self._names = self._devices_of_jobs.names
        self._runs: dict[str, JobRun] = {}
        self._held = contextlib.ExitStack()
        self._is_over = False
        self._problem = ""
        self._devices = self._devices_of_jobs.counts(self._names)
        decide = elastic(self._devices, settings.objective, settings.horizon)
        self._schedule = JobSchedule(self._devices, decide, every=settings.every)
        self._planning = Planning(self._cluster, self._devices_of_jobs.units)
        self._remote: RemoteSocket | None = None

    def run(self, opened: Callable[[str], None] = say_in_background) -> int:
        """Serves until SIGTERM, SIGINT or SIGHUP.

        Args:
            opened: Function that receives messages on its address and its end.

        Raises:
            WhaleError: Another scheduler uses the folder, or the folder cannot be
                written or has jobs on another cluster.
        """
        with self._held, handled_signals(self._handle, signal.SIGINT):
            self.open()
            text = f"{self._settings.folder / SOCKET}, which its user alone can open"
            opened(f"whalejax: jobs on {self._cluster.describe()}; listening at {text}")
            if self._remote is not None:
                opened(f"whalejax: listening at {self._remote.address_text} as well")
            if self._hosts is not None:
                where = f"hosts that {self._hosts.engine} gives"
                if self._hosts.engine is None:
                    where = ", ".join(self._hosts.names)
                opened(
                    f"whalejax: jobs run on {where}; the "
                    f"supervisor of each listens at {self._hosts.address}, to agents "
                    "with the key of its run"
                )
            while not self._is_over:
                self.turn(_TURN_SECONDS)
        there = [job.name for job in self._book.unfinished() if job.target]
        if there:
            opened(
                f"whalejax: the scheduler ends, and {', '.join(there)} go on. Start it "
                f"again with --save {self._settings.folder} to take them back"
            )
        return 0

    def _handle(self, number: int, _: object) -> None:
        self._is_over = True

    def open(self) -> None:
        """Locks the folder, restores the jobs from its journal, and listens.

        Raises:
            WhaleError: Another scheduler uses the folder, or the folder cannot be
                written or has jobs on another cluster.
        """
        folder = self._settings.folder
        make_private(folder)
        self._held.enter_context(FolderLock(folder))
        self._book = JobBook(folder)
        self._held.callback(self._book.close)
        self._check_cluster()
        pool = ThreadPoolExecutor(_ASKING_THREADS)
        self._held.callback(lambda: pool.shutdown(wait=False, cancel_futures=True))
        self._pool = pool
        self._held.callback(self._planning.close)
        self._placing = Placing(self._book, self._runs, self._devices_of_jobs)
        for job in self._book.jobs.values():
            run = self._run_of(job)
            if job.run:  # Do not read the long journals of an ended job again.
                run.reader.restore(job.run)
                continue
            for at, before, after in job.placed:
                run.reader.record_decision(at, before, after)
            for launch in job.launched_at:
                run.reader.record_launch(*launch)
            run.poll()
            if job.how:
                continue
            if not job.options and not job.cancelled:
                self._planning.submit(job.request)
            elif job.wants_devices:
                self._schedule.add(
                    self._table(job), self._remaining_steps(job), job.place
                )
        self._remove_idle()
        self._socket = LocalSocket(folder)
        self._held.callback(self._socket.close)
        if (address := self._settings.listen) is not None:
            requests = self._socket.requests
            self._remote = RemoteSocket(folder, address, requests)
            self._held.callback(self._remote.close)

    def _check_cluster(self) -> None:
        """Refuses another cluster while jobs have tables for the earlier one."""
        text, before = self._cluster.describe(), self._book.cluster
        if self._hosts is not None:
            text = f"{text} at {','.join(self._hosts.names)}"
        there = [job.name for job in self._book.unfinished()]
        if before and before != text and there:
            raise JobError(
                f"{self._settings.folder} has jobs on {before} that have not ended "
                f"({', '.join(there[:5])}), and --cluster is {text}. Give the same "
                "cluster, or cancel them first"
            )
        if before != text:
            self._book.record("opened", cluster=text, devices={**self._devices})

    # The loop.

    def turn(self, seconds: float) -> None:
        """Answers requests, and reacts to events.

        Args:
            seconds: Longest wait for a request.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._socket.requests.get(timeout=seconds)
                seconds = 0.0
                asked.answer.put(self.answer(asked.request))
        self._write()
        if (planned := self._planning.poll()) is not None:
            self._take_plan(planned)
        now = time.time()
        for job in self._book.unfinished():
            self._look_at(job)
        if now >= self._schedule.next_at:
            try:
                self._decide(now)
            except JobError as error:  # The jobs keep their devices.
                say_in_background(f"whalejax: nothing is decided: {error}")
        self._placing.turn(may_start=not self._problem)
        self._count_devices()
        self._remove_idle()

    def _remove_idle(self) -> None:
        """Releases the devices of jobs that want none.

        A killed scheduler may have recorded a pause or cancellation without a release.
        """
        for job in self._book.jobs.values():
            if not job.wants_devices:
                self._schedule.remove(job.name)
                if not job.how:
                    self._place(job, NOWHERE)

    def _write(self) -> None:
        was = self._problem
        self._book.write()
        self._look_at_disk()
        if self._problem and not was:
            say_in_background(f"whalejax: {self._problem}")
        elif was and not self._problem:
            say_in_background("whalejax: there is space again")

    def _look_at_disk(self) -> None:
        """Checks whether the disk has space for the journal and for starting runs."""
        folder, self._problem = self._settings.folder, ""
        goes_on = "jobs go on, and none is started until there is space"
        if why := self._book.problem:
            self._problem = (
                f"the journal in {folder} cannot be written ({why}): what happens is "
                f"held in memory, {goes_on}"
            )
            return
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            free_bytes = disk.f_bavail * disk.f_frsize
            if free_bytes < _LEAST_FREE_BYTES:
                self._problem = (
                    f"{folder} has {free_bytes / 1e6:.1f} MB left, less than "
                    f"{_LEAST_FREE_BYTES / 1e6:.0f} MB: {goes_on}"
                )

    def _look_at(self, job: LiveJob) -> None:
        run, step = self._runs[job.name], self._runs[job.name].reader.step
        run.poll()
        if run.reader.step > step and job.launches:
            self._book.record("progressed", name=job.name)

    def _decide(self, now: float) -> None:
        costs = self._costs()
        for name in self._schedule.places():
            job = self._book.jobs[name]
            self._schedule.update(
                name, self._remaining_steps(job), self._table(job, costs)
            )
        for move in self._schedule.decide(now):
            self._place(self._book.jobs[move.name], move.after)
        for name in self._schedule.places():
            self._choose_batch(self._book.jobs[name], costs)

    def _choose_batch(self, job: LiveJob, costs: Mapping[str, float]) -> None:
        """Records a target batch for a job if it makes clearly more progress."""
        option = self._table(job, costs).options.get(job.place)
        if option is None or not job.larger or option.batch == job.wanted_batch:
            return
        self._book.record(
            "batch",
            name=job.name,
            batch=option.batch,
            efficiency=option.efficiency,
            noise_scale=self._runs[job.name].reader.noise_scale,
        )

    def _count_devices(self) -> None:
        """Counts the usable devices, and pauses jobs that need more."""
        counts = self._devices_of_jobs.counts(self._placing.usable())
        if counts == self._devices:
            return
        is_less = any(number < self._devices[kind] for kind, number in counts.items())
        self._devices.update(counts)
        self._schedule.set_devices(self._devices)
        for name in [*self._schedule.places()]:
            job = self._book.jobs[name]
            if not self._fits(job):
                self._schedule.remove(name)
                self._place(job, NOWHERE)
        for job in self._book.unfinished():
            if job.name not in self._schedule.places():
                self._enter(job)
        if is_less:
            say_in_background(f"whalejax: {self._failed_note()}")

    def _fits(self, job: LiveJob) -> bool:
        return any(count <= self._devices.get(kind, 0) for kind, count in job.options)

    def _enter(self, job: LiveJob) -> None:
        if job.wants_devices and self._fits(job):
            self._schedule.add(self._table(job), self._remaining_steps(job))

    def _failed_note(self) -> str:
        failed, refused = self._placing.failed, self._placing.refused
        hosts = self._devices_of_jobs.hosts_of
        away = {
            name: why
            for name, why in self._placing.lost_devices().items()
            if name not in failed and not refused.keys() & hosts([name])
        }
        notes = []
        for what, lost in (
            ("devices that failed are used no more", failed),
            ("nodes that are refused are not asked for again", refused),
            ("devices of hosts that are away are not used", away),
        ):
            if lost:
                notes.append(f"{what}: {_each_with_reason(lost)}")
        return "; ".join(notes)

    def _place(self, job: LiveJob, place: Place) -> None:
        if place != job.place:
            self._book.record("placed", name=job.name, kind=place[0], size=place[1])
            _, before, after = job.placed[-1]
            self._runs[job.name].reader.record_decision(time.time(), before, after)

    def _run_of(self, job: LiveJob) -> JobRun:
        home = self._settings.folder / job.name
        run = JobRun(home, job.request, self._pool, self._hosts)
        return self._runs.setdefault(job.name, run)

    # Tables.

    def _take_plan(self, planned: PlannedJob) -> None:
        job = self._book.jobs[planned.name]
        if job.how or job.cancelled:
            return
        if planned.refusal:
            self._book.record(
                "ended", name=job.name, how="refused", why=planned.refusal
            )
            return
        self._book.record(
            "planned", name=job.name, batch=planned.batch, options=planned.options
        )
        self._enter(job)

    def _table(
        self, job: LiveJob, costs: Mapping[str, float] | None = None
    ) -> ScheduledJob:
        run, known = self._runs[job.name], self._costs() if costs is None else costs
        measured = {
            place: job.run_batch * steps
            for place, steps in run.reader.steps_per_second(job.run_batch).items()
        }
        own = {**known, **run.reader.costs.means()}
        options: Mapping[Place, JobOption] = job.options
        noise_scale = run.reader.noise_scale
        if job.larger and noise_scale is not None:
            horizon = self._settings.horizon
            lost = min(own["start_seconds"], horizon / 2)
            options = options_with_batches(
                {job.batch: job.options, **job.larger},
                own_batch=job.batch,
                present=job.wanted_batch,
                noise_scale=noise_scale,
                measured=measured if job.wanted_batch == job.run_batch else {},
                least_gain=max(LEAST_GAIN, horizon / (horizon - lost)),
            )
            measured = {}
        table = ScheduledJob(
            name=job.name,
            options=options,
            samples=float(job.batch * job.request.steps),
            arrival=job.added_at,
            priority=job.request.priority,
            resize_seconds=own["resize_seconds"],
            start_seconds=own["start_seconds"],
            join_seconds=own["join_seconds"],
        )
        return with_measured(table, measured)

    def _costs(self) -> Mapping[str, float]:
        """Returns the mean costs of changes over all jobs, or assumed costs."""
        every = ChangeCosts()
        for run in self._runs.values():
            every.add(run.reader.costs)
        resize = self._settings.resize
        known = {"start_seconds": resize, "join_seconds": resize}
        still = {"resize_seconds": _MEMBERS_GO_ON_SECONDS}
        return {**known, **still, **every.means()}

    def _remaining_steps(self, job: LiveJob) -> float:
        return job.remaining(self._runs[job.name].reader.step)

    # Requests.

    def answer(self, request: requests.Request) -> Answer:
        """Handles a request, and returns its answer or refusal.

        Args:
            request: Request to answer.
        """
        try:
            match request:
                case Add():
                    return self._add(request)
                case JobChange():
                    return self._change(request)
                case ShowJobs():
                    return self._show()
        except WhaleError as error:
            return RequestRefused(why=str(error))

    def _add(self, request: Add) -> Answer:
        least, most = request.devices
        if known := self._book.jobs.get(request.name):
            raise JobError(
                f"a job is named {request.name!r} already (it is "
                f"{known.how or 'there'}); give another --name"
            )
        home = self._settings.folder / request.name
        if home.exists() or request.name == KEY:
            raise JobError(
                f"--name is {request.name!r}, and {home} is the scheduler's own, or of "
                "a job that its journal does not have, whose checkpoints this job "
                "would take. Give another --name, or move it away"
            )
        if least > most:
            raise JobError(f"--devices is {least}:{most}; expected MIN at most MAX")
        every = self._devices_of_jobs.counts(self._names)
        kind, there = max(every.items(), key=lambda item: item[1])
        if least > there:
            count = f"{there} of {kind}" if kind else f"{there}"
            raise JobError(
                f"--devices is {least}:{most}, and {self._cluster.describe()} has "
                f"{count}: {least - there} too few for the job. Give MIN up to {there}"
            )
        units = self._devices_of_jobs.units
        ranges = [
            (-(-least // unit) * unit, min(most, every[kind]))
            for kind, unit in units.items()
        ]
        if not any(low <= high for low, high in ranges):
            sizes = " or ".join(map(str, sorted({*units.values()})))
            raise JobError(
                f"--devices is {least}:{most}, and jobs get whole nodes of {sizes} "
                "devices here. Give a range with a multiple, or serve a cluster of "
                "smaller nodes"
            )
        folder = Path(request.folder)
        if not folder.is_dir():
            raise JobError(f"{folder}, in which the job would run, is no folder")
        told = {k: v for k, v in request.fields.items() if k != "kind"}
        self._book.record("added", job=told)
        self._run_of(self._book.jobs[request.name])
        self._planning.submit(request)
        return self._done_answer()

    def _change(self, request: JobChange) -> Answer:
        job = self._book.jobs.get(request.name)
        if job is None:
            names = ", ".join(list(self._book.jobs)[-10:]) or "none"
            raise JobError(f"there is no job {request.name!r}; there are: {names}")
        if job.how:
            raise JobError(
                f"job {job.name!r} has ended ({job.how}); there is nothing to "
                f"{request.what}"
            )
        if job.cancelled:
            raise JobError(f"job {job.name!r} is cancelled already")
        match request.what:
            case "resume":
                if not job.paused:
                    raise JobError(f"job {job.name!r} is not paused")
                self._book.record("resumed", name=job.name)
                self._enter(job)
                return self._done_answer()
            case "pause":
                if job.paused:
                    raise JobError(f"job {job.name!r} is paused already")
                self._book.record("paused", name=job.name)
            case "cancel":
                self._book.record("cancelled", name=job.name)
                self._planning.withdraw(job.name)
        self._remove_idle()
        return self._done_answer()

    def _done_answer(self) -> RequestDone:
        self._look_at_disk()
        return RequestDone(note=self._problem)

    def _show(self) -> Answer:
        costs, places = self._costs(), self._schedule.places()
        tables = {name: self._table(self._book.jobs[name], costs) for name in places}
        return requests.Jobs(
            jobs=[
                report_of(job, self._runs[job.name], tables.get(job.name))
                for job in self._book.jobs.values()
            ],
            cluster=self._cluster.describe(),
            devices=len(self._names),
            pid=os.getpid(),
            notes=[
                note
                for note in (
                    self._cluster_note(),
                    self._problem,
                    self._failed_note(),
                )
                if note
            ],
        )

    def _cluster_note(self) -> str:
        """Returns a note if the cluster file has changed, or an empty text."""
        if _bytes_of(self._settings.cluster) == self._file:
            return ""
        return (
            f"{self._settings.cluster} has changed since the scheduler read it, and it "
            f"goes on with {self._cluster.describe()}. Put it back, or let the jobs "
            "end and start the scheduler again"
        )


def _each_with_reason(lost: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, why in lost.items():
        names.setdefault(why, []).append(name)
    return ", ".join(f"{', '.join(each)} ({why})" for why, each in names.items())


def _bytes_of(cluster: str) -> bytes:
    path = Path(cluster)
    try:
        return path.read_bytes() if path.suffix in (".toml", ".json") else b""
    except OSError:
        return b""
