"""Divides the equations of a program among virtual stages.

Stage programs can cut a model anywhere. The model is written as units: the equations of
the loss with calls inlined, in order; loops, branches and checkpointed regions are one
unit each. The name of a cut point is the parameter whose read begins the second part:
it means the same in another trace.

Cheap units that read only data and parameters (masks, keys, casts) run on every virtual
stage that reads them, so they need no transfer. Two kinds of units do not, because each
reader would need their parameter too: lookups of data in a parameter, and sums of a
parameter, as in a penalty on its size.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whalejax.meshes.errors import Problems
from whalejax.planner.model.graph import LOOKUPS, Graph
from whalejax.planner.plan_errors import PlanError


Position = tuple[int, ...]

Value = tuple[Position, int]
"""A result of an equation: its position, and the index of the result. Inputs of the
program have the position ``()``."""


SUMS = frozenset(("reduce_sum", "reduce_max"))
"""Operations whose results are much smaller than their operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Equation that is assigned to virtual stages as one.

    Attributes:
        position: Position of the equation.
        reads: Distinct values that it reads.
        writes: Results of the equation.
        tensors: Ids of the results in the graph; None for scalar constants.
        sizes: Bytes of each result.
        cheap: Whether it has no products and no loops.
        line: Source line in the user's code.
        kind: Name of the operation.
    """

    position: Position
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    tensors: tuple[int | None, ...]
    sizes: tuple[int, ...]
    cheap: bool
    line: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Units:
    """A program as a list of units.

    Attributes:
        units: Units that something depends on, in order.
        params: Dotted paths of the trained parameters, which are the first inputs.
        frozen: Numbers of the non-trainable inputs that are weights.
        results: Loss and reported values; None for constants.
        fresh: Value that replaces a non-trainable input after a micro-batch, by input.
        others: Dotted paths of the non-trainable inputs, which follow the parameters.
        counters: Increment of a non-trainable counter per micro-batch, by input number.
    """

    units: tuple[Unit, ...]
    params: tuple[str, ...]
    results: tuple[Value | None, ...]
    fresh: Mapping[int, Value]
    others: tuple[str, ...] = ()
    frozen: frozenset[int] = frozenset()
    counters: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def makers(self) -> dict[Value, int]:
        """Index of the unit that produces each value."""
        return {v: i for i, unit in enumerate(self.units) for v in unit.writes}

    @functools.cached_property
    def free(self) -> tuple[bool, ...]:
        """Whether each unit is cheap, reads only such units, and looks up no data in a
        weight.
        """
        result: list[bool] = []
        behind: list[frozenset[int]] = []
        for unit in self.units:
            makers = [self.makers.get(v) for v in unit.reads]
            direct = {v[1] for v in unit.reads if v not in self.makers}
            others = (behind[m] for m in makers if m is not None)
            behind.append(frozenset(direct).union(*others))
            free = unit.cheap and all(m is None or result[m] for m in makers)
            result.append(free and not (unit.kind in LOOKUPS and self._mix(behind[-1])))
        return tuple(result)

    @functools.cached_property
    def frozen_others(self) -> frozenset[int]:
        """``frozen`` as numbers among the non-trainable inputs."""
        return frozenset(n - len(self.params) for n in self.frozen)

    def is_weight(self, number: int) -> bool:
        """Whether an input is a weight, trained or not."""
        return number < len(self.params) or number in self.frozen

    def path(self, number: int) -> str:
        """Returns the dotted path of an input that belongs to the model."""
        trained = len(self.params)
        mine = number < trained
        return self.params[number] if mine else self.others[number - trained]

    def _mix(self, inputs: Collection[int]) -> bool:
        data = len(self.params) + len(self.others)
        return any(map(self.is_weight, inputs)) and any(n >= data for n in inputs)

    @functools.cached_property
    def inputs(self) -> tuple[frozenset[int], ...]:
        """Numbers of the inputs that each unit reads, also through free units."""
        inputs: list[frozenset[int]] = []
        for unit in self.units:
            own: set[int] = set()
            for value in unit.reads:
                maker = self.makers.get(value)
                if maker is None:
                    own.add(value[1])
                elif self.free[maker]:
                    own |= inputs[maker]
            inputs.append(frozenset(own))
        return tuple(inputs)

    def unit_at(self, position: Position) -> int | None:
        """Returns the unit of the operation at a position, if any."""
        place = bisect_right(self._positions, position) - 1
        if place < 0:
            return None
        own = self._positions[place]
        return place if position[: len(own)] == own else None

    @functools.cached_property
    def _positions(self) -> list[Position]:
        return [unit.position for unit in self.units]

    @functools.cached_property
    def borders(self) -> dict[str, int]:
        """Possible cut points: a unit's number, by the parameter that it reads first.

        The cut point is where the fewest bytes are cut since the last unit that reads
        parameters.
        """
        crossing = self.border_bytes
        seen: set[int] = set()
        borders: dict[str, int] = {}
        before = -1
        for index, inputs in enumerate(self.inputs):
            weights = {n for n in inputs if self.is_weight(n)}
            if self.free[index] or not weights:
                continue
            fresh = weights - seen
            if fresh and before >= 0:
                span = range(before + 1, index + 1)
                best = min(span, key=lambda b: crossing[b])
                borders[self.path(min(fresh))] = best
            seen |= weights
            before = index
        return borders

    @functools.cached_property
    def border_bytes(self) -> list[int]:
        """Bytes cut before each unit: made by earlier units, read by it or later."""
        last: dict[Value, int] = {}
        for index, unit in enumerate(self.units):
            if not self.free[index]:
                last.update(dict.fromkeys(unit.reads, index))
        last.update((v, len(self.units)) for v in self.results if v is not None)
        steps = [0] * (len(self.units) + 2)
        for index, unit in enumerate(self.units):
            if self.free[index]:
                continue
            for value, nbytes in zip(unit.writes, unit.sizes, strict=True):
                if value in last:
                    steps[index + 1] += nbytes
                    steps[last[value] + 1] -= nbytes
        return list(itertools.accumulate(steps))

    def labels(self, graph: Graph) -> tuple[int | None, ...]:
        """Returns the stage number of each unit's mark, or None without one.

        Raises:
            PlanError: A stage is marked inside a loop (names its line), or has no part
                in the loss.
        """
        result: list[set[int | None]] = [set() for _ in self.units]
        for op in graph.ops:
            index = self.unit_at(op.position)
            if index is not None:
                marks = graph.task_graphs[op.task_graph].marks
                stages = (m.get("i") or 0 for m in marks if m.kind == "stage")
                result[index].add(next(map(int, stages), None))
        problems = Problems("stages are marked inside a loop", PlanError)
        for unit, numbers in zip(self.units, result, strict=True):
            if len(numbers) > 1:
                marked = sorted(n for n in numbers if n is not None)
                problems.add(
                    f"{unit.line} holds the marks of stage "
                    f"{', '.join(map(str, marked))}"
                    + (" and what no stage does" if None in numbers else "")
                    + ". A loop or checkpointed region lies on one stage: put marks "
                    "around it, unroll it, or leave the marks out and give num_stages"
                )
        problems.raise_if_any()
        labels = tuple(next(iter(numbers), None) for numbers in result)
        _check_needed(graph, labels)
        return labels


def _check_needed(graph: Graph, labels: Sequence[int | None]) -> None:
    stages = [
        (int(mark.get("i") or 0), region.scope)
        for region in graph.task_graphs
        for mark in region.marks
        if mark.kind == "stage"
    ]
    problems = Problems("stages do nothing that the loss needs", PlanError)
    for number, scope in dict(reversed(stages)).items():
        if number not in labels:
            problems.add(
                f"stage {number} of {len(dict(stages))}, marked at {scope}: the loss "
                "and its metrics read none of its results. Use one, or drop the mark"
            )
    problems.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePart:
    """Units of one virtual stage.

    Attributes:
        units: Numbers of the units, in order.
        inputs: Numbers of the program's inputs that the units read.
        imports: Values received from earlier virtual stages, in their order.
        exports: Values sent to later virtual stages.
        fresh: Inputs whose value after a micro-batch is computed here.
    """

    units: tuple[int, ...]
    inputs: tuple[int, ...]
    imports: tuple[Value, ...]
    exports: tuple[Value, ...]
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Program that is divided among virtual stages.

    Attributes:
        units: The program.
        parts: Part of each virtual stage.
        made_at: Virtual stage that produces each transferred value.
        starts: Cut points of all parts after the first; empty if marks define them.
    """

    units: Units
    parts: tuple[PlacePart, ...]
    made_at: Mapping[Value, int]
    starts: tuple[str, ...] = ()

    def readers(self, value: Value) -> tuple[int, ...]:
        """Returns the virtual stages that receive a value."""
        return tuple(i for i, part in enumerate(self.parts) if value in part.imports)

    def owner(self, number: int, stages: int) -> int:
        """Returns the first stage that reads or makes an input; stage 0 if none does.

        Args:
            number: Number of the input.
            stages: Number of stages; parts are assigned round-robin.
        """
        parts = enumerate(self.parts)
        places = (i for i, x in parts if number in x.inputs or number in x.fresh)
        return min((place % stages for place in places), default=0)


