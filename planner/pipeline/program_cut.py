"""Divides the equations of a program among virtual stages.

Stage programs can cut a model anywhere. The model is a list of units: the equations of
the loss in order, with calls inlined. Loops, branches and checkpointed regions are one
unit each. A cut point is named after the parameter that the second part is first to
read, which another trace has too.

Cheap units that read only data and parameters (masks, keys, casts) are *free*: they run
on every virtual stage that reads them, and need no transfer. Lookups of data in a
parameter are not free, nor are sums of a parameter, such as a penalty on its size, as
each reader would need the parameter.
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
"""Result of an equation, as (position of the equation, index of the result). Inputs of
the program have the position ``()``.
"""


SUMS = frozenset(("reduce_sum", "reduce_max"))
"""Operations whose results are much smaller than their operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Equation that is assigned to virtual stages as one.

    Attributes:
        position: Position of the equation.
        reads: Distinct values that the equation reads.
        writes: Results of the equation.
        tensors: Ids of the results in the graph; None for scalar constants.
        sizes: Bytes of each result.
        cheap: Whether the equation has no products and no loops.
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
        units: Units whose results are used, in order.
        params: Dotted paths of the trained parameters, which are the first inputs.
        frozen: Numbers of the inputs that are weights without training.
        results: Loss and reported values; None for constants.
        fresh: Value that replaces a non-trained input after a micro-batch, by input.
        others: Dotted paths of the non-trained inputs, which follow the parameters.
        counters: Increment of a non-trained counter per micro-batch, by input.
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
        """Whether each unit is free.

        A free unit is cheap, reads only free units, and looks up no data in a weight.
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
        """``frozen`` as numbers among the non-trained inputs."""
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
        """Returns the unit of the operation at a position, or None."""
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
        """Possible cut points: number of a unit, by the parameter that it reads first.

        Of the units since the last one that reads parameters, it is the one before
        which the fewest bytes are cut.
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
        """Bytes that a cut before each unit would transfer to later units."""
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
        """Returns the number of the stage that marks each unit, or None without a mark.

        Raises:
            PlanError: Stages are marked inside a loop (names its line), or a stage is
                not used by the loss.
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
                    f"{unit.line} has marks of stage "
                    f"{', '.join(map(str, marked))}"
                    + (" and operations of no stage" if None in numbers else "")
                    + ". A loop or checkpointed region is on one stage: put marks "
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
    problems = Problems("the loss does not need some stages", PlanError)
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
        imports: Values that earlier virtual stages send, in the order of these.
        exports: Values that later virtual stages receive.
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
        units: Program as a list of units.
        parts: Part of each virtual stage.
        made_at: Virtual stage that produces each transferred value.
        starts: Cut points before all parts but the first; empty if marks set them.
    """

    units: Units
    parts: tuple[PlacePart, ...]
    made_at: Mapping[Value, int]
    starts: tuple[str, ...] = ()

    def readers(self, value: Value) -> tuple[int, ...]:
        """Returns the virtual stages that receive a value."""
        return tuple(i for i, part in enumerate(self.parts) if value in part.imports)

    def owner(self, number: int, stages: int) -> int:
        """Returns the first stage that reads or changes an input; 0 if none does.

        Args:
            number: Number of the input.
            stages: Number of stages, to which parts are assigned in turn.
        """
        parts = enumerate(self.parts)
        places = (i for i, x in parts if number in x.inputs or number in x.fresh)
        return min((place % stages for place in places), default=0)


def divide_program(units: Units, starts: Sequence[str]) -> Division:
    """Divides a program at cut points.

    Args:
        units: Program as a list of units.
        starts: Cut points before all parts but the first, as in ``Units.borders``.

    Raises:
        PlanError: A cut point is unknown, cut points are not in the program's order, or
            a value is changed in one part and read in another.
    """
    unknown = [name for name in starts if name not in units.borders]
    if unknown:
        raise PlanError(
            f"no part of the model begins with reading {unknown[0]}, as this plan was "
            "made for another version of the model. Plan again"
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

    A unit without a mark goes to the latest stage that produces one of its operands. A
    unit that reads only parameters and data goes to the first stage that reads it.

    Args:
        units: Program as a list of units.
        labels: Number of each unit's stage, or None.

    Raises:
        PlanError: A stage reads a value that a later stage makes (names both lines), or
            that another stage changes.
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
    """Returns the division by each unit's virtual stage; readers run free units too."""
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
    for place, part in enumerate(parts):
        for number in part.fresh:
            others = [
                i for i, x in enumerate(parts) if number in x.inputs and i != place
            ]
            if others:
                path = units.path(number)
                raise PlanError(
                    f"{path} is changed in part {place} of the model and read in part "
                    f"{others[0]}, so every micro-batch would wait for the one before. "
                    "Keep it constant while training, or put its readers into the "
                    "same stage"
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
            # The unit is on a reader's stage, or else where its operands are read.
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
    """Returns a free unit's stages: those of readers, or of a sum's parameter."""
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
    """A stage reads a value that a later stage makes."""


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
                    f"{lines[0]} in stage {homes[index]} reads a value that {lines[1]} "
                    f"makes in stage {homes[maker]}. Move one of them, so that a stage "
                    "reads only values of its own and of earlier stages"
                )
    problems.raise_if_any()
