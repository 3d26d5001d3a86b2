"""Fully masked attention rows, if masked blocks of scores are skipped.

Masked blocks are skipped because masked scores have no weight beside an unmasked one.
But the softmax of a fully masked row is a mean over masked scores, and skipped blocks
belong to it. All these scores are equal. So skipped blocks contribute the sum of their
values to such a row, and need no product.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from whalejax.planner.cost.blocked_attention import Ring


class SkippedBlocks:
    """The masked blocks of one device, whose values are summed round by round.

    Args:
        ring: Rounds of the ring.
        score: Score in all masked blocks.
        here: Position of this device in the ring.
        wide: Dtype of sums.
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
        """Returns zero sums, ``[batch, row blocks, width]``."""
        shape = value.shape[0], self.ring.rows.shape[1], value.shape[2]
        return jnp.zeros(shape, self.wide)

    def summed(self, step: Any, value: Any, sums: Any) -> Any:
        """Adds the values of a round to the sums.

        Args:
            step: Number of the round.
            value: Values ``[batch, columns, width]``.
            sums: Sums before the round.
        """
        batch, columns, width = value.shape
        size = self.ring.column_size
        parts = value.astype(self.wide).reshape(batch, columns // size, size, width)
        return sums + self._product("rc,bce->bre", step, parts.sum(axis=2))

    def blended(self, sums: Any, total: Any, peak: Any, below: Any) -> Any:
        """Adds masked blocks to weighted values, row maxima and row sums.

        Args:
            sums: Sums of values after all rounds.
            total: Weighted values ``[batch, group, rows, width]``.
            peak: Row maxima ``[batch, group, rows]``.
            below: Row sums of weights ``[batch, group, rows]``.
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
        """Returns the cotangents of values in masked blocks.

        Args:
            level: Row maxima ``[batch, group, rows]``.
            below: Row sums of weights ``[batch, group, rows]``.
            given: Cotangents of the output, ``[batch, group, rows, width]``.
            kind: Dtype of the weights in products.

        Returns:
            ``[batch, row blocks, width]``.
        """
        weights = jnp.where(self.columns > 0, self._each(level) / below, 0)
        weighed = weights.astype(kind).astype(self.wide)[..., None] * given
        batch, _, _, width = given.shape
        blocks, size = self.ring.rows.shape[1], self.ring.row_size
        return weighed.sum(axis=1).reshape(batch, blocks, size, width).sum(axis=2)

    def returned(self, step: Any, pulled: Any, cotangent: Any) -> Any:
        """Adds the cotangents from masked blocks to those of the current values."""
        result = self._product("rc,bre->bce", step, pulled)
        return cotangent + jnp.repeat(result, self.ring.column_size, axis=1)

    def _each(self, level: Any) -> Any:
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
