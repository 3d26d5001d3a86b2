"""The compiled step of a model with tables: ``wh.compile_tables`` and its state.

Lookups, the dense part and updates are three sections of one ``jax.jit`` program, which
``whalejax.tables.programs`` defines. Ids are checked before a step runs, because
indexing an array accepts any id.

The module is long because ``TableStep`` has all public methods of a step.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.adapters.base import Adapter, made_model
from whalejax.adapters.leaves import is_key
from whalejax.capture.batch import aval_of
from whalejax.distributed.standard_streams import say
from whalejax.lowering.global_arrays import settle
from whalejax.lowering.runner import abstract_state
from whalejax.lowering.train_state import TrainState, bare, host_copy, typed_key
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, short_repr
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.replace import Replacement, place_again
from whalejax.runtime.dense_runner import dense_runner
from whalejax.runtime.plan_compatibility import devices_of
from whalejax.runtime.table_processes import TableProcesses, put, rows_here
from whalejax.state.resume import depends_on_parts, restore_or_init
from whalejax.state.table_checkpoint import (
    Sections,
    leaf_names,
    restore_sections,
    rows_by_process,
    save_sections,
)
from whalejax.tables.dense import UNUSED, by_path, lookup_forms
from whalejax.tables.device_use import predict_device_use
from whalejax.tables.layout import TableLayout, make_layout, without_requests
from whalejax.tables.lookup_counts import LookupCounts
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.programs import TablePrograms
from whalejax.tables.recognize import Lookup, TableProgram, check_divisible
from whalejax.tables.store import TableStore
from whalejax.tables.tables_plan import TablesPlan
from whalejax.tables.wide_ids import check_32_bits
from whalejax.user_code.ambient_mesh import without_mesh


_WORTH: Final = 0.05
"""Minimum gain of another placement, as a fraction of the most loaded rank's time."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("params", "rest", "opt_state", "tables", "step", "rng", "loss_scale"),
    ],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TablesState:
    """State of a step with tables, as sharded arrays.

    A step donates its state and returns the next one.

    Attributes:
        params: Trained leaves that are not tables, by path.
        rest: Leaves that are not trained, by path.
        opt_state: State of the dense optimizer.
        tables: Tables and the state of their rows: ``TableArrays``, or a reference if
            they are in other processes.
        step: Number of finished steps, an int32 scalar.
        rng: The run's random key.
        loss_scale: Scale of float16 losses, or None.
    """

    params: dict[str, Any]
    rest: dict[str, Any]
    opt_state: Any
    tables: Any
    step: Any
    rng: Any
    loss_scale: Any = None

    @property
    def model(self) -> Any:
        """Raises an error: tables may be in other processes, so the step makes it."""
        raise AttributeError(
            "the state of a step with tables has no model; step.model(state) makes it"
        )

    @property
    def samples(self) -> None:
        """None: each step takes a full batch, so samples are not counted."""
        return None


