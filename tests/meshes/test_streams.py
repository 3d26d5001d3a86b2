"""Standard output that takes nothing: a command says so, and does not end with 0."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.planner.plans import example
from whalejax.cli import main
from whalejax.distributed import standard_streams


ROOT: Final = Path(__file__).resolve().parents[2]
SAYS: Final = "standard output cannot be written (No space left on device)"

COMMANDS: Final = (
    ("--version",),
    ("--help",),
    ("completion", "bash"),
    ("show", "plan.json"),
    ("show", "plan.json", "--json"),
    ("why", "plan.json", "blocks.0.query.kernel", "--json"),
    ("diff", "plan.json", "plan.json"),
    ("diff", "plan.json", "plan.json", "--json"),
    ("estimate", "table.csv", "-o", "out.csv", "--json"),
    ("launch", "--processes", "1", "--json", "script.py"),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the commands need."""
    from tests.planner.test_tables import TABLE

    monkeypatch.chdir(tmp_path)
    example().save("plan.json")
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "script.py").write_text("")
    return tmp_path


BUFFERED: Final = pytest.mark.parametrize("buffered", [True, False])


@contextlib.contextmanager
def full(*, buffered: bool) -> Iterator[None]:
    """Standard output on a disk that is full; seen when it is flushed, or at once."""
    with (
        open("/dev/full", "wb", buffering=-1 if buffered else 0) as file,
        io.TextIOWrapper(file, "utf-8", write_through=not buffered) as out,
        contextlib.redirect_stdout(out),
    ):
        try:
            yield
        finally:
            standard_streams.drop_stdout()


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:os.fork")
@BUFFERED
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk(
    command: tuple[str, ...], buffered: bool, here: Path, capfd: Any
) -> None:
    with full(buffered=buffered):
        assert main.main(command) == 2
    said = capfd.readouterr().err
    assert said.count(SAYS) == 1 and "Traceback" not in said


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_rank_that_failed_keeps_its_status(here: Path, capfd: Any) -> None:
    (here / "script.py").write_text("raise SystemExit(3)")
    with full(buffered=True):
        assert main.main(["launch", "--processes", "1", "--json", "script.py"]) == 3
    assert SAYS in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("show plan.json --json", 2, "--json prints to standard output, which is"),
        ("show plan.json", 0, ""),
        ("--help", 0, ""),
        ("--version", 0, ""),
    ],
)
def test_closed_output(
    words: str,
    status: int,
    says: str,
    here: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main(words.split()) == status
    errors = capfd.readouterr().err
    assert says in errors and bool(says) == bool(errors)


@pytest.mark.parametrize("path", ["", "/dev/full"])
def test_errors_that_cannot_be_shown(
    path: str, here: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb", buffering=0)) if path else None
        out = file and io.TextIOWrapper(file, "utf-8", write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", out)
            assert main.main(["show", "none.json"]) == 2
    assert capfd.readouterr().out == ""


def test_who_has_read_enough(here: Path) -> None:
    """The reader of a pipe may go; Python's own end does not fail over it."""
    shell = '{ "$@"; echo $? >&2; } | head -c 9'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "whalejax"]
        + ["show", "plan.json", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (len(done.stdout), done.stderr) == (9, "0\n")


def test_other_files_keep_their_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for another file is not standard output's affair."""
    with (
        standard_streams.standard_output(),
        pytest.raises(OSError) as caught,
        open("/dev/full", "w", encoding="utf-8") as file,
    ):
        file.write("a")
    assert not isinstance(caught.value, standard_streams.OutputWriteError)
