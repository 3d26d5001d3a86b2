"""A secondary trainer of a run: leads micro-batches leased by the primary one.

It loads the batches that it leads and gives them to the peers, has its own wiring for
each stage, and reports to the primary trainer which peers have the results. Only the
primary trainer ends steps and writes checkpoints.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.ledger import Ledger
from whalejax.swarm_runtime.micro_batch_route import (
    Counts,
    MicroBatchRoute,
    StageLost,
    StepContext,
    StopRequested,
)
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.registry import PeerRecord, facts_of
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.micro_batch_queue import MicroBatchLease
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
    Batch,
    EnlistTrainer,
    GivenShare,
    Led,
    Ping,
    Pong,
    ServingPeers,
    StopHeard,
    StopPeer,
    Take,
    Tensors,
)


ASK_SECONDS: Final = 10.0
ENLIST_SECONDS: Final = 60.0
PATIENCE_SECONDS: Final = 3600.0
_BEAT_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 256
_MOST_WORDS: Final = 2000

At = tuple[str, int, int]


class _ReportedPeers:
    def __init__(self) -> None:
        self._members: list[PeerRecord] = []

    def members(self, now: float) -> list[PeerRecord]:
        """Returns the peers with valid leases."""
        return [m for m in self._members if m.expires > now]

    def take(self, peers: ServingPeers) -> None:
        """Takes over the peers of an answer."""
        self._members = [
            PeerRecord(
                name=name,
                address=(address[0], address[1]),
                stage=stage,
                incarnation=incarnation,
                queue=queue,
                expires=expires,
                ready=True,
            )
            for name, address, stage, incarnation, queue, expires in peers
        ]


class SecondaryTrainer:
    """A trainer without the registry, in its own threads.

    Attributes:
        name: Unique name for the process.
        led: Number of micro-batches that it led and that count.
        over: Reason why it has ended; empty before that.
        failed: Whether it ended with a failure.
    """

    def __init__(
        self,
        cut: StagedJob,
        key: Key,
        registry: Address,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        wire: str = "f32",
        sum_wire: str = "f32",
        call_seconds: float = 30.0,
        patience_seconds: float = PATIENCE_SECONDS,
        tell: Callable[..., None] = lambda kind, **more: None,
    ) -> None:
        """Listens for calls; connects to no peer yet.

        Args:
            cut: Staged job.
            key: Key of the swarm.
            registry: Address of the registry.
            host, port: Address on which it listens; peers get micro-batches there.
            wire, sum_wire: Wire formats of tensors and of gradient sums, the same in
                all processes.
            call_seconds: Deadline of a call.
            patience_seconds: Longest wait in seconds for a registry that stopped
                answering.
            tell: Function that reports events as text.

        Raises:
            WhaleError: The address cannot be listened on.
        """
        self.name = f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
        self._cut, self._registry, self._tell = cut, registry, tell
        self._call_seconds = call_seconds
        self._patience_seconds = patience_seconds
        self._facts = facts_of(cut, wire, sum_wire)
        self._sum_wire = sum_wire
        self._caller = Caller(key)
        self._told, self._clock_ahead = _ReportedPeers(), 0.0
        self._fleet = self._new_fleet()
        self.counts = Counts()
        self._at: At = ("", -1, -1)
        self._stop = threading.Event()
        self._leads: dict[tuple[At, int, int], None] = {}
        self._lock, self._data = threading.RLock(), threading.Lock()
        self._leaving, self._ended = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE)
        self._thread: threading.Thread | None = None
        self._heard_at = time.monotonic()
        self.led, self.over, self.failed = 0, "", False
        handlers: Handlers = {
            Ping: lambda _: Pong(name=self.name),
            Batch: self._give_batch,
            StopPeer: self._on_stop,
        }
        try:
            listening = listen(host, port)
        except OSError as error:
            raise WhaleError(
                f"host {host}, port {port}: this trainer cannot listen there "
                f"({error.strerror or error}). Give an address of this machine and a "
                "free port"
            ) from error
        self._service = Service(listening, key, handlers)
        self._address = told_address(self._service.address, registry)

    def _new_fleet(self) -> Fleet:
        """Returns a fleet without measurements, with the registry's clock."""
        ahead = self._clock_ahead
        return Fleet(
            self._told,
            self._cut.stages,
            seed=secrets.randbelow(1 << 30),  # Trainers should not make equal choices.
            clock=lambda: time.monotonic() + ahead,
        )

    def start(self) -> None:
        """Enlists, and leads leased micro-batches, in threads.

        Raises:
            WhaleError: No registry answers, or it refuses this trainer.
        """
        taken_in(
            self._enlist,
            self._ended,
            who="trainer",
            seconds=ENLIST_SECONDS,
            again_seconds=_BEAT_SECONDS,
        )
        self._thread = threading.Thread(target=self._take_all, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Takes no more leases; ``wait`` returns when the current ones are done.

        It sends nothing itself, so a signal handler may call it.
        """
        self._leaving.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it has left or the run has ended; returns whether it has.

        Args:
            seconds: Longest wait; None for no limit.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Leaves at once; others lead its micro-batches."""
        self._ended.set()
        self._stop.set()
        self._service.close()
        self._caller.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(ASK_SECONDS)

    def _end(self, why: str, failed: bool) -> None:
        if not self._ended.is_set():
            self.over, self.failed = why, failed
            self._ended.set()

    # Enlisting.

    def _enlist(self) -> None:
        question = EnlistTrainer(
            name=self.name, address=self._address, facts=self._facts
        )
        self._caller.ask(self._registry, question, seconds=ENLIST_SECONDS)

    # Taking.

    def _take_all(self) -> None:
        self._heard_at = time.monotonic()
        while not self._ended.is_set():
            try:
                given = self._take()
                self._heard_at = time.monotonic()
                if not given.known:
                    if self._leaving.is_set():
                        self._end("left", failed=False)
                    else:
                        self._enlist()
                elif given.number >= 0:
                    self._begin(given)
            except RefusedRequestError as error:
                self._end(error.why, failed=True)
            except UnreachableProcessError as error:
                silent = self.silent_seconds
                address = f"{self._registry[0]}:{self._registry[1]}"
                if self._leaving.is_set():
                    self._end(f"left without being let go: {error}", failed=False)
                elif silent > self._patience_seconds:
                    self._end(
                        f"the registry at {address} has not answered for {silent:.0f} "
                        "s. Start `whalejax swarm serve` again",
                        failed=True,
                    )
                self._ended.wait(_BEAT_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the registry's last answer."""
        return time.monotonic() - self._heard_at

    def _take(self) -> GivenShare:
        with self._lock:
            leads = [(at[1], at[2], number, n) for at, number, n in self._leads]
        question = Take(
            name=self.name,
            leads=leads,
            counts=dataclasses.asdict(self.counts),
            leaving=self._leaving.is_set(),
        )
        if question.leaving:
            self._ended.wait(_BEAT_SECONDS / 10)
        return self._caller.ask(self._registry, question, seconds=ASK_SECONDS)

    def _begin(self, given: GivenShare) -> None:
        """Leads a micro-batch, in its own thread."""
        at: At = (given.run, given.generation, given.step)
        with self._lock:
            if at != self._at:
                if at[0] != self._at[0]:
                    self._clock_ahead = given.now - time.monotonic()
                    self._fleet = self._new_fleet()
                self._stop.set()  # The current micro-batches are of a finished step.
                self._at, self._stop = at, threading.Event()
            self._told.take(given.peers)
            told = self._told.members(self._fleet.now())
            for member in self._fleet.synced():
                if member.name not in {m.name for m in told}:
                    self._fleet.drop(member.name)
            for member in told:
                if not self._fleet.is_paused(member):
                    self._fleet.add(member)
            share = MicroBatchLease(
                number=given.number, times=given.times, trainer=self.name
            )
            self._leads[at, share.number, share.times] = None
            context = self._context(at, given.state, share)
        self._pool.submit(self._lead, context, share)

    def _context(self, at: At, state: int, share: MicroBatchLease) -> StepContext:
        ledger = Ledger(
            step=at[2], stages=self._cut.stages, micro_batches=self._cut.count
        )
        ledger.count_from(share.number, share.attempts.start - 1)
        return StepContext(
            cut=self._cut,
            fleet=self._fleet,
            caller=self._caller,
            ledger=ledger,
            lock=self._lock,
            run=at[0],
            generation=at[1],
            step=at[2],
            state=state,
            batch=self._address,
            sum_wire=self._sum_wire,
            call_seconds=self._call_seconds,
            await_peer=_no_peer,
            tell=self._tell,
            counts=self.counts,
            stop=self._stop,
        )

    def _lead(self, context: StepContext, share: MicroBatchLease) -> None:
        """Leads a micro-batch, and reports which peers have its results."""
        passage, why = MicroBatchRoute(context, share.number), ""
        try:
            self._micro_batch(context.step, share.number)
            passage.run(share.attempts.start - 1)
        except StopRequested:
            why = "it is of a step that is over"
        except StageLost as gone:
            why = f"no peer of stage {gone.stage} answers {self.name}"
        except Exception as error:  # also of the data; the primary trainer checks
            why = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        question = Led(
            **context.at(),
            name=self.name,
            number=share.number,
            times=share.times,
            made=[] if why else passage.results,
            why=why,
            arrays=() if why else passage.sums,
        )
        try:
            self._caller.ask(self._registry, question, seconds=self._call_seconds)
            self.led += not why
        except (UnreachableProcessError, RefusedRequestError) as error:
            if not self._ended.is_set():
                self._tell("not counted", number=share.number, why=str(error))
        finally:
            with self._lock:
                at = context.run, context.generation, context.step
                self._leads.pop((at, share.number, share.times), None)

    # Requests to it.

    def _micro_batch(self, step: int, number: int) -> list[Any]:
        with self._data:
            return self._cut.micro_batch(step, number)

    def _give_batch(self, asked: Batch) -> Tensors:
        """Returns the leaves of a micro-batch of the current step."""
        at = asked.run, asked.generation, asked.step
        if at != self._at or not 0 <= asked.number < self._cut.count:
            raise RefusedRequestError(
                "stale", f"{self.name} leads no micro-batch {asked.number} of {at}"
            )
        leaves = self._micro_batch(asked.step, asked.number)
        places = asked.places
        if any(not 0 <= p < len(leaves) for p in places):
            raise RefusedRequestError(
                "stale", f"a batch has {len(leaves)} leaves, not {places}"
            )
        arrays = tuple(leaves[p] for p in places)
        return Tensors(arrays=arrays)

    def _on_stop(self, asked: StopPeer) -> StopHeard:
        self._end(asked.why or "the run is over", asked.failed)
        return StopHeard()


def _no_peer(stage: int) -> None:
    """Raises, since a secondary trainer returns a micro-batch rather than wait."""
    raise StageLost(stage)
