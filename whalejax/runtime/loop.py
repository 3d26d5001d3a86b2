"""The training loop: steps without waiting, checkpoints, and a stop at a bad loss.

A step returns before its work is done, and the loop lets it: it looks at a loss some
steps later, and waits only where it measures or saves. That is easy to get subtly wrong
(timing the dispatch, saving a state whose loss nobody has seen yet), so it is written
once, here; the command line and scripts share it.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import jax
import jax.numpy as jnp

from whalejax.lowering.global_arrays import is_here, settle
from whalejax.lowering.multihost.watchdog import lost
from whalejax.lowering.state import TrainState
from whalejax.membership.heartbeat import tells_of_loss
from whalejax.meshes.checks import Arguments, is_whole, shown
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.checkpoint_record import UNFINISHED_SUFFIX
from whalejax.runtime.evaluations import Evaluations
from whalejax.runtime.resume import checkpoints, held, steps_of
from whalejax.runtime.run_records import BestCheckpoint, Records, host_values
from whalejax.runtime.run_records import best as best
from whalejax.runtime.train_step import TrainStep


_STEPS_IN_FLIGHT: Final = 2
_WARM_UP_STEPS: Final = 2
_WINDOW_SECONDS: Final = 4.0
_LEFTOVER: Final = re.compile(
    rf"step_\d{{6,}}(\.deleted|{re.escape(UNFINISHED_SUFFIX)})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is known when the loss of a step arrives.

    Attributes:
        step: steps done, this one counted.
        loss: of this step.
        step_seconds: of a step in the latest window that was measured, or None.
        metrics: Every metric of the step by name, ``loss`` among them; numbers where
            they are scalar, else arrays of numpy.
    """

    step: int
    loss: float
    step_seconds: float | None
    metrics: Mapping[str, Any] = field(default_factory=dict)


