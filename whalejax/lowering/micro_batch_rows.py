"""Assigns samples of a global batch to micro-batches, for every executor.

Micro-batch ``m`` of ``M`` has the samples ``m, m + M, m + 2·M …``. So the samples of a
micro-batch depend on ``M`` alone. A sharded batch dimension stays sharded without
communication. If ``g`` consecutive samples belong together, micro-batch ``m`` has the
groups ``m, m + M …``, with the samples of each group in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRows:
    """Division of a batch into micro-batches.

    Attributes:
        count: Number of micro-batches per step.
        group: Number of consecutive samples that stay together.
    """

    count: int
    group: int = 1

    @classmethod
    def of(cls, plan: Plan) -> MicroBatchRows:
        return cls(count=plan.num_micro_batches, group=plan.group_size)

    def rows(self, size: int, number: int) -> np.ndarray:
        """Returns the indices of the samples of one micro-batch.

        Args:
            size: Number of samples of the global batch.
            number: Index of the micro-batch.

        >>> MicroBatchRows(count=2).rows(6, 1)
        array([1, 3, 5])
        >>> MicroBatchRows(count=2, group=2).rows(8, 1)
        array([2, 3, 6, 7])
        """
        cut = np.arange(size).reshape(-1, self.count, self.group)
        return cut[:, number].reshape(-1)

    def index(self, size: int, axis: int, number: int) -> tuple[Any, ...]:
        """Returns the index of one micro-batch in a host array.

        Args:
            size: Number of samples of the global batch.
            axis: Batch dimension of the array.
            number: Index of the micro-batch.
        """
        front = (slice(None),) * axis
        if self.group == 1:
            return (*front, slice(number, None, self.count))
        return (*front, self.rows(size, number))

    def take(self, leaf: Any, axis: int, number: Any) -> Any:
        """Returns one micro-batch of a global array.

        Args:
            leaf: Global array.
            axis: Batch dimension of the array.
            number: Index of the micro-batch; may be traced.
        """
        part = jax.lax.dynamic_index_in_dim(
            leaf.reshape(self._cut(leaf.shape, axis)), number, axis + 1, keepdims=False
        )
        return part.reshape(self._part(leaf.shape, axis))

    def stack(self, leaf: Any, axis: int) -> Any:
        """Returns all micro-batches of a global array, along a new first dimension.

        Args:
            leaf: Global array.
            axis: Batch dimension of the array.
        """
        parts = jnp.moveaxis(leaf.reshape(self._cut(leaf.shape, axis)), axis + 1, 0)
        return parts.reshape(self.count, *self._part(leaf.shape, axis))

    def unstack(self, parts: Any, axis: int) -> Any:
        """Returns a global array from its micro-batches: the inverse of ``stack``.

        Args:
            parts: Micro-batches along the first dimension.
            axis: Batch dimension of the array.
        """
        shape = list(parts.shape[1:])
        shape[axis] *= self.count
        cut = self._cut(shape, axis)
        each = parts.reshape(self.count, *cut[: axis + 1], *cut[axis + 2 :])
        return jnp.moveaxis(each, 0, axis + 1).reshape(shape)

    def put(self, leaf: Any, part: Any, axis: int, number: Any) -> Any:
        """Returns a global array with one micro-batch replaced.

        Args:
            leaf: Global array.
            part: Array of the micro-batch.
            axis: Batch dimension of the array.
            number: Index of the micro-batch; may be traced.
        """
        cut = self._cut(leaf.shape, axis)
        each = part.reshape(*cut[: axis + 1], *cut[axis + 2 :])
        whole = jax.lax.dynamic_update_index_in_dim(
            leaf.reshape(cut), each, number, axis=axis + 1
        )
        return whole.reshape(leaf.shape)

    def place(self, part: Any, axis: int, number: Any) -> Any:
        """Returns a global array with one micro-batch, and zeros elsewhere.

        Args:
            part: Array of the micro-batch.
            axis: Batch dimension of the array.
            number: Index of the micro-batch; may be traced.
        """
        shape = list(part.shape)
        shape[axis] *= self.count
        return self.put(jnp.zeros(shape, part.dtype), part, axis, number)

    def _cut(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        """Returns the shape with ``axis`` as (groups, micro-batches, group samples)."""
        groups = shape[axis] // (self.count * self.group)
        inner = () if self.group == 1 else (self.group,)
        return (*shape[:axis], groups, self.count, *inner, *shape[axis + 1 :])

    def _part(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], shape[axis] // self.count, *shape[axis + 1 :])
