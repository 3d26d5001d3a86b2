"""Environment variables of an elastic run's processes.

They name the supervisor's address, the run, and the agent if one started the process.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Final

from whalejax.distributed.launch_env import split_address


SUPERVISOR: Final = "WHALEJAX_SUPERVISOR"
"""Address of the supervisor, which sends a member everything else."""

RUN: Final = "WHALEJAX_RUN"
"""The supervisor's name for the run, unique among the runs of its folder."""

AT_ONCE: Final = signal.SIGQUIT
"""Signal by which a launcher tells its supervisor to end all processes at once."""

SUPERVISOR_SECONDS: Final = 120.0
"""Seconds after which a lost supervisor is given up."""

HELD_BY: Final = "WHALEJAX_AGENT"
"""Name of the agent that started the process."""

MEMBER_HOST: Final = "WHALEJAX_MEMBER_HOST"
"""Address at which other members reach the process; set if its agent was given one."""


def local_host(address: str) -> str:
    """Returns the address of this host at which other members reach this process.

    This is the local address of connections to the supervisor, unless ``MEMBER_HOST``
    gives another.

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
