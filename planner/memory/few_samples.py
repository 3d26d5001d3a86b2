"""Finds the extra buffers that compilers use for convolutions with few samples.

TPU compilers move a part of an extent into the batch of such a convolution. They write
its operand and result in that form too. The number of samples on a device depends on
the layout, which this module does not know. So every entry states the least number of
samples at which the buffer exists (``SavedTensorGroup.least_samples``);
``saved_tensors.kept_bytes`` reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from whalejax.planner.memory.saved_tensors import SMALL, TensorEntry
from whalejax.planner.model.graph import CONVOLUTION, Graph, Op


class FewSamples:
    """Saved values and temporaries that exist only with few samples on a device.

    Args:
        graph: Captured loss.
        lanes: Lanes of the compiler; without lanes there are no such buffers.
        is_value: Function that returns whether a tensor is computed from data.
        entry: Function from a tensor to its entry.

    Attributes:
        kept: Saved values by operation. A convolution's operand is saved in two forms.
            A normalisation by statistics of samples saves the mean, the factor and the
            other operand, each as large as its result.
        convolves: Whether the compiler may transform some convolution so.
    """

    def __init__(
        self,
        graph: Graph,
        lanes: int,
        is_value: Callable[[int], bool],
        entry: Callable[[int], TensorEntry],
    ) -> None:
        self.graph = graph
        self.lanes = lanes
        self.kept: dict[int, Counter[TensorEntry]] = {}
        self.convolves = any(map(self._in_space, graph.ops))
        if not self.convolves:
            return
        spatial, statistics = self._spatial()
        doubled: set[tuple[int | None, int]] = set()
        for i, op in enumerate(graph.ops):
            if op.trip > 1 or not op.results:
                continue
            if not graph.tensors[op.results[0]].differentiable:
                continue
            key = op.remat, op.operands[0] if op.operands else -1
            if self._in_space(op) and is_value(key[1]) and key not in doubled:
                doubled.add(key)
                self.kept[i] = Counter({entry(key[1])._replace(least_samples=1): 1})
            if op.elementwise and not spatial.isdisjoint(op.operands):
                own = statistics.intersection(op.operands)
                if any(self._of_samples(t, op.results[0]) for t in own):
                    result = graph.tensors[op.results[0]]
                    one = TensorEntry(result.id, result.nbytes, i, least_samples=2)
                    self.kept[i] = Counter({one: 1 + (op.kind == "mul")})

    def _spatial(self) -> tuple[set[int], set[int]]:
        """Returns the results of spatial convolutions, and the reductions of them."""
        spatial: set[int] = set()
        statistics: set[int] = set()
        for op in self.graph.ops:
            if self._in_space(op):
                spatial.update(op.results)
                continue
            reads = not spatial.isdisjoint(op.operands)
            same = op.elementwise or op.reshape
            if reads and same:
                spatial.update(op.results)
            elif reads and op.kind.startswith("reduce_"):
                statistics.update(op.results)
            elif same and not statistics.isdisjoint(op.operands):
                statistics.update(op.results)
        return spatial, statistics

    def _in_space(self, op: Op) -> bool:
        if op.kind != CONVOLUTION or op.trip > 1 or self.lanes == 1:
            return False
        overlaps = any(window.span > window.stride for window in op.windows)
        return overlaps and len(self.graph.tensors[op.results[0]].shape) >= 4

    def _of_samples(self, tensor: int, result: int) -> bool:
        """Returns whether a tensor has one number for all of a sample's extent."""
        small, large = self.graph.tensors[tensor], self.graph.tensors[result]
        own = small.shape[:2] == (*large.shape[:1], 1) != large.shape[:2]
        return own and small.nbytes * SMALL <= large.nbytes

    def before(self, end: int, region: int | None = None) -> Counter[TensorEntry]:
        """Returns the saved values of a region's operations before another one."""
        result: Counter[TensorEntry] = Counter()
        for i, entries in self.kept.items():
            if i < end and self.graph.ops[i].remat == region:
                result += entries
        return result

    def working(self, number: int) -> Counter[TensorEntry]:
        """Returns the temporaries of an operation's backward pass.

        These are the gradients on both sides of a normalisation; and a convolution's
        result in two forms, in float32.
        """
        op = self.graph.ops[number]
        if not self.convolves:
            return Counter()
        if op.elementwise:
            return Counter(dict.fromkeys(self.kept.get(number, ()), 2))
        if not self._in_space(op):
            return Counter()
        tensor = self.graph.tensors[op.results[0]]
        if not tensor.differentiable:
            return Counter()
        nbytes = math.prod(tensor.shape) * 4
        return Counter({TensorEntry(tensor.id, nbytes, number, least_samples=1): 2})
