"""A run goes on from the newest whole checkpoint, at the next sample, and alone."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.whalejax.runs import (
    ROOT,
    batch_at,
    fresh_state,
    make_job,
    shared_step,
)
from tests.whalejax.test_checkpoint import data_files, without_hashes
from whalejax.cli import train_session
from whalejax.cli.options import TrainCommand
from whalejax.meshes.errors import WhaleError
from whalejax.runtime import loop
from whalejax.runtime.train_step import TrainState, TrainStep
from whalejax.state import checkpoint_files, folder_lock, resume
from whalejax.state.folder_lock import LOCK, FolderLock
from whalejax.state.resume import batches_from, checkpoints, restore_newest


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


def batches(index: int) -> Any:
    return batch_at(index, 16)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of three steps, that tests only read."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    step = shared_step()
    loop.train(step, fresh_state(step), batches, steps=3, save_dir=folder, save_every=1)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Such a directory that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def flip_a_bit(path: Path) -> None:
    biggest = max(data_files(path), key=lambda file: file.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)


# Samples.


def test_a_state_counts_samples(run: Path) -> None:
    step = shared_step()
    state = fresh_state(step)
    assert state.samples == 0
    state, _ = step(state, batches(0))
    assert state.samples == 16
    found = step.restore(run / "step_000003")
    assert (int(found.step), found.samples) == (3, 48)
    found, _ = step(dataclasses.replace(found, samples=5), batches(0))
    assert found.samples == 21
    copied = jax.tree.map(lambda x: x, found)
    assert copied.samples is None
    copied, _ = step(copied, batches(0))
    step.save(run / "other", copied)
    assert step.restore(run / "other").samples == 5 * 16


def loss_of_samples(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"]) ** 2) * 1e-6


def job_of_samples(*, by_number: bool) -> wh.Job:
    """A job whose samples are the numbers below a hundred, over and over."""
    x = np.arange(100, dtype=np.float32).reshape(100, 1)

    def batch(step: int, size: int) -> dict[str, Any]:
        return {"x": x[(np.arange(size) + step * size) % 100]}

    def make() -> Any:
        return {"w": jnp.ones((1, 1))}

    data = batch if by_number else {"x": x}
    return wh.Job(loss_of_samples, make, data, optax.sgd(0.1))


@pytest.mark.parametrize("by_number", [True, False])
def test_batches_of_another_size_begin_at_the_next_sample(by_number: bool) -> None:
    job = job_of_samples(by_number=by_number)
    found = batches_from(job, 8, step=9, samples=36)
    rows = [found(index)["x"][:, 0].tolist() for index in range(9, 18)]
    assert sum(rows, []) == [i % 100 for i in range(36, 36 + 72)]
    whole = batches_from(job, 12, step=3, samples=36)
    assert whole(4)["x"][:, 0].tolist() == [*range(48, 60)]
    keys = wh.Job(
        len, len, lambda n, size: jax.random.split(jax.random.key(n), size), None
    )
    joined = batches_from(keys, 4, step=0, samples=2)(0)
    assert joined.shape == (4,) and joined.dtype == jax.random.key(0).dtype
    assert joined[0] == jax.random.split(jax.random.key(0), 4)[2]


def test_resuming_with_another_batch_size_skips_no_sample(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    take: Any = TrainStep.__call__

    def told(step: TrainStep, state: TrainState, batch: Any) -> Any:
        given.append(batch["x"][:, 0].tolist())
        return take(step, state, batch)

    monkeypatch.setattr(TrainStep, "__call__", told)
    job = job_of_samples(by_number=True)
    command = TrainCommand(model="samples", cluster="cpu:8", save=tmp_path / "run")
    first = dataclasses.replace(command, batch=8, steps=3)
    train_session.run(job, first, started=0.0)
    second = dataclasses.replace(command, batch=16, steps=5, resume=True)
    train_session.run(job, second, started=0.0)
    assert [len(rows) for rows in given] == [8, 8, 8, 16, 16]
    assert sum(given, []) == [*range(56)]
    said = " ".join(capsys.readouterr().out.split())
    assert f"starting from {tmp_path / 'run' / 'step_000003'}: 3 steps, 24 samples" in (
        said
    )
    model = job.make_model()
    plan = wh.plan(loss_of_samples, model, job.batch_at(0, 4), cluster="cpu:1")
    step = wh.compile(plan, loss_of_samples, model, devices=jax.devices()[:1])
    found = step.restore(tmp_path / "run" / "step_000005", only="model")
    assert (int(found.step), found.samples) == (5, 56)


# Damage.


def test_the_newest_whole_checkpoint_is_taken(run: Path) -> None:
    flip_a_bit(run / "step_000003")
    (run / "step_000002" / "whalejax.json").unlink()
    (run / "step_000002.damaged").mkdir()
    found = restore_newest(shared_step(), checkpoints(run))
    assert found is not None
    assert (int(found.state.step), found.checkpoint) == (1, run / "step_000001")
    assert sorted(path.name for path in run.iterdir()) == [
        "step_000001",
        "step_000002.damaged",
        "step_000002.damaged2",
        "step_000003.damaged",
    ]
    first, second = found.notes
    assert first.startswith(f"{run / 'step_000003'} is damaged; restore another checkp")
    assert first.endswith(
        "\nGoing on from step_000001; what is left of step_000003 is "
        "step_000003.damaged now"
    )
    assert second.startswith(
        f"{run / 'step_000002'} is not a whole checkpoint: it has no"
    )
    assert "step_000002.damaged2 now" in second


def test_what_is_no_folder_is_passed_over(run: Path) -> None:
    (run / "step_000012").write_text("")
    (run / "step_000013").symlink_to(run / "nothing")
    found = restore_newest(shared_step(), checkpoints(run))
    assert found is not None and found.checkpoint == run / "step_000003"
    first, second = found.notes
    where = "there is no checkpoint at this path: it is"
    assert f"{run / 'step_000013'}: {where} a link to nothing" in first
    assert f"{run / 'step_000012'}: {where} a file" in second
    assert "step_000012.damaged now" in second


def test_a_pipe_in_place_of_a_record_is_not_waited_for(run: Path) -> None:
    record = run / "step_000003" / "whalejax.json"
    record.unlink()
    os.mkfifo(record)
    found = restore_newest(shared_step(), checkpoints(run))
    assert found is not None and found.checkpoint == run / "step_000002"
    assert "no regular file, but a pipe or a device" in found.notes[0]


def test_without_a_whole_checkpoint_nothing_is_begun(run: Path) -> None:
    for path in run.iterdir():
        flip_a_bit(path)
    before = sorted(run.iterdir())
    with pytest.raises(wh.WhaleError) as caught:
        restore_newest(shared_step(), checkpoints(run))
    text = str(caught.value)
    assert text.startswith("no whole checkpoint to resume from: 3 problems\n")
    assert text.index("step_000003") < text.index("step_000001")
    assert text.endswith("from a copy, or start anew with another directory")
    assert sorted(run.iterdir()) == before
    assert restore_newest(shared_step(), []) is None


def test_another_model_is_no_damage(run: Path) -> None:
    record = (run / "step_000003" / "whalejax.json").read_text()
    (run / "step_000003" / "whalejax.json").write_text(
        record.replace('"whalejax_checkpoint": 1', '"whalejax_checkpoint": 9')
    )
    found = restore_newest(shared_step(), checkpoints(run))
    assert found and "has checkpoint format 9" in found.notes[0]
    other = make_job(make_model=lambda: {"w": jnp.zeros(3)}).make_model()
    step = wh.compile(
        wh.plan(
            lambda m, b: jnp.mean(m["w"] * b), other, jnp.zeros(3), cluster="cpu:1"
        ),
        lambda m, b: jnp.mean(m["w"] * b),
        other,
        devices=jax.devices()[:1],
    )
    with pytest.raises(wh.WhaleError, match="of another model or optimizer"):
        restore_newest(step, checkpoints(run))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_resumed_session_says_what_is_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    flip_a_bit(run / "step_000003")
    without_hashes(run / "step_000002")
    command = TrainCommand(
        model="perceptron",
        cluster="cpu:8",
        save=run,
        save_every=1,
        steps=4,
        resume=True,
        quiet=quiet,
        replay=1,
    )
    report = train_session.run(make_job(), command, started=0.0)
    assert report.steps == 2
    expected = wh_losses(4)[2:]
    assert (report.loss_first, report.loss_last) == pytest.approx(expected, rel=1e-5)
    found = capsys.readouterr()
    said = " ".join((found.err if quiet else found.out).split())
    assert "Going on from step_000002; what is left of step_000003 is" in said
    assert "could not be checked" in said
    assert (found.out == "") == quiet and (found.err == "") != quiet
    names = {path.name for path in run.iterdir()}
    # The one that was begun from stays, and those after it.
    assert names >= {"step_000002", "step_000003", "step_000003.damaged", "step_000004"}
    assert not names & {LOCK}


def wh_losses(steps: int) -> list[float]:
    """The losses of a run that nothing happened to."""
    step = shared_step()
    run = loop.train(step, fresh_state(step), batches, steps=steps)
    return list(run.losses)


# Two runs and one directory.

HOLDS = """
import sys
from pathlib import Path
from whalejax.state.folder_lock import FolderLock

