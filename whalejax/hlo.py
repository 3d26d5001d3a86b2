"""Count the collectives of a compiled program by reading its HLO text.

Loops with a known trip count are multiplied out. The module reads text because that is
the one form of a compiled program that every backend gives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whalejax.meshes.problems import WhaleError


KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

_ITEMSIZES = {"pred": 1, "token": 0, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"body=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\].*? \{('[^}]*)\}")
_MESH_AXIS = re.compile(r"('[^']+')(?:=(\d+)|:\(\d+\)(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A collective of the program.

    Attributes:
        kind: as in ``KINDS``.
        shapes: (dtype, shape) of its results on one device.
        nbytes: bytes of its results on one device.
        count: how often it runs in one execution of the program.
        group_size: devices that it joins; 0 where the text does not say.
        name: name stack of the operation behind it, if the compiler kept it.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int
    count: int
    group_size: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """All collectives of a program."""

    instructions: tuple[Instruction, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Executions by kind."""
        found: Counter[str] = Counter()
        for i in self.instructions:
            found[i.kind] += i.count
        return found

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Result bytes on one device by kind, executions multiplied."""
        found: Counter[str] = Counter()
        for i in self.instructions:
            found[i.kind] += i.count * i.nbytes
        return found

    def of(self, kind: str) -> tuple[Instruction, ...]:
        """The collectives of one kind."""
        return tuple(i for i in self.instructions if i.kind == kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    opcode: str
    result: str
    rest: str


def collectives(text: str) -> Collectives:
    """Read the collectives of a compiled program.

    An asynchronous one counts once, where it starts. All branches of a conditional
    count, although one of them runs.

    Args:
        text: ``compiled.as_text()``.

    Returns:
        Those that the entry computation reaches, in the order of the text.

    Raises:
        WhaleError: a loop that holds a collective has no known trip count, or no entry
            computation is found.

    >>> found = collectives(
    ...     "ENTRY %main (x: f32[4]) -> f32[8] {\\n"
    ...     "  ROOT %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}\\n"
    ...     "}"
    ... )
    >>> found.counts, found.nbytes["all-gather"]
    (Counter({'all-gather': 1}), 32)
    """
    computations, entry = _computations(text)
    if entry is None:
        raise WhaleError("the program text has no ENTRY computation; expected HLO text")
    found: list[Instruction] = []
    _visit(computations, entry, 1, found)
    return Collectives(instructions=tuple(found))


def _computations(text: str) -> tuple[dict[str, list[_Line]], str | None]:
    computations: dict[str, list[_Line]] = {}
    entry = None
    current: list[_Line] = []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None and " = " not in line.split("(")[0]:
            current = computations.setdefault(head[1], [])
            if line.startswith("ENTRY"):
                entry = head[1]
            continue
        match = _INSTRUCTION.match(line)
        if match is not None:
            current.append(_Line(opcode=match[3], result=match[2], rest=match[4]))
    return computations, entry


def _visit(
    computations: Mapping[str, list[_Line]],
    name: str,
    count: int,
    found: list[Instruction],
) -> None:
    for line in computations.get(name, []):
        kind = line.opcode.removesuffix("-start")
        if kind in KINDS:
            found.append(_instruction(kind, line, count))
        if line.opcode == "while":
            inner: list[Instruction] = []
            trips = _TRIP.search(line.rest)
            body = _BODY.search(line.rest)
            if body is not None:
                times = int(trips[1]) if trips else 1
                _visit(computations, body[1], count * times, inner)
            if inner and trips is None:
                raise WhaleError(
                    f"a loop with {len(inner)} collectives has no known trip count; "
                    "they cannot be counted"
                )
            found.extend(inner)
        else:
            for called in _called(line.rest):
                if kind not in KINDS:
                    _visit(computations, called, count, found)


def _called(rest: str) -> Iterator[str]:
    yield from (m[1] for m in _CALLED.finditer(rest))
    branches = _BRANCHES.search(rest)
    if branches is not None:
        yield from (b.strip().lstrip("%") for b in branches[1].split(","))


def _instruction(kind: str, line: _Line, count: int) -> Instruction:
    shapes = []
    nbytes = 0
    for dtype, dims in _SHAPE.findall(_result(kind, line)):
        shape = tuple(int(d) for d in dims.split(",") if d)
        shapes.append((dtype, shape))
        nbytes += math.prod(shape) * _itemsize(dtype)
    name = _NAME.search(line.rest)
    return Instruction(
        kind=kind,
        shapes=tuple(shapes),
        nbytes=nbytes,
        count=count,
        group_size=_group_size(line.rest),
        name=name[1] if name else "",
    )


def _result(kind: str, line: _Line) -> str:
    """The shape of what a collective gives, without what an asynchronous one holds.

    Where one starts, its type is a tuple of operands, results and context; only an
    all-reduce names its results alone.
    """
    if line.opcode == kind or kind == "all-reduce":
        return line.result
    elements, depth = [""], 0
    for character in line.result.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements[1]


def _group_size(text: str) -> int:
    """Devices in a replica group, in any of the three ways to write groups."""
    listed = _LISTED_GROUPS.search(text)
    if listed is not None:
        return listed[1].count(",") + 1
    counted = _COUNTED_GROUPS.search(text)
    if counted is not None:
        return int(counted[1])
    by_axes = _MESH_GROUPS.search(text)
    if by_axes is None:
        return 0
    sizes = {m[1]: int(m[2]) for m in _MESH_AXIS.finditer(by_axes[1])}
    # A part of an axis, as in 'a':(2)4, gives its own size.
    parts = [int(m[3] or sizes[m[1]]) for m in _MESH_AXIS.finditer(by_axes[2])]
    return math.prod(parts)


def _itemsize(dtype: str) -> int:
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise WhaleError(f"HLO element type {dtype!r} is not known")
    return max(1, int(digits[0]) // 8)
