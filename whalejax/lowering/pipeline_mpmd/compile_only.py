"""Compiles stage programs as a step runs them, without running them.

Every program is compiled for the output shardings of the programs before it. From the
compiled programs and the rows of the schedule follow the memory of each stage over time
and the transfers between stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.jaxpr.steps import FixedValue, Operand
from whalejax.lowering.global_arrays import aval_with_sharding, results_of
from whalejax.lowering.pipeline_mpmd.interface import StageExecutor
from whalejax.lowering.pipeline_mpmd.stage_programs import (
    CompiledPart,
    VirtualStagePrograms,
)
from whalejax.planner.pipeline.schedules import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """A compiled program of a stage.

    Attributes:
        stage: Number of the stage.
        name: Purpose of the program, such as ``"forward of part 0"``.
        runs: Number of runs of the program in a step.
        compiled: Compiled program, a ``jax.stages.Compiled``.
    """

    stage: int
    name: str
    runs: int
    compiled: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak memory of a device of a stage in a step, in bytes by term.

    Attributes:
        params_bytes: Parameters, with copies of parameters that another stage stores.
        optimizer_bytes: Optimizer state of the parameters.
        gradients_bytes: Accumulated gradients.
        kept_bytes: Batch, non-trainable state, and the largest sum of residuals of
            micro-batches in flight.
        temporary_bytes: Temporaries, inputs and outputs of a program, as far as the
            peak exceeds the other terms.
    """

    params_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    kept_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The sum of all terms."""
        return (
            self.params_bytes
            + self.optimizer_bytes
            + self.gradients_bytes
            + self.kept_bytes
            + self.temporary_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTransferBytes:
    """Bytes that each device of one virtual stage receives, forward or backward.

    Attributes:
        part: Number of the virtual stage.
        action: ``forward`` for values, ``backward`` for their cotangents.
        times: Number of transfers in a step.
        nbytes: Bytes of each transfer.
    """

    part: int
    action: Action
    times: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStages:
    """Compiled stage programs, with their memory and transfers.

    Attributes:
        programs: Compiled programs by virtual stage, followed by those of the update.
        memory: Memory of a device of each stage.
        moved: Transfers between virtual stages.
        once_bytes: Bytes that the devices of each stage receive once in a step. They
            are inputs that another stage owns, and gradients of the stage's parameters
            from other stages.
    """

    programs: tuple[StageProgram, ...]
    memory: tuple[StageMemory, ...]
    moved: tuple[PartTransferBytes, ...]
    once_bytes: tuple[int, ...]


def compile_stages(
    apart: StageExecutor, state: Any, batch: Sequence[Any]
) -> CompiledStages:
    """Compiles all programs of a step.

    Args:
        apart: Executor of the stages.
        state: Abstract state with shardings.
        batch: Abstract leaves of the flat batch.
    """
    return _Rehearsing(apart, state, batch).compile_all()


@dataclass(slots=True)
class _Site:
    """Bytes after each action: residuals of a micro-batch in flight, and others."""

    kept: dict[Action, int] = field(default_factory=dict)
    above: dict[Action, int] = field(default_factory=dict)


class _Rehearsing:
    def __init__(self, apart: StageExecutor, state: Any, batch: Sequence[Any]) -> None:
        self.apart = apart
        self.state = state
        params = jax.tree.leaves(state.params)
        self.leaves = [*params, *jax.tree.leaves(state.rest), *batch]
        self.params = len(params)
        self.rest = self.params + len(jax.tree.leaves(state.rest))
        self.programs: list[StageProgram] = []
        self.sites: list[_Site] = []

    def compile_all(self) -> CompiledStages:
        for site in self.apart.sites:
            self.sites.append(self._site(site))
        finishing = self._finishing()
        stages = range(len(self.apart.plans))
        return CompiledStages(
            programs=tuple(self.programs),
            memory=tuple(self._memory(stage, finishing[stage]) for stage in stages),
            moved=tuple(self._part_transfers()),
            once_bytes=tuple(map(self._once_bytes, stages)),
        )

    # Programs.

    def _site(self, site: VirtualStagePrograms) -> _Site:
        place, names, result = site.place, site.place.names, _Site()
        whole = self.apart.whole[site.stage]
        values = self._common(site)
        common = {*values}
        for v, at in zip(place.part.imports, names.imports, strict=True):
            values[at] = aval_with_sharding(
                self._aval(site, at), self._handing(v, site.number)
            )
        sums = [aval_with_sharding(self._aval(site, x), whole) for x in names.sums]
        made, _ = self._compiled(site, "forward", site.forward, values, sums, result)
        first = len(place.part.exports) + len(place.part.fresh)
        values.update(zip(place.residuals, made[first:], strict=True))
        result.kept["forward"] = _nbytes(
            values[n] for n in site.later.intersection(values) - common
        )
        for v, at in zip(place.sent, names.cotangents, strict=False):
            values[at] = aval_with_sharding(
                self._aval(site, at), self._handing(v, site.number)
            )
        if len(names.cotangents) > len(place.sent):
            at = names.cotangents[-1]
            values[at] = aval_with_sharding(self._aval(site, at), whole)
        gradients = [
            aval_with_sharding(
                self._aval(site, x), self.apart.gradient_sharding(n, site.stage)
            )
            for n, x in zip(place.params, names.gradients, strict=True)
        ]
        added = [] if site.weight else gradients
        made, _ = self._compiled(site, "backward", site.backward, values, added, result)
        result.kept["backward"] = 0
        if site.weight is not None:
            more = zip(site.backward.gives, made, strict=True)
            values.update((n, x) for n, x in more if not isinstance(n, FixedValue))
            waiting = {*site.weight.reads} - common
            result.kept["backward"] = _nbytes(values[n] for n in waiting)
            self._compiled(site, "weight", site.weight, values, gradients, result)
            result.kept["weight"] = 0
        return result

    def _compiled(
        self,
        site: VirtualStagePrograms,
        action: Action,
        piece: CompiledPart,
        values: Mapping[int, Any],
        before: Sequence[Any],
        found: _Site,
    ) -> Any:
        lowered = piece.program.lower([values[n] for n in piece.reads], list(before))
        compiled = lowered.compile()
        self.programs.append(
            StageProgram(
                stage=site.stage,
                name=f"{action} of part {site.number}",
                runs=self.apart.table.num_micro_batches,
                compiled=compiled,
            )
        )
        names = site.place.names
        handed = names.imports if action == "forward" else names.cotangents
        found.above[action] = _above(compiled) + _nbytes(
            values[n] for n in piece.reads if n in handed
        )
        return results_of(lowered, compiled)

    def _common(self, site: VirtualStagePrograms) -> dict[int, Any]:
        place, names, state = site.place, site.place.names, self.state
        whole = self.apart.whole[site.stage]
        numbers = zip(
            (*place.params, *place.rest, *place.batch),
            (*names.params, *names.rest, *names.batch),
            strict=True,
        )
        common = {
            at: aval_with_sharding(
                self.leaves[n], self.apart.input_sharding(n, site.stage)
            )
            for n, at in numbers
        }
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        common.update(dict.fromkeys((names.step, names.number, names.counted), scalar))
        if names.rng is not None:
            common[names.rng] = aval_with_sharding(state.rng, whole)
        if names.scale is not None and state.loss_scale is not None:
            common[names.scale] = aval_with_sharding(state.loss_scale.scale, whole)
        return common

    def _aval(self, site: VirtualStagePrograms, operand: Operand) -> Any:
        if isinstance(operand, FixedValue):
            return jnp.asarray(operand.value)
        return site.place.steps.avals[operand]

    def _handing(self, value: Any, place: int) -> Any:
        return self.apart.moves.layout(value, place)

    def _finishing(self) -> list[int]:
        apart, above = self.apart, [0] * len(self.apart.plans)
        end = apart.whole[-1]
        sums = jax.tree.map(lambda x: aval_with_sharding(x, end), apart.sums)
        gradients = [
            aval_with_sharding(x, apart.gradient_sharding(n, apart.owner(n)))
            for n, x in enumerate(apart.wide_params)
        ]
        values = [
            *jax.tree.leaves(self.state),
            *jax.tree.leaves(sums),
            *gradients,
            *jax.tree.leaves(self.state.rest),
        ]
        for stage, compiled in apart.finish.compiled(values):
            above[stage] = max(above[stage], _above(compiled))
            self.programs.append(
                StageProgram(stage=stage, name="update", runs=1, compiled=compiled)
            )
        return above

    # Memory.

    def _memory(self, stage: int, finishing: int) -> StageMemory:
        apart = self.apart
        owned = [n for n in range(len(self.leaves)) if apart.owner(n) == stage]
        there = sorted({*owned, *self._replicated_inputs(stage)})
        held = [
            aval_with_sharding(self.leaves[n], apart.input_sharding(n, stage))
            for n in there
        ]
        params = [x for n, x in zip(there, held, strict=True) if n < self.params]
        others = [x for n, x in zip(there, held, strict=True) if n >= self.params]
        optimizer = zip(
            jax.tree.leaves(self.state.opt_state),
            jax.tree.leaves(apart.stages.opt_state),
            strict=True,
        )
        read = {n for s in self._of(stage) for n in s.place.params}
        alone = {n for n in owned if n < self.params} - read
        gradients = _nbytes(
            aval_with_sharding(
                apart.gradient_aval(n), apart.gradient_sharding(n, stage)
            )
            for n in (*(n for s in self._of(stage) for n in s.place.params), *alone)
        )
        kept, above = self._in_flight(stage)
        resting = _nbytes(others)
        return StageMemory(
            params_bytes=_nbytes(params),
            optimizer_bytes=_nbytes(x for x, at in optimizer if at in (stage, -1)),
            gradients_bytes=gradients,
            kept_bytes=resting + kept,
            temporary_bytes=max(above, finishing - kept),
        )

    def _in_flight(self, stage: int) -> tuple[int, int]:
        """Returns the most residual bytes in flight, and other bytes at the peak."""
        now = most = fullest = 0
        stages = self.apart.table.num_stages
        held: dict[tuple[int, int], int] = {}
        for row in self.apart.table.of_stage(stage):
            place = row.chunk * stages + stage
            site = self.sites[place]
            fullest = max(fullest, now + site.above[row.action])
            key, after = (place, row.micro_batch), site.kept[row.action]
            now += after - held.get(key, 0)
            held[key] = after
            most = max(most, now)
        return most, max(0, fullest - most)

    def _of(self, stage: int) -> list[VirtualStagePrograms]:
        return [site for site in self.apart.sites if site.stage == stage]

    def _replicated_inputs(self, stage: int) -> set[int]:
        return {
            n
            for site in self._of(stage)
            for n in (*site.place.params, *site.place.rest, *site.place.batch)
            if self.apart.owner(n) != stage
        }

    # Transfers between stages.

    def _part_transfers(self) -> Iterator[PartTransferBytes]:
        apart = self.apart
        sums: dict[tuple[int, Action], int] = {}
        for action, places in apart.moves.targets.items():
            for source, targets in enumerate(places):
                for target, values in targets.items():
                    # Cotangents move to the devices of the target before its program.
                    part = target if action == "forward" else source
                    sums[part, action] = sums.get((part, action), 0) + _nbytes(
                        aval_with_sharding(apart.avals[v], self._handing(v, target))
                        for v in values
                    )
        for (part, action), nbytes in sorted(sums.items()):
            count = apart.table.num_micro_batches
            yield PartTransferBytes(
                part=part, action=action, times=count, nbytes=nbytes
            )

    def _once_bytes(self, stage: int) -> int:
        apart = self.apart
        inputs = [
            aval_with_sharding(self.leaves[n], apart.input_sharding(n, stage))
            for n in self._replicated_inputs(stage)
        ]
        gradients = [
            aval_with_sharding(
                apart.gradient_aval(n), apart.gradient_sharding(n, stage)
            )
            for site in apart.sites
            for n in site.place.params
            if site.stage != stage and apart.owner(n) == stage
        ]
        return _nbytes((*inputs, *gradients))


def _above(compiled: Any) -> int:
    stats = compiled.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.temp_size_in_bytes + fresh)


def _nbytes(values: Iterable[Any]) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * _compat.itemsize_bytes(x.dtype)
        for x in values
    )
