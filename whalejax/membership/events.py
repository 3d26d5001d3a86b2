"""What may happen in an elastic run, as its supervisor's loop hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whalejax.membership.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Processes may be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A supervisor that was killed is started again.

    Attributes:
        told: what its journal tells.
        losses: generation and loss of the steps that were written down.
        wall: the time by which failures in the journal are told.
        committed_at: when the newest step was, by the same.
    """

    told: History
    losses: Mapping[int, tuple[int, float]]
    wall: float = 0.0
    committed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A turn of the loop: time has passed, and what came in it has been told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A member that is not refused introduces itself, first or again.

    Attributes:
        name: that it goes by.
        slot: of a process that was started here.
        fields: of its message.
    """

    name: str
    slot: int | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A member said something; ``name`` is the one it was registered under."""

    name: str
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """A connection ended; its member may come back while its lease lasts."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process was started, and waits until that is written down.

    Attributes:
        name: of its member.
        slot: that it fills.
        pid: its number.
        began: when it began, by which a later supervisor knows it.
        agent: that holds it; empty for none.
        machine: of the process.
    """

    name: str
    slot: int
    pid: int
    began: str = ""
    agent: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """A process could not be started, as the system said; it is tried again."""

    slot: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A process is started later: at a time, or when an agent has room for it."""

    slot: int
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process has ended.

    Attributes:
        name: of its member.
        status: of the process; None where nobody can know.
        log: the end of what it wrote.
    """

    name: str
    status: int | None
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrunnable:
    """A process that has not joined cannot be run with what it was given."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """An agent joined the run, and may hold so many processes."""

    agent: str
    host: str
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFreed:
    """An agent has room for so many further processes."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLeft:
    """An agent was told to end, and holds no process any more."""

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is lost with all members that it holds, which is one failure."""

    agent: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionProposed:
    """A process says how gradients are added up, and why; what is said first holds.

    Attributes:
        by: ``"messages"`` or ``"collectives"``; empty of a process that only asks.
        why: for a user.
    """

    by: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """The run is to end: members stop at a step, and one saves its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAtOnce:
    """The run is to end without waiting for anything; no state is saved."""


Event = (
    Begin
    | Resume
    | Tick
    | Register
    | Heard
    | Disconnected
    | Started
    | NotStarted
    | Deferred
    | Exited
    | Unrunnable
    | AgentJoined
    | RoomFreed
    | AgentLeft
    | AgentLost
    | ReductionProposed
    | Terminate
    | EndAtOnce
)
