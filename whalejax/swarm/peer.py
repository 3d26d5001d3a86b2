"""A process of a swarm that serves one stage: joins, announces itself, leaves in order.

It goes on while the registry is away, and joins again where that has forgotten it. Who
asks it to leave (SIGTERM, Ctrl-C) waits until the step is over, so that nobody computes
again what it holds.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Final

from whalejax.elastic.wire.connection import listen
from whalejax.elastic.wire.framing import Message
from whalejax.meshes.errors import WhaleError
from whalejax.swarm.cut import Cut
from whalejax.swarm.registry import ANY
from whalejax.swarm.wire.messages import TO_PEER
from whalejax.swarm.wire.service import Address, Caller, Gone, Refused, Service
from whalejax.swarm.worker import Hook, Worker


BEAT_SECONDS: Final = 1.0
JOIN_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 60.0
ASK_SECONDS: Final = 10.0


class Peer:
    """One peer, in threads of its own.

    Attributes:
        name: unique for the process.
        worker: what computes.
        refused: why the registry will not have it; empty otherwise.
        over: why the run has ended; empty while it goes on.
    """

    def __init__(
        self,
        cut: Cut,
        key: bytes,
        registry: Address,
        *,
        stage: int = ANY,
        host: str = "127.0.0.1",
        port: int = 0,
        wire: str = "f32",
        pull_seconds: float = 30.0,
        beat_seconds: float = BEAT_SECONDS,
        hook: Hook = lambda point, step: None,
    ) -> None:
        """Listen, and connect to nobody yet.

        Args:
            cut: of the job.
            key: of the swarm.
            registry: its address.
            stage: to serve, or ``ANY``.
            host, port: where to listen; others reach it there.
            wire: as all peers send tensors.
            pull_seconds: deadline of a tensor that another peer is asked for.
            beat_seconds: between announcements.
            hook: called at points of the protocol.
        """
        self._cut, self._registry, self._wanted = cut, registry, stage
        self._beat_seconds = beat_seconds
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self._caller = Caller(key)
        self.worker = Worker(
            cut,
            self._caller,
            self.name,
            wire=wire,
            pull_seconds=pull_seconds,
            hook=hook,
        )
        handlers = {**self.worker.handlers, "move": self._move, "stop": self._stop}
        try:
            listening = listen(host, port)
        except OSError as error:
            raise WhaleError(
                f"host {host}, port {port}: this peer cannot listen there "
                f"({error.strerror or error}). Give an address of this machine and a "
                "free port"
            ) from error
        self._service = Service(listening, key, TO_PEER, handlers)
        self._facts = {**cut.facts(), "wire": wire, "stages": str(cut.stages)}
        self._incarnation = 0
        self._leaving = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.refused = self.over = ""

    def start(self) -> None:
        """Join, serve and announce, in a thread.

        Raises:
            WhaleError: no registry answers, or it refuses this peer.
        """
        self._join(time.monotonic() + JOIN_SECONDS)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()  # Before compiling, which may take longer than a lease.
        self.worker.serve(self._wanted)
        self._try_to_announce()

    def leave(self) -> None:
        """Ask to go; ``wait`` returns when nobody needs this peer any more."""
        self._leaving.set()
        self._try_to_announce()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the peer has left or the run is over; whether it is so.

        Args:
            seconds: at most; for ever if None.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Go at once; what it holds is lost."""
        self._ended.set()
        self._service.close()
        self._caller.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ASK_SECONDS)

    # Joining.

    def _join(self, until: float) -> None:
        fields = {
            "name": self.name,
            "address": list(self._service.address),
            "stage": self._wanted,
            "facts": self._facts,
            "token": "",
        }
        while True:
            try:
                answer = self._caller.ask(
                    self._registry, "join", fields, seconds=ASK_SECONDS
                )
                break
            except Refused as error:
                raise WhaleError(error.why) from None
            except Gone as error:
                if "key" in str(error) or time.monotonic() > until:
                    raise WhaleError(
                        f"no registry took this peer in within {JOIN_SECONDS:.0f} s: "
                        f"{error}. Give the address that `whalejax swarm serve` says "
                        "it listens at, and its key file"
                    ) from None
            if self._ended.wait(self._beat_seconds):
                return
        self._wanted, self._incarnation = (
            answer.fields["stage"],
            answer.fields["incarnation"],
        )

    def _move(self, asked: Message) -> Message:
        """Serve another stage; answered when its programs are compiled."""
        stage = asked.fields["stage"]
        if not 0 <= stage < self._cut.stages:
            raise Refused("stale", f"there is no stage {stage}")
        self.worker.serve(stage)
        self._wanted = stage
        self._try_to_announce()
        return Message(kind="moved", fields={"stage": stage})

    def _stop(self, asked: Message) -> Message:
        self.over = asked.fields["why"] or "the run is over"
        self._ended.set()
        return Message(kind="stopped", fields={})

    # Announcing.

    def _beat(self) -> None:
        asked_at: float | None = None
        while not self._ended.wait(self._beat_seconds if asked_at is None else 0.1):
            if self._leaving.is_set() and asked_at is None:
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() > asked_at + LEAVE_SECONDS:
                self.over = "left without being let go"
                self._ended.set()
                return
            self._try_to_announce()

    def _try_to_announce(self) -> None:
        try:
            self._announce()
        except Gone:
            return  # Mates and the trainer may still need what it holds.
        except Refused as error:
            self.refused = error.why
        except WhaleError as error:
            self.refused = str(error)
            self._ended.set()

    def _announce(self) -> None:
        worker = self.worker
        stage = worker.stage
        if stage is None:
            number, step = self._wanted, -1
        else:
            number, step = stage.number, worker.step
        fields = {
            "name": self.name,
            "incarnation": self._incarnation,
            "stage": number,
            "generation": worker.generation,
            "step": step,
            "queue": worker.waiting,
            "done": worker.done,
            "seconds": worker.seconds,
            "leaving": self._leaving.is_set(),
            "ready": stage is not None,
        }
        answer = self._caller.ask(
            self._registry, "announce", fields, seconds=ASK_SECONDS
        )
        if answer.fields.get("free"):
            self.over = "left"
            self._ended.set()
        elif not answer.fields.get("known") and not self._leaving.is_set():
            self._join(time.monotonic() + JOIN_SECONDS)
        elif not answer.fields.get("known"):
            self.over = "left"
            self._ended.set()
