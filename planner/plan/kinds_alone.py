"""Notes on plans for mixed device kinds that are slower than one of the kinds alone.

All devices of a cluster take part in the gradient reduction, even if slow ones compute
nothing. So the fast devices may be faster without the slow ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.formats.cluster_text import levels_of_kind
from whalejax.meshes.units import milliseconds
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.least_paces import StageBounds
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import Again, ProgramCache
from whalejax.planner.search.uneven_replicas import device_kinds, devices_of_kind


LESS = 0.1
"""Smallest fraction of the step time that a kind must save alone for a note."""


def notes_on_kinds(
    plan: Plan,
    graph: Graph,
    request: Request,
    *,
    known: ProgramCache,
    again: Again,
    replan: Callable[[Cluster], Plan],
) -> list[str]:
    """Returns a note if the devices of one kind are clearly faster without the others.

    Args:
        plan: Plan on devices of several kinds.
        graph: The captured loss.
        request: Options of the search that found the plan.
        known: Programs of the loss that were analysed before.
        again: Function that traces other programs of the loss.
        replan: Function that plans the same question for other devices.
    """
    limit = plan.time.step_seconds * (1 - LESS)
    sizes = Counter(kind.name for kind in device_kinds(plan.cluster))
    count = request.num_micro_batches or 1
    found: list[Plan] = []
    for kind in plan.cluster.kinds:
        part = devices_of_kind(plan.cluster, kind, sizes[kind.name])
        levels = levels_of_kind(plan.cluster, kind.name)
        if levels is not None:
            part = dataclasses.replace(part, levels=levels)
        one = dataclasses.replace(request, num_devices=part.num_devices)
        with contextlib.suppress(WhaleError):
            bounds = StageBounds(graph, part, one, 1, [count], known=known, again=again)
            if bounds.seconds(count) < limit:
                found.append(replan(part))
    best = min(found, key=lambda one: one.time.step_seconds, default=None)
    if best is None or best.time.step_seconds >= limit:
        return []
    seconds = best.time.step_seconds
    times = plan.time.step_seconds / seconds
    name = best.cluster.kinds[0].display_name()
    return [
        f"the {best.num_devices} {name} alone take {milliseconds(seconds)} a step, "
        f"{times:.1f} × as fast: plan for a cluster of them, and leave the others out"
    ]
