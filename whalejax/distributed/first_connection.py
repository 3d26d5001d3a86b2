"""Connects processes that know one address.

One process listens at the address, and the others try to connect until it does. Either
all have the same key, or none has a key. Without a key, messages are not encrypted, and
any process that reaches the address can take part.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from whalejax.distributed.launch_env import KEY_FILE, is_loopback, split_address
from whalejax.distributed.reserved_port import is_reserved
from whalejax.meshes.errors import WhaleError
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import BACKLOG, Channel, ConnectionClosedError, dial
from whalejax.wire.keys import Key, load_key


_PAUSE_SECONDS: Final = 0.1
_OLD_KEY: Final = "WHALEJAX_KEY"


def shared_key(environment: Mapping[str, str] = os.environ) -> Key | None:
    """Loads the key that the processes of this run share; None without one.

    Raises:
        WhaleError: The key cannot be loaded, or the obsolete ``WHALEJAX_KEY`` is set
            instead.

    >>> shared_key({})
    """
    name = environment.get(KEY_FILE)
    if not name and environment.get(_OLD_KEY):
        raise WhaleError(
            f"{_OLD_KEY} is set, the secret of a whalejax that signed its messages. "
            f"Make a key, python -m whalejax.wire.keys new FILE, copy it to every "
            f"host, name it in {KEY_FILE}, and unset {_OLD_KEY}"
        )
    if not name:
        return None
    try:
        return load_key(Path(name))
    except WhaleError as error:
        raise WhaleError(
            f"{KEY_FILE}: {error}. Or unset it, or make a key for all hosts: python -m "
            "whalejax.wire.keys new FILE"
        ) from error


def listen_at(coordinator: str, parameter: str = "coordinator") -> socket.socket:
    """Returns a listening socket at the address where all processes connect.

    For a loopback address, the socket listens only at that address. For another one it
    listens at all addresses, as JAX's own service does, because other hosts may know
    this host by another address.

    Args:
        coordinator: ``"host:port"``.
        parameter: Name of the argument, for errors.

    Raises:
        WhaleError: No host has this name.
        OSError: The address belongs to another machine, or the port is in use.
    """
    host, port = split_address(coordinator, parameter)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as error:
        raise WhaleError(
            f"{parameter} is {joined_address(host, port)!r}: {host} has no address "
            f"here ({error.strerror}). Give an address of the machine of process 0"
        ) from error
    # This process or its launcher may have reserved the port, which can be shared.
    option = socket.SO_REUSEPORT if is_reserved(port) else socket.SO_REUSEADDR
    with socket.socket(family, kind, proto) as tried:
        tried.setsockopt(socket.SOL_SOCKET, option, 1)
        tried.bind(address)  # raises if it belongs to another machine
    if not is_loopback(host):
        address = ("" if family == socket.AF_INET else "::", port, *address[2:])
    listen = socket.socket(family, kind, proto)
    try:
        listen.setsockopt(socket.SOL_SOCKET, option, 1)
        listen.bind(address)
        listen.listen(BACKLOG)
    except OSError:
        listen.close()
        raise
    return listen


def reach(coordinator: str, key: Key | None, end: float) -> Channel:
    """Connects to the listening process as soon as it listens.

    Args:
        coordinator: ``"host:port"``.
        key: Key of this process.
        end: Deadline, by ``time.monotonic``.

    Raises:
        ConnectionClosedError: No process listened there.
        WireTimeoutError: The process that listens there does not answer.
        WrongKey, OtherProtocol: That process does not belong to this run.
    """
    address = split_address(coordinator, "coordinator")
    why = "nothing was tried"
    while (left := end - time.monotonic()) > 0:
        try:
            return dial(address, key, seconds=left)
        except ConnectionClosedError as error:
            # The process does not listen yet, or is shutting down.
            why = str(error)
            time.sleep(min(_PAUSE_SECONDS, max(left, 0.0)))
    raise ConnectionClosedError(why)
