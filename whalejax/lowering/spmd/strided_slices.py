"""Strided slices of sharded dimensions.

The gradient of such a slice is an interior padding, for which XLA's partitioner makes
arrays of a wrong length, so the compiler rejects its own program. If the stride divides
the dimension, the slice is a column of a reshaped matrix. The gradient of the column
needs no interior padding.
"""

from __future__ import annotations

from typing import Any

import jax


def is_strided(equation: Any) -> bool:
    """Whether an equation is a slice with a stride above 1."""
    strides = equation.params.get("strides")
    return equation.primitive.name == "slice" and any(k > 1 for k in strides or ())


def strided(equation: Any, value: Any) -> Any:
    """Returns the result of a strided slice.

    Args:
        equation: Slice equation.
        value: Operand of the slice.
    """
    params = equation.params
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    strides = list(params["strides"])
    for dim in range(len(starts)):
        columns = _columns(value.shape[dim], starts[dim], limits[dim], strides[dim])
        if columns is None:
            continue
        first, count = columns
        value = _column(value, dim, strides[dim], first)
        starts[dim], limits[dim], strides[dim] = 0, count, 1
    return jax.lax.slice(value, starts, limits, strides)


def _columns(size: int, start: int, limit: int, stride: int) -> tuple[int, int] | None:
    if stride == 1 or size % stride or start >= stride:
        return None
    return start, len(range(start, limit, stride))


def _column(value: Any, dim: int, stride: int, first: int) -> Any:
    front, behind = value.shape[:dim], value.shape[dim + 1 :]
    rows = value.reshape(*front, value.shape[dim] // stride, stride, *behind)
    return jax.lax.index_in_dim(rows, first, dim + 1, keepdims=False)
