"""Weights that every iteration of a loop reads unsliced, as loops over time do.

Loops over layers read a slice of their weights in each iteration. The scans around an
operation, and the slices of its weights, tell the two kinds apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whalejax.planner.model.graph import LOOPS, Graph, Op, makes_weights


def rereads(graph: Graph, weight: Sequence[bool]) -> tuple[int, ...]:
    """Returns the number of consecutive executions of each operation that read the same
    weights.

    Args:
        graph: The captured loss.
        weight: For every tensor, whether it depends on parameters alone.
    """
    if all(op.trip == 1 for op in graph.ops):
        return (1,) * len(graph.ops)
    slices: dict[int, int] = {}
    result = []
    for op in graph.ops:
        known = [slices.get(t, 1) for t in op.operands if weight[t]]
        if makes_weights(op, weight):
            times = _slice_count(graph, op)
            for t in op.results:
                slices[t] = times * max(known, default=1)
        result.append(max((op.trip // n for n in known), default=1) or 1)
    return tuple(result)


def _slice_count(graph: Graph, op: Op) -> int:
    """Returns the number of slices that an operation reads in turn; 1 without any."""
    if not op.operands:
        return 1
    before, after = (graph.tensors[t].shape for t in (op.operands[0], op.results[0]))
    if op.kind in LOOPS and before[1:] == after and before:
        return before[0]
    if op.kind in ("dynamic_slice", "gather") and op.trip > 1:
        return max(1, min(op.trip, math.prod(before) // max(1, math.prod(after))))
    return 1
