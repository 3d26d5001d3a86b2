"""Processes that share the space of samples, each of which reads its own slab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.processes import finish, start
from tests.whalejax.test_volumes import write_npy, write_zarr


VOLUMES: Final = 4
SHAPE: Final = (8, 8, 8, 2)
RATE: Final = 0.125
PROGRAM: Final = """
import json, sys
import optax
import whalejax as wh
jax.config.update("jax_enable_x64", True)
from tests.whalejax import test_volumes_processes as shared

model, batch = shared.kernels(), shared.batch_of(0)
plan = wh.plan(shared.loss, model, batch, optimizer=optax.sgd(shared.RATE),
               cluster="cpu:4", mesh={"depth": 2, "height": 2}, zero=0)
step = wh.compile(plan, shared.loss, model, optimizer=optax.sgd(shared.RATE),
                  devices=jax.devices())
files = [f"{sys.argv[5]}/{n}" for n in range(shared.VOLUMES)]
source = wh.Volumes({"x": files}, step)
state, losses = step.init_from(model), []
for batch in wh.Feed(source, 2, step, seed=None, epochs=1):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
print(json.dumps([losses, source.bytes_read]), flush=True)
"""


def kernels() -> dict[str, Any]:
    """Of two convolutions, of which the second is in groups."""
    rng = np.random.default_rng(1)
    return {
        "plain": jnp.asarray(rng.normal(size=(3, 3, 3, 2, 2)) / 7),
        "groups": jnp.asarray(rng.normal(size=(3, 3, 3, 1, 2)) / 5),
    }


def batch_of(first: int) -> dict[str, Any]:
    """Two of the volumes."""
    x = np.random.default_rng(0).normal(size=(VOLUMES, *SHAPE))
    return {"x": x[first : first + 2]}


def loss(model: Any, batch: Any) -> jax.Array:
    """The mean square of what both convolutions make of a volume."""
    x = batch["x"]
    for name, groups in (("plain", 1), ("groups", 2)):
        x = jnp.tanh(
            jax.lax.conv_general_dilated(
                x,
                model[name],
                (1, 1, 1),
                "SAME",
                feature_group_count=groups,
                dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
            )
        )
    return jnp.mean(x**2)


def on_one_device() -> list[float]:
    """Losses of two steps."""
    model, found = kernels(), []
    for first in range(0, VOLUMES, 2):
        value, gradient = jax.value_and_grad(loss)(model, batch_of(first))
        model = jax.tree.map(lambda p, g: p - RATE * g, model, gradient)
        found.append(float(value))
    return found


@pytest.mark.relaxed_promotion
@jax.enable_x64(True)
@pytest.mark.parametrize(
    ("count", "write"),
    [
        pytest.param(2, write_npy, id="two of npy", marks=pytest.mark.full),
        pytest.param(4, write_zarr, id="four of zarr", marks=pytest.mark.full),
    ],
)
def test_each_process_reads_its_slab(tmp_path: Path, count: int, write: Any) -> None:
    volumes = np.concatenate([batch_of(first)["x"] for first in range(0, VOLUMES, 2)])
    for number, volume in enumerate(volumes):
        write(tmp_path / f"{number}", volume)
    running = start(PROGRAM, tmp_path, count=count, devices=4 // count)
    expected = on_one_device()
    for output in finish(running):
        losses, bytes_read = json.loads(output.splitlines()[-1])
        assert losses == pytest.approx(expected, rel=1e-12)
        assert bytes_read == volumes.nbytes // count
