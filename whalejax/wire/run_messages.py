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
"""First micro-batch of a range, and the one after its last."""

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
"""Names, hosts and ports, by rank."""


# Messages of members to the supervisor.


class Register(Message):
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
    run: Text
    by: Way
    why: Text


class Refusal(Message):
    machine: Text
    pid: Whole
    why: Text


class Beat(Message):
    phase: Text
    step: Whole
    done: Whole


class Report(Message):
    """Numbered message; a member repeats those that were not acknowledged.

    Attributes:
        number: Number from 1, set when sent; a report without one is refused.
    """

    number: Whole = 0


class Ready(Report):
    pass


class Prepared(Report):
    generation: Whole
    step: Whole
    held: list[Node]


class Committed(Report):
    generation: Whole
    step: Whole
    loss: float
    seconds: Seconds
    parts: Shares


class Suspect(Report):
    generation: Whole
    name: Text
    why: Text


class Leaving(Report):
    why: Text


class MemberLeft(Report, tag="left"):
    step: Whole


class CheckpointWritten(Report, tag="written"):
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
    why: Text


class Unfit(Report):
    count: Whole
    why: Text


class CompiledAhead(Report):
    count: Whole
    seconds: Seconds


class NotCopied(Report):
    step: Whole
    why: Text


class TablesPlaced(Report):
    step: Whole
    why: Text


class Note(Report):
    why: Text


class Recovered(Report):
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
    goodput: Seconds
    number: Whole


class Prepare(Message):
    generation: Whole
    after: Whole


class Begin(Message):
    generation: Whole
    members: Members
    step: Whole
    sources: Facts
    first: Shares
    later: Shares


class Stop(Message):
    why: Text
    saves: bool
    well: bool


class RunEnded(Message, tag="over"):
    why: Text
    well: bool


class Keep(Message):
    step: Whole


class RunDone(Message, tag="done"):
    pass


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
    command: Annotated[list[Text], Meta(min_length=1)]
    environment: Facts
    beat_seconds: Seconds


class Start(Message):
    name: MemberName
    device: Text = ""


class Release(Message):
    name: MemberName


class Kill(Message):
    name: MemberName


class EventNoted(Message, tag="noted"):
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
    generation: Whole
    step: Whole
    nodes: list[Node]
    arrays: Arrays = ()


class Total(Message):
    generation: Whole
    step: Whole
    arrays: Arrays = ()


class State(Message):
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
