"""Processes are started by one call, whose mistakes are said before anything waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
