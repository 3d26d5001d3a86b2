"""Explains plans in text: sizes, layouts, and the reasons for a layout or a plan.

The module needs no JAX. ``plan_page`` combines its texts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.cost_terms import precision_words
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Tensor
from whalejax.planner.plan.report.parameter_table import homes
from whalejax.planner.plan.report.table_text import tables_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Candidate, LeafPlan, starred
from whalejax.planner.sharding.layout import STAGE, Spec, shards
from whalejax.planner.step_options import option_words


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape as text: ``"4096×512"``, or ``"scalar"``."""
    return "×".join(map(str, shape)) or "scalar"


def spec_text(spec: Spec) -> str:
    """Returns a layout as text: ``"(data+fsdp, –)"``."""
    return "(" + ", ".join("+".join(axes) or "–" for axes in spec) + ")"


def mesh_words(mesh: Mapping[str, int]) -> str:
    """Returns the axes of size above 1 as text: ``"data 2 × tensor 4"``."""
    words = (f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return " × ".join(words) or "one device"


def named_axes(plan: PlanData) -> dict[str, str]:
    """Returns the text of each axis of size above 1, such as ``"fsdp 8"``.

    An axis ``tensor`` that shards no weight is ``"data 8 (named tensor)"`` if it shards
    only the batch, else ``"tensor 8 (shards no parameter)"``.
    """
    return {
        axis: f"{axis} {size}"
        if axis != "tensor" or plan.stage_plans or sharded_bytes(plan, axis)
        else f"data {size} (named tensor)"
        if only_shards_batch(plan, axis)
        else f"tensor {size} (shards no parameter)"
        for axis, size in plan.axis_sizes.items()
        if size > 1
    }


def only_shards_batch(plan: PlanData, axis: str) -> bool:
    """Returns whether a mesh axis shards only samples, and no other dimension."""
    roles = {
        role
        for region in plan.compute
        for name, names in region.axes
        if name == axis
        for role in names
    }
    return roles == {"batch"} and not sharded_bytes(plan, axis)


def sharded_bytes(plan: PlanData, axis: str) -> int:
    """Returns the total bytes of the parameters that a mesh axis shards."""
    return sum(
        leaf.nbytes
        for leaf in plan.leaves
        if any(axis in axes for axes in (*leaf.param_spec, *leaf.compute_spec))
    )


def layout_text(plan: PlanData) -> str:
    """Returns mesh, ZeRO stage, micro-batches, options and pipeline in one line."""
    words = " × ".join(named_axes(plan).values()) or "one device"
    inner = dict.fromkeys(mesh_words(stage.axis_sizes) for stage in plan.stage_plans)
    if len(inner) > 1:
        words += f" ({' | '.join(inner)})"
    if plan.zero and any("data" in p.axis_sizes for p in (plan, *plan.stage_plans)):
        words += f" · ZeRO-{plan.zero} over data"
    parts = plan.num_micro_batches
    words += f" · {parts} micro-batch{'es' if parts > 1 else ''}"
    if idle := plan.shares.count(0):
        each = plan.num_devices // len(plan.shares)
        words += f" · {idle * each} of {plan.num_devices} devices idle"
    own = option_words(plan, plan.axis_sizes)
    own += precision_words(plan.precisions, plan.precision)
    own += pipeline_words(plan)
    beyond = plan.beyond.words() if plan.beyond else ()
    return " · ".join([words, *own, *beyond])


def pipeline_words(plan: PlanData) -> list[str]:
    """Returns the text of a plan's pipeline, or of each if pipelines differ."""
    each = [one.stages.words() for one in plan.pipelines or (plan,) if one.stages]
    if len(set(each)) < 2:
        return each[:1]
    return [f"pipeline {number}: {words}" for number, words in enumerate(each)]


NOT_READ: Final = "the loss does not read it"
"""Note of a parameter that has no effect on the loss."""


def leaf_note(
    leaf: LeafPlan, tensor: Tensor, mesh: Mapping[str, int], dims: Dimensions
) -> str:
    """Returns why ``fsdp`` shards no dimension of a parameter, or an empty text."""
    if mesh["fsdp"] == 1 or any("fsdp" in axes for axes in leaf.param_spec):
        return ""
    reasons = []
    for dim, names in enumerate(leaf.roles):
        if not names:
            continue
        role = dims.find(names[0])
        size = tensor.shape[dim]
        label = f"dim {dim} ({names[0]}, {size})"
        if role is not None and role.unshardable:
            reasons.append(f"{label}: {role.unshardable}")
            continue
        axes = (*leaf.param_spec[dim], "fsdp")
        divisor = " × ".join(f"{axis} {mesh[axis]}" for axis in axes)
        reasons.append(f"{label}: {divisor} does not divide it")
    return "; ".join(reasons)


def whole_reasons(plan: PlanData) -> list[tuple[str, list[LeafPlan]]]:
    """Returns the parameters that no axis shards, by reason, most bytes first."""
    found: dict[str, list[LeafPlan]] = {}
    own = homes(plan)
    for leaf in plan.leaves:
        if not any(leaf.param_spec):
            home = own.get(leaf.path, plan)
            reason = _whole_leaf(home, leaf, alone=home is plan)
            found.setdefault(reason, []).append(leaf)
    return sorted(found.items(), key=lambda pair: -sum(leaf.nbytes for leaf in pair[1]))


def whole_dimensions(plan: PlanData) -> list[str]:
    """Returns texts on logical dimensions that cannot be sharded, with the reasons."""
    shared_out = {
        names[0]
        for leaf in plan.leaves
        for names, axes in zip(leaf.roles, leaf.compute_spec, strict=True)
        if names and STAGE in axes
    }
    for part in plan.stage_plans or (plan,):
        for region in part.compute:
            shared_out.update(name for _, roles in region.axes for name in roles)
    return [
        f"{role.name} ({role.size}): {role.unshardable}"
        for role in plan.roles
        if role.unshardable and role.name not in shared_out
    ]


def _whole_leaf(home: PlanData, leaf: LeafPlan, *, alone: bool) -> str:
    """Returns the reasons why no dimension of a parameter is sharded, each once.

    ``alone`` is False if ``home`` is the plan of one stage.
    """
    if not home.axes:
        return "there is one device" if alone else "its stage is one device"
    if leaf.note:
        return leaf.note
    roles = {r.name: r for r in home.roles}
    reasons = [
        _whole_reason(home, leaf, dim, names, roles).removeprefix("whole: ")
        for dim, names in enumerate(leaf.roles)
    ]
    return "; ".join(dict.fromkeys(reasons)) or "it is a single number"


def why(plan: PlanData, leaf: LeafPlan) -> str:
    """Returns the text that explains a parameter's layout.

    Args:
        plan: The plan.
        leaf: One of its leaves.
    """
    nbytes = leaf.nbytes
    home = plan.home(leaf.path)
    mesh = home.axis_sizes
    lines = [
        f"{leaf.path}  {'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}, "
        f"{gigabytes(nbytes)}, "
        f"{gigabytes(nbytes // shards(leaf.param_spec, mesh))} per device"
    ]
    roles = {r.name: r for r in home.roles}
    for dim, names in enumerate(leaf.roles):
        lines.append(_why_dim(home, leaf, dim, names, roles))
    state = f"optimizer state as {spec_text(leaf.optimizer_spec)}"
    if not leaf.trained:
        state = "not trained: without gradient and optimizer state"
    lines.append(
        f"  computed with as {spec_text(leaf.compute_spec)}, stored as "
        f"{spec_text(leaf.param_spec)}, {state}"
    )
    if leaf.hosted:
        lines.append("  is in host memory: layers come to the device to be read")
    if leaf.note and leaf.note != NOT_READ:
        lines.append(f"  whole because {leaf.note}")
    if home is not plan:
        lines.append(f"  lies on {_stage_words(plan, leaf.path)}")
        lines += _readers(plan, leaf.path)
    lines.append("  plans that were evaluated:")
    lines += [f"    {candidate}" for candidate in plan.candidates]
    return "\n".join(lines)


def _readers(plan: PlanData, path: str) -> list[str]:
    back = ", and gives its gradient back" if plan.leaf(path).trained else ""
    found = dict.fromkeys(
        f"  stage {stage} reads it too: once in a step it is given a copy{back}"
        for one in plan.pipelines or (plan,)
        for stage, own in enumerate(one.stage_plans)
        if own is not one.home(path) and any(leaf.path == path for leaf in own.leaves)
    )
    return [*found]


def _stage_words(plan: PlanData, path: str) -> str:
    each = [one.stage_plans.index(one.home(path)) for one in plan.pipelines or (plan,)]
    if len(set(each)) == 1:
        return f"stage {each[0]}"
    words = [f"stage {stage} of pipeline {r}" for r, stage in enumerate(each)]
    return " and ".join(words)


def _why_dim(
    plan: PlanData,
    leaf: LeafPlan,
    dim: int,
    names: tuple[str, ...],
    roles: Mapping[str, object],
) -> str:
    label = " × ".join(names) or "size 1"
    compute, stored = leaf.compute_spec[dim], leaf.param_spec[dim]
    reasons = []
    there = _homes(plan, compute, names)
    if there:
        reasons.append(
            f"computed in shards over {'+'.join(compute)} in {', '.join(there)}"
        )
    elif compute == ("stage",):
        reasons.append("divided among the stages")
    elif compute:
        reasons.append(
            f"in shards over {'+'.join(compute)} until it is used, then exchanged for "
            "shards of the fused dimension"
        )
    for part in names[1:]:
        for axis in (a for a, n in plan.axes if n > 1 and a not in compute):
            there = _homes(plan, (axis,), (part,))
            if there:
                reasons.append(
                    f"{part} is computed in shards over {axis} in {', '.join(there)}, "
                    "and no PartitionSpec can name it here"
                )
    added = [a for a in stored if a not in compute]
    if added:
        use = "exchanged for layers" if "stage" in added else "gathered for use"
        reasons.append(f"stored in shards over {'+'.join(added)}, {use}")
    if not reasons:
        reasons.append(_whole_reason(plan, leaf, dim, names, roles))
    return f"  dim {dim} is {label} ({leaf.shape[dim]}): {'; '.join(reasons)}"


def _homes(plan: PlanData, axes: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the TaskGraphs that shard one of these dimensions over an axis."""
    return [
        r.task_graph
        for r in plan.compute
        if any(a in axes and set(n) & set(names) for a, n in r.axes)
    ]


def _whole_reason(
    plan: PlanData,
    leaf: LeafPlan,
    dim: int,
    names: tuple[str, ...],
    roles: Mapping[str, object],
) -> str:
    if leaf.note == NOT_READ:
        return f"whole: {NOT_READ}"
    role = roles.get(names[0]) if names else None
    blocked = getattr(role, "unshardable", "")
    if blocked:
        return f"whole: {blocked}"
    model = [(a, n) for a, n in plan.axes if a in ("fsdp", "expert", "tensor")]
    if not model:
        others = " and ".join(axis for axis, _ in plan.axes)
        rest = f" (only {others})" if others else ""
        return f"whole: no axis of this mesh shards parameters{rest}"
    failing = [(a, n) for a, n in model if leaf.shape[dim] % n]
    if failing:
        return "whole: " + ", ".join(
            f"{a} {n} does not divide {leaf.shape[dim]}" for a, n in failing
        )
    if not {a for a, _ in model} & {a for axes in leaf.param_spec for a in axes}:
        axes = " and ".join(axis for axis, _ in model)
        one = len(model) == 1
        return f"whole: where it is read, {axes} shard{'s' * one} other dimensions"
    return "whole: another dimension of it, or a cheaper one, took the axis"


def explain(plan: PlanData) -> str:
    """Returns the text that explains a plan: terms, other plans, dimensions."""
    spare = plan.room_bytes - plan.memory.total_bytes
    tables = tables_text(plan)
    lines = [
        *(f"whole: {tables}".splitlines() if tables else ()),
        f"chosen: {layout_text(plan)}: {milliseconds(plan.time.step_seconds)} a step, "
        f"{gigabytes(plan.memory.total_bytes)} per device, {gigabytes(spare)} to spare",
    ]
    other = plan.runner_up
    if other is None:
        several = len(plan.candidates) > 1
        lines.append(
            "no other layout that was evaluated fits"
            if several
            else "no other layout is listed beside it"
            if plan.stage_plans or plan.pipelines
            else "no other layout was evaluated: all that was asked for leaves this one"
        )
    else:
        lines += _against(plan, other)
    lines += filter(None, [gap_words(plan)])
    refused = [c for c in plan.candidates if not c.fits]
    for c in refused[:3]:
        lines.append(f"too large: {c.layout}: {c.verdict}")
    lines += _held_whole(plan)
    lines += [f"note: {text}" for text in plan.notes]
    return "\n".join(lines)


def gap_words(plan: PlanData) -> str:
    """Returns the text on the gain of other one-program plans; empty if unknown."""
    if plan.gap is None:
        return ""
    if plan.gap < 5e-5:
        return "no other plan of one program is faster"
    return f"no other plan of one program can be more than {plan.gap:.2%} faster"


def _against(plan: PlanData, other: Candidate) -> list[str]:
    """Returns texts on the runner-up, and on what would reverse the choice."""
    slower = other.step_seconds - plan.time.step_seconds
    lines = [f"runner-up: {other}"]
    differences = {
        f.name.removesuffix("_seconds"): getattr(other.time, f.name)
        - getattr(plan.time, f.name)
        for f in dataclasses.fields(plan.time)
    }
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))
    words = [
        f"{name} {'+' if seconds > 0 else '−'}{milliseconds(abs(seconds))}"
        for name, seconds in largest
        if abs(seconds) > 0.02 * max(abs(s) for s in differences.values())
    ]
    if words:
        lines.append(f"  its terms beside the chosen plan's: {', '.join(words)}")
    name, loss = max(differences.items(), key=lambda item: item[1])
    if slower > 0 and loss > 0:
        spent = getattr(other.time, f"{name}_seconds")
        lines.append(
            f"  it would be as fast if its {name}, {milliseconds(spent)}, took "
            f"{milliseconds(slower)} less"
            if spent > slower
            else f"  its {name} alone cannot make up for {milliseconds(slower)}"
        )
    return lines


def _held_whole(plan: PlanData) -> list[str]:
    held: Counter[str] = Counter()
    for leaf in plan.leaves:
        if leaf.note:
            held[f"{starred(leaf.path)}: {leaf.note}"] += 1
    return [f"whole: {text}" for text in (*held, *whole_dimensions(plan))]
