"""Time and memory of cases: frames with their options, as arrays.

What one micro-batch costs inside a stage comes from ``cells``; here links, storage,
schedules and host memory join it. Compute, collectives, update and memory are the terms
of single plans (``enumerate``, ``saved_tensors``, ``optimizer_step``); a case with one
stage, nothing computed again and nothing in host memory is priced the same there and
here.

Gradients are reduced in every micro-batch, as compiled programs do: what they add up is
there on every device. What moves to host memory and back does so beside the computation
of the same place, and what is longer than that is exposed.

Many cases agree in what happens inside a stage, or in how parameters are stored; each
of the two is worked out once for all that agree.

The module is long because all terms of a case's time share one table of seconds by
kind of device, place, phase and term.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import KEPT_BYTES
from whalejax.meshes.fitted_constants import WHOLE, constants
from whalejax.planner.cost.collectives import Spans, span_rates
from whalejax.planner.model.layer_chain import FIRST, LAST, LAYER
from whalejax.planner.pipeline.schedules import most_in_flight
from whalejax.planner.search.batched.cells import Column, Columns
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.link_rates import Rates, Wires
from whalejax.planner.search.batched.mesh_grid import (
    ORDERS,
    SCHEDULES,
    Frames,
)
from whalejax.planner.search.batched.parameter_bytes import Storage
from whalejax.planner.search.batched.placement import Group as Group
from whalejax.planner.search.batched.placement import Placement as Placement
from whalejax.planner.sharding.layout import GRID_AXES
from whalejax.planner.sharding.offload_candidates import exposed_seconds
from whalejax.planner.sharding.shard_counts import distinct_columns
from whalejax.planner.terms import OFFLOADS


PLACES = (FIRST, LAYER, LAST)

TINY = 1e-30
"""Seconds by which nothing is divided into nothing."""

PHASES = ("forward", "backward")

TERMS = ("compute", "launch", "activation", "border", "parameter", "offload")
"""Terms of a stage's time for one micro-batch."""

Seconds = dict[tuple[int, int, str, str], Array]
"""By kind of device, place, phase and term; of one layer at ``LAYER``."""


class StageMemory(Protocol):
    """Memory of cases by what is in it in every span of a step; see ``ExactMemory``."""

    def covers(self, cases: Cases) -> bool:
        """Whether it can tell all of some cases."""

    def terms(self, cases: Cases, group: Group) -> tuple[dict[str, Array], Array]:
        """Terms on a stage of a group, and bytes in host memory."""

    def offloaded_activations(self, cases: Cases) -> Array:
        """Bytes of activations that wait in host memory, of one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What does not change over cases.

    Attributes:
        cells: priced columns, one behind the other.
        storage: how parameters are stored.
        wires: rates of the cluster's links.
        layers: that stages divide.
        policies: for each combination, TaskGraph to its policy.
        cluster: the machine.
        state_bytes: bytes of what is not trained.
        batch_bytes: of the global batch, as if all of it were sharded.
        optimizer_other_bytes: optimizer state that follows no parameter.
        room: which part of the memory of devices cases may fill.
        exact: memory by what is there when, where the program tells it.
    """

    cells: Columns
    storage: Storage
    wires: Wires
    layers: int
    policies: Sequence[Mapping[int, str]]
    cluster: Cluster
    state_bytes: int
    batch_bytes: int
    optimizer_other_bytes: int
    room: float = 1.0
    exact: StageMemory | None = None

    @functools.cached_property
    def lightest(self) -> list[int]:
        """Policies that compute something again, and none of which another does less.

        What ``dots`` computes again the others do too.
        """
        again = [
            frozenset(home for home, name in policy.items() if name != "none")
            for policy in self.policies
        ]
        dots = [
            index
            for index, policy in enumerate(self.policies)
            if again[index] and set(policy.values()) <= {"none", "dots"}
        ]
        return [
            index
            for index in range(1, len(self.policies))
            if not any(
                again[other] < again[index]
                or (again[other] == again[index] and other < index)
                for other in dots
            )
        ]

    @functools.cached_property
    def traffic(self) -> list[tuple[Column, tuple[str, ...], Array, Array]]:
        """Columns of collectives on activations: axes, payload, and times of each."""
        return [
            (
                column,
                usual_axes(column.axes),
                values,
                self.cells[dataclasses.replace(column, what="times")],
            )
            for column, values in self.cells.items()
            if column.what == "bytes"
        ]

    @functools.cached_property
    def gradients(self) -> Mapping[tuple[tuple[str, ...], int], Array]:
        """Payload of the reductions of gradients, by axes and place."""
        found: dict[tuple[tuple[str, ...], int], Array] = {}
        for column, values in self.cells.items():
            if column.what == "gradient":
                key = usual_axes(column.axes), column.place
                found[key] = found[key] + values if key in found else values
        return found


