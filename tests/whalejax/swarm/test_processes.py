"""Peers as processes of their own that are killed or stopped from inside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.flags import QUICK
from tests.whalejax.keys import KEY
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.fleets import Swarm, same, swarm
from tests.whalejax.swarm.test_faults import Journal, counted_once


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

ROOT: Final = Path(__file__).resolve().parents[3]
STEPS: Final = 4
_SECONDS: Final = 300.0


@contextlib.contextmanager
def processes(
    registry: tuple[str, int], given: list[dict[str, Any]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Peers, which are ended in any case."""
    common = {
        "job": "tests.whalejax.swarm.swarm_jobs:make",
        "stages": jobs.STAGES,
        "micro_batches": jobs.COUNT,
        "registry": list(registry),
        "key": str(KEY.path),
        "pull_seconds": 3.0,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
    }
    script = str(ROOT / "scripts" / "swarm_peer.py")
    found: list[subprocess.Popen[str]] = []
    try:
        for one in given:
            words = [sys.executable, script, json.dumps({**common, **one})]
            found.append(
                subprocess.Popen(
                    words, env=environment, stdout=subprocess.PIPE, text=True
                )
            )
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def test_killed_and_stopped_processes_change_no_loss() -> None:
    """Beside peers of this process, so that only those that end are processes."""
    journal = Journal()
    settings = {"call_seconds": 10.0, "more": {"write": journal}}
    given: list[dict[str, Any]] = [
        {"stage": 1, "fault": ["sum", 1, "SIGKILL"]},
        {"stage": 2, "fault": ["backward", 1, "SIGSTOP"]},
    ]
    with swarm(steps=STEPS, lease_seconds=30.0, **settings) as found:
        for stage in range(jobs.STAGES):
            found.join(stage, pull_seconds=3.0)
        with processes(found.serving.address, given) as running:
            losses = []
            for _, metrics in found.serving.run():
                losses.append(float(metrics["loss"]))
                while len(losses) == 1 and ready(found) < 5:
                    assert all(p.poll() is None for p in running)
                    threading.Event().wait(0.1)
            assert same(losses, jobs.losses(STEPS))
            counted_once(journal, STEPS)
            assert running[0].wait(_SECONDS) == -9
            state = Path(f"/proc/{running[1].pid}/stat").read_text()
            assert state.rpartition(")")[2].split()[0] == "T"


def ready(found: Swarm) -> int:
    """Peers that could work in the next step."""
    return sum(m.ready for m in found.serving.trainer.fleet.members())
