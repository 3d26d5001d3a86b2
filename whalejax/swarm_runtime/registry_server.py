"""Serves the registry and the primary trainer of a swarm at one address."""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from whalejax.distributed.launch_env import reached_host
from whalejax.swarm.deadlines import LEASE_SECONDS
from whalejax.swarm.ledger import Write
from whalejax.swarm_runtime.registry import (
    PeerRecord,
    Registry,
    facts_of,
    unreachable_error,
)
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.swarm_process import open_listener
from whalejax.swarm_runtime.trainer import Trainer
from whalejax.swarm_runtime.trainers.trainer_state import Settings, Snapshot, Tell
from whalejax.wire import swarm_messages as messages
from whalejax.wire.addresses import joined_address
from whalejax.wire.keys import Key
from whalejax.wire.service import (
    Address,
    Caller,
    Handlers,
    RefusedRequestError,
    Service,
    ask_all,
)


REACH_SECONDS: Final = 5.0
LINK_SECONDS: Final = 20.0
"""Seconds within which a peer must report which other peers it reaches."""

ERRORS: Final = ("sum_error", "wire_error")
"""Names of the metrics that ``SwarmStatus`` shows: errors of the wire formats."""

_MOST_LINKS: Final = 8
"""Maximum number of other peers to which a joining peer's links are tried."""

_MOST_THREADS: Final = 64
_MOST_WORDS: Final = 2000


