"""``whalejax jobs simulate``: simulates jobs that share a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rich.console import Console

from whalejax.cli.jobs.jobs_options import JobsSimulateCommand, check_seconds
from whalejax.cli.progress import Meter, Working
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.units import count_text, milliseconds
from whalejax.scheduler.allocation import Objective
from whalejax.scheduler.job_table import (
    JobError,
    JobOption,
    ScheduledJob,
    best_options,
)
from whalejax.scheduler.job_trace import TracedJob, read_job_trace
from whalejax.scheduler.plan_table import (
    larger_batches,
    planned_options,
    tried_numbers,
)
from whalejax.scheduler.schedule import elastic, first_come_first_served
from whalejax.scheduler.simulation import JobRecord, JobSimulation, simulate
from whalejax.user_code.losses import Job


def simulated(command: JobsSimulateCommand, find_job: Callable[[str], Job]) -> int:
    """Simulates a trace of jobs, and prints the course of each.

    Args:
        command: Options of the command.
        find_job: Returns the job for a model's name.

    Returns:
        The exit status.

    Raises:
        WhaleError: An option or the trace is invalid, or a job cannot be planned.
    """
    check_seconds(command)
    traced = read_job_trace(command.trace)
    cluster = parse_cluster(command.cluster)
    jobs = _scheduled(traced, cluster, find_job, command)
    several = len(cluster.kinds) > 1
    devices: dict[str, int] = {}
    for node in cluster.nodes:
        kind = node.kind.name if several else ""
        devices[kind] = devices.get(kind, 0) + node.count
    rules = {"static": first_come_first_served(devices)}
    if command.policy != "static":
        objective: Objective = command.policy
        rules[objective] = elastic(devices, objective, command.horizon)
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal
    found = {}
    for policy, decide in rules.items():
        with Meter(console, f"simulating {policy}", first=0, steps=len(jobs)) as meter:
            found[policy] = simulate(
                jobs, devices, decide, every=command.every, count_ended=meter.show
            )
    static, result = found["static"], found[command.policy]
    print(json.dumps(_data(result, static)) if command.json else _text(result, static))
    return 0


def _scheduled(
    traced: Sequence[TracedJob],
    cluster: Cluster,
    find_job: Callable[[str], Job],
    command: JobsSimulateCommand,
) -> list[ScheduledJob]:
    """Returns the jobs with their tables of plans; equal jobs share a table."""
    tables: dict[object, list[JobOption]] = {}
    result = []
    for one in traced:
        key = one.model, one.batch, one.devices, one.noise_scale
        if key not in tables:
            with Working(f"planning {one.name}"):
                tables[key] = planned_options(
                    find_job(one.model),
                    cluster,
                    tried_numbers(*one.devices),
                    batches=larger_batches(*one.batch),
                    noise_scale=one.noise_scale,
                    precision=command.precision,
                )
        options = best_options(tables[key])
        own = best_options(o for o in tables[key] if o.batch == one.batch[0])
        if not own:
            raise JobError(
                f"job {one.name!r}: no plan of {one.model} with "
                f"{count_text(one.batch[0], 'sample')} "
                f"on {one.devices[0]} to {one.devices[1]} devices of "
                f"{cluster.describe()}; whalejax plan prints the reason. Give the job "
                "other devices or another batch"
            )
        result.append(
            ScheduledJob(
                name=one.name,
                options=options,
                samples=float(one.steps * one.batch[0]),
                arrival=one.arrival,
                priority=one.priority,
                resize_seconds=command.resize,
                asked=max(own, key=lambda place: own[place].progress),
            )
        )
    return result


def _data(found: JobSimulation, static: JobSimulation) -> dict[str, object]:
    return {
        "mean_completion_s": round(found.mean_completion, 3),
        "makespan_s": round(found.makespan, 3),
        "utilisation": round(found.utilisation, 4),
        "starved": found.starved,
        "completion_over_static": round(
            found.mean_completion / static.mean_completion, 4
        ),
        "makespan_over_static": round(found.makespan / static.makespan, 4),
        "jobs": [
            {
                "name": one.job.name,
                "arrival_s": one.job.arrival,
                "waited_s": round(one.waited, 3),
                "completion_s": round(one.completion, 3),
                "devices": [
                    [round(i.begin, 3), round(i.end, 3), *i.place]
                    for i in one.intervals
                ],
            }
            for one in found.records
        ],
    }


def _text(found: JobSimulation, static: JobSimulation) -> str:
    lines = [f"{'job':16} {'arrives':>10} {'waits':>10} {'takes':>10}  devices"]
    lines += [
        f"{one.job.name:16.16} {_clock(one.job.arrival):>10} {_clock(one.waited):>10} "
        f"{_clock(one.completion):>10}  {_course(one)}"
        for one in found.records
    ]
    ratio = found.mean_completion / static.mean_completion
    lines.append(
        f"mean completion {_clock(found.mean_completion)}, {ratio:.2f} of static; "
        f"makespan {_clock(found.makespan)}, {found.makespan / static.makespan:.2f} of "
        f"static; devices held {found.utilisation:.0%} of the time"
    )
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    if seconds < 120:
        return milliseconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _course(record: JobRecord) -> str:
    places: list[str] = []
    before = record.intervals[0].begin
    for one in record.intervals:
        kind, number = one.place
        places += ["0"] * (one.begin > before)  # the job waited in between
        places.append(f"{number} {kind}".strip())
        before = one.end
    more = f" … {len(places) - 8} more" if len(places) > 8 else ""
    return " → ".join(places[:8]) + more
