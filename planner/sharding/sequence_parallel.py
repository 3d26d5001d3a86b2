"""Sequence parallelism of the operations between products that ``tensor`` shards.

A tensor axis shards heads, hidden width and vocabulary. Norms, dropout and the residual
stream between such products have none of these dimensions, so every device would
compute all of them. As TaskGraphs of their own, they can shard the sequence over the
axis. An all-reduce between them and the products then becomes an all-gather and a
reduce-scatter (Korthikanti et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions, op_roles
from whalejax.planner.model.graph import Graph, Op, TaskGraph, makes_weights
from whalejax.planner.sharding.layout import Table


SUFFIX = " between"
"""Suffix of a TaskGraph's name for its part between products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """Graph in which each TaskGraph is divided into products and the rest.

    Attributes:
        graph: Graph with the same operations; new TaskGraphs follow the others.
        parents: Original TaskGraph of each new TaskGraph between products.
        shared: Roles that ``tensor`` shards in the products.
    """

    graph: Graph
    parents: Mapping[int, int]
    shared: frozenset[int]

    def tables(
        self, tables: Mapping[int, Table], batch: Sequence[int], sequence: Sequence[int]
    ) -> dict[int, Table]:
        """Returns the tables of all TaskGraphs, including the new ones.

        Args:
            tables: Tables of the original TaskGraphs.
            batch: Roles of the batch.
            sequence: Roles that ``tensor`` shards between products.
        """
        result = dict(tables)
        for child, parent in self.parents.items():
            table = tables[parent]
            splits = not set(table["tensor"]) <= set(batch)
            result[child] = {**table, "tensor": tuple(sequence)} if splits else table
        return result


def shared_roles(tables: Mapping[int, Table], batch: Sequence[int]) -> frozenset[int]:
    """Returns the roles, except the batch, that ``tensor`` shards in some TaskGraph."""
    roles = {r for table in tables.values() for r in table.get("tensor", ())}
    return frozenset(roles.difference(batch))


def split_between(
    graph: Graph, dims: Dimensions, shared: frozenset[int]
) -> SequenceSplit:
    """Moves operations on the batch without the roles ``shared`` to other TaskGraphs.

    Args:
        graph: Captured loss with experts in TaskGraphs of their own.
        dims: Logical dimensions of the loss.
        shared: Roles that ``tensor`` shards in products.
    """
    return SequenceSplits(graph, dims).of(shared)


class SequenceSplits:
    """Results of ``split_between`` for several sets of roles, each computed once.

    Args:
        graph, dims: Arguments of ``split_between``.
    """

    def __init__(self, graph: Graph, dims: Dimensions) -> None:
        self.graph = graph
        self.dims = dims
        self.of = functools.cache(self._of)
        # Most operations are in the same TaskGraph in all splits.
        self._moved = functools.cache(self._op)

    @functools.cached_property
    def _roles(self) -> list[frozenset[int]]:
        return [op_roles(i, op, self.dims) for i, op in enumerate(self.graph.ops)]

    @functools.cached_property
    def _follows(self) -> list[tuple[int, int]]:
        return _weight_only_ops(self.graph)

    @functools.cached_property
    def _lends(self) -> list[bool]:
        marks = [one.strategy for one in self.graph.task_graphs]
        return [mark is not None and mark.kind == "replicate" for mark in marks]

    def _of(self, shared: frozenset[int]) -> SequenceSplit:
        graph, roles = self.graph, self._roles
        batch = frozenset(r.index for r in self.dims.batch)
        known = {own: bool(own & batch) and not own & shared for own in {*roles}}
        children: dict[int, int] = {}
        homes: list[int] = []
        for op, own in zip(graph.ops, roles, strict=True):
            home = op.task_graph
            if known[own] and not self._lends[home]:
                place = len(graph.task_graphs) + len(children)
                home = children.setdefault(home, place)
            homes.append(home)
        for index, reader in self._follows:
            homes[index] = homes[reader]
        new = tuple(
            TaskGraph(index=child, name=graph.task_graphs[parent].name + SUFFIX)
            for parent, child in children.items()
        )
        whole = dataclasses.replace(
            graph,
            ops=tuple(map(self._moved, range(len(homes)), homes)),
            task_graphs=(*graph.task_graphs, *new),
        )
        parents = {child: parent for parent, child in children.items()}
        return SequenceSplit(graph=whole, parents=parents, shared=shared)

    def _op(self, index: int, home: int) -> Op:
        op = self.graph.ops[index]
        return op if op.task_graph == home else dataclasses.replace(op, task_graph=home)


def _weight_only_ops(graph: Graph) -> list[tuple[int, int]]:
    """Returns (operation on weights alone, first reader) pairs, the last one first."""
    weight = graph.weight_tensors()
    reader: dict[int, int] = {}
    weight_only_ops = []
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        if makes_weights(op, weight):
            if op.results[0] in reader:
                weight_only_ops.append((index, reader[op.results[0]]))
        for t in op.operands:
            reader[t] = index
    return weight_only_ops