with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
assert "jax" not in sys.modules
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``run``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_directory_is_one_runs_alone(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    folder, step = tmp_path / "run", shared_step()
    asked: list[int] = []
    with pytest.raises(wh.WhaleError) as caught:
        loop.train(
            step,
            fresh_state(step),
            asked.append,
            steps=2,
            save_dir=folder,
            save_every=1,
        )
    assert not asked
    host = os.uname().nodename
    assert re.fullmatch(
        re.escape(f"{folder} is in use by process {other.pid} on {host} since ")
        + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: two runs would remove each other's "
        r"checkpoints\. Give another directory, or wait for that run or end it\. If it "
        r"is known to have ended, remove " + re.escape(str(folder / LOCK)),
        str(caught.value),
    )
    command = TrainCommand(model="perceptron", cluster="cpu:8", save=folder, steps=1)
    with pytest.raises(wh.WhaleError, match="is in use by process"):
        train_session.run(make_job(), command, started=0.0)
    # However it ends, the directory is free then, and whoever takes it says so.
    other.kill()
    other.wait()
    assert f'"pid": {other.pid},' in (folder / LOCK).read_text()
    with FolderLock(folder):
        assert f'"pid": {os.getpid()},' in (folder / LOCK).read_text()
    assert not folder.exists() or not [*folder.iterdir()]


def test_a_run_that_ends_well_lets_go(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    other.communicate("\n")
    assert other.returncode == 0
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_lets_go(tmp_path: Path) -> None:
    step = shared_step()

    def fail(index: int) -> Any:
        assert (tmp_path / "run" / LOCK).exists()
        raise KeyError(index)

    with pytest.raises(KeyError):
        loop.train(step, fresh_state(step), fail, steps=2, save_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lock_that_is_removed_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before lets go between our opening its file and locking it."""
    lock: Any = fcntl.flock

    def late(opened: int, how: int) -> None:
        monkeypatch.undo()
        (tmp_path / LOCK).unlink()
        lock(opened, how)

    monkeypatch.setattr(folder_lock.fcntl, "flock", late)
    with (
        FolderLock(tmp_path),
        pytest.raises(wh.WhaleError, match=f"by process {os.getpid()} on"),
    ):
        FolderLock(tmp_path).__enter__()


def test_a_lock_that_somebody_removed_is_anothers_then(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / LOCK).unlink()
        with FolderLock(tmp_path):
            kept = (tmp_path / LOCK).read_text()
            FolderLock(tmp_path)._give_up()
            assert (tmp_path / LOCK).read_text() == kept
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    with first:
        (tmp_path / LOCK).unlink()
        second.__enter__()
    assert (tmp_path / LOCK).exists()
    second.__exit__(None, None, None)
    assert not [*tmp_path.iterdir()]


def test_file_systems_without_locks_go_by_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "run"

    def unsupported(opened: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder_lock.fcntl, "flock", unsupported)
    with pytest.raises(wh.WhaleError, match=f"in use by process {other.pid} on"):
        FolderLock(folder).__enter__()
    other.kill()
    other.wait()
    with FolderLock(folder):
        pass
    for content in ("[" * 5000, '{"pid": -1}', '{"pid": 1, "host": "elsewhere"}'):
        folder.mkdir(exist_ok=True)
        (folder / LOCK).write_text(content)
        is_known = "elsewhere" in content or "-1" in content
        if is_known:
            with pytest.raises(wh.WhaleError, match="in use by another run"):
                FolderLock(folder).__enter__()
        else:
            with FolderLock(folder):
                pass


def test_directories_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(wh.WhaleError, match="cannot be written here .Not a directory"):
        FolderLock(tmp_path / "file" / "run").__enter__()

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(wh.WhaleError, match="No space left on device.*free some space"):
        FolderLock(tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_cannot_be_listed_or_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    step = shared_step()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        with pytest.raises(wh.WhaleError, match="cannot be listed .Permission denied"):
            loop.latest(run)
    state = step.restore(run / "step_000003")
    rename: Any = Path.rename

    def fail_to_remove(path: Path, target: Path) -> Any:
        return fail() if target.name.endswith(".deleted") else rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_to_remove)
    with pytest.raises(wh.WhaleError, match="older checkpoints cannot be removed"):
        loop.train(step, state, batches, steps=4, save_dir=run, keep=1)
    assert loop.latest(run) == run / "step_000004"


# Several processes.


class Others:
    """What the other processes tell, where this one is of two."""

    def __init__(self, first: str, here: int) -> None:
        self.first, self.here = first, here
        self.said: list[str] = []

    def told_by_all(self, mine: str, _: str) -> list[str]:
        self.said.append(mine)
        return [mine, ""] if self.here == 0 else [self.first, mine]

    def fail_together(self, error: str, _: str) -> None:
        self.said.append(error)
        if error:
            raise WhaleError(error)


def seen_by(monkeypatch: pytest.MonkeyPatch, here: int, first: str = "") -> Others:
    others = Others(first, here)
    monkeypatch.setattr(resume.jax, "process_index", lambda: here)
    monkeypatch.setattr(checkpoint_files, "told_by_all", others.told_by_all)
    monkeypatch.setattr(resume, "fail_together", others.fail_together)
    return others


def test_the_first_process_says_which_checkpoints_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"step_00000{number}").mkdir()
    with monkeypatch.context() as patch:
        others = seen_by(patch, 0)
        found = [path.name for path in resume.agreed_checkpoints(tmp_path)]
        assert found == ["step_000003", "step_000002", "step_000001"]
    # The other one would take the third, which was written since.
    with monkeypatch.context() as patch:
        names = json.dumps(["step_000002", "step_000001"])
        seen_by(patch, 1, json.dumps([names, "", False]))
        found = [path.name for path in resume.agreed_checkpoints(tmp_path)]
        assert found == ["step_000002", "step_000001"]
    with monkeypatch.context() as patch:
        others = seen_by(patch, 1, json.dumps(['["step_000009"]', "", False]))
        with pytest.raises(
            WhaleError,
            match=r"process 1 does not see .*step_000009, from which process 0 goes "
            r"on. Keep checkpoints in a folder that all hosts share",
        ):
            resume.agreed_checkpoints(tmp_path)
        assert len(others.said) == 2  # All hear of it.
    with monkeypatch.context() as patch:
        seen_by(patch, 1, json.dumps(["", "it cannot be listed", False]))
        with pytest.raises(WhaleError, match="it cannot be listed"):
            resume.agreed_checkpoints(tmp_path)


def test_a_full_disk_takes_nothing_of_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(opened: int, data: bytes, place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(folder_lock.os, "pwrite", full)
        with FolderLock(tmp_path):
            with pytest.raises(WhaleError, match="is in use by another run"):
                FolderLock(tmp_path).__enter__()
        # Where nothing but the text can hold the folder, it is refused.
        patched.setattr(folder_lock.fcntl, "flock", unsupported)
        with pytest.raises(WhaleError, match="No space left on device"):
            FolderLock(tmp_path).__enter__()
    with FolderLock(tmp_path):
        assert folder_lock.is_held(tmp_path)


def unsupported(opened: int, how: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_folder_is_free_where_nobody_holds_it_of_whatever_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_lock.is_free(tmp_path)
    with FolderLock(tmp_path):
        assert not folder_lock.is_free(tmp_path)
    lock = tmp_path / folder_lock.LOCK
    holder = json.dumps({"host": "another", "pid": 1, "since": "then"})
    lock.write_text(holder)
    assert folder_lock.is_free(tmp_path)  # It was killed there.
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not folder_lock.is_free(tmp_path)
        fcntl.flock(held, fcntl.LOCK_UN)
        # Who takes the folder while somebody asks waits for the answer.
        fcntl.flock(held, fcntl.LOCK_SH)
        monkeypatch.setattr(
            folder_lock.time, "sleep", lambda _: fcntl.flock(held, fcntl.LOCK_UN)
        )
        with FolderLock(tmp_path):
            pass
    lock.write_text(holder)
    monkeypatch.setattr(folder_lock.fcntl, "flock", unsupported)
    assert not folder_lock.is_free(tmp_path)  # Nobody can know.
