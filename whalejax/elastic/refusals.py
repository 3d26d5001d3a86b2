"""Reports errors in a process's arguments to the supervisor, before the process joins.

Every process gets the same arguments, and would fail in the same way after a restart.
So the supervisor ends the run at such a report.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.elastic.environment import SUPERVISOR
from whalejax.elastic.supervisor_client import NoSupervisorError, key_of_run
from whalejax.meshes.errors import WhaleError
from whalejax.processes.local_processes import machine
from whalejax.wire.connection import dial
from whalejax.wire.messages import WireError
from whalejax.wire.run_messages import TO_MEMBER, Refusal


_SECONDS: Final = 10.0
_LONGEST: Final = 5000


@contextlib.contextmanager
def reported_refusals() -> Iterator[None]:
    """Reports an error within the block to this process's supervisor, if it has one.

    Raises:
        WhaleError: The error of the block.
    """
    try:
        yield
    except NoSupervisorError:
        raise
    except WhaleError as error:
        address = os.environ.get(SUPERVISOR)
        if address is not None:
            # If the report is lost, the supervisor restarts the process.
            with contextlib.suppress(WhaleError, WireError):
                _report(address, os.environ.get(KEY_FILE, ""), str(error))
        raise


def _report(address: str, key_file: str, why: str) -> None:
    key = key_of_run(key_file, address)
    channel = dial(split_address(address, "supervisor"), key, seconds=_SECONDS)
    refusal = Refusal(machine=machine(), pid=os.getpid(), why=why[:_LONGEST])
    try:
        channel.send(refusal)
        channel.receive(TO_MEMBER, seconds=_SECONDS)
    finally:
        channel.close()
