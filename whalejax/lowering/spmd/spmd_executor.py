"""The ``spmd`` executor: one program for all devices, with sharding constraints.

It builds the pure step function of a plan without stages. The step scans over
micro-batches, divides the summed gradients by the summed weights, and runs a sharded
optimizer. The compiler shards all axes. So statistics over the batch (batch
normalisation, valid-token means, auxiliary losses) equal those of the full micro-batch
on one device.

The module is long because the step, its evaluation and the update share the same few
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from whalejax import _compat
from whalejax.lowering.metrics import summands, wide
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.optimizer_state import owners_of, updates
from whalejax.lowering.spmd.constraints import Constraints
from whalejax.lowering.spmd.evaluate import (
    PartialProgram,
    ScanReplacement,
    evaluate,
    named_sharding,
)
from whalejax.lowering.spmd.optimizer_offload import (
    Follower,
    flattened,
    streamable,
    streamed,
)
from whalejax.lowering.spmd.parameter_offload import HostParameter
from whalejax.planner.cost_terms import moves_to_host
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import OffloadableState
from whalejax.planner.sharding.layout import Spec


if TYPE_CHECKING:
    from whalejax.adapters.base import Adapter
    from whalejax.capture import Captured
    from whalejax.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over micro-batches.

    Attributes:
        total: Sum of the losses' totals.
        weight: Sum of the losses' weights.
        metrics: Sum of each metric.
        gradients: Sum of the gradients of the totals, in flat order.
        batch_gradients: Gradients of the totals by the batch leaves that the adapter's
            ``batch_gradients`` names, with a row for each sample.
        means: Whether ``gradients`` are already gradients of the mean loss.
    """

    total: Any
    weight: Any
    metrics: Any
    gradients: tuple[Any, ...]
    batch_gradients: tuple[Any, ...] = ()
    means: bool = False


