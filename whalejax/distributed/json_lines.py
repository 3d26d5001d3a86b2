"""Lines of JSON between two processes, with a limit to all that a stranger may send.

Who listens at a port hears from anyone. Here a line has a greatest length, JSON has a
greatest depth, every answer has a deadline, and where processes share a secret each
side proves that it knows it (HMAC-SHA256 over a number that the other side drew) before
anything else is said. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from typing import Any, Final

from whalejax.distributed.launch_env import is_loopback
from whalejax.distributed.reserved_port import is_reserved


MOST_DEPTH: Final = 8
"""Lists and objects inside each other; what is sent here has five."""

MOST_BYTES: Final = 1 << 18
"""Of a line that a stranger sends."""

ANSWER_SECONDS: Final = 10.0
"""An answer that needs no work comes within these."""

_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKETS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


class Connection:
    """One connection."""

    def __init__(self, link: socket.socket, *, most_bytes: int = MOST_BYTES) -> None:
        """Speak over a connected socket.

        Args:
            link: is closed with this.
            most_bytes: of a line that is read.
        """
        self._link = link
        self._most_bytes = most_bytes
        self._come = b""
        self._telling = threading.Lock()

    def tell(self, data: object, seconds: float = ANSWER_SECONDS) -> None:
        """Send something.

        Raises:
            OSError: the other side is gone, or does not take it in time.
        """
        with self._telling:
            self._link.settimeout(max(0.01, seconds))
            self._link.sendall(json.dumps(data).encode() + b"\n")

    def told(self, seconds: float = ANSWER_SECONDS) -> Any:
        """What the other side sends next.

        Raises:
            OSError: it is gone, or says nothing in time (``TimeoutError``).
            ValueError: that is no line of JSON within the limits.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._come:
            if len(self._come) > self._most_bytes:
                raise ValueError(f"a line of more than {self._most_bytes} bytes")
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
            self._link.settimeout(max(0.01, left))
            try:
                data = self._link.recv(1 << 16)
            except TimeoutError:
                continue  # it may have been that of another thread, which tells
            if not data:
                raise ConnectionResetError(
                    errno.ECONNRESET, "the other side has closed"
                )
            self._come += data
        line, _, self._come = self._come.partition(b"\n")
        return parsed(line)

    def close(self) -> None:
        """Say and hear no more, a thread that waits here neither."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


def parsed(line: bytes) -> Any:
    """What a line of JSON says.

    Raises:
        ValueError: it is none, or lies too deep.

    >>> parsed(b'{"a": [1]}')
    {'a': [1]}
    """
    text = line.decode()
    depth = deepest = 0
    for char in _STRING.sub("", text):
        depth += _BRACKETS.get(char, 0)
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise ValueError(f"JSON of depth {deepest}; at most {MOST_DEPTH}")
    return json.loads(text, parse_constant=_refused)


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


# Who knows the secret.


class Stranger(ValueError):
    """The other side is not of this program, or does not know the secret."""


def receive(link: Connection, purpose: str, key: bytes) -> None:
    """Greet who has come, and have it prove that it knows the secret.

    Args:
        link: to it.
        purpose: what is listened for.
        key: the secret; empty where there is none, and nothing is proved.

    Raises:
        ValueError, OSError: it does not.
    """
    if not key:
        link.tell({"whalejax": purpose})
        return
    mine = secrets.token_hex(16)
    link.tell({"whalejax": purpose, "nonce": mine})
    told = link.told()
    if not (isinstance(told, dict) and _right(told, key, "came", purpose, mine)):
        raise Stranger("it does not know the secret")
    link.tell({"proof": _proof(key, "received", purpose, mine, told["nonce"])})


def greet(link: Connection, purpose: str, key: bytes, seconds: float) -> None:
    """Prove to who listens that this process knows the secret, and have it prove so.

    Args:
        link: to it.
        purpose: what it should listen for.
        key: the secret; empty where there is none.
        seconds: to wait for its greeting.

    Raises:
        Stranger: another program listens there, or the secrets differ.
        OSError: it is gone, or says nothing in time.
    """
    try:
        told = link.told(seconds)
    except ValueError as error:
        raise Stranger("another program listens there") from error
    if not isinstance(told, dict) or told.get("whalejax") != purpose:
        raise Stranger("another program listens there")
    theirs = told.get("nonce")
    if (theirs is not None) != bool(key):
        raise Stranger(
            "one side was given a secret (WHALEJAX_KEY_FILE) and the other was not"
        )
    if not key:
        return
    mine, theirs = secrets.token_hex(16), str(theirs)
    proof = _proof(key, "came", purpose, theirs, mine)
    link.tell({"nonce": mine, "proof": proof})
    wrong = "the secrets of both sides (WHALEJAX_KEY_FILE) differ"
    try:
        told = link.told()
    except (ConnectionError, ValueError) as error:
        raise Stranger(wrong) from error
    expected = _proof(key, "received", purpose, theirs, mine)
    given = told.get("proof") if isinstance(told, dict) else None
    if not (isinstance(given, str) and _same(given, expected)):
        raise Stranger(wrong)


def _right(
    told: dict[str, Any], key: bytes, role: str, purpose: str, mine: str
) -> bool:
    theirs, given = told.get("nonce"), told.get("proof")
    if not (isinstance(theirs, str) and isinstance(given, str) and len(theirs) < 100):
        return False
    return _same(given, _proof(key, role, purpose, mine, theirs))


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _proof(key: bytes, *words: str) -> str:
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).hexdigest()


# Where one listens.


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine.

    At a loopback address alone where that is given; else at all addresses, as JAX's
    own service does, because other hosts may know this one by another.

    Raises:
        OSError: the address is not of this machine, or the port is in use.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )[0]
    # Where this process holds the port, it shares it with itself.
    option = socket.SO_REUSEPORT if is_reserved(port) else socket.SO_REUSEADDR
    with socket.socket(family, kind, proto) as tried:
        tried.setsockopt(socket.SOL_SOCKET, option, 1)
        tried.bind(address)  # whether it is of this machine
    if not is_loopback(host):
        address = ("" if family == socket.AF_INET else "::", port, *address[2:])
    found = socket.socket(family, kind, proto)
    try:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
        found.bind(address)
        found.listen(128)
    except OSError:
        found.close()
        raise
    return found
