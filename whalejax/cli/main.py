"""The command line, ``whalejax``: parses the options and runs the chosen command.

Heavy packages are imported only when a command needs them, so that help and errors
appear at once. The module is long because it runs every command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tyro
from tyro import conf

from whalejax._version import __version__
from whalejax.api.named_jobs import (
    find_job,
    is_file,
    lasting_name,
    model_names,
    named_values,
)
from whalejax.cli.jobs.jobs_options import (
    JobsAddCommand,
    JobsCancelCommand,
    JobsCommand,
    JobsLogsCommand,
    JobsPauseCommand,
    JobsResumeCommand,
    JobsServeCommand,
    JobsShowCommand,
    JobsSimulateCommand,
)
from whalejax.cli.launch_options import join_help_lines
from whalejax.cli.option_checks import (
    check_options,
    check_table_options,
    check_words,
    checked,
    unknown_words_text,
)
from whalejax.cli.options import (
    AgentCommand,
    BatchCommand,
    CalibrateCommand,
    CheckCommand,
    Command,
    CompletionCommand,
    DiffCommand,
    DoctorCommand,
    EstimateCommand,
    ExportCommand,
    GoodputCommand,
    LaunchCommand,
    PlanCommand,
    ProfileCommand,
    SearchCommand,
    ShowCommand,
    StatusCommand,
    TrainCommand,
    VerifyCommand,
    WhyCommand,
    plan_settings,
    prices,
)
from whalejax.cli.swarm_options import (
    SwarmCommand,
    SwarmJoinCommand,
    SwarmServeCommand,
    SwarmShowCommand,
    SwarmTrainCommand,
)
from whalejax.distributed.standard_streams import (
    OutputWriteError,
    drop_stdout,
    say,
    standard_output,
)
from whalejax.meshes.errors import Problems, WhaleError


if TYPE_CHECKING:
    from whalejax.meshes.cluster import Cluster


_DESCRIPTION = """Train a model that is written for one device on many. WhaleJAX plans
how to distribute it, explains the plan by numbers, and runs it.

Two commands have subcommands:

swarm trains on peers that may join and leave: whalejax swarm --help

jobs shares a cluster among jobs: whalejax jobs --help

MODEL is FILE.py:FUNCTION or a reference model: {models}."""
_USER_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Runs a command.

    Args:
        argv: Arguments after the program's name.

    Returns:
        The exit status. 0 is success. 1: a verified plan does not fit, a checked plan
        differs from one device, or a host has a problem. 2: the user's input is invalid
        or standard output cannot be written; standard error has the reason. 130: the
        user interrupted. ``estimate`` returns the number of unread rows, at most 100.
        Commands that run processes return the status of their run.
    """
    started = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):  # Write ? for unencodable characters.
        sys.stdout.reconfigure(errors="replace")
    closed = sys.stdout is None
    with standard_output():
        try:
            status = _run_command(argv, started, closed=closed)
            sys.stdout.flush()
            return status
        except WhaleError as error:
            if isinstance(error, OutputWriteError):
                drop_stdout()
            say(f"whalejax: {error}")
            return _USER_ERROR
        except KeyboardInterrupt:
            say("whalejax: interrupted")
            return _INTERRUPTED
        except BrokenPipeError:  # The process that reads our output has ended.
            drop_stdout()
            return 0
        except Exception as error:
            from whalejax.adapters.loss_inputs import loss_error_text

            text = loss_error_text(error)
            if not text:
                raise
            say(f"whalejax: {text}")
            return _USER_ERROR


