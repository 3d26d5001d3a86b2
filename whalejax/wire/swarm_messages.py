"""Questions and answers between the processes of a swarm.

A question may be sent twice. Its fields identify it: a call of a stage by run,
generation, step, stage, micro-batch and attempt.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

from whalejax.wire.messages import (
    Arrays,
    Message,
    Question,
    Seconds,
    Size,
    Text,
    Whole,
)


MOST_PEERS: Final = 4096
_PEERS: Final = Meta(max_length=MOST_PEERS)
_NUMBERS: Final = Meta(max_length=65_536)

Address: TypeAlias = tuple[Text, Annotated[int, Meta(gt=0, lt=1 << 16)]]
Wholes: TypeAlias = Annotated[list[Whole], _NUMBERS]
Facts: TypeAlias = dict[Text, Text]
Counts: TypeAlias = dict[Text, Whole]
Sources: TypeAlias = Annotated[list[tuple[Whole, Text, Address, Whole]], _PEERS]
"""Stage, name, address and attempt of peers that hold a tensor."""
Holder: TypeAlias = tuple[Text, Address, Wholes, Wholes]
Holders: TypeAlias = Annotated[list[Holder], _PEERS]
"""Name and address of peers, and micro-batches with attempts that each holds."""
Addresses: TypeAlias = Annotated[list[tuple[Text, Address]], _PEERS]
"""Name and address of peers."""
ServingPeers: TypeAlias = Annotated[
    list[tuple[Text, Address, Whole, Whole, Whole, Seconds]], _PEERS
]
"""Name, address, stage, incarnation, queue and end of the lease of peers."""
MadeBy: TypeAlias = Annotated[
    list[tuple[Text, Whole, Text, Whole, Whole, Size]], Meta(max_length=2 * MOST_PEERS)
]
"""Phase, stage, name, incarnation, attempt and coding error of the results of peers."""
Leads: TypeAlias = Annotated[list[tuple[Whole, Whole, Whole, Whole]], _NUMBERS]
"""Generation, step and index of micro-batches, and the numbers of earlier leases."""


# Answers.


class Pong(Message):
    name: Text


class Receipt(Message):
    """Answer to a call: its seconds, and the coding error.

    The seconds include waiting for the device, checks and coding.

    After the last stage's backward call, ``arrays`` has the sums of the loss.
    """

    seconds: Seconds
    lost: Size
    arrays: Arrays = ()


class Tensors(Message):
    arrays: Arrays = ()


class Summed(Message):
    """Micro-batches and attempts in a peer's sum.

    ``lost`` is the squared norm of the coding error, and ``whole`` that of the sum.
    Both are 0 if the sum is sent without coding.
    """

    numbers: Wholes
    attempts: Wholes
    lost: Size
    whole: Size


class GradientSlices(Message):
    numbers: Wholes
    attempts: Wholes
    lost: Size
    arrays: Arrays = ()

    def __post_init__(self) -> None:
        _check_as_many(self.numbers, self.attempts)


class StageValues(Message, tag="told"):
    """A peer's values after an exchange of the update, or the digest of its state."""

    numbers: Wholes
    digest: Text
    arrays: Arrays = ()


class StateChunk(Message):
    count: Whole
    digest: Text
    arrays: Arrays = ()


class PeerMoved(Message, tag="moved"):
    stage: Whole


class PeersReached(Message, tag="reached"):
    unreached: Facts


class StopHeard(Message):
    pass


class PeerWelcome(Message, tag="welcome"):
    stage: Whole
    incarnation: Whole
    run: Text


class AnnouncementReceived(Message, tag="heard"):
    """Answer to ``Announce``: ``known`` is false if the peer must join again, and
    ``free`` is true if it may leave.
    """

    known: bool
    free: bool


class TrainerEnlisted(Message, tag="enlisted"):
    run: Text


class GivenShare(Message):
    """Lease of micro-batch ``number``, or -1 for none, with the peers that serve.

    ``times`` counts earlier leases. If not ``known``, the trainer must enlist again.
    """

    known: bool = True
    run: Text = ""
    generation: Whole = -1
    step: Whole = -1
    state: Whole = -1
    number: Whole = -1
    times: Whole = -1
    now: Seconds = 0.0
    peers: ServingPeers = []


class MicroBatchAccepted(Message, tag="taken"):
    pass


