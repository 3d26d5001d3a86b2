"""What outlives the process with the dense part, and processes on other hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.sections.test_sections import (
    TABLES,
    check_same_rows,
    make_step,
    on_one_device,
    trained,
)
from tests.whalejax.test_table_step import make_batch, make_net
from whalejax.sections.section_run import KeptState


ROOT: Final = Path(__file__).resolve().parents[3]
DEADLINE: Final = 240.0


def start(folder: Path, steps: int, staleness: int, pause: float) -> Any:
    words = [str(folder), str(steps), str(staleness), str(pause)]
    module = "tests.whalejax.sections.dense_process"
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def losses_of(folder: Path) -> dict[int, list[float]]:
    """Losses of each step, as often as it was done."""
    found: dict[int, list[float]] = {}
    path = folder / "losses"
    for line in path.read_text().splitlines() if path.exists() else ():
        number, loss = json.loads(line)
        found.setdefault(number, []).append(loss)
    return found


@pytest.mark.parametrize("staleness", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_process_in_place_of_a_killed_one_goes_on(
    staleness: int, tmp_path: Path
) -> None:
    steps, alone, killed = 23, tmp_path / "alone", tmp_path / "killed"
    assert start(alone, steps, staleness, 0.0).wait(DEADLINE) == 0
    expected = losses_of(alone)
    for least in (8, 17):
        process = start(killed, steps, staleness, 0.2)
        end = time.monotonic() + DEADLINE
        while max(losses_of(killed), default=-1) < least:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert start(killed, steps, staleness, 0.0).wait(DEADLINE) == 0
    found = losses_of(killed)
    assert set(found) == set(range(steps))
    assert any(len(each) > 1 for each in found.values())  # Some were done again.
    assert all(each[0] == expected[n][0] for n, each in found.items())
    assert all(set(each) == {each[0]} for each in found.values())
    with np.load(killed / "rows.npz") as rows, np.load(alone / "rows.npz") as others:
        assert not rows["over"].any()
        for name in TABLES:
            np.testing.assert_array_equal(rows[name], others[name])


def test_what_is_kept_is_found_again_and_forgotten_by_a_new_run(tmp_path: Path) -> None:
    pins = {"user": "rows", "tag": 0}
    inside = ("user", "tag")
    given: Any = {"inside": inside, "pins": pins}
    run = wh.SectionRun(folder=tmp_path, keep_every=2)
    with make_step(1, run=run, **given) as step:
        assert step.resume() is None
        _, state = trained(step, 5)
        kept = step.table_values(state)
        assert KeptState(tmp_path).step == 4
        assert [p.name for p in tmp_path.glob("dense-*")] == ["dense-000000000004"]
    with make_step(1, run=run, **given) as step:
        state = step.resume()
        assert int(state.step) == 4
        state, _ = step(state, make_batch(4, np.float32))
        # With s = 1, and rows with all updates after step 3, as before.
        for name, rows in step.table_values(state).items():
            np.testing.assert_array_equal(rows, kept[name])
        state = step.init_from(make_net(np.float32))
        assert KeptState(tmp_path).step == -1 and step.resume() is None


def test_a_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    kept = KeptState(tmp_path)
    kept.begin(3).mkdir()
    kept.commit(3)
    assert KeptState(tmp_path).step == 3
    (tmp_path / "kept.json").write_text("{")
    with pytest.raises(wh.WhaleError, match="kept.json is damaged"):
        KeptState(tmp_path)


def test_the_launcher_starts_a_killed_process_again(tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", tmp_path / "said"
    script.write_text(
        "import os, pathlib, signal\n"
        f"said = pathlib.Path({str(said)!r})\n"
        "before = said.read_text() if said.exists() else ''\n"
        "said.write_text(before + 'x')\n"
        "if len(before) < 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = ["launch", "--processes", "1", "--logs", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "whalejax", *words, "--keep", str(script)]
    done = subprocess.run(command, cwd=ROOT, timeout=DEADLINE, check=False)
    assert done.returncode == 0 and said.read_text() == "xx"
    command[command.index("1")] = "2"
    done = subprocess.run(
        command, cwd=ROOT, timeout=DEADLINE, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2 and "restarts a single process" in done.stderr


KEEPER: Final = """import json, sys
from pathlib import Path
from whalejax.processes.restarting_processes import Keeper, KeptCommand