def _run_command(argv: Sequence[str], started: float, *, closed: bool) -> int:
    if list(argv) == ["--version"]:
        print(f"whalejax {__version__}")
        return 0
    try:
        _check_command_name(argv)
        group = argv[0] if argv[0] in _GROUPS else ""
        parse = {"swarm": parse_swarm, "jobs": parse_jobs}.get(group, _parse)
        command: Any = parse(argv)
    except SystemExit as stop:  # after --help, or an error that was printed
        return stop.code if isinstance(stop.code, int) else _USER_ERROR
    if closed and getattr(command, "json", False):
        raise WhaleError(
            "--json prints to standard output, which is closed. Send it to a file, or "
            "leave --json out"
        )
    if group == "swarm":
        return _swarm(command)
    return _jobs(command) if group == "jobs" else _run(command, started)


COMMAND_NAMES = (
    "train plan show export diff why search batch estimate verify check profile "
    "calibrate completion launch agent status goodput doctor swarm jobs".split()
)
"""Commands, in the order of the help."""


_GROUPS = {
    "swarm": ("serve", "train", "join", "show"),
    "jobs": tuple("simulate serve add show logs cancel pause resume".split()),
}
"""Subcommands, by command."""


def _check_command_name(argv: Sequence[str]) -> None:
    group = argv[0] if argv and argv[0] in _GROUPS else ""
    known, words = (_GROUPS[group], argv[1:]) if group else (COMMAND_NAMES, argv)
    if words and (words[0].startswith("-") or words[0] in known):
        return
    from whalejax.meshes.arguments.near_names import COMMAND_SYNONYMS, near_hint

    prog = f"whalejax {group}".rstrip()
    text = "no command is given."
    if words:
        hint = near_hint(words[0], known, None if group else COMMAND_SYNONYMS)
        named = f"{group} {words[0]}".strip()
        text = f"there is no command {named!r}{hint or '.'}"
    raise WhaleError(
        f"{text} Commands: {', '.join(known)}. {prog} --help describes them"
    )


def _parse(argv: Sequence[str]) -> Command:
    if argv[:1] == ["launch"]:
        from whalejax.processes.launcher import words_after

        argv = ["launch", *words_after(argv[1:])]
    parsed: Command = _parsed(Command, "whalejax", _description(argv), argv)
    return parsed


def _parsed(commands: Any, prog: str, description: str, words: Sequence[str]) -> Any:
    check_words(words)
    kinds = {config.name: kind for kind, config in map(get_args, get_args(commands))}
    if (kind := kinds.get(words[0] if words else "")) is not None:
        check_options(f"{prog} {words[0]}", kind, words[1:])
        if {"-h", "--help"} & {*words}:
            join_help_lines(kind)
    parsed, unknown = tyro.cli(
        commands,
        prog=prog,
        description=description,
        args=list(words),
        config=(conf.OmitArgPrefixes, conf.FlagCreatePairsOff),
        return_unknown_args=True,
    )
    if unknown:
        raise WhaleError(
            unknown_words_text(f"{prog} {words[0]}", type(parsed), unknown)
        )
    return parsed


def _description(argv: Sequence[str]) -> str:
    if not {"-h", "--help"} & {*argv}:
        return ""
    return _DESCRIPTION.format(models=", ".join(model_names()))


def parse_swarm(argv: Sequence[str]) -> SwarmCommand:
    """Returns the command that follows ``whalejax swarm``.

    Args:
        argv: Arguments after the program's name.
    """
    parsed: SwarmCommand = _parsed(
        SwarmCommand,
        "whalejax swarm",
        "Train a model whose stages are served by peers that may join and leave.",
        argv[1:],
    )
    return parsed


def parse_jobs(argv: Sequence[str]) -> JobsCommand:
    """Returns the command that follows ``whalejax jobs``.

    Args:
        argv: Arguments after the program's name.
    """
    parsed: JobsCommand = _parsed(
        JobsCommand,
        "whalejax jobs",
        "Divide devices among jobs that start and end.",
        argv[1:],
    )
    return parsed


