"""Encrypted connections that carry messages, with a deadline on every wait.

In TLS 1.3, both sides show a certificate of the run's authority. So others cannot read,
change, repeat or remove data on the network. After the handshake the listener sends its
protocol and whether it accepts the other side. A frame has the sizes of a message's
values and arrays, followed by both. If processes have no key, the same protocol runs
without TLS.

The process's loop reads all incoming data. A slow reader delays only its own sender.

The module is long because the handshake, both directions of a connection and its
deadlines share one state.
"""

from __future__ import annotations

import collections
import contextlib
import math
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from whalejax.meshes.errors import visible
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection_loop import loop
from whalejax.wire.keys import Key, certificate_refusal, peer_name
from whalejax.wire.messages import (
    CONTROL_BYTES,
    M,
    Message,
    Messages,
    Text,
    WireError,
    encode,
    too_large,
)


PROTOCOL: Final = "whalejax 6"
"""Name and version of the protocol; both sides must have the same."""

UNENCRYPTED: Final = f"{PROTOCOL} without a key\n".encode()
"""Greeting that a process without a key sends to a listener instead of a handshake."""

KEYS_DIFFER: Final = (
    "one side was given a key (WHALEJAX_KEY_FILE) and the other was not"
)

HANDSHAKE_SECONDS: Final = 10.0
FRAME_SECONDS: Final = 60.0
"""Seconds in which a frame must arrive completely once begun, or be accepted."""

SLOWEST_BYTES_PER_SECOND: Final = 1e7
"""Rate of a slow link, 80 Mb/s, by which deadlines of large messages are longer."""

MOST_POSTED_BYTES: Final = 1 << 23
"""Maximum bytes of posted messages that the other side has not accepted."""

BACKLOG: Final = 1024

_HEADER: Final = struct.Struct(">IQ")
_MOST_WAITING: Final = 64
_MOST_WAITING_BYTES: Final = 1 << 26
"""Maximum bytes of messages that wait to be received; beyond that, nothing is read."""
_MOST_AT_ONCE: Final = 1 << 22
"""Maximum bytes read from one connection before the other connections are read."""
_TICK_SECONDS: Final = 0.2
_LOST: Final = (ssl.SSLError, OSError, ValueError)


class ConnectionClosedError(WireError):
    """The other side has ended the connection."""


class WireTimeoutError(WireError):
    """Data did not arrive, or was not accepted, in time."""


class WrongKey(WireError):
    """One side does not accept the key of the other, so another attempt fails too."""


class OtherProtocol(WireError):
    """The listener is not a process of a run, or has another version."""


class Admission(Message):
    """First message of a listener: its protocol, and the reason for a refusal.

    After a final refusal, another attempt to connect fails too.
    """

    protocol: Text
    refused: Text = ""
    is_final: bool = False


_ADMISSION: Final = Messages(Admission)


