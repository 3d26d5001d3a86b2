"""The admission and the end of a process that joins a swarm.

``Peer`` and ``SecondaryTrainer`` are such processes.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from whalejax.distributed.launch_env import ALL_ADDRESSES
from whalejax.elastic.environment import local_host
from whalejax.meshes.errors import WhaleError
from whalejax.swarm.deadlines import LEASE_SECONDS
from whalejax.swarm_runtime.registry import facts_of
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import listen
from whalejax.wire.keys import Key
from whalejax.wire.service import (
    Address,
    Caller,
    Handlers,
    RefusedRequestError,
    Service,
    UnreachableProcessError,
)
from whalejax.wire.swarm_messages import StopHeard, StopPeer


ADMIT_SECONDS: Final = 60.0
"""Seconds in which a registry must admit a process, including a check of its links."""

LEAVE_SECONDS: Final = 2 * LEASE_SECONDS
"""Seconds for which a leaving process waits for a registry that does not answer."""

PATIENCE_SECONDS: Final = 3600.0
ASK_SECONDS: Final = 10.0


class SwarmProcess:
    """A process that a registry admits.

    Attributes:
        name: Unique name for the process.
        over: Reason why it has ended; empty before that.
        failed: Whether it ended with a failure.
    """

    def __init__(
        self,
        kind: str,
        cut: StagedJob,
        key: Key,
        registry: Address,
        *,
        wire: str,
        sum_wire: str,
        patience_seconds: float,
    ) -> None:
        """Prepares the process; it does not listen yet.

        Args:
            kind: Kind of process, for errors: ``"peer"`` or ``"trainer"``.
            cut: Staged job.
            key: Key of the swarm.
            registry: Address of the registry.
            wire, sum_wire: Wire formats of tensors and of gradient sums, the same in
                all processes.
            patience_seconds: Longest wait in seconds for a registry that stopped
                answering.
        """
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self._kind, self._cut, self._key, self._registry = kind, cut, key, registry
        self._facts = facts_of(cut, wire, sum_wire)
        self._patience_seconds = patience_seconds
        self._caller = Caller(key)
        self._leaving, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._heard_at = time.monotonic()
        self.over, self.failed = "", False

    def _listen(self, host: str, port: int, handlers: Handlers) -> None:
        listening = open_listener(f"this {self._kind}", host, port)
        handlers = {**handlers, StopPeer: self._on_stop}
        self._service = Service(listening, self._key, handlers)
        self._address = told_address(self._service.address, self._registry)

    def _ask_admission(self, once: Callable[[], None], again_seconds: float) -> None:
        """Calls ``once``, which asks for admission, until the registry answers.

        Raises:
            WhaleError: No registry answered in time, or it refused this process.
        """
        until = time.monotonic() + ADMIT_SECONDS
        while not self._ended.is_set():
            try:
                once()
                return
            except RefusedRequestError as error:
                raise WhaleError(error.why) from None
            except UnreachableProcessError as error:
                if error.hopeless:
                    raise WhaleError(
                        f"the registry did not take this {self._kind} in: {error}. "
                        "Give the address that `whalejax swarm serve` says it listens "
                        "at, and a copy of its key file with --key"
                    ) from None
                if time.monotonic() > until:
                    raise WhaleError(
                        f"no registry took this {self._kind} in within "
                        f"{ADMIT_SECONDS:.0f} s: {error}. Give the address that "
                        "`whalejax swarm serve` says it listens at, and its key file"
                    ) from None
            self._ended.wait(again_seconds)

    def leave(self) -> None:
        """Requests to leave; ``wait`` returns when this process is no longer needed.

        It sends no message itself, so a signal handler may call it.
        """
        self._leaving.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until this process has left or the run has ended; returns whether so.

        Args:
            seconds: Longest wait; None for no limit.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Leaves immediately; other processes repeat its work."""
        self._ended.set()
        self._service.close()
        self._caller.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ASK_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the registry's last answer."""
        return time.monotonic() - self._heard_at

    def _end(self, why: str, *, failed: bool = False) -> None:
        if not self._ended.is_set():
            self.over, self.failed = why, failed
            self._ended.set()

    def _hears(self) -> None:
        self._heard_at = time.monotonic()

    def _end_if_alone(self) -> None:
        """Ends this process if the registry has not answered for too long."""
        silent, is_leaving = self.silent_seconds, self._leaving.is_set()
        if silent <= (LEAVE_SECONDS if is_leaving else self._patience_seconds):
            return
        address = joined_address(*self._registry)
        why = f"the registry at {address} has not answered for {silent:.0f} s"
        if is_leaving:
            self._end(f"left without being let go: {why}")
        else:
            self._end(f"{why}. Start `whalejax swarm serve` again", failed=True)

    def _on_stop(self, asked: StopPeer) -> StopHeard:
        self._end(asked.why or "the run is over", failed=asked.failed)
        return StopHeard()


def told_address(listens: Address, registry: Address) -> Address:
    """Returns the address at which others reach a process of a swarm.

    Args:
        listens: Address on which the process listens. For a wildcard address, the
            result is the local address of a connection to the registry.
        registry: Address of the registry.
    """
    host, port = listens
    if host in ALL_ADDRESSES:
        host = local_host(joined_address(*registry))
    return host, port


def open_listener(who: str, host: str, port: int) -> socket.socket:
    """Returns a listening socket for a process of a swarm.

    Args:
        who: Name of the process, for errors.
        host, port: Address on which to listen; port 0 chooses a free one.

    Raises:
        WhaleError: The address is not available.
    """
    try:
        return listen(host, port)
    except OSError as error:
        raise WhaleError(
            f"host {host}, port {port}: {who} cannot listen there "
            f"({error.strerror or error}). Give an address of this machine and a free "
            "port"
        ) from error
