"""Timeline of a scheduler's jobs from its journal, compared with a simulation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whalejax.display.job_chart import HeldDevices, JobChart, JobLane
from whalejax.journals.journal import read
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.job_table import JobError, ScheduledJob
from whalejax.scheduler.live.job_book import JOURNAL, LiveJob, apply_event
from whalejax.scheduler.live.run_reader import ChangeCosts, RunReader
from whalejax.scheduler.schedule import elastic
from whalejax.scheduler.simulation import JobSimulation, simulate


@dataclass(slots=True)
class _History:
    held: list[HeldDevices] = field(default_factory=list)
    since: float = 0.0
    devices: int = 0

    def change(self, at: float, devices: int) -> None:
        if self.devices and at > self.since:
            period = HeldDevices(
                start_seconds=self.since, end_seconds=at, devices=self.devices
            )
            self.held.append(period)
        self.since, self.devices = at, devices


@names_arguments("wh.jobs_timeline")
def jobs_timeline(
    folder: str | os.PathLike[str], *, predicted: bool = True
) -> JobChart:
    """Draws the jobs of ``whalejax jobs serve`` over the devices of their cluster.

    The measured lanes show the devices that each job held, from the scheduler's
    journal. The predicted lanes show a simulation of the same jobs and arrivals, with
    the planner's throughputs and the measured costs of changes.

    Args:
        folder: Folder of the scheduler (``--save``).
        predicted: Whether to simulate the jobs for comparison.

    Returns:
        Gantt chart with the use of the devices in a notebook, text in a terminal.
        ``save`` writes it to a file.

    Raises:
        WhaleError: The folder has no scheduler's journal, or the journal has no job.
    """
    problems = Arguments("wh.jobs_timeline")
    problems.path("folder", folder, "the folder of jobs serve")
    problems.switch("predicted", predicted)
    problems.raise_if_any()
    path = Path(folder) / JOURNAL
    if not path.is_file():
        raise WhaleError(
            f"{folder} has no {JOURNAL}. Give the folder of whalejax jobs serve --save"
        )
    jobs, histories, devices, newest = _read_journal(path)
    if not jobs:
        raise WhaleError(f"no job was added in {folder} yet")
    first = min(job.added_at for job in jobs.values())
    goes_on = any(not job.how for job in jobs.values())
    end = time.time() if goes_on else newest
    for history in histories.values():
        history.change(end, 0)
    simulation = _simulation(jobs, Path(folder), devices) if predicted else None
    return JobChart(
        [_lane(job, histories[name], first, simulation) for name, job in jobs.items()],
        sum(devices.values()),
        end - first,
    )


def _read_journal(
    path: Path,
) -> tuple[dict[str, LiveJob], dict[str, _History], dict[str, int], float]:
    """Returns jobs, periods, devices by kind and the newest time from a journal."""
    jobs: dict[str, LiveJob] = {}
    histories: dict[str, _History] = {}
    devices, at = {"": 0}, 0.0
    for record in read(path):
        at = max(at, record.get("time", 0.0))
        event, name = record["event"], record.get("name", "")
        if event == "opened":
            devices = record.get("devices", {"": record.get("num_devices", 0)})
            continue
        apply_event(jobs, event, record, at)
        for known in jobs:
            histories.setdefault(known, _History())
        if name in histories and event in ("devices", "ended"):
            count = len(record["devices"]) if event == "devices" else 0
            histories[name].change(at, count)
    held = sum(
        max((o.devices for o in h.held), default=h.devices) for h in histories.values()
    )
    if not any(devices.values()):
        devices = {"": max(held, 1)}
    return jobs, histories, devices, at


def _lane(
    job: LiveJob, history: _History, first: float, simulation: JobSimulation | None
) -> JobLane:
    predicted: tuple[HeldDevices, ...] = ()
    for record in simulation.records if simulation else ():
        if record.job.name == job.name:
            predicted = tuple(
                HeldDevices(
                    start_seconds=one.begin - first,
                    end_seconds=one.end - first,
                    devices=one.place[1],
                )
                for one in record.intervals
            )
    return JobLane(
        name=job.name,
        arrival_seconds=job.added_at - first,
        end_seconds=None if job.ended_at is None else job.ended_at - first,
        outcome=job.how,
        held=tuple(
            HeldDevices(
                start_seconds=one.start_seconds - first,
                end_seconds=one.end_seconds - first,
                devices=one.devices,
            )
            for one in history.held
        ),
        predicted=predicted,
    )


def _simulation(
    jobs: Mapping[str, LiveJob], folder: Path, devices: Mapping[str, int]
) -> JobSimulation | None:
    """Simulates the jobs that have predictions; returns None if that is impossible."""
    costs = ChangeCosts()
    for name in jobs:
        reader = RunReader(folder / name)
        reader.poll()
        costs.add(reader.costs)
    means: dict[str, Any] = {"resize_seconds": 0.0, **costs.means()}
    tables = [
        ScheduledJob(
            name=job.name,
            options=job.options,
            samples=float(job.batch * job.request.steps),
            arrival=job.added_at,
            priority=job.request.priority,
            **means,
        )
        for job in jobs.values()
        if job.options
    ]
    if not tables:
        return None
    try:
        return simulate(tables, devices, elastic(devices, "throughput", 600.0))
    except JobError:  # A job may no longer fit the cluster that the journal names.
        return None
