"""Brings a sharded sequence into the order in which causal attention is even, and back.

Apart from the ring because what is read beside the scores is dealt out too, and nothing
here knows of attention. ``ring_rounds`` of the planner says which device holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def dealt_out(
    x: Any, dim: int, axes: Sequence[str], size: int, *, back: bool = False
) -> Any:
    """One device's part of a sequence in zig-zag order, or back in its own.

    Args:
        x: Its part, two halves after another.
        dim: The sequence.
        axes: Mesh axes that shard it.
        size: Their devices.
        back: ``x`` is in zig-zag order.
    """
    axes = tuple(axes)
    low, high = jnp.split(x, 2, axis=dim)
    even = lax.axis_index(axes) % 2 == 0
    # Of a device's two parts one has an even number, in either order.
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
    """The device that holds a part in zig-zag order."""
    return min(part, 2 * size - 1 - part)
