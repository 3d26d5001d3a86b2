"""The thread of a process that reads all of its connections.

The functions that it calls must not block: they store received data for other threads.
So a slow connection never delays another one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Final, Protocol


TICK_SECONDS: Final = 0.2
"""Seconds between checks of deadlines."""


class Watched(Protocol):
    """Connection or listening socket that the loop serves."""

    def ready(self, events: int) -> None:
        """Reads and writes the socket as far as possible."""

    def tick(self, now: float) -> None:
        """Handles deadlines that have passed."""


class Waker:
    """Wakes a selector from any thread.

    Attributes:
        close: Closes the sockets.
    """

    def __init__(self) -> None:
        """Starts without a wake-up."""
        self._reads, self._writes = socket.socketpair()
        for end in (self._reads, self._writes):
            end.setblocking(False)
        self.close = weakref.finalize(self, _close, self._reads, self._writes)

    def fileno(self) -> int:
        """Returns the descriptor of the socket that becomes readable."""
        return self._reads.fileno()

    def wake(self) -> None:
        """Wakes the selector until ``clear``."""
        with contextlib.suppress(OSError):  # already awake, or closed
            self._writes.send(b"x")

    def clear(self) -> None:
        """Resets the wake-up."""
        with contextlib.suppress(OSError):
            self._reads.recv(4096)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()


class Loop:
    """Watches sockets in a thread of its own, as long as the process lives."""

    def __init__(self) -> None:
        """Starts the thread without sockets."""
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Watched, int] = {}
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name="wire")
        self._thread.start()

    def call(self, work: Callable[[], None]) -> None:
        """Runs a function soon in the loop's thread.

        Args:
            work: Function to call; it must not block.
        """
        self._work.append(work)
        self._waker.wake()

    @property
    def is_here(self) -> bool:
        """Returns whether the loop's thread calls this."""
        return threading.current_thread() is self._thread

    # In the thread of the loop.

    def watch(self, link: socket.socket, watched: Watched, events: int) -> None:
        """Watches a socket for some events, which replace the previous ones.

        Args:
            link: Socket to watch.
            watched: Handler of the events and deadlines.
            events: Events of ``selectors``; 0 for deadlines only.
        """
        before = self._watched.get(watched, 0)
        self._watched[watched] = events
        if before and not events:
            self._selector.unregister(link)
        elif before and before != events:
            self._selector.modify(link, events, watched)
        elif events and not before:
            self._selector.register(link, events, watched)

    def forget(self, link: socket.socket, watched: Watched) -> None:
        """Stops watching a socket, before it is closed."""
        if self._watched.pop(watched, 0):
            self._selector.unregister(link)

    def _run(self) -> None:
        tick_at = time.monotonic() + TICK_SECONDS
        while True:
            left = max(0.0, tick_at - time.monotonic())
            for key, events in self._selector.select(0 if self._work else left):
                if key.data is None:
                    self._waker.clear()
                elif key.data in self._watched:
                    _guarded(key.data.ready, events)
            for _ in range(len(self._work)):
                _guarded(self._work.popleft())
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_SECONDS
                for watched in [*self._watched]:
                    if watched in self._watched:
                        _guarded(watched.tick, now)


def _guarded(work: Callable[..., None], *given: float) -> None:
    """Calls a function, and prints its error so that other connections continue."""
    try:
        work(*given)
    except Exception:
        traceback.print_exc()


_loops: Final[dict[int, Loop]] = {}
_lock: Final = threading.Lock()


def loop() -> Loop:
    """Returns the loop of this process; a forked process has its own."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = Loop()
        return _loops[os.getpid()]
