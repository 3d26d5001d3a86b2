"""The training loop: asynchronous steps, checkpoints, and a stop at a bad loss.

A step returns before its work is done. The loop reads a loss some steps later, and
waits only when it measures or saves. So it measures more than the dispatch of a step,
and saves no state whose loss is not yet known.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import jax
import jax.numpy as jnp

from whalejax.lowering.global_arrays import is_here, settle
from whalejax.lowering.train_state import TrainState, check_alive
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text, milliseconds
from whalejax.runtime.evaluations import Evaluations
from whalejax.runtime.run_records import BestCheckpoint, Records, check_folder
from whalejax.runtime.run_records import best as best
from whalejax.runtime.steps_in_flight import (
    STEPS_IN_FLIGHT,
    LossesInFlight,
    NotFiniteError,
    StepTimer,
)
from whalejax.runtime.steps_in_flight import Progress as Progress
from whalejax.runtime.train_step import TrainStep
from whalejax.state.checkpoint_record import UNFINISHED_SUFFIX
from whalejax.state.resume import checkpoints, hold_folder, steps_of
from whalejax.user_code.argument_checks import check_function


__all__ = ["Hook", "LoopResult", "Progress", "best", "latest", "train"]


def __dir__() -> list[str]:
    return sorted(__all__)


_LEFTOVER: Final = re.compile(
    rf"step_\d{{6,}}(\.deleted|{re.escape(UNFINISHED_SUFFIX)})"
)


_SAVE_EVERY: Final = 100
_KEEP: Final = 3


Hook = Callable[[int, Mapping[str, Any]], Any]
"""Function that logs values: its arguments are a step's number, and values by name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoopResult:
    """Result of a call of ``train``.

    Attributes:
        state: State after the last step.
        first_step: Number of finished steps of the state at the start.
        losses: Loss of every step of this call, in order.
        step_seconds: Median seconds of a step, without the first two; None if there
            were no more.
        checkpoint: Latest checkpoint that this call wrote, or None.
        evaluations: (step, metrics by name) of every evaluation of this call, in order.
        best: Checkpoint of the best evaluation so far; None if not requested.
        stopped_early: Whether ``patience`` evaluations in a row were not better.
    """

    state: TrainState
    first_step: int
    losses: tuple[float, ...]
    step_seconds: float | None
    checkpoint: Path | None
    evaluations: tuple[tuple[int, dict[str, float]], ...] = ()
    best: BestCheckpoint | None = None
    stopped_early: bool = False

    def __repr__(self) -> str:
        done = f"{count_text(len(self.losses), 'step')} after {self.first_step}"
        words = [f"loss {self.losses[-1]:.6g}"] if self.losses else []
        if self.step_seconds is not None:
            words.append(f"{milliseconds(self.step_seconds)} a step")
        words += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        words += [f"best {self.best.path}"] if self.best else []
        words += ["stopped early"] if self.stopped_early else []
        return f"<LoopResult of {', '.join([done, *words])}>"


@names_arguments("wh.loop.train")
def train(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any] | Iterable[Any],
    *,
    steps: int,
    save_dir: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    eval_batches: Callable[[], Iterable[Any]] | Sequence[Any] | None = None,
    eval_every: int | None = None,
    best: str | None = None,
    best_mode: Literal["min", "max"] = "min",
    patience: int | None = None,
    csv: str | os.PathLike[str] | None = None,
    progress: bool = False,
    hooks: Sequence[Hook] = (),
    resumed_from: Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    is_held: bool = False,
) -> LoopResult:
    """Trains until a total number of steps is done.

    Args:
        step: Compiled step from ``wh.compile``.
        state: State to start from; it is donated.
        batches: Function from the number of a step, counted from 0, to its global
            batch. Or an iterable that yields the batch of each step, such as a
            ``wh.Feed``.
        steps: Total number of steps, including those before a resumption.
        save_dir: Folder of checkpoints with names such as ``step_000100``; None writes
            none.
        save_every: Number of steps between checkpoints; the last step is saved too.
            None takes 100.
        keep: Number of latest checkpoints to keep; None keeps 3.
        eval_batches: Batches of an evaluation: a sequence, or a function that returns
            an iterable each time. Metrics of an evaluation are means over its batches,
            weighted by their samples.
        eval_every: Number of steps between evaluations; None uses ``save_every``. The
            last step is evaluated too.
        best: Name of an evaluation metric, such as ``"loss"``. The checkpoint with its
            best value is kept in addition, with a name such as ``best_000100``.
        best_mode: Better direction of the metric: ``"min"`` or ``"max"``.
        patience: Number of evaluations in a row without improvement after which
            training ends; None never ends it.
        csv: File with a row for each step, and columns for its loss, metrics, seconds
            and evaluation. A resumed run appends to it.
        progress: Whether to show the progress: as a bar with the remaining time on a
            terminal, as lines elsewhere.
        hooks: Functions called with a step's number and values by name, such as
            ``lambda step, values: wandb.log(values, step=step)``. Values are the
            metrics of each step, and those of each evaluation with the prefix
            ``eval/``. Only one of several processes calls them.
        resumed_from: Checkpoint that is never removed, or None.
        on_step: Function called with the ``Progress`` of every step, in order, a few
            steps after it was computed.
        clock: Function that returns monotonic seconds.
        is_held: Whether the caller has locked ``save_dir`` already by
            ``state.resume.hold_folder``. If not, it is locked here.

    Raises:
        WhaleError: A loss or a parameter is not finite; such a state is never saved. Or
            another process has died. Or, before the first step, arguments are invalid,
            a checkpoint to be written exists already, or another run uses the folder.
    """
    settings = dict(locals())
    del settings["state"], settings["batches"]
    _check_order(step, state, batches)
    check_alive(state)
    with ExitStack() as opened:
        run = _run_of(opened, int(state.step), **settings)
        return run.go(state, _batch_function(batches, run.rhythm.first))


