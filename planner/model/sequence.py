"""The sequence of a model, and the operations that need all of it on every device.

Attention's sequence meets itself in a product of two values. A ``context`` axis shards
it or, outside products, sequence parallelism does. Some operations cannot work on a
part of a sequence: a shift, a running sum, a convolution. They run unsharded, so that
they do not forbid sharding to all others: their operands are gathered before and their
results sharded after; cotangents in reverse.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import ATTENTION, LOOPS, Graph, Op
from whalejax.planner.model.reshape_factors import slots_of


MOST_PLACES = 4
"""Most operations that a note names."""


Place = tuple[int, int, int]
"""An operation, its operand or result, and a dimension of that."""


def attended(graph: Graph, dims: Dimensions) -> set[int]:
    """Returns the sequences of attention in blocks, where no scores meet themselves."""
    return {
        role
        for op in graph.ops
        if op.kind == ATTENTION
        for role in dims.layouts[op.operands[1]][op.column]
    }


def meeting_in_values(
    graph: Graph, dims: Dimensions, weight: Sequence[bool]
) -> set[int]:
    """Returns the roles that meet themselves in products of values with values.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        weight: Whether each tensor depends on parameters alone.
    """
    meeting = attended(graph, dims)
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        if op.matmul is not None and not any(weight[t] for t in op.operands):
            meeting.update(dims.layouts[slots_of(op)[cut.slot]][cut.dim])
    return meeting


def with_whole_operations(graph: Graph, dims: Dimensions) -> Dimensions:
    """Gives all of the sequence only to the operations that need it unsharded.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss, where one such operation makes the role
            unshardable for all.

    Returns:
        Dimensions in which these operations see the sequence unsharded, and its role
        can be sharded. A role that a loop runs over stays unshardable.
    """
    if not any(role.unshardable for role in dims.roles):
        return dims
    weight = graph.weight_tensors()
    result = meeting_in_values(graph, dims, weight) - {r.index for r in dims.batch}
    result = {r for r in result if dims.roles[r].unshardable}
    for op in graph.ops:
        if op.matmul is not None:
            for t in op.operands:
                if weight[t]:
                    result.difference_update(*dims.layouts[t])
    places = {role: set[Place]() for role in result}
    for index, op in enumerate(graph.ops):
        for role, place in _needed(dims, index, op, result):
            if place is None:
                places.pop(role, None)
            elif role in places:
                places[role].add(place)
    return _seen_whole(dims, graph, places) if places else dims


def _needed(
    dims: Dimensions, index: int, op: Op, roles: Collection[int]
) -> Iterator[tuple[int, Place | None]]:
    """Yields slots where an operation needs a role unsharded; None if impossible."""
    slots = slots_of(op)
    for factor in op.factors:
        if not factor.needs_all:
            continue
        for slot, dim in factor.members:
            seen = dims.seen.get((index, slot), dims.layouts[slots[slot]])
            for role in {*seen[dim]}.intersection(roles):
                alone = {*seen[dim]} <= {*roles}
                yield (
                    role,
                    (index, slot, dim) if alone and op.kind not in LOOPS else None,
                )


def _seen_whole(
    dims: Dimensions, graph: Graph, places: dict[int, set[Place]]
) -> Dimensions:
    seen = dict(dims.seen)
    for index, slot, dim in sorted(set[Place]().union(*places.values())):
        old = seen.get((index, slot), dims.layouts[slots_of(graph.ops[index])[slot]])
        seen[index, slot] = (*old[:dim], (), *old[dim + 1 :])
    return dataclasses.replace(
        dims,
        roles=tuple(
            dataclasses.replace(role, unshardable="") if role.index in places else role
            for role in dims.roles
        ),
        seen=seen,
        whole=frozenset(
            (index, slot) for at in places.values() for index, slot, _ in at
        ),
    )


def run_whole(
    graph: Graph, dims: Dimensions, sharded: Collection[int]
) -> dict[int, list[Op]]:
    """Returns the operations that run on all of a sharded sequence, by its role.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        sharded: Roles that some axis shards.
    """
    whole: dict[int, dict[int, None]] = defaultdict(dict)
    for index, slot in sorted(dims.whole):
        tensor = slots_of(graph.ops[index])[slot]
        for before, after in _pairs(dims.layouts[tensor], dims.seen[index, slot]):
            for role in {*before}.intersection(sharded).difference(after):
                whole[role][index] = None
    return {role: [graph.ops[i] for i in at] for role, at in whole.items()}


def _pairs(before: Layout, after: Layout) -> Iterator[tuple[tuple[int, ...], ...]]:
    return zip(before, after, strict=True)


def whole_notes(graph: Graph, dims: Dimensions, sharded: Collection[int]) -> list[str]:
    """Returns the notes on operations that run on all of a sequence that is sharded
    elsewhere.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        sharded: Roles that some axis shards.
    """
    notes = []
    for role, ops in sorted(run_whole(graph, dims, sharded).items()):
        texts = [f"{op.kind}{f' at {op.scope}' if op.scope else ''}" for op in ops]
        places = [
            f"{count} × {text}" if count > 1 else text
            for text, count in Counter(texts).items()
        ]
        more = f" and {len(places) - MOST_PLACES} more" * (len(places) > MOST_PLACES)
        notes.append(
            f"{dims.roles[role].name} ({dims.roles[role].size}) is needed whole by "
            f"{', '.join(places[:MOST_PLACES])}{more}: what they read of it is "
            "gathered, and what they give is sharded after"
        )
    return notes
