"""Progress of a run: a bar on a terminal, elsewhere a line every few seconds.

Under continuous integration nothing is shown.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from whalejax.meshes.units import milliseconds as seconds_text


_LINE_SECONDS = 5.0
_PLAIN_WIDTH = 110


def make_console(*, quiet: bool = False) -> Console:
    """Returns a console on standard output, as wide as the terminal or ``COLUMNS``.

    An output that is not a terminal has no colour, and is wide enough for a table.

    Args:
        quiet: Whether to print nothing.
    """
    columns = os.environ.get("COLUMNS", "")
    width: int | None = None
    if not sys.stdout.isatty() and not columns.strip("0").isdecimal():
        width = _PLAIN_WIDTH
    elif columns.isdecimal() and not int(columns):  # a terminal of unknown width
        width = shutil.get_terminal_size().columns
    return Console(
        quiet=quiet,
        highlight=False,
        soft_wrap=False,
        width=width,
    )


def unattended() -> bool:
    """Whether to show nothing: continuous integration sets ``CI``."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


class Meter:
    """Progress of a run: a bar on a terminal, elsewhere a line every few seconds.

    It is a context manager. Under continuous integration nothing is shown.

    Args:
        console: Console for the output; a quiet console shows nothing.
        title: Title such as ``"training"``.
        first: Number of earlier steps.
        steps: Total number of steps.
        waiting: Activity before the first step, such as ``"compiling"``; a line then
            shows its time.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        *,
        first: int,
        steps: int,
        waiting: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._clock = clock
        self._printed: float | None = None
        self._bar: Progress | None = None
        self._waiting = waiting
        self._shows = not (console.quiet or unattended())
        if console.is_terminal and self._shows:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"),
                console=console,
            )
            self._task = self._bar.add_task(
                waiting or title, total=steps, completed=first, words=""
            )

    def show(self, step: int, words: str = "") -> None:
        """Shows the number of finished steps.

        Args:
            step: Number of finished steps.
            words: Additional text of the line.
        """
        if not self._shows:
            return
        now = self._clock()
        if self._waiting:
            spent = seconds_text(now - self._started)
            line = f"the first step was done after {spent}, {self._waiting} included"
            self._console.print(Text(line))
            self._waiting = ""
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, words=words, description=self._title
            )
            return
        due = self._printed is None or now - self._printed >= _LINE_SECONDS
        if due or step == self._steps:
            self._printed = now
            line = f"{self._title} {step}/{self._steps}  {words}".rstrip()
            self._console.print(Text(line))

    def __enter__(self) -> Meter:
        self._started = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def progress_words(
    loss: float,
    *,
    unit: str,
    units_per_step: int,
    predicted_seconds: float,
    measured_seconds: float | None,
) -> str:
    """Returns the loss, speed and step time of a run in one line.

    Args:
        loss: Loss of the latest step.
        unit: Unit of the speed, ``"tokens"`` or ``"samples"``.
        units_per_step: Number of units in a global batch.
        predicted_seconds: Step time that the plan predicts.
        measured_seconds: Measured step time, or None while nothing is measured.

    >>> progress_words(2.5, unit="tokens", units_per_step=4096,
    ...                predicted_seconds=0.4, measured_seconds=0.5)
    'loss 2.5000 · 8,192 tokens/s · step 500 ms, predicted 400 ms'
    """
    predicted = f"predicted {seconds_text(predicted_seconds)}"
    if measured_seconds is None:
        return f"loss {loss:.4f} · step not measured yet, {predicted}"
    speed = f"{units_per_step / measured_seconds:,.0f} {unit}/s"
    step = f"step {seconds_text(measured_seconds)}, {predicted}"
    return f"loss {loss:.4f} · {speed} · {step}"
