"""Bytes and number of the exchanges at the borders of devices that share space.

Dimensions are exchanged one after the other, each with what the ones before it brought,
so that corners arrive too. A convolution exchanges three times in a step: its operand
forward, the operand again for the kernel's gradient (halos are not kept), and the
result's cotangent for the operand's gradient. Where the program exchanges itself
(``Window.local``) the compiler keeps the halos, and what is exchanged backward is
their cotangents, which go home.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.planner.model.windows import Window, hops


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One strip that every device sends to a neighbour.

    Attributes:
        axis: the mesh axis.
        phase: forward or backward.
        payload_bytes: of one exchange.
        count: how many in one execution of the operation.
    """

    axis: str
    phase: str
    payload_bytes: Any
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A strip of one dimension: its axis, its width and what it grows the part to."""

    axis: str
    own: int
    below: int
    above: int
    grown: int


def exchanges(
    windows: Sequence[Window],
    axes: Mapping[int, str],
    mesh: Mapping[str, int],
    extents: Sequence[tuple[int, ...]],
    kept: Sequence[Any],
    *,
    kernel: bool,
    image: bool,
    again: bool,
) -> Iterator[Exchange]:
    """The exchanges of one operation.

    Args:
        windows: of the operation.
        axes: number of a window to the mesh axis that shards its dimension.
        mesh: axis sizes.
        extents: of operand and result, unsharded, by dimension.
        kept: bytes of operand and result on one device.
        kernel: a gradient flows to the kernel of a convolution.
        image: one flows to the operand.
        again: the forward pass runs again in the backward pass.
    """
    ahead, behind = [], []
    for number, window in enumerate(windows):
        axis = axes.get(number)
        if axis is None:
            continue
        parts, size, result = mesh[axis], extents[0][window.dim], extents[1][window.out]
        below, above = window.halo(size, result, parts)
        own = size // parts
        read = own + below + above if window.local else window.read(result, parts)
        ahead.append(_Side(axis=axis, own=own, below=below, above=above, grown=read))
        below, above = window.gradient_halo(size, result, parts)
        behind.append(
            _Side(
                axis=axis,
                own=result // parts,
                below=below,
                above=above,
                grown=window.gradient_read(size, parts),
            )
        )
    yield from _strips(ahead, kept[0], "forward", 1 + again)
    local = any(window.local for window in windows)
    if kernel and not local:
        yield from _strips(ahead, kept[0], "backward", 1)
    if image and local:
        yield from _strips(ahead, kept[0], "backward", 1)
    elif image:
        yield from _strips(behind, kept[1], "backward", 1)


def _strips(
    sides: Sequence[_Side], nbytes: Any, phase: str, times: int
) -> Iterator[Exchange]:
    for side in sides:
        for halo in (side.below, side.above):
            count, width = hops(halo, side.own)
            if count:
                yield Exchange(
                    axis=side.axis,
                    phase=phase,
                    payload_bytes=nbytes / side.own * width,
                    count=count * times,
                )
        nbytes = nbytes * side.grown / side.own
