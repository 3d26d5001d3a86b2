"""The collectives of a compiled program: kind, bytes, executions and mesh axes.

Payloads follow the planner's convention, the bytes of the unsharded array on one
device. This is the result of an all-gather, and the operand of a reduce-scatter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from whalejax.hlo.groups import Groups, axes_between, axes_of, groups_of, pairs_of
from whalejax.hlo.hlo_text import (
    COLLECTIVES,
    HloError,
    Line,
    Module,
    Shape,
    nbytes_of,
    read,
    shapes_of,
)
from whalejax.hlo.loops import Branch, Execution, executions, largest_branches


KINDS = tuple(sorted(COLLECTIVES))
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
"""Attribute of fusions that continue one asynchronous collective, in TPU programs."""

_START = 'custom_call_target="AsyncCollectiveStart"'
"""Marker of the first of these fusions, on whose result the others depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A collective of the program.

    Attributes:
        kind: One of ``KINDS``.
        shapes: (dtype, shape) of the results on one device.
        nbytes: Bytes of the results on one device.
        count: Number of executions in one execution of the program.
        group_size: Number of devices in a group; 0 if the text does not have it, and
            for a collective-permute.
        groups: Groups of devices; for a collective-permute, (source, target) pairs.
        name: Name stack of the source operation; empty if the compiler dropped it.
        places: Source lines, innermost first.
        instruction: Name of the instruction in the program, as in profiles.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int
    count: int
    group_size: int
    name: str
    groups: Groups = ()
    places: tuple[str, ...] = ()
    instruction: str = ""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the unsharded array on one device, as the planner counts them."""
        whole = self.kind == "reduce-scatter"
        return self.nbytes * (max(1, self.group_size) if whole else 1)

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
        """Returns the mesh axes of the groups; None if the groups are no axes.

        Args:
            mesh: Mesh axes and sizes, outermost first.
        """
        if self.kind == "collective-permute":
            return axes_between(self.groups, mesh) if self.groups else None
        return axes_of(self.groups, mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """All collectives of a program."""

    instructions: tuple[Instruction, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of executions by kind."""
        counts: Counter[str] = Counter()
        for i in self.instructions:
            counts[i.kind] += i.count
        return counts

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Result bytes on one device by kind, over all executions."""
        nbytes: Counter[str] = Counter()
        for i in self.instructions:
            nbytes[i.kind] += i.count * i.nbytes
        return nbytes

    def of(self, kind: str) -> tuple[Instruction, ...]:
        """Returns the collectives of one kind."""
        return tuple(i for i in self.instructions if i.kind == kind)


def collectives(program: str | Module) -> Collectives:
    """Returns the collectives of a compiled program.

    An asynchronous collective counts once: at its start, or in the first of a chain of
    fusions. It also counts once if it begins before a loop that continues it. Of a
    conditional, the branch that sends most bytes counts.

    Args:
        program: ``compiled.as_text()``, or the result of ``read``.

    Returns:
        Collectives that the entry computation reaches, in the order of the text.

    Raises:
        HloError: A loop with a collective has no known trip count, or the program has
            an unknown construct.

    >>> found = collectives(
    ...     "ENTRY %main (x: f32[4]) -> f32[8] {\\n"
    ...     "  ROOT %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}\\n"
    ...     "}"
    ... )
    >>> found.counts, found.nbytes["all-gather"]
    (Counter({'all-gather': 1}), 32)
    """
    module = read(program) if isinstance(program, str) else program
    result: list[tuple[Branch, Instruction]] = []
    chains = _Chains()
    uncounted: Counter[str] = Counter()
    for execution in executions(module):
        kind = execution.line.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            _refuse(execution.line)
            continue
        if not chains.begins(kind, execution):
            continue
        if execution.loop:
            uncounted[execution.loop] += 1
        result.append((execution.branch, _instruction(module, kind, execution)))
    for number in uncounted.values():
        raise HloError(
            f"a loop with {number} collectives has no known trip count, so "
            "the collectives cannot be counted"
        )
    sent: Counter[Branch] = Counter()
    for branch, one in result:
        sent[branch] += one.nbytes * one.count
    largest = largest_branches(sent)
    return Collectives(instructions=tuple(i for b, i in result if b in largest))


class _Chains:
    """Distinguishes starts of asynchronous collectives from their continuations."""

    def __init__(self) -> None:
        self.begun: set[tuple[str, str, str, tuple[int, ...]]] = set()

    def begins(self, kind: str, execution: Execution) -> bool:
        """Whether a collective starts here, instead of continuing a counted one."""
        chain = _CHAIN.search(execution.line.rest)
        if chain is None:
            return True
        channel = _CHANNEL.search(execution.line.rest)
        number = channel[1] if channel else ""
        *around, here = (
            (kind, chain[1], number, execution.visits[: n + 1])
            for n in range(len(execution.visits))
        )
        if here in self.begun:
            return False
        # A loop that starts no collective itself continues one that began before.
        if not _starts(execution) and self.begun.intersection(around):
            return False
        self.begun.add(here)
        return True


def _starts(execution: Execution) -> bool:
    return _START in execution.computation.root().rest


def _refuse(line: Line) -> None:
    sends = line.opcode in ("send", "recv") and "is_host_transfer=true" not in line.rest
    if sends or line.opcode == "collective-broadcast":
        raise HloError(f"the {line.opcode} {line.name} sends, and cannot be counted")


def _instruction(module: Module, kind: str, execution: Execution) -> Instruction:
    line = execution.line
    shapes = shapes_of(_result(kind, line))
    if kind == "collective-permute":
        groups = pairs_of(line.rest)
        size = 0
    else:
        groups = groups_of(line.rest, module.num_devices)
        size = max(map(len, groups), default=0)
    cut = _cut(execution, kind, size)
    if cut is not None:
        kind, shapes = "reduce-scatter", cut
    return Instruction(
        kind=kind,
        shapes=shapes,
        nbytes=nbytes_of(shapes),
        count=execution.count,
        group_size=size,
        name=line.op_name,
        groups=groups,
        places=module.places(line),
        instruction=line.name,
    )


def _cut(execution: Execution, kind: str, size: int) -> tuple[Shape, ...] | None:
    """Returns the shapes of an all-reduce after a fusion cut out this device's part.

    TPU programs write a reduce-scatter so. Returns None for other all-reduces.
    """
    fused = execution.computation.name != execution.caller
    if kind != "all-reduce" or not fused or size < 2:
        return None
    root = execution.computation.root()
    whole = execution.line.shapes
    if root.opcode != "dynamic-slice" or execution.line.name not in root.operands:
        return None
    return root.shapes if nbytes_of(root.shapes) * size == nbytes_of(whole) else None


def _result(kind: str, line: Line) -> str:
    """Returns the shape of a collective's result, without operands and context.

    The type of an asynchronous start is a tuple of operands, results and context. An
    all-reduce is an exception, whose type has results alone.
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
