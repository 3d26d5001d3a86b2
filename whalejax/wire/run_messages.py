"""Messages between the processes of an elastic run."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta

from whalejax.wire.messages import (
    Arrays,
    Count,
    Message,
    Messages,
    Port,
    Seconds,
    Text,
    Whole,
)


_MOST_MEMBERS: Final = 4096

Node: TypeAlias = tuple[Whole, Whole]
"""Range of micro-batches: the index of the first, and the index after the last."""

Shares: TypeAlias = dict[Text, list[Node]]
Facts: TypeAlias = dict[Text, Text]
Way: TypeAlias = Literal["", "messages", "collectives"]
MemberName: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{1,31}\Z")]
"""Name that a supervisor gives a member; also names its log."""
AgentName: TypeAlias = Annotated[str, Meta(pattern=r"(?a)\A[\w.-]{1,64}\Z")]
Status: TypeAlias = Annotated[int, Meta(gt=-256, lt=256)]
Members: TypeAlias = Annotated[
    list[tuple[Text, Text, Port]], Meta(max_length=_MOST_MEMBERS)
]
"""Name, host and port of each member, by rank."""


# Messages of members to the supervisor.


class Register(Message):
    """Request of a process to take part, repeated after a reconnection."""

    run: Text
    name: Text
    machine: Text
    pid: Whole
    host: Text
    port: Port
    generation: Whole
    step: Whole
    micro_batches: Whole
    steps: Whole
    save: Text
    facts: Facts
    token: Text


class ReductionOffer(Message, tag="adding_up"):
    """Question about the run's gradient reduction; ``by`` proposes one, or is empty."""

    run: Text
    by: Way
    why: Text


class Refusal(Message):
    """Report that a process cannot run; sent before it joins."""

    machine: Text
    pid: Whole
    why: Text


class Beat(Message):
    """Heartbeat, with the step of the member's state and its progress in its phase."""

    phase: Text
    step: Whole
    done: Whole


class Report(Message):
    """Numbered message, which a member repeats until it is acknowledged.

    Attributes:
        number: Number from 1, which is set when the report is sent.
    """

    number: Whole = 0


class Ready(Report):
    """Report that the member has compiled and could take part."""


class Prepared(Report):
    """Report that the member has stopped; ``held`` are subtrees that it has summed."""

    generation: Whole
    step: Whole
    held: list[Node]


class Committed(Report):
    """Report of a finished step; ``seconds`` is the time of one micro-batch.

    ``parts`` has the micro-batches of each member, and only the first member sends it.
    """

    generation: Whole
    step: Whole
    loss: float
    seconds: Seconds
    parts: Shares


class Suspect(Report):
    """Report that the member cannot reach another one."""

    generation: Whole
    name: Text
    why: Text


class Leaving(Report):
    """Report that the member was asked to end."""

    why: Text


class MemberLeft(Report, tag="left"):
    """Report that the user's loop ended before the last step."""

    step: Whole


class CheckpointWritten(Report, tag="written"):
    """Question whether a written checkpoint may get its name; see ``Keep``."""

    step: Whole


class Finished(Report):
    step: Whole


class Saved(Report):
    step: Whole
    path: Text


class NotSaved(Report):
    step: Whole
    why: Text


class Failed(Report):
    """Report of the error by which the member ends."""

    why: Text


class Unfit(Report):
    """Report that there is no plan for a number of members."""

    count: Whole
    why: Text


class CompiledAhead(Report):
    """Report that programs for another number of members are compiled."""

    count: Whole
    seconds: Seconds


class NotCopied(Report):
    """Report that copies of shards have failed."""

    step: Whole
    why: Text


class TablesPlaced(Report):
    step: Whole
    why: Text


class Note(Report):
    """Note for the user."""

    why: Text


class Recovered(Report):
    """Report of the state with which the run goes on, and of its source."""

    step: Whole
    source: Text


OfMember: TypeAlias = (
    Register
    | ReductionOffer
    | Refusal
    | Beat
    | Ready
    | Prepared
    | Committed
    | Suspect
    | Leaving
    | MemberLeft
    | CheckpointWritten
    | Finished
    | Saved
    | NotSaved
    | Failed
    | Unfit
    | CompiledAhead
    | NotCopied
    | TablesPlaced
    | Note
    | Recovered
)


# Messages of the supervisor to members.


class ReductionDecision(Message, tag="added_up"):
    """The run's gradient reduction; ``by`` is empty before it is decided."""

    by: Way
    why: Text
    processes: Count
    hosts: Count


