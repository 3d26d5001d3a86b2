"""Separate gradients of each rank of ``data``, and their combination by Adasum.

Usually the compiler sums gradients over the full batch. Here ``data`` is a manual axis
of ``shard_map`` during differentiation, and the compiler shards the other axes. Each
rank has its own samples and statistics, and all have the same model. Then ``adasum``
combines the gradients, or, in the delta form, the updates of the ranks' optimizers.

``vmap`` over ranks does not work. It turns the gradient of a convolution's kernel into
a grouped convolution, for which XLA gathers the samples of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from whalejax.lowering.metrics import wide
from whalejax.lowering.optimizer_state import updates
from whalejax.lowering.spmd import spmd_executor
from whalejax.lowering.spmd.adasum import adasum_reduce, weighted_means
from whalejax.lowering.spmd.spmd_executor import Program, Sums
from whalejax.planner.cost.adasum_cost import DATA, node_size
from whalejax.planner.model.repeated_layers import layers_by_path
from whalejax.planner.plan.plan import Plan
from whalejax.planner.sharding.layout import Spec
from whalejax.user_code.losses import ReportedValue, is_merged


def plan_of_rank(plan: Plan) -> Plan:
    """Returns the plan that one rank of ``data`` runs on its own samples.

    Args:
        plan: Plan of all ranks.
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
    """Returns loss and gradients of the global batch, and the new non-trainable state.

    Args:
        program: Loss, optimizer and plan to run; the loss is traced for a micro-batch
            of one rank.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
        scale: Scale of float16 losses, or None.

    Returns:
        Sums with combined gradients, and the mean of the ranks' non-trainable state. In
        the delta form, the gradients of all ranks are stacked along a leading
        dimension.
    """
    frozen = program.captured.frozen

    def of_rank(own: Program, shared: Any, batch: Sequence[Any], first: Any) -> Any:
        params, rest, rng, step, scale = shared
        sums, after = spmd_executor.gradients_of(
            own, params, rest, batch, rng, step, scale, first
        )
        kept = enumerate(jax.tree.leaves(after))
        return sums, [x for i, x in kept if i not in frozen]

    shared = params, rest, rng, step, scale
    sums, moved = _on_batches(program, of_rank, shared, batch)
    sums = _with_weights(program, sums)
    specs = [_without_data(leaf.gradient_spec) for leaf in program.plan.trained]
    gradients = program.constrain(sums.gradients, [((DATA,), *spec) for spec in specs])
    if program.plan.combine == DELTA:
        means = [weighted_means(wide(g), sums.weight) for g in gradients]
    else:
        means = _adasum(program, gradients, sums.weight, specs)
    result = dataclasses.replace(
        _summed(program, sums),
        gradients=tuple(means),
        batch_gradients=_from_ranks(program, sums.batch_gradients),
        means=True,
    )
    return result, _rest(program, rest, moved)


def _from_ranks(program: Program, stacked: Sequence[Any]) -> tuple[Any, ...]:
    wanted, joined = program.adapter.batch_gradients, []
    for place, ranks in zip(wanted, stacked, strict=True):
        axis = program.batch_axes[place] or 0
        each = jnp.moveaxis(ranks, 0, axis)
        shape = (*each.shape[:axis], -1, *each.shape[axis + 2 :])
        joined.append(each.reshape(shape))
    specs = [program.plan.batch[place].spec for place in wanted]
    return tuple(program.constrain(joined, specs))


def losses_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
) -> Sums:
    """Returns the summed losses of the global batch, without gradients.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
    """

    def of_rank(own: Program, shared: Any, batch: Sequence[Any], first: Any) -> Any:
        params, rest, rng, step = shared
        return spmd_executor.losses_of(own, params, rest, batch, rng, step, first)

    shared = params, rest, rng, step
    sums = _on_batches(program, of_rank, shared, batch)
    return _summed(program, _with_weights(program, sums))


DELTA = "adasum_updates"
"""Value of ``combine`` for the delta form, which combines updates of optimizers."""


def update(
    program: Program,
    params: Sequence[Any],
    state: Any,
    gradients: Sequence[Any],
    loss: Any,
    applies: Any = None,
) -> tuple[list[Any], Any]:
    """Runs the optimizer in the delta form: each rank by its own gradients.

    All ranks start from the same state. Their updates are combined by Adasum, and the
    state afterwards is the mean over ranks.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        state: State of the optimizer.
        gradients: Gradients of each rank, stacked along a leading dimension.
        loss: Loss, for optimizers that take it.
        applies: Whether the step takes effect, for float16; default: it does.
    """
    structure: Any = jax.tree.structure(program.adapter.params)
    specs = [_without_data(leaf.param_spec) for leaf in program.plan.trained]
    stacked = [((DATA,), *spec) for spec in specs]

    def of_rank(own: Program, shared: Any, gradients: Sequence[Any]) -> Any:
        params, state, loss = shared
        trees = structure.unflatten(gradients), state, structure.unflatten(params)
        return updates(own.optimizer, *trees, loss)

    shared = list(params), state, loss
    gradients = program.constrain(gradients, stacked)
    changes, states = _on_ranks(program, of_rank, shared, list(gradients))
    changes = program.constrain(jax.tree.leaves(changes), stacked)
    weights = jnp.ones((program.plan.axis_sizes[DATA],), jnp.float32)
    added = structure.unflatten(_adasum(program, changes, weights, specs))
    fresh = jax.tree.leaves(optax.apply_updates(structure.unflatten(params), added))
    new = jax.tree.map(_mean_over_ranks, states, state)
    if applies is not None:
        fresh = [jnp.where(applies, x, y) for x, y in zip(fresh, params, strict=True)]
        new = jax.tree.map(lambda x, y: jnp.where(applies, x, y), new, state)
    stored = [leaf.param_spec for leaf in program.plan.trained]
    return program.constrain(fresh, stored), new


