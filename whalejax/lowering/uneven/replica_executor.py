"""The executor for replicas of different speeds, with unequal shares of micro-batches.

Every replica is a row of the mesh along ``data``. It runs its own programs on its own
micro-batches, and sums their results. Then the sums of all replicas are added, and each
replica updates its copy of the model. With ZeRO, it updates only its slice, and the
slices are gathered. Programs do not depend on shares, so changed shares compile
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from whalejax.capture import Captured
from whalejax.lowering.batch_record import dtype_of
from whalejax.lowering.global_arrays import (
    assemble_global,
    is_here,
    put_global,
    seen_on,
)
from whalejax.lowering.multihost.plan_agreement import Agreement
from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.runner import (
    abstract_state,
    check_compiler_options,
    fresh_state,
    laid_out,
    rest_layouts,
)
from whalejax.lowering.spmd.constraints import constraints_of
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.lowering.spmd.spmd_executor import Program
from whalejax.lowering.step_runner import Evaluation, Metrics
from whalejax.lowering.train_state import Origin, TrainState, bare, consuming
from whalejax.lowering.uneven.broadcast_init import as_first, several_kinds
from whalejax.lowering.uneven.flat_all_reduce import DATA, Exchange
from whalejax.lowering.uneven.moving_statistics import slopes
from whalejax.lowering.uneven.replica import Replica, inputs_of
from whalejax.lowering.uneven.replica_timing import AdaptiveSharesRunner
from whalejax.lowering.uneven.zero1_update import OwningReplica, ReplicaSlices
from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.spmd_search import analysed_for


MicroBatches = Mapping[int, Sequence[Any]]
"""Flat leaves of micro-batches, by number."""


class UnevenReplicasExecutor(AdaptiveSharesRunner):
    """Runs a plan with unequal shares; its methods are those of ``runner.Runner``.

    Attributes:
        program: Loss, optimizer and the plan of one replica, on the mesh of all.
        mesh: Mesh of all devices, replicas along its first axis.
        exchange: Exchange that sums the replicas' buffers.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        optimizer: optax.GradientTransformationExtraArgs,
        devices: Sequence[Any],
        batch_axes: tuple[int | None, ...],
        origin: Origin,
    ) -> None:
        self._origin = origin
        self._options: Any = dict(plan.compiler_options) or None
        self.mesh: Mesh = plan.mesh(devices)
        self._meshes = _rows(self.mesh)
        self._wholes = [NamedSharding(mesh, PartitionSpec()) for mesh in self._meshes]
        super().__init__(
            plan, [r for r, whole in enumerate(self._wholes) if is_here(whole)]
        )
        inner = plan.replica
        analysed = analysed_for(inner, captured.graph)
        constraints = constraints_of(inner, analysed, captured)
        self._programs = [
            Program(
                plan=inner,
                captured=captured,
                adapter=captured.adapter,
                constraints=constraints,
                mesh=mesh,
                optimizer=optimizer,
                batch_axes=batch_axes,
            )
            for mesh in (self.mesh, *self._meshes)
        ]
        self.program = self._programs[0]
        check_compiler_options(
            self._options, self._wholes[self._mine[0]], devices[0].platform
        )
        whole = NamedSharding(self.mesh, PartitionSpec())
        self.batch_shardings = tuple(
            named_sharding(x.spec, self.mesh) for x in plan.batch
        )
        self.shardings = laid_out(
            self.program,
            origin,
            params=[named_sharding(x.param_spec, self.mesh) for x in plan.trained],
            followers=[
                named_sharding(x.optimizer_spec, self.mesh) for x in plan.trained
            ],
            rest=rest_layouts(self.program, self.mesh),
            others=whole,
        )
        self._agreement = Agreement(self.mesh)
        self.watch = Watch(alone=not self.mesh.is_multi_process)

    # Initialisation.

    def init_state(self, build: Callable[..., Any], *arguments: Any) -> TrainState:
        whole = fresh_state(self.program, self._origin, build)
        copies = {
            r: jax.jit(self._replica_init(whole, r), out_shardings=self._on(r))(
                *arguments
            )
            for r in self._mine
        }
        if several_kinds(self.mesh):
            self._agree()
            places = {replica: self._on(replica) for replica in self._mine}
            same = as_first(copies, places, self.mesh, self._meshes)
            # Leaves that replicas shard keep their own slices.
            copies = {
                r: jax.tree.map(
                    lambda own, first, place: own if _cut(place) else first,
                    copies[r],
                    same[r],
                    places[r],
                )
                for r in copies
            }
        return self._assemble_global(copies)

    def _replica_init(
        self, whole: Callable[..., TrainState], r: int
    ) -> Callable[..., Any]:
        if not self._plan.zero:
            return whole
        slices = ReplicaSlices(
            self._programs[1 + r], self._abstract, r, len(self._meshes)
        )

        def replica_state(*arguments: Any) -> TrainState:
            state = whole(*arguments)
            opt_state = slices.slice_optimizer_state(state.opt_state)
            return dataclasses.replace(state, opt_state=opt_state)

        return replica_state

    def _agree(self) -> None:
        self._agreement.check(
            self.program, lambda: {"shares": self.shares}, plan=self._plan
        )

    def _on(self, replica: int, *, whole: bool = True) -> TrainState:
        result: TrainState = jax.tree.map(
            lambda s: NamedSharding(self._meshes[replica], s.spec),
            self.shardings if whole else bare(self.shardings),
        )
        return result

    def _assemble_global(self, copies: Mapping[int, TrainState]) -> TrainState:
        result: TrainState = jax.tree.map(
            lambda sharding, *leaves: assemble_global(
                leaves, sharding, _times(leaves[0].shape, sharding, len(self._meshes))
            ),
            self.shardings,
            *copies.values(),
        )
        return result

    def _local_view(
        self, state: TrainState, replica: int, *, whole: bool = True
    ) -> TrainState:
        local_view: TrainState = jax.tree.map(
            lambda leaf, sharding: seen_on(
                leaf, sharding, _times(leaf.shape, sharding, 1 / len(self._meshes))
            ),
            state,
            self._on(replica, whole=whole),
        )
        return local_view

    # Running.

    def _issue_step(
        self, state: TrainState, batch: MicroBatches
    ) -> tuple[TrainState, Metrics]:
        seen = {r: self._local_view(state, r) for r in self._mine}
        told = self.exchange.add(self._ran(seen, batch))
        with consuming(state):
            new, metrics, paces = self._finished(seen, told)
        issue_step = self._assemble_global(new), self._agreed(metrics)
        self._settle(paces)
        return issue_step

    def _finished(
        self, seen: Mapping[int, TrainState], told: Mapping[int, Sequence[Any]]
    ) -> tuple[dict[int, TrainState], dict[int, Metrics], Any]:
        new, metrics, paces = dict[int, TrainState](), dict[int, Metrics](), None
        if not self._plan.zero:
            for r in self._mine:
                new[r], metrics[r], paces = self._replicas[r].finish(seen[r], told[r])
            self._begins = {r: metrics[r]["loss"] for r in self._mine}
            return new, metrics, paces
        packed = {}
        for r, one in self._owning.items():
            new[r], metrics[r], paces, packed[r] = one.finish_own(seen[r], told[r])
        gathered = self.gathering.add(packed)
        for r, one in self._owning.items():
            leaves, self._begins[r] = one.collect(gathered[r])
            new[r] = one.with_gathered(new[r], leaves)
        return new, metrics, paces

    def _ran(
        self, seen: Mapping[int, TrainState], batch: MicroBatches
    ) -> dict[int, list[Any]]:
        timed = self._start()
        sums = {r: self._replicas[r].begin() for r in self._mine}
        rest = {r: seen[r].rest for r in self._mine}
        for replica, number in self._issue_order():
            sums[replica], rest[replica] = self._replicas[replica].add(
                sums[replica],
                rest[replica],
                *inputs_of(self.program, seen[replica]),
                self._put_micro_batch(replica, batch[number]),
                self._numbers[replica][number],
            )
        ran = {}
        for r in self._mine:
            count, later = self.shares[r], sum(self.shares[r + 1 :])
            numbers = [
                put_global(np.float32(n), self._wholes[r]) for n in (count, later)
            ]
            ran[r], done = self._replicas[r].pack(
                sums[r], seen[r].rest, rest[r], *numbers, self._pace(r, self._meshes[r])
            )
            if r in timed:
                self._stopwatches[r].stop(done, count)
        return ran

    def _issue_evaluation(self, state: TrainState, batch: MicroBatches) -> Evaluation:
        seen = {r: self._local_view(state, r, whole=False) for r in self._mine}
        sums = {r: self._replicas[r].begin_eval() for r in self._mine}
        for replica, number in self._issue_order():
            sums[replica] = self._replicas[replica].evaluate(
                sums[replica],
                *inputs_of(self.program, seen[replica]),
                self._put_micro_batch(replica, batch[number]),
                self._numbers[replica][number],
            )
        told = self._telling.add(
            {r: self._replicas[r].pack_sums(sums[r]) for r in self._mine}
        )
        issue_evaluation: Evaluation = self._agreed(
            {r: self._replicas[r].report(told[r]) for r in self._mine}
        )
        return issue_evaluation

    def lower(self, state: TrainState, batch: Sequence[Any]) -> Any:
        raise PlanError(
            "every replica of this plan has programs of its own, so there is no single "
            "program to lower"
        )

    def _issue_order(self) -> list[tuple[int, int]]:
        numbers = micro_batch_ranges(self.shares)
        return [
            (r, numbers[r][turn])
            for turn in range(max(self.shares))
            for r in self._mine
            if turn < len(numbers[r])
        ]

    def _put_micro_batch(self, replica: int, leaves: Sequence[Any]) -> list[Any]:
        places = [
            named_sharding(x.spec, self._meshes[replica]) for x in self._plan.batch
        ]
        return [put_global(x, place) for x, place in zip(leaves, places, strict=True)]

    @functools.cached_property
    def _numbers(self) -> dict[int, list[Any]]:
        count = self._plan.num_micro_batches
        return {
            r: [put_global(np.int32(m), self._wholes[r]) for m in range(count)]
            for r in self._mine
        }

    def _agreed(self, copies: Mapping[int, Any]) -> Any:
        whole = NamedSharding(self.mesh, PartitionSpec())
        result: Any = jax.tree.map(
            lambda *leaves: assemble_global(leaves, whole), *copies.values()
        )
        return result

    # Programs.

    @functools.cached_property
    def _replicas(self) -> dict[int, Replica]:
        if self._plan.zero:
            return {**self._owning}
        return {
            r: Replica(*self._replica_arguments(r), **self._common) for r in self._mine
        }

    @functools.cached_property
    def _owning(self) -> dict[int, OwningReplica]:
        return {
            r: OwningReplica(*self._replica_arguments(r), replica=r, **self._common)
            for r in self._mine
        }

    def _replica_arguments(self, replica: int) -> tuple[Any, ...]:
        return self._programs[1 + replica], self._abstract, self._micro_batch

    @functools.cached_property
    def _common(self) -> dict[str, Any]:
        return {
            "replicas": len(self._meshes),
            "slopes": slopes(self.program.captured),
            "options": self._options,
        }

    @functools.cached_property
    def _abstract(self) -> TrainState:
        return abstract_state(self.program, self._origin)

    @property
    def _micro_batch(self) -> list[Any]:
        micro_batch = []
        for leaf, axis in zip(self._plan.batch, self.program.batch_axes, strict=True):
            shape = list(leaf.shape)
            if axis is not None:
                shape[axis] //= self._plan.num_micro_batches
            micro_batch.append(jax.ShapeDtypeStruct(tuple(shape), dtype_of(leaf.dtype)))
        return micro_batch

    @functools.cached_property
    def exchange(self) -> Exchange:
        return self._exchange(0)

    @functools.cached_property
    def gathering(self) -> Exchange:
        avals = self._owning[self._mine[0]].gathered.avals
        return Exchange(self.mesh, self._meshes, avals, gathers=True)

    @functools.cached_property
    def _telling(self) -> Exchange:
        return self._exchange(1)

    def _exchange(self, which: int) -> Exchange:
        avals = self._replicas[self._mine[0]].avals[which]
        return Exchange(self.mesh, self._meshes, avals)


def _times(
    shape: tuple[int, ...], sharding: NamedSharding, times: float
) -> tuple[int, ...]:
    cut = _cut(sharding)
    return tuple(
        round(size * times) if dim in cut else size for dim, size in enumerate(shape)
    )


def _cut(sharding: NamedSharding) -> list[int]:
    return [
        dim
        for dim, axes in enumerate(sharding.spec)
        if axes == DATA or (isinstance(axes, tuple) and DATA in axes)
    ]


def _rows(mesh: Mesh) -> list[Mesh]:
    assert mesh.axis_names[0] == DATA
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return [
        Mesh(mesh.devices[r : r + 1], mesh.axis_names, axis_types=kinds)
        for r in range(mesh.devices.shape[0])
    ]
