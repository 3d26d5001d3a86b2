"""The training loop: steps without waiting, checkpoints, and a stop at a bad loss.

A step returns before its work is done, and the loop lets it: it looks at a loss some
steps later, and waits only where it measures or saves. That is easy to get subtly wrong
(timing the dispatch, saving a state whose loss nobody has seen yet), so it is written
once, here; the command line and scripts share it.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp

from whalejax.lowering.global_arrays import is_here, settle
from whalejax.lowering.multihost.watchdog import lost
from whalejax.lowering.state import TrainState
from whalejax.membership.heartbeat import tells_of_loss
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.checkpoint_record import UNFINISHED_SUFFIX
from whalejax.runtime.resume import checkpoints, held, steps_of
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
    """

    step: int
    loss: float
    step_seconds: float | None


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
    """

    state: TrainState
    first_step: int
    losses: tuple[float, ...]
    step_seconds: float | None
    checkpoint: Path | None


def train(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    *,
    steps: int,
    save_dir: Path | None = None,
    save_every: int = 100,
    keep: int = 3,
    resumed_from: Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    is_held: bool = False,
) -> LoopResult:
    """Train until so many steps are done in all.

    Args:
        step: the compiled step.
        state: is consumed; training goes on after the steps it has behind it.
        batches: gives the global batch of a step, counted from 0.
        steps: to be done in all, those before a resumption counted.
        save_dir: where checkpoints go, as ``step_000100``; None writes none.
        save_every: steps between checkpoints; there is one after the last step too.
        keep: how many checkpoints stay, the latest ones.
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
            or another run saves into the same directory.
    """
    first = int(state.step)
    checkpoint = resumed_from
    losses = _Losses(on_step, getattr(step, "steps_in_flight", _STEPS_IN_FLIGHT))
    windows = _Windows(clock)
    with held(None if is_held else save_dir):
        if save_dir is not None:
            _check_new(save_dir, first, steps, save_every)
        try:
            for done in range(first + 1, steps + 1):
                state, metrics = step(state, batches(done - 1))
                losses.expect(done, metrics["loss"], metrics.get("loss_scale"))
                saves = save_dir and _is_saved(done, steps, save_every)
                if saves or done == steps or windows.is_due(done - first):
                    losses.wait()
                    losses.step_seconds = windows.close(done - first)
                    losses.take_all()
                if save_dir and saves:
                    _check_parameters(step, state, done)
                    checkpoint = _save(save_dir, done, step, state)
                    _prune(save_dir, keep, resumed_from)
                    windows.open(done - first)
        except _NotFiniteError as error:
            _stop(error, steps, checkpoint, save_dir)
    return LoopResult(
        state=state,
        first_step=first,
        losses=tuple(losses.values),
        step_seconds=windows.median_seconds(),
        checkpoint=checkpoint if checkpoint != resumed_from else None,
    )


def latest(save_dir: Path) -> Path | None:
    """The checkpoint of the most steps in a directory, or None.

    Args:
        save_dir: where ``train`` saved; what a killed run left unfinished is not
            taken for a checkpoint.
    """
    return next(iter(checkpoints(save_dir)), None)


# Losses that have not arrived yet.


class _NotFiniteError(Exception):
    """A loss or a parameter that is not finite: after which step, and what."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step = step
        self.what = what


class _Losses:
    """Losses in order; those still being computed are in flight."""

    def __init__(
        self, on_step: Callable[[Progress], None] | None, most_in_flight: int
    ) -> None:
        self._most_in_flight = most_in_flight
        self.values: list[float] = []
        self.step_seconds: float | None = None
        self._in_flight: deque[tuple[int, Any, Any]] = deque()
        self._on_step = on_step

    def expect(self, step: int, loss: Any, scale: Any = None) -> None:
        """Take the loss of a step that was started; wait for one well before it.

        Args:
            step: its number.
            loss: of the step.
            scale: of losses in float16 after it, or None.
        """
        self._in_flight.append((step, loss, scale))
        while len(self._in_flight) > self._most_in_flight:
            self._take()

    def wait(self) -> None:
        """Wait for everything in flight."""
        for step, loss, _ in self._in_flight:
            _arrived(step, loss)

    def take_all(self) -> None:
        """Take, check and tell everything in flight."""
        while self._in_flight:
            self._take()

    def _take(self) -> None:
        step, loss, scale = self._in_flight.popleft()
        value = _arrived(step, loss)
        # In float16 such a step changed nothing, and a smaller scale is tried.
        hopeful = scale is not None and float(scale) > 1.0
        if not math.isfinite(value) and not hopeful:
            raise _NotFiniteError(step, f"the loss is {value}")
        self.values.append(value)
        if self._on_step is not None:
            self._on_step(
                Progress(step=step, loss=value, step_seconds=self.step_seconds)
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


def _is_saved(done: int, steps: int, save_every: int) -> bool:
    return done % save_every == 0 or done == steps


def _check_new(save_dir: Path, first: int, steps: int, save_every: int) -> None:
    """Refuse to train towards a checkpoint that could not be written."""
    there = [
        path.name
        for path in reversed(checkpoints(save_dir))
        if first < steps_of(path) <= steps
        and _is_saved(steps_of(path), steps, save_every)
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
