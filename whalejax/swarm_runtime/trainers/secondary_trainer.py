"""A secondary trainer of a run, which leads micro-batches for the primary trainer.

It leases micro-batches, loads them and gives them to the peers. It chooses peers by its
own measurements, and reports to the primary trainer which peers have the results. Only
the primary trainer ends steps and writes checkpoints.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from whalejax.swarm.ledger import Ledger
from whalejax.swarm_runtime.micro_batch_route import (
    Counts,
    MicroBatchRoute,
    StageLost,
    StepContext,
    StopRequested,
)
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.registry import PeerRecord
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.swarm_process import (
    ADMIT_SECONDS,
    ASK_SECONDS,
    PATIENCE_SECONDS,
    SwarmProcess,
)
from whalejax.swarm_runtime.trainers.micro_batch_queue import MicroBatchLease
from whalejax.swarm_runtime.trainers.trainer_state import given_leaves
from whalejax.wire import swarm_messages as messages
from whalejax.wire.keys import Key
from whalejax.wire.service import (
    Address,
    Handlers,
    RefusedRequestError,
    UnansweredError,
    UnreachableProcessError,
)


_BEAT_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 256
_MOST_WORDS: Final = 2000

At = tuple[str, int, int]


class SecondaryTrainer(SwarmProcess):
    """A trainer without the registry, in its own threads.

    Attributes:
        led: Number of micro-batches that it led and whose results were accepted.
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
            host, port: Address on which it listens, and at which peers get
                micro-batches.
            wire, sum_wire: Wire formats of tensors and of gradient sums, the same in
                all processes.
            call_seconds: Deadline of a call.
            patience_seconds: Longest wait in seconds for a registry that stopped
                answering.
            tell: Function that reports events.

        Raises:
            WhaleError: The address is not available.
        """
        super().__init__(
            "trainer",
            cut,
            key,
            registry,
            wire=wire,
            sum_wire=sum_wire,
            patience_seconds=patience_seconds,
        )
        self._tell, self._call_seconds, self._sum_wire = tell, call_seconds, sum_wire
        self._told: list[PeerRecord] = []
        self._clock_ahead = 0.0
        self._fleet = self._new_fleet()
        self.counts = Counts()
        self._at: At = ("", -1, -1)
        self._stop = threading.Event()
        self._leads: dict[tuple[At, int, int], None] = {}
        self._lock, self._data = threading.RLock(), threading.Lock()
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE)
        self.led = 0
        handlers: Handlers = {
            messages.Ping: lambda _: messages.Pong(name=self.name),
            messages.Batch: self._give_batch,
        }
        self._listen(host, port, handlers)

    def _new_fleet(self) -> Fleet:
        """Returns a fleet without measurements, with the registry's clock."""
        ahead = self._clock_ahead
        return Fleet(
            lambda now: [m for m in self._told if m.expires > now],
            self._cut.stages,
            seed=secrets.randbelow(1 << 30),  # Trainers should choose differently.
            clock=lambda: time.monotonic() + ahead,
        )

    def start(self) -> None:
        """Enlists, and leads leased micro-batches, in threads.

        Raises:
            WhaleError: No registry answers, or it refuses this trainer.
        """
        self._ask_admission(self._enlist, _BEAT_SECONDS)
        self._thread = threading.Thread(target=self._take_all, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leaves immediately; other trainers lead its micro-batches."""
        self._ended.set()
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    # Enlisting.

    def _enlist(self) -> None:
        question = messages.EnlistTrainer(
            name=self.name, address=self._address, facts=self._facts
        )
        self._caller.ask(self._registry, question, seconds=ADMIT_SECONDS)

    # Taking.

    def _take_all(self) -> None:
        self._hears()
        while not self._ended.is_set():
            try:
                given = self._take()
                self._hears()
                if not given.known:
                    if self._leaving.is_set():
                        self._end("left")
                    else:
                        self._enlist()
                elif given.number >= 0:
                    self._begin(given)
            except RefusedRequestError as error:
                self._end(error.why, failed=True)
            except UnreachableProcessError as error:
                if self._leaving.is_set():
                    self._end(f"left without being let go: {error}")
                self._end_if_alone()
                self._ended.wait(_BEAT_SECONDS)

    def _take(self) -> messages.GivenShare:
        with self._lock:
            leads = [(at[1], at[2], number, n) for at, number, n in self._leads]
        question = messages.Take(
            name=self.name,
            leads=leads,
            counts=dataclasses.asdict(self.counts),
            leaving=self._leaving.is_set(),
        )
        if question.leaving:
            self._ended.wait(_BEAT_SECONDS / 10)
        return self._caller.ask(self._registry, question, seconds=ASK_SECONDS)

    def _begin(self, given: messages.GivenShare) -> None:
        at: At = (given.run, given.generation, given.step)
        with self._lock:
            if at != self._at:
                if at[0] != self._at[0]:
                    self._clock_ahead = given.now - time.monotonic()
                    self._fleet = self._new_fleet()
                self._stop.set()  # The current micro-batches belong to a finished step.
                self._at, self._stop = at, threading.Event()
            self._told = [
                PeerRecord(
                    name=name,
                    address=(address[0], address[1]),
                    stage=stage,
                    incarnation=incarnation,
                    queue=queue,
                    expires=expires,
                    ready=True,
                )
                for name, address, stage, incarnation, queue, expires in given.peers
            ]
            told = self._fleet.members()
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
        route, why = MicroBatchRoute(context, share.number), ""
        try:
            self._micro_batch(context.step, share.number)
            route.run(share.attempts.start - 1)
        except StopRequested:
            why = "it is of a step that is over"
        except StageLost as gone:
            why = f"no peer of stage {gone.stage} answers {self.name}"
        except Exception as error:  # The primary trainer handles an error in the data.
            why = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        question = messages.Led(
            **context.at(),
            name=self.name,
            number=share.number,
            times=share.times,
            made=[] if why else route.results,
            why=why,
            arrays=() if why else route.sums,
        )
        try:
            self._caller.ask(self._registry, question, seconds=self._call_seconds)
            self.led += not why
        except UnansweredError as error:
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

    def _give_batch(self, asked: messages.Batch) -> messages.Tensors:
        at = asked.run, asked.generation, asked.step
        if at != self._at or not 0 <= asked.number < self._cut.count:
            raise RefusedRequestError(
                "stale", f"{self.name} leads no micro-batch {asked.number} of {at}"
            )
        return given_leaves(self._micro_batch(asked.step, asked.number), asked)


def _no_peer(stage: int) -> None:
    """Raises ``StageLost``: a secondary trainer does not wait for a peer."""
    raise StageLost(stage)
