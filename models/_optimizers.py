"""The optimizer that the transformers share, so that jobs differ in sizes alone."""

from __future__ import annotations

from typing import Any

import optax


def warmed_adamw(
    learning_rate: float,
    warmup_steps: int,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.01,
) -> Any:
    """AdamW behind a clipping of the global norm at 1, with a linear warm-up.

    Args:
        learning_rate: reached after the warm-up, then constant.
        warmup_steps: steps over which it rises, at least 1.
        b2: decay of the second moment.
        weight_decay: decoupled, times the learning rate.

    Returns:
        An optax gradient transformation.

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
