"""The executor for parallel pipelines with unequal shares of micro-batches.

Every replica is a separate pipeline of stage programs, divided for its devices. It runs
the micro-batches of its share by its own schedule. Then all replicas sum their
gradients, stage by stage, and each updates its copy of the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.adapters.leaves import is_key
from whalejax.capture import Captured
from whalejax.lowering.global_arrays import (
    StageMetrics,
    absent,
    assemble_global,
    impl_of,
    is_here,
    put_global,
    seen_on,
    stages_mesh,
    wrapped,
)
from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.multihost.plan_agreement import Agreement
from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.pipeline_mpmd.evaluation import StageProgramsEvaluator
from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)
from whalejax.lowering.pipeline_mpmd.stage_trace import ABSENT
from whalejax.lowering.pipeline_mpmd.step import SchedulePass
from whalejax.lowering.spmd.spmd_executor import Sums
from whalejax.lowering.step_runner import Evaluation, Metrics
from whalejax.lowering.train_state import Origin, TrainState, bare, consuming
from whalejax.lowering.uneven.broadcast_init import several_kinds
from whalejax.lowering.uneven.moving_statistics import StatisticsReduction, slopes
from whalejax.lowering.uneven.replica_timing import AdaptiveSharesRunner, told_size
from whalejax.lowering.uneven.stage_groups import StageGroup, groups_of, together
from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.pipeline.schedules import ScheduleRow, schedule
from whalejax.planner.pipeline.transfer_order import ScheduledTransfer
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


WHOLE = PartitionSpec()

MicroBatches = Mapping[int, Sequence[Any]]
"""Flat leaves of micro-batches, by number."""


class UnevenPipelinesExecutor(AdaptiveSharesRunner):
    """Runs a plan of parallel pipelines; its methods are those of ``runner.Runner``.

    Attributes:
        pipelines: Executor of each pipeline.
        program: Loss, optimizer and plan of the model on the first replica's devices.
        mesh: Mesh of all devices by stage, with the stages of the first pipeline first.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        optimizer: optax.GradientTransformationExtraArgs,
        devices: Sequence[Any],
        batch_axes: tuple[int | None, ...],
        origin: Origin,
        *,
        home: UnevenPipelinesExecutor | None = None,
    ) -> None:
        """Traces the pipelines for their shapes, and compiles nothing.

        Args:
            plan: Plan to run.
            captured: Traced loss.
            optimizer: Optimizer of the model.
            devices: Devices of the plan, in node order.
            batch_axes: Batch dimension of each flat batch leaf, or None.
            origin: Identity of the step.
            home: Executor of the same plan whose states are evaluated; default None.
        """
        each = len(devices) // len(plan.pipelines)
        self.pipelines: list[StageProgramsExecutor] = []
        for r, own in enumerate(plan.pipelines):
            some = devices[r * each : (r + 1) * each]
            given = own, captured, optimizer, some, batch_axes, origin
            self.pipelines.append(
                StageProgramsExecutor(*given)
                if home is None
                else StageProgramsEvaluator(home.pipelines[r], *given)
            )
        super().__init__(
            plan, [r for r, one in enumerate(self.pipelines) if any(one.here)]
        )
        self.program = self.pipelines[0].program
        self.mesh: Mesh = stages_mesh(plan, devices)
        self.shardings: TrainState = jax.tree.map(
            together, *[pipeline.shardings for pipeline in self.pipelines]
        )
        self.batch_shardings = self.pipelines[self._mine[0]].batch_shardings
        self._agreement = Agreement(self.mesh)
        self.watch = Watch(alone=not self.mesh.is_multi_process)

    # Initialisation.

    def init_state(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        copies = {
            r: self.pipelines[r].init_state(build, *arguments) for r in self._mine
        }
        if several_kinds(self.mesh):
            self._agree()
            copies = self._as_first(copies)
        state: TrainState = self._assemble_global(copies)
        return state

    def _as_first(self, copies: Mapping[int, TrainState]) -> dict[int, TrainState]:
        owners = [jax.tree.leaves(pipeline.stages) for pipeline in self.pipelines]
        leaves = {r: jax.tree.leaves(copy) for r, copy in copies.items()}
        specs = [s.spec for s in jax.tree.leaves(self.shardings)]
        stages = [*zip(*owners, strict=True)]
        for group in self._groups.values():
            several = [i for i, own in enumerate(stages) if own == group.stages]
            mine = {r: [leaves[r][i] for i in several] for r in group.here}
            first = group.as_first(mine, [specs[i] for i in several])
            for r, same in first.items():
                for i, leaf in zip(several, same, strict=True):
                    leaves[r][i] = leaf
        trees: Any = {r: jax.tree.structure(copy) for r, copy in copies.items()}
        return {r: trees[r].unflatten(several) for r, several in leaves.items()}

    def _agree(self) -> None:
        self._agreement.check(self.program, self._described, plan=self._plan)

    def _described(self) -> dict[str, object]:
        each = [pipeline.moves.described() for pipeline in self.pipelines]
        result: dict[str, object] = {"shares": self.shares}
        for name in each[0]:
            result[f"{name} of pipelines"] = [one[name] for one in each]
        return result

    def _assemble_global(self, copies: Mapping[int, Any]) -> Any:
        def one(sharding: NamedSharding, *leaves: Any) -> Any:
            here = [x for x in leaves if is_here(x.sharding)]
            return (
                assemble_global(here, sharding) if here else absent(leaves[0], sharding)
            )

        return jax.tree.map(one, self.shardings, *copies.values())

    def _local_view(
        self, state: TrainState, replica: int, *, whole: bool = True
    ) -> TrainState:
        places = self.pipelines[replica].shardings

        def one(leaf: Any, sharding: NamedSharding) -> Any:
            there = seen_on(leaf, sharding)
            return absent(leaf, sharding) if there is None else there

        local_view: TrainState = jax.tree.map(
            one, state, places if whole else bare(places)
        )
        return local_view

    # Running.

    def _issue_step(
        self, state: TrainState, batch: MicroBatches
    ) -> tuple[TrainState, Metrics]:
        seen = {r: self._local_view(state, r) for r in self._mine}
        timed = self._start()
        runs = self._ran(seen, batch)
        gradients = {r: run.summed() for r, run in runs.items()}
        for r in timed:  # A local name would keep gradients alive during the exchange.
            self._stopwatches[r].stop(
                [x for x in gradients[r] if x is not ABSENT], self.shares[r]
            )
        losses, rest = self._reduce_across_pipelines(runs, gradients)
        paces = self._paces()
        new, metrics = dict[int, TrainState](), dict[int, Metrics]()
        with consuming(state):
            for r in self._mine:
                new[r], metrics[r] = self.pipelines[r].finished(
                    seen[r], losses[r], gradients[r], rest[r]
                )
        self._begins = {r: metrics[r]["loss"] for r in self._mine}
        issue_step = self._assemble_global(new), self._agreed(metrics)
        self._settle(paces)
        return issue_step

    def _ran(
        self,
        seen: Mapping[int, TrainState],
        batch: MicroBatches,
        *,
        keeps: bool = True,
    ) -> dict[int, SchedulePass]:
        numbers = micro_batch_ranges(self.shares)
        runs = {
            r: SchedulePass(
                self.pipelines[r],
                seen[r],
                self._batch(r, batch),
                keeps=keeps,
                first_micro_batch=numbers[r].start,
            )
            for r in self._mine
        }
        orders = [self._order(r, self.shares[r]) for r in self._mine]
        for events in itertools.zip_longest(*orders):
            for r, event in zip(self._mine, events, strict=True):
                if event is not None and (keeps or event.action == "forward"):
                    self.watch.doing = event
                    runs[r].do(event)
        return runs

    @functools.cached_property
    def _orders(
        self,
    ) -> dict[tuple[int, int], tuple[ScheduleRow | ScheduledTransfer, ...]]:
        return {}

    def _order(
        self, replica: int, count: int
    ) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
        if not count:
            return ()
        key = replica, count
        if key not in self._orders:
            one = self.pipelines[replica]
            table = schedule(one.table.name, one.table.num_stages, count)
            self._orders[key] = one.moves.order_of(table)
        return self._orders[key]

    def _batch(self, replica: int, batch: MicroBatches) -> list[Any]:
        numbers, axes = (
            micro_batch_ranges(self.shares)[replica],
            self.program.batch_axes,
        )
        result = []
        for i, (leaf, axis) in enumerate(zip(self._plan.batch, axes, strict=True)):
            sharding = self.pipelines[replica].batch_shardings[i]
            parts = [batch[m][i] for m in numbers]
            aval = self._batch_avals[i]
            if not is_here(sharding):
                result.append(absent(aval, sharding))
            elif axis is None and parts:
                result.append(put_global(parts[0], sharding))
            else:
                where = (slice(None),) * ((axis or 0) % max(1, len(leaf.shape)))
                result.append(self._filled(aval, where, numbers, parts, sharding))
        return result

    def _filled(
        self,
        aval: Any,
        before: tuple[slice, ...],
        numbers: range,
        parts: Sequence[Any],
        sharding: NamedSharding,
    ) -> Any:
        raw = jax.eval_shape(jax.random.key_data, aval) if is_key(aval) else aval
        whole = np.zeros(raw.shape, raw.dtype)
        cut = MicroBatchRows.of(self._plan)
        for m, part in zip(numbers, parts, strict=True):
            here = cut.index(raw.shape[len(before)], len(before), m)
            whole[here] = jax.random.key_data(part) if is_key(part) else part
        return wrapped(put_global(whole, sharding), impl_of(aval))

    @functools.cached_property
    def _batch_avals(self) -> list[Any]:
        first = self.pipelines[0].first_batch
        avals = self.program.captured.jaxpr.in_avals[first:]
        return [
            jax.ShapeDtypeStruct(leaf.shape, aval.dtype)
            for leaf, aval in zip(self._plan.batch, avals, strict=False)
        ]

    # Reductions over pipelines.

    @functools.cached_property
    def _groups(self) -> dict[tuple[int, ...], StageGroup]:
        meshes = [pipeline.meshes for pipeline in self.pipelines]
        return groups_of([*self._owners, self._starts, self._ends], meshes)

    @property
    def _starts(self) -> tuple[int, ...]:
        """The first stage of each pipeline, which finishes the backward pass last."""
        return (0,) * len(self.pipelines)

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(len(pipeline.plans) - 1 for pipeline in self.pipelines)

    @functools.cached_property
    def _owners(self) -> list[tuple[int, ...]]:
        count = self.pipelines[0].first_batch
        return [
            tuple(pipeline.owner(n) for pipeline in self.pipelines)
            for n in range(count)
        ]

    @property
    def _first_rest(self) -> int:
        return len(self.program.adapter.param_paths)

    @functools.cached_property
    def _statistics_reduction(self) -> StatisticsReduction:
        counters = self.pipelines[0].division.units.counters
        return StatisticsReduction(
            slopes=slopes(self.program.captured),
            counters={n - self._first_rest: x for n, x in counters.items()},
            frozen=self.program.captured.frozen,
            count=self._plan.num_micro_batches,
            steady=self.program.captured.steady.leaves,
        )

    def _reduce_across_pipelines(
        self, runs: Mapping[int, SchedulePass], gradients: Mapping[int, list[Any]]
    ) -> tuple[dict[int, Sums | None], dict[int, Any]]:
        """Reduces gradients in place; returns the reduced losses and other state."""
        losses: dict[int, Sums | None] = dict.fromkeys(runs)
        rest = {r: [*jax.tree.leaves(run.state.rest)] for r, run in runs.items()}
        for stages, group in self._groups.items():
            mine = [n for n, own in enumerate(self._owners) if own == stages]
            params = [n for n in mine if n < self._first_rest]
            others = [n for n in mine if n >= self._first_rest]
            specs = [
                self.pipelines[0].gradient_sharding(n, stages[0]).spec for n in params
            ]
            told = {r: self._told_of(runs[r], others) for r in group.here}
            ends = stages == self._ends
            sums = {r: runs[r].losses() if ends else None for r in group.here}
            arrays = {
                r: [
                    *(_pop_array(gradients[r], n) for n in params),
                    *told[r].values(),
                    *jax.tree.leaves(sums[r]),
                ]
                for r in group.here
            }
            count = len(next(iter(arrays.values()), ()))
            result = group.add(arrays, [*specs, *[WHOLE] * (count - len(specs))])
            for r, several in result.items():
                flat = iter(several)
                for n in params:
                    gradients[r][n] = next(flat)
                given = {n: next(flat) for n in told[r]}
                for n in others:
                    i = n - self._first_rest
                    rest[r][i] = self._after(i, rest[r][i], given.get(n))
                if ends:
                    tree: Any = jax.tree.structure(sums[r])
                    losses[r] = tree.unflatten(flat)
        return losses, {
            r: jax.tree.unflatten(jax.tree.structure(run.state.rest), rest[r])
            for r, run in runs.items()
        }

    def _told_of(self, run: SchedulePass, numbers: Sequence[int]) -> dict[int, Any]:
        old = jax.tree.leaves(run.state.rest)
        replica = [*map(id, self.pipelines)].index(id(run.apart))
        ran, later = self.shares[replica], sum(self.shares[replica + 1 :])
        return {
            n: self._tell(i, old[i], run.leaves[n], np.float32(ran), np.float32(later))
            for n in numbers
            for i in [n - self._first_rest]
            if not self._statistics_reduction.is_own(i, old[i])
        }

    @functools.cached_property
    def _tell(self) -> Callable[..., Any]:
        return jax.jit(self._statistics_reduction.contribution, static_argnums=0)

    @functools.cached_property
    def _after(self) -> Callable[..., Any]:
        return jax.jit(self._statistics_reduction.after, static_argnums=0)

    def _paces(self) -> Any:
        """Returns the measured seconds of all pipelines, on all devices here.

        The processes of each pipeline's first stage report them, as that stage finishes
        last.
        """
        group = self._groups[self._starts]
        mine = {r: [self._largest(self._pace(r, group.rows[r]))] for r in group.here}
        mine = {
            r: [seen_on(x, self.pipelines[r].whole[0]) for x in xs]
            for r, xs in mine.items()
        }
        result = group.add(mine, [WHOLE])
        told = {
            r: self._tellers[r](result[r] if r in result else [None])["paces"]
            for r in self._mine
        }
        return told[self._mine[0]]

    @functools.cached_property
    def _largest(self) -> Callable[..., Any]:
        return jax.jit(lambda paces: paces.max(0))

    @functools.cached_property
    def _tellers(self) -> dict[int, StageMetrics]:
        aval = jax.ShapeDtypeStruct((told_size(len(self.pipelines)),), jnp.float32)
        return {
            r: StageMetrics({"paces": aval}, self.pipelines[r].whole, stage=0)
            for r in self._mine
        }

    def _agreed(self, copies: Mapping[int, Any]) -> Any:
        if not self.mesh.is_multi_process:
            return copies[self._mine[0]]
        everywhere = {r: NamedSharding(self.pipelines[r].mesh, WHOLE) for r in copies}
        spread = {
            # Metrics of a multi-process pipeline are already on all its devices.
            r: jax.device_put(told, everywhere[r])
            if everywhere[r].is_fully_addressable
            else told
            for r, told in copies.items()
        }
        whole = NamedSharding(self.mesh, WHOLE)
        result: Any = jax.tree.map(
            lambda *leaves: assemble_global(leaves, whole), *spread.values()
        )
        return result

    def _issue_evaluation(self, state: TrainState, batch: MicroBatches) -> Evaluation:
        seen = {r: self._local_view(state, r, whole=False) for r in self._mine}
        runs = self._ran(seen, batch, keeps=False)
        for r in self._mine:
            self.pipelines[r].moves.settle()
        group = self._groups[self._ends]
        sums = {r: runs[r].losses() for r in group.here}
        flat = {r: jax.tree.leaves(one) for r, one in sums.items()}
        count = len(next(iter(flat.values()), ()))
        added = group.add(flat, [WHOLE] * count)
        told = {
            r: self.pipelines[r].reported(
                jax.tree.unflatten(jax.tree.structure(sums[r]), added[r])
                if r in added
                else None
            )
            for r in self._mine
        }
        issue_evaluation: Evaluation = self._agreed(told)
        return issue_evaluation

    def lower(self, state: TrainState, batch: Sequence[Any]) -> Any:
        raise PlanError(
            "the stages of this plan have programs of their own, so there is no one "
            "program to lower"
        )


def _pop_array(several: list[Any], number: int) -> Any:
    pop_array, several[number] = several[number], ABSENT
    return pop_array
