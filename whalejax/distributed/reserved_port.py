"""Reserves a port from its announcement until the processes have ended.

If a free port is found and released, another program can take it before a process
listens at it. So a socket that does not listen keeps the port. The kernel then gives it
to no other program, but lets sockets of the same user with ``SO_REUSEPORT`` listen
there, as JAX's coordination service does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final


HELD_PORT: Final = "WHALEJAX_HELD_PORT"
"""Environment variable with the port that the launcher has reserved for a process."""

_held: Final[dict[int, int]] = {}
"""Sockets of reserved ports by port, open until ``release_port`` or the end."""


def reserve_port(host: str, port: int = 0) -> int:
    """Reserves a port of a local address until it is released.

    Args:
        host: Local address.
        port: Number of the port; 0 chooses a free one.

    Raises:
        OSError: The address is not local, no port is free, or ``port`` is in use.

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
    """Releases a port, if this process has reserved it."""
    opened = _held.pop(port, None)
    if opened is not None:
        with contextlib.suppress(OSError):
            os.close(opened)


def is_held(port: int) -> bool:
    """Returns whether this process itself has reserved a port."""
    return port in _held


def is_reserved(port: int) -> bool:
    """Returns whether this process or its launcher has reserved a port."""
    return is_held(port) or os.environ.get(HELD_PORT) == str(port)