# Ranks.


def _on_ranks(
    program: Program, function: Callable[..., Any], shared: Any, *stacked: Any
) -> Any:
    """Runs a function on every rank of ``data`` and stacks the results.

    All ranks receive ``shared``. In ``stacked``, the ranks are a leading dimension.
    """
    plan = plan_of_rank(program.plan)

    def of_rank(shared: Any, *slices: Any) -> Any:
        here: Any = jax.sharding.get_abstract_mesh()  # The axis data is manual.
        own = dataclasses.replace(program, plan=plan, mesh=here)
        taken = jax.tree.map(lambda x: x[0], slices)
        return jax.tree.map(lambda x: x[None], function(own, shared, *taken))

    by_rank = PartitionSpec(DATA)
    mapped = jax.shard_map(
        of_rank,
        mesh=program.mesh,
        in_specs=(PartitionSpec(), *(by_rank for _ in stacked)),
        out_specs=by_rank,
        axis_names={DATA},
        check_vma=False,  # No output is replicated over ranks.
    )
    return mapped(shared, *stacked)


def _on_batches(
    program: Program, function: Callable[..., Any], shared: Any, batch: Sequence[Any]
) -> Any:
    """Runs a function on every rank's part of a global batch and stacks the results.

    The last argument of the function is the number of the rank's first micro-batch.
    """
    plan = program.plan
    ranks, count = plan.axis_sizes[DATA], plan.num_micro_batches
    axes = program.batch_axes
    specs = [_without_data(leaf.spec) for leaf in plan.batch]
    places = [i for i, axis in enumerate(axes) if axis is not None]
    cut = [_by_rank(batch[i], axes[i] or 0, ranks) for i in places]
    cut = program.constrain(cut, [((DATA,), *specs[i]) for i in places])
    others = [x if axis is None else None for x, axis in zip(batch, axes, strict=True)]

    def of_rank(own: Program, shared: Any, parts: Sequence[Any], number: Any) -> Any:
        shared, leaves = shared
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part
        return function(own, shared, leaves, number * count)

    numbers = jnp.arange(ranks)
    return _on_ranks(program, of_rank, (shared, others), cut, numbers)


def _with_weights(program: Program, sums: Sums) -> Sums:
    """Replaces weights that are equal on all ranks by a constant, to avoid a sum."""
    if program.captured.graph.weighted:
        return sums
    weight = sums.weight
    count = jnp.asarray(program.plan.num_micro_batches, weight.dtype)
    return dataclasses.replace(sums, weight=jnp.broadcast_to(count, weight.shape))


def _by_rank(leaf: Any, axis: int, ranks: int) -> Any:
    shape = leaf.shape
    cut = (*shape[:axis], ranks, shape[axis] // ranks, *shape[axis + 1 :])
    return jnp.moveaxis(leaf.reshape(cut), axis, 0)


def _without_data(spec: Spec) -> Spec:
    return tuple(tuple(a for a in axes if a != DATA) for axes in spec)


def _adasum(
    program: Program, stacked: Sequence[Any], weights: Any, specs: Sequence[Spec]
) -> list[Any]:
    plan, graph = program.plan, program.captured.graph
    paths = layers_by_path(graph)
    axes = [paths.get(leaf.path) for leaf in plan.trained]
    laid = [
        spec if one is None else one.stacked_spec(spec, plan.axis_sizes)
        for spec, one in zip(specs, axes, strict=True)
    ]
    pairs = zip(stacked, axes, strict=True)
    by_layer = [x if one is None else one.by_layer(x) for x, one in pairs]
    result = adasum_reduce(
        program.constrain(by_layer, [((DATA,), *spec) for spec in laid]),
        program.constrain([weights], [((DATA,),)])[0],
        laid,
        [1 if axis is None else axis.count for axis in axes],
        program.mesh,
        node=node_size(plan.axis_sizes, plan.cluster, plan.combine),
    )
    back = zip(result, axes, strict=True)
    return [x if one is None else one.as_stored(x) for x, one in back]


def _summed(program: Program, sums: Sums) -> Sums:
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
    """Combines the metrics of all ranks.

    Afterwards, ``reported`` divides by the number of micro-batches of one rank, or by
    the weight of all.
    """
    if not isinstance(metric, ReportedValue):
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


def _rows(metric: ReportedValue, rows: Any) -> Any:
    ranks, axis, outer, inner = rows.shape[0], metric.axis, metric.outer, metric.inner
    front, behind = rows.shape[1 : axis + 1], rows.shape[axis + 2 :]
    size = rows.shape[axis + 1] // (outer * inner)
    cut = rows.reshape(ranks, *front, outer, size, inner, *behind)
    cut = jnp.moveaxis(cut, 0, axis + 1)
    return cut.reshape(*front, outer * ranks * size * inner, *behind)


def _rest(program: Program, before: Any, moved: Sequence[Any]) -> Any:
    frozen = program.captured.frozen
    tree: Any = jax.tree.structure(before)
    after = iter(moved)
    return tree.unflatten(
        [
            x if i in frozen else _mean_over_ranks(next(after), x)
            for i, x in enumerate(jax.tree.leaves(before))
        ]
    )


def _mean_over_ranks(ranks: Any, before: Any) -> Any:
    if jnp.issubdtype(ranks.dtype, jnp.inexact):
        return wide(ranks).mean(0).astype(before.dtype)
    return ranks[0]
