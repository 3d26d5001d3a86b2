"""The ``pipeline_mpmd`` executor: stage programs.

Every stage has its own devices and layout, and compiles a forward and a backward
program for each of its virtual stages. All processes follow the rows of the schedule
and the transfers in one order. Each issues the work of its own devices.

The module is long because one class has the whole step: sums, forward and backward
programs, transfers and the update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax import _compat
from whalejax.capture import Captured
from whalejax.capture.program_units import avals_of, units_of
from whalejax.jaxpr.steps import Steps
from whalejax.lowering.global_arrays import (
    StageMetrics,
    absent,
    is_here,
    put_global,
    stages_mesh,
)
from whalejax.lowering.metrics import wide
from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.pipeline_mpmd.stage_programs import VirtualStagePrograms, site_of
from whalejax.lowering.pipeline_mpmd.stage_trace import ABSENT, PipelineFacts, place_of
from whalejax.lowering.pipeline_mpmd.stage_transfers import StageTransfers
from whalejax.lowering.pipeline_mpmd.step import SchedulePass
from whalejax.lowering.pipeline_mpmd.update import MultiStageProgram, ValuePlacement
from whalejax.lowering.runner import (
    abstract_state,
    check_compiler_options,
    evaluation_of,
    finished,
    fresh_state,
    laid_out,
)
from whalejax.lowering.spmd.constraints import Constraints, constraints_of, layouts_of
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.lowering.spmd.spmd_executor import Program, Sums, sums_of
from whalejax.lowering.step_runner import Evaluation, Metrics, StepRunner
from whalejax.lowering.train_state import Origin, TrainState, consuming
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.pipeline.program_cut import (
    Division,
    Value,
    divide_program,
    divided_by_marks,
)
from whalejax.planner.pipeline.schedules import Schedule, schedule
from whalejax.planner.pipeline.stage_graph import places_of, stage_graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.spmd_search import analysed_for


_ALL = -1
"""Stage number of a leaf that every stage has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MultiMeshProgram(Program):
    """Program of the full model, with a mesh for each parameter."""

    meshes: tuple[Mesh, ...]

    def constrain(
        self, leaves: Sequence[Any], specs: Sequence[Any], away: Any = ()
    ) -> list[Any]:
        del away
        return [
            jax.lax.with_sharding_constraint(x, named_sharding(spec, mesh))
            for x, spec, mesh in zip(leaves, specs, self.meshes, strict=True)
        ]


