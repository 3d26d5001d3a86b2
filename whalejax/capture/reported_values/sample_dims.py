"""Finds the batch dimension of reported values.

Several micro-batches may report a value with a row for each sample. The rows have to be
put in the order of the global batch, while other values are means or sums. This module
follows the batch's samples forward through the operations of a graph. It finds the
dimension of each reported value's rows, or why the dimension is unknown.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whalejax.planner.model.graph import LOOKUPS, LOOPS, Graph, Op
from whalejax.planner.model.reshape_factors import groups, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Position of the samples in one dimension.

    Attributes:
        axis: Index of the dimension.
        outer: Number of times that the dimension repeats all samples.
        inner: Number of consecutive elements of one sample.
    """

    axis: int = 0
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownCombination:
    """A value for which the combination over micro-batches is unknown.

    Attributes:
        shape: Shape in one micro-batch.
        why: Reason, as a clause.
    """

    shape: tuple[int, ...]
    why: str


class _Mark(enum.Enum):
    OTHER = "comes from a dimension that is no batch"
    MIXED = "has some of the samples, or has them in another order"


_Where = SampleRows | _Mark | None
"""Meaning of a dimension; None if no operand has the dimension, as in a constant."""

_FRESH = frozenset(("broadcast_in_dim", "iota", "zeros_like", "empty", "empty2"))
"""Operations that create dimensions."""

_CUTS = frozenset(("slice", "dynamic_slice"))
"""Operations that return part of a dimension."""


def reported_rows(
    graph: Graph, values: Sequence[int]
) -> list[SampleRows | UnknownCombination | None]:
    """Returns the position of the samples in each reported value.

    Args:
        graph: Graph of the loss, traced with more than one sample.
        values: Ids of tensors that are not scalars.

    Returns:
        For each value, the position of its rows or why it is unknown; None for a value
        without rows.
    """
    follow = _Follow(graph)
    follow.run()
    return [follow.value_rows(value) for value in values]


def rows_of(graph: Graph) -> set[int]:
    """Returns all tensors for which the one dimension of the samples is known."""
    follow = _Follow(graph)
    follow.run()
    return {
        t.id for t in graph.tensors if isinstance(follow.value_rows(t.id), SampleRows)
    }


