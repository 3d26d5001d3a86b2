"""A captured model with its logical dimensions, and a TaskGraph for its experts.

A mixture of experts multiplies a batch of tokens by a batch of weights. From the first
to the last such product, work is divided over experts; before and after, it is divided
over tokens. One table for the whole model cannot express both. So the unmarked
operations between these products become a TaskGraph of their own, with an all-to-all on
either side.

``last_tokens_cut`` finds slices that drop the last tokens of a loss. Capture postpones
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import ALL
from whalejax.planner.model.dimensions import Dimensions, roles_of
from whalejax.planner.model.graph import Graph, Op, TaskGraph, makes_weights
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.model.reshape_factors import slots_of


EXPERTS = "experts"
"""Name of the TaskGraph of experts that have no mark."""


def expert_roles(graph: Graph, dims: Dimensions) -> frozenset[int]:
    """Returns the batch dimensions of products of values with weights.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
    """
    weight = graph.weight_tensors()
    roles: set[int] = set()
    for op in graph.ops:
        if op.matmul is None or len(op.operands) < 2:
            continue
        left, right = op.operands[0], op.operands[1]
        if weight[left] == weight[right]:
            continue
        shared = _roles(dims, left) & _roles(dims, right) & _roles(dims, op.results[0])
        roles |= {r for r in shared if not dims.roles[r].unshardable}
    return frozenset(roles)


def with_expert_regions(graph: Graph, dims: Dimensions) -> Graph:
    """Returns the graph with unmarked expert products in a TaskGraph of their own.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.

    Returns:
        The graph; the given one if no experts are outside marks.
    """
    experts = expert_roles(graph, dims)
    if not experts:
        return graph
    weight = graph.weight_tensors()
    index = len(graph.task_graphs)
    inside: set[int] = set()
    ops: list[Op] = []
    for op in graph.ops:
        free = graph.task_graphs[op.task_graph].strategy is None
        if free and _is_expert_op(op, dims, experts, weight, inside):
            inside.update(op.results)
            op = dataclasses.replace(op, task_graph=index)
        ops.append(op)
    if not inside:
        return graph
    region = TaskGraph(index=index, name=EXPERTS)
    return dataclasses.replace(
        graph, ops=tuple(ops), task_graphs=(*graph.task_graphs, region)
    )


def check_task_graphs(given: Iterable[str], graph: Graph, problems: Problems) -> None:
    """Records an error for each name that no TaskGraph has.

    Args:
        given: Names of TaskGraphs; ``"*"`` stands for all others.
        graph: The captured loss.
        problems: Collector of the errors.
    """
    names = [*given]
    if EXPERTS in names:
        graph = with_expert_regions(graph, analyse(graph))
    known = [g.name for g in graph.task_graphs]
    for name in names:
        if name not in (*known, ALL):
            problems.add(
                f"there is no TaskGraph {name!r}; expected some of {', '.join(known)}"
            )


def _is_expert_op(
    op: Op,
    dims: Dimensions,
    experts: frozenset[int],
    weight: tuple[bool, ...],
    inside: set[int],
) -> bool:
    if not op.operands or all(weight[t] for t in op.operands):
        return False
    if not all(_roles(dims, t) & experts for t in op.results):
        return False
    if op.matmul is not None and weight[op.operands[0]] != weight[op.operands[1]]:
        return bool(
            _roles(dims, op.operands[0]) & _roles(dims, op.operands[1]) & experts
        )
    values = [t for t in op.operands if not weight[t]]
    return any(t in inside for t in values) and all(
        t in inside or not dims.layouts[t] for t in values
    )


def weight_homes(graph: Graph, weight: Sequence[bool]) -> dict[int, int]:
    """Returns the TaskGraph that first computes with each parameter, ignoring casts.

    Args:
        graph: The captured loss.
        weight: For every tensor, whether it depends on parameters alone.

    Returns:
        TaskGraph index by tensor id, for parameters and values made only of them.
    """
    homes: dict[int, int] = {}
    for op in reversed(graph.ops):
        passed = makes_weights(op, weight)
        for t in op.operands:
            if weight[t]:
                home = homes.get(op.results[0]) if passed else None
                homes[t] = op.task_graph if home is None else home
    return homes


def _roles(dims: Dimensions, tensor: int) -> frozenset[int]:
    return roles_of(dims.layouts[tensor])


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """Graph with its logical dimensions; experts are a TaskGraph of their own."""

    graph: Graph
    dims: Dimensions


def analyse_graph(graph: Graph) -> GraphAnalysis:
    """Returns a graph with its logical dimensions, and with a TaskGraph of experts.

    The lowering repeats this for its own trace, so the result depends on the graph
    alone.
    """
    dims = analyse(graph)
    return GraphAnalysis(graph=with_expert_regions(graph, dims), dims=dims)


MOST_CUT = 1 / 4
"""Largest fraction of a sequence that a slice may drop if it is to be postponed."""


def last_tokens_cut(graph: Graph) -> frozenset[tuple[int, ...]]:
    """Returns the positions of slices that drop a few last tokens of a sequence.

    Args:
        graph: The captured loss.
    """
    slices = {
        index: op.position
        for index, op in enumerate(graph.ops)
        if _cuts(op) and op.trip == 1 and _cuts_few(graph, op)
    }
    if not slices:
        return frozenset()
    whole = analyse(graph).whole
    return frozenset(at for index, at in slices.items() if (index, 0) in whole)


def _cuts_few(graph: Graph, op: Op) -> bool:
    before, after = (graph.tensors[t] for t in slots_of(op))
    keeps_most = after.size >= (1 - MOST_CUT) * before.size
    return keeps_most and before.differentiable and before.kind == "value"


def _cuts(op: Op) -> bool:
    constant_start = op.kind == "dynamic_slice" and len(op.operands) == 1
    return op.kind == "slice" or constant_start


def gathered_bytes(graph: Graph) -> int:
    """Returns the bytes of values with gradients that are needed with the full
    sequence.

    Args:
        graph: The captured loss.
    """
    dims, nbytes = analyse(graph), 0
    for index, slot in dims.whole:
        op = graph.ops[index]
        tensor = graph.tensors[slots_of(op)[slot]]
        nbytes += tensor.nbytes * op.trip * tensor.differentiable
    return nbytes
