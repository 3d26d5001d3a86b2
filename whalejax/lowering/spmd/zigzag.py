"""Reorders a sharded sequence to balance causal attention, and back.

Inputs of the scores besides queries and keys are reordered too, so this does not depend
on attention. The planner's ``blocked_attention`` defines the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def dealt_out(
    x: Any, dim: int, axes: Sequence[str], size: int, *, back: bool = False
) -> Any:
    """Reorders one device's part of a sequence to zig-zag order, or back.

    Args:
        x: Part of the device, with two halves that are consecutive in their order.
        dim: Dimension of the sequence.
        axes: Mesh axes that shard the sequence.
        size: Number of devices along the axes.
        back: Whether ``x`` is in zig-zag order; default False.
    """
    axes = tuple(axes)
    low, high = jnp.split(x, 2, axis=dim)
    even = lax.axis_index(axes) % 2 == 0
    # In both orders, one of a device's two parts has an even number.
    to = [[_holder(2 * d + odd, size) for d in range(size)] for odd in (0, 1)]
    moves = [list(enumerate(targets)) for targets in to]
    if back:
        first = jnp.where(even, low, high)
        second = jnp.where(even, high, low)
        moves = [[(b, a) for a, b in pairs] for pairs in moves]
        parts = [
            lax.ppermute(part, axes, pairs)
            for part, pairs in zip((first, second), moves, strict=True)
        ]
        return jnp.concatenate(parts, axis=dim)
    a = lax.ppermute(low, axes, moves[0])
    b = lax.ppermute(high, axes, moves[1])
    parts = [jnp.where(even, a, b), jnp.where(even, b, a)]
    return jnp.concatenate(parts, axis=dim)


def _holder(part: int, size: int) -> int:
    return min(part, 2 * size - 1 - part)
