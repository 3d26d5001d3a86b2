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

    All processes make transfers in the order of the program and of ``order``. A process
    without devices of either stage skips a transfer.
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
            # On CPUs a wait for another process blocks the thread.
            self._aside = TransferThread()

    def agree(self) -> None:
        """Compares the plan with those of other processes, at the first call.

        Raises:
            PlanError: Other processes have other layouts or another order.
        """
        apart = self._apart
        self._agreement.check(apart.program, self.described, plan=apart.plan)

    def described(self) -> dict[str, object]:
        """Returns further values that must be equal in all processes, by name."""
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
            "order of transfers between stages": self.order,
            "layouts of stages": layouts,
            "devices": places,
        }

    def brought(self, number: int, stage: int, leaf: Any) -> Any:
        """Copies an input of the loss to another stage.

        Args:
            number: Number of the input.
            stage: Stage that receives the input.
            leaf: Leaf on the stage that owns it.

        Returns:
            The copy; None if this process has no devices of the receiving stage.
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
        """Moves a gradient to its owner.

        Args:
            number: Number of the input of the loss to which the gradient belongs.
            stage: Stage that computed the gradient.
            gradient: Gradient; None if another process has it.

        Returns:
            The gradient; None if this process has no devices of the owner.
        """
        apart = self._apart
        source, target = (
            apart.gradient_sharding(number, s) for s in (stage, apart.owner(number))
        )
        if source == target:
            return gradient
        aval = apart.gradient_aval(number)
        key = "gathered", number, stage
        return self._send(key, [gradient], [aval], [source], [target])()[0]

    def transfer(
        self, handing: ScheduledTransfer, arrays: Sequence[Any] | None
    ) -> Coming:
        """Transfers values between virtual stages.

        The results are None if another process receives them.

        Args:
            handing: Source and target of the transfer.
            arrays: Arrays of the source; None if another process has them.
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
        """Waits for all transfers so far, before anything else is moved."""
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
            # The programs of a stage with several processes wait for each other too.
            alone = self._on_cpus and self._aside is None
            self._ways[key] = StageChannel(avals, sources, targets, alone=alone)
        return self._ways[key].send(arrays, aside)

    def layout(self, value: Value, place: int) -> NamedSharding:
        """Returns the sharding of a transferred value at one virtual stage."""
        apart = self._apart
        stage = place % len(apart.plans)
        return named_sharding(apart.layouts[stage].get(value, ()), apart.meshes[stage])

    def values_of(self, handing: ScheduledTransfer) -> list[Value]:
        """Returns the transferred values, or for cotangents the values they are of."""
        values: list[Value] = self.targets[handing.action][handing.source][
            handing.target
        ]
        return values

    @functools.cached_property
    def targets(self) -> Mapping[Action, list[dict[int, list[Value]]]]:
        """The values that each virtual stage transfers, by action and target.

        Values go to their readers. Cotangents go to the virtual stages that computed
        the differentiable values.
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
        """The order in which all processes issue actions and transfers."""
        return self.order_of(self._apart.table)

    def order_of(self, table: Schedule) -> tuple[ScheduleRow | ScheduledTransfer, ...]:
        """Returns ``order`` for another number of micro-batches.

        Args:
            table: Schedule with this number.
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
        # A backward pass takes as long as two forward passes, each half of it as one.
        shares: dict[Action, float] = {"forward": 1.0, "backward": 2.0}
        if table.splits_backward:
            shares = dict.fromkeys(table.actions, 1.0)
        return issue_order(
            table,
            pairs["forward"],
            pairs["backward"],
            {a: [share * s for s in seconds] for a, share in shares.items()},
        )
