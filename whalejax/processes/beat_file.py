"""Signs of life of a kept process: a file that it touches, and that its keeper reads.

A process that stands still, as after SIGSTOP, does not end, and its connections stay
open; only silence tells. A process begins its beats when it has something to lose.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from whalejax.membership.lease import Lease


BEAT_FILE: Final = "WHALEJAX_BEAT_FILE"
"""Environment variable with the path of the file."""

BEAT_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
"""Seconds without a beat after which a process counts as standing still."""

_LONGEST_TURN_SECONDS: Final = 5.0


def begin_beats() -> Callable[[], None]:
    """Begins the beats of this process, if it has a keeper; returns their end."""
    path = os.environ.get(BEAT_FILE)
    if path is None:
        return lambda: None
    ended, file = threading.Event(), Path(path)

    def run() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):  # The next beat may come through.
                file.touch()
            ended.wait(BEAT_SECONDS)
        with contextlib.suppress(OSError):
            file.unlink()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


class BeatListener:
    """Finds kept processes that were heard once and are silent now.

    Attributes:
        seconds: Seconds of silence that are too long.
    """

    def __init__(self, folder: Path, seconds: float = SILENT_SECONDS) -> None:
        """Starts without processes.

        Args:
            folder: Folder of one file for each process.
            seconds: Seconds of silence that are too long.
        """
        self.seconds, self._folder = seconds, folder
        self._lease: Lease[str] = Lease(seconds, _LONGEST_TURN_SECONDS)
        self._touched: dict[str, int] = {}

    def environment(self, name: str) -> dict[str, str]:
        """Returns environment variables of a process that is about to start.

        Args:
            name: Name of the process.
        """
        self.forget(name)
        return {BEAT_FILE: str(self._path(name).absolute())}

    def forget(self, name: str) -> None:
        """Forgets a process, and removes its file.

        Args:
            name: Name of the process.
        """
        self._path(name).unlink(missing_ok=True)
        self._lease.forget(name)

    def silent(self, names: list[str], now: float) -> dict[str, float]:
        """Returns the processes that are silent for too long, with the seconds.

        Args:
            names: Names of the processes that run.
            now: The time, in seconds.
        """
        self._lease.turn(now)
        for name in names:
            try:
                touched = self._path(name).stat().st_mtime_ns
            except FileNotFoundError:
                self._lease.forget(name)
                continue
            if touched != self._touched.get(name):
                self._touched[name] = touched
                self._lease.renew(name, now)
        return self._lease.overdue(now)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.beat"
