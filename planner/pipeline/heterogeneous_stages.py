"""Pipeline stages on mixed device kinds: their devices, their layers, and the gain.

The devices are divided into equal parts, in node order, each of one kind. Whale places
earlier stages on devices with more memory, as they store activations of more
micro-batches, and then cuts the model by FLOPs (Jia et al., 2022, section 3.3.2).

This module instead times the model's smallest parts on every kind. Dynamic programming
chooses the order of the devices and the cut points together, over the numbers of used
devices per kind and the end of the last stage. The result is exact. Each kind has its
own memory, with the activations in flight.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.planner.balance.shares import (
    corrections,
    gain_words,
    timing_note,
    weights_hash,
)
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.layer_stack import devices_of_stage
from whalejax.planner.pipeline.schedules import Schedule
from whalejax.planner.pipeline.simulate import simulate
from whalejax.planner.pipeline.stage_cuts import (
    ChainCut,
    Layer,
    Stage,
    cut,
    interval_seconds,
)
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Devices in the order of the pipeline, and the cut of the model for them.

    Attributes:
        order: Index of each stage's devices in the given list.
        stages: Devices of each stage, with the number of micro-batches in flight there.
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
        devices: Devices of each stage; ``in_flight`` replaces theirs.
        in_flight: Largest number of micro-batches in flight of each stage, in the order
            of the pipeline, as in ``Schedule.in_flight``.
        order: Index of each stage's devices.

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
    """Returns the order of devices and the cut that make the slowest stage fastest.

    The result is exact. Among equally fast orders, earlier stages have more memory. For
    every combination of used devices per kind, the time is O(S · L²) with S kinds and L
    layers.

    Args:
        layers: Layers in the model's order.
        devices: Devices of each stage, in any order; ``in_flight`` replaces theirs.
        in_flight: Largest number of micro-batches in flight of each stage, in the order
            of the pipeline.

    Raises:
        PlanError: There are fewer layers than stages, or no cut fits in any order.

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
        # The cut's error says what is missing. Whale's order has most room early.
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
    """Returns the best paces and the last choices, by used devices and layers."""
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
        # The kind with least memory is tried first as the last one, so it wins ties.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevices:
    """Devices that a stage may have: one of the equal parts of a cluster.

    Attributes:
        block: Index of the part, in node order.
        cluster: Cluster of these devices.
        ratio: Measured time of the model on them over predicted time.
    """

    block: int
    cluster: Cluster
    ratio: float = 1.0

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""
        return self.cluster.kinds[0]


def grounds(
    graph: Graph, cluster: Cluster, devices: int, stages: int
) -> tuple[StageDevices, ...]:
    """Returns the parts of a cluster on which stages can run.

    Args:
        graph: Captured loss, by which measured times are looked up.
        cluster: All devices.
        devices: Number of devices of a stage.
        stages: Number of stages.

    Raises:
        PlanError: Links do not join the devices in this way, or a stage would have
            mixed kinds.
    """
    first = devices_of_stage(cluster, devices, stages)
    each = [node.kind for node in cluster.nodes for _ in range(node.count)]
    if len({kind.name for kind in each[: devices * stages]}) == 1:
        return tuple(
            StageDevices(block=block, cluster=first) for block in range(stages)
        )
    parts = [cluster.part(devices, block * devices) for block in range(stages)]
    for block, part in enumerate(parts):
        if not part.is_uniform:
            start = block * devices
            raise PlanError(
                f"stage is {stages}, but one stage would have devices {start} to "
                f"{start + devices - 1}, which are {part.describe()}. A stage has "
                "devices of one kind: choose a number of stages that divides the "
                "devices of every kind into full stages"
            )
    kinds = [part.kinds[0] for part in parts]
    ratios = corrections(kinds, weights_hash(graph.params))
    return tuple(
        StageDevices(block=block, cluster=part, ratio=ratio)
        for block, (part, ratio) in enumerate(zip(parts, ratios, strict=True))
    )


def by_memory(found: Sequence[StageDevices]) -> list[StageDevices]:
    """Returns one part of each kind, the kind with least memory first."""
    kinds = {ground.kind.name: ground for ground in reversed(found)}
    return sorted(reversed(kinds.values()), key=lambda g: g.kind.memory_bytes)


