"""Events of an elastic run, and effects that its supervisor's loop carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whalejax.membership.assignment import Node
from whalejax.membership.exit_status import STATUS, Ending
from whalejax.wire import run_messages as wire


# What may happen.


class StartsAllowedEvent(NamedTuple):
    """Processes may be started."""


class Resume(NamedTuple):
    """A supervisor that was killed is started again.

    Attributes:
        events: Events of its journal.
        losses: Generation and loss of the steps that were written down.
        wall: The time by which failures in the journal are told.
        committed_at: When the newest step was, by the same.
    """

    events: Sequence[Mapping[str, Any]]
    losses: Mapping[int, tuple[int, float]]
    wall: float = 0.0
    committed_at: float = 0.0


class Tick(NamedTuple):
    """A turn of the loop: time has passed, and what came in it has been told."""


class RegisterEvent(NamedTuple):
    """A member that is not refused introduces itself; ``slot`` if it was started."""

    name: str
    slot: int | None
    message: wire.Register


class MemberMessageEvent(NamedTuple):
    """A member said something; ``name`` is the one it was registered under."""

    name: str
    message: wire.OfMember


class Disconnected(NamedTuple):
    """A connection ended; its member may come back while its lease lasts."""

    name: str


class Started(NamedTuple):
    """A process was started, and waits until that is written down.

    A later supervisor knows it by when it ``began``; ``agent`` is empty for none.
    """

    name: str
    slot: int
    pid: int
    began: str = ""
    agent: str = ""
    machine: str = ""


class NotStarted(NamedTuple):
    """A process could not be started, as the system said; it is tried again."""

    slot: int
    why: str


class Deferred(NamedTuple):
    """A process is started later: at a time, or when an agent has room for it."""

    slot: int
    until: float | None = None


class ProcessExitEvent(NamedTuple):
    """A process has ended, by a status if it is known; ``log`` ends what it wrote."""

    name: str
    status: int | None
    log: str = ""


class Unrunnable(NamedTuple):
    """A process that has not joined cannot be run with what it was given."""

    name: str
    why: str


class AgentJoined(NamedTuple):
    """An agent joined the run, and may hold so many processes."""

    agent: str
    host: str
    room: int


class RoomFreed(NamedTuple):
    """Agents have room for so many further processes."""

    rooms: int


class AgentLeft(NamedTuple):
    """An agent was asked to end, and holds no process any more."""

    agent: str


class AgentLost(NamedTuple):
    """An agent is lost with all members that it holds, which is one failure."""

    agent: str
    why: str


class ReductionProposed(NamedTuple):
    """A process says how gradients are added up, or asks; what is said first holds."""

    by: str
    why: str


class ResizeEvent(NamedTuple):
    """The run is to have another number of members; none ends it as ``Terminate`` does.

    Attributes:
        size: Number of members.
        devices: Names of the devices of each slot; None where they stay.
    """

    size: int
    devices: tuple[str, ...] | None = None


class Terminate(NamedTuple):
    """The run is to end: at once, or at a step after which a member saves its state."""

    at_once: bool


Event = (
    StartsAllowedEvent
    | Resume
    | Tick
    | RegisterEvent
    | MemberMessageEvent
    | Disconnected
    | Started
    | NotStarted
    | Deferred
    | ProcessExitEvent
    | Unrunnable
    | AgentJoined
    | RoomFreed
    | AgentLeft
    | AgentLost
    | ReductionProposed | ResizeEvent | Terminate
)  # fmt: skip


# What is to be done.


class Send(NamedTuple):
    """Send a member a message."""

    name: str
    message: wire.ToMember


class KillEffect(NamedTuple):
    """End a member's process at once, so that it can do nothing more."""

    name: str
    pid: int


class StartEffect(NamedTuple):
    """Start a process in a slot."""

    slot: int


class ReleaseEffect(NamedTuple):
    """Let a process run that was started: it is written down."""

    name: str


class WriteEvent(NamedTuple):
    """Write an event down, before anything that follows it is done."""

    event: str
    fields: dict[str, object]


class StepCommit(NamedTuple):
    """A step was committed: what it took from whom."""

    step: int
    generation: int
    loss: float
    parts: Mapping[str, Sequence[Node]]


class End(NamedTuple):
    """The run is over: how, and what a user is told of it."""

    how: Ending
    text: str

    @property
    def status(self) -> int:
        """Exit status of the process that started the run."""
        return STATUS[self.how]


Effect = Send | KillEffect | StartEffect | ReleaseEffect | WriteEvent | StepCommit | End
