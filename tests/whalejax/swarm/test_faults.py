"""Peers that die or stand still at every point of the protocol change no loss."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import Fault, Swarm, same, swarm
from whalejax.swarm.ledger import committed, count_lost_and_doubled
from whalejax.swarm_runtime.peer_store.gradient_sums import GradientSum


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

STEPS = 4
HOWS = ("killed", "stopped")
# A peer that stands still is found by this; a slow machine may find others so, too.
SHORT: dict[str, Any] = {"call_seconds": 6.0, "state_seconds": 6.0}


class Journal:
    """Keeps what the ledger writes."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, event: str, fields: Any) -> None:
        self.lines.append({"event": event, **json.loads(json.dumps(fields))})


def counted_once(journal: Journal, steps: int) -> None:
    """Every step was committed with each micro-batch of each stage exactly once."""
    assert sorted(committed(journal.lines)) == [*range(steps)]
    assert count_lost_and_doubled(journal.lines) == (0, 0)


def alike(found: Swarm) -> None:
    """Peers of a stage that have the newest state have the same."""
    seen: dict[int, set[str]] = {}
    for peer in found.peers:
        stage, digests = peer.worker.stage, peer.worker._digests
        if stage is not None and STEPS in digests:
            seen.setdefault(stage.number, set()).add(digests[STEPS])
    assert sorted(seen) == [*range(jobs.STAGES)]
    assert all(len(digests) == 1 for digests in seen.values())


def test_what_is_added_twice_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the peers of each stage say that they added."""
    add, journal = GradientSum.add, Journal()

    def twice(self: GradientSum, numbers: list[int], *given: Any) -> None:
        for _ in range(1 + (numbers == [2])):
            add(self, numbers, *given)

    with swarm(steps=1, more={"write": journal}) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        monkeypatch.setattr(GradientSum, "add", twice)
        found.run()
    assert count_lost_and_doubled(journal.lines) == (0, jobs.STAGES)
    lines = [dict(x) for x in journal.lines]
    for line in lines:
        if line["event"] == "summed":
            line["added"] = {name: [[0, 1], [1, 1]] for name in line["added"]}
    assert count_lost_and_doubled(lines) == (jobs.STAGES * (jobs.COUNT - 2), 0)
    assert {line["generation"] for line in lines} == {0}


def cases(*points: str, default: tuple[str, ...]) -> list[Any]:
    """Points and what happens there; those that take long only in the whole suite."""
    return [
        pytest.param(p, h, marks=[] if f"{p} {h}" in default else pytest.mark.full)
        for p in points
        for h in HOWS
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("point", "how"),
    cases(
        *("forward", "backward", "sum", "apply"),
        default=("backward killed", "sum killed", "sum stopped", "apply killed"),
    ),
)
def test_a_step_survives(point: str, how: str) -> None:
    fault, journal = Fault(point, 1, how), Journal()
    stage = {"forward": 0, "backward": 2}.get(point, 1)
    with swarm(steps=STEPS, more={"write": journal}, **SHORT) as found:
        for number in range(jobs.STAGES):
            found.join(number, pull_seconds=2.0)
        fault.peer = found.join(stage, pull_seconds=2.0, hook=fault)
        try:
            losses = found.run()
        finally:
            fault.release.set()
        assert fault.happened
        assert same(losses, jobs.losses(STEPS))
        counted_once(journal, STEPS)
        alike(found)
        assert found.serving.trainer.counts.failed > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("point", "how"),
    cases(
        *("download", "downloading", "save"), default=("download killed", "save killed")
    ),
)
def test_a_newcomer_survives(point: str, how: str) -> None:
    """It, or the mate that gives it the state: either of two may be asked."""
    faults: list[Fault] = []
    journal = Journal()
    with swarm(steps=STEPS, more={"write": journal}, **SHORT) as found:

        def faulty(stage: int) -> None:
            fault = Fault(point, 0, how, faults)
            fault.peer = found.join(stage, pull_seconds=2.0, hook=fault)

        for stage in (0, 1, 1, 2):
            if point == "save" and stage == 1:
                faulty(stage)
            else:
                found.join(stage, pull_seconds=2.0)
        losses = []
        try:
            for _, metrics in found.serving.run():
                losses.append(float(metrics["loss"]))
                if len(losses) == 1:
                    if point != "save":
                        faulty(1)
                    found.join(1, pull_seconds=2.0)
        finally:
            for fault in faults:
                fault.release.set()
        assert faults[0].happened
        assert same(losses, jobs.losses(STEPS))
        counted_once(journal, STEPS)
        alike(found)
