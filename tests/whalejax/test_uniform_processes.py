"""Processes alike, with plans whose axes cross them, compute what one device does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests import cases, equality
from tests.processes import finish, start
from whalejax.user_code.losses import Job


PROGRAM: Final = """
import json
jax.config.update("jax_enable_x64", True)
import numpy as np
from tests.whalejax.test_uniform_processes import compiled, job

name, folder, source = sys.argv[5:8]
every = jax.devices()
if len(every) > count:  # rows and columns of the mesh, both of two processes
    every = [every[0], every[2], every[3], every[1]]
made = job(name)
step = compiled(name, every)
rows = {d.process_index for d in step.mesh.devices[0]}, {
    d.process_index for d in step.mesh.devices[:, 0]}
assert all(len(found) == 2 for found in rows), rows
state = step.init(made.make_model, rng=jax.random.key(0))
parts = [x[step.batch_rows()] for x in jax.tree.leaves(made.batch_at(0))]
batch = jax.tree.unflatten(jax.tree.structure(made.batch_at(0)), parts)
state, metrics = step(state, batch)
losses = [float(metrics["loss"])]

def whole(tree):
    everywhere = jax.sharding.NamedSharding(step.mesh, jax.P())
    gathered = jax.jit(lambda x: x, out_shardings=everywhere)(jax.tree.leaves(tree))
    return [np.asarray(x.addressable_data(0)) for x in gathered]

gradients = whole(state.opt_state[0]["gradient"])
exact = True
if source:  # another number of processes saved it: every shard is as it was
    state = step.restore(source)
    kept = np.load(source + ".npz")
    for place, x in enumerate(jax.tree.leaves((state.params, state.opt_state))):
        for shard in x.addressable_shards:
            exact &= np.array_equal(shard.data, kept[f"arr_{place}"][shard.index])
else:
    step.save(folder + "/kept", state)
    found = whole((state.params, state.opt_state))
    if index == 0:
        np.savez(folder + "/kept.npz", *found)
state, metrics = step(state, batch)
losses.append(float(metrics["loss"]))
if index == 0:
    np.savez(f"{folder}/gradients-{count}.npz", *gradients)
print(json.dumps([losses, bool(exact), int(state.step)]), flush=True)
"""


def job(name: str) -> Job:
    """What all of them train: a reference model, or two plain matrices."""
    if name == "plain":
        return wh.Job(plain_loss, plain_model, plain_batch(), None, batch_size=16)
    model = next(one for one in cases.MODELS if one.name == name)
    return model.job("float64", annotated=False)


def plain_model(key: Any) -> dict[str, Any]:
    """Weights of two layers."""
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (8, 16)),
        "down": jax.random.normal(down, (16, 4)),
    }


def plain_batch() -> dict[str, Any]:
    """Sixteen samples."""
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(16, 8)), "y": rng.normal(size=(16, 4))}


def plain_loss(model: Any, batch: Any) -> Any:
    """Mean squared error."""
    hidden = jnp.tanh(batch["x"] @ model["up"])
    return ((hidden @ model["down"] - batch["y"]) ** 2).mean()


def compiled(name: str, devices: Any) -> wh.TrainStep:
    """Its step on some devices, in two rows where there are several."""
    made, count = job(name), len(devices)
    model = jax.eval_shape(made.make_model, jax.random.key(0))
    optimizer = optax.chain(equality.keep_gradient(), optax.trace(0.9))
    plan = wh.plan(
        made.loss_fn,
        model,
        made.batch_at(0),
        optimizer=optimizer,
        cluster=equality.free_links(count),
        num_micro_batches=2,
        mesh={"data": 2, "tensor": count // 2} if count > 1 else None,
    )
    return wh.compile(plan, made.loss_fn, model, optimizer=optimizer, devices=devices)


def run(name: str, folder: Path, source: str, *, count: int) -> list[Any]:
    """Start the program; what its processes found, which must be the same."""
    running = start(PROGRAM, name, folder, source, count=count, devices=4 // count)
    found = [json.loads(output.splitlines()[-1]) for output in finish(running)]
    assert all(one == found[0] for one in found)
    return list(found[0])


def saved(path: Path) -> list[np.ndarray]:
    """Arrays that a process wrote."""
    with np.load(path) as arrays:
        return [arrays[f"arr_{place}"] for place in range(len(arrays))]


@pytest.mark.full
@pytest.mark.relaxed_promotion
@jax.enable_x64(True)
@pytest.mark.parametrize("name", ["plain", pytest.param("gpt", marks=pytest.mark.full)])
def test_four_then_two_processes_then_one_device(name: str, tmp_path: Path) -> None:
    """Data and tensor parallel over processes; four's checkpoint is for all."""
    single = equality.on_one_device(job(name), 2)
    four = run(name, tmp_path, "", count=4)
    two = run(name, tmp_path, str(tmp_path / "kept"), count=2)
    for losses, exact, steps in (four, two):
        assert exact and steps == 2
        assert losses == pytest.approx(four[0], rel=1e-12)
        assert losses[0] == pytest.approx(single.loss, rel=1e-12)
    for count in (2, 4):
        found = saved(tmp_path / f"gradients-{count}.npz")
        worst = equality.worst_leaf(found, single.gradients, single.paths)
        assert worst[0] <= equality.FLOAT64_TOLERANCE, worst
    step = compiled(name, jax.devices()[:1])
    state = step.restore(tmp_path / "kept")
    restored = jax.tree.leaves((state.params, state.opt_state))
    for one, kept in zip(restored, saved(tmp_path / "kept.npz"), strict=True):
        assert np.array_equal(one, kept)
    _, metrics = step(state, job(name).batch_at(0))
    assert float(metrics["loss"]) == pytest.approx(four[0][1], rel=1e-12)