class SwarmStatus(Message, tag="shown"):
    wire: Text
    sum_wire: Text
    sum_error: Size | None
    wire_error: Size | None
    stages: Whole
    step: Whole
    steps: Whole
    generation: Whole
    micro_batches: Whole
    loss: float | None
    left: Whole
    counts: Counts
    trainers: Annotated[list[dict[str, Any]], _NUMBERS]
    peers: Annotated[list[dict[str, Any]], _NUMBERS]


class Terms(Message):
    wire: Text
    sum_wire: Text
    stages: Whole
    batch: Whole
    micro_batches: Whole
    precision: Any
    seed: int
    delayed_updates: bool
    pull_seconds: Seconds
    call_seconds: Seconds


# Questions that several kinds of processes answer.


class At(Message):
    """A question about a step."""

    run: Text
    generation: Whole
    step: Whole


class Ping(Question[Pong]):
    pass


class Batch(At, Question[Tensors]):
    number: Whole
    places: Wholes


class FetchState(At, Question[StateChunk]):
    stage: Whole
    place: Whole


class StopPeer(Question[StopHeard], tag="stop"):
    why: Text
    failed: bool


# Questions to a peer.


class StageCall(At):
    """Call of a stage on the state after ``state`` steps."""

    state: Whole
    stage: Whole
    number: Whole
    attempt: Whole
    batch: Address
    sources: Sources


class Forward(StageCall, Question[Receipt]):
    pass


class BackwardCall(StageCall, Question[Receipt], tag="backward"):
    cotangents: Sources


class Fetch(At, Question[Tensors]):
    phase: Text
    number: Whole
    attempt: Whole
    target: Whole


class Sum(At, Question[Summed]):
    stage: Whole
    round: Whole
    peers: Holders

    def __post_init__(self) -> None:
        _check_holders(self.peers)


class Gradients(At, Question[GradientSlices]):
    """Asks for a part of each array of a peer's sum over micro-batches."""

    numbers: Wholes
    attempts: Wholes
    part: Whole
    parts: Whole

    def __post_init__(self) -> None:
        _check_as_many(self.numbers, self.attempts)


class SumPart(At, Question[Tensors]):
    """Asks for a peer's part of each array of the stage's sum."""

    round: Whole


class UpdateStage(At, Question[StageValues], tag="update"):
    """Asks for exchange ``level`` of the update that applies the sum ``round``.

    ``arrays`` has the sums of the loss in exchange 0. Later it has the values that
    ``heard`` names.
    """

    stage: Whole
    round: Whole
    level: Whole
    heard: Wholes
    peers: Holders
    arrays: Arrays = ()

    def __post_init__(self) -> None:
        _check_holders(self.peers)


class Sync(At, Question[StageValues]):
    """Asks a peer to get the state of a step.

    If ``keeps``, a peer that has the state downloads nothing. Without ``sources``, the
    peer initialises the state.
    """

    stage: Whole
    keeps: bool
    sources: Holders


class MovePeer(Question[PeerMoved], tag="move"):
    stage: Whole


class Reach(Question[PeersReached]):
    peers: Addresses


# Questions to the process with the registry and the first trainer.


class Join(Question[PeerWelcome]):
    name: Text
    address: Address
    stage: Whole
    facts: Facts


class Announce(Question[AnnouncementReceived]):
    name: Text
    incarnation: Whole
    stage: Whole
    generation: Whole
    step: Whole
    queue: Whole
    done: Whole
    seconds: Seconds
    leaving: bool
    ready: bool


class EnlistTrainer(Question[TrainerEnlisted], tag="enlist"):
    name: Text
    address: Address
    facts: Facts


class Take(Question[GivenShare]):
    """Asks for a micro-batch; ``leads`` has the micro-batches that the trainer has."""

    name: Text
    leads: Leads
    counts: Counts
    leaving: bool


class Led(At, Question[MicroBatchAccepted]):
    """Reports that a trainer has finished a micro-batch, or why it gives it back."""

    name: Text
    number: Whole
    times: Whole
    made: MadeBy
    why: Text
    arrays: Arrays = ()


class ShowSwarm(Question[SwarmStatus], tag="show"):
    pass


class AskTerms(Question[Terms]):
    pass


def _check_holders(holders: Holders) -> None:
    for _, _, numbers, attempts in holders:
        _check_as_many(numbers, attempts)


def _check_as_many(numbers: Wholes, attempts: Wholes) -> None:
    if len(numbers) != len(attempts):
        raise ValueError("numbers and attempts differ in length")
