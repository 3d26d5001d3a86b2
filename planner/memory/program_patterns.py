"""Names the parts of a program for which predicted memory was never checked.

Predicted memory was compared with compiled programs. A program that sorts, loops over
time or is mostly tables has parts that no compared program had, so the error of its
prediction is unknown.
"""

from __future__ import annotations

from typing import Final

from whalejax.planner.model.graph import CONVOLUTION, Graph
from whalejax.planner.model.loop_reads import rereads
from whalejax.planner.sharding.parameter_layout import are_most, looked_up_tables


_BY_KIND: Final = {
    "sort": "sorts",
    "top_k": "sorts",
    "approx_top_k": "sorts",
    "ragged_dot_general": "ragged products",
    "while": "while loops",
    "fft": "Fourier transforms",
    **dict.fromkeys(
        "cholesky lu qr svd eigh eig triangular_solve schur".split(), "linear algebra"
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), "running sums"
    ),
}
"""Names of patterns by the kind of an operation."""

MEASURED: Final = frozenset(("2-D convolutions", "3-D convolutions"))
"""Patterns that compiled programs had; programs without patterns were compiled too."""


def patterns(graph: Graph) -> frozenset[str]:
    """Returns the names of the unusual parts of a program.

    Args:
        graph: Captured loss.

    Returns:
        Names, such as ``"2-D convolutions"`` or ``"sorts"``; empty for layers of
        products, attention and elementwise operations.
    """
    result = {_BY_KIND[op.kind] for op in graph.ops if op.kind in _BY_KIND}
    for op in graph.ops:
        if op.kind == CONVOLUTION:
            rank = len(graph.tensors[op.operands[0]].shape) - 2
            result.add(f"{rank}-D convolutions")
    result |= {f"{name} (which has no rule)" for name in graph.unknown_primitives}
    times = rereads(graph, graph.weight_tensors())
    products = (n for op, n in zip(graph.ops, times, strict=True) if op.matmul)
    if any(n > 1 for n in products):
        result.add("weights that every turn of a loop reads")
    if are_most(looked_up_tables(graph), graph.params):
        result.add("tables that hold most parameters")
    return frozenset(result)


def unmeasured(graph: Graph) -> tuple[str, ...]:
    """Returns the sorted patterns of a program that no compiled program had."""
    return tuple(sorted(patterns(graph) - MEASURED))
