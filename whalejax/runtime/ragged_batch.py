"""Evaluation of a batch with fewer samples than planned, such as an epoch's last one.

A plan's programs accept only full batches, so the samples are evaluated in passes. Each
pass takes a number of samples that divides the batch size, and repeats them to fill a
batch. All samples have equal weight, so the pass returns their mean. The results of
passes are weighted by their numbers of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.adapters.leaves import is_key
from whalejax.capture import Captured
from whalejax.capture.split_checks import reason_text
from whalejax.lowering.step_runner import Evaluation, Metrics
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.user_code.losses import ReportedValue


def real_samples(
    leaves: Sequence[Any], plan: Plan, axes: Sequence[int | None]
) -> tuple[int, int] | None:
    """Returns the numbers of samples of a smaller batch and of a full one, or None.

    Args:
        leaves: Leaves of a batch.
        plan: Plan of the step.
        axes: Batch dimension of each leaf.
    """
    sizes = set()
    for leaf, planned, axis in zip(leaves, plan.batch, axes, strict=True):
        shape = np.shape(leaf)
        if axis is None:
            continue
        if len(shape) != len(planned.shape):
            return None
        sizes.add((shape[axis], planned.shape[axis]))
    if len(sizes) != 1:
        return None
    ((given, whole),) = sizes
    return (int(given), int(whole)) if 0 < given < whole else None


def passes(samples: int, whole: int) -> Iterator[tuple[int, int]]:
    """Yields the first sample and the number of samples of each pass.

    Args:
        samples: Number of samples.
        whole: Number of samples of a full batch.

    >>> [*passes(13, 32)]
    [(0, 8), (8, 4), (12, 1)]
    """
    first = 0
    while first < samples:
        left = samples - first
        count = next(n for n in range(left, 0, -1) if whole % n == 0)
        yield first, count
        first += count


def repeated(
    leaves: Sequence[Any], axes: Sequence[int | None], first: int, count: int, size: int
) -> list[Any]:
    """Returns a full batch that repeats some samples of a batch.

    Args:
        leaves: Leaves of the batch.
        axes: Batch dimension of each leaf.
        first, count: Index of the first sample, and number of samples.
        size: Number of samples of a full batch.
    """
    rows = first + np.arange(size) % count

    def fill_batch(leaf: Any, axis: int | None) -> Any:
        if axis is None:
            return leaf
        if isinstance(leaf, jax.Array):
            if is_key(leaf):
                return leaf[(*[slice(None)] * axis, rows)]
            return jnp.take(leaf, rows, axis=axis)
        return np.take(np.asarray(leaf), rows, axis=axis)

    return [fill_batch(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]


def check_mean(captured: Captured, samples: int, whole: int) -> None:
    """Refuses a loss that is not a mean over samples.

    Args:
        captured: Traced loss in evaluation mode.
        samples: Number of samples.
        whole: Number of samples of a full batch.

    Raises:
        PlanError: The loss is not a mean, or a reported value cannot be combined.
    """
    problems = Problems(kind=PlanError)
    for _, count in passes(samples, whole):
        result = captured.independence(count, whole, None)
        if result.reason is not None:
            problems.add(reason_text(result.reason))
        elif result.runs > 1:
            problems.add(f"the loss divides the batch into {result.runs} runs")
    for text in captured.apart().mismatch_messages():
        problems.add(text)
    problems.raise_if_any(
        title=(
            f"the batch has {count_text(samples, 'sample')}, the plan is for {whole}, "
            "and the evaluation of these alone cannot be had from whole batches. Leave "
            "them out, plan without an optimizer for batches of this size, or say how "
            "reported values are put together, with wh.Aux(means=..., sums=..., "
            "samples=...)"
        )
    )


def together(
    parts: Sequence[tuple[int, Evaluation]], captured: Captured, whole: int
) -> Metrics:
    """Combines passes into the loss and metrics of all samples.

    Args:
        parts: Number of samples and result of each pass.
        captured: Traced loss that was evaluated.
        whole: Number of samples of a full batch.
    """
    counts = [count for count, _ in parts]
    weights = [
        count / whole * weight if captured.graph.weighted else jnp.float32(count)
        for count, (_, weight) in parts
    ]
    combined = _PassCombiner(counts=counts, weights=weights, whole=whole)
    tree = captured.apart().out_tree
    _, _, kinds, _ = tree.unflatten(range(tree.num_leaves))
    several = [metrics for _, (metrics, _) in parts]
    result: Metrics = jax.tree.map(
        combined.value,
        kinds,
        *[{name: one[name] for name in kinds} for one in several],
        is_leaf=lambda x: isinstance(x, ReportedValue),
    )
    return {**result, "loss": combined.mean(*(one["loss"] for one in several))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassCombiner:
    """Combines the results of passes.

    A full batch has ``whole`` samples, with equally many copies of each sample.
    """

    counts: Sequence[int]
    weights: Sequence[Any]
    whole: int

    def value(self, kind: Any, *values: Any) -> Any:
        if not isinstance(kind, ReportedValue):
            return self.mean(*values)
        if kind.how == "same":
            return jax.tree.map(self.take_first, *values)
        if kind.how in ("mean", "average", "sum", "max", "min"):
            return jax.tree.map(getattr(self, kind.how), *values)
        return jax.tree.map(lambda *rows: self.rows(kind, rows), *values)

    def take_first(self, *values: Any) -> Any:
        return values[0]

    def max(self, *values: Any) -> Any:
        return jnp.stack(values).max(0)

    def min(self, *values: Any) -> Any:
        return jnp.stack(values).min(0)

    def average(self, *values: Any) -> Any:
        total = sum(x * n for x, n in zip(values, self.counts, strict=True))
        return total / sum(self.counts)

    def mean(self, *values: Any) -> Any:
        """Returns the weighted mean, without values of weight 0, which may be NaN."""
        pairs = zip(values, self.weights, strict=True)
        total = sum(
            jnp.where(weight != 0, x * weight.astype(x.dtype), jnp.zeros_like(x))
            for x, weight in pairs
        )
        weight: Any = sum(self.weights)
        return total / weight.astype(values[0].dtype)

    def sum(self, *values: Any) -> Any:
        times = [self.whole // count for count in self.counts]
        if not jnp.issubdtype(values[0].dtype, jnp.inexact):
            return sum(x // n for x, n in zip(values, times, strict=True))
        return sum(x / n for x, n in zip(values, times, strict=True))

    def rows(self, kind: ReportedValue, values: Sequence[Any]) -> Any:
        axis, outer, inner = kind.axis, kind.outer, kind.inner
        front, behind = values[0].shape[:axis], values[0].shape[axis + 1 :]
        apart = (*front, outer, self.whole, inner, *behind)
        own = [
            jax.lax.slice_in_dim(x.reshape(apart), 0, count, axis=axis + 1)
            for x, count in zip(values, self.counts, strict=True)
        ]
        rows = jnp.concatenate(own, axis=axis + 1)
        return rows.reshape(*front, outer * sum(self.counts) * inner, *behind)
