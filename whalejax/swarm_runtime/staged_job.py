"""A job divided into stages: inputs, outputs and state leaves of each stage.

Every process of a swarm makes the same division from the same code, and compares its
facts with the other processes. The division is that of an ordinary plan with stages.
The programs are for one device, from the same traces as in the stage-programs executor.

The module is long because ``StagedJob`` makes all programs of a stage from the same
traces.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from scipy.optimize import linear_sum_assignment

from whalejax import _compat
from whalejax.adapters.base import Adapter, adapt, made_model
from whalejax.agreement.facts import program_hash, training_facts, values_hash
from whalejax.api import job_plans
from whalejax.capture import Captured, capture
from whalejax.capture.batch import aval_of
from whalejax.capture.loss_options import as_planned
from whalejax.capture.precision import at_precision
from whalejax.capture.program_units import avals_of, units_of
from whalejax.elastic.replica_programs import possible_counts
from whalejax.jaxpr.steps import Steps
from whalejax.lowering.batch_layout import BatchLayout
from whalejax.lowering.global_arrays import impl_of, raw_array, wrapped
from whalejax.lowering.metrics import wide
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.multihost.fingerprints import fingerprint
from whalejax.lowering.pipeline_mpmd.stage_trace import (
    PipelineFacts,
    TracedVirtualStage,
    place_of,
)
from whalejax.lowering.pipeline_mpmd.update_partition import UpdatePartition
from whalejax.lowering.runner import (
    abstract_state,
    finished,
    fresh_state,
    laid_out,
    metrics_of,
)
from whalejax.lowering.spmd.constraints import Constraints
from whalejax.lowering.spmd.spmd_executor import Program, Sums, sums_of
from whalejax.lowering.train_state import Origin, TrainState
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.units import gigabytes
from whalejax.planner.pipeline.program_cut import (
    Division,
    Units,
    Value,
    divide_program,
    divided_by_marks,
)
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.stage_models import TooFewParts
from whalejax.state.state_bytes import unpacked
from whalejax.user_code.losses import Job
from whalejax.wire.messages import MOST_ARRAY_BYTES, MOST_ARRAYS


EVERY = -1
"""Stage number of a leaf that all stages have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedProgram(Program):
    """A program on one device, without sharding constraints."""

    def constrain(
        self, leaves: Sequence[Any], specs: Sequence[Any], away: Any = ()
    ) -> list[Any]:
        del specs, away
        return list(leaves)


