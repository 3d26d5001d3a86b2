"""Attention rows that see no key, where masked blocks of scores are left out.

Blocks that a mask hides are left out, because beside any other score theirs have no
weight. A row all of whose scores are masked has no other: its softmax is a mean over
masked scores, those of hidden blocks among them. These all hold one number, so what
they add to such a row is the sum of their values, and no product is needed for it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from whalejax.planner.sharding.ring_rounds import Ring


class SkippedBlocks:
    """The hidden blocks of one device, whose sums are taken as keys go round.

    Args:
        ring: The rounds.
        score: Score in all masked blocks.
        here: This device's place in the ring.
        wide: The type of sums.
    """

    def __init__(self, ring: Ring, score: float, here: Any, wide: Any) -> None:
        self.ring = ring
        self.wide = wide
        self.score = jnp.asarray(score, wide)
        blocks = _masked_blocks(ring)
        self.blocks = jnp.asarray(blocks, wide)[here]
        columns = blocks.sum(axis=(1, 3)) * ring.column_size
        columns = np.repeat(columns, ring.row_size, axis=1)[:, None, None]
        self.columns = jnp.asarray(columns, wide)[here]

    def none_yet(self, value: Any) -> Any:
        """Sums over no values, ``[batch, row blocks, width]``."""
        shape = value.shape[0], self.ring.rows.shape[1], value.shape[2]
        return jnp.zeros(shape, self.wide)

    def summed(self, step: Any, value: Any, sums: Any) -> Any:
        """Sums with the values that are here in a round.

        Args:
            step: Number of the round.
            value: ``[batch, columns, width]``.
            sums: Before it.
        """
        batch, columns, width = value.shape
        size = self.ring.column_size
        parts = value.astype(self.wide).reshape(batch, columns // size, size, width)
        return sums + self._product("rc,bce->bre", step, parts.sum(axis=2))

    def blended(self, sums: Any, total: Any, peak: Any, below: Any) -> Any:
        """Weighted values, highest score and sum of weights, hidden blocks included.

        Args:
            sums: After all rounds.
            total: ``[batch, group, rows, width]``.
            peak, below: ``[batch, group, rows]``.
        """
        higher = jnp.where(self.columns > 0, jnp.maximum(peak, self.score), peak)
        level = jnp.where(jnp.isfinite(higher), higher, 0)
        shrink = jnp.exp(peak - level)
        each = self._each(level)
        added = jnp.repeat(sums, self.ring.row_size, axis=1)[:, None]
        return (
            total * shrink[..., None] + each[..., None] * added,
            higher,
            below * shrink + each * self.columns,
        )

    def pulled(self, level: Any, below: Any, given: Any, kind: Any) -> Any:
        """Cotangent of one value of a hidden block, ``[batch, row blocks, width]``.

        Args:
            level, below: Row maxima and sums, ``[batch, group, rows]``.
            given: Cotangents of the output, ``[batch, group, rows, width]``.
            kind: Dtype in which weights are read.
        """
        weights = jnp.where(self.columns > 0, self._each(level) / below, 0)
        weighed = weights.astype(kind).astype(self.wide)[..., None] * given
        batch, _, _, width = given.shape
        blocks, size = self.ring.rows.shape[1], self.ring.row_size
        return weighed.sum(axis=1).reshape(batch, blocks, size, width).sum(axis=2)

    def returned(self, step: Any, pulled: Any, cotangent: Any) -> Any:
        """Cotangents of the values that are here, with those of hidden blocks."""
        result = self._product("rc,bre->bce", step, pulled)
        return cotangent + jnp.repeat(result, self.ring.column_size, axis=1)

    def _each(self, level: Any) -> Any:
        """The weight of one hidden score beside the highest of a row."""
        return jnp.where(self.columns > 0, jnp.exp(self.score - level), 0)

    def _product(self, text: str, step: Any, values: Any) -> Any:
        blocks = self.blocks[step]
        return jnp.einsum(text, blocks, values, precision=lax.Precision.HIGHEST)


def _masked_blocks(ring: Ring) -> np.ndarray:
    """Returns the masked blocks, ``[device, round, row block, column block]``."""
    device, step = np.ix_(range(ring.size), range(ring.size))
    rows = ring.rows[device][:, :, :, None]
    columns = ring.columns[(device - step) % ring.size][:, :, None, :]
    masked_blocks: np.ndarray = ~ring.seen[rows, columns]
    return masked_blocks
