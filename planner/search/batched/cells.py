"""One micro-batch inside a stage under a variant, for many meshes at once.

Rows, flows, kept values and leaves of a chain in spots, priced by the same functions as
single plans, with arrays for the sizes of the axes. What depends on more than the axes
inside a stage (links, shards of storage, micro-batches in flight) is kept apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster, CompilerProfile, Level
from whalejax.planner.cost.operation_cost import (
    Setting,
    flow_cost,
    gradients_of,
    hits_of,
    rounds_of,
    row_seconds,
)
from whalejax.planner.cost.row_builder import Views
from whalejax.planner.entries import Collective
from whalejax.planner.memory.saved_tensors import (
    Kept,
    Residents,
    fold_kept,
    kept_bytes,
    residents,
)
from whalejax.planner.model.dimensions import Layout
from whalejax.planner.model.graph import ATTENTION
from whalejax.planner.model.layer_chain import LAYER, Chain
from whalejax.planner.model.repeated_layers import kind_of
from whalejax.planner.search.batched.layout_variants import Array, Variant
from whalejax.planner.sharding.fused_parameters import Fused, lying
from whalejax.planner.sharding.layout import GRID_AXES, Spec
from whalejax.planner.sharding.operation_rows import Flow, Row, Rows
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafGroup,
    OptimizerBytes,
)


REMATS = ("none", "dots", "named", "full")
"""What a TaskGraph keeps for its backward pass: all that it reads again, the results of
products with weights, what the model names, or nothing but what it is given."""


@dataclass(frozen=True, slots=True)
class Column:
    """What an array over cells says; fields that do not matter keep their defaults.

    Attributes:
        what: ``forward``, ``backward`` or ``again`` (seconds of a TaskGraph at a place
            on a kind of device; ``again`` leaves products out), ``launches``,
            ``bytes`` and ``times`` (payload and count of collectives), ``attention``
            (seconds of its products), ``covers`` (seconds of attention in blocks, while
            which keys and values go round), ``saved``, ``rebuilt``, ``largest``,
            ``stream`` (bytes), ``gradient`` (bytes to reduce), ``parts`` (shards of a
            dimension of a group of leaves), ``samples``, ``expert``, ``context``,
            ``tensor``, ``variant`` and ``ring``.
        task_graph: which, or which group of leaves.
        place: along the chain, or which dimension.
        kind: which kind of device.
        phase: forward, backward, or the policy of what is saved.
        term: of the time, for collectives.
        collective, axes: for collectives.
    """

    what: str
    task_graph: int = 0
    place: int = 0
    kind: int = 0
    phase: str = ""
    term: str = ""
    collective: str = ""
    axes: tuple[str, ...] = ()


_TIMED = ("forward", "backward", "again", "attention", "covers")
"""Columns that depend on the kind of device."""

Columns = dict[Column, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLeaves:
    """A group of leaves along a chain.

    Attributes:
        group: its facts.
        count: leaves in all.
        place: where they lie.
        task_graph: which TaskGraph does.
        slices: layers that each leaf holds.
    """

    group: LeafGroup
    count: int
    place: int
    task_graph: int
    slices: int


class Links:
    """What a chain needs to be priced, worked out once.

    Args:
        chain: the layers.
        views: its operations, wherever they stand.
        optimizer: bytes of its state.
        compiler: what it makes of the operations.
        narrowed: only some TaskGraphs compute in 16 bits.
        cast_bytes: of a float32 parameter as computed with, over its own.
    """

    def __init__(
        self,
        chain: Chain,
        views: Views,
        optimizer: OptimizerBytes,
        compiler: CompilerProfile,
        *,
        narrowed: bool = False,
        cast_bytes: float = 1.0,
    ) -> None:
        self.chain = chain
        self.dims = dims = views.dims
        self.rows: Rows = views.rows(chain.graph)
        self.residents: Residents = residents(
            chain.graph,
            dims,
            self.rows.weight,
            copies_kernels=compiler.copies_kernels,
        )
        self.facts = LeafFacts.of(
            chain.graph,
            dims,
            self.rows.reading,
            optimizer,
            narrowed=narrowed,
            cast_bytes=cast_bytes,
        )
        self.leaves = self._leaves()
        self.entries = self._entries()
        self.stream = self._stream()
        self.named = any(op.kind == "name" for op in chain.graph.ops)
        self.twins = self._twins()

    def _leaves(self) -> tuple[StackedLeaves, ...]:
        """Leaves that differ in their layer's number alone are one; in tree order."""
        counts: Counter[tuple[Any, ...]] = Counter()
        groups: dict[tuple[Any, ...], LeafGroup] = {}
        places = self.chain.leaf_places()
        for tensor, index in zip(self.facts.tensors, self.facts.group_of, strict=True):
            group = self.facts.groups[index][0]
            spot = self.chain.spots[group.home]
            key = (places[tensor.id], spot.task_graph, *kind_of(tensor))
            groups.setdefault(key, group)
            counts[key] += self.chain.leaf_times.get(tensor.path, 1)
        return tuple(
            self._stacked(groups[key], n, key[0], key[1]) for key, n in counts.items()
        )

    def _stacked(
        self, group: LeafGroup, count: int, place: int, task_graph: int
    ) -> StackedLeaves:
        stack = place == LAYER and self.chain.scanned
        return StackedLeaves(
            group=group,
            count=count,
            place=place,
            task_graph=task_graph,
            slices=self.chain.layers if stack else 1,
        )

    def _entries(self) -> dict[int, tuple[Kept, ...]]:
        graph = self.chain.graph
        readers: dict[tuple[int, int], int] = {}
        for op in graph.ops:
            home = self.chain.spots[op.task_graph].task_graph
            for t in op.operands:
                readers.setdefault((t, home), op.task_graph)
        found = {}
        for home, entries in self.chain.entries().items():
            once = {t: (trip, readers[t, home]) for t, trip in entries}
            times = {t: 0 for t in once}
            for t, trip in entries:
                times[t] += trip
            found[home] = fold_kept(
                graph, self.dims, {t: (times[t], spot) for t, (_, spot) in once.items()}
            )
        return found

    def _stream(self) -> tuple[Kept, ...]:
        graph = self.chain.graph
        reader = {t: op.task_graph for op in reversed(graph.ops) for t in op.operands}
        entries = {t: (1, reader[t]) for t in self.chain.stream()}
        return fold_kept(graph, self.dims, entries)

    def _twins(self) -> frozenset[int]:
        """Roles that stand for a cut dimension where it meets itself."""
        found: set[int] = set()
        for cut in self.dims.cuts:
            if self.chain.graph.ops[cut.op].matmul is not None:
                found.update(self.dims.seen[cut.op, cut.slot][cut.dim])
        return frozenset(found)

    def meets_itself(self, row: Row, sequence: Sequence[int]) -> bool:
        """It is a product of attention: over a sequence and its twin."""
        roles = frozenset[int]().union(*(slot.roles for slot in row.slots))
        return row.product is not None and bool(
            roles & self.twins and roles & set(sequence)
        )


