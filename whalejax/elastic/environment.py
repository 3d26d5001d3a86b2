"""Environment variables of an elastic run's processes."""

from __future__ import annotations

import os
import signal
import socket
from typing import Final

from whalejax.distributed.launch_env import split_address


SUPERVISOR: Final = "WHALEJAX_SUPERVISOR"
"""Host and port of the supervisor."""

RUN: Final = "WHALEJAX_RUN"
"""The supervisor's name for the run, unique among the runs of its folder."""

AT_ONCE: Final = signal.SIGQUIT
"""Signal by which a launcher asks its supervisor to end all processes immediately."""

SUPERVISOR_SECONDS: Final = 120.0
"""Default seconds for which a process waits for a lost supervisor to return."""

HELD_BY: Final = "WHALEJAX_AGENT"
"""Name of the agent that started the process."""

MEMBER_HOST: Final = "WHALEJAX_MEMBER_HOST"
"""Address at which other members reach the process; set only by agents with --host."""


def local_host(address: str) -> str:
    """Returns the address of this host at which other members reach this process.

    It is ``MEMBER_HOST`` if set. Otherwise it is the local address of a connection to
    the supervisor at ``address``.

    >>> local_host("127.0.0.1:1")
    '127.0.0.1'
    """
    if given := os.environ.get(MEMBER_HOST):
        return given
    host, port = split_address(address, "supervisor")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # Nothing is sent.
        result: str = probe.getsockname()[0]
        return result
