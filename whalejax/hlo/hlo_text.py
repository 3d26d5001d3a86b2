"""Parses the text of a compiled program into computations and instructions.

Every line of a computation must be an instruction with a known opcode. Other lines are
refused, so that no later count is incomplete.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from whalejax.meshes.errors import WhaleError


class HloError(WhaleError):
    """A compiled program has a construct that this reader does not know."""


Shape = tuple[str, tuple[int, ...]]
"""Element type and dimensions."""

COLLECTIVES = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
    }
)
"""Kinds of collectives to count."""

_ASYNC = ("-start", "-update", "-done")

_PLAIN = frozenset(
    """
    abs add add-dependency after-all and async-done async-start async-update atan2
    batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert
    broadcast call cbrt ceil cholesky clamp collective-broadcast compare complex
    concatenate conditional constant convert convolution copy copy-done copy-start
    cosine count-leading-zeros custom-call divide domain dot dynamic-reshape
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor
    fusion gather get-dimension-size get-tuple-element imag infeed iota is-finite log
    log-plus-one logistic map maximum minimum multiply negate not opt-barrier
    optimization-barrier or outfeed pad parameter partition-id popcnt power real recv
    recv-done reduce reduce-precision reduce-window remainder replica-id reshape reverse
    rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even
    rsqrt scatter select select-and-scatter send send-done set-dimension-size shift-left
    shift-right-arithmetic shift-right-logical sign sine slice slice-done slice-start
    sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple
    while xor dynamic-slice-start dynamic-slice-done dynamic-update-slice-start
    dynamic-update-slice-done call-start call-update call-done custom-call-start
    custom-call-update custom-call-done
    """.split()
)

_KNOWN = (
    _PLAIN | COLLECTIVES | {kind + suffix for kind in COLLECTIVES for suffix in _ASYNC}
)

_ITEMSIZES = {"pred": 1, "token": 0, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BARE_OPERAND = re.compile(r"(?:^|,\s*)([A-Za-z_][\w.\-]*)(?=,|$)")
OP_NAME = re.compile(r'op_name="([^"]*)"')
SOURCE_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_REPLICAS = re.compile(r"replica_count=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction.

    Attributes:
        name: Name of the instruction.
        opcode: Opcode of the instruction.
        result: Type of the result, as text.
        operands: Names of the operands, in order.
        inside: Text between the parentheses of the instruction.
        rest: Text after the parentheses: attributes, metadata and backend data.
        root: Whether its result is that of the computation.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    inside: str
    rest: str
    root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Type and dimensions of each resulting array, with nested tuples flattened."""
        return shapes_of(self.result)

    @property
    def op_name(self) -> str:
        """Name stack of the source operation, or empty."""
        match = OP_NAME.search(self.rest)
        return match[1] if match else ""

    def computation(self, key: str) -> str:
        """Returns the name of the computation in an attribute.

        Raises:
            HloError: The attribute names no computation.
        """
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        if match is None:
            raise HloError(f"{self.opcode} {self.name} names no computation {key}=")
        return match[1]


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order of the text.

    Attributes:
        name: Name of the computation.
        lines: Instructions, by name.
    """

    name: str
    lines: dict[str, Line] = field(default_factory=dict)

    def root(self) -> Line:
        """Returns the line of the computation's result."""
        for line in reversed(self.lines.values()):
            if line.root:
                return line
        return next(reversed(self.lines.values()))


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    Attributes:
        computations: Computations by name.
        entry: Name of the entry computation.
        num_devices: Product of partitions and replicas.
        tables: Rows of the file, location and frame tables, by number.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    tables: Mapping[str, Mapping[int, str]]

    def computation(self, name: str) -> Computation:
        """Returns a computation by name.

        Raises:
            HloError: No computation has that name.
        """
        computation = self.computations.get(name)
        if computation is None:
            raise HloError(f"the program text has no computation {name!r}")
        return computation

    def places(self, line: Line) -> tuple[str, ...]:
        """Returns the source lines of an instruction, as ``file:line``.

        The innermost line comes first. There are none if the compiler dropped them.
        """
        plain = SOURCE_LINE.search(line.rest)
        if plain is not None:
            return (f"{plain[1]}:{plain[2]}",)
        places: list[str] = []
        frame = _FRAME.search(line.rest)
        number = int(frame[1]) if frame else 0
        seen: set[int] = set()
        while number and number not in seen:
            seen.add(number)
            row = _numbers(self.tables["StackFrames"].get(number, ""))
            place = self._place(row.get("file_location_id", 0))
            if place:
                places.append(place)
            number = row.get("parent_frame_id", 0) - self._offset
        return tuple(places)

    @property
    def _offset(self) -> int:
        """Offset of parent frame numbers, which some compilers print one too high."""
        first = _numbers(self.tables["StackFrames"].get(1, ""))
        return int(first.get("parent_frame_id") == 1)

    def _place(self, location: int) -> str:
        row = _numbers(self.tables["FileLocations"].get(location, ""))
        file = self.tables["FileNames"].get(row.get("file_name_id", 0), "")
        return f"{file.strip(chr(34))}:{row.get('line', 0)}" if file else ""


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def read(text: str) -> Module:
    """Parses the text of a compiled program.

    Args:
        text: ``compiled.as_text()``.

    Raises:
        HloError: A line or an opcode is unknown, or there is no entry computation.

    >>> module = read(
    ...     "ENTRY %main (x: f32[4]) -> f32[4] {\\n"
    ...     "  %x = f32[4]{0} parameter(0)\\n"
    ...     "  ROOT %y = f32[4]{0} negate(%x)\\n"
    ...     "}"
    ... )
    >>> module.computation(module.entry).root().operands
    ('x',)
    """
    if "ENTRY " not in text:
        raise HloError("the program text has no ENTRY computation; expected HLO text")
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    entry, table = "", None
    current: Computation | None = None
    for raw in text.splitlines():
        stripped = raw.strip()
        if not stripped or stripped.startswith("HloModule"):
            continue
        if current is not None:
            if stripped.startswith("}"):
                current = None
            else:
                line = _line(raw)
                current.lines[line.name] = line
            continue
        head = _COMPUTATION.match(raw)
        if head is not None:
            current = computations.setdefault(head[1], Computation(head[1]))
            entry = head[1] if raw.startswith("ENTRY") else entry
        elif stripped in tables:
            table = tables[stripped]
        elif table is not None and stripped[0].isdigit():
            number, _, row = stripped.partition(" ")
            table[int(number)] = row
        else:
            raise HloError(f"a line of the program text is unknown: {raw:.120}")
    return Module(computations, entry, _num_devices(text), tables)


