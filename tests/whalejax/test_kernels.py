"""Kernels that nobody can divide are run whole by every device."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


@pytest.mark.parametrize(
    ("order", "runs"), [(range(8), True), (range(2), False), (range(7, -1, -1), False)]
)
def test_shard_map_runs_on_the_devices_of_the_plan(order: Any, runs: bool) -> None:
    mesh = Mesh(np.array([jax.devices()[n] for n in order]), ("x",))
    rows = PartitionSpec("x")

    def loss(p: Any, x: Any) -> jax.Array:
        double = jax.shard_map(
            lambda h: 2 * h, mesh=mesh, in_specs=rows, out_specs=rows
        )
        return jnp.mean(double(jnp.tanh(x @ p["w"])) ** 2)

    model, x = {"w": jnp.full((8, 16), 0.1)}, jnp.ones((16, 8))
    plan = wh.plan(loss, model, x, optimizer=optax.sgd(0.1), cluster="cpu:8")
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "devices": jax.devices()}
    if not runs:
        ids = re.escape(str([*order]))
        with pytest.raises(wh.PlanError, match=rf"shard_map on devices {ids} \(test_"):
            wh.compile(plan, loss, model, **options)
        return
    step = wh.compile(plan, loss, model, **options)
    _, metrics = step(step.init_from(model), x)
    np.testing.assert_allclose(metrics["loss"], loss(model, x), rtol=1e-5)


def test_layouts_of_device_put_are_omitted() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean(jax.device_put(jnp.tanh(x @ p["w"]), sharding) ** 2)

    model, x = {"w": jnp.full((8, 16), 0.1)}, jnp.ones((16, 8))
    tx = optax.sgd(0.1)
    plan = wh.plan(loss, model, x, optimizer=tx, cluster="cpu:8")
    assert any("fixes by device_put (the first: " in note for note in plan.notes)
    step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())
    _, metrics = step(step.init_from(model), x)
    np.testing.assert_allclose(metrics["loss"], loss(model, x), rtol=1e-5)
