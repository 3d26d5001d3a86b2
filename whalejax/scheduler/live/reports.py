"""Reports on live jobs."""

from __future__ import annotations

from whalejax.scheduler.job_table import ScheduledJob
from whalejax.scheduler.live.job_book import LiveJob
from whalejax.scheduler.live.job_run import JobRun
from whalejax.scheduler.live.requests import JobReport


def report_of(job: LiveJob, run: JobRun, table: ScheduledJob | None) -> JobReport:
    """Returns the report on a job for ``whalejax jobs show``.

    Args:
        job: The job.
        run: Run of the job.
        table: Table of its options, or None.
    """
    reader, request = run.reader, job.request
    held = len(reader.held_slots)
    starts = [at for at, before, after in job.placed if after and not before]
    changes = [after for _, _, after in job.placed]
    option = job.larger.get(job.run_batch, job.options).get(job.place)
    speeds = reader.steps_per_second(job.run_batch)
    measured = speeds.get(job.place)
    progress = table.progress(job.place) if table is not None else 0.0
    left = job.remaining(reader.step)
    return JobReport(
        name=job.name,
        status=job.how or _status(job, run, held),
        held=held,
        target=job.target,
        kind=job.place[0],
        step=reader.step,
        steps=job.run_steps or request.steps,
        loss=reader.loss,
        predicted=None if option is None else option.samples_per_second,
        measured=None if measured is None else job.run_batch * measured,
        priority=request.priority,
        added_at=job.added_at,
        started_at=min(starts, default=None),
        ended_at=job.ended_at,
        resizes=max(len(changes) - 1, 0),
        seconds_left=left / progress if progress else None,
        why=job.why
        or run.refusal
        or reader.refusal
        or _waits_for(job, is_usable=table is not None)
        or run.missing_agent(),
        batch=job.run_batch,
        noise_scale=reader.noise_scale,
        folder=str(run.home.absolute()),
    )


def _status(job: LiveJob, run: JobRun, held: int) -> str:
    is_there = bool(held) or run.is_alive
    if job.cancelled:
        return "ending"
    if job.paused:
        return "pausing" if is_there else "paused"
    if not job.options:
        return "planning"
    if not job.target or job.behind:
        return "pausing" if is_there else "waiting"
    return "running" if run.reader.members and is_there else "starting"


def _waits_for(job: LiveJob, *, is_usable: bool) -> str:
    if job.wants_devices and not job.target:
        if is_usable:
            return "devices that others have"
        return "too few devices are usable for it"
    if job.behind and not job.how:
        return f"{job.behind} comes first, and needs the nodes that it gave back"
    return ""
