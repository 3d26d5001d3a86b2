"""Sequence parallelism: what stands between the products that a tensor axis shards.

A tensor axis shards heads, hidden width and vocabulary; norms, dropout and the residual
stream between those products hold none of them, and every device would compute all of
it. As TaskGraphs of their own they may have another table, in which the axis shards the
sequence, and the borders to either side become an all-gather and a reduce-scatter where
there was an all-reduce (Korthikanti et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions, op_roles
from whalejax.planner.model.graph import Graph, Op, TaskGraph, makes_weights
from whalejax.planner.sharding.layout import Table


SUFFIX = " between"
"""Follows the name of a TaskGraph in that of its part between products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """A graph whose TaskGraphs are split in two.

    Attributes:
        graph: The same operations; new TaskGraphs stand behind the others.
        parents: TaskGraph between products to the one that it is part of.
        shared: The roles that ``tensor`` shards in the products.
    """

    graph: Graph
    parents: Mapping[int, int]
    shared: frozenset[int]

    def tables(
        self, tables: Mapping[int, Table], batch: Sequence[int], sequence: Sequence[int]
    ) -> dict[int, Table]:
        """Returns the tables of all TaskGraphs, the new ones included.

        Args:
            tables: Tables of the other TaskGraphs.
            batch: The batch roles.
            sequence: Roles that ``tensor`` shards between products.
        """
        result = dict(tables)
        for child, parent in self.parents.items():
            table = tables[parent]
            splits = not set(table["tensor"]) <= set(batch)
            result[child] = {**table, "tensor": tuple(sequence)} if splits else table
        return result


def shared_roles(tables: Mapping[int, Table], batch: Sequence[int]) -> frozenset[int]:
    """The roles that ``tensor`` shards in some TaskGraph, but for the batch."""
    roles = {r for table in tables.values() for r in table.get("tensor", ())}
    return frozenset(roles.difference(batch))


def split_between(
    graph: Graph, dims: Dimensions, shared: frozenset[int]
) -> SequenceSplit:
    """Separates operations on the batch that hold none of some roles.

    Args:
        graph: The captured loss, experts set apart.
        dims: Its logical dimensions.
        shared: The roles.
    """
    return next(splits_between(graph, dims, [shared]))


def splits_between(
    graph: Graph, dims: Dimensions, several: Iterable[frozenset[int]]
) -> Iterator[SequenceSplit]:
    """``split_between`` for one set of roles after another.

    Args:
        graph, dims: Arguments of ``split_between``, unchanged.
        several: The sets.
    """
    several = [*several]
    if not several:
        return
    batch = frozenset(r.index for r in dims.batch)
    roles = [op_roles(index, op, dims) for index, op in enumerate(graph.ops)]
    follows = _weight_only_ops(graph)
    # Most operations stand in the same TaskGraph in all of them.
    moved = functools.cache(lambda op, home: _with_task_graph(graph.ops[op], home))
    for shared in several:
        known = {own: bool(own & batch) and not own & shared for own in {*roles}}
        children: dict[int, int] = {}
        homes: list[int] = []
        for op, own in zip(graph.ops, roles, strict=True):
            home = op.task_graph
            mark = graph.task_graphs[home].strategy
            lends = mark is not None and mark.kind == "replicate"
            if known[own] and not lends:
                place = len(graph.task_graphs) + len(children)
                home = children.setdefault(home, place)
            homes.append(home)
        for index, reader in follows:
            homes[index] = homes[reader]
        new = tuple(
            TaskGraph(index=child, name=graph.task_graphs[parent].name + SUFFIX)
            for parent, child in children.items()
        )
        whole = dataclasses.replace(
            graph,
            ops=tuple(map(moved, range(len(homes)), homes)),
            task_graphs=(*graph.task_graphs, *new),
        )
        parents = {child: parent for parent, child in children.items()}
        yield SequenceSplit(graph=whole, parents=parents, shared=shared)


def _with_task_graph(op: Op, home: int) -> Op:
    return op if op.task_graph == home else dataclasses.replace(op, task_graph=home)


def _weight_only_ops(graph: Graph) -> list[tuple[int, int]]:
    """Operations with weights alone, the last first, each with its first reader.

    What is done with weights alone stands where their first reader does.
    """
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
