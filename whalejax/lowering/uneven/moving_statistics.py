"""Finds how a micro-batch changes moving statistics, to combine those of replicas.

A moving average is ``r -> a r + c``, with the same ``a`` in every micro-batch and a
``c`` that depends on its samples. For such leaves the result of consecutive
micro-batches is a sum. Each replica contributes the terms of its own micro-batches,
multiplied by ``a`` for every later micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.adapters.leaves import is_key
from whalejax.capture import Captured


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsReduction:
    """Reduces non-trainable leaves over replicas.

    Moving averages get the value that all micro-batches in sequence would give. Other
    statistics are averaged, weighted by the number of micro-batches of each replica.
    Increments of integers are summed.
    Attributes:
        slopes: Slopes of moving averages, by the number of the leaf.
        counters: Increments of counters in a micro-batch, by the number of the leaf.
        frozen: Numbers of the leaves that are frozen weights.
        count: Number of micro-batches of all replicas.
        steady: Numbers of the leaves that micro-batches do not change.
    """

    slopes: Mapping[int, np.ndarray]
    counters: Mapping[int, Any]
    count: int
    frozen: frozenset[int] = frozenset()
    steady: tuple[int, ...] = ()

    def is_own(self, number: int, leaf: Any) -> bool:
        """Returns whether every replica can compute a leaf without communication.

        This holds for keys, counters, frozen weights, and ``steady`` leaves.
        """
        known = number in self.frozen or number in self.steady
        return is_key(leaf) or number in self.counters or known

    def contribution(
        self, number: int, old: Any, new: Any, ran: Any, later: Any
    ) -> Any:
        """Returns a replica's contribution to a leaf, to be summed over replicas.

        Args:
            number: Number of the leaf.
            old: Leaf before the replica's micro-batches.
            new: Leaf after the replica's micro-batches.
            ran: Number of micro-batches of this replica.
            later: Number of micro-batches that other replicas run after these.
        """
        if number in self.slopes:
            slope = jnp.asarray(self.slopes[number], new.dtype)
            one, n = (slope ** x.astype(new.dtype) for x in (ran, later))
            return (new - one * old) * n
        if jnp.issubdtype(new.dtype, jnp.inexact):
            return new * (ran / self.count).astype(new.dtype)
        wide = new.astype(jnp.int32) if new.dtype == jnp.bool_ else new
        return wide - old.astype(wide.dtype)

    def after(self, number: int, old: Any, total: Any) -> Any:
        """Returns a leaf after the step of all replicas.

        Args:
            number: Number of the leaf.
            old: Leaf before the step.
            total: Sum of all replicas' contributions; unused if ``is_own``.
        """
        if self.is_own(number, old):
            added = self.count * self.counters.get(number, 0)
            return old + jnp.asarray(added, old.dtype) if added else old
        if number in self.slopes:
            slope = jnp.asarray(self.slopes[number], old.dtype)
            return slope**self.count * old + total
        if jnp.issubdtype(old.dtype, jnp.inexact):
            return total
        return (old + total).astype(old.dtype)


def slopes(captured: Captured) -> dict[int, np.ndarray]:
    """Returns the slopes of moving averages, by number of the non-trainable leaf.

    Leaves that change in another way are omitted.

    Args:
        captured: Traced loss.
    """
    first = len(captured.adapter.param_paths)
    rest = jax.tree.leaves(captured.adapter.rest)
    avals = [_compat.abstract(a.shape, a.dtype) for a in captured.jaxpr.in_avals]
    frozen = captured.frozen
    numbers = [
        i
        for i, leaf in enumerate(rest)
        if not is_key(leaf)
        and i not in frozen
        and jnp.issubdtype(avals[first + i].dtype, jnp.inexact)
    ]
    if not numbers:
        return {}

    def after(leaves: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        given = list(others)
        for i, leaf in zip(numbers, leaves, strict=True):
            given[first + i] = leaf
        result = _compat.run_flowing(captured.jaxpr, given)[-len(rest) :]
        return [result[i] for i in numbers]

    def slope(others: Sequence[Any], along: Sequence[Any]) -> list[Any]:
        leaves = [others[first + i] for i in numbers]
        slope: list[Any] = jax.jvp(
            lambda x: after(x, others), (leaves,), (list(along),)
        )[1]
        return slope

    along = [avals[first + i] for i in numbers]
    traced = jax.make_jaxpr(slope)(avals, along)
    flags = [True] * len(avals) + [False] * len(along)
    varying = _compat.depending(traced, flags)
    kept = [place for place, varies in enumerate(varying) if not varies]

    @jax.jit
    def constant(along: Sequence[Any]) -> list[Any]:
        # The results do not depend on these values.
        nothing = [jnp.zeros(a.shape, a.dtype) for a in avals]
        constant = _compat.run_flowing(traced, [*nothing, *along])
        return [constant[place] for place in kept]

    return _alone(constant, along, kept, numbers) if kept else {}


def _alone(
    constant: Callable[..., list[Any]],
    along: Sequence[Any],
    kept: Sequence[int],
    numbers: Sequence[int],
) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    ones = [np.ones(a.shape, a.dtype) for a in along]
    other = [rng.uniform(0.5, 2.0, a.shape).astype(a.dtype) for a in along]
    result = {}
    for place, one, there in zip(kept, constant(ones), constant(other), strict=True):
        if np.allclose(there, one * other[place], rtol=1e-4):
            result[numbers[place]] = np.asarray(one)
    return result
