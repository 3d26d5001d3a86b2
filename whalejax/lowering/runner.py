"""``Runner``, the interface of executors, and ``OneProgram``, which runs one program.

A runner creates every array in its layout, compiles the step and runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.capture import Captured
from whalejax.capture.batch import aval_of
from whalejax.lowering.dispatch import gradients_of, losses_of
from whalejax.lowering.loss_scale import LossScale, all_finite
from whalejax.lowering.metrics import reported, wide
from whalejax.lowering.multihost.plan_agreement import Agreement
from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.optimizer_state import kin_of, owners_of
from whalejax.lowering.spmd import per_rank
from whalejax.lowering.spmd.constraints import constraints_of
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.lowering.spmd.parameter_offload import out_of_host
from whalejax.lowering.spmd.spmd_executor import Program, Sums, update
from whalejax.lowering.step_runner import Evaluation, Metrics, StepRunner
from whalejax.lowering.train_state import Origin, TrainState, bare, strongly_typed
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.spmd_search import analysed_for


class Runner(Protocol):
    """Executor of a plan, as the train step uses it."""

    @property
    def program(self) -> Program:
        """The loss, optimizer and plan."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices."""
        ...

    @property
    def shardings(self) -> TrainState:
        """The ``NamedSharding`` of each array, in the structure of a state."""
        ...

    @property
    def batch_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of each flat leaf of a global batch."""
        ...

    def init_state(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        """Returns an initial state.

        Args:
            build: Function that returns parameters, non-trainable state and the run's
                key.
            arguments: Arguments of ``build``.
        """
        ...

    def advance(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Runs one step, and returns the next state and the metrics."""
        ...

    def evaluate(self, state: TrainState, batch: Any) -> Evaluation:
        """Returns the loss and metrics of a batch, and their weight.

        Args:
            state: State without its exported model, from ``train_state.bare``.
            batch: Global batch that its layout placed.
        """
        ...

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Returns the step's lowered program."""
        ...


