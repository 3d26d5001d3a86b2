"""Whatever ranks write and however they end, the launcher names who failed first."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from whalejax.distributed.launch_env import MARK, BlameReport, DeviceReport
from whalejax.membership import fixed_run
from whalejax.membership.fixed_run import rank_name
from whalejax.meshes.errors import WhaleError
from whalejax.processes import launcher, local_run
from whalejax.processes.launcher import Launch
from whalejax.processes.local_processes import GRACE_SECONDS
from whalejax.processes.process_output import TAIL_BYTES, Log, Pump, TerminalOutput


ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 120

LOUD: Final = """
import os, sys
for _ in range(50):
    os.write(1, b"x" * 8191 + b"\\n")
sys.exit(3 if os.environ["WHALEJAX_PROCESS_ID"] == "1" else 0)
"""
"""More than a pipe holds, so that who is not drained never ends; rank 1 fails then."""


def start(
    tmp_path: Path,
    program: str,
    *words: str,
    shell: str = 'exec "$@"',
) -> subprocess.Popen[bytes]:
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "whalejax", "launch", "--logs", str(tmp_path)]
    return subprocess.Popen(
        ["sh", "-c", shell, "sh", *command, *words, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(running: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    try:
        out, errors = running.communicate(timeout=SECONDS)
    finally:
        running.kill()
    return running.returncode, (out or b"").decode(), errors.decode()


NAMED: Final = "rank 1 on localhost failed first, with status 3"


def test_a_full_disk_under_the_logs(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").symlink_to("/dev/full")
    status, out, errors = ended(start(tmp_path, LOUD))
    assert status == 3 and NAMED in errors and "  [1] xxx" in errors
    assert out.count("\n") == 50
    assert errors.count("rank-1.log cannot be written (No space left on device)") == 1
    assert "Traceback" not in errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ('exec "$@" >&-', ""),
        ('exec "$@" > /dev/full', "rank 0 cannot be shown (No space left on device)"),
        pytest.param(
            '"$@" | true; exit 3',
            "rank 0 cannot be shown (Broken pipe)",
            marks=pytest.mark.full,
        ),
        pytest.param('exec "$@" <&- >&-', "", marks=pytest.mark.full),
    ],
)
def test_a_terminal_that_is_gone(tmp_path: Path, shell: str, says: str) -> None:
    status, out, errors = ended(start(tmp_path, LOUD, shell=shell))
    assert (status, out) == (3, "")
    assert NAMED in errors and says in errors and "Traceback" not in errors
    assert (tmp_path / "rank-0.log").stat().st_size == 50 * 8192


STRANGE: Final = (
    b"\xff\xfe\n",
    b"[1, 2]\n",
    b"null\n",
    b'{"type": "introduced", "kind": "cpu", "devices": "many"}\n',
    b'{"type": "introduced", "kind": ["cpu"], "devices": 1}\n',
    b'{"type": "introduced", "kind": "cpu", "devices": true}\n',
    b'{"type": "introduced", "kind": "cpu", "devices": 1, "more": 2}\n',
    b'{"type": "blamed", "rank": 99, "why": "no such rank"}\n',
    b'{"type": "blamed", "rank": -1, "why": "no such rank"}\n',
    b'{"type": "blamed", "rank": 1, "why": "itself"}\n',
    b'{"type": "blamed", "rank": 1.5, "why": 3}\n',
    b"[" * 100_000 + b"\n",
    b"9" * 5_000 + b"\n",
    b"without an end of its line",
)


def test_the_launchers_own_mark_with_other_content(tmp_path: Path) -> None:
    """It is output like any other."""
    lines = [MARK.encode() + rest for rest in STRANGE]
    program = (
        f"import os, sys\nlines = {lines!r}\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1':\n"
        "    os.write(1, b''.join(lines))\n"
        "    sys.exit(3)\n"
        "import time; time.sleep(600)"
    )
    status, _, errors = ended(start(tmp_path, program))
    assert status == 3 and NAMED in errors and "Traceback" not in errors
    assert (tmp_path / "rank-1.log").read_bytes() == b"".join(lines)


class Kept:
    """Stands for a log."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def pump(told: Callable[[Any], bool] = lambda _: True) -> tuple[Pump, Kept]:
    kept: Any = Kept()
    return Pump(-1, (kept,), told), kept


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_is_for_the_launcher_is_taken_out(size: int) -> None:
    text = (
        b"epoch 1\n"
        + MARK.encode()
        + b'{"type": "introduced", "kind": "cpu\\u001b[2J", "devices": 2}\n10%\r20%\r'
        + MARK.encode()
        + b'{"type": "blamed", "rank": 1, "why": "is gone"}\nwhalejax is a name\n'
    )
    found: list[Any] = []
    one, kept = pump(lambda said: not found.append(said))
    for place in range(0, len(text), size):
        one.feed(text[place : place + size])
    assert kept.data == b"epoch 1\n10%\r20%\rwhalejax is a name\n"
    assert found == [
        DeviceReport(kind="cpu?[2J", devices=2),
        BlameReport(rank=1, why="is gone"),
    ]


