"""Authenticated connections that carry messages, with a deadline on every wait.

Both sides prove that they know the key of the run (HMAC-SHA256 over what each drew at
random), and nothing but bytes of fixed length is read before that. Every frame carries
a MAC over its number and sizes, which is checked before what follows is read, and one
over all of it, so that none can be forged, changed, repeated or left out. What is sent
is not encrypted: whoever can listen on the network can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from whalejax.meshes.texts import visible
from whalejax.wire.messages import (
    CONTROL_BYTES,
    M,
    Message,
    Messages,
    WireError,
    encode,
    too_large,
)


HANDSHAKE_SECONDS: Final = 10.0
FRAME_SECONDS: Final = 60.0
"""A frame that has begun must be whole, or one that is sent be taken, so soon."""

_MAGIC: Final = b"WHALEJAX-ELASTIC-2\n"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_HEADER: Final = struct.Struct(">IQ")
_COUNTER: Final = struct.Struct(">Q")
_OF_HEADER: Final = b"header"
_REFUSAL: Final = bytes(_MAC_BYTES)
"""Said in place of a proof: the key is wrong. A connection that merely ends says less,
such as that the listener was killed."""
_TICK_SECONDS: Final = 0.2


class Closed(WireError):
    """The other side has ended the connection."""


class TooLate(WireError):
    """Something did not come in time."""


class WrongKey(WireError):
    """The two sides do not share a key; to dial again is of no use."""


class OtherProtocol(WireError):
    """What listens there is no process of a run, or one of another version."""


class Channel:
    """An authenticated connection; one thread may receive while others send.

    Attributes:
        peer: host and port of the other side, for messages to a reader.
    """

    def __init__(
        self,
        link: socket.socket,
        sends: bytes,
        takes: bytes,
        most_bytes: int = CONTROL_BYTES,
    ) -> None:
        """Use ``accept`` or ``dial``.

        Args:
            link: the socket; closed by ``close``.
            sends, takes: keys of frames in each direction.
            most_bytes: of a message, either way.
        """
        self._link, self._most_bytes = link, most_bytes
        self._link.setblocking(False)
        self._sends, self._takes = sends, takes
        self._sent = self._taken = 0
        self._lock = threading.Lock()
        self.peer = _peer(link)

    def send(
        self,
        message: Message,
        *,
        seconds: float = FRAME_SECONDS,
        gives_up: Callable[[], bool] = bool,
    ) -> None:
        """Send a message.

        Args:
            message: what to send.
            seconds: in which the other side must take it.
            gives_up: asked now and then while the other side takes nothing.

        Raises:
            Closed: the other side is gone.
            TooLate: it did not take it, or ``gives_up`` says so; the connection is of
                no use any more.
        """
        text, views = encode(message, self._most_bytes)
        with self._lock:
            header = self._header(len(text), sum(view.nbytes for view in views))
            parts: list[bytes | memoryview] = [header, text, *views]
            parts.append(_mac(self._sends, self._sent, parts))
            self._sent += 1
            end = time.monotonic() + seconds
            for part in parts:
                self._write(memoryview(part), end, gives_up)

    def _header(self, text_bytes: int, array_bytes: int) -> bytes:
        sizes = _HEADER.pack(text_bytes, array_bytes)
        return sizes + _mac(self._sends, self._sent, [_OF_HEADER, sizes])

    def _write(
        self, view: memoryview, end: float, gives_up: Callable[[], bool]
    ) -> None:
        while view.nbytes:
            try:
                view = view[self._link.send(view) :]
            except (BlockingIOError, InterruptedError):
                self._wait(end, writes=True, gives_up=gives_up)
            except (OSError, ValueError) as error:
                raise Closed(f"{self.peer} is gone ({error})") from None

    def receive(
        self,
        takes: Messages[M],
        *,
        seconds: float,
        whole_seconds: float = FRAME_SECONDS,
        until: float = math.inf,
    ) -> M:
        """The next message.

        Args:
            takes: what may come.
            seconds: to wait for its beginning.
            whole_seconds: in which it must be whole, once it has begun.
            until: by when it must be whole in any case, as ``time.monotonic`` counts.

        Raises:
            TooLate: none began in that time, or it was not whole soon after.
            Closed: the other side is gone.
            WireError: what came is no message; the connection is of no use any more.
        """
        self._wait(min(time.monotonic() + seconds, until))
        end = min(time.monotonic() + whole_seconds, until)
        header = self._read(_HEADER.size + _MAC_BYTES, end)
        sizes = header[: _HEADER.size]
        self._check_mac([_OF_HEADER, sizes], header[_HEADER.size :])
        text_bytes, array_bytes = _HEADER.unpack(sizes)
        if why := too_large(text_bytes, array_bytes, self._most_bytes):
            raise WireError(f"{self.peer} announces a message that is too large: {why}")
        text, data = self._read(text_bytes, end), self._read(array_bytes, end)
        self._check_mac([header, text, data], self._read(_MAC_BYTES, end))
        self._taken += 1
        return takes.decode(memoryview(text), data)

    def _check_mac(self, parts: Sequence[bytes | bytearray], mac: bytearray) -> None:
        if not hmac.compare_digest(mac, _mac(self._takes, self._taken, parts)):
            raise WireError(f"{self.peer} sent a message with a wrong MAC")

    def _read(self, size: int, end: float) -> bytearray:
        found = bytearray()
        # What is announced is not believed before it comes.
        while len(found) < size:
            place = len(found)
            found.extend(bytes(min(size - place, 1 << 20)))
            view = memoryview(found)
            try:
                while place < len(view):
                    place += self._read_some(view[place:], end)
            finally:
                view.release()
        return found

    def _read_some(self, view: memoryview, end: float) -> int:
        try:
            count = self._link.recv_into(view)
        except (BlockingIOError, InterruptedError):
            self._wait(end)
            return 0
        except (OSError, ValueError) as error:
            raise Closed(f"{self.peer} is gone ({error})") from None
        if not count:
            raise Closed(f"{self.peer} has ended the connection")
        return count

    def _wait(
        self,
        end: float,
        *,
        writes: bool = False,
        gives_up: Callable[[], bool] = bool,
    ) -> None:
        """Until the socket is ready."""
        while True:
            left = end - time.monotonic()
            if left <= 0 or gives_up():
                what = "took nothing" if writes else "sent nothing"
                raise TooLate(f"{self.peer} {what} in time")
            try:
                poll = select.poll()
                poll.register(self._link, select.POLLOUT if writes else select.POLLIN)
                if poll.poll(1000 * min(left, _TICK_SECONDS)):
                    return
            except (OSError, ValueError) as error:
                raise Closed(f"{self.peer} is gone ({error})") from None

    def fileno(self) -> int:
        """Of the socket, for a selector."""
        return self._link.fileno()

    def shut_down(self) -> None:
        """Send and take nothing more; what came before can still be received.

        For who could not send: the last message of the other side, such as that the
        run is over, may have come and wait to be received.
        """
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; a thread that waits in it raises ``Closed``."""
        self.shut_down()
        self._link.close()


