"""A training session of the command line: plan, compile, train, replay, report.

Each part stands in a module of its own; this one puts them in order and turns what
happened into words and one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from whalejax import jobs, loop, replay
from whalejax.adapters import dotted
from whalejax.losses import Job
from whalejax.meshes.problems import Problems
from whalejax.options import TrainCommand
from whalejax.planner.plan import Plan
from whalejax.progress import Meter, make_console, progress_words
from whalejax.show import print_plan, seconds_text
from whalejax.train import TrainState, TrainStep
from whalejax.train import compile as compile_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a session found; the command line prints it as JSON.

    Attributes:
        model: name of the job.
        steps: done in this session.
        loss_first, loss_last: of its first and last step; None if none was done.
        max_rel_diff_vs_one_device: largest relative difference between the losses and
            those of one device, or None where nothing was replayed.
        mesh: mesh axes and sizes.
        predicted_step_s: seconds of a step, by the plan.
        measured_step_s: median seconds of a step, or None where too few were done.
        tokens_per_s, samples_per_s: measured speed; tokens where the batch has any.
        seconds: since the command began, everything counted.
    """

    model: str
    steps: int
    loss_first: float | None
    loss_last: float | None
    max_rel_diff_vs_one_device: float | None
    mesh: dict[str, int]
    predicted_step_s: float
    measured_step_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    seconds: float


def run(job: Job, options: TrainCommand, *, started: float) -> Report:
    """Train a job as the command line says.

    Args:
        job: what to train.
        options: of the command.
        started: ``time.monotonic()`` when the command began.

    Raises:
        WhaleError: the options contradict each other, no plan fits, the plan is for
            another machine, or the loss is not finite.
    """
    console = make_console(quiet=options.quiet)
    checkpoint = check_options(options)
    model = jobs.abstract_model(job)
    plan = Plan.load(options.plan) if options.plan else _made_plan(job, model, options)
    print_plan(plan, console)
    size = plan.batch[0].shape[0]

    def batches(index: int) -> Any:
        return job.batch_at(index, size)

    first = batches(0)
    step = compile_step(plan, job.loss_fn, model, optimizer=job.optimizer, batch=first)
    state = _start(step, job, options, checkpoint)
    if options.resume:
        origin = f"from {checkpoint}" if checkpoint else "anew: nothing was saved there"
        console.print(f"starting {origin}", markup=False)
    done = _train(step, state, batches, options, checkpoint, console)
    losses, measured = done.losses, done.step_seconds
    del done, state  # their memory is the replay's
    difference = None
    count = min(options.replay, len(losses))
    if count:
        alone = replay.one_device_step(job, model, first, plan)
        again = _replay(alone, job, batches, options, checkpoint, count, console)
        difference = replay.max_relative_difference(losses, again)
    unit, amount = units_of(first)
    report = Report(
        model=job.name,
        steps=len(losses),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        max_rel_diff_vs_one_device=difference,
        mesh=plan.axis_sizes or {"data": 1},
        predicted_step_s=plan.time.step_seconds,
        measured_step_s=measured,
        tokens_per_s=amount / measured if measured and unit == "tokens" else None,
        samples_per_s=size / measured if measured else None,
        seconds=time.monotonic() - started,
    )
    for line in _words(report):
        console.print(line, markup=False)
    if options.json:
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    return report


# Before anything runs.


def check_options(options: TrainCommand) -> Path | None:
    """Find what contradicts itself, before anything takes time.

    Returns:
        The checkpoint to resume from, or None.

    Raises:
        WhaleError: every problem, at once.
    """
    problems = Problems("whalejax train")
    numbers = {
        "--steps": (options.steps, 1),
        "--save-every": (options.save_every, 1),
        "--replay": (options.replay, 0),
        "--batch": (options.batch, 1),
        "--micro-batches": (options.micro_batches, 1),
    }
    for name, (value, least) in numbers.items():
        if value is not None and value < least:
            problems.add(f"{name} is {value}; expected {least} or more")
    if options.plan is not None:
        for name, given in (
            ("--cluster", options.cluster),
            ("--batch", options.batch),
            ("--precision", options.precision),
            ("--micro-batches", options.micro_batches),
        ):
            if given is not None:
                problems.add(
                    f"{name} {given} was given with --plan {options.plan}, which "
                    "decides it. Leave it out, or make another plan with whalejax plan"
                )
    found = _check_save(options, problems)
    problems.raise_if_any()
    return found


