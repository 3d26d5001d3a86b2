"""Mixed precision: compute in 16 bits, keep masters and gradients in float32.

The cast stands inside the traced loss, so that everything behind it (gathers of
parameters, products, activations) is counted and moved at the narrow width, and the
gradient arrives at the master in float32 through the cast's own transpose. Small
gradients vanish in float16, which has few exponents: there the loss is scaled up before
it is differentiated and the gradients down after, by a number that adapts (Micikevicius
et al., 2018).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from whalejax.adapters import Adapter
from whalejax.meshes.problems import WhaleError
from whalejax.planner.graph import Graph
from whalejax.planner.plan import Plan
from whalejax.planner.precisions import PRECISIONS as PRECISIONS


CAST_BYTES = {"f32": 1.0, "bf16": 0.5, "f16": 0.5}
"""Bytes of a parameter as computed with, over its stored bytes."""


def at_precision(adapter: Adapter, precision: str) -> Adapter:
    """An adapter whose loss computes at a precision.

    Args:
        adapter: the model.
        precision: one of ``PRECISIONS``.

    Raises:
        WhaleError: another precision.
    """
    if precision not in PRECISIONS:
        raise WhaleError(
            f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}"
        )
    if precision == "f32":
        return adapter
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float16
    return dataclasses.replace(adapter, compute_dtype=dtype)


def bf16_note(plan: Plan, graph: Graph) -> list[str]:
    """What is said of products in bfloat16 on devices without units for them.

    Args:
        plan: on any devices.
        graph: the captured loss.
    """
    kinds = [kind for kind in plan.cluster.kinds if kind.widens_bfloat16]
    products = [op for op in graph.ops if op.matmul is not None]
    if not any(graph.tensors[op.operands[0]].dtype == "bfloat16" for op in products):
        return []
    asked = "bf16" in (plan.precision, *dict(plan.precisions).values())
    remedy = "precision='f16' takes" if asked else "A model that says float16 takes"
    return [
        f"{kind.display_name()} has no units for bfloat16: XLA multiplies in float32 "
        f"there, with {kind.peak_flops('f32') / 1e12:g} instead of "
        f"{kind.peak_flops('f16') / 1e12:g} TFLOP/s. {remedy} its units (if it has "
        f"some for bfloat16, say so: kinds.{kind.name}.flops_per_second.bf16)"
        for kind in kinds
    ]


FIRST_SCALE: Final = 2.0**15
GROWS_AFTER: Final = 2000
"""Steps without overflow after which the scale doubles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What losses in float16 are multiplied by, and how it went; scalars.

    Attributes:
        scale: float32; doubles after ``GROWS_AFTER`` good steps, halves after a bad.
        good_steps: int32, since the scale last changed.
        skipped_steps: int32, those whose gradients overflowed; they changed nothing.
    """

    scale: Any
    good_steps: Any
    skipped_steps: Any

    @classmethod
    def fresh(cls) -> LossScale:
        """Before the first step."""
        return cls(
            scale=jnp.asarray(FIRST_SCALE, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
        )

    def after(self, finite: Any) -> LossScale:
        """After a step whose gradients were all finite, or were not."""
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
    found = jnp.asarray(True)
    for value in values:
        found &= jnp.isfinite(value).all()
    return found
