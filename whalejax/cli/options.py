"""The options of most commands, as data; their docstrings are the help texts.

They are separate from ``main`` so that a command's code can name its options without
importing the command line.

The module is long because these commands have many options. Those of runs with several
processes are in ``launch_options`` and ``elastic_options``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from tyro import conf

from whalejax.api.named_jobs import named_values, value_of
from whalejax.cli.elastic_options import AgentCommand as AgentCommand
from whalejax.cli.elastic_options import GoodputCommand as GoodputCommand
from whalejax.cli.elastic_options import StatusCommand as StatusCommand
from whalejax.cli.launch_options import (
    SSH,
    AgentsAddress,
    Hosts,
    RayAddress,
    RemoteShell,
    Restarts,
    Switch,
    option,
)
from whalejax.cli.launch_options import DoctorCommand as DoctorCommand
from whalejax.cli.launch_options import LaunchCommand as LaunchCommand
from whalejax.meshes.checks import LARGEST, MOST_SAMPLES
from whalejax.meshes.errors import Problems, WhaleError


Model = Annotated[conf.Positional[str], option(metavar="MODEL")]
PlanFile = Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
OptionalText = Annotated[str | None, option(metavar="TEXT")]
OptionalNumber = Annotated[int | None, option(metavar="N")]
Settings = Annotated[tuple[str, ...], option(metavar="NAME=VALUE")]
Precision = Annotated[
    tuple[str, ...],
    option(
        metavar="[NAME=]f32|bf16|f16",
        help="f32, the default: the model's own types; bf16 or f16: with float32 "
        "master weights; or one for each TaskGraph, * for the rest: '*=bf16' split=f32",
    ),
]
Remat = Annotated[
    tuple[str, ...],
    option(
        metavar="[NAME=]POLICY",
        help="what layers recompute: none: nothing; dots: all but dots; named: all but "
        "what is named; full: all; or one for each TaskGraph, as in --precision",
    ),
]
Attention = Annotated[
    tuple[str, ...],
    option(
        metavar="[NAME=]ring|gather",
        help="ring: in blocks, keys passed around; gather: as the model does it; or "
        "one for each TaskGraph, as in --precision",
    ),
]
Mesh = Annotated[
    tuple[str, ...],
    option(
        metavar="AXIS=N",
        help="fixed sizes of one or several mesh axes: stage=2 tensor=4; the planner "
        "chooses the other axes (stage=1 excludes stages). With train --processes: -1 "
        "for the axis that takes what is left; auto; or replicas",
    ),
]
Shares = Annotated[
    str | None,
    option(
        metavar="N,N",
        help="micro-batches of each replica (a rank of data, or a pipeline), such as "
        "5,3; or even: as many of each; by speed if left out",
    ),
]
Offload = Annotated[
    tuple[Literal["optimizer", "activations", "params", "none"], ...],
    option(
        metavar="optimizer|activations|params|none",
        help="kept in host memory, one or several: optimizer state, activations "
        "of recomputed layers, params of scans over layers; or none; only what must be "
        "if left out",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Train a model on the devices of this machine.

    Plans, compiles, trains, and compares with one device if asked to. --plan takes the
    place of --cluster, --batch, --mesh, --precision, --micro-batches, --shares,
    --remat, --offload, --attention, --loss-chunks, --combine, --per-micro-batch,
    --group-size and --compiler-options.
    """

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    set: Settings = ()
    """options of the model, or of your function: layers=96 hidden=12288; those that
    --plan was made with, if left out"""
    plan: Annotated[Path | None, option(metavar="PLAN.json")] = None
    """run this plan, which whalejax plan made, instead of making one"""
    cluster: OptionalText = None
    """the devices, instead of measuring them: h100:8, h100:4x8, a .toml file"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    steps: int = 100
    """total number of steps, including those before a resumption"""
    save: Annotated[Path | None, option(metavar="DIR")] = None
    """write checkpoints into this directory"""
    save_every: int = 100
    """steps between checkpoints; there is one after the last step too"""
    keep: Annotated[int | None, option(metavar="K")] = None
    """number of latest checkpoints to keep in the directory of --save; 3 if left
    out"""
    csv: Annotated[Path | None, option(metavar="FILE.csv")] = None
    """write a row for each step: loss, metrics, seconds"""
    eval_every: OptionalNumber = None
    """steps between evaluations, if the job has eval_batches; those of --save-every
    if left out"""
    best: OptionalText = None
    """evaluation metric, such as loss, whose best checkpoint is kept too"""
    best_mode: Annotated[Literal["min", "max"] | None, option(metavar="min|max")] = None
    """better direction of --best; min if left out"""
    early_stop: OptionalNumber = None
    """stop after this many evaluations in a row that are no better by --best"""
    resume: Switch = False
    """resume from the latest complete checkpoint in the directory of --save, if any"""
    mesh: Mesh = ()
    precision: Precision = ()
    micro_batches: OptionalNumber = None
    """parts of a global batch, run one after the other; the fewest that fit if left
    out"""
    per_micro_batch: Switch = False
    """use each part's own loss, where samples of a batch are not independent"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same part of a batch"""
    shares: Shares = None
    remat: Remat = ()
    offload: Offload = ()
    attention: Attention = ()
    loss_chunks: OptionalNumber = None
    """parts of a device's tokens whose logits are made one at a time; 1: all at once"""
    combine: OptionalText = None
    """how ranks of data combine gradients: mean, adasum, adasum_nodes (Adasum of the
    nodes' means), adasum_updates (of what each rank's optimizer makes of them)"""
    compiler_options: Settings = ()
    """XLA options for the training step: xla_a=true xla_b=2"""
    tables: Annotated[str | None, option(metavar="KIND:RATE")] = None
    """place embedding tables, whose rows are updated by adagrad:0.02, or sgd,
    row_adagrad, lazy_adam"""
    staleness: int = 0
    """with --tables on --cluster cpu:2+cpu:1: updates that a lookup may miss"""
    replace_every: OptionalNumber = None
    """with --tables: steps after which they are placed again, if that gains 5 %"""
    seed: int = 0
    """random seed of the initial values and of dropout"""
    processes: Annotated[str | None, option(metavar="MIN:MAX")] = None
    """train with MIN to MAX processes, which may fail and rejoin; needs --save"""
    spares: Annotated[int, option(metavar="N")] = 0
    """with --processes: standby processes, which replace lost ones at once"""
    restarts: Restarts = None
    noise_scale: Switch = False
    """measure the gradient-noise scale, in samples, as a metric; needs --processes"""
    hosts: Hosts = "localhost"
    host: AgentsAddress = None
    ray: RayAddress = None
    port: OptionalNumber = None
    """with --processes: port of the supervisor; a free one, or 8476 for agents"""
    remote_shell: RemoteShell = SSH
    replay: Annotated[int, option(metavar="N")] = 0
    """then repeat the first N steps (at most all) on one device and compare losses"""
    check: Switch = False
    """first run the plan at reduced sizes and compare it with one device, for at most a
    minute; ends if something differs"""
    json: Switch = False
    """print the results as one JSON object in the last line"""
    quiet: Switch = False
    """print no plan and no progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Choose how to train a model on a cluster; needs no device of it."""

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    set: Settings = ()
    """options of the model, or of your function: layers=96 hidden=12288"""
    cluster: OptionalText = None
    """h100:8, h100:4x8, v5p:4x4x4, a .toml file, or local; local if left out"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="PLAN.json")] = None
    """write the plan to this file"""
    mesh: Mesh = ()
    precision: Precision = ()
    micro_batches: OptionalNumber = None
    """parts of a global batch, run one after the other; the fewest that fit if left
    out"""
    per_micro_batch: Switch = False
    """use each part's own loss, where samples of a batch are not independent"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same part of a batch"""
    shares: Shares = None
    remat: Remat = ()
    offload: Offload = ()
    attention: Attention = ()
    loss_chunks: OptionalNumber = None
    """parts of a device's tokens whose logits are made one at a time; 1: all at once"""
    combine: OptionalText = None
    """how ranks of data combine gradients: mean, adasum, adasum_nodes (Adasum of the
    nodes' means), adasum_updates (of what each rank's optimizer makes of them)"""
    compiler_options: Settings = ()
    """XLA options for the training step: xla_a=true xla_b=2"""
    tables: Annotated[str | None, option(metavar="KIND:RATE")] = None
    """place embedding tables, whose rows are updated by adagrad:0.02, or sgd,
    row_adagrad, lazy_adam"""
    staleness: int = 0
    """with --tables on --cluster cpu:2+h100:8: updates that a lookup may miss"""
    margin: Annotated[float | None, option(metavar="PART")] = None
    """fraction of the predicted memory to keep free beyond it, such as 0.1"""
    verify: Switch = False
    """compile the plan, and use the next one if the compiler refuses it"""
    allow_idle: Switch = False
    """accept a plan that leaves devices idle if none uses all"""
    estimate: Switch = False
    """also consider plans that cannot be run; such a plan says so"""
    swarm: Switch = False
    """plan for peers that come and go, each device one of them; needs --bandwidth"""
    bandwidth: OptionalText = None
    """bandwidth of each peer's link, with --swarm: 200Mb/s, 25MB/s"""
    wire: OptionalText = None
    """type of values between peers, with --swarm: f32, bf16 or int8"""
    sum_wire: OptionalText = None
    """type of gradients that the peers of a stage send to sum them, with --swarm: f32
    (if left out), f16 or int8"""
    json: Switch = False
    """print the plan as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowCommand:
    """Show a plan: its mesh, time, memory, parameters and traffic."""

    plan: PlanFile
    """a file that whalejax plan wrote"""
    all: Switch = False
    """show all kinds of parameters, traffic and reasons, not only the largest"""
    tokens: Annotated[float | None, option(metavar="N")] = None
    """tokens of a run, such as 1e12 (samples if a batch has none): show how long it
    takes, and its price"""
    describe: Switch = False
    """instead describe the parallelism, the synchronisation and the exchanged data"""
    json: Switch = False
    """print the plan as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Print a plan as a file of another system.

    Formats: maxtext (rules for custom_mesh_and_rule), axlearn (mesh_rules), haliax
    (axis mappings), levanter (the section trainer), jobset, skypilot. A comment on top
    lists what the format cannot express.
    """

    plan: PlanFile
    """a file that whalejax plan wrote"""
    to: Annotated[str, option(metavar="FORMAT")]
    """maxtext, axlearn, haliax, levanter, jobset or skypilot"""
    name: str = "train"
    """name of the job, for jobset and skypilot"""
    image: OptionalText = None
    """container image, for jobset and skypilot"""
    command: OptionalText = None
    """shell command that starts the run, for jobset and skypilot; if left out, whalejax
    train on one host, python train.py on several"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="FILE")] = None
    """write the file here instead of printing it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffCommand:
    """Show what changes from one plan to another: settings, parameters, traffic, cost.

    Prints only what differs.
    """

    before: Annotated[conf.Positional[Path], option(metavar="A.json")]
    """a file that whalejax plan wrote"""
    after: Annotated[conf.Positional[Path], option(metavar="B.json")]
    """another such file, of the same model or not"""
    all: Switch = False
    """show every parameter that differs, not only those that change most"""
    json: Switch = False
    """print the differences as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyCommand:
    """Explain the layout of a parameter."""

    plan: PlanFile
    """a file that whalejax plan wrote"""
    path: Annotated[conf.Positional[str], option(metavar="PATH")]
    """dotted path of a parameter, such as head.kernel"""
    json: Switch = False
    """print the answer as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCommand:
    """Plan a model on several clusters and rank them; needs no device of any.

    Prints the plans, fastest step first, and what is missing if none fits.
    """

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    on: Annotated[conf.UseAppendAction[tuple[str, ...]], option(metavar="CLUSTER")] = ()
    """a cluster: h100:8, h100:4x8, v5p:4x4x4, a .toml file; give it once for each"""
    price: Annotated[
        conf.UseAppendAction[tuple[str, ...]], option(metavar="KIND=PRICE")
    ] = ()
    """price of a device-hour, such as h100=2.5; once for each kind, in one currency"""
    set: Settings = ()
    """options of the model, or of your function: layers=96 hidden=12288"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    each: Annotated[int, option(metavar="N")] = 1
    """largest number of plans for each cluster, on different meshes"""
    precision: Precision = ()
    remat: Remat = ()
    attention: Attention = ()
    micro_batches: OptionalNumber = None
    """parts of a global batch, run one after the other; the fewest that fit if left
    out"""
    per_micro_batch: Switch = False
    """use each part's own loss, where samples of a batch are not independent"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same part of a batch"""
    estimate: Switch = False
    """also consider plans that cannot be run; such a plan says so"""
    export: Annotated[str | None, option(metavar="FORMAT")] = None
    """print another system's file instead: axlearn (a mesh rule for each cluster),
    skypilot (clusters in turn), or one for the best plan, as whalejax export does"""
    image: OptionalText = None
    """container image, for --export jobset and skypilot"""
    json: Switch = False
    """print plans, candidates and refusals as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand:
    """Find the largest batch that fits on each of several clusters; needs no device.

    Prints the largest global batch that is computed at once, its plan and its speed.
    """

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    on: Annotated[tuple[str, ...], option(metavar="CLUSTER")] = ()
    """clusters, one after the other: h100:8 a100-40:16 v5e:4x4, or .toml files"""
    set: Settings = ()
    """options of the model, or of your function: layers=96 hidden=12288"""
    precision: Precision = ()
    remat: Remat = ()
    attention: Attention = ()
    micro_batches: OptionalNumber = None
    """parts of a global batch, one after the other; 1 if left out"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCommand:
    """Run some steps of a plan on this machine; compare measured with predicted.

    Prints compute, collectives by kind and mesh axes, and idle gaps, each with the
    plan's prediction, and collectives that are not in the plan.
    """

    plan: PlanFile
    """a file that whalejax plan wrote, for the devices of this machine"""
    model: OptionalText = None
    """the model: gpt, or file.py:function. If left out, the plan's own if that is a
    reference model: a file of code is run only if it is named here"""
    set: Settings = ()
    """options of --model"""
    steps: int = 5
    """steps that are traced, after two that are not"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="TRACE.json")] = None
    """write the trace and the prediction as one file for ui.perfetto.dev"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """Compile a plan with the compiler of its hardware; needs none of that hardware.

    Prints memory, traffic and matmuls, predicted and compiled. TPUs need the extra
    whalejax[tpu-compile]; GPUs need --setup-gpu once. Ends with status 1 if the
    plan does not fit.
    """

    plan: Annotated[conf.Positional[Path | None], option(metavar="PLAN.json")] = None
    """a file that whalejax plan wrote"""
    topology: OptionalText = None
    """v5p:4x4x4, v5e:16x16, v6e:8x8, h100:2x8, local; the plan's own if left out"""
    model: OptionalText = None
    """the model: gpt, or file.py:function. If left out, the plan's own if that is a
    reference model: a file of code is run only if it is named here"""
    set: Settings = ()
    """options of --model"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 1800.0
    """time after which the compiler is stopped"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="PLAN.json")] = None
    """if the plan does not fit, write the next one that is expected to"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    setup_gpu: Switch = False
    """first install the GPU compiler, about 5 GB, into a folder of its own"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCommand:
    """Run a plan at reduced sizes on virtual CPU devices, and compare with one device.

    Compares the loss, every gradient and the updated parameters of one step, under the
    plan's own layout and options; needs none of its devices. Ends with status 1 if
    something differs.
    """

    plan: Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
    """a file that whalejax plan wrote"""
    model: OptionalText = None
    """the model: gpt, or file.py:function. If left out, the plan's own if that is a
    reference model: a file of code is run only if it is named here"""
    set: Settings = ()
    """options of --model"""
    even: Switch = False
    """skip extents that are odd on each device; halves the time"""
    seed: int = 0
    """seed of random numbers"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 600.0
    """time after which the check is stopped"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateCommand:
    """Measure the devices of this machine and write a description of them."""

    output: Annotated[Path, option(aliases=["-o"], metavar="CLUSTER.toml")]
    """where to write the description, which --cluster takes"""
    kind: OptionalText = None
    """name of this kind of device; the catalogue's, or else JAX's, if left out"""
    append: Switch = False
    """keep the kinds in the file, and add this machine as further nodes"""
    seconds: float = 18.0
    """approximate time after which measuring stops"""
    model: OptionalText = None
    """also time a micro-batch of this model: gpt, file.py:function"""
    set: Settings = ()
    """options of --model: layers=96 hidden=12288"""
    samples: OptionalNumber = None
    """samples in that micro-batch; the job's whole batch if left out"""
    precision: Precision = ()
    json: Switch = False
    """print the description as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateCommand:
    """Predict the runs of a table whose layouts are given.

    The table is CSV with a header: layers, hidden, seq, global_batch, num_devices and
    device are needed; the rest is inferred if a row leaves it out, and noted. A row
    that cannot be read gets no prediction but a note with the reason; the exit status
    is the number of such rows (at most 100).
    """

    table: Annotated[conf.Positional[Path], option(metavar="TABLE.csv")]
    """file of the runs, one a line"""
    output: Annotated[Path, option(aliases=["-o"], metavar="OUT.csv")]
    """where to write the same table with step time, memory and notes appended"""
    strict: Switch = False
    """refuse a table with rows that cannot be read, and write nothing"""
    json: Switch = False
    """print how many runs were predicted as one line of JSON"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCommand:
    """Print the completion script of a shell.

    For bash: eval "$(whalejax completion bash)" in ~/.bashrc.
    """

    shell: conf.Positional[Literal["bash", "zsh", "fish"]]
    """shell of the script: bash, zsh or fish"""


