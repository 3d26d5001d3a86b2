"""Mixed precision: compute in 16 bits, keep parameters and gradients in float32.

The cast is part of the traced loss. So all that follows the cast (gathers of
parameters, products, activations) is counted and moved at 16 bits. The transpose of the
cast returns gradients in float32 to the master weights. In float16 the loss is scaled
too; see ``lowering.loss_scale``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax.numpy as jnp

from whalejax.adapters.base import Adapter
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import ALL
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan


CAST_BYTES = {"f32": 1.0, "bf16": 0.5, "f16": 0.5}
"""Ratio of a parameter's bytes in computation to its stored bytes."""

SMALL_PART: Final = 0.05
"""Largest share of float32 products, such as a router's, in the work of all products
with which the rest of the model is still cast as a whole.
"""


def at_precision(adapter: Adapter, precision: str) -> Adapter:
    """Returns an adapter whose loss computes at a precision.

    Args:
        adapter: The model and its loss.
        precision: One of ``PRECISIONS``.

    Raises:
        WhaleError: The precision is not one of ``PRECISIONS``.
    """
    if precision not in PRECISIONS:
        raise WhaleError(
            f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}"
        )
    if precision == "f32":
        return adapter
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float16
    return dataclasses.replace(adapter, compute_dtype=dtype)


def taken_precision(
    asked: str, traced: Callable[[str | Mapping[str, str]], Any]
) -> tuple[str | Mapping[str, str], list[str]]:
    """Returns the form in which a precision takes effect, and notes on it.

    Normally parameters and batches are cast once, and the model's own promotion does
    the rest. This fails if much of the model computes in float32 whatever its inputs
    are, or if types do not fit after the cast. The products are then cast to 16 bits
    one by one, as if the user had asked for it in all TaskGraphs.

    Args:
        asked: One of ``PRECISIONS``.
        traced: Function from a precision to the programs of the loss.

    Returns:
        The precision for planning, and notes for the user.

    Raises:
        Exception: The loss can be traced in neither way. The error is the loss's own.
    """
    if asked == "f32":
        return asked, []
    by_product = {ALL: asked}
    start = f"precision={asked!r} is taken as {by_product!r}, product by product: "
    try:
        captured = traced(asked).captured
        wide, part = captured.wide_products, captured.float32_part
    except WhaleError:
        raise
    except Exception as error:  # whatever a loss may raise
        try:
            traced(by_product).captured  # noqa: B018
        except Exception:
            raise error from None
        said = str(error).strip().partition("\n")[0]
        return by_product, [
            f"{start}the loss cannot be traced with parameters and batch cast to it "
            f"({type(error).__name__}: {said:.100})"
        ]
    free = wide.pop("", 0)
    if free and part > SMALL_PART:
        are = "product is" if free == 1 else "products are"
        where = f", the largest at {captured.float32_line}"
        return by_product, [
            f"{start}{free} {are} in float32 whatever parameters and batch are, as in "
            f"modules with a dtype of their own{where}"
        ]
    if free:
        wide[f"({part:.2%} of the work), whose operands the model casts,"] = free
    return asked, [
        f"{asked}: {count_text(count, 'product')} {where} stay{'s' * (count == 1)} in "
        "float32"
        for where, count in wide.items()
    ]


def widest_work(graph: Graph) -> str:
    """Returns the dtype in which products do most work; float32 without products."""
    work: dict[str, float] = {}
    for op in graph.ops:
        if op.matmul is not None:
            name = graph.tensors[op.operands[0]].dtype
            work[name] = work.get(name, 0.0) + float(math.prod(op.matmul))
    return max(work, key=lambda name: work[name], default="float32")


def bf16_note(plan: Plan, graph: Graph) -> list[str]:
    """Returns notes on 16-bit products on devices without 16-bit units.

    Args:
        plan: Any plan.
        graph: Graph of the loss.
    """
    products = [op for op in graph.ops if op.matmul is not None]
    types = {graph.tensors[op.operands[0]].dtype for op in products}
    without = [
        f"{kind.display_name()} has no fast units for {dtype}: products run in "
        f"float32, with {kind.peak_flops('f32') / 1e12:g} TFLOP/s"
        for kind in plan.cluster.kinds
        for dtype in ("bfloat16", "float16")
        if dtype in types and kind.multiplies_in("f16") == "f32"
    ]
    kinds = [
        kind
        for kind in plan.cluster.kinds
        if kind.widens_bfloat16 and kind.multiplies_in("f16") == "f16"
    ]
    if "bfloat16" not in types:
        return without
    asked = "bf16" in (plan.precision, *dict(plan.precisions).values())
    remedy = "precision='f16' uses" if asked else "A model in float16 uses"
    return without + [
        f"{kind.display_name()} has no units for bfloat16: XLA multiplies in float32 "
        f"there, with {kind.peak_flops('f32') / 1e12:g} instead of "
        f"{kind.peak_flops('f16') / 1e12:g} TFLOP/s. {remedy} its units. If the "
        "device does have bfloat16 units, give their rate: "
        f"kinds.{kind.name}.flops_per_second.bf16"
        for kind in kinds
    ]
