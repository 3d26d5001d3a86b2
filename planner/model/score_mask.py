"""Scores of an attention that a mask hides, by part of the sequence.

Attention in blocks skips blocks that are hidden whatever the data are. The mask is
evaluated once, in equal parts of the sequence. The cost model derives from these parts
the hidden blocks of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMask:
    """Parts of an attention's scores that have a score which is not hidden.

    Attributes:
        count: Number of equal parts of the rows, and of the columns.
        packed: The visible parts, ``bool[count, count]``, eight in a byte.
        causal: Whether no row sees a part of later columns.
        triangular: Whether these are all hidden parts.
    """

    count: int
    packed: bytes
    causal: bool
    triangular: bool

    @classmethod
    def of(cls, hidden: np.ndarray, *, square: bool) -> ScoreMask:
        """Returns the mask of hidden parts.

        Args:
            hidden: Whether each part is hidden, ``bool[count, count]``.
            square: Whether there are as many columns as rows.

        >>> mask = ScoreMask.of(~np.tri(4, dtype=bool), square=True)
        >>> mask.causal, mask.triangular
        (True, True)
        """
        count = len(hidden)
        later = ~np.tri(count, dtype=bool)
        causal = square and count > 1 and bool(hidden[later].all())
        return cls(
            count=count,
            packed=np.packbits(~hidden).tobytes(),
            causal=causal,
            triangular=causal and not hidden[~later].any(),
        )

    def hidden_blocks(self, rows: int, columns: int) -> np.ndarray:
        """Returns the blocks without a visible part, ``bool[rows, columns]``.

        A block smaller than a part counts as visible if its part is.

        Args:
            rows: Number of equal blocks of rows.
            columns: Number of equal blocks of columns.

        >>> mask = ScoreMask.of(~np.tri(4, dtype=bool), square=True)
        >>> mask.hidden_blocks(2, 2).tolist()
        [[False, True], [False, False]]
        """
        count = self.count
        bits = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=count**2)
        sums = np.zeros((count + 1, count + 1), np.int64)
        sums[1:, 1:] = bits.reshape(count, count).cumsum(axis=0).cumsum(axis=1)
        (top, bottom), (left, right) = (_ends(n, count) for n in (rows, columns))
        above, below = sums[top], sums[bottom]
        seen = below[:, right] - below[:, left] - above[:, right] + above[:, left]
        result: np.ndarray = seen == 0
        return result


def _ends(blocks: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first part of each block, and the one after its last."""
    numbers = np.arange(blocks)
    return numbers * count // blocks, -(-(numbers + 1) * count // blocks)
