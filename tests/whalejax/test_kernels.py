"""Kernels that nobody can divide are run whole by every device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import whalejax as wh
from tests.equality import check, free_links, on_one_device
from whalejax.user_code.losses import Job


def _kernel(x: Any, out: Any) -> None:
    out[...] = x[...] * x[...]


def squares(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_kernel, out_shape=shape, interpret=True)(x)


@jax.custom_vjp
def squared(x: Any) -> Any:
    return squares(x)


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * x * g,))


def loss(p: Any, x: Any) -> Any:
    h = squared(x @ p["w"])
    fixed = squares(jax.lax.stop_gradient(h))  # without a rule, without a gradient
    return jnp.mean(jnp.sin(h) * fixed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "tensor": 4}])
def test_a_kernel_is_run_whole(mesh: dict[str, int]) -> None:
    model = {"w": 0.3 * jax.random.normal(jax.random.key(0), (8, 8))}
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    job = Job(loss, lambda: None, batch, None, batch_size=16)
    outcome = check(on_one_device(job, model=model), mesh=mesh)
    assert outcome.error < 1e-5, outcome.worst_path
    # Without a mapped region around it a TPU's compiler would take no such program.
    assert "manual_computation" in outcome.step.lower().as_text()


def test_shard_map_without_a_mesh() -> None:
    def mapped(p: Any, x: Any) -> Any:
        none = PartitionSpec()
        double = jax.shard_map(lambda x: 2 * x, in_specs=none, out_specs=none)
        return jnp.mean(double(x @ p["w"]))

    model = {"w": jnp.ones((8, 8))}
    with pytest.raises(wh.WhaleError) as said:
        wh.plan(mapped, model, jnp.ones((16, 8)), cluster=free_links(8))
    assert str(said.value) == (
        "loss_fn calls jax.shard_map without a mesh, and the plan's own mesh is "
        "chosen after the loss is traced. Give the call mesh=, plan and compile under "
        "jax.set_mesh(mesh), or remove jax.shard_map: the plan divides the work "
        "itself"
    )