Command = (
    Annotated[TrainCommand, conf.subcommand("train")]
    | Annotated[PlanCommand, conf.subcommand("plan")]
    | Annotated[ShowCommand, conf.subcommand("show")]
    | Annotated[ExportCommand, conf.subcommand("export")]
    | Annotated[DiffCommand, conf.subcommand("diff")]
    | Annotated[WhyCommand, conf.subcommand("why")]
    | Annotated[SearchCommand, conf.subcommand("search")]
    | Annotated[BatchCommand, conf.subcommand("batch")]
    | Annotated[ProfileCommand, conf.subcommand("profile")]
    | Annotated[EstimateCommand, conf.subcommand("estimate")]
    | Annotated[VerifyCommand, conf.subcommand("verify")]
    | Annotated[CheckCommand, conf.subcommand("check")]
    | Annotated[CalibrateCommand, conf.subcommand("calibrate")]
    | Annotated[CompletionCommand, conf.subcommand("completion")]
    | Annotated[LaunchCommand, conf.subcommand("launch")]
    | Annotated[AgentCommand, conf.subcommand("agent")]
    | Annotated[StatusCommand, conf.subcommand("status")]
    | Annotated[GoodputCommand, conf.subcommand("goodput")]
    | Annotated[DoctorCommand, conf.subcommand("doctor")]
)


