"""Environment variables of an elastic run's processes: one address and a key file.

One that an agent started is told who that is, too.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Final

from whalejax.distributed.launch_env import split_address


SUPERVISOR: Final = "WHALEJAX_SUPERVISOR"
"""Where a member finds the supervisor, which tells it everything else."""

RUN: Final = "WHALEJAX_RUN"
"""What the supervisor calls the run, unlike earlier ones of its folder."""

AT_ONCE: Final = signal.SIGQUIT
"""By which a launcher tells its supervisor to end all processes, whatever they do."""

SUPERVISOR_SECONDS: Final = 120.0
"""A supervisor that is gone for so long does not come back."""

HELD_BY: Final = "WHALEJAX_AGENT"
"""Name of the agent that started it."""

MEMBER_HOST: Final = "WHALEJAX_MEMBER_HOST"
"""Address at which other members reach it, where its agent was given one."""


def local_host(address: str) -> str:
    """The address of this host at which others reach what runs here.

    That from which it reaches the supervisor, unless its agent was given another.

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