def has_several_kinds(found: Sequence[StageDevices]) -> bool:
    """Returns whether the parts are of several kinds."""
    return len({ground.kind.name for ground in found}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousPlacement:
    """Placement of a chain of layers on mixed devices, with predicted times.

    Attributes:
        placed: Order of the devices, and the cut.
        work: Compute seconds of one micro-batch on each stage.
        seconds: Step time under the schedule, including transfers.
        equal_seconds: Step time with the cut for equal devices, in node order.
        equal_fits: Whether that cut fits in memory.
        least_seconds: Step time if layers were divisible and all devices always busy.
        needs_bytes: Bytes per device that each stage needs, by the cut's estimate.
    """

    placed: StageAssignment
    work: tuple[float, ...]
    seconds: float
    equal_seconds: float
    equal_fits: bool
    least_seconds: float
    needs_bytes: tuple[float, ...]


def allot(
    chains: Mapping[str, Sequence[Layer]],
    found: Sequence[StageDevices],
    table: Schedule,
    reserved: Mapping[str, float],
    *,
    hidden: bool = False,
) -> HeterogeneousPlacement:
    """Places stages on mixed devices, and cuts the model for them.

    Args:
        chains: Layers of the model on the devices of each kind, by name of the kind.
            Layouts are equal, and memory is that of the first.
        found: Devices of the stages, in node order.
        table: Schedule with one part of the model on each stage.
        reserved: Bytes per device that belong to no layer, by kind.
        hidden: Whether transfers overlap with computation. If not (the default), they
            add to the time of both stages.

    Raises:
        PlanError: There are fewer layers than stages, or no cut fits in any order.
    """
    layers = next(iter(chains.values()))
    devices = [
        Stage(
            kind=ground.kind.name,
            memory_bytes=ground.kind.memory_bytes - reserved.get(ground.kind.name, 0.0),
            seconds=tuple(
                chain.seconds * ground.ratio for chain in chains[ground.kind.name]
            ),
        )
        for ground in found
    ]
    held = [max(1, n) for n in table.in_flight]
    links = [replace(x, transfer_seconds=0.0) for x in layers] if hidden else layers
    placed = place(links, devices, held)
    stages = [replace(d, in_flight=n) for d, n in zip(devices, held, strict=True)]
    equal = cut(links, [Stage(seconds=devices[0].seconds)] * len(devices))
    return HeterogeneousPlacement(
        placed=placed,
        work=_work(placed.cut, placed.stages),
        seconds=_step_seconds(placed.cut, layers, placed.stages, table),
        equal_seconds=_step_seconds(equal, layers, stages, table),
        equal_fits=_fits(equal, layers, stages),
        least_seconds=table.num_micro_batches
        * least_seconds([s.seconds for s in placed.stages]),
        needs_bytes=tuple(
            sum(
                layer.static_bytes + n * layer.activation_bytes for layer in layers[a:b]
            )
            for (a, b), n in zip(_spans(placed.cut), held, strict=True)
        ),
    )


def _spans(found: ChainCut) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([0, *itertools.accumulate(found.counts)])


def _work(found: ChainCut, stages: Sequence[Stage]) -> tuple[float, ...]:
    return tuple(
        sum(stage.seconds[a:b])
        for stage, (a, b) in zip(stages, _spans(found), strict=True)
    )


def _step_seconds(
    found: ChainCut,
    layers: Sequence[Layer],
    stages: Sequence[Stage],
    table: Schedule,
) -> float:
    """Returns a cut's step time; the forward pass takes a third of a stage's work."""
    part = [seconds / 3 for seconds in _work(found, stages)]
    borders = [b - 1 for _, b in _spans(found)][:-1]
    handed = max((layers[at].transfer_seconds / 2 for at in borders), default=0.0)
    line = simulate(
        table,
        part,
        part if table.splits_backward else [2 * seconds for seconds in part],
        handed,
        weight_seconds=part if table.splits_backward else None,
    )
    return line.step_seconds


def _fits(found: ChainCut, layers: Sequence[Layer], stages: Sequence[Stage]) -> bool:
    return all(
        np.isfinite(interval_seconds(layers, stage)[a, b])
        for stage, (a, b) in zip(stages, _spans(found), strict=True)
    )


def least_seconds(seconds: Sequence[Sequence[float]]) -> float:
    """Returns the seconds per micro-batch of a pipeline with divisible layers.

    The result is exact for this order of devices.

    Args:
        seconds: Seconds of every layer of the model on each stage's devices.

    >>> least_seconds([[1.0] * 3, [2.0] * 3])
    2.0
    """
    ends = [np.concatenate([[0.0], np.cumsum(each)]) for each in seconds]
    places = np.arange(len(ends[0]), dtype=float)

    def reaches(pace: float) -> bool:
        at = 0.0
        for end in ends:
            at = float(np.interp(np.interp(at, places, end) + pace, end, places))
        return at >= len(places) - 1

    low, high = 0.0, float(ends[0][-1])
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def notes(
    found: Sequence[StageDevices], graph: Graph, one: HeterogeneousPlacement
) -> Iterator[str]:
    """Yields the note of a plan whose stages have mixed kinds.

    Args:
        found: Devices of the stages, in node order.
        graph: The captured loss.
        one: Placement of the model on them.
    """
    kinds = [ground.kind for ground in found]
    if note := timing_note(kinds, weights_hash(graph.params)):
        yield note.replace("shares:", "stages:", 1)
    total = sum(one.placed.cut.counts)
    each = ", ".join(
        f"{count} on {kinds[i].display_name()} ({seconds * 1e3:.3g} ms)"
        for i, count, seconds in zip(
            one.placed.order, one.placed.cut.counts, one.work, strict=True
        )
    )
    gain, bound = (one.equal_seconds / t for t in (one.seconds, one.least_seconds))
    words = gain_words(max(1.0, gain), bound)  # The search evaluated more terms.
    other = "in node order" if total == len(kinds) else "equal layers"
    words = words.replace("even shares", other)
    fits = "" if one.equal_fits else "; equal layers do not fit in memory"
    yield f"stages: {each} of {total} parts of the model: {words}{fits}"
