"""A job with embedding tables over all processes of a generation.

Tables are placed again for the devices of each generation. The first process plans, and
the others take its plan: the placement search has a time limit, so it could end
differently in each process.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from whalejax.api import job_plans
from whalejax.capture.batch import aval_of
from whalejax.elastic.mesh_sizes import Asked, mesh_of
from whalejax.elastic.sharded_programs import SpreadPrograms, cluster_of
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.placement import TablePlacement
from whalejax.runtime.table_copies import CopiedTableStates
from whalejax.runtime.train_step import compile as compile_step
from whalejax.state.checkpoint_files import told_by_first
from whalejax.state.shard_copies import CopiedStates
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.user_code.losses import Job
from whalejax.wire.run_messages import TablesPlaced


_LONGEST: Final = 2000
_MOST_TABLES: Final = 8


class TableSpreadPrograms(SpreadPrograms):
    """A job with tables, planned and compiled for the present processes.

    Attributes:
        size: Samples of a global batch.
        count: Number of micro-batches in a step: 1.
        plan: Plan for these processes.
        step: Compiled training step, a ``TableStep``.
    """

    def __init__(
        self,
        job: Job,
        *,
        tables: SparseOptimizer,
        mesh: Asked,
        batch: int | None,
        precision: Any,
        seed: int,
        replace_every: int | None = None,
    ) -> None:
        """Plans and traces the model; compiles nothing yet.

        Args:
            job: Job to train.
            tables: Update rule of the tables' rows.
            mesh: Sizes of the dense part's mesh axes, or a function that gives them for
                a number of devices, or ``"auto"``.
            batch: Samples of the global batch; default: the job's own number.
            precision: Precision of the dense part, as ``wh.plan`` takes it.
            seed: Seed of the run.
            replace_every: Steps after which tables are placed again, from counts of
                their lookups. None counts no lookups.

        Raises:
            PlanError: There is no plan for the devices of these processes.
        """
        self._job, self._mesh, self._seed = job, mesh, seed
        self._tables, self._precision = tables, precision
        self._first = job_plans.first_batch(job, batch)
        self.size, self.count = batch or job.batch_size or 0, 1
        self._model = job_plans.abstract_model(job)
        self._batch = jax.tree.map(aval_of, self._first)
        self.plan = _first_plan(lambda: self.plan_for(jax.process_count()))
        self.step: Any = compile_step(
            self.plan,
            job.loss_fn,
            self._model,
            optimizer=job.optimizer,
            batch=self._batch,
            replace_every=replace_every,
        )
        self._told: TablePlacement | None = None

    def plan_for(self, processes: int) -> Plan:
        """Returns the plan for a number of processes.

        Raises:
            PlanError: There is no such plan.
        """
        devices = processes * jax.local_device_count()
        if self.size % devices:
            raise PlanError(
                f"a batch has {count_text(self.size, 'sample')}; expected a multiple "
                f"of {devices}, the devices of {processes} processes, since each "
                "device looks up the ids of its own samples. Give a batch that every "
                "wanted number of devices divides"
            )
        return job_plans.make_table_plan(
            self._job,
            self._model,
            self._first,
            cluster_of(processes),
            tables=self._tables,
            staleness=0,
            precision=self._precision,
            mesh=mesh_of(self._mesh, devices),
        )

    def compile_for(self, plan: Plan) -> bool:
        """Returns False: steps with tables are not compiled ahead.

        Args:
            plan: Plan for another number of processes.
        """
        del plan
        return False

    def new_placement(self, done: int) -> TablesPlaced | None:
        """Returns a report of the placement; None if it was already reported.

        Args:
            done: Number of finished steps.
        """
        placement = self.step.plan.placement
        if placement is self._told:
            return None
        self._told = placement
        return TablesPlaced(step=done, why=_placement_text(placement)[:_LONGEST])

    def batch(self, step: int, samples: int | None = None) -> Any:
        """Returns this process's part of the global batch of a step.

        Args:
            step: Number of the step, from 0.
            samples: Unused: every step takes a full batch.
        """
        del samples
        batch = self._batches(step * self.size)
        if jax.process_count() == 1:
            return batch
        rows = self.step.batch_rows()
        return jax.tree.map(
            lambda leaf: leaf[rows] if np.shape(leaf)[:1] == (self.size,) else leaf,
            batch,
        )

    def copied_states(self) -> CopiedStates:
        """Returns the functions that copy states of this step into memory."""
        return CopiedTableStates(self.step)

    def save(
        self, path: Path, state: Any, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint; all processes call this.

        Args:
            path: Path of the new checkpoint.
            state: State to write, which is not donated.
            before_it_appears: Function called before the checkpoint gets its name. It
                raises in all processes if the checkpoint must not appear.
        """
        self.step._save(path, state, before_it_appears)


def _first_plan(make: Callable[[], Plan]) -> Plan:
    """Returns in every process the plan that the first process makes.

    Raises:
        PlanError: There is no plan; raised in all processes.
        WhaleError: Planning failed in another way; raised in all processes.
    """
    if jax.process_count() == 1:
        return make()

    def packed() -> str:
        text = json.dumps(make().document())
        return base64.b85encode(zlib.compress(text.encode())).decode()

    first = told_by_first(packed, "the plan of this run")
    return Plan.from_document(json.loads(zlib.decompress(base64.b85decode(first))))


def _placement_text(placement: TablePlacement) -> str:
    tables, count = placement.tables, placement.ranks.count
    ways = [_way_text(placement, table.name) for table in tables[:_MOST_TABLES]]
    more = len(tables) - len(ways)
    return (
        f"{count_text(len(tables), 'table')} in "
        f"{count_text(len(placement.shards), 'shard')} on {count} "
        f"rank{'s' if count > 1 else ''}, the most loaded with "
        f"{placement.imbalance:.2f} of the mean: "
        f"{', '.join(ways)}{f' and {more} others' if more else ''}"
    )


def _way_text(placement: TablePlacement, table: str) -> str:
    shards = placement.shards_of(table)
    if shards[0].split == "replicate":
        return f"{table} on all ranks"
    ranks = sorted({shard.rank for shard in shards})
    several = "s" if len(ranks) > 1 else ""
    return f"{table} {shards[0].split} on rank{several} {'+'.join(map(str, ranks))}"
