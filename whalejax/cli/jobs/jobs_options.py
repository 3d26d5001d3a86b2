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
    """Simulate jobs that share a cluster, and print when each starts, changes and ends.

    Plans each job for every number of devices that it may have, and trains nothing.
    """

    trace: Annotated[conf.Positional[Path], conf.arg(metavar="TRACE.csv")]
    """CSV file with a job per row. Columns: name, arrival (seconds), model, batch (64,
    or 64:1024 if it may grow), steps, devices (4, or 1:8); optional: priority,
    noise_scale"""
    cluster: Annotated[str, conf.arg(metavar="CLUSTER")]
    """cluster, such as h100:2x8, or a file"""
    policy: Policy = "throughput"
    """sum over jobs to maximise. throughput: speed relative to the fewest devices;
    completion: share of the remaining work per second, which ends short jobs first;
    fairness, sia: speed relative to a fair share. static: no sum, each job gets its
    most devices in order of arrival"""
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
    """Divide the devices of one or several hosts among jobs that start and end.

    Each job is an elastic run with its own supervisor. Jobs continue if this command
    ends; started again with the same --save, the command manages them again.
    """

    cluster: Annotated[str, conf.arg(metavar="CLUSTER")]
    """devices of this host, such as cpu:4 or h100:8; of --hosts, such as h100:2x8; or a
    cluster file"""
    save: Save = Path("jobs")
    """folder of the journal, the socket and the jobs, which other users cannot read"""
    policy: Literal["throughput", "completion", "fairness", "sia"] = "throughput"
    """what to maximise, as for jobs simulate"""
    every: Annotated[float, conf.arg(metavar="SECONDS")] = 60.0
    """time between decisions if no job arrives or ends"""
    resize: Annotated[float, conf.arg(metavar="SECONDS")] = 31.0
    """expected time to start a job or to add devices to it, until such times are
    measured"""
    horizon: Annotated[float, conf.arg(metavar="SECONDS")] = 600.0
    """time in which the gain of a change must exceed its cost"""
    hosts: Annotated[str | None, option(metavar="A,B")] = None
    """hosts of the cluster's nodes, in the same order. A job runs in its folder with
    this Python, on other hosts by ssh; all hosts must mount --save"""
    slurm: Annotated[str | None, option(metavar="OPTIONS")] = None
    """instead of --hosts: options of srun, which allocates a node while a job holds it;
    {kind} and {devices} stand for the node's kind and number of devices"""
    ray: Annotated[str | None, option(metavar="ADDRESS")] = None
    """instead of --hosts: address of a Ray cluster, or auto to find it; while a job
    holds a node, a Ray actor holds the node's CPUs or GPUs"""
    host: Annotated[str | None, option(metavar="ADDRESS")] = None
    """with --hosts, --slurm or --ray: address of this machine at which the nodes reach
    the jobs' supervisors"""
    listen: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """address at which to accept commands from other machines, which need --at and the
    file key of --save; if left out, only your commands on this machine"""
    remote_shell: Annotated[str, conf.arg(metavar="WORDS")] = SSH
    """command that runs a command on a host; it receives the host and the command"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options that name the scheduler of a command."""

    save: Save = Path("jobs")
    """folder of --save of jobs serve"""
    at: Annotated[str | None, option(metavar="HOST:PORT")] = None
    """address of jobs serve --listen, to use instead of the socket in --save"""
    key: Annotated[Path | None, option(metavar="FILE")] = None
    """with --at: copy of the scheduler's file key; if left out, the one in --save"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsAddCommand(SchedulerOptions):
    """Add a job to those that share the devices; it is planned before it runs."""

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    devices: Annotated[str, conf.arg(metavar="MIN:MAX")]
    """smallest and largest number of devices, such as 1:8, or one number for both"""
    set: Settings = ()
    """options of the model, or of your function: layers=6 embed=128"""
    name: Annotated[str | None, option(metavar="NAME")] = None
    """name that no other job has; made from the model's name if left out"""
    batch: Annotated[str | None, option(metavar="N|MIN:MAX")] = None
    """samples in a global batch; the job's own number if left out. With MIN:MAX, the
    measured gradient noise decides when a larger batch is worth it"""
    rate_rule: Annotated[Literal["linear", "sqrt"] | None, option(metavar="RULE")] = (
        None
    )
    """growth of the learning rate with the batch: linear or sqrt"""
    steps: Annotated[int, conf.arg(metavar="N")] = 100
    """total number of steps"""
    priority: Annotated[int, conf.arg(metavar="N")] = 0
    """jobs with a higher priority are admitted first; the weight of a job is 1 plus its
    priority"""
    micro_batches: OptionalNumber = None
    """micro-batches of a step over all processes of the job; if left out, the largest
    number up to 16 that divides the batch"""
    precision: Precision = ()
    mesh: Mesh = ()
    save_every: Annotated[int, conf.arg(metavar="N")] = 100
    """steps between checkpoints; the last step writes one too"""
    seed: int = 0
    """random seed of the initial values and of dropout"""
    wait: bool = True
    """wait until the job is planned (default); --no-wait only adds it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsShowCommand(SchedulerOptions):
    """Show the jobs that share the devices, until Ctrl-C.

    Below are the jobs that ended last, and reasons such as why a job waits or failed.
    """

    all: bool = False
    """show all ended jobs, not only the last five; --json always contains all"""
    once: bool = False
    """print the table once; the default if the output is no terminal"""
    json: bool = False
    """print the jobs once, as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsLogsCommand(SchedulerOptions):
    """Print the last lines of the logs of a job's processes and its supervisor."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""
    lines: Annotated[int, conf.arg(metavar="N")] = 20
    """number of last lines of each log to print"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsCancelCommand(SchedulerOptions):
    """End a job after its current step, with a checkpoint."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="ID")]
    """id of the job"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPauseCommand(SchedulerOptions):
    """Pause a job after its current step, with a checkpoint, and free its devices."""

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
    """Checks the options of a scheduler whose values are in seconds.

    Args:
        command: Options of the command.

    Raises:
        JobError: A value is out of range.
    """
    for name in ("every", "resize", "horizon"):
        value, is_least = getattr(command, name), name == "resize"
        if not 0 <= value < _MOST_SECONDS or not (value or is_least):
            limit = "at least 0" if is_least else "above 0"
            raise JobError(
                f"--{name} is {value:g}; expected seconds, {limit} and below "
                f"{_MOST_SECONDS:g}"
            )
