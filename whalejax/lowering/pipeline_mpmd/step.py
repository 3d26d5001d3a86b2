"""One pass of a batch through the virtual stages, by the rows of a schedule.

Programs are issued asynchronously, before the programs that they depend on have
finished. Values are released after their last read. A process issues the work of its
own devices and skips the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from whalejax.jaxpr.steps import FixedValue
from whalejax.lowering.global_arrays import seen_on
from whalejax.lowering.pipeline_mpmd.interface import StageExecutor
from whalejax.lowering.pipeline_mpmd.stage_channels import Coming
from whalejax.lowering.pipeline_mpmd.stage_programs import VirtualStagePrograms
from whalejax.lowering.pipeline_mpmd.stage_trace import ABSENT
from whalejax.lowering.spmd.spmd_executor import Sums
from whalejax.lowering.train_state import TrainState
from whalejax.planner.pipeline.program_cut import Value
from whalejax.planner.pipeline.schedules import Action, ScheduleRow
from whalejax.planner.pipeline.transfer_order import ScheduledTransfer


class SchedulePass:
    """One pass over a batch.

    Attributes:
        apart: Executor of the stages.
        leaves: Current inputs of the loss.
        copies: Copies of other stages' arrays, by stage and number.
        common: Values that all micro-batches read, by virtual stage and number.
        live: Residuals for the backward pass, by virtual stage and micro-batch.
        coming: Transferred arrays, by action, virtual stage and micro-batch.
        leaving: Computed values that are not transferred yet.
        sums: Accumulated sums of each virtual stage.
        gradients: Accumulated gradients of each virtual stage.
        batch_gradients: Gradients by the batch leaves that the adapter's
            ``batch_gradients`` names; empty until ``summed`` was called.
    """

    def __init__(
        self,
        apart: StageExecutor,
        state: TrainState,
        batch: Sequence[Any],
        *,
        keeps: bool = True,
        first_micro_batch: int = 0,
    ) -> None:
        """Copies the inputs to every stage, and runs nothing yet.

        Args:
            apart: Executor of the stages.
            state: State before the step.
            batch: Flat leaves of the global batch.
            keeps: Whether a backward pass follows; default True.
            first_micro_batch: Number, in the global batch, of the schedule's first
                micro-batch; default 0.
        """
        self.apart = apart
        self.keeps = keeps
        self.first_micro_batch = first_micro_batch
        self.state = state
        self.live: dict[tuple[int, int], dict[int, Any]] = {}
        self.coming: dict[tuple[Action, int, int], list[tuple[list[Value], Coming]]]
        self.coming = defaultdict(list)
        self.leaving: dict[ScheduledTransfer, list[Any]] = {}
        params = jax.tree.leaves(state.params)
        self.leaves = [*params, *jax.tree.leaves(state.rest), *batch]
        self.first = len(params)
        self.copies: dict[tuple[int, int], Any] = {}
        for site in apart.sites:
            self._bring(site)
        self.common = [
            self._common(site) if apart.here[site.stage] else {} for site in apart.sites
        ]
        self.sums = [sums() for sums, _ in apart.zeros]
        self.gradients = [gradients() for _, gradients in apart.zeros] if keeps else []
        self.batch_gradients: list[Any] = []

    def _bring(self, site: VirtualStagePrograms) -> None:
        place = site.place
        for n in (*place.params, *place.rest, *place.batch):
            key = site.stage, n
            if self.apart.owner(n) != site.stage and key not in self.copies:
                self.copies[key] = self.apart.moves.brought(
                    n, site.stage, self.leaves[n]
                )

    def _on(self, stage: int, number: int) -> Any:
        if self.apart.owner(number) == stage:
            return self.leaves[number]
        return self.copies[stage, number]

    def _common(self, site: VirtualStagePrograms) -> dict[int, Any]:
        place, names, state = site.place, site.place.names, self.state
        whole = self.apart.whole[site.stage]
        common = {
            at: self._on(site.stage, n)
            for several, numbers in (
                (place.params, names.params),
                (place.batch, names.batch),
            )
            for n, at in zip(several, numbers, strict=True)
        }
        common[names.step] = seen_on(state.step, whole)
        if names.rng is not None:
            common[names.rng] = seen_on(state.rng, whole)
        if names.scale is not None and state.loss_scale is not None:
            common[names.scale] = seen_on(state.loss_scale.scale, whole)
        return common

    def do(self, event: ScheduleRow | ScheduledTransfer) -> None:
        """Issues an action or transfer of the schedule on this process's devices."""
        if isinstance(event, ScheduledTransfer):
            self._hand(event)
        elif self.apart.here[event.stage]:
            place = event.chunk * self.apart.table.num_stages + event.stage
            getattr(self, event.action)(place, event.micro_batch)

    def _hand(self, handing: ScheduledTransfer) -> None:
        coming = self.apart.moves.transfer(handing, self.leaving.pop(handing, None))
        if self.apart.here[handing.target % self.apart.table.num_stages]:
            key = handing.action, handing.target, handing.micro_batch
            values = self.apart.moves.values_of(handing)
            self.coming[key].append((values, coming))

    def _came(
        self, action: Action, number: int, micro_batch: int
    ) -> Iterator[tuple[Value, Any]]:
        for values, coming in self.coming.pop((action, number, micro_batch), ()):
            yield from zip(values, coming(), strict=True)

    def forward(self, number: int, micro_batch: int) -> None:
        """Runs the forward pass of a virtual stage for a micro-batch."""
        site = self.apart.sites[number]
        place, names, key = site.place, site.place.names, (number, micro_batch)
        values = dict(self.common[number])
        numbers = self.apart.numbers[site.stage]
        global_number = self.first_micro_batch + micro_batch
        values[names.number] = numbers[global_number]
        # In an evaluation, counters do not advance.
        values[names.counted] = numbers[global_number if self.keeps else 0]
        for n, at in zip(place.rest, names.rest, strict=True):
            values[at] = self._on(site.stage, n)
        handed = dict(self._came("forward", number, micro_batch))
        for v, at in zip(place.part.imports, names.imports, strict=True):
            values[at] = handed[v]
        piece = site.forward if self.keeps else site.forward_only
        results, self.sums[number] = piece.run(
            [values[n] for n in piece.reads], self.sums[number]
        )
        count = len(place.part.exports)
        exports = dict(zip(place.part.exports, results[:count], strict=True))
        self._leave(number, micro_batch, "forward", exports)
        if not self.keeps:
            return
        for n, fresh in zip(place.part.fresh, results[count:], strict=False):
            self.leaves[n] = fresh
        kept = results[count + len(place.part.fresh) :]
        values.update(zip(place.residuals, kept, strict=True))
        self.live[key] = {n: values[n] for n in values if n in site.later}

    def _leave(
        self, number: int, micro_batch: int, action: Action, made: dict[Value, Any]
    ) -> None:
        for target, values in self.apart.moves.targets[action][number].items():
            handing = ScheduledTransfer(
                micro_batch=micro_batch, source=number, target=target, action=action
            )
            self.leaving[handing] = [made[v] for v in values]

    def backward(self, number: int, micro_batch: int) -> None:
        """Runs the backward pass of a virtual stage for a micro-batch."""
        site = self.apart.sites[number]
        place, names, key = site.place, site.place.names, (number, micro_batch)
        values = self.live[key]
        returned: dict[Value, list[Any]] = defaultdict(list)
        for value, cotangent in self._came("backward", number, micro_batch):
            returned[value].append(cotangent)
        result = [self.apart.total(returned[v]) for v in place.sent]
        if number == len(self.apart.sites) - 1:
            result.append(self.apart.one)
        values.update(zip(names.cotangents, result, strict=True))
        added = [] if site.weight else self.gradients[number]
        results, added = site.backward.run(
            [values[n] for n in site.backward.reads], added
        )
        cotangents = dict(zip(place.received, results, strict=False))
        self._leave(number, micro_batch, "backward", cotangents)
        if site.weight is None:
            self.gradients[number] = added
            del self.live[key]
            return
        count = len(place.received)
        more = zip(site.backward.gives[count:], results[count:], strict=True)
        values.update((n, x) for n, x in more if not isinstance(n, FixedValue))
        self.live[key] = {n: values[n] for n in site.weight.reads}

    def weight(self, number: int, micro_batch: int) -> None:
        """Runs the part of a split backward pass that computes parameter gradients."""
        site = self.apart.sites[number]
        assert site.weight is not None
        values = self.live.pop((number, micro_batch))
        _, self.gradients[number] = site.weight.run(
            [values[n] for n in site.weight.reads], self.gradients[number]
        )

    def losses(self) -> Sums | None:
        """Returns the loss sums of micro-batches; None if another process has them."""
        if not self.apart.here[-1]:
            return None
        tree = self.apart.sites[-1].place.sums_tree
        total, weight, metrics = tree.unflatten(self.sums[-1])
        return Sums(total=total, weight=weight, metrics=metrics, gradients=())

    def summed(self) -> list[Any]:
        """Returns the gradient of each parameter on its owner, or ``ABSENT``."""
        apart = self.apart
        apart.moves.settle()
        # Values are released before the sums, so that both are never stored at once.
        every, self.gradients = self.gradients, []
        result: dict[int, list[Any]] = defaultdict(list)
        for site, gradients in zip(apart.sites, every, strict=True):
            for place, n in enumerate(site.place.params):
                here = gradients[place] if apart.here[site.stage] else None
                result[n].append(apart.moves.collect_gradient(n, site.stage, here))
        wanted = apart.program.adapter.batch_gradients
        numbers = [apart.first_batch + place for place in wanted]

        def whole(n: int) -> Any:
            return apart.total(result[n]) if n in result else apart.unread[n]()

        self.batch_gradients = [whole(n) for n in numbers]
        return [
            whole(n) if apart.here[apart.owner(n)] else ABSENT
            for n in range(self.first)
        ]

    def rest_after(self) -> Any:
        """Returns the non-trainable state after all micro-batches."""
        tree: Any = jax.tree.structure(self.state.rest)
        last = self.first + tree.num_leaves
        return tree.unflatten(
            [
                self.apart.advance_counter(n, self.leaves[n])
                for n in range(self.first, last)
            ]
        )
