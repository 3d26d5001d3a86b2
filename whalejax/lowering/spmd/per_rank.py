"""Gradients of each rank of ``data`` by itself, and their combination by Adasum.

The compiler sums gradients over the whole batch as soon as samples meet in one program.
So the loss is mapped over ranks: each has its own samples, its own statistics of them,
and the model as all have it; what each computes lies on its own devices. Then gradients
(or, in the delta form, what the optimizer makes of them) meet in ``adasum``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from whalejax.api.losses import Merged, is_merged
from whalejax.lowering.metrics import wide
from whalejax.lowering.spmd import executor
from whalejax.lowering.spmd.adasum import combined
from whalejax.lowering.spmd.executor import Program, Sums
from whalejax.planner.cost.adasum import DATA, node_size
from whalejax.planner.model.repeated_layers import sliced_params
from whalejax.planner.plan.plan import Plan
from whalejax.planner.sharding.layout import Spec
from whalejax.runtime.optimizer_state import updates


def plan_of_rank(plan: Plan) -> Plan:
    """What one rank of ``data`` runs of a plan, on its own samples.

    Args:
        plan: the plan of all.
    """
    own = plan.replica
    leaves = [
        dataclasses.replace(leaf, gradient_spec=_without_data(leaf.gradient_spec))
        for leaf in own.leaves
    ]
    batch = [dataclasses.replace(x, spec=_without_data(x.spec)) for x in own.batch]
    return dataclasses.replace(own, leaves=tuple(leaves), batch=tuple(batch))


def gradients_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    scale: Any = None,
) -> tuple[Sums, Any]:
    """Loss and gradients of the global batch, and the new rest.

    Args:
        program: what to run; the loss is traced at a rank's micro-batch.
        params, rest, batch, rng, step, scale: as for ``executor.gradients_of``.

    Returns:
        Sums whose gradients are combined; in the delta form those of each rank, along
        a leading dimension. The rest is the mean over ranks.
    """
    own = _of_rank(program)

    def one(batch: Sequence[Any], first: Any) -> Any:
        return executor.gradients_of(
            own, params, rest, batch, rng, step, scale, first=first
        )

    sums, after = _mapped(program, one, batch)
    specs = [leaf.gradient_spec for leaf in own.plan.trained]
    gradients = program.constrain(sums.gradients, [((DATA,), *spec) for spec in specs])
    if program.plan.combine == DELTA:
        means = [_mean(wide(g), sums.weight) for g in gradients]
    else:
        means = _adasum(program, gradients, sums.weight, specs)
    found = dataclasses.replace(
        _together(program, sums), gradients=tuple(means), means=True
    )
    return found, _rest(program, rest, after)


def losses_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
) -> Sums:
    """The summed losses of the global batch, without gradients.

    Args:
        program, params, rest, batch, rng, step: as for ``gradients_of``.
    """
    own = _of_rank(program)

    def one(batch: Sequence[Any], first: Any) -> Any:
        return executor.losses_of(own, params, rest, batch, rng, step, first=first)

    return _together(program, _mapped(program, one, batch))


DELTA = "adasum_updates"
"""The way that combines what each rank's optimizer would add to the parameters."""


def update(
    program: Program,
    params: Sequence[Any],
    state: Any,
    gradients: Sequence[Any],
    loss: Any,
    applies: Any = None,
) -> tuple[list[Any], Any]:
    """The delta form: every rank's own step of the optimizer, combined.

    All ranks begin at the same state, which afterwards is the mean of theirs.

    Args:
        program, params, state, loss, applies: as for ``executor.update``.
        gradients: of each rank, along a leading dimension.
    """
    structure: Any = jax.tree.structure(program.adapter.params)
    tree = structure.unflatten(params)

    def one(gradients: Sequence[Any]) -> Any:
        given = structure.unflatten(gradients)
        return updates(program.optimizer, given, state, tree, loss)

    changes, states = jax.vmap(one, spmd_axis_name=DATA)(list(gradients))
    specs = [_without_data(leaf.param_spec) for leaf in program.plan.trained]
    ranked = [((DATA,), *spec) for spec in specs]
    changes = program.constrain(jax.tree.leaves(changes), ranked)
    weights = jnp.ones((program.plan.axis_sizes[DATA],), jnp.float32)
    added = _adasum(program, changes, weights, specs)
    fresh = jax.tree.leaves(optax.apply_updates(tree, structure.unflatten(added)))
    new = jax.tree.map(_of_all, states, state)
    if applies is not None:
        fresh = [jnp.where(applies, x, y) for x, y in zip(fresh, params, strict=True)]
        new = jax.tree.map(lambda x, y: jnp.where(applies, x, y), new, state)
    stored = [leaf.param_spec for leaf in program.plan.trained]
    return program.constrain(fresh, stored), new


# Ranks.


