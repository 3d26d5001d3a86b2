"""Shows the progress of planning and compilation on a terminal, with elapsed times."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from whalejax.meshes.errors import listening
from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.runtime.progress_meter import Meter as Meter
from whalejax.runtime.progress_meter import make_console as make_console
from whalejax.runtime.progress_meter import progress_words as progress_words
from whalejax.runtime.progress_meter import unattended


_REMARK_SECONDS = 1.0
_LEAST_SHARE = 0.02


def remark(console: Console, text: str) -> None:
    """Prints a line about the next activity, unless nobody watches the terminal.

    Args:
        console: Console to write to. Nothing is printed if it is quiet.
        text: Text without markup.
    """
    if not unattended():
        console.print(text, markup=False)


class Working:
    """Display of the current activity and its duration on a terminal.

    At the end the display is removed. An activity of a second or more leaves one line
    with the time of each part. Nothing is shown if the output is no terminal, under
    continuous integration, or if ``quiet``.

    Args:
        title: Title of the activity, such as ``"planning"``.
        quiet: Whether to show nothing.
        console: Console to write to; standard error by default.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        title: str,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._title = title
        self._clock = clock
        self._parts: list[tuple[str, float]] = []
        self._end = ExitStack()
        self._shows = self._console.is_terminal and not (quiet or unattended())

    def _begin(self, what: str) -> None:
        self._parts.append((what, self._clock()))
        self._bar.update(self._task, description=f"{self._title}: {what}")

    def __enter__(self) -> Working:
        self._started = self._clock()
        if self._shows:
            spinner, words = SpinnerColumn(), TextColumn("{task.description}")
            columns = (spinner, words, TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._title, total=None)
            self._end.enter_context(self._bar)
            self._end.enter_context(listening(self._begin))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.close()
        seconds = self._clock() - self._started
        if self._shows and exc_type is None and seconds >= _REMARK_SECONDS:
            self._console.print(Text(self._words(seconds)))

    def _words(self, seconds: float) -> str:
        ends = [begun for _, begun in self._parts[1:]] + [self._started + seconds]
        spent: dict[str, float] = {}
        for (what, begun), end in zip(self._parts, ends, strict=True):
            spent[what] = spent.get(what, 0.0) + end - begun
        parts = [
            f"{what} {seconds_text(part)}"
            for what, part in spent.items()
            if part >= _LEAST_SHARE * seconds
        ]
        return f"{self._title} {seconds_text(seconds)}: {', '.join(parts)}".rstrip(": ")