def _jobs(command: JobsCommand) -> int:
    if isinstance(command, JobsSimulateCommand):
        from whalejax.cli.jobs import simulate_jobs

        return simulate_jobs.simulated(command, find_job)
    from whalejax.cli.jobs import job_commands  # These need no JAX.

    match command:
        case JobsServeCommand():
            return job_commands.serve(command)
        case JobsAddCommand():
            return job_commands.add(command)
        case JobsShowCommand():
            return job_commands.show(command)
        case JobsLogsCommand():
            return job_commands.logs(command)
        case JobsCancelCommand():
            return job_commands.change(command, "cancel")
        case JobsPauseCommand():
            return job_commands.change(command, "pause")
        case JobsResumeCommand():
            return job_commands.change(command, "resume")


def _swarm(command: SwarmCommand) -> int:
    from whalejax.cli import swarm

    match command:
        case SwarmServeCommand():
            return swarm.serve(command, find_job)
        case SwarmJoinCommand():
            return swarm.join(command, find_job)
        case SwarmTrainCommand():
            return swarm.train(command, find_job)
        case SwarmShowCommand():
            return swarm.show(command)


def _run(command: Command, started: float) -> int:
    checked(command)
    match command:
        case TrainCommand():
            from whalejax.cli import train_session

            train_session.check_options(command)  # before the model's file is run
            if command.processes is not None:
                from whalejax.cli.elastic_launch import train_elastically

                return train_elastically(command)
            job = find_job(command.model, named_values(_settings(command)))
            train_session.run(job, command, started=started)
        case PlanCommand():
            _plan(command)
        case ShowCommand():
            _show(command)
        case ExportCommand():
            _export(command)
        case WhyCommand():
            _why(command)
        case DiffCommand():
            _diff(command)
        case SearchCommand():
            _search(command)
        case BatchCommand():
            _batch(command)
        case ProfileCommand():
            _profile(command)
        case EstimateCommand():
            return _estimate(command)
        case VerifyCommand():
            return _verify(command)
        case CheckCommand():
            return _check(command)
        case CalibrateCommand():
            _calibrate(command)
        case CompletionCommand():
            _complete(command.shell)
        case LaunchCommand():
            from whalejax.cli import launch

            return launch.launch(command)
        case AgentCommand():
            from whalejax.elastic.agents.agent import Agent, AgentOptions

            options = AgentOptions(**dataclasses.asdict(command))
            return Agent(options).run()
        case StatusCommand():
            from whalejax.journals import status

            return status.show(command.folder, json=command.json)
        case GoodputCommand():
            _goodput(command)
        case DoctorCommand():
            from whalejax.cli import doctor

            return doctor.doctor(command)
    return 0


def _plan_without_tables(
    command: PlanCommand,
    job: Any,
    model: Any,
    batch: Any,
    source: tuple[str, ...],
    settings: dict[str, Any],
) -> Any:
    from whalejax.api import job_plans

    return job_plans.make_plan(
        *(job, model, batch, job_plans.machine(command.cluster)),
        runnable=not command.estimate,
        allow_idle=command.allow_idle,
        margin=command.margin,
        verified=command.verify,
        swarm=command.swarm,
        bandwidth=command.bandwidth,
        wire=command.wire,
        sum_wire=command.sum_wire,
        source=source,
        **settings,
    )


def _plan(command: PlanCommand) -> None:
    from whalejax.api import job_plans
    from whalejax.cli import show
    from whalejax.cli.progress import Working, make_console

    _check_output(command.output)
    problems = Problems("whalejax plan")
    check_table_options(command, problems)
    problems.raise_if_any()
    settings = plan_settings(command)
    job = find_job(command.model, named_values(command.set))
    source = (lasting_name(command.model), *command.set)
    with Working("planning", quiet=command.quiet):
        model = job_plans.abstract_model(job)
        batch = job_plans.first_batch(job, command.batch)
        if command.tables is not None:
            from whalejax.tables.sparse_optimizers import optimizer_named

            plan = job_plans.make_table_plan(
                *(job, model, batch, command.cluster),
                tables=optimizer_named(command.tables),
                staleness=command.staleness,
                margin=command.margin,
                source=source,
                **settings,
            )
        else:
            plan = _plan_without_tables(command, job, model, batch, source, settings)
    if command.output is not None:
        plan.save(command.output)
    if command.json:
        print(json.dumps(plan.document()))
        return
    console = make_console()
    show.print_plan(plan, console)
    if command.output is not None:
        console.print(f"\nwritten to {command.output}", markup=False)


