"""Drawn signals at drawn moments, by the benchmark: nothing hangs, differs or stays."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.whalejax.elastic.runs import ROOT


SECONDS = 1500.0


@pytest.mark.parametrize(
    ("seed", "faults"),
    [(8, 3), *(pytest.param(seed, 10, marks=pytest.mark.full) for seed in range(3, 9))],
)
def test_drawn_faults_lose_nothing(seed: int, faults: int) -> None:
    words = ["--faults", str(faults), "--each", str(faults), "--seed", str(seed)]
    told = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_elastic.py"), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=SECONDS,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    case: dict[str, Any] = json.loads(told.stdout.splitlines()[0])
    assert case["seed"] == seed and len(case["faults"]) == faults
    assert all(fault["seconds"] is not None for fault in case["faults"]), case
    assert (case["samples_lost"], case["samples_doubled"]) == (0, 0), case
    assert case["unlike_losses"] == 0 and case["leftovers"] == [], case
    assert case["max_rel_loss_diff"] <= (1e-12 if case["x64"] else 1e-6), case