def mesh_sizes(words: Sequence[str]) -> dict[str, int] | None:
    """Returns the mesh axis sizes of ``--mesh``; None if none is fixed.

    Args:
        words: Words of the option; ``wh.plan`` checks the names of the axes.

    Raises:
        WhaleError: A word without ``=`` or an axis twice; lists all. If there are none,
            lists all sizes that are not whole numbers of 1 or more.

    >>> mesh_sizes(["stage=2", "tensor=4"])
    {'stage': 2, 'tensor': 4}
    """
    problems = Problems("--mesh")
    sizes = named_values(words, "--mesh", "stage=2")
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            problems.add(f"{axis} is {size}; expected a whole number of 1 or more")
    problems.raise_if_any()
    return sizes or None


def share_counts(words: str | None) -> str | tuple[int, ...] | None:
    """Returns the micro-batches of each replica from ``--shares``, ``"even"`` or None.

    Args:
        words: Value of the option; ``wh.plan`` checks them against the plan.

    Raises:
        WhaleError: Neither ``even`` nor comma-separated numbers.

    >>> share_counts("5,3")
    (5, 3)
    """
    if words is None or words == "even":
        return words
    parts = [part.strip() for part in words.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise WhaleError(
            f"--shares is {words!r}; expected even, or the micro-batches of each "
            "replica, such as 5,3"
        )
    return tuple(map(int, parts))


def prices(words: Sequence[str]) -> dict[str, float]:
    """Returns the prices of ``--price`` by kind of device.

    Args:
        words: Words of the option; ``wh.search`` checks the kinds.

    Raises:
        WhaleError: A word without ``=``, a kind twice, or a price that is no number;
            lists all.

    >>> prices(["h100=2.5", "v100-32=1"])
    {'h100': 2.5, 'v100-32': 1.0}
    """
    problems = Problems("--price")
    result: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        price = value_of(text)
        if not name or isinstance(price, bool | str):
            problems.add(f"{word!r} is no KIND=PRICE, such as h100=2.5")
        elif name in result:
            problems.add(f"{name} is given twice")
        else:
            result[name] = float(price)
    problems.raise_if_any()
    return result


def _word_or_words(
    words: Sequence[str], option: str, example: str
) -> str | dict[str, str] | None:
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    problems = Problems(option)
    word_or_words: dict[str, str] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        if not (name and text):
            problems.add(
                f"{word!r} names no TaskGraph; expected one word for the whole model, "
                f"such as {example}, or NAME=WORD for each TaskGraph, '*' for all "
                f"others, such as '*={example}'"
            )
        elif name in word_or_words:
            problems.add(f"{name} is given twice")
        else:
            word_or_words[name] = text
    problems.raise_if_any()
    return word_or_words


def compiler_options(words: Sequence[str]) -> dict[str, Any]:
    """Returns the XLA options of ``--compiler-options``.

    Raises:
        WhaleError: A word without ``=``, or a name twice; lists all.

    >>> compiler_options(["xla_a=true", "xla_b=007", "xla_c=12"])
    {'xla_a': True, 'xla_b': '007', 'xla_c': 12}
    """
    example = "xla_tpu_enable_async_collective_fusion=true"
    options = named_values(words, "--compiler-options", example)
    texts = dict(word.split("=", 1) for word in words)
    # A text that a number would not reproduce, such as 007, stays a text.
    return {
        name: value
        if isinstance(value, bool) or str(value) == texts[name]
        else texts[name]
        for name, value in options.items()
    }


def _by_task_graph(option: str, example: str) -> Callable[[Sequence[str]], Any]:
    """Returns a parser for one value, or for ``NAME=VALUE`` for each TaskGraph."""
    return lambda words: _word_or_words(words, f"--{option}", example)


_PLAN_OPTIONS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "mesh": ("mesh", mesh_sizes),
    "precision": ("precision", _by_task_graph("precision", "bf16")),
    "micro_batches": ("num_micro_batches", int),
    "per_micro_batch": ("per_micro_batch", lambda given: given or None),
    "group_size": ("group_size", int),
    "shares": ("shares", share_counts),
    "remat": ("remat", _by_task_graph("remat", "full")),
    "offload": ("offload", tuple),
    "attention": ("attention", _by_task_graph("attention", "ring")),
    "loss_chunks": ("loss_chunks", int),
    "combine": ("combine", str),
    "compiler_options": ("compiler_options", compiler_options),
}
"""Options that are arguments of ``wh.plan``: the argument's name, and the parser."""

