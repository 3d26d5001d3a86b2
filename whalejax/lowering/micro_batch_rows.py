"""Assigns samples of a global batch to micro-batches, for every executor.

Micro-batch ``m`` of ``M`` holds the samples ``m, m + M, m + 2·M …``: what meets in a
micro-batch depends on ``M`` alone, and a batch dimension that is sharded over devices
stays sharded, with no communication. Where ``g`` neighbours belong together, the same
holds of groups: micro-batch ``m`` holds the groups ``m, m + M …``, each in its order.
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
        group: Number of neighbouring samples that stay together.
    """

    count: int
    group: int = 1

    @classmethod
    def of(cls, plan: Plan) -> MicroBatchRows:
        return cls(count=plan.num_micro_batches, group=plan.group_size)

    def rows(self, size: int, number: int) -> np.ndarray:
        """Numbers of the samples of one micro-batch.

        Args:
            size: Samples of the global batch.
            number: Number of the micro-batch.

        >>> MicroBatchRows(count=2).rows(6, 1)
        array([1, 3, 5])
        >>> MicroBatchRows(count=2, group=2).rows(8, 1)
        array([2, 3, 6, 7])
        """
        cut = np.arange(size).reshape(-1, self.count, self.group)
        return cut[:, number].reshape(-1)

    def index(self, size: int, axis: int, number: int) -> tuple[Any, ...]:
        """Index of one micro-batch in a host's array.

        Args:
            size: Samples of the global batch.
            axis: The array's batch dimension.
            number: Number of the micro-batch.
        """
        front = (slice(None),) * axis
        if self.group == 1:
            return (*front, slice(number, None, self.count))
        return (*front, self.rows(size, number))

    def take(self, leaf: Any, axis: int, number: Any) -> Any:
        """One micro-batch of a global array.

        Args:
            leaf: The array.
            axis: Its batch dimension.
            number: Number of the micro-batch; may be traced.
        """
        part = jax.lax.dynamic_index_in_dim(
            leaf.reshape(self._cut(leaf.shape, axis)), number, axis + 1, keepdims=False
        )
        return part.reshape(self._part(leaf.shape, axis))

    def stack(self, leaf: Any, axis: int) -> Any:
        """All micro-batches of a global array, along a new first dimension.

        Args:
            leaf: The array.
            axis: Its batch dimension.
        """
        parts = jnp.moveaxis(leaf.reshape(self._cut(leaf.shape, axis)), axis + 1, 0)
        return parts.reshape(self.count, *self._part(leaf.shape, axis))

    def place(self, part: Any, axis: int, number: Any) -> Any:
        """A global array of zeros, but for one micro-batch.

        Args:
            part: The array of the micro-batch.
            axis: Its batch dimension.
            number: Number of the micro-batch; may be traced.
        """
        shape = list(part.shape)
        shape[axis] *= self.count
        cut = self._cut(shape, axis)
        each = part.reshape(*cut[: axis + 1], *cut[axis + 2 :])
        whole = jnp.zeros(cut, part.dtype)
        whole = jax.lax.dynamic_update_index_in_dim(whole, each, number, axis=axis + 1)
        return whole.reshape(shape)

    def _cut(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        """Groups of a micro-batch, micro-batches, samples of a group."""
        groups = shape[axis] // (self.count * self.group)
        inner = () if self.group == 1 else (self.group,)
        return (*shape[:axis], groups, self.count, *inner, *shape[axis + 1 :])

    def _part(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], shape[axis] // self.count, *shape[axis + 1 :])