class Pricer:
    """Prices all variants of a chain, those that agree in an operation together."""

    def __init__(
        self,
        variants: Sequence[Variant],
        links: Links,
        cluster: Cluster,
        batch_size: int,
    ) -> None:
        self.variants = variants
        self.links = links
        self.cluster = cluster
        self.columns: Columns = {}
        counts = [len(v.points.samples) for v in variants]
        bounds = np.concatenate([[0], np.cumsum(counts)])
        self.rows_of = [
            np.arange(a, b) for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        self.number = int(bounds[-1])
        for name in ("samples", "expert", "context", "tensor"):
            parts = [getattr(v.points, name) for v in variants]
            self.columns[Column(name)] = np.concatenate(parts) * 1.0
        owner = np.repeat(np.arange(len(variants)), counts)
        self.columns[Column("variant")] = owner.astype(float)
        self.mesh = self._mesh(batch_size)
        self.batch = frozenset(r.index for r in links.dims.batch)
        self.likes = [self._like(rows) for rows in self.rows_of]
        self._settings: dict[tuple[int, ...], tuple[Array, Setting]] = {}
        self._numbers: dict[Hashable, int] = {}
        self.hits = functools.cache(self._hits)
        self.specs = functools.cache(self._specs)
        self.alike_in_hits = functools.cache(self._alike_in_hits)
        self.alike_in_specs = functools.cache(self._alike_in_specs)

    def _mesh(self, batch_size: int) -> dict[str, Array]:
        c, one = self.columns, np.ones(self.number)
        sizes = {axis: c[Column(axis)] for axis in ("expert", "context", "tensor")}
        data = batch_size / (c[Column("samples")] * sizes["expert"])
        sizes |= {"stage": one, "data": data, "fsdp": one}
        return {axis: sizes[axis] for axis in GRID_AXES}

    def _like(self, rows: Array) -> dict[str, int]:
        """One mesh of a variant: with the batch in parts, if any has it so."""
        best = rows[int(np.argmax(self.mesh["data"][rows]))]
        return {axis: int(self.mesh[axis][best]) for axis in GRID_AXES}

    def setting(self, variants: tuple[int, ...]) -> tuple[Array, Setting]:
        """The cells of some variants, and their meshes."""
        if variants not in self._settings:
            rows = np.concatenate([self.rows_of[v] for v in variants])
            mesh = {axis: sizes[rows] for axis, sizes in self.mesh.items()}
            like = self.likes[variants[0]]
            s = Setting(mesh, 1, self.cluster, self.links.dims, self.batch, like)
            self._settings[variants] = rows, s
        return self._settings[variants]

    def _hits(self, spot: int, present: frozenset[int]) -> list[dict[str, int]]:
        """``hits_of`` under every variant where these roles are present."""
        settings = (self.setting((v,))[1] for v in range(len(self.variants)))
        return [
            hits_of(present, variant.spots[spot], s)
            for variant, s in zip(self.variants, settings, strict=True)
        ]

    def _specs(
        self, layout: Layout, sizes: Layout, spot: int, fused: Fused | None = None
    ) -> list[Spec]:
        """Layouts of a value, or of a parameter as it lies, under every variant."""
        return [
            lying(layout, sizes, fused, variant.spots[spot], like)
            for variant, like in zip(self.variants, self.likes, strict=True)
        ]

    def _alike_in_hits(self, spot: int, present: frozenset[int]) -> list[int]:
        """A number for every variant, the same for those with the same hits."""
        return self._numbered(tuple(h.items()) for h in self.hits(spot, present))

    def _alike_in_specs(
        self, layout: Layout, sizes: Layout, spot: int, fused: Fused | None = None
    ) -> list[int]:
        """The same for those that lay a value out alike."""
        return self._numbered(self.specs(layout, sizes, spot, fused))

    def _numbered(self, values: Iterable[Hashable]) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(value, len(numbers)) for value in values]

    def alike(self, *signatures: Sequence[int]) -> list[tuple[int, ...]]:
        """Variants by some numbers of each."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, key in enumerate(zip(*signatures, strict=True)):
            found.setdefault(key, []).append(index)
        return [tuple(group) for group in found.values()]

    def cells(self, column: Column) -> Array:
        """A column, to add to."""
        if column not in self.columns:
            self.columns[column] = np.zeros(self.number)
        return self.columns[column]

    def add(self, column: Column, rows: Array, values: Any) -> None:
        """Add to a column at some cells."""
        self.cells(column)[rows] += values

    def where(self, spot: int) -> tuple[int, int]:
        """TaskGraph and place of a spot."""
        found = self.links.chain.spots[spot]
        return found.task_graph, found.place

    def price(self, priced: Columns | None = None) -> Columns:
        """All columns.

        Args:
            priced: those for devices of other kinds, of the same compiler.
        """
        if priced is not None:
            self.columns |= {c: v for c, v in priced.items() if c.what not in _TIMED}
        for row in self.links.rows.ops:
            self._work(row, alone=priced is not None)
        if priced is not None:
            return self.columns
        for flow in self.links.rows.flows:
            self._traffic(flow)
        self._memory()
        self._parts()
        return self.columns

    def _work(self, row: Row, *, alone: bool) -> None:
        """Seconds of an operation; its kernels and gradients' reductions, unless alone.

        Args:
            row: equal operations.
            alone: nothing else is wanted.
        """
        spot, present = row.task_graph, frozenset[int]()
        for slot in row.slots:
            present |= slot.roles
        home, place = self.where(spot)
        timed = [self._timed(row, kind) for kind in range(len(self.cluster.kinds))]
        launched = self.cells(Column("launches", home, place))
        for group in self.alike(self.alike_in_hits(spot, present)):
            rows, s = self.setting(group)
            hits = self.hits(spot, present)[group[0]]
            launches = 0.0
            for device, (forward, backward) in zip(
                self.cluster.kinds, timed, strict=True
            ):
                ahead, behind, launches = row_seconds(row, hits, s, device)
                ahead = ahead * row.count
                behind = behind * row.count + ahead * row.remat
                for column in forward:
                    column[rows] += ahead
                for column in backward:
                    column[rows] += behind
            if alone:
                continue
            launched[rows] += launches * row.count
            for c in gradients_of(row, hits, s):
                column = self.cells(Column("gradient", 0, place, axes=c.axes))
                column[rows] += c.payload_bytes * float(c.count)
            for c in rounds_of(row, hits, s):
                self._send(home, place, rows, c)

    def _timed(self, row: Row, kind: int) -> tuple[list[Array], list[Array]]:
        """Columns that an operation's seconds count in, forward and backward."""
        home, place = self.where(row.task_graph)
        forward = [Column("forward", home, place, kind)]
        backward = [Column("backward", home, place, kind)]
        if row.product is None or not _weighs(row):
            forward.append(Column("again", home, place, kind))
        if self.links.meets_itself(row, self.variants[0].spots[0]["context"]):
            forward.append(Column("attention", kind=kind, phase="forward"))
            backward.append(Column("attention", kind=kind, phase="backward"))
        if row.kind == ATTENTION:
            forward.append(Column("covers", home, place, kind, "forward"))
            backward.append(Column("covers", home, place, kind, "backward"))
        return [*map(self.cells, forward)], [*map(self.cells, backward)]

    def _flow_signatures(self, flow: Flow) -> Iterator[list[int]]:
        """What decides the collectives of a flow under a variant, but for sizes."""
        source, home = flow.source, flow.task_graph
        yield self.alike_in_specs(source.layout, source.sizes, home, flow.fused)
        yield self.alike_in_hits(home, flow.present)
        for use in flow.uses:
            yield self.alike_in_specs(use.view.layout, use.view.sizes, use.task_graph)
            yield self.alike_in_hits(use.task_graph, use.present)

    def _traffic(self, flow: Flow) -> None:
        """Collectives on a value, by where they run."""
        home, place = self.where(_reader(flow))
        for group in self.alike(*self._flow_signatures(flow)):
            rows, s = self.setting(group)
            for c in flow_cost(flow, self.variants[group[0]].spots, s):
                self._send(home, place, rows, c)

    def _send(self, home: int, place: int, rows: Array, c: Collective) -> None:
        """Add a collective on activations to its columns, at some cells."""
        column = Column(
            "bytes",
            home,
            place,
            phase=c.phase,
            term=c.what,
            collective=c.kind,
            axes=c.axes,
        )
        count = np.asarray(c.count, dtype=float)
        self.add(column, rows, c.payload_bytes * count)
        self.add(dataclasses.replace(column, what="times"), rows, count)

    def _kept(self, entry: Kept) -> Array:
        """Bytes of a kept value at every cell."""
        found = np.zeros(self.number)
        specs = self.alike_in_specs(entry.layout, entry.sizes, entry.task_graph)
        for group in self.alike(specs):
            rows, s = self.setting(group)
            tables = self.variants[group[0]].spots
            found[rows] = kept_bytes((entry,), tables, s)[0]
        return found

    def _memory(self) -> None:
        """Bytes kept from forward to backward under every policy, and temporaries."""
        every, kept = np.arange(self.number), self.links.residents
        for entry in kept.saved:
            home, place = self.where(entry.task_graph)
            nbytes = self._kept(entry)
            policies = [
                "none",
                *{"product": ["dots"], "name": ["named"]}.get(entry.made, []),
            ]
            for policy in policies:
                self.add(Column("saved", home, place, phase=policy), every, nbytes)
        for home, entries in self.links.entries.items():
            for entry in entries:
                place, nbytes = self.where(entry.task_graph)[1], self._kept(entry)
                for policy in ("dots", "named", "full"):
                    self.add(Column("saved", home, place, phase=policy), every, nbytes)
        for rebuilt in kept.rebuilt:
            nbytes = sum((self._kept(entry) for entry in rebuilt), np.zeros(1))
            self._most(Column("rebuilt"), nbytes)
        for entry in kept.largest:
            self._most(Column("largest"), self._kept(entry))
        for entry in self.links.stream:
            self.add(Column("stream"), every, self._kept(entry))

    def _most(self, column: Column, nbytes: Array) -> None:
        before = self.columns.get(column, np.zeros(self.number))
        self.columns[column] = np.maximum(before, nbytes)

    def _parts(self) -> None:
        """Into how many parts the computation cuts each dimension of the leaves."""
        for index, leaf in enumerate(self.links.leaves):
            group = leaf.group
            specs = self.specs(group.layout, group.sizes, group.home, group.fused)
            for rows, spec in zip(self.rows_of, specs, strict=True):
                for dim, axes in enumerate(spec):
                    if axes:
                        column = Column("parts", index, dim)
                        if column not in self.columns:
                            self.columns[column] = np.ones(self.number)
                        for axis in axes:
                            self.columns[column][rows] *= self.mesh[axis][rows]


def _weighs(row: Row) -> bool:
    """Its result is kept where results of products with weights are."""
    return sum(slot.weight for slot in row.operands[:2]) == 1


def _reader(flow: Flow) -> int:
    """The spot that a flow belongs to: where it is made, or a weight's first reader."""
    if flow.source.weight and flow.uses:
        return flow.uses[0].task_graph
    return flow.task_graph


def ideal(cluster: Cluster) -> Cluster:
    """The cluster, were it one level of its best links without latency."""
    fastest = max(
        v.bandwidth_bytes_per_second / min([1.0, *(f for _, f in v.slowdown)])
        for v in cluster.levels
    )
    level = Level(
        name="ideal",
        size=cluster.num_devices,
        bandwidth_bytes_per_second=fastest,
        latency_seconds=0.0,
    )
    return dataclasses.replace(cluster, levels=(level,))
