"""Which executor a plan is made for: one program, or stages, alike or apart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from whalejax.capture import Captured
from whalejax.capture.stack import stack_of
from whalejax.capture.units import units_of
from whalejax.planner.asked import Asked
from whalejax.planner.decide import check_marks, decide
from whalejax.planner.foresee import foresee
from whalejax.planner.graph import Graph
from whalejax.planner.mpmd import SCHEDULES, decide_mpmd
from whalejax.planner.parts import Units
from whalejax.planner.pipelines import LOCKSTEP, decide_stages
from whalejax.planner.plan import Plan, PlanError
from whalejax.planner.scored import Request
from whalejax.planner.shared import STAGE
from whalejax.planner.terms import Remat


def decider(
    captured: Captured, request: Request, *, runnable: bool
) -> tuple[Callable[..., Plan], Request, tuple[str, ...]]:
    """Who decides how a model runs.

    Args:
        captured: the loss.
        request: what was asked for.
        runnable: what cannot run is not wanted.

    Returns:
        The search, what is asked of it (of the devices of one stage, where there are
        some), and notes on why.

    Raises:
        PlanError: what is asked of a pipeline contradicts itself or cannot run.
    """
    if not runnable:
        return foresee, request, ()
    check_marks(captured.graph, request.num_devices)
    asked = _asked(captured, request)
    mesh = dict(asked.mesh)
    stages = mesh.pop(STAGE, 1)
    request = dataclasses.replace(
        request, mesh=mesh, num_micro_batches=asked.num_micro_batches
    )
    if stages == 1:
        return decide, request, ()
    marked = bool(_marked(captured))
    why = _why_apart(captured, asked, marked)
    if not why:
        return functools.partial(decide_stages, piped=asked), request, ()

    @functools.cache
    def traced(remat: Remat) -> tuple[Graph, Units]:
        program = captured.with_remat(remat) if remat else captured
        return program.graph, units_of(program)

    search = functools.partial(decide_mpmd, piped=asked, traced=traced, marked=marked)
    return search, request, (f"stages have programs of their own: {why}",)


def _marked(captured: Captured) -> set[int]:
    """Numbers of the stages that the user marked."""
    return {
        int(mark.get("i") or 0)
        for task_graph in captured.graph.task_graphs
        for mark in task_graph.marks
        if mark.kind == "stage"
    }


def _asked(captured: Captured, request: Request) -> Asked:
    """The pipeline that is asked for, by arguments and by marks."""
    graph, marked = captured.graph, _marked(captured)
    asked = Asked.of(graph, request, SCHEDULES)
    count = asked.mesh.get(STAGE)
    if marked:
        if count not in (None, len(marked)):
            raise PlanError(
                f"{len(marked)} stages are marked, and {count} are asked for. Drop "
                "num_stages and the axis stage, or the marks"
            )
        return dataclasses.replace(asked, mesh={**asked.mesh, STAGE: len(marked)})
    pipelines = (m for g in graph.task_graphs for m in g.marks if m.kind == "pipeline")
    mark = next(pipelines, None)
    if mark is not None and count is None:
        raise PlanError(
            f"{mark} does not say into how many stages, and plans that run do not "
            "find that yet. Give num_stages, or mesh={'stage': …}"
        )
    return asked


def _why_apart(captured: Captured, asked: Asked, marked: bool) -> str:
    """Why stages have programs of their own; empty where one program runs them all."""
    if marked:
        return "marks say where the model is cut"
    if asked.schedule not in (None, *LOCKSTEP):
        return f"one program for all stages does not follow {asked.schedule}"
    try:
        length = stack_of(captured).length
    except PlanError as error:
        return str(error).rstrip(".")
    stages = asked.mesh[STAGE]
    if length % stages:
        return f"{length} layers do not divide into {stages} stages alike"
    return ""
