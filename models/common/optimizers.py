"""Optimizers that several models share."""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import optax


_SMALLEST_FACTORED: Final = 32


def warmed_adamw(
    learning_rate: float,
    warmup_steps: int,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.01,
) -> Any:
    """Returns AdamW after a clipping of the global norm at 1, with a linear warm-up.

    Args:
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises, at least 1.
        b2: Decay of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.

    Returns:
        Optax gradient transformation.

    >>> callable(warmed_adamw(1e-3, 10).update)
    True
    """
    schedule = optax.warmup_constant_schedule(
        learning_rate / warmup_steps, learning_rate, warmup_steps
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=b2, weight_decay=weight_decay),
    )


def slowing_adafactor(learning_rate: float, constant_steps: int) -> Any:
    """Returns Adafactor with a constant rate that decays after a number of steps.

    After Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
    Cost" (2018), without momentum. For a matrix it stores the means of the squares over
    rows and over columns. The rate decays with the inverse square root of the step.

    Args:
        learning_rate: Learning rate relative to the size of the updated parameter.
        constant_steps: Number of steps with a constant rate, at least 1.

    Returns:
        Optax gradient transformation.

    >>> callable(slowing_adafactor(1e-2, 10_000).update)
    True
    """

    def rate(step: Any) -> Any:
        passed = jnp.maximum(jnp.asarray(step, jnp.float32) / constant_steps, 1.0)
        return learning_rate / jnp.sqrt(passed)

    # Heads have usually 64 dimensions. With optax's limit of 128, the squares of their
    # kernels would be stored in full.
    return optax.adafactor(rate, min_dim_size_to_factor=_SMALLEST_FACTORED)