Hook = Callable[[int, Mapping[str, Any]], Any]
"""Called with the number of a step and its values by name, to log them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """What a call of ``train`` did.

    Attributes:
        state: after the last step.
        first_step: steps that the state had behind it at the start.
        losses: of every step done here, in order.
        step_seconds: median time of a step, the first two left out; None where no more
            were done.
        checkpoint: the latest one written here, or None.
        evaluations: (step, metrics by name) of every evaluation done here, in order.
        best: The checkpoint of the best evaluation, of earlier runs too; None where
            none was asked for.
        stopped_early: ``patience`` evaluations in a row were no better.
    """

    state: TrainState
    first_step: int
    losses: tuple[float, ...]
    step_seconds: float | None
    checkpoint: Path | None
    evaluations: tuple[tuple[int, dict[str, float]], ...] = ()
    best: BestCheckpoint | None = None
    stopped_early: bool = False


def train(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any] | Iterable[Any],
    *,
    steps: int,
    save_dir: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    keep: int = 3,
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
    """Train until so many steps are done in all.

    Args:
        step: the compiled step.
        state: is consumed; training goes on after the steps it has behind it.
        batches: gives the global batch of a step, counted from 0; or an iterable whose
            next batch is that of the next step, such as a ``wh.Feed``.
        steps: to be done in all, those before a resumption counted.
        save_dir: where checkpoints go, as ``step_000100``; None writes none.
        save_every: steps between checkpoints; there is one after the last step too.
        keep: how many checkpoints stay, the latest ones.
        eval_batches: Batches of an evaluation: a sequence, or a function that gives
            them anew each time. Metrics of an evaluation are means over its batches,
            weighted by their samples.
        eval_every: Steps between evaluations; ``save_every`` if None. There is one
            after the last step too.
        best: Name of the metric of an evaluation, such as ``"loss"``, whose best
            checkpoint stays beside the latest ones, as ``best_000100``.
        best_mode: ``"min"`` or ``"max"``: which values are better.
        patience: Training ends when so many evaluations in a row are no better; never
            if None.
        csv: File with a row for each step: loss, metrics, seconds, and evaluations in
            columns of their own. A run that goes on adds to it.
        progress: Show a bar with the time that is left, or lines where there is no
            terminal.
        hooks: Called for each step with its number and its metrics by name, and for
            each evaluation with ``eval/`` before the names: ``lambda step, values:
            wandb.log(values, step=step)``. In one process of several.
        resumed_from: a checkpoint that stays in any case.
        on_step: called with every loss, in order, a few steps after it was computed.
        clock: seconds, rising.
        is_held: the caller holds ``save_dir`` for this run already
            (``runtime.resume.held``); else it is held here.

    Raises:
        WhaleError: a loss or a parameter is not finite; the step and the last good
            checkpoint are named. No checkpoint holds a state of which this is known.
            Or another process is gone, which may show only when a loss is waited for.
            Before the first step: a checkpoint that is to be written is there already,
            another run saves into the same directory, or arguments contradict.
    """
    settings = dict(locals())
    del settings["state"], settings["batches"]
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
    """The run that ``train`` was asked for, checked and with its folder held.

    Args:
        opened: Where what has to be closed is entered.
        first: Steps that were done before.
        step, save_dir, clock, is_held, resumed_from, given: As for ``train``.
    """
    folder = None if save_dir is None else Path(save_dir)
    _check_arguments(step=step, save_dir=folder, **given)
    every, batches = given["save_every"], given["eval_batches"]
    rhythm = _Rhythm(
        first=first,
        steps=given["steps"],
        save_every=None if folder is None else every,
        eval_every=None if batches is None else given["eval_every"] or every,
    )
    opened.enter_context(held(None if is_held else folder))
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
        keep=given["keep"],
        resumed_from=resumed_from,
        losses=_Losses(
            records.tell, getattr(step, "steps_in_flight", _STEPS_IN_FLIGHT)
        ),
        windows=_Windows(clock),
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
    """Which steps there are, and after which of them something is done.

    Attributes:
        first: Steps that were done before.
        steps: Steps to be done in all.
        save_every, eval_every: Steps between checkpoints and evaluations, or None.
    """

    first: int
    steps: int
    save_every: int | None
    eval_every: int | None

    def saves(self, done: int) -> bool:
        """Whether there is a checkpoint after a step."""
        return self._is_due(done, self.save_every)

    def evaluates(self, done: int) -> bool:
        """Whether there is an evaluation after a step."""
        return self._is_due(done, self.eval_every)

    def _is_due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.steps)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run of the loop: everything that ``train`` was given, and the last checkpoint.

    Attributes:
        step, folder, keep, resumed_from: As for ``train``.
        rhythm: Which steps there are.
        losses, windows, evaluations: What was computed, measured and evaluated.
    """

    step: TrainStep
    rhythm: _Rhythm
    folder: Path | None
    keep: int
    resumed_from: Path | None
    losses: _Losses
    windows: _Windows
    evaluations: Evaluations

    def go(self, state: TrainState, batch_of: Callable[[int], Any]) -> LoopResult:
        """Do all steps.

        Args:
            state: Is consumed.
            batch_of: Gives the global batch of a step, counted from 0.
        """
        first, steps = self.rhythm.first, self.rhythm.steps
        checkpoint, done = self.resumed_from, first
        losses, windows = self.losses, self.windows
        try:
            for done in range(first + 1, steps + 1):
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
        except _NotFiniteError as error:
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
        """Save and evaluate what is due after a step; the checkpoint, if any."""
        checkpoint = None
        if self.folder is not None:
            _check_parameters(self.step, state, done)
        # First evaluated: a run that is ended in it does the steps before it again.
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


