"""Reads and writes checkpoints of a swarm, which are independent of its plan.

A snapshot has the arrays of each stage. A checkpoint is an ordinary training state,
which any plan can restore. Both have the same arrays in different orders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from whalejax.lowering.global_arrays import raw_array
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.state.checkpoint import restore, save
from whalejax.state.resume import checkpoints, depends_on_parts, restore_newest
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.trainer_state import Snapshot


class Checkpoints:
    """Reads and writes the checkpoints of a staged job."""

    def __init__(self, cut: StagedJob) -> None:
        """Stores the job whose states are written."""
        self._cut = cut

    def state_of(self, snapshot: Snapshot) -> TrainState:
        """Returns the training state of a snapshot with arrays."""
        assert snapshot.arrays is not None
        parts = {
            stage: self._cut.typed(stage, arrays)
            for stage, arrays in snapshot.arrays.items()
        }
        return self._cut.full_state(parts)

    def snapshot_of(self, state: TrainState) -> Snapshot:
        """Returns the snapshot of a training state."""
        raw = [np.asarray(raw_array(x)) for x in jax.tree.leaves(state)]
        # With delayed updates, the previous values start equal to the current ones.
        arrays = {
            stage: [
                raw[n] for n in (*self._cut.leaf_numbers(stage), *self._cut.late(stage))
            ]
            for stage in range(self._cut.stages)
        }
        return Snapshot(step=int(np.asarray(state.step)), arrays=arrays)

    def restore(self, path: str | os.PathLike[str]) -> TrainState:
        """Returns the state of a checkpoint of any plan."""
        place = SingleDeviceSharding(self._cut.device)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self._cut.abstract,
        )
        state: TrainState = restore(path, abstract, self._cut.plan, self._cut.size)
        return state

    def newest(self, folder: Path) -> tuple[Snapshot, tuple[str, ...]] | None:
        """Returns the newest complete checkpoint of a folder and its notes, or None.

        Raises:
            WhaleError: A run with another batch size wrote it.
        """
        newest = restore_newest(self, checkpoints(folder))
        if newest is None:
            return None
        self._check_samples(newest.state, newest.checkpoint)
        return self.snapshot_of(newest.state), newest.notes

    def _check_samples(self, state: TrainState, path: Path) -> None:
        """Refuses a checkpoint of a run with another batch size.

        Peers identify a batch by the number of its step, so another batch size would
        skip or repeat samples.
        """
        step, size = int(np.asarray(state.step)), self._cut.size
        if state.samples in (None, step * size):
            return
        raise WhaleError(
            f"{path.name} has {state.samples} samples in {step} steps; expected "
            f"{step * size}, as a swarm cannot change the batch size, which is {size}. "
            "Give the batch size that it was trained with, or another directory"
        )

    @property
    def plan(self) -> Plan:
        """Plan of the swarm."""
        return self._cut.plan

    @property
    def parts_matter(self) -> bool:
        """Whether the result depends on the number of micro-batches."""
        return depends_on_parts(self._cut.plan, self._cut.adapter)

    def copy_state(self, state: TrainState) -> TrainState:
        """Returns the state itself, because a snapshot has its own arrays."""
        return state

    def save(
        self, path: Path, state: TrainState, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint.

        Args:
            path: Path of the new checkpoint.
            state: State to write, which is not donated.
            before_it_appears: Function that raises if the checkpoint must not appear.
        """
        save(
            path,
            state,
            self._cut.plan,
            self._cut.size,
            before_it_appears=before_it_appears,
        )