program = KeptCommand(name="script", command=json.loads(sys.argv[1]))
sys.exit(Keeper([program], Path(sys.argv[2]), print, silent_seconds=10.0).run())
"""


@pytest.mark.full
def test_a_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    steps, alone, stopped = 23, tmp_path / "alone", tmp_path / "stopped"
    assert start(alone, steps, 2, 0.0).wait(DEADLINE) == 0
    stopped.mkdir()
    module = "tests.whalejax.sections.dense_process"
    words = [sys.executable, "-m", module, str(stopped), str(steps), "2", "0.2"]
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, json.dumps(words), str(tmp_path / "logs")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + DEADLINE
    while max(losses_of(stopped), default=-1) < 8:
        assert keeper.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    first = int((stopped / "pid").read_text())
    os.kill(first, signal.SIGSTOP)
    said, _ = keeper.communicate(timeout=DEADLINE)
    assert keeper.returncode == 0 and "script stands still: no beat for" in said
    assert int((stopped / "pid").read_text()) != first
    found, expected = losses_of(stopped), losses_of(alone)
    assert set(found) == set(range(steps))
    assert all(set(each) == set(expected[n]) for n, each in found.items())
    with np.load(stopped / "rows.npz") as rows, np.load(alone / "rows.npz") as others:
        assert not rows["over"].any()
        for name in TABLES:
            np.testing.assert_array_equal(rows[name], others[name])


SHELL: Final = """import os, sys
open(sys.argv[1], "a").write(sys.argv[2] + chr(10))
os.execv("/bin/sh", ["sh", "-c", sys.argv[3]])
"""


def test_processes_on_other_hosts(tmp_path: Path) -> None:
    """Two addresses of this machine stand for hosts, a script for ssh."""
    shell, said = tmp_path / "shell.py", tmp_path / "said"
    shell.write_text(SHELL)
    run = wh.SectionRun(
        folder=tmp_path / "run",
        hosts=("127.0.0.2", "127.0.0.3"),
        remote_shell=(sys.executable, str(shell), str(said)),
    )
    one = on_one_device()
    expected, other = trained(one, 6)

    def kill(number: int) -> None:
        if number == 3:
            os.kill(step.pipeline.section.pids[1], signal.SIGKILL)

    with make_step(0, run=run) as step:
        losses, state = trained(step, 6, kill)
        assert losses == expected
        check_same_rows(step, state, one, other)
        found = [step.pipeline.section.at(rank) for rank in (0, 1)]
        assert [each[1][0] for each in found if each] == ["127.0.0.2", "127.0.0.3"]
        assert step.report().replaced == 1
    assert set(said.read_text().split()) == {"127.0.0.2", "127.0.0.3"}
    assert not list((tmp_path / "run").glob("run-*"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep_every": 3}, "folder is None; name one that all hosts see"),
        ({"keep_every": 0}, "keep_every is 0; expected a whole number"),
        ({"folder": "a", "hosts": ("node7",)}, "which node7 of hosts cannot reach"),
        ({"folder": "a", "hosts": ()}, r"hosts is \(\); expected some words"),
        ({"folder": 3}, "folder is 3; expected the path"),
        (
            {
                "folder": "a",
                "host": "me",
                "hosts": ("b",),
                "remote_shell": ("no-such",),
            },
            "there is no program 'no-such' here",
        ),
    ],
)
def test_runs_that_cannot_be(given: Any, words: str) -> None:
    with pytest.raises(wh.WhaleError, match=words):
        wh.SectionRun(**given)
