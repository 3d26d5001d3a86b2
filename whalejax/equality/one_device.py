"""Computes a loss on one device, one micro-batch at a time, as reference of a check.

The loss is the user's code or its traced program, without any lowering. Micro-batch m
of M has the samples m, m + M and so on, or groups of samples with these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from whalejax.adapters.base import Adapter
from whalejax.lowering.micro_batch_rows import MicroBatchRows


FLOOR: Final = 1e-3
"""Least divisor of an error, relative to the root mean square of the leaf norms."""

_LOSS_SCALE: Final = 2.0**15
"""Loss scale in float16, in which small gradients would become zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Loss and gradients of a global batch.

    Attributes:
        loss: Mean loss.
        gradients: Flat gradients of the mean loss, a list for each rank.
        weights: Weight of each rank in the mean.
    """

    loss: float
    gradients: list[list[np.ndarray]]
    weights: list[float]


def reference(
    adapter: Adapter,
    batch_axes: Sequence[int | None],
    cut: MicroBatchRows,
    *,
    ranks: int = 1,
) -> Callable[..., Reference]:
    """Returns a function that computes loss and gradients on one device.

    Args:
        adapter: Model and loss, at the precision of the computation.
        batch_axes: Dimension of the samples in each leaf of the batch; None if a leaf
            has none.
        cut: Division of a batch into micro-batches.
        ranks: Number of ranks with separate gradients: 1 if the plan takes their mean.

    Returns:
        Function of (params, rest, batch, key), which are trees of arrays.
    """
    half = adapter.compute_dtype == jnp.float16
    scale = _LOSS_SCALE if half else 1.0

    def total(params: Any, rest: Any, part: Any, key: Any, index: Any) -> Any:
        folded = adapter.fold_rest(adapter.fold_rest(rest, 0), index)
        rng = jax.random.fold_in(jax.random.fold_in(key, 0), index)
        result = adapter.loss(params, folded, part, rng if adapter.takes_rng else None)
        after = adapter.restore_keys(result.rest, rest)
        value = jnp.asarray(result.total) * scale
        return value, (jnp.asarray(result.weight), after)

    compiled = jax.jit(jax.value_and_grad(total, has_aux=True))
    parts = cut.count * ranks

    def run(params: Any, rest: Any, batch: Any, key: Any) -> Reference:
        sums: list[Any] = [None] * ranks
        before = [rest] * ranks
        for index in range(parts):
            rank, micro = divmod(index, cut.count)
            part = _part(batch, batch_axes, micro, cut, rank, ranks)
            (value, (weight, after)), gradients = compiled(
                params, _counted_once(before[rank], rest), part, key, index
            )
            before[rank] = after
            added = jax.tree.map(
                lambda x: np.asarray(x, np.float64), (value, weight, gradients)
            )
            known = sums[rank]
            sums[rank] = added if known is None else jax.tree.map(np.add, known, added)
        loss = sum(s[0] for s in sums) / sum(s[1] for s in sums) / scale
        return Reference(
            loss=float(loss),
            gradients=[[g / s[1] / scale for g in jax.tree.leaves(s[2])] for s in sums],
            weights=[float(s[1]) for s in sums],
        )

    return run


def _part(
    batch: Any,
    axes: Sequence[int | None],
    micro: int,
    cut: MicroBatchRows,
    rank: int,
    ranks: int,
) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    tree: Any = structure
    part = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is None:
            part.append(leaf)
            continue
        index = (slice(None),) * axis
        size = leaf.shape[axis] // ranks
        own = leaf[(*index, slice(rank * size, (rank + 1) * size))]
        part.append(own[cut.index(size, axis, micro)])
    return tree.unflatten(part)


def _counted_once(rest: Any, before: Any) -> Any:
    def one(new: Any, old: Any) -> Any:
        return old if jnp.issubdtype(new.dtype, jnp.integer) else new

    return jax.tree.map(one, rest, before)


def leaf_errors(
    got: Sequence[np.ndarray], true: Sequence[np.ndarray]
) -> list[tuple[float, float]]:
    """Returns the error ‖difference‖ / ‖true‖ and the norm ‖true‖ of each leaf.

    The divisor is at least ``FLOOR`` times the root mean square of all norms.

    Args:
        got, true: Leaves in the same order.

    >>> leaf_errors([np.array([3.0])], [np.array([2.0])])
    [(0.5, 2.0)]
    """
    norms = [float(np.linalg.norm(np.asarray(g, np.float64))) for g in true]
    floor = FLOOR * float(np.sqrt(np.mean(np.square(norms)))) if norms else 0.0
    errors = []
    for a, b, norm in zip(got, true, norms, strict=True):
        left = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        error = float(np.linalg.norm(left)) / max(norm, floor, np.finfo(float).tiny)
        # NaN is the largest error.
        errors.append((error if np.isfinite(error) else float("inf"), norm))
    return errors


def recording(
    optimizer: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    """Returns an optimizer whose state also has the last gradients.

    Args:
        optimizer: Optimizer of the user; None is gradient descent.
    """
    inner = optax.sgd(0.125) if optimizer is None else optimizer
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"gradient": zeros, "own": extended.init(params)}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        new, own = extended.update(updates, state["own"], params, **extra)
        return new, {"gradient": updates, "own": own}

    return optax.GradientTransformationExtraArgs(init, update)
