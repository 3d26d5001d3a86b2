"""Finds the cut of a loss's last tokens, and the bytes of the whole sequence's values.

Apart from ``sequence`` because it asks for the analysis of a graph, of which that is a
part. Capture reads it to put such cuts off.
"""

from __future__ import annotations

from whalejax.planner.model.dimension_analysis import analyse
from whalejax.planner.model.graph import Graph, Op
from whalejax.planner.model.reshape_factors import slots_of


MOST_CUT = 1 / 4
"""Part of a sequence that may be cut off for the rest to be carried on with it."""


def last_tokens_cut(graph: Graph) -> frozenset[tuple[int, ...]]:
    """Positions of slices that cut some of a sequence's tokens off values.

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
    """Little is cut off a value with a gradient."""
    before, after = (graph.tensors[t] for t in slots_of(op))
    few = after.size >= (1 - MOST_CUT) * before.size
    return few and before.differentiable and before.kind == "value"


def _cuts(op: Op) -> bool:
    """A slice that begins where the program says, by numbers that are no operands."""
    alone = op.kind == "dynamic_slice" and len(op.operands) == 1
    return op.kind == "slice" or alone


def gathered_bytes(graph: Graph) -> int:
    """Returns the bytes of differentiated values that operations need whole of a
    sharded sequence.

    Args:
        graph: The captured loss.
    """
    dims, count = analyse(graph), 0
    for index, slot in dims.whole:
        op = graph.ops[index]
        tensor = graph.tensors[slots_of(op)[slot]]
        count += tensor.nbytes * op.trip * tensor.differentiable
    return count