def _batch(command: BatchCommand) -> None:
    from whalejax.api import job_plans as jobs
    from whalejax.api.largest_batch import largest_batch
    from whalejax.cli import show
    from whalejax.cli.progress import Working, make_console

    if not command.on:
        raise WhaleError("--on is missing; expected --on h100:8 v5e:4x4")
    job = find_job(command.model, named_values(command.set))
    with Working("planning", quiet=command.quiet):
        batch = largest_batch(
            job.loss_fn,
            jobs.abstract_model(job),
            jobs.first_batch(job, None),
            clusters=command.on,
            optimizer=job.optimizer,
            **jobs.split_settings(job),
            **plan_settings(command),
        )
    if command.json:
        print(json.dumps(batch.document()))
    else:
        make_console().print(show.Lines(batch.lines))


def _profile(command: ProfileCommand) -> None:
    import jax

    from whalejax.api import job_plans as jobs
    from whalejax.cli import show
    from whalejax.cli.plan_source import planned_job
    from whalejax.cli.progress import Working, make_console
    from whalejax.runtime.train_step import compile as compile_step

    _check_output(command.output)
    job, plan = planned_job(command.plan, command.model, command.set)
    batch = jobs.first_batch(job, plan.batch[0].shape[0])
    model = jobs.abstract_model(job)
    with Working("profiling", quiet=command.quiet):
        step = compile_step(
            plan, job.loss_fn, model, optimizer=job.optimizer, batch=batch
        )
        state = step.init(job.make_model, rng=jax.random.key(0))
        _, result = step.profile(state, batch, steps=command.steps)
    if command.output is not None:
        result.save(command.output)
    if command.json:
        print(json.dumps(result.document()))
    else:
        make_console().print(show.Lines(result.lines))


def _show(command: ShowCommand) -> None:
    from whalejax.cli import show
    from whalejax.cli.progress import make_console
    from whalejax.planner.plan.plan import Plan
    from whalejax.planner.plan.report.headline import run_words

    if command.json and command.describe:
        raise WhaleError(
            "--describe and --json are two ways to print; give one of them"
        )
    if command.tokens is not None and not 0 < command.tokens <= 1e24:
        raise WhaleError(
            f"--tokens is {command.tokens:g}; expected the number of tokens of a run, "
            "above 0 and at most 1e24, such as 1e12"
        )
    plan = Plan.load(command.plan)
    if command.json:
        print(json.dumps(plan.document()))
    elif command.describe:
        print(plan.describe())
    else:
        show.print_plan(plan, make_console(), all_rows=command.all)
        if command.tokens is not None:
            print(f"run     {run_words(plan.throughput(), command.tokens)}")


def _export(command: ExportCommand) -> None:
    from whalejax.planner.plan.plan import Plan
    from whalejax.planner.plan.report.export import check_export

    _check_output(command.output)
    check_export(command.to, image=command.image, called="--to")
    text = Plan.load(command.plan).export(
        command.to, name=command.name, image=command.image, command=command.command
    )
    if command.output is None:
        print(text, end="")
    else:
        command.output.write_text(text)


