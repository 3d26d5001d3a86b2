"""The space of the search over arrays: the cells of a model on a cluster, priced.

It depends on little of what a search is asked, so that searches of one model share it.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.row_builder import Views
from whalejax.planner.model.dimension_analysis import analyse
from whalejax.planner.model.expert_regions import with_expert_regions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.rebatch import resized
from whalejax.planner.model.repeated_layers import find_layers
from whalejax.planner.search.batched.cases import Placement
from whalejax.planner.search.batched.cells import Column, Columns, Links, Pricer, ideal
from whalejax.planner.search.batched.layout_variants import Points, Variant, Variants
from whalejax.planner.search.batched.link_rates import Wires
from whalejax.planner.search.batched.mesh_grid import Bounds, Frames, frames_of
from whalejax.planner.search.batched.parameter_bytes import Storage
from whalejax.planner.search.request import Request
from whalejax.planner.search.user_choices import Asked
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.sharding.strategies import choices


INNER = ("expert", "context", "tensor")
"""Axes inside a replica of a stage."""


WIDER = 4
"""A graph is read with so many times its batch: what holds of all its divisors holds of
half and of twice the batch, too."""


class Reading:
    """A graph as the wide search reads it, whatever the cluster.

    Args:
        graph: a captured loss.
        default: the strategy of what is not marked.

    Attributes:
        asked: the graph as given.
        graph: the same with equal layers written once, and with ``batch`` where that
            can be told.
        batch: samples of a step; all that divide them are covered.
    """

    def __init__(self, graph: Graph, default: str | None) -> None:
        self.asked = graph
        self.batch = whole_batch(graph)
        layers = find_layers(graph)
        wider = resized(layers.graph, WIDER * self.batch)
        if wider is not None:
            self.batch = WIDER * self.batch
            layers = dataclasses.replace(layers, graph=wider)
        self.dims = dims = analyse(layers.graph)
        self.graph = graph = with_expert_regions(layers.graph, dims)
        self.views = Views(graph, dims)
        options = choices(graph, dims, self.views.rows(graph), default)
        self.variants = Variants(graph, dims, layers, options)
        self.experts = any(
            c.experts or c.pinned_to("expert") for c in options.choices.values()
        )

    def covers(self, graph: Graph) -> bool:
        """Whether it says all of the same loss with another batch, too."""
        return graph is self.asked or (
            self.graph.batch_size == self.batch and self.batch % whole_batch(graph) == 0
        )


def whole_batch(graph: Graph) -> int:
    """Samples of a step."""
    return graph.batch_size * graph.num_micro_batches


class Space:
    """Every cell of a model on a cluster: what shards what inside a stage, priced.

    Args:
        reading: the model.
        cluster: the machine.
        request: what was asked.
        like: the space of the same on other devices, which one compiler serves.

    Attributes:
        reading, cluster: as given.
        inner: sizes of axes inside a stage, as far as the user fixed them.
        served: variants that serve what was asked; empty if none does.
        links: what pricing needs; of the first of them.
        cells: priced columns.
        storage: how parameters are stored.
        wires, ideal_wires: rates of the cluster's links, and were all the fastest.
    """

    def __init__(
        self,
        reading: Reading,
        cluster: Cluster,
        request: Request,
        like: Space | None = None,
    ) -> None:
        self.served: list[Variant]
        self.links: Links
        self.cells: Columns
        self.storage: Storage
        self.reading, self.cluster = reading, cluster
        self.inner = inner_sizes(reading, request)
        known = (None, None) if like is None else (like.wires, like.ideal_wires)
        self.wires: Wires = Wires(cluster, known[0])
        self.ideal_wires: Wires = Wires(ideal(cluster), known[1])
        size = reading.graph.batch_size
        if like is not None:
            self.served, self.links = like.served, like.links
            self.storage, self.inner = like.storage, like.inner
            pricer = Pricer(self.served, self.links, cluster, size)
            self.cells = pricer.price(like.cells)
            return
        wanted = request.sequence_parallel
        found = reading.variants.of(self._points(request))
        self.served = [v for v in found if wanted in (None, v.sequence_parallel)]
        if not self.served:
            return
        self.links = Links(
            self.served[0].chain,
            reading.views,
            request.optimizer,
            cluster.compiler,
            narrowed=request.narrowed,
            cast_bytes=request.cast_bytes,
        )
        self.cells = Pricer(self.served, self.links, cluster, size).price()
        self.storage = Storage(
            self.cells, self.links.leaves, request.cast_bytes, cluster.compiler
        )

    def _points(self, request: Request) -> Points:
        total, fixed = request.num_devices, self.inner

        def sizes(axis: str, used: bool) -> list[int]:
            allowed = divisors(total) if used else [1]
            return [n for n in allowed if fixed.get(axis, n) == n]

        batch = self.reading.batch
        samples = divisors(batch)
        found = [
            (n, expert, context, tensor)
            for expert in sizes("expert", self.reading.experts)
            for context in sizes("context", bool(self.reading.variants.sequence))
            for tensor in sizes("tensor", True)
            if total % (expert * context * tensor) == 0
            for n in samples
            if batch % (n * expert) == 0
        ]
        table = np.array(found, dtype=np.int64).reshape(-1, 4)
        names = ("samples", *INNER)
        return Points(**{name: table[:, i] for i, name in enumerate(names)})

    @property
    def sizes(self) -> dict[str, np.ndarray]:
        """Samples of a micro-batch, and the axes inside a stage, of every cell."""
        return {
            name: self.cells[Column(name)].astype(np.int64)
            for name in ("samples", *INNER)
        }


def inner_sizes(reading: Reading, request: Request) -> dict[str, int]:
    """Sizes of axes inside a stage, as far as the user fixed them."""
    fixed = Asked.of(reading.graph, request).mesh
    return {axis: size for axis, size in fixed.items() if axis in INNER}


class Spaces:
    """The spaces of one loss, each worked out once, whatever the batch.

    Attributes:
        seeds: sizes of the mesh axes that the last searches chose.
    """

    def __init__(self) -> None:
        self.seeds: deque[tuple[int, ...]] = deque(maxlen=8)
        self._frames: deque[tuple[tuple[object, ...], Frames]] = deque(maxlen=4)
        self._readings: list[tuple[tuple[object, ...], Reading]] = []
        self._spaces: list[tuple[tuple[object, ...], Space]] = []

    def _reading(self, graph: Graph, default: str | None, program: object) -> Reading:
        key = default, program
        for known, reading in self._readings:
            if known == key and reading.covers(graph):
                return reading
        found = Reading(graph, default)
        self._readings.append((key, found))
        return found

    def of(
        self, graph: Graph, cluster: Cluster, request: Request, program: object = None
    ) -> Space:
        """The space of a request.

        Args:
            graph: of the loss; each can be told from each other of the same program.
            cluster: the machine.
            request: what was asked.
            program: how attention, logits and layers run, where not as written.
        """
        reading = self._reading(graph, request.default, program)
        key = (
            *(cluster.compiler, request.num_devices),
            *(request.sequence_parallel, request.optimizer),
            *(request.narrowed, request.cast_bytes),
        )
        # Where an axis is fixed, other sizes are left out when frames are made.
        inner = inner_sizes(reading, request)
        alike = [
            space
            for known, space in self._spaces
            if known == key and space.reading is reading and space.inner in ({}, inner)
        ]
        for space in alike:
            if space.cluster == cluster:
                return space
        like = next((space for space in alike if space.served), None)
        space = Space(reading, cluster, request, like)
        self._spaces.append((key, space))
        return space

    def frames(self, space: Space, placement: Placement, bounds: Bounds) -> Frames:
        """Every frame around the cells of a space, worked out once for equal bounds.

        Args:
            space: one of these.
            placement: kinds of devices.
            bounds: what frames may be.
        """
        key = space.served, placement, bounds
        for known, frames in self._frames:
            if known[0] is key[0] and known[1:] == key[1:]:
                return frames
        sizes, replicas = space.sizes, placement.by == "replicas"
        count = len(sizes["samples"])
        found = frames_of(np.arange(count), sizes, bounds, shares=replicas)
        fits = np.ones(len(found), dtype=bool)
        inner = sizes["expert"] * sizes["context"] * sizes["tensor"]
        for number in placement.counts:
            if replicas:
                fits &= number % (inner[found.cell] * found.stage * found.fsdp) == 0
            if placement.by == "stages":
                part = found.stage * number
                fits &= (part % bounds.num_devices == 0) & (part > 0)
        found = found.take(fits)
        self._frames.append((key, found))
        return found