class OneProgram(StepRunner):
    """Runs a plan as one program; its methods are those of ``Runner``."""

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        optimizer: optax.GradientTransformationExtraArgs,
        devices: Sequence[Any],
        batch_axes: tuple[int | None, ...],
        origin: Origin,
    ) -> None:
        self.mesh: Mesh = plan.mesh(devices)
        self._agreement = Agreement(self.mesh, one_kind=True)
        self.watch = Watch(alone=not self.mesh.is_multi_process)
        own = plan if plan.combine == "mean" else per_rank.plan_of_rank(plan)
        analysed = analysed_for(own, captured.graph)
        self.program = Program(
            plan=plan,
            captured=captured,
            adapter=captured.adapter,
            constraints=constraints_of(own, analysed, captured),
            mesh=self.mesh,
            optimizer=optimizer,
            batch_axes=batch_axes,
        )
        self._origin = origin
        self.batch_shardings = tuple(
            named_sharding(x.spec, self.mesh) for x in plan.batch
        )
        self.shardings = self._shardings()
        whole = NamedSharding(self.mesh, PartitionSpec())
        batch = list(self.batch_shardings)
        options: Any = dict(plan.compiler_options) or None
        check_compiler_options(options, whole, devices[0].platform)
        self._step = jax.jit(
            self._advance,
            in_shardings=(self.shardings, batch),
            out_shardings=(self.shardings, whole),
            donate_argnums=0,
            compiler_options=options,
        )
        self._loss = jax.jit(
            self.traced_evaluation,
            in_shardings=(bare(self.shardings), batch),
            out_shardings=whole,
            compiler_options=options,
        )

    def init_state(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        whole = fresh_state(self.program, self._origin, build)
        born: TrainState = jax.jit(whole, out_shardings=self.shardings)(*arguments)
        return born

    def _agree(self) -> None:
        self._agreement.check(self.program)

    def _issue_step(
        self, state: TrainState, batch: Sequence[Any]
    ) -> tuple[TrainState, Metrics]:
        issue_step: tuple[TrainState, Metrics] = self._step(state, list(batch))
        return issue_step

    def _issue_evaluation(self, state: TrainState, batch: Sequence[Any]) -> Evaluation:
        issue_evaluation: Evaluation = self._loss(state, list(batch))
        return issue_evaluation

    def _results(self, new: TrainState, metrics: Metrics) -> Sequence[Any]:
        return jax.tree.leaves(metrics)  # The next step donates the new state.

    def lower(self, state: TrainState, batch: Sequence[Any]) -> Any:
        if not self.program.adapter.batch_gradients:
            return self._step.lower(state, list(batch))
        given = self.shardings, list(self.batch_shardings)
        # The compiler would remove gradients by the batch, as nothing reads them.
        step = jax.jit(
            self.traced_step,
            in_shardings=given,
            out_shardings=(self.shardings, None, None),
            donate_argnums=0,
        )
        return step.lower(state, list(batch))

    def _shardings(self) -> TrainState:
        program, leaves, mesh = self.program, self.program.plan.trained, self.mesh
        held = program.followers()
        moved = {f.fresh for f in held if any(i in f.hosted for i, _ in f.state)}
        whole = NamedSharding(mesh, PartitionSpec())
        return laid_out(
            program,
            self._origin,
            params=[named_sharding(x.param_spec, mesh, host=x.hosted) for x in leaves],
            followers=[
                named_sharding(leaf.optimizer_spec, mesh, host=place in moved)
                for place, leaf in enumerate(leaves)
            ],
            rest=rest_layouts(program, mesh),
            others=whole,
        )

    # The program.

    def _advance(
        self, state: TrainState, batch: list[Any]
    ) -> tuple[TrainState, Metrics]:
        new, metrics, _ = self.traced_step(state, batch)
        return new, metrics

    def traced_step(
        self, state: TrainState, batch: list[Any]
    ) -> tuple[TrainState, Metrics, list[Any]]:
        """Runs one step inside a larger program.

        Args:
            state: State after the previous step.
            batch: Flat leaves of the global batch, in their planned layout.

        Returns:
            The next state, the metrics, and gradients of the mean loss by the batch
            leaves that the adapter's ``batch_gradients`` names.
        """
        program = self.program
        scaling = state.loss_scale
        sums, rest = gradients_of(
            program,
            jax.tree.leaves(state.params),
            state.rest,
            batch,
            state.rng if program.adapter.takes_rng else None,
            state.step,
            None if scaling is None else scaling.scale,
        )
        delta = program.plan.combine == per_rank.DELTA
        end = per_rank.update if delta else update
        new, metrics = finished(program, state, sums, rest, end=end)
        return new, metrics, batch_means(program, sums, batch)

    def traced_evaluation(self, state: TrainState, batch: list[Any]) -> Evaluation:
        """Evaluates a batch inside a larger program.

        Args:
            state: State without its exported model, from ``train_state.bare``.
            batch: Flat leaves of the global batch, in their planned layout.
        """
        program = self.program
        rng = state.rng if program.adapter.takes_rng else None
        params = jax.tree.leaves(state.params)
        sums = losses_of(program, params, state.rest, batch, rng, state.step)
        return evaluation_of(program, sums)


def rest_layouts(program: Program, mesh: Mesh) -> Callable[[int], NamedSharding]:
    """Returns the shardings of non-trainable leaves, by their number.

    Weights are sharded as planned, other leaves are replicated.

    Args:
        program: Loss, optimizer and plan to run.
        mesh: Mesh of the devices.
    """
    planned = {leaf.path: leaf.param_spec for leaf in program.plan.leaves}
    paths = program.adapter.rest_paths
    return lambda number: named_sharding(planned.get(paths[number], ()), mesh)


def fresh_state(
    program: Program, origin: Origin, build: Callable[..., Any]
) -> Callable[..., TrainState]:
    """Returns a function that makes the state of a new run.

    Args:
        program: Loss, optimizer and plan to run.
        origin: Identity of the step.
        build: Function that returns parameters, non-trainable state and the run's key.
    """

    def full_state(*args: Any) -> TrainState:
        params, rest, key = build(*args)
        params, rest = jax.tree.map(strongly_typed, (params, rest))
        return TrainState(
            params=params,
            rest=rest,
            opt_state=jax.tree.map(strongly_typed, program.optimizer.init(params)),
            step=jnp.zeros((), jnp.int32),
            rng=key,
            loss_scale=_fresh_scale(program),
            origin=origin,
        )

    return full_state


def _fresh_scale(program: Program) -> LossScale | None:
    return LossScale.initial() if program.plan.scales_loss else None


def abstract_state(program: Program, origin: Origin) -> TrainState:
    """Returns the abstract training state of a program.

    Args:
        program: Loss, optimizer and plan to run.
        origin: Identity of the step.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        program.adapter.params,
    )
    return TrainState(
        params=params,
        rest=jax.tree.map(aval_of, program.adapter.rest),
        opt_state=jax.eval_shape(program.optimizer.init, params),
        step=jax.ShapeDtypeStruct((), jnp.int32),
        rng=jax.eval_shape(lambda: jax.random.key(0)),
        loss_scale=jax.eval_shape(functools.partial(_fresh_scale, program)),
        origin=origin,
    )


def laid_out(
    program: Program,
    origin: Origin,
    *,
    params: Sequence[Any],
    followers: Sequence[Any],
    rest: Callable[[int], Any],
    others: Any,
    kin: Sequence[Any] | None = None,
) -> TrainState:
    """Returns a training state with an item in place of every leaf.

    Args:
        program: Loss, optimizer and plan to run.
        origin: Identity of the step.
        params: Item for each parameter.
        followers: For each parameter, the item for optimizer state that follows it.
        rest: Function from the number of a non-trainable leaf to its item.
        others: Item for every other leaf.
        kin: For each parameter, the item for optimizer state that belongs to it but has
            another shape; default: ``others``.
    """
    shapes = abstract_state(program, origin)
    leaves = program.plan.trained
    owners = owners_of(shapes.opt_state, [(leaf.path, leaf.shape) for leaf in leaves])
    related = kin_of(shapes.opt_state, [leaf.path for leaf in leaves])

    def of_state(owner: int | None, related: int | None) -> Any:
        if owner is not None:
            return followers[owner]
        return others if kin is None or related is None else kin[related]

    kept_tree: Any = jax.tree.structure(shapes.rest)
    params_tree: Any = jax.tree.structure(shapes.params)
    state_tree: Any = jax.tree.structure(shapes.opt_state)
    return TrainState(
        params=params_tree.unflatten(list(params)),
        rest=kept_tree.unflatten([rest(i) for i in range(kept_tree.num_leaves)]),
        opt_state=state_tree.unflatten(map(of_state, owners, related)),
        step=others,
        rng=others,
        loss_scale=jax.tree.map(lambda _: others, shapes.loss_scale),
        origin=origin,
    )


def finished(
    program: Program,
    state: TrainState,
    sums: Sums,
    rest: Any,
    *,
    end: Callable[..., tuple[list[Any], Any]] = update,
) -> tuple[TrainState, Metrics]:
    """Returns the next state and the metrics after all micro-batches.

    Args:
        program: Loss, optimizer and plan to run.
        state: State before the step.
        sums: Sums over all micro-batches.
        rest: Non-trainable state after the last micro-batch.
        end: Function that runs the optimizer; default: ``spmd_executor.update``.
    """
    params = jax.tree.leaves(state.params)
    scaling = state.loss_scale
    gradients = [
        (g if sums.means else g / sums.weight.astype(g.dtype)).astype(p.dtype)
        for g, p in zip(map(wide, sums.gradients), params, strict=True)
    ]
    loss = sums.total / sums.weight
    every = [*gradients, *sums.batch_gradients]
    finite = None if scaling is None else all_finite(every)
    fresh, opt_state = end(program, params, state.opt_state, gradients, loss, finite)
    metrics = metrics_of(program, sums)
    here = [out_of_host(p) for p in params]
    rest = program.captured.steady.after(here, state.rest, rest)
    if scaling is not None and finite is not None:
        rest = _if_finite(program, finite, rest, state.rest)
        scaling = scaling.after(finite)
        metrics["loss_scale"] = scaling.scale
        metrics["skipped_steps"] = scaling.skipped_steps
    params_tree: Any = jax.tree.structure(state.params)
    new = TrainState(
        params=params_tree.unflatten(fresh),
        rest=rest,
        opt_state=opt_state,
        step=state.step + 1,
        rng=state.rng,
        loss_scale=scaling,
        origin=state.origin,
    )
    return new, metrics


def batch_means(program: Program, sums: Sums, batch: Sequence[Any]) -> list[Any]:
    """Returns gradients of the mean loss by leaves of the batch.

    Args:
        program: Loss, optimizer and plan to run. Its adapter's ``batch_gradients``
            names the leaves.
        sums: Sums over all micro-batches.
        batch: Flat leaves of the global batch, whose dtypes the gradients get.
    """
    pairs = zip(program.adapter.batch_gradients, sums.batch_gradients, strict=True)
    return [
        (wide(g) / sums.weight.astype(wide(g).dtype)).astype(batch[place].dtype)
        for place, g in pairs
    ]


def _if_finite(program: Program, finite: Any, after: Any, before: Any) -> Any:
    frozen, tree = program.captured.frozen, jax.tree.structure(after)
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    if_finite = [
        x if i in frozen else jnp.where(finite, x, y) for i, (x, y) in enumerate(pairs)
    ]
    return jax.tree.unflatten(tree, if_finite)


def metrics_of(program: Program, sums: Sums) -> Metrics:
    """Returns the loss and reported metrics of the global batch.

    Args:
        program: Loss, optimizer and plan to run.
        sums: Sums over all micro-batches.
    """
    weighted = program.captured.graph.weighted
    count = sums.weight if weighted else program.plan.num_micro_batches
    return {**reported(sums.metrics, count), "loss": sums.total / sums.weight}


def evaluation_of(program: Program, sums: Sums) -> Evaluation:
    """Returns the loss, the metrics and the weight of an evaluation.

    Args:
        program: Loss, optimizer and plan to run.
        sums: Sums over all micro-batches.
    """
    return metrics_of(program, sums), sums.weight


def check_compiler_options(options: Any, whole: NamedSharding, platform: str) -> None:
    """Compiles a trivial program with compiler options, to report wrong ones clearly.

    Raises:
        PlanError: The compiler does not accept an option.
    """
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
            f"compiler_options: the compiler of this {platform} does not accept "
            f"{', '.join(f'{k}={v}' for k, v in options.items())} ({said}). Correct "
            "the name or value, or plan without the option"
        ) from error
