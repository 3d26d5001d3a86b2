"""Transfers between pipeline stages: inputs, values, cotangents, sums."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from whalejax.lowering.multihost.plan_agreement import Agreement
from whalejax.lowering.pipeline_mpmd.interface import StageExecutor
from whalejax.lowering.pipeline_mpmd.stage_channels import (
    Coming,
    StageChannel,
    TransferThread,
)
from whalejax.lowering.spmd.evaluate import named_sharding
from whalejax.planner.pipeline.program_cut import Value
from whalejax.planner.pipeline.schedules import Action, Schedule, ScheduleRow
from whalejax.planner.pipeline.transfer_order import ScheduledTransfer, issue_order


class StageTransfers:
    """Moves arrays between the stages of a pipeline.

    Every move is made by all processes in one order, that of the program and of
    ``order``; a process that holds none of the devices passes over it.
    """

    def __init__(self, apart: StageExecutor) -> None:
        self._apart = apart
        self._ways: dict[Hashable, StageChannel] = {}
        self._aside: TransferThread | None = None
        mesh = apart.mesh
        self._agreement = Agreement(mesh)
        rows: Any = mesh.devices
        self._on_cpus = mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"
        alone = all(len({d.process_index for d in row}) == 1 for row in rows)
        if self._on_cpus and alone:
            # A CPU process that waits for another does nothing else in that thread.
            self._aside = TransferThread()

    def agree(self) -> None:
        """Compares the plan with that of the other processes, the first time.

        Raises:
            PlanError: They have other layouts, or another order.
        """
        apart = self._apart
        self._agreement.check(apart.program, self.described, plan=apart.plan)

    def described(self) -> dict[str, object]:
        """Returns values beside the plan that must be equal in all processes,
        by name.
        """
        layouts = [
            (
                plan.model_hash,
                plan.axes,
                *((x.path, x.param_spec, x.optimizer_spec) for x in plan.leaves),
            )
            for plan in self._apart.plans
        ]
        places = [[d.id for d in row] for row in self._apart.mesh.devices]
        return {
            "order of what stages hand over": self.order,
            "layouts of stages": layouts,
            "devices": places,
        }

    def brought(self, number: int, stage: int, leaf: Any) -> Any:
        """An input of the loss on another stage; None if that is not here.

        Args:
            number: Number of the input.
            stage: Stage that receives it.
            leaf: Leaf on the stage that owns it.
        """
        apart = self._apart
        return self._send(
            ("brought", number, stage),
            [leaf],
            [leaf],
            [apart.input_sharding(number, apart.owner(number))],
            [apart.input_sharding(number, stage)],
        )()[0]

    def collect_gradient(self, number: int, stage: int, gradient: Any) -> Any:
        """The gradient of a parameter where it belongs; None if that is not here.

        Args:
            number: Number of the parameter.
            stage: Stage that computed the gradient.
            gradient: Or None if that is not here.
        """
        apart = self._apart
        source, target = (
            apart.gradient_sharding(number, s) for s in (stage, apart.owner(number))
        )
        if source == target:
            return gradient
        aval = apart.wide_params[number]
        key = "gathered", number, stage
        return self._send(key, [gradient], [aval], [source], [target])()[0]

    def transfer(
        self, handing: ScheduledTransfer, arrays: Sequence[Any] | None
    ) -> Coming:
        """Transfers the values of one virtual stage to another; None if the receiver is
        not here.

        Args:
            handing: Transfer to make: its source and its target.
            arrays: Arrays of the source; None if another process holds them.
        """
        values = self.values_of(handing)
        way = handing.action, handing.source, handing.target
        return self._send(
            way,
            [None] * len(values) if arrays is None else arrays,
            [self._apart.avals[v] for v in values],
            [self.layout(v, handing.source) for v in values],
            [self.layout(v, handing.target) for v in values],
            self._aside,
        )

    def settle(self) -> None:
        """Waits until all that was handed over is, before anything else is moved."""
        if self._aside is not None:
            jax.block_until_ready(self._aside.settle())

    def _send(
        self,
        key: Hashable,
        arrays: Sequence[Any],
        avals: Sequence[Any],
        sources: Sequence[NamedSharding],
        targets: Sequence[NamedSharding],
        aside: TransferThread | None = None,
    ) -> Coming:
        if key not in self._ways:
            # Where a stage lies in several processes, its own programs wait as well.
            alone = self._on_cpus and self._aside is None
            self._ways[key] = StageChannel(avals, sources, targets, alone=alone)
        return self._ways[key].send(arrays, aside)

    def layout(self, value: Value, place: int) -> NamedSharding:
        """Returns the sharding of a transferred value at one virtual stage."""
        apart = self._apart
        stage = place % len(apart.plans)
        return named_sharding(apart.layouts[stage].get(value, ()), apart.meshes[stage])

    def values_of(self, handing: ScheduledTransfer) -> list[Value]:
        """Returns the values of a transfer, or those whose cotangents are
        transferred.
        """
        values: list[Value] = self.targets[handing.action][handing.source][
            handing.target
        ]
        return values

    @functools.cached_property
    def targets(self) -> Mapping[Action, list[dict[int, list[Value]]]]:
        """Returns the values that each virtual stage transfers, by action and target.

        Values go to those who read them, and cotangents to those who made these, where
        a gradient flows through them.
        """
        division, ahead, back = self._apart.division, [], []
        for part, site in zip(division.parts, self._apart.sites, strict=True):
            readers: dict[int, list[Value]] = {}
            for value in part.exports:
                for reader in division.readers(value):
                    readers.setdefault(reader, []).append(value)
            makers: dict[int, list[Value]] = {}
            for value in site.place.received:
                makers.setdefault(division.made_at[value], []).append(value)
            ahead.append(readers)
            back.append(makers)
        return {"forward": ahead, "backward": back}

    @functools.cached_property
    def order(self) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
        """Returns the order in which all processes issue actions and transfers."""
        return self.order_of(self._apart.table)

    def order_of(self, table: Schedule) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
        """The same, with another number of micro-batches.

        Args:
            table: The schedule with it.
        """
        apart = self._apart
        pairs = {
            action: [(a, b) for a, several in enumerate(places) for b in several]
            for action, places in self.targets.items()
        }
        count = len(apart.plans)
        seconds = [
            apart.plans[p % count].time.step_seconds for p in range(len(apart.sites))
        ]
        # A backward pass is twice a forward pass, and in halves where it is split.
        shares: dict[Action, float] = {"forward": 1.0, "backward": 2.0}
        if table.splits_backward:
            shares = dict.fromkeys(table.actions, 1.0)
        return issue_order(
            table,
            pairs["forward"],
            pairs["backward"],
            {a: [share * s for s in seconds] for a, share in shares.items()},
        )