class _Rows:
    """Frames with their meshes, and collectives on them."""

    def __init__(self, model: Model, frames: Frames) -> None:
        self.model = model
        self.frames = frames
        self.cluster = model.cluster
        self.number = len(frames)
        self.mesh = {"stage": frames.stage, "data": frames.data, "fsdp": frames.fsdp}
        for axis in ("expert", "context", "tensor"):
            self.mesh[axis] = self.cell(Column(axis)).astype(np.int64)
        self.hidden = constants().platforms.get(self.cluster.platform, WHOLE)
        self.zeros = np.zeros(self.number)
        self._rates: dict[tuple[str, tuple[str, ...]], Rates] = {}
        self._ranks: dict[tuple[str, ...], tuple[Array, Array]] = {}
        self._places: Array | None = None

    def cell(self, column: Column) -> Array:
        """A priced column at every row's cell."""
        values = self.model.cells.get(column)
        if values is None:
            return np.zeros(self.number)
        found: Array = np.take(values, self.frames.cell)
        return found

    def rates(
        self, kind: Any, axes: tuple[str, ...], priced: Callable[[Spans], Rates]
    ) -> Rates:
        """Rates of links at every row.

        Args:
            kind: of collective.
            axes: of the mesh; some.
            priced: from their spans to seconds for each byte and for each time.
        """
        if (kind, axes) not in self._rates:
            wires = self.model.wires
            if self._places is None:
                columns = [self.mesh[axis] for axis in GRID_AXES]
                first, inverse = distinct_columns([*columns, self.frames.order])
                sizes = np.stack([column[first] for column in columns])
                self._places = wires.places(sizes, self.frames.order[first])[inverse]
            per_byte, per_time = wires.rates(kind, axes, priced)
            self._rates[kind, axes] = (
                np.take(per_byte, self._places),
                np.take(per_time, self._places),
            )
        return self._rates[kind, axes]

    def ranks(self, axes: tuple[str, ...]) -> tuple[Array, Array]:
        """How many ranks axes join at every row, and where several of them do."""
        if axes not in self._ranks:
            sizes = [self.mesh[axis] for axis in axes]
            used = sum((size > 1 for size in sizes), self.zeros)
            self._ranks[axes] = math.prod(sizes, start=self.zeros + 1.0), used > 1
        return self._ranks[axes]

    def collective(
        self, kind: Any, axes: tuple[str, ...], payload: Array, times: Array
    ) -> Array:
        """Seconds of equal collectives under every row's order of axes."""
        if not axes:
            return self.zeros
        per_byte, per_time = self.rates(
            kind, axes, lambda spans: span_rates(kind, spans, self.cluster)
        )
        found: Array = payload * per_byte + times * per_time
        return found

    def traffic(
        self, column: Column, axes: tuple[str, ...], payload: Array, times: Array
    ) -> list[tuple[str, Array]]:
        """Seconds of a column of collectives by phase, those that are repeated too."""
        cell = self.frames.cell
        count = np.take(times, cell)
        if not count.any():
            return []
        seconds = self.collective(
            column.collective, axes, np.take(payload, cell), count
        )
        found = [(column.phase, seconds)]
        again = self.policy(column.task_graph, "full", "named")
        if column.phase == "forward" and again.any():
            found.append(("backward", seconds * again))
        return found

    def policy(self, task_graph: int, *names: str) -> Array:
        """Rows in which a TaskGraph has one of some policies."""
        has = np.array([p.get(task_graph) in names for p in self.model.policies])
        return np.take(has, self.frames.remat)


