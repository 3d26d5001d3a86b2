"""The scale of losses in float16, which adapts (Micikevicius et al., 2018).

Small gradients vanish in float16, which has few exponents: there the loss is scaled up
before it is differentiated and the gradients down after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp


FIRST_SCALE: Final = 2.0**15
GROWS_AFTER: Final = 2000
"""Steps without overflow after which the scale doubles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic scale of float16 losses and its history; scalars.

    Attributes:
        scale: float32; doubles after ``GROWS_AFTER`` good steps, halves after a bad.
        good_steps: int32, since the scale last changed.
        skipped_steps: int32, those whose gradients overflowed; they changed nothing.
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
        """Returns the scale after a step, by whether all gradients were finite."""
        good = self.good_steps + 1
        grows = good >= GROWS_AFTER
        up = jnp.where(grows, self.scale * 2, self.scale)
        down = jnp.maximum(self.scale * 0.5, 1.0)
        return LossScale(
            # Doubled too often it would be infinite, and stay so.
            scale=jnp.where(finite, jnp.minimum(up, 2.0**126), down),
            good_steps=jnp.where(finite & ~grows, good, 0),
            skipped_steps=self.skipped_steps + (~finite).astype(jnp.int32),
        )


def all_finite(values: Sequence[Any]) -> Any:
    """Whether no number among arrays is infinite or none, a scalar."""
    finite = jnp.asarray(True)
    for value in values:
        finite &= jnp.isfinite(value).all()
    return finite