class RegistryServer:
    """A registry and the primary trainer of a run, at one address.

    Attributes:
        address: Address of both.
        trainer: Primary trainer of the run.
        registry: Registry of its peers.
    """

    def __init__(
        self,
        cut: StagedJob,
        key: Key,
        settings: Settings,
        *,
        wire: str = "f32",
        sum_wire: str = "f32",
        host: str = "127.0.0.1",
        port: int = 0,
        listening: socket.socket | None = None,
        lease_seconds: float = LEASE_SECONDS,
        tell: Tell = lambda kind, **more: None,
        write: Write | None = None,
        snapshot: Snapshot | None = None,
        generation: int = 0,
        **more: Any,
    ) -> None:
        """Listens for calls; runs no step before ``run``.

        Args:
            cut: Staged job.
            key: Key of the swarm.
            settings: Settings of the run.
            wire: Wire format of tensors.
            sum_wire: Wire format of gradients during their reduction.
            host, port: Address on which it listens.
            listening: Socket that already listens at the address; ``close`` closes it.
            lease_seconds: Seconds for which a peer's announcement is valid.
            tell, write, snapshot, generation, more: Arguments of ``Trainer``,
                unchanged.

        Raises:
            WhaleError: The address is not available.
        """
        self._caller = Caller(key)
        self.registry = Registry(
            facts_of(cut, wire, sum_wire),
            stages=cut.stages,
            lease_seconds=lease_seconds,
            longest_turn=lease_seconds / 2,
            reach=self._reach,
        )
        self.trainer = Trainer(
            cut,
            self.registry,
            self._caller,
            settings,
            tell=tell,
            write=write,
            snapshot=snapshot,
            generation=generation,
            wire=wire,
            sum_wire=sum_wire,
            **more,
        )
        self._settings, self._tell = settings, tell
        self._wires = wire, sum_wire
        listening = listening or open_listener("the registry", host, port)
        self._service = Service(listening, key, self._handlers)
        host, port = self._service.address
        self.address = self.trainer.address = reached_host(host), port
        self._loss: float | None = None
        self._errors: dict[str, float | None] = {}
        self._lock = threading.Lock()

    @property
    def _handlers(self) -> Handlers:
        return {
            messages.Ping: lambda _: messages.Pong(name="registry"),
            messages.Batch: self.trainer.give_batch,
            messages.FetchState: self.trainer.give_state,
            messages.Join: self._join,
            messages.Announce: self._announce,
            messages.EnlistTrainer: self._enlist,
            messages.Take: self.trainer.sharing.give,
            messages.Led: self.trainer.sharing.take_in,
            messages.ShowSwarm: self._show,
            messages.AskTerms: self._terms,
        }

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Runs the steps (see ``Trainer.run``), then tells the peers of the end."""
        try:
            for step, metrics in self.trainer.run():
                self._loss = float(metrics["loss"])
                self._errors = {name: metrics.get(name) for name in ERRORS}
                yield step, metrics
        except Exception as error:
            self.stop(f"the run has failed: {error}"[:_MOST_WORDS], failed=True)
            raise
        self.stop("all steps are done")

    def stop(self, why: str, *, failed: bool = False) -> None:
        """Informs all peers and trainers that the run is over.

        Args:
            why: Reason, as a clause.
            failed: Whether the run ended with a failure.
        """
        members = self.registry.members(time.monotonic())
        addresses = [m.address for m in members]
        addresses += self.trainer.sharing.addresses()
        question = messages.StopPeer(why=why, failed=failed)
        ask_all(self._caller, addresses, question, REACH_SECONDS)

    def close(self) -> None:
        """Ends all connections."""
        self._service.close()
        self._caller.close()

    # Requests of peers.

    def _reach(self, address: Address) -> str:
        why = self._ping(address)
        others = self._neighbours(address)
        if others and not why:
            question = messages.Reach(peers=[(m.name, m.address) for m in others])
            (own,) = ask_all(self._caller, [address], question, LINK_SECONDS)
            outward = own.unreached if isinstance(own, messages.PeersReached) else {}
            self._check_links("peer", address, others, outward)
        return why

    def _ping(self, address: Address) -> str:
        (answer,) = ask_all(self._caller, [address], messages.Ping(), REACH_SECONDS)
        return "" if isinstance(answer, messages.Pong) else str(answer)

    def _neighbours(self, address: Address) -> list[PeerRecord]:
        """Returns a few peers of many stages, to check a joining process's links."""
        members = self.registry.members(time.monotonic())
        others = [m for m in members if m.address != address]
        seen: dict[int, int] = {}
        ranks = []
        for member in others:
            ranks.append(seen.setdefault(member.stage, 0))
            seen[member.stage] += 1
        order = sorted(range(len(others)), key=lambda n: (ranks[n], others[n].stage))
        return [others[n] for n in order[:_MOST_LINKS]]

    def _check_links(
        self,
        what: str,
        address: Address,
        others: Sequence[PeerRecord],
        outward: Mapping[str, str],
    ) -> None:
        """Refuses a joining peer that cannot exchange messages with most others."""
        where = joined_address(*address)
        question = messages.Reach(peers=[(where, address)])
        addresses = [m.address for m in others]
        told = ask_all(self._caller, addresses, question, LINK_SECONDS)
        there = {
            m.name: answer.unreached.get(where, "")
            for m, answer in zip(others, told, strict=True)
            if isinstance(answer, messages.PeersReached)
        }
        problems = [
            f"it does not reach {name} ({outward[name]})"
            if name in outward
            else f"{name} does not reach it ({why})"
            for name, why in there.items()
            if name in outward or why
        ]
        if not problems:
            return
        text = f"the {what} at {where}: {'; '.join(problems)}"
        if 2 * len(problems) <= len(there):
            self._tell("note", why=f"{text}. Micro-batches avoid these links")
            return
        raise RefusedRequestError(
            "failed",
            f"{text}. Peers take tensors from each other and from trainers: give "
            "--host an address of that machine that all machines of the swarm reach, "
            "and open its port",
        )

    def _join(self, asked: messages.Join) -> messages.PeerWelcome:
        name, stage, address = asked.name, asked.stage, asked.address
        self.registry.admit(name, address, stage, asked.facts)
        # Read the time after ``admit``, which may take longer than a lease.
        member = self.registry.join(name, address, stage, time.monotonic())
        return messages.PeerWelcome(
            stage=member.stage,
            incarnation=member.incarnation,
            run=self.trainer.run_id,
        )

    def _announce(self, asked: messages.Announce) -> messages.AnnouncementReceived:
        told = asked.fields
        name = told.pop("name")
        if self.registry.is_free(name):
            return messages.AnnouncementReceived(known=False, free=True)
        announce = self.registry.announce(name, time.monotonic(), **told)
        return messages.AnnouncementReceived(known=announce is not None, free=False)

    def _enlist(self, asked: messages.EnlistTrainer) -> messages.TrainerEnlisted:
        name, address = asked.name, asked.address
        self.registry.check(f"trainer {name}", asked.facts)
        if why := self._ping(address):
            raise unreachable_error(f"trainer {name}", address, why)
        others = self._neighbours(address)
        if others:
            self._check_links("trainer", address, others, {})
        self.trainer.sharing.enlist(name, address)
        return messages.TrainerEnlisted(run=self.trainer.run_id)

    def _terms(self, asked: messages.AskTerms) -> messages.Terms:
        del asked
        cut = self.trainer.cut
        return messages.Terms(
            wire=self._wires[0],
            sum_wire=self._wires[1],
            stages=cut.stages,
            batch=cut.size,
            micro_batches=cut.count,
            precision=cut.precision,
            seed=cut.seed,
            delayed_updates=cut.delayed_updates,
            pull_seconds=self._settings.call_seconds / 3,
            call_seconds=self._settings.call_seconds,
        )

    def _show(self, asked: messages.ShowSwarm) -> messages.SwarmStatus:
        del asked
        trainer, now = self.trainer, time.monotonic()
        show = functools.partial(_peer_status, trainer=trainer)
        ledger = trainer.ledger
        return messages.SwarmStatus(
            wire=self._wires[0],
            sum_wire=self._wires[1],
            stages=trainer.cut.stages,
            step=trainer.step,
            steps=self._settings.steps,
            generation=trainer.generation,
            micro_batches=trainer.cut.count,
            loss=self._loss,
            sum_error=self._errors.get("sum_error"),
            wire_error=self._errors.get("wire_error"),
            left=0 if ledger is None else ledger.missing_gradients,
            counts=dataclasses.asdict(trainer.counts),
            trainers=trainer.sharing.status_rows(),
            peers=[show(m) for m in self.registry.members(now)],
        )


def _peer_status(member: PeerRecord, *, trainer: Trainer) -> dict[str, Any]:
    synced = trainer.fleet.has(member)
    return {
        "name": member.name,
        "address": joined_address(*member.address),
        "stage": member.stage,
        "step": member.step,
        "queue": member.queue,
        "done": member.done,
        "seconds": trainer.fleet.seconds_per_task(member) or 0.0,
        "state": "leaving"
        if member.leaving
        else "working"
        if synced
        else "waiting"
        if member.ready
        else "compiling",
    }