def divide_program(units: Units, starts: Sequence[str]) -> Division:
    """Divides a program at cut points.

    Args:
        units: The program.
        starts: Parameters whose first read begins each part after the first, as in
            ``Units.borders``.

    Raises:
        PlanError: A cut point is unknown, they are not in program order, or a value is
            changed in one part and read in another.
    """
    unknown = [name for name in starts if name not in units.borders]
    if unknown:
        raise PlanError(
            f"no part of the model begins with reading {unknown[0]}; this plan was "
            "made for another version of it. Plan again"
        )
    bounds = [units.borders[name] for name in starts]
    if bounds != sorted(set(bounds)):
        raise PlanError(
            f"parts that begin with {', '.join(starts)} are not in the order in which "
            "the model reads them. Plan again"
        )
    homes = [bisect_right(bounds, index) for index in range(len(units.units))]
    return replace(_division(units, homes, len(bounds) + 1), starts=tuple(starts))


def divided_by_marks(units: Units, labels: Sequence[int | None]) -> Division:
    """Divides a program at the user's ``stage`` marks.

    Units without a mark go to the latest stage that makes one of their operands. If
    they read only parameters and data, they go to the first stage that reads them.

    Args:
        units: The program.
        labels: Number of each unit's stage, or None.

    Raises:
        PlanError: A stage reads a value that a later one makes (names both lines), or
            one that another stage changes.
    """
    stages = 1 + max((n for n in labels if n is not None), default=0)
    homes: list[int | None] = list(labels)
    for index, unit in enumerate(units.units):
        if homes[index] is None:
            made = [units.makers[v] for v in unit.reads if v in units.makers]
            known = [h for m in made if (h := homes[m]) is not None]
            homes[index] = max(known, default=None)
    reader: dict[int, int] = {}
    for index in reversed(range(len(units.units))):
        home = homes[index]
        if home is None:
            home = homes[index] = reader.get(index, stages - 1)
        for value in units.units[index].reads:
            maker = units.makers.get(value)
            if maker is not None:
                reader[maker] = min(home, reader.get(maker, home))
    return _division(units, [0 if h is None else h for h in homes], stages)


