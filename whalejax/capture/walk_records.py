"""Records that the walk writes before regions and gradients are known.

It is separate from the walk because regions and gradients read it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.capture.rules.behaviour import Behaviour
from whalejax.planner.model.graph import Factor, Mark, TensorKind
from whalejax.user_code.annotations import parse_scope


Position = tuple[int, ...]
Label = tuple[Mark, Position]
"""A mark and the position of the jaxpr in which it was opened."""

Value = int | None
"""A tensor's id; None for a scalar that is written into the program."""


@dataclass(slots=True, kw_only=True)
class TensorDraft:
    """A tensor for which it is not yet known whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    inexact: bool
    kind: TensorKind = "value"
    path: str = ""
    names: tuple[str | None, ...] = ()
    pinned: tuple[str | None, ...] = ()
    called: tuple[str | None, ...] = ()
    trained: bool = False

    def reshaped(self, shape: tuple[int, ...]) -> TensorDraft:
        """Returns a computed value like this tensor, with another shape."""
        return TensorDraft(
            shape=shape,
            dtype=self.dtype,
            itemsize_bytes=self.itemsize_bytes,
            inexact=self.inexact,
        )


@dataclass(slots=True, kw_only=True)
class OpDraft:
    """An operation without regions and gradients; slots leave out literals."""

    kind: str
    position: Position
    operands: tuple[int, ...]
    results: tuple[int, ...]
    behaviour: Behaviour
    trip: int
    remat: int | None
    kept: bool
    labels: tuple[Label, ...]
    scope: str
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Surroundings of the equations of one inner jaxpr.

    Attributes:
        prefix: Position of the jaxpr.
        labels, scope, trip, remat, chunks: See ``OpDraft``.
        policy: Policy of the checkpointed region around it.
        sorted_rows: The call around it that sorts rows across the batch, or None.
        depth: Length of the position of that call's jaxpr.
    """

    prefix: Position = ()
    labels: tuple[Label, ...] = ()
    scope: str = ""
    trip: int = 1
    remat: int | None = None
    policy: Callable[..., Any] | None = None
    chunks: int = 1
    sorted_rows: Any = None
    depth: int = 0

    def enter_call(self, position: Position, index: int) -> Context:
        """Returns the surroundings inside a call's inner jaxpr."""
        return replace(self, prefix=(*position, index))

    def under(self, text: str) -> Context:
        """Returns the surroundings of equations under a relative name stack."""
        if not text:
            return self
        marks = tuple(
            (mark, self.prefix)
            for mark in map(parse_scope, text.split("/"))
            if mark is not None
        )
        return replace(
            self,
            labels=self.labels + marks,
            scope=f"{self.scope}/{text}" if self.scope else text,
        )


def without_literals(
    rule: Behaviour, operands: Sequence[Value], num_results: int
) -> Behaviour:
    """Returns a rule whose slots do not count operands that are literals."""
    if None not in operands:
        return rule
    slots: dict[int, int] = {}
    for slot, tensor in enumerate(operands):
        if tensor is not None:
            slots[slot] = len(slots)
    kept = len(slots)
    slots.update((len(operands) + k, kept + k) for k in range(num_results))
    factors: list[Factor] = []
    for factor in rule.factors:
        members = tuple((slots[s], d) for s, d in factor.members if s in slots)
        if members:
            factors.append(Factor(members=members, kind=factor.kind))
    return replace(
        rule,
        factors=tuple(factors),
        saves=tuple(
            (slots[slot], slots[wrt])
            for slot, wrt in rule.saves
            if slot in slots and wrt in slots
        ),
    )
