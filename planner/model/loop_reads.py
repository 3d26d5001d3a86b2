"""Weights that every turn of a loop reads whole, as loops over time do.

Loops over layers take a slice of their weights in each turn. Which of both an operation
does is read off the scans around it and the slices that its weights are.
"""

from __future__ import annotations

from collections.abc import Sequence

from whalejax.planner.model.graph import LOOPS, Graph


def rereads(graph: Graph, weight: Sequence[bool]) -> tuple[int, ...]:
    """For each operation, how many executions in a row read the same weights.

    Scans of which neither operands nor results are stacked have no known length, and
    count as one turn.

    Args:
        graph: the captured loss.
        weight: for every tensor, whether it depends on parameters alone.
    """
    lengths = _lengths(graph)
    if not lengths:
        return (1,) * len(graph.ops)
    slices: dict[int, int] = {}
    found = []
    for op in graph.ops:
        known = [slices.get(t, 1) for t in op.operands if weight[t]]
        if op.results and all(weight[t] for t in op.results):
            before, after = (
                graph.tensors[ids[0]].shape if ids else ()
                for ids in (op.operands, op.results)
            )
            sliced = op.kind in LOOPS and before[1:] == after and len(before) > 0
            times = before[0] if sliced else 1
            for t in op.results:
                slices[t] = times * max(known, default=1)
        turns = 1
        for place in range(1, len(op.position)):
            turns *= lengths.get(op.position[:place], 1)
        found.append(max((turns // n for n in known), default=1) or 1)
    return tuple(found)


def _lengths(graph: Graph) -> dict[tuple[int, ...], int]:
    """Turns of each scan, by its position."""
    found: dict[tuple[int, ...], int] = {}
    for op in graph.ops:
        if op.kind == "scan" and op.operands and not op.results:
            found[op.position] = graph.tensors[op.operands[0]].shape[0]
    return found
