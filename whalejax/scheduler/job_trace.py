"""Traces of jobs: CSV files with the arrival, model and devices of each job."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whalejax.meshes.errors import Problems
from whalejax.meshes.formats.cluster_text import MAX_DEVICES
from whalejax.meshes.read_file import numbered_rows, open_trace
from whalejax.scheduler.job_table import JobError


COLUMNS: Final = ("name", "arrival", "model", "batch", "steps", "devices")
"""Required columns of a trace; ``priority`` and ``noise_scale`` are optional."""

_MOST_SECONDS: Final = 1e12
_MOST_SAMPLES: Final = 2**36
_MOST_STEPS: Final = 10**12
_MOST_DIGITS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """A row of a trace.

    Attributes:
        name: Name, unique in the trace.
        arrival: Time of arrival, in seconds from the start.
        model: A reference model, or ``file.py:function``.
        batch: Samples of its own global batch, and of its largest allowed batch.
        steps: Number of steps at its own batch.
        devices: Minimum and maximum number of devices.
        priority: Priority; jobs of a higher priority are admitted first.
        noise_scale: Gradient-noise scale in samples.
    """

    name: str
    arrival: float
    model: str
    batch: tuple[int, int]
    steps: int
    devices: tuple[int, int]
    priority: int = 0
    noise_scale: float = 0.0


def read_job_trace(path: Path) -> list[TracedJob]:
    """Returns the jobs of a CSV file, in the order of their arrivals.

    Args:
        path: Path of a file with the columns ``COLUMNS``. ``arrival`` is in seconds;
            ``batch`` is ``64``, or ``64:1024`` if it may grow; ``devices`` is ``4`` or
            ``1:8``.

    Raises:
        JobError: The file is invalid.
    """
    reader = open_trace(path, JobError)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise JobError(
            f"trace {path} has no column {', '.join(missing)}; expected "
            f"{', '.join(COLUMNS)} in its first line"
        )
    job_trace: list[TracedJob] = []
    with Problems(f"trace {path}", JobError) as problems:
        for line, row in numbered_rows(reader, problems):
            cells = _Cells(row, line, problems)
            before = len(problems)
            job = TracedJob(
                name=cells.word("name"),
                arrival=cells.number("arrival", _MOST_SECONDS),
                model=cells.word("model"),
                batch=cells.batches(),
                steps=cells.whole("steps", 1, _MOST_STEPS),
                devices=cells.span("devices", MAX_DEVICES),
                priority=cells.whole("priority", 0, 100, default=0),
                noise_scale=cells.number("noise_scale", _MOST_SAMPLES, default=0),
            )
            if len(problems) == before:
                job_trace.append(job)
        for name, times in Counter(job.name for job in job_trace).items():
            if times > 1:
                problems.add(f"{times} jobs are named {name!r}")
        if not job_trace and not problems:
            problems.add("it holds no job")
    return sorted(job_trace, key=lambda job: (job.arrival, job.name))


def _number(text: str) -> int:
    """Returns a whole number of at most 18 digits; -1 for any other text."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else -1


class _Cells:
    def __init__(
        self, row: dict[str, str | None], line: int, problems: Problems
    ) -> None:
        self.row, self.line, self.problems = row, line, problems

    def _refuse(self, name: str, expected: str) -> None:
        given = str(self.row.get(name))[:40]
        self.problems.add(f"line {self.line}: {name} is {given!r}; expected {expected}")

    def word(self, name: str) -> str:
        text = (self.row.get(name) or "").strip()
        if not text:
            self._refuse(name, "a name")
        return text

    def number(self, name: str, most: float, default: float | None = None) -> float:
        text = (self.row.get(name) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            self._refuse(name, f"a number from 0 to {most:g}")
            return 0.0
        return value

    def whole(
        self, name: str, least: int, most: int, default: int | None = None
    ) -> int:
        text = (self.row.get(name) or "").strip()
        if not text and default is not None:
            return default
        value = _number(text)
        if not least <= value <= most:
            self._refuse(name, f"a whole number from {least} to {most}")
            return least
        return value

    def batches(self) -> tuple[int, int]:
        least, most = self.span("batch", _MOST_SAMPLES)
        if least < most < 2 * least:
            expected = f"a largest batch of {2 * least} or more, as batches are doubled"
            self._refuse("batch", expected)
        return least, most

    def span(self, name: str, most: int) -> tuple[int, int]:
        low, _, high = (self.row.get(name) or "").strip().partition(":")
        pair = [_number(low), _number(high)]
        least, largest = pair if high else (pair[0], pair[0])
        if not 1 <= least <= largest <= most:
            self._refuse(name, f"N or MIN:MAX, whole numbers from 1 to {most}")
            return 1, 1
        return least, largest
