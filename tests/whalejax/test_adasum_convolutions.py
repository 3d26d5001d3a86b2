"""Adasum of convolutional networks: what ranks exchange, with and without space."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from tests.adasum import difference, reference
from whalejax import hlo


SAMPLES, EXTENT, CHANNELS = 12, 12, 4

KEEPS = optax.chain(optax.trace(decay=0.0), optax.scale(-1.0))
"""Keeps the gradient that it is given."""


def convolved(x: Any, kernel: Any, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    sliding = {"dimension_numbers": numbers, "feature_group_count": groups}
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **sliding)


def normed(x: Any) -> Any:
    axes = (0, 1, 2)
    spread = x.var(axes, keepdims=True)
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(spread + 1e-5)


def loss(params: Any, batch: Any) -> Any:
    x = normed(convolved(batch["x"], params["first"]))
    x = jnp.tanh(convolved(jnp.tanh(x), params["second"]))
    return jnp.mean(jnp.sin(convolved(x, params["groups"], 2)) ** 2)


def drawn() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    inputs = {"first": CHANNELS, "second": CHANNELS, "groups": CHANNELS // 2}
    params = {
        name: jnp.asarray(draw.normal(size=(3, 3, n, CHANNELS)) / 6, jnp.float32)
        for name, n in inputs.items()
    }
    x = draw.normal(size=(SAMPLES, EXTENT, EXTENT, CHANNELS))
    return params, {"x": jnp.asarray(x, jnp.float32)}


def stepping(mesh: dict[str, int], combine: str = "adasum") -> tuple[wh.Plan, Any]:
    params, batch = drawn()
    devices = int(np.prod([*mesh.values()]))
    plan = wh.plan(
        *(loss, params, batch),
        cluster=f"cpu:{devices}",
        mesh=mesh,
        optimizer=KEEPS,
        combine=combine,
        num_micro_batches=1,
        per_micro_batch=combine != "mean",
    )
    given = {"optimizer": KEEPS, "devices": jax.devices()[:devices]}
    return plan, wh.compile(plan, loss, params, **given)


def planned_bytes(plan: wh.Plan) -> Counter[str]:
    found: Counter[str] = Counter()
    for c in plan.collectives:
        found[c.kind] += int(c.payload_bytes * c.times(plan.num_micro_batches))
    return found


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "height": 2},
        pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.full),
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"data": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_rank_keeps_its_images_to_itself(mesh: dict[str, int]) -> None:
    """Of other ranks it receives gradients and dot products, as many as planned."""
    ranks = mesh["data"]
    params, batch = drawn()
    plan, step = stepping(mesh)
    state, metrics = step(step.init_from(params), batch)
    parts = batch["x"].reshape(ranks, -1, *batch["x"].shape[1:])
    alone = jax.jit(jax.value_and_grad(loss))
    losses, each = zip(*(alone(params, {"x": own}) for own in parts), strict=True)
    assert np.isclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    for name, found in state.opt_state[0].trace.items():
        expected = reference(np.stack([g[name] for g in each]))
        assert difference(found, expected) <= 1e-5
    compiled = step.lower().compile()
    found = hlo.collectives(compiled.as_text())
    assert found.nbytes == planned_bytes(plan)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["fsdp", "height"])
def test_it_takes_as_much_memory_as_the_mean_does(axis: str) -> None:
    """But for what is planned for the combination."""
    taken, planned = [], []
    for combine in ("adasum", "mean"):
        plan, step = stepping({"data": 2, axis: 2}, combine)
        analysis = step.lower().compile().memory_analysis()
        taken.append(analysis.temp_size_in_bytes + analysis.argument_size_in_bytes)
        planned.append(plan.memory.total_bytes)
    assert taken[0] / taken[1] <= 1.1 * planned[0] / planned[1]
