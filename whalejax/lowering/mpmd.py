"""The ``pipeline_mpmd`` executor: stages with programs of their own.

Every stage has devices of its own, with a layout of its own on them, and compiles a
forward and a backward program for each of its parts of the model. The rows of the
schedule are issued in their order; what one stage hands another is copied between their
devices, and every stage goes on as soon as it has what it needs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
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
from whalejax.capture.units import avals_of, units_of
from whalejax.cutting import Fixed, Operand, Steps
from whalejax.lowering.constraints import Constraints, constraints_of, layouts_of
from whalejax.lowering.evaluate import named
from whalejax.lowering.parted import Parted, Where
from whalejax.lowering.passing import Pass
from whalejax.lowering.pieces import Site, site_of
from whalejax.lowering.places import Facts, place_of
from whalejax.lowering.spmd import Program, Sums, sums_of, wide
from whalejax.planner.decide import analyse_graph, analysed_for
from whalejax.planner.dimensions import Dimensions
from whalejax.planner.parts import Division, Value, divided, divided_by_marks
from whalejax.planner.plan import Plan, PlanError
from whalejax.planner.schedules import Schedule, schedule
from whalejax.planner.stage_models import places_of, stage_graph
from whalejax.runner import (
    Metrics,
    abstract_state,
    check_compiler_options,
    finished,
    fresh_state,
    laid_out,
    metrics_of,
)
from whalejax.state import Origin, TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole(Program):
    """The program of the whole model, whose parameters lie on several meshes.

    Attributes:
        meshes: of each parameter.
    """

    meshes: tuple[Mesh, ...]

    def constrain(
        self, leaves: Sequence[Any], specs: Sequence[Any], away: Any = ()
    ) -> list[Any]:
        del away
        return [
            jax.lax.with_sharding_constraint(x, named(spec, mesh))
            for x, spec, mesh in zip(leaves, specs, self.meshes, strict=True)
        ]


class Apart:
    """Runs a plan whose stages have programs of their own; see ``runner.Runner``.

    Attributes:
        captured: the loss.
        plans, meshes: of each stage.
        whole: for each stage, the layout of what all its devices hold.
        division: the loss in parts.
        table: who does what when.
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
        if jax.process_count() > 1:
            raise PlanError(
                "the stages of this plan have programs of their own, which run in one "
                f"process so far; here are {jax.process_count()}. Write the layers as "
                "one scan, so that one program can run all stages"
            )
        self._plan = plan
        self._origin = origin
        self.captured = captured
        self._options: Any = dict(plan.compiler_options) or None
        self.plans = plan.stages.plans
        self.meshes = _meshes(self.plans, devices)
        self.whole = [NamedSharding(m, PartitionSpec()) for m in self.meshes]
        check_compiler_options(self._options, self.whole[0], devices[0].platform)
        self.mesh = stages_mesh(plan, devices)
        self.division = _division(plan, captured)
        self._layouts: dict[int, dict[Value, Any]] = {}
        self._handing: dict[tuple[Value, int], NamedSharding] = {}
        self.table: Schedule = schedule(
            plan.stages.schedule,
            len(self.plans),
            plan.num_micro_batches,
            plan.stages.chunks,
        )
        paths = captured.adapter.param_paths
        self._owners = [
            self.division.owner(i, len(self.plans)) for i in range(len(paths))
        ]
        self.program = _Whole(
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
            params=[self._named(i, "param_spec") for i in range(len(paths))],
            followers=[self._named(i, "optimizer_spec") for i in range(len(paths))],
            rest=lambda i: self.whole[self._rest_owner(i)],
            others=self.whole[0],
        )
        self.batch_shardings = tuple(
            named(leaf.spec, self.meshes[self._batch_owner(i)])
            for i, leaf in enumerate(plan.batch)
        )
        self._finish, self._finish_tree = self._finishing()

    # Starting.

    def born(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        whole = fresh_state(self.program, self._origin, build)
        tree: Any = jax.tree.structure(self.shardings)
        shardings = jax.tree.leaves(self.shardings)
        stages = jax.tree.leaves(self._stages)
        found: list[Any] = [None] * len(shardings)
        for stage in range(len(self.plans)):
            own = [i for i, other in enumerate(stages) if other == stage]

            def part(*args: Any, own: Sequence[int] = own) -> list[Any]:
                leaves = jax.tree.leaves(whole(*args))
                return [leaves[i] for i in own]

            places = [shardings[i] for i in own]
            made = jax.jit(part, out_shardings=places)(*arguments)
            for i, leaf in zip(own, made, strict=True):
                found[i] = leaf
        state: TrainState = tree.unflatten(found)
        return state

    def _state(self, **places: Any) -> TrainState:
        return laid_out(self.program, self._origin, **places)

    @functools.cached_property
    def _stages(self) -> TrainState:
        """The stage where each leaf of the state lies."""
        return self._state(
            params=self._owners, followers=self._owners, rest=self._rest_owner, others=0
        )

    def _named(self, number: int, kind: str) -> NamedSharding:
        """A layout of a parameter on its stage."""
        stage = self._owners[number]
        path = self.captured.adapter.param_paths[number]
        return named(getattr(self.leaf(stage, path), kind), self.meshes[stage])

    def leaf(self, stage: int, path: str) -> Any:
        """The plan of a parameter on a stage; what no stage reads lies whole."""
        found = (leaf for leaf in self.plans[stage].leaves if leaf.path == path)
        return next(found, self._plan.leaf(path))

    def _rest_owner(self, number: int) -> int:
        count = len(self.captured.adapter.param_paths)
        found: int = self.division.owner(count + number, len(self.plans))
        return found

    def _batch_owner(self, number: int) -> int:
        adapter = self.captured.adapter
        count = len(adapter.param_paths) + len(jax.tree.leaves(adapter.rest))
        found: int = self.division.owner(count + number, len(self.plans))
        return found

    # Running.

    def advance(
        self, state: TrainState, batch: Sequence[Any]
    ) -> tuple[TrainState, Metrics]:
        run = Pass(self, state, batch)
        for row in self.table.rows:
            run.row(row)
        sums = run.summed()
        rest = run.rest_after()
        leaves = jax.tree.leaves((state, sums, rest))
        found: tuple[TrainState, Metrics] = self._finish_tree.unflatten(
            self._finish(leaves)
        )
        state.step.delete()  # That the state was consumed is seen by it.
        return found

    def evaluate(self, state: TrainState, batch: Sequence[Any]) -> Metrics:
        run = Pass(self, state, batch, keeps=False)
        for number in range(self.table.num_micro_batches):
            for place in range(self.table.num_places):
                run.forward(place, number)
        return self._metrics(run.losses())

    def lower(self, state: TrainState, batch: Sequence[Any]) -> Any:
        raise PlanError(
            "the stages of this plan have programs of their own, so there is no one "
            "program to lower"
        )

    @functools.cached_property
    def _metrics(self) -> Callable[..., Metrics]:
        return jax.jit(functools.partial(metrics_of, self.program))

    # Compiling.

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The places with their programs."""
        units, avals = self.division.units, avals_of(self.captured)
        graph = self.captured.graph
        tensors = {
            v: t
            for unit in units.units
            for v, t in zip(unit.writes, unit.tensors, strict=True)
        }
        facts = Facts(
            units=units,
            avals=avals,
            flows=frozenset(
                v
                for v, t in tensors.items()
                if t is not None and graph.tensors[t].differentiable
            ),
            scales=self._plan.scales_loss,
        )
        found: list[Site] = []
        stages = len(self.plans)
        for stage in range(stages):
            program, layouts = self._program(stage, tensors)
            self._layouts[stage] = layouts
            for place in places_of(stage, stages, self.table.num_chunks):
                made = place_of(
                    program,
                    facts,
                    self.division.parts[place],
                    layouts,
                    last=place == self.table.num_places - 1,
                )
                found.append(
                    site_of(
                        place,
                        stage,
                        made,
                        splits=self.table.splits_backward,
                        options=self._options,
                    )
                )
        return sorted(found, key=lambda site: site.number)

    def _program(
        self, stage: int, tensors: Mapping[Value, int | None]
    ) -> tuple[Program, dict[Value, Any]]:
        """A stage's program, and the layouts of what it is handed and hands on."""
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
    def zeros(self) -> Sequence[Callable[[], tuple[list[Any], list[Any]]]]:
        """For each place, what makes sums and gradients of nothing."""
        found = []
        for site in self.sites:
            steps, names = site.place.steps, site.place.names
            mesh = self.meshes[site.stage]
            paths = self.captured.adapter.param_paths
            leaves = [self.leaf(site.stage, paths[n]) for n in site.place.params]
            avals = [
                [_aval(steps, x) for x in names.sums],
                [_aval(steps, x) for x in names.gradients],
            ]
            places = (
                [self.whole[site.stage]] * len(names.sums),
                [named(leaf.gradient_spec, mesh) for leaf in leaves],
            )

            def nothing(avals: Any = avals) -> Any:
                return tuple(
                    [jnp.zeros(a.shape, a.dtype) for a in several] for several in avals
                )

            found.append(jax.jit(nothing, out_shardings=places))
        return found

    @functools.cached_property
    def numbers(self) -> list[list[Any]]:
        """For each stage, the numbers of the micro-batches."""
        count = self.table.num_micro_batches
        return [
            [jax.device_put(np.int32(m), whole) for m in range(count)]
            for whole in self.whole
        ]

    @functools.cached_property
    def readers(self) -> list[dict[int, list[Value]]]:
        """For each place, what it hands to which other."""
        found: list[dict[int, list[Value]]] = []
        for part in self.division.parts:
            found.append(defaultdict(list))
            for value in part.exports:
                for reader in self.division.readers(value):
                    found[-1][reader].append(value)
        return found

    @functools.cached_property
    def makers(self) -> list[dict[int, list[Value]]]:
        """For each place, whose values it was handed that a gradient flows through."""
        found: list[dict[int, list[Value]]] = []
        for site in self.sites:
            found.append(defaultdict(list))
            for value in site.place.received:
                found[-1][self.division.made_at[value]].append(value)
        return found

    @functools.cached_property
    def _dims(self) -> Dimensions:
        return analyse_graph(self.captured.graph).dims

    @property
    def counters(self) -> Mapping[int, int]:
        """By the number of an input, what a micro-batch adds to it."""
        return self.division.units.counters

    def counted(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Counters after a step.

        Args:
            leaves: as they were before, by number.
        """
        count = self.table.num_micro_batches
        return {n: self._add(x, count * self.counters[n]) for n, x in leaves.items()}

    @functools.cached_property
    def _add(self) -> Callable[..., Any]:
        return jax.jit(lambda x, more: x + jnp.asarray(more, x.dtype))

    @functools.cached_property
    def one(self) -> Any:
        """The cotangent of the loss."""
        last = self.sites[-1].place
        aval = last.steps.avals[last.names.cotangents[-1]]
        return jax.device_put(np.ones((), aval.dtype), self.whole[-1])

    @functools.cached_property
    def gradient_shardings(self) -> list[NamedSharding]:
        """Where the gradient of each parameter is added up."""
        count = len(self.captured.adapter.param_paths)
        return [self._named(i, "gradient_spec") for i in range(count)]

    @functools.cached_property
    def _sum(self) -> Callable[..., Any]:
        return jax.jit(lambda values: functools.reduce(jnp.add, values))

    def total(self, values: Sequence[Any]) -> Any:
        """The sum of arrays on one stage."""
        return values[0] if len(values) == 1 else self._sum(values)

    def no_gradient(self, number: int) -> Any:
        """The gradient of a parameter that nothing reads."""
        params = jax.tree.leaves(abstract_state(self.program, self._origin).params)
        aval = _wide(params[number])
        zeros = np.zeros(aval.shape, aval.dtype)
        return jax.device_put(zeros, self.gradient_shardings[number])

    def batch_sharding(self, stage: int, number: int) -> NamedSharding:
        """Where a leaf of the batch lies on a stage."""
        path = self._plan.batch[number].path
        leaves = (x for x in self.plans[stage].batch if x.path == path)
        return named(next(leaves, self._plan.batch[number]).spec, self.meshes[stage])

    def handing(self, value: Value, place: int) -> NamedSharding:
        """Where a value that places hand each other lies at one of them."""
        stage = place % len(self.plans)
        if (value, stage) not in self._handing:
            spec = self._layouts[stage].get(value, ())
            self._handing[value, stage] = named(spec, self.meshes[stage])
        return self._handing[value, stage]

    def _finishing(self) -> tuple[Parted, Any]:
        """The update, cut by stages, and the structure of what it gives."""
        state = abstract_state(self.program, self._origin)
        body, _ = _compat.open_jaxpr(self.captured.jaxpr)
        results = [_compat.abstract(v.aval.shape, v.aval.dtype) for v in body.outvars]
        *told, _ = self.captured.out_tree.unflatten(results)
        sums: Sums = jax.eval_shape(
            lambda total, weight, metrics: sums_of(
                self.program, total, weight, metrics, ()
            ),
            *told,
        )
        params = jax.tree.leaves(state.params)
        sums = replace(sums, gradients=tuple(_wide(x) for x in params))
        tree: Any
        flat, tree = jax.tree.flatten((state, sums, state.rest))
        shape: Any = None

        def finish(*leaves: Any) -> list[Any]:
            nonlocal shape
            results = finished(self.program, *tree.unflatten(leaves))
            found, shape = jax.tree.flatten(results)
            return list(found)

        steps = Steps.of(jax.make_jaxpr(finish)(*flat))
        end = len(self.plans) - 1
        kinds = self._wheres(end, sums.metrics)
        new = jax.tree.map(
            lambda stage, sharding: Where(owner=stage, stage=stage, sharding=sharding),
            self._stages,
            self.shardings,
        )
        count = shape.num_leaves - len(jax.tree.leaves(new))
        report = Where(owner=end, stage=end, sharding=self.whole[end])
        parted = Parted(
            steps,
            jax.tree.leaves(kinds),
            [*jax.tree.leaves(new), *[report] * count],
            self.whole,
            self._options,
        )
        return parted, shape

    def _wheres(self, end: int, metrics: Any) -> Any:
        """Where the state, the sums and what is not trained lie."""
        owned = [Where(owner=i, stage=i, consumed=True) for i in self._owners]
        kept = [Where(owner=i, stage=i) for i in self._owners]

        def rest(number: int) -> Where:
            stage = self._rest_owner(number)
            return Where(owner=stage, stage=stage)

        state = self._state(
            params=owned,
            followers=owned,
            rest=rest,
            others=Where(owner=None, stage=0),
        )
        told = Where(owner=end, stage=end)
        sums = Sums(
            total=told,
            weight=told,
            metrics=jax.tree.map(lambda _: told, metrics),
            gradients=tuple(kept),
        )
        return state, sums, state.rest


def stages_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """All devices of a plan in stages, each of which has a mesh of its own.

    Args:
        plan: one whose stages have programs of their own.
        devices: in node order.
    """
    together = np.array(devices).reshape(len(plan.apart), -1)
    return Mesh(together, ("stage", "device"))


def _meshes(plans: Sequence[Plan], devices: Sequence[Any]) -> list[Mesh]:
    """The devices of each stage, one after the other."""
    found, first = [], 0
    for plan in plans:
        found.append(plan.mesh(list(devices[first : first + plan.num_devices])))
        first += plan.num_devices
    return found


def _division(plan: Plan, captured: Captured) -> Division:
    """The loss in the parts of a plan."""
    assert plan.stages is not None
    units = units_of(captured)
    if plan.stages.starts:
        return divided(units, plan.stages.starts)
    return divided_by_marks(units, units.labels(captured.graph))


def _aval(steps: Steps, operand: Operand) -> Any:
    if isinstance(operand, Fixed):
        value = jnp.asarray(operand.value)
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    aval = steps.avals[operand]
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _wide(aval: Any) -> Any:
    """A parameter's gradient as it is added up."""
    return jax.eval_shape(wide, aval)
