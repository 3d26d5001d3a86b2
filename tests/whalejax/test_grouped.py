"""Convolutions in groups of channels under meshes of several axes."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from whalejax import hlo


MESH: Final = {"data": 2, "fsdp": 2, "tensor": 2}


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        "SAME",
        feature_group_count=x.shape[-1] // kernel.shape[1],
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


@jax.custom_vjp
def called(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return convolved(x, kernel)


called.defvjp(
    lambda x, kernel: (convolved(x, kernel), (x, kernel)),
    lambda kept, cotangent: jax.vjp(convolved, *kept)[1](cotangent),
)


def plain_loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((convolved(x, p["kernel"]) @ p["head"]) ** 2)


def called_loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((called(x, p["kernel"]) @ p["head"]) ** 2)


def scanned_loss(p: Any, x: jax.Array) -> jax.Array:
    def layer(h: Any, kernel: Any) -> Any:
        return h + jnp.tanh(convolved(h, kernel)), None

    return jnp.mean((lax.scan(layer, x, p["kernel"])[0] @ p["head"]) ** 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "kernel", "options"),
    [
        (plain_loss, (3, 4, 16), {}),
        (plain_loss, (3, 1, 16), {}),
        (called_loss, (3, 4, 16), {}),
        (scanned_loss, (2, 3, 4, 16), {"offload": "params"}),
    ],
    ids=["groups", "depthwise", "called", "host memory"],
)
def test_its_gradient_is_that_of_one_device(
    loss: Any, kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "kernel": jax.random.normal(keys[0], kernel),
        "head": jax.random.normal(keys[1], (16, 24)),
    }
    x = jax.random.normal(keys[2], (8, 10, 16))
    optimizer, here = optax.sgd(1.0), wh.Cluster.detect(calibrate=False)
    options = {"optimizer": optimizer, "mesh": MESH, "cluster": here, **options}
    plan = wh.plan(loss, params, x, **options)
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    state, _ = step(step.init_from(params), x)
    for path, slope in jax.grad(loss)(params, x).items():
        got = params[path] - np.asarray(state.params[path])
        np.testing.assert_allclose(got, slope, atol=1e-5 * float(jnp.abs(slope).max()))
    if loss is plain_loss:
        found = hlo.collectives(step.lower().compile().as_text())
        predicted = sum(c.payload_bytes * c.times(1) for c in plan.collectives)
        assert predicted == sum(found.nbytes.values())
