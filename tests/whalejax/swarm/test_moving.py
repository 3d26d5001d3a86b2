"""Peers change stage while a run goes on, where that makes it faster."""

from __future__ import annotations

import pytest

from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import same, swarm
from whalejax.swarm.moving import Mover
from whalejax.swarm.peer import Peer
from whalejax.swarm.trainer import Trainer


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 6


def test_a_peer_moves_to_the_stage_that_lacks_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are taken to be alike: three serve stage 0, and one each other."""
    monkeypatch.setattr(
        "whalejax.swarm.fleet.Fleet.seconds_per_task", lambda self, member: 1.0
    )
    mover = Mover(jobs.STAGES, period=1e-6)

    def between(trainer: Trainer) -> None:
        mover(trainer)
        # What moves is ready before the next step, so that the test sees it work.
        for peer in found.peers:
            target = mover._going.get(peer.name)
            while target is not None and serves(peer) != target:
                peer.wait(0.05)

    with swarm(steps=STEPS, more={"between": between}) as found:
        for stage in (0, 0, 0, 1, 2):
            found.join(stage)
        assert same(found.run(), jobs.losses(STEPS))
        moves = [told for kind, told in found.told if kind == "moved"]
        assert [(m["source"], m["target"]) for m in moves] in ([(0, 1)], [(0, 2)])
        counts = [0] * jobs.STAGES
        for peer in found.peers:
            counts[serves(peer)] += 1
        assert counts in ([2, 2, 1], [2, 1, 2])
        moved = next(p for p in found.peers if p.name == moves[0]["peer"])
        assert moved.worker.step == STEPS  # It works in its new stage.


def serves(peer: Peer) -> int:
    """The stage of a peer, or -1 while it changes."""
    stage = peer.worker.stage
    return -1 if stage is None else stage.number
