"""Which axis may shard which dimension, for the search over arrays of meshes.

A *variant* is one table for each spot of a chain: the TaskGraphs' own tables, with
sequence parallelism between the products or without. Meshes under which a variant
shards the same dimensions are priced together, as arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.layer_chain import Chain, chain_of
from whalejax.planner.model.repeated_layers import Layers
from whalejax.planner.sharding.fused_parameters import reading
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.strategies import Options, sharded_by_split


Array = np.ndarray

MOST_COMBINATIONS = 64
"""Of the TaskGraphs' tables; with more, each tries its heaviest one and none else."""

Combination = tuple[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], ...]
"""A table for each TaskGraph, as something that can be a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Sizes of the axes inside a pipeline stage, many at once; all arrays are alike.

    Attributes:
        samples: of one device in one micro-batch, where the batch is sharded over
            ``data``, ``fsdp`` and ``expert``.
        expert, context, tensor: sizes of those axes.
    """

    samples: Array
    expert: Array
    context: Array
    tensor: Array

    def take(self, chosen: Array) -> Points:
        """Some of the points."""
        names = ("samples", "expert", "context", "tensor")
        return Points(**{name: getattr(self, name)[chosen] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to shard, and the points at which it means the same.

    Attributes:
        chain: the model, divided into spots.
        tables: of each TaskGraph, for the plan.
        spots: of each spot, for the price.
        sequence_parallel: ``tensor`` shards the sequence between the products.
        points: sizes.
    """

    chain: Chain
    tables: Mapping[int, Table]
    spots: Mapping[int, Table]
    sequence_parallel: bool
    points: Points


class Variants:
    """Everything that a model may do inside a stage."""

    def __init__(
        self, graph: Graph, dims: Dimensions, layers: Layers, options: Options
    ) -> None:
        self.graph = graph
        self.layers = layers
        self.dims = dims
        self.options = options
        self.batch = frozenset(options.batch)
        self.limited = False
        self.sequence = options.sequence
        self.fused = frozenset(reading(graph, dims).fused.values())

    def of(self, points: Points) -> Iterator[Variant]:
        """Every variant with the points that it serves; none serves no point.

        Args:
            points: all sizes to consider; each breaks no mark by itself.
        """
        pairs = np.stack([points.expert, points.tensor])
        served: dict[tuple[Combination, object], list[tuple[int, int]]] = {}
        for expert, tensor in np.unique(pairs, axis=1).T.tolist():
            for combination in self._combinations(expert, tensor):
                key = (combination, self._lie(expert, tensor))
                served.setdefault(key, []).append((expert, tensor))
        named = [{g: dict(axes) for g, axes in tables} for tables, _ in served]
        shared = list(dict.fromkeys(self._shared(tables) for tables in named))
        chain = chain_of(self.graph, self.dims, self.layers, shared)
        for tables, sizes in zip(named, served.values(), strict=True):
            here = np.zeros(len(points.tensor), dtype=bool)
            for expert, tensor in sizes:
                here |= (points.expert == expert) & (points.tensor == tensor)
            between = shared.index(self._shared(tables))
            for sequence_parallel in (False, True):
                for several in (False, True):
                    mask = here & ((points.context > 1) == several)
                    mask &= self._divides(points, tables, sequence_parallel)
                    if mask.any():
                        yield Variant(
                            chain=chain,
                            tables=tables,
                            spots=self._spots(
                                chain, tables, between if sequence_parallel else None
                            ),
                            sequence_parallel=sequence_parallel,
                            points=points.take(mask),
                        )

    def _lie(self, expert: int, tensor: int) -> tuple[bool, ...]:
        """What decides on which dimension a fused parameter lies, beside the tables."""
        sizes = {self.dims.roles[r].size for f in self.fused for r in f.others}
        parts = (expert, tensor, expert * tensor)
        return tuple(size % n == 0 for size in sorted(sizes) for n in parts)

    def _combinations(self, expert: int, tensor: int) -> Iterator[Combination]:
        mesh = {"data": 2, "fsdp": 1, "expert": expert, "tensor": tensor}
        if sharded_by_split(self.options, mesh):
            return
        lists = [self._widest(g, mesh) for g in self.options.order]
        if math.prod(map(len, lists)) > MOST_COMBINATIONS:
            self.limited = True
            lists = [self._heaviest(tables) for tables in lists]
        for tables in itertools.product(*lists):
            used = [
                any(not set(t[axis]) <= self.batch for t in tables)
                for axis, size in (("expert", expert), ("tensor", tensor))
                if size > 1
            ]
            if all(used):
                named = zip(self.options.order, tables, strict=True)
                yield tuple((g, tuple(sorted(t.items()))) for g, t in named)

    def _widest(self, task_graph: int, mesh: Mapping[str, int]) -> list[Table]:
        """The tables of a TaskGraph that no other contains."""
        tables = self.options.tables(task_graph, mesh)

        def inside(one: Table, other: Table) -> bool:
            mine, theirs = set(one["tensor"]), set(other["tensor"])
            return one["expert"] == other["expert"] and mine < theirs

        return [t for t in tables if not any(inside(t, other) for other in tables)]

    def _heaviest(self, tables: list[Table]) -> list[Table]:
        """The first, which shards most weight, and the one that lends to the batch."""
        lent = [t for t in tables[1:] if set(t["tensor"]) <= self.batch]
        return [*tables[:1], *lent[:1]]

    def _divides(
        self, points: Points, tables: Mapping[int, Table], sequence_parallel: bool
    ) -> Array:
        """Points at which the sequence and the batch divide by what shards them."""
        parts = points.context.copy()
        if sequence_parallel:
            if not self.sequence:
                return np.zeros(len(parts), dtype=bool)
            parts = parts * points.tensor
        found: Array = (points.context == 1) | bool(self.sequence)
        if sequence_parallel:
            found = found & (points.tensor > 1)
        for role in self.sequence:
            found &= self.dims.roles[role].size % parts == 0
        if any(set(t["tensor"]) <= self.batch for t in tables.values()):
            found &= points.samples % points.tensor == 0
        return found

    def _shared(self, tables: Mapping[int, Table]) -> frozenset[int]:
        """Roles that the tensor axis shards instead of the batch."""
        found = frozenset(r for t in tables.values() for r in t["tensor"])
        return found - self.batch

    def _spots(
        self, chain: Chain, tables: Mapping[int, Table], between: int | None
    ) -> dict[int, Table]:
        """The table of each spot; between products the sequence's, if asked for."""
        found: dict[int, Table] = {}
        for index, spot in enumerate(chain.spots):
            table = dict(tables[spot.task_graph])
            split = not set(table["tensor"]) <= self.batch
            if between is not None and split and spot.between[between]:
                table["tensor"] = self.sequence
            found[index] = table
        return found
