"""Requests to the scheduler of jobs, and its answers.

At the local socket each is one line, with the name and version of the protocol and a
message as JSON. The receiver refuses anything else.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from whalejax.meshes.errors import visible
from whalejax.scheduler.job_table import JobError
from whalejax.wire.messages import Count, Message, Text, Whole


T = TypeVar("T")

PROTOCOL: Final = "whalejax-jobs/1"
"""Name and version of the protocol, which must be equal on both sides."""

MOST_BYTES: Final = 1 << 26
"""Maximum bytes of a line, enough for reports on some ten thousand jobs."""

NAME_PATTERN: Final = r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,63}\Z"
JobName: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
Priority: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
Steps: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]
What: TypeAlias = Literal["cancel", "pause", "resume"]


class Add(Message):
    """Request to add a job.

    Attributes:
        name: Name, unique among the jobs of the folder.
        model: A reference model, or ``file.py:function`` with its full path.
        settings: Settings of the model, each ``NAME=VALUE``.
        batch: Samples of a global batch; the job's own number if None.
        most_batch: Samples of the largest allowed batch; None keeps the batch.
        rate_rule: Learning rate of larger batches, ``"linear"`` or ``"sqrt"``; empty
            keeps the job's own rate.
        steps: Total number of steps at its own batch.
        devices: Minimum and maximum number of devices.
        priority: Priority. Jobs of a higher priority are admitted first, and have more
            weight.
        micro_batches: Number of micro-batches in a step, which members divide; None for
            the default of ``train_elastic``.
        precision: Values of ``--precision``.
        mesh: Values of ``--mesh``.
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
    """Request to cancel a job, to pause it with a checkpoint, or to resume it."""

    name: Text
    what: What


class ShowJobs(Message, tag="show"):
    """Request for reports on all jobs."""


Request: TypeAlias = Add | JobChange | ShowJobs


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on a job.

    Attributes:
        name: Name of the job.
        status: ``planning``, ``waiting``, ``starting``, ``running``, ``pausing``,
            ``paused``, ``ending``, ``complete``, ``failed``, ``refused`` or
            ``cancelled``.
        held, target: Number of devices that it holds, and target number of devices.
        kind: Kind of these devices; empty if the cluster has only one.
        step, steps: Number of finished steps, and total number of steps.
        loss: Loss of the newest step.
        predicted, measured: Samples per second on the target number of devices.
        priority: Priority with which it was added.
        added_at, started_at, ended_at: Unix times; None for future events.
        resizes: Number of changes of its devices since its first start.
        seconds_left: Seconds until its end on the target number of devices, or None.
        why: Reason of its end or of its wait.
        batch: Samples of the current global batch.
        noise_scale: Measured gradient-noise scale in samples, or None.
        folder: Folder of its logs, journal and checkpoints.
    """

    name: str
    status: str
    held: int = 0
    target: int = 0
    kind: str = ""
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
    """Reports on all jobs, and on the scheduler.

    Attributes:
        jobs: Reports on the jobs, in the order of their arrivals.
        cluster: Description of the cluster.
        devices: Number of devices.
        pid: Process id of the scheduler.
        notes: Problems of its disk, cluster file or devices, if any.
    """

    jobs: list[JobReport]
    cluster: Text
    devices: Whole
    pid: Whole
    notes: list[Text]


class RequestDone(Message, tag="done"):
    """Answer to a request that was recorded; ``note`` is a warning, or empty."""

    note: Text = ""


class RequestRefused(Message, tag="refused"):
    """Answer to an invalid request, which changed nothing."""

    why: Text


Answer: TypeAlias = Jobs | RequestDone | RequestRefused


def encoded(message: Request | Answer) -> bytes:
    """Returns a message as a line."""
    return PROTOCOL.encode() + b" " + msgspec.json.encode(message) + b"\n"


def decoded_request(line: bytes) -> Request:
    """Returns the request in a line.

    Raises:
        JobError: The line has another protocol version, or is not a request.
    """
    return _decoded(line, _REQUESTS, "the command")


def decoded_answer(line: bytes) -> Answer:
    """Returns the answer in a line.

    Raises:
        JobError: The line has another protocol version, or is not an answer.
    """
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
        raise JobError(f"{who} sent no valid message ({error})") from error