def _of_rank(program: Program) -> Program:
    return dataclasses.replace(program, plan=plan_of_rank(program.plan))


def _mapped(program: Program, one: Callable[..., Any], batch: Sequence[Any]) -> Any:
    """A function of a rank's batch and the number of its first micro-batch, of all."""
    plan = program.plan
    ranks, count = plan.axis_sizes[DATA], plan.num_micro_batches
    axes = program.batch_axes
    specs = [_without_data(leaf.spec) for leaf in plan.batch]
    places = [i for i, axis in enumerate(axes) if axis is not None]
    cut = [_by_rank(batch[i], axes[i] or 0, ranks) for i in places]
    cut = program.constrain(cut, [((DATA,), *specs[i]) for i in places])

    def of_rank(parts: Sequence[Any], number: Any) -> Any:
        leaves = list(batch)
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part
        return one(leaves, number * count)

    return jax.vmap(of_rank, spmd_axis_name=DATA)(cut, jnp.arange(ranks))


def _by_rank(leaf: Any, axis: int, ranks: int) -> Any:
    shape = leaf.shape
    cut = (*shape[:axis], ranks, shape[axis] // ranks, *shape[axis + 1 :])
    return jnp.moveaxis(leaf.reshape(cut), axis, 0)


def _without_data(spec: Spec) -> Spec:
    return tuple(tuple(a for a in axes if a != DATA) for axes in spec)


def _mean(sums: Any, weights: Any) -> Any:
    """Of each rank's sums, along the leading dimension."""
    by = weights.reshape(-1, *[1] * (sums.ndim - 1)).astype(sums.dtype)
    return jnp.where(by != 0, sums / jnp.where(by != 0, by, 1), jnp.zeros_like(sums))


def _adasum(
    program: Program, stacked: Sequence[Any], weights: Any, specs: Sequence[Spec]
) -> list[Any]:
    plan = program.plan
    graph = program.captured.graph
    sliced = sliced_params(graph)
    layers = {t.path: t.shape[0] for t in graph.params if t.id in sliced}
    return combined(
        stacked,
        program.constrain([weights], [((DATA,),)])[0],
        specs,
        [layers.get(leaf.path, 1) for leaf in plan.trained],
        program.mesh,
        node=node_size(plan.axis_sizes, plan.cluster, plan.combine),
    )


def _together(program: Program, sums: Sums) -> Sums:
    """Sums of all ranks but for gradients, of those along a leading dimension."""
    weighted = program.captured.graph.weighted
    metrics = jax.tree.map(
        lambda metric: _metric(metric, weighted=weighted),
        sums.metrics,
        is_leaf=is_merged,
    )
    return dataclasses.replace(
        sums, total=sums.total.sum(0), weight=sums.weight.sum(0), metrics=metrics
    )


def _metric(metric: Any, *, weighted: bool) -> Any:
    """What all ranks report, of what each does.

    ``reported`` divides by the micro-batches of one rank, or by the weight of all.
    """
    if not isinstance(metric, Merged):
        inexact = jnp.issubdtype(metric.dtype, jnp.inexact)
        return metric.mean(0) if inexact and not weighted else metric.sum(0)

    def together(x: Any) -> Any:
        if metric.how == "average" or (metric.how == "mean" and not weighted):
            return x.mean(0)
        if metric.how in ("mean", "sum"):
            return x.sum(0)
        if metric.how == "same":
            return x[0]
        if metric.how in ("max", "min"):
            return x.reshape(-1, *x.shape[2:])
        return _rows(metric, x)

    return dataclasses.replace(metric, value=jax.tree.map(together, metric.value))


def _rows(metric: Merged, rows: Any) -> Any:
    """Rows of all samples, of those of each rank, which has samples in a row."""
    ranks, axis, outer, inner = rows.shape[0], metric.axis, metric.outer, metric.inner
    front, behind = rows.shape[1 : axis + 1], rows.shape[axis + 2 :]
    size = rows.shape[axis + 1] // (outer * inner)
    cut = rows.reshape(ranks, *front, outer, size, inner, *behind)
    cut = jnp.moveaxis(cut, 0, axis + 1)
    return cut.reshape(*front, outer * ranks * size * inner, *behind)


def _rest(program: Program, before: Any, after: Any) -> Any:
    """What is not trained, after a step: the mean over ranks of what each has."""
    frozen = program.captured.frozen
    tree: Any = jax.tree.structure(before)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return tree.unflatten(
        [x if i in frozen else _of_all(y, x) for i, (x, y) in enumerate(pairs)]
    )


def _of_all(ranks: Any, before: Any) -> Any:
    """The mean over ranks; of what is no number to take it of, the first rank's."""
    if jnp.issubdtype(ranks.dtype, jnp.inexact):
        return wide(ranks).mean(0).astype(before.dtype)
    return ranks[0]
