"""Options of ``whalejax jobs``: simulate, serve and commands for running jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from tyro import conf

from whalejax.cli.launch_options import SSH, option
from whalejax.cli.options import Mesh, Model, OptionalNumber, Precision, Settings
from whalejax.scheduler.job_table import JobError


_MOST_SECONDS: Final = 1e12

Policy = Literal["throughput", "completion", "fairness", "sia", "static"]


RateRule = Literal["linear", "sqrt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSimulateCommand:
    """Simulate a trace of jobs, and print when each would start, change and end.

    Plans every job for each number of devices that it may have; runs nothing.
    """

    trace: Annotated[conf.Positional[Path], conf.arg(metavar="TRACE.csv")]
    """columns name, arrival (seconds), model, batch (64, or 64:1024 if it may grow),
    steps, devices (4, or 1:8), and optionally priority and noise_scale"""
    cluster: Annotated[str, conf.arg(metavar="CLUSTER")]
    """cluster, such as h100:2x8, or a file"""
    policy: Policy = "throughput"
    """what to maximise: throughput, the sum of throughputs relative to the fewest
    devices; completion, which ends short jobs first; fairness or sia, a fair sum of
    speeds; static gives each job its most devices, in the order of arrival"""
    every: Annotated[float, conf.arg(metavar="SECONDS")] = 60.0
    """time between decisions if no job arrives or ends"""
    resize: Annotated[float, conf.arg(metavar="SECONDS")] = 31.0
    """time without progress when a job starts or its devices change"""
    horizon: Annotated[float, conf.arg(metavar="SECONDS")] = 600.0
    """time in which the gain of a change must exceed its cost"""
    precision: Literal["f32", "bf16"] = "bf16"
    """precision of the jobs"""
    json: bool = False
    """print the result as one line of JSON and nothing else"""


Save = Annotated[Path, conf.arg(metavar="DIR")]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsServeCommand:
    """Divide the devices of this host, or of several, among jobs that come and end.

    Each job is an elastic run with its own supervisor: it continues if this command
    ends, and is managed again once the command starts with the same --save.
    """

    cluster: Annotated[str, conf.arg(metavar="CLUSTER")]
    """devices of this host, such as cpu:4 or h100:8, or of --hosts, as h100:2x8, or a
    file"""
    save: Save = Path("jobs")
    """folder of the journal, the socket, and of each job; for you alone"""
    policy: Literal["throughput", "completion", "fairness", "sia"] = "throughput"
    """what to maximise, as for jobs simulate"""
    every: Annotated[float, conf.arg(metavar="SECONDS")] = 60.0
    """time between decisions if no job arrives or ends"""
    resize: Annotated[float, conf.arg(metavar="SECONDS")] = 31.0
    """time that a start takes, or that further devices need to take part; replaced by
    measured times"""
    horizon: Annotated[float, conf.arg(metavar="SECONDS")] = 600.0
    """time in which the gain of a change must exceed its cost"""
    hosts: Annotated[str | None, option(metavar="A,B")] = None
    """hosts of the cluster's nodes, in their order: jobs run there, by ssh except on
    this one, in the folder of the job, with this Python; --save is on all of them"""
    slurm: Annotated[str | None, option(metavar="OPTIONS")] = None
    """in place of --hosts: each node of the cluster is an allocation by srun with these
    options while a job holds it; {kind} and {devices} stand for those of the node"""
    ray: Annotated[str | None, option(metavar="ADDRESS")] = None
    """in place of --hosts: each node of the cluster is an actor of this Ray cluster, or
    of auto, with the node's CPUs or GPUs, while a job holds the node"""
    host: Annotated[str | None, option(metavar="ADDRESS")] = None
    """with --hosts, --slurm or --ray: address of this machine at which they reach the
    jobs' supervisors"""
    listen: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """take commands from other machines there too, with --at and the file key of
    --save; without it only you can give commands, on this machine"""
    remote_shell: Annotated[str, conf.arg(metavar="WORDS")] = SSH
    """command that receives a host and a command for it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options that say which scheduler gets a command."""

    save: Save = Path("jobs")
    """folder of jobs serve"""
    at: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """address of jobs serve --listen, in place of its socket in --save"""
    key: Annotated[Path | None, option(metavar="FILE")] = None
    """with --at: copy of the file key in the folder of that jobs serve; if left out,
    the one in --save"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsAddCommand(SchedulerOptions):
    """Add a job to those that share the devices; it is planned before it runs."""

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    devices: Annotated[str, conf.arg(metavar="MIN:MAX")]
    """the fewest and the most devices, such as 1:8, or a number"""
    set: Settings = ()
    """options of the model, or of your function: layers=6 embed=128"""
    name: Annotated[str | None, option(metavar="NAME")] = None
    """name that no other job has; made from the model's name if left out"""
    batch: Annotated[str | None, option(metavar="N|MIN:MAX")] = None
    """samples in a global batch; the job's own number if left out. In a range, larger
    ones are used if the measured noise of the gradient makes them worth it"""
    rate_rule: Annotated[Literal["linear", "sqrt"] | None, option(metavar="RULE")] = (
        None
    )
    """learning rate of larger batches, linear or sqrt"""
    steps: Annotated[int, conf.arg(metavar="N")] = 100
    """total number of steps"""
    priority: Annotated[int, conf.arg(metavar="N")] = 0
    """jobs with a higher one are admitted first, and weigh as much more"""
    micro_batches: OptionalNumber = None
    """micro-batches of a step, which the job's processes share; if left out,
    the largest number up to 16 that divides the batch"""
    precision: Precision = ()
    mesh: Mesh = ()
    save_every: Annotated[int, conf.arg(metavar="N")] = 100
    """steps between checkpoints; there is one after the last step too"""
    seed: int = 0
    """random seed of the initial values and of dropout"""
    wait: bool = True
    """wait until it is planned, the default; with --no-wait only add it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsShowCommand(SchedulerOptions):
    """Show the jobs that share the devices, until Ctrl-C.

    Below them are those that ended last, and the reasons of all that have one.
    """

    all: bool = False
    """show every job that has ended; without it the last five. With --json they are
    all there"""
    once: bool = False
    """print the table once, as also where the output is no terminal"""
    json: bool = False
    """print it once, as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsLogsCommand(SchedulerOptions):
    """Print the last lines of the logs of a job's processes and its supervisor."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""
    lines: Annotated[int, conf.arg(metavar="N")] = 20
    """number of lines of each log, from its end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsCancelCommand(SchedulerOptions):
    """End a job after a step, with a checkpoint."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPauseCommand(SchedulerOptions):
    """Take the devices of a job away after a step, with a checkpoint."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsResumeCommand(SchedulerOptions):
    """Continue a paused job from its checkpoint."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""


JobsCommand = (
    Annotated[JobsSimulateCommand, conf.subcommand("simulate")]
    | Annotated[JobsServeCommand, conf.subcommand("serve")]
    | Annotated[JobsAddCommand, conf.subcommand("add")]
    | Annotated[JobsShowCommand, conf.subcommand("show")]
    | Annotated[JobsLogsCommand, conf.subcommand("logs")]
    | Annotated[JobsCancelCommand, conf.subcommand("cancel")]
    | Annotated[JobsPauseCommand, conf.subcommand("pause")]
    | Annotated[JobsResumeCommand, conf.subcommand("resume")]
)


def check_seconds(command: JobsServeCommand | JobsSimulateCommand) -> None:
    """Checks the options of a scheduler that are seconds.

    Args:
        command: Options of the command.

    Raises:
        JobError: One is out of range.
    """
    for name in ("every", "resize", "horizon"):
        value, is_least = getattr(command, name), name == "resize"
        if not 0 <= value < _MOST_SECONDS or not (value or is_least):
            limit = "at least 0" if is_least else "above 0"
            raise JobError(
                f"--{name} is {value:g}; expected seconds, {limit} and below "
                f"{_MOST_SECONDS:g}"
            )
