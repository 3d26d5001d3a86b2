"""A plan in the words of other systems: Flax's rules, MaxText's flags.

Both are poorer than a plan. What they cannot say is refused, not left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.problems import Problems
from whalejax.planner.collectives import axis_parts
from whalejax.planner.layout import MESH_AXES, STAGE


if TYPE_CHECKING:
    from whalejax.planner.plan import Plan

MAXTEXT = {
    "stage": "pipeline",
    "data": "data",
    "fsdp": "fsdp",
    "expert": "expert",
    "context": "context",
    "tensor": "tensor",
}
"""Our mesh axes and the word that MaxText's flags have for them."""


def flax_rules(plan: Plan) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Logical dimensions and the mesh axes that shard them.

    A table of rules has one entry for each dimension, for activations and parameters
    alike. Parameters that ``fsdp`` stores in shards are named by the dimension that it
    shards, which no activation may be sharded over at the same time; stacked layers by
    theirs, which ``stage`` shares out.

    Raises:
        PlanError: two regions, or computation and storage, want different axes.
    """
    from whalejax.planner.plan import PlanError

    _check_alike(plan)
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
    return tuple(
        (
            role.name,
            next(iter(wanted[role.name]), None) if role.name in wanted else None,
        )
        for role in plan.roles
    )


def maxtext_flags(plan: Plan) -> dict[str, int]:
    """Degrees inside a slice or node (``ici``) and between them (``dcn``).

    Axes of size 1 are left out; MaxText takes them as 1.

    Raises:
        PlanError: MaxText has no flags for it: stages with layouts of their own,
            unequal shares, or ``tensor`` sharding the batch in a part of the model.
    """
    from whalejax.planner.plan import PlanError

    _check_alike(plan)
    if plan.shares or plan.pipelines:
        raise PlanError(
            "unlike devices take unequal shares of the batch under this plan, and "
            "MaxText has no flag for that. Plan for devices of one kind"
        )
    if any("tensor" in axes for leaf in plan.batch for axes in leaf.spec[:1]):
        raise PlanError(
            "tensor shards the batch in a part of the model under this plan, which "
            "MaxText's tensor axis does not. Fix the mesh, as in mesh={'tensor': 1}"
        )
    sizes = {axis: 1 for axis in MESH_AXES} | plan.axis_sizes
    flags: dict[str, int] = {}
    for axis, word in MAXTEXT.items():
        parts = axis_parts((axis,), sizes, plan.cluster)
        between = math.prod(p.size for p in parts if p.level == _network(plan.cluster))
        inside = math.prod(p.size for p in parts) // between
        for prefix, degree in (("ici", inside), ("dcn", between)):
            if degree > 1:
                flags[f"{prefix}_{word}_parallelism"] = degree
    return flags


def _check_alike(plan: Plan) -> None:
    """Refuse plans whose stages are models of their own."""
    from whalejax.planner.plan import PlanError

    if plan.apart:
        raise PlanError(
            "the stages of this plan have layouts of their own, which no one table or "
            "mesh says. Export each of plan.stages.plans"
        )


def _network(cluster: Cluster) -> object:
    """The level between slices or nodes, or None where all is one."""
    outermost = cluster.levels[-1]
    if len(cluster.nodes) == 1 or outermost.torus:
        return None
    return outermost
