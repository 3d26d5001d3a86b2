"""The compiled step of a plan whose tables are in separate processes.

It has the methods of any step with tables. But a call only puts a batch into the
pipeline of both sections, and returns immediately. Reading metrics or the state waits
until the sections have finished the step.

The module is long because it has all public methods of the step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.sections import Sections, SectionTimes
from whalejax.runtime.table_step import TablesState, TableStep
from whalejax.sections.pipeline import Pipeline, Work
from whalejax.sections.process_requests import ProcessRequest, ProcessRequests
from whalejax.sections.remote_store import (
    RemoteStore,
    RemoteTables,
    begin_message,
    rank_ids,
)
from whalejax.sections.section_run import KeptState, SectionRun
from whalejax.sections.sparse_rows import Arrays
from whalejax.state.table_checkpoint import restore_sections, save_sections
from whalejax.tables.exchange import assemble, pack_gradients
from whalejax.tables.layout import TableLayout, make_layout
from whalejax.tables.programs import TablePrograms
from whalejax.tables.recognize import Lookup
from whalejax.user_code.ambient_mesh import without_mesh


class PipelineMetrics(Mapping[str, Any]):
    """Metrics of a step; reading a value waits until the step is done."""

    def __init__(self, pipeline: Pipeline, work: Work) -> None:
        """Stores the step; waits for nothing.

        Args:
            pipeline: Pipeline of the step.
            work: Batch of the step.
        """
        self._pipeline, self._work = pipeline, work

    def __getitem__(self, name: str) -> Any:
        return self._pipeline.wait_for(self._work)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pipeline.wait_for(self._work))

    def __len__(self) -> int:
        return len(self._pipeline.wait_for(self._work))

    def __repr__(self) -> str:
        return repr(dict(self))


class PipelineState:
    """The state after steps that may be in flight.

    A step donates its state and returns the next one. Reading the state's arrays waits
    until all its steps are done and their updates are applied.

    Attributes:
        step: Number of steps, including those in flight.
    """

    def __init__(self, owner: SectionsStep, step: int) -> None:
        """Stores the step; waits for nothing.

        Args:
            owner: Step of the state.
            step: Number of steps.
        """
        self._owner, self.step = owner, step
        self.samples = self.loss_scale = None

    @property
    def params(self) -> dict[str, Any]:
        """Trained leaves that are not tables, by path."""
        return self._owner.settled(self).params

    @property
    def rest(self) -> dict[str, Any]:
        """Leaves that are not trained, by path."""
        return self._owner.settled(self).rest

    @property
    def opt_state(self) -> Any:
        """State of the dense optimizer."""
        return self._owner.settled(self).opt_state

    @property
    def tables(self) -> RemoteTables:
        """A reference to the tables in processes."""
        found: RemoteTables = self._owner.settled(self).tables
        return found

    @property
    def rng(self) -> Any:
        """The run's random key."""
        return self._owner.settled(self).rng


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionReport:
    """Report of both sections; ``print`` shows it.

    Attributes:
        sections: Sections of the plan.
        measured: Sections with measured times.
        lags: Number of lookups, by the number of updates missing at the lookup.
        replaced: Number of processes that were replaced.
    """

    sections: Sections
    measured: Sections
    lags: dict[int, int]
    replaced: int

    @property
    def times(self) -> SectionTimes:
        """Measured times, for ``times=`` of ``wh.plan``."""
        return self.measured.times

    @property
    def over_bound(self) -> int:
        """Number of lookups that missed more updates than planned; should be 0."""
        most = self.sections.staleness
        return sum(count for lag, count in self.lags.items() if not 0 <= lag <= most)

    def __str__(self) -> str:
        total = max(1, sum(self.lags.values()))
        lags = ", ".join(
            f"{lag}: {count / total:.0%}" for lag, count in sorted(self.lags.items())
        )
        return (
            f"planned: {self.sections}\nmeasured: {self.measured}\n"
            f"updates that lookups lacked: {lags or 'none yet'}; processes replaced: "
            f"{self.replaced}"
        )