def accept(
    link: socket.socket, key: bytes, *, most_bytes: int = CONTROL_BYTES
) -> Channel:
    """Authenticate who dialled.

    Args:
        link: an accepted socket; closed where this fails.
        key: of the run.
        most_bytes: of a message.

    Raises:
        WrongKey: the other side does not know the key.
        WireError: it is too slow, or gone.
    """
    end = time.monotonic() + HANDSHAKE_SECONDS
    try:
        _at_once(link)
        mine = secrets.token_bytes(_NONCE_BYTES)
        _push(link, _MAGIC + mine, end)
        size = len(_MAGIC) + _NONCE_BYTES + _MAC_BYTES
        said = _pull(link, size, end)
        theirs = said[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES]
        proof = _proof(key, b"dialler", mine, theirs)
        if not said.startswith(_MAGIC) or not hmac.compare_digest(
            said[-_MAC_BYTES:], proof
        ):
            _push(link, _REFUSAL, end)
            raise WrongKey(f"{_peer(link)} does not have the key of this run")
        _push(link, _proof(key, b"listener", mine, theirs), end)
        return Channel(
            link,
            sends=_proof(key, b"from listener", mine, theirs),
            takes=_proof(key, b"from dialler", mine, theirs),
            most_bytes=most_bytes,
        )
    except (OSError, WireError) as error:
        link.close()
        if isinstance(error, WireError):
            raise
        raise Closed(f"a connection ended before it was one ({error})") from None


