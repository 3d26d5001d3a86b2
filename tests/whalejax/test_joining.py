"""Processes are started by one call, whose mistakes are said before anything waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

import whalejax as wh
from tests.processes import ROOT, free_port


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"coordinator": "a:1"}, "num_processes and process_id not given"),
        (
            {"coordinator": "here", "num_processes": 2, "process_id": 2},
            r"'here'; expected 'host:port'[\s\S]*process_id is 2; expected 0 to 1",
        ),
        (
            {"coordinator": "a:1", "num_processes": 0, "process_id": 0},
            "num_processes is 0",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({}, "no cluster is known here"),
    ],
)
def test_mistakes_are_said_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        wh.init_distributed(**arguments)


PROGRAM: Final = """
import sys, time
import whalejax as wh
port, count, number, timeout = sys.argv[1], *map(int, sys.argv[2:])
try:
    found = wh.init_distributed(f"127.0.0.1:{port}", count, number,
                                timeout_seconds=timeout, heartbeat_seconds=5)
except wh.WhaleError as error:
    print(error, flush=True)
    raise SystemExit(3)
import jax, jax.numpy as jnp
assert wh.init_distributed() == found == count
from jax.experimental import multihost_utils
print("together", multihost_utils.process_allgather(jnp.ones(())).sum(), flush=True)
time.sleep(60)
"""


def begin(*arguments: object) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env={**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_process_that_stands_still_ends_the_others() -> None:
    """It says nothing any more, and the others end within a minute."""
    port = free_port()
    running = [begin(port, 2, number, 60) for number in range(2)]
    try:
        for process in running:
            assert process.stdout is not None
            line = ""
            while "together" not in line:
                line = process.stdout.readline()
                assert line, "it ended"
            assert "2.0" in line
        running[1].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        said = running[0].communicate(timeout=60)[0]
        assert running[0].returncode != 0
        assert time.monotonic() - start < 60
        assert "whalejax: process 1 (pid " in said
        assert "it is gone or stands still. Process 0 ends for it" in said
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_where_nothing_listens_that_is_said() -> None:
    process = begin(free_port(), 2, 1, 3)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "nothing listens at 127.0.0.1" in said or "DEADLINE" in said


DETECTED: Final = """
import whalejax as wh
count = wh.init_distributed(timeout_seconds=60)
import jax
from jax.experimental import multihost_utils
mine = jax.numpy.asarray(jax.process_index())
print("ranks", multihost_utils.process_allgather(mine).tolist(), "of", count)
"""


def slurm_of(rank: int, port: int) -> dict[str, str]:
    """What ``srun`` says to a process; JAX takes the port from the job's number."""
    return {
        "SLURM_JOB_ID": str(port - (65535 - 2**12 + 1)),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def open_mpi_of(rank: int, port: int) -> dict[str, str]:
    """What ``mpirun`` says to a process; JAX takes the port from the job's number."""
    job = port - (65535 - 2**12 + 1)
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job << 12}.0;tcp://127.0.0.1:35911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


def port_for_jobs() -> int:
    """A free one of those that JAX takes from the number of a job."""
    for port in range(65535 - 2**12 + 1 + os.getpid() % 1000, 65535):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.full
@pytest.mark.parametrize("says", [slurm_of, open_mpi_of])
def test_clusters_that_jax_knows_say_who_is_who(
    says: Callable[[int, int], dict[str, str]],
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    port = port_for_jobs()
    common = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DETECTED],
            env={**kept, **common, **gloo, **says(rank, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for text in said:
        assert "ranks [0, 1] of 2" in text