@names_arguments("SectionsStep", instance="step")
class SectionsStep(TableStep):
    """A plan of two sections, compiled: call it with a state and a global batch.

    Its processes run until ``close``. As a context manager, it calls ``close``.

    Attributes:
        pipeline: Pipeline of both sections. Its folder of saved states may have the
            state of a killed process, which ``resume`` returns.
        beside: Lookups and updates of the tables that are on devices, or None.
    """

    def __init__(
        self,
        *given: Any,
        job: tuple[str, Mapping[str, Any]] | None = None,
        run: SectionRun | None = None,
        **settings: Any,
    ) -> None:
        """Starts the processes of the sparse section.

        Args:
            given: Arguments of ``TableStep``, unchanged.
            job: Name and settings of the job whose batches the processes make, or None.
            run: Hosts of the processes, and the state that is saved; default: this
                machine, and no state.
            settings: Other arguments of ``Pipeline``.
        """
        self._job, self._settings, self._run = job, settings, run
        keeps = run is not None and run.keep_every is not None
        self._kept = KeptState(run.folder or "") if run and keeps else None
        self._held: TablesState | None = None
        self._newest: PipelineState | TablesState | None = None
        self._started = 0
        super().__init__(*given)
        self._ids = jax.jit(self._ids_and_bounds)
        self._clip_ids = jax.jit(self._clipped_ids)
        given_once: Any = {"donate_argnums": 0, "static_argnums": 3}
        self._train_dense = jax.jit(self._advance_dense, **given_once)
        self._eval_dense = jax.jit(self._evaluate_dense)

    @property
    def sections(self) -> Sections:
        """The division of work between the sections."""
        found: Sections | None = self.plan.sections
        assert found is not None
        return found

    @property
    def steps_in_flight(self) -> int:
        """Number of steps after which a loop reads a loss, so that no section waits."""
        return self.sections.queue_depth

    def _make_layout(
        self,
        placement: TablePlacement,
        lookups: tuple[Lookup, ...],
        names: tuple[str, ...],
    ) -> TableLayout:
        if placement is self.plan.beside:
            return super()._make_layout(placement, lookups, names)
        return make_layout(placement, lookups, names)

    def _make_store(self) -> RemoteStore:
        self.beside, store, placed = None, None, self.plan.beside
        if placed is not None:
            self.beside = self._programs_of(placed, clips=self.programs.clips)
            store = self._store_of(self.beside, placed)
        layout, rows, sections = self.programs.layout, self.plan.rows, self.sections
        self._requests = ProcessRequests(layout)
        size = self.plan.placement.batch_size
        job = None if self._job is None else (*self._job, size)
        self.pipeline = Pipeline(
            layout.ranks,
            staleness=sections.staleness,
            depth=sections.queue_depth,
            begin=lambda rank: begin_message(
                layout, rows, self.dtype, rank, sections.staleness, job
            ),
            dense=self._run_dense,
            kept=-1 if self._kept is None else self._kept.step,
            run=self._run,
            **self._settings,
        )
        return RemoteStore(
            layout=layout,
            optimizer=rows,
            dtype=self.dtype,
            pipeline=self.pipeline,
            begun=[0],
            beside=store,
            forget=self._forget,
        )

    def _result_shardings(self) -> Any:
        return None

    @property
    def _asking(self) -> TablePrograms:
        return self.programs if self.beside is None else self.beside

    @property
    def _plain_beside(self) -> TablePrograms | None:
        return None if self.beside is None else self.beside.plain

    def close(self) -> None:
        """Ends the processes; an unsaved state is lost."""
        self.pipeline.close()

    # State that outlives this process.

    @without_mesh
    def resume(self) -> TablesState | None:
        """Returns the state that a previous process saved, or None.

        Later steps are repeated. Call it before ``init``, which starts a new state.

        Raises:
            WhaleError: The saved state is of another model or optimizer.
        """
        if self._kept is None or self._kept.step < 0:
            return None
        path = self._kept.dense_path(self._kept.step)
        whole = self._abstract_sections()
        found = restore_sections(path, self._without_remote(whole))
        self.store.begun[0] += 1
        beside = self.store.beside
        arrays = None if beside is None else beside.empty()
        return self._restored(found, RemoteTables(self.store.begun[0], arrays))

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.forget()

    def _without_remote(self, sections: Any) -> Any:
        """Returns a checkpoint's arrays without the tables in processes."""
        beside = self.plan.beside
        names = set() if beside is None else {table.name for table in beside.tables}
        return {
            section: {name: x for name, x in arrays.items() if name in names}
            if section.startswith("tables")
            else arrays
            for section, arrays in sections.items()
        }

    def _keep(self, state: PipelineState) -> None:
        """Saves the state after all steps so far, and the processes' rows, if due."""
        if self._kept is None or self._run is None or self._run.keep_every is None:
            return
        if state.step % self._run.keep_every:
            return
        held, step = self.settled(state), state.step
        sections = self._dense_sections(held)
        store, tables = self.store.beside, held.tables.beside
        if store is not None:
            sections["tables"] = store.collect(tables, None)
            for kind in self.plan.rows.state_names:
                sections[f"tables.{kind}"] = store.collect(tables, kind)
        size = self.plan.placement.batch_size
        save_sections(self._kept.begin(step), sections, self.plan.dense, size)
        self._kept.commit(step)
        self.pipeline.kept = step

    # States.

    def settled(self, state: Any) -> TablesState:
        """Returns the state with all its arrays, after waiting for its steps.

        Args:
            state: Newest state.

        Raises:
            WhaleError: The state was donated, or a section failed.
        """
        self._begin(state)
        self.pipeline.flush()
        assert self._held is not None
        return self._held

    def _begin(self, state: Any) -> int:
        if isinstance(state, PipelineState):
            if state is not self._newest or self._started != self.store.begun[0]:
                raise WhaleError(_CONSUMED)
            return state.step
        given = super()._checked(state)
        if not isinstance(given.tables, RemoteTables):
            raise WhaleError(
                "state is of another step, whose tables are on its devices; restore "
                "its checkpoint, or begin with init or init_from of this step"
            )
        if given.tables.number != self.store.begun[0]:
            raise WhaleError(_CONSUMED)
        if self._started != given.tables.number:
            self.pipeline.begin_at(int(given.step))
            self._started = given.tables.number
            self._held = self._newest = given
        elif given is not self._newest:
            raise WhaleError(_CONSUMED)
        return int(given.step)

    def _checked(self, state: Any) -> TablesState:
        return self.settled(state)

    # Running.

    @without_mesh
    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Starts one step of both optimizers, without waiting for it.

        Args:
            state: State after the previous step; its buffers are donated.
            batch: Global batch.

        Returns:
            The new state, and metrics; reading them waits for the step.

        Raises:
            PlanError: The step was compiled without an optimizer.
            WhaleError: An id is out of range, the batch has another shape than the
                plan's, or a section failed.
        """
        self._check_trains()
        leaves = [np.asarray(leaf) for leaf in self._matching(batch)]
        step = self._begin(state)
        return self._submitted(step, leaves, *self._host_ids(leaves))

    def _submitted(
        self, step: int, leaves: list[Any], ids: np.ndarray, bounds: np.ndarray
    ) -> tuple[PipelineState, PipelineMetrics]:
        if not self.programs.clips:
            self._check_bounds(bounds)
        work = Work(leaves=leaves, requests=self._requests_for(ids))
        self.pipeline.submit(work)
        new = self._newest = PipelineState(self, step + 1)
        self._keep(new)
        return new, PipelineMetrics(self.pipeline, work)

    def run(self, state: Any, steps: int) -> Iterator[tuple[Any, Any]]:
        """Runs steps whose batches the processes of the sparse section make.

        Args:
            state: State after the previous step; its buffers are donated.
            steps: Number of steps to run.

        Yields:
            The state and metrics of each step, as from a call.

        Raises:
            PlanError: The step was compiled without an optimizer.
            WhaleError: The step was compiled without ``job``, or a section failed.
        """
        self._check_trains()
        if self._job is None:
            raise WhaleError(
                "this step has no job whose batches it could make. Give job= to "
                "wh.compile, or call the step with batches"
            )
        first, ranks = self._begin(state), self.programs.layout.ranks
        ahead = self.sections.queue_depth + ranks
        count = len(jax.tree.leaves(self.plan.batch))
        with ThreadPoolExecutor(ranks) as pool:
            waiting: deque[Future[list[np.ndarray]]] = deque()
            for number in range(steps):
                while len(waiting) < min(ahead, steps - number):
                    step = first + number + len(waiting)
                    waiting.append(
                        pool.submit(self.pipeline.make_batch, step % ranks, step)
                    )
                arrays = waiting.popleft().result()
                leaves, by_lookup = arrays[:count], arrays[count:]
                tree: Any = jax.tree.structure(self.plan.batch)
                self._matching(tree.unflatten(leaves))
                ids, bounds = self._made_ids(by_lookup)
                yield self._submitted(first + number, leaves, ids, bounds)

    def _made_ids(self, by_lookup: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``_host_ids`` for ids that another process made."""
        return _on_cpu(self._clip_ids, by_lookup)

    def _check_trains(self) -> None:
        if not self._trains:
            raise PlanError(
                "this step was compiled without an optimizer and can only evaluate. "
                "Pass optimizer= to wh.compile to train"
            )

    def _host_ids(self, leaves: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        return _on_cpu(self._ids, leaves)

    def _ids_and_bounds(self, leaves: list[Any]) -> tuple[Any, Any]:
        return self._clipped_ids(self.program.ids(leaves))

    def _clipped_ids(self, by_lookup: list[Any]) -> tuple[Any, Any]:
        own = [by_lookup[n] for n in self._numbers(self.plan.placement)]
        return self.programs.join_ids(own), self.programs.bounds_of(by_lookup)

    @without_mesh
    def eval(self, state: Any, batch: Any) -> dict[str, Any]:
        """Returns the loss and metrics of a batch; changes nothing.

        Args:
            state: State to evaluate; it is not donated. Steps in flight end first.
            batch: Global batch, in the same form as for a step.
        """
        self._evaluator  # noqa: B018  (traced before the program that it is a part of)
        leaves = [np.asarray(leaf) for leaf in self._matching(batch)]
        ids, bounds = self._host_ids(leaves)
        if not self.programs.clips:
            self._check_bounds(bounds)
        held = self.settled(state)
        requests = self._requests_for(ids)
        found = self.pipeline.look_up(requests)
        placed = self._on_devices(leaves), self._received(requests, found)
        metrics: dict[str, Any] = self._eval_dense(held, *placed)
        return metrics

    def lower(self, state: Any, batch: Any) -> Any:
        """Returns the lowered dense section (``jax.stages.Lowered``).

        Args:
            state, batch: Arguments of a step, unchanged.
        """
        leaves = self._on_devices(self._matching(batch))
        layout = self.programs.layout
        size = self.plan.placement.batch_size
        shape = layout.ranks, size, layout.vector_elements
        received = jax.ShapeDtypeStruct(shape, self.dtype)
        return self._train_dense.lower(self.settled(state), leaves, received, False)

    def _requests_for(self, ids: np.ndarray) -> list[ProcessRequest]:
        return self._requests.requests(rank_ids(self.programs.layout, ids))

    def _run_dense(
        self, work: Work, answers: list[Arrays]
    ) -> tuple[list[Arrays], Mapping[str, Any]]:
        requests = work.requests
        placed = self._on_devices(work.leaves), self._received(requests, answers)
        crowded = self._is_crowded(placed[0])
        new, metrics, packed = self._train_dense(self._held, *placed, crowded)
        self._held, work.leaves = new, None
        given = zip(requests, np.asarray(packed), strict=True)
        return [self._requests.gradients(*each) for each in given], metrics

    def _received(
        self, requests: Sequence[ProcessRequest], answers: Sequence[Arrays]
    ) -> Any:
        given = zip(requests, answers, strict=True)
        vectors = np.stack([self._requests.vectors(*each) for each in given])
        sharding = NamedSharding(self.mesh, PartitionSpec(None, tuple(self.plan.axes)))
        return jax.device_put(vectors, sharding)

    def _vectors(
        self,
        beside: TablePrograms | None,
        state: TablesState,
        batch: list[Any],
        received: Any,
    ) -> tuple[list[Any], tuple[Any, Any]]:
        """Returns all vectors, and (ids, found ids) of the tables on devices."""
        programs = self.programs
        given: tuple[Any, Any] = None, None
        vectors: dict[int, Any] = {}
        lookups = enumerate(programs.program.lookups)
        numbers = self._numbers(self.plan.placement)
        for place, (number, lookup) in zip(numbers, lookups, strict=True):
            vectors[place] = assemble(programs.layout, number, lookup, received)
        if beside is not None and self.plan.beside is not None:
            ids = beside.shared_out(beside.all_ids(batch))
            found, taken = beside.look_up(state.tables.beside, ids)
            vectors |= zip(self._numbers(self.plan.beside), found, strict=True)
            given = ids, taken
        return [vectors[number] for number in sorted(vectors)], given

    def _advance_dense(
        self, state: TablesState, batch: list[Any], received: Any, is_crowded: bool
    ) -> tuple[TablesState, dict[str, Any], Any]:
        beside = self._plain_beside if is_crowded else self.beside
        vectors, (ids, taken) = self._vectors(beside, state, batch, received)
        new, metrics, by_vector = self._dense_step(state, batch, vectors)
        own = [by_vector[n] for n in self._numbers(self.plan.placement)]
        packed = pack_gradients(self.programs.layout, own, received.dtype)
        if beside is not None and self.plan.beside is not None:
            numbers = self._numbers(self.plan.beside)
            own = [beside.shared_out(by_vector[n]) for n in numbers]
            given = state.tables.beside, ids, taken, own, state.step
            tables = dataclasses.replace(state.tables, beside=beside.update(*given))
            new = dataclasses.replace(new, tables=tables)
        return new, metrics, packed

    def _evaluate_dense(
        self, state: TablesState, batch: list[Any], received: Any
    ) -> dict[str, Any]:
        vectors, _ = self._vectors(self._plain_beside, state, batch, received)
        return self._dense_metrics(state, batch, vectors)

    def place(self, state: Any, placement: Any) -> TablesState:
        """Refuses to move tables, because tables in processes cannot move.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            "tables in processes of their own stay where they are. Plan anew with the "
            "counts, and let a step of that plan adopt the state"
        )

    @without_mesh
    def adopt(self, state: Any, step: TableStep) -> TablesState:
        """Copies another step's state to these processes, without files.

        Args:
            state: State of the other step; it is not donated.
            step: Step of the state; another step than this one.

        Raises:
            PlanError: The state is this step's, or of another model or optimizer.
        """
        if step is self:
            raise PlanError("the state is of this step already. Go on with it")
        return super().adopt(state, step)

    # Measurements.

    def report(self) -> SectionReport:
        """Returns the times of both sections so far, and the lags of lookups.

        Times of the first steps include compilation; ``forget_times`` resets them.
        """
        sparse, wire, batch, dense = self.pipeline.seconds()
        times = SectionTimes(
            sparse_seconds=float(sum(sparse)),
            wire_seconds=max(wire, default=0.0),
            dense_seconds=dense,
            batch_seconds=float(np.mean(batch or [0.0])),
            tables=tuple(table.name for table in self.plan.placement.tables),
        )
        measured = dataclasses.replace(self.sections, times=times, is_measured=True)
        return SectionReport(
            sections=self.sections,
            measured=measured,
            lags=dict(self.pipeline.lags),
            replaced=self.pipeline.section.replaced,
        )

    def forget_times(self) -> None:
        """Resets the measured times."""
        self.pipeline.forget_seconds()


def _on_cpu(program: Any, arrays: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        ids, bounds = program(arrays)
        return np.asarray(ids), np.asarray(bounds)


_CONSUMED = (
    "this state was donated to a step, or another state was begun since. Go "
    "on with the state that the step returned"
)


def check_job(problems: Arguments, job: Any, settings: Any) -> None:
    """Collects problems in the name of a job and in its settings.

    Args:
        problems: Collector of problems.
        job: Name of a job, or None.
        settings: Options of the job, or None.
    """
    if job is not None and not isinstance(job, str):
        problems.refuse("job", job, 'the name of a job, such as "dlrm", or None')
    if isinstance(settings, Mapping) and settings and job is None:
        problems.add("job_settings was given without job, the name of a job. Give it")
    if settings is not None and not isinstance(settings, Mapping):
        problems.refuse(
            "job_settings", settings, "settings of the job by name, or None"
        )