def latest(save_dir: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of the most steps in a directory, or None.

    Args:
        save_dir: where ``train`` saved; what a killed run left unfinished is not
            taken for a checkpoint.
    """
    return next(iter(checkpoints(Path(save_dir))), None)


def _batch_function(
    batches: Callable[[int], Any] | Iterable[Any], first: int
) -> Callable[[int], Any]:
    """What gives the batch of a step, by its number or one after the other."""
    if callable(batches):
        return batches
    place = getattr(batches, "step", first)
    if is_whole(place) and place != first:
        raise WhaleError(
            f"batches comes to step {place} next, and the state has {first} steps "
            "behind it: samples would be seen again, or left out. Make it with "
            f"wh.Feed(…, first_sample=state.samples), or first={first}"
        )
    if isinstance(batches, Mapping) or not hasattr(batches, "__iter__"):
        raise WhaleError(
            f"batches is {shown(batches)}; expected a function from the number of a "
            "step, counted from 0, to its global batch, or an iterable of batches"
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


def _check_arguments(*, step: Any, **given: Any) -> None:
    """Refuse arguments of ``train`` that cannot be, or contradict each other."""
    problems = Arguments("loop.train")
    if not callable(step):
        problems.refuse("step", step, "what wh.compile gives")
    for name in ("save_every", "keep"):
        problems.whole(name, given[name], least=1)
    problems.whole("steps", given["steps"])
    for name in ("eval_every", "patience"):
        problems.whole(name, given[name], least=1, none=True)
    problems.choice("best_mode", given["best_mode"], ("min", "max"))
    sets = given["eval_batches"]
    if sets is not None and not (callable(sets) or isinstance(sets, list | tuple)):
        problems.refuse(
            "eval_batches", sets, "a list of batches, or a function that gives them"
        )
    hooks = given["hooks"]
    if not isinstance(hooks, list | tuple) or not all(map(callable, hooks)):
        problems.refuse(
            "hooks", hooks, "a list of functions of a step's number and its values"
        )
    if given["csv"] is not None:
        problems.path("csv", given["csv"], "the path of a CSV file")
    if given["eval_batches"] is None:
        for name in ("eval_every", "best", "patience"):
            if given[name] is not None:
                problems.add(
                    f"{name} is {shown(given[name])}, and there is no evaluation: give "
                    "eval_batches, a list of batches or a function that gives them"
                )
    elif given["best"] is not None and given["save_dir"] is None:
        problems.add(f"best is {shown(given['best'])}; it needs save_dir")
    if given["patience"] is not None and given["best"] is None:
        problems.add("patience needs best, the metric that is to become better")
    problems.raise_if_any()


# Losses that have not arrived yet.


class _NotFiniteError(Exception):
    """A loss or a parameter that is not finite: after which step, and what."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step = step
        self.what = what


class _Losses:
    """Losses in order; those still being computed are in flight."""

    def __init__(self, tell: Callable[[Progress], None], most_in_flight: int) -> None:
        self._most_in_flight = most_in_flight
        self.values: list[float] = []
        self.step_seconds: float | None = None
        self._in_flight: deque[tuple[int, dict[str, Any]]] = deque()
        self._tell = tell

    def expect(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a step that was started; wait for one well before it.

        Args:
            step: its number.
            metrics: of the step.
        """
        self._in_flight.append((step, dict(metrics)))
        while len(self._in_flight) > self._most_in_flight:
            self._take()

    def wait(self) -> None:
        """Wait for everything in flight."""
        for step, metrics in self._in_flight:
            _arrived(step, metrics["loss"])

    def take_all(self) -> None:
        """Take, check and tell everything in flight."""
        while self._in_flight:
            self._take()

    def _take(self) -> None:
        step, metrics = self._in_flight.popleft()
        value = _arrived(step, metrics["loss"])
        # In float16 such a step changed nothing, and a smaller scale is tried.
        scale = metrics.get("loss_scale")
        hopeful = scale is not None and float(scale) > 1.0
        if not math.isfinite(value) and not hopeful:
            raise _NotFiniteError(step, f"the loss is {value}")
        self.values.append(value)
        self._tell(
            Progress(
                step=step,
                loss=value,
                step_seconds=self.step_seconds,
                metrics=host_values(metrics),
            )
        )


def _arrived(step: int, loss: Any) -> float:
    """The loss of a step, waited for; a lost process may show only here."""
    try:
        return float(loss)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if jax.process_count() > 1 and tells_of_loss(error):
            raise lost(error, f"the loss of step {step}") from error
        raise


# Time.


class _Windows:
    """Time of a step over windows that open and close with nothing in flight.

    The first steps are left out: they compile and fill caches.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._opened: tuple[int, float] | None = None
        self._seconds: list[float] = []

    def is_due(self, done: int) -> bool:
        """Whether it is time to wait for what is in flight and call ``close``."""
        if self._opened is None:
            return done >= _WARM_UP_STEPS
        return self._clock() - self._opened[1] >= _WINDOW_SECONDS

    def open(self, done: int) -> None:
        """Begin a window, or begin it again after something that is no step."""
        if done >= _WARM_UP_STEPS:
            self._opened = (done, self._clock())

    def close(self, done: int) -> float | None:
        """End the window, begin the next; seconds of a step in the one that ended."""
        if self._opened is not None and done > self._opened[0]:
            count = done - self._opened[0]
            each = (self._clock() - self._opened[1]) / count
            self._seconds.extend([each] * count)
        self.open(done)
        return self._seconds[-1] if self._seconds else None

    def median_seconds(self) -> float | None:
        """Over all steps in windows; each counts with the mean of its window."""
        return statistics.median(self._seconds) if self._seconds else None


# Checkpoints.


@functools.partial(jax.jit)
def _finite(leaves: list[Any]) -> list[Any]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]


def _check_parameters(step: TrainStep, state: TrainState, done: int) -> None:
    """A finite loss says nothing about the update that followed it."""
    # Stages with programs of their own hold their parameters on devices of their own.
    places: dict[Any, dict[str, jax.Array]] = {}
    leaves = jax.tree.leaves(state.params)
    for planned, leaf in zip(step.plan.trained, leaves, strict=True):
        if is_here(leaf.sharding):
            devices = frozenset(leaf.sharding.device_set)
            places.setdefault(devices, {})[planned.path] = leaf
    settle()
    spoilt = {
        path
        for one in places.values()
        for path, is_finite in zip(
            one, jax.device_get(_finite([*one.values()])), strict=True
        )
        if not is_finite
    }
    paths = [planned.path for planned in step.plan.trained if planned.path in spoilt]
    if paths:
        raise _NotFiniteError(done, f"parameters are not finite: {', '.join(paths)}")


def _check_new(save_dir: Path, rhythm: _Rhythm) -> None:
    """Refuse to train towards a checkpoint that could not be written."""
    first, steps = rhythm.first, rhythm.steps
    there = [
        path.name
        for path in reversed(checkpoints(save_dir))
        if first < steps_of(path) <= steps and rhythm.saves(steps_of(path))
    ]
    if there:
        raise WhaleError(
            f"save_dir is {save_dir}, which holds {', '.join(there)} already, and the "
            f"state has {first} steps behind it: training to step {steps} would write "
            "there. Give another directory, or go on from the latest checkpoint: "
            "step.restore(loop.latest(save_dir))"
        )


def _save(save_dir: Path, done: int, step: TrainStep, state: TrainState) -> Path:
    path = save_dir / f"step_{done:06d}"
    step.save(path, state)
    return path


def _prune(save_dir: Path, keep: int, protected: Path | None) -> None:
    """Remove what is older than the latest checkpoints, and what killed runs left."""
    if jax.process_index() != 0:
        return
    try:
        _remove_leftovers(save_dir)
        for path in checkpoints(save_dir)[keep:]:
            if path != protected:
                # Renamed first: half a checkpoint must never bear a checkpoint's name.
                path.rename(path.with_name(f"{path.name}.deleted"))
        _remove_leftovers(save_dir)
    except OSError as error:
        raise WhaleError(
            f"{save_dir}: older checkpoints cannot be removed "
            f"({error.strerror or error}). The latest one is whole: mend the file "
            "system, or ask for leave to write there, and go on from it with --resume"
        ) from error


def _remove_leftovers(save_dir: Path) -> None:
    for path in save_dir.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _stop(
    error: _NotFiniteError, steps: int, checkpoint: Path | None, save_dir: Path | None
) -> NoReturn:
    if checkpoint:
        kept = (
            f"The last good checkpoint is {checkpoint}; training can go on from there "
            "with --resume"
        )
    elif save_dir:
        kept = f"No good checkpoint stands in {save_dir} yet"
    else:
        kept = "No checkpoint was written; --save DIR writes them"
    raise WhaleError(
        f"step {error.step} of {steps}: {error.what}; training has stopped. {kept}. "
        "A lower learning rate, a longer warm-up or clipping the gradient's norm are "
        "the usual remedies"
    ) from None
