"""Heartbeats of a child process: it touches a file, which its parent process checks.

A stopped process, as after SIGSTOP, does not end, and its connections stay open: only
missing heartbeats reveal it. A process without a first heartbeat is not watched.
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
"""Seconds without a heartbeat after which a process counts as stopped."""

_LONGEST_TURN_SECONDS: Final = 5.0


def begin_beats() -> Callable[[], None]:
    """Starts heartbeats if the parent process checks them; returns a stop function."""
    path = os.environ.get(BEAT_FILE)
    if path is None:
        return lambda: None
    ended, file = threading.Event(), Path(path)

    def run() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):  # The next heartbeat may succeed.
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
    """Finds child processes whose heartbeats have stopped.

    Attributes:
        seconds: Seconds without a heartbeat after which a process is silent.
    """

    def __init__(self, folder: Path, seconds: float = SILENT_SECONDS) -> None:
        """Starts without processes.

        Args:
            folder: Folder with one file per process.
            seconds: Seconds without a heartbeat after which a process is silent.
        """
        self.seconds, self._folder = seconds, folder
        self._lease: Lease[str] = Lease(seconds, _LONGEST_TURN_SECONDS)
        self._touched: dict[str, int] = {}

    def environment(self, name: str) -> dict[str, str]:
        """Returns the environment variables of a new process; removes an old file.

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
        """Returns the silent processes, with the seconds since their last heartbeat.

        Args:
            names: Names of the running processes.
            now: The time, in seconds.
        """
        self._lease.turn(now)
        for name in names:
            try:
                touched = self._path(name).stat().st_mtime_ns
            except OSError:  # No file yet, or its file system does not answer.
                self._lease.forget(name)
                self._touched.pop(name, None)  # Renews it once the file is back.
                continue
            if touched != self._touched.get(name):
                self._touched[name] = touched
                self._lease.renew(name, now)
        return self._lease.overdue(now)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.beat"
