"""What a process that ``whalejax launch`` started knows, and says of itself.

Apart from the launcher, because this is what the processes need of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final


COORDINATOR: Final = "WHALEJAX_COORDINATOR"
NUM_PROCESSES: Final = "WHALEJAX_NUM_PROCESSES"
PROCESS_ID: Final = "WHALEJAX_PROCESS_ID"

PORT: Final = 8476
"""Where process 0 listens, if it runs on another host and no port was given."""

MARK: Final = "whalejax-rank "
"""Begins the line in which a process says what it has; the launcher takes it out."""

ENDS_FOR_ANOTHER: Final = 70
"""Status of a process that ends because of another one."""


def launched(
    environment: Mapping[str, str] = os.environ,
) -> tuple[str, int, int] | None:
    """Coordinator, number of processes and rank, if a launcher gave them.

    >>> launched({})
    >>> launched({COORDINATOR: "a:1", NUM_PROCESSES: "2", PROCESS_ID: "0"})
    ('a:1', 2, 0)
    """
    if not {COORDINATOR, NUM_PROCESSES, PROCESS_ID} <= environment.keys():
        return None
    return (
        environment[COORDINATOR],
        int(environment[NUM_PROCESSES]),
        int(environment[PROCESS_ID]),
    )


def introduce(kind: str, devices: int) -> None:
    """Tell the launcher, if there is one, what this process computes on.

    Args:
        kind: of its devices, as JAX names it.
        devices: how many it has.
    """
    if launched() is not None:
        said = json.dumps({"kind": kind, "devices": devices})
        print(f"{MARK}{said}", flush=True)


def blame(rank: int, why: str) -> None:
    """Tell the launcher, if there is one, because of whom this process ends.

    Args:
        rank: the other one.
        why: words that follow its name.
    """
    if launched() is not None:
        print(f"{MARK}{json.dumps({'blames': rank, 'why': why})}", flush=True)
