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
        help="f32 (default): the model's own types; bf16 or f16: that type, with "
        "float32 master weights; or a type per TaskGraph, * for all others: '*=bf16' "
        "split=f32",
    ),
]
Remat = Annotated[
    tuple[str, ...],
    option(
        metavar="[NAME=]POLICY",
        help="values that layers recompute. none: no values; dots: all except products "
        "with weights; named: all except those that the model names; full: all values; "
        "or a policy per TaskGraph, as in --precision",
    ),
]
Attention = Annotated[
    tuple[str, ...],
    option(
        metavar="[NAME=]ring|gather",
        help="ring: devices pass blocks of keys round; gather: as the model computes "
        "it; or a method per TaskGraph, as in --precision",
    ),
]
Mesh = Annotated[
    tuple[str, ...],
    option(
        metavar="AXIS=N",
        help="fixed sizes of mesh axes, such as stage=2 tensor=4; the planner chooses "
        "the other axes. stage=1 means no pipeline. train --processes also takes auto, "
        "replicas, and the size -1 for the axis that gets the remaining devices",
    ),
]
Shares = Annotated[
    str | None,
    option(
        metavar="N,N",
        help="micro-batches of each replica, such as 5,3; even: the same number for "
        "all; if left out, by speed. A replica is a rank of data, or a pipeline",
    ),
]
Offload = Annotated[
    tuple[Literal["optimizer", "activations", "params", "none"], ...],
    option(
        metavar="optimizer|activations|params|none",
        help="store in host memory the optimizer state, activations of recomputed "
        "layers, or params of scans over layers; one or several, or none. If left out, "
        "only what does not fit on the devices",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Train a model on the devices of this machine.

    Plans, compiles and trains; --replay and --check also compare with one device.
    --plan excludes --cluster, --batch, --mesh, --precision, --micro-batches, --shares,
    --remat, --offload, --attention, --loss-chunks, --combine, --per-micro-batch,
    --group-size and --compiler-options, which the plan file fixes.
    """

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    set: Settings = ()
    """options of the model, or of your function: layers=96 hidden=12288; if left out,
    those with which --plan was made"""
    plan: Annotated[Path | None, option(metavar="PLAN.json")] = None
    """run this plan, which whalejax plan made, instead of making one"""
    cluster: OptionalText = None
    """the devices, instead of measuring them: h100:8, h100:4x8, a .toml file"""
    batch: OptionalNumber = None
    """samples in a global batch; the job's own number if left out"""
    steps: int = 100
    """total number of steps, including those before --resume"""
    save: Annotated[Path | None, option(metavar="DIR")] = None
    """write checkpoints into this directory"""
    save_every: int = 100
    """steps between checkpoints; the last step writes one too"""
    keep: Annotated[int | None, option(metavar="K")] = None
    """number of latest checkpoints to keep in the directory of --save; default: 3"""
    csv: Annotated[Path | None, option(metavar="FILE.csv")] = None
    """write a row for each step: loss, metrics, seconds"""
    eval_every: OptionalNumber = None
    """steps between evaluations of a job with eval_batches; as --save-every if left
    out"""
    best: OptionalText = None
    """evaluation metric, such as loss; the checkpoint with the best value is kept"""
    best_mode: Annotated[Literal["min", "max"] | None, option(metavar="min|max")] = None
    """whether the smallest or the largest value of --best is best; min if left out"""
    early_stop: OptionalNumber = None
    """stop after this many successive evaluations that do not improve --best"""
    resume: Switch = False
    """resume from the latest complete checkpoint in the directory of --save, if any"""
    mesh: Mesh = ()
    precision: Precision = ()
    micro_batches: OptionalNumber = None
    """micro-batches of a step, run one after the other; the fewest that fit in memory
    if left out"""
    per_micro_batch: Switch = False
    """compute the loss of each micro-batch separately, although its samples are not
    independent of the others"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same micro-batch"""
    shares: Shares = None
    remat: Remat = ()
    offload: Offload = ()
    attention: Attention = ()
    loss_chunks: OptionalNumber = None
    """number of parts in which a device computes the logits; 1: all at once"""
    combine: OptionalText = None
    """how ranks of data combine gradients: mean; adasum; adasum_nodes: Adasum of the
    nodes' means; adasum_updates: Adasum of the updates by each rank's optimizer"""
    compiler_options: Settings = ()
    """XLA options for the training step: xla_a=true xla_b=2"""
    tables: Annotated[str | None, option(metavar="KIND:RATE")] = None
    """assign embedding tables to devices; the optimizer of their rows and its learning
    rate: adagrad:0.02, or sgd, row_adagrad or lazy_adam"""
    staleness: int = 0
    """with --tables on --cluster cpu:2+cpu:1: newest updates that a lookup may lack"""
    replace_every: OptionalNumber = None
    """with --tables: steps after which tables change devices if that gains 5 %"""
    seed: int = 0
    """random seed of the initial values and of dropout"""
    processes: Annotated[str | None, option(metavar="MIN:MAX")] = None
    """train on MIN to MAX processes that may fail and rejoin; needs --save"""
    spares: Annotated[int, option(metavar="N")] = 0
    """with --processes: number of standby processes, which replace lost ones at once"""
    restarts: Restarts = None
    noise_scale: Switch = False
    """measure the gradient-noise scale, in samples, as a metric; needs --processes"""
    hosts: Hosts = "localhost"
    host: AgentsAddress = None
    ray: RayAddress = None
    port: OptionalNumber = None
    """with --processes: port of the supervisor; if left out, 8476 with agents, else a
    free port"""
    remote_shell: RemoteShell = SSH
    replay: Annotated[int, option(metavar="N")] = 0
    """after training, repeat the first N steps on one device and compare the losses"""
    check: Switch = False
    """first run the plan at reduced sizes, for at most a minute, and compare with one
    device; train nothing if they differ"""
    json: Switch = False
    """print the results as one JSON object in the last line"""
    quiet: Switch = False
    """print no plan and no progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Plan how to train a model on a cluster; the command needs no device of it."""

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
    """micro-batches of a step, run one after the other; the fewest that fit in memory
    if left out"""
    per_micro_batch: Switch = False
    """compute the loss of each micro-batch separately, although its samples are not
    independent of the others"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same micro-batch"""
    shares: Shares = None
    remat: Remat = ()
    offload: Offload = ()
    attention: Attention = ()
    loss_chunks: OptionalNumber = None
    """number of parts in which a device computes the logits; 1: all at once"""
    combine: OptionalText = None
    """how ranks of data combine gradients: mean; adasum; adasum_nodes: Adasum of the
    nodes' means; adasum_updates: Adasum of the updates by each rank's optimizer"""
    compiler_options: Settings = ()
    """XLA options for the training step: xla_a=true xla_b=2"""
    tables: Annotated[str | None, option(metavar="KIND:RATE")] = None
    """assign embedding tables to devices; the optimizer of their rows and its learning
    rate: adagrad:0.02, or sgd, row_adagrad or lazy_adam"""
    staleness: int = 0
    """with --tables on --cluster cpu:2+h100:8: newest updates that a lookup may lack"""
    margin: Annotated[float | None, option(metavar="PART")] = None
    """memory to leave free, as a fraction of the predicted memory, such as 0.1"""
    verify: Switch = False
    """compile the plan, and choose the next best one if the compiler refuses it"""
    allow_idle: Switch = False
    """accept a plan with idle devices if no plan uses all devices"""
    estimate: Switch = False
    """also consider plans that no executor can run; the result marks them"""
    swarm: Switch = False
    """plan for a swarm in which each device is a peer; needs --bandwidth"""
    bandwidth: OptionalText = None
    """with --swarm: bandwidth of each peer's link, such as 200Mb/s or 25MB/s"""
    wire: OptionalText = None
    """with --swarm: type of the activations between peers: f32, bf16 or int8"""
    sum_wire: OptionalText = None
    """with --swarm: type of the gradients that peers of a stage exchange: f32 (if left
    out), f16 or int8"""
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
    """tokens of a training run, such as 1e12, to show its time and price; samples if
    the batch has no tokens"""
    describe: Switch = False
    """instead describe the plan's parallelism, synchronisation and exchanged data"""
    json: Switch = False
    """print the plan as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Print a plan as a file of another system.

    Formats: maxtext (rules for custom_mesh_and_rule), axlearn (mesh_rules), haliax
    (axis mappings), levanter (the section trainer), jobset, skypilot. The file begins
    with a comment that lists the parts of the plan that it cannot express.
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
    train for one host, and python train.py for several"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="FILE")] = None
    """write the file here instead of printing it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffCommand:
    """Show how two plans differ in settings, parameters, traffic and cost."""

    before: Annotated[conf.Positional[Path], option(metavar="A.json")]
    """a file that whalejax plan wrote"""
    after: Annotated[conf.Positional[Path], option(metavar="B.json")]
    """another plan file, of the same model or another"""
    all: Switch = False
    """show all parameters that differ, not only those that differ most"""
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
    """Plan a model on several clusters, whose devices it does not need.

    Prints the plans, fastest step first, or the missing memory if no plan fits.
    """

    model: Model
    """a reference model, such as gpt, or file.py:function; it returns a wh.Job"""
    on: Annotated[conf.UseAppendAction[tuple[str, ...]], option(metavar="CLUSTER")] = ()
    """a cluster: h100:8, h100:4x8, v5p:4x4x4, a .toml file; give --on once for each"""
    price: Annotated[
        conf.UseAppendAction[tuple[str, ...]], option(metavar="KIND=PRICE")
    ] = ()
    """price of an hour of one device, by kind: h100=2.5; use one currency for all"""
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
    """micro-batches of a step, run one after the other; the fewest that fit in memory
    if left out"""
    per_micro_batch: Switch = False
    """compute the loss of each micro-batch separately, although its samples are not
    independent of the others"""
    group_size: OptionalNumber = None
    """number of neighbouring samples that stay in the same micro-batch"""
    estimate: Switch = False
    """also consider plans that no executor can run; the result marks them"""
    export: Annotated[str | None, option(metavar="FORMAT")] = None
    """print a file of another system instead: axlearn (a mesh rule for each cluster),
    skypilot (clusters in turn), or the best plan in a format of whalejax export"""
    image: OptionalText = None
    """container image, for --export jobset and skypilot"""
    json: Switch = False
    """print plans, candidates and refusals as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand:
    """Find the largest global batch that fits on each of several clusters.

    Prints this batch, its plan and its speed; needs no device of the clusters.
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
    """micro-batches of a step, run one after the other; 1 if left out"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCommand:
    """Run some steps of a plan on this machine, and compare them with its predictions.

    Prints the measured and predicted times of compute, of collectives by kind and mesh
    axes, and of idle gaps. It also lists collectives that are not in the plan.
    """

    plan: PlanFile
    """a file that whalejax plan wrote, for the devices of this machine"""
    model: OptionalText = None
    """a reference model, such as gpt, or file.py:function; if left out, the reference
    model of the plan. A plan of file.py:function needs this option"""
    set: Settings = ()
    """options of --model"""
    steps: int = 5
    """number of profiled steps, after two steps without a profile"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="TRACE.json")] = None
    """write the trace and the prediction to a file for ui.perfetto.dev"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """Compile a plan for its hardware, without that hardware.

    Prints predicted and compiled memory, traffic and matmuls. For TPUs, install the
    extra whalejax[tpu-compile]; for GPUs, run --setup-gpu once. The exit status is 1 if
    the plan does not fit.
    """

    plan: Annotated[conf.Positional[Path | None], option(metavar="PLAN.json")] = None
    """a file that whalejax plan wrote"""
    topology: OptionalText = None
    """v5p:4x4x4, v5e:16x16, v6e:8x8, h100:2x8 or local; the plan's own if left out"""
    model: OptionalText = None
    """a reference model, such as gpt, or file.py:function; if left out, the reference
    model of the plan. A plan of file.py:function needs this option"""
    set: Settings = ()
    """options of --model"""
    timeout: Annotated[float, option(metavar="SECONDS")] = 1800.0
    """time after which the compiler is stopped"""
    output: Annotated[Path | None, option(aliases=["-o"], metavar="PLAN.json")] = None
    """if the plan does not fit, write the next plan that is predicted to fit"""
    json: Switch = False
    """print the result as one line of JSON and nothing else"""
    setup_gpu: Switch = False
    """first install the GPU compiler, about 5 GB, into a separate folder"""
    quiet: Switch = False
    """show no progress on the terminal"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCommand:
    """Run a plan at reduced sizes on virtual CPU devices, and compare with one device.

    Compares the loss, all gradients and the updated parameters of one step. The layout
    and the options are the plan's. The exit status is 1 if a value differs.
    """

    plan: Annotated[conf.Positional[Path], option(metavar="PLAN.json")]
    """a file that whalejax plan wrote"""
    model: OptionalText = None
    """a reference model, such as gpt, or file.py:function; if left out, the reference
    model of the plan. A plan of file.py:function needs this option"""
    set: Settings = ()
    """options of --model"""
    even: Switch = False
    """skip the second run, with sizes that are odd on each device; halves the time"""
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
    """name of this kind of device; if left out, that of the catalogue, or of JAX"""
    append: Switch = False
    """keep the nodes of the file, and add this machine to them"""
    seconds: float = 18.0
    """approximate time after which measuring stops"""
    model: OptionalText = None
    """also time a micro-batch of this model: gpt, file.py:function"""
    set: Settings = ()
    """options of --model: layers=96 hidden=12288"""
    samples: OptionalNumber = None
    """with --model: samples in the micro-batch; the job's global batch if left out"""
    precision: Precision = ()
    json: Switch = False
    """print the description as one line of JSON and nothing else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateCommand:
    """Predict the step time and memory of runs with given layouts.

    The runs are the rows of a CSV file with a header. Each row needs layers, hidden,
    seq, global_batch, num_devices and device; notes tell how other values were
    inferred. A row that cannot be read gets a note instead of a prediction. The exit
    status is the number of such rows, at most 100.
    """

    table: Annotated[conf.Positional[Path], option(metavar="TABLE.csv")]
    """CSV file with one run per row"""
    output: Annotated[Path, option(aliases=["-o"], metavar="OUT.csv")]
    """file for the table with additional columns: step time, memory and notes"""
    strict: Switch = False
    """write nothing and fail if a row cannot be read"""
    json: Switch = False
    """print the number of predicted runs as one line of JSON"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCommand:
    """Print the completion script of a shell.

    For bash: eval "$(whalejax completion bash)" in ~/.bashrc.
    """

    shell: conf.Positional[Literal["bash", "zsh", "fish"]]
    """bash, zsh or fish"""


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
        words: Words of the option, such as ``"tensor=4"``. Axes may have any name.

    Raises:
        WhaleError: Some words have no ``=``, an axis is given twice, or a size is no
            whole number of 1 or more.

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
        words: Value of the option.

    Raises:
        WhaleError: The value is neither ``even`` nor comma-separated numbers.

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
        words: Words of the option, such as ``"h100=2.5"``. Kinds may have any name.

    Raises:
        WhaleError: Some words have no ``=``, a kind is given twice, or a price is no
            number; lists all problems.

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
                f"{word!r} names no TaskGraph; expected one value for the whole model, "
                f"such as {example}, or NAME=VALUE for each TaskGraph, with the name "
                f"'*' for all others, such as '*={example}'"
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
        WhaleError: Some words have no ``=``, or a name is given twice; lists all.

    >>> compiler_options(["xla_a=true", "xla_b=007", "xla_c=12"])
    {'xla_a': True, 'xla_b': '007', 'xla_c': 12}
    """
    example = "xla_tpu_enable_async_collective_fusion=true"
    options = named_values(words, "--compiler-options", example)
    texts = dict(word.split("=", 1) for word in words)
    # Text such as 007, which differs from the text of its number, stays text.
    return {
        name: value
        if isinstance(value, bool) or str(value) == texts[name]
        else texts[name]
        for name, value in options.items()
    }


def _by_task_graph(option: str, example: str) -> Callable[[Sequence[str]], Any]:
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
"""Name and parser of each option that is an argument of ``wh.plan``."""

PLAN_NUMBERS: Final = {
    "loss_chunks": (1, LARGEST),
    "group_size": (1, MOST_SAMPLES),
    "micro_batches": (1, MOST_SAMPLES),
}
"""Least and greatest value of the plan options that are integers."""


def plan_settings(command: Any) -> dict[str, Any]:
    """Returns the arguments of ``wh.plan`` that the given options of a command set.

    Args:
        command: One of the classes here.

    Raises:
        WhaleError: Some options have invalid values; lists all.

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
    """Returns the given options that choose the hosts of a command's processes.

    Args:
        command: Options of the command.
    """
    default = TrainCommand(model="")
    names = ("hosts", "host", "ray", "port", "remote_shell")
    given = [n for n in names if getattr(command, n) != getattr(default, n)]
    return [f"--{name.replace('_', '-')}" for name in given]


def given_plan_options(command: TrainCommand | PlanCommand) -> list[tuple[str, str]]:
    """Returns the given options that contradict ``--plan``, as (option, value) texts.

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
