"""Heartbeats of a child process, which writes them to a pipe that its parent reads.

A stopped process, as after SIGSTOP, does not end, and its connections stay open. Only
missing heartbeats reveal it. They count from the first heartbeat, for which a process
may also have a deadline.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from whalejax.membership.lease import Lease


BEAT_PIPE: Final = "WHALEJAX_BEAT_PIPE"
"""Environment variable with the descriptor and the inode of the pipe: ``7:4242``."""

BEAT_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
"""Seconds without a heartbeat after which a process counts as stopped."""

_LONGEST_TURN_SECONDS: Final = 5.0
_LAST: Final = b"."
"""Byte of the last heartbeat of a process that is about to end."""


def beat(byte: bytes = b"x") -> None:
    """Sends the parent process a heartbeat, if it has opened a pipe for this process.

    Children of this process inherit the variable but not the pipe. Their descriptor has
    another inode, so they send nothing.
    """
    number, _, inode = os.environ.get(BEAT_PIPE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(int(number))
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
            os.write(int(number), byte)


def begin_beats() -> Callable[[], None]:
    """Starts a thread that sends heartbeats; returns a function that stops it."""
    if BEAT_PIPE not in os.environ:
        return lambda: None
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            beat()
            ended.wait(BEAT_SECONDS)
        beat(_LAST)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


class HeartbeatPipes:
    """Heartbeat pipes of child processes, which reveal stopped processes.

    Attributes:
        beating: Names of the processes that have sent a heartbeat.
    """

    def __init__(
        self, selector: selectors.BaseSelector, seconds: float = SILENT_SECONDS
    ) -> None:
        """Starts without processes.

        Args:
            selector: Selector in which the pipes are registered. A pipe's data is a
                function to call when the pipe is readable.
            seconds: Seconds without a heartbeat after which a process is silent.
        """
        self.beating: set[str] = set()
        self._selector = selector
        self._lease: Lease[str] = Lease(seconds, _LONGEST_TURN_SECONDS)
        self._pipes: dict[str, int] = {}

    @contextlib.contextmanager
    def pipe(
        self, name: str, first_seconds: float
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Opens a pipe; yields descriptor and environment variables for the process.

        Args:
            name: Name of the process, which is started in the context.
            first_seconds: Deadline of its first heartbeat in seconds, or infinity.
        """
        self.forget(name)
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._pipes[name] = read
        self._selector.register(read, selectors.EVENT_READ, lambda: self._read(name))
        self._lease.expect(name, time.monotonic() + first_seconds)
        try:
            yield write, {BEAT_PIPE: f"{write}:{os.fstat(write).st_ino}"}
        finally:
            os.close(write)

    def _read(self, name: str) -> tuple[()]:
        try:
            data = os.read(self._pipes[name], 4096)
        except (KeyError, BlockingIOError):
            return ()  # The process ended in the same turn, and may run again.
        if not data or _LAST in data:
            self.forget(name)
        else:
            self.beating.add(name)
            self._lease.renew(name, time.monotonic())
        return ()

    def forget(self, name: str) -> None:
        """Forgets a process, and closes its pipe.

        Args:
            name: Name of the process.
        """
        self._lease.forget(name)
        self.beating.discard(name)
        if name in self._pipes:
            self._selector.unregister(self._pipes[name])
            os.close(self._pipes.pop(name))

    def overdue(self) -> dict[str, float]:
        """Returns the silent processes, with the seconds since their last heartbeat."""
        now = time.monotonic()
        self._lease.turn(now)
        return self._lease.overdue(now)
