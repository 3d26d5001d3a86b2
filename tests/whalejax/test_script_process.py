"""A rank that ends by SystemExit ends at once, with its own status, and is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.processes import ROOT
from whalejax.processes import script_process


RANK: Final = """
import sys, time
import whalejax as wh
wh.init_distributed()
import jax
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("begin")
if jax.process_index() == int(sys.argv[1]):
    print("comes to its end", flush=True)
    {ending}
if sys.argv[2] == "waits":
    multihost_utils.sync_global_devices("a rank never comes here")
time.sleep(3)
print("outlives it", flush=True)
"""
ENVIRONMENT: Final = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))},
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
}


def launched(
    tmp_path: Path, ending: str, *words: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Launch two ranks, one of which ends so; what launcher and ranks wrote."""
    script = tmp_path / "script.py"
    script.write_text(RANK.format(ending=ending))
    options = ["--logs", str(tmp_path), "--processes", "2", "--exit-timeout", "100"]
    done = subprocess.run(
        [sys.executable, "-m", "whalejax", "launch", *options, str(script), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done, [(tmp_path / f"rank-{r}.log").read_text() for r in range(2)]


@pytest.mark.parametrize(
    ("rank", "ending", "status", "how"),
    [
        (1, "sys.exit(3)", 3, "SystemExit: 3"),
        (1, "raise SystemExit(2)", 2, "SystemExit: 2"),
        (0, "sys.exit('bad config')", 1, "SystemExit: bad config"),
    ],
)
def test_a_rank_that_exits_with_a_status_is_named(
    rank: int, ending: str, status: int, how: str, tmp_path: Path
) -> None:
    done, logs = launched(tmp_path, ending, str(rank), "waits")
    assert "comes to its end" in logs[rank], done.stderr
    assert done.returncode == status, done.stderr
    own = rf"rank {rank} on localhost (failed first, with status {status}|"
    # Process 0 goes with its service: the other one may find it silent before.
    own += rf"failed with {how}|has said nothing)"
    assert re.search(own, done.stderr), done.stderr
    assert f"rank {1 - rank} on localhost" not in done.stderr


@pytest.mark.parametrize(
    ("rank", "ending"), [(1, "sys.exit()"), (0, "raise SystemExit(0)")]
)
def test_a_rank_that_exits_with_0_ends_well(
    rank: int, ending: str, tmp_path: Path
) -> None:
    done, logs = launched(tmp_path, ending, str(rank), "goes on")
    assert done.returncode == 0, done.stderr
    assert "comes to its end" in logs[rank]
    assert "outlives it" in logs[1 - rank]


SEEN: Final = """
import os, pickle, sys
class Kept: pass
print(__name__, __file__, __doc__, __spec__, __package__, type(__loader__).__name__)
names = {*vars()} - {"__annotations__", "__cached__"}  # not of every Python
print(sys.argv, sys.path[0], os.getcwd(), sorted(names))
print(type(pickle.loads(pickle.dumps(Kept()))) is Kept, sys.modules["__main__"].Kept)
print("jax" in sys.modules, "whalejax" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 5, 256])
def test_a_script_finds_what_python_gives_it(status: int, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "script.py").write_text(SEEN)
    words = ["there/script.py", str(status), "--more"]
    plain, ours = (
        subprocess.run(
            [sys.executable, *shim, *words],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=100,
        )
        for shim in ([], [script_process.__file__])
    )
    assert plain.stdout and ours.stdout == plain.stdout, ours.stderr
    assert ours.returncode == plain.returncode == status % 256


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ranks_that_never_join_are_told_so(processes: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    options = ["--logs", str(tmp_path), "--processes", processes]
    done = subprocess.run(
        [sys.executable, "-m", "whalejax", "launch", *options, str(script)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    alone = "no process called wh.init_distributed(), so each ran the whole script"
    assert (alone in done.stderr) == (processes == "2")
