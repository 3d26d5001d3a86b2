"""The jobs of a scheduler, as its journal records them.

A scheduler applies each event when it writes it. After a restart it replays the journal
by the same function.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from whalejax.journals.journal import JournalLines, read
from whalejax.scheduler.job_table import NOWHERE, JobError, JobOption, Place
from whalejax.scheduler.live.requests import Add


JOURNAL: Final = "jobs.jsonl"

COMPLETE: Final = "complete"
FAILED: Final = "failed"
REFUSED: Final = "refused"
CANCELLED: Final = "cancelled"


@dataclass(slots=True, kw_only=True)
class LiveJob:
    """A job that was added.

    Attributes:
        request: Request that added it.
        added_at: Unix time of its arrival.
        batch: Samples of its own global batch; 0 before it is planned.
        options: Predicted options with its own batch, by place.
        larger: Predicted options with larger allowed batches, by samples of the batch.
        wanted: Target batch, and its progress per sample relative to the job's own
            batch; (0, 1) for its own batch.
        segments: First step, batch and progress per sample of each launch.
        run_steps: Step after which the current run ends.
        launched_at: Unix time, batch and device kind of each launch.
        place: Target device kind and number of devices.
        placed: Unix times of decisions about it, with the numbers of devices of the
            target's kind before and after.
        devices: Names of the devices that it holds, by slot.
        paused, cancelled: Whether the user paused or cancelled it.
        launches: Number of starts of its run since its last new step.
        behind: Name of an earlier job that needs the nodes which this job gave back;
            empty if there is none.
        how: Outcome of the job; empty before its end.
        why: Reason for its end, or for a pause by the scheduler.
        ended_at: Unix time of its end, or None.
        run: Step, loss and costs of its run at the job's end; empty before.
    """

    request: Add
    added_at: float
    batch: int = 0
    options: dict[Place, JobOption] = field(default_factory=dict)
    larger: dict[int, dict[Place, JobOption]] = field(default_factory=dict)
    wanted: tuple[int, float] = (0, 1.0)
    segments: list[tuple[int, int, float]] = field(default_factory=list)
    run_steps: int = 0
    launched_at: list[tuple[float, int, str]] = field(default_factory=list)
    place: Place = NOWHERE
    placed: list[tuple[float, int, int]] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    paused: bool = False
    cancelled: bool = False
    launches: int = 0
    behind: str = ""
    how: str = ""
    why: str = ""
    ended_at: float | None = None
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.request.name

    @property
    def target(self) -> int:
        """Target number of devices."""
        return self.place[1]

    @property
    def wanted_batch(self) -> int:
        """Samples of its target batch; 0 before it is planned."""
        return self.wanted[0] or self.batch

    @property
    def run_batch(self) -> int:
        """Samples of its last launch's batch; of its own batch before the first."""
        return self.segments[-1][1] if self.segments else self.batch

    @property
    def changes_batch(self) -> bool:
        """Whether its run has another batch than the target."""
        return bool(self.segments) and self.run_batch != self.wanted_batch

    def remaining(self, step: int) -> float:
        """Returns the remaining samples after a step, counted at its own batch.

        Args:
            step: Newest finished step.
        """
        done = float(self.batch * step)
        if self.segments:
            firsts = [first for first, _, _ in self.segments]
            done = sum(
                max(0, min(step, after) - first) * batch * efficiency
                for (first, batch, efficiency), after in zip(
                    self.segments, [*firsts[1:], step], strict=True
                )
            )
        return max(0.0, self.batch * self.request.steps - done)

    @property
    def wants_devices(self) -> bool:
        """Whether it is planned, and not ended, paused or cancelled."""
        return bool(self.options) and not (self.how or self.paused or self.cancelled)