PLAN_NUMBERS: Final = {
    "loss_chunks": (1, LARGEST),
    "group_size": (1, MOST_SAMPLES),
    "micro_batches": (1, MOST_SAMPLES),
}
"""Least and greatest value of the plan options that are integers."""


def plan_settings(command: Any) -> dict[str, Any]:
    """Returns the arguments of ``wh.plan`` that a command was given.

    Args:
        command: One of the classes here.

    Raises:
        WhaleError: Values that an option cannot have; lists all.

    >>> plan_settings(PlanCommand(model="gpt", precision=("*=bf16", "split=f32")))
    {'precision': {'*': 'bf16', 'split': 'f32'}}
    """
    settings, wrong = {}, list[str]()
    for name, (setting, read) in _PLAN_OPTIONS.items():
        if getattr(command, name, None) in (None, ()):
            continue
        try:
            settings[setting] = read(getattr(command, name))
        except WhaleError as error:
            wrong.append(str(error))
    if wrong:
        raise WhaleError("\n".join(wrong))
    return {setting: value for setting, value in settings.items() if value is not None}


def given_places(command: TrainCommand) -> list[str]:
    """Returns the given options that set where a command's processes run.

    Args:
        command: Options of the command.
    """
    default = TrainCommand(model="")
    names = ("hosts", "host", "ray", "port", "remote_shell")
    given = [n for n in names if getattr(command, n) != getattr(default, n)]
    return [f"--{name.replace('_', '-')}" for name in given]


def given_plan_options(command: TrainCommand | PlanCommand) -> list[tuple[str, str]]:
    """Returns the given options that a plan file replaces, as (option, value) texts.

    Args:
        command: Options of the command.
    """
    options = []
    for name in ("cluster", "batch", *_PLAN_OPTIONS):
        value = getattr(command, name)
        if value not in (None, ()) and value is not False:
            words = " ".join(value) if isinstance(value, tuple) else str(value)
            options.append((f"--{name.replace('_', '-')}", words))
    return options
