"""Several processes of one program, with devices of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.flags import QUICK
from whalejax.distributed.reserved_port import reserve_port


ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = 240

START: Final = """
import gc, os, sys
gc.set_threshold(50_000, 20, 20)
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what native code writes (Gloo does) goes to stderr
import jax
index, count, port, devices = map(int, sys.argv[1:5])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", devices)
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
"""
"""How each begins; what it is given stands behind, in ``sys.argv[5:]``."""


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(
    program: str, *arguments: object, count: int = 2, devices: int = 1
) -> list[subprocess.Popen[str]]:
    """Start processes that know each other.

    Args:
        program: Python code, behind ``START``.
        arguments: of each.
        count: of processes.
        devices: of each.
    """
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
    }
    # Held, so that no other program gets it before the first of them listens there.
    port = reserve_port("127.0.0.1")
    known = str(count), str(port), str(devices), *map(str, arguments)
    return [
        subprocess.Popen(
            [sys.executable, "-c", START + program, str(index), *known],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def finish(running: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes to end well; what each wrote."""
    try:
        done = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, done, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [output for output, _ in done]