class _Inside(_Rows):
    """What happens inside a stage: computation and collectives on activations.

    Attributes:
        seconds: of one micro-batch at each place.
    """

    def __init__(self, model: Model, frames: Frames, kinds: Sequence[int]) -> None:
        super().__init__(model, frames)
        self.seconds: Seconds = {}
        self._communicate()
        for kind in kinds:
            self._compute(kind)
            self._ring(kind)

    def _add(self, key: tuple[int, int, str, str], values: Array) -> None:
        each = values / self.model.layers if key[1] == LAYER else values
        self.seconds[key] = self.seconds.get(key, 0.0) + each

    def _compute(self, kind: int) -> None:
        launch = self.cluster.kinds[kind].launch_seconds
        for place in PLACES:
            for home in self.model.policies[0]:
                ahead = self.cell(Column("forward", home, place, kind))
                behind = self.cell(Column("backward", home, place, kind))
                again = self.cell(Column("again", home, place, kind))
                behind = behind + ahead * self.policy(home, "full", "named")
                behind = behind + again * self.policy(home, "dots")
                self._add((kind, place, "forward", "compute"), ahead)
                self._add((kind, place, "backward", "compute"), behind)
                launches = self.cell(Column("launches", home, place)) * launch
                self._add((kind, place, "forward", "launch"), launches / 3)
                self._add((kind, place, "backward", "launch"), launches * (2 / 3))

    def _communicate(self) -> None:
        self.context: dict[tuple[str, str], Array] = {}
        self.others: Seconds = {}
        for column, axes, payload, times in self.model.traffic:
            if "data" not in axes:
                for phase, seconds in self.traffic(column, axes, payload, times):
                    keys = column.axes == ("context",) and column.place == LAYER
                    if keys and column.collective != "all-reduce":
                        if column.term != "ring":
                            own = phase, column.term
                            self.context[own] = self.context.get(own, 0.0) + seconds
                            continue
                    key = (0, column.place, phase, column.term)
                    self.others[key] = self.others.get(key, 0.0) + seconds

    def _ring(self, kind: int) -> None:
        """A ring's exchange runs beside the products with what came before."""
        for (_, place, phase, term), seconds in self.others.items():
            if term != "ring":
                self._add((kind, place, phase, term), seconds)
        for place in PLACES:
            self._rounds(kind, place)
        ring, parts = self.frames.ring > 0, self.mesh["context"]
        for phase in PHASES:
            terms = [term for at, term in self.context if at == phase]
            whole = sum((self.context[phase, t] for t in terms), self.zeros)
            products = self.cell(Column("attention", kind=kind, phase=phase))
            hidden = products * (parts - 1) / parts
            left = np.maximum(0.0, whole - hidden) / np.maximum(whole, TINY)
            for term in terms:
                seconds = self.context[phase, term]
                exposed = np.where(ring, seconds * left, seconds)
                self._add((kind, LAYER, phase, term), exposed)

    def _rounds(self, kind: int, place: int) -> None:
        """What of the rounds of attention in blocks its computation does not cover."""
        sent = {p: self.others.get((0, place, p, "ring"), self.zeros) for p in PHASES}
        whole = sum(sent.values(), self.zeros)
        if not whole.any():
            return
        covers = self.zeros
        for home in self.model.policies[0]:
            ahead, behind = (
                self.cell(Column("covers", home, place, kind, phase))
                for phase in PHASES
            )
            covers = covers + behind + ahead * (1 + self.policy(home, "full", "named"))
        if self.cluster.platform == "cpu":
            covers = self.zeros
        left = np.maximum(0.0, whole - covers) / np.maximum(whole, TINY)
        for phase, seconds in sent.items():
            self._add((kind, place, phase, "activation"), seconds * left)


