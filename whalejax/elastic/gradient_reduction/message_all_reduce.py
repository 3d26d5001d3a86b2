"""The sum of all members' gradients, by messages, in a fixed order.

Every member sums one slice of the buffers (reduce-scatter) and sends it to the others
(all-gather). Each member sums small buffers in full, in one round instead of two. The
order of the sum is that of ``assignment.total``, so the result is bitwise equal for any
number of members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from whalejax.elastic.member_connections import Look, Peers
from whalejax.membership.assignment import Node, check_tiles, total
from whalejax.meshes.errors import WhaleError
from whalejax.wire.run_messages import GradientPart, Total


SMALL_BYTES: Final = 1 << 16
"""Largest total size of buffers that every member sums in full, to save a round."""

BLOCK_ELEMENTS: Final = 1 << 24
"""Number of elements of each buffer that are exchanged at a time."""

Buffers = Sequence[np.ndarray]
Expected = tuple[int, np.dtype[Any]]
"""Length and dtype of an array."""

Parts = Mapping[Node, Buffers]
"""Flat gradient sums, one for each dtype, by the node of the sum tree."""


def exchanged(
    peers: Peers,
    names: Sequence[str],
    me: str,
    step: int,
    parts: Parts,
    shapes: Sequence[tuple[int, Any]],
    count: int,
    look: Look,
) -> tuple[list[np.ndarray], dict[str, list[Node]]]:
    """Returns the sum of all members' gradients.

    Args:
        peers: Connections to the other members.
        names: Names of the members, by rank.
        me: Name of this member.
        step: Number of the step.
        parts: Gradient sums of this member; empty if it has no micro-batch in the step.
        shapes: Length and dtype of each buffer.
        count: Number of micro-batches in a step.
        look: Function called during waits for others.

    Returns:
        Summed buffers, and for each member the nodes of the sum tree that it sent.

    Raises:
        WhaleError: Micro-batches are missing or duplicate, or a member sent arrays of
            an unexpected length or dtype.
    """
    small = rounds_of(sum(size * dtype.itemsize for size, dtype in shapes)) == 1
    result = [np.empty(size, dtype) for size, dtype in shapes]
    longest = max((size for size, _ in shapes), default=0)
    came: dict[str, list[Node]] = {}
    for first in range(0, max(longest, 1), BLOCK_ELEMENTS):
        spans = [
            (min(first, size), min(first + BLOCK_ELEMENTS, size)) for size, _ in shapes
        ]
        dtypes = [np.dtype(dtype) for _, dtype in shapes]
        block = _Block(peers, names, me, step, count, dtypes, look)
        came = block.run(parts, spans, result, whole=small)
    return result, came


def sent_bytes(size: int, members: int, parts: int) -> float:
    """Returns the bytes that a member sends to reduce a step's buffers.

    Args:
        size: Bytes of one set of buffers.
        members: Number of members, including itself.
        parts: Number of gradient sums that it contributes.

    >>> sent_bytes(1 << 20, 4, 2) / (1 << 20), sent_bytes(100, 4, 2)
    (2.25, 600)
    """
    others = members - 1
    if size <= SMALL_BYTES:
        return others * size * parts
    return others / members * size * (parts + 1)


def rounds_of(size: int) -> int:
    """Returns the number of message rounds that sum buffers of ``size`` bytes."""
    return 1 if size <= SMALL_BYTES else 2


class _Block:
    """Exchange of one block: the same range of elements of every buffer."""

    def __init__(
        self,
        peers: Peers,
        names: Sequence[str],
        me: str,
        step: int,
        count: int,
        dtypes: Sequence[np.dtype[Any]],
        look: Look,
    ) -> None:
        self._dtypes = dtypes
        self._peers, self._names, self._me = peers, list(names), me
        self._step, self._count, self._look = step, count, look
        self._at = {"generation": peers.generation, "step": step}
        self._others = [name for name in names if name != me]

    def run(
        self,
        parts: Parts,
        spans: Sequence[tuple[int, int]],
        found: Sequence[np.ndarray],
        *,
        whole: bool,
    ) -> dict[str, list[Node]]:
        """Writes the sums of the spans into ``found``; returns each member's nodes."""
        nodes = sorted(parts)
        for other in self._others:
            several = self._spans(spans, other, whole=whole)
            arrays = [
                parts[node][i][a:b]
                for node in nodes
                for i, (a, b) in enumerate(several)
            ]
            part = GradientPart(**self._at, nodes=nodes, arrays=tuple(arrays))
            self._peers.send(other, part, self._look)
        mine = self._spans(spans, self._me, whole=whole)
        came: dict[Node, list[np.ndarray]] = {
            node: [parts[node][i][a:b] for i, (a, b) in enumerate(mine)]
            for node in nodes
        }
        told = {self._me: nodes}
        for other in self._others:
            told[other] = self._take_parts(other, mine, came)
        check_tiles([node for name in told for node in told[name]], self._count)
        sums = total(came, self._count, _added)
        for (a, b), buffer, one in zip(mine, found, sums, strict=True):
            buffer[a:b] = one
        if not whole:
            self._gather(spans, found, sums)
        return told

    def _take_parts(
        self,
        other: str,
        mine: Sequence[tuple[int, int]],
        came: dict[Node, list[np.ndarray]],
    ) -> list[Node]:
        said = self._peers.take(other, GradientPart, self._step, self._look)
        nodes = said.nodes
        check_arrays(said, self._expected(mine) * len(nodes), other)
        for place, node in enumerate(nodes):
            if node not in came:  # ``check_tiles`` reports a duplicate node.
                start = place * len(mine)
                came[node] = list(said.arrays[start : start + len(mine)])
        return nodes

    def _gather(
        self,
        spans: Sequence[tuple[int, int]],
        found: Sequence[np.ndarray],
        sums: Sequence[np.ndarray],
    ) -> None:
        for other in self._others:
            self._peers.send(other, Total(**self._at, arrays=tuple(sums)), self._look)
        for other in self._others:
            said = self._peers.take(other, Total, self._step, self._look)
            theirs = self._spans(spans, other, whole=False)
            check_arrays(said, self._expected(theirs), other)
            for (a, b), buffer, one in zip(theirs, found, said.arrays, strict=True):
                buffer[a:b] = one

    def _spans(
        self, spans: Sequence[tuple[int, int]], name: str, *, whole: bool
    ) -> list[tuple[int, int]]:
        if whole:
            return list(spans)
        rank, size = self._names.index(name), len(self._names)
        return [
            (a + (b - a) * rank // size, a + (b - a) * (rank + 1) // size)
            for a, b in spans
        ]

    def _expected(self, spans: Sequence[tuple[int, int]]) -> list[Expected]:
        pairs = zip(spans, self._dtypes, strict=True)
        return [(b - a, dtype) for (a, b), dtype in pairs]


def check_arrays(
    said: GradientPart | Total, expected: Sequence[Expected], other: str
) -> None:
    """Refuses arrays of an unexpected length or dtype.

    Args:
        said: Message with the arrays.
        expected: Length and dtype of each array; all arrays have one dimension.
        other: Name of the sender.

    Raises:
        WhaleError: The arrays differ from the expected ones.
    """
    there = [(x.shape, x.dtype) for x in said.arrays]
    if there != [((size,), dtype) for size, dtype in expected]:
        result = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in there[:8])
        wanted = ", ".join(f"{dtype}[{size}]" for size, dtype in expected[:8])
        raise WhaleError(
            f"{other} sent {len(there)} arrays for {said.kind} ({result or 'none'}); "
            f"expected {len(expected)} ({wanted}). Run the same code in all members"
        )


def _added(one: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
    return [x + y for x, y in zip(one, other, strict=True)]
