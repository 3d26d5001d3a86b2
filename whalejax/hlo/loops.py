"""Counts the executions of each instruction, including those in loops.

Some compilers write the trip count of a loop. Others, such as TPU's, do not. Then the
counter of the loop is followed through condition and body: from its start, by its step,
to its bound.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.hlo.hlo_text import Computation, Line, Module


_TRIP = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=(\w+)")
_INDEX = re.compile(r"index=(\d+)")
_WHOLE = re.compile(r"^-?\d+$")
_FOLLOWED = re.compile(r"^(?:\(|(?:[su]\d+|pred)\[\])")
"""Types that can be followed: tuples, integers and booleans."""

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SAME = frozenset(
    {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"}
    | {"optimization-barrier", "opt-barrier"}
)
"""Opcodes that return a scalar unchanged."""


@dataclass(frozen=True, slots=True)
class _CarryElement:
    index: int
    plus: int = 0


class _State:
    """All carries of a loop, as one value."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    direction: str
    left: Any
    right: Any


Branch = tuple[tuple[int, int], ...]
"""The branches around an instruction, outermost first. Each is the number of the
conditional, unique for each execution of it, and the number of the branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An instruction with the number of its executions, and where it occurs.

    Attributes:
        line: The instruction.
        computation: Computation of the instruction.
        count: Number of executions in one run of the program; 0 if a loop around the
            instruction has an unknown trip count.
        caller: Innermost enclosing computation that is no fusion.
        visits: A number for each enclosing computation, outermost first, unique for
            each place from which it is called.
        loop: Outermost loop around the instruction with an unknown trip count; empty
            without one.
        branch: Branches of conditionals around the instruction.
    """

    line: Line
    computation: Computation
    count: int
    caller: str
    visits: tuple[int, ...]
    loop: str = ""
    branch: Branch = ()


def executions(module: Module) -> Iterator[Execution]:
    """Yields every instruction that the entry computation reaches, with its executions.

    All branches of a conditional are included, although one runs; see
    ``largest_branches``. Scalar computations of reductions, sorts and scatters are
    omitted.

    Args:
        module: Module from ``read``.
    """
    start = module.computation(module.entry)
    yield from _Visits(module).of(start, 1, "", (start.name, (0,)))


def largest_branches(work: Mapping[Branch, float]) -> set[Branch]:
    """Returns the branch of each conditional with most work, an upper bound of any run.

    Args:
        work: Work of each branch without its inner branches, in any unit.

    Returns:
        Branches that count, with ``()`` for instructions outside branches.

    >>> one, other = ((1, 0),), ((1, 1),)
    >>> largest_branches({(): 5.0, one: 2.0, other: 3.0}) == {(), other}
    True
    """
    total: dict[Branch, float] = defaultdict(float, work)
    depth = max(map(len, work), default=0)
    largest: list[set[Branch]] = [{()}]
    for length in range(depth, 0, -1):
        cut = {path[:length] for path in work if len(path) >= length}
        best: dict[tuple[Branch, int], Branch] = {}
        for path in sorted(cut, key=lambda path: -total[path]):
            best.setdefault((path[:-1], path[-1][0]), path)
        for (outer, _), path in best.items():
            total[outer] += total[path]
        largest.insert(1, set(best.values()))
    result: set[Branch] = {()}
    for branches in largest[1:]:
        result |= {path for path in branches if path[:-1] in result}
    return result


_Caller = tuple[str, tuple[int, ...]]
"""Innermost computation that is no fusion, and the visits around it."""


class _Visits:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.numbers = itertools.count(1)

    def of(
        self,
        computation: Computation,
        count: int,
        loop: str,
        caller: _Caller,
        branch: Branch = (),
    ) -> Iterator[Execution]:
        module = self.module
        for line in computation.lines.values():
            yield Execution(
                line=line,
                computation=computation,
                count=count,
                caller=caller[0],
                visits=caller[1],
                loop=loop,
                branch=branch,
            )
            if line.opcode == "while":
                times = trips(module, computation, line)
                unknown = loop or (line.name if times is None else "")
                inner = count * (times or 0)
                for key, runs in (("body", inner), ("condition", inner + count)):
                    inside = module.computation(line.computation(key))
                    here = self._enter(inside, caller)
                    yield from self.of(inside, runs, unknown, here, branch)
                continue
            entered = next(self.numbers)
            for place, name in enumerate(_called(line)):
                inside = module.computation(name)
                fused = line.opcode == "fusion"
                here = caller if fused else self._enter(inside, caller)
                chosen = line.opcode == "conditional"
                within = (*branch, (entered, place)) if chosen else branch
                yield from self.of(inside, count, loop, here, within)

    def _enter(self, computation: Computation, caller: _Caller) -> _Caller:
        return computation.name, (*caller[1], next(self.numbers))


