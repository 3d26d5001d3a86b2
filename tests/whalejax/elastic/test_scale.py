"""Many members over real sockets: a small version of what the bench measures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.whalejax.elastic.runs import ROOT


def test_members_that_come_at_once_start_beat_and_commit() -> None:
    words = ["--members", "40", "--seconds", "1", "--steps", "2", "--dialled", "20"]
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_scale.py"), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    # Nobody may be lost, and each step is committed once, or it ends with an error.
    assert told.returncode == 0, told.stderr[-4000:]
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    assert (found["members"], found["dialled"], found["entered"]) == (40, 20, 20)
    assert {n: sorted(cost) for n, cost in found["rules"].items()} == {
        n: ["beat_us", "committed_us", "turn_ms"] for n in ("64", "256", "1000")
    }
