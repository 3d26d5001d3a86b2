"""Processes are started by one call, whose mistakes are said before anything waits."""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest

import whalejax as wh
from tests.flags import QUICK
from tests.processes import ROOT, free_port
from whalejax.elastic import init_distributed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"coordinator": "a:1"}, "num_processes and process_id not given"),
        (
            {"coordinator": "here", "num_processes": 2, "process_id": 2},
            r"'here'; expected HOST:PORT[\s\S]*process_id is 2; expected 0 to 1",
        ),
        (
            {"coordinator": "a:1", "num_processes": 0, "process_id": 0},
            "num_processes is 0",
        ),
        (
            {"coordinator": "fd00::2:8476", "num_processes": 2, "process_id": 1},
            r"without brackets.*expected \[ADDRESS\]:PORT, such as \[fd00::2\]:8476",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({}, "no cluster is known here"),
    ],
)
def test_mistakes_are_said_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        wh.init_distributed(**arguments)


def test_mutual_tls_that_jax_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run without, and nobody would know."""
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "cert.pem")
    without = inspect.Signature()
    monkeypatch.setattr(init_distributed.inspect, "signature", lambda _: without)
    with pytest.raises(
        wh.WhaleError, match="JAX_MTLS_CERT_FILE set, and JAX .* has no"
    ):
        wh.init_distributed("127.0.0.1:1", 1, 0)


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
        env={
            **kept,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
def test_a_process_that_stands_still_ends_the_others() -> None:
    """It says nothing any more, and the others end for it."""
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
        said = running[0].communicate(timeout=240)[0]
        assert running[0].returncode != 0
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
    assert "nothing listens at 127.0.0.1" in said and "after 3 s" in said


def test_one_that_never_comes_is_named_before_jax_aborts() -> None:
    process = begin(free_port(), 3, 0, 2)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 3
    assert "processes 1, 2 of 3 have not come to 127.0.0.1" in said
    assert "Check failure" not in said


def test_a_port_in_use_is_said_by_process_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = begin(other.getsockname()[1], 2, 0, 60).communicate(timeout=240)[0]
    assert "process 0 cannot listen at port" in said and "already in use" in said
    assert "Check failure" not in said


# What happens before the first beat, and after the last one.

WINDOWS: Final = """
import atexit, os, signal, sys, threading, time
import jax
import whalejax as wh
from whalejax.membership import launch_heartbeat as heartbeat

case, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 1)
there = jax.local_devices
def local_devices():
    if case == "driver" and rank == 1:
        raise RuntimeError("no driver")
    if case == "interrupt" and rank == 1:
        time.sleep(600)
    if case == "interrupt":
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    return there()
jax.local_devices = local_devices
join = jax.distributed.initialize
def initialize(*given, **named):
    if case == "network" and rank == 1:
        raise RuntimeError("UNAVAILABLE: no network")
    if case == "leaves" and rank == 1:
        sys.exit(4)
    join(*given, **named)
jax.distributed.initialize = initialize
if case == "address":
    port = f"[::1]:{port}"
else:
    port = f"127.0.0.1:{port}"
wh.init_distributed(port, 2, rank, heartbeat_seconds=10)
if case == "goodbye" and rank == 0:
    atexit.register(time.sleep, 600)
if case == "goodbye" and rank == 1:
    def interrupt():
        while not heartbeat.start_heartbeat()._ended:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
if case == "exit" and rank == 1:
    atexit.register(time.sleep, 600)
if case == "address":
    from jax.experimental import multihost_utils
    multihost_utils.process_allgather(jax.numpy.ones(()))
    sockets = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{n}")}
    for name in ("tcp", "tcp6"):
        for line in list(open(f"/proc/self/net/{name}"))[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                print("listens", words[1].split(":")[0], flush=True)
    print("there", flush=True)
    if rank == 1:
        time.sleep(600)
"""


def windows(case: str) -> list[subprocess.Popen[str]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    given = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    given["XLA_FLAGS"] = QUICK
    given["WHALEJAX_EXIT_SECONDS"] = "1" if case == "exit" else ""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", WINDOWS, case, port, str(rank)],
            env={**kept, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "statuses", "says"),
    [
        (
            "driver",
            (70, 1),
            (r"process 1 \(pid \d+ on .*\) failed with RuntimeError: no driver", ""),
        ),
        (
            "network",
            (70, 1),
            (
                r"process 1 \(pid .*\) came and ended before JAX had joined all",
                r"JAX cannot join 2 processes at .* \(UNAVAILABLE: no network\)",
            ),
        ),
        pytest.param(
            "leaves",
            (70, 4),
            (r"process 1 \(pid .*\) came and ended before JAX had joined all", ""),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "interrupt",
            (130, 70),
            (
                "process 0 was interrupted while it waited in init_distributed",
                r"process 0 \(pid \d+ on .*\) failed with KeyboardInterrupt",
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "exit",
            (70, -signal.SIGKILL),
            (r"process 1 \(pid .*\) has not come to its end 1 s after others had", ""),
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_right_process_is_named(
    case: str, statuses: tuple[int, int], says: tuple[str, str]
) -> None:
    running = windows(case)
    try:
        said = [running[0].communicate(timeout=240)[0], ""]
        if says[1]:
            said[1] = running[1].communicate(timeout=240)[0]
        if case in ("driver", "leaves"):
            running[1].communicate(timeout=240)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert tuple(process.returncode for process in running) == statuses, said
    for text, expected in zip(said, says, strict=True):
        assert re.search(expected, text), text


@pytest.mark.full
def test_an_interrupt_at_the_exit_ends_a_process_by_its_signal() -> None:
    """Raised there it would be dropped, and the others would be blamed."""
    running = windows("goodbye")
    try:
        running[1].communicate(timeout=240)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert running[1].returncode == -signal.SIGINT


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_here_nothing_listens_for_other_machines_and_sigterm_ends() -> None:
    """Neither JAX's service nor Gloo; and JAX does not keep SIGTERM to itself."""
    running = windows("address")
    try:
        lines = []
        assert running[1].stdout is not None
        while "there\n" not in lines:
            lines.append(running[1].stdout.readline())
            assert lines[-1], lines
        running[1].terminate()
        assert running[1].wait(240) == -signal.SIGTERM
        lines += running[0].communicate(timeout=240)[0].splitlines(keepends=True)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    found = [line.split()[1] for line in lines if line.startswith("listens")]
    # As the kernel writes ::1 and 127.0.0.1.
    local = {f"{'0' * 24}01000000", "0100007F", f"{'0' * 16}FFFF00000100007F"}
    assert len(found) >= 3 and set(found) <= local


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
    common = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
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
