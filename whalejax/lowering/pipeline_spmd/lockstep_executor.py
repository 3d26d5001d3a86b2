"""The ``pipeline_spmd`` executor: equal stages in one program, turn by turn.

Every stage has some layers of a scan over stacked parameters, and all stages run one
loop. In each turn a stage runs its layers forward for one micro-batch and backward for
another, by the rows of the schedule, and sends results to its neighbours. All stages
compute the parts before and after the layers, but only the results of the first and the
last stage are used. ``activation_stash`` defines what is saved for a micro-batch in
flight. The compiler shards the other mesh axes. If stages have unequal numbers of
layers, each runs its own number of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from whalejax.capture.layer_scan import Stack
from whalejax.lowering.pipeline_spmd.activation_stash import STASHES
from whalejax.lowering.pipeline_spmd.stage_body import Carry, OneStage, layer_counts
from whalejax.lowering.pipeline_spmd.ticks import (
    handed_back,
    handed_on,
    put,
    read_ring_slot,
    turns_of,
    where,
)
from whalejax.lowering.pipeline_spmd.uneven_layer_exchange import (
    collected,
    dealt_rest,
    distribute_layers,
)
from whalejax.lowering.spmd.spmd_executor import (
    Program,
    Sums,
    micro_batches,
    unstacked,
)
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.schedules import Schedule, schedule


def pipelined_gradients(
    program: Program,
    stack: Stack,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    scale: Any = None,
) -> tuple[Sums, Any]:
    """Returns loss and gradients of the global batch, and the new non-trainable state.

    Args:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
        scale: Scale of float16 losses, or None.
    """
    table, plan = _table(program), program.plan
    assert plan.stages is not None
    stash = STASHES[plan.stages.stash]

    def trained(local: OneStage) -> Sums:
        here, none = stash(local), local.nothing()

        def turn(carry: Any, now: Any) -> tuple[Any, None]:
            handed, returned, kept, sums, stacked = carry
            ahead, back = now[:, 0], now[:, 1]
            kept, out = here.ahead(kept, handed, ahead)
            number = jnp.maximum(back[local.stage], 0)
            mine = [read_ring_slot(ring, number) for ring in kept]

            def behind() -> tuple[Sums, Sequence[Any], Carry]:
                behind, before = here.behind(mine, returned, number)
                by_leaf = list(behind.batch_gradients)
                behind = replace(behind, batch_gradients=())
                added = jax.tree.map(jnp.add, sums, behind)
                return added, by_leaf, local.constrain_carry(before)

            idle = sums, local.no_batch_gradients(), none
            sums, by_leaf, before = local.chosen(back, behind, idle)
            pairs = zip(stacked, by_leaf, strict=True)
            stacked = [put(ring, x, back[local.stage]) for ring, x in pairs]
            handed = handed_on(out, table.num_stages)
            returned = handed_back(before, table.num_stages)
            return (handed, returned, kept, sums, stacked), None

        depth = max(table.in_flight)
        kept = [jnp.broadcast_to(x, (depth, *x.shape)) for x in here.empty]
        sums = replace(local.no_sums(), gradients=local.no_gradients())
        zeros = local.no_batch_gradients()
        count = plan.num_micro_batches
        stacked = [jnp.broadcast_to(x, (count, *x.shape)) for x in zeros]
        carry: Any = (none, none, kept, sums, stacked)
        (*_, sums, stacked), _ = jax.lax.scan(turn, carry, turns_of(table))
        return _summed(replace(sums, batch_gradients=tuple(stacked)), stack)

    run = _on_stages(program, stack, trained, _sums_specs(program, stack))
    sums = run(params, rest, batch, rng, step, scale)
    by_leaf = unstacked(program, sums.batch_gradients)
    sums = replace(sums, batch_gradients=by_leaf)
    return sums, _advance_counters(rest, stack, program.plan.num_micro_batches)


_WHOLE = PartitionSpec()


def _sums_specs(program: Program, stack: Stack) -> Sums:
    adapter = program.adapter
    return Sums(
        total=_WHOLE,
        weight=_WHOLE,
        metrics=_WHOLE,
        gradients=tuple(_specs_of(len(adapter.param_paths), stack)),
        batch_gradients=(_WHOLE,) * len(adapter.batch_gradients),
    )


def _summed(sums: Sums, stack: Stack) -> Sums:
    whole = jax.tree.map(
        lambda x: jax.lax.psum(x, STAGE),
        (sums.total, sums.weight, sums.metrics, sums.batch_gradients),
    )
    gradients = [
        g if i in stack.params else jax.lax.psum(g, STAGE)
        for i, g in enumerate(sums.gradients)
    ]
    total, weight, metrics, by_leaf = whole
    return Sums(
        total=total,
        weight=weight,
        metrics=metrics,
        gradients=tuple(gradients),
        batch_gradients=by_leaf,
    )


def _specs_of(count: int, stack: Stack) -> list[PartitionSpec]:
    return [PartitionSpec(STAGE) if i in stack.params else _WHOLE for i in range(count)]


def _rest_specs(rest: Any, stack: Stack) -> Any:
    tree: Any = jax.tree.structure(rest)
    count = tree.num_leaves
    return tree.unflatten(
        [PartitionSpec(STAGE) if i in stack.frozen else _WHOLE for i in range(count)]
    )


def _on_stages(
    program: Program,
    stack: Stack,
    function: Callable[[OneStage], Sums],
    outputs: Any,
) -> Callable[..., Sums]:
    """Returns ``function`` as a function of global arrays that all stages run.

    In it, counters advance with each micro-batch.
    """
    adapter, cut = program.adapter, program.batch_axes

    def run(
        params: Sequence[Any],
        rest: Any,
        batch: Sequence[Any],
        rng: Any,
        step: Any,
        scale: Any,
    ) -> Any:
        at_step = adapter.fold_rest(rest, step)
        rng = None if rng is None else jax.random.fold_in(rng, step)
        parts, whole = micro_batches(program, batch)
        pairs = zip(batch, cut, strict=True)
        others = [x if axis is None else None for x, axis in pairs]

        def local(params: list[Any], given: tuple[Any, ...]) -> Sums:
            here: Any = jax.sharding.get_abstract_mesh()  # The axis stage is manual.
            at_step, parts, others, rng, scale = given

            def micro(number: Any) -> tuple[Any, Sequence[Any], Any]:
                key = None if rng is None else jax.random.fold_in(rng, number)
                taken = [
                    jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
                    for x in parts
                ]
                counted = _advance_counters(at_step, stack, number)
                return adapter.fold_rest(counted, number), whole(taken, others), key

            return function(
                OneStage(
                    program=replace(program, mesh=here),
                    stack=stack,
                    params=params,
                    stage=jax.lax.axis_index(STAGE),
                    micro=micro,
                    scale=scale,
                )
            )

        specs = _rest_specs(rest, stack)
        mapped = jax.shard_map(
            local,
            mesh=program.mesh,
            in_specs=(_specs_of(len(params), stack), (specs, *[_WHOLE] * 4)),
            out_specs=outputs,
            axis_names={STAGE},
            check_vma=False,
        )
        at_step = dealt_rest(program, stack, at_step, layer_counts(program))
        given = at_step, parts, others, rng, scale
        return _dealt_out(program, stack, lambda own: mapped(own, given), params)

    return run


def _advance_counters(rest: Any, stack: Stack, number: Any) -> Any:
    if not any(stack.advances):
        return rest
    leaves = [
        x + jnp.asarray(number * more, x.dtype) if more else x
        for x, more in zip(jax.tree.leaves(rest), stack.advances, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(rest), leaves)


def _dealt_out(
    program: Program,
    stack: Stack,
    run: Callable[[list[Any]], Sums],
    params: Sequence[Any],
) -> Sums:
    counts = layer_counts(program)
    if min(counts) == max(counts):
        return run(list(params))
    sums = run(distribute_layers(program, stack, params, counts))
    if not sums.gradients:
        return sums
    gradients = collected(program, stack, sums.gradients, counts)
    return replace(sums, gradients=gradients)


def pipelined_losses(
    program: Program,
    stack: Stack,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
) -> Sums:
    """Returns the summed losses of the global batch, without gradients.

    Args:
        program: Loss, optimizer and plan to run.
        stack: Scan over layers.
        params: Flat trained parameters.
        rest: Non-trainable state.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None.
        step: Number of finished steps.
    """
    table = _table(program)
    turns = turns_of(table)[: table.num_micro_batches + table.num_stages - 1, :, 0]

    def evaluated(local: OneStage) -> Sums:
        def turn(carry: Any, now: Any) -> tuple[Any, None]:
            handed, sums = carry
            ahead = now[local.stage]
            (out, _), turn = local.loss(local.params, handed, jnp.maximum(ahead, 0))
            turn = where((ahead >= 0) & local.last, turn)
            handed = handed_on(local.constrain_carry(out), table.num_stages)
            return (handed, jax.tree.map(jnp.add, sums, turn)), None

        carry = local.nothing(), local.no_sums()
        (_, sums), _ = jax.lax.scan(turn, carry, turns)
        return _summed(sums, stack)

    outputs = Sums(total=_WHOLE, weight=_WHOLE, metrics=_WHOLE, gradients=())
    still = replace(stack, advances=())  # In an evaluation, counters do not advance.
    found: Sums = _on_stages(program, still, evaluated, outputs)(
        params, rest, batch, rng, step, None
    )
    return found


def _table(program: Program) -> Schedule:
    plan = program.plan
    assert plan.stages is not None
    return schedule(
        plan.stages.schedule, plan.axis_sizes[STAGE], plan.num_micro_batches
    )
