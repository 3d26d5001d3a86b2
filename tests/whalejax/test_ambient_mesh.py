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


def refusal(function: Any) -> str:
    """Why a loss is not planned."""
    model, x = {"w": jnp.ones((8, 8))}, jnp.ones((16, 8))
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(function, model, x, cluster=free_links(8))
    return str(caught.value)


def test_a_layout_of_no_mesh() -> None:
    assert refusal(constrained) == (
        "loss_fn calls with_sharding_constraint with a PartitionSpec, and no mesh "
        "defines its axes. Remove the call, as the plan divides the work itself and "
        "ignores the layout; or plan and compile under jax.set_mesh(mesh), with a mesh "
        "of any axes"
    )


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto, None])
def test_explicit_layouts_are_refused(kind: AxisType | None) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind or AxisType.Auto,))
    rows = PartitionSpec("data", None)

    def product(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.einsum("bi,ij->bj", x, p["w"], out_sharding=rows) ** 2)

    def moved(p: Any, x: Any) -> Any:
        return jnp.mean(jax.sharding.reshard(x @ p["w"], rows) ** 2)

    def picked(p: Any, x: Any) -> Any:
        return jnp.mean(p["w"].at[jnp.arange(8)].get(out_sharding=rows))

    for function in (product, moved, picked):
        with jax.set_mesh(mesh) if kind else contextlib.nullcontext():
            text = refusal(function)
        assert text.startswith(
            "loss_fn asks for layouts along explicit mesh axes (out_sharding=, "
            "reshard), and programs with explicit axes are not supported: "
        )
        assert "Remove these layouts" in text


def test_meshes_with_explicit_axes_inside_a_loss() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows = PartitionSpec("data", None)

    def moved(p: Any, x: Any) -> Any:
        return jnp.mean(jax.sharding.reshard(x @ p["w"], NamedSharding(mesh, rows)))

    assert "float32[16@data,8] in test_ambient_mesh.py:" in refusal(moved)

    def laid(p: Any, x: Any) -> Any:
        sharding = NamedSharding(mesh, rows)
        return jnp.mean(jax.lax.with_sharding_constraint(x @ p["w"], sharding))

    def mapped(p: Any, x: Any) -> Any:
        double = jax.shard_map(
            lambda x: 2 * x, mesh=mesh, in_specs=rows, out_specs=rows
        )
        return jnp.mean(double(x @ p["w"]))

    for function, name in ((laid, "with_sharding_constraint"), (mapped, "shard_map")):
        text = refusal(function)
        assert f"names a mesh with explicit axes in {name}" in text.replace("jax.", "")
        assert "axis_types=(jax.sharding.AxisType.Auto,) * its number of axes" in text
