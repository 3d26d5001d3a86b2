"""Admission of a process to a swarm by its registry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from whalejax.distributed.launch_env import ALL_ADDRESSES, joined_address
from whalejax.elastic.environment import local_host
from whalejax.meshes.errors import WhaleError
from whalejax.wire.service import Address, RefusedRequestError, UnreachableProcessError


def told_address(listens: Address, registry: Address) -> Address:
    """Returns the address at which others reach a process of a swarm.

    Args:
        listens: Address on which it listens; for the wildcard address, the result is
            the address from which the process reaches the registry.
        registry: Address of the registry.
    """
    host, port = listens
    if host in ALL_ADDRESSES:
        host = local_host(joined_address(*registry))
    return host, port


def taken_in(
    once: Callable[[], None],
    ended: threading.Event,
    *,
    who: str,
    seconds: float,
    again_seconds: float,
) -> None:
    """Asks a registry to admit a process; retries if none answers.

    Args:
        once: Function that asks once.
        ended: Event of the process's end, after which it asks no more.
        who: Kind of process, for errors: ``"peer"`` or ``"trainer"``.
        seconds: Seconds after which it gives up.
        again_seconds: Seconds between two tries.

    Raises:
        WhaleError: No registry admitted it, or one refused it.
    """
    until = time.monotonic() + seconds
    while not ended.is_set():
        try:
            once()
            return
        except RefusedRequestError as error:
            raise WhaleError(error.why) from None
        except UnreachableProcessError as error:
            if error.hopeless:
                raise WhaleError(
                    f"the registry did not take this {who} in: {error}. Give the "
                    "address that `whalejax swarm serve` says it listens at, and a "
                    "copy of its key file with --key"
                ) from None
            if time.monotonic() > until:
                raise WhaleError(
                    f"no registry took this {who} in within {seconds:.0f} s: {error}. "
                    "Give the address that `whalejax swarm serve` says it listens at, "
                    "and its key file"
                ) from None
        ended.wait(again_seconds)
