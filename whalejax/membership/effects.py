"""What a supervisor may be told to do; its loop does it, in the order given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.membership.assignment import Node
from whalejax.membership.endings import STATUS, Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a member a message, by its kind and fields."""

    name: str
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End a member's process at once, so that it can do nothing more."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process in a slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let a process run that was started: it is written down."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteEvent:
    """Write an event down, before anything that follows it is done."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """A step was committed: what it took from whom."""

    step: int
    generation: int
    loss: float
    parts: Mapping[str, Sequence[Node]]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The run is over: how, and what a user is told of it."""

    how: Ending
    text: str

    @property
    def status(self) -> int:
        """For the process that started the run."""
        return STATUS[self.how]


Effect = Send | Kill | Start | Release | WriteEvent | StepCommit | End
