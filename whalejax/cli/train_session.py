"""A training session of the command line: plan, compile, train, replay, report.

Each part is in a separate module. This module runs them in order, and prints the report
as text and as one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from whalejax.api import job_plans
from whalejax.cli import replay
from whalejax.cli.option_checks import check_command, check_table_options
from whalejax.cli.options import (
    TrainCommand,
    given_places,
    given_plan_options,
    plan_settings,
)
from whalejax.cli.progress import Meter, Working, make_console, progress_words, remark
from whalejax.cli.show import print_plan
from whalejax.cli.train_report import TrainReport, words_of
from whalejax.distributed.standard_streams import say
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.table_text import whole_seconds
from whalejax.runtime import loop
from whalejax.runtime.plan_compatibility import devices_of
from whalejax.runtime.train_step import TrainStep
from whalejax.runtime.train_step import compile as compile_step
from whalejax.state.resume import (
    agreed_checkpoints,
    batches_from,
    hold_folder,
    restore_newest,
)
from whalejax.tables.sparse_optimizers import optimizer_named
from whalejax.user_code.losses import Job


def run(job: Job, options: TrainCommand, *, started: float) -> TrainReport:
    """Trains a job with the options of the command line.

    Args:
        job: Job to train.
        options: Options of the command.
        started: ``time.monotonic()`` when the command began.

    Raises:
        WhaleError: Options contradict each other, no plan fits, the plan is for another
            machine, or a loss is not finite.
    """
    check_options(options)
    with hold_folder(options.save):
        return _run(job, options, started)


def _run(job: Job, options: TrainCommand, started: float) -> TrainReport:
    # Only the first process prints.
    speaks = jax.process_index() == 0
    console = make_console(quiet=options.quiet or not speaks)
    model = job_plans.abstract_model(job)
    session = _Session(
        job=job,
        options=options,
        console=console,
        model=model,
        plan=_plan(job, model, options, console),
    )
    print_plan(session.plan, console)
    checked = session.check() if options.check and speaks else None
    losses, step_seconds, checkpoint = session.train()
    difference = None
    if losses and options.replay:
        again = session.replay(min(options.replay, len(losses)), checkpoint)
        difference = replay.max_relative_difference(losses, again)
    report = session.report(losses, step_seconds, difference, started)
    report = dataclasses.replace(report, checked_error=checked)
    for line in words_of(report):
        console.print(line, markup=False)
    if options.json and speaks:
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    return report


def check_options(options: TrainCommand) -> None:
    """Refuses conflicting options, before the model is traced.

    Raises:
        WhaleError: Options conflict; lists all problems.
    """
    problems = Problems("whalejax train")
    check_command(options, problems)
    if options.plan is not None:
        for name, words in given_plan_options(options):
            problems.add(
                f"{name} {words} was given with --plan {options.plan}, which fixes "
                f"it. Leave out {name}, or make another plan with whalejax plan"
            )
    if options.best_mode is not None and options.best is None:
        problems.add(
            f"--best-mode {options.best_mode} was given without --best METRIC. Give "
            "both, or leave it out"
        )
    if options.spares and options.processes is None:
        problems.add(
            f"--spares is {options.spares} without --processes MIN:MAX. Give both, or "
            "leave --spares out"
        )
    if options.restarts and options.processes is None:
        problems.add(
            f"--restarts is {options.restarts} without --processes. Give both, or "
            "leave --restarts out"
        )
    if options.noise_scale and options.processes is None:
        problems.add(
            "--noise-scale was given without --processes MIN:MAX, whose replicas "
            "measure it. Give both, or leave --noise-scale out"
        )
    for name in given_places(options) if options.processes is None else ():
        problems.add(
            f"{name} was given without --processes MIN:MAX. Give both, or leave "
            f"{name} out"
        )
    if options.check and options.processes is not None:
        problems.add(
            "--check was given with --processes MIN:MAX, whose processes plan "
            "themselves. Make such a plan with whalejax plan -o, and check it with "
            "whalejax check"
        )
    check_table_options(options, problems)
    _check_save(options, problems)
    problems.raise_if_any()


def _unwritable(path: Path) -> str:
    """Returns why no checkpoint can be written below a path, to print after the path.

    Returns an empty text if one can.
    """
    if path.parts and path.parts[0].endswith(":"):
        return (
            " is an address; checkpoints are written to a mounted file system. Give a "
            "path"
        )
    there = path
    while not there.exists():
        if there.is_symlink():
            there.stat()  # Raises for a broken or circular link.
        there = there.parent
    if not there.is_dir():
        inside = "" if there == path else f" is in {there}, which"
        return f"{inside} is a file; expected a directory"
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return (
            f": {there} cannot be read and written. Give another directory, or change "
            "its permissions"
        )
    return ""


def _check_save(options: TrainCommand, problems: Problems) -> None:
    if options.save is None:
        if options.resume:
            problems.add("--resume was given without --save DIR. Give both")
        for name, value in (("--keep", options.keep), ("--best", options.best)):
            if value is not None:
                problems.add(
                    f"{name} {value} was given without --save DIR, the directory of "
                    "the checkpoints. Give both, or leave it out"
                )
        return
    try:
        problem = _unwritable(options.save)
    except OSError as error:  # for example too long a name, or a circular link
        problem = f": {error.strerror or error}. Give another directory"
    if problem:
        problems.add(f"--save {options.save}{problem}")
        return
    save = loop.latest(options.save)
    if save is not None and not options.resume:
        problems.add(
            f"--save {options.save} holds checkpoints already, the latest "
            f"{save.name}. Continue from it with --resume, or give another directory"
        )


def _plan(job: Job, model: Any, options: TrainCommand, console: Console) -> Plan:
    if options.plan is not None:
        plan = Plan.load(options.plan)
    else:
        plan = _planned(job, model, options, console)
    devices_of(plan, None)  # refuses a plan that cannot run, before it is shown
    return plan


def _planned(job: Job, model: Any, options: TrainCommand, console: Console) -> Plan:
    if options.tables is not None:
        return _with_tables(job, model, options)
    settings = plan_settings(options)
    if options.cluster is None:
        remark(console, "planning; first measuring the devices, for at most 20 s")
    with Working("planning", quiet=console.quiet):
        return job_plans.make_plan(
            job,
            model,
            job.batch_at(0, options.batch),
            job_plans.machine(options.cluster),
            **settings,
        )


def _with_tables(job: Job, model: Any, options: TrainCommand) -> Plan:
    return job_plans.make_table_plan(
        *(job, model, job.batch_at(0, options.batch), options.cluster),
        tables=optimizer_named(options.tables or ""),
        staleness=options.staleness,
        **plan_settings(options),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    job: Job
    options: TrainCommand
    console: Console
    model: Any
    plan: Plan

    @property
    def batch_size(self) -> int:
        return self.plan.batch[0].shape[0]

    def batch_at(self, index: int) -> Any:
        return self.job.batch_at(index, self.batch_size)

    def check(self) -> float | None:
        """Returns the plan's largest error at reduced sizes; None if unknown."""
        from whalejax.cli.plan_check import check_before_training

        result = check_before_training(
            self.job, self.model, self.batch_at(0), self.plan, self.console
        )
        return None if result is None else result.worst.error

    def start(self, step: TrainStep) -> TrainState:
        return step.init(self.job.make_model, rng=jax.random.key(self.options.seed))

    def batches_from(self, state: TrainState) -> Callable[[int], Any]:
        size, done = self.batch_size, int(state.step)
        samples = done * size if state.samples is None else state.samples
        return batches_from(self.job, size, step=done, samples=samples)

    def train(self) -> tuple[tuple[float, ...], float | None, Path | None]:
        """Trains; returns the losses, step time and first checkpoint, if any."""
        options, job = self.options, self.job
        batch = self.batch_at(0)
        step = compile_step(
            self.plan,
            *(job.loss_fn, self.model),
            optimizer=job.optimizer,
            batch=batch,
            replace_every=options.replace_every,
        )
        state, checkpoint = self._restore_or_init(step)
        first = int(state.step)
        saves, evaluates = options.save is not None, job.eval_batches is not None
        with Meter(
            self.console,
            "training",
            first=first,
            steps=options.steps,
            waiting="compiling",
        ) as meter:
            done = loop.train(
                step,
                state,
                self.batches_from(state),
                steps=options.steps,
                save_dir=options.save,
                save_every=options.save_every if saves or evaluates else None,
                keep=options.keep if saves else None,
                eval_batches=job.eval_batches,
                eval_every=options.eval_every,
                best=options.best,
                best_mode=options.best_mode or "min",
                patience=options.early_stop,
                csv=options.csv,
                resumed_from=checkpoint,
                on_step=functools.partial(self._show, meter, *self._units),
                is_held=True,
            )
        self._tell_evaluations(done)
        scaling = done.state.loss_scale
        skipped = 0 if scaling is None else int(scaling.skipped_steps)
        if scaling is not None and skipped:
            self.console.print(
                f"{skipped} step{'s' if skipped > 1 else ''} changed nothing, because "
                "gradients overflowed in float16; the loss scale is now "
                f"{float(scaling.scale):g}",
                markup=False,
            )
        return done.losses, done.step_seconds, checkpoint

    def _tell_evaluations(self, done: loop.LoopResult) -> None:
        if done.evaluations:
            number, metrics = done.evaluations[-1]
            words = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.console.print(f"evaluation at step {number}: {words}", markup=False)
        if done.stopped_early:
            self.console.print("ended early: evaluations no longer improved")
        if done.best is not None:
            best = done.best
            self.console.print(
                f"best {best.metric} {best.value:.4f} at step {best.step}: {best.path}",
                markup=False,
            )

    def _restore_or_init(self, step: TrainStep) -> tuple[TrainState, Path | None]:
        """Returns the first state and its checkpoint, if any; prints its source."""
        options = self.options
        folder = options.save if options.resume else None
        or_init = restore_newest(
            step, [] if folder is None else agreed_checkpoints(folder)
        )
        for note in or_init.notes if or_init else ():
            self._warn(note)
        if or_init:
            steps = count_text(int(or_init.state.step), "step")
            samples = or_init.state.samples
            more = "" if samples is None else f", {count_text(samples, 'sample')}"
            self.console.print(
                f"starting from {or_init.checkpoint}: {steps}{more}", markup=False
            )
        elif options.resume:
            self.console.print("starting at step 0: no checkpoint to resume from")
        remark(self.console, "compiling; the first step takes longer")
        if or_init:
            return or_init.state, or_init.checkpoint
        return self.start(step), None

    @property
    def _units(self) -> tuple[str, int]:
        work = self.plan.work
        return (work.unit, work.units) if work else ("samples", self.batch_size)

    def _warn(self, text: str) -> None:
        """Prints a warning, even with ``--quiet``."""
        if not self.options.quiet:
            self.console.print(text, markup=False)
        elif jax.process_index() == 0:
            say(f"whalejax: {text}")

    def _show(
        self,
        meter: Meter,
        unit: str,
        units_per_step: int,
        progress: loop.Progress,
    ) -> None:
        words = progress_words(
            progress.loss,
            unit=unit,
            units_per_step=units_per_step,
            predicted_seconds=whole_seconds(self.plan),
            measured_seconds=progress.step_seconds,
        )
        meter.show(progress.step, words)

    def replay(self, count: int, checkpoint: Path | None) -> tuple[float, ...]:
        batch = self.batch_at(0)
        step = replay.one_device_step(self.job, self.model, batch, self.plan)
        title = "replaying on one device"
        with Meter(self.console, title, first=0, steps=count) as meter:
            newest = restore_newest(step, [] if checkpoint is None else [checkpoint])
            state = newest.state if newest else self.start(step)
            batches = self.batches_from(state)
            return replay.replay(step, state, batches, steps=count, on_step=meter.show)

    def report(
        self,
        losses: Sequence[float],
        step_seconds: float | None,
        difference: float | None,
        started: float,
    ) -> TrainReport:
        work = self.plan.work
        speed = 1 / step_seconds if step_seconds else None
        measured = self.plan.throughput(step_seconds) if speed and work else None
        return TrainReport(
            model=self.job.name,
            steps=len(losses),
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            max_rel_diff_vs_one_device=difference,
            mesh=self.plan.axis_sizes or {"data": 1},
            predicted_step_s=whole_seconds(self.plan),
            measured_step_s=step_seconds,
            tokens_per_s=measured.tokens_per_second if measured else None,
            samples_per_s=speed * self.batch_size if speed else None,
            seconds=time.monotonic() - started,
            parameters=work.parameters if work else None,
            device_flops_per_s=measured.device_flops_per_second if measured else None,
            utilization=measured.utilization if measured else None,
        )
