"""Windows that slide over space: the elements that a device needs of its neighbours.

A convolution or a pooling reads a window of its operand for each element of its result.
If devices share a spatial dimension in equal parts, windows at the edge of a part reach
into the next one: that strip is the *halo*. If parts of the operand have ``stride``
times the elements of parts of the result, the window alone gives the halo's width. Let
a window span ``span`` elements, move by ``stride`` and begin ``low`` elements before
the first. Then a part needs ``low`` elements below and ``span - low - stride`` above
(Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained
Parallelism", IPDPS 2019, section III).
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
        dim, out: Dimension of operand 0 and of result 0.
        space: One of ``SPACES`` if the operation (a convolution) names it, or empty.
        span: Elements from the first to the last that one window reads.
        stride: Elements of the operand from one window to the next.
        low: Padding elements before the first element.
        spread: Elements of the result for one of the operand: above 1 for a transposed
            convolution, whose windows then do not overlap.
        refused: Reason why devices cannot share the dimension here, or empty.
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
            size: Elements of the operand along the dimension, over all devices.
            result: Elements of the result.
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
        """Returns the elements that a device reads beyond its part, with padding.

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
        """Returns the offset of the first element that a device reads, in its part
        extended by ``reach``.

        Args:
            size, result, parts: Arguments of ``halo``, unchanged.
            part: Number of the device, which may be a tracer.
        """
        before, _ = self.reach(size, result, parts)
        step = result // parts * self.stride - size // parts
        return part * step + (before - self.low) if step else before - self.low

    def read(self, size: int, result: int, parts: int) -> int:
        """Returns the operand elements that a device reads for its part of a result."""
        if self.spread > 1:
            return size // parts
        return (result // parts - 1) * self.stride + self.span
