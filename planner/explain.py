"""Plans in words: the table that ``print(plan)`` shows, and ``why``.

Plain text with no dependency, so that a plan can be read wherever it can be loaded;
richer displays stand in ``whalejax.show`` and read the same data.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from whalejax.planner.dimensions import Dimensions, starred
from whalejax.planner.graph import Tensor
from whalejax.planner.layout import Spec, shards
from whalejax.planner.terms import chunk_words, own_words, precision_words


if TYPE_CHECKING:
    from whalejax.planner.plan import LeafPlan, Plan


def gigabytes(nbytes: float) -> str:
    """Bytes with three digits and a decimal unit: ``"12.6 MB"``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def milliseconds(seconds: float) -> str:
    """Seconds with three digits, as milliseconds below one: ``"412 ms"``."""
    return f"{seconds:,.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def spec_text(spec: Spec) -> str:
    """A layout as people write it: ``"(data+fsdp, –)"``."""
    return "(" + ", ".join("+".join(axes) or "–" for axes in spec) + ")"


def mesh_words(mesh: Mapping[str, int]) -> str:
    """Axes above size 1 in words: ``"data 2 × tensor 4"``."""
    words = (f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return " × ".join(words) or "one device"


def layout_text(plan: Plan) -> str:
    """Mesh, ZeRO level and micro-batches in one line."""
    words = mesh_words(plan.axis_sizes)
    inner = dict.fromkeys(mesh_words(stage.axis_sizes) for stage in plan.apart)
    if len(inner) > 1:
        words += f" ({' | '.join(inner)})"
    if plan.zero:
        words += f" · ZeRO-{plan.zero} over data"
    parts = plan.num_micro_batches
    words += f" · {parts} micro-batch{'es' if parts > 1 else ''}"
    own = own_words(plan.remat, plan.offload, plan.sequence_parallel, plan.attention)
    own += chunk_words(plan.loss_chunks)
    own += precision_words(plan.precisions, plan.precision)
    own += [plan.stages.words()] if plan.stages else []
    beyond = plan.beyond.words() if plan.beyond else ()
    return " · ".join([words, *own, *beyond])


def leaf_note(
    leaf: LeafPlan, tensor: Tensor, mesh: Mapping[str, int], dims: Dimensions
) -> str:
    """Why ``fsdp`` shards no dimension of a parameter, or an empty text."""
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


def no_such_leaf(plan: Plan, path: str) -> str:
    """Message for a path that no parameter has."""
    paths = [leaf.path for leaf in plan.leaves]
    near = difflib.get_close_matches(path, paths, n=3, cutoff=0.3) or paths[:3]
    return (
        f"no parameter has the path {path!r} (the model has {len(paths)}). "
        f"Nearest: {', '.join(near)}"
    )


def _bar(value: float, total: float, width: int = 24) -> str:
    return "█" * max(1 if value > 0 else 0, round(width * value / max(total, 1e-30)))


def _terms(value: object, suffix: str) -> list[tuple[str, float]]:
    """Non-zero terms of a dataclass, largest first, with short names."""
    assert dataclasses.is_dataclass(value)
    pairs = [
        (f.name.removesuffix(suffix), float(getattr(value, f.name)))
        for f in dataclasses.fields(value)
    ]
    return sorted([p for p in pairs if p[1] > 0], key=lambda p: -p[1])


def table(plan: Plan) -> str:
    """The plan as a table for a terminal."""
    time, memory = plan.time, plan.memory
    step = time.step_seconds
    lines = [f"Plan  {plan.cluster.describe()} · {layout_text(plan)}"]
    terms = ", ".join(f"{n} {milliseconds(s)}" for n, s in _terms(time, "_seconds"))
    lines.append(f"step    {milliseconds(step)} predicted ({terms})")
    terms = ", ".join(f"{n} {gigabytes(b)}" for n, b in _terms(memory, "_bytes"))
    lines.append(
        f"memory  {gigabytes(memory.total_bytes)} of "
        f"{gigabytes(plan.cluster.memory_bytes)} per device predicted ({terms})"
    )
    for region in plan.compute:
        marks = " > ".join(region.marks) or "unmarked"
        axes = "; ".join(f"{a}: {', '.join(r) or '–'}" for a, r in region.axes)
        lines.append(f"compute {region.task_graph} [{marks}]  {axes or 'one device'}")
    lines.append("")
    lines.extend(_leaf_rows(plan))
    lines.append("")
    lines.extend(_collective_rows(plan))
    lines.extend(f"note    {note}" for note in plan.notes)
    lines.extend(_runner_up(plan))
    return "\n".join(lines)


def _leaf_rows(plan: Plan) -> list[str]:
    folded: dict[tuple[str, ...], list[str]] = {}
    for leaf in plan.leaves:
        nbytes = math.prod(leaf.shape) * _itemsize(leaf.dtype)
        local = nbytes // shards(leaf.param_spec, plan.home(leaf.path).axis_sizes)
        shape = "×".join(str(n) for n in leaf.shape) or "scalar"
        row = (starred(leaf.path), shape, spec_text(leaf.param_spec), gigabytes(local))
        folded.setdefault(row, []).append(leaf.path)
    head = ("parameter", "shape", "spec", "per device")
    rows: list[tuple[str, ...]] = [head]
    for (path, *rest), paths in folded.items():
        label = f"{path} ×{len(paths)}" if len(paths) > 1 else paths[0]
        rows.append((label, rest[0], rest[1], rest[2]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _itemsize(dtype: str) -> int:
    import numpy as np

    if dtype == "bfloat16":
        return 2
    return int(np.dtype(dtype).itemsize)


def _collective_rows(plan: Plan) -> list[str]:
    total: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for c in plan.collectives:
        times = plan.times(c)
        key = (c.kind, "+".join(c.axes), c.what)
        total[key] += c.payload_bytes * times
        count[key] += times
    return [
        f"traffic {kind} over {axes} for {what}: {count[kind, axes, what]} a step, "
        f"{gigabytes(total[kind, axes, what])}"
        for kind, axes, what in sorted(total, key=lambda k: -total[k])
    ]


def _runner_up(plan: Plan) -> list[str]:
    others = [c for c in plan.candidates if c.verdict != "chosen"]
    if not others:
        return []
    c = others[0]
    return [
        f"next    {c.layout}: {milliseconds(c.step_seconds)}, "
        f"{gigabytes(c.memory_bytes)} per device; {c.verdict}"
    ]


def why(plan: Plan, leaf: LeafPlan) -> str:
    """Why a parameter is laid out as it is.

    Args:
        plan: the plan.
        leaf: one of its leaves.
    """
    nbytes = math.prod(leaf.shape) * _itemsize(leaf.dtype)
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
    lines.append(
        f"  computed with as {spec_text(leaf.compute_spec)}, stored as "
        f"{spec_text(leaf.param_spec)}, optimizer state as "
        f"{spec_text(leaf.optimizer_spec)}"
    )
    if leaf.hosted:
        lines.append("  lies in host memory: layers come to the device to be read")
    if leaf.note:
        lines.append(f"  whole because {leaf.note}")
    if home is not plan:
        lines.append(f"  lies on stage {plan.apart.index(home)}")
    lines.append("  plans that were weighed:")
    for c in plan.candidates:
        lines.append(
            f"    {c.layout}: {milliseconds(c.step_seconds)}, "
            f"{gigabytes(c.memory_bytes)} per device; {c.verdict}"
        )
    return "\n".join(lines)


def _why_dim(
    plan: Plan,
    leaf: LeafPlan,
    dim: int,
    names: tuple[str, ...],
    roles: Mapping[str, object],
) -> str:
    label = " × ".join(names) or "size 1"
    compute, stored = leaf.compute_spec[dim], leaf.param_spec[dim]
    reasons = []
    homes = _homes(plan, compute, names)
    if homes:
        reasons.append(
            f"computed in shards over {'+'.join(compute)} in {', '.join(homes)}"
        )
    elif compute == ("stage",):
        reasons.append("shared out among the stages")
    elif compute:
        reasons.append(
            f"in shards over {'+'.join(compute)} until it is used, then exchanged for "
            "shards of what is fused"
        )
    for part in names[1:]:
        for axis in (a for a, n in plan.axes if n > 1 and a not in compute):
            homes = _homes(plan, (axis,), (part,))
            if homes:
                reasons.append(
                    f"{part} is computed in shards over {axis} in {', '.join(homes)}, "
                    "and no PartitionSpec can name it here"
                )
    added = [a for a in stored if a not in compute]
    if added:
        use = "exchanged for layers" if "stage" in added else "gathered for use"
        reasons.append(f"stored in shards over {'+'.join(added)}, {use}")
    if not reasons:
        reasons.append(_whole_reason(plan, leaf, dim, names, roles))
    return f"  dim {dim} is {label} ({leaf.shape[dim]}): {'; '.join(reasons)}"


def _homes(plan: Plan, axes: Sequence[str], names: Sequence[str]) -> list[str]:
    """TaskGraphs that shard a dimension of these names over some of the axes."""
    return [
        r.task_graph
        for r in plan.compute
        if any(a in axes and set(n) & set(names) for a, n in r.axes)
    ]


def _whole_reason(
    plan: Plan,
    leaf: LeafPlan,
    dim: int,
    names: tuple[str, ...],
    roles: Mapping[str, object],
) -> str:
    role = roles.get(names[0]) if names else None
    blocked = getattr(role, "unshardable", "")
    if blocked:
        return f"whole: {blocked}"
    model = [(a, n) for a, n in plan.axes if a in ("fsdp", "expert", "tensor")]
    if not model:
        return "whole: no axis of this mesh shards parameters (only data)"
    failing = [(a, n) for a, n in model if leaf.shape[dim] % n]
    if failing:
        return "whole: " + ", ".join(
            f"{a} {n} does not divide {leaf.shape[dim]}" for a, n in failing
        )
    return "whole: another dimension of it, or a cheaper one, took the axis"
