"""The compiled step: ``wh.compile``, the state it carries, and how it starts.

``TrainStep`` is a thin shell around one ``jax.jit`` program: it checks a plan against
the model before anything is compiled, gives every array its layout when it is born,
and hands the state back in the user's own types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax import _compat
from whalejax.adapters import Adapter, adapt, wants_key
from whalejax.adapters_leaves import is_key
from whalejax.capture import Captured, capture
from whalejax.capture.batch import aval_of
from whalejax.losses import Job as Job
from whalejax.lowering.away import out_of_host
from whalejax.lowering.constraints import constraints_of
from whalejax.lowering.evaluate import HOST_MEMORY, named
from whalejax.lowering.executor import gradients_of, losses_of
from whalejax.lowering.spmd import Program, owners_of, update, wide
from whalejax.matching import BatchLayout, check_same_model, mesh_of
from whalejax.meshes.problems import WhaleError
from whalejax.planner.decide import analysed_for
from whalejax.planner.explain import gigabytes
from whalejax.planner.plan import Plan, PlanError
from whalejax.precision import LossScale, all_finite, at_precision


if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """Which step a state belongs to: one for each step, equal to no other.

    It stands in the tree of every state, which JAX's caches keep for ever; hence it is
    not the step itself.
    """

    adapter: Adapter


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "rest", "opt_state", "step", "rng", "loss_scale"],
    meta_fields=["origin"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a step changes, as sharded arrays.

    A step consumes the state that it is given and returns the next one. ``model`` is
    the model in the user's own type.

    Attributes:
        params: trained leaves, in the structure of the user's model.
        rest: what is not trained: statistics, random keys, other collections.
        opt_state: the optimizer's state.
        step: number of steps done, an int32 scalar.
        rng: the run's random key, from which each step folds its own, or None.
        loss_scale: how losses are scaled where float16 computes, or None.
        origin: tells which step it belongs to.
    """

    params: Any
    rest: Any
    opt_state: Any
    step: Any
    rng: Any
    loss_scale: LossScale | None
    origin: _Origin

    @property
    def model(self) -> Any:
        """The model in the user's own type and tree, in the devices' memory."""
        _check_alive(self)
        params = jax.tree.map(out_of_host, self.params)
        return self.origin.adapter.rebuild(params, self.rest)


