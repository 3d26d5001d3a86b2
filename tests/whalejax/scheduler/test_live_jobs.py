"""Real jobs that trade the devices of one host, while processes are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_jobs import Serving, audit_faults


pytestmark = pytest.mark.relaxed_promotion

STEPS = {"first": 300, "second": 60, "third": 60}


def test_jobs_trade_devices_and_lose_nothing_to_kills(tmp_path: Path) -> None:
    """A member, a supervisor and the scheduler are killed between."""
    serving = Serving(tmp_path, "--every", "3", "--resize", "2")

    def step(name: str) -> int:
        return max((said["step"] for said in serving.commits(name)), default=0)

    def add(name: str, *words: str) -> None:
        words = ("--set", "seconds=0.03", "--no-wait", *words)
        serving.add(name, *words, steps=STEPS[name])

    def are_complete() -> bool:
        there = serving.shown()
        return bool(there) and all(there[name].status == "complete" for name in STEPS)

    try:
        add("first")
        assert serving.until(lambda: step("first") > 5)
        add("second")
        assert serving.until(lambda: 0 < len(serving.members("first")) < 4)
        serving.kill_scheduler()
        serving.kill_member("first")
        add("third", "--priority", "1")
        assert serving.until(lambda: step("second") > 5)
        serving.kill_all_above("second")
        assert serving.until(are_complete)
        assert serving.trades() >= 1
        given = [e for e in serving.book() if e["event"] == "devices"]
        assert all(len({*said["devices"]}) <= 4 for said in given)
        assert not audit_faults(serving, tmp_path / "alone", STEPS)
        assert serving.until(lambda: not serving.leftovers([*STEPS]), 60.0)
    finally:
        serving.end([*STEPS])
