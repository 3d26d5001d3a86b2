"""Accepts connections at a listening socket, and limits them.

A stranger is a connection whose handshake is not finished. Many strangers cannot keep
members of a run out: some are dropped when others come.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from whalejax.wire.connection import (
    HANDSHAKE_SECONDS,
    KEYS_DIFFER,
    PROTOCOL,
    UNENCRYPTED,
    Admission,
    Channel,
    admission,
    at_once,
    end_of,
)
from whalejax.wire.connection_loop import loop
from whalejax.wire.keys import Key, certificate_refusal, peer_name
from whalejax.wire.messages import CONTROL_BYTES


MOST_STRANGERS: Final = 256
"""Maximum number of strangers. If one more comes, the oldest one is dropped that is
silent or has had time to speak. If there is none, the newcomer waits."""

MOST_CHANNELS: Final = 4096
"""Maximum number of connections after their handshake."""

IDLE_SECONDS: Final = 600.0
"""Seconds without data after which a connection is ended."""

_SILENT_SECONDS: Final = 5.0
"""Seconds after which a silent stranger is sent the protocol's name."""

_SPEAKING_SECONDS: Final = 2.0
"""Seconds after which a stranger that sends data may be dropped for others."""

_AT_ONCE: Final = 16
_PAUSE_SECONDS: Final = 0.1
"""Seconds without accepting connections after a lack of descriptors or memory."""

_SAY_SECONDS: Final = 1.0

