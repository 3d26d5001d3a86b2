"""Mixed precision: compute in bfloat16, keep masters and gradients in float32.

The cast stands inside the traced loss, so that everything behind it (gathers of
parameters, products, activations) is counted and moved at the narrow width, and the
gradient arrives at the master in float32 through the cast's own transpose.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from whalejax.adapters import Adapter
from whalejax.meshes.problems import WhaleError


PRECISIONS = ("f32", "bf16")
"""``f32`` leaves the model's own types alone."""

CAST_BYTES = {"f32": 1.0, "bf16": 0.5}
"""Bytes of a parameter as computed with, over its stored bytes."""


def at_precision(adapter: Adapter, precision: str) -> Adapter:
    """An adapter whose loss computes at a precision.

    Args:
        adapter: the model.
        precision: ``"f32"`` or ``"bf16"``.

    Raises:
        WhaleError: another precision.
    """
    if precision not in PRECISIONS:
        raise WhaleError(
            f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}"
        )
    if precision == "f32":
        return adapter
    return dataclasses.replace(adapter, compute_dtype=jnp.bfloat16)
