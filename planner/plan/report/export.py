"""A plan in the words of other systems: Flax's rules, MaxText's flags.

Both are poorer than a plan. What they cannot say is refused, not left out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.plan.report.logical_names import logical_names
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES, STAGE, Spec


Rules = tuple[tuple[str, tuple[str, ...] | None], ...]
"""Dimensions by name, and the mesh axes that shard them."""


def flax_rules(plan: PlanData) -> Rules:
    """Logical dimensions and the mesh axes that shard them.

    A table of rules has one entry for each dimension, for activations and parameters
    alike, and the first that finds its axis free counts. Dimensions that the
    computation shards stand first, so that activations get theirs; then those that
    ``fsdp`` shards in storage, and stacked layers, which ``stage`` shares out.

    Raises:
        PlanError: two regions, or computation and storage, want different axes; or
            some parameter would lie otherwise than the plan says; or devices take
            unequal shares.
    """
    _check_one_layout(plan, "a table of rules")
    wanted: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for region in plan.compute:
        axes: dict[str, tuple[str, ...]] = {}
        for axis, roles in region.axes:
            for role in roles:
                axes[role] = (*axes.get(role, ()), axis)
        for role, found in axes.items():
            wanted[role][found].append(region.task_graph)
    for leaf in plan.leaves:
        for names, compute, stored in zip(
            leaf.roles, leaf.compute_spec, leaf.param_spec, strict=True
        ):
            if names and (stored != compute or STAGE in stored):
                places = wanted[names[0]][stored]
                if "storage" not in places:
                    places.append("storage")
    problems = Problems("a table of rules cannot say this plan", PlanError)
    for role, meanings in wanted.items():
        if len(meanings) > 1:
            listed = "; ".join(
                f"{'+'.join(axes)} in {', '.join(places)}"
                for axes, places in meanings.items()
            )
            problems.add(f"{role} is sharded over {listed}. Use plan.partition_specs()")
    problems.raise_if_any()
    axes_of = {role: next(iter(meanings)) for role, meanings in wanted.items()}
    computed = {role for role, m in wanted.items() if ["storage"] not in m.values()}
    order = [role.name for role in plan.roles]
    order.sort(key=lambda name: name not in computed)
    rules = tuple((name, axes_of.get(name)) for name in _before(plan, axes_of, order))
    for leaf in plan.leaves:
        names = _names(leaf)
        if (by_rules := _by_rules(names, rules)) != leaf.param_spec:
            problems.add(
                f"{leaf.path} {names} would be stored as {by_rules}, not as "
                f"{leaf.param_spec}. Use plan.partition_specs()"
            )
    problems.raise_if_any()
    called = logical_names(plan)
    return tuple((called[name], axes) for name, axes in rules)


def logical_axes(plan: PlanData) -> dict[str, tuple[str | None, ...]]:
    """Names of the dimensions of every parameter, as rules have them, by its path.

    >>> import jax, jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"up": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    >>> plan = wh.plan(lambda net, x: (x @ net["up"]).mean(), net, x,
    ...                cluster="h100:8")
    >>> logical_axes(plan)
    {'up': ('up_0', 'mlp')}
    """
    called = logical_names(plan)
    return {
        leaf.path: tuple(called.get(name) if name else None for name in _names(leaf))
        for leaf in plan.leaves
    }


def _names(leaf: LeafPlan) -> tuple[str, ...]:
    """One name for each dimension."""
    return tuple(names[0] if names else "" for names in leaf.roles)


def _by_rules(names: Sequence[str], rules: Rules) -> Spec:
    """The layout that Flax gives an array of these dimensions."""
    found: list[tuple[str, ...]] = [() for _ in names]
    done = [False for _ in names]
    for name, axes in rules:
        place = names.index(name) if name in names else None
        free = not set(axes or ()) & {a for given in found for a in given}
        if place is not None and free and not done[place]:
            found[place], done[place] = axes or (), True
    return tuple(found)


def _before(
    plan: PlanData, axes_of: Mapping[str, tuple[str, ...]], order: Sequence[str]
) -> list[str]:
    """The names in an order in which each parameter's sharded ones stand first.

    Where no order serves all parameters, some of those it cannot serve stand as given.
    """
    after: dict[str, set[str]] = {name: set() for name in order}
    for leaf in plan.leaves:
        names = _names(leaf)
        layout = [*zip(names, map(set, leaf.param_spec), strict=True)]
        for (name, axes), (other, others) in itertools.permutations(layout, 2):
            wished = set(axes_of.get(other, ()))
            if other and wished & axes and wished != others:
                after[other].add(name)
    found: list[str] = []
    waiting = list(order)
    while waiting:
        ready = (n for n in waiting if not after[n].difference(found))
        found.append(waiting.pop(waiting.index(next(ready, waiting[0]))))
    return found


def maxtext_flags(plan: PlanData) -> dict[str, int]:
    """Degrees inside a slice or node (``ici``) and between them (``dcn``).

    Axes of size 1 are left out; MaxText takes them as 1.

    Raises:
        PlanError: MaxText has no flags for it: stages with layouts of their own,
            unequal shares, or ``tensor`` sharding the batch in a part of the model.
    """
    _check_one_layout(plan, "MaxText's flags")
    if any("tensor" in axes for leaf in plan.batch for axes in leaf.spec[:1]):
        raise PlanError(
            "tensor shards the batch in a part of the model under this plan, which "
            "MaxText's tensor axis does not. Fix the mesh, as in mesh={'tensor': 1}"
        )
    sizes = {axis: 1 for axis in MESH_AXES} | plan.axis_sizes
    flags: dict[str, int] = {}
    for axis in MESH_AXES:
        word = "pipeline" if axis == STAGE else axis
        parts = axis_parts((axis,), sizes, plan.cluster)
        between = math.prod(p.size for p in parts if p.level == _network(plan.cluster))
        inside = math.prod(p.size for p in parts) // between
        for prefix, degree in (("ici", inside), ("dcn", between)):
            if degree > 1:
                flags[f"{prefix}_{word}_parallelism"] = degree
    return flags


def _check_one_layout(plan: PlanData, form: str) -> None:
    """Refuse stages that are models of their own, and devices with unlike shares."""
    if plan.stage_plans:
        raise PlanError(
            "the stages of this plan have layouts of their own, which no one table or "
            "mesh says. Export each of plan.stages.plans"
        )
    if plan.shares or plan.pipelines:
        raise PlanError(
            "unlike devices take unequal shares of the batch under this plan, and "
            f"{form} cannot say that. Plan for devices of one kind"
        )


def _network(cluster: Cluster) -> object:
    """The level between slices or nodes, or None where all is one."""
    outermost = cluster.levels[-1]
    if len(cluster.nodes) == 1 or outermost.torus:
        return None
    return outermost
