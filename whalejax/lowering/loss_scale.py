"""Adaptive scale of losses in float16 (Micikevicius et al., 2018).

Small gradients underflow in float16, which has a small range of exponents. So the loss
is scaled up before differentiation, and the gradients are scaled down after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp


FIRST_SCALE: Final = 2.0**15
GROWS_AFTER: Final = 2000
"""Number of steps without overflow after which the scale doubles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Adaptive scale of float16 losses and its history, as scalars.

    Attributes:
        scale: Scale in float32, from 1 to 2**126. It doubles after ``GROWS_AFTER``
            steps without overflow, and halves after an overflow.
        good_steps: Number of steps without overflow since the last change, int32.
        skipped_steps: Number of steps that were skipped because their gradients
            overflowed, int32.
    """

    scale: Any
    good_steps: Any
    skipped_steps: Any

    @classmethod
    def initial(cls) -> LossScale:
        """Returns the scale before the first step."""
        return cls(
            scale=jnp.asarray(FIRST_SCALE, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
        )

    def after(self, finite: Any) -> LossScale:
        """Returns the scale after a step."""
        good = self.good_steps + 1
        grows = good >= GROWS_AFTER
        up = jnp.where(grows, self.scale * 2, self.scale)
        down = jnp.maximum(self.scale * 0.5, 1.0)
        return LossScale(
            # The limit keeps the scale finite.
            scale=jnp.where(finite, jnp.minimum(up, 2.0**126), down),
            good_steps=jnp.where(finite & ~grows, good, 0),
            skipped_steps=self.skipped_steps + (~finite).astype(jnp.int32),
        )


def all_finite(values: Sequence[Any]) -> Any:
    """Returns a scalar: whether all elements of all arrays are finite."""
    finite = jnp.asarray(True)
    for value in values:
        finite &= jnp.isfinite(value).all()
    return finite
