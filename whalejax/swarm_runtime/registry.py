"""Leases of peers on their stages; a lease ends unless it is renewed.

The registry opens no socket and reads no clock: ``registry_server`` passes the time.
Peers continue without the registry, and join again when it has restarted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from whalejax.agreement.facts import difference
from whalejax.membership.lease import Lease
from whalejax.swarm.deadlines import LEASE_SECONDS
from whalejax.swarm.stage_assignment import PeerLoad, newcomer_stage
from whalejax.wire.addresses import joined_address
from whalejax.wire.service import Address, RefusedRequestError


if TYPE_CHECKING:
    from whalejax.swarm_runtime.staged_job import StagedJob


ANY: Final = -1
"""Requested stage of a joining peer for which the registry chooses the stage."""

Reach = Callable[[Address], str]
"""Function that returns why an address is unreachable; empty if it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """A peer, from its latest announcement.

    Attributes:
        name: Unique name of the process.
        address: Address on which it listens.
        stage: Stage that it serves.
        expires: Time at which its lease ends.
        generation, step: Run generation and step of its newest state; -1 without one.
        queue: Number of waiting and running calls.
        done: Number of calls that have run on its device.
        seconds: Duration of its last call on the device.
        leaving: Whether it wants to leave.
        ready: Whether its programs are compiled.
        incarnation: Number of times that it has joined.
    """

    name: str
    address: Address
    stage: int
    expires: float
    generation: int = -1
    step: int = -1
    queue: int = 0
    done: int = 0
    seconds: float = 0.0
    leaving: bool = False
    ready: bool = False
    incarnation: int = 1


def facts_of(cut: StagedJob, wire: str, sum_wire: str) -> dict[str, str]:
    """Returns data that must be equal in all processes of a swarm, by name.

    Args:
        cut: Staged job.
        wire, sum_wire: Wire formats of tensors, and of gradients during their
            reduction.
    """
    stages = str(cut.stages)
    return {**cut.facts(), "wire": wire, "sum wire": sum_wire, "stages": stages}


def unreachable_error(who: str, address: Address, why: str) -> RefusedRequestError:
    """Returns the refusal of a process whose address cannot be reached.

    Args:
        who: Kind and name of the process.
        address: Address on which it claims to listen.
        why: Reason, as a clause.
    """
    return RefusedRequestError(
        "failed",
        f"{who} says that it listens at {joined_address(*address)}, which cannot be "
        f"reached from here ({why}). Give --host an address of that machine that "
        "others reach, and open its port",
    )


class Registry:
    """The peers of a swarm.

    Attributes:
        lease: Leases of peers, by name; an announcement renews one.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        *,
        stages: int,
        lease_seconds: float = LEASE_SECONDS,
        longest_turn: float = math.inf,
        reach: Reach = lambda address: "",
    ) -> None:
        """Starts without peers.

        Args:
            facts: Facts that a peer must share with this process.
            stages: Number of stages of the model.
            lease_seconds: Seconds for which an announcement is valid.
            longest_turn: Seconds without a request after which this process counts as
                paused.
            reach: Function that tries a joining peer's address.
        """
        self._facts, self.stages = dict(facts), stages
        self.lease: Lease[str] = Lease(lease_seconds, longest_turn)
        self._reach = reach
        self._lock = threading.Lock()
        self._members: dict[str, PeerRecord] = {}
        self._joins: dict[str, int] = {}
        self._freed: set[str] = set()

    def admit(
        self, name: str, address: Address, stage: int, facts: Mapping[str, str]
    ) -> None:
        """Checks whether a peer may join, and tries its address.

        Args:
            name: Name of the peer.
            address: Address on which it claims to listen.
            stage: Requested stage, or ``ANY``.
            facts: Facts about its code, plan and versions.

        Raises:
            RefusedRequestError: The peer runs other code, requests an unknown stage, or
                is unreachable.
        """
        self.check(f"peer {name}", facts)
        if stage != ANY and not 0 <= stage < self.stages:
            raise RefusedRequestError(
                "failed",
                f"peer {name} asks for stage {stage}; there are stages 0 to "
                f"{self.stages - 1}. Give --stage one of them, or leave it out",
            )
        if why := self._reach(address):
            raise unreachable_error(f"peer {name}", address, why)

    def join(self, name: str, address: Address, stage: int, now: float) -> PeerRecord:
        """Adds an admitted peer, and chooses its stage.

        Args:
            name: Name of the peer.
            address: Address on which it listens.
            stage: Requested stage, or ``ANY``.
            now: Time after the admission, in seconds, at which the lease begins.
        """
        with self._lock:
            self._expire(now)
            if stage == ANY:
                stage = newcomer_stage(self._loads(), self.stages)
            self.lease.renew(name, now)
            self._joins[name] = self._joins.get(name, 0) + 1
            member = PeerRecord(
                name=name,
                address=address,
                stage=stage,
                expires=now + self.lease.seconds,
                incarnation=self._joins[name],
            )
            self._members[name] = member
            self._freed.discard(name)
            return member

    def check(self, who: str, facts: Mapping[str, str]) -> None:
        """Refuses a process with other facts.

        Raises:
            RefusedRequestError: The facts differ.
        """
        if differs := difference(who, facts, self._facts):
            raise RefusedRequestError("failed", differs)

    def announce(self, name: str, now: float, **told: Any) -> PeerRecord | None:
        """Renews a lease; returns None if the peer is unknown or has rejoined.

        Args:
            name: Name of the peer.
            now: Current time in seconds.
            told: Current values of other attributes of ``PeerRecord``, including the
                incarnation.
        """
        with self._lock:
            known = self._members.get(name)
            if known is None or known.incarnation != told.pop("incarnation"):
                return None
            self.lease.turn(now)
            self.lease.renew(name, now)
            announce = replace(known, expires=now + self.lease.seconds, **told)
            self._members[name] = announce
            return announce

    def members(self, now: float) -> list[PeerRecord]:
        """Returns the peers with valid leases, by name."""
        with self._lock:
            self._expire(now)
            return sorted(self._members.values(), key=lambda m: m.name)

    def free(self, name: str) -> None:
        """Records that a leaving peer is no longer needed."""
        with self._lock:
            self._freed.add(name)
            self._members.pop(name, None)
            self.lease.forget(name)

    def is_free(self, name: str) -> bool:
        """Returns whether a leaving peer may end."""
        with self._lock:
            return name in self._freed

    def _expire(self, now: float) -> None:
        self.lease.turn(now)
        for name in self.lease.overdue(now):
            self.lease.forget(name)
            self._members.pop(name, None)

    def _loads(self) -> list[PeerLoad]:
        return [
            PeerLoad(
                peer=m.name,
                stage=m.stage,
                queue_length=m.queue,
                speeds=(1.0,) * self.stages,
            )
            for m in self._members.values()
            if not m.leaving
        ]
