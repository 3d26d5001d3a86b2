"""Events of a run of processes, and effects that its loop carries out.

An elastic run uses all of them. Other runs, such as ``whalejax launch --processes N``,
use only those that concern neither members nor agents.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from whalejax.membership.assignment import Node
from whalejax.membership.exit_status import STATUS, Ending
from whalejax.wire import run_messages as wire


# Events.


class StartsAllowedEvent(NamedTuple):
    """Processes may be started."""


class Resume(NamedTuple):
    """A supervisor that was killed has been started again.

    Attributes:
        events: Events of its journal.
        losses: Generation and loss of the recorded steps.
        wall: Current time by the clock of the journal.
        committed_at: Time of the newest commit, by the same clock.
    """

    events: Sequence[Mapping[str, Any]]
    losses: Mapping[int, tuple[int, float]]
    wall: float = 0.0
    committed_at: float = 0.0


class Tick(NamedTuple):
    """A turn of the loop ends, after its other events; time has passed.

    Attributes:
        beating: Names of the processes that have sent a heartbeat.
        silent: Seconds without a heartbeat of each process that stands still.
    """

    beating: Collection[str] = ()
    silent: Mapping[str, float] = {}


class RegisterEvent(NamedTuple):
    """A member registers, and was not refused.

    ``slot`` is None if the supervisor did not start it.
    """

    name: str
    slot: int | None
    message: wire.Register


class MemberMessageEvent(NamedTuple):
    """A member sent a message; ``name`` is its registered name."""

    name: str
    message: wire.OfMember


class Disconnected(NamedTuple):
    """A member's connection ended; the member may reconnect until its lease ends."""

    name: str


class Started(NamedTuple):
    """A process was started, and waits until its start is in the journal.

    A later supervisor recognises the process by ``pid`` and its start time ``began``.
    ``agent`` is empty if no agent runs it. ``machine`` comes from
    ``processes.machine``.
    """

    name: str
    slot: int
    pid: int
    began: str = ""
    agent: str = ""
    machine: str = ""


class NotStarted(NamedTuple):
    """The system could not start a process; the start is retried later."""

    slot: int
    why: str


class Deferred(NamedTuple):
    """A start is deferred until a time; None waits for room on an agent."""

    slot: int
    until: float | None = None


class ProcessExitEvent(NamedTuple):
    """A process ended; ``status`` is None if unknown, ``log`` is the end of its log."""

    name: str
    status: int | None
    log: str = ""


class Unrunnable(NamedTuple):
    """A process that has not joined cannot run with its arguments."""

    name: str
    why: str


class AgentJoined(NamedTuple):
    """An agent joined the run, with room for ``room`` processes."""

    agent: str
    host: str
    room: int


class RoomFreed(NamedTuple):
    """Agents have room for ``rooms`` more processes."""

    rooms: int


class AgentLeft(NamedTuple):
    """An agent that was asked to end runs no process any more."""

    agent: str


class AgentLost(NamedTuple):
    """An agent failed together with its members, which counts as one failure."""

    agent: str
    why: str


class ReductionProposed(NamedTuple):
    """A process proposes a gradient reduction; if ``by`` is empty, it only asks.

    The first proposal becomes the run's decision.
    """

    by: str
    why: str


class ResizeEvent(NamedTuple):
    """A resize of the run was requested.

    Attributes:
        size: New number of members; 0 ends the run as ``Terminate`` does.
        devices: Names of the devices of each slot; None if they stay the same.
    """

    size: int
    devices: tuple[str, ...] | None = None


class Terminate(NamedTuple):
    """A signal requested the end of the run.

    The run ends immediately if ``at_once``, else after a step, with its state saved.
    """

    at_once: bool
    number: int = signal.SIGTERM


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


# Effects.


class Send(NamedTuple):
    """Send a member a message."""

    name: str
    message: wire.ToMember


class KillEffect(NamedTuple):
    """Kill a member's process at once."""

    name: str
    pid: int


class TerminateEffect(NamedTuple):
    """Ask a process to end, by a signal."""

    name: str
    number: int = signal.SIGTERM


class SayEffect(NamedTuple):
    """Print a line for the user."""

    text: str


class StartEffect(NamedTuple):
    """Start a process in a slot."""

    slot: int


class ReleaseEffect(NamedTuple):
    """Let a started process run: its start is in the journal."""

    name: str


class WriteEvent(NamedTuple):
    """Write an event to the journal before any later effect is carried out."""

    event: str
    fields: dict[str, object]


class StepCommit(NamedTuple):
    """Record a committed step, with the micro-batches of each member."""

    step: int
    generation: int
    loss: float
    parts: Mapping[str, Sequence[Node]]


class End(NamedTuple):
    """End the run.

    ``how`` is the outcome, and ``text`` the message for the user. ``code`` is the exit
    status, or None if it follows from ``how``.
    """

    how: Ending
    text: str
    code: int | None = None

    @property
    def status(self) -> int:
        """Exit status of the process that started the run."""
        return STATUS[self.how] if self.code is None else self.code


Effect = (
    Send
    | KillEffect
    | TerminateEffect
    | SayEffect
    | StartEffect
    | ReleaseEffect
    | WriteEvent
    | StepCommit
    | End
)
