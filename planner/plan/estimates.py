"""Plans that no executor of this version runs, compared with the best that runs.

An estimate comes from the same searches, under a request that ignores the limits of the
executors. It lists the features that no executor supports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from whalejax.meshes.units import milliseconds
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.layer_stack import StackedLayers
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.host_offload import unhosted
from whalejax.planner.search.request import LayoutCandidate, OffloadableState, Request
from whalejax.planner.sharding.offload_candidates import sliced_leaves
from whalejax.planner.step_options import FixedOptions, options_of


NO_SLICES = "no scan over layers slices parameters in host memory"


def why_not(graph: Graph, request: Request, plan: Plan) -> list[str]:
    """Returns the reasons why no executor of this version runs a plan.

    Args:
        graph: Captured loss.
        request: Options of the request.
        plan: Plan that was searched for as an estimate.

    Returns:
        The reasons; empty if an executor runs the plan.
    """
    result = []
    if plan.stages is None and not plan.shares and not plan.cluster.is_uniform:
        result.append("one program runs on devices of one kind")
    hosts = request.hosted or OffloadableState
    texts = [*unhosted(plan.offload, hosts, has_optimizer=True)]
    if plan.stages is not None:
        texts += FixedOptions(**options_of(plan)).refused_by_stages().values()
        scans = StackedLayers.of(graph, every=True) if plan.stages.turns else None
        if scans is not None and scans.others:
            number = 1 + len(scans.others)
            texts.append(f"stages divide the layers of {number} scans")
    if "params" in plan.offload and not sliced_leaves(graph):
        texts.append(NO_SLICES)
    return [*result, *(text.partition(". ")[0] for text in texts)]


def paper_notes(
    found: LayoutCandidate | None, request: Request, plan: Plan
) -> Iterator[str]:
    """Yields the note on a faster plan that no executor of this version runs.

    Args:
        found: Faster plan, or None.
        request: Options of the request.
        plan: Plan that runs.
    """
    if found is not None:
        hosts = request.hosted or OffloadableState
        why = unhosted(found.offload, hosts, has_optimizer=True)
        texts = [text.partition(". ")[0] for text in why]
        if "params" in found.offload and not texts:
            texts = [NO_SLICES]
        yield paper_note(found.layout, found.time.step_seconds, texts, plan)


def paper_note(layout: str, seconds: float, reasons: list[str], plan: Plan) -> str:
    """Returns the note on a plan that is faster but that no executor runs.

    Args:
        layout: Text of the faster plan's layout.
        seconds: Step time of the faster plan, in seconds.
        reasons: Reasons why no executor of this version runs the faster plan.
        plan: Plan that runs.
    """
    less = 1 - seconds / plan.time.step_seconds
    return (
        f"on paper {layout} takes {milliseconds(seconds)} a step, {less:.0%} less; it "
        f"does not run because: {'; '.join(reasons)} (runnable=False plans it)"
    )


def as_estimate(plan: Plan, reasons: list[str]) -> Plan:
    """Returns the plan, marked as not runnable, with the reasons.

    Args:
        plan: Plan that was searched for as an estimate.
        reasons: Reasons why no executor runs it.
    """
    notes = (
        "an estimate: no executor of this version runs it; wh.compile refuses it",
        f"it does not run because: {'; '.join(reasons)}",
    )
    return dataclasses.replace(plan, runnable=False, notes=(*notes, *plan.notes))


def gain_notes(
    runs: Plan | None, problem: PlanError | None, taken: Plan
) -> Iterator[str]:
    """Yields lines on what an estimate gains over the best plan that runs.

    Args:
        runs: The best plan that runs, or None.
        problem: Error that says why no plan runs, or None.
        taken: Estimate that is returned.
    """
    if runs is not None:
        own = next((c.layout for c in runs.candidates if c.verdict == "chosen"), "")
        words = f" ({own})" if own else ""
        step = runs.time.step_seconds
        yield (
            f"the best plan that runs{words} takes {milliseconds(step)} a step, "
            f"{milliseconds(step - taken.time.step_seconds)} more"
        )
    elif isinstance(problem, NothingFits):
        yield "no plan that runs fits"
    else:
        yield f"none runs: {' '.join(str(problem).split())}"
