"""One replica of a run with remote replicas: its contributions, and the update.

Its programs are those of replicas with shares, which do not depend on the number of
micro-batches. Each micro-batch starts from the state before the step, and returns one
flat buffer for each dtype. The caller sums the buffers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.lowering.global_arrays import put_global
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.spmd.spmd_executor import Sums
from whalejax.lowering.step_runner import Metrics
from whalejax.lowering.train_state import TrainState, consuming
from whalejax.lowering.uneven.replica import inputs_of
from whalejax.lowering.uneven.replica_executor import UnevenReplicasExecutor
from whalejax.lowering.uneven.replica_timing import told_size


class ContributingReplica:
    """Micro-batches and the update of one replica.

    Attributes:
        count: Number of micro-batches of a step.
        squares: Squared norm of the mean gradient of each micro-batch of this step that
            ran in this process, by number; empty unless it is measured.
    """

    def __init__(
        self, runner: UnevenReplicasExecutor, *, measures_squares: bool = False
    ) -> None:
        """Prepares the programs; compiles nothing yet.

        Args:
            runner: Runner of a plan with one replica.
            measures_squares: Whether to measure the squared norms of gradients.
        """
        assert len(runner.shares) == 1
        self._runner = runner
        self._replica = runner._replicas[0]
        self.count = runner.program.plan.num_micro_batches
        self.squares: dict[int, float] = {}
        self._measures_squares = measures_squares
        self._one = jax.jit(self._contributed)
        self._total_square = jax.jit(self._square_of_buffers)

    @property
    def shapes(self) -> list[tuple[int, Any]]:
        """The length and dtype of each buffer."""
        return [
            (aval.shape[0], np.dtype(aval.dtype)) for aval in self._replica.avals[0]
        ]

    def part(
        self, state: TrainState, batch: Sequence[Any], number: int
    ) -> list[np.ndarray]:
        """Returns a micro-batch's contribution to the sums of a step.

        Args:
            state: State of the run; it is not donated.
            batch: Flat leaves of the global batch.
            number: Number of the micro-batch.
        """
        runner = self._runner
        seen = runner._local_view(state, 0)
        leaves = runner._put_micro_batch(0, self._cut(batch, number))
        part, square = self._one(
            seen.rest,
            inputs_of(runner.program, seen),
            leaves,
            runner._numbers[0][number],
            self._later[number],
        )
        if square is not None:
            self.squares[number] = float(square)
        return [np.asarray(x) for x in part]

    def total_square(self, buffers: Sequence[np.ndarray]) -> float:
        """Returns the squared norm of the mean gradient of a step.

        Args:
            buffers: Sum of the contributions of all micro-batches.
        """
        return float(self._total_square(list(buffers)))

    def _contributed(
        self, rest: Any, inputs: Any, leaves: Any, number: Any, later: Any
    ) -> tuple[list[Any], Any]:
        replica = self._replica
        sums, after = replica.add(replica.begin(), rest, *inputs, leaves, number)
        paces = jax.numpy.zeros((1, told_size(1)), "float32")
        buffers, _ = replica.pack(sums, rest, after, np.float32(1), later, paces)
        return buffers, _mean_square(sums) if self._measures_squares else None

    def _square_of_buffers(self, buffers: Sequence[Any]) -> Any:
        return _mean_square(self._replica.unpack(buffers))

    def _cut(self, batch: Sequence[Any], number: int) -> list[Any]:
        result, rows = [], MicroBatchRows.of(self._runner.program.plan)
        for leaf, axis in zip(batch, self._runner.program.batch_axes, strict=True):
            if axis is not None:
                leaf = leaf[rows.index(leaf.shape[axis], axis, number)]
            result.append(leaf)
        return result

    @functools.cached_property
    def _later(self) -> list[Any]:
        whole = self._runner._wholes[0]
        return [
            put_global(np.float32(self.count - 1 - n), whole) for n in range(self.count)
        ]

    def finish(
        self, state: TrainState, buffers: Sequence[np.ndarray]
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and metrics from the sum of all micro-batches.

        Args:
            state: State after the previous step; its buffers are donated.
            buffers: Sum of the contributions of all micro-batches.
        """
        runner = self._runner
        seen = runner._local_view(state, 0)
        with consuming(state):
            new, metrics, _ = self._replica.finish(seen, list(buffers))
        finish = runner._assemble_global({0: new})
        if state.samples is not None:
            size = self._samples
            finish = dataclasses.replace(finish, samples=state.samples + size)
        return finish, runner._agreed({0: metrics})

    @property
    def _samples(self) -> int:
        plan, axes = self._runner.program.plan, self._runner.program.batch_axes
        sizes = zip(plan.batch, axes, strict=True)
        return next((x.shape[a] for x, a in sizes if a is not None), 1)


def _mean_square(sums: Sums) -> Any:
    floats = (g.astype(jnp.float32) for g in sums.gradients)
    return sum(jnp.vdot(g, g) for g in floats) / sums.weight.astype(jnp.float32) ** 2
