"""Sums the metrics that a loss reports over micro-batches, for every executor.

Executors combine micro-batches by addition alone. Means are sums that are divided at
the end. Rows of samples are sums of arrays that are zero at the rows of other
micro-batches. Maxima and minima are collected in the same way, with a row for each
micro-batch, and reduced at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.user_code.losses import ReportedValue, is_merged


def wide(x: Any) -> Any:
    """Returns the array with a float32 or wider dtype; complex stays complex."""
    narrow = not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def summands(metrics: Any, weight: Any, number: Any, cut: MicroBatchRows) -> Any:
    """Returns one micro-batch's terms of the sums.

    Args:
        metrics: Metrics that the loss reported.
        weight: Weight of the micro-batch in means; None if the loss has none.
        number: Number of the micro-batch; may be traced.
        cut: Division of the batch into micro-batches.
    """
    count = cut.count

    def summand(metric: Any) -> Any:
        if not isinstance(metric, ReportedValue):
            metric = jnp.asarray(metric)
            if count == 1 and metric.dtype == jnp.bool_:
                return _with_bool_flags(
                    ReportedValue(metric, "same"), _summable(metric)
                )
            metric = _summable(metric)
            return metric if weight is None else _weighted(metric, weight)
        if metric.how == "sum":
            return replace(metric, value=jax.tree.map(_summable, metric.value))
        if metric.how == "same":
            once = jax.tree.map(lambda x: _once(x, number, count), metric.value)
            return _with_bool_flags(metric, once)
        if metric.how == "average":
            share = jax.tree.map(lambda x: wide(x) / count, metric.value)
            return replace(metric, value=share)
        if metric.how == "mean":
            means = jax.tree.map(wide, jax.tree.map(jnp.asarray, metric.value))
            if weight is not None:
                means = jax.tree.map(lambda x: _weighted(x, weight), means)
            return replace(metric, value=means)
        if metric.how in ("max", "min"):
            each = jax.tree.map(lambda x: jnp.asarray(x)[None], metric.value)
            metric = replace(metric, value=each)
        rows = jax.tree.map(lambda x: _spread(metric, x, number, cut), metric.value)
        return _with_bool_flags(metric, rows)

    return jax.tree.map(summand, metrics, is_leaf=is_merged)


def reported(metrics: Any, count: Any) -> Any:
    """Returns the metrics of the global batch.

    Args:
        metrics: Sums over the micro-batches.
        count: Number of micro-batches, or their total weight.
    """

    def one(metric: Any) -> Any:
        if isinstance(metric, ReportedValue) and metric.how == "mean":
            return jax.tree.map(lambda x: x / jnp.asarray(count, x.dtype), metric.value)
        if isinstance(metric, ReportedValue) and metric.how in ("max", "min"):
            end = getattr(jnp, metric.how)
            ends = jax.tree.map(lambda x: end(x, axis=0), metric.value)
            return _as_truths(metric, ends)
        if isinstance(metric, ReportedValue):
            return _as_truths(metric, metric.value)
        if not jnp.issubdtype(metric.dtype, jnp.inexact):
            return metric
        return metric / jnp.asarray(count, metric.dtype)

    return jax.tree.map(one, metrics, is_leaf=is_merged)


def _with_bool_flags(metric: ReportedValue, value: Any) -> ReportedValue:
    leaves = jax.tree.leaves(metric.value)
    truths = tuple(jnp.asarray(x).dtype == jnp.bool_ for x in leaves)
    return replace(metric, value=value, truths=truths if any(truths) else ())


def _as_truths(metric: ReportedValue, value: Any) -> Any:
    if not metric.truths:
        return value
    tree: Any
    leaves, tree = jax.tree.flatten(value)
    pairs = zip(leaves, metric.truths, strict=True)
    return tree.unflatten([x.astype(bool) if truth else x for x, truth in pairs])


def _summable(metric: Any) -> Any:
    metric = jnp.asarray(metric)
    if jnp.issubdtype(metric.dtype, jnp.inexact):
        return wide(metric)
    narrow = metric.dtype == jnp.bool_ or metric.dtype.itemsize < 4
    return metric.astype(jnp.int32) if narrow else metric


def _once(metric: Any, number: Any, count: int) -> Any:
    """Returns a metric that is equal in all micro-batches, and zero in all but one."""
    metric = _summable(metric)
    if count == 1:
        return metric
    return jnp.where(number == 0, metric, jnp.zeros_like(metric))


def _weighted(metric: Any, weight: Any) -> Any:
    if not jnp.issubdtype(metric.dtype, jnp.inexact):
        return metric
    # In a micro-batch of weight zero, the metric may be NaN.
    part = metric * weight.astype(metric.dtype)
    return jnp.where(weight != 0, part, jnp.zeros_like(part))


def _spread(metric: ReportedValue, rows: Any, number: Any, cut: MicroBatchRows) -> Any:
    rows = jnp.asarray(rows)
    if metric.how != "concat":
        rows = _summable(rows)
    rows = rows.astype(jnp.int32) if rows.dtype == jnp.bool_ else rows
    if cut.count == 1:
        return rows
    axis, outer, inner = metric.axis, metric.outer, metric.inner
    front, behind = rows.shape[:axis], rows.shape[axis + 1 :]
    size = rows.shape[axis] // (outer * inner)
    each = rows.reshape(*front, outer, size, inner, *behind)
    whole = cut.place(each, axis + 1, number)
    return whole.reshape(*front, outer * size * cut.count * inner, *behind)
