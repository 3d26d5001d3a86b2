"""Finds operations whose statistics of the samples reach the loss or the state.

It follows the batch dimension, and values reduced over it, forward through the factors
of a graph's operations. Values that depend on a statistic, such as batch
normalisation's, still have rows of samples: each micro-batch its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from whalejax.planner.model.graph import Graph, Op


Sources = frozenset[int]
"""Indices of the operations that reduced over the batch."""

_NONE: Final[Sources] = frozenset()


def statistics(graph: Graph, loss: Sequence[int], state: Sequence[int]) -> set[int]:
    """Returns indices of operations whose statistics of the samples matter to the loss.

    Args:
        graph: Graph of the loss.
        loss, state: Tensors of the loss's results, and of the model's new state.
    """
    follow = _Follow(graph, [*loss, *state])
    follow.run()
    for tensor in state:
        follow.statistics |= follow.reduced.get(tensor, _NONE)
    return follow.statistics


class _Follow:
    """Follows the batch dimension, and values that were reduced over it.

    Attributes:
        statistics: Operations whose result meets the samples again, or that mix samples
            and keep their dimension.
        reduced: Source operations of each tensor that was reduced over the batch.
    """

    def __init__(self, graph: Graph, roots: Iterable[int]) -> None:
        self.graph = graph
        self.statistics: set[int] = set()
        self.reduced: dict[int, Sources] = {}
        self._matters = _reaching(graph, roots)
        self._batch: dict[int, set[int]] = {}
        for tensor, dim in graph.batch_dims:
            self._batch.setdefault(tensor, set()).add(dim)

    def run(self) -> None:
        for index, op in enumerate(self.graph.ops):
            mixes, across = self._spread(op)
            if not any(t in self._matters for t in op.results):
                continue
            sources = _NONE.union(*(self.reduced.get(t, _NONE) for t in op.operands))
            if not any(self._batch.get(t) for t in op.results):
                sources |= {index} if mixes else _NONE
                self.reduced.update(dict.fromkeys(op.results, sources))
            elif mixes:
                self.statistics |= {index} if across else _NONE
            else:
                self.statistics |= sources

    def _spread(self, op: Op) -> tuple[bool, bool]:
        """Passes the batch dimension on; returns whether samples are mixed, and kept.

        They are kept if the operation mixes them along a batch dimension that it needs
        unsharded, as a running sum does.
        """
        slots = op.operands + op.results
        count = len(op.operands)
        mixes = across = False
        for factor in op.factors:
            if not any(
                s < count and d in self._batch.get(slots[s], ())
                for s, d in factor.members
            ):
                continue
            onward = [(slots[s], d) for s, d in factor.members if s >= count]
            for tensor, dim in onward:
                self._batch.setdefault(tensor, set()).add(dim)
            across |= factor.needs_all
            mixes |= across or not onward
        if op.reshape:
            self._reshape(op)
        return mixes and bool(op.results), across

    def _reshape(self, op: Op) -> None:
        """Puts the batch in the result's dimension that holds its stride."""
        before = self.graph.tensors[op.operands[0]].shape
        after = self.graph.tensors[op.results[0]].shape
        for dim in self._batch.get(op.operands[0], ()):
            front = 1
            for size in before[:dim]:
                front *= size
            reached = 1
            for out, size in enumerate(after):
                reached *= size
                if reached > front and size > 1:
                    self._batch.setdefault(op.results[0], set()).add(out)
                    break


def _reaching(graph: Graph, roots: Iterable[int]) -> set[int]:
    wanted = set(roots)
    for _ in range(2):  # The need of a loop's carry is found only after its body.
        for op in reversed(graph.ops):
            if any(t in wanted for t in op.results):
                wanted.update(op.operands)
    return wanted
