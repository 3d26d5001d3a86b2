"""The process with the registry and the first trainer."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from whalejax.elastic.wire.connection import listen
from whalejax.elastic.wire.framing import Message
from whalejax.meshes.errors import WhaleError
from whalejax.swarm.cut import Cut
from whalejax.swarm.ledger import Write
from whalejax.swarm.registry import LEASE_SECONDS, Member, Registry
from whalejax.swarm.trainer import Settings, Snapshot, Tell, Trainer, as_told
from whalejax.swarm.wire.messages import TO_TRAINER
from whalejax.swarm.wire.service import Address, Caller, Gone, Refused, Service


REACH_SECONDS: Final = 5.0


class Serving:
    """A registry and a trainer that answer at one address.

    Attributes:
        address: where.
        trainer: leads the run.
        registry: of its peers.
    """

    def __init__(
        self,
        cut: Cut,
        key: bytes,
        settings: Settings,
        *,
        wire: str = "f32",
        host: str = "127.0.0.1",
        port: int = 0,
        lease_seconds: float = LEASE_SECONDS,
        tell: Tell = lambda kind, **more: None,
        write: Write | None = None,
        snapshot: Snapshot | None = None,
        generation: int = 0,
        **more: Any,
    ) -> None:
        """Listen; no step is done before ``run``.

        Args:
            cut: of the job.
            key: of the swarm.
            settings: of the run.
            wire: how peers send tensors.
            host, port: where to listen.
            lease_seconds: for which a peer's announcement holds.
            tell, write, snapshot, generation, more: as for ``Trainer``.

        Raises:
            WhaleError: it cannot listen there.
        """
        self._caller = Caller(key)
        facts = {**cut.facts(), "wire": wire, "stages": str(cut.stages)}
        self.registry = Registry(
            facts, stages=cut.stages, lease_seconds=lease_seconds, reach=self._reach
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
            **more,
        )
        self._settings, self._shown = settings, {"wire": wire}
        handlers = {
            "ping": lambda _: Message(kind="pong", fields={"name": "registry"}),
            "batch": self.trainer.give_batch,
            "state": self.trainer.give_state,
            "join": self._join,
            "announce": self._announce,
            "show": self._show,
            "terms": self._terms,
        }
        try:
            listening = listen(host, port)
        except OSError as error:
            raise WhaleError(
                f"host {host}, port {port}: the registry cannot listen there "
                f"({error.strerror or error}). Give an address of this machine and a "
                "free port"
            ) from error
        self._service = Service(listening, key, TO_TRAINER, handlers)
        self.address = self.trainer.address = self._service.address
        self._loss: float | None = None
        self._lock = threading.Lock()

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do the steps; see ``Trainer.run``. In the end, peers are told."""
        for step, metrics in self.trainer.run():
            self._loss = float(metrics["loss"])
            yield step, metrics
        self.stop("all steps are done")

    def stop(self, why: str) -> None:
        """Tell all peers that the run is over.

        Args:
            why: in words.
        """
        for member in self.registry.members(time.monotonic()):
            try:
                self._caller.ask(
                    member.address, "stop", {"why": why}, seconds=REACH_SECONDS
                )
            except (Gone, Refused):
                continue  # It is gone already, or will see that the registry is.

    def close(self) -> None:
        """End all connections."""
        self._service.close()
        self._caller.close()

    # What peers ask.

    def _reach(self, address: Address) -> str:
        try:
            self._caller.ask(address, "ping", {}, seconds=REACH_SECONDS)
        except (Gone, Refused) as error:
            return str(error)
        return ""

    def _join(self, asked: Message) -> Message:
        fields = asked.fields
        host, port = fields["address"]
        member = self.registry.join(
            fields["name"],
            (host, port),
            fields["stage"],
            fields["facts"],
            time.monotonic(),
        )
        return Message(
            kind="welcome",
            fields={"stage": member.stage, "incarnation": member.incarnation},
        )

    def _announce(self, asked: Message) -> Message:
        told = dict(asked.fields)
        name = told.pop("name")
        if self.registry.is_free(name):
            return Message(kind="heard", fields={"known": False, "free": True})
        found = self.registry.announce(name, time.monotonic(), **told)
        return Message(kind="heard", fields={"known": found is not None, "free": False})

    def _terms(self, asked: Message) -> Message:
        """What a newcomer must know to cut the job alike."""
        del asked
        cut = self.trainer.cut
        fields = {
            **self._shown,
            "stages": cut.stages,
            "batch": cut.size,
            "micro_batches": cut.count,
            "precision": cut.precision,
            "seed": cut.seed,
            "pull_seconds": self._settings.call_seconds / 3,
        }
        return Message(kind="terms", fields=fields)

    def _show(self, asked: Message) -> Message:
        del asked
        trainer, now = self.trainer, time.monotonic()
        show = functools.partial(_shown, trainer=trainer)
        ledger = trainer.ledger
        fields = {
            **self._shown,
            "stages": trainer.cut.stages,
            "step": trainer.step,
            "steps": self._settings.steps,
            "generation": trainer.generation,
            "micro_batches": trainer.cut.count,
            "loss": self._loss,
            "left": 0 if ledger is None else len(ledger.to_do()),
            "counts": as_told(trainer.counts),
            "peers": [show(m) for m in self.registry.members(now)],
        }
        return Message(kind="shown", fields=fields)


def _shown(member: Member, *, trainer: Trainer) -> Mapping[str, Any]:
    synced = trainer.fleet.has(member.name)
    return {
        "name": member.name,
        "address": f"{member.address[0]}:{member.address[1]}",
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
