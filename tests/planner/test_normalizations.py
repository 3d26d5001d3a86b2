"""Which operations of softmax and norms one kernel computes, and what it reads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import whalejax as wh
from whalejax.meshes import cluster


ROWS, COLUMNS = 1024, 2048
NBYTES = 4 * ROWS * COLUMNS


def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)


def _compute_seconds(function, remat: str, *, fused: bool) -> float:
    def loss(p, x):
        h = function(x @ p["a"])
        return jnp.mean((h @ p["b"]) ** 2)

    params = {
        "a": jax.ShapeDtypeStruct((64, COLUMNS), jnp.float32),
        "b": jax.ShapeDtypeStruct((COLUMNS, 64), jnp.float32),
    }
    machine = cluster("h100:1")
    profile = dataclasses.replace(machine.compiler, fuses_normalizations=fused)
    plan = wh.plan(
        loss if remat == "none" else jax.checkpoint(loss),
        params,
        jax.ShapeDtypeStruct((ROWS, 64), jnp.float32),
        cluster=dataclasses.replace(machine, compiler=profile),
        num_micro_batches=1,
    )
    return plan.time.compute_seconds


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("function", [_softmax, _layer_norm])
def test_a_normalization_is_one_kernel(function, remat: str) -> None:
    apart = _compute_seconds(function, remat, fused=False)
    together = _compute_seconds(function, remat, fused=True)
    bandwidth = cluster("h100:1").nodes[0].kind.achieved_bytes_per_second
    # At least the passes between the reductions: one write and two reads, forward
    # (again where it is computed again) and backward once.
    passes = 6 if remat == "full" else 3
    assert apart - together > passes * NBYTES / bandwidth


def test_operations_without_a_reduction_are_as_before() -> None:
    apart = _compute_seconds(jnp.tanh, "full", fused=False)
    assert _compute_seconds(jnp.tanh, "full", fused=True) == apart
