"""Drawn signals at drawn points of the protocol, by the benchmark: nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.whalejax.elastic.runs import ROOT


SECONDS = 1500.0


@pytest.mark.full
@pytest.mark.parametrize("seed", [11, 12])
def test_drawn_faults_lose_and_double_nothing(seed: int) -> None:
    words = ["--faults", "10", "--first", str(seed), "--seconds", "1200", "--no-keep"]
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_swarm.py"), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=SECONDS,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[0])
    assert found["seed"] == seed and found["steps"] == 30, found
    assert len(found["drawn"]) == 10 and len(found["faults"]) >= 8, found
    assert (found["lost"], found["doubled"]) == (0, 0), found
    assert found["digests_equal"] and found["max_rel_loss_diff"] <= 1e-6, found
