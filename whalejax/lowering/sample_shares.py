"""Assigns samples of a global batch to replicas with unequal shares.

A global batch is divided into micro-batches as on one device. Each replica runs some of
them, one after the other. So results do not depend on the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.adapters.leaves import is_key
from whalejax.lowering.batch_layout import BatchLayout
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import BatchLeaf
from whalejax.planner.plan_errors import PlanError


def checked_shares(
    given: Sequence[int], plan: Plan, most: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shares of a plan's replicas, after checks.

    Args:
        given: Number of micro-batches of each replica.
        plan: Plan with unequal shares.
        most: Largest share that fits in the memory of each replica.

    Raises:
        PlanError: Shares are not whole numbers, have another length or sum than the
            plan's, or do not fit in memory.
    """
    listed = np.asarray(given).tolist()
    result = tuple(listed if isinstance(listed, list) else [listed])
    whole = all(is_whole(k, 0) for k in result)
    if not whole or len(result) != len(plan.shares) or sum(result) != sum(plan.shares):
        raise PlanError(
            f"shares is {short_repr(list(result))}; expected {len(plan.shares)} whole "
            f"numbers that add up to {count_text(sum(plan.shares), 'micro-batch')}, "
            f"such as {list(plan.shares)}"
        )
    over = [i for i, (k, m) in enumerate(zip(result, most, strict=True)) if k > m]
    if over:
        told = ", ".join(f"replica {i}: {result[i]} of {most[i]}" for i in over)
        raise PlanError(
            f"shares is {list(result)!r:.80}, and memory has no room for so many "
            f"micro-batches ({told}). Give at most {list(most)}"
        )
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PortionLayout(BatchLayout):
    """Checks global batches and divides them into this process's micro-batches.

    Attributes:
        axes: Batch dimension of each leaf, or None.
        cut: Division of a global batch into micro-batches.
        mine: Function that returns the numbers of this process's micro-batches, which
            depend on the current shares.
    """

    axes: tuple[int | None, ...]
    cut: MicroBatchRows
    mine: Callable[[], Sequence[int]]

    def place(self, batch: Any) -> Any:
        """Returns the flat leaves of this process's micro-batches, by number.

        Args:
            batch: Global batch, or this process's micro-batches alone, concatenated.

        Raises:
            PlanError: The structure, a shape or a dtype differs. The message lists all.
        """
        mine = list(self.mine())
        leaves = self.flat(batch)
        problems = Problems()
        cut = []
        for leaf, planned, axis in zip(leaves, self.leaves, self.axes, strict=True):
            problem = self._problem(leaf, planned, axis, len(mine))
            if problem:
                problems.add(problem)
            else:
                cut.append(self._cut(leaf, planned, axis, mine))
        problems.raise_if_any(PlanError, title="the batch does not match the plan")
        return {number: [leaf[i] for leaf in cut] for i, number in enumerate(mine)}

    def _problem(
        self, leaf: Any, planned: BatchLeaf, axis: int | None, mine: int
    ) -> str:
        shapes = {planned.shape, self._part(planned, axis, mine)}
        problem = self.problem(leaf, planned, shapes)
        if not problem and isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                problem = (
                    f"batch{planned.path} is on devices of several processes. With "
                    "uneven shares, give arrays of this process: the global batch, or "
                    "its own micro-batches"
                )
        return problem

    def _part(self, planned: BatchLeaf, axis: int | None, mine: int) -> tuple[int, ...]:
        if axis is None:
            return planned.shape
        shape = list(planned.shape)
        shape[axis] = shape[axis] // self.cut.count * mine
        return tuple(shape)

    def _cut(
        self, leaf: Any, planned: BatchLeaf, axis: int | None, mine: Sequence[int]
    ) -> list[Any]:
        if is_key(leaf):
            array = leaf
        else:
            array = np.asarray(leaf).astype(jnp.dtype(planned.dtype), copy=False)
        if axis is None:
            return [array] * len(mine)
        axis %= len(planned.shape)
        size = planned.shape[axis] // self.cut.count
        if array.shape == planned.shape:
            whole = planned.shape[axis]
            return [array[self.cut.index(whole, axis, m)] for m in mine]
        before = (slice(None),) * axis
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(mine))]
        return [array[(*before, cut)] for cut in cuts]
