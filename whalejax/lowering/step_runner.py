"""``StepRunner``: the work of every executor around a step.

A step or an evaluation has four parts, in this order. Processes compare their plans, a
watch starts, the executor issues its programs, and the watch receives the results. The
programs are done when the results are ready. Executors implement the comparison and
the programs.
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
        watch: Watch that ends this process if it waits too long for another.
    """

    watch: Watch

    def advance(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Runs one step, and returns the next state and the metrics.

        Args:
            state: State after the previous step; its buffers are donated.
            batch: Global batch that the executor's layout placed.
        """
        self._agree()
        with self.watch.step():
            new, metrics = self._issue_step(state, batch)
        self.watch.issued(self._results(new, metrics))
        return new, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Evaluation:
        """Returns the loss and metrics of a batch, and their weight.

        Args:
            state: State without its exported model, from ``train_state.bare``.
            batch: Global batch that the executor's layout placed.
        """
        self._agree()
        with self.watch.step("an evaluation"):
            result = self._issue_evaluation(state, batch)
        self.watch.issued(jax.tree.leaves(result))
        return result

    def _agree(self) -> None:
        raise AssertionError("an executor says how its processes agree")

    def _issue_step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        raise AssertionError("an executor says what a step is")

    def _issue_evaluation(self, state: TrainState, batch: Any) -> Evaluation:
        raise AssertionError("an executor says what an evaluation is")

    def _results(self, new: TrainState, metrics: Metrics) -> Sequence[Any]:
        return jax.tree.leaves((metrics, new.step))
