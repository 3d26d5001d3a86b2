"""Checkpoints come back to the bit, under any plan, or not at all."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.whalejax.runs import (
    batch_at,
    described_cluster,
    fresh_state,
    host_leaves,
    loss_fn,
    make_job,
    make_params,
    run_script,
    shared_step,
    step_of,
)
from whalejax.lowering.train_state import Origin
from whalejax.runtime.train_step import TrainState, TrainStep
from whalejax.state.checkpoint import UncheckedCheckpoint
from whalejax.state.checkpoint_record import UNFINISHED_SUFFIX


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


@pytest.fixture
def trained() -> tuple[TrainStep, TrainState]:
    """A state with a few steps behind it, so that nothing in it is zero by chance."""
    step = shared_step()
    state = fresh_state(step)
    for index in range(3):
        state, _ = step(state, batch_at(index, 16))
    return step, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests only read."""
    step = shared_step()
    path = tmp_path_factory.mktemp("saved") / "one"
    step.save(path, fresh_state(step))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    target = tmp_path / "copy"
    shutil.copytree(saved, target)
    return target


def test_restores_to_the_bit(
    trained: tuple[TrainStep, TrainState], tmp_path: Path
) -> None:
    step, state = trained
    step.save(tmp_path / "a", state)
    found = step.restore(tmp_path / "a")
    assert host_leaves(found) == host_leaves(state)
    assert int(found.step) == 3
    for after, before in zip(
        jax.tree.leaves(found), jax.tree.leaves(state), strict=True
    ):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)


