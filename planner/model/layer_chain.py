"""A model as a chain: what comes before its repeated layers, the layers, what follows.

Pipelines cut a model between layers, and whatever repeats is priced once. Every
TaskGraph is divided into *spots*: by its place along the chain, and by whether an
operation stands between the products that a tensor axis shards, where sequence
parallelism may shard the rest.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions, op_roles
from whalejax.planner.model.graph import LOOPS, Graph, TaskGraph, makes_weights
from whalejax.planner.model.repeated_layers import Layers


FIRST, LAYER, LAST = 0, 1, 2
"""Places along a chain."""

ENDS, EVERYWHERE = 3, 4
"""Where parameters lie that several places read: on both ends, or on all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A part of a TaskGraph.

    Attributes:
        task_graph: index of the TaskGraph.
        place: ``FIRST``, ``LAYER`` or ``LAST``.
        between: for each set of dimensions that a tensor axis may shard, whether its
            operations hold none of them.
    """

    task_graph: int
    place: int
    between: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A graph whose TaskGraphs are spots.

    Attributes:
        graph: the same operations; ``task_graph`` is an index into ``spots``.
        spots: what each is.
        layers: how many equal layers there are; 1 where none were found.
        scanned: the layers are one body with a trip count.
        layer_of: for each operation, the layer that it stands in (0 for a scanned
            body), -1 before the layers and ``layers`` behind them.
        leaf_times: for how many leaves one stands; see ``Layers``.
    """

    graph: Graph
    spots: tuple[Spot, ...]
    layers: int
    scanned: bool
    layer_of: tuple[int, ...]
    leaf_times: Mapping[str, int]

    def entries(self) -> dict[int, list[tuple[int, int]]]:
        """Values that a TaskGraph reads from another, or from the layer before.

        Returns:
            TaskGraph index to (tensor, trip) pairs, a tensor once for each layer that
            reads it: what is kept where all else is computed again.
        """
        weight = self.graph.weight_tensors()
        made: dict[int, tuple[int, int]] = {}
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        seen: set[tuple[int, int, int]] = set()
        for op, layer in zip(self.graph.ops, self.layer_of, strict=True):
            home = self.spots[op.task_graph].task_graph
            for t in op.operands:
                value = self.graph.tensors[t].kind == "value" and not weight[t]
                key = (t, home, layer)
                outside = made.get(t) != (home, layer)
                if value and outside and op.kind not in LOOPS and key not in seen:
                    seen.add(key)
                    found[home].append((t, op.trip))
            for t in op.results:
                made[t] = (home, -2 if op.kind in LOOPS else layer)
        return dict(found)

    def leaf_places(self) -> dict[int, int]:
        """Where each parameter has to lie, by tensor id."""
        weight = self.graph.weight_tensors()
        behind: dict[int, set[int]] = {t.id: {t.id} for t in self.graph.params}
        reads: dict[int, set[int]] = {t.id: set() for t in self.graph.params}
        sliced: set[int] = set()
        for op, layer in zip(self.graph.ops, self.layer_of, strict=True):
            sources = {p for t in op.operands for p in behind.get(t, ())}
            if makes_weights(op, weight):
                for t in op.results:
                    behind.setdefault(t, set()).update(sources)
            if op.kind in LOOPS:
                sliced |= sources
            if op.kind in LOOPS or makes_weights(op, weight):
                continue
            for parameter in sources:
                reads[parameter].add(layer)
        return {t: self._leaf_place(t, at, t in sliced) for t, at in reads.items()}

    def _leaf_place(self, tensor: int, layers: set[int], sliced: bool) -> int:
        inside = {n for n in layers if 0 <= n < self.layers}
        first, last = min(layers, default=0) < 0, max(layers, default=0) >= self.layers
        shape = self.graph.tensors[tensor].shape
        stacked = sliced and shape[:1] == (self.layers,)
        if inside and (first or last or len(inside) > 1):
            return EVERYWHERE
        if inside:
            alone = self.layers == 1 or not self.scanned or stacked
            return LAYER if alone else EVERYWHERE
        if first and last:
            return ENDS
        return LAST if last else FIRST

    def stream(self) -> tuple[int, ...]:
        """Tensors that go from one layer to the next, those of the first border."""
        makers = {t: i for i, op in enumerate(self.graph.ops) for t in op.results}
        weight = self.graph.weight_tensors()
        border = 0 if self.scanned else min(1, self.layers - 1)
        found: dict[int, None] = {}
        for op, layer in zip(self.graph.ops, self.layer_of, strict=True):
            if layer != border or op.kind in LOOPS:
                continue
            for t in op.operands:
                maker = makers.get(t)
                tensor = self.graph.tensors[t]
                if maker is None or weight[t] or not tensor.differentiable:
                    continue
                if self.layer_of[maker] != layer:
                    found[t] = None
        return tuple(found)


def chain_of(
    graph: Graph,
    dims: Dimensions,
    found: Layers,
    shared: Sequence[frozenset[int]],
) -> Chain:
    """Divide the TaskGraphs.

    Args:
        graph: ``found.graph``, experts set apart.
        dims: its logical dimensions.
        found: its layers.
        shared: sets of roles that a tensor axis may shard; operations without any of
            a set, on values of the batch, stand between.
    """
    weight = graph.weight_tensors()
    layers, layer_of = found.count, found.layer_of
    batch = frozenset(r.index for r in dims.batch)
    indices: dict[Spot, int] = {}
    spots: list[Spot] = []
    known: dict[frozenset[int], tuple[bool, ...]] = {}
    for index, op in enumerate(graph.ops):
        roles = op_roles(index, op, dims)
        if roles not in known:
            known[roles] = tuple(bool(roles & batch) and not roles & s for s in shared)
        spots.append(
            Spot(
                task_graph=op.task_graph,
                place=_place(layer_of[index], layers),
                between=known[roles],
            )
        )
    _weights_follow(graph, weight, spots)
    for spot in spots:
        indices.setdefault(spot, len(indices))
    regions = tuple(
        TaskGraph(index=i, name=f"{graph.task_graphs[s.task_graph].name}.{i}")
        for s, i in indices.items()
    )
    ops = tuple(
        dataclasses.replace(op, task_graph=indices[spot])
        for op, spot in zip(graph.ops, spots, strict=True)
    )
    return Chain(
        graph=dataclasses.replace(graph, ops=ops, task_graphs=regions),
        spots=tuple(indices),
        layers=layers,
        scanned=found.scanned,
        layer_of=layer_of,
        leaf_times=found.leaf_times,
    )


def _place(layer: int, layers: int) -> int:
    return FIRST if layer < 0 else LAST if layer >= layers else LAYER


def _weights_follow(graph: Graph, weight: Sequence[bool], spots: list[Spot]) -> None:
    """What is done with weights alone stands where their first reader does."""
    reader: dict[int, int] = {}
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        if makes_weights(op, weight):
            places = [reader[t] for t in op.results if t in reader]
            if places:
                spots[index] = spots[places[0]]
        for t in op.operands:
            reader[t] = index