def test_a_progress_bar_passes_as_it_comes() -> None:
    one, kept = pump()
    for percent in range(3):
        one.feed(f"\r{percent} %".encode())
        assert kept.data.endswith(f"{percent} %".encode())
    assert one.tail(2) == ["1 %", "2 %"]


def test_a_long_line_is_not_kept() -> None:
    one, kept = pump()
    for begins in (b"x", MARK.encode() + b"["):
        one.feed(begins)
        for _ in range(100):
            one.feed(b"x" * 65_536)
            kept.data = b""
        assert len(one._tail) == TAIL_BYTES and len(one._held) < 5_000
        one.feed(b"\n")
    assert max(map(len, one.tail(20))) <= 301


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "os.write(1, b'50 %\\r')\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    )
    running = start(tmp_path, program)
    assert running.stdout is not None
    assert running.stdout.read(1) == b"5"
    (tmp_path / "go").touch()
    assert ended(running)[0] == 0


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="has no such signals")
def test_a_realtime_signal(tmp_path: Path) -> None:
    program = (
        "import os, signal, time\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGRTMIN + 3)\n"
        "time.sleep(600)"
    )
    status, _, errors = ended(start(tmp_path, program))
    assert status == 128 + signal.SIGRTMIN + 3
    assert "rank 1 on localhost failed first, with signal SIGRTMIN+3" in errors
    assert "Traceback" not in errors


