"""Orders a plan's devices by traffic, if the rate of every link is known.

A cluster's levels do not say which pairs of devices share a fast link. If the cluster
lists the rate of every link, mesh ranks that exchange many bytes get devices with fast
links. This is a quadratic assignment problem.

For at most eight devices, all placements are compared. For more, each rank in turn gets
the free device that is cheapest with the ranks placed so far. Then pairs of ranks swap
devices as long as that helps. The cluster's own order is improved by swaps too, and the
better result is used.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from itertools import permutations
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan_data import PlanData


Matrix: TypeAlias = npt.NDArray[np.float64]
Order: TypeAlias = npt.NDArray[np.intp]

EXACT_DEVICES: Final = 8
"""Largest number of devices for which all placements (40,320) are compared."""

_LEAST_SWAP_GAIN: Final = 1e-12
"""Smallest gain of a swap, as a fraction. Smaller gains may be rounding errors, with
which swaps might never end.
"""


def place(traffic_bytes: Any, seconds_per_byte: Any) -> tuple[int, ...]:
    """Returns the device of each rank with the least total time of all transfers.

    Args:
        traffic_bytes: Array ``[ranks, ranks]`` of bytes, by sender and receiver.
        seconds_per_byte: Array ``[devices, devices]`` of the links between as many
            devices as ranks. The diagonals are ignored.

    Returns:
        Device of each rank; among equal placements of at most eight devices, the first
        in lexicographic order.

    Raises:
        WhaleError: The matrices are not square, differ in size, or have entries that
            are negative or not finite.

    >>> far, near = 1.0, 0.1
    >>> links = [[0, far, near], [far, 0, far], [near, far, 0]]
    >>> place([[0, 9, 0], [9, 0, 1], [0, 1, 0]], links)
    (0, 2, 1)
    """
    traffic, seconds = _checked(traffic_bytes, seconds_per_byte)
    if len(traffic) <= EXACT_DEVICES:
        orders = _orders(len(traffic))
        costs = np.zeros(len(orders))
        for sender, receiver in zip(*np.nonzero(traffic), strict=True):
            links = seconds[orders[:, sender], orders[:, receiver]]
            costs += traffic[sender, receiver] * links
        best = orders[int(np.argmin(costs))]
    else:
        greedy = _exchanged(_greedy(traffic, seconds), traffic, seconds)
        given = _exchanged(np.arange(len(traffic)), traffic, seconds)
        best = min(given, greedy, key=lambda order: cost(order, traffic, seconds))
    return tuple(best.tolist())


def cost(order: Any, traffic_bytes: Any, seconds_per_byte: Any) -> float:
    """Returns the seconds of all transfers, one after the other.

    Args:
        order: Device of each rank.
        traffic_bytes: Bytes by sender and receiver, as in ``place``.
        seconds_per_byte: Seconds per byte of the links, as in ``place``.

    >>> cost([1, 0], [[0, 3], [0, 0]], [[0, 1], [2, 0]])
    6.0
    """
    devices = np.asarray(order)
    traffic, seconds = _checked(traffic_bytes, seconds_per_byte)
    return float((traffic * seconds[np.ix_(devices, devices)]).sum())


def _checked(traffic: Any, seconds: Any) -> tuple[Matrix, Matrix]:
    result = []
    with Problems("place") as problems:
        for name, given in (("traffic_bytes", traffic), ("seconds_per_byte", seconds)):
            matrix = np.array(given, np.float64)
            result.append(matrix)
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                problems.add(f"{name} has shape {matrix.shape}; expected a square")
            elif not (np.isfinite(matrix) & (matrix >= 0)).all():
                problems.add(
                    f"{name} has negative or non-finite entries; expected 0 or more"
                )
            else:
                np.fill_diagonal(matrix, 0.0)
        if not problems and result[0].shape != result[1].shape:
            problems.add(
                f"traffic_bytes is for {count_text(len(result[0]), 'rank')}, "
                f"seconds_per_byte for {count_text(len(result[1]), 'device')}; "
                "expected equal numbers. Give idle devices ranks that send nothing"
            )
    return result[0], result[1]


@cache
def _orders(count: int) -> Order:
    return np.array(list(permutations(range(count))), np.intp).reshape(-1, count)


def _greedy(traffic: Matrix, seconds: Matrix) -> Order:
    """Places the ranks in turn, next the one with most traffic to placed ranks."""
    both = traffic + traffic.T
    order = np.full(len(traffic), -1, np.intp)
    free = np.ones(len(traffic), bool)
    for step in range(len(traffic)):
        open_ranks = np.flatnonzero(order < 0)
        placed = np.flatnonzero(order >= 0)
        said = both[np.ix_(open_ranks, placed)].sum(1) if step else both.sum(1)
        rank = open_ranks[int(np.argmax(said))]
        devices = np.flatnonzero(free)
        if step:
            taken = order[placed]
            prices = seconds[np.ix_(devices, taken)] @ traffic[rank, placed]
            prices += seconds[np.ix_(taken, devices)].T @ traffic[placed, rank]
        else:
            prices = seconds[devices].sum(1) + seconds[:, devices].sum(0)
        order[rank] = devices[int(np.argmin(prices))]
        free[order[rank]] = False
    return order


def _exchanged(order: Order, traffic: Matrix, seconds: Matrix) -> Order:
    """Swaps the pair with the largest gain until no swap gains."""
    order = order.copy()
    while True:
        links = seconds[np.ix_(order, order)]
        total = float((traffic * links).sum())
        gains = _gains(traffic, links)
        one, other = np.unravel_index(int(np.argmax(gains)), gains.shape)
        if gains[one, other] <= _LEAST_SWAP_GAIN * total:
            return order
        order[[one, other]] = order[[other, one]]


def _gains(traffic: Matrix, links: Matrix) -> Matrix:
    """Returns the seconds that each swap saves, as an array ``[ranks, ranks]``."""
    # Cost of rank r on the device of rank s, if all others stay.
    pays = traffic @ links.T + traffic.T @ links
    now = np.diag(pays)
    # A swap moves both ends of the pair's own link, whose cost is computed separately.
    own = traffic * links + traffic.T * links.T
    swapped = traffic * links.T + traffic.T * links
    # In pays[r, s], the partner s is still on its old device, with a free link to
    # itself.
    gains: Matrix = now[:, None] + now[None, :] - own - pays - pays.T - swapped
    np.fill_diagonal(gains, 0.0)
    return gains


P = TypeVar("P", bound=PlanData)

MOST_DEVICES = 256
"""Largest number of devices to order, as each swap costs matrix products."""

_LEAST_GAIN = 1e-3
"""Smallest gain, as a fraction, for which the cluster's own order is changed."""


def ordered(plan: P) -> P:
    """Returns the plan with its devices placed by traffic, or unchanged.

    The cluster's order stays if the work of a rank depends on its device: with a
    program per stage, unequal shares or several device kinds. It also stays if the plan
    leaves devices idle or has more than ``MOST_DEVICES``.

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
        f"devices are ordered as {', '.join(map(str, order))}, by what they send each "
        f"other: {after * 1e3:.3g} ms of transfers a step in total, {before * 1e3:.3g} "
        "ms in the cluster's own order"
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
