"""Windows that slide over space, and the elements that a device needs of neighbours.

A convolution or a pooling reads a window of its operand for each element of its result.
If devices have equal parts of a spatial dimension, windows at the edge of a part reach
into the next part. The elements there are the *halo*.

If a part of the operand has ``stride`` times the elements of a part of the result, the
window alone gives the halo's width. Let a window cover ``span`` elements, move by
``stride`` and begin ``low`` elements before the first. A part then needs ``low``
elements below and ``span - low - stride`` above (Dryden et al., "Improving
Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS 2019,
section III).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


SPACES = ("depth", "height", "width")
"""Names of spatial dimensions, and of the mesh axes that shard them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Window of an operation along one spatial dimension.

    Attributes:
        dim, out: Dimensions of operand 0 and of result 0.
        space: Name in ``SPACES`` if the operation is a convolution, which knows it,
            else empty.
        span: Number of elements from the first to the last that one window reads.
        stride: Number of elements of the operand from one window to the next.
        low: Number of padding elements before the first element.
        spread: Elements of the result per element of the operand. It is above 1 for a
            transposed convolution, whose windows then do not overlap.
        refused: Reason why devices cannot shard the dimension here, or empty.
    """

    dim: int
    out: int
    space: str = ""
    span: int = 1
    stride: int = 1
    low: int = 0
    spread: int = 1
    refused: str = ""

    def halo(self, size: int, result: int, parts: int) -> tuple[int, int]:
        """Returns the most elements that a device receives from below and from above.

        Args:
            size: Length of the operand's unsharded dimension.
            result: Length of the result's unsharded dimension.
            parts: Number of devices.

        >>> Window(dim=1, out=1, span=3, low=1).halo(16, 16, 4)
        (1, 1)
        >>> Window(dim=1, out=1, span=3, stride=2).halo(16, 8, 4)
        (0, 1)
        >>> Window(dim=1, out=1, span=2, stride=2).halo(16, 8, 4)
        (0, 0)
        >>> Window(dim=1, out=1, span=3).halo(16, 14, 2)  # nothing is padded
        (1, 1)
        """
        if parts == 1 or self.spread > 1:
            return 0, 0
        own, made = size // parts, result // parts

        def first(part: int) -> int:
            return part * made * self.stride - self.low

        below = (part * own - first(part) for part in range(1, parts))
        above = (
            first(part) + (made - 1) * self.stride + self.span - (part + 1) * own
            for part in range(parts - 1)
        )
        return max(0, *below), max(0, *above)

    def reach(self, size: int, result: int, parts: int) -> tuple[int, int]:
        """Returns the elements that a device reads below and above its part, with
        padding.

        Args:
            size, result, parts: Arguments of ``halo``, unchanged.

        >>> Window(dim=1, out=1, span=5, low=4).reach(16, 16, 4)  # none behind
        (4, 0)
        >>> Window(dim=1, out=1, span=3).reach(16, 14, 2)
        (1, 1)
        """
        below, above = self.halo(size, result, parts)
        high = (result - 1) * self.stride + self.span - self.low - size
        return max(below, self.low), max(above, high)

    def start(self, size: int, result: int, parts: int, part: Any) -> Any:
        """Returns the offset of the first element that a device reads.

        It counts in the device's part, extended by ``reach``.

        Args:
            size, result, parts: Arguments of ``halo``, unchanged.
            part: Number of the device, which may be a tracer.
        """
        before, _ = self.reach(size, result, parts)
        step = result // parts * self.stride - size // parts
        return part * step + (before - self.low) if step else before - self.low

    def read(self, size: int, result: int, parts: int) -> int:
        """Returns how many elements of the operand a device reads for its result."""
        if self.spread > 1:
            return size // parts
        return (result // parts - 1) * self.stride + self.span