def _division(units: Units, homes: Sequence[int], count: int) -> Division:
    """Returns the division by each unit's virtual stage; readers run free units."""
    readers = _readers(units, homes, count)
    places = _places(units, homes, count, readers)
    members: list[list[int]] = [[] for _ in range(count)]
    for index, several in enumerate(places):
        for place in several:
            members[place].append(index)
    _check_order(units, homes)
    made_at: dict[Value, int] = {}
    imports: list[dict[Value, None]] = [{} for _ in range(count)]

    def read(value: Value, place: int) -> None:
        maker = units.makers.get(value)
        if maker is not None and place not in places[maker]:
            (made_at[value],) = places[maker]
            imports[place][value] = None

    for place, indices in enumerate(members):
        for index in indices:
            for value in units.units[index].reads:
                read(value, place)
    for result in units.results:
        if result is not None:
            read(result, count - 1)
    fresh: dict[int, list[int]] = defaultdict(list)
    for number, value in units.fresh.items():
        maker = units.makers.get(value)
        there = readers[number] if maker is None else places[maker]
        fresh[min(there, default=0)].append(number)
    parts = tuple(
        PlacePart(
            units=tuple(members[place]),
            inputs=_inputs(units, members[place], fresh[place], place, count),
            imports=tuple(sorted(imports[place])),
            exports=tuple(sorted(v for v, at in made_at.items() if at == place)),
            fresh=tuple(fresh[place]),
        )
        for place in range(count)
    )
    _check_changed(units, parts)
    return Division(units=units, parts=parts, made_at=made_at)