class _Follow:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.where: dict[tuple[int, int], _Where] = {}
        self.single: set[int] = set()
        batch = set(graph.batch_dims)
        for tensor in graph.tensors:
            if tensor.kind in ("param", "state", "batch"):
                for dim in range(len(tensor.shape)):
                    key = tensor.id, dim
                    self.where[key] = SampleRows() if key in batch else _Mark.OTHER

    def run(self) -> None:
        """Passes over the program until nothing changes; loops need several passes."""
        loops = any(op.kind in LOOPS for op in self.graph.ops)
        before = -1, -1
        while before != (now := self._resolved_counts()):
            before = now
            for op in self.graph.ops:
                self._op(op)
            if not loops:
                return

    def _resolved_counts(self) -> tuple[int, int]:
        ranks = sum(_rank(where) for where in self.where.values())
        return ranks, len(self.single)

    def value_rows(self, value: int) -> SampleRows | UnknownCombination | None:
        shape = self.graph.tensors[value].shape
        dims = [self.where.get((value, dim)) for dim in range(len(shape))]
        rows = [
            SampleRows(axis=axis, outer=x.outer, inner=x.inner)
            for axis, x in enumerate(dims)
            if isinstance(x, SampleRows)
        ]
        if _Mark.MIXED in dims:
            why = "has some of the samples, or mixes them along a dimension"
            return UnknownCombination(shape=shape, why=why)
        if len(rows) > 1:
            return UnknownCombination(
                shape=shape, why="has samples along several dimensions"
            )
        if rows:
            return rows[0]
        if value in self.single:
            return UnknownCombination(
                shape=shape, why="is of one sample of the micro-batch"
            )
        return None

    def _set(self, tensor: int, dim: int, found: _Where) -> None:
        key = tensor, dim
        self.where[key] = _stronger(self.where.get(key), found)

    def _op(self, op: Op) -> None:
        if op.reshape and op.operands:
            self._reshape(op)
        else:
            self._factors(op)
        if any(t in self.single for t in op.operands) and not any(
            self._samples(t) for t in slots_of(op)
        ):
            self.single.update(op.results)

    def _samples(self, tensor: int) -> list[int]:
        rank = len(self.graph.tensors[tensor].shape)
        samples = ((dim, self.where.get((tensor, dim))) for dim in range(rank))
        return [d for d, x in samples if isinstance(x, SampleRows) or x is _Mark.MIXED]

    def _factors(self, op: Op) -> None:
        slots, count = slots_of(op), len(op.operands)
        tied: set[tuple[int, int]] = set()
        for factor in op.factors:
            given = [(s, d) for s, d in factor.members if s < count]
            onward = [(s, d) for s, d in factor.members if s >= count]
            if not (given and onward):
                continue
            where: _Where = None
            for slot, dim in given:
                where = _stronger(where, self.where.get((slots[slot], dim)))
            if factor.needs_all and isinstance(where, SampleRows):
                where = _Mark.MIXED
            for slot, dim in onward:
                self._set(slots[slot], dim, where)
            tied.update(factor.members)
        if not op.unknown and op.kind not in _FRESH and count:
            self._untied(op, tied)

    def _untied(self, op: Op, tied: set[tuple[int, int]]) -> None:
        """Sets result dimensions that come from parts of dimensions or from several."""
        lost = [
            (slot, dim)
            for slot, tensor in enumerate(op.operands)
            for dim in self._samples(tensor)
            if (slot, dim) not in tied
        ]
        whole = {m for f in op.factors if f.needs_all for m in f.members}
        picks = op.kind in _CUTS or op.kind in LOOKUPS
        cut = [m for m in lost if m in whole or picks]
        for slot, tensor in enumerate(op.results, len(op.operands)):
            for dim, size in enumerate(self.graph.tensors[tensor].shape):
                if size == 1:
                    continue
                here = self.where.get((tensor, dim))
                if (slot, dim) not in tied:
                    self._set(
                        tensor, dim, _Mark.MIXED if cut else self._produced_rows(op)
                    )
                elif op.kind == "gather" and cut and not isinstance(here, SampleRows):
                    self._set(tensor, dim, _Mark.MIXED)
        if op.kind in _CUTS and any(m not in whole for m in lost):
            self.single.update(op.results)

    def _produced_rows(self, op: Op) -> _Where:
        """Returns the meaning of a dimension that is in no factor."""
        known = any(
            isinstance(self.where.get((t, d)), (SampleRows, _Mark))
            for t in op.operands
            for d in range(len(self.graph.tensors[t].shape))
        )
        return _Mark.OTHER if known else None

    def _reshape(self, op: Op) -> None:
        source, result = op.operands[0], op.results[0]
        shapes = [self.graph.tensors[t].shape for t in (source, result)]
        before, after = shapes
        for ins, outs in groups(before, after):
            given = [self.where.get((source, dim)) for dim in ins]
            sizes = [before[dim] for dim in ins], [after[dim] for dim in outs]
            for dim, values in zip(outs, _regrouped(given, *sizes), strict=True):
                self._set(result, dim, values)


def _rank(where: _Where) -> int:
    if isinstance(where, SampleRows):
        return 2
    return {None: 0, _Mark.OTHER: 1, _Mark.MIXED: 3}[where]


def _stronger(a: _Where, b: _Where) -> _Where:
    if isinstance(a, SampleRows) and isinstance(b, SampleRows) and a != b:
        return _Mark.MIXED
    return a if _rank(a) >= _rank(b) else b


def _regrouped(
    given: Sequence[_Where], before: Sequence[int], after: Sequence[int]
) -> Iterator[_Where]:
    """Yields the meanings of dimensions that regroup others in order.

    ``before`` and ``after`` have the sizes of the dimensions before and afterwards.
    """
    rows = [dim for dim, x in enumerate(given) if isinstance(x, SampleRows)]
    if _Mark.MIXED in given or len(rows) > 1:
        yield from [_Mark.MIXED] * len(after)
        return
    if not rows:
        known = _Mark.OTHER if _Mark.OTHER in given else None
        yield from [known] * len(after)
        return
    place = rows[0]
    result = given[place]
    assert isinstance(result, SampleRows)
    samples = before[place] // (result.outer * result.inner)
    low = result.inner * math.prod(before[place + 1 :])
    high = low * samples
    strides = [math.prod(after[dim + 1 :]) for dim in range(len(after))]
    ends = [stride * size for stride, size in zip(strides, after, strict=True)]
    inside = [
        low % stride == 0 and end % high == 0 and stride <= low and high <= end
        for stride, end in zip(strides, ends, strict=True)
    ]
    for stride, end, holds in zip(strides, ends, inside, strict=True):
        if holds:
            yield SampleRows(outer=end // high, inner=low // stride)
        elif any(inside):
            yield _Mark.OTHER
        else:
            yield _Mark.MIXED
