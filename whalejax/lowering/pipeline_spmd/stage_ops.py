"""Operations that a stage computes in another way than the traced program.

Inside ``shard_map`` over the stages, the compiler partitions the other axes, which it
cannot do for every operation. A stage also has fewer layers than were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode as Mode

from whalejax.lowering.spmd.gather_scatter import filling, in_parts, signed
from whalejax.planner.sharding.layout import Spec


def in_stages(
    equation: Any,
    values: Sequence[Any],
    specs: Sequence[Spec],
    mesh: Any,
    flows: Sequence[bool] | None = None,
) -> list[Any] | None:
    """Returns the results of an operation, or None if it runs as traced.

    Args:
        equation: Operation of the traced program.
        values: Operands of the operation.
        specs: Specs of the operands, for lookups.
        mesh: Mesh of the devices.
        flows: Whether a gradient flows through each operand of a call with its own
            derivative rule.
    """
    before = equation.invars[0].aval.shape if values else ()
    if equation.primitive.name == "reshape" and values[0].shape != before:
        (layers, *_), (_, *form) = values[0].shape, equation.outvars[0].aval.shape
        return [jnp.reshape(values[0], (layers, *form))]
    if equation.primitive.name == "gather" and _takes_one(equation):
        return [_take_by_sum(equation, *values)]
    return in_parts(equation, values, specs, mesh, flows)


def _takes_one(equation: Any) -> bool:
    operand, indices = (v.aval for v in equation.invars)
    numbers, last = equation.params["dimension_numbers"], operand.ndim - 1
    rows = tuple(range(last))
    return bool(
        jnp.issubdtype(operand.dtype, jnp.inexact)
        and numbers.collapsed_slice_dims == (last,)
        and numbers.start_index_map == (last,)
        and numbers.offset_dims == ()
        and tuple(numbers.operand_batching_dims) == rows
        and tuple(numbers.start_indices_batching_dims) == rows
        and indices.shape[:-1] == (*operand.shape[:-1], 1)
    )


def _take_by_sum(equation: Any, operand: Any, indices: Any) -> Any:
    """Computes a lookup as a sum in which all terms except one are zero.

    A sum, unlike a lookup, fuses with the operation that makes the rows, such as a cast
    of logits to float32.
    """
    mode, size = Mode.from_any(equation.params["mode"]), operand.shape[-1]
    place = signed(indices[..., 0])
    if mode == Mode.CLIP:
        place = jnp.clip(place, 0, size - 1)
    places = jax.lax.broadcasted_iota(place.dtype, operand.shape, operand.ndim - 1)
    result = jnp.where(places == place, operand, 0).sum(-1, keepdims=True)
    if mode != Mode.FILL_OR_DROP:
        return result
    fill = filling(equation.params["fill_value"], operand.dtype)
    return jnp.where((place >= 0) & (place < size), result, fill)
