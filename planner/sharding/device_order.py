"""The order in which a plan takes its devices, where links are known one by one.

Levels say what a group of devices has in common; which two of them share a fast link
they cannot say. Where a cluster has its links one by one, the ranks of the mesh are
placed by what they send each other, so that it goes over fast links
(``rank_order``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import numpy as np

from whalejax.planner.plan_data import PlanData
from whalejax.planner.sharding.rank_order import Matrix, cost, place


P = TypeVar("P", bound=PlanData)

MOST_DEVICES = 256
"""Of more the order is not looked for: exchanges are compared by matrix products."""

_LEAST_GAIN = 1e-3
"""Relative; for less the cluster's own order stays."""


def ordered(plan: P) -> P:
    """The plan with its devices placed by traffic, or as it is.

    Stages with programs of their own, unlike shares and devices of several kinds keep
    the cluster's order: there, where a rank runs decides what it is given.

    Args:
        plan: Plan on a cluster with or without links.
    """
    cluster = plan.cluster
    apart = bool(plan.stage_plans or plan.shares) or not cluster.is_uniform
    whole = plan.num_devices == cluster.num_devices
    if not cluster.links or apart or not whole or cluster.num_devices > MOST_DEVICES:
        return plan
    traffic = traffic_bytes(plan)
    rates = np.array(cluster.links)
    np.fill_diagonal(rates, np.inf)
    seconds = 1.0 / rates
    order = place(traffic, seconds)
    before = cost(range(len(order)), traffic, seconds)
    after = cost(order, traffic, seconds)
    if after >= before * (1 - _LEAST_GAIN):
        return plan
    note = (
        f"devices are taken in the order {', '.join(map(str, order))}, by what they "
        f"send each other: {after * 1e3:.3g} ms of sending a step in all, "
        f"{before * 1e3:.3g} ms in the cluster's own order"
    )
    return dataclasses.replace(plan, device_order=order, notes=(*plan.notes, note))


def traffic_bytes(plan: PlanData) -> Matrix:
    """Returns the bytes that each rank of the mesh sends to each other in one step.

    Collectives run as rings in the order of the ranks (Thakur et al., 2005): an
    all-reduce sends 2(n-1)/n of its payload to the next, a gather or scatter half of
    that, a permute all of it; an all-to-all a part to each.

    Args:
        plan: With its collectives.

    Returns:
        ``[ranks, ranks]``, bytes from each to each.
    """
    sizes = plan.axis_sizes
    names = list(sizes)
    count = math.prod(sizes.values())
    ranks = np.arange(count).reshape(tuple(sizes.values()))
    result = np.zeros((count, count))
    for collective in plan.collectives:
        inside = [names.index(axis) for axis in collective.axes if axis in sizes]
        ends = range(ranks.ndim - len(inside), ranks.ndim)
        size = math.prod(ranks.shape[i] for i in inside)
        if size < 2:
            continue
        groups = np.moveaxis(ranks, inside, ends).reshape(-1, size)
        sent = collective.payload_bytes * plan.times(collective)
        if collective.kind == "all-to-all":
            for step in range(1, size):
                result[groups, np.roll(groups, -step, axis=1)] += sent / size
            continue
        part = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}
        share = part.get(collective.kind, (size - 1) / size)
        result[groups, np.roll(groups, -1, axis=1)] += sent * share
    return result