_SPOKEN: Final = (
    f"This process speaks {PROTOCOL!r}. A whalejax that signs its messages is of an "
    "earlier version: install the same everywhere.\n"
).encode()
"""Unencrypted text for a silent stranger, which may be an earlier version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedConnections:
    """Number of connections refused since the last report, and a reason."""

    count: int
    why: str


class _Stranger:
    """A connection whose handshake is not finished."""

    def __init__(self, acceptor: Acceptor, link: socket.socket) -> None:
        self._acceptor, self.link = acceptor, link
        self.came_at, self.speaks = time.monotonic(), False
        self.peer, self._said = end_of(link), b""

    def ready(self, events: int) -> None:
        del events
        wants = selectors.EVENT_READ
        try:
            if not self.speaks:
                first = socket.socket.recv(self.link, 1, socket.MSG_PEEK)
                self.speaks = True
                has_key = isinstance(self.link, ssl.SSLSocket)
                if first and has_key == (first == UNENCRYPTED[:1]):
                    self._differ()
                    return
            if isinstance(self.link, ssl.SSLSocket):
                self.link.do_handshake()
            elif not self._greeted():
                loop().watch(self.link, self, wants)
                return
        except BlockingIOError:
            pass
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            wants = selectors.EVENT_WRITE
        except (ssl.SSLError, OSError, ValueError) as error:
            why = certificate_refusal(error) if isinstance(error, ssl.SSLError) else ""
            reason = getattr(error, "reason", None) or error
            why = why or f"it does not speak {PROTOCOL!r} ({reason})"
            self._acceptor.refuse(self, f"{self.peer}: {why}")
            return
        else:
            self._acceptor.admit(self)
            return
        loop().watch(self.link, self, wants)

    def _greeted(self) -> bool:
        """Whether a side without a key has sent its complete greeting.

        Raises:
            ValueError: The side sends something else.
        """
        said = self.link.recv(len(UNENCRYPTED) - len(self._said))
        self._said += said
        if not said or not UNENCRYPTED.startswith(self._said):
            raise ValueError("it says something else")
        return self._said == UNENCRYPTED

    def _differ(self) -> None:
        """Refuses a connection of which only one side has a key; tells both sides."""
        with contextlib.suppress(OSError):
            socket.socket.send(self.link, admission(refused=KEYS_DIFFER, is_final=True))
        self._acceptor.refuse(self, f"{self.peer}: {KEYS_DIFFER}")

    def tick(self, now: float) -> None:
        if not self.speaks and now > self.came_at + _SILENT_SECONDS:
            with contextlib.suppress(OSError):
                socket.socket.send(self.link, _SPOKEN)
            self._acceptor.refuse(self, f"{self.peer} said nothing")
        elif now > self.came_at + HANDSHAKE_SECONDS:
            self._acceptor.refuse(self, f"{self.peer} finished no handshake")


class Acceptor:
    """Accepts and admits connections in the process's loop, until it is closed."""

    def __init__(
        self,
        listening: socket.socket,
        key: Key | None,
        notify: Callable[[Channel], None],
        *,
        most_bytes: int = CONTROL_BYTES,
        most_strangers: int = MOST_STRANGERS,
        most_channels: int = MOST_CHANNELS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Starts to accept connections.

        Args:
            listening: Listening socket; ``close`` closes it.
            key: Key of this process; None for no key and no encryption.
            notify: Function that the loop calls with a connection that has received
                data or ended; it must not block.
            most_bytes: Largest size of a message.
            most_strangers: Maximum number of connections with an unfinished handshake.
            most_channels: Maximum number of connections after their handshake.
            idle_seconds: Seconds without data after which a connection is ended.
        """
        self._listening, self._key, self._notify = listening, key, notify
        self._most_bytes, self._idle_seconds = most_bytes, idle_seconds
        self._most_strangers, self._most_channels = most_strangers, most_channels
        self._lock = threading.Lock()
        self._strangers: dict[_Stranger, None] = {}
        self._channels: set[Channel] = set()
        self._closed, self._stays_closed_until = threading.Event(), 0.0
        self._refused, self._why = 0, ""
        self._said_at = -_SAY_SECONDS
        listening.setblocking(False)
        loop().call(self._watch)

    def take_refused(self, now: float) -> RefusedConnections | None:
        """Returns the connections that were refused since the last report.

        None means that there are none, or that the last report was within a second.
        """
        with self._lock:
            if not self._refused or now - self._said_at < _SAY_SECONDS:
                return None
            result = RefusedConnections(count=self._refused, why=self._why)
            self._refused, self._said_at = 0, now
            return result

    def close(self) -> None:
        """Closes the listening socket and every connection."""
        self.stop_listening()
        self._in_loop(self._close_channels)

    def stop_listening(self) -> None:
        """Stops accepting connections; open connections stay."""
        self._closed.set()
        self._in_loop(self._end)

    def _in_loop(self, work: Callable[[], object]) -> None:
        if loop().is_here:
            work()
            return
        is_done = threading.Event()

        def do() -> None:
            work()
            is_done.set()

        loop().call(do)
        is_done.wait()

    # In the loop.

    def ready(self, events: int) -> None:
        """Accepts a connection."""
        del events
        for _ in range(_AT_ONCE):
            oldest = self._oldest() if self._is_full else None
            if self._is_full and oldest is None:
                break
            try:
                link, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                self._count(f"a connection was not accepted ({error.strerror})")
                self._stays_closed_until = time.monotonic() + _PAUSE_SECONDS
                break
            if oldest is not None:
                did = "finished no handshake" if oldest.speaks else "said nothing"
                self.refuse(oldest, f"{oldest.peer} {did}, and others came")
            self._take(link)
        self._watch()

    def tick(self, now: float) -> None:
        """Drops idle connections, and those whose certificate was revoked."""
        self._watch()
        revoked = frozenset() if self._key is None else self._key.revoked()
        for channel in [*self._channels]:
            is_idle = now > channel.heard_at + self._idle_seconds
            if is_idle or channel.name in revoked:
                channel.close()

    def _watch(self) -> None:
        """Watches the socket, unless no connection can be accepted now."""
        if self._closed.is_set():
            return
        full = self._is_full and self._oldest() is None
        waits = full or time.monotonic() < self._stays_closed_until
        loop().watch(self._listening, self, 0 if waits else selectors.EVENT_READ)

    @property
    def _is_full(self) -> bool:
        return len(self._strangers) >= self._most_strangers

    def _oldest(self) -> _Stranger | None:
        late = time.monotonic() - _SPEAKING_SECONDS
        strangers = self._strangers
        return next((s for s in strangers if not s.speaks or s.came_at < late), None)

    def _take(self, plain: socket.socket) -> None:
        plain.setblocking(False)
        try:
            at_once(plain)
            link = plain
            if self._key is not None:
                link = self._key.accepts.wrap_socket(
                    plain, server_side=True, do_handshake_on_connect=False
                )
        except OSError as error:  # The connection has ended.
            plain.close()
            self._count(f"a connection ended before its handshake ({error.strerror})")
            return
        stranger = _Stranger(self, link)
        self._strangers[stranger] = None
        stranger.ready(selectors.EVENT_READ)

    def refuse(self, stranger: _Stranger, why: str) -> None:
        """Ends a connection whose handshake failed."""
        self._strangers.pop(stranger, None)
        self._count(why)
        loop().forget(stranger.link, stranger)
        with contextlib.suppress(OSError):  # lets the message arrive
            socket.socket.recv(stranger.link, 1 << 16)
        stranger.link.close()

    def admit(self, stranger: _Stranger) -> None:
        """Admits a connection after its handshake, or tells it why it is refused."""
        del self._strangers[stranger]
        loop().forget(stranger.link, stranger)
        name, why, full = "", "", ""
        if self._key is not None and isinstance(stranger.link, ssl.SSLSocket):
            name = peer_name(stranger.link)
            why = self._key.refusal(name)
        channel = Channel(stranger.link, name, self._most_bytes, self._tell)
        if not why and len(self._channels) >= self._most_channels:
            full = f"it has {self._most_channels} connections, as many as it takes"
        channel.post(
            Admission(protocol=PROTOCOL, refused=why or full, is_final=bool(why))
        )
        if why or full:
            self._count(f"{channel.peer}: {why or full}")
            channel.close()
            return
        self._channels.add(channel)
        channel.ready(selectors.EVENT_READ)

    def _tell(self, channel: Channel) -> None:
        if channel in self._channels:
            if channel.is_closed:
                self._channels.discard(channel)
            self._notify(channel)

    def _count(self, why: str) -> None:
        with self._lock:
            self._refused, self._why = self._refused + 1, why

    def _close_channels(self) -> None:
        for channel in [*self._channels]:
            channel.close()

    def _end(self) -> None:
        loop().forget(self._listening, self)
        self._listening.close()
        for stranger in [*self._strangers]:
            self.refuse(stranger, "")
