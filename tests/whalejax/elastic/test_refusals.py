"""Jobs that cannot be run end with the refusal at once, and are not tried again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.flags import QUICK
from tests.whalejax.elastic.runs import ROOT
from whalejax.elastic.member import ElasticMember
from whalejax.elastic.sharded_member import SpreadMember
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.wire.run_messages import NotSaved, Stop


JOB = """
import numpy as np, optax, jax.numpy as jnp
import whalejax as wh

def loss(params, batch):
    rows = batch @ params
    return jnp.square(rows @ rows.T).mean()

def job():
    return wh.Job(
        loss_fn=loss,
        make_model=lambda: jnp.ones((4, 4)),
        batch=lambda step, size: np.ones((size, 4), "float32"),
        optimizer=optax.sgd(0.1),
        batch_size=8,
    )
"""
SCRIPT = """
for state, metrics in wh.train_elastic(job(), steps=3, num_micro_batches=2):
    pass
"""


def job() -> wh.Job:
    """A job that runs."""

    def loss(params: Any, batch: Any) -> Any:
        return jnp.square(batch @ params).mean()

    x = np.ones((8, 4), "float32")
    return wh.Job(loss, lambda: jnp.ones((4, 4)), x, optax.sgd(0.1), batch_size=8)


def whalejax(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whalejax", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": QUICK, "PYTHONPATH": str(ROOT)},
    )


def starts(folder: Path) -> int:
    events = journal.read(folder / FOLDER / journal.EVENTS)
    return sum(said["event"] == "started" for said in events)


def test_a_job_whose_samples_depend_on_each_other_is_refused_once(
    tmp_path: Path,
) -> None:
    path, save = tmp_path / "job.py", tmp_path / "save"
    path.write_text(JOB)
    words = ["train", f"{path}:job", "--processes", "1:2", "--micro-batches", "2"]
    run = whalejax(*words, "--json", "--save", str(save))
    assert run.returncode == 2, run.stderr
    assert "dot_general (job.py:7) compares samples with each other" in run.stderr
    assert "failures without" not in run.stderr and starts(save) == 2
    told = json.loads(run.stdout.splitlines()[-1])
    assert (told["status"], told["state"]) == (2, "refused")
    assert "job.py:7" in told["why"]


@pytest.mark.parametrize("call", ["wh.train_elastic(job(), steps=3)", "pass"])
def test_a_script_that_never_joins_is_started_once(tmp_path: Path, call: str) -> None:
    path, logs = tmp_path / "job.py", tmp_path / "logs"
    path.write_text(f"{JOB}\n{call}\n".replace("rows @ rows.T", "rows"))
    run = whalejax("launch", "--processes", "1:1", "--logs", str(logs), str(path))
    assert run.returncode == 2, run.stderr
    assert "ended with status 0, and never joined the run" in run.stderr
    assert "write `for state, metrics in wh.train_elastic(job, steps=…):`" in run.stderr
    assert starts(logs) == 1
    (log,) = logs.rglob("*.log")
    warned = "UserWarning: nothing was trained: wh.train_elastic" in log.read_text()
    assert warned == (call != "pass")


def test_steps_that_nothing_iterates_over_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="nothing was trained: wh.train_elastic") as w:
        wh.train_elastic(job(), steps=1)
    assert [one.filename for one in w] == [__file__]
    steps = wh.train_elastic(job(), steps=1)
    assert iter(steps) is steps and int(next(steps)[0].step) == 1


def test_a_job_that_is_not_there_is_refused_once(tmp_path: Path) -> None:
    words = ["train", "nosuch", "--processes", "1:2", "--save", str(tmp_path)]
    run = whalejax(*words)
    assert run.returncode == 2 and "no reference model is named" in run.stderr
    assert starts(tmp_path) == 2, run.stderr


def test_a_script_whose_job_cannot_be_planned_is_started_once(tmp_path: Path) -> None:
    path, logs = tmp_path / "job.py", tmp_path / "logs"
    path.write_text(JOB + SCRIPT)
    run = whalejax("launch", "--processes", "1:1", "--logs", str(logs), str(path))
    assert run.returncode == 2, run.stderr
    assert "compares samples with each other" in run.stderr and starts(logs) == 1


@pytest.mark.parametrize(
    ("third", "told"),
    [
        (np.ones((9, 4), "float32"), "shape (9, 4); the plan is for the global shape"),
        (np.ones((7, 4), "float32"), "as many samples in every step"),
        (np.ones((8, 4), "int32"), "batch has dtype int32; the plan is for float32"),
        ({"x": np.ones((8, 4), "float32")}, "has besides batch['x']"),
    ],
)
def test_a_batch_unlike_the_planned_one_is_not_trained(third: Any, told: str) -> None:
    usual = np.ones((8, 4), "float32")
    other = dataclasses.replace(job(), batch=lambda n, size: third if n == 2 else usual)
    steps = wh.train_elastic(other, steps=3, num_micro_batches=2)
    assert [int(next(steps)[0].step) for _ in range(2)] == [1, 2]
    with pytest.raises(wh.PlanError, match=re.escape(told)):
        next(steps)


def spoilt(step: int, size: int) -> np.ndarray:
    return np.full((size, 4), np.nan if step == 2 else 1.0, "float32")


def test_a_state_with_a_loss_of_nan_is_not_saved(tmp_path: Path) -> None:
    other = dataclasses.replace(job(), batch=spoilt)
    for name, more in {"alone": {}, "spread": {"mesh": "auto"}}.items():
        save = tmp_path / name
        list(wh.train_elastic(other, steps=3, save=save, save_every=1, **more))
        there = sorted(path.name for path in save.glob("step_*"))
        assert there == ["step_000001", "step_000002"]


def test_a_member_that_must_end_does_not_save_a_state_with_a_loss_of_nan() -> None:
    saved: list[int] = []
    posted: list[Any] = []
    for is_divergent in (False, True):
        member = object.__new__(ElasticMember)
        member._control = SimpleNamespace(step=3, post=posted.append)  # type: ignore[assignment]
        member._state = SimpleNamespace()  # type: ignore[assignment]
        member._training = SimpleNamespace(save=Path("save"))  # type: ignore[assignment]
        member._saver = SimpleNamespace(  # type: ignore[assignment]
            save=lambda state, step: saved.append(step), wait=lambda: True
        )
        member._is_divergent = is_divergent
        with pytest.raises(SystemExit):
            member._stop(Stop(saves=True, well=True, why="drained"))
    assert saved == [3]
    assert [type(report) for report in posted] == [NotSaved]


def test_a_process_that_must_end_does_not_save_a_state_with_a_loss_of_nan(
    tmp_path: Path,
) -> None:
    member = object.__new__(SpreadMember)
    saved: list[Path] = []
    member._training = SimpleNamespace(save=tmp_path, keep=1)  # type: ignore[assignment]
    member._control, member._phase = None, lambda phase: None  # type: ignore[assignment,method-assign]
    member._programs = SimpleNamespace(  # type: ignore[assignment]
        save=lambda path, state, approve: saved.append(path)
    )
    for member._is_divergent in (True, False):
        member._save(None, 3)  # type: ignore[arg-type]
    assert saved == [tmp_path / "step_000003"]


def test_a_loss_of_nan_ends_a_run(tmp_path: Path) -> None:
    path, save = tmp_path / "job.py", tmp_path / "save"
    path.write_text(
        "from tests.whalejax.elastic import test_refusals as r\n"
        "import dataclasses\n"
        "def job(): return dataclasses.replace(r.job(), batch=r.spoilt)\n"
    )
    words = ["--processes", "1:1", "--save", str(save), "--save-every", "1"]
    run = whalejax("train", f"{path}:job", *words, "--steps", "5")
    assert run.returncode == 1, run.stderr
    assert "step 3 of 5: the loss is nan; training has stopped" in run.stderr
    there = sorted(path.name for path in save.glob("step_*"))
    assert there == ["step_000001", "step_000002"] and starts(save) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    run = whalejax(
        *("launch", "--processes", "1:2", "--logs", "/proc/logs", str(script))
    )
    told = "--logs /proc/logs: No such file or directory. Name a folder that can be"
    assert run.returncode == 2 and told in run.stderr, run.stderr
    run = whalejax("train", "mlp-test", "--processes", "1:2", "--save", "/proc/logs")
    told = "/proc/logs/elastic: checkpoints cannot be written here"
    assert run.returncode == 2 and told in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
