"""Peers change stage while a run goes on, where that makes it faster."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import same, swarm
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.stage_moves import StageMover
from whalejax.swarm_runtime.trainer import Trainer
from whalejax.swarm_runtime.trainers.trainer_state import TransferRates
from whalejax.wire.messages import Message


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 6


def test_a_peer_moves_to_the_stage_that_lacks_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are taken to be alike: three serve stage 0, and one each other.

    The peer is told so only when the next step is over, and is left alone meanwhile.
    """
    monkeypatch.setattr(
        "whalejax.swarm_runtime.peer_fleet.Fleet.seconds_per_task",
        lambda self, member: 1.0,
    )
    mover, may_move = StageMover(jobs.STAGES, period=1e-6), threading.Event()

    def between(trainer: Trainer) -> None:
        if trainer._computing is not None:
            return
        for name, target in dict(trainer.moving).items():
            may_move.set()
            # It is ready before the next step, so that the test sees it work.
            while not any(
                m.name == name and m.stage == target and m.ready
                for m in found.members()
            ):
                found.peers[0].wait(0.05)
        mover(trainer)

    with swarm(steps=STEPS, more={"rebalance": between}) as found:
        caller: Any = found.serving.trainer.caller
        ask = caller.ask

        def late(address: Any, question: Any, **more: Any) -> Message:
            if question.kind == "move":
                may_move.wait(300)
            return ask(address, question, **more)

        caller.ask = late
        for stage in (0, 0, 0, 1, 2):
            found.join(stage)
        assert same(found.run(), jobs.losses(STEPS))
        moves = [told for kind, told in found.told if kind == "moved"]
        assert [(m["source"], m["target"]) for m in moves] in ([(0, 1)], [(0, 2)])
        assert (
            found.serving.trainer.pace.bytes_per_second
            != TransferRates().bytes_per_second
        )
        assert (
            found.serving.trainer.pace.compile_seconds
            != TransferRates().compile_seconds
        )
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


def test_a_peer_moves_while_a_step_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradients are computed again, and it is in its new stage in that step.

    Four gradients of the second step are computed; the others wait until it is there.
    """
    monkeypatch.setattr(
        "whalejax.swarm_runtime.peer_fleet.Fleet.seconds_per_task",
        lambda self, member: 1.0,
    )
    mover, calls = StageMover(jobs.STAGES, period=1e-6), itertools.count()
    held: list[int] = []

    def rebalance(trainer: Trainer) -> None:
        counts = trainer.gradients_at()
        if trainer.step == 1 and counts.total() >= 4 and not held:
            mover(trainer)
            if mover._going:  # Also where the move is over already.
                held.append(counts[mover._going])

    def joined() -> list[int]:
        return [told["step"] for kind, told in found.told if kind == "joined"]

    def hook(point: str, step: int) -> None:
        if point == "backward" and step == 1 and next(calls) >= 4:
            end = time.monotonic() + 240
            while len(joined()) < 6 and time.monotonic() < end:
                time.sleep(0.02)

    with swarm(steps=3, more={"rebalance": rebalance}) as found:
        for stage in (0, 0, 0, 1, 2):
            found.join(stage, hook=hook)
        assert same(found.run(), jobs.losses(3))
        # On a busy machine a peer may be missed and come back within the step.
        assert joined()[:5] == [0] * 5 and 1 in joined()[5:]
        (moved,) = [told for kind, told in found.told if kind == "moved"]
        assert moved["source"] == 0 and moved["target"] in (1, 2)
        lost = [told["parts"] for kind, told in found.told if kind == "lost"]
        assert sum(lost) >= held[0]