class MemberWelcome(Message, tag="welcome"):
    run: Text
    name: Text
    beat_seconds: Seconds


class RegistrationRefused(Message, tag="refused"):
    why: Text


class ReportReceived(Message, tag="heard"):
    """Acknowledgement of all reports up to a number."""

    goodput: Seconds
    number: Whole


class Prepare(Message):
    """Request to stop for a generation after step ``after``; -1: immediately."""

    generation: Whole
    after: Whole


class Begin(Message):
    """Start of a generation with the state of a step.

    ``sources`` gives, for each member without that state, a member that has it.
    ``first`` and ``later`` are the micro-batches of each member in the first step and
    in later steps.
    """

    generation: Whole
    members: Members
    step: Whole
    sources: Facts
    first: Shares
    later: Shares


class Stop(Message):
    """End of the run before its last step; ``saves`` asks for a last checkpoint."""

    why: Text
    saves: bool
    well: bool


class RunEnded(Message, tag="over"):
    """End of a member's part in the run; ``well`` means without a failure."""

    why: Text
    well: bool


class Keep(Message):
    """Permission for a written checkpoint to get its name."""

    step: Whole


class RunDone(Message, tag="done"):
    """End of the run after its last step."""


ToMember: TypeAlias = (
    ReductionDecision
    | MemberWelcome
    | RegistrationRefused
    | ReportReceived
    | Prepare
    | Begin
    | Stop
    | RunEnded
    | Keep
    | RunDone
)


# Messages of agents to the supervisor.


class Enlist(Message):
    """Request of an agent to join or rejoin, with the processes that it runs."""

    agent: AgentName
    host: Text
    machine: Text
    room: Count
    version: Text
    token: Text
    there: list[tuple[MemberName, Whole, Text]]


class AgentBeat(Message):
    leaving: bool


class Launched(Message):
    name: Text
    pid: Whole
    began: Text


class NotLaunched(Message):
    name: Text
    why: Text


class Exited(Message):
    """Report of a process's end; ``said`` is the end of its log."""

    name: Text
    status: Status | None
    said: Text


OfAgent: TypeAlias = Enlist | AgentBeat | Launched | NotLaunched | Exited


# Messages between a scheduler and the supervisor.


class Resize(Message):
    size: Whole
    devices: list[Text] | None = None


class ResizeDone(Message, tag="resized"):
    size: Whole


# Messages of the supervisor to agents.


class Enlisted(Message):
    """Acceptance of an agent, with the program of its processes."""

    command: Annotated[list[Text], Meta(min_length=1)]
    environment: Facts
    beat_seconds: Seconds


class Start(Message):
    name: MemberName
    device: Text = ""


class Release(Message):
    """Permission for a started process to run: its start is in the journal."""

    name: MemberName


class Kill(Message):
    name: MemberName


class EventNoted(Message, tag="noted"):
    """Acknowledgement that a process's end is in the journal."""

    name: MemberName


class Finish(Message):
    why: Text


ToAgent: TypeAlias = (
    Enlisted | RegistrationRefused | Start | Release | Kill | EventNoted | Finish
)


# Messages between members.


class PeerHello(Message, tag="hello"):
    generation: Whole
    name: Text


class GradientPart(Message, tag="part"):
    """Sums of subtrees of micro-batches, for the slice that the receiver reduces."""

    generation: Whole
    step: Whole
    nodes: list[Node]
    arrays: Arrays = ()


class Total(Message):
    """The reduced slice of the sender."""

    generation: Whole
    step: Whole
    arrays: Arrays = ()


class State(Message):
    """Piece ``place`` of ``count`` of a state; ``text`` of the last one has a hash."""

    place: Whole
    count: Whole
    text: Text
    arrays: Arrays = ()


ToPeer: TypeAlias = GradientPart | Total | State

TO_SUPERVISOR: Final = Messages[OfMember | OfAgent | Resize](
    *get_args(OfMember), *get_args(OfAgent), Resize
)
TO_SCHEDULER: Final = Messages[ResizeDone | RegistrationRefused](
    ResizeDone, RegistrationRefused
)
TO_MEMBER: Final = Messages[ToMember](*get_args(ToMember))
TO_AGENT: Final = Messages[ToAgent](*get_args(ToAgent))
HELLO: Final = Messages(PeerHello)
"""First message of a connection between members."""
TO_PEER: Final = Messages[ToPeer](*get_args(ToPeer))
