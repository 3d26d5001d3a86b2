"""Makes a plan of one program on all devices from the best layout of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.build import build_plan
from whalejax.planner.plan.estimates import paper_notes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import BatchLeaf
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import (
    Again,
    ProgramCache,
    by_marks,
    decided_on,
)


def decide(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    precision: str = "f32",
    batch: Sequence[BatchLeaf] = (),
    again: Again | None = None,
    known: ProgramCache | None = None,
) -> Plan:
    """Chooses how to run a model on a cluster.

    Args:
        graph: The captured loss.
        cluster: Cluster to plan for.
        request: Options of the plan, such as micro-batches and default strategy.
        precision: Precision to record in the plan.
        batch: Leaves of the GLOBAL batch, in the order of ``graph.batch_dims``; their
            layouts are filled in.
        again: Traces the loss with TaskGraphs recomputed in the backward pass, with
            attention in blocks or logits in chunks; None excludes these.
        known: Cache to share with other searches of the same loss.

    Raises:
        PlanError: The marks cannot be obeyed, or no plan fits; lists every problem.
    """
    request = by_marks(graph, request)
    decided = decided_on(graph, cluster, request, again, known)
    plan = build_plan(
        decided.analysed,
        decided.search,
        decided.weighed,
        cluster,
        request,
        precision,
        batch,
        decided.gap,
    )
    notes = paper_notes(decided.on_paper, request, plan)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))