def _check_changed(units: Units, parts: Sequence[PlacePart]) -> None:
    """Refuses values that one virtual stage changes and another reads."""
    for place, part in enumerate(parts):
        for number in part.fresh:
            others = [
                i for i, x in enumerate(parts) if number in x.inputs and i != place
            ]
            if others:
                path = units.path(number)
                raise PlanError(
                    f"{path} is changed in part {place} of the model and read in part "
                    f"{others[0]}: every micro-batch would have to wait for the one "
                    "before. Leave it as it is while training, or keep what reads it "
                    "in one stage"
                )


def _readers(units: Units, homes: Sequence[int], count: int) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = defaultdict(set)
    for index, inputs in enumerate(units.inputs):
        if not units.free[index]:
            for number in inputs:
                readers[number].add(homes[index])
    for value in units.results:
        if value is not None:
            maker = units.makers.get(value)
            if maker is None or units.free[maker]:
                for number in (value[1],) if maker is None else units.inputs[maker]:
                    readers[number].add(count - 1)
    return readers


def _places(
    units: Units,
    homes: Sequence[int],
    count: int,
    readers: Mapping[int, Collection[int]],
) -> list[tuple[int, ...]]:
    wanted: list[set[int]] = [set() for _ in units.units]
    for value in units.results:
        if value is not None and value in units.makers:
            wanted[units.makers[value]].add(count - 1)
    for number, value in units.fresh.items():
        maker = units.makers.get(value)
        if maker is not None and units.free[maker]:
            # On a reader's stage; else on a stage that reads its operands.
            others = (p for n in units.inputs[maker] for p in readers.get(n, ()))
            there = readers.get(number) or {*others}
            wanted[maker].add(min(there, default=0))
    for index in reversed(range(len(units.units))):
        if not units.free[index]:
            wanted[index] = {homes[index]}
        else:
            wanted[index] = _unit_stages(units, index, wanted[index], readers)
        for value in units.units[index].reads:
            if value in units.makers:
                wanted[units.makers[value]] |= wanted[index]
    return [tuple(sorted(w)) for w in wanted]


def _unit_stages(
    units: Units,
    index: int,
    wanted: set[int],
    readers: Mapping[int, Collection[int]],
) -> set[int]:
    """Returns a free unit's stages: its readers', or the parameter's for a sum."""
    inputs = units.inputs[index]
    if units.units[index].kind not in SUMS or not inputs or not wanted:
        return wanted or {0}
    if not all(map(units.is_weight, inputs)):
        return wanted
    first = max(min(readers.get(n, ()), default=0) for n in inputs)
    return {first} if min(wanted) >= first else wanted


def _inputs(
    units: Units, members: Sequence[int], fresh: Sequence[int], place: int, count: int
) -> tuple[int, ...]:
    values = [v for index in members for v in units.units[index].reads]
    values += [units.fresh[number] for number in fresh]
    if place == count - 1:
        values += [v for v in units.results if v is not None]
    return tuple(sorted({n for position, n in values if position == ()}))


class FlowsBackwards(PlanError):
    """A stage reads a value that a later one makes."""


def _check_order(units: Units, homes: Sequence[int]) -> None:
    problems = Problems("values flow backwards between stages", FlowsBackwards)
    seen: set[tuple[str, str]] = set()
    for index, unit in enumerate(units.units):
        for value in unit.reads:
            maker = units.makers.get(value)
            if maker is None or units.free[maker] or homes[maker] <= homes[index]:
                continue
            lines = unit.line, units.units[maker].line
            if lines not in seen:
                seen.add(lines)
                problems.add(
                    f"{lines[0]} in stage {homes[index]} reads what {lines[1]} makes "
                    f"in stage {homes[maker]}. Move one of them, so that a stage reads "
                    "only what it or an earlier one makes"
                )
    problems.raise_if_any()
