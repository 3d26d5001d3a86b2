"""Slices with a stride, of dimensions that devices have parts of.

The gradient of such a slice puts its elements apart with nothing between them, and
XLA's partitioner makes arrays of another length of that: the compiler refuses its own
program. Where the stride divides the dimension, elements that are as far apart are the
columns of a matrix, and to take one needs no such step.
"""

from __future__ import annotations

from typing import Any

import jax


def is_strided(equation: Any) -> bool:
    """Whether an equation is a slice that leaves elements out between others."""
    strides = equation.params.get("strides")
    return equation.primitive.name == "slice" and any(k > 1 for k in strides or ())


def strided(equation: Any, value: Any) -> Any:
    """The result of such a slice.

    Args:
        equation: The slice.
        value: Its operand.
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
    """Returns the column of a matrix that a slice takes, and its number of elements."""
    if stride == 1 or size % stride or start >= stride:
        return None
    return start, len(range(start, limit, stride))


def _column(value: Any, dim: int, stride: int, first: int) -> Any:
    front, behind = value.shape[:dim], value.shape[dim + 1 :]
    rows = value.reshape(*front, value.shape[dim] // stride, stride, *behind)
    return jax.lax.index_in_dim(rows, first, dim + 1, keepdims=False)
