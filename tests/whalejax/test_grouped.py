"""Convolutions in groups of channels under meshes of several axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from whalejax import hlo


@pytest.mark.parametrize("groups", [4, 16])
def test_its_gradient_is_that_of_one_device(groups: int) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "kernel": jax.random.normal(keys[0], (3, 16 // groups, 16)),
        "head": jax.random.normal(keys[1], (16, 24)),
    }
    x = jax.random.normal(keys[2], (8, 10, 16))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x,
            p["kernel"],
            (1,),
            "SAME",
            feature_group_count=groups,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return jnp.mean((y @ p["head"]) ** 2)

    optimizer = optax.sgd(1.0)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    here = wh.Cluster.detect(calibrate=False)
    plan = wh.plan(loss, params, x, optimizer=optimizer, mesh=mesh, cluster=here)
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    state, _ = step(step.init_from(params), x)
    for path, slope in jax.grad(loss)(params, x).items():
        got = params[path] - np.asarray(state.params[path])
        np.testing.assert_allclose(got, slope, atol=1e-5 * float(jnp.abs(slope).max()))
    found = hlo.collectives(step.lower().compile().as_text())
    predicted = sum(c.payload_bytes * c.times(1) for c in plan.collectives)
    assert predicted == sum(found.nbytes.values())
