"""Divides dimensions into atoms such that a reshape keeps the list of atoms.

A reshape only regroups dimensions. If each dimension is a product of *atoms*, major
first, operand and result are the same list of atoms. The dimension analysis first finds
the coarsest such atoms. A cut point is a product of minor atoms of a dimension. Cut
points are copied over reshapes, and between equal dimensions, until nothing changes. A
reshape whose sides have no common atoms is a *barrier*, where its dimensions must be
unsharded.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from whalejax.planner.model.graph import Graph, Op


def slots_of(op: Op) -> tuple[int, ...]:
    """Returns the tensor ids of an operation's operands, then of its results."""
    return op.operands + op.results


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """Group of dimensions that a reshape turns into other dimensions.

    Attributes:
        op: Index of the reshape.
        operand, result: Tensor ids.
        ins, outs: Dimensions of operand and result whose sizes have equal products,
            without dimensions of size 1.
    """

    op: int
    operand: int
    result: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Union:
    """Union-find over integers with path halving."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, node: int) -> int:
        """Returns the representative of a set."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(self, a: int, b: int) -> int:
        """Joins two sets, and returns their representative."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b] = a
        return a


def groups(
    before: tuple[int, ...], after: tuple[int, ...]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the shortest runs of dimensions with equal products, without size 1."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    i = j = 0
    while i < len(left) and j < len(right):
        ins, outs = [left[i]], [right[j]]
        a, b = before[left[i]], after[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(left):
                a *= before[left[i]]
                ins.append(left[i])
                i += 1
            elif b < a and j < len(right):
                b *= after[right[j]]
                outs.append(right[j])
                j += 1
            else:
                return
        yield ins, outs


class Atoms:
    """Atoms of every dimension of a graph.

    Dimensions are numbered over all tensors, and so are atoms.

    Attributes:
        graph: Graph of the dimensions.
        regroupings: Regroupings of all reshapes.
        barriers: Regroupings whose two sides have no common atoms.
        sizes: Sizes of the atoms of each dimension, major first.
        first: Number of the first atom of each dimension.
        owners: Tensor of each atom.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._base: list[int] = []
        count = 0
        for tensor in graph.tensors:
            self._base.append(count)
            count += len(tensor.shape)
        self._dims = Union(count)
        self._lengths = [size for t in graph.tensors for size in t.shape]
        self._points: dict[int, set[int]] = defaultdict(set)
        self.regroupings = tuple(self._find_regroupings())
        self.barriers: set[Regrouping] = set()
        self._tie_lengths()
        self._refine()
        self.sizes = [self._sizes(node) for node in range(count)]
        self.first = [0, *itertools.accumulate(len(s) for s in self.sizes)]
        self.owners = [
            tensor.id
            for tensor in graph.tensors
            for dim in range(len(tensor.shape))
            for _ in self.sizes[self.dim(tensor.id, dim)]
        ]
        self.barriers |= {r for r in self.regroupings if not self._explained(r)}

    def dim(self, tensor: int, dim: int) -> int:
        """Returns the number of a dimension."""
        return self._base[tensor] + dim

    def of(self, tensor: int, dim: int) -> range:
        """Returns the numbers of a dimension's atoms, major first."""
        node = self.dim(tensor, dim)
        return range(self.first[node], self.first[node + 1])

    def _find_regroupings(self) -> Iterator[Regrouping]:
        for index, op in enumerate(self.graph.ops):
            if op.reshape and op.operands:
                a, b = op.operands[0], op.results[0]
                shapes = (self.graph.tensors[t].shape for t in (a, b))
                for ins, outs in groups(*shapes):
                    yield Regrouping(
                        op=index, operand=a, result=b, ins=tuple(ins), outs=tuple(outs)
                    )

    def _tie_lengths(self) -> None:
        for op in self.graph.ops:
            slots = slots_of(op)
            for factor in op.factors:
                nodes = [self.dim(slots[s], d) for s, d in factor.members]
                for node in nodes[1:]:
                    self._dims.join(nodes[0], node)
        for r in self.regroupings:
            if len(r.ins) == len(r.outs) == 1:
                self._dims.join(
                    self.dim(r.operand, r.ins[0]), self.dim(r.result, r.outs[0])
                )

    def _refine(self) -> None:
        changed = True
        while changed:
            changed = False
            for regrouping in self.regroupings:
                if regrouping not in self.barriers:
                    changed |= self._push(regrouping)
        for root, points in self._points.items():
            self._points[root] = _chain(points)

    def _push(self, regrouping: Regrouping) -> bool:
        """Copies cut points between both sides; returns whether it added any."""
        sides = [
            [self.dim(tensor, d) for d in reversed(dims)]
            for tensor, dims in (
                (regrouping.operand, regrouping.ins),
                (regrouping.result, regrouping.outs),
            )
        ]
        bounds: set[int] = set()
        for side in sides:
            low = 1
            for node in side:
                bounds.add(low)
                bounds.update(low * p for p in self._points[self._dims.find(node)])
                low *= self._lengths[node]
        fresh: list[tuple[int, set[int]]] = []
        for side in sides:
            low = 1
            for node in side:
                high = low * self._lengths[node]
                inside = [b for b in bounds if low < b < high]
                if any(b % low or high % b for b in inside):
                    self.barriers.add(regrouping)
                    return False
                fresh.append((self._dims.find(node), {b // low for b in inside}))
                low = high
        changed = False
        for root, points in fresh:
            changed |= not points <= self._points[root]
            self._points[root] |= points
        return changed

    def _sizes(self, node: int) -> tuple[int, ...]:
        size = self._lengths[node]
        if size == 1:
            return ()
        points = self._points.get(self._dims.find(node), ())
        chain = [1, *sorted(points), size]
        return tuple(b // a for a, b in itertools.pairwise(chain))[::-1]

    def _explained(self, r: Regrouping) -> bool:
        ins, outs = (
            [n for d in dims for n in self.sizes[self.dim(tensor, d)]]
            for tensor, dims in ((r.operand, r.ins), (r.result, r.outs))
        )
        return ins == outs


def _chain(points: set[int]) -> set[int]:
    """Returns a chain of points that each divide the next, without other points."""
    chain: list[int] = []
    for point in sorted(points):
        if not chain or point % chain[-1] == 0:
            chain.append(point)
    return set(chain)