class StageProgramsExecutor(StepRunner):
    """Runs a plan with stage programs; its methods are those of ``runner.Runner``.

    Attributes:
        plan: Plan of the model.
        captured: Traced loss.
        plans: Plan of each stage.
        meshes: Mesh of each stage.
        whole: For each stage, the sharding that replicates over all its devices.
        division: Division of the loss into virtual stages.
        table: Pipeline schedule: rows of (tick, stage, chunk, micro-batch, action).
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        optimizer: optax.GradientTransformationExtraArgs,
        devices: Sequence[Any],
        batch_axes: tuple[int | None, ...],
        origin: Origin,
    ) -> None:
        assert plan.stages is not None
        self.plan = plan
        self._origin = origin
        self.captured = captured
        self._options: Any = dict(plan.compiler_options) or None
        self.plans = plan.stages.plans
        self.mesh = stages_mesh(plan, devices)
        self.meshes = [
            own.mesh(list(row))
            for own, row in zip(self.plans, self.mesh.devices, strict=True)
        ]
        self.whole = [NamedSharding(m, PartitionSpec()) for m in self.meshes]
        self.here = [*map(is_here, self.whole)]
        check_compiler_options(self._options, self.whole[0], devices[0].platform)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.watch = Watch(alone=not self.mesh.is_multi_process)
        self.division = _division(plan, captured)
        self.layouts: dict[int, dict[Value, Any]] = {}
        self.moves = StageTransfers(self)
        self.table: Schedule = schedule(
            plan.stages.schedule,
            len(self.plans),
            plan.num_micro_batches,
            plan.stages.chunks,
        )
        paths = captured.adapter.param_paths
        self._owners = [self._holder(i) for i in range(len(paths))]
        self.program = _MultiMeshProgram(
            plan=plan,
            captured=captured,
            adapter=captured.adapter,
            constraints=Constraints(),
            mesh=self.mesh,
            optimizer=optimizer,
            batch_axes=batch_axes,
            meshes=tuple(self.meshes[i] for i in self._owners),
        )
        self.shardings = self._state(
            params=[self._of_param(i, "param_spec") for i in range(len(paths))],
            followers=[self._of_param(i, "optimizer_spec") for i in range(len(paths))],
            kin=[self.whole[i] for i in self._owners],
            rest=lambda i: self._of_rest(i, self._rest_owner(i)),
            others=self._everywhere,
        )
        self.batch_shardings = tuple(
            named_sharding(leaf.spec, self.meshes[self._batch_owner(i)])
            for i, leaf in enumerate(plan.batch)
        )
        self.finish, self._report = self._finishing()

    # Initialisation.

    def init_state(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        whole = fresh_state(self.program, self._origin, build)
        tree: Any = jax.tree.structure(self.shardings)
        shardings = jax.tree.leaves(self.shardings)
        stages = jax.tree.leaves(self.stages)
        result = [
            None if is_here(sharding) else absent(aval, sharding)
            for aval, sharding in zip(
                jax.tree.leaves(self.abstract), shardings, strict=True
            )
        ]
        for stage in (_ALL, *(i for i, here in enumerate(self.here) if here)):
            own = [i for i, other in enumerate(stages) if other == stage]

            def part(*args: Any, own: Sequence[int] = own) -> list[Any]:
                leaves = jax.tree.leaves(whole(*args))
                return [leaves[i] for i in own]

            places = [shardings[i] for i in own]
            made = jax.jit(part, out_shardings=places)(*arguments)
            for i, leaf in zip(own, made, strict=True):
                result[i] = leaf
        state: TrainState = tree.unflatten(result)
        return state

    @functools.cached_property
    def abstract(self) -> TrainState:
        return abstract_state(self.program, self._origin)

    def _state(self, **places: Any) -> TrainState:
        return laid_out(self.program, self._origin, **places)

    @functools.cached_property
    def stages(self) -> TrainState:
        """The stage of each leaf of the state, or ``_ALL``."""
        return self._state(
            params=self._owners,
            followers=self._owners,
            kin=self._owners,
            rest=self._rest_owner,
            others=_ALL,
        )

    def _of_param(
        self, number: int, kind: str, stage: int | None = None
    ) -> NamedSharding:
        if stage is None:
            stage = self._owners[number]
        path = self.captured.adapter.param_paths[number]
        return named_sharding(getattr(self.leaf(stage, path), kind), self.meshes[stage])

    def _of_rest(self, number: int, stage: int) -> NamedSharding:
        path = self.captured.adapter.rest_paths[number]
        if number not in self.division.units.frozen_others:
            return self.whole[stage]
        return named_sharding(self.leaf(stage, path).param_spec, self.meshes[stage])

    def leaf(self, stage: int, path: str) -> Any:
        """Returns the plan of a parameter on a stage; by default, of the full model."""
        result = (leaf for leaf in self.plans[stage].leaves if leaf.path == path)
        return next(result, self.plan.leaf(path))

    def _rest_owner(self, number: int) -> int:
        return self.owner(len(self._owners) + number)

    def _batch_owner(self, number: int) -> int:
        return self.owner(self.first_batch + number)

    @functools.cached_property
    def first_batch(self) -> int:
        """The number of the first input of the loss that is a batch leaf."""
        return len(self._owners) + len(jax.tree.leaves(self.captured.adapter.rest))

    def owner(self, number: int) -> int:
        """Returns the stage that owns an input of the loss."""
        if number < len(self._owners):
            return self._owners[number]
        home = self._homes.get(number - len(self._owners))
        return self._holder(number) if home is None else home

    def _holder(self, number: int) -> int:
        holder: int = self.division.owner(number, len(self.plans))
        return holder

    @functools.cached_property
    def _homes(self) -> dict[int, int]:
        return self.captured.steady.homes(self._owners)

    def input_sharding(self, number: int, stage: int) -> NamedSharding:
        """Returns the sharding of an input of the loss on a stage."""
        if number < len(self._owners):
            return self._of_param(number, "param_spec", stage)
        if number < self.first_batch:
            return self._of_rest(number - len(self._owners), stage)
        planned = self.plan.batch[number - self.first_batch]
        leaves = (x for x in self.plans[stage].batch if x.path == planned.path)
        return named_sharding(next(leaves, planned).spec, self.meshes[stage])

    def gradient_sharding(self, number: int, stage: int) -> NamedSharding:
        """Returns the sharding in which a stage accumulates a gradient."""
        if number >= self.first_batch:
            return self.input_sharding(number, stage)
        return self._of_param(number, "gradient_spec", stage)

    # Running.

    def _agree(self) -> None:
        self.moves.agree()

    def _issue_step(
        self, state: TrainState, batch: Sequence[Any]
    ) -> tuple[TrainState, Metrics]:
        new, metrics, _ = self.step_with_gradients(state, batch)
        return new, metrics

    def step_with_gradients(
        self, state: TrainState, batch: Sequence[Any]
    ) -> tuple[TrainState, Metrics, list[Any]]:
        """Issues the programs of a step.

        Args:
            state: State before the step; it is donated.
            batch: Flat leaves of the global batch, in their planned layout.

        Returns:
            The next state, the metrics, and gradients of the mean loss by the batch
            leaves that the adapter's ``batch_gradients`` names. Such gradients need a
            single process.
        """
        run = SchedulePass(self, state, batch)
        for event in self.moves.order:
            self.watch.doing = event
            run.do(event)
        losses, gradients = run.losses(), run.summed()
        means = [self._mean(g, losses) for g in run.batch_gradients]
        new, metrics = self.finished(state, losses, gradients, run.rest_after())
        return new, metrics, means

    def _mean(self, gradient: Any, losses: Sums | None) -> Any:
        assert losses is not None
        whole = NamedSharding(gradient.sharding.mesh, PartitionSpec())
        return self._divide(gradient, jax.device_put(losses.weight, whole))

    @functools.cached_property
    def _divide(self) -> Callable[..., Any]:
        return jax.jit(
            lambda gradient, weight: gradient / weight.astype(gradient.dtype)
        )

    def finished(
        self,
        state: TrainState,
        losses: Sums | None,
        gradients: Sequence[Any],
        rest: Any,
    ) -> tuple[TrainState, Metrics]:
        """Finishes a step after all its micro-batches.

        Args:
            state: State before the step; it is donated.
            losses: Sums of the losses of micro-batches; None if another process has
                them.
            gradients: Gradient sum of each parameter, or ``ABSENT``.
            rest: Non-trainable state after the last micro-batch.
        """
        sums = replace(
            losses or jax.tree.map(lambda _: ABSENT, self.sums),
            gradients=tuple(gradients),
        )
        before = jax.tree.leaves(state)
        given = [*before, *jax.tree.leaves((sums, rest))]
        with consuming(state):
            results = self.finish(given)
        # Other processes change their own leaves.
        leaves = [
            old if new is None else new
            for new, old in zip(results[: len(before)], before, strict=True)
        ]
        tree: Any = jax.tree.structure(state)
        return tree.unflatten(leaves), self._report(results[len(before) :])

    def _issue_evaluation(self, state: TrainState, batch: Sequence[Any]) -> Evaluation:
        run = SchedulePass(self, state, batch, keeps=False)
        for event in self.moves.order:
            if event.action == "forward":
                self.watch.doing = event
                run.do(event)
        self.moves.settle()
        return self.reported(run.losses())

    def reported(self, sums: Sums | None) -> Evaluation:
        """Returns the loss and metrics of an evaluation.

        Args:
            sums: Sums of the losses; None if another process has them.
        """
        result = self._evaluation_avals if sums is None else self._metrics(sums)
        told: Evaluation = self._evaluated(jax.tree.leaves(result))
        return told

    def lower(self, state: TrainState, batch: Sequence[Any]) -> Any:
        raise PlanError(
            "the stages of this plan have programs of their own, so there is no one "
            "program to lower"
        )

    @functools.cached_property
    def _metrics(self) -> Callable[..., Evaluation]:
        return jax.jit(functools.partial(evaluation_of, self.program))

    @functools.cached_property
    def _evaluation_avals(self) -> Evaluation:
        told: Evaluation = jax.eval_shape(
            functools.partial(evaluation_of, self.program), self.sums
        )
        return told

    @functools.cached_property
    def _evaluated(self) -> StageMetrics:
        return StageMetrics(self._evaluation_avals, self.whole)

    # Compiling.

    @functools.cached_property
    def sites(self) -> list[VirtualStagePrograms]:
        """The virtual stages with their programs."""
        units = self.division.units
        graph = self.captured.graph
        tensors = {
            v: t
            for unit in units.units
            for v, t in zip(unit.writes, unit.tensors, strict=True)
        }
        facts = PipelineFacts(
            units=units,
            avals=self.avals,
            flows=frozenset(
                v
                for v, t in tensors.items()
                if t is not None and graph.tensors[t].differentiable
            ),
            scales=self.plan.scales_loss,
            batch_paths=tuple(leaf.path for leaf in self.plan.batch),
        )
        sites: list[VirtualStagePrograms] = []
        stages = len(self.plans)
        for stage in range(stages):
            program, layouts = self._program(stage, tensors)
            self.layouts[stage] = layouts
            for place in places_of(stage, stages, self.table.num_chunks):
                made = place_of(
                    program,
                    facts,
                    self.division.parts[place],
                    layouts,
                    last=place == self.table.num_places - 1,
                )
                sites.append(
                    site_of(
                        place,
                        stage,
                        made,
                        mesh=self.meshes[stage],
                        splits=self.table.splits_backward,
                        options=self._options,
                    )
                )
        return sorted(sites, key=lambda site: site.number)

    def _program(
        self, stage: int, tensors: Mapping[Value, int | None]
    ) -> tuple[Program, dict[Value, Any]]:
        plan, places = self.plans[stage], self._places(stage)
        graph = stage_graph(self.captured.graph, self._dims, self.division, places)
        captured = replace(self.captured, graph=graph)
        analysed = analysed_for(plan, graph)
        parts = [self.division.parts[place] for place in places]
        values = {v for part in parts for v in (*part.imports, *part.exports)}
        known = {v: t for v in values if (t := tensors[v]) is not None}
        specs = layouts_of(plan, analysed, [*known.values()])
        program = Program(
            plan=plan,
            captured=captured,
            adapter=captured.adapter,
            constraints=constraints_of(plan, analysed, captured),
            mesh=self.meshes[stage],
            optimizer=self.program.optimizer,
            batch_axes=self.program.batch_axes,
        )
        return program, {v: specs[t] for v, t in known.items()}

    def _places(self, stage: int) -> tuple[int, ...]:
        return places_of(stage, len(self.plans), self.table.num_chunks)

    @functools.cached_property
    def zeros(self) -> Sequence[tuple[Callable[[], list[Any]], ...]]:
        """Functions that make zero sums and zero gradients of each virtual stage."""
        zeros: list[Any] = []
        for site in self.sites:
            if not self.here[site.stage]:
                zeros.append((list, list))
                continue
            steps, names = site.place.steps, site.place.names
            avals = [
                [steps.aval_of(x) for x in names.sums],
                [steps.aval_of(x) for x in names.gradients],
            ]
            places = (
                [self.whole[site.stage]] * len(names.sums),
                [self.gradient_sharding(n, site.stage) for n in site.place.params],
            )

            def nothing(avals: Sequence[Any]) -> list[Any]:
                return [jnp.zeros(a.shape, a.dtype) for a in avals]

            zeros.append(
                tuple(
                    jax.jit(functools.partial(nothing, several), out_shardings=there)
                    for several, there in zip(avals, places, strict=True)
                )
            )
        return zeros

    @functools.cached_property
    def numbers(self) -> list[list[Any]]:
        """The indices of the micro-batches as arrays on each stage."""
        every = range(self.plan.num_micro_batches)
        return [[put_global(np.int32(m), whole) for m in every] for whole in self.whole]

    @functools.cached_property
    def _dims(self) -> Dimensions:
        return analyse_graph(self.captured.graph).dims

    def advance_counter(self, number: int, leaf: Any) -> Any:
        """Advances counters in the non-trainable state after a step.

        Args:
            number: Number of the input of the loss.
            leaf: Leaf after the last micro-batch.
        """
        each = self.division.units.counters.get(number)
        if each is None or not self.here[self.owner(number)]:
            return leaf
        return self._add(leaf, self.table.num_micro_batches * each)

    @functools.cached_property
    def _add(self) -> Callable[..., Any]:
        return jax.jit(lambda x, more: x + jnp.asarray(more, x.dtype))

    @functools.cached_property
    def one(self) -> Any:
        """The cotangent of the loss."""
        last = self.sites[-1].place
        aval = last.steps.avals[last.names.cotangents[-1]]
        return put_global(np.ones((), aval.dtype), self.whole[-1])

    @functools.cached_property
    def _sum(self) -> Callable[..., Any]:
        return jax.jit(lambda values: functools.reduce(jnp.add, values))

    def total(self, values: Sequence[Any]) -> Any:
        """Returns the sum of arrays on one stage."""
        return values[0] if len(values) == 1 else self._sum(values)

    @functools.cached_property
    def wide_params(self) -> list[Any]:
        """The abstract sum of gradients by each parameter."""
        leaves = jax.tree.leaves(self.abstract.params)
        return [jax.eval_shape(wide, x) for x in leaves]

    def gradient_aval(self, number: int) -> Any:
        """Returns the abstract sum of gradients by an input of the loss.

        Args:
            number: Number of the input: a parameter or a leaf of the global batch.
        """
        if number < len(self._owners):
            return self.wide_params[number]
        leaf = self.plan.batch[number - self.first_batch]
        aval = self.avals[(), number]
        return jax.eval_shape(wide, _compat.abstract(leaf.shape, aval.dtype))

    @functools.cached_property
    def avals(self) -> Mapping[Value, Any]:
        """Abstract values of the loss for one micro-batch."""
        return avals_of(self.captured)

    @functools.cached_property
    def unread(self) -> dict[int, Callable[[], Any]]:
        """Functions that make zero gradients of unread inputs, by input number."""
        read = {n for site in self.sites for n in site.place.params}
        wanted = self.program.adapter.batch_gradients
        numbers = [*range(len(self._owners)), *(self.first_batch + n for n in wanted)]
        avals = {n: self.gradient_aval(n) for n in numbers if n not in read}
        return {
            n: jax.jit(
                functools.partial(jnp.zeros, aval.shape, aval.dtype),
                out_shardings=self.gradient_sharding(n, self.owner(n)),
            )
            for n, aval in avals.items()
        }

    @functools.cached_property
    def sums(self) -> Sums:
        """Abstract sums over micro-batches, without gradients."""
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

    def _finishing(self) -> tuple[MultiStageProgram, StageMetrics]:
        state = self.abstract
        sums = replace(self.sums, gradients=tuple(self.wide_params))
        tree: Any
        flat, tree = jax.tree.flatten((state, sums, state.rest))
        shape: Any = None

        def finish(*leaves: Any) -> list[Any]:
            nonlocal shape
            results = finished(self.program, *tree.unflatten(leaves))
            finish, shape = jax.tree.flatten(results)
            return list(finish)

        steps = Steps.of(jax.make_jaxpr(finish)(*flat))
        end = len(self.plans) - 1
        kinds = self._wheres(end, sums.metrics)
        new = jax.tree.map(
            lambda stage, sharding: ValuePlacement(
                owner=None if stage == _ALL else stage, sharding=sharding
            ),
            self.stages,
            self.shardings,
        )
        first = len(jax.tree.leaves(new))
        report = ValuePlacement(owner=end, sharding=self.whole[end])
        parted = MultiStageProgram(
            steps,
            jax.tree.leaves(kinds),
            [*jax.tree.leaves(new), *[report] * (shape.num_leaves - first)],
            self.whole,
            self._options,
        )
        avals = [steps.aval_of(x) for x in steps.outputs]
        return parted, StageMetrics(shape.unflatten(avals)[1], self.whole)

    def _wheres(self, end: int, metrics: Any) -> Any:
        owned = [ValuePlacement(owner=i, consumed=True) for i in self._owners]
        state = self._state(
            params=owned,
            followers=owned,
            kin=owned,
            rest=lambda number: ValuePlacement(owner=self._rest_owner(number)),
            others=ValuePlacement(owner=None),
        )
        told = ValuePlacement(owner=end)
        sums = Sums(
            total=told,
            weight=told,
            metrics=jax.tree.map(lambda _: told, metrics),
            gradients=tuple(owned),
        )
        return state, sums, state.rest


def _division(plan: Plan, captured: Captured) -> Division:
    assert plan.stages is not None
    units = units_of(captured)
    if plan.stages.starts:
        return divide_program(units, plan.stages.starts)
    return divided_by_marks(units, units.labels(captured.graph))