def _search(command: SearchCommand) -> None:
    from whalejax.api import job_plans
    from whalejax.cli import show
    from whalejax.cli.progress import Working, make_console
    from whalejax.planner.plan.report.export import check_export

    if not command.on:
        raise WhaleError("--on is missing; expected --on h100:8, once for each cluster")
    if command.json and command.export is not None:
        raise WhaleError("--export and --json are two ways to print; give one of them")
    if command.export is not None:
        check_export(command.export, image=command.image, called="--export")
    elif command.image is not None:
        raise WhaleError("--image is for --export jobset; give both, or neither")
    given, settings = prices(command.price), plan_settings(command)
    job = find_job(command.model, named_values(command.set))
    with Working("planning", quiet=command.quiet):
        plans = job_plans.search_plans(
            job,
            command.on,
            batch=command.batch,
            prices=given,
            each=command.each,
            runnable=not command.estimate,
            **settings,
        )
    if command.export is not None:
        source = (lasting_name(command.model), *command.set)
        named = tuple(dataclasses.replace(plan, source=source) for plan in plans)
        exported = dataclasses.replace(plans, plans=named)
        print(exported.export(command.export, image=command.image), end="")
    elif command.json:
        print(json.dumps(plans.document()))
    else:
        make_console().print(show.Lines(plans.lines))


def _why(command: WhyCommand) -> None:
    from whalejax.planner.plan.plan import Plan

    plan = Plan.load(command.plan)
    if not command.json:
        print(plan.why(command.path))
        return
    leaf, candidates = plan.leaf(command.path), plan.candidates
    document = {
        "whalejax_why": 1,
        "parameter": dataclasses.asdict(leaf),
        "why": plan.why(command.path).splitlines(),
        "weighed": [dataclasses.asdict(candidate) for candidate in candidates],
    }
    print(json.dumps(document))


def _diff(command: DiffCommand) -> None:
    from whalejax.cli import show
    from whalejax.cli.progress import make_console
    from whalejax.planner.plan.plan import Plan

    diff = Plan.load(command.before).diff(Plan.load(command.after))
    if command.json:
        print(json.dumps(diff.document()))
        return
    lines = functools.partial(diff.lines, all_rows=command.all)
    make_console().print(show.Lines(lines))


def _settings(command: TrainCommand) -> tuple[str, ...]:
    """Returns the given options of the model, or those of its plan without any."""
    from whalejax.cli.plan_source import check_source
    from whalejax.planner.plan.plan import Plan

    path, settings = command.plan, tuple[str, ...]()
    if command.set or path is None or not path.is_file():
        return command.set
    with contextlib.suppress(WhaleError):  # The command reads the plan again.
        model, *words = Plan.load(path).source or ("",)
        if model == lasting_name(command.model):
            settings = tuple(words)
    if settings and not is_file(command.model):
        check_source(Plan.load(path), str(path))
    return settings


def _check_output(output: Path | None) -> None:
    if output is not None and not output.absolute().parent.is_dir():
        raise WhaleError(
            f"--output {output}: there is no directory {output.absolute().parent}. "
            "Create it first"
        )


def _verify(command: VerifyCommand) -> int:
    from whalejax.api import job_plans
    from whalejax.cli.plan_source import planned_job
    from whalejax.cli.progress import Working, make_console
    from whalejax.verification import gpu, report

    _check_output(command.output)
    if command.setup_gpu:
        say(f"the GPU compiler is installed in {gpu.set_up()}")
        if command.plan is None:
            return 0
    if command.plan is None:
        raise WhaleError(
            "PLAN.json is missing; expected a file that whalejax plan wrote"
        )
    job, plan = planned_job(command.plan, command.model, command.set)
    question = job_plans.question_of(job, plan)
    with Working("verifying", quiet=command.quiet):
        result = question.verify(
            plan, command.topology, timeout_seconds=command.timeout
        )
    if command.output is not None and result.better is not None:
        result.better.save(command.output)
    if command.json:
        print(json.dumps(result.document()))
    else:
        console = make_console()
        console.print(report.table(result))
        if command.output is not None and result.better is not None:
            console.print(f"written to {command.output}", markup=False)
    return 0 if result.fits else 1


