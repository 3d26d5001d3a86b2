"""Secondary trainers of a run, and the micro-batches that they lead.

Secondary trainers request micro-batches, and report which peers have the results. A
trainer that is silent for too long or answers no ping is removed, and others lead its
micro-batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from whalejax.membership.lease import Lease
from whalejax.swarm_runtime.micro_batch_route import MicroBatchRoute, StepContext
from whalejax.swarm_runtime.peer_fleet import Fleet
from whalejax.swarm_runtime.trainers.micro_batch_queue import (
    OWN,
    MicroBatchLease,
    MicroBatchQueue,
)
from whalejax.wire.addresses import joined_address
from whalejax.wire.service import Address, Caller, RefusedRequestError, UnansweredError
from whalejax.wire.swarm_messages import GivenShare, Led, MicroBatchAccepted, Ping, Take


WAIT_SECONDS: Final = 0.5
"""Longest time in seconds for which a trainer's request for a micro-batch waits."""

SILENT_SECONDS: Final = 2.0
"""Seconds of silence after which a trainer that leads a micro-batch is pinged."""

PING_SECONDS: Final = 5.0
LONGEST_CALLS: Final = 4
"""Longest time of a lease, in call deadlines; at least one deadline for each stage."""


@dataclass(slots=True, kw_only=True)
class _SecondaryTrainer:
    """A secondary trainer.

    Attributes:
        address: Address at which it leads micro-batches.
        led: Micro-batches that it has led.
        leaving: Whether it takes no more leases.
        counts: Number of its faults, by kind.
    """

    address: Address
    led: int = 0
    leaving: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step whose micro-batches are leased to trainers.

    Attributes:
        context: Context of the step.
        routes: Routes of its micro-batches, by number.
        shares: Queue that leases the micro-batches.
        in_flight: Maximum number of micro-batches in flight, over all trainers.
    """

    context: StepContext
    routes: Sequence[MicroBatchRoute]
    shares: MicroBatchQueue
    in_flight: int


class TrainerPool:
    """Secondary trainers of a run; safe to use from several threads.

    Attributes:
        led: Number of micro-batches that the primary trainer has led.
    """

    def __init__(
        self, fleet: Fleet, caller: Caller, tell: Callable[..., None], lease: float
    ) -> None:
        """Starts without trainers.

        Args:
            fleet: Usable peers.
            caller: Client that pings the trainers.
            tell: Function that reports events.
            lease: Seconds of silence after which a trainer is removed.
        """
        self._fleet, self._caller, self._tell = fleet, caller, tell
        self.led = 0
        self._lease: Lease[str] = Lease(lease)
        self._lock = threading.RLock()
        self._trainers: dict[str, _SecondaryTrainer] = {}
        self._step: _Step | None = None

    # Membership.

    def enlist(self, name: str, address: Address) -> None:
        """Adds a secondary trainer; replaces an earlier one of the same name.

        Args:
            name: Unique name for the process.
            address: Address at which it leads micro-batches.
        """
        with self._lock:
            self._lose(name)
            self._trainers[name] = _SecondaryTrainer(address=address)
            self._lease.renew(name, self._fleet.now())
        self._tell("trainer joined", trainer=name)

    def addresses(self) -> list[Address]:
        """Returns the addresses of all trainers."""
        with self._lock:
            return [trainer.address for trainer in self._trainers.values()]

    def status_rows(self) -> list[dict[str, Any]]:
        """Returns the trainers' rows of ``whalejax swarm show``, the primary first."""
        with self._lock:
            step = self._step
            held = (lambda name: 0) if step is None else step.shares.leading_count
            status_rows = [
                {
                    "name": name,
                    "address": joined_address(*one.address),
                    "state": "leaving" if one.leaving else "leading",
                    "leads": held(name),
                    "led": one.led,
                    "counts": dict(one.counts),
                }
                for name, one in sorted(self._trainers.items())
            ]
            own = {"name": OWN, "address": "", "state": "leading", "counts": {}}
            return [{**own, "leads": held(OWN), "led": self.led}, *status_rows]

    def watch(self) -> None:
        """Removes silent trainers, and takes back micro-batches that are overdue."""
        now = self._fleet.now()
        with self._lock:
            step = self._step
            silent = {
                name: (self._trainers[name].address, seconds)
                for name, seconds in self._lease.overdue(now, SILENT_SECONDS).items()
            }
        for name, (address, seconds) in silent.items():
            why = f"it gave no sign of life for {seconds:.0f} s"
            if seconds <= self._lease.seconds:
                if step is None or not step.shares.leading_count(name):
                    continue
                try:
                    self._caller.ask(address, Ping(), seconds=PING_SECONDS)
                    continue
                except UnansweredError as error:
                    why = str(error)
            self._lose(name, why)

        if step is not None:
            # The process answers pings, but its work hangs, for example on its data.
            context = step.context
            seconds = max(LONGEST_CALLS, context.cut.stages) * context.call_seconds
            for share in step.shares.overdue(seconds):
                if step.shares.give_back(share):
                    why = f"it has not finished after {seconds:.0f} s"
                    more = {"number": share.number, "why": why}
                    self._tell("gave back", trainer=share.trainer, **more)

    def _lose(self, name: str, why: str = "") -> None:
        with self._lock:
            known, step = self._trainers.pop(name, None), self._step
            self._lease.forget(name)
            lost = [] if step is None else step.shares.lose(name)
        if known is not None and why:
            self._tell("trainer lost", trainer=name, numbers=lost, why=why)

    # Micro-batches.

    def open(
        self, context: StepContext, routes: Sequence[MicroBatchRoute], in_flight: int
    ) -> MicroBatchQueue:
        """Begins to lease the micro-batches of a step.

        Args:
            context: Context of the step.
            routes: Routes of its micro-batches, by number.
            in_flight: Maximum number of micro-batches in flight, over all trainers.
        """
        shares = MicroBatchQueue(len(routes), context.stop)
        with self._lock:
            self._step = _Step(
                context=context, routes=routes, shares=shares, in_flight=in_flight
            )
        return shares

    def close(self) -> None:
        """Ends the step: leases nothing and counts no result until ``open``."""
        with self._lock:
            self._step = None

    def most(self) -> int:
        """Returns the number of micro-batches that a trainer may lead at a time."""
        with self._lock:
            step = self._step
            trainers = 1 + sum(
                not trainer.leaving for trainer in self._trainers.values()
            )
        if step is None:
            return 1
        return max(1, -(-min(step.in_flight, len(step.routes)) // trainers))

    def give(self, asked: Take) -> GivenShare:
        """Answers a trainer that requests a micro-batch."""
        name = asked.name
        with self._lock:
            trainer, step = self._trainers.get(name), self._step
            if trainer is None:
                return GivenShare(known=False)
            self._lease.renew(name, self._fleet.now())
            trainer.counts, trainer.leaving = asked.counts, asked.leaving
            if trainer.leaving:
                if step is None or not step.shares.leading_count(name):
                    del self._trainers[name]
                    self._lease.forget(name)
                    self._tell("trainer left", trainer=name)
                return GivenShare()
            if step is not None:
                # Requeue micro-batches whose lease did not reach the trainer.
                current = step.context.generation, step.context.step
                leads = [lead for lead in asked.leads if lead[:2] == current]
                step.shares.lose(name, {(lead[2], lead[3]) for lead in leads})
        share = None
        if step is None:
            threading.Event().wait(WAIT_SECONDS / 10)
        else:
            share = step.shares.wait_for(name, self.most, WAIT_SECONDS)
        if step is None or share is None:
            return GivenShare()
        peers = [
            (p.name, p.address, p.stage, p.incarnation, p.queue, p.expires)
            for p in self._fleet.usable()
        ]
        return GivenShare(
            **step.context.at(),
            state=step.context.state,
            number=share.number,
            times=share.times,
            now=self._fleet.now(),
            peers=peers,
        )

    def take_in(self, asked: Led) -> MicroBatchAccepted:
        """Records a trainer's report on a micro-batch that it leads.

        Raises:
            RefusedRequestError: The trainer no longer leads the micro-batch, or the
                result is invalid.
        """
        step, name, number = self._step, asked.name, asked.number
        share = MicroBatchLease(number=number, times=asked.times, trainer=name)
        at = {"run": asked.run, "generation": asked.generation, "step": asked.step}
        stale = RefusedRequestError(
            "stale",
            f"micro-batch {number} of {at} is not with {name} any more: another "
            "trainer leads it, or the step is over",
        )
        if step is None or at != step.context.at():
            raise stale
        if asked.why:
            if not step.shares.give_back(share):
                raise stale
            self._tell("gave back", trainer=name, number=number, why=asked.why)
            return MicroBatchAccepted()
        route = step.routes[number] if number < len(step.routes) else None
        if route is None:
            raise stale

        def count() -> None:
            route.take_in(name, asked.made, asked.arrays, share.attempts)

        try:
            counts = step.shares.finish(share, count)
        except RefusedRequestError as error:
            step.shares.give_back(share)
            self._tell("gave back", trainer=name, number=number, why=error.why)
            raise
        if not counts:
            raise stale
        with self._lock:
            trainer = self._trainers.get(name)
            if trainer is not None:
                self._lease.renew(name, self._fleet.now())
                trainer.led += 1
        return MicroBatchAccepted()
