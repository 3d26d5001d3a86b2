"""Plans are made, compiled and run under their own mesh, whatever is set outside."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import whalejax as wh
from tests.equality import free_links, keep_gradient


def loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)


def constrained(p: Any, x: Any) -> Any:
    """Needs a mesh around it."""
    h = jnp.tanh(x @ p["w"])
    return jnp.mean(jax.lax.with_sharding_constraint(h, PartitionSpec("data")) ** 2)


WAYS: dict[str, dict[str, Any]] = {
    "one program": {"mesh": {"data": 4, "tensor": 2}, "num_micro_batches": 2},
    "replicas": {"shares": [1] * 8},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("names", [("data", "model"), ("data", "tensor")])
def test_set_mesh(way: str, kind: AxisType, names: tuple[str, str]) -> None:
    mesh = jax.make_mesh((4, 2), names, axis_types=(kind,) * 2)
    p = {"w": jax.random.normal(jax.random.key(0), (8, 8))}
    x = jax.random.normal(jax.random.key(1), (16, 8))
    wanted = jax.grad(loss)(p, x)["w"]
    given: Any = {"optimizer": keep_gradient()}
    for function in (loss, constrained):
        needed = function is constrained
        with jax.set_mesh(mesh):
            batch = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
            plan = wh.plan(function, p, x, cluster=free_links(8), **given, **WAYS[way])
        # A loss that names an axis is traced again where it is compiled.
        with jax.set_mesh(mesh) if needed else contextlib.nullcontext():
            step = wh.compile(plan, function, p, **given, devices=jax.devices()[:8])
        with jax.set_mesh(mesh):
            state, metrics = step(step.init_from(p), batch)
            again = step.eval(state, batch)
        np.testing.assert_allclose(state.opt_state["gradient"]["w"], wanted, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], loss(p, x), rtol=1e-5)
        assert np.isfinite(again["loss"])
