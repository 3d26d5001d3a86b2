"""A process of a swarm that serves one stage: it joins, announces itself and leaves.

It continues while the registry is unavailable, and joins again if the registry has
forgotten it. A request to leave (SIGTERM, Ctrl-C) takes effect after the current step,
so that no other peer has to recompute its results.
"""

from __future__ import annotations

import threading
from typing import Final

from whalejax.swarm_runtime.peer_store.stage_store import Hook
from whalejax.swarm_runtime.peer_worker import Worker
from whalejax.swarm_runtime.registry import ANY
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.swarm_process import (
    ADMIT_SECONDS,
    ASK_SECONDS,
    PATIENCE_SECONDS,
    SwarmProcess,
    told_address,
)
from whalejax.wire import swarm_messages as messages
from whalejax.wire.keys import Key
from whalejax.wire.service import (
    Address,
    Handlers,
    RefusedRequestError,
    UnreachableProcessError,
)


BEAT_SECONDS: Final = 1.0
LEAVE_BEAT_SECONDS: Final = 0.1


class Peer(SwarmProcess):
    """One peer, in its own threads.

    Attributes:
        worker: Worker of the peer.
        refused: Reason why the registry refused the last announcement, or empty.
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
            host, port: Address on which it listens and is reached.
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
        super().__init__(
            "peer",
            cut,
            key,
            registry,
            wire=wire,
            sum_wire=sum_wire,
            patience_seconds=patience_seconds,
        )
        self._wanted, self._beat_seconds = stage, beat_seconds
        self.worker = Worker(
            cut,
            self._caller,
            self.name,
            wire=wire,
            sum_wire=sum_wire,
            pull_seconds=pull_seconds,
            hook=hook,
        )
        handlers: Handlers = {**self.worker.handlers, messages.MovePeer: self._move}
        self._listen(host, port, handlers)
        self._incarnation = 0
        self._wake = threading.Event()
        self.refused = ""

    def start(self) -> None:
        """Joins, serves and announces, in a thread.

        Raises:
            WhaleError: No registry answers, or it refuses this peer.
        """
        self._join()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()  # The compilation may take longer than a lease.
        self.worker.serve(self._wanted)
        self._try_to_announce()

    def leave(self) -> None:
        """Requests to leave after the step; see ``SwarmProcess``."""
        super().leave()
        self._wake.set()

    def close(self) -> None:
        """Leaves immediately; the peer's results are lost."""
        self._ended.set()
        self._wake.set()
        super().close()

    # Joining.

    def _join(self) -> None:
        self._ask_admission(self._join_once, self._beat_seconds)

    def _join_once(self) -> None:
        # After a change of network, another local address reaches the registry.
        self._address = told_address(self._service.address, self._registry)
        question = messages.Join(
            name=self.name,
            address=self._address,
            stage=self._wanted,
            facts=self._facts,
        )
        answer = self._caller.ask(self._registry, question, seconds=ADMIT_SECONDS)
        self._wanted = answer.stage
        self._incarnation = answer.incarnation
        self.worker.enter(answer.run)

    def _move(self, asked: messages.MovePeer) -> messages.PeerMoved:
        """Serves another stage; answers once the stage's programs are compiled."""
        stage = asked.stage
        if not 0 <= stage < self._cut.stages:
            raise RefusedRequestError("stale", f"there is no stage {stage}")
        self.worker.serve(stage)
        self._wanted = stage
        self._try_to_announce()
        return messages.PeerMoved(stage=stage)

    # Announcing.

    def _beat(self) -> None:
        self._hears()
        while not self._ended.is_set():
            leaving = self._leaving.is_set()
            self._wake.wait(LEAVE_BEAT_SECONDS if leaving else self._beat_seconds)
            if not leaving:
                self._wake.clear()
            if not self._ended.is_set():
                self._try_to_announce()
                self._end_if_alone()

    def _try_to_announce(self) -> None:
        try:
            self._announce()
        except UnreachableProcessError:
            return  # Other peers and the trainer may still need this peer's results.
        except RefusedRequestError as error:
            self.refused = error.why
            return
        self._hears()
        self.refused = ""

    def _announce(self) -> None:
        worker = self.worker
        stage = worker.stage
        if stage is None:
            number, step = self._wanted, -1
        else:
            number, step = stage.number, worker.step
        question = messages.Announce(
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
            self._end("left")
        elif answer.known:
            return
        elif self._leaving.is_set():
            self._end("left")
        else:
            try:
                self._join_once()
            except RefusedRequestError as error:
                self._end(error.why, failed=True)