def _estimate(command: EstimateCommand) -> int:
    from whalejax.estimates.estimate_table import write_estimates

    result = write_estimates(command.table, command.output, strict=command.strict)
    if command.json:
        print(json.dumps({**asdict(result), "output": str(command.output)}))
    else:
        print(
            f"{result.predicted} of {result.runs} runs predicted, written to "
            f"{command.output}"
        )
        refused = result.runs - result.predicted - result.unread
        for count, what in ((result.unread, "read"), (refused, "predicted")):
            if count:
                rows = f"{count} row{'s' if count > 1 else ''}"
                print(f"{rows} could not be {what}; the column note has the reason")
    return min(result.unread, MOST_STATUS)


MOST_STATUS = 100
"""Largest exit status of ``estimate``; shells use larger statuses for signals."""


def _complete(shell: str) -> None:
    from whalejax.cli.completion import completion_script

    groups: dict[str, Callable[[list[str]], object]] = {
        "swarm": lambda words: parse_swarm(["swarm", *words]),
        "jobs": lambda words: parse_jobs(["jobs", *words]),
    }
    print(completion_script(shell, _parse, groups), end="")


def _check(command: CheckCommand) -> int:
    from whalejax.cli import plan_check

    return plan_check.check(command)


def _goodput(command: GoodputCommand) -> None:
    from whalejax.planner.plan.goodput import goodput
    from whalejax.planner.plan.plan import Plan

    options = dataclasses.asdict(command)
    as_json = options.pop("json")
    result = goodput(Plan.load(options.pop("plan")), **options)
    print(json.dumps(asdict(result)) if as_json else result)


def _described(path: Path) -> Cluster | None:
    """Returns the cluster of a file that would be overwritten, or None."""
    from whalejax.meshes import Cluster

    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        return Cluster.load(path)
    except WhaleError as error:
        raise WhaleError(
            f"{path} exists and does not describe a cluster ({error}). Remove it "
            "first, or give another --output"
        ) from None


def _calibrate(command: CalibrateCommand) -> None:
    from whalejax.cli.progress import Working
    from whalejax.meshes import Cluster
    from whalejax.meshes.calibration.calibrate import local_network, measured
    from whalejax.meshes.merge_kinds import merge_clusters

    _check_output(command.output)
    if command.output.suffix.lower() != ".toml":
        raise WhaleError(
            f"--output {command.output}: the description is a TOML file, whose name "
            f"ends in .toml. Name it {command.output.with_suffix('.toml').name}"
        )
    if command.model is None and (command.set or command.samples or command.precision):
        raise WhaleError(
            "--set, --samples and --precision need --model, which was not given"
        )
    job = None
    beside = Cluster.load(command.output) if command.append else None
    instead = None if command.append else _described(command.output)
    if command.model is not None:
        job = find_job(command.model, named_values(command.set))
    words = []
    with Working("calibrating"):
        cluster = Cluster.of(
            measured(command.seconds, kind=command.kind, beside=beside, instead=instead)
        )
        if job is not None:
            from whalejax.cli.measure_model import timing_words, with_timing

            cluster, timed = with_timing(
                cluster,
                job,
                command.samples,
                plan_settings(command).get("precision", "f32"),
            )
            words.append(timing_words(timed))
    words.append(f"{cluster.describe()}, measured and written to {command.output}")
    if beside is not None:
        cluster = Cluster.of(merge_clusters(beside, cluster, local_network()))
    cluster.save(command.output)
    if beside is not None:
        outer = cluster.levels[-1]
        words.append(
            f"which holds {cluster.describe()} now. The network between the kinds was "
            f"not measured and is assumed to be {outer.name} at "
            f"{outer.bandwidth_bytes_per_second / 1e9:.3g} GB/s, the last [[levels]] "
            "of the file"
        )
    if command.json:
        print(json.dumps({"output": str(command.output), **cluster.to_json()}))
    else:
        print("\n".join(words))
