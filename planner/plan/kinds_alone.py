"""Notes that devices of one kind alone are faster than a plan on mixed kinds.

All devices of a cluster take part in the gradient reduction, even if slow ones compute
nothing. So the fast ones may be faster without them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import milliseconds
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.least_paces import StageBounds
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import ProgramCache
from whalejax.planner.search.uneven_replicas import device_kinds, devices_of_kind


LESS = 0.1
"""Least fraction of the step time by which a kind must be faster alone."""


def notes_on_kinds(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    decide: Callable[..., Plan],
    known: ProgramCache,
    **options: Any,
) -> Iterator[str]:
    """Yields a note for each kind of device that is clearly faster without the others.

    Args:
        plan: Plan on devices of several kinds.
        graph, cluster, request, options: Arguments of the search that found it.
        decide: Search for the plan of one program on equal devices.
        known: Programs of the loss that were analysed before.
    """
    limit = plan.time.step_seconds * (1 - LESS)
    sizes = Counter(kind.name for kind in device_kinds(cluster))
    for kind in cluster.kinds:
        part = devices_of_kind(cluster, kind, sizes[kind.name])
        one = dataclasses.replace(request, num_devices=part.num_devices)
        counts = [request.num_micro_batches or 1]
        bounds = StageBounds(graph, part, one, 1, counts, known=known)
        if bounds.seconds(counts[0]) >= limit:
            continue
        try:
            alone = decide(graph, part, one, known=known, **options)
        except PlanError:
            continue
        seconds = alone.time.step_seconds
        if seconds < limit:
            name = kind.display_name()
            times = plan.time.step_seconds / seconds
            yield (
                f"the {part.num_devices} {name} alone take {milliseconds(seconds)} a "
                f"step, {times:.1f} × as fast: plan for a cluster of them, and leave "
                "the others out"
            )
