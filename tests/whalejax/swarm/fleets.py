"""Swarms whose peers are threads of the test's process, and what befalls them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from tests.whalejax.keys import KEY
from tests.whalejax.swarm import swarm_jobs as jobs
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.registry import PeerRecord
from whalejax.swarm_runtime.registry_server import RegistryServer
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.secondary_trainer import SecondaryTrainer
from whalejax.swarm_runtime.trainers.trainer_state import Settings


PEERS: Final = 6
_SECONDS: Final = 300.0


class Swarm:
    """A registry, a trainer and peers.

    Attributes:
        serving: the first two.
        peers: by number.
        trainers: further ones.
        told: what the trainer said.
    """

    def __init__(
        self,
        cut: StagedJob,
        *,
        steps: int,
        wire: str = "f32",
        sum_wire: str = "f32",
        **settings: Any,
    ) -> None:
        self.cut, self.wire, self.sum_wire = cut, wire, sum_wire
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.peers: list[Peer] = []
        self.trainers: list[SecondaryTrainer] = []
        self._waiting: dict[str, Callable[[], Any]] = {}
        lease = settings.pop("lease_seconds", _SECONDS)
        more = settings.pop("more", {})
        settings = {
            "call_seconds": _SECONDS,
            "patience_seconds": _SECONDS,
            "newcomer_seconds": _SECONDS,
            "spare_seconds": _SECONDS,
            **settings,
        }
        self.serving = RegistryServer(
            cut,
            KEY,
            Settings(steps=steps, **settings),
            wire=wire,
            sum_wire=sum_wire,
            lease_seconds=lease,
            tell=self._tell,
            **more,
        )

    def when(self, kind: str, do: Callable[[], Any]) -> None:
        """Do something, in a thread, when something is first said."""
        self._waiting[kind] = do

    def _tell(self, kind: str, **told: Any) -> None:
        self.told.append((kind, told))
        do = self._waiting.pop(kind, None)
        if do is not None:
            threading.Thread(target=do, daemon=True).start()

    def join(self, stage: int = -1, **options: Any) -> Peer:
        """One more peer, which is ready when this returns."""
        wires = {"wire": self.wire, "sum_wire": self.sum_wire}
        options = {**wires, "pull_seconds": _SECONDS, **options}
        peer = Peer(
            self.cut,
            KEY,
            self.serving.address,
            stage=stage,
            beat_seconds=0.05,
            **options,
        )
        self.peers.append(peer)
        peer.start()
        return peer

    def lead(self, **options: Any) -> SecondaryTrainer:
        """One more trainer, which is there when this returns."""
        wires = {"wire": self.wire, "sum_wire": self.sum_wire}
        options = {**wires, "call_seconds": _SECONDS, **options}
        found = SecondaryTrainer(
            options.pop("cut", self.cut), KEY, self.serving.address, **options
        )
        self.trainers.append(found)
        found.start()
        return found

    def members(self) -> list[PeerRecord]:
        """The peers, as they last announced themselves."""
        return self.serving.trainer.fleet.members()

    def kinds(self) -> list[str]:
        """What was said, in order."""
        return [kind for kind, _ in self.told]

    def run(self) -> list[float]:
        """The losses of all steps."""
        return [float(metrics["loss"]) for _, metrics in self.serving.run()]

    def close(self) -> None:
        for process in (*self.trainers, *self.peers):
            process.close()
        self.serving.close()


@contextlib.contextmanager
def swarm(
    cut: StagedJob | None = None, *, steps: int, **settings: Any
) -> Iterator[Swarm]:
    """A swarm, which is ended in any case."""
    found = Swarm(jobs.cut() if cut is None else cut, steps=steps, **settings)
    try:
        yield found
    finally:
        found.close()


class Fault:
    """Ends a peer, or lets it stand still, when it reaches a point the first time.

    Of several peers with faults of one list, the first.
    """

    def __init__(
        self, point: str, step: int, how: str, others: list[Fault] | None = None
    ) -> None:
        self._point, self._step, self._how = point, step, how
        self._lock, self._done = threading.Lock(), False
        self._others = [] if others is None else others
        self._others.append(self)
        self.release = threading.Event()
        self.peer: Peer | None = None

    def __call__(self, point: str, step: int) -> None:
        with self._lock:
            if self.happened or point != self._point or step < self._step:
                return
            self._done = True
        assert self.peer is not None
        if self._how == "killed":
            threading.Thread(target=self.peer.close, daemon=True).start()
        self.release.wait(_SECONDS)

    @property
    def happened(self) -> bool:
        return any(fault._done for fault in self._others)


def same(one: list[float], other: list[float], tolerance: float = 1e-6) -> bool:
    """Losses are equal to a relative tolerance."""
    return bool(np.allclose(one, other, rtol=tolerance, atol=0))


Hook = Callable[[str, int], None]
