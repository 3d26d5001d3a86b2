"""Orders a plan's devices by traffic, if the rate of every link is known.

Levels describe groups of devices, but not which pairs share a fast link. If a cluster
lists the rate of every link, mesh ranks that exchange many bytes are placed on fast
links (``rank_order``).
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
"""Largest number of devices to order: each swap costs matrix products."""

_LEAST_GAIN = 1e-3
"""Smallest relative gain that changes the cluster's own order."""


def ordered(plan: P) -> P:
    """Returns the plan with its devices placed by traffic, or unchanged.

    Plans with a program for each stage, with uneven shares or with several kinds of
    device keep the cluster's order: there, the work of a rank depends on its device. So
    do plans that leave devices idle or have more than ``MOST_DEVICES``.

    Args:
        plan: Plan on a cluster with or without links.
    """
    cluster = plan.cluster
    uneven = bool(plan.stage_plans or plan.shares) or not cluster.is_uniform
    uses_all = plan.num_devices == cluster.num_devices
    if not cluster.links or uneven or not uses_all:
        return plan
    if cluster.num_devices > MOST_DEVICES:
        return plan
    traffic = traffic_bytes(plan)
    rates = np.array(cluster.links)
    np.fill_diagonal(rates, np.inf)
    seconds_per_byte = 1.0 / rates
    order = place(traffic, seconds_per_byte)
    before = cost(range(len(order)), traffic, seconds_per_byte)
    after = cost(order, traffic, seconds_per_byte)
    if after >= before * (1 - _LEAST_GAIN):
        return plan
    note = (
        f"devices are taken in the order {', '.join(map(str, order))}, by what they "
        f"send each other: {after * 1e3:.3g} ms of transfers a step in all, "
        f"{before * 1e3:.3g} ms in the cluster's own order"
    )
    return dataclasses.replace(plan, device_order=order, notes=(*plan.notes, note))


def traffic_bytes(plan: PlanData) -> Matrix:
    """Returns the bytes that each rank sends to each other rank in one step.

    Collectives run as rings in the order of the ranks (Thakur et al., 2005). An
    all-reduce sends 2(n-1)/n of its payload to the next rank, an all-gather or
    reduce-scatter half of that, and a permute all of it. An all-to-all sends an equal
    part to each rank.

    Args:
        plan: Plan whose collectives are counted.

    Returns:
        Array ``[ranks, ranks]`` of bytes, by sender and receiver.
    """
    sizes = plan.axis_sizes
    names = list(sizes)
    count = math.prod(sizes.values())
    ranks = np.arange(count).reshape(tuple(sizes.values()))
    result = np.zeros((count, count))
    for collective in plan.collectives:
        axes = [names.index(axis) for axis in collective.axes if axis in sizes]
        last_axes = range(ranks.ndim - len(axes), ranks.ndim)
        size = math.prod(ranks.shape[i] for i in axes)
        if size < 2:
            continue
        groups = np.moveaxis(ranks, axes, last_axes).reshape(-1, size)
        sent = collective.payload_bytes * plan.times(collective)
        if collective.kind == "all-to-all":
            for step in range(1, size):
                result[groups, np.roll(groups, -step, axis=1)] += sent / size
            continue
        parts = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}
        part = parts.get(collective.kind, (size - 1) / size)
        result[groups, np.roll(groups, -1, axis=1)] += sent * part
    return result
