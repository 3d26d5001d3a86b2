"""Number and bytes of halo exchanges between devices that shard space.

Dimensions are exchanged in turn. Each exchange includes the elements that were received
before, so corners arrive too. An operation exchanges its operand in the forward pass,
and sends back the cotangents of the received elements in the backward pass. If the
backward pass needs the operand inside a loop or a rematerialised region (``Repeats``),
the operand is exchanged again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.planner.model.windows import Window
from whalejax.planner.sharding.operation_rows import Repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloExchange:
    """Elements that every device sends to one neighbour.

    Attributes:
        axis: Mesh axis along which the neighbour is.
        phase: ``"forward"`` or ``"backward"``.
        payload_bytes: Bytes of one exchange.
        count: Number of exchanges in one execution of the operation.
    """

    axis: str
    phase: str
    payload_bytes: Any
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Halo along one dimension: its widths, and the extent without it and with it."""

    axis: str
    own: int
    below: int
    above: int
    grown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardHalo:
    """Requirements of an operation's backward pass.

    Attributes:
        image: Whether a gradient flows to the operand.
        merges: Whether the compiler reuses the exchanges of the forward pass in a
            checkpointed region that receives the same values.
        narrow: Whether the compiler exchanges operands of products in half the bytes.
    """

    image: bool
    merges: bool
    narrow: bool


def exchanges(
    windows: Sequence[Window],
    axes: Mapping[int, str],
    mesh: Mapping[str, int],
    extents: Sequence[tuple[int, ...]],
    nbytes: Any,
    repeats: Repeats,
    backward: BackwardHalo,
) -> Iterator[HaloExchange]:
    """Yields the halo exchanges of one operation.

    Args:
        windows: Windows of the operation.
        axes: Mesh axis that shards the dimension of a window, by index of the window.
        mesh: Axis sizes.
        extents: Unsharded extents of operand and result, by dimension.
        nbytes: Bytes of the operand on one device.
        repeats: Loops and checkpointed regions around the operation.
        backward: Requirements of the backward pass.
    """
    sides = []
    for number, window in enumerate(windows):
        axis = axes.get(number)
        if axis is None:
            continue
        parts, size, result = mesh[axis], extents[0][window.dim], extents[1][window.out]
        below, above = window.halo(size, result, parts)
        sides.append(
            _Side(
                axis=axis,
                own=size // parts,
                below=below,
                above=above,
                grown=window.read(size, result, parts),
            )
        )
    sent = nbytes / 2 if backward.narrow else nbytes
    yield from _strips(sides, sent, "forward", 1)
    yield from _strips(sides, sent, "backward", _repeat_count(repeats, backward))
    yield from _strips(sides, nbytes, "backward", int(backward.image))


def _repeat_count(repeats: Repeats, backward: BackwardHalo) -> int:
    needed = repeats.runs_again or repeats.reads_operand
    if repeats.in_loop:
        return repeats.around_loop + needed
    merged = repeats.mergeable and backward.merges
    return int(repeats.in_region and needed and not merged)


def _strips(
    sides: Sequence[_Side], nbytes: Any, phase: str, times: int
) -> Iterator[HaloExchange]:
    for side in sides:
        for halo in (side.below, side.above) if times else ():
            if halo:
                yield HaloExchange(
                    axis=side.axis,
                    phase=phase,
                    payload_bytes=nbytes / side.own * halo,
                    count=times,
                )
        nbytes = nbytes * side.grown / side.own