class TrainStep:
    """A plan, compiled: call it with a state and a global batch.

    Attributes:
        plan: what it runs.
        mesh: the devices.
        adapter: how the model divides into parameters and the rest.
        shardings: a state whose leaves are the ``NamedSharding`` of each array.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        captured: Captured,
        optimizer: optax.GradientTransformation | None,
        mesh: Mesh,
        batch: Any,
        batch_axes: tuple[int | None, ...],
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.adapter = adapter
        self._origin = _Origin(adapter)
        analysed = analysed_for(plan, captured.graph)
        self._program = Program(
            plan=plan,
            captured=captured,
            adapter=adapter,
            constraints=constraints_of(plan, analysed, captured),
            mesh=mesh,
            optimizer=optax.with_extra_args_support(
                optax.identity() if optimizer is None else optimizer
            ),
            batch_axes=batch_axes,
        )
        self._trains = optimizer is not None
        self._layout = BatchLayout(
            structure=batch,
            leaves=plan.batch,
            shardings=tuple(named(leaf.spec, mesh) for leaf in plan.batch),
        )
        self._whole = NamedSharding(mesh, PartitionSpec())
        self.shardings = self._make_shardings()
        places = (self.shardings, list(self._layout.shardings))
        options: Any = dict(plan.compiler_options) or None
        _check_compiler_options(options, self._whole, mesh.devices.flat[0].platform)
        self._step = jax.jit(
            self._advance,
            in_shardings=places,
            out_shardings=(self.shardings, self._whole),
            donate_argnums=0,
            compiler_options=options,
        )
        self._loss = jax.jit(
            self._evaluate,
            in_shardings=places,
            out_shardings=self._whole,
            compiler_options=options,
        )

    # Starting.

    def init(self, make_model: Callable[..., Any], *, rng: Any) -> TrainState:
        """A fresh state, every array born in its own layout.

        Args:
            make_model: builds the model; takes the key, or nothing.
            rng: a random key; the run's own keys derive from it too.

        Raises:
            WhaleError: it builds another model than the plan is for.
        """
        takes_key = wants_key(make_model)

        def build(key: Any) -> tuple[Any, Any, Any]:
            model = make_model(key) if takes_key else make_model()
            params, rest = self.adapter.take_apart(model)
            return params, rest, jax.random.fold_in(key, 0x5EED)

        return self._born(build, self._key(rng))

    def init_from(self, model: Any, *, rng: Any = None) -> TrainState:
        """A state with the values of an existing model, which stays the user's own.

        Args:
            model: the model, with real arrays.
            rng: a random key for losses that take one; key 0 if left out.
        """
        key = jax.random.key(0) if rng is None else self._key(rng)
        params, rest = self.adapter.take_apart(model)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            raise WhaleError(
                "init_from was given an abstract model, which has shapes and no "
                "values. Use init(make_model, rng=jax.random.key(seed))"
            )
        # Arrays may live on any device, or be shared with the user: go by the host so
        # that a donated buffer is never one of theirs.
        values = jax.tree.map(_host_copy, (params, rest))
        return self._born(lambda tree, key: (*tree, key), values, key)

    def _key(self, rng: Any) -> Any:
        return _typed_key(rng, for_loss=self.adapter.takes_rng)

    def _born(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        def whole(*args: Any) -> TrainState:
            params, rest, key = build(*args)
            params, rest = jax.tree.map(_strongly_typed, (params, rest))
            return TrainState(
                params=params,
                rest=rest,
                opt_state=jax.tree.map(
                    _strongly_typed, self._program.optimizer.init(params)
                ),
                step=jnp.zeros((), jnp.int32),
                rng=key,
                loss_scale=self._fresh_scale(),
                origin=self._origin,
            )

        born: TrainState = jax.jit(whole, out_shardings=self.shardings)(*arguments)
        return born

    def _make_shardings(self) -> TrainState:
        leaves = self.plan.leaves
        structure = _structure(self.adapter.params)
        state = jax.eval_shape(self._program.optimizer.init, self._abstract_params())
        # What belongs to no parameter is whole.
        owners = owners_of(state, [(leaf.path, leaf.shape) for leaf in leaves])
        held = self._program.followers()
        moved = {f.fresh for f in held if any(i in f.hosted for i, _ in f.state)}
        return TrainState(
            params=structure.unflatten(
                [named(x.param_spec, self.mesh, host=x.hosted) for x in leaves]
            ),
            rest=jax.tree.map(lambda _: self._whole, self.adapter.rest),
            opt_state=_structure(state).unflatten(
                [
                    self._whole
                    if owner is None
                    else named(
                        leaves[owner].optimizer_spec,
                        self.mesh,
                        host=owner in moved,
                    )
                    for owner in owners
                ]
            ),
            step=self._whole,
            rng=self._whole,
            loss_scale=jax.tree.map(lambda _: self._whole, self._fresh_scale()),
            origin=self._origin,
        )

    def _fresh_scale(self) -> LossScale | None:
        return LossScale.fresh() if self.plan.scales_loss else None

    def _abstract_params(self) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, jax.dtypes.canonicalize_dtype(x.dtype)
            ),
            self.adapter.params,
        )

    # Running.

    def __call__(
        self, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """One step of the optimizer.

        Args:
            state: is consumed: its buffers are reused.
            batch: the global batch; with several processes this process's part of it,
                or global ``jax.Array`` leaves.

        Returns:
            The new state, and metrics: ``loss`` and what the loss function reports.

        Raises:
            PlanError: the batch has another shape than the plan is for.
        """
        self._check_owner(state)
        if not self._trains:
            raise PlanError(
                "this step was compiled without an optimizer and can only evaluate. "
                "Pass optimizer= to wh.plan and wh.compile to train"
            )
        new, metrics = self._step(state, self._layout.place(batch))
        return new, metrics

    def eval(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """The loss and metrics of a batch, without a gradient; nothing changes.

        It is the loss of training, with its dropout and its statistics of the batch;
        for another loss call a function of your own on ``state.model``.

        Args:
            state: is kept.
            batch: as for a step.
        """
        self._check_owner(state)
        metrics: dict[str, Any] = self._loss(state, self._layout.place(batch))
        return metrics

    def _check_owner(self, state: TrainState) -> None:
        if getattr(state, "origin", None) is not self._origin:
            raise PlanError(
                f"the state is {type(state).__name__} and was not made by this step; "
                "expected the TrainState that its init, init_from or restore gave, or "
                "that its last call returned. To go on under another plan, save with "
                "one step and restore with the other"
            )
        _check_alive(state)

    def lower(self, state: TrainState | None = None) -> Any:
        """The lowered step (``jax.stages.Lowered``), for looking at the program.

        Args:
            state: a state, or None for an abstract one.
        """
        if state is None:
            state = self.abstract_state()
        return self._step.lower(state, self._layout.abstract())

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and layouts of the state, with no array behind them."""
        params = self._abstract_params()
        shapes = TrainState(
            params=params,
            rest=jax.tree.map(aval_of, self.adapter.rest),
            opt_state=jax.eval_shape(self._program.optimizer.init, params),
            step=jax.ShapeDtypeStruct((), jnp.int32),
            rng=jax.eval_shape(lambda: jax.random.key(0)),
            loss_scale=jax.eval_shape(self._fresh_scale),
            origin=self._origin,
        )
        abstract: TrainState = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self.shardings,
        )
        return abstract

    def save(self, path: str | os.PathLike[str], state: TrainState) -> None:
        """Write a checkpoint; it appears whole or not at all.

        Args:
            path: a directory that does not exist yet.
            state: is kept.
        """
        from whalejax.checkpoint import save

        _check_alive(state)
        save(path, state, self.plan)

    def restore(self, path: str | os.PathLike[str]) -> TrainState:
        """Read a checkpoint into this plan's layout, whatever plan wrote it.

        Args:
            path: what ``save`` wrote.

        Raises:
            WhaleError: no checkpoint is there, or it is another model's.
        """
        from whalejax.checkpoint import restore

        state: TrainState = restore(path, self.abstract_state(), self.plan)
        return state

    # The program.

    def _advance(
        self, state: TrainState, batch: list[Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        program = self._program
        params = jax.tree.leaves(state.params)
        rng = state.rng if self.adapter.takes_rng else None
        scaling = state.loss_scale
        scale = None if scaling is None else scaling.scale
        sums, rest = gradients_of(
            program, params, state.rest, batch, rng, state.step, scale
        )
        gradients = [
            (g / sums.weight.astype(g.dtype)).astype(p.dtype)
            for g, p in zip(map(wide, sums.gradients), params, strict=True)
        ]
        loss = sums.total / sums.weight
        finite = None if scaling is None else all_finite(gradients)
        fresh, opt_state = update(
            program, params, state.opt_state, gradients, loss, finite
        )
        metrics = self._metrics(sums.total, sums.weight, sums.metrics)
        if scaling is not None and finite is not None:
            rest = jax.tree.map(functools.partial(jnp.where, finite), rest, state.rest)
            scaling = scaling.after(finite)
            metrics["loss_scale"] = scaling.scale
            metrics["skipped_steps"] = scaling.skipped_steps
        new = TrainState(
            params=_structure(state.params).unflatten(fresh),
            rest=rest,
            opt_state=opt_state,
            step=state.step + 1,
            rng=state.rng,
            loss_scale=scaling,
            origin=self._origin,
        )
        return new, metrics

    def _evaluate(self, state: TrainState, batch: list[Any]) -> dict[str, Any]:
        program = self._program
        rng = state.rng if self.adapter.takes_rng else None
        params = jax.tree.leaves(state.params)
        sums = losses_of(program, params, state.rest, batch, rng, state.step)
        return self._metrics(sums.total, sums.weight, sums.metrics)

    def _metrics(self, total: Any, weight: Any, sums: Any) -> dict[str, Any]:
        weighted = self._program.captured.graph.weighted
        count = weight if weighted else self.plan.num_micro_batches

        def mean(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            return x / jnp.asarray(count, x.dtype)

        return {**jax.tree.map(mean, sums), "loss": total / weight}


def _check_alive(state: TrainState) -> None:
    """Raise for a state whose buffers a step has taken; JAX itself may crash."""
    number = state.step
    if _compat.is_concrete(number) and number.is_deleted():
        raise PlanError(
            "this state was consumed by a step, which reuses its memory. Go on with "
            "the state that the step returned: state, metrics = step(state, batch)"
        )


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _strongly_typed(leaf: Any) -> Any:
    """An array of the very type that a step returns, or the second would recompile."""
    leaf = jnp.asarray(leaf)
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)


def _typed_key(rng: Any, *, for_loss: bool) -> Any:
    """A key array; raw uint32 keys, as ``jax.random.PRNGKey`` makes, are wrapped.

    Args:
        rng: what the user gave.
        for_loss: the loss takes it; its algorithm must be the traced one.
    """
    if not hasattr(rng, "dtype"):
        raise WhaleError(
            f"rng is {rng!r:.60}; expected a random key. Give jax.random.key(seed)"
        )
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        traced = jax.eval_shape(lambda: jax.random.key(0)).dtype
        if for_loss and rng.dtype != traced:
            raise WhaleError(
                f"rng is a {rng.dtype}; the loss was traced with a {traced}. Give "
                "jax.random.key(seed), or set jax_default_prng_impl before planning"
            )
        return rng
    if rng.dtype == jnp.uint32 and rng.shape == (2,):
        return jax.random.wrap_key_data(rng)
    raise WhaleError(
        f"rng has dtype {rng.dtype} and shape {tuple(rng.shape)}; expected a random "
        "key. Give jax.random.key(seed)"
    )


def _host_copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf  # held by several processes: copied from device to device
    if jnp.issubdtype(aval_of(leaf).dtype, jax.dtypes.prng_key):
        data: Any = np.array(jax.random.key_data(leaf), copy=True)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return np.array(leaf, copy=True)


def compile(
    plan: Plan,
    loss_fn: Callable[..., Any],
    model: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    batch: Any = None,
    trainable: Any = None,
    axis_names: Mapping[str, str] | None = None,
    batch_axes: Any = 0,
    devices: Any = None,
) -> TrainStep:
    """Turn a plan into a step that runs.

    Args:
        plan: from ``wh.plan`` or ``wh.Plan.load``.
        loss_fn: the loss the plan was made for.
        model: the same model, abstract or real.
        optimizer: an optax transformation; plain evaluation needs none.
        batch: the global batch, abstract or real, where it has containers other than
            dictionaries, lists and tuples; otherwise the plan knows it.
        trainable, axis_names, batch_axes: as given to ``wh.plan``.
        devices: the devices to run on, in node order; all of them if left out.

    Returns:
        The step. Nothing is compiled before it is called.

    Raises:
        PlanError: the plan is for another model, batch or machine, or cannot run yet;
            found before anything compiles.
    """
    from whalejax.batches import batch_of

    if not plan.runnable:
        raise PlanError(
            "this plan is an estimate (runnable=False) and cannot be run. Plan again "
            "without runnable=False"
        )
    mesh_of(plan, devices)  # before anything takes time
    return step_of(
        plan,
        adapt(model, loss_fn, trainable=trainable, axis_names=axis_names),
        batch_of(plan) if batch is None else batch,
        optimizer=optimizer,
        batch_axes=batch_axes,
        devices=devices,
    )


def step_of(
    plan: Plan,
    adapter: Adapter,
    example: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    batch_axes: Any,
    devices: Any,
) -> TrainStep:
    """``compile`` for a model that was adapted.

    Args:
        plan: a runnable one.
        adapter: the model as it is, at no other precision.
        example: the global batch, abstract or real.
        optimizer, batch_axes, devices: as for ``compile``.
    """
    mesh = mesh_of(plan, devices)
    _check_host_memory(plan, mesh)
    adapter = at_precision(adapter.without_values(), plan.precision)
    captured = capture(
        adapter,
        example,
        num_micro_batches=plan.num_micro_batches,
        batch_axes=batch_axes,
    )
    check_same_model(plan, captured, example)
    return TrainStep(
        plan,
        adapter,
        captured.as_planned(plan),
        optimizer,
        mesh,
        jax.tree.structure(example),
        captured.batch_axes,
    )


def _check_host_memory(plan: Plan, mesh: Mesh) -> None:
    """Refuse a plan that keeps something where these devices reach nothing."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if plan.offload and HOST_MEMORY not in kinds:
        saved = plan.memory.host_bytes
        raise PlanError(
            f"the plan keeps {' and '.join(plan.offload)} in host memory "
            f"({gigabytes(saved)} of each device), and a {device.device_kind} reaches "
            f"none here: it has {', '.join(kinds) or 'no memory that JAX knows of'} "
            "(so have GPUs that are compiled for and not there). Plan with offload=()"
        )


def _check_compiler_options(options: Any, whole: NamedSharding, platform: str) -> None:
    """Compile nothing under the options, so that a wrong one is said as such."""
    if options is None:
        return
    nothing = jax.jit(
        lambda: jnp.zeros(()), out_shardings=whole, compiler_options=options
    )
    try:
        nothing.lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise PlanError(
            f"compiler_options: the compiler of this {platform} does not take "
            f"{', '.join(f'{k}={v}' for k, v in options.items())} ({said}). Correct "
            "the name or value that it names, or plan without it"
        ) from error
