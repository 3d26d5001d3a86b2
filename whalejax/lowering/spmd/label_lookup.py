"""Looks up one element of each row, such as a label's logit, by comparison.

``take_along_axis`` is a gather, and its gradient a scatter into zeros. If the rows are
one long dimension, as in a micro-batch of one sample, TPU compilers flatten and copy
operand and gradient. This needs two more float32 arrays of the size of the logits
(libtpu 0.0.42, v6e, 32,768 rows of 151,936). A comparison with the index, a selection
and a sum give the same numbers. They fuse with neighbouring operations, and need no
such arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode as Mode

from whalejax.lowering.spmd.gather_scatter import filling, signed


def picks_from_rows(equation: Any) -> bool:
    """Returns whether a gather takes one floating-point element of each of many rows.

    Args:
        equation: Gather equation.
    """
    numbers = equation.params["dimension_numbers"]
    table, indices = (atom.aval for atom in equation.invars)
    single, batch = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    if tuple(single) != tuple(numbers.start_index_map) or len(single) != 1:
        return False
    rows = [table.shape[dim] for dim in range(len(table.shape)) if dim not in single]
    return (
        jnp.issubdtype(table.dtype, jnp.floating)
        and [n for n in rows if n > 1] == [table.shape[d] for d in batch]
        and len(batch) == 1
        and math.prod(indices.shape) == math.prod(rows)
        and Mode.from_any(equation.params["mode"]) in _MODES
    )


_MODES = (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)


def picked(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the result of a gather for which ``picks_from_rows`` is true.

    Args:
        equation: Gather equation.
        values: Table, and one index for each row.
    """
    table, indices = values
    params = equation.params
    numbers, mode = params["dimension_numbers"], Mode.from_any(params["mode"])
    (single,) = numbers.collapsed_slice_dims
    size = table.shape[single]
    rows = [1 if dim == single else n for dim, n in enumerate(table.shape)]
    places = signed(indices).reshape(rows)
    if mode is Mode.CLIP:
        places = jnp.clip(places, 0, size - 1)
    at = lax.broadcasted_iota(places.dtype, table.shape, single)
    zero = jnp.zeros((), table.dtype)
    result = jnp.sum(jnp.where(at == places, table, zero), axis=single, keepdims=True)
    if mode is Mode.FILL_OR_DROP:
        fill = filling(params["fill_value"], table.dtype)
        result = jnp.where((places >= 0) & (places < size), result, fill)
    return [result.reshape(equation.outvars[0].aval.shape)]
