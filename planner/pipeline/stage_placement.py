"""Chooses the kinds of devices for pipeline stages.

Whale places earlier stages on devices with more memory, because they store the
activations of more micro-batches, and then cuts the model by FLOP (Jia et al., 2022,
section 3.3.2). Here the order of the devices and the cut are chosen together and
exactly, by dynamic programming over the numbers of used devices per kind and the end of
the last stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from whalejax.planner.pipeline.stage_cuts import (
    ChainCut,
    Layer,
    Stage,
    cut,
    interval_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Devices in the order of the pipeline, and the cut of the model for them.

    Attributes:
        order: For each stage, the index of its devices in the given list.
        stages: Devices of each stage, with the activations that it stores there.
        cut: Cut of the model.
    """

    order: tuple[int, ...]
    stages: tuple[Stage, ...]
    cut: ChainCut


def memory_order(devices: Sequence[Stage]) -> tuple[int, ...]:
    """Returns the order by Whale's rule: earlier stages on devices with more memory.

    Args:
        devices: Devices of each stage. Devices with equal memory keep their order.

    >>> memory_order([Stage(memory_bytes=16e9), Stage(memory_bytes=32e9)])
    (1, 0)
    """
    return tuple(sorted(range(len(devices)), key=lambda i: -devices[i].memory_bytes))


def in_order(
    layers: Sequence[Layer],
    devices: Sequence[Stage],
    in_flight: Sequence[int],
    order: Sequence[int],
) -> StageAssignment:
    """Returns the best cut for devices in a given order.

    Args:
        layers: Layers in the model's order.
        devices: Devices of each stage; their ``in_flight`` is replaced.
        in_flight: Micro-batches whose activations each stage stores, in the order of
            the pipeline, as in ``Schedule.in_flight``.
        order: For each stage, the index of its devices.

    Raises:
        PlanError: No cut fits the memory.
    """
    stages = tuple(
        replace(devices[i], in_flight=held)
        for i, held in zip(order, in_flight, strict=True)
    )
    return StageAssignment(order=tuple(order), stages=stages, cut=cut(layers, stages))


def place(
    layers: Sequence[Layer], devices: Sequence[Stage], in_flight: Sequence[int]
) -> StageAssignment:
    """Returns the order of the devices and the cut with the fastest slowest stage.

    The result is exact. Among equally fast orders, earlier stages have more memory.
    Time is O(S · L²) for every combination of used devices per kind, with S kinds and L
    layers.

    Args:
        layers: Layers in the model's order.
        devices: Devices of each stage, in any order; their ``in_flight`` is replaced.
        in_flight: Micro-batches whose activations each stage stores, in pipeline order.

    Raises:
        PlanError: Fewer layers than stages, or no cut fits in any order.

    >>> fast = Stage(kind="v100-32", speed=2.0, memory_bytes=32.0)
    >>> slow = Stage(kind="p100-16", speed=1.0, memory_bytes=16.0)
    >>> block = Layer(seconds=1.0, activation_bytes=2.0)
    >>> found = place([block] * 12, [slow, fast], in_flight=(2, 1))
    >>> found.order, found.cut.counts, found.cut.seconds
    ((1, 0), (8, 4), (4.0, 4.0))
    """
    if not devices or len(layers) < len(devices):
        return in_order(layers, devices, in_flight, range(len(devices)))
    kinds = _kinds(devices)
    paces, parents = _search(layers, kinds, in_flight)
    counts = tuple(len(where) for _, where in kinds)
    if not np.isfinite(paces[counts][-1]):
        # The cut names what is missing; in Whale's order early stages have most room.
        return in_order(layers, devices, in_flight, memory_order(devices))
    order = []
    state, end = counts, len(layers)
    left = [list(where) for _, where in kinds]
    while any(state):
        kind, start = (int(table[end]) for table in parents[state])
        order.append(left[kind].pop())
        state, end = _less(state, kind), start
    return in_order(layers, devices, in_flight, order[::-1])


def _kinds(devices: Sequence[Stage]) -> list[tuple[Stage, list[int]]]:
    alike: dict[Stage, list[int]] = {}
    for i in memory_order(devices):
        alike.setdefault(replace(devices[i], in_flight=1), []).append(i)
    return list(alike.items())


State = tuple[int, ...]
"""Number of used devices of each kind."""


def _less(state: State, kind: int) -> State:
    return tuple(n - (k == kind) for k, n in enumerate(state))


def _search(
    layers: Sequence[Layer],
    kinds: Sequence[tuple[Stage, list[int]]],
    in_flight: Sequence[int],
) -> tuple[dict[State, np.ndarray], dict[State, np.ndarray]]:
    """Returns the best pace of the first layers by used devices, and last choices."""
    count = len(layers)
    ranges = [range(len(where) + 1) for _, where in kinds]
    states = sorted(itertools.product(*ranges), key=sum)
    nothing = np.full(count + 1, np.inf)
    nothing[0] = 0.0
    paces, parents = {states[0]: nothing}, dict[State, np.ndarray]()
    cost = {
        (kind, held): interval_seconds(layers, replace(stage, in_flight=held))
        for kind, (stage, _) in enumerate(kinds)
        for held in Counter(in_flight)
    }
    for state in states[1:]:
        held = in_flight[sum(state) - 1]
        best, parent = np.full(count + 1, np.inf), np.zeros((2, count + 1), dtype=int)
        # The kind with least memory is tried last first, so ties put it last.
        for kind in reversed(range(len(kinds))):
            if not state[kind]:
                continue
            pace = np.maximum(paces[_less(state, kind)][:, None], cost[kind, held])
            start = pace.argmin(axis=0)
            result = pace[start, np.arange(count + 1)]
            better = result < best
            best = np.where(better, result, best)
            parent = np.where(
                better, np.stack([np.full_like(start, kind), start]), parent
            )
        paces[state], parents[state] = best, parent
    return paces, parents