def _called(line: Line) -> list[str]:
    if line.opcode in ("fusion", "async-start"):
        return [line.computation("calls")]
    if line.opcode in ("call", "call-start"):
        key = "to_apply" if "to_apply=" in line.rest else "calls"
        return [line.computation(key)]
    if line.opcode in ("custom-call", "custom-call-start"):
        match = re.search(r"called_computations=\{([^}]*)\}", line.rest)
        return _names(match[1]) if match else []
    if line.opcode == "conditional":
        match = _BRANCHES.search(line.rest)
        if match is not None:
            return _names(match[1])
        return [line.computation(f"{word}_computation") for word in ("true", "false")]
    return []


def _names(text: str) -> list[str]:
    return [name.strip().lstrip("%") for name in text.split(",") if name.strip()]


def trips(module: Module, computation: Computation, loop: Line) -> int | None:
    """Returns the number of executions of a loop's body, or None if it is unknown.

    Args:
        module: The program.
        computation: Computation of the loop.
        loop: ``while`` instruction of the loop.
    """
    stated = _TRIP.search(loop.rest)
    if stated is not None:
        return int(stated[1])
    condition = module.computation(loop.computation("condition"))
    body = module.computation(loop.computation("body"))
    compared = _Values(module, condition, [_State()]).root()
    after = _Values(module, body, [_State()]).root()
    if not isinstance(compared, _Comparison) or not isinstance(after, list):
        return None
    before = (
        _Values(module, computation).of(loop.operands[0]) if loop.operands else None
    )
    if not isinstance(before, list):
        return None
    return _solved(compared, before, after)


def _solved(
    compared: _Comparison, before: Sequence[Any], after: Sequence[Any]
) -> int | None:
    left, right, direction = compared.left, compared.right, compared.direction
    if isinstance(right, _CarryElement) and not _unchanged(
        _CarryElement(right.index), after
    ):
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(
            direction, direction
        )
    if isinstance(right, _CarryElement):
        if not _unchanged(_CarryElement(right.index), after):
            return None
        right = _plus(before[right.index], right.plus)
    if not isinstance(left, _CarryElement) or not isinstance(right, int):
        return None
    start, moved = before[left.index], after[left.index]
    if not isinstance(start, int) or not isinstance(moved, _CarryElement):
        return None
    step = moved.plus
    if moved.index != left.index or step == 0:
        return None
    distance = right - (start + left.plus)
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    elif direction not in ("LT", "GT", "NE"):
        return None
    if direction in ("LT", "LE") and step < 0 or direction in ("GT", "GE") and step > 0:
        return None  # The loop is infinite, or never runs.
    if direction == "NE" and (distance % step or distance * step < 0):
        return None
    return max(0, -(-distance // step))


def _unchanged(carried: _CarryElement, after: Sequence[Any]) -> bool:
    return bool(after[carried.index] == _CarryElement(carried.index))


def _plus(value: Any, number: int) -> Any:
    return value + number if isinstance(value, int) else None


class _Values:
    """Follows integers and carries through a computation; other values are None."""

    def __init__(
        self, module: Module, computation: Computation, arguments: Sequence[Any] = ()
    ) -> None:
        self.module = module
        self.computation = computation
        self.arguments = arguments
        self.known: dict[str, Any] = {}

    def root(self) -> Any:
        return self.of(self.computation.root().name)

    def of(self, name: str) -> Any:
        if name not in self.known:
            line = self.computation.lines.get(name)
            followed = line is not None and _FOLLOWED.match(line.result)
            self.known[name] = self._find_value(line) if line and followed else None
        return self.known[name]

    def _find_value(self, line: Line) -> Any:
        match line.opcode:
            case "constant":
                return int(line.inside) if _WHOLE.match(line.inside) else None
            case "parameter":
                at = int(line.inside)
                return self.arguments[at] if at < len(self.arguments) else None
            case "tuple":
                return [self.of(operand) for operand in line.operands]
            case "get-tuple-element":
                return self._element(self.of(line.operands[0]), line)
            case "add" | "subtract":
                left, right = map(self.of, line.operands)
                return _sum(left, right, 1 if line.opcode == "add" else -1)
            case "compare":
                way = _DIRECTION.search(line.rest)
                left, right = map(self.of, line.operands)
                return _Comparison(way[1] if way else "", left, right)
            case "fusion" | "call":
                (name,) = _called(line)
                inside = self.module.computation(name)
                given = [self.of(operand) for operand in line.operands]
                return _Values(self.module, inside, given).root()
            case opcode if opcode in _SAME:
                return self.of(line.operands[0])
        return None

    def _element(self, whole: Any, line: Line) -> Any:
        match = _INDEX.search(line.rest)
        index = int(match[1]) if match else -1
        if isinstance(whole, _State):
            return _CarryElement(index)
        if isinstance(whole, list) and 0 <= index < len(whole):
            return whole[index]
        return None


def _sum(left: Any, right: Any, sign: int) -> Any:
    if sign > 0 and isinstance(left, int) and isinstance(right, _CarryElement):
        left, right = right, left
    if not isinstance(right, int):
        return None
    if isinstance(left, _CarryElement):
        return _CarryElement(left.index, left.plus + sign * right)
    return _plus(left, sign * right)