def _run_of(
    opened: ExitStack,
    first: int,
    *,
    step: TrainStep,
    save_dir: str | os.PathLike[str] | None,
    clock: Callable[[], float],
    is_held: bool,
    resumed_from: Path | None,
    **given: Any,
) -> _Run:
    """Checks the arguments of ``train``, locks the folder and returns the run."""
    _check_arguments(step=step, save_dir=save_dir, **given)
    folder = None if save_dir is None else Path(save_dir)
    every, batches = given["save_every"] or _SAVE_EVERY, given["eval_batches"]
    rhythm = _Rhythm(
        first=first,
        steps=given["steps"],
        save_every=None if folder is None else every,
        eval_every=None if batches is None else given["eval_every"] or every,
    )
    opened.enter_context(hold_folder(None if is_held else folder))
    if folder is not None:
        _check_new(folder, rhythm)
    names = ("steps", "csv", "progress", "hooks", "on_step")
    records = Records(
        step, first=first, opened=opened, **{name: given[name] for name in names}
    )
    return _Run(
        step=step,
        rhythm=rhythm,
        folder=folder,
        keep=given["keep"] or _KEEP,
        resumed_from=resumed_from,
        losses=LossesInFlight(
            records.tell, getattr(step, "steps_in_flight", STEPS_IN_FLIGHT)
        ),
        windows=StepTimer(clock),
        evaluations=Evaluations(
            step,
            batches,
            records=records,
            folder=folder,
            first=first,
            metric=given["best"],
            mode=given["best_mode"],
            patience=given["patience"],
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rhythm:
    first: int
    steps: int
    save_every: int | None
    eval_every: int | None

    def saves(self, done: int) -> bool:
        return self._is_due(done, self.save_every)

    def evaluates(self, done: int) -> bool:
        return self._is_due(done, self.eval_every)

    def _is_due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.steps)


@dataclass(slots=True, kw_only=True)
class _Run:
    step: TrainStep
    rhythm: _Rhythm
    folder: Path | None
    keep: int
    resumed_from: Path | None
    losses: LossesInFlight
    windows: StepTimer
    evaluations: Evaluations

    def go(self, state: TrainState, batch_of: Callable[[int], Any]) -> LoopResult:
        first, steps = self.rhythm.first, self.rhythm.steps
        checkpoint, done = self.resumed_from, first
        losses, windows = self.losses, self.windows
        try:
            for done in range(first + 1, steps + 1):
                if self.evaluations.is_over:  # if an earlier run has stopped early
                    done -= 1
                    break
                state, metrics = self.step(state, batch_of(done - 1))
                losses.expect(done, metrics)
                pauses = self.rhythm.saves(done) or self.rhythm.evaluates(done)
                if pauses or done == steps or windows.is_due(done - first):
                    losses.wait()
                    losses.step_seconds = windows.close(done - first)
                    losses.take_all()
                if pauses:
                    checkpoint = self._paused(done, state) or checkpoint
                    windows.open(done - first)
                if self.evaluations.is_over:
                    if self.folder is not None and not self.rhythm.saves(done):
                        checkpoint = self._saved(done, state)
                    break
        except NotFiniteError as error:
            _stop(error, steps, checkpoint, self.folder)
        return LoopResult(
            state=state,
            first_step=first,
            losses=tuple(losses.values),
            step_seconds=windows.median_seconds(),
            checkpoint=checkpoint if checkpoint != self.resumed_from else None,
            evaluations=tuple(self.evaluations.done),
            best=self.evaluations.best,
            stopped_early=self.evaluations.is_over and done < steps,
        )

    def _paused(self, done: int, state: TrainState) -> Path | None:
        """Evaluates and saves if due after a step; returns a new checkpoint or None."""
        checkpoint = None
        if self.folder is not None:
            _check_parameters(self.step, state, done)
        # Evaluate first: after an interruption a resumed run repeats the evaluation.
        if self.rhythm.evaluates(done):
            self.evaluations.run(done, state)
        if self.folder is not None and self.rhythm.saves(done):
            checkpoint = self._saved(done, state)
        return checkpoint

    def _saved(self, done: int, state: TrainState) -> Path:
        assert self.folder is not None
        checkpoint = _save(self.folder, done, self.step, state)
        _prune(self.folder, self.keep, self.resumed_from)
        return checkpoint


@names_arguments("wh.loop.latest")
def latest(save_dir: str | os.PathLike[str]) -> Path | None:
    """Returns the checkpoint with the most steps in a directory, or None.

    Args:
        save_dir: Folder to which ``train`` saved; unfinished checkpoints of a killed
            run are skipped.
    """
    check_folder("loop.latest", save_dir)
    return next(iter(checkpoints(Path(save_dir))), None)


def _batch_function(
    batches: Callable[[int], Any] | Iterable[Any], first: int
) -> Callable[[int], Any]:
    if callable(batches):
        function = batches

        def batch_of(index: int) -> Any:
            batch = function(index)
            if batch is None:
                raise WhaleError(
                    f"batches({index}) returned None; expected the global batch of "
                    "that step"
                )
            return batch

        return batch_of
    place = getattr(batches, "step", first)
    if is_whole(place) and place != first:
        raise WhaleError(
            f"batches comes to step {place} next, and the state has {first} finished "
            "steps: samples would be repeated or left out. Make it with "
            f"wh.Feed(…, first_sample=state.samples), or first={first}"
        )
    if isinstance(batches, Mapping) or not hasattr(batches, "__iter__"):
        raise WhaleError(
            f"batches is {short_repr(batches)}; expected a function from the number of "
            "a step, counted from 0, to its global batch, or an iterable of batches"
        )
    following = iter(batches)

    def next_batch(index: int) -> Any:
        try:
            return next(following)
        except StopIteration:
            raise WhaleError(
                f"batches ended before step {index + 1}. Give as many as there are "
                "steps, or one that begins again, such as wh.Feed(…) without epochs="
            ) from None

    return next_batch


def _check_order(step: Any, state: Any, batches: Any) -> None:
    order = "The order is wh.loop.train(step, state, batches, steps=…)"
    if isinstance(step, TrainState) or isinstance(state, TrainStep):
        raise WhaleError(
            f"step is a {type(step).__name__}, and state a {type(state).__name__}. "
            f"{order}"
        )
    if not hasattr(state, "step"):
        raise WhaleError(
            f"state is {short_repr(state)}; expected the state that "
            "step.init(make_model, rng=key) or step.init_from(model) gives, or that "
            f"a step returned. {order}"
        )
    if callable(batches):
        problems = Arguments("wh.loop.train")
        check_function(problems, "batches", batches, "step")
        problems.raise_if_any()


def _check_arguments(*, step: Any, **given: Any) -> None:
    problems = Arguments("loop.train")
    if not callable(step):
        problems.refuse("step", step, "what wh.compile gives")
    problems.whole("steps", given["steps"])
    for name in ("save_every", "keep", "eval_every", "patience"):
        problems.whole(name, given[name], least=1, none=True)
    problems.choice("best_mode", given["best_mode"], ("min", "max"))
    _check_functions(problems, given)
    if given["csv"] is not None:
        problems.path("csv", given["csv"], "the path of a CSV file")
    if given["save_dir"] is not None:
        problems.path("save_dir", given["save_dir"], "the path of a folder")
    if given["eval_batches"] is None:
        for name in ("eval_every", "best", "patience"):
            if given[name] is not None:
                problems.add(
                    f"{name} is {short_repr(given[name])}, and there is no evaluation: "
                    "give eval_batches, a list of batches or a function that gives them"
                )
    if given["save_dir"] is None:
        _check_without_folder(problems, given)
    if given["patience"] is not None and given["best"] is None:
        problems.add("patience needs best, the metric that is to become better")
    problems.raise_if_any()


def _check_without_folder(problems: Arguments, given: Mapping[str, Any]) -> None:
    """Refuses options of checkpoints if there is no folder for them."""
    evaluates = given["eval_batches"] is not None
    needing = ["keep", *(["best"] if evaluates else ["save_every"])]
    for name in needing:
        if given[name] is not None:
            problems.add(
                f"{name} is {short_repr(given[name])}; it needs save_dir, the folder "
                "of the checkpoints"
            )


def _check_functions(problems: Arguments, given: Mapping[str, Any]) -> None:
    sets = given["eval_batches"]
    if sets is not None and not (callable(sets) or isinstance(sets, list | tuple)):
        problems.refuse(
            "eval_batches", sets, "a list of batches, or a function that gives them"
        )
    elif callable(sets):
        check_function(problems, "eval_batches", sets)
    hooks = given["hooks"]
    if not isinstance(hooks, list | tuple) or not all(map(callable, hooks)):
        problems.refuse(
            "hooks", hooks, "a list of functions of a step's number and its values"
        )
    else:
        for hook in hooks:
            check_function(problems, "hook", hook, "step", "values")
    if given["on_step"] is not None:
        taken = "a function of the progress of a step, or None"
        if problems.function("on_step", given["on_step"], taken):
            check_function(problems, "on_step", given["on_step"], "progress")


# Checkpoints.


@functools.partial(jax.jit)
def _finite(leaves: list[Any]) -> list[Any]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _check_parameters(step: TrainStep, state: TrainState, done: int) -> None:
    """Raises if a parameter is not finite, which a finite loss does not exclude."""
    # With stage programs, parameters are on separate devices.
    places: dict[Any, dict[str, jax.Array]] = {}
    leaves = jax.tree.leaves(state.params)
    for planned, leaf in zip(step.plan.trained, leaves, strict=True):
        if is_here(leaf.sharding):
            devices = frozenset(leaf.sharding.device_set)
            places.setdefault(devices, {})[planned.path] = leaf
    settle()
    spoilt = {
        path
        for place in places.values()
        for path, is_finite in zip(
            place, jax.device_get(_finite([*place.values()])), strict=True
        )
        if not is_finite
    }
    paths = [planned.path for planned in step.plan.trained if planned.path in spoilt]
    if paths:
        raise NotFiniteError(done, f"parameters are not finite: {', '.join(paths)}")


def _check_new(save_dir: Path, rhythm: _Rhythm) -> None:
    first, steps = rhythm.first, rhythm.steps
    there = [
        path.name
        for path in reversed(checkpoints(save_dir))
        if first < steps_of(path) <= steps and rhythm.saves(steps_of(path))
    ]
    if there:
        raise WhaleError(
            f"save_dir is {save_dir}, which holds {', '.join(there)} already, and the "
            f"state has {count_text(first, 'step')} behind it: training to step "
            f"{steps} would write there. Give another directory, or go on from the "
            "latest checkpoint: step.restore(loop.latest(save_dir))"
        )


def _save(save_dir: Path, done: int, step: TrainStep, state: TrainState) -> Path:
    path = save_dir / f"step_{done:06d}"
    step.save(path, state)
    return path


def _prune(save_dir: Path, keep: int, protected: Path | None) -> None:
    """Removes all but the latest checkpoints, and leftovers of killed runs."""
    if jax.process_index() != 0:
        return
    try:
        _remove_leftovers(save_dir)
        for path in checkpoints(save_dir)[keep:]:
            if path != protected:
                # Rename it first: a partly removed folder must not have a
                # checkpoint's name.
                path.rename(path.with_name(f"{path.name}.deleted"))
        _remove_leftovers(save_dir)
    except OSError as error:
        raise WhaleError(
            f"{save_dir}: older checkpoints cannot be removed "
            f"({error.strerror or error}). The latest one is whole: mend the file "
            "system, or ask for permission to write there, and go on from it with "
            "--resume"
        ) from error


def _remove_leftovers(save_dir: Path) -> None:
    for path in save_dir.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _stop(
    error: NotFiniteError, steps: int, checkpoint: Path | None, save_dir: Path | None
) -> NoReturn:
    if checkpoint:
        kept = (
            f"The last good checkpoint is {checkpoint}; training can go on from there: "
            "--resume, or step.restore"
        )
    elif save_dir:
        kept = f"No good checkpoint stands in {save_dir} yet"
    else:
        kept = "No checkpoint was written; --save DIR, or save_dir=, writes them"
    raise WhaleError(
        f"step {error.step} of {steps}: {error.what}; training has stopped. {kept}. "
        "A lower learning rate, a longer warm-up or clipping the gradient's norm are "
        "the usual remedies"
    ) from None
