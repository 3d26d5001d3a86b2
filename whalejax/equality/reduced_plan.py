"""Makes a plan for a reduced model, with the layouts and options of the model's plan.

Layouts name logical dimensions and mesh axes, so they are valid at other sizes. Names
that contain a size, such as ``dim64``, are matched by the dimension's position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from whalejax.capture.batch import aval_of
from whalejax.equality.check_errors import CheckError
from whalejax.equality.mesh_reduction import MeshReduction
from whalejax.equality.reduced_model import PlannedModel, ReducedModel
from whalejax.equality.role_sizes import layer_roles
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import Layout
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import BatchLeaf, LeafPlan, RegionTable, RoleInfo


def reduced_plan(
    plan: Plan, model: PlannedModel, reduced: ReducedModel, mesh: MeshReduction
) -> Plan:
    """Returns the plan of a reduced model.

    Args:
        plan: Plan of the original model.
        model: Model at its own sizes.
        reduced: Model at reduced sizes.
        mesh: Reduced numbers of devices, micro-batches and layers.

    Raises:
        CheckError: The reduced model lacks a dimension or TaskGraph of the plan, or its
            number of layers is not that of the stages.
    """
    small = reduced.planned
    names = _names(plan, model, small)
    _check_task_graphs(plan, model, small)
    _check_layers(small, mesh)
    leaves = jax.tree.leaves((small.adapter.params, small.adapter.rest))
    paths = (*small.adapter.param_paths, *small.adapter.rest_paths)
    avals = dict(zip(paths, map(aval_of, leaves), strict=True))
    batch = list(map(aval_of, jax.tree.leaves(small.batch)))
    builder = _Builder(
        mesh=mesh,
        avals=avals,
        batch={leaf.path: x for leaf, x in zip(plan.batch, batch, strict=True)},
        names=names,
        roles=tuple(
            RoleInfo(name=r.name, size=r.size) for r in small.analysed.dims.roles
        ),
        model_hash=small.captured.graph.model_hash,
    )
    return builder.plan(plan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    mesh: MeshReduction
    avals: Mapping[str, Any]
    batch: Mapping[str, Any]
    names: Mapping[str, str]
    roles: tuple[RoleInfo, ...]
    model_hash: str

    def plan(self, plan: Plan) -> Plan:
        mesh, stages = self.mesh, plan.stages
        axes = mesh.axes(plan.axes)
        if stages is not None:
            plans = tuple(self.plan(stage) for stage in stages.plans)
            layers = mesh.stage_layers or stages.layers
            stages = dataclasses.replace(stages, plans=plans, layers=layers)
        shares = mesh.shares if plan.shares else ()
        kept = mesh.ranks if plan.pipelines else ()
        if shares:
            axes = tuple((a, len(shares) if a == "data" else n) for a, n in axes)
        hosts = "device_order" if axes == plan.axes else ""
        result = dataclasses.replace(
            plan,
            axes=axes,
            device_order=plan.device_order if hosts else (),
            num_micro_batches=mesh.num_micro_batches,
            shares=shares,
            stages=stages,
            pipelines=tuple(self.plan(plan.pipelines[rank]) for rank in kept),
            leaves=tuple(self._leaf(leaf) for leaf in plan.leaves),
            batch=tuple(self._batch_leaf(leaf) for leaf in plan.batch),
            roles=self.roles,
            compute=tuple(self._table(table) for table in plan.compute),
            storage=self._renamed(plan.storage),
            model_hash=self.model_hash,
            # Samples were proven independent at full size. A resized program may
            # contain constants of the full model, so it is not checked again.
            per_micro_batch=True,
            optimizer_bytes=None,
            question=None,
        )
        return result

    def _leaf(self, leaf: LeafPlan) -> LeafPlan:
        aval = self.avals[leaf.path]
        return dataclasses.replace(leaf, shape=tuple(aval.shape), dtype=str(aval.dtype))

    def _batch_leaf(self, leaf: BatchLeaf) -> BatchLeaf:
        aval = self.batch.get(leaf.path)
        if aval is None:
            return leaf
        return dataclasses.replace(leaf, shape=tuple(aval.shape), dtype=str(aval.dtype))

    def _table(self, table: RegionTable) -> RegionTable:
        return dataclasses.replace(table, axes=self._renamed(table.axes))

    def _renamed(
        self, axes: Sequence[tuple[str, tuple[str, ...]]]
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple(
            (axis, tuple(self.names.get(name, name) for name in roles))
            for axis, roles in axes
        )


def _names(plan: Plan, model: PlannedModel, small: PlannedModel) -> dict[str, str]:
    full, now = model.analysed.dims, small.analysed.dims
    places = _places(model, small)
    tables = [axes for table in plan.compute for axes in table.axes]
    used = {name for _, names in (*tables, *plan.storage) for name in names}
    result: dict[str, str] = {}
    for name in sorted(used):
        role = full.find(name)
        if role is None:
            continue
        there = places.get(role.index)
        again = now.find(name)
        if there is None:
            if again is None and role.size > 1:
                raise CheckError(
                    f"the reduced model lacks the dimension {name} of size "
                    f"{role.size}, which the plan shards"
                )
        elif again is None or again.index != there:
            result[name] = now.roles[there].name
    return result


def _places(model: PlannedModel, small: PlannedModel) -> dict[int, int]:
    """Maps roles of a model to roles at the same positions of the reduced model.

    Positions are those in parameters and in the batch, then those in operations of a
    kind that both programs have equally often.
    """
    full, now = model.analysed, small.analysed
    places: dict[int, int] = {}

    def pair(one: Layout, other: Layout) -> None:
        if len(one) != len(other):
            return
        for atoms, others in zip(one, other, strict=True):
            if len(atoms) == len(others):
                for role, there in zip(atoms, others, strict=True):
                    places.setdefault(role, there)

    inputs = ("param", "state", "batch")
    for tensor in full.graph.tensors:
        if tensor.kind in inputs and tensor.id < len(now.graph.tensors):
            pair(full.dims.layouts[tensor.id], now.dims.layouts[tensor.id])
    again = _by_kind(now)
    for kind, indices in _by_kind(full).items():
        if len(again.get(kind, ())) == len(indices):
            for one, other in zip(indices, again[kind], strict=True):
                for before, after in zip(
                    _layouts(full, one), _layouts(now, other), strict=False
                ):
                    pair(before, after)
    return places


def _by_kind(analysed: GraphAnalysis) -> dict[str, list[int]]:
    kind: dict[str, list[int]] = {"dot_general": []}
    for index, op in enumerate(analysed.graph.ops):
        kind.setdefault(op.kind, []).append(index)
    return kind


def _layouts(analysed: GraphAnalysis, index: int) -> list[Layout]:
    op, dims = analysed.graph.ops[index], analysed.dims
    slots = enumerate((*op.operands, *op.results))
    return [dims.seen.get((index, slot), dims.layouts[t]) for slot, t in slots]


def _check_layers(small: PlannedModel, mesh: MeshReduction) -> None:
    graph, dims = small.analysed.graph, small.analysed.dims
    counts = {dims.roles[role].size for role in layer_roles(graph, dims)}
    wanted = sum(mesh.stage_layers)
    if wanted and counts != {wanted}:
        raise CheckError(
            f"the stages have {wanted} layers, but the model has "
            f"{', '.join(map(str, sorted(counts))) or 'no'} layers"
        )


def _check_task_graphs(plan: Plan, model: PlannedModel, small: PlannedModel) -> None:
    """Checks that the reduced model has the TaskGraphs of the plan."""
    full = {g.name for g in model.analysed.graph.task_graphs}
    now = {g.name for g in small.analysed.graph.task_graphs}
    lost = sorted(full - now) if plan.stages is None else []
    if lost:
        raise CheckError(f"the reduced model lacks the TaskGraphs {', '.join(lost)}")
