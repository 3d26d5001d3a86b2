"""Real processes, really killed: no step is lost, no sample doubled, losses equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.runs import ROOT, SECONDS, Run, running, runs
from whalejax.elastic.replica_programs import ReplicaPrograms
from whalejax.journals import journal
from whalejax.journals.journal import FOLDER
from whalejax.membership.assignment import check_tiles


pytestmark = pytest.mark.relaxed_promotion

MICRO_BATCHES = 8


def expected_losses(steps: int) -> list[float]:
    """Those of an undisturbed run on one device."""
    programs = ReplicaPrograms(
        example.make(), batch=None, micro_batches=MICRO_BATCHES, precision="f32", seed=0
    )
    state, losses = programs.init_state(), []
    for step in range(steps):
        batch = programs.job.batch_at(step, programs.size)
        state, metrics = programs.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def audit(run: Run, steps: int) -> list[float]:
    """Check what was committed, and that nothing is left; the losses."""
    commits = {said["step"]: said for said in run.commits()}
    assert sorted(commits) == list(range(1, steps + 1)), run.told()
    for said in run.commits():
        nodes = [(a, b) for given in said["parts"].values() for a, b in given]
        check_tiles(nodes, MICRO_BATCHES)
    for step, losses in run.losses().items():
        # Whoever came to it in whatever generation, to the last bit.
        assert losses == {float(commits[step]["loss"]).hex()}, step
    for said in run.samples():
        first = (said["step"] - 1) * example.SIZE
        assert said["samples"] == [first, first + example.SIZE - 1]
        assert said["sum"] == sum(range(first, first + example.SIZE))
    for said in run.events("started"):
        assert not runs(said["pid"], said["began"])
    return [commits[step]["loss"] for step in range(1, steps + 1)]


def lost(run: Run) -> list[str]:
    return [said["name"] for said in run.events("lost")]


@pytest.mark.full
def test_a_run_survives_the_loss_of_members_and_supervisor(tmp_path: Path) -> None:
    steps, options = 150, {"pause": 0.02, "save": str(tmp_path / "save")}
    settings = {"least": 1, "most": 2, "spares": 1}
    with running(tmp_path, {"steps": steps, **options}, **settings) as run:
        run.until(lambda: run.step() >= 10)
        run.until(lambda: len(run.events("ready")) == 3)
        first = run.kill(0)
        run.until(lambda: lost(run) == [first])
        at = run.step()
        run.until(lambda: run.step() >= at + 5)
        assert len(run.events("begun")[-1]["members"]) == 2  # The spare stepped in.
        generation = run.events("begun")[-1]["generation"]
        run.supervisor.kill()
        run.supervisor.wait()
        run.start()
        at = run.step()
        run.until(lambda: run.step() >= at + 5)
        assert run.events("begun")[-1]["generation"] == generation
        assert run.wait() == 0, run.told()
        losses = audit(run, steps)
        saved = [said["step"] for said in run.events("saved")]
        assert saved[-1] == steps and (tmp_path / "save/step_000150").is_dir()
    np.testing.assert_allclose(losses[:30], expected_losses(30), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, {"data": -1}])
def test_loops_that_are_left_save_their_state(tmp_path: Path, mesh: Any) -> None:
    save = tmp_path / "save"
    options = {"steps": 400, "breaks_at": 7, "save": str(save), "mesh": mesh}
    with running(tmp_path, options, least=2, most=2) as run:
        assert run.wait() == 0, run.told()
        (saved,) = run.events("saved")
        assert saved["step"] == 7 and [p.name for p in save.glob("step_*")] == [
            "step_000007"
        ]


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, {"data": -1}])
def test_an_error_in_the_body_leaves_no_checkpoint_of_its_step(
    tmp_path: Path, mesh: Any
) -> None:
    """The body of that step must run again after a restart."""
    save = tmp_path / "save"
    options = {"steps": 400, "fails_at": 7, "save": str(save), "save_every": 4}
    with running(tmp_path, {**options, "mesh": mesh}, least=1, most=1) as run:
        assert run.wait() == 1, run.told()
        assert [p.name for p in save.glob("step_*")] == ["step_000004"]
        assert "a bug in the body" in run.events("ending")[0]["why"]


@pytest.mark.full
def test_loops_that_are_left_complete_a_run(tmp_path: Path) -> None:
    options = {"steps": 400, "breaks_at": 12, "after": 12.0}
    settings = {"least": 2, "most": 2, "spares": 1, "lease_seconds": 5.0}
    with running(tmp_path, options, **settings) as run:
        assert run.wait() == 0, run.told()
        audit(run, 12)
        assert len(run.events("started")) == 3 and not lost(run), run.told()
        assert [e["how"] for e in run.events("ended")] == ["complete"] * 3


@pytest.mark.full
def test_an_error_in_the_body_of_the_loop_is_a_failure(tmp_path: Path) -> None:
    options = {"steps": 400, "fails_at": 5}
    with running(tmp_path, options, least=1, most=1) as run:
        assert run.wait() == 1, run.told()
        (ending,) = run.events("ending")
        assert ending["how"] == "failed" and "a bug in the body" in ending["why"]
        assert "the same error ended m1 and then m2, without" in ending["why"]
        assert len(run.events("started")) == 2


@pytest.mark.full
def test_the_last_member_that_is_told_to_leave_saves_its_state_first(
    tmp_path: Path,
) -> None:
    steps, options = 300, {"pause": 0.05, "save": str(tmp_path / "save")}
    with running(tmp_path, {"steps": steps, **options}, least=1, most=2) as run:
        run.until(lambda: run.step() >= 5 and len(run.events("ready")) == 2)
        first = run.kill(0)
        last = run.kill(1, signal.SIGTERM)
        run.until(lambda: bool(run.events("saved")))
        assert run.wait() == 0, run.told()
        audit(run, steps)
        assert lost(run) == [first]
        ended = {said["name"]: said["how"] for said in run.events("ended")}
        assert ended[last] == "drained"
        begun = [said["members"] for said in run.events("begun")]
        assert [last] in begun  # It went on alone until others came.


@pytest.mark.full
@pytest.mark.parametrize("x64", [False, True])
def test_every_way_to_lose_members(tmp_path: Path, x64: bool) -> None:
    steps = 400
    options: dict[str, Any] = {"steps": steps, "pause": 0.02, "x64": x64}
    settings = {"least": 1, "most": 3, "spares": 0, "lease_seconds": 8.0}
    with running(tmp_path, options, **settings) as run:
        run.until(lambda: run.step() >= 5)
        for number, (place, kind) in enumerate(
            [(1, signal.SIGKILL), (0, signal.SIGSTOP), (0, signal.SIGTERM)]
        ):
            at = run.step()
            run.kill(place, kind)
            run.until(lambda at=at: run.step() > at + 5)
            size = len(run.events("begun")[-1]["members"])
            assert size < 3 or number == 2, run.told()
        run.until(lambda: len(run.events("begun")[-1]["members"]) >= 2)
        # All at once: the last whole checkpoint, or step 0, and the same losses.
        for pid in run.members().values():
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == 0, run.told()
        losses = audit(run, steps)
    with running(tmp_path / "alone", options, least=1, most=1) as run:
        assert run.wait() == 0
        assert losses == audit(run, steps)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_??????"))


@pytest.mark.full
def test_members_save_and_train_without_a_supervisor(tmp_path: Path) -> None:
    save, steps = tmp_path / "save", 120
    options = {"pause": 0.1, "save": str(save), "save_every": 5}
    with running(tmp_path, {"steps": steps, **options}, least=1, most=2) as run:
        run.until(lambda: run.step() >= 3)
        run.supervisor.kill()
        run.supervisor.wait()
        at = run.step()
        run.until_files(lambda: bool(checkpoints(save)[-1:] > [at + 15]))
        run.start()
        assert run.wait() == 0, run.told()
        audit(run, steps)
        assert len(run.events("begun")) == 1 and not lost(run)


@pytest.mark.full
def test_members_that_give_their_supervisor_up_leave_their_newest_state(
    tmp_path: Path,
) -> None:
    save, steps = tmp_path / "save", 400
    options = {"pause": 0.1, "save": str(save), "save_every": 1000}
    more = {"steps": steps, **options, "supervisor_seconds": 3.0}
    with running(tmp_path, more, least=1, most=2) as run:
        run.until(lambda: run.step() >= 3)
        there = [(e["pid"], e["began"]) for e in run.events("started")]
        run.supervisor.kill()
        run.supervisor.wait()
        run.until_files(lambda: not any(runs(*process) for process in there))
        newest = max(said["step"] for said in run.samples())
        assert checkpoints(save)[-1] >= newest - 1 > 10
        run.start()
        run.until(lambda: run.step() > newest)
        # It went on from there.
        since = [said["step"] for said in run.commits() if said["generation"] > 1]
        assert min(since) >= newest, run.told()
        run.supervisor.terminate()
        run.until(lambda: run.supervisor.poll() is not None)


@pytest.mark.full
def test_a_last_checkpoint_may_take_longer_than_processes_have_to_end(
    tmp_path: Path,
) -> None:
    save = tmp_path / "save"
    options = {"steps": 400, "pause": 0.05, "save": str(save), "slow_save": 15.0}
    # Its beats, which say that it saves, come every second.
    settings = {"least": 1, "most": 2, "lease_seconds": 8.0}
    run = Run(tmp_path, options, settings, more={"exit_seconds": 6.0})
    try:
        run.until(lambda: run.step() >= 3)
        run.supervisor.terminate()
        assert run.wait() == 143, run.told()
        (ending,) = run.events("ending")
        assert ending["how"] == "drained" and not run.events("not_saved")
        assert checkpoints(save) == [run.events("saved")[-1]["step"]]
        assert checkpoints(save)[-1] >= run.step()
    finally:
        run.end()


LAUNCHES = """
import json, sys
from pathlib import Path
from whalejax.elastic.launching import supervise
from whalejax.membership.settings import Supervised, SupervisorSettings
settings = SupervisorSettings(least=1, most=1)
words = tuple(json.loads(sys.argv[1]))
run = Supervised(command=words, folder=Path(sys.argv[2]), settings=settings)
sys.exit(supervise(run))
"""


@pytest.mark.full
def test_the_third_interrupt_ends_a_long_body_of_the_loop(tmp_path: Path) -> None:
    options = json.dumps({"out": str(tmp_path), "steps": 10, "pause": 1e6})
    command = [sys.executable, "-m", "tests.whalejax.elastic.script", options]
    log, commits = tmp_path / "log", tmp_path / FOLDER / journal.COMMITS
    with log.open("w") as errors:
        there = subprocess.Popen(
            [sys.executable, "-c", LAUNCHES, json.dumps(command), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stderr=errors,
        )
    end = time.monotonic() + SECONDS
    while not journal.read_commits(commits):
        assert there.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    for count in (1, 2):
        there.send_signal(signal.SIGINT)
        while log.read_text().count("interrupted") < count:
            assert there.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
    assert there.poll() is None  # It waits for the end of the body.
    there.send_signal(signal.SIGINT)
    assert there.wait(SECONDS) == 143, log.read_text()
    events = journal.read_events(tmp_path / FOLDER / journal.EVENTS)
    for said in events:
        if said["event"] == "started":
            assert not runs(said["pid"], said["began"])
    assert "the run was ended at once" in log.read_text()
