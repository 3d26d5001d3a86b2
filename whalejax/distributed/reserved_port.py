"""A port that is held from its announcement until the processes have ended.

Another program can take a port that was found free and released before a process
listens at it. A port that is held by a non-listening socket stays: the kernel gives it
to no other program, and lets sockets of the same user with ``SO_REUSEPORT`` listen
there, as JAX's coordination service does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final


HELD_PORT: Final = "WHALEJAX_HELD_PORT"
"""Variable with the port that the launcher holds, at which a process may listen."""

_held: Final[dict[int, int]] = {}
"""Descriptors of the sockets by port; they stay open until the process ends."""


def reserve_port(host: str, port: int = 0) -> int:
    """Reserves a port of a local address until it is released.

    Args:
        host: Local address.
        port: Number of the port; a free one if 0.

    Raises:
        OSError: The address is not of this machine, no port is free, or the one that
            was asked for is in use.

    >>> is_reserved(reserve_port("127.0.0.1"))
    True
    """
    result = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        result.bind((host, port))
    except OSError:
        result.close()
        raise
    held: int = result.getsockname()[1]
    _held[held] = result.detach()
    return held


def release_port(port: int) -> None:
    """Releases a port, if this process holds it."""
    opened = _held.pop(port, None)
    if opened is not None:
        with contextlib.suppress(OSError):
            os.close(opened)


def is_held(port: int) -> bool:
    """Returns whether this process itself holds a port."""
    return port in _held


def is_reserved(port: int) -> bool:
    """Returns whether this process, or its launcher for it, holds a port."""
    return is_held(port) or os.environ.get(HELD_PORT) == str(port)
