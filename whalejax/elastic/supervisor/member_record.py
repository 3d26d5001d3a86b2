"""What a supervisor knows of a member, and what it may decide to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whalejax.elastic.assignment import Node
from whalejax.elastic.supervisor.endings import STATUS, Ending
from whalejax.wire.messages import Message


Status = Literal[
    "starting", "registered", "ready", "active", "finished", "left", "failed", "gone"
]


@dataclass(slots=True, kw_only=True)
class Member:
    """A member, as the supervisor last heard of it.

    Attributes:
        name: unlike that of any other process of the run, also of earlier ones.
        slot: the place among local processes that it fills; None for one that the
            supervisor did not start.
        pid: of a local process; 0 where it is not known.
        began: when that process began.
        agent: that holds the process; empty where it runs on the supervisor's machine.
        machine: of the process, as ``processes.machine`` names it.
        status: ``"starting"`` until it says something, ``"registered"`` while it
            compiles, ``"ready"`` where it could take part, ``"active"`` where it does,
            ``"finished"`` behind the last step, ``"left"`` where its loop was left,
            ``"failed"`` where it told its error and has not ended yet.
        reached: its status before it failed or was given up.
        since: when it came to the status that it reached.
        heard_at: of its last word.
        connected: there is a connection.
        leaving: it asked to leave.
        released_at: when it was told that its part is over; None before.
        token: what its process drew, by which it is known before it has heard its name.
        ends_by_kill: it is ended by SIGKILL, because it has nothing to save.
        reported: number of its newest report that was taken.
        host, port: where other members reach it.
        step: the step of the state that it holds; -1 without a state.
        seconds: of a micro-batch.
        phase, done, moved_at: what it does, a count that rises while it does, and when
            that last rose.
        beyond: beats that told of a step after the one where others left their loops.
        prepared: the generation for which it has stopped.
        held: what it has added up of the step after ``step``.
    """

    name: str
    slot: int | None
    pid: int = 0
    began: str = ""
    agent: str = ""
    machine: str = ""
    status: Status = "starting"
    reached: Status = "starting"
    since: float = 0.0
    heard_at: float = 0.0
    connected: bool = False
    leaving: bool = False
    released_at: float | None = None
    token: str = ""
    ends_by_kill: bool = False
    reported: int = 0
    host: str = ""
    port: int = 0
    step: int = -1
    seconds: float = 0.0
    phase: str = ""
    done: int = 0
    moved_at: float = 0.0
    beyond: int = 0
    prepared: int = -1
    held: Sequence[Node] = field(default_factory=tuple)

    @property
    def is_there(self) -> bool:
        """It has not been given up."""
        return self.status != "gone"

    def becomes(self, status: Status, now: float) -> None:
        """Come to a status."""
        self.status = status
        if status not in ("failed", "gone"):
            self.reached, self.since = status, now


# What is to be done; the supervisor's loop does it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a member a message."""

    name: str
    message: Message


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
class End:
    """The run is over: how, and what a user is told of it."""

    how: Ending
    text: str

    @property
    def status(self) -> int:
        """For the process that started the run."""
        return STATUS[self.how]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """A step was committed: what it took from whom."""

    step: int
    generation: int
    loss: float
    parts: Mapping[str, Sequence[Node]]


Effect = Send | Kill | Start | Release | WriteEvent | StepCommit | End
