"""A swarm whose peers are allocations of Slurm, or actors of Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port
from tests.whalejax.elastic.engines.launched import environment
from tests.whalejax.elastic.engines.test_ray import ray_cluster
from tests.whalejax.elastic.engines.test_slurm import slurm as slurm
from tests.whalejax.swarm import swarm_jobs as jobs
from tests.whalejax.swarm.test_kept import child


pytestmark = [
    pytest.mark.full,
    pytest.mark.relaxed_promotion,  # Optax promotes its counts
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SECONDS = 240
STEPS = 60


def trained(
    folder: Path, given: dict[str, str], options: list[str], command: str
) -> None:
    """Trains, kills what runs the first peer, and compares the losses.

    Args:
        folder: Folder of the run.
        given: Environment variables.
        options: Options that name the engine.
        command: Word of the command that runs a peer on its node.
    """
    words = [
        *(sys.executable, "-m", "whalejax", "swarm", "serve", f"{jobs.__file__}:make"),
        *("--stages", "3", "--steps", str(STEPS), "--micro-batches", "6"),
        *("--processes", "3", "--save", "s", "--save-every", "5", "--json"),
        *("--port", str(free_port()), "--host", socket.gethostname(), *options),
    ]
    running = subprocess.Popen(
        words,
        env=given,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    losses: dict[int, float] = {}
    killed = False
    try:
        assert running.stdout is not None
        for line in running.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == "step":
                losses[said["step"]] = said["loss"]
            if said.get("step") == 12 and not killed:
                killed = True
                os.kill(child(running.pid, command), signal.SIGKILL)
        errors = running.communicate(timeout=SECONDS)[1]
    finally:
        running.kill()
    assert running.returncode == 0, errors
    assert "peer-1 ended by SIGKILL; it is started again" in errors
    assert [losses[step] for step in sorted(losses)] == pytest.approx(
        jobs.losses(STEPS), rel=1e-6
    )


def test_peers_are_allocations(tmp_path: Path, slurm: Path) -> None:
    given = environment(SLURM_CONF=str(slurm / "slurm.conf"))
    trained(tmp_path, given, ["--slurm=--mem=100M"], "srun")
    end = time.monotonic() + SECONDS
    words = ["squeue", "-h"]
    while subprocess.run(words, env=given, capture_output=True, check=True).stdout:
        assert time.monotonic() < end
        time.sleep(0.5)


def test_peers_are_actors(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="there is no Ray here; it is an extra")
    given = environment(RAY_USAGE_STATS_ENABLED="0")
    with ray_cluster(tmp_path, given) as (address, tell):
        for _ in range(2):  # Four nodes of one CPU.
            tell("add")
        shell = "whalejax.elastic.engines.ray_shell"
        trained(tmp_path, given, ["--ray", address], shell)