def test_the_saved_state_is_kept_and_goes_on_alike(
    trained: tuple[TrainStep, TrainState], tmp_path: Path
) -> None:
    step, state = trained
    step.save(tmp_path / "a", state)
    restored, theirs = step(step.restore(tmp_path / "a"), batch_at(3, 16))
    state, ours = step(state, batch_at(3, 16))
    assert float(theirs["loss"]) == float(ours["loss"])
    assert host_leaves(restored) == host_leaves(state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_restores_under_another_plan(
    trained: tuple[TrainStep, TrainState], tmp_path: Path, num_devices: int
) -> None:
    step, state = trained
    options = {"default": wh.replicate()} if num_devices == 8 else {}
    other = step_of(make_job(), num_devices, **options)
    assert other.plan.axes != step.plan.axes
    step.save(tmp_path / "a", state)
    found = other.restore(tmp_path / "a")
    assert host_leaves(found) == host_leaves(state)
    assert found.origin is other._origin
    for leaf, sharding in zip(
        jax.tree.leaves(found), jax.tree.leaves(other.shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    # It runs there, and says the same up to the order of sums.
    _, there = other(found, batch_at(3, 16))
    _, here = step(state, batch_at(3, 16))
    assert float(there["loss"]) == pytest.approx(float(here["loss"]), rel=1e-5)


class Noisy(nnx.Module):
    """Dropout and batch statistics: random keys and untrained leaves in the model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(12, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_and_statistics_come_back(tmp_path: Path, impl: str) -> None:
    def loss(model: Noisy, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    def make() -> Noisy:
        return Noisy(nnx.Rngs(jax.random.key(3, impl=impl)))

    model = nnx.eval_shape(make)
    batch = {"x": batch_at(0, 16)["x"]}
    tx = optax.sgd(0.1)
    plan = wh.plan(loss, model, batch, optimizer=tx, cluster=described_cluster())
    step = wh.compile(plan, loss, model, optimizer=tx)
    state = step.init(make, rng=jax.random.key(5, impl=impl))
    state, _ = step(state, batch)
    step.save(tmp_path / "a", state)
    found = step.restore(tmp_path / "a")
    assert host_leaves(found) == host_leaves(state)
    assert str(jax.random.key_impl(found.rng)) == impl
    _, theirs = step(found, batch)
    _, ours = step(state, batch)
    assert float(theirs["loss"]) == float(ours["loss"])


def test_odd_leaves_come_back(tmp_path: Path) -> None:
    plan = shared_step().plan
    state = TrainState(
        params={leaf.path: jnp.arange(3.0) for leaf in plan.leaves},
        rest={
            "bf16": jnp.arange(5, dtype=jnp.bfloat16),
            "nothing": jnp.zeros((0, 4), jnp.int8),
            "keys": jax.random.split(jax.random.key(1), 3),
            "a/b": jnp.array(True),
            "c": {"d": jnp.uint8(1)},
            "c.d": jnp.uint8(2),
        },
        opt_state=(),
        step=jnp.int32(2**31 - 1),
        rng=jax.random.key(0),
        loss_scale=None,
        origin=Origin(shared_step().adapter),
    )
    from whalejax.state import checkpoint

    checkpoint.save(tmp_path / "a", state, plan)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    found = checkpoint.restore(tmp_path / "a", abstract, plan)
    assert host_leaves(found) == host_leaves(state)


# What is refused.


def test_another_model_is_refused_leaf_by_leaf(saved: Path) -> None:
    def other_params(key: jax.Array) -> dict[str, jax.Array]:
        params = make_params(key)
        wider = {"up": jnp.zeros((12, 640)), "down": jnp.zeros((640, 8))}
        return {**params, **wider, "bias": jnp.zeros(640), "extra": jnp.zeros(8)}

    def other_loss(params: Any, batch: Any) -> jax.Array:
        return loss_fn(params, batch) + jnp.mean(params["extra"])

    job = make_job(
        loss_fn=other_loss, make_model=other_params, optimizer=optax.sgd(0.1)
    )
    with pytest.raises(wh.WhaleError) as caught:
        step_of(job).restore(saved)
    text = str(caught.value)
    title, *lines = text.splitlines()
    assert title.startswith(f"{saved} is a checkpoint of another model or optimizer: ")
    assert "params extra: the checkpoint has no such leaf, this model float32[8]" in (
        text
    )
    assert (
        "params up: the checkpoint has float32[12, 320], this model float32[12, 640]"
        in text
    )
    # bias, down, extra, up; and Adam's count, mu and nu of three parameters.
    assert len(lines) == 4 + 7
    assert sum("opt_state" in line for line in lines) == 7
    assert "this model has no such leaf" in text


def test_the_same_model_with_another_batch_is_taken(saved: Path) -> None:
    step = step_of(make_job(batch_size=32))
    assert step.plan.model_hash != shared_step().plan.model_hash
    found = step.restore(saved)
    assert int(found.step) == 0


def test_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(wh.WhaleError) as caught:
        shared_step().restore(path)
    assert str(caught.value) == (
        f"{path}: there is no checkpoint at this path. Give the path of one that "
        "step.save wrote"
    )


def test_only_the_remains_of_a_killed_save_are_there(tmp_path: Path) -> None:
    (tmp_path / f"a{UNFINISHED_SUFFIX}").mkdir()
    with pytest.raises(
        wh.WhaleError, match="writing was cut short, there is a.unfinished"
    ):
        shared_step().restore(tmp_path / "a")


def test_something_is_there_already(saved: Path, tmp_path: Path) -> None:
    """Nothing is lost: the state can be saved elsewhere, and what is there stays."""
    step = shared_step()
    state = fresh_state(step)
    with pytest.raises(
        wh.WhaleError,
        match=r"this path exists already.*the state is as it was. Save it at",
    ):
        step.save(saved, state)
    assert sorted(p.name for p in saved.parent.iterdir()) == [saved.name]
    step.restore(saved)
    step.save(tmp_path / "other", state)
    assert host_leaves(step.restore(tmp_path / "other")) == host_leaves(state)


def test_a_lost_record_is_named(copy: Path) -> None:
    (copy / "whalejax.json").unlink()
    with pytest.raises(wh.WhaleError) as caught:
        shared_step().restore(copy)
    assert str(caught.value).startswith(
        f"{copy} is not a whole checkpoint: it has no whalejax.json"
    )


def test_a_folder_of_checkpoints_is_none_itself(copy: Path) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        shared_step().restore(copy.parent)
    assert str(caught.value) == (
        f"{copy.parent} is no checkpoint, but holds 1: '{copy.name}'. Give the path of "
        f"one, such as {copy}"
    )


def test_a_newer_format_is_named(copy: Path) -> None:
    record = copy / "whalejax.json"
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "whalejax_checkpoint": 2}))
    with pytest.raises(wh.WhaleError, match="format 2; this WhaleJAX reads 1. Upgrade"):
        shared_step().restore(copy)


def without_hashes(path: Path) -> None:
    """Make a checkpoint one of a version that wrote no hashes."""
    record = json.loads((path / "whalejax.json").read_text())
    newer = ("record_sha256", "file_sha256", "samples", "batch_size")
    for name in (*newer, "num_micro_batches"):
        del record[name]
    (path / "whalejax.json").write_text(json.dumps(record, indent=1))


def data_files(path: Path) -> list[Path]:
    """The files that hold the numbers."""
    return [p for p in path.rglob("*") if p.is_file() and p.parent.name == "d"]


def test_damaged_files_are_listed(copy: Path) -> None:
    removed, cut, *_ = sorted(data_files(copy))
    nbytes = cut.stat().st_size
    removed.unlink()
    cut.write_bytes(cut.read_bytes()[:7])
    with pytest.raises(wh.WhaleError) as caught:
        shared_step().restore(copy)
    text = str(caught.value)
    title = f"{copy} is damaged; restore another checkpoint: 2 problems"
    assert text.startswith(title)
    assert f"{removed.relative_to(copy)} is missing (" in text
    assert f"{cut.relative_to(copy)} has 7 bytes; {nbytes} were written" in text


def test_numbers_that_orbax_cannot_read(copy: Path) -> None:
    tree = copy / "arrays" / "_METADATA"
    tree.write_text("x" * tree.stat().st_size)
    without_hashes(copy)
    with (
        pytest.warns(UncheckedCheckpoint),
        pytest.raises(wh.WhaleError) as caught,
    ):
        shared_step().restore(copy)
    assert str(caught.value).startswith(f"{copy}: this checkpoint cannot be read (")
    assert str(caught.value).endswith("Restore another one")


# A kill while saving.

KILLED_WHILE_SAVING = """
import os, signal, sys
from tests.whalejax import runs
from whalejax.state import checkpoint

step = runs.shared_step()
state = runs.fresh_state(step)
finish = getattr(checkpoint, sys.argv[2])

def finish_and_die(*args):
    finish(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(checkpoint, sys.argv[2], finish_and_die)
step.save(sys.argv[1], state)
"""


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", ["write_arrays", "write_record"])
def test_a_kill_while_saving_leaves_no_checkpoint(tmp_path: Path, after: str) -> None:
    path = tmp_path / "a"
    done = run_script(KILLED_WHILE_SAVING, path, after, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [f"a{UNFINISHED_SUFFIX}"]
    assert data_files(tmp_path), "nothing had been written yet"
    # What is left does not stand in the way of the next attempt.
    step = shared_step()
    state = fresh_state(step)
    step.save(path, state)
    assert host_leaves(step.restore(path)) == host_leaves(state)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_numbers_on_disk_have_readable_names(saved: Path) -> None:
    record = json.loads((saved / "whalejax.json").read_text())
    names = {f"{leaf['section']} {leaf['name']}" for leaf in record["leaves"]}
    assert {"params up", "params bias", "opt_state 0.mu.down", "step value"} <= names
    assert record["whalejax"] == wh.__version__
    assert record["model_hash"] == shared_step().plan.model_hash
    up = next(leaf for leaf in record["leaves"] if leaf["name"] == "up")
    assert (up["shape"], up["dtype"]) == ([12, 320], "float32")
    assert np.prod(up["shape"]) == 12 * 320
