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
    """Returns the best plan of one program on all devices of a cluster.

    Args:
        graph: The captured loss.
        cluster: Cluster to plan for.
        request: Options of the plan, such as micro-batches and default strategy.
        precision: Name of the precision that the plan stores; default: ``"f32"``.
        batch: Leaves of the global batch, in the order of ``graph.batch_dims``. The
            plan adds their layouts.
        again: Function that traces the loss with other options: TaskGraphs recomputed
            in the backward pass, attention in blocks, logits in chunks. None excludes
            these options.
        known: Cache that other searches of the same loss share; default: None.

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
