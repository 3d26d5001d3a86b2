"""The compiled step: ``wh.compile``, and its state.

``TrainStep`` is a thin layer over compiled programs. It checks a plan against the model
before anything compiles, creates every array in its layout, and returns the state in
the user's types.

The module is long because ``TrainStep`` has all public methods of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import numpy as np
import optax

from whalejax import _compat
from whalejax.adapters.base import Adapter, adapt, made_model
from whalejax.capture import Captured, capture
from whalejax.capture.batch import aval_of
from whalejax.capture.loss_options import as_planned
from whalejax.capture.precision import at_precision
from whalejax.capture.split_checks import check_split
from whalejax.lowering.global_arrays import is_here, stages_mesh
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.optimizer_schedules import with_schedule
from whalejax.lowering.runner import OneProgram, Runner, abstract_state
from whalejax.lowering.train_state import Origin, following, host_copy, typed_key
from whalejax.lowering.train_state import TrainState as TrainState
from whalejax.lowering.uneven.replica_timing import AdaptiveSharesRunner
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.plan_compatibility import (
    check_fixed_devices,
    check_host_memory,
    check_planned,
    check_planned_state,
    check_same_model,
    check_same_shapes,
    devices_of,
)
from whalejax.runtime.ragged_batch import (
    check_mean,
    passes,
    real_samples,
    repeated,
    together,
)
from whalejax.runtime.runner_choice import (
    evaluator_of,
    layout_of,
    rehearsal_of,
    runner_of,
)
from whalejax.state.adopt_state import OwnStates, adopted, to_lower, to_save
from whalejax.state.resume import depends_on_parts, restore_or_init
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import (
    check_order,
    is_module,
    refuse_bad_optimizer,
)
from whalejax.user_code.losses import Job as Job


if TYPE_CHECKING:
    import os

    from whalejax.lowering.pipeline_mpmd.compile_only import CompiledStages
    from whalejax.runtime.profiling.step_profile import StepProfile
    from whalejax.sections.section_run import SectionRun


_LOOPS = (
    "Write state, metrics = step(state, batch), or wh.loop.train(step, state, batches, "
    "steps=…)"
)
"""Remedy for a call of the missing ``TrainStep.train``."""


@names_arguments(
    "wh.TrainStep",
    instance="step",
    instead="A TrainStep is made by wh.compile(plan, loss_fn, model, optimizer=…).",
    habits=dict.fromkeys(("train", "fit"), _LOOPS),
)
class TrainStep:
    """A compiled plan, which is called with a state and a global batch.

    Attributes:
        plan: Plan of the step.
        mesh: Mesh of the devices.
        adapter: Adapter that divides the model into parameters and other state.
        shardings: ``NamedSharding`` of each array of a state, in a state's structure.
        batch_axes: Batch dimension of each flat leaf of a batch, or None.
    """

    def __init__(
        self,
        plan: Plan,
        adapter: Adapter,
        captured: Captured,
        optimizer: optax.GradientTransformation | None,
        devices: Sequence[Any],
        batch: Any,
        batch_axes: tuple[int | None, ...],
        traced: Callable[[Adapter], Captured],
    ) -> None:
        """Traces the step for its shapes; compiles nothing.

        Args:
            plan, adapter, captured, optimizer, devices, batch_axes: Plan, model, loss,
                optimizer, devices and batch dimensions of the step.
            batch: Structure of a batch.
            traced: Function that traces the loss for an adapter in another mode.
        """
        if not (isinstance(plan, Plan) and isinstance(adapter, Adapter)):
            raise WhaleError(
                "a TrainStep is made by wh.compile(plan, loss_fn, model, optimizer=…), "
                f"not by its class, which was given {short_repr(plan)} as plan"
            )
        self.plan = plan
        self.adapter = adapter
        mesh = stages_mesh(plan, devices) if plan.stage_plans else None
        self._origin = Origin(adapter, mesh)
        self._own = OwnStates(self._origin)
        self.batch_axes = batch_axes
        self._trains = optimizer is not None
        extended = optax.with_extra_args_support(
            optax.identity() if optimizer is None else optimizer
        )
        self._made_with = extended, devices, batch_axes, self._origin
        self._traced = traced
        self._runner: Runner = runner_of(plan)(plan, captured, *self._made_with)
        self.mesh = self._runner.mesh
        self.shardings = self._runner.shardings
        self._layout = layout_of(self._runner, plan, batch)

    @functools.cached_property
    def _evaluator(self) -> Runner:
        adapter = self.adapter.evaluating()
        if adapter is None:
            return self._runner
        plan, captured = self.plan, self._traced(adapter)
        check_split(captured, plan)
        given = captured, *self._made_with
        try:
            return evaluator_of(plan, self._runner, *given)
        except PlanError as error:
            raise PlanError(
                "the model in evaluation mode cannot be run by this plan, which was "
                f"made for the model as it trains ({error}). Evaluate with "
                "training=True, or with a plan of its own for the model after "
                "model.eval(), without an optimizer"
            ) from error

    # Initialisation.

    @without_mesh
    def init(self, make_model: Callable[..., Any], *, rng: Any) -> TrainState:
        """Returns an initial state, with every array created in its layout.

        Args:
            make_model: Function of a random key, or of nothing, that builds the model.
                An NNX class whose constructor takes ``rngs`` gets ``nnx.Rngs(key)``.
            rng: Random key; the run's keys are derived from it too.

        Raises:
            WhaleError: The function builds another model than the plan's.
        """
        if not callable(make_model) or is_module(make_model):
            raise WhaleError(
                f"make_model is {short_repr(make_model)}; expected a function of a "
                "random "
                "key, or of nothing, that builds the model. Of a model that is there: "
                "init_from(model)"
            )

        def build(key: Any) -> tuple[Any, Any, Any]:
            with _compat.short_sharding_errors():
                model = made_model(make_model, key)
            params, rest = self.adapter.take_apart(model)
            return params, rest, jax.random.fold_in(key, 0x5EED)

        return self._with_samples(self._runner.init_state(build, self._key(rng)), 0)

    @without_mesh
    def init_from(self, model: Any, *, rng: Any = None) -> TrainState:
        """Returns a state with the values of a model, which is copied.

        Args:
            model: Model with real arrays.
            rng: Random key for losses that take one; None uses key 0.

        Raises:
            WhaleError: The model is a class, or is abstract.
        """
        if inspect.isclass(model):
            raise WhaleError(
                f"init_from was given the class {model.__name__}; expected a model "
                "with real arrays. Of a function or class that makes one: "
                "init(make_model, rng=jax.random.key(seed))"
            )
        key = jax.random.key(0) if rng is None else self._key(rng)
        params, rest = self.adapter.take_apart(model)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            raise WhaleError(
                "init_from was given an abstract model, which has shapes and no "
                "values. Use init(make_model, rng=jax.random.key(seed))"
            )
        # Copy the user's arrays through the host, from any device, so that a donated
        # buffer is never the user's.
        values = jax.tree.map(host_copy, (params, rest))
        return self._with_samples(self._born_from(values, key), 0)

    def _born_from(self, values: tuple[Any, Any], key: Any) -> TrainState:
        return self._runner.init_state(lambda tree, key: (*tree, key), values, key)

    def _with_samples(self, state: TrainState, samples: int | None) -> TrainState:
        return dataclasses.replace(state, samples=samples)

    @property
    def _batch_size(self) -> int:
        sizes = zip(self.plan.batch, self.batch_axes, strict=True)
        return next((x.shape[axis] for x, axis in sizes if axis is not None), 1)

    def _key(self, rng: Any) -> Any:
        return typed_key(rng, for_loss=self.adapter.takes_rng)

    def __repr__(self) -> str:
        kind = "trains" if self._trains else "evaluates"
        return f"<TrainStep that {kind}: {self.plan!r}>"

    # Running.

    @names_arguments(
        "step",
        instead="Write state, metrics = step(state, batch). A random key is in the "
        "state: init and init_from take it as rng=.",
    )
    @without_mesh
    def __call__(
        self, state: TrainState, batch: Any = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step of the optimizer.

        Args:
            state: State after the previous step; its buffers are donated.
            batch: Global batch. With several processes, this process's part of it, or
                global ``jax.Array`` leaves.

        Returns:
            The new state, and metrics: ``loss`` and the values that the loss reports.

        Raises:
            PlanError: The batch has another shape than the plan's, or the state has
                another layout (use ``adopt``).
        """
        if batch is None:
            raise PlanError(
                "the step was called without a batch; it takes the state and the "
                "global batch: state, metrics = step(state, batch)"
            )
        if not self._trains:
            raise PlanError(
                "this step was compiled without an optimizer and can only evaluate. "
                "Pass optimizer= to wh.plan and wh.compile to train"
            )
        own = self._own.checked(state, self.abstract_state, trains=True)
        new, metrics = self._runner.advance(own, self._layout.place(batch))
        seen = own.samples
        taken = None if seen is None else seen + self._batch_size
        return following(self._with_samples(new, taken), state), metrics

    @without_mesh
    def eval(
        self, state: TrainState, batch: Any, *, training: bool = False
    ) -> dict[str, Any]:
        """Returns the loss and metrics of a batch, without gradients; changes nothing.

        NNX modules are evaluated as after ``model.eval()``: without dropout, and with
        the statistics from training. A Linen module gets its mode from the loss, so
        compile a separate loss for evaluation, which accepts the same states.

        Args:
            state: State to evaluate; it is not donated. It may be of another step with
                the same layout, with any optimizer or none.
            batch: Global batch, in the same form as for a step. It may have fewer
                samples, as at the end of an epoch, if there is one process and the loss
                is a mean over samples.
            training: Whether to run the model in training mode.

        Raises:
            PlanError: The batch or the layout of the state differs from the plan's. Or
                the model in training mode combines samples that the plan splits.
        """
        problems = Arguments("TrainStep.eval")
        problems.switch("training", training)
        problems.raise_if_any()
        own = self._own.checked(state, self.abstract_state, trains=False)
        runner = self._runner if training else self._evaluator
        if training and not self._trains:
            check_split(runner.program.captured, self.plan)
        if isinstance(runner, AdaptiveSharesRunner) and runner is not self._runner:
            runner.shares = self.shares
        leaves = self._layout.flat(batch)
        alone = jax.process_count() == 1
        sizes = real_samples(leaves, self.plan, self.batch_axes) if alone else None
        if sizes is None:
            return runner.evaluate(own, self._layout.place(batch))[0]
        return self._ragged(runner, own, leaves, *sizes)

    def _ragged(
        self,
        runner: Runner,
        state: TrainState,
        leaves: Sequence[Any],
        samples: int,
        whole: int,
    ) -> dict[str, Any]:
        captured = runner.program.captured
        check_mean(captured, samples, whole)
        parts = []
        for first, count in passes(samples, whole):
            several = repeated(leaves, self.batch_axes, first, count, whole)
            tree: Any = self._layout.structure
            batch = self._layout.place(tree.unflatten(several))
            parts.append((count, runner.evaluate(state, batch)))
        return together(parts, captured, whole)

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of micro-batches of each replica in the next step, in node order.

        It is empty if every device has a part of each micro-batch. It can be set, to
        the same value in all processes. If ``rebalances``, it follows measured times.
        """
        runner = self._runner
        return runner.shares if isinstance(runner, AdaptiveSharesRunner) else ()

    @shares.setter
    def shares(self, shares: Sequence[int]) -> None:
        self._adaptive_runner.shares = shares

    @property
    def parts_matter(self) -> bool:
        """Whether results depend on the number of micro-batches.

        They do if the loss of a micro-batch is not a mean over samples, or is random.
        """
        return depends_on_parts(self.plan, self.adapter)

    def batch_rows(self) -> np.ndarray:
        """Returns this process's samples of the next global batch, in order.

        Returns:
            Indices in the global batch. With uneven shares, they are the samples of
            this process's micro-batches in order, and change with the shares.
        """
        runner, plan = self._runner, self.plan
        axes = runner.program.batch_axes
        sizes = [
            (number, axis, leaf.shape[axis])
            for number, (leaf, axis) in enumerate(zip(plan.batch, axes, strict=True))
            if axis is not None
        ]
        if not sizes:
            return np.arange(0)
        rows = np.arange(sizes[0][2])
        if isinstance(runner, AdaptiveSharesRunner):
            cut, size = MicroBatchRows.of(plan), len(rows)
            return np.concatenate(
                [cut.rows(size, m) for m in runner.numbers()] or [rows[:0]]
            )
        for number, axis, _ in sizes:
            sharding = runner.batch_shardings[number]
            if is_here(sharding):
                indices = sharding.addressable_devices_indices_map(
                    plan.batch[number].shape
                )
                mine = [rows[index[axis]] for index in indices.values() if index]
                return np.unique(np.concatenate(mine))
        return rows

    def batch_regions(self) -> dict[str, tuple[tuple[slice, ...], ...]]:
        """Returns the part of a sample on this process's devices.

        Returns:
            For each batch leaf, by its path, the sorted slices of each dimension of a
            sample, without the batch dimension. A dimension has one slice if all
            devices have the same part.
        """
        batch_regions = {}
        shardings = self._runner.batch_shardings
        for leaf, axis, sharding in zip(
            self.plan.batch, self.batch_axes, shardings, strict=True
        ):
            pieces: list[set[tuple[int, int]]] = [set() for _ in leaf.shape]
            indices = sharding.addressable_devices_indices_map(leaf.shape)
            for index in indices.values():
                for dim, cut in enumerate(index or ()):
                    start, stop, _ = cut.indices(leaf.shape[dim])
                    pieces[dim].add((start, stop))
            batch_regions[leaf.path] = tuple(
                tuple(slice(*piece) for piece in sorted(each))
                for dim, each in enumerate(pieces)
                if dim != axis
            )
        return batch_regions

    @property
    def seconds(self) -> tuple[float, ...]:
        """The measured seconds of a micro-batch on each replica; 0 if unknown."""
        runner = self._runner
        return runner.seconds if isinstance(runner, AdaptiveSharesRunner) else ()

    @property
    def rebalances(self) -> bool:
        """Whether shares follow the measured times of replicas. It can be set."""
        runner = self._runner
        return isinstance(runner, AdaptiveSharesRunner) and runner.rebalances

    @rebalances.setter
    def rebalances(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise WhaleError(
                f"rebalances is {short_repr(wanted)}; expected True or False"
            )
        self._adaptive_runner.rebalances = wanted

    @property
    def _adaptive_runner(self) -> AdaptiveSharesRunner:
        if not isinstance(self._runner, AdaptiveSharesRunner):
            raise PlanError(
                "the replicas of this plan have equal parts of every micro-batch. Plan "
                "with shares=[...], micro-batches of each replica, to change them"
            )
        return self._runner

    @without_mesh
    def lower(self, state: TrainState | None = None) -> Any:
        """Returns the lowered step (``jax.stages.Lowered``), to inspect the program.

        Args:
            state: State, or None for an abstract one.
        """
        if state is None:
            state = self.abstract_state()
        else:
            state = to_lower(state, self._own, self.abstract_state)
        return self._runner.lower(state, self._layout.abstract())

    @without_mesh
    def profile(
        self, state: TrainState, batch: Any, *, steps: int = 5
    ) -> tuple[TrainState, StepProfile]:
        """Traces some steps, and compares measured with predicted times.

        Args:
            state: State to train; its buffers are donated.
            batch: Global batch of every step.
            steps: Number of traced steps, after two untraced ones.

        Returns:
            The state after the last step, and the profile: ``print`` shows it, and
            ``save`` writes a file for Perfetto.

        Raises:
            PlanError: The errors of a step.
            WhaleError: Another profiler is running, or the trace has no step.
        """
        from whalejax.runtime.profiling.step_profile import profiled

        problems = Arguments("step.profile")
        problems.whole("steps", steps, least=1, most=1000)
        problems.raise_if_any()
        one_program = not (
            self.plan.stage_plans or self.plan.pipelines or self.plan.shares
        )

        def program() -> str:
            return str(self.lower().compile().as_text()) if one_program else ""

        def run(state: TrainState) -> TrainState:
            following, _ = jax.block_until_ready(self(state, batch))
            return cast("TrainState", following)

        return profiled(self.plan, program, run, state, steps)

    @without_mesh
    def rehearse(self) -> CompiledStages:
        """Compiles the stage programs without running them.

        Raises:
            PlanError: The plan has one program (see ``lower``), or several pipelines.
        """
        if self.plan.pipelines:
            raise PlanError(
                "this plan runs pipelines side by side, and rehearse() compiles one. "
                "Plan one of them alone: mesh= with data 1, on its devices"
            )
        if not self.plan.stage_plans:
            raise PlanError(
                "this plan is one program, and rehearse() compiles stages that have "
                "their own. Take lower().compile()"
            )
        given = self.abstract_state(), self._layout.abstract()
        return rehearsal_of(self._runner, *given)

    @without_mesh
    def abstract_state(self) -> TrainState:
        """Returns the abstract state: shapes, dtypes and shardings."""
        shapes = abstract_state(self._runner.program, self._origin)
        abstract: TrainState = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self.shardings,
        )
        return abstract

    def save(self, path: str | os.PathLike[str], state: TrainState) -> None:
        """Writes a checkpoint atomically.

        Args:
            path: Directory that does not exist yet.
            state: State to write; it is not donated.

        Raises:
            WhaleError: The checkpoint cannot be written, or the state was donated. No
                files remain.
        """
        from whalejax.state.checkpoint import save

        problems = Arguments("TrainStep.save")
        problems.path("path", path, "the path of a folder that does not exist yet")
        problems.raise_if_any()
        whole = to_save(state, self.abstract_state(), trains=self._trains)
        save(path, whole, self.plan, self._batch_size)

    @without_mesh
    def adopt(self, state: TrainState) -> TrainState:
        """Copies another step's state to this step's layout, from device to device.

        It is not needed if the layout is the same, as after another compilation of the
        same plan. Arrays move between devices without files or host memory.

        Args:
            state: State of the other step; it is not donated. It must be of the same
                model and, if this step trains, have an optimizer state of the same
                structure.

        Raises:
            PlanError: The state was donated, is of another model or optimizer, or would
                have to move between processes.
        """
        return adopted(state, self.abstract_state())

    @without_mesh
    def restore_or_init(
        self,
        folder: str | os.PathLike[str],
        make_model: Callable[..., Any],
        *,
        rng: Any,
    ) -> TrainState:
        """Restores the newest undamaged checkpoint in a folder, or returns a new state.

        A script that begins with it and saves as ``folder/step_000100`` can be stopped
        and restarted at any time, even with another number of processes.

        Args:
            folder: Folder of checkpoints; it need not exist. Damaged checkpoints are
                renamed, with a warning.
            make_model, rng: Arguments of ``init``, unchanged.

        Raises:
            WhaleError: A checkpoint is of another model, or all are damaged.
        """
        name = "TrainStep.restore_or_init"
        return restore_or_init(self, name, folder, make_model, rng)  # type: ignore[no-any-return]

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        only: Literal["model"] | None = None,
        keep_schedule: bool | None = None,
    ) -> TrainState:
        """Reads a checkpoint of any plan into this plan's layout.

        The files' hashes are checked before anything is used.

        Args:
            path: Path of a checkpoint of ``save``.
            only: ``"model"`` reads the model's parameters and other state, the run's
                random key, and the numbers of steps and samples. The optimizer's state
                and the loss scale are initialised. Use it to continue with another
                optimizer or schedule, or to evaluate.
            keep_schedule: With ``only="model"``, whether schedules of the optimizer
                continue from the checkpoint's number of updates. If False, they start
                at 0 for any ``state.step``. None is False with a warning.

        Raises:
            WhaleError: No checkpoint exists, or it is damaged or of another model. Or
                ``keep_schedule`` is True and there is no schedule.
        """
        from whalejax.state.checkpoint import restore, restore_model

        problems = Arguments("TrainStep.restore")
        problems.path("path", path, "the path of a checkpoint")
        problems.choice("only", only, ("model",), none=True)
        problems.switch("keep_schedule", keep_schedule, none=True)
        if only is None and isinstance(keep_schedule, bool):
            problems.add(
                f'keep_schedule is {keep_schedule}, and without only="model" all of '
                "the optimizer's state is the checkpoint's. Leave it out"
            )
        problems.raise_if_any()
        given = path, self.abstract_state(), self.plan, self._batch_size
        if only is None:
            state: TrainState = restore(*given)
            return state
        on_host = not isinstance(self._runner, OneProgram)
        result = restore_model(*given, on_host=on_host)
        born = self._born_from((result.params, result.rest), result.rng)
        born = with_schedule(born, result.updates, keep_schedule)
        number = jax.device_put(np.int32(result.step), born.step.sharding)
        return self._with_samples(
            dataclasses.replace(born, step=number), result.samples
        )


@without_mesh
@names_arguments("wh.compile")
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
    out_of_range: str = "error",
    job: str | None = None,
    job_settings: Mapping[str, Any] | None = None,
    replace_every: int | None = None,
    section_run: SectionRun | None = None,
) -> TrainStep:
    """Compiles a plan into a step.

    Args:
        plan: Plan from ``wh.plan`` or ``wh.Plan.load``.
        loss_fn: Loss of the plan.
        model: Model of the plan, abstract or real.
        optimizer: Optax transformation; evaluation needs none.
        batch: Global batch, abstract or real. It is needed only if it has containers
            other than dictionaries, lists and tuples.
        trainable, axis_names, batch_axes: Arguments of ``wh.plan``, unchanged.
        devices: Devices in node order; None uses all.
        out_of_range: With tables, treatment of ids without a row: ``"error"`` checks
            every batch before it is used, ``"clip"`` takes the nearest row.
        job: With tables in separate processes, name of a job, as on the command line.
            These processes make its batches for ``SectionsStep.run``.
        job_settings: Options of that job.
        replace_every: With tables, number of steps after which they are placed again if
            their lookups show a gain; see ``wh.compile_tables``.
        section_run: With tables in separate processes, the hosts of these, and the
            state that is saved for a successor of this process.

    Returns:
        The ``TrainStep``; for a plan with tables a ``TableStep`` or ``SectionsStep``.
        Nothing is compiled before its first call.

    Raises:
        PlanError: The plan is for another model, batch or machine, or cannot be run.
            It is raised before anything compiles.
    """
    from whalejax.lowering.batch_record import batch_of

    _check_plan(plan, loss_fn, model)
    if plan.tables is not None:
        from whalejax.runtime.compile_tables import compile_plan

        _check_table_arguments(axis_names, batch_axes)
        options: dict[str, Any] = {"trainable": trainable, "devices": devices}
        step: Any = compile_plan(
            plan,
            *(loss_fn, model, batch, optimizer),
            out_of_range=out_of_range,
            job=job,
            job_settings=job_settings,
            replace_every=replace_every,
            section_run=section_run,
            **options,
        )
        return step  # type: ignore[no-any-return]
    given = (job, job_settings, replace_every, section_run)
    _refuse_table_options(out_of_range, *given)
    refuse_bad_optimizer(optimizer)
    check_order("wh.compile(plan, loss_fn, model)", loss_fn, model, batch)
    if batch is not None:
        check_planned(plan, batch, batch_axes)
    devices_of(plan, devices)  # check before slow work
    return step_of(
        plan,
        adapt(model, loss_fn, trainable=trainable, axis_names=axis_names),
        batch_of(plan) if batch is None else batch,
        optimizer=optimizer,
        batch_axes=batch_axes,
        devices=devices,
    )


def _check_plan(plan: Any, loss_fn: Any, model: Any) -> None:
    if isinstance(loss_fn, Plan) or isinstance(model, Plan):
        raise PlanError(
            "the plan stands where the loss or the model is expected. The order is "
            "wh.compile(plan, loss_fn, model)"
        )
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan is {short_repr(plan)}; expected the result of wh.plan or "
            "wh.Plan.load"
        )
    if not plan.runnable:
        raise PlanError(
            "this plan is an estimate (runnable=False) and cannot be run. Plan again "
            "without runnable=False"
        )


def _check_table_arguments(axis_names: Any, batch_axes: Any) -> None:
    problems = Arguments("wh.compile")
    if axis_names is not None:
        problems.add("axis_names was given with a plan with tables. Leave it out")
    if not is_whole(batch_axes, 0, 0):
        problems.add(
            f"batch_axes is {short_repr(batch_axes)} with a plan with tables, whose "
            "batches "
            "have samples along dimension 0. Leave it out"
        )
    problems.raise_if_any()


def _refuse_table_options(
    out_of_range: Any, job: Any, job_settings: Any, replace_every: Any, run: Any
) -> None:
    problems = Arguments("wh.compile")
    given = {
        "job": job,
        "job_settings": job_settings,
        "replace_every": replace_every,
        "section_run": run,
    }
    names = [name for name, value in given.items() if value is not None]
    if not (isinstance(out_of_range, str) and out_of_range == "error"):
        names.append("out_of_range")
    for name in names:
        problems.add(f"{name} is of plans with tables, and this has none. Leave it out")
    problems.raise_if_any()


@without_mesh
def step_of(
    plan: Plan,
    adapter: Adapter,
    example: Any,
    *,
    optimizer: optax.GradientTransformation | None,
    batch_axes: Any,
    devices: Any,
) -> TrainStep:
    """Implements ``compile`` for an adapted model.

    Args:
        plan: Runnable plan.
        adapter: Model in its original precision.
        example: Global batch, abstract or real.
        optimizer, batch_axes, devices: Arguments of ``compile``, unchanged.
    """
    chosen = devices_of(plan, devices)
    check_host_memory(plan, chosen[0])
    adapter = at_precision(adapter.without_values(), plan.precision)
    example = jax.tree.map(aval_of, example)

    def traced(adapter: Adapter, ranks: int = 1) -> Captured:
        return capture(
            adapter,
            example,
            num_micro_batches=plan.num_micro_batches * ranks,
            batch_axes=batch_axes,
        )

    try:
        captured = traced(adapter)
    except Exception:
        check_same_shapes(plan, adapter)  # may explain the error
        raise
    check_same_model(plan, captured, example, trains=optimizer is not None)
    evaluating = adapter.evaluating() if optimizer is None else None
    if evaluating is None:
        check_split(captured, plan)
    check_planned_state(plan, adapter, optimizer)
    check_fixed_devices(captured, plan, chosen)
    # With Adasum, each rank runs the loss on its own samples.
    apart = 1 if plan.combine == "mean" else plan.axis_sizes["data"]
    if apart > 1:
        captured = traced(adapter, apart)
    return TrainStep(
        plan,
        adapter,
        as_planned(captured, plan),
        optimizer,
        chosen,
        jax.tree.structure(example),
        captured.batch_axes,
        lambda other: as_planned(traced(other, apart), plan),
    )