def _check_save(options: TrainCommand, problems: Problems) -> Path | None:
    if options.save is None:
        if options.resume:
            problems.add("--resume was given without --save DIR; say where from")
        return None
    if options.save.exists() and not options.save.is_dir():
        problems.add(f"--save {options.save} is a file; expected a directory")
        return None
    found = loop.latest(options.save)
    if found is not None and not options.resume:
        problems.add(
            f"--save {options.save} holds checkpoints already, the latest "
            f"{found.name}. Go on from it with --resume, or give another directory"
        )
    return found


def _made_plan(job: Job, model: Any, options: TrainCommand) -> Plan:
    return jobs.make_plan(
        job,
        model,
        job.batch_at(0, options.batch),
        jobs.machine(options.cluster),
        precision=options.precision,
        micro_batches=options.micro_batches,
    )


# Training.


def _start(
    step: TrainStep, job: Job, options: TrainCommand, checkpoint: Path | None
) -> TrainState:
    if checkpoint is not None:
        return step.restore(checkpoint)
    return step.init(job.make_model, rng=jax.random.key(options.seed))


def _train(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    options: TrainCommand,
    checkpoint: Path | None,
    console: Console,
) -> loop.Run:
    first = int(state.step)
    unit, amount = units_of(batches(0))
    predicted = step.plan.time.step_seconds
    with Meter(console, "training", first=first, steps=options.steps) as meter:

        def show(progress: loop.Progress) -> None:
            words = progress_words(
                progress.loss,
                unit=unit,
                units_per_step=amount,
                predicted_seconds=predicted,
                measured_seconds=progress.step_seconds,
            )
            meter.show(progress.step, words)

        return loop.train(
            step,
            state,
            batches,
            steps=options.steps,
            save_dir=options.save,
            save_every=options.save_every,
            resumed_from=checkpoint,
            on_step=show,
        )


def _replay(
    alone: TrainStep,
    job: Job,
    batches: Callable[[int], Any],
    options: TrainCommand,
    checkpoint: Path | None,
    count: int,
    console: Console,
) -> tuple[float, ...]:
    state = _start(alone, job, options, checkpoint)
    title = "replaying on one device"
    with Meter(console, title, first=0, steps=count) as meter:
        return replay.replay(
            alone, state, batches, steps=count, on_step=lambda done: meter.show(done)
        )


# Words.


def units_of(batch: Any) -> tuple[str, int]:
    """What the speed of training counts, and how many of it a global batch holds.

    Tokens are the elements of the leaf that is named after them; without such a leaf
    samples are counted, along dimension 0.

    >>> import numpy as np
    >>> units_of({"tokens": np.zeros((4, 9)), "mask": np.zeros((4, 8))})
    ('tokens', 36)
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, leaf in leaves:
        if dotted(path).rpartition(".")[2] in ("tokens", "token_ids", "input_ids"):
            return "tokens", math.prod(leaf.shape)
    return "samples", leaves[0][1].shape[0]


def _words(report: Report) -> list[str]:
    lines = []
    if report.loss_first is None:
        lines.append("nothing to do: all steps were done before")
    else:
        lines.append(
            f"loss {report.loss_first:.4f} to {report.loss_last:.4f} in "
            f"{report.steps} steps, {report.seconds:.1f} s in all"
        )
    if report.measured_step_s is not None:
        ratio = report.measured_step_s / report.predicted_step_s
        lines.append(
            f"step {seconds_text(report.measured_step_s)} measured, "
            f"{seconds_text(report.predicted_step_s)} predicted ({ratio:.2f} times)"
        )
    if report.max_rel_diff_vs_one_device is not None:
        lines.append(
            "largest relative difference of a loss to one device's: "
            f"{report.max_rel_diff_vs_one_device:.1e}"
        )
    return lines