class JobBook:
    """All jobs of a folder, and their journal.

    Attributes:
        jobs: Jobs by name, in the order of their arrivals.
        cluster: Text of the cluster for which the journal was created, or empty.
    """

    def __init__(self, folder: Path) -> None:
        """Restores the jobs from the journal of a folder.

        Raises:
            WhaleError: The journal cannot be read or written.
        """
        self.jobs: dict[str, LiveJob] = {}
        self.cluster = ""
        path = folder / JOURNAL
        try:
            for said in read(path):
                self._apply(said["event"], said, said.get("time", 0.0))
        except (LookupError, TypeError, ValueError) as error:
            raise JobError(
                f"{path} is no journal of this version's scheduler ({error}). Give "
                "another --save, or the whalejax that wrote it"
            ) from error
        self._lines = JournalLines(path, durable=True)

    def record(self, event: str, **fields: Any) -> None:
        """Writes an event to the journal, and applies it."""
        self._lines.write(event, fields)
        self._apply(event, fields, time.time())

    def write(self) -> str:
        """Writes events that a full disk has delayed; returns the problem, if any."""
        return "" if self._lines.flush() else self._lines.problem

    @property
    def problem(self) -> str:
        """Reason why events are not on the disk yet; empty if all are."""
        return self._lines.problem

    def close(self) -> None:
        """Closes the journal."""
        self._lines.close()

    def unfinished(self) -> list[LiveJob]:
        """Returns the jobs that have not ended."""
        return [job for job in self.jobs.values() if not job.how]

    def _apply(self, event: str, fields: Mapping[str, Any], at: float) -> None:
        if event == "opened":
            self.cluster = fields["cluster"]
        else:
            apply_event(self.jobs, event, fields, at)


def apply_event(
    jobs: dict[str, LiveJob], event: str, fields: Mapping[str, Any], at: float
) -> None:
    """Applies an event of the journal to the jobs.

    Args:
        jobs: Jobs by name.
        event: Kind of the event; an unknown kind changes nothing.
        fields: Fields of the event.
        at: Unix time of the event.
    """
    if event == "added":
        request = msgspec.convert({"kind": "add", **fields["job"]}, Add)
        jobs[request.name] = LiveJob(request=request, added_at=at)
        return
    job = jobs.get(fields.get("name", ""))
    if job is None:
        return
    match event:
        case "planned":
            job.batch = fields["batch"]
            job.options = {}
            for place, option in _options(fields["options"]):
                if option.batch in (0, job.batch):
                    job.options[place] = option
                else:
                    job.larger.setdefault(option.batch, {})[place] = option
        case "placed":
            kind, size = fields.get("kind", ""), fields["size"]
            before = job.target if kind == job.place[0] or not size else 0
            job.placed.append((at, before, size))
            if not size:  # The scheduler ended this run, not the job.
                job.launches = 0
            job.place = kind, size
        case "devices":
            job.devices = list(fields["devices"])
        case "launched":
            job.launches, job.behind = job.launches + 1, ""
            if "batch" in fields:
                segment = fields["step"], fields["batch"], fields["efficiency"]
                job.segments.append(segment)
                job.run_steps = fields["steps"]
                kind = fields.get("kind", "")
                job.launched_at.append((at, fields["batch"], kind))
        case "batch":
            job.wanted = fields["batch"], fields["efficiency"]
        case "progressed":
            job.launches = 0
        case "gave_back":
            job.behind, job.launches = fields["to"], 0
        case "paused" | "resumed":
            job.paused, job.why = event == "paused", fields.get("why", "")
            job.launches = 0
        case "cancelled":
            job.cancelled = True
        case "ended":
            job.how, job.why = fields["how"], fields["why"]
            job.run = fields.get("run", {})
            job.ended_at, job.place, job.devices = at, NOWHERE, []


def told_options(options: Iterable[JobOption]) -> list[dict[str, Any]]:
    """Returns the options of a job as fields for the journal."""
    return [
        {
            "kind": option.place[0],
            "devices": option.place[1],
            "samples_per_second": option.samples_per_second,
            "layout": option.layout,
            "batch": option.batch,
        }
        for option in options
    ]


def _options(told: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Place, JobOption]]:
    for one in told:
        place = one["kind"], one["devices"]
        speed, layout = one["samples_per_second"], one["layout"]
        yield (
            place,
            JobOption(
                place=place,
                samples_per_second=speed,
                layout=layout,
                batch=one.get("batch", 0),
            ),
        )
