"""A process of a swarm that serves one stage: joins, announces itself, leaves in order.

It goes on while the registry is away, and joins again where that has forgotten it. Who
asks it to leave (SIGTERM, Ctrl-C) waits until the step is over, however long it takes,
so that nobody computes again what it holds.
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
"""In which a registry answers a newcomer; it asks others meanwhile."""

LEAVE_SECONDS: Final = 2 * LEASE_SECONDS
"""A peer that leaves waits for a registry that does not answer for so long."""

LEAVE_BEAT_SECONDS: Final = 0.1
PATIENCE_SECONDS: Final = 3600.0
ASK_SECONDS: Final = 10.0


class Peer:
    """One peer, in threads of its own.

    Attributes:
        name: Unique for the process.
        worker: Worker that computes.
        refused: Reason why the registry refused its newest announcement; empty
            otherwise.
        over: Reason why the run has ended; empty while it goes on.
        failed: Whether the run ended by a failure.
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
            registry: Its address.
            stage: Number of the stage to serve, or ``ANY``.
            host, port: Address to listen at; others reach it there.
            wire: Wire format of tensors, the same for all peers.
            sum_wire: Wire format of gradients that stage peers send while they sum
                them.
            pull_seconds: Deadline of a tensor that another peer is asked for.
            beat_seconds: Between announcements.
            patience_seconds: Longest wait in seconds for a registry that does not
                answer any more.
            hook: Called at points of the protocol.
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
        """Join, serve and announce, in a thread.

        Raises:
            WhaleError: No registry answers, or it refuses this peer.
        """
        self._join()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()  # Before compiling, which may take longer than a lease.
        self.worker.serve(self._wanted)
        self._try_to_announce()

    def leave(self) -> None:
        """Asks to go; ``wait`` returns when nobody needs this peer any more.

        Asks nobody itself, so that a handler of signals may call it.
        """
        self._leaving.set()
        self._wake.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the peer has left or the run is over; whether it is so.

        Args:
            seconds: Longest wait; for ever if None.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Goes at once; what it holds is lost."""
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
        """Serves another stage; answered when its programs are compiled."""
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
        """Seconds since the registry last answered."""
        return time.monotonic() - self._heard_at

    def _end_if_alone(self) -> None:
        """A peer that no registry answers goes after a while."""
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
            return  # Mates and the trainer may still need what it holds.
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