def _num_devices(text: str) -> int:
    head = text[: text.find("\n")] if text.startswith("HloModule") else ""
    counts = (_PARTITIONS.search(head), _REPLICAS.search(head))
    return math.prod(
        int(num_devices[1]) for num_devices in counts if num_devices is not None
    )


def _line(raw: str) -> Line:
    match = _INSTRUCTION.match(raw)
    if match is None:
        raise HloError(f"a line of the program text is unknown: {raw:.120}")
    root, name, result, opcode, tail = match.groups()
    if opcode not in _KNOWN:
        raise HloError(f"the opcode {opcode!r} of {name} is not known")
    inside, rest = _split_operands(tail)
    return Line(
        name=name,
        opcode=opcode,
        result=result,
        operands=tuple((_OPERAND if "%" in inside else _BARE_OPERAND).findall(inside)),
        inside=inside,
        rest=rest,
        root=bool(root),
    )


def _split_operands(tail: str) -> tuple[str, str]:
    if "(" not in tail:
        inside, _, rest = tail.partition(")")
        return inside, rest
    depth, quoted = 1, False
    for at, character in enumerate(tail):
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return tail[:at], tail[at + 1 :]
    return tail, ""


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Returns element types and dimensions in the text of a type.

    >>> shapes_of("(f32[8]{0}, bf16[4,3]{1,0}, f32[])")
    (('f32', (8,)), ('bf16', (4, 3)), ('f32', ()))
    """
    return tuple(
        (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(text)
    )


def nbytes_of(shapes: tuple[Shape, ...]) -> int:
    """Returns the bytes of some arrays, without padding; at least 1 for each element.

    Raises:
        HloError: An element type is unknown.

    >>> nbytes_of((("bf16", (4, 3)), ("pred", ())))
    25
    """
    return sum(math.prod(dims) * _itemsize(dtype) for dtype, dims in shapes)


def _itemsize(dtype: str) -> int:
    if dtype in _ITEMSIZES:
        return _ITEMSIZES[dtype]
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise HloError(f"HLO element type {dtype!r} is not known")
    return max(1, int(digits[0]) // 8)
