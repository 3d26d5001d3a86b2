"""What tells programs apart whose memory compilers lay out otherwise than others'.

Predictions of memory were held against compiled programs of some patterns. Of a program
with another one nobody knows how far off they are.
"""

from __future__ import annotations

from typing import Final

from whalejax.planner.model.graph import CONVOLUTION, LOOKUPS, LOOPS, Graph
from whalejax.planner.model.repeated_layers import sliced_params


_BY_KIND: Final = {
    "sort": "sorts",
    "top_k": "sorts",
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

_MOST_OF_THE_BYTES: Final = 0.5
"""Part of all parameters from which tables that are looked up are a pattern."""

MEASURED: Final = frozenset(("2-D convolutions", "3-D convolutions"))
"""Patterns of programs that were compiled; those with none were, too."""


def patterns(graph: Graph) -> frozenset[str]:
    """What a program has that others lack.

    Args:
        graph: the captured loss.

    Returns:
        Names, such as ``"2-D convolutions"`` or ``"sorts"``; empty for layers of
        products, attention and elementwise operations.
    """
    found = {_BY_KIND[op.kind] for op in graph.ops if op.kind in _BY_KIND}
    for op in graph.ops:
        if op.kind == CONVOLUTION:
            rank = len(graph.tensors[op.operands[0]].shape) - 2
            found.add(f"{rank}-D convolutions")
    found |= {f"{name}, which has no rule" for name in graph.unknown_primitives}
    if _turns_read_weights(graph):
        found.add("weights that every turn of a loop reads")
    if _looked_up_share(graph) >= _MOST_OF_THE_BYTES:
        found.add("tables that hold most parameters")
    return frozenset(found)


def unmeasured(graph: Graph) -> tuple[str, ...]:
    """Patterns of a program that no compiled one had, sorted."""
    return tuple(sorted(patterns(graph) - MEASURED))


def _turns_read_weights(graph: Graph) -> bool:
    """A loop's products read parameters whole, as those over positions do."""
    weight, sliced = graph.weight_tensors(), set(sliced_params(graph))
    for op in graph.ops:
        if any(t in sliced for t in op.operands) and all(weight[t] for t in op.results):
            sliced.update(op.results)
        if op.matmul is None or op.trip == 1 or op.chunks > 1:
            continue
        if any(weight[t] and t not in sliced for t in op.operands[:2]):
            return True
    return False


def _looked_up_share(graph: Graph) -> float:
    """Which part of the parameters' bytes is looked up and nothing else."""
    source = {t.id: t.id for t in graph.params}
    looked, others = set[int](), set[int]()
    for op in graph.ops:
        mine = [source[t] for t in op.operands if t in source]
        passes = op.reshape or op.kind in ("transpose", "convert_element_type", *LOOPS)
        if passes and len(op.operands) == 1 and mine:
            source.update(dict.fromkeys(op.results, mine[0]))
        elif op.kind in LOOKUPS:
            looked.update(mine)
        else:
            others.update(mine)
    total = sum(t.nbytes for t in graph.params)
    tables = sum(t.nbytes for t in graph.params if t.id in looked - others)
    return tables / max(1, total)
