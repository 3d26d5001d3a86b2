"""The table of ``whalejax jobs show``, printed once or updated until Ctrl-C."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from whalejax.meshes.errors import visible
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.requests import JobReport, Jobs


_AGAIN_SECONDS: Final = 1.0
_ENDED: Final = 5
"""Number of ended jobs in the table without ``--all``."""

_NEWLINE: Final = "\n"
_STYLES: Final = {
    "running": "green",
    "complete": "dim",
    "cancelled": "dim",
    "failed": "red",
    "refused": "red",
    "waiting": "yellow",
}


def print_table(jobs: Jobs, *, every: bool = False) -> None:
    """Prints the table once.

    Args:
        jobs: Status of the jobs.
        every: Whether to show all ended jobs, not only the last five.
    """
    Console().print(_rendered(jobs, every))


def live_table(find: Callable[[], Jobs], *, every: bool = False) -> None:
    """Shows the table as it changes, until Ctrl-C.

    Args:
        find: Function that returns the current jobs.
        every: Whether to show all ended jobs, not only the last five.
    """
    jobs = find()
    with contextlib.suppress(KeyboardInterrupt), Live(_rendered(jobs, every)) as live:
        while True:
            time.sleep(_AGAIN_SECONDS)
            try:
                jobs = find()
                live.update(_rendered(jobs, every))
            except JobError as error:  # Jobs outlive the scheduler; it may return.
                text = Text(str(error), style="red")
                live.update(Group(_rendered(jobs, every), text))


def _rendered(jobs: Jobs, every: bool) -> RenderableType:
    there = [job for job in jobs.jobs if job.ended_at is None]
    ended = [job for job in jobs.jobs if job.ended_at is not None]
    ended.sort(key=lambda job: job.ended_at or 0.0)
    shown = ended if every else ended[-_ENDED:]
    table = Table(box=None, pad_edge=False)
    for name in ("job", "status", "devices", "step", "loss", "samples/s", "left"):
        right = name in ("step", "loss", "samples/s", "left")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for one in [*there, *shown]:
        if shown and one is shown[0]:
            table.add_row(Text("ended", style="dim"))
        table.add_row(
            Text(one.name),
            Text(one.status, style=_STYLES.get(one.status, "")),
            _devices(one),
            f"{one.step}/{one.steps}",
            "" if one.loss is None else f"{one.loss:.4g}",
            _speed(one),
            "" if one.seconds_left is None else clock(one.seconds_left),
        )
    reasons: dict[str, list[str]] = {}
    for one in [*there, *shown]:
        if one.why and one.status != "complete":
            reasons.setdefault(visible(one.why, keep=_NEWLINE), []).append(one.name)
    held = sum(job.held for job in jobs.jobs)
    foot = f"{held} of {jobs.devices} devices held on {jobs.cluster}"
    if len(shown) < len(ended):
        foot += f"; {len(ended) - len(shown)} more jobs have ended (--all)"
    notes = [Text(note, style="red") for note in jobs.notes]
    texts = [Text(f"{', '.join(names)}: {why}") for why, names in reasons.items()]
    return Group(table, Text(foot, style="dim"), *texts, *notes)


def _devices(one: JobReport) -> str:
    kind = f" {one.kind}" if one.kind else ""
    if one.held == one.target:
        return f"{one.held}{kind}"
    return f"{one.held} → {one.target}{kind}"


def _speed(one: JobReport) -> str:
    if one.measured is not None:
        return f"{one.measured:.4g}"
    return "" if one.predicted is None else f"~{one.predicted:.4g}"


def clock(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds.

    >>> clock(75.4), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