def test_logs_that_are_deleted(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    program = (
        "import os, shutil, sys, time\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1':\n"
        f"    shutil.rmtree({str(logs)!r})\n"
        "    sys.exit('boom')\n"
        "time.sleep(600)"
    )
    status, _, errors = ended(start(tmp_path, program, "--logs", str(logs)))
    assert status == 1 and "  [1] boom" in errors and "Traceback" not in errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkdir, "Is a directory"),
        (os.mkfifo, "it is a pipe or a socket, where writing may block"),
    ],
)
def test_a_log_that_cannot_be_written(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    make(tmp_path / "rank-1.log")
    program = f"open({str(tmp_path / 'began')!r}, 'w')"
    status, _, errors = ended(start(tmp_path, program))
    assert status == 2 and f"rank-1.log cannot be written ({says})" in errors
    assert "Traceback" not in errors and not (tmp_path / "began").exists()


def test_a_pipe_for_a_log_that_somebody_reads(tmp_path: Path) -> None:
    """Who reads may stop reading, and then the process would wait for that."""
    os.mkfifo(tmp_path / "rank-0.log")
    reader = os.open(tmp_path / "rank-0.log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(WhaleError, match=r"rank-0\.log .* \(it is a pipe"):
            Log(tmp_path / "rank-0.log", print)
    finally:
        os.close(reader)


def test_more_ranks_than_the_shell_allows_files_for(tmp_path: Path) -> None:
    shell = 'ulimit -Sn 40; exec "$@"'
    status, _, errors = ended(start(tmp_path, "", "--processes", "16", shell=shell))
    assert status == 0, errors


def test_a_key_of_an_earlier_version_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("5e" * 32)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("WHALEJAX_KEY_FILE", str(tmp_path / "key"))
    status, _, errors = ended(start(tmp_path, ""))
    assert status == 2 and errors.count("holds no certificate") == 1
    assert not (tmp_path / "rank-0.log").exists()


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, _, errors = ended(start(tmp_path, "", "--port", str(port)))
    assert status == 2
    assert f"--port is {port}, which cannot be listened at" in errors
    assert "Address already in use" in errors and "give another" in errors


@pytest.mark.full
def test_nohup(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "print('here', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    )
    running = start(tmp_path, program, shell='trap "" HUP; exec "$@"')
    assert running.stdout is not None
    assert running.stdout.readline() == b"here\n"
    running.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert ended(running)[0] == 0


# What a launcher waits for has an end.


def within(tmp_path: Path, program: str, **given: Any) -> int:
    launch = Launch(
        command=(sys.executable, "-c", program), processes=2, logs=tmp_path, **given
    )
    return launcher.run(launch)


FORKS: Final = "ignore:os.fork"  # JAX may be there; nothing is shared


def test_a_terminal_that_takes_no_more_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipe that nobody reads, and then somebody does."""
    source, target = os.pipe()
    said: list[str] = []
    with os.fdopen(target, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr("whalejax.processes.process_output.PATIENCE_SECONDS", 0.01)
        shown = TerminalOutput(said.append)
        for _ in range(40):
            shown.write(b"x" * 8191 + b"\n")
        read = os.read(source, 1 << 20)
        shown.write(b"again\n")
    assert 0 < len(read) < 40 * 8192
    left = 40 * 8192 - len(read)
    said_of_it = f"\n[{left} bytes are left out here: see the log]\nagain\n"
    assert os.read(source, 1 << 20).decode() == said_of_it
    os.close(source)
    assert not said


STANDS: Final = """
import os, time
if os.environ["WHALEJAX_PROCESS_ID"] == "1":
    print("stands", flush=True)
    time.sleep(600)
"""


@pytest.mark.filterwarnings(FORKS)
def test_one_that_stands_still_at_its_exit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert within(tmp_path, STANDS, exit_seconds=1) == 1
    said = capsys.readouterr().err
    assert "rank 1 on localhost has not ended 1 s after others had" in said
    assert "whalejax: stopping rank 1 by SIGTERM; what is left in 10 s" in said


ABSENT: Final = """
import os, time
from whalejax.distributed.launch_env import Joining, tell_launcher
if os.environ["WHALEJAX_PROCESS_ID"] == "0":
    tell_launcher(Joining())
    time.sleep(600)
"""


@pytest.mark.filterwarnings(FORKS)
def test_one_that_ends_well_while_others_wait_for_it_to_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert within(tmp_path, ABSENT) == 1
    said = capsys.readouterr().err
    assert "rank 1 on localhost ended with exit status 0 before it had joined" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings(FORKS)
def test_one_that_a_signal_has_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_run, "STOPPED_SECONDS", 0.5)
    program = (
        "import os, signal, time\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(600)"
    )
    assert within(tmp_path, program) == 1
    assert "rank 1 on localhost is stopped by a signal" in capsys.readouterr().err


@pytest.mark.filterwarnings(FORKS)
def test_systems_that_watch_processes_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    program = (
        "import os, sys, time\n"
        "if os.environ['WHALEJAX_PROCESS_ID'] == '1': sys.exit(3)\n"
        "time.sleep(600)"
    )
    assert within(tmp_path, program) == 3
    assert "rank 1 on localhost failed first" in capsys.readouterr().err


class Stubborn:
    """Stands for processes that nothing ends before they are killed."""

    names = tuple(rank_name(rank) for rank in range(8))

    def terminate(self, name: str, *, group: bool) -> None:
        assert name in self.names and group

    def kill(self, name: str) -> None:
        assert name in self.names

    def log(self, name: str) -> Path:
        return Path(os.devnull)


def test_stopping_has_one_deadline_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(local_run.time, "monotonic", lambda: clock[0])
    launch = Launch(command=("true",), processes=8, logs=tmp_path)
    with contextlib.ExitStack() as stack:
        made = launcher._Launched(launch, stack, "127.0.0.1:1", {})
        monkeypatch.setattr(made._loop, "processes", Stubborn())

        def take_ends(seconds: float) -> None:
            clock[0] += seconds

        monkeypatch.setattr(made._loop, "_take_ends", take_ends)
        made._loop._stop()
    assert clock[0] <= 1.5 * GRACE_SECONDS + 1e-6
    said = capsys.readouterr().err
    assert "stopping rank 0, 1, 2, 3, 4, 5, 6, 7 by SIGTERM" in said
    assert "in 10 s is killed" in said
