"""Requests to the scheduler of jobs, and its answers.

Each is one line over a local socket: the name and version of what is spoken, and a
message of ours as JSON. Anything else is refused where it arrives.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from whalejax.meshes.texts import visible
from whalejax.scheduler.job_table import JobError
from whalejax.wire.messages import Count, Message, Seconds, Text, Whole


T = TypeVar("T")

PROTOCOL: Final = "whalejax-jobs/1"
"""Name and version of what is spoken; both sides have the same."""

MOST_BYTES: Final = 1 << 22
"""Of a line."""

NAME_PATTERN: Final = r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,63}\Z"
JobName: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
Steps: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]
What: TypeAlias = Literal["cancel", "pause", "resume"]


class Add(Message):
    """A job.

    Attributes:
        name: Unlike that of any other job of the folder.
        model: A reference model, or ``file.py:function`` by its whole path.
        settings: ``NAME=VALUE`` words, for the model.
        batch: Samples of a global batch; the job's own number if None.
        most_batch: Samples of the largest batch that the job may take; None keeps one.
        rate_rule: Learning rate of larger batches, ``"linear"`` or ``"sqrt"``.
        steps: Steps to be done in all, with its own batch.
        devices: The fewest and the most devices.
        priority: Jobs of a higher one are admitted first, and weigh as much more.
        micro_batches: Number of micro-batches in a step, which members share.
        precision: Words of ``--precision``.
        mesh: Words of ``--mesh``.
        save_every: Steps between checkpoints.
        seed: Seed of the model's initial values and of dropout.
        folder: Folder in which the job runs.
    """

    name: JobName
    model: Text
    settings: list[Text] = []
    batch: Steps | None = None
    most_batch: Steps | None = None
    rate_rule: Literal["", "linear", "sqrt"] = ""
    steps: Steps
    devices: tuple[Count, Count]
    priority: Priority = 0
    micro_batches: Count | None = None
    precision: list[Text] = []
    mesh: list[Text] = []
    save_every: Steps = 100
    seed: int = 0
    folder: Text


class JobChange(Message, tag="change"):
    """A job is to end, to stand still with a checkpoint, or to go on from it."""

    name: Text
    what: What


class ShowJobs(Message, tag="show"):
    """Ask for all jobs."""


Request: TypeAlias = Add | JobChange | ShowJobs


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the scheduler knows it.

    Attributes:
        name: Name of the job.
        status: ``planning``, ``waiting``, ``starting``, ``running``, ``pausing``,
            ``paused``, ``ending``, ``complete``, ``failed``, ``refused`` or
            ``cancelled``.
        held, target: Number of devices that it holds, and that it is to have.
        step, steps: Steps that are done, and in all.
        loss: Loss of the newest step.
        predicted, measured: Samples a second on the devices that it has.
        priority: Priority with which it was added.
        added_at, started_at, ended_at: Unix time; None where it has not come to that.
        resizes: Number of changes of its devices since its first start.
        seconds_left: Until it would end on the devices that it has.
        why: Reason of its end, or of its waiting.
        batch: Samples of the present global batch.
        noise_scale: Measured noise scale of its gradient in samples, or None.
        folder: Its logs, journal and checkpoints.
    """

    name: str
    status: str
    held: int = 0
    target: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    predicted: float | None = None
    measured: float | None = None
    priority: int = 0
    added_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    resizes: int = 0
    seconds_left: float | None = None
    why: str = ""
    batch: int = 0
    noise_scale: float | None = None
    folder: str = ""


class Jobs(Message):
    """All jobs in the order in which they came, and what they share.

    Attributes:
        jobs: The jobs.
        cluster: Devices in words.
        devices: Number of devices.
        pid: Number of the scheduler's process.
        notes: Problems of its disk or its cluster file, if any.
    """

    jobs: list[JobReport]
    cluster: Text
    devices: Whole
    pid: Whole
    notes: list[Text]
    seconds: Seconds = 0.0


class RequestDone(Message, tag="done"):
    """Answer to a request that was recorded; ``note`` says what else there is
    to know.
    """

    note: Text = ""


class RequestRefused(Message, tag="refused"):
    """Answer to a request that is impossible; nothing has changed."""

    why: Text


Answer: TypeAlias = Jobs | RequestDone | RequestRefused


def encoded(message: Request | Answer) -> bytes:
    """A message as a line."""
    return PROTOCOL.encode() + b" " + msgspec.json.encode(message) + b"\n"


def decoded_request(line: bytes) -> Request:
    """The request of a line.

    Raises:
        JobError: It is of another version, or none of ours.
    """
    return _decoded(line, _REQUESTS, "the command")


def decoded_answer(line: bytes) -> Answer:
    """The answer of a line, as ``decoded_request`` reads requests."""
    return _decoded(line, _ANSWERS, "the scheduler")


_REQUESTS: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_ANSWERS: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


def _decoded(line: bytes, decoder: msgspec.json.Decoder[T], who: str) -> T:
    said, _, text = line.partition(b" ")
    if said != PROTOCOL.encode():
        other = visible(said[:40].decode(errors="replace"))
        raise JobError(
            f"{who} speaks {other!r}, and this process {PROTOCOL!r}. Run the same "
            "whalejax for whalejax jobs serve and the commands"
        )
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise JobError(f"{who} sent no message of ours ({error})") from error