@names_arguments("TableStep", instance="step")
class TableStep:
    """A compiled plan with tables, which is called with a state and a global batch.

    Attributes:
        plan: Plan of the step.
        program: Loss, divided at its lookups.
        runner: Executor of the dense part.
        mesh: Mesh of the devices, with the axes over which lookups are divided.
        programs: Sections of the step, and the layout of the tables.
        dtype: Element type of all tables.
        store: Store that moves tables to the devices and back.
        adapter: Adapter that divides the model into parameters and other state.
        crowded_steps: Number of steps in which a device needed more distinct rows of
            another device than planned. These steps exchange vectors by sample.
    """

    def __init__(
        self,
        plan: TablesPlan,
        adapter: Adapter,
        optimizer: optax.GradientTransformation | None,
        out_of_range: str,
        devices: Any,
        replace_every: int | None = None,
    ) -> None:
        """Traces the step for its shapes; compiles nothing.

        Args:
            plan, adapter, optimizer, out_of_range, devices, replace_every: Arguments of
                ``compile_tables``, unchanged.

        Raises:
            WhaleError: The plan is for another loss, or does not run on the devices.
        """
        self.plan, self.adapter, self._replace_every = plan, adapter, replace_every
        self._counts, self.crowded_steps = LookupCounts(), 0
        self._trains = optimizer is not None
        self._optimizer = optax.identity() if optimizer is None else optimizer
        chosen = devices_of(plan.dense, devices)
        program = cut_program(adapter, plan.batch)
        names = tuple(adapter.param_paths[one.param] for one in program.lookups)
        if tuple(adapter.param_paths[n] for n in program.tables) != plan.tables:
            raise PlanError(
                f"this plan has the tables {', '.join(plan.tables)}, and the loss "
                f"looks up {', '.join(dict.fromkeys(names))}. Plan again for this loss"
            )
        check_divisible(program.lookups, len(chosen))
        self._made_with = optimizer, chosen
        self.runner = dense_runner(plan.dense, adapter, program, *self._made_with)
        self.mesh = _lookup_mesh(plan, self.runner)
        self._processes = TableProcesses(self.mesh)
        self._use(plan, program, names, clips=out_of_range == "clip")

    def _use(
        self,
        plan: TablesPlan,
        program: TableProgram,
        names: tuple[str, ...],
        *,
        clips: bool,
    ) -> None:
        self.plan, self.program = plan, program
        rows = {table.name: table.rows for table in plan.all_tables}
        self._names, self._rows = names, tuple(rows[name] for name in names)
        self.programs = self._programs_of(plan.placement, clips=clips)
        adapter = self.adapter
        leaves = dict(
            zip(adapter.param_paths, jax.tree.leaves(adapter.params), strict=True)
        )
        self.dtype = leaves[plan.tables[0]].dtype
        self.store = self._make_store()
        self._train, self._eval = self._make_programs()
        whole = NamedSharding(self.mesh, PartitionSpec())
        self._bounds = jax.jit(self.programs.id_bounds, out_shardings=whole)
        asking = self._asking
        self._room_taken = jax.jit(asking.room_taken, out_shardings=whole)
        self._ids = jax.jit(self.programs.program.ids, out_shardings=whole)

    def _make_programs(self) -> tuple[Any, Any]:
        step = jax.jit(
            self._advance,
            donate_argnums=0,
            static_argnums=2,
            out_shardings=self._result_shardings(),
        )
        return step, jax.jit(self._evaluate)

    def _result_shardings(self) -> Any:
        tables = jax.tree.map(lambda x: x.sharding, self.store.abstract_arrays())
        return with_tables(self.runner.shardings, tables), None

    def _numbers(self, placement: TablePlacement) -> list[int]:
        held = {table.name for table in placement.tables}
        return [n for n, name in enumerate(self._names) if name in held]

    def _programs_of(self, placement: TablePlacement, *, clips: bool) -> TablePrograms:
        numbers, mesh, axes = self._numbers(placement), self.mesh, tuple(self.plan.axes)
        if any(shard.split == "node_rows" for shard in placement.shards):
            per_node = placement.ranks.per_node
            axes = ("node", "in_node")
            mesh = Mesh(self.mesh.devices.reshape(-1, per_node), axes)
        lookups = tuple(self.program.lookups[n] for n in numbers)
        names = tuple(self._names[n] for n in numbers)
        layout = self._make_layout(placement, lookups, names)
        samples = lookups[0].shape[0] // self.mesh.size
        return TablePrograms(
            program=dataclasses.replace(self.program, lookups=lookups),
            layout=layout,
            by_sample=without_requests(layout, placement, lookups, names, samples),
            names=names,
            rows=tuple(self._rows[n] for n in numbers),
            optimizer=self.plan.rows,
            mesh=mesh,
            axes=axes,
            clips=clips,
        )

    def _make_layout(
        self,
        placement: TablePlacement,
        lookups: tuple[Lookup, ...],
        names: tuple[str, ...],
    ) -> TableLayout:
        samples = lookups[0].shape[0] // self.mesh.size
        return make_layout(placement, lookups, names, samples)

    def _store_of(
        self, programs: TablePrograms, placement: TablePlacement
    ) -> TableStore:
        tables = placement.tables
        return TableStore(
            layout=programs.layout,
            optimizer=self.plan.rows,
            mesh=programs.mesh,
            axes=programs.axes,
            shapes={table.name: (table.rows, table.width) for table in tables},
            dtype=self.dtype,
        )

    def _make_store(self) -> Any:
        return self._store_of(self.programs, self.plan.placement)

    def close(self) -> None:
        """Does nothing; in a ``SectionsStep``, ends the processes of the tables."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def parts_matter(self) -> bool:
        """Whether results depend on the number of micro-batches."""
        return depends_on_parts(self.plan.dense, self.adapter)

    # Initialisation.

    @without_mesh
    def init(self, make_model: Callable[..., Any], *, rng: Any) -> TablesState:
        """Returns an initial state; creates one table at a time, sharded.

        Args:
            make_model: Function of a random key, or of nothing, that builds the model.
            rng: Random key; the run's keys are derived from it too.

        Raises:
            WhaleError: The function builds a model other than the plan's.
        """
        if not callable(make_model):
            raise WhaleError(
                f"make_model is {short_repr(make_model)}; expected a function of a "
                "random key, or of nothing, that builds the model"
            )
        key = typed_key(rng, for_loss=self.adapter.takes_rng)

        def leaves(key: Any) -> tuple[dict[str, Any], list[Any]]:
            model = made_model(make_model, key)
            params, rest = self.adapter.take_apart(model)
            paths = self.adapter.param_paths
            values = dict(zip(paths, jax.tree.leaves(params), strict=True))
            return values, jax.tree.leaves(rest)

        def dense(key: Any) -> tuple[dict[str, Any], list[Any]]:
            values, rest = leaves(key)
            return {p: x for p, x in values.items() if p not in tables}, rest

        tables = set(self.plan.tables)
        arrays = self.store.empty()
        host = jax.local_devices(backend="cpu")[0]
        with jax.default_device(host):
            key_here = jax.device_put(key, host)
            params, rest = jax.jit(dense)(key_here)
        key_there = put(key, NamedSharding(self.mesh, PartitionSpec()))
        for name in self.plan.tables:
            # XLA does not compute unused outputs, so this makes a single table.
            def table(key: Any, name: str = name) -> Any:
                return leaves(key)[0][name]

            if self.store.makes_on_devices(name):
                arrays = self.store.create(arrays, name, table, key_there)
                continue
            with jax.default_device(host):
                values = np.asarray(jax.jit(table)(key_here))
            arrays = self.store.write(arrays, name, values, None)
        key = jax.random.fold_in(key, 0x5EED)
        others = by_path(self.adapter.rest_paths, rest)
        return self._state(params, others, arrays, key, None)

    @without_mesh
    def init_from(self, model: Any, *, rng: Any = None) -> TablesState:
        """Returns a state with the values of a model, which is copied.

        Args:
            model: Model with real arrays.
            rng: Random key for losses that take one; None uses key 0.

        Raises:
            WhaleError: The model is abstract.
        """
        key = jax.random.key(0) if rng is None else rng
        key = typed_key(key, for_loss=self.adapter.takes_rng)
        params, rest = self.adapter.take_apart(model)
        leaves = jax.tree.leaves(params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise WhaleError(
                "init_from was given an abstract model, which has shapes and no "
                "values. Use init(make_model, rng=jax.random.key(seed))"
            )
        values = dict(zip(self.adapter.param_paths, leaves, strict=True))
        arrays = self.store.empty()
        for name in self.plan.tables:
            arrays = self.store.write(arrays, name, host_copy(values.pop(name)), None)
        others = by_path(self.adapter.rest_paths, rest)
        return self._state(values, others, arrays, key, None)

    def _state(
        self,
        params: Mapping[str, Any],
        rest: Mapping[str, Any],
        tables: Any,
        key: Any,
        done: Mapping[str, Any] | None,
    ) -> TablesState:
        """Returns a state from its parts; ``done`` has the other fields of a state."""
        params = dict(params) or {UNUSED: np.zeros((), np.float32)}
        whole = NamedSharding(self.mesh, PartitionSpec())
        shared = self._processes.are_several
        values = jax.tree.map(
            lambda x: put(x, whole) if shared and is_key(x) else host_copy(x),
            (params, dict(rest), key),
        )
        dense = self.runner.init_state(lambda *given: given, *values)
        if done is not None:
            known = {name: x for name, x in done.items() if x is not None}
            dense = dataclasses.replace(dense, **known)
            dense = jax.tree.map(put, dense, self.runner.shardings)
        return with_tables(dense, tables)

    # Running.

    @without_mesh
    def __call__(
        self, state: TablesState, batch: Any
    ) -> tuple[TablesState, dict[str, Any]]:
        """Runs one step of both optimizers.

        Args:
            state: State after the previous step; its buffers are donated.
            batch: Global batch. With several processes, the samples ``batch_rows`` of
                it, or global ``jax.Array`` leaves.

        Returns:
            The new state, and metrics: ``loss`` and the values that the loss reports.

        Raises:
            WhaleError: The step has no optimizer, an id is out of range, the batch has
                another shape than the plan's, or the state was already donated. Or
                another process was lost, or has another program.
        """
        if not self._trains:
            raise PlanError(
                "this step was compiled without an optimizer and can only evaluate. "
                "Pass optimizer= to wh.compile_tables to train"
            )
        self._processes.check(
            self.plan,
            self.program,
            lambda: self._abstract_dense().params,
            self._optimizer,
        )
        held, leaves = self._checked(state), self._place_batch(batch)
        if self._replace_every is not None:
            held = self._replaced(held, leaves)
        is_crowded = self._is_crowded(leaves)
        new, metrics = self._processes.run(
            lambda *given: self._train(*given, is_crowded), held, leaves
        )
        return new, metrics

    @property
    def _asking(self) -> TablePrograms:
        """Programs in which devices request rows from each other."""
        return self.programs

    def _is_crowded(self, leaves: list[Any]) -> bool:
        """Whether a batch needs more distinct rows than the buffers can hold."""
        if not self._asking.layout.requests:
            return False
        crowded = float(self._processes.run(self._room_taken, leaves)) > 1
        self.crowded_steps += crowded
        return crowded

    # Placement.

    def _replaced(self, state: TablesState, leaves: list[Any]) -> TablesState:
        """Counts lookups; moves tables after ``replace_every`` steps if that pays."""
        ids = self._processes.run(self._ids, leaves)
        self._counts.add(self.programs.names, self.programs.rows, ids)
        if self._counts.batches < (self._replace_every or 1):
            return state
        found = self._processes.first_replacement(self.replacement)
        self._counts = LookupCounts()
        if jax.process_index() == 0:
            say(f"whalejax: {found}")
        return self.place(state, found.placement) if found.gain > _WORTH else state

    def replacement(self) -> Replacement:
        """Returns the best placement for the counted lookups, with its gain.

        Raises:
            PlanError: No lookups were counted; ``replace_every`` counts them.
        """
        if not self._counts.batches:
            raise PlanError(
                "no lookups were counted. Give replace_every= to wh.compile, and train"
            )
        placement = self.plan.placement
        samples = self._counts.batches * placement.batch_size
        return place_again(placement, self._counts.by_table, samples)

    @without_mesh
    def place(self, state: TablesState, placement: TablePlacement) -> TablesState:
        """Moves the tables of a state, and of this step, to another placement.

        Args:
            state: State to move; its buffers are donated.
            placement: Placement of the same tables on the same number of ranks.

        Raises:
            PlanError: The placement has other tables or ranks.
        """
        held, before = self._checked(state), self.plan.placement
        sizes = [
            [(t.name, t.rows, t.width) for t in one.tables]
            for one in (before, placement)
        ]
        if sizes[0] != sizes[1] or placement.ranks.count != before.ranks.count:
            raise PlanError(
                f"this placement is of {count_text(len(sizes[1]), 'table')} on "
                f"{count_text(placement.ranks.count, 'rank')}; expected those of the "
                f"plan, {len(sizes[0])} on {before.ranks.count}. Of another number of "
                "ranks make a plan and a step, and let it adopt the state"
            )
        store, programs = self.store, self.programs
        lookups = programs.program.lookups
        given = placement, lookups, programs.names, self.plan.rows, self.plan.dense
        use = predict_device_use(*given)
        plan = dataclasses.replace(self.plan, placement=placement, use=use)
        self._use(plan, programs.program, programs.names, clips=programs.clips)
        return dataclasses.replace(held, tables=self._taken_over(held.tables, store))

    def _taken_over(self, tables: Any, store: Any) -> Any:
        arrays = self.store.empty()
        for kind in (None, *self.plan.rows.state_names):
            for name, values in store.each(tables, kind):
                arrays = self.store.write(arrays, name, values, kind)
        return arrays

    @without_mesh
    def adopt(self, state: Any, step: TableStep) -> TablesState:
        """Copies another step's state to this placement, without files.

        Args:
            state: State of the other step; it is not donated.
            step: Step of the state, with the same model and optimizers on any devices.

        Raises:
            PlanError: ``step`` is not a step with tables, the state is of another model
                or optimizer, or there are several processes.
        """
        if not isinstance(step, TableStep):
            raise PlanError(
                f"step is {short_repr(step)}; expected the step of the state"
            )
        if self._processes.are_several:
            raise PlanError(
                "adopt copies states within one process, and these devices are of "
                f"{jax.process_count()}. Save the state, and restore it in the new "
                "processes; whalejax launch --processes MIN:MAX does so by itself"
            )
        held = step._checked(state)
        own, given = self._abstract_sections(), step._abstract_sections()
        if step.plan.rows.kind != self.plan.rows.kind or _shapes(own) != _shapes(given):
            raise PlanError(
                "the state is of another model or of other optimizers. Compile this "
                "step with those that made it"
            )
        tables = self._taken_over(held.tables, step.store)
        opt_state, step = jax.tree.map(np.asarray, (held.opt_state, held.step))
        done = {"opt_state": opt_state, "step": step}
        if held.loss_scale is not None and self.runner.shardings.loss_scale is not None:
            done["loss_scale"] = jax.tree.map(np.asarray, held.loss_scale)
        return self._state(held.params, held.rest, tables, held.rng, done)

    @without_mesh
    def eval(self, state: TablesState, batch: Any) -> dict[str, Any]:
        """Returns the loss and metrics of a batch; changes nothing.

        NNX modules are in evaluation mode, as after ``model.eval()``.

        Args:
            state: State to evaluate; it is not donated.
            batch: Global batch, in the same form as for a step.

        Raises:
            WhaleError: An id is out of range, the batch has another shape than the
                plan's, or the model in evaluation mode looks up other rows.
        """
        self._evaluator  # noqa: B018  (traced before the program that it is a part of)
        given = self._checked(state), self._place_batch(batch)
        metrics: dict[str, Any] = self._processes.run(self._eval, *given)
        return metrics

    @functools.cached_property
    def _evaluator(self) -> Any:
        adapter = self.adapter.evaluating()
        if adapter is None:
            return self.runner
        program = cut_program(adapter, self.plan.batch)
        leaves = jax.tree.leaves(self.plan.batch)
        both = self.program, program
        reads = [str(jax.make_jaxpr(one.ids)(leaves)) for one in both]
        if reads[0] != reads[1] or lookup_forms(both[0]) != lookup_forms(both[1]):
            raise PlanError(
                "the model in evaluation mode looks up other rows than in training. "
                "Look up the same ones, and choose among their vectors"
            )
        given = self.plan.dense, adapter, program, *self._made_with
        return dense_runner(*given, trains=self.runner)

    def batch_rows(self) -> np.ndarray:
        """Returns the indices of this process's samples in a global batch, in order."""
        samples = self.program.lookups[0].shape[0]
        leaves = jax.tree.leaves(self.plan.batch)
        first = [n for n, x in enumerate(leaves) if x.shape and x.shape[0] == samples]
        given = self.runner.batch_shardings[first[0]]
        sharding = NamedSharding(given.mesh, PartitionSpec(*given.spec[:1]))
        return rows_here(sharding, samples)

    @without_mesh
    def lower(self, state: TablesState, batch: Any) -> Any:
        """Returns the lowered step (``jax.stages.Lowered``), to inspect the program.

        Args:
            state, batch: Arguments of a step, unchanged.
        """
        return self._train.lower(self._checked(state), self._place_batch(batch), False)

    @without_mesh
    def lower_shapes(self) -> Any:
        """Returns the step lowered from shapes alone; the devices may be absent."""
        given = self._abstract_state(), self._abstract_batch()
        return self._train.lower(*given, False)

    def _abstract_state(self) -> TablesState:
        shapes, shardings = self._abstract_dense(), self.runner.shardings
        dense = jax.tree.map(_shaped, shapes, shardings)
        return with_tables(dense, self.store.abstract_arrays())

    def _abstract_dense(self) -> TrainState:
        origin = self.runner.shardings.origin
        return abstract_state(self.runner.program, origin)

    def _abstract_batch(self) -> list[Any]:
        leaves = jax.tree.leaves(self.plan.batch)
        return [
            _shaped(leaf, sharding)
            for leaf, sharding in zip(leaves, self.runner.batch_shardings, strict=False)
        ]

    def report(self) -> Any:
        """Refuses to report on sections, because this step has only one.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            "this step has no processes beside its devices, whose times report() would "
            "give: all tables are on the devices, where that was planned to be faster. "
            "in_processes= of wh.plan puts tables into processes"
        )

    def profile(self, state: Any, batch: Any, *, steps: int = 5) -> Any:
        """Refuses to profile, because a plan has no separate terms for tables.

        Args:
            state, batch, steps: Arguments of ``TrainStep.profile``, unused.

        Raises:
            PlanError: Always.
        """
        del state, batch, steps
        raise PlanError(
            "step.profile sets a trace beside the terms of a plan's step, and those of "
            "lookups, exchanges and updates of tables are one number. Trace steps with "
            "jax.profiler.trace; of two sections step.report() says what each took"
        )

    def _checked(self, state: Any) -> TablesState:
        if not isinstance(state, TablesState):
            raise WhaleError(
                f"state is {short_repr(state)}; expected what this step's init, "
                "init_from or restore gave"
            )
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            raise WhaleError(
                "this state was donated to a step, which reused its memory. Go on "
                "with the state that the step returned"
            )
        return state

    def _matching(self, batch: Any) -> list[Any]:
        """Returns the leaves of a batch; refuses one that does not match the plan."""
        structure: Any = jax.tree.structure(self.plan.batch)
        expected = jax.tree.leaves(self.plan.batch)
        try:
            same = bool(jax.tree.structure(batch) == structure)
            given = [aval_of(leaf) for leaf in jax.tree.leaves(batch)] if same else []
        except (TypeError, AttributeError):
            given, same = [], False
        shapes = [_leaf_text(leaf) for leaf in expected]
        if not same:
            raise PlanError(
                f"batch is {short_repr(batch)}; this step is for leaves of the shapes "
                f"{', '.join(shapes)}, in the same containers and types. Plan again "
                "for another batch"
            )
        problems = Problems("batch", PlanError)
        for name, leaf, shape in zip(leaf_names(batch), given, shapes, strict=True):
            if _leaf_text(leaf) != shape:
                problems.add(
                    f"{name} is {_leaf_text(leaf)}; expected {shape}, as planned. "
                    "Convert it, or plan again for this batch"
                )
        problems.raise_if_any()
        check_32_bits(batch)
        # A data loader may overwrite its buffer while the step still runs.
        return [
            leaf if isinstance(leaf, jax.Array) else host_copy(leaf)
            for leaf in jax.tree.leaves(batch)
        ]

    def _on_devices(self, leaves: list[Any]) -> list[Any]:
        shardings = self.runner.batch_shardings
        return [jax.device_put(*pair) for pair in zip(leaves, shardings, strict=False)]

    def _place_batch(self, batch: Any) -> list[Any]:
        if self._processes.are_several:
            leaves = self._processes.place(
                batch, self.plan.batch, self.runner.batch_shardings
            )
        else:
            leaves = self._on_devices(self._matching(batch))
        if not self.programs.clips:
            bounds = self._processes.run(self._bounds, leaves)
            self._check_bounds(np.asarray(bounds))
        return leaves

    def _check_bounds(self, bounds: np.ndarray) -> None:
        problems = Arguments("batch")
        for number, (least, most) in enumerate(bounds):
            rows, name = self._rows[number], self._names[number]
            if least < 0 or most >= rows:
                feature = self.program.lookups[number].feature
                value = f"the id {most}" if most >= rows else _negative_id(least, rows)
                problems.add(
                    f"{feature} has {value}, and {name} has {rows:,} rows, from 0; "
                    'correct the data, or compile with out_of_range="clip" to take the '
                    "nearest row"
                )
        problems.raise_if_any()

    def _advance(
        self, state: TablesState, batch: list[Any], is_crowded: bool
    ) -> tuple[TablesState, dict[str, Any]]:
        programs = self.programs.plain if is_crowded else self.programs
        ids = programs.shared_out(programs.all_ids(batch))
        vectors, taken = programs.look_up(state.tables, ids)
        new, metrics, by_vector = self._dense_step(state, batch, vectors)
        by_vector = [programs.shared_out(one) for one in by_vector]
        applies = _applies(state, new)
        tables = programs.update(
            state.tables, ids, taken, by_vector, state.step, applies
        )
        return dataclasses.replace(new, tables=tables), metrics

    def _dense_step(
        self, state: TablesState, batch: list[Any], vectors: list[Any]
    ) -> tuple[TablesState, dict[str, Any], list[Any]]:
        given = self._dense_state(state), self._dense_leaves(batch, vectors)
        new, metrics, gradients = self.runner.traced_step(*given)
        return with_tables(new, state.tables), metrics, gradients

    def _dense_metrics(
        self, state: TablesState, batch: list[Any], vectors: list[Any]
    ) -> dict[str, Any]:
        given = self._dense_state(state), self._dense_leaves(batch, vectors)
        metrics: dict[str, Any]
        metrics, _ = self._evaluator.traced_evaluation(bare(given[0]), given[1])
        return metrics

    def _dense_state(self, state: TablesState) -> TrainState:
        origin = self.runner.shardings.origin
        fields = {name: getattr(state, name) for name in _DENSE_FIELDS}
        return TrainState(origin=origin, **fields)

    def _dense_leaves(self, batch: list[Any], vectors: list[Any]) -> list[Any]:
        specs = [leaf.spec for leaf in self.plan.dense.batch]
        leaves: list[Any] = self.runner.program.constrain([*batch, *vectors], specs)
        return leaves

    def _evaluate(self, state: TablesState, batch: list[Any]) -> dict[str, Any]:
        programs = self.programs.plain
        ids = programs.shared_out(programs.all_ids(batch))
        vectors, _ = programs.look_up(state.tables, ids)
        return self._dense_metrics(state, batch, vectors)

    # Checkpoints.

    @without_mesh
    def save(self, path: str | os.PathLike[str], state: TablesState) -> None:
        """Writes a checkpoint atomically.

        Args:
            path: Directory that does not exist yet; its parents are created.
            state: State to write; it is not donated.

        Raises:
            WhaleError: The path exists already, or it cannot be written.
        """
        self._save(path, state)

    def _save(
        self,
        path: str | os.PathLike[str],
        state: TablesState,
        before_it_appears: Callable[[], None] = lambda: None,
    ) -> None:
        """Implements ``save``.

        ``before_it_appears`` is called when everything is written. It raises in all
        processes if the checkpoint must not appear.
        """
        sections = self._sections(self._checked(state))
        settle()
        save_sections(
            path,
            sections,
            self.plan.dense,
            self.plan.placement.batch_size,
            wanted=self._abstract_sections(),
            before_it_appears=before_it_appears,
        )

    @without_mesh
    def restore(self, path: str | os.PathLike[str]) -> TablesState:
        """Reads a checkpoint of any placement into this plan's placement.

        Args:
            path: Path of a checkpoint of ``save``.

        Raises:
            WhaleError: No checkpoint exists, or it is damaged or of another model or
                optimizer.
        """
        found = restore_sections(path, self._abstract_sections())
        return self._restored(found, self.store.empty())

    @without_mesh
    def restore_or_init(
        self,
        folder: str | os.PathLike[str],
        make_model: Callable[..., Any],
        *,
        rng: Any,
    ) -> TablesState:
        """Restores the newest undamaged checkpoint in a folder, or returns a new state.

        Args:
            folder: Folder of checkpoints with names such as ``step_000100``; it need
                not exist. Damaged checkpoints are renamed, with a warning.
            make_model, rng: Arguments of ``init``, unchanged.

        Raises:
            WhaleError: A checkpoint is of another model, or all are damaged.
        """
        name = "step.restore_or_init"
        return restore_or_init(self, name, folder, make_model, rng)  # type: ignore[no-any-return]

    def _restored(
        self, found: Mapping[str, Mapping[str, Any]], arrays: Any
    ) -> TablesState:
        """Returns the state of a checkpoint, whose tables overwrite ``arrays``."""
        dense = self._abstract_dense()
        done: dict[str, Any] = {"step": found["step"]["step"]}
        for name in ("opt_state", "loss_scale"):
            tree, section = getattr(dense, name), found.get(name, {})
            leaves = [section[path] for path in leaf_names(tree)]
            structure: Any = jax.tree.structure(tree)
            done[name] = structure.unflatten(leaves)
        for kind in (None, *self.plan.rows.state_names):
            section = found.get("tables" if kind is None else f"tables.{kind}", {})
            for name, values in section.items():
                arrays = self.store.write(arrays, name, np.asarray(values), kind)
        rest = found.get("rest", {})
        return self._state(found["params"], rest, arrays, found["rng"]["rng"], done)

    def _sections(self, state: TablesState) -> Sections:
        """Returns all arrays of a state in host memory, by section and path.

        With several processes, each has some rows of every table.
        """
        sections = self._dense_sections(state)
        for kind in (None, *self.plan.rows.state_names):
            section = "tables" if kind is None else f"tables.{kind}"
            if self._processes.are_several:
                sections[section] = {
                    name: rows_by_process(
                        functools.partial(self.store.gather, state.tables, name, kind),
                        self.store.shapes[name][0],
                    )
                    for name in self.plan.tables
                }
            else:
                sections[section] = self.store.collect(state.tables, kind)
        return sections

    def _dense_sections(self, state: Any) -> Sections:
        sections: Sections = {
            "params": dict(state.params),
            "rest": dict(state.rest),
            "step": {"step": state.step},
            "rng": {"rng": state.rng},
        }
        for name in ("opt_state", "loss_scale"):
            tree = getattr(state, name)
            leaves = jax.tree.leaves(tree)
            sections[name] = dict(zip(leaf_names(tree), leaves, strict=True))
        saved: Sections = jax.tree.map(_as_saved, sections)
        return saved

    def _abstract_sections(self) -> Sections:
        leaves = zip(
            self.adapter.param_paths, jax.tree.leaves(self.adapter.params), strict=True
        )
        tables = {p: aval_of(x) for p, x in leaves if p in self.plan.tables}
        sections = {**self._dense_sections(self._abstract_dense()), "tables": tables}
        for kind in self.plan.rows.state_names:
            sections[f"tables.{kind}"] = {
                name: jax.ShapeDtypeStruct(
                    (x.shape[0], self.plan.rows.state_width(kind, x.shape[1])), x.dtype
                )
                for name, x in tables.items()
            }
        return sections

    # The model.

    def table_values(self, state: TablesState) -> dict[str, np.ndarray]:
        """Returns all tables, unsharded in host memory, by path.

        Args:
            state: State to read; it is not donated.
        """
        found: dict[str, np.ndarray] = self.store.collect(state.tables, None)
        return found

    def row_states(self, state: TablesState) -> dict[str, dict[str, np.ndarray]]:
        """Returns the row states of all tables, unsharded, by path and name.

        Args:
            state: State to read; it is not donated.
        """
        kinds = self.plan.rows.state_names
        by_kind = {kind: self.store.collect(state.tables, kind) for kind in kinds}
        return {
            name: {kind: by_kind[kind][name] for kind in kinds}
            for name in self.plan.tables
        }

    def model(self, state: TablesState) -> Any:
        """Returns the model in the user's type, with unsharded tables in host memory.

        Args:
            state: State to export; it is not donated.
        """
        values = {**self.table_values(self._checked(state)), **state.params}
        # Copy them: the next step donates the buffers of the state.
        params = [
            jnp.asarray(host_copy(values[path])) for path in self.adapter.param_paths
        ]
        rest = [
            jax.device_put(host_copy(state.rest[path]))
            for path in self.adapter.rest_paths
        ]
        trees: list[Any] = [
            jax.tree.structure(self.adapter.params),
            jax.tree.structure(self.adapter.rest),
        ]
        parts = trees[0].unflatten(params), trees[1].unflatten(rest)
        return self.adapter.rebuild(*parts)


_DENSE_FIELDS: Final = ("params", "rest", "opt_state", "step", "rng", "loss_scale")


def with_tables(dense: TrainState, tables: Any) -> TablesState:
    """Returns a state of a step with tables from its two parts.

    Args:
        dense: State of the dense part's executor.
        tables: Tables and the state of their rows.
    """
    fields = {name: getattr(dense, name) for name in _DENSE_FIELDS}
    return TablesState(tables=tables, **fields)


def _applies(before: TablesState, after: TablesState) -> Any:
    """Returns whether a step's gradients were finite; None without a loss scale."""
    if before.loss_scale is None:
        return None
    return before.loss_scale.skipped_steps == after.loss_scale.skipped_steps


def _as_saved(leaf: Any) -> Any:
    """Returns a leaf in host memory, or unchanged if it is a key, shape or partial."""
    is_array = isinstance(leaf, jax.Array) and not is_key(leaf)
    return np.asarray(leaf) if is_array and leaf.is_fully_addressable else leaf


def _shapes(sections: Sections) -> Any:
    return {
        section: {name: (x.shape, str(x.dtype)) for name, x in arrays.items()}
        for section, arrays in sections.items()
        if section != "loss_scale"  # A new one starts where the other has none.
    }


def _shaped(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaf_text(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _negative_id(value: int, rows: int) -> str:
    return f"the id {value - rows} ({value} if the loss counts none from the end)"


def _lookup_mesh(plan: TablesPlan, runner: Any) -> Mesh:
    sizes = plan.axes
    mesh: Mesh = runner.mesh
    if not plan.dense.stage_plans and set(mesh.axis_names) == set(sizes):
        return mesh
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
