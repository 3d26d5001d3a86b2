"""A process of a swarm that serves one stage: joins, announces itself, leaves in order.

It continues while the registry is unavailable, and joins again if that has forgotten
it. A request to leave (SIGTERM, Ctrl-C) takes effect after the step, however long that
takes, so that no other peer recomputes its results.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Final

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.deadlines import LEASE_SECONDS
from whalejax.swarm_runtime.peer_store.stage_store import Hook
from whalejax.swarm_runtime.peer_worker import Worker
from whalejax.swarm_runtime.registry import ANY, facts_of
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.wire.registration import taken_in, told_address
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
from whalejax.wire.swarm_messages import (
    Announce,
    Join,
    MovePeer,
    PeerMoved,
    StopHeard,
    StopPeer,
)


BEAT_SECONDS: Final = 1.0
JOIN_SECONDS: Final = 60.0
JOIN_ASK_SECONDS: Final = 60.0
"""Seconds in which a registry answers a joining peer, while it checks links."""

LEAVE_SECONDS: Final = 2 * LEASE_SECONDS
"""Seconds that a leaving peer waits for a registry that does not answer."""

LEAVE_BEAT_SECONDS: Final = 0.1
PATIENCE_SECONDS: Final = 3600.0
ASK_SECONDS: Final = 10.0


class Peer:
    """One peer, in its own threads.

    Attributes:
        name: Unique name for the process.
        worker: Worker of the peer.
        refused: Reason why the registry refused the latest announcement; else empty.
        over: Reason why the run has ended; empty before that.
        failed: Whether the run ended with a failure.
    """

    def __init__(
        self,
        cut: StagedJob,
        key: Key,
        registry: Address,
        *,
        stage: int = ANY,
        host: str = "127.0.0.1",
        port: int = 0,
        wire: str = "f32",
        sum_wire: str = "f32",
        pull_seconds: float = 30.0,
        beat_seconds: float = BEAT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        hook: Hook = lambda point, step: None,
    ) -> None:
        """Listens for calls; connects to no peer yet.

        Args:
            cut: Staged job.
            key: Key of the swarm.
            registry: Address of the registry.
            stage: Number of the stage to serve, or ``ANY``.
            host, port: Address on which it listens; others reach it there.
            wire: Wire format of tensors, the same for all peers.
            sum_wire: Wire format of gradients during their reduction over a stage's
                peers.
            pull_seconds: Deadline of a tensor requested from another peer.
            beat_seconds: Seconds between announcements.
            patience_seconds: Longest wait in seconds for a registry that stopped
                answering.
            hook: Function called at points of the protocol.

        Raises:
            WhaleError: This machine cannot listen at the address.
        """
        self._cut, self._registry, self._wanted = cut, registry, stage
        self._beat_seconds, self._patience_seconds = beat_seconds, patience_seconds
        self._heard_at = time.monotonic()
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self._caller = Caller(key)
        self.worker = Worker(
            cut,
            self._caller,
            self.name,
            wire=wire,
            sum_wire=sum_wire,
            pull_seconds=pull_seconds,
            hook=hook,
        )
        handlers: Handlers = {
            **self.worker.handlers,
            MovePeer: self._move,
            StopPeer: self._stop,
        }
        try:
            listening = listen(host, port)
        except OSError as error:
            raise WhaleError(
                f"host {host}, port {port}: this peer cannot listen there "
                f"({error.strerror or error}). Give an address of this machine and a "
                "free port"
            ) from error
        self._service = Service(listening, key, handlers)
        self._facts = facts_of(cut, wire, sum_wire)
        self._incarnation = 0
        self._leaving = threading.Event()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.refused = self.over = ""
        self.failed = False

    def start(self) -> None:
        """Joins, serves and announces, in a thread.

        Raises:
            WhaleError: No registry answers, or it refuses this peer.
        """
        self._join()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()  # Before compiling, which may outlast a lease.
        self.worker.serve(self._wanted)
        self._try_to_announce()

    def leave(self) -> None:
        """Requests to leave; ``wait`` returns when nobody needs this peer any more.

        It sends nothing itself, so a signal handler may call it.
        """
        self._leaving.set()
        self._wake.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the peer has left or the run has ended; returns whether it has.

        Args:
            seconds: Longest wait; None for no limit.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Leaves at once; its results are lost."""
        self._ended.set()
        self._wake.set()
        self._service.close()
        self._caller.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ASK_SECONDS)

    # Joining.

    def _join(self) -> None:
        taken_in(
            self._join_once,
            self._ended,
            who="peer",
            seconds=JOIN_SECONDS,
            again_seconds=self._beat_seconds,
        )

    def _join_once(self) -> None:
        question = Join(
            name=self.name,
            address=told_address(self._service.address, self._registry),
            stage=self._wanted,
            facts=self._facts,
        )
        answer = self._caller.ask(self._registry, question, seconds=JOIN_ASK_SECONDS)
        self._wanted = answer.stage
        self._incarnation = answer.incarnation
        self.worker.enter(answer.run)

    def _move(self, asked: MovePeer) -> PeerMoved:
        """Serves another stage; answers when its programs are compiled."""
        stage = asked.stage
        if not 0 <= stage < self._cut.stages:
            raise RefusedRequestError("stale", f"there is no stage {stage}")
        self.worker.serve(stage)
        self._wanted = stage
        self._try_to_announce()
        return PeerMoved(stage=stage)

    def _stop(self, asked: StopPeer) -> StopHeard:
        self._end(asked.why or "the run is over", asked.failed)
        return StopHeard()

    def _end(self, why: str, failed: bool) -> None:
        if not self._ended.is_set():
            self.over, self.failed = why, failed
            self._ended.set()

    # Announcing.

    def _beat(self) -> None:
        self._heard_at = time.monotonic()
        while not self._ended.is_set():
            leaving = self._leaving.is_set()
            self._wake.wait(LEAVE_BEAT_SECONDS if leaving else self._beat_seconds)
            if not leaving:
                self._wake.clear()
            if not self._ended.is_set():
                self._try_to_announce()
                self._end_if_alone()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the registry's last answer."""
        return time.monotonic() - self._heard_at

    def _end_if_alone(self) -> None:
        """Ends a peer that no registry answers, after a while."""
        leaving = self._leaving.is_set()
        most = LEAVE_SECONDS if leaving else self._patience_seconds
        silent = self.silent_seconds
        if silent > most:
            address = f"{self._registry[0]}:{self._registry[1]}"
            why = f"the registry at {address} has not answered for {silent:.0f} s"
            if leaving:
                self._end(f"left without being let go: {why}", failed=False)
            else:
                self._end(f"{why}. Start `whalejax swarm serve` again", failed=True)

    def _try_to_announce(self) -> None:
        try:
            self._announce()
        except UnreachableProcessError:
            return  # Other peers and the trainer may still need its results.
        except RefusedRequestError as error:
            self.refused = error.why
            return
        self._heard_at, self.refused = time.monotonic(), ""

    def _announce(self) -> None:
        worker = self.worker
        stage = worker.stage
        if stage is None:
            number, step = self._wanted, -1
        else:
            number, step = stage.number, worker.step
        question = Announce(
            name=self.name,
            incarnation=self._incarnation,
            stage=number,
            generation=worker.generation,
            step=step,
            queue=worker.waiting,
            done=worker.done,
            seconds=worker.seconds,
            leaving=self._leaving.is_set(),
            ready=stage is not None,
        )
        answer = self._caller.ask(self._registry, question, seconds=ASK_SECONDS)
        if answer.free:
            self._end("left", failed=False)
        elif answer.known:
            return
        elif self._leaving.is_set():
            self._end("left", failed=False)
        else:
            try:
                self._join_once()
            except RefusedRequestError as error:
                self._end(error.why, failed=True)
