"""A port that is held from when others are told of it until they have ended.

A port that was found free and let go can be another program's before it is listened at.
One that is held by a socket which does not listen stays: the kernel gives it to nobody
else, and lets sockets of the same user listen there that say ``SO_REUSEPORT``, as the
coordination service of JAX does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final


HELD_PORT: Final = "WHALEJAX_HELD_PORT"
"""Tells a process which port its launcher holds, so that it may listen there."""

_held: Final[dict[int, int]] = {}
"""Ports to the descriptors of their sockets, which end with the process alone."""


def reserve_port(host: str, port: int = 0) -> int:
    """A port of an address of this machine, held until it is let go.

    Args:
        host: The address.
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
    """Lets a port go that this process holds; nothing where it holds none."""
    opened = _held.pop(port, None)
    if opened is not None:
        with contextlib.suppress(OSError):
            os.close(opened)


def is_held(port: int) -> bool:
    """Whether this process itself holds a port."""
    return port in _held


def is_reserved(port: int) -> bool:
    """Whether this process holds a port, or the one that started it does for it."""
    return is_held(port) or os.environ.get(HELD_PORT) == str(port)
