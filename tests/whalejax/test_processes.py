"""Two processes of one program: batches in parts and whole, states and models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import finish, start


PROGRAM = """
import json
import numpy as np, optax
import whalejax as wh

rng = np.random.default_rng(0)
x = rng.normal(size=(16, 8)).astype(np.float32)
y = rng.normal(size=(16, 4)).astype(np.float32)
model = {"w": np.full((8, 4), 0.1, np.float32)}

def loss(m, b):
    z = b["x"] @ m["w"]
    return ((z - b["y"]) ** 2).mean(), {"z": z, "pred": z.argmax(-1)}

found = {}
for axis in ("data", "fsdp"):
    tx = optax.adam(0.1)
    plan = wh.plan(loss, model, {"x": x, "y": y}, optimizer=tx, cluster="h100:2",
                   mesh={axis: 2}, num_micro_batches=2)
    step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
    half = slice(jax.process_index() * 8, jax.process_index() * 8 + 8)
    parts = {"x": x[half], "y": y[half]}
    sharding = jax.sharding.NamedSharding(step.mesh, jax.P(axis))
    whole = {
        name: jax.make_array_from_process_local_data(sharding, part, value.shape)
        for (name, part), value in zip(parts.items(), (x, y))
    }
    losses = []
    for batch in (parts, whole):
        state = step.init_from(model)
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    again = step.init_from(state.model)
    local = {name: jax.numpy.asarray(part) for name, part in parts.items()}
    told, *others = (
        jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data),
                     step.eval(state, batch))
        for batch in (local, parts, {"x": x, "y": y})
    )
    for other in others:
        assert jax.tree.all(jax.tree.map(np.array_equal, told, other))
    w = np.asarray(again.params["w"].addressable_shards[0].data)
    if axis == "data":
        np.testing.assert_allclose(told["z"], x @ w, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(told["pred"], (x @ w).argmax(-1))
        first, kept = step, state
    else:
        moved = step.adopt(kept)
        np.testing.assert_allclose(
            step.eval(moved, parts)["loss"], first.eval(kept, parts)["loss"], rtol=1e-5
        )
    try:
        step.eval(state, {"x": x[:5], "y": y[half]})
    except wh.WhaleError as error:
        assert (
            f"batch['x'] has shape (5, 8) in process {jax.process_index()}; the plan "
            "is for the global shape (16, 8), of which this process gives (8, 8)."
        ) in str(error), error
    else:
        raise AssertionError("nothing is said")
    _, metrics = step(again, parts)
    losses.append(float(metrics["loss"]))
    path = f"{sys.argv[5]}/{axis}"
    step.save(path, state)
    _, metrics = step(step.restore(path), whole)
    losses.append(float(metrics["loss"]))
    found[axis] = losses
print(json.dumps(found), flush=True)
"""


def test_two_processes_take_parts_and_whole_batches(tmp_path: Path) -> None:
    outputs = finish(start(PROGRAM, tmp_path))
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert found[0] == found[1]
    for losses in found[0].values():
        first, second, same, also, third, restored = losses
        assert (first, second) == pytest.approx((same, also), rel=1e-6)
        assert third == pytest.approx(restored, rel=1e-5)
        assert first > second > third
    assert found[0]["data"] == pytest.approx(found[0]["fsdp"], rel=1e-5)
