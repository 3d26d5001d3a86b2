"""Errors and notes that plans with pipeline stages share, under any executor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from whalejax.meshes.units import gigabytes
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.layer_stack import check_devices
from whalejax.planner.pipeline.stage_graph import places_of
from whalejax.planner.plan.build import KEPT_CANDIDATES
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import BatchLeaf, Candidate
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.request import Request


UNEVEN = 1.5
"""Smallest ratio of a stage's time to the mean time that a note reports."""


class StagedPlan(Protocol):
    """Evaluated candidate with stages."""

    time: TimeTerms
    memory: MemoryTerms
    fits: bool

    @property
    def layout(self) -> str:
        """Text of the layout."""
        ...


class StageMemoryPlan(StagedPlan, Protocol):
    """Candidate whose stages have memory of their own."""

    room_bytes: int
    fullest: int


def check_stages(
    request: Request, stages: int, *, most: int, estimated: Collection[str]
) -> None:
    """Refuses requests that are impossible with stages.

    Args:
        request: Options of the request.
        stages: Number of stages.
        most: Largest number of stages.
        estimated: Options that no executor runs in stages; estimates may have them.

    Raises:
        PlanError: A request is impossible; names the option and the remedy.
    """
    check_devices(request.num_devices, stages, most=most)
    refused = request.refused_by_stages()
    able = estimated if request.estimate else ()
    if texts := [text for name, text in refused.items() if name not in able]:
        raise PlanError(". ".join(texts))


def merged_pipelines_note(graph: Graph) -> str:
    """Returns the note that several marked pipelines are planned as one.

    Args:
        graph: The captured loss.
    """
    result: dict[int, set[str]] = {}
    for task_graph in graph.task_graphs:
        kinds = [mark.kind for mark in task_graph.marks]
        if "pipeline" in kinds:
            at = task_graph.path[kinds.index("pipeline")]
            numbers = (m.get("i") for m in task_graph.marks if m.kind == "stage")
            result.setdefault(at, set()).update(n or "0" for n in numbers)
    if len(result) < 2:
        return ""
    if any(result.values()):
        stages = " and ".join(str(len(inside)) for inside in result.values())
        return (
            f"pipeline: {len(result)} are marked, of {stages} stages, and a model is "
            "one pipeline: stages of equal number are one stage. Put one wh.pipeline() "
            "around all of them where they follow each other"
        )
    return (
        f"pipeline: {len(result)} regions are marked, and the whole model is one "
        "pipeline. Put one wh.pipeline(num_stages=…) around all of it"
    )


def uncut(graph: Graph, plan: Plan) -> str:
    """Returns the note on a stage that is slowest because of a loop, or an empty text.

    Args:
        graph: The captured loss.
        plan: Plan with stage programs.
    """
    said = _lopsided(plan)
    if not said or not graph.layers_in_a_loop:
        return ""
    return f"{said}: a loop is one part of the model here, and is not divided"


def lopsided(plan: Plan, *, marked: bool) -> str:
    """Returns the note on a stage that is far slower than others, or an empty text.

    ``uncut`` reports stages that are slow because of a loop.

    Args:
        plan: Plan with stage programs.
        marked: Whether ``stage`` marks set the cut points.
    """
    said = _lopsided(plan)
    if not said:
        return ""
    if marked:
        return f"{said}, as they are marked"
    return (
        f"{said}: parts of the model begin where a parameter is read first, and no "
        "other cut is more even (layers that read slices of one parameter are one "
        "part)"
    )


def _lopsided(plan: Plan) -> str:
    """Returns the text on a stage with far more than the mean time, or none."""
    stages = plan.stages
    if stages is None or not stages.paces:
        return ""
    each = [
        pace.forward_seconds + pace.backward_seconds + pace.weight_seconds
        for pace in stages.paces
    ]
    count = len(each) // stages.chunks
    seconds = [
        sum(each[place] for place in places_of(stage, count, stages.chunks))
        for stage in range(count)
    ]
    share = max(seconds) / max(sum(seconds), 1e-30)
    if share * count < UNEVEN:
        return ""
    return (
        f"one of {count} stages takes {share:.0%} of the time of all stages (an even "
        f"part is {1 / count:.0%})"
    )


def evened(remedy: str) -> str:
    """Returns the remedy for the slow stages that ``uncut`` reports.

    Args:
        remedy: Text that names the option with which one program divides the loop among
            stages; empty if there is none.
    """
    if not remedy:
        return "Write the layers out (of the reference models: scan_layers=False)"
    remedy = remedy.removesuffix(", or leave the axis stage out")
    return (
        f"{remedy}; then stages divide its layers. Or write the layers out (of the "
        "reference models: scan_layers=False)"
    )


def batch_of(
    plans: Sequence[Plan], batch: Sequence[BatchLeaf]
) -> tuple[BatchLeaf, ...]:
    """Returns the batch leaves; each has the layout of the first stage that reads it.

    Args:
        plans: Plan of each stage.
        batch: Leaves of the batch, without layouts.
    """
    result: dict[str, BatchLeaf] = {}
    for plan in plans:
        for leaf in plan.batch:
            result.setdefault(leaf.path, leaf)
    return tuple(
        result.get(leaf.path, replace(leaf, spec=((),) * len(leaf.shape)))
        for leaf in batch
    )


def candidates(
    weighed: Sequence[StagedPlan], best: StagedPlan
) -> tuple[Candidate, ...]:
    """Returns the candidates that a pipeline plan stores, best first.

    Args:
        weighed: All evaluated candidates.
        best: Chosen candidate.
    """
    order = sorted(weighed, key=lambda one: (not one.fits, one.time.step_seconds))
    alike = {one.layout: one for one in reversed(order)} | {best.layout: best}
    order = [one for one in order if alike[one.layout] is one]
    return tuple(
        Candidate(
            layout=one.layout,
            time=one.time,
            memory=one.memory,
            fits=one.fits,
            verdict=_verdict(one, best),
        )
        for one in order
        if one is best or one in order[:KEPT_CANDIDATES]
    )


def _verdict(one: StagedPlan, best: StagedPlan) -> str:
    if one is best:
        return "chosen"
    if not one.fits:
        return f"needs {gigabytes(one.memory.total_bytes)} of memory"
    return speed_difference_text(one.time.step_seconds, best.time.step_seconds)


def speed_difference_text(seconds: float, best_seconds: float) -> str:
    """Compares a step time with that of the chosen plan.

    >>> speed_difference_text(1.1, 1.0)
    '10.0% slower'
    """
    slower = seconds / best_seconds - 1
    if slower >= 0:
        return f"{slower:.1%} slower"
    return f"{-slower:.1%} faster, by less than predictions tell apart"


def too_large(one: StageMemoryPlan) -> NothingFits:
    """Returns the error for a plan that lacks memory; it names the stage."""
    need, room = one.memory.total_bytes, one.room_bytes
    name, most = max(one.memory.by_name().items(), key=lambda pair: pair[1])
    return NothingFits(
        f"{one.layout} needs {gigabytes(need)} on a device and there are "
        f"{gigabytes(room)}, {gigabytes(need - room)} short, on stage {one.fullest} "
        f"(they count from 0); {gigabytes(most)} of it are {name}. Use more stages or "
        "micro-batches, or shard more inside a stage (fsdp, tensor)",
        lacks_bytes=need - room,
        of_bytes=room,
        nearest=one.layout,
    )
