"""Takes connections at a listening socket; strangers cannot keep members out.

Apart from ``connection`` because it is about many connections at once: how many may be
open, who has to go first, and what is said of those that were refused.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from whalejax.wire.connection import Channel, accept
from whalejax.wire.messages import CONTROL_BYTES, WireError


MOST_STRANGERS: Final = 32
"""Connections at once that have not authenticated; a further one ends the oldest."""

MOST_CHANNELS: Final = 1024
"""Authenticated ones at once."""

_PAUSE_SECONDS: Final = 0.1
"""Before accepting again where there was no file descriptor, memory or thread left."""

_SAY_SECONDS: Final = 1.0
_TICK_MILLISECONDS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedConnections:
    """Connections that were refused since this was last said: how many, and why."""

    count: int
    why: str


class Acceptor:
    """Accepts and authenticates, in threads of its own, until it is closed."""

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        serve: Callable[[Channel], None],
        *,
        most_bytes: int = CONTROL_BYTES,
        most_strangers: int = MOST_STRANGERS,
        most_channels: int = MOST_CHANNELS,
    ) -> None:
        """Begin to accept.

        Args:
            listening: closed by ``close``.
            key: of the run.
            serve: is given each authenticated connection, in a thread of its own;
                it is closed when that returns.
            most_bytes: of a message.
            most_strangers: connections at once that have not authenticated.
            most_channels: connections at once that have.
        """
        self._listening, self._key, self._serve = listening, key, serve
        self._most_bytes = most_bytes
        self._most_strangers, self._most_channels = most_strangers, most_channels
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._channels: set[Channel] = set()
        self._closed = threading.Event()
        self._refused, self._why = 0, ""
        self._said_at = -_SAY_SECONDS
        listening.setblocking(False)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def refused(self, now: float) -> RefusedConnections | None:
        """What was refused and not yet told; at most once a second.

        Args:
            now: the time.
        """
        with self._lock:
            if not self._refused or now - self._said_at < _SAY_SECONDS:
                return None
            found = RefusedConnections(count=self._refused, why=self._why)
            self._refused, self._said_at = 0, now
            return found

    def close(self) -> None:
        """End the listening socket and every connection."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # Wakes the thread.
        self._thread.join()
        self._listening.close()
        with self._lock:
            links, channels = [*self._strangers], [*self._channels]
        for link in links:
            _end(link)
        for channel in channels:
            channel.close()

    # Threads.

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        while not self._closed.is_set():
            try:
                poll.poll(_TICK_MILLISECONDS)
                link, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:
                if not self._closed.is_set():
                    self._count(f"a connection was not accepted ({error.strerror})")
                    self._make_room()
                    self._closed.wait(_PAUSE_SECONDS)
                continue
            self._take(link)

    def _take(self, link: socket.socket) -> None:
        """Authenticate it in a thread; the oldest stranger goes where there are many.

        Who has the key needs milliseconds for that, so that members get in however many
        others connect and say nothing.
        """
        with self._lock:
            full = len(self._strangers) >= self._most_strangers
            self._strangers[link] = None
        if full:
            self._make_room()
        try:
            threading.Thread(target=self._run, args=(link,), daemon=True).start()
        except RuntimeError as error:
            self._forget(link)
            link.close()
            self._count(f"a connection was not accepted ({error})")
            self._closed.wait(_PAUSE_SECONDS)

    def _make_room(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                _end(oldest)

    def _run(self, link: socket.socket) -> None:
        try:
            channel = accept(link, self._key, most_bytes=self._most_bytes)
        except WireError as error:
            self._count(str(error))
            return
        finally:
            self._forget(link)
        with self._lock:
            full = len(self._channels) >= self._most_channels
            if not full and not self._closed.is_set():
                self._channels.add(channel)
        try:
            if full:
                self._count(f"{channel.peer} is one of more than {self._most_channels}")
            elif not self._closed.is_set():
                self._serve(channel)
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _forget(self, link: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(link, None)

    def _count(self, why: str) -> None:
        with self._lock:
            self._refused, self._why = self._refused + 1, why


def _end(link: socket.socket) -> None:
    """Let the thread that waits for a connection see its end; it closes it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