def _at_once(link: socket.socket) -> None:
    """Send the parts of a frame as they come.

    Otherwise the last ones wait until the other side has acknowledged the first, which
    it puts off, so that each message may take 40 ms longer.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(
    address: tuple[str, int],
    key: bytes,
    *,
    seconds: float = HANDSHAKE_SECONDS,
    most_bytes: int = CONTROL_BYTES,
) -> Channel:
    """Connect to a process and authenticate each other.

    Args:
        address: host and port.
        key: of the run.
        seconds: for all of it.
        most_bytes: of a message.

    Raises:
        Closed: nothing listens there, or it ended the connection.
        TooLate: it answers nothing.
        WrongKey: it does not have the key, or refused that of this process.
        OtherProtocol: it says something else.
    """
    end = time.monotonic() + seconds
    where = f"{address[0]}:{address[1]}"
    try:
        link = socket.create_connection(address, timeout=max(seconds, 0.01))
    except TimeoutError:
        raise TooLate(f"{where} answered nothing in {seconds:.0f} s") from None
    except OSError as error:
        raise Closed(f"{where}: {error.strerror or error}") from None
    except (ValueError, OverflowError) as error:  # No name of a host, or no port.
        raise Closed(f"{visible(where)[:80]} is no address ({error})") from None
    try:
        _at_once(link)
        said = _pull(link, len(_MAGIC) + _NONCE_BYTES, end)
        theirs = said[len(_MAGIC) :]
        if not said.startswith(_MAGIC):
            raise OtherProtocol(f"{where} is no process of a run of this version")
        mine = secrets.token_bytes(_NONCE_BYTES)
        _push(link, _MAGIC + mine + _proof(key, b"dialler", theirs, mine), end)
        proof = _pull(link, _MAC_BYTES, end)
        if proof == _REFUSAL:
            raise WrongKey(f"{where} refused the key of this process")
        if not hmac.compare_digest(proof, _proof(key, b"listener", theirs, mine)):
            raise WrongKey(f"{where} does not have the key of this run")
        return Channel(
            link,
            sends=_proof(key, b"from dialler", theirs, mine),
            takes=_proof(key, b"from listener", theirs, mine),
            most_bytes=most_bytes,
        )
    except (OSError, WireError) as error:
        link.close()
        if isinstance(error, WireError):
            raise
        raise Closed(f"{where}: {error}") from None


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens, at a free port where none is given."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(64)
    except OSError:
        found.close()
        raise
    return found


def _proof(key: bytes, role: bytes, listener: bytes, dialler: bytes) -> bytes:
    """What only who knows the key can say, of what both drew; each role another."""
    said = b"%s|%s|%s|%s" % (_MAGIC, role, listener, dialler)
    return hmac.digest(key, said, "sha256")


def _mac(
    key: bytes, number: int, parts: Sequence[bytes | bytearray | memoryview]
) -> bytes:
    found = hmac.new(key, _COUNTER.pack(number), hashlib.sha256)
    for part in parts:
        found.update(part)
    return found.digest()


def _push(link: socket.socket, data: bytes, end: float) -> None:
    link.settimeout(max(end - time.monotonic(), 0.01))
    try:
        link.sendall(data)
    except TimeoutError:
        raise TooLate(f"{_peer(link)} took nothing in time") from None


def _pull(link: socket.socket, size: int, end: float) -> bytes:
    found = b""
    while len(found) < size:
        link.settimeout(max(end - time.monotonic(), 0.01))
        try:
            some = link.recv(size - len(found))
        except TimeoutError:
            raise TooLate(f"{_peer(link)} answered nothing in time") from None
        if not some:
            raise Closed(f"{_peer(link)} has ended the connection")
        found += some
    return found


def _peer(link: socket.socket) -> str:
    try:
        name = link.getpeername()
    except OSError:
        return "a process that is gone"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a local process"
