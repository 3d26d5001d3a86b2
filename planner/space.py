"""What the wide search ranges over: the cells of a model on a cluster, priced.

It depends on little of what a search is asked, so that searches of one model share it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.asked import Asked
from whalejax.planner.choices import choices
from whalejax.planner.dimensions import analyse
from whalejax.planner.graph import Graph
from whalejax.planner.layers import find_layers
from whalejax.planner.layout import divisors
from whalejax.planner.priced import Column, Columns, Links, Pricer, ideal
from whalejax.planner.regions import with_expert_regions
from whalejax.planner.search import Request
from whalejax.planner.stored import Storage
from whalejax.planner.variants import Points, Variant, Variants
from whalejax.planner.views import Views
from whalejax.planner.wires import Wires


INNER = ("expert", "context", "tensor")
"""Axes inside a replica of a stage."""


class Reading:
    """A graph as the wide search reads it, whatever the cluster.

    Args:
        graph: a captured loss.
        default: the strategy of what is not marked.
    """

    def __init__(self, graph: Graph, default: str | None) -> None:
        layers = find_layers(graph)
        self.dims = dims = analyse(layers.graph)
        self.graph = graph = with_expert_regions(layers.graph, dims)
        self.views = Views(graph, dims)
        options = choices(graph, dims, self.views.rows(graph), default)
        self.variants = Variants(graph, dims, layers, options)
        self.experts = any(
            c.experts or c.pinned_to("expert") for c in options.choices.values()
        )


class Space:
    """Every cell of a model on a cluster: what shards what inside a stage, priced.

    Args:
        reading: the model.
        cluster: the machine.
        request: what was asked.
        like: the space of the same on other devices, which one compiler serves.

    Attributes:
        reading, cluster: as given.
        batch: samples of a step.
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
        self.batch = reading.graph.batch_size * reading.graph.num_micro_batches
        self.wires, self.ideal_wires = Wires(cluster), Wires(ideal(cluster))
        size = reading.graph.batch_size
        if like is not None:
            self.served, self.links = like.served, like.links
            self.storage = like.storage
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
        )
        self.cells = Pricer(self.served, self.links, cluster, size).price()
        self.storage = Storage(self.cells, self.links.leaves, request.cast_bytes)

    def _points(self, request: Request) -> Points:
        total = request.num_devices
        fixed = Asked.of(self.reading.graph, request).mesh

        def sizes(axis: str, used: bool) -> list[int]:
            allowed = divisors(total) if used else [1]
            return [n for n in allowed if fixed.get(axis, n) == n]

        samples = divisors(self.batch)
        found = [
            (n, expert, context, tensor)
            for expert in sizes("expert", self.reading.experts)
            for context in sizes("context", bool(self.reading.variants.sequence))
            for tensor in sizes("tensor", True)
            if total % (expert * context * tensor) == 0
            for n in samples
            if self.batch % (n * expert) == 0
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


class Spaces:
    """The spaces of one graph, each worked out once.

    Attributes:
        seeds: sizes of the mesh axes that the last searches chose.
    """

    def __init__(self) -> None:
        self.seeds: deque[tuple[int, ...]] = deque(maxlen=8)
        self._readings: dict[str | None, Reading] = {}
        self._spaces: list[tuple[tuple[object, ...], Space]] = []

    def of(self, graph: Graph, cluster: Cluster, request: Request) -> Space:
        """The space of a request.

        Args:
            graph: always the same.
            cluster: the machine.
            request: what was asked.
        """
        default = request.default
        if default not in self._readings:
            self._readings[default] = Reading(graph, default)
        key = (
            *(cluster.compiler, default, request.num_devices, request.mesh or {}),
            *(request.sequence_parallel, request.optimizer),
            *(request.narrowed, request.cast_bytes),
        )
        alike = [space for known, space in self._spaces if known == key]
        for space in alike:
            if space.cluster == cluster:
                return space
        like = next((space for space in alike if space.served), None)
        space = Space(self._readings[default], cluster, request, like)
        self._spaces.append((key, space))
        return space
