"""Finds halo exchanges that the backward pass repeats.

Usually the backward pass of a program has the elements that its forward pass received.
It does not in a loop or a checkpointed region: there the operand is saved or recomputed
without the neighbours' elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.planner.model.dimensions import Dimensions, op_roles, roles_of
from whalejax.planner.model.graph import (
    CONVOLUTION,
    LINEAR_WINDOWS,
    LOOPS,
    Graph,
    Op,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Loops and checkpointed regions around one operation with windows.

    Attributes:
        runs_again: Whether the backward pass recomputes the operation.
        reads_operand: Whether its own backward pass reads the windows' elements.
        in_loop: Whether it runs several times in one forward pass.
        in_region: Whether it is in a checkpointed region.
        around_loop: Whether that region contains its full loop, which then runs again
            before the backward loop.
        mergeable: Whether the region receives the operand, or makes it from its inputs
            without a sum over devices that the compiler adds.
    """

    runs_again: bool
    reads_operand: bool
    in_loop: bool = False
    in_region: bool = False
    around_loop: bool = False
    mergeable: bool = False


def repeats(
    graph: Graph,
    dims: Dimensions,
    maker: Sequence[int | None],
    again: Sequence[bool],
    index: int,
) -> Repeats:
    """Returns the loops and regions around one operation.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        maker: Operation that makes each tensor.
        again: Whether the backward pass recomputes each operation.
        index: Index of the operation.
    """
    op = graph.ops[index]
    kernel = op.kind == CONVOLUTION
    read = op.operands[1] if kernel else op.operands[0]
    around = op.trip > 1 and _holds_loop(graph, op)
    return Repeats(
        runs_again=again[index] or around,
        reads_operand=op.kind not in LINEAR_WINDOWS
        and graph.tensors[read].differentiable,
        in_loop=op.trip > 1,
        in_region=op.remat is not None,
        around_loop=around,
        mergeable=op.remat is not None and not _sums_before(graph, dims, maker, index),
    )


def _holds_loop(graph: Graph, op: Op) -> bool:
    return op.remat is not None and any(
        loop.kind in LOOPS
        and loop.remat == op.remat
        and op.position[: len(loop.position)] == loop.position
        for loop in graph.ops
    )


def _sums_before(
    graph: Graph, dims: Dimensions, maker: Sequence[int | None], index: int
) -> bool:
    """Whether the region makes the operand from sums over samples or space."""
    region = graph.ops[index].remat
    waiting, seen = [graph.ops[index].operands[0]], set[int]()
    while waiting:
        made = maker[waiting.pop()]
        if made is None or made in seen or graph.ops[made].remat != region:
            continue
        seen.add(made)
        op = graph.ops[made]
        if op.kind not in LOOPS and not op.reshape and _sums(made, op, dims):
            return True
        waiting.extend(op.operands)
    return False


def _sums(index: int, op: Op, dims: Dimensions) -> bool:
    count = len(op.operands)
    given = op_roles(index, op, dims)
    left = frozenset[int]().union(
        *(
            roles_of(dims.seen.get((index, count + slot), dims.layouts[t]))
            for slot, t in enumerate(op.results)
        )
    )
    return any(dims.roles[r].space or dims.roles[r].is_batch for r in given - left)
