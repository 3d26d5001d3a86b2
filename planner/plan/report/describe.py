"""Describes a plan in the terms of surveys of distributed training.

The aspects follow two surveys: what is parallel (data, operators, layers), which parts
are synchronous, and what is exchanged over which topology (Ben-Nun and Hoefler,
"Demystifying Parallel and Distributed Deep Learning", 2019, sections 4-6; Mayer and
Jacobsen, "Scalable Deep Learning on Distributed Infrastructures", 2020, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.plan.report.plan_page import page_width
from whalejax.planner.plan.report.plan_traffic import (
    HANDED,
    TIED,
    TIED_GRADIENT,
    by_sort,
)
from whalejax.planner.plan.report.text_layout import Line, indented, plain
from whalejax.planner.plan_data import PlanData
from whalejax.planner.sharding.layout import SPATIAL_AXES
from whalejax.planner.step_options import attention_words, combine_words


_KINDS = {
    "data": "data parallelism",
    "fsdp": "data parallelism with parameters, gradients and optimizer state in shards "
    "(ZeRO-3)",
    "expert": "expert parallelism",
    "context": "sequence parallelism",
    **dict.fromkeys(SPATIAL_AXES, "spatial parallelism"),
    "tensor": "operator (tensor) parallelism",
    "stage": "pipeline parallelism",
}
_ZERO = {
    1: "optimizer state in shards (ZeRO-1)",
    2: "gradients and optimizer state in shards (ZeRO-2)",
}


def describe(plan: PlanData) -> str:
    """Describes a plan's parallelism, synchrony and traffic.

    Args:
        plan: The plan, of any kind.

    Returns:
        Lines of text; each begins with its aspect.
    """
    lines: list[Line] = []
    aspects = (
        ("what is parallel", _parallel(plan)),
        ("who is synchronous", _synchronous(plan)),
        ("what is exchanged", _exchanged(plan)),
        ("what is replicated", _replicated(plan)),
    )
    for title, texts in aspects:
        lines.append(((title, "name"),))
        for text in texts:
            lines += indented([text], page_width())
    return plain(lines)


def _parallel(plan: PlanData) -> Iterator[str]:
    if plan.num_devices == 1:
        yield "nothing: one device computes everything"
        return
    meshes = {**plan.axis_sizes}
    for own in plan.stage_plans:
        meshes |= own.axis_sizes
    for axis, size in meshes.items():
        yield f"{axis} {size}: {_of_axis(plan, axis)}"
    kinds = [axis for axis in meshes if axis in _KINDS]
    if len(kinds) > 1:
        yield f"together: hybrid parallelism over {len(kinds)} axes of one mesh"


def _of_axis(plan: PlanData, axis: str) -> str:
    words = _KINDS[axis]
    if axis == "stage" and plan.stages is not None:
        return (
            f"{words}: {plan.stages.words()}, "
            f"{count_text(plan.num_micro_batches, 'micro-batch')}"
        )
    if axis == "data" and plan.zero:
        words += f", {_ZERO[plan.zero]}"
    if axis == "data" and plan.combine != "mean":
        words += f", {combine_words(plan.combine)}"
    if axis == "data" and plan.shares:
        words += f", shares {' '.join(map(str, plan.shares))} of its micro-batches"
    if axis == "context":
        attention = attention_words(plan.attention, plan.axis_sizes)
        words += f", {attention or 'keys and values gathered'}"
    where: dict[str, list[str]] = {}
    for region in plan.compute:
        for name, roles in region.axes:
            if name == axis and roles:
                where.setdefault(", ".join(roles), []).append(region.task_graph)
    shards = [f"{roles} in {', '.join(homes)}" for roles, homes in where.items()]
    return f"{words}; shards {'; '.join(shards)}" if shards else words


def _synchronous(plan: PlanData) -> Iterator[str]:
    if plan.num_devices == 1:
        yield "one device waits for nobody"
        return
    if plan.combine == "mean":
        met = "the gradients of the whole global batch are summed before the"
    else:
        met = f"{combine_words(plan.combine)} of all ranks of data comes before the"
    yield (
        f"all devices: {met} one update of a step, and nobody computes with older "
        "parameters"
    )
    if plan.stages is not None:
        yield (
            f"stages empty the pipeline at the end of each step ({plan.stages.schedule}"
            " with a flush)"
        )
    if plan.shares:
        least, most = min(plan.shares), max(plan.shares)
        takes = "unlike numbers of micro-batches"
        if least == most:
            takes = f"{most} micro-batch{'es' if most > 1 else ''} each"
        yield (
            f"ranks of data take {takes}, and wait for each other once, where "
            "gradients are summed with the weights of their samples"
        )
    elif plan.num_micro_batches > 1 and plan.stages is None:
        yield (
            f"within a step {plan.num_micro_batches} micro-batches follow each other; "
            "their gradients are accumulated"
        )


def _exchanged(plan: PlanData) -> Iterator[str]:
    found = [*by_sort(plan).values()]
    if not found:
        yield "nothing"
        return
    most = " at most" if plan.stage_plans else ""
    for row in found:
        handed = row.kind == HANDED
        how = "point to point" if handed else f"{row.kind} over {'+'.join(row.axes)}"
        words = (_HANDED if handed else SENT)[row.what]
        yield (
            f"{words}: {how},{most} {gigabytes(row.nbytes)} a step and device, across "
            f"{' and '.join(row.links) or 'no link'}"
        )
    yield (
        "decentralized: devices exchange with each other by collectives; there is no "
        "parameter server"
    )


SENT = {
    "gradient": "gradients",
    "parameter": "parameters",
    "activation": "partial sums of activations",
    "border": "activations that change layout",
    "ring": "keys and values that go round",
    "moments": "optimizer state that is averaged",
    "halo": "halos: samples of neighbours that windows reach into",
    "ids": "ids, to the devices that hold their rows",
    "rows": "rows of embedding tables",
    "row gradients": "gradients of rows",
}
"""Text of what a collective transfers, by its contents."""

_HANDED = {
    "activation": "activations from stage to stage",
    "gradient": "gradients of activations from stage to stage",
    TIED: "parameters that several stages read",
    TIED_GRADIENT: "gradients of parameters that several stages read",
}


def _replicated(plan: PlanData) -> Iterator[str]:
    total = sum(leaf.nbytes for leaf in plan.leaves)
    whole = sum(leaf.nbytes for leaf in plan.leaves if not any(leaf.param_spec))
    if plan.num_devices == 1:
        yield f"nothing: {gigabytes(total)} of parameters on one device"
        return
    where = "every device of their stage" if plan.stage_plans else "every device"
    words = f"{gigabytes(whole)} of {gigabytes(total)} of parameters on {where}"
    yield words + "; the others lie in shards" * (whole < total)
