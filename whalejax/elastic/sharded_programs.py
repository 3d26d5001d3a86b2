"""A job as one model over all processes of a generation: its plan, step and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from whalejax.api import job_plans
from whalejax.capture.batch import aval_of
from whalejax.elastic.mesh_sizes import Asked, mesh_of
from whalejax.elastic.replica_programs import possible_counts, tell_source
from whalejax.lowering.train_state import TrainState
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.train_step import compile as compile_step
from whalejax.state.adopt_state import to_save
from whalejax.state.async_checkpoints import Tell
from whalejax.state.checkpoint import save
from whalejax.state.resume import (
    agreed_checkpoints,
    batches_by_samples,
    restore_newest,
)
from whalejax.state.shard_copies import CopiedModelStates, CopiedStates
from whalejax.user_code.losses import Job
from whalejax.wire.run_messages import TablesPlaced


class SpreadPrograms:
    """A job, planned and compiled for the present processes.

    Attributes:
        size: Samples of a global batch.
        count: Number of micro-batches in a step. It does not depend on the number of
            processes, because random keys and statistics depend on it.
        plan: Plan for these processes.
        step: Compiled training step.
    """

    def __init__(
        self,
        job: Job,
        *,
        mesh: Asked,
        batch: int | None,
        micro_batches: int | None,
        precision: Any,
        seed: int,
    ) -> None:
        """Plans and traces the model; compiles nothing yet.

        Args:
            job: Job to train.
            mesh: Sizes of mesh axes, or a function that gives them for a number of
                devices, or ``"auto"``.
            batch: Samples of the global batch; default: the job's own number.
            micro_batches: Number of micro-batches in a step. Default: the largest of
                ``possible_counts`` if ``mesh`` names stages, else 1.
            precision: Precision of the model, as ``wh.plan`` takes it.
            seed: Seed of the run.

        Raises:
            PlanError: There is no plan for the devices of these processes.
        """
        self._job, self._mesh, self._seed = job, mesh, seed
        first = job_plans.first_batch(job, batch)
        self.size = batch or job.batch_size or 0
        staged = isinstance(mesh, Mapping) and STAGE in mesh
        counts = possible_counts(self.size, job.group_size) if staged else [1]
        self.count = micro_batches or counts[0]
        model = self._model = job_plans.abstract_model(job)
        self._batch = jax.tree.map(aval_of, first)
        here = jax.process_count()
        self.plan = job_plans.make_plan(
            job,
            model,
            first,
            cluster_of(here),
            precision=precision,
            num_micro_batches=self.count,
            mesh=mesh_of(mesh, here * jax.local_device_count()),
        )
        self.step = compile_step(
            self.plan, job.loss_fn, model, optimizer=job.optimizer, batch=first
        )

    def plan_for(self, processes: int) -> Plan:
        """Returns the plan for another number of processes, without tracing.

        Raises:
            PlanError: There is no such plan.
        """
        sizes = mesh_of(self._mesh, processes * jax.local_device_count())
        return self.plan.what_if(cluster=cluster_of(processes), mesh=sizes)

    def compile_for(self, plan: Plan) -> bool:
        """Compiles a step of one process into the persistent cache, without running it.

        It compiles only on CPUs, for one process, and without stage programs. Keys of
        the cache depend on the process's rank on CPUs, and on their number on GPUs. On
        GPUs, XLA may also wait for other processes to share autotuning results.

        Returns:
            Whether the step was compiled.
        """
        several = plan.cluster.num_devices > jax.local_device_count()
        if plan.stage_plans or several or plan.cluster.platform != "cpu":
            return False
        step = compile_step(
            plan,
            self._job.loss_fn,
            self._model,
            optimizer=self._job.optimizer,
            batch=self._batch,
            devices=jax.devices()[: plan.cluster.num_devices],
        )
        step.lower().compile()
        return True

    def restore_or_init(
        self, folder: Path | None, tell: Tell = lambda report: None
    ) -> TrainState:
        """Restores the newest complete checkpoint, or makes a new state.

        All processes call this.

        Args:
            folder: Folder of checkpoints, or None.
            tell: Function that receives each ``Note`` and ``Recovered`` report.
        """
        result = (
            restore_newest(self.step, agreed_checkpoints(folder)) if folder else None
        )
        if result is None:
            key = jax.random.key(self._seed)
            state = self.step.init(self._job.make_model, rng=key)
        else:
            state = result.state
        tell_source(state, result, tell)
        return state

    def batch(self, step: int, samples: int | None = None) -> Any:
        """Returns this process's part of the global batch of a step.

        Args:
            step: Number of the step, from 0.
            samples: Samples used by all earlier steps; default: those of ``step``
                batches.
        """
        batch = self._batches(step * self.size if samples is None else samples)
        if jax.process_count() == 1:
            return batch
        leaves = jax.tree.leaves(batch)
        tree: Any = jax.tree.structure(batch)
        rows = self.step.batch_rows()
        return tree.unflatten(
            leaf if axis is None else np.take(np.asarray(leaf), rows, axis)
            for leaf, axis in zip(leaves, self.step.batch_axes, strict=True)
        )

    @functools.cached_property
    def _batches(self) -> Callable[[int], Any]:
        return batches_by_samples(self._job, self.size)

    def new_placement(self, done: int) -> TablesPlaced | None:
        """Returns None: a job without tables places none.

        Args:
            done: Number of finished steps.
        """
        del done
        return None

    def copied_states(self) -> CopiedStates:
        """Returns the functions that copy states of this step into memory."""
        return CopiedModelStates(self.step.abstract_state, self.step.plan)

    def save(
        self, path: Path, state: TrainState, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint; all processes call this.

        Args:
            path: Path of the new checkpoint.
            state: State to write, which is not donated.
            before_it_appears: Function called before the checkpoint gets its name. It
                raises in all processes if the checkpoint must not appear.
        """
        whole = to_save(state, self.step.abstract_state(), trains=True)
        size = self.step._batch_size
        save(path, whole, self.plan, size, before_it_appears=before_it_appears)


def cluster_of(processes: int) -> Cluster:
    """Returns a cluster of processes that each have as many devices as this one.

    CPU speed is not measured, because all processes must compute the same plan.
    """
    each = jax.local_device_count()
    if jax.local_devices()[0].platform == "cpu":
        return parse_cluster(f"cpu:{processes * each}")
    if processes == jax.process_count():
        return _detected()
    kind = _detected().nodes[0].kind
    return parse_cluster(f"{kind.name}:{processes}x{each}")


@functools.cache
def _detected() -> Cluster:
    return Cluster.detect()
