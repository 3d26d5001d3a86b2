"""The end of a step across stages: each updates its arrays, and shares scalars.

The update is one traced program over the arrays of all stages. An operation runs on the
stage of its arrays. Scalars that several stages compute are broadcast, such as a norm
over all gradients. Every stage computes the operations on scalars alone. Operations
that need a broadcast scalar wait for it. The others do not, so a stage that finishes
early updates early.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from whalejax.jaxpr.steps import FixedValue, Operand, Steps
from whalejax.lowering.global_arrays import (
    StageBroadcast,
    assemble_global,
    aval_with_sharding,
    is_here,
    put_global,
    results_of,
    run_alone,
    seen_on,
)
from whalejax.lowering.pipeline_mpmd.update_partition import (
    Group,
    Owner,
    UpdatePartition,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuePlacement:
    """Stage, sharding and donation of an input or output of the program.

    Attributes:
        owner: Stage of the value; None for all devices.
        sharding: Sharding of an output.
        consumed: Whether the program may donate an input.
    """

    owner: Owner
    sharding: NamedSharding | None = None
    consumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _BroadcastVector:
    """Scalars of one dtype that a stage broadcasts to all others, in one vector."""

    group: Group
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    group: Group
    takes: tuple[int, ...]
    reads: tuple[int, ...]
    hears: tuple[_BroadcastVector, ...]
    gives: tuple[int, ...]
    tells: tuple[_BroadcastVector, ...]
    program: Any
    usable: Callable[[Mapping[int, Any]], frozenset[int]]

    def program_inputs(
        self, taken: Sequence[Any], read: Sequence[Any], vectors: Sequence[Any]
    ) -> tuple[dict[int, Any], dict[int, Any], Sequence[Any]]:
        own = dict(zip(self.takes, taken, strict=True))
        others = dict(zip(self.reads, read, strict=True))
        usable = self.usable(own)
        others.update((n, x) for n, x in own.items() if n not in usable)
        return {n: own[n] for n in usable}, others, vectors

    def run(
        self,
        mesh: Any,
        taken: Sequence[Any],
        read: Sequence[Any],
        vectors: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        result: tuple[list[Any], list[Any]] = run_alone(
            lambda several: self.program(*several),
            self.program_inputs(taken, read, vectors),
            mesh,
        )
        return result


class MultiStageProgram:
    """A program over the arrays of several stages."""

    def __init__(
        self,
        steps: Steps,
        inputs: Sequence[ValuePlacement],
        outputs: Sequence[ValuePlacement],
        whole: Sequence[NamedSharding],
        options: Any = None,
    ) -> None:
        """Divides the program among the stages.

        Args:
            steps: Program over all stages.
            inputs, outputs: Stage, sharding and donation of each input and output.
            whole: Sharding of each stage that replicates over all its devices.
            options: XLA options of the compiler.

        Raises:
            PlanError: An operation takes arrays of several stages.
        """
        self._steps = steps
        self._whole = whole
        self._inputs = dict(zip(steps.inputs, inputs, strict=True))
        self._outputs = [*zip(steps.outputs, outputs, strict=True)]
        self._options = options
        self._parting = parting = UpdatePartition(
            steps,
            [where.owner for where in inputs],
            [where.owner for where in outputs],
            stages=len(whole),
            meshes=[x.mesh for x in whole],
        )
        told = {group: self._vectors(group) for group in parting.tells}
        self._parts = self._compiled(parting.reads, told)
        self._exchanges = {
            level: _Exchange([part for part in parts if part.tells], steps, whole)
            for level, parts in self._parts.items()
            if any(part.tells for part in parts)
        }

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Runs the program.

        Args:
            values: Inputs on their stages; inputs of other processes may have any
                value.

        Returns:
            Outputs; None for outputs of other processes.
        """
        inputs = dict(zip(self._steps.inputs, values, strict=True))
        made: dict[tuple[int, int], Any] = {}
        heard: dict[tuple[_BroadcastVector, int], Any] = {}

        def on(number: int, stage: int) -> Any:
            if (number, stage) not in made:
                value = inputs[number]
                if self._parting.owners[number] is None:
                    value = seen_on(value, self._whole[stage])
                made[number, stage] = value
            return made[number, stage]

        for level, parts in self._parts.items():
            said: dict[_BroadcastVector, Any] = {}
            for part in parts:
                stage = part.group[1]
                if not is_here(self._whole[stage]):
                    continue
                taken, read = (
                    [on(n, stage) for n in numbers]
                    for numbers in (part.takes, part.reads)
                )
                vectors = [heard[told, stage] for told in part.hears]
                mesh = self._whole[stage].mesh
                results, vectors = part.run(mesh, taken, read, vectors)
                said.update(zip(part.tells, vectors, strict=True))
                for number, result in zip(part.gives, results, strict=True):
                    made[number, stage] = result
            if level in self._exchanges:
                heard.update(self._exchanges[level](said))
        call, given = [], set[int]()
        for operand, where in self._outputs:
            result = self._output(operand, where, inputs, made)
            if not isinstance(operand, FixedValue) and result is not None:
                if operand in given:
                    # The next step cannot donate one buffer for two inputs.
                    result = jax.device_put(result, where.sharding, may_alias=False)
                given.add(operand)
            call.append(result)
        return call

    def compiled(self, values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yields the stage and the compiled program of each part, and runs nothing.

        Args:
            values: Abstract inputs with shardings.
        """
        made: dict[tuple[int, int], Any] = {}
        for number, value in zip(self._steps.inputs, values, strict=True):
            owner = self._parting.owners[number]
            for stage in range(len(self._whole)) if owner is None else (owner,):
                made[number, stage] = (
                    aval_with_sharding(value, self._whole[stage])
                    if owner is None
                    else value
                )
        for parts in self._parts.values():
            for part in parts:
                stage = part.group[1]
                whole = self._whole[stage]
                taken, read = (
                    [made[n, stage] for n in numbers]
                    for numbers in (part.takes, part.reads)
                )
                vectors = [
                    jax.ShapeDtypeStruct(
                        (len(told.numbers),),
                        self._steps.avals[told.numbers[0]].dtype,
                        sharding=whole,
                    )
                    for told in part.hears
                ]
                lowered = part.program.lower(*part.program_inputs(taken, read, vectors))
                program = lowered.compile()
                results, _ = results_of(lowered, program)
                pairs = zip(part.gives, results, strict=True)
                made.update(((number, stage), x) for number, x in pairs)
                yield stage, program

    def _output(
        self,
        operand: Operand,
        where: ValuePlacement,
        inputs: Mapping[int, Any],
        made: Mapping[tuple[int, int], Any],
    ) -> Any:
        assert where.sharding is not None
        if isinstance(operand, FixedValue):
            return put_global(operand.value, where.sharding)
        if self._parting.is_given(operand, where.owner):
            return inputs[operand]
        if where.owner is not None:
            return made.get((operand, where.owner))
        copies = [made.get((operand, s)) for s in range(len(self._whole))]
        return assemble_global([x for x in copies if x is not None], where.sharding)

    def _vectors(self, group: Group) -> tuple[_BroadcastVector, ...]:
        types: dict[Any, list[int]] = defaultdict(list)
        for number in sorted(self._parting.tells[group]):
            types[self._steps.avals[number].dtype].append(number)
        return tuple(
            _BroadcastVector(group=group, numbers=tuple(x)) for x in types.values()
        )

    def _compiled(
        self,
        reads: Mapping[Group, list[int]],
        told: Mapping[Group, tuple[_BroadcastVector, ...]],
    ) -> dict[int, list[_Part]]:
        order = sorted(reads)
        last = {n: group for group in order for n in reads[group]}
        kept = {x for x, _ in self._outputs if not isinstance(x, FixedValue)}
        spare = {
            n: group
            for n, group in last.items()
            if n not in kept and (n not in self._inputs or self._inputs[n].consumed)
        }
        vectors = {
            n: x for several in told.values() for x in several for n in x.numbers
        }
        result: dict[int, list[_Part]] = defaultdict(list)
        for group in order:
            own = [
                n for n in reads[group] if self._parting.owners[n] in (None, group[1])
            ]
            takes = [n for n in own if spare.get(n) == group]
            heard = dict.fromkeys(vectors[n] for n in reads[group] if n not in own)
            result[group[0]].append(
                self._part(
                    group,
                    takes,
                    [n for n in own if n not in takes],
                    tuple(heard),
                    told.get(group, ()),
                )
            )
        return dict(result)

    def _part(
        self,
        group: Group,
        takes: Sequence[int],
        reads: Sequence[int],
        hears: tuple[_BroadcastVector, ...],
        tells: tuple[_BroadcastVector, ...],
    ) -> _Part:
        gives = tuple(self._parting.gives.get(group, ()))
        return _Part(
            group=group,
            takes=tuple(takes),
            reads=tuple(reads),
            hears=hears,
            gives=gives,
            tells=tells,
            program=self._program(group, hears, gives, tells),
            usable=self._reusing(group, gives),
        )

    def _program(
        self,
        group: Group,
        hears: Sequence[_BroadcastVector],
        gives: Sequence[int],
        tells: Sequence[_BroadcastVector],
    ) -> Any:
        level, stage = group
        numbers = [n for told in tells for n in told.numbers]
        there = [self._sharding(n, stage) for n in gives]

        def finish(
            taken: dict[int, Any], read: dict[int, Any], vectors: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            values = {**taken, **read}
            for told, vector in zip(hears, vectors, strict=True):
                values.update((n, vector[i]) for i, n in enumerate(told.numbers))
            results = self._steps.run([*gives, *numbers], values)
            known = dict(zip((*gives, *numbers), results, strict=True))
            said = [jnp.stack([known[n] for n in told.numbers]) for told in tells]
            return results[: len(gives)], said

        finish.__name__ = f"finish_{stage}_{level + 1}"
        return jax.jit(
            finish,
            donate_argnums=0,
            out_shardings=(there, [self._whole[stage]] * len(tells)),
            compiler_options=self._options,
        )

    def _reusing(
        self, group: Group, gives: Sequence[int]
    ) -> Callable[[Mapping[int, Any]], frozenset[int]]:
        there = [self._sharding(n, group[1]) for n in gives]
        known: list[frozenset[int]] = []

        def usable(given: Mapping[int, Any]) -> frozenset[int]:
            if not known:
                known.append(self._usable(given, gives, there))
            return known[0]

        return usable

    def _usable(
        self,
        given: Mapping[int, Any],
        gives: Sequence[int],
        there: Sequence[NamedSharding | None],
    ) -> frozenset[int]:
        avals = [self._steps.avals[n] for n in gives]
        if None in there and any(
            len(x.sharding.device_set) > 1 for x in given.values()
        ):
            return frozenset(given)  # The compiler matches inputs and outputs.
        room = Counter(
            (x.shape if s is None else s.shard_shape(x.shape), x.dtype)
            for x, s in zip(avals, there, strict=True)
        )
        usable = set()
        for n, x in given.items():
            kind = x.sharding.shard_shape(x.shape), x.dtype
            if room[kind]:
                room[kind] -= 1
                usable.add(n)
        return frozenset(usable)

    def _sharding(self, number: int, stage: int) -> NamedSharding | None:
        for operand, where in self._outputs:
            if operand == number and where.owner == stage:
                return where.sharding
            if operand == number and where.owner is None:
                return self._whole[stage]
        return None if self._steps.avals[number].shape else self._whole[stage]


class _Exchange:
    def __init__(
        self, parts: Sequence[_Part], steps: Steps, whole: Sequence[NamedSharding]
    ) -> None:
        self._told = [told for part in parts for told in part.tells]
        self._whole = whole
        self._everywhere = StageBroadcast(
            whole,
            [told.group[1] for told in self._told],
            [
                jax.ShapeDtypeStruct(
                    (len(told.numbers),), steps.avals[told.numbers[0]].dtype
                )
                for told in self._told
            ],
        )

    def __call__(
        self, said: Mapping[_BroadcastVector, Any]
    ) -> Iterator[tuple[tuple[_BroadcastVector, int], Any]]:
        vectors = self._everywhere.tell([said.get(told) for told in self._told])
        for told, vector in zip(self._told, vectors, strict=True):
            for stage, whole in enumerate(self._whole):
                yield (told, stage), seen_on(vector, whole)
