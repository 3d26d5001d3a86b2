"""Peers change stage while a run goes on, where that makes it faster."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import same, swarm
from whalejax.elastic.wire.framing import Message
from whalejax.elastic.wire.service import Address
from whalejax.swarm.leading.state import Pace
from whalejax.swarm.moving import Mover
from whalejax.swarm.peer import Peer
from whalejax.swarm.trainer import Trainer


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 6


def test_a_peer_moves_to_the_stage_that_lacks_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are taken to be alike: three serve stage 0, and one each other.

    The peer is told so only when the next step is over, and is left alone meanwhile.
    """
    monkeypatch.setattr(
        "whalejax.swarm.fleet.Fleet.seconds_per_task", lambda self, member: 1.0
    )
    mover, may_move = Mover(jobs.STAGES, period=1e-6), threading.Event()

    def between(trainer: Trainer) -> None:
        for name, target in dict(trainer.moving).items():
            may_move.set()
            # It is ready before the next step, so that the test sees it work.
            while not any(
                m.name == name and m.stage == target and m.ready
                for m in found.members()
            ):
                found.peers[0].wait(0.05)
        mover(trainer)

    with swarm(steps=STEPS, more={"between": between}) as found:
        caller: Any = found.serving.trainer.caller
        ask = caller.ask

        def late(address: Address, kind: str, *given: Any, **more: Any) -> Message:
            if kind == "move":
                may_move.wait(300)
            return ask(address, kind, *given, **more)

        caller.ask = late
        for stage in (0, 0, 0, 1, 2):
            found.join(stage)
        assert same(found.run(), jobs.losses(STEPS))
        moves = [told for kind, told in found.told if kind == "moved"]
        assert [(m["source"], m["target"]) for m in moves] in ([(0, 1)], [(0, 2)])
        assert found.serving.trainer.pace.bytes_per_second != Pace().bytes_per_second
        assert found.serving.trainer.pace.compile_seconds != Pace().compile_seconds
        counts = [0] * jobs.STAGES
        for peer in found.peers:
            counts[serves(peer)] += 1
        assert counts in ([2, 2, 1], [2, 1, 2])
        moved = next(p for p in found.peers if p.name == moves[0]["peer"])
        assert moved.worker.step == STEPS  # It works in its new stage.
        joined = [
            told["stage"]
            for kind, told in found.told
            if kind == "joined" and told["peer"] == moved.name
        ]
        assert joined == [moves[0]["source"], moves[0]["target"]]
        counts_of = found.serving.trainer.counts
        assert counts_of.refused == counts_of.recomputed == 0


def serves(peer: Peer) -> int:
    """The stage of a peer, or -1 while it changes."""
    stage = peer.worker.stage
    return -1 if stage is None else stage.number
