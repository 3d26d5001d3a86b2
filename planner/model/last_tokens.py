"""Finds slices that drop a loss's last tokens, and the bytes that are gathered.

Capture postpones such slices. The module is separate because it needs the analysis of a
graph, and ``sequence`` is a part of that analysis.
"""

from __future__ import annotations

from whalejax.planner.model.graph import Graph, Op
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.model.reshape_factors import slots_of


MOST_CUT = 1 / 4
"""Largest fraction of a sequence that a slice may drop and still be postponed."""


def last_tokens_cut(graph: Graph) -> frozenset[tuple[int, ...]]:
    """Returns the positions of slices that drop a few tokens of a sequence.

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
    """Returns the bytes of differentiable values that operations need unsharded along
    the sequence.

    Args:
        graph: The captured loss.
    """
    dims, nbytes = analyse(graph), 0
    for index, slot in dims.whole:
        op = graph.ops[index]
        tensor = graph.tensors[slots_of(op)[slot]]
        nbytes += tensor.nbytes * op.trip * tensor.differentiable
    return nbytes
