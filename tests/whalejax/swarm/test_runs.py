"""Swarms train as one process does, whoever computes what."""

from __future__ import annotations

import pytest

from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import PEERS, same, swarm


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_losses_are_those_of_one_process(clip: float | None) -> None:
    with swarm(jobs.cut(clip), steps=STEPS) as found:
        for number in range(PEERS):
            found.join(number % jobs.STAGES)
        assert same(found.run(), jobs.losses(STEPS, clip))
        digests = {
            (p.worker.stage.number, p.worker._digests[STEPS])
            for p in found.peers
            if p.worker.stage is not None
        }
        assert len(digests) == jobs.STAGES
        assert all(p.wait(60) and p.over == "all steps are done" for p in found.peers)


@pytest.mark.parametrize(
    ("wire", "tolerance"),
    [pytest.param("bf16", 1e-3, marks=pytest.mark.full), ("int8", 1e-2)],
)
def test_a_narrow_wire_changes_little(wire: str, tolerance: float) -> None:
    with swarm(steps=3, wire=wire) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        losses = found.run()
    whole = jobs.losses(STEPS)[:3]
    assert same(losses, whole, tolerance) and not same(losses, whole, 1e-7)
