"""``StepRunner``: what every executor does around a step, in one place.

A step or an evaluation is four things, in this order: processes agree on what they run,
a watch begins to look after them, the executor issues its programs, and what they give
is handed to the watch, which knows by it when they are done. Executors say how they
agree and what they issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.train_state import TrainState


Metrics = dict[str, Any]

Evaluation = tuple[Metrics, Any]
"""Metrics of a batch, and the sum of the weights of its losses."""


class StepRunner:
    """Steps and evaluations of one executor.

    Attributes:
        watch: Sees that no process waits for ever for another.
    """

    watch: Watch

    def advance(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step; see ``runner.Runner``.

        Args:
            state: State of the step before; its buffers are donated.
            batch: A global batch as the executor's layout gives it.
        """
        self._agree()
        with self.watch.step():
            new, metrics = self._issue_step(state, batch)
        self.watch.issued(self._results(new, metrics))
        return new, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Evaluation:
        """The loss and metrics of a batch; see ``runner.Runner``.

        Args:
            state: State without its exported model, from ``train_state.bare``.
            batch: Global batch, laid out like the one of ``advance``.
        """
        self._agree()
        with self.watch.step("an evaluation"):
            result = self._issue_evaluation(state, batch)
        self.watch.issued(jax.tree.leaves(result))
        return result

    def _agree(self) -> None:
        """Compares what is run with the other processes, the first time."""
        raise AssertionError("an executor says how its processes agree")

    def _issue_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Issues the programs of a step; what they will give."""
        raise AssertionError("an executor says what a step is")

    def _issue_evaluation(self, state: TrainState, batch: Any) -> Evaluation:
        """Issues the programs of an evaluation; what they will give."""
        raise AssertionError("an executor says what an evaluation is")

    def _results(self, new: TrainState, metrics: Metrics) -> Sequence[Any]:
        """Arrays that are there when the step is done."""
        return jax.tree.leaves((metrics, new.step))