class Cases(_Rows):
    """Cases of one placement, or of one kind among replicas.

    Attributes:
        by: see ``Placement``.
        groups: their stages.
        holders: places where there are parameters.
        held: parameters by place.
        over: layers that stages could hold beyond those that there are.
    """

    def __init__(
        self, model: Model, frames: Frames, placement: Placement, kind: int | None
    ) -> None:
        super().__init__(model, frames)
        self.by, self.alike = placement.by, placement.by == "all"
        first, *others = self._groups(placement, kind)
        self.groups = [first, *(g for g in others if g.count.any())]
        self.over = self.zeros
        self.holders = model.storage.holders
        self.held = model.storage.at(frames.cell, frames.data, frames.fsdp)
        self._seconds: Seconds | None = None
        self._sums: dict[tuple[int, int, str], Array] = {}
        self._ends: dict[tuple[int, str], Array] = {}

    @property
    def seconds(self) -> Seconds:
        """Of one micro-batch at each place; worked out once it is asked for."""
        if self._seconds is None:
            frames = self.frames
            kinds = list(dict.fromkeys(group.kind for group in self.groups))
            first, inverse = distinct_columns(
                [frames.cell, frames.order, self._moved(), frames.ring, frames.remat]
            )
            inside = _Inside(self.model, frames.take(first), kinds)
            self._seconds = {k: v[inverse] for k, v in inside.seconds.items()}
            for used in kinds:
                self._batch_wide(used)
                self._parameters(used)
                self._offloaded(used)
        return self._seconds

    def _moved(self) -> Array:
        """Size of the axis that an order moves inside those of a stage."""
        found = np.ones(self.number, dtype=np.int64)
        for index, order in enumerate(ORDERS):
            if order[-1] in ("stage", "data", "fsdp"):
                moved = self.frames.order == index
                found = np.where(moved, self.mesh[order[-1]], found)
        return found

    def capacity(self, kind: int) -> tuple[int, float]:
        """Bytes of a device, and of its host; the least where shares are alike."""
        kinds = self.cluster.kinds if self.alike else (self.cluster.kinds[kind],)
        return (
            int(self.model.room * min(k.memory_bytes for k in kinds)),
            min(k.host_memory_bytes or math.inf for k in kinds),
        )

    def host_link(self, kind: int) -> float:
        """Bytes per second to the host; 0 where there is no link."""
        kinds = self.cluster.kinds if self.alike else (self.cluster.kinds[kind],)
        return min(k.host_link_bytes_per_second or 0.0 for k in kinds)

    def offloads(self, name: str) -> Array:
        """Cases that keep something in host memory."""
        bit = 1 << OFFLOADS.index(name)
        found: Array = (self.frames.offload & bit) > 0
        return found

    # Stages.

    def _groups(self, placement: Placement, kind: int | None) -> list[Group]:
        stages = self.frames.stage
        zero = np.zeros(self.number, dtype=np.int64)
        no, yes = zero > 0, zero == 0
        alone = stages == 1
        if placement.by == "stages":
            devices = sum(placement.counts)
            parts = [
                (k, stages * n // devices)
                for k, n in zip(placement.kinds, placement.counts, strict=True)
            ]
        else:
            here = kind if kind is not None else self._slowest()
            parts = [(here, stages)]
        groups = [Group(parts[0][0], zero + 1, zero, yes, alone)]
        before = zero
        for place, (k, count) in enumerate(parts):
            inner = count - (place == 0)
            if place == len(parts) - 1:
                inner = inner - ~alone
            start = before + (place == 0)
            groups.append(Group(k, np.maximum(inner, 0), start, no, no))
            before = before + count
        groups.append(Group(parts[-1][0], 1 - alone, stages - 1, no, yes))
        return groups

    def _slowest(self) -> int:
        return self.cluster.kinds.index(self.cluster.slowest)

    # One micro-batch at each place, by term.

    def _add(self, kind: int, place: int, phase: str, term: str, values: Array) -> None:
        if place == LAYER:
            values = values / self.model.layers
        key = (kind, place, phase, term)
        self.seconds[key] = self.seconds.get(key, 0.0) + values

    def _batch_wide(self, kind: int) -> None:
        """Collectives over the whole batch: statistics, and the loss."""
        for column, axes, payload, times in self.model.traffic:
            if "data" in axes:
                for phase, seconds in self.traffic(column, axes, payload, times):
                    self._add(kind, column.place, phase, column.term, seconds)

    def _parameters(self, kind: int) -> None:
        """Gathers of parameters in shards, half of them in each pass."""
        share = (1 - self.hidden.overlap_parameters) / 2
        if not (self.frames.fsdp > 1).any():
            return
        for place in self.holders:
            payload, times = self.held[place].gathers
            seconds = share * self.collective("all-gather", ("fsdp",), payload, times)
            # What several places read is gathered at the first of them.
            where = place if place in PLACES else FIRST
            for phase in PHASES:
                self._add(kind, where, phase, "parameter", seconds)

    def _offloaded(self, kind: int) -> None:
        """What transfers to and from the host take longer than the computation."""
        link = self.host_link(kind)
        if not self.frames.offload.any() or not link:
            return
        away = self.offloads("params")
        exact = self.model.exact
        if exact is not None and (self.frames.stage == 1).all() and exact.covers(self):
            self._add_transfers(kind, link, exact.offloaded_activations(self))
            return
        for place in PLACES:
            params = self.held[place].params * away
            saved = self.saved(place) * self.offloads("activations")
            # Sums of gradients come and go again with every micro-batch.
            sums = 2 * self.gradients(place) * self.offloads("gradients")
            for phase in PHASES:
                compute = self.seconds[kind, place, phase, "compute"]
                if place == LAYER:
                    compute = compute * self.model.layers
                moved = params + saved + (sums if phase == "backward" else 0.0)
                exposed = exposed_seconds(moved, link, compute)
                self._add(kind, place, phase, "offload", exposed)

    def _add_transfers(self, kind: int, link: float, waiting: Array) -> None:
        """The same of what a program moves beside all that it computes, as one plan.

        Args:
            kind: of device.
            link: bytes per second to the host.
            waiting: bytes of activations of one micro-batch that wait there.
        """
        moved = waiting * self.offloads("activations")
        for place in self.holders:
            moved = moved + self.held[place].params * self.offloads("params")
        for phase in PHASES:
            compute = self.zeros
            for place in PLACES:
                times = self.model.layers if place == LAYER else 1
                compute = compute + times * self.seconds[kind, place, phase, "compute"]
            exposed = exposed_seconds(moved, link, compute)
            self._add(kind, LAYER, phase, "offload", exposed)

    def place_seconds(self, kind: int, place: int, phase: str) -> Array:
        """One micro-batch at a place: for ``LAYER`` one layer."""
        key = (kind, place, phase)
        if key not in self._sums:
            found = self.zeros
            for term in TERMS:
                found = found + self.seconds.get((*key, term), 0.0)
            self._sums[key] = found
        return self._sums[key]

    def bare_seconds(self, kind: int, place: int) -> Array:
        """Computation of one micro-batch at a place, nothing computed again."""
        found = self.zeros
        launch = self.cluster.kinds[kind].launch_seconds
        for home in self.model.policies[0]:
            for phase in PHASES:
                found = found + self.cell(Column(phase, home, place, kind))
            found = found + self.cell(Column("launches", home, place)) * launch
        return found / self.model.layers if place == LAYER else found

    def stage_seconds(
        self, group: Group, layers: Array, phases: Sequence[str] = PHASES
    ) -> Array:
        """One micro-batch on a stage of a group with so many layers."""
        return sum(
            (
                layers * self.place_seconds(group.kind, LAYER, phase)
                + self._end_seconds(group, phase)
                for phase in phases
            ),
            self.zeros,
        )

    def _end_seconds(self, group: Group, phase: str) -> Array:
        """One micro-batch on a stage of a group, but for its layers."""
        key = id(group), phase
        if key not in self._ends:
            first = group.first * self.place_seconds(group.kind, FIRST, phase)
            last = group.last * self.place_seconds(group.kind, LAST, phase)
            self._ends[key] = first + last
        return self._ends[key]

    # Bytes.

    def gradients(self, place: int) -> Array:
        """Gradients of a place; all layers."""
        return self.owned(self.held[place].gradients, 2)

    def owned(self, pair: Array, level: int = 1) -> Array:
        """Of a pair, with ZeRO's shards from some level on."""
        found: Array = np.where(self.frames.zero >= level, pair[1], pair[0])
        return found

    def saved(self, place: int, *, least: bool = False) -> Array:
        """Bytes kept from forward to backward at a place; all layers.

        Args:
            place: along the chain.
            least: under the policy of each TaskGraph that keeps least.
        """
        found = self.zeros
        for home in self.model.policies[0]:
            names = dict.fromkeys(p[home] for p in self.model.policies)
            kept = {n: self.cell(Column("saved", home, place, phase=n)) for n in names}
            if least:
                found = found + np.min(list(kept.values()), axis=0)
                continue
            for name, values in kept.items():
                found = found + values * self.policy(home, name)
        return found

    def in_flight(self, group: Group, parts: Array, *, last: bool = False) -> Array:
        """Of so many micro-batches, how many stages' worth a group holds at most.

        Args:
            group: its first stage holds most.
            parts: micro-batches.
            last: what its last stage holds.
        """
        f = self.frames
        stage = np.maximum(0, group.index + group.count - 1) if last else group.index
        held = np.zeros(self.number)
        for index, name in enumerate(SCHEDULES):
            rows = np.flatnonzero(f.schedule == index)
            if len(rows):
                held[rows] = most_in_flight(
                    name,
                    f.stage[rows],
                    stage[rows],
                    parts[rows],
                    f.chunks[rows],
                )
        found: Array = held / f.chunks
        return found

    def fresh(self, kind: int, nbytes: Array) -> Array:
        """Seconds of touching so much new memory."""
        speed = self.cluster.kinds[kind].fresh_bytes_per_second
        if speed is None:
            return self.zeros
        return np.where(nbytes <= KEPT_BYTES, 0.0, nbytes / speed)


def usual_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a reduction with ``fsdp`` beside ``data``, in the usual order."""
    named = {*axes, "fsdp"} if "data" in axes else set(axes)
    return tuple(a for a in GRID_AXES if a in named)