jax.tree_util.register_dataclass(
    Sums,
    data_fields=["total", "weight", "metrics", "gradients", "batch_gradients"],
    meta_fields=["means"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A plan, a trace and a mesh, from which the step function is built.

    Attributes:
        plan: Plan of the step.
        captured: Loss, traced at micro-batch shape.
        adapter: Adapter that divides the model into parameters and other state.
        constraints: Sharding constraints inside the loss.
        mesh: Mesh of the devices.
        optimizer: Optax transformation.
        batch_axes: Batch dimension of each flat batch leaf, or None.
    """

    plan: Plan
    captured: Captured
    adapter: Adapter
    constraints: Constraints
    mesh: Mesh
    optimizer: optax.GradientTransformationExtraArgs
    batch_axes: tuple[int | None, ...]

    def constrain(
        self,
        leaves: Sequence[Any],
        specs: Sequence[Spec],
        away: Collection[int] = (),
    ) -> list[Any]:
        """Constrains flat leaves to specs, except offloaded leaves."""
        return [
            x
            if i in away
            else jax.lax.with_sharding_constraint(x, named_sharding(spec, self.mesh))
            for i, (x, spec) in enumerate(zip(leaves, specs, strict=True))
        ]

    def loss(
        self,
        params: Sequence[Any],
        rest: Any,
        batch: Sequence[Any],
        rng: Any,
        part: ScanReplacement | None = None,
        here: PartialProgram | None = None,
    ) -> tuple[Any, tuple[Any, Any, Any]]:
        """Runs the traced loss of one micro-batch under the plan's constraints.

        Args:
            params: Flat trained parameters.
            rest: Non-trainable state.
            batch: Flat leaves of the micro-batch.
            rng: Random key, or None if the loss takes none.
            part: Replacement of the scan over layers; default: all layers run.
            here: Equations that run; default: all run.

        Returns:
            Total, and (weight, metrics, new non-trainable state).
        """
        leaves = jax.tree.leaves(rest)
        params = [
            HostParameter(host=p)
            if leaf.hosted and not isinstance(p, HostParameter)
            else p
            for p, leaf in zip(params, self.plan.trained, strict=True)
        ]
        arguments = [*params, *leaves, *batch, *([] if rng is None else [rng])]
        jaxpr, constraints = self.captured.jaxpr, self.constraints

        outputs = evaluate(
            jaxpr, arguments, constraints, self.mesh, part=part, here=here
        )
        total, *others = self.captured.out_tree.unflatten(outputs)
        return total, tuple(others)

    def followers(self) -> list[Follower]:
        """Returns the offloaded state that is updated in chunks, with its specs.

        Raises:
            PlanError: The optimizer is not the plan's, and reads offloaded state in
                full.
        """
        leaves = self.plan.trained
        away = [i for i, leaf in enumerate(leaves) if leaf.hosted]
        state = "optimizer" in self.plan.offload
        if not (state or away):
            return []
        result = followers(self.optimizer, self.adapter, state=state, params=away)
        whole = [i for i in away if i not in {follower.fresh for follower in result}]
        if whole:
            raise PlanError(
                f"the plan keeps {len(whole)} parameters in host memory, such as "
                f"{leaves[whole[0]].path}, but this optimizer reads each of them in "
                "full at once. Compile with the optimizer of the plan, or plan "
                "with this one"
            )
        tree = jax.eval_shape(self.optimizer.init, self.adapter.params)
        owners = owners_of(tree, [(leaf.path, leaf.shape) for leaf in leaves])
        follows = any(i is not None and len(leaves[i].shape) > 1 for i in owners)
        if state and follows and not any(f.hosted - {f.fresh} for f in result):
            raise PlanError(
                "the plan keeps the optimizer's state in host memory, and this one "
                "does not update its state element by element. Compile with the "
                "optimizer of the plan, or plan with this one"
            )
        return [replace(f, spec=leaves[f.fresh].optimizer_spec) for f in result]


def micro_batches(
    program: Program, batch: Sequence[Any], but: Collection[int] = ()
) -> tuple[list[Any], Callable[..., list[Any]]]:
    """Divides a global batch into micro-batches along a new leading dimension.

    Args:
        program: Loss, optimizer and plan to run.
        batch: Flat leaves of the global batch.
        but: Numbers of leaves that are not divided; default: none.

    Returns:
        The divided leaves, and a function from one micro-batch of each to all flat
        leaves. Undivided leaves are taken from ``batch``, or from the function's second
        argument.
    """
    rows = MicroBatchRows.of(program.plan)
    known = enumerate(program.batch_axes)
    axes = {i: axis for i, axis in known if axis is not None and i not in but}
    places = list(axes)
    batches = [rows.stack(batch[place], axis) for place, axis in axes.items()]
    specs = [((), *program.plan.batch[place].spec) for place in places]

    def full_batch(parts: Sequence[Any], others: Sequence[Any] = batch) -> list[Any]:
        leaves = list(others)
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part
        return leaves

    return program.constrain(batches, specs), full_batch


def gradients_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    scale: Any = None,
    first: Any = 0,
) -> tuple[Sums, Any]:
    """Returns loss and gradients of the global batch, and new non-trainable state.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state, in the adapter's structure.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None if the loss takes none.
        step: Number of the step, folded into keys with the micro-batch's index.
        scale: Factor of the loss before differentiation, by which gradients are
            divided; default: none.
        first: Number of the first micro-batch, an offset for keys; default 0.
    """
    one = differentiator(program, params, rest, rng, step, scale, first)
    count = program.plan.num_micro_batches
    if count == 1:
        alone: tuple[Sums, Any] = one(rest, batch, 0)
        return alone
    return _accumulate(program, one, rest, batch, count)


def differentiator(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    rng: Any,
    step: Any,
    scale: Any = None,
    first: Any = 0,
) -> Callable[..., tuple[Sums, Any]]:
    """Returns a function that runs a micro-batch forward and backward.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state before the step; only its keys are read.
        rng: Random key of the run, or None if the loss takes none.
        step: Number of the step, folded into keys with the micro-batch's index.
        scale: Factor of the loss before differentiation, by which gradients are
            divided; default: none.
        first: Number of the first micro-batch, an offset for keys; default 0.

    Returns:
        Function from the non-trainable state, the flat micro-batch and its index to
        sums and the non-trainable state afterwards.
    """
    adapter = program.adapter
    at_step = adapter.fold_rest(rest, step)
    rng = None if rng is None else jax.random.fold_in(rng, step)
    # Gradients are reduced in the parameter's spec, and then resharded. With a single
    # constraint, the compiler would reshard the activations instead.
    stored = [leaf.param_spec for leaf in program.plan.trained]
    specs = [leaf.gradient_spec for leaf in program.plan.trained]

    hosted = [leaf.hosted for leaf in program.plan.trained]
    differentiated = [
        _seed(p, spec, program.mesh) if away else p
        for p, spec, away in zip(params, stored, hosted, strict=True)
    ]

    wanted = adapter.batch_gradients
    layouts = [program.plan.batch[place].spec for place in wanted]

    def loss(
        given: tuple[Sequence[Any], ...], rest: Any, batch: Sequence[Any], key: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        triples = zip(params, given[0], hosted, strict=True)
        leaves = [
            HostParameter(host=p, seed=x) if away else x for p, x, away in triples
        ]
        by_place = dict(zip(wanted, given[1], strict=True))
        read = [by_place.get(place, leaf) for place, leaf in enumerate(batch)]
        total, others = program.loss(leaves, rest, read, key)
        return total if scale is None else total * scale, (total, others)

    differentiate = jax.value_and_grad(loss, has_aux=True)

    def one(rest: Any, batch: Sequence[Any], index: Any) -> tuple[Sums, Any]:
        drawn = index + first
        folded = adapter.fold_rest(adapter.restore_keys(rest, at_step), drawn)
        key = None if rng is None else jax.random.fold_in(rng, drawn)
        read = [batch[place] for place in wanted]
        (_, (total, (weight, metrics, fresh))), (gradients, by_leaf) = differentiate(
            (differentiated, read), folded, batch, key
        )
        if scale is not None:
            gradients = [wide(g) / scale for g in gradients]
            by_leaf = [wide(g) / scale for g in by_leaf]
        fresh = adapter.restore_keys(fresh, rest)
        gradients = program.constrain(program.constrain(gradients, stored), specs)
        by_leaf = program.constrain(by_leaf, layouts)
        sums = sums_of(program, total, weight, metrics, tuple(gradients), index)
        return replace(sums, batch_gradients=tuple(by_leaf)), fresh

    return one


def _seed(param: Any, spec: Spec, mesh: Mesh) -> Any:
    """Returns the seed of an offloaded parameter: zeros; see ``HostParameter``."""
    nothing = jnp.zeros(param.shape, param.dtype)
    return jax.lax.with_sharding_constraint(nothing, named_sharding(spec, mesh))


def sums_of(
    program: Program,
    total: Any,
    weight: Any,
    metrics: Any,
    gradients: tuple[Any, ...],
    number: Any,
) -> Sums:
    """Returns one micro-batch's terms of the sums, in float32 or wider.

    Metrics are means over the micro-batch. If the user weights the loss, metrics get
    the same weights, so that the result is the mean over the full batch.
    """
    total, weight = wide(total), wide(jnp.asarray(weight))
    count = program.plan.num_micro_batches
    weighted = program.captured.graph.weighted
    rows = MicroBatchRows.of(program.plan)
    metrics = summands(metrics, weight if weighted else None, number, rows)
    if count > 1:
        gradients = tuple(wide(g) for g in gradients)
    return Sums(total=total, weight=weight, metrics=metrics, gradients=gradients)


def losses_of(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    batch: Sequence[Any],
    rng: Any,
    step: Any,
    first: Any = 0,
) -> Sums:
    """Returns the summed losses of the global batch, without gradients.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state, in the adapter's structure.
        batch: Flat leaves of the global batch.
        rng: Random key of the run, or None if the loss takes none.
        step: Number of the step, folded into keys with the micro-batch's index.
        first: Number of the first micro-batch, an offset for keys; default 0.
    """
    one = evaluator(program, params, rest, rng, step, first)
    count = program.plan.num_micro_batches
    if count == 1:
        return one(0, batch)
    parts, whole = micro_batches(program, batch)
    shapes = jax.eval_shape(one, 0, whole([p[0] for p in parts]))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(sums: Sums, step: Any) -> tuple[Sums, None]:
        index, part = step
        return jax.tree.map(jnp.add, sums, one(index, whole(part))), None

    summed: Sums
    summed, _ = jax.lax.scan(body, zeros, (jnp.arange(count), parts))
    return summed


def evaluator(
    program: Program,
    params: Sequence[Any],
    rest: Any,
    rng: Any,
    step: Any,
    first: Any = 0,
) -> Callable[..., Sums]:
    """Returns a function from a micro-batch's index and flat leaves to sums.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat trained parameters.
        rest: Non-trainable state, in the adapter's structure.
        rng: Random key of the run, or None if the loss takes none.
        step: Number of the step, folded into keys with the micro-batch's index.
        first: Number of the first micro-batch, an offset for keys; default 0.
    """
    adapter = program.adapter
    at_step = adapter.fold_rest(rest, step)
    rng = None if rng is None else jax.random.fold_in(rng, step)

    def one(index: Any, batch: Sequence[Any]) -> Sums:
        drawn = index + first
        key = None if rng is None else jax.random.fold_in(rng, drawn)
        folded = adapter.fold_rest(at_step, drawn)
        total, (weight, metrics, _) = program.loss(params, folded, batch, key)
        return sums_of(program, total, weight, metrics, (), index)

    return one


def _accumulate(
    program: Program,
    one: Callable[..., Any],
    rest: Any,
    batch: Sequence[Any],
    count: int,
) -> tuple[Sums, Any]:
    read = _ReadLeaves(program, batch)
    parts, whole = micro_batches(program, batch, but=read.wanted)
    first = read.part(whole([p[0] for p in parts]), 0)
    shapes, _ = jax.eval_shape(one, rest, first, 0)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    specs = [leaf.gradient_spec for leaf in program.plan.trained]
    zeros = Sums(
        total=zeros.total,
        weight=zeros.weight,
        metrics=zeros.metrics,
        gradients=tuple(program.constrain(zeros.gradients, specs)),
        batch_gradients=read.zeros(shapes.batch_gradients),
    )

    tree: Any = jax.tree.structure(rest)
    leaves, frozen = jax.tree.leaves(rest), program.captured.frozen
    moving = [i for i in range(len(leaves)) if i not in frozen]

    def filled(some: Sequence[Any]) -> Any:
        """Adds frozen weights, which are no carries, as a loop may copy carries."""
        given = iter(some)
        pairs = enumerate(leaves)
        return tree.unflatten([x if i in frozen else next(given) for i, x in pairs])

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        sums, some = carry
        index, part = step
        added, after = one(filled(some), read.part(whole(part), index), index)
        after = jax.tree.leaves(after)
        sums = read.added(sums, added, index)
        return (sums, [after[i] for i in moving]), None

    carry = zeros, [leaves[i] for i in moving]
    (sums, some), _ = jax.lax.scan(body, carry, (jnp.arange(count), parts))
    return sums, filled(some)


class _ReadLeaves:
    """Batch leaves whose gradients a step returns, in a loop over micro-batches.

    The loop reads and writes micro-batches inside the global arrays, which may be too
    large to copy.
    """

    def __init__(self, program: Program, batch: Sequence[Any]) -> None:
        self._program, self._batch = program, batch
        self._rows = MicroBatchRows.of(program.plan)
        self.wanted = program.adapter.batch_gradients
        self._axes = [program.batch_axes[place] or 0 for place in self.wanted]
        self._specs = [program.plan.batch[place].spec for place in self.wanted]

    def part(self, leaves: list[Any], index: Any) -> list[Any]:
        """Returns the leaves of a micro-batch, including its parts of these leaves."""
        pairs = zip(self.wanted, self._axes, strict=True)
        parts = [self._rows.take(self._batch[n], axis, index) for n, axis in pairs]
        parts = self._program.constrain(parts, self._specs)
        for place, part in zip(self.wanted, parts, strict=True):
            leaves[place] = part
        return leaves

    def zeros(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """Returns zero gradients of the global batch, like those of a micro-batch."""
        pairs = zip(self.wanted, parts, strict=True)
        zeros = [jnp.zeros(self._batch[n].shape, part.dtype) for n, part in pairs]
        return tuple(self._program.constrain(zeros, self._specs))

    def added(self, sums: Sums, more: Sums, index: Any) -> Sums:
        triples = zip(
            sums.batch_gradients, more.batch_gradients, self._axes, strict=True
        )
        by_leaf = [self._rows.put(x, g, axis, index) for x, g, axis in triples]
        before, more = (replace(each, batch_gradients=()) for each in (sums, more))
        total: Sums = jax.tree.map(jnp.add, before, more)
        by_leaf = self._program.constrain(by_leaf, self._specs)
        return replace(total, batch_gradients=tuple(by_leaf))


def unstacked(program: Program, stacked: Sequence[Any]) -> tuple[Any, ...]:
    """Returns gradients by leaves of the global batch.

    Args:
        program: Loss, optimizer and plan to run.
        stacked: Gradients of every micro-batch along a leading dimension, by the batch
            leaves that the adapter's ``batch_gradients`` names.
    """
    rows, wanted = MicroBatchRows.of(program.plan), program.adapter.batch_gradients
    specs = [program.plan.batch[place].spec for place in wanted]
    stacked = program.constrain(stacked, [((), *spec) for spec in specs])
    axes = [program.batch_axes[place] or 0 for place in wanted]
    pairs = zip(stacked, axes, strict=True)
    return tuple(program.constrain([rows.unstack(x, axis) for x, axis in pairs], specs))


def update(
    program: Program,
    params: Sequence[Any],
    state: Any,
    gradients: Sequence[Any],
    loss: Any,
    applies: Any = None,
) -> tuple[list[Any], Any]:
    """Runs the optimizer's step, on each device for its own shards.

    Args:
        program: Loss, optimizer and plan to run.
        params: Flat parameters, as stored.
        state: Optimizer state.
        gradients: Flat gradients of the mean loss.
        loss: Mean loss, for optimizers that read it.
        applies: Boolean scalar; with False the step changes nothing. Default: True.

    Returns:
        New parameters, as stored, and new optimizer state.
    """
    owned = [leaf.optimizer_spec for leaf in program.plan.trained]
    stored = [leaf.param_spec for leaf in program.plan.trained]
    structure: Any = jax.tree.structure(program.adapter.params)
    leaves = jax.tree.leaves(state)
    state_tree: Any = jax.tree.structure(state)
    count = len(params)

    step = stepping(program.optimizer, structure, state_tree, skips=applies is not None)
    away = [i for i, leaf in enumerate(program.plan.trained) if leaf.hosted]
    values = [
        *program.constrain(params, owned, away),
        *program.constrain(gradients, owned),
        *leaves,
        loss,
        jnp.asarray(True) if applies is None else applies,
    ]
    held = program.followers()
    if held:
        results = streamed(step, values, held, program.mesh)
    else:
        results = step(values)
    fresh, new = results[:count], state_tree.unflatten(results[count:])
    return program.constrain(fresh, stored, away), new


def stepping(
    optimizer: optax.GradientTransformationExtraArgs,
    structure: Any,
    state_tree: Any,
    *,
    skips: bool,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns an optimizer's step as a function of flat values.

    Args:
        optimizer: Optimizer of the step.
        structure: Tree structure of the parameters.
        state_tree: Tree structure of the optimizer's state.
        skips: Whether a step has no effect if the last value is False.

    Returns:
        Function from parameters, gradients, state, the loss and a boolean to parameters
        and state.
    """
    count = structure.num_leaves

    def step(values: Sequence[Any]) -> list[Any]:
        *values, loss, applies = values
        tree = structure.unflatten(values[:count])
        gradients = structure.unflatten(values[count : 2 * count])
        kept = state_tree.unflatten(values[2 * count :])
        changes, new = updates(optimizer, gradients, kept, tree, loss)
        fresh = optax.apply_updates(tree, changes)
        result = [*jax.tree.leaves(fresh), *jax.tree.leaves(new)]
        if not skips:
            return result
        before = [*values[:count], *values[2 * count :]]
        pairs = zip(result, before, strict=True)
        return [jnp.where(applies, x, y) for x, y in pairs]

    return step


def followers(
    optimizer: optax.GradientTransformationExtraArgs,
    adapter: Adapter,
    *,
    state: bool,
    params: Collection[int],
    small: bool = False,
    program: UpdateProgram | None = None,
) -> list[Follower]:
    """Returns the parameters that are updated in chunks.

    They or their state are offloaded, and both have elementwise updates. If the state
    alone is offloaded, they are matrices, unless ``small``.

    Args:
        optimizer: Optimizer of the model.
        adapter: Adapter of the model, with abstract parameters.
        state: Whether the optimizer state of all parameters is offloaded.
        params: Numbers of the offloaded parameters.
        small: Whether to include the state of parameters that are not matrices; default
            False.
        program: Result of ``update_program``; traced by default.

    Returns:
        Parameters with their state, as numbers of the values of ``stepping``, without
        specs.
    """
    program = program or update_program(optimizer, adapter)
    shapes = [x.shape for x in jax.tree.leaves(adapter.params)]
    count = len(shapes)
    owners = owners_of(program.state, [*zip(adapter.param_paths, shapes, strict=True)])
    held: dict[int, list[tuple[int, int]]] = {i: [] for i in params}
    for place, owner in enumerate(owners):
        if owner is None:
            continue
        if owner in held or (state and (small or moves_to_host(shapes[owner]))):
            held.setdefault(owner, []).append((2 * count + place, count + place))
    result = [
        Follower(
            inputs=(owner, count + owner),
            state=tuple(pairs),
            fresh=owner,
            hosted=frozenset([i for i, _ in pairs] if state else [])
            | frozenset({owner}.intersection(params)),
        )
        for owner, pairs in held.items()
    ]
    return streamable(program.jaxpr, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProgram:
    """The traced step of an optimizer.

    Attributes:
        state: Abstract state of the optimizer.
        jaxpr: Program of ``stepping``, without calls.
    """

    state: Any
    jaxpr: Any


def update_program(
    optimizer: optax.GradientTransformationExtraArgs, adapter: Adapter
) -> UpdateProgram:
    """Traces an optimizer's step.

    Args:
        optimizer: Optimizer of the model.
        adapter: Adapter of the model, with abstract parameters.
    """
    params = [
        _compat.abstract(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for x in jax.tree.leaves(adapter.params)
    ]
    structure: Any = jax.tree.structure(adapter.params)
    states = jax.eval_shape(optimizer.init, structure.unflatten(params))
    state_tree: Any = jax.tree.structure(states)
    step = stepping(optimizer, structure, state_tree, skips=False)
    scalars = [_compat.abstract((), jnp.float32), _compat.abstract((), jnp.bool_)]
    given = [*params, *params, *jax.tree.leaves(states), *scalars]
    return UpdateProgram(state=states, jaxpr=flattened(step, given))


def offloadable_state(
    adapter: Adapter, optimizer: optax.GradientTransformation
) -> OffloadableState:
    """Returns the state that a plan may offload with this optimizer.

    Args:
        adapter: Adapter of the model, with abstract parameters.
        optimizer: Optax transformation.
    """
    extended = optax.with_extra_args_support(optimizer)
    paths = adapter.param_paths
    first = 2 * len(paths)
    program = update_program(extended, adapter)
    state = jax.tree.leaves(program.state)
    # Parameters may be offloaded with their state, or alone.
    of_state, alone, beside = (
        followers(extended, adapter, state=state, params=params, program=program)
        for state, params in (
            (True, ()),
            (False, range(len(paths))),
            (True, range(len(paths))),
        )
    )
    return OffloadableState(
        state={
            paths[follower.fresh]: sum(
                state[place - first].size * state[place - first].dtype.itemsize
                for place, _ in follower.state
            )
            for follower in of_state
            if follower.state
        },
        params=frozenset.intersection(
            *(frozenset(paths[f.fresh] for f in result) for result in (alone, beside))
        ),
    )
