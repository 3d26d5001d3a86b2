"""The commands ``whalejax jobs`` serve, add, show, logs, cancel, pause and resume."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from whalejax.api.named_jobs import lasting_name, named_values
from whalejax.cli.jobs.jobs_options import (
    JobsAddCommand,
    JobsCancelCommand,
    JobsLogsCommand,
    JobsPauseCommand,
    JobsResumeCommand,
    JobsServeCommand,
    JobsShowCommand,
    SchedulerOptions,
    check_seconds,
)
from whalejax.cli.process_places import address_for
from whalejax.elastic.elastic_worker import mesh_asked
from whalejax.journals.journal import FOLDER
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.checks import LARGEST, MOST_SAMPLES
from whalejax.meshes.errors import Problems, WhaleError, visible
from whalejax.processes.launch_spec import check_hosts, shell_words
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_hosts import (
    JobHosts,
    named_hosts,
    ray_hosts,
    slurm_hosts,
)
from whalejax.scheduler.live.job_run import LOG
from whalejax.scheduler.live.job_service import JobService, ServeSettings
from whalejax.scheduler.live.remote_socket import SchedulerAddress, ask
from whalejax.scheduler.live.requests import (
    NAME_PATTERN,
    Add,
    JobChange,
    JobReport,
    Jobs,
    RequestDone,
    ShowJobs,
    What,
)


_PLANNING_SECONDS: Final = 900.0
_AGAIN_SECONDS: Final = 0.5
_SERVE_SECONDS: Final = 15.0
"""Time that ``jobs add`` waits for a scheduler to start listening."""

_RUNS: Final = ("starting", "running", "pausing")
"""Status of jobs with processes, which stop after a step."""

_NAME: Final = re.compile(NAME_PATTERN)
_SERVE_DEFAULTS: Final = JobsServeCommand(cluster="")
_MOST_DEVICES: Final = 1 << 20
_REFUSED: Final = 0, 0
"""Range of an option that was refused."""


def serve(command: JobsServeCommand) -> int:
    """Runs the scheduler until it is asked to end.

    Args:
        command: Options of the command.
    """
    check_seconds(command)
    settings = ServeSettings(
        folder=command.save,
        cluster=command.cluster,
        objective=command.policy,
        every=command.every,
        resize=command.resize,
        horizon=command.horizon,
        hosts=_hosts_of(command),
        listen=command.listen,
    )

    def print_address(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return JobService(settings).run(print_address)


def _hosts_of(command: JobsServeCommand) -> JobHosts | None:
    """Returns the hosts of jobs; None for this machine only."""
    hosts = () if command.hosts is None else tuple(command.hosts.split(","))
    shell = shell_words(command.remote_shell)
    given = {name: getattr(command, name) for name in ("hosts", "slurm", "ray")}
    given = {name: value for name, value in given.items() if value is not None}
    with Problems("whalejax jobs serve", JobError) as problems:
        if len(given) > 1:
            texts = " and ".join(f"--{name} {value!r}" for name, value in given.items())
            problems.add(f"{texts} were given; expected one of them")
        if command.hosts is not None:
            check_hosts(problems, hosts, len(hosts), shell)
        elif command.remote_shell != _SERVE_DEFAULTS.remote_shell:
            problems.add(
                "--remote-shell was given without --hosts. Leave it out, or give both"
            )
        if command.host is not None and not given:
            problems.add(
                "--host was given without --hosts, --slurm or --ray. Leave it out, or "
                "give one of these too"
            )
    nodes, address = parse_cluster(command.cluster), command.host or ""
    if command.slurm is not None:
        return slurm_hosts(nodes, command.slurm, address)
    if command.ray is not None:
        return ray_hosts(nodes, command.ray, address)
    if not hosts:
        return None
    return named_hosts(nodes, hosts, shell, address or address_for(hosts))


def add(command: JobsAddCommand) -> int:
    """Adds a job, and waits until it is planned unless ``--no-wait`` is given.

    Args:
        command: Options of the command.
    """
    place = _place(command)
    ask(place, ShowJobs(), patience=_SERVE_SECONDS)
    request = request_of(command, Path.cwd())
    answer = ask(place, request)
    assert isinstance(answer, RequestDone)
    if answer.note:
        print(f"whalejax: {answer.note}", file=sys.stderr, flush=True)
    if not command.wait:
        print(f"{request.name} is added")
        return 0
    end = time.monotonic() + _PLANNING_SECONDS
    while time.monotonic() < end:
        report = _report(place, request.name)
        if report.status == "refused":
            raise JobError(f"job {request.name!r} is refused: {report.why}")
        if report.status != "planning":
            why = f": {report.why}" if report.status == "paused" and report.why else ""
            print(f"{request.name} is added, and {report.status}{why}")
            return 0
        time.sleep(_AGAIN_SECONDS)
    raise JobError(
        f"job {request.name!r} is added, but was not planned within "
        f"{_PLANNING_SECONDS:.0f} s; whalejax jobs show prints its status"
    )


def request_of(command: JobsAddCommand, folder: Path) -> Add:
    """Returns the job that a command adds.

    Args:
        command: Options of the command.
        folder: Folder in which the job will run.

    Raises:
        WhaleError: Some options cannot be used, or ``--name`` is missing and no
            scheduler listens, which knows the names of its jobs.
    """
    model = lasting_name(command.model)
    name = command.name or _default_name(command)
    with Problems("whalejax jobs add", JobError) as problems:
        if not _NAME.fullmatch(name):
            problems.add(
                f"--name is {visible(name)[:80]!r}; expected at most 64 letters, "
                "digits and . _ -, beginning with a letter or digit"
            )
        devices = _span("--devices", command.devices, _MOST_DEVICES, problems)
        batch, most_batch = _batches(command, problems)
        for option, value, most in (
            ("--steps", command.steps, LARGEST),
            ("--save-every", command.save_every, LARGEST),
            ("--micro-batches", command.micro_batches, _MOST_DEVICES),
        ):
            if value is not None and not 1 <= value <= most:
                problems.add(f"{option} is {value}; expected 1 to {most:,}")
        if not 0 <= command.priority <= 100:
            problems.add(f"--priority is {command.priority}; expected 0 to 100")
        if abs(command.seed) > LARGEST:
            problems.add(f"--seed is {command.seed}; expected a number of 64 bits")
        try:
            named_values(command.set)
            mesh_asked(command.mesh)
        except WhaleError as error:
            problems.add(str(error))
    return Add(
        name=name,
        model=model,
        settings=list(command.set),
        batch=batch,
        most_batch=most_batch,
        rate_rule=command.rate_rule or "",
        steps=command.steps,
        devices=devices,
        priority=command.priority,
        micro_batches=command.micro_batches,
        precision=list(command.precision),
        mesh=list(command.mesh),
        save_every=command.save_every,
        seed=command.seed,
        folder=str(folder.absolute()),
    )


def _default_name(command: JobsAddCommand) -> str:
    path, _, function = command.model.rpartition(":")
    stem = Path(path or function).stem
    base = re.sub(r"[^0-9A-Za-z_.-]+", "-", stem).strip("-._")[:56] or "job"
    there = {job.name for job in _jobs(_place(command)).jobs}
    numbers = (f"{base}-{n}" for n in range(2, len(there) + 3))
    return next(name for name in (base, *numbers) if name not in there)


def _batches(
    command: JobsAddCommand, problems: Problems
) -> tuple[int | None, int | None]:
    """Returns the smallest and the largest batch of a job; None if not given."""
    text, rule = command.batch, command.rate_rule
    most: int | None = None
    least: int | None = None
    if text is not None:
        least, most = _span("--batch", text, MOST_SAMPLES, problems)
    if text is None or ":" not in text:
        if rule is not None:
            problems.add(
                f"--rate-rule {rule} was given without a range of batches. Give "
                "--batch MIN:MAX, or leave --rate-rule out"
            )
        return least, None
    assert least is not None and most is not None
    if (least, most) != _REFUSED and most < 2 * least:
        problems.add(
            f"--batch is {text}; larger batches are multiples of the smallest, so the "
            f"largest needs {2 * least} samples or more. Give --batch "
            f"{least}:{2 * least} or more, or one number"
        )
    if rule is None:
        problems.add(
            f"--batch is {text} without --rate-rule: a larger batch needs a larger "
            "learning rate. Give --rate-rule linear (for SGD) or sqrt (for Adam and "
            "others that divide by the gradient's size)"
        )
    if command.mesh and list(command.mesh) != ["replicas"]:
        problems.add(
            f"--batch is {text} with --mesh {' '.join(command.mesh)}. The gradient's "
            "noise scale decides the batch, and only replicas measure it. Leave --mesh "
            "out, or give one batch"
        )
    return least, most


def _span(option: str, text: str, most: int, problems: Problems) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    parts = [int(t) if t.isdecimal() and t.isascii() else 0 for t in (low, high)]
    least, largest = parts if colon else (parts[0], parts[0])
    if not 1 <= least <= largest <= most:
        problems.add(
            f"{option} is {visible(text)[:40]!r}; expected N from 1 to {most:,}, or "
            "MIN:MAX with MIN at most MAX, such as 1:8"
        )
        return _REFUSED
    return least, largest


def change(
    command: JobsCancelCommand | JobsPauseCommand | JobsResumeCommand, what: What
) -> int:
    """Cancels, pauses or resumes a job.

    Args:
        command: The options.
        what: Change to make.
    """
    name = command.name
    place = _place(command)
    runs = _report(place, name).status in _RUNS
    answer = ask(place, JobChange(name=name, what=what))
    assert isinstance(answer, RequestDone)
    effects = {
        "cancel": "is cancelled, and ends after a step" if runs else "is cancelled",
        "pause": "writes a checkpoint after a step and pauses" if runs else "is paused",
        "resume": "continues as soon as devices are free",
    }
    print(f"{name} {effects[what]}")
    if answer.note:
        print(f"whalejax: {answer.note}", file=sys.stderr, flush=True)
    return 0


def show(command: JobsShowCommand) -> int:
    """Shows all jobs: on a terminal until Ctrl-C, elsewhere once.

    Args:
        command: Options of the command.
    """
    from whalejax.cli.jobs.jobs_table import live_table, print_table

    place = _place(command)
    jobs = _jobs(place)
    if command.json:
        print(json.dumps(msgspec.to_builtins(jobs)))
    elif command.once or not sys.stdout.isatty():
        print_table(jobs, every=command.all)
    else:
        live_table(lambda: _jobs(place), every=command.all)
    return 0


def logs(command: JobsLogsCommand) -> int:
    """Prints the ends of a job's logs.

    Args:
        command: Options of the command.
    """
    if command.lines < 1:
        raise JobError(f"--lines is {command.lines}; expected 1 or more")
    report = _report(_place(command), command.name)
    home = Path(report.folder)
    if not home.is_dir() and report.started_at is None:
        why = f": {report.why}" if report.why else ""
        raise JobError(
            f"{command.name} has not started, and has no logs. It is "
            f"{report.status}{why}"
        )
    if not home.is_dir():
        raise JobError(
            f"the logs of {command.name} are in {home} on the scheduler's machine; "
            "this machine has no such folder. Run the command there"
        )
    if report.why:
        print(f"{command.name} is {report.status}: {visible(report.why)}")
    logs = sorted((home / FOLDER).glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in [home / LOG, *logs]:
        if path.is_file():
            print(f"==> {path}")
            with path.open(errors="replace") as file:
                for line in deque(file, command.lines):
                    print(visible(line.rstrip("\n")))
    return 0


def _place(command: SchedulerOptions) -> SchedulerAddress:
    return SchedulerAddress(folder=command.save, address=command.at, key=command.key)


def _jobs(place: SchedulerAddress) -> Jobs:
    answer = ask(place, ShowJobs())
    assert isinstance(answer, Jobs)
    return answer


def _report(place: SchedulerAddress, name: str) -> JobReport:
    jobs = _jobs(place).jobs
    for one in jobs:
        if one.name == name:
            return one
    names = ", ".join(job.name for job in jobs[-10:]) or "none"
    raise JobError(f"there is no job {name!r}; there are: {names}")
