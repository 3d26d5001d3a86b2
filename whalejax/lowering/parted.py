"""The end of a step across stages: each updates what it holds, and shares numbers.

The update is one traced program over the arrays of all stages. An operation runs where
its arrays are; numbers that several stages make (a norm over all gradients, whether all
are finite) are joined on the first stage, and brought to those who read them. What
follows such a number waits for it, and nothing else does, so that a stage that is done
early updates early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from whalejax.cutting import Fixed, Step, Steps
from whalejax.planner.plan import PlanError


JOINED = -1
"""Owner of the numbers that several stages make together."""

Owner = int | None
"""A stage; None for what every stage can make for itself."""

Group = tuple[int, int]
"""A part of the program: how many parts have to run before it, and its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an input or an output of the program lies.

    Attributes:
        owner: the stage that it belongs to, or None.
        stage: where it lies.
        sharding: its layout; None for an input.
        consumed: the program may reuse its memory.
    """

    owner: Owner
    stage: int
    sharding: NamedSharding | None = None
    consumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A compiled part.

    Attributes:
        stage: where it runs.
        takes: numbers of the values whose memory it reuses.
        reads: numbers of the other values that it takes.
        gives: numbers of those that it makes.
        run: from both to these.
    """

    stage: int
    takes: tuple[int, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    run: Callable[..., Sequence[Any]]


class Parted:
    """A program over the arrays of several stages."""

    def __init__(
        self,
        steps: Steps,
        inputs: Sequence[Where],
        outputs: Sequence[Where],
        whole: Sequence[NamedSharding],
        options: Any = None,
    ) -> None:
        """Cut a program.

        Args:
            steps: the program.
            inputs, outputs: where they lie.
            whole: for each stage, the layout of what all its devices hold.
            options: of the compiler.

        Raises:
            PlanError: an operation takes arrays of several stages.
        """
        self._steps = steps
        self._whole = whole
        self._inputs = dict(zip(steps.inputs, inputs, strict=True))
        self._outputs = outputs
        self._options = options
        self._groups = self._grouped()
        self._parts = self._cut()

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run it.

        Args:
            values: its inputs, each where it lies.
        """
        known = dict(zip(self._steps.inputs, values, strict=True))
        stage_of = {n: where.stage for n, where in self._inputs.items()}
        copies: dict[tuple[int, int], Any] = {}

        def on(number: int, stage: int) -> Any:
            if stage_of[number] == stage:
                return known[number]
            if (number, stage) not in copies:
                there = self._whole[stage]
                copies[number, stage] = jax.device_put(known[number], there)
            return copies[number, stage]

        for part in self._parts:
            taken, read = (
                [on(n, part.stage) for n in numbers]
                for numbers in (part.takes, part.reads)
            )
            results = part.run(taken, read)
            for number, result in zip(part.gives, results, strict=True):
                known[number], stage_of[number] = result, part.stage
        found = []
        for operand, where in zip(self._steps.outputs, self._outputs, strict=True):
            if isinstance(operand, Fixed):
                found.append(jax.device_put(operand.value, where.sharding))
            elif stage_of[operand] == where.stage:
                found.append(known[operand])  # Born, or given, as it is wanted.
            else:
                found.append(jax.device_put(known[operand], where.sharding))
        return found

    def _grouped(self) -> dict[int, Group]:
        """The part that makes each value; free ones are left out."""
        owners: dict[int, Owner] = {n: w.owner for n, w in self._inputs.items()}
        levels: dict[int, int] = {}
        found: dict[int, Group] = {}
        for step in self._steps.steps:
            owner = self._owner(step, owners)
            level = 0
            for number in step.sources:
                if number in levels:
                    level = max(level, levels[number] + (owners[number] != owner))
            for number in step.writes:
                owners[number] = owner
                if owner is not None:
                    levels[number] = level
                    found[number] = (level, owner)
        return found

    def _owner(self, step: Step, owners: dict[int, Owner]) -> Owner:
        """Where an operation runs: where its arrays are, or its numbers."""
        arrays = {owners[n] for n in step.sources if self._steps.avals[n].shape}
        arrays.discard(None)
        if len(arrays) > 1:
            raise PlanError(
                "this optimizer takes parameters, gradients or state of several stages "
                f"into one operation ({step.equation.primitive.name}), as wrappers "
                "that choose between updates or flatten the tree do. Take one that "
                "updates leaf by leaf (norms over all of them are fine), or leave the "
                "axis stage out"
            )
        if arrays:
            return arrays.pop()
        numbers = {owners[n] for n in step.sources} - {None}
        if JOINED in numbers or len(numbers) > 1:
            return JOINED
        return numbers.pop() if numbers else None

    def _cut(self) -> list[_Part]:
        """The parts in an order in which they can run."""
        steps, groups = self._steps, self._groups
        gives: dict[Group, dict[int, None]] = defaultdict(dict)
        wanted = [x for x in steps.outputs if not isinstance(x, Fixed)]
        live, _ = steps.needed(wanted, ())
        for step in live:
            own = {groups[n] for n in step.writes if n in groups}
            for number in step.sources:
                if number in groups and own and groups[number] not in own:
                    gives[groups[number]][number] = None
        for operand, where in zip(steps.outputs, self._outputs, strict=True):
            if not isinstance(operand, Fixed) and operand not in self._inputs:
                gives[groups.get(operand, (0, where.stage))][operand] = None
        order = sorted(gives)
        reads = {}
        for group in order:
            foreign = {n for n, other in groups.items() if other != group}
            _, reads[group] = steps.needed([*gives[group]], {*steps.inputs, *foreign})
        last = {n: group for group in order for n in reads[group]}
        kept = {n for n in wanted if n in self._inputs}
        return [
            self._part(
                group,
                [*gives[group]],
                reads[group],
                {n for n, at in last.items() if at == group and n not in kept},
            )
            for group in order
        ]

    def _part(
        self, group: Group, gives: list[int], reads: list[int], last: Set[int]
    ) -> _Part:
        stage = max(0, group[1])  # Numbers are joined on the first stage.
        takes = tuple(
            n
            for n in reads
            if n in last and n in self._inputs and self._inputs[n].consumed
            if self._inputs[n].stage == stage
        )
        reads = [n for n in reads if n not in takes]
        places = {
            n: where.sharding
            for n, where in zip(self._steps.outputs, self._outputs, strict=True)
            if not isinstance(n, Fixed) and where.stage == stage
        }

        def _finish(taken: Sequence[Any], read: Sequence[Any]) -> list[Any]:
            values = dict(zip((*takes, *reads), (*taken, *read), strict=True))
            return self._steps.run(gives, values)

        return _Part(
            stage=stage,
            takes=takes,
            reads=tuple(reads),
            gives=tuple(gives),
            run=jax.jit(
                _finish,
                donate_argnums=0,
                out_shardings=[
                    places.get(n, self._whole_or_none(n, stage)) for n in gives
                ],
                compiler_options=self._options,
            ),
        )

    def _whole_or_none(self, number: int, stage: int) -> NamedSharding | None:
        """Numbers lie on all devices of a stage; of arrays the compiler chooses."""
        return None if self._steps.avals[number].shape else self._whole[stage]