class StagedJob:
    """A job that is divided into stages; nothing is compiled.

    Attributes:
        job: Job to train.
        plan: Plan with stages that defines the division.
        count: Number of micro-batches of a step.
        size: Samples of a global batch.
        stages: Number of stages.
        delayed_updates: Whether each step computes with the parameters before the
            previous step's update.
        division: Loss in parts, one for each stage.
        program: Loss, optimizer and plan of the full model.
        abstract: Shapes and dtypes of the full state.
        ready: Compiled programs of stages, by number.
    """

    def __init__(
        self,
        job: Job,
        *,
        stages: int,
        batch: int | None = None,
        micro_batches: int | None = None,
        precision: Any = "f32",
        seed: int = 0,
        delayed_updates: bool = False,
    ) -> None:
        """Plans and traces the job.

        Args:
            job: Job to train.
            stages: Number of stages; at least 2.
            batch: Samples of the global batch; default: the job's own number.
            micro_batches: Number of micro-batches in a step; default: the largest
                number up to 16 that divides the batch.
            precision: Precision of the model, as ``wh.plan`` takes it.
            seed: Seed of the run.
            delayed_updates: Whether to apply the update of each step while the next
                step is computed. The next step then uses the parameters before that
                update.

        Raises:
            PlanError: A swarm cannot train the job.
        """
        self.job, self.stages, self.seed = job, stages, seed
        self.precision, self.delayed_updates = precision, delayed_updates
        first = job_plans.first_batch(job, batch)
        self.size = batch or job.batch_size or 0
        self.count = micro_batches or possible_counts(self.size, job.group_size)[0]
        model = job_plans.abstract_model(job)
        try:
            self.plan = job_plans.make_plan(
                job,
                model,
                first,
                parse_cluster(f"cpu:{stages}"),
                mesh={"stage": stages},
                precision=precision,
                num_micro_batches=self.count,
            )
        except PlanError as error:
            if not isinstance(error.__context__, TooFewParts):
                raise
            # Swarms cannot divide a scan.
            raise PlanError(error.__context__.cut) from None
        example = jax.tree.map(aval_of, first)
        self.structure: Any = jax.tree.structure(example)
        adapter = adapt(model, job.loss_fn).without_values()
        self.adapter: Adapter = at_precision(adapter, self.plan.precision)
        result = capture(
            self.adapter, example, num_micro_batches=self.count, batch_axes=0
        )
        self.captured: Captured = as_planned(result, self.plan)
        self._data = values_hash(jax.tree.leaves(first))
        self.division = _division(self.plan, self.captured, stages)
        self.origin = Origin(self.adapter)
        self.device = jax.local_devices()[0]
        self.program = UnshardedProgram(
            plan=self.plan,
            captured=self.captured,
            adapter=self.captured.adapter,
            constraints=Constraints(),
            mesh=Mesh(np.array(self.device).reshape(()), ()),
            optimizer=optax.with_extra_args_support(job.optimizer),
            batch_axes=self.captured.batch_axes,
        )
        self.params = len(self.adapter.param_paths)
        self.abstract = abstract_state(self.program, self.origin)
        self.rest = len(jax.tree.leaves(self.abstract.rest))
        self.ready: dict[int, Any] = {}
        self._batches: dict[int, list[Any]] = {}
        self._refuse()

    def _refuse(self) -> None:
        """Refuses a job that stages on different machines cannot run."""
        result = []
        for number in range(self.params + self.rest):
            if number >= self.params and number not in self.division.units.frozen:
                continue
            several = self.readers(number)
            if len(several) > 1:
                path = self.division.units.path(number)
                stages = ", ".join(map(str, several))
                result.append(
                    f"{path} is read by stages {stages}, and peers of different stages "
                    "share no weights. Give each stage weights of its own (such as "
                    "tied_embedding=False, or fewer layers to each block that "
                    "shared_layers shares), or use fewer stages"
                )
        for part in self.division.parts:
            for number in part.fresh:
                result.append(
                    f"{self.division.units.path(number)} is changed by every "
                    "micro-batch, so that its value would depend on which peer ran "
                    "which. Leave it as it is while training"
                )
        if self.captured.steady.advance is not None:
            result.append(
                "the model has state that a step changes beside its weights. Leave it "
                "as it is while training"
            )
        if self.plan.scales_loss:
            result.append(
                "with precision f16 the loss scale depends on gradients that are not "
                "finite, and a swarm refuses these. Take precision bf16 or f32"
            )
        for stage in range(self.stages):
            result += self._too_large(stage)
        if result:
            raise PlanError("a swarm cannot train this model: " + "; ".join(result))

    def _too_large(self, stage: int) -> list[str]:
        part = self.division.parts[stage]
        every = [self.avals[v] for v in part.exports]
        border = sum(math.prod(x.shape) * x.dtype.itemsize for x in every)
        params = sum(self.owner(n) == stage for n in range(self.params))
        # With two peers, each sends half of the sum to the other.
        half = self.gradient_bytes(stage) // 2
        problems = [
            f"stage {stage} {does} {gigabytes(size)}, and a message holds at most "
            f"{gigabytes(MOST_ARRAY_BYTES)}. {remedy}"
            for does, size, remedy in (
                ("hands on", border, "Take more micro-batches"),
                ("sums gradients in parts of", half, "Take more stages"),
            )
            if size > MOST_ARRAY_BYTES
        ]
        for what, count in (("arrays", len(every)), ("parameters", params)):
            if count > MOST_ARRAYS:
                problems.append(
                    f"stage {stage} sends {count} {what} at once, and a message holds "
                    f"at most {MOST_ARRAYS} arrays. Take more stages, or stack them"
                )
        return problems

    def readers(self, number: int) -> list[int]:
        """Returns the stages that read an input of the loss."""
        parts = enumerate(self.division.parts)
        return [stage for stage, part in parts if number in part.inputs]

    # Common facts of all processes.

    @functools.cache  # noqa: B019
    def facts(self) -> dict[str, str]:
        """Returns hashes of the facts that all peers must share, by name."""
        built = _compat.trace(self._build, [jax.random.key(0)])
        facts = training_facts(
            self.captured.jaxpr,
            plan=self.plan.hash,
            optimizer=fingerprint(self.program),
            first_batch=self._data,
            seed=self.seed,
        )
        initial = f"{program_hash(built.jaxpr)} {values_hash(built.consts)}"
        return {
            **facts,
            "initial values": initial,
            "delayed updates": str(self.delayed_updates),
        }

    # The state.

    def owner(self, number: int) -> int:
        """Returns the stage of a parameter, by its number."""
        owner: int = self.division.owner(number, self.stages)
        return owner

    @functools.cached_property
    def owners(self) -> list[int]:
        """Stage of each flat leaf of the state, or ``EVERY``."""
        params = [self.owner(n) for n in range(self.params)]
        whole = laid_out(
            self.program,
            self.origin,
            params=params,
            followers=params,
            kin=params,
            rest=lambda number: EVERY,
            others=EVERY,
        )
        owners: list[int] = jax.tree.leaves(whole)
        return owners

    def leaf_numbers(self, stage: int) -> list[int]:
        """Returns the numbers of the flat state leaves of a stage's peers."""
        weights = {self.params + n for n in self.division.units.frozen_others}
        return [
            number
            for number, owner in enumerate(self.owners)
            if owner == stage
            or (
                owner == EVERY
                and (number not in weights or stage in self.readers(number))
            )
        ]

    def init_function(self, stage: int) -> Callable[[Any], list[Any]]:
        """Returns a function from the run's key to a stage's initial state."""
        whole = fresh_state(self.program, self.origin, self._build)
        numbers = self.leaf_numbers(stage)

        def init_leaves(key: Any) -> list[Any]:
            leaves = jax.tree.leaves(whole(key))
            return [leaves[n] for n in numbers]

        return init_leaves

    def _build(self, key: Any) -> tuple[Any, Any, Any]:
        make = self.job.make_model
        model = made_model(make, key)
        params, rest = self.adapter.take_apart(model)
        return params, rest, jax.random.fold_in(key, 0x5EED)

    def raw_avals(self, stage: int) -> list[Any]:
        """Returns a stage's abstract arrays; random keys become their data.

        With delayed updates, the parameters of the previous step follow.
        """
        leaves = jax.tree.leaves(self.abstract)
        numbers = [*self.leaf_numbers(stage), *self.late(stage)]
        return [raw_array(leaves[n]) for n in numbers]

    def late(self, stage: int) -> list[int]:
        """Returns the numbers of leaves whose previous values a stage also stores."""
        if not self.delayed_updates:
            return []
        return [n for n in range(self.params) if self.owner(n) == stage]

    def state_bytes(self, stage: int) -> int:
        """Returns the bytes of a stage's arrays, which ``raw_avals`` lists."""
        avals = self.raw_avals(stage)
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in avals)

    def gradient_bytes(self, stage: int) -> int:
        """Returns the bytes of a stage's float32 gradients of one micro-batch."""
        return sum(
            math.prod(leaf.shape) * 4
            for number, leaf in enumerate(jax.tree.leaves(self.abstract.params))
            if self.owner(number) == stage
        )

    def split(self, stage: int, data: np.ndarray) -> list[np.ndarray] | None:
        """Splits a stage's bytes into its arrays; returns None for a wrong length."""
        return unpacked(self.raw_avals(stage), data)

    def typed(self, stage: int, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Puts a stage's NumPy arrays on the device.

        Args:
            stage: Number of the stage.
            arrays: Arrays from ``split``; parameters of the previous step are ignored.
        """
        leaves = jax.tree.leaves(self.abstract)
        result, numbers = [], self.leaf_numbers(stage)
        for array, number in zip(arrays[: len(numbers)], numbers, strict=True):
            leaf: Any = jnp.array(array, copy=True)
            result.append(wrapped(leaf, impl_of(leaves[number])))
        return result

    def full_state(self, parts: Mapping[int, Sequence[Any]]) -> TrainState:
        """Returns the full state from the arrays of all stages.

        Args:
            parts: Arrays of each stage.
        """
        leaves: dict[int, Any] = {}
        for stage, part in parts.items():
            for number, leaf in zip(self.leaf_numbers(stage), part, strict=True):
                leaves.setdefault(number, leaf)
        tree: Any = jax.tree.structure(self.abstract)
        state: TrainState = tree.unflatten([leaves[n] for n in range(len(leaves))])
        step = int(np.asarray(state.step))
        return dataclasses.replace(state, samples=step * self.size)

    # Data.

    def micro_batch(self, step: int, number: int) -> list[np.ndarray]:
        """Returns the flat leaves of a micro-batch.

        Args:
            step: Number of the step, from 0.
            number: Number of the micro-batch.

        Raises:
            PlanError: The batch has other shapes than the planned one.
        """
        micro_batch, rows = [], MicroBatchRows.of(self.program.plan)
        for leaf, axis in zip(self._batch(step), self.program.batch_axes, strict=True):
            array = np.asarray(leaf)
            if axis is not None:
                array = array[rows.index(array.shape[axis], axis, number)]
            micro_batch.append(array)
        return micro_batch

    @functools.cached_property
    def _layout(self) -> BatchLayout:
        return BatchLayout(
            structure=self.structure, leaves=self.plan.batch, shardings=()
        )

    def _batch(self, step: int) -> list[Any]:
        if step not in self._batches:
            leaves = self._layout.check(self.job.batch_at(step, self.size), step)
            # Keep this batch and the previous one, which delayed updates need.
            kept = [n for n in self._batches if n == step - 1]
            self._batches = {**{n: self._batches[n] for n in kept}, step: leaves}
        return self._batches[step]

    # Programs.

    @functools.cached_property
    def avals(self) -> Mapping[Value, Any]:
        """Shape and dtype of every value of the loss, for one micro-batch."""
        return avals_of(self.captured)

    @functools.cached_property
    def flows(self) -> frozenset[Value]:
        """Values through which a gradient flows."""
        graph = self.captured.graph
        return frozenset(
            v
            for unit in self.division.units.units
            for v, t in zip(unit.writes, unit.tensors, strict=True)
            if t is not None and graph.tensors[t].differentiable
        )

    @functools.cache  # noqa: B019 A staged job lives as long as its process.
    def place(self, stage: int) -> TracedVirtualStage:
        """Returns a stage's part, traced with its backward pass."""
        facts = PipelineFacts(
            units=self.division.units,
            avals=self.avals,
            flows=self.flows,
            scales=self.plan.scales_loss,
        )
        return place_of(
            self.program,
            facts,
            self.division.parts[stage],
            {},
            last=stage == self.stages - 1,
            cuts_batch=False,
        )

    @functools.cache  # noqa: B019
    def sources(self, stage: int) -> dict[int, list[int]]:
        """Returns the positions of a stage's imports, by the stage that makes them."""
        sources: dict[int, list[int]] = {}
        for place, value in enumerate(self.division.parts[stage].imports):
            sources.setdefault(self.division.made_at[value], []).append(place)
        return sources

    def sinks(self, stage: int) -> list[int]:
        """Returns the stages that return cotangents to a stage."""
        return [s for s in range(stage + 1, self.stages) if self.returned(s, stage)]

    def exported_values(self, stage: int, target: int) -> list[Value]:
        """Returns the values that a stage makes and another reads, in order."""
        exports = self.division.parts[stage].exports
        imports = self.division.parts[target].imports
        return [v for v in exports if v in imports]

    def returned(self, stage: int, target: int) -> list[Value]:
        """Returns the values whose cotangents a stage returns to another, in order."""
        made_at = self.division.made_at
        return [
            v
            for v in self.division.parts[stage].imports
            if v in self.flows and made_at[v] == target
        ]

    def broadcast_values(self, level: int, stage: int) -> tuple[int, ...]:
        """Returns the numbers of the values that a stage broadcasts after a round."""
        return tuple(sorted(self.update.parting.tells.get((level, stage), ())))

    @property
    def flat_sums(self) -> list[Any]:
        """Flat shapes and dtypes of the loss's total, weight and metrics."""
        sums = self.sums
        flat_sums: list[Any] = jax.tree.leaves((sums.total, sums.weight, sums.metrics))
        return flat_sums

    def metrics(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Returns the metrics of a step from flat sums."""
        tree: Any = jax.tree.structure(
            (self.sums.total, self.sums.weight, self.sums.metrics)
        )
        total, weight, metrics = tree.unflatten(flat)
        sums = Sums(total=total, weight=weight, metrics=metrics, gradients=())
        return metrics_of(self.program, sums)

    @functools.cached_property
    def sums(self) -> Sums:
        """Shapes and dtypes of the sums over micro-batches, without gradients."""
        body, _ = _compat.open_jaxpr(self.captured.jaxpr)
        results = [_compat.abstract(v.aval.shape, v.aval.dtype) for v in body.outvars]
        *told, _ = self.captured.out_tree.unflatten(results)
        sums: Sums = jax.eval_shape(
            lambda total, weight, metrics: sums_of(
                self.program, total, weight, metrics, (), 0
            ),
            *told,
        )
        return sums

    @functools.cached_property
    def update(self) -> StagedUpdate:
        """The update at the end of a step, divided among the stages."""
        state = self.abstract
        gradients = [jax.eval_shape(wide, x) for x in jax.tree.leaves(state.params)]
        sums = dataclasses.replace(self.sums, gradients=tuple(gradients))
        tree: Any
        flat, tree = jax.tree.flatten((state, sums))
        rest = range(self.params, self.params + self.rest)

        def finish(*leaves: Any) -> list[Any]:
            before, added = tree.unflatten(leaves)
            new, _ = finished(self.program, before, added, before.rest)
            finish = jax.tree.leaves(new)
            return [x for n, x in enumerate(finish) if n not in rest]

        owners = [None if n == EVERY else n for n in self.owners]
        told = [None] * (len(flat) - len(owners) - self.params)
        own = [self.owner(n) for n in range(self.params)]
        steps = Steps.of(jax.make_jaxpr(finish)(*flat))
        outputs = [n for n in range(len(owners)) if n not in rest]
        parting = UpdatePartition(
            steps,
            [*owners, *told, *own],
            [owners[n] for n in outputs],
            stages=self.stages,
            few_rounds=True,
        )
        return StagedUpdate(steps=steps, parting=parting, outputs=tuple(outputs))


@dataclass(frozen=True, kw_only=True)
class StagedUpdate:
    """The update at the end of a step, over the arrays of all stages.

    Attributes:
        steps: Program from the state, the sums and the gradients to the next state.
        parting: Partition of the program among stages, in rounds with exchanges of
            scalars.
        outputs: Number of the state's leaf for each result.
    """

    steps: Steps
    parting: UpdatePartition
    outputs: tuple[int, ...]

    @functools.cached_property
    def rounds(self) -> int:
        """Number of rounds: one more than the number of exchanges of scalars."""
        return 1 + max((level for level, _ in self.parting.reads), default=0)


def _division(plan: Plan, captured: Captured, stages: int) -> Division:
    """Returns the loss in one part for each stage.

    Raises:
        PlanError: The plan runs all stages in one loop.
    """
    assert plan.stages is not None
    if plan.stages.executor != "mpmd":
        raise PlanError(
            "the layers of this model are one scanned loop, which a plan divides "
            "inside one program. A swarm cuts between operations: unroll the layers "
            "(scan_layers=False), or put stage marks around several loops"
        )
    units = units_of(captured)
    if plan.stages.starts:
        chunks = plan.stages.chunks
        return divide_program(
            units, _untied_borders(units, plan.stages.starts[chunks - 1 :: chunks])
        )
    division = divided_by_marks(units, units.labels(captured.graph))
    if len(division.parts) != stages:
        raise PlanError(
            f"stage marks cut this model into {len(division.parts)} parts, and "
            f"stages={stages} was asked for. Give stages={len(division.parts)}"
        )
    return division


def _untied_borders(units: Units, starts: Sequence[str]) -> Sequence[str]:
    """Returns cut points near the plan's that keep layers with shared weights together.

    If there are too few such cut points, it returns the plan's own.

    Args:
        units: Program to cut.
        starts: Names of the plan's cut points in ``Units.borders``.
    """
    spans: dict[int, tuple[int, int]] = {}
    for index, unit in enumerate(units.units):
        for path, number in unit.reads:
            if path == () and number < len(units.params):
                spans[number] = spans.get(number, (index, index))[0], index
    free = [
        name
        for name, border in units.borders.items()
        if not any(first < border <= last for first, last in spans.values())
    ]
    if len(free) < len(starts):
        return starts
    far = [
        [abs(units.borders[start] - units.borders[name]) for name in free]
        for start in starts
    ]
    _, chosen = linear_sum_assignment(far)
    return sorted((free[n] for n in chosen), key=lambda name: units.borders[name])
