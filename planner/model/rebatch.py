"""Makes the graph for another number of samples without a new trace.

The analysis finds the dimensions that belong to the batch, and values with such a
dimension grow with it. If that is uncertain, the result is None, and the model is
traced.
"""

from __future__ import annotations

import math
from dataclasses import replace

from whalejax.planner.model.dimensions import Dimensions, roles_of
from whalejax.planner.model.graph import Graph, LoopResidual, Op, Tensor
from whalejax.planner.model.logical_dimensions import analyse


_MAKES = ("broadcast_in_dim", "iota", "random_bits", "reshape")
"""Operations whose result may have samples that no operand has."""

_FOLDS = ("argmax", "argmin")
"""Operations, besides products and reductions, that combine all samples."""


class _UnknownBatchGrowthError(Exception):
    """It is unknown which sizes grow with the batch."""


def rebatch_graph(graph: Graph, batch_size: int) -> Graph | None:
    """Returns the graph of a trace with another batch size, except its hash.

    Args:
        graph: Graph of a trace.
        batch_size: Number of samples in a micro-batch of the new graph.

    Returns:
        The graph, or None if only a trace can tell: samples are looped over, picked or
        combined, or another dimension is as long as the batch. Python code that depends
        on the number of samples while tracing, such as a branch, is not detected.
    """
    if 1 in (batch_size, graph.batch_size):
        return None  # Factors have no dimensions of size 1.
    try:
        return _GraphResizer(graph, batch_size).graph()
    except _UnknownBatchGrowthError:
        return None


class _GraphResizer:
    def __init__(self, graph: Graph, batch_size: int) -> None:
        self.given = graph
        self.before, self.after = graph.batch_size, batch_size
        dims = analyse(graph)
        batch = {role.index for role in dims.batch}
        self.given_sizes = {
            size
            for tensor in graph.tensors
            if tensor.kind in ("param", "state", "batch")
            for size in tensor.shape
            if size > 1
        } - {self.before}
        self.own = {i for i, role in enumerate(dims.roles) if role.of_weights}
        if batch & self.own or any(op.unknown for op in graph.ops):
            raise _UnknownBatchGrowthError
        self._check_told(dims)
        self.grows = [
            tuple(
                self._grows(dims, tensor, dim, batch)
                for dim in range(len(tensor.shape))
            )
            for tensor in graph.tensors
        ]

    def _check_told(self, dims: Dimensions) -> None:
        """Checks that every dimension comes from a leaf.

        The model may compute other dimensions, such as a capacity, from the batch size.
        """
        told: set[int] = set()
        for tensor in self.given.tensors:
            if tensor.kind in ("param", "state", "batch"):
                told |= roles_of(dims.layouts[tensor.id])
        # These are the same values in another layout, as keys next to queries.
        for (index, slot), layout in dims.seen.items():
            op = self.given.ops[index]
            tensor_id = (*op.operands, *op.results)[slot]
            for before, after in zip(dims.layouts[tensor_id], layout, strict=True):
                if len(before) == len(after) and told.issuperset(before):
                    told.update(after)
        if any(roles_of(layout) - told for layout in dims.layouts):
            raise _UnknownBatchGrowthError

    def _grows(
        self, dims: Dimensions, tensor: Tensor, dim: int, batch: set[int]
    ) -> bool:
        roles, sizes = dims.layouts[tensor.id][dim], dims.sizes[tensor.id][dim]
        samples = [
            n for role, n in zip(roles, sizes, strict=True) if role in batch and n > 1
        ]
        if samples and samples != [self.before]:
            raise _UnknownBatchGrowthError
        leaf = tensor.kind in ("param", "state")
        alike = not samples and not leaf and tensor.shape[dim] == self.before
        if alike and not {*roles} & self.own:
            raise _UnknownBatchGrowthError
        if samples and math.prod(sizes) != tensor.shape[dim]:
            raise _UnknownBatchGrowthError
        return bool(samples)

    def scale_with_batch(self, number: int) -> int:
        with_batch, rest = divmod(number * self.after, self.before)
        if rest:
            raise _UnknownBatchGrowthError
        return with_batch

    def graph(self) -> Graph:
        given = self.given
        return replace(
            given,
            tensors=tuple(self._tensor(t) for t in given.tensors),
            ops=tuple(self._op(op) for op in given.ops),
            stacked=tuple(self._resize_stacked(s) for s in given.stacked),
            batch_size=self.after,
        )

    def _tensor(self, tensor: Tensor) -> Tensor:
        grows = self.grows[tensor.id]
        if not any(grows):
            return tensor
        shape = tuple(
            self.scale_with_batch(n) if more else n
            for n, more in zip(tensor.shape, grows, strict=True)
        )
        return replace(tensor, shape=shape)

    def _resize_stacked(self, kept: LoopResidual) -> LoopResidual:
        if not any(self.grows[kept.tensor]):
            return kept
        return replace(kept, nbytes=self.scale_with_batch(kept.nbytes))

    @staticmethod
    def _check_whole(
        op: Op, slots: list[tuple[bool, ...]], together: list[frozenset[int]]
    ) -> None:
        """Checks that an operation neither picks some of the samples nor adds any."""
        number = len(op.operands)
        if not _folds(op) and any(max(held) < number for held in together):
            raise _UnknownBatchGrowthError
        tied = {member for factor in op.factors for member in factor.members}
        if op.reshape or op.kind in _MAKES:
            return
        for slot, dims in enumerate(slots):
            for dim, grows in enumerate(dims):
                if grows and (slot, dim) not in tied:
                    raise _UnknownBatchGrowthError

    def _op(self, op: Op) -> Op:
        slots = [self.grows[t] for t in (*op.operands, *op.results)]
        if op.trip > 1 and op.trip % self.before == 0:
            raise _UnknownBatchGrowthError  # The loop may be over samples.
        if not _made_of(op.trip, self.given_sizes | {op.chunks}):
            raise _UnknownBatchGrowthError  # Only the loss knows the trip count.
        together: list[frozenset[int]] = []
        for factor in op.factors:
            more = {slots[slot][dim] for slot, dim in factor.members}
            if len(more) > 1:
                raise _UnknownBatchGrowthError
            if more == {True}:
                if factor.needs_all:
                    raise _UnknownBatchGrowthError
                together.append(frozenset(slot for slot, _ in factor.members))
        self._check_whole(op, slots, together)
        if not op.flops and op.matmul is None:
            return op
        held = sum(map(sum, slots))
        if len(together) > 1 or (held and not together):
            raise _UnknownBatchGrowthError
        if not together:
            return op
        matmul = op.matmul
        if matmul is not None:
            sizes = list(matmul)
            place = _place(op, together[0])
            sizes[place] = self.scale_with_batch(sizes[place])
            matmul = sizes[0], sizes[1], sizes[2], sizes[3]
        return replace(op, flops=self.scale_with_batch(op.flops), matmul=matmul)


def _folds(op: Op) -> bool:
    return op.matmul is not None or op.kind in _FOLDS or op.kind.startswith("reduce")


def _made_of(number: int, sizes: set[int]) -> bool:
    return number == 1 or any(
        number % size == 0 and _made_of(number // size, sizes)
        for size in sizes
        if 1 < size <= number
    )


def _place(op: Op, slots: frozenset[int]) -> int:
    """Returns the position of an index letter in a product's (m, k, n, batch)."""
    left, right = 0 in slots, 1 in slots
    out = any(slot >= len(op.operands) for slot in slots)
    if left and right and out:
        return 3
    if not out:
        return 1
    return 0 if left else 2
