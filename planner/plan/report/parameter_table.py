"""Makes table rows of a plan's parameters: equal layers merged, with their cost.

All displays of a plan use these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whalejax.planner.cost.optimizer_step import reduced_gradients
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import (
    Collective,
    CollectiveKind,
    LeafPlan,
    starred,
)
from whalejax.planner.sharding.layout import Spec, shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that differ only in their layer's number.

    Attributes:
        label: Path of the parameters; ``×4`` follows if four layers are merged.
        count: Number of parameters.
        leaf: First of the parameters.
        device_bytes: Total bytes of the parameters on one device that stores them.
        collectives: Text of the collectives of each parameter in one step.
    """

    label: str
    count: int
    leaf: LeafPlan
    device_bytes: int
    collectives: str


def parameter_rows(plan: PlanData) -> list[ParameterRow]:
    """Returns a plan's parameters in the model's order, repeated layers merged."""
    stored = homes(plan)
    groups: dict[tuple[object, ...], list[LeafPlan]] = {}
    for leaf in plan.leaves:
        home = stored.get(leaf.path, plan)
        layouts = (leaf.compute_spec, leaf.param_spec, leaf.gradient_spec)
        specs = (*layouts, leaf.optimizer_spec, leaf.summed, leaf.gathers)
        alike = (leaf.shape, leaf.dtype, *specs, leaf.hosted, home.axes)
        groups.setdefault((starred(leaf.path), *alike), []).append(leaf)
    rows = []
    said: dict[tuple[object, ...], str] = {}  # thousands of rows share a text
    for leaves in groups.values():
        leaf, count = leaves[0], len(leaves)
        home = stored.get(leaf.path, plan)
        local = leaf.nbytes // shards(leaf.param_spec, home.axis_sizes)
        layouts = (leaf.compute_spec, leaf.param_spec, leaf.gradient_spec)
        moved = (leaf.optimizer_spec, leaf.summed, leaf.gathers)
        key = (id(home), leaf.nbytes, *layouts, *moved)
        if key not in said:
            said[key] = collective_words(
                collectives_of(home, leaf, unlike=bool(plan.shares)), home
            )
        rows.append(
            ParameterRow(
                label=leaf.path if count == 1 else f"{starred(leaf.path)} ×{count}",
                count=count,
                leaf=leaf,
                device_bytes=local * count,
                collectives=said[key],
            )
        )
    return rows


def homes(plan: PlanData) -> dict[str, PlanData]:
    """Returns the stage's plan that stores each parameter, for stage programs."""
    return {leaf.path: p for p in reversed(plan.stage_plans) for leaf in p.leaves}


def added_axes(before: Spec, after: Spec) -> tuple[str, ...]:
    """Returns the mesh axes that shard a tensor in ``after`` but not in ``before``."""
    old = {axis for axes in before for axis in axes}
    return tuple(axis for axes in after for axis in axes if axis not in old)


def collectives_of(
    plan: PlanData, leaf: LeafPlan, *, unlike: bool = False
) -> tuple[Collective, ...]:
    """Returns a parameter's collectives in one micro-batch and in the update.

    Args:
        plan: Plan of the devices that store the parameter.
        leaf: The parameter.
        unlike: Whether the ranks of ``data`` have unequal shares; default: False.

    Returns:
        Gathers of the parameter and reductions of its gradient, as if it were the only
        parameter. The compiler combines reductions of several parameters over the same
        axes.
    """
    mesh, found = plan.axis_sizes, list[Collective]()
    used = leaf.nbytes // shards(leaf.compute_spec, mesh)
    axes = added_axes(leaf.compute_spec, leaf.param_spec)
    if axes and leaf.gathers:
        found.append(
            _parameter_collective("all-gather", axes, "forward", used, leaf.gathers)
        )
    # Ranks with unequal shares sum their gradients once, after all micro-batches.
    # Adasum exchanges parts of the gradients.
    adasum = plan.combine != "mean"
    last = ("data",) if (unlike or adasum) and "data" in leaf.summed else ()
    summed = tuple(axis for axis in leaf.summed if axis not in last)
    if summed:
        whole = _parameter_collective("all-reduce", summed, "backward", used)
        cut = set(added_axes(leaf.compute_spec, leaf.gradient_spec)) & set(summed)
        parts = reduced_gradients(
            summed,
            used,
            mesh,
            plan.cluster.compiler,
            over_data="data" in cut,
        )
        found += [c for c in parts if c.payload_bytes] if cut else [whole]
    if last:
        kept = leaf.nbytes // shards(leaf.gradient_spec, mesh)
        sent = _parameter_collective("all-reduce", last, "update", kept)
        kinds: tuple[CollectiveKind, ...] = ("all-to-all", "all-gather")
        found += [replace(sent, kind=k) for k in kinds] if adasum else [sent]
    axes = added_axes(leaf.param_spec, leaf.optimizer_spec)
    if axes:
        stored = leaf.nbytes // shards(leaf.param_spec, mesh)
        found.append(_parameter_collective("all-gather", axes, "update", stored))
    return tuple(_as_run(plan, c) for c in found)


def _parameter_collective(
    kind: CollectiveKind,
    axes: tuple[str, ...],
    phase: str,
    nbytes: int,
    count: int = 1,
) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        phase=phase,
        what="parameter" if kind == "all-gather" else "gradient",
        payload_bytes=nbytes,
        count=count,
    )


def _as_run(plan: PlanData, asked: Collective) -> Collective:
    """Returns the collective, with the kind that the plan lists for it."""
    kinds = [
        c.kind
        for c in plan.collectives
        if (c.what, c.axes, c.phase) == (asked.what, asked.axes, asked.phase)
    ]
    return asked if asked.kind in kinds or not kinds else replace(asked, kind=kinds[0])


def collective_words(collectives: Sequence[Collective], plan: PlanData) -> str:
    """Returns a short text on a step's collectives, as ``"2 all-gather over fsdp"``."""
    times: dict[str, int] = {}
    for c in collectives:
        words = f"{c.kind} over {'+'.join(c.axes)}"
        times[words] = times.get(words, 0) + plan.times(c)
    return ", ".join(f"{n} {words}" for words, n in times.items()) or "none"
