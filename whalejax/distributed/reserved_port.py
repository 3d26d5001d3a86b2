"""A port that this process holds from when it tells others of it until it ends.

A port that was found free and let go can be another program's before it is listened at.
One that is held by a socket which does not listen stays: the kernel gives it to nobody
else, and lets sockets of the same user listen there that say ``SO_REUSEPORT``, as the
coordination service of JAX does.
"""

from __future__ import annotations

import socket
from typing import Final


_held: Final[dict[int, int]] = {}
"""Ports to the descriptors of their sockets, which end with the process alone."""


def reserve_port(host: str) -> int:
    """A free port of an address of this machine, held until the process ends.

    Args:
        host: the address.

    Raises:
        OSError: the address is not of this machine, or no port is free.

    >>> is_reserved(reserve_port("127.0.0.1"))
    True
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((host, 0))
    except OSError:
        found.close()
        raise
    port: int = found.getsockname()[1]
    _held[port] = found.detach()
    return port


def is_reserved(port: int) -> bool:
    """Whether this process holds a port."""
    return port in _held