class Channel:
    """A connection, which several threads may use.

    Attributes:
        peer: Host and port of the other side, for messages to a reader.
        name: Name in the other side's certificate.
        heard_at: Time of the last complete header or message, by ``time.monotonic``.
    """

    def __init__(
        self,
        link: socket.socket,
        name: str,
        most_bytes: int = CONTROL_BYTES,
        notify: Callable[[Channel], None] | None = None,
    ) -> None:
        """Wraps a socket; use ``dial`` or an ``Acceptor`` instead.

        Args:
            link: Socket after its handshake; ``close`` closes it.
            name: Name in the certificate of the other side; empty without a key.
            most_bytes: Largest size of a message, in either direction.
            notify: Function that the loop calls when a message can be received and when
                the connection ends; it must not block.
        """
        self._link, self._most_bytes, self._notify = link, most_bytes, notify
        self.name = name
        self._loop = loop()
        self._using, self._sending = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._frames: collections.deque[tuple[bytearray, Any]] = collections.deque()
        self._why, self._waiting_bytes = "", 0
        self._is_paused = self._is_dropped = False
        self._posted: collections.deque[memoryview] = collections.deque()
        self._posted_bytes, self._posted_at = 0, 0.0
        self._header, self._text = bytearray(_HEADER.size), bytearray()
        self._data: Any = np.empty(0, np.uint8)
        self._wants = collections.deque([memoryview(self._header)])
        self._in_header, self._frame_end, self._has_news = True, math.inf, False
        self.peer, self.heard_at = end_of(link), time.monotonic()

    def open(self) -> None:
        """Starts reading."""
        self._loop.call(lambda: self.ready(selectors.EVENT_READ))

    # Sending.

    def send(
        self,
        message: Message,
        *,
        seconds: float = FRAME_SECONDS,
        gives_up: Callable[[], bool] = bool,
    ) -> None:
        """Sends a message, and waits until the system has accepted it.

        Args:
            message: Message to send.
            seconds: Seconds within which the other side must accept the whole message.
            gives_up: Function called repeatedly while the other side accepts nothing;
                True ends the wait.

        Raises:
            ConnectionClosedError: The other side has ended the connection.
            WireTimeoutError: The other side did not accept the message, or ``gives_up``
                returned True. The connection can no longer be used.
            WireError: The message is larger than a receiver accepts.
        """
        parts = self._frame(message)
        end = time.monotonic() + seconds
        try:
            with self._sending:
                while not self._flush():
                    self._wait_to_write(end, gives_up)
                for part in parts:
                    while part.nbytes:
                        sent = self._write(part)
                        part = part[sent:]
                        if not sent:
                            self._wait_to_write(end, gives_up)
        finally:
            if self._posted:  # posted in the meantime
                self._loop.call(self._write_posted)

    def post(self, message: Message) -> None:
        """Sends a message without waiting; closes the connection if it is stuck.

        Args:
            message: Message to send; its arrays are copied.

        Raises:
            WireError: The message is larger than a receiver accepts, or the connection
                has ended.
        """
        if self._why:
            raise ConnectionClosedError(self._why)
        part = memoryview(b"".join(self._frame(message)))
        with self._changed:
            if not self._posted:
                self._posted_at = time.monotonic()
            self._posted.append(part)
            self._posted_bytes += part.nbytes
            full = self._posted_bytes > MOST_POSTED_BYTES
        if full:
            self._end(f"{self.peer} takes nothing")
        else:
            self._write_posted()

    def _frame(self, message: Message) -> list[memoryview]:
        text, views = encode(message, self._most_bytes)
        header = _HEADER.pack(len(text), sum(view.nbytes for view in views))
        return [memoryview(header + text), *views]

    def _write(self, part: memoryview) -> int:
        """Returns the number of bytes that the system accepted, possibly 0."""
        if self._why:
            raise ConnectionClosedError(self._why)
        try:
            with self._using:
                return self._link.send(part)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0
        except _LOST as error:
            raise ConnectionClosedError(
                f"{self.peer} is gone ({_error_text(error)})"
            ) from None

    def _wait_to_write(self, end: float, gives_up: Callable[[], bool]) -> None:
        left = end - time.monotonic()
        if left <= 0 or gives_up():
            raise WireTimeoutError(f"{self.peer} took nothing in time")
        with contextlib.suppress(OSError, ValueError):  # The next write reports it.
            poll = select.poll()
            poll.register(self._link, select.POLLOUT)
            poll.poll(1000 * min(left, _TICK_SECONDS))

    def _write_posted(self) -> None:
        """Writes posted messages as far as possible; the loop writes the rest."""
        if not self._sending.acquire(blocking=False):
            return  # The sending thread writes them afterwards.
        try:
            is_done = self._flush()
        except ConnectionClosedError as error:
            self._end(str(error))
            return
        finally:
            self._sending.release()
        if not is_done or self._posted:
            self._loop.call(self._watch)

    def _flush(self) -> bool:
        while self._posted:
            sent = self._write(self._posted[0])
            if not sent:
                return False
            with self._changed:
                self._posted_bytes -= sent
                self._posted_at = time.monotonic()
                rest = self._posted.popleft()[sent:]
                if rest.nbytes:
                    self._posted.appendleft(rest)
        return True

    # Receiving.

    def receive(
        self, takes: Messages[M], *, seconds: float, until: float = math.inf
    ) -> M:
        """Waits for the next message.

        Args:
            takes: Messages that are expected.
            seconds: Maximum seconds until the message begins.
            until: Deadline of the complete message, on the clock of ``time.monotonic``.

        Raises:
            WireTimeoutError: No message began within ``seconds``, or it was incomplete
                at ``until``.
            ConnectionClosedError: The connection has ended. One reason is data that is
                not a message, or that stopped within one.
            MalformedError: The message is not an expected one.
        """
        end = min(time.monotonic() + seconds, until)
        with self._changed:
            while not self._frames and not self._why:
                now = time.monotonic()
                # Wait for the rest of a message that has begun.
                if now >= until or (now >= end and self._in_header):
                    raise WireTimeoutError(f"{self.peer} sent nothing in time")
                left = end - now if now < end else _TICK_SECONDS
                self._changed.wait(min(left, until - now))
        result = self.next(takes)
        assert result is not None
        return result

    def next(self, takes: Messages[M]) -> M | None:
        """Returns the next message that has been received, or None.

        Raises:
            ConnectionClosedError: There is no message, and the connection has ended.
            MalformedError: The message is not an expected one.
        """
        with self._changed:
            if not self._frames:
                if self._why:
                    raise ConnectionClosedError(self._why)
                return None
            text, data = self._frames.popleft()
            self._waiting_bytes -= len(text) + len(data)
            if self._is_paused and self._has_room(_MOST_WAITING // 2):
                self._is_paused = False
                self._loop.call(lambda: self.ready(selectors.EVENT_READ))
        return takes.decode(memoryview(text), memoryview(data))

    def _has_room(self, most: int) -> bool:
        return len(self._frames) < most and self._waiting_bytes <= _MOST_WAITING_BYTES

    # In the loop.

    def ready(self, events: int) -> None:
        """Reads and writes as far as possible without waiting."""
        if events & selectors.EVENT_WRITE:
            self._write_posted()
        if events & selectors.EVENT_READ and not self._is_dropped:
            self._has_news, why = False, ""
            try:
                self._read()
            except WireError as error:
                why = str(error)
            if self._has_news and self._notify is not None:
                self._notify(self)
            if why:
                self._end(why)
        self._watch()

    def _read(self) -> None:
        budget = _MOST_AT_ONCE
        while not self._is_paused:
            if budget <= 0:
                self._loop.call(lambda: self.ready(selectors.EVENT_READ))
                return
            try:
                with self._using:
                    count = self._link.recv_into(self._wants[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                return
            except _LOST as error:
                raise ConnectionClosedError(
                    f"{self.peer} is gone ({_error_text(error)})"
                ) from None
            if not count:
                raise ConnectionClosedError(f"{self.peer} has ended the connection")
            budget -= count
            self._wants[0] = self._wants[0][count:]
            while self._wants and not self._wants[0].nbytes:
                self._wants.popleft()
            if not self._wants:
                self._has_read()

    def _has_read(self) -> None:
        self.heard_at = time.monotonic()
        if self._in_header:
            text_bytes, array_bytes = _HEADER.unpack(self._header)
            if why := too_large(text_bytes, array_bytes, self._most_bytes):
                raise WireError(
                    f"{self.peer} announces a message that is too large: {why}"
                )
            # Unwritten memory costs nothing, so a wrong announced size does no harm.
            self._text, self._data = bytearray(text_bytes), np.empty(array_bytes, "u1")
            self._in_header = False
            slowest = array_bytes / SLOWEST_BYTES_PER_SECOND
            self._frame_end = self.heard_at + FRAME_SECONDS + slowest
            self._wants.extend(
                view
                for view in (memoryview(self._text), memoryview(self._data))
                if view.nbytes
            )
        if not self._wants:
            with self._changed:
                self._frames.append((self._text, self._data))
                self._waiting_bytes += len(self._text) + len(self._data)
                self._is_paused = not self._has_room(_MOST_WAITING)
                self._has_news = True
                self._in_header, self._frame_end = True, math.inf
                self._changed.notify_all()
            self._header = bytearray(_HEADER.size)
            self._wants.append(memoryview(self._header))

    def tick(self, now: float) -> None:
        """Ends the connection if a received or posted frame takes too long."""
        if now > self._frame_end:
            self._end(f"{self.peer} sent half a message, and no more in time")
        elif self._posted and now > self._posted_at + FRAME_SECONDS:
            self._end(f"{self.peer} takes nothing")

    def _watch(self) -> None:
        if self._is_dropped:
            return
        reads = 0 if self._is_paused else selectors.EVENT_READ
        writes = selectors.EVENT_WRITE if self._posted else 0
        self._loop.watch(self._link, self, reads | writes)

    def _drop(self) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            self._loop.forget(self._link, self)
            with self._using:
                self._link.close()
            if self._notify is not None:
                self._notify(self)

    # Ending.

    def _end(self, why: str) -> None:
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            # The plain socket's method does not touch the state of the encryption.
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)
        if self._loop.is_here:
            self._drop()
        else:
            self._loop.call(self._drop)

    @property
    def has_more(self) -> bool:
        """Whether ``next`` returns a message or raises an error."""
        return bool(self._frames or self._why)

    @property
    def is_closed(self) -> bool:
        """Whether no more data can arrive; received messages may remain."""
        return bool(self._why)

    def shut_down(self) -> None:
        """Ends sending; data that has arrived can still be read.

        After a failed send, the other side's last message may still wait to be
        received, such as that the run is over.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; threads that wait raise ``ConnectionClosedError``."""
        self._end("this process has ended the connection")


def dial(
    address: tuple[str, int],
    key: Key | None,
    *,
    seconds: float = HANDSHAKE_SECONDS,
    most_bytes: int = CONTROL_BYTES,
    notify: Callable[[Channel], None] | None = None,
) -> Channel:
    """Connects to a process; each shows the other its certificate.

    Args:
        address: Host and port.
        key: Key of this process; None for no key and no encryption.
        seconds: Deadline of connection and handshake together.
        most_bytes: Largest size of a message.
        notify: Argument of ``Channel``.

    Raises:
        ConnectionClosedError: Nothing listens there, or the listener ended the
            connection, or has too many.
        WireTimeoutError: The listener does not answer in time.
        WrongKey: One side does not accept the key of the other.
        OtherProtocol: The listener speaks another protocol.
    """
    end = time.monotonic() + seconds
    where = joined_address(*address)
    try:
        plain = socket.create_connection(address, timeout=max(seconds, 0.01))
    except TimeoutError:
        raise WireTimeoutError(f"{where} answered nothing in {seconds:.0f} s") from None
    except OSError as error:
        raise ConnectionClosedError(f"{where}: {error.strerror or error}") from None
    except (ValueError, OverflowError) as error:  # an invalid host name or port
        raise ConnectionClosedError(
            f"{visible(where)[:80]} is no address ({error})"
        ) from None
    link: socket.socket = plain
    try:
        at_once(plain)
        plain.settimeout(max(end - time.monotonic(), 0.01))
        name = ""
        if key is None:
            plain.sendall(UNENCRYPTED)
            _check_admission(_ADMISSION.decode(_pulled(plain, end)), where)
        else:
            link = wrapped = key.dials.wrap_socket(plain)
            _check_admission(_ADMISSION.decode(_pulled(wrapped, end)), where)
            name = peer_name(wrapped)
            if why := key.refusal(name):
                raise WrongKey(f"{where}: {why}")
        link.setblocking(False)
        channel = Channel(link, name, most_bytes, notify)
    except TimeoutError:
        link.close()
        raise WireTimeoutError(f"{where} answered nothing in time") from None
    except (ssl.SSLError, OSError, WireError) as error:
        link.close()
        raise _dialled_wrong(error, where) from None
    channel.open()
    return channel


def admission(*, refused: str = "", is_final: bool = False) -> bytes:
    """Returns the bytes of a listener's first message."""
    said = Admission(protocol=PROTOCOL, refused=refused, is_final=is_final)
    text, _ = encode(said)
    return _HEADER.pack(len(text), 0) + text


def _pulled(link: socket.socket, end: float) -> bytes:
    """Reads the values of the listener's first message."""
    result, size = b"", _HEADER.size
    while len(result) < size:
        link.settimeout(max(end - time.monotonic(), 0.01))
        some = link.recv(size - len(result))
        if not some:
            raise ConnectionClosedError("it has ended the connection")
        result += some
        if len(result) == _HEADER.size:
            size += min(_HEADER.unpack(result)[0], CONTROL_BYTES)
    return result[_HEADER.size :]


def _check_admission(said: Admission, where: str) -> None:
    if said.protocol != PROTOCOL:
        raise OtherProtocol(
            f"{where} speaks {visible(said.protocol)[:40]!r}, and this process "
            f"{PROTOCOL!r}. Install the same whalejax everywhere"
        )
    if said.refused and said.is_final:
        raise WrongKey(f"{where} refused the key of this process: {said.refused}")
    if said.refused:
        raise ConnectionClosedError(said.refused)


def _dialled_wrong(error: Exception, where: str) -> WireError:
    if isinstance(error, WrongKey | OtherProtocol):
        return error
    if isinstance(error, ssl.SSLError):
        if why := certificate_refusal(error):
            return WrongKey(f"{where}: {why}")
        if not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return OtherProtocol(
                f"{where} is no process of a run of this version: it does not speak "
                f"{PROTOCOL!r} over TLS 1.3 ({_error_text(error)})"
            )
    if isinstance(error, WireError) and not isinstance(error, ConnectionClosedError):
        return OtherProtocol(f"{where} is no process of a run of this version: {error}")
    return ConnectionClosedError(f"{where}: {_error_text(error)}")


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Returns a listening socket, at a free port by default."""
    result = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind((host, port))
        result.listen(BACKLOG)
    except OSError:
        result.close()
        raise
    return result


def at_once(link: socket.socket) -> None:
    """Makes a socket send the parts of a frame without delay.

    By default, the last parts wait until the other side acknowledges the first one,
    which may take 40 ms.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _error_text(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error)
    return str(getattr(error, "strerror", None) or error)


def end_of(link: socket.socket) -> str:
    try:
        name = link.getpeername()
    except OSError:
        return "a process that is gone"
    return joined_address(*name[:2]) if isinstance(name, tuple) else "a local process"
