"""Operations that a stage computes in a way of its own.

Inside ``shard_map`` over the stages other axes are left to the compiler, which cannot
cut every operation there; and a stage has fewer layers than were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def in_stages(equation: Any, values: Sequence[Any]) -> list[Any] | None:
    """The results of an operation, or None where it is computed as it was traced.

    Args:
        equation: the operation.
        values: its operands.
    """
    name = equation.primitive.name
    if name == "reshape" and values[0].shape != equation.invars[0].aval.shape:
        (layers, *_), (_, *form) = values[0].shape, equation.outvars[0].aval.shape
        return [jnp.reshape(values[0], (layers, *form))]
    if name == "gather" and _takes_one(equation):
        return [_taken(*values)]
    return None


def _takes_one(equation: Any) -> bool:
    """Whether a gather takes one element of the last dimension for each row.

    XLA's partitioner ends the process at one whose operand is sharded there, where
    some axes are manual and several are not.
    """
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


def _taken(operand: Any, indices: Any) -> Any:
    """The same as a sum over the dimension, of which all but one term are zero."""
    places = jax.lax.broadcasted_iota(indices.dtype, operand.shape, operand.ndim - 1)
    kept = jnp.where(places == indices[..., 0], operand, 0)
    return kept.sum(-1, keepdims=True)
