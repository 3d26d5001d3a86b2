"""Processes that a launcher starts: who they are, and that none outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import pytest

from whalejax.meshes.errors import WhaleError
from whalejax.processes import launch_spec as launch
from whalejax.processes import launcher
from whalejax.processes.launcher import Launch


ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 60

WHO = """
import os, sys
from whalejax.distributed.launch_env import DeviceReport, launched, tell_launcher
address, count, rank = launched()
tell_launcher(DeviceReport(kind=f"kind{rank}", devices=rank + 1))
print("rank", rank, "of", count, "at", address, sys.argv[1:], os.environ.get("AT"))
"""

KEYS = """
import os, pathlib, sys
from whalejax.distributed.first_connection import shared_key
key = shared_key()
print(key.run)
pathlib.Path(sys.argv[1], "key").write_text(str(key.path))
"""

WAITS = """
import os, pathlib, subprocess, sys, time
rank = os.environ["WHALEJAX_PROCESS_ID"]
child = subprocess.Popen(["sleep", "600"])
folder = pathlib.Path(sys.argv[1])
(folder / f"{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
(folder / f"{rank}.tmp").rename(folder / f"{rank}.pids")
if rank == "1" and sys.argv[2] == "fails":
    while not (folder / "0.pids").exists():
        time.sleep(0.01)
    sys.exit("boom")
print("waits", flush=True)
time.sleep(600)
"""


def start(tmp_path: Path, program: str, *words: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(program)
    options, arguments = list(words), []
    if "--" in options:
        place = options.index("--")
        options, arguments = options[:place], options[place + 1 :]
    command = [sys.executable, "-m", "whalejax", "launch", "--logs", str(tmp_path)]
    return subprocess.Popen(
        [*command, *options, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(folder: Path, ranks: int) -> None:
    files = [folder / f"{rank}.pids" for rank in range(ranks)]
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 2 * ranks
    pause = threading.Event()
    for _ in range(500):
        if not any(map(alive, pids)):
            return
        pause.wait(0.01)
    pytest.fail(f"still there: {[pid for pid in pids if alive(pid)]}")


def test_ranks_know_each_other_and_have_logs(tmp_path: Path) -> None:
    running = start(tmp_path, WHO, "--processes", "3", "--", "--steps", "2")
    out, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert logs[0].strip() == out.strip()  # rank 0 alone is shown
    addresses = {log.split(" at ")[1].split()[0] for log in logs}
    assert len(addresses) == 1 and addresses.pop().startswith("127.0.0.1:")
    for rank, log in enumerate(logs):
        assert log.strip().startswith(f"rank {rank} of 3 at ")
        assert "['--steps', '2']" in log
        assert "whalejax-rank" not in log
    listens, *lines = errors.splitlines()
    assert re.fullmatch(
        r"whalejax: process 0 listens at 127\.0\.0\.1:\d+, which this machine alone "
        "can reach",
        listens,
    )
    table = [line.split() for line in lines]
    assert table[0][:4] == ["rank", "host", "kind", "devices"]
    assert [row[:4] for row in table[1:]] == [
        [str(rank), "localhost", f"kind{rank}", str(rank + 1)] for rank in range(3)
    ]


def test_how_all_ended_as_json(tmp_path: Path) -> None:
    running = start(tmp_path, WHO, "--json")
    out, errors = running.communicate(timeout=SECONDS)
    assert (running.returncode, errors) == (0, "")
    found = json.loads(out)
    assert (found["status"], found["failure"]) == (0, None)
    assert found["ranks"] == [
        {
            "rank": rank,
            "host": "localhost",
            "kind": f"kind{rank}",
            "devices": rank + 1,
            "cpu_quota_percent": None,
            "log": str(tmp_path / f"rank-{rank}.log"),
        }
        for rank in range(2)
    ]
    assert "rank 0 of 2" in (tmp_path / "rank-0.log").read_text()


def test_a_failure_as_json(tmp_path: Path) -> None:
    running = start(tmp_path, "raise SystemExit('boom')", "--json")
    out, errors = running.communicate(timeout=SECONDS)
    assert (running.returncode, errors) == (1, "")
    found = json.loads(out)
    assert found["status"] == 1 and "boom" in found["failure"]
    assert {rank["kind"] for rank in found["ranks"]} == {None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_failed_rank_said_is_shown_once(tmp_path: Path, failing: int) -> None:
    """The first rank's output is shown while it runs, that of others at the end."""
    script = (
        "import os, time\n"
        f"if os.environ['WHALEJAX_PROCESS_ID'] == '{failing}': 1 / 0\n"
        "time.sleep(600)"
    )
    running = start(tmp_path, script)
    out, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 1
    assert f"rank {failing} on localhost failed first, with status 1" in errors
    assert [s.count("ZeroDivisionError") for s in (out, errors)] == [
        int(failing == 0),
        int(failing == 1),
    ]
    assert str(tmp_path / f"rank-{failing}.log") in errors


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_first_error_is_shown_and_all_are_stopped(tmp_path: Path) -> None:
    running = start(tmp_path, WAITS, "--processes", "3", "--", str(tmp_path), "fails")
    out, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 1
    assert "rank 1 on localhost failed first, with status 1" in errors
    assert "  [1] boom" in errors
    pids = [rank for rank in range(3) if (tmp_path / f"{rank}.pids").exists()]
    assert pids[:2] == [0, 1]
    wait_until_gone(tmp_path, 2)


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX may be there; nothing is shared
def test_the_rest_may_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails is named when those that were there have ended."""
    code = (
        "import os, pathlib, time\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1': raise SystemExit('boom')\n"
        "time.sleep(0.5)\n"
        f"pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    )
    launch = Launch(
        command=(sys.executable, "-c", code),
        processes=2,
        logs=tmp_path,
        tells=False,
        stops=False,
    )
    assert launcher.run(launch) == 1
    assert (tmp_path / "done").exists()
    said = capsys.readouterr().err
    assert said.startswith("whalejax: rank 1 on localhost failed first, with status 1")
    assert said.endswith("; the others went on. It said:\n  [1] boom\n")


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_launcher_takes_its_processes_with_it(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    if number != signal.SIGKILL and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run in the background, where the signal is ignored")
    running = start(tmp_path, WAITS, "--processes", "1", "--", str(tmp_path), "")
    assert running.stdout is not None
    assert running.stdout.readline() == "waits\n"
    running.send_signal(number)
    running.communicate(timeout=SECONDS)
    assert running.wait(SECONDS) == status
    if number == signal.SIGKILL:  # only what it started itself goes with it then
        pid, child = map(int, (tmp_path / "0.pids").read_text().split())
        (tmp_path / "0.pids").write_text(f"{pid} {pid}")
        os.kill(child, signal.SIGKILL)
    wait_until_gone(tmp_path, 1)


def test_other_hosts_are_reached_by_a_shell(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nAT="$2:$1"; export AT; exec sh -c "$3"\n')
    shell.chmod(0o755)
    running = start(
        tmp_path,
        WHO,
        *("--processes", "4", "--hosts", "node-a,node-b", "--port", "4321"),
        *("--remote-shell", f"{shell} -x", "--", "it's a word"),
    )
    _, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    for rank in range(4):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        host = "node-a" if rank < 2 else "node-b"
        assert f"rank {rank} of 4 at node-a:4321" in log
        assert log.strip().endswith(f"""["it's a word"] {host}:-x""")


def test_what_listens_and_what_others_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in launch.PASSED_ON:
        monkeypatch.delenv(name, raising=False)
    away = Launch(
        command=("true",), processes=2, hosts=("fd00::2", "b"), remote_shell=("sh",)
    )
    assert away.coordinator() == "[fd00::2]:8476"
    assert away.shared_environment() == {}
    said = away.listens(away.coordinator())
    assert "on all addresses of fd00::2 at port 8476, without authentication" in said
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "/cert")
    monkeypatch.setenv("WHALEJAX_KEY_FILE", "/key")
    assert away.shared_environment() == {
        "WHALEJAX_KEY_FILE": "/key",
        "JAX_MTLS_CERT_FILE": "/cert",
    }
    words = away.words(0, away.shared_environment())
    assert "JAX_MTLS_CERT_FILE=/cert" in words[-1]
    assert "by the mutual TLS of JAX_MTLS_CERT_FILE" in away.listens("b:8476")


def test_ranks_of_this_machine_share_a_key_that_ends_with_them(tmp_path: Path) -> None:
    running = start(tmp_path, KEYS, "--", str(tmp_path))
    _, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, errors
    logs = {(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)}
    assert len(logs) == 1 and logs.pop().startswith("whalejax run ")
    assert not Path((tmp_path / "key").read_text()).exists()


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX may be there; nothing is shared
def test_without_control_groups_it_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: float) -> None:
        raise WhaleError("no control group can be made here")

    monkeypatch.setattr(launcher, "Quota", refuse)
    command = (sys.executable, "-c", "print('ran')")
    made = Launch(command=command, processes=1, quotas=(50,), logs=tmp_path)
    assert launcher.run(made) == 0
    found = capfd.readouterr()
    assert "running without CPU quotas: no control group can be made" in found.err
    assert "ran" in found.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processes": 0}, "--processes is 0; expected at least 1"),
        ({"hosts": ("a", "a")}, "--hosts a,a has a host twice"),
        ({"hosts": ("a", "b", "c")}, "Raise it to 3"),
        ({"hosts": ("localhost", "b")}, "which b cannot reach under that name"),
        ({"hosts": ("", "b")}, "--hosts has an empty name"),
        ({"exit_seconds": 0}, "--exit-timeout is 0; expected at least 1 s"),
        ({"port": 70000}, "--port is 70000; expected 1 to 65535"),
        ({"quotas": (50,)}, "--cpu-quota has 1 values for 2 processes"),
        ({"quotas": (100, 0)}, "--cpu-quota: a CPU quota of 0 percent of a core"),
        ({"hosts": ("b",), "quotas": (5, 5)}, "works on this machine only"),
        ({"hosts": ("b",), "remote_shell": ("no-such",)}, "no program 'no-such'"),
    ],
)
def test_what_cannot_be_started_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(WhaleError) as error:
        Launch(**{"command": ("true",), "processes": 2, **given})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cpu-quota", "fast,slow"), "--cpu-quota is 'fast,slow'; expected percents"),
        (("--logs", "/dev/null/logs"), "--logs /dev/null/logs: "),
    ],
)
def test_options_are_read_or_refused(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    running = start(tmp_path, WHO, *words)
    _, errors = running.communicate(timeout=SECONDS)
    assert running.returncode == 2
    assert said in errors and "Traceback" not in errors
