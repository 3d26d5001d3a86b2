"""Temporaries of CPU programs as predicted, beside what XLA's compiler allots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.meshes import Cluster


WIDTH: Final = 256
LAYERS: Final = 4
HEAD: Final = jax.ShapeDtypeStruct((WIDTH, 16), jnp.float32)
BATCH: Final = {
    "x": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32),
    "y": jax.ShapeDtypeStruct((64, 16), jnp.float32),
}

Loss = Callable[[Any, Any], jax.Array]


def kernels(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ended(x: jax.Array, params: Any, batch: Any) -> jax.Array:
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def by_layer(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ params["w"][layer])
    return ended(x, params, batch)


def in_parts(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in params["w"]:
        one, two = jnp.split(w, 2, axis=1)
        x = x + jnp.tanh(x @ one) * (x @ two)
    return ended(x, params, batch)


def in_turns(params: Any, batch: Any) -> jax.Array:
    """The same kernel, again and again."""
    x = batch["x"]
    for _ in range(LAYERS):
        x = jnp.tanh(x @ params["w"])
    return ended(x, params, batch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        pytest.param(by_layer, [kernels(WIDTH, WIDTH)] * LAYERS, id="a list"),
        pytest.param(by_layer, kernels(LAYERS, WIDTH, WIDTH), id="slices of a stack"),
        pytest.param(in_parts, [kernels(WIDTH, 2 * WIDTH)] * 2, id="halves"),
        pytest.param(in_turns, kernels(WIDTH, WIDTH), id="one in turns"),
    ],
)
def test_gradients_that_wait_to_be_reduced(loss: Loss, layers: Any) -> None:
    params = {"w": layers, "head": HEAD}
    optimizer = optax.sgd(0.1)
    plan = wh.plan(
        loss,
        params,
        BATCH,
        optimizer=optimizer,
        cluster=Cluster.detect(calibrate=False),
        mesh={"data": 8},
        zero=0,
    )
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    allotted = step.lower().compile().memory_analysis().temp_size_in_bytes
    predicted = plan.memory.temporary_bytes
    # Four kernels of their own, before they are reduced and after.
    assert predicted > 2 * LAYERS * WIDTH * WIDTH * 4
    assert predicted == pytest.approx(allotted, rel=0.05)
