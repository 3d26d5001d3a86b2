"""Evaluations of a training loop: means over batches, best checkpoint, early stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError
from whalejax.runtime.run_records import (
    BestCheckpoint,
    Records,
    best,
    best_path,
    host_values,
    is_better,
    keep_best,
    note_best,
)
from whalejax.runtime.train_step import TrainStep


class Evaluations:
    """The evaluations of one run.

    Args:
        step: Compiled step.
        batches: Sequence of batches, function that returns new ones, or None.
        records: Table that receives the results.
        folder: Folder of the checkpoints, or None.
        first: Number of steps before the run.
        metric: Name of the metric whose best checkpoint is saved, or None.
        mode: Better direction of its values, ``"min"`` or ``"max"``.
        patience: Number of evaluations in a row without a better value after which the
            run ends, or None.

    Raises:
        WhaleError: The folder has the best checkpoint of another run, or one chosen by
            another metric or mode.

    Attributes:
        done: (step, metrics by name) of every evaluation, in order.
        best: Checkpoint of the best evaluation, earlier runs included, or None.
    """

    def __init__(
        self,
        step: TrainStep,
        batches: Callable[[], Iterable[Any]] | Sequence[Any] | None,
        *,
        records: Records,
        folder: Path | None,
        first: int,
        metric: str | None,
        mode: Literal["min", "max"],
        patience: int | None,
    ) -> None:
        self._step = step
        self._batches = batches
        self._records = records
        self._folder = folder
        self._metric = metric
        self._mode: Literal["min", "max"] = mode
        self._patience = patience
        self._waited = 0
        self.done: list[tuple[int, dict[str, float]]] = []
        self.best: BestCheckpoint | None = None
        if metric is not None and folder is not None:
            self.best = best(folder)
            self._waited = 0 if self.best is None else self.best.waited
            if self.best is not None and first == 0:
                raise WhaleError(
                    f"{folder} keeps the best checkpoint of another run "
                    f"({self.best.path.name}), and this one begins at step 0. Give "
                    "another folder, or go on from a checkpoint of that run"
                )
            if self.best is not None and self.best.mode != mode:
                raise WhaleError(
                    f"{folder} keeps the best checkpoint by the "
                    f"{self.best.mode}imum, and best_mode is {mode!r}. Give another "
                    "folder, or the same mode"
                )
            if self.best is not None and self.best.metric != metric:
                raise WhaleError(
                    f"{folder} keeps the best checkpoint by {self.best.metric!r}, and "
                    f"best is {metric!r}. Give another folder, or remove "
                    f"{self.best.path}"
                )

    @property
    def is_over(self) -> bool:
        """Whether the last ``patience`` evaluations were not better than the best."""
        return self._patience is not None and self._waited >= self._patience

    def run(self, done: int, state: TrainState) -> None:
        """Evaluates a state, and saves it if it is the best.

        Args:
            done: Number of finished steps of the state.
            state: State to evaluate; it is not donated.

        Raises:
            WhaleError: There are no batches, or no metric with the requested name.
        """
        metrics = mean_metrics(self._step, state, self._evaluation_batches())
        self.done.append((done, metrics))
        self._records.tell_evaluation(done, metrics)
        if self._metric is None:
            return
        if self._metric not in metrics:
            raise WhaleError(
                f"best is {self._metric!r}, and an evaluation has "
                f"{', '.join(metrics)}. Give one of them"
            )
        value = metrics[self._metric]
        if not is_better(value, self.best, self._mode):
            self._waited += 1
            if self.best is not None and jax.process_index() == 0:
                self.best = dataclasses.replace(self.best, waited=self._waited)
                note_best(self.best)
            return
        self._waited = 0
        folder = self._folder
        if folder is None:
            return
        checkpoint = BestCheckpoint(
            step=done,
            metric=self._metric,
            mode=self._mode,
            value=value,
            path=best_path(folder, done, self.best),
        )
        keep_best(
            folder,
            checkpoint,
            lambda path: self._step.save(path, state),
            writes=jax.process_index() == 0,
        )
        self.best = checkpoint

    def _evaluation_batches(self) -> Iterable[Any]:
        batches = self._batches
        assert batches is not None
        return batches() if callable(batches) else batches


def mean_metrics(
    step: TrainStep, state: TrainState, batches: Iterable[Any]
) -> dict[str, float]:
    """Returns the means of all scalar metrics over batches, weighted by samples.

    Args:
        step: Compiled step.
        state: State to evaluate; it is not donated.
        batches: Global batches; the last one may have fewer samples.

    Raises:
        WhaleError: There is no batch.
    """
    sums: dict[str, float] = {}
    total = 0
    for batch in batches:
        size = _samples(step, batch)
        values = host_values(step.eval(state, batch))
        total += size
        for name, value in values.items():
            if isinstance(value, float):
                sums[name] = sums.get(name, 0.0) + size * value
    if not total:
        raise WhaleError(
            "eval_batches gave no batch. Give a list of batches, or a function that "
            "gives them anew each time: an iterator is empty the second time"
        )
    return {name: value / total for name, value in sums.items()}


def _samples(step: Any, batch: Any) -> int:
    """Returns the weight of a batch, which is equal in all processes.

    In one process it is the number of samples. Several processes may have unequal parts
    of a batch, but evaluate only full batches, so all batches have weight 1.
    """
    if jax.process_count() > 1:
        return 1
    leaves = jax.tree.leaves(batch)
    axes = getattr(step, "batch_axes", None) or [0] * len(leaves)
    return next(
        int(np.shape(leaf)[axis])
        for leaf, axis in zip(leaves, axes, strict=False)
        if axis is not None
    )
