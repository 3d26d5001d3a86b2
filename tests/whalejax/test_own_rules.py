"""Functions with derivative rules of their own run and are differentiated as on one
device, whatever they close over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.ode import odeint

from tests.equality import check, on_one_device
from whalejax.user_code.losses import Job


TABLE = jnp.linspace(-1.0, 1.0, 16)
WIDTH, LAYERS, SAMPLES = 8, 3, 16

Loss = Callable[[Any, Any], Any]


def nearest(x: Any, table: Any) -> Any:
    distances = jnp.abs(x[..., None] - table.reshape((1,) * x.ndim + table.shape))
    return table[jnp.argmin(distances, -1)]


@jax.custom_vjp
def quantised(x: Any) -> Any:
    """Straight through; it closes over the table."""
    return nearest(x, TABLE)


quantised.defvjp(lambda x: (quantised(x), None), lambda _, g: (g,))


@jax.custom_vjp
def looked_up(x: Any, table: Any) -> Any:
    """Straight through, with the table as an operand."""
    return nearest(x, table)


looked_up.defvjp(
    lambda x, table: (looked_up(x, table), table.shape),
    lambda shape, g: (g, jnp.zeros(shape, g.dtype)),
)


def plain(p: Any, x: Any) -> Any:
    return jnp.mean(quantised(jnp.tanh(x @ p["w"][0]) @ p["w"][1]) ** 2)


def in_a_branch(p: Any, x: Any) -> Any:
    h = jax.lax.cond(x[0, 0] > 100, jnp.tanh, quantised, x @ p["w"][0])
    return jnp.mean((h @ p["w"][1]) ** 2)


def in_a_scan(p: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (quantised(jnp.tanh(h @ w)), None), x, p["w"])
    return jnp.mean(h**2)


def of_slices(p: Any, x: Any) -> Any:
    tables = jnp.stack([TABLE, 2 * TABLE, TABLE])

    def turn(h: Any, given: Any) -> tuple[Any, None]:
        return looked_up(jnp.tanh(h @ given[0]), given[1]), None

    return jnp.mean(jax.lax.scan(turn, x, (p["w"], tables))[0] ** 2)


def flow(y: Any, t: Any, w: Any) -> Any:
    """Closes over an array."""
    return jnp.tanh(y @ w) * TABLE[:WIDTH].reshape((1,) * (y.ndim - 1) + (-1,)) + t


def together(p: Any, x: Any) -> Any:
    ys = odeint(flow, x, jnp.linspace(0.0, 1.0, 3), 0.1 * p["w"][0])
    return jnp.mean(ys[-1] ** 2)


def one_by_one(p: Any, x: Any) -> Any:
    times = jnp.linspace(0.0, 1.0, 3)
    ys = jax.vmap(lambda y: odeint(flow, y, times, 0.1 * p["w"][0]))(x)
    return jnp.mean(ys[:, -1] ** 2)


CASES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "one device": (plain, {"devices": 1}),
    "data": (plain, {}),
    "data and tensor": (plain, {"mesh": {"data": 2, "tensor": 4}}),
    "fsdp, in parts": (plain, {"mesh": {"fsdp": 8}, "num_micro_batches": 2}),
    "shares": (plain, {"num_micro_batches": 8, "shares": [1] * 8}),
    "in a branch": (in_a_branch, {}),
    "stages": (in_a_scan, {"mesh": {"stage": 3}, "devices": 6, "num_micro_batches": 2}),
    "unequal stages": (in_a_scan, {"mesh": {"stage": 2}, "num_micro_batches": 2}),
    "of slices": (of_slices, {}),
    "of slices, unequal stages": (
        of_slices,
        {"mesh": {"stage": 2}, "num_micro_batches": 2},
    ),
    "an equation of motion": (together, {}),
    "an equation of motion for each sample": (one_by_one, {}),
}


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion  # JAX's own odeint promotes
@pytest.mark.parametrize("case", CASES)
def test_as_on_one_device(case: str) -> None:
    loss, options = CASES[case]
    weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    job = Job(
        loss_fn=loss,
        make_model=lambda: {"w": weights},
        batch=jax.random.normal(jax.random.key(1), (SAMPLES, WIDTH)),
        optimizer=None,
        batch_size=SAMPLES,
    )
    count = options.get("num_micro_batches", 1)
    one = on_one_device(job, count, model={"w": weights})
    outcome = check(one, **options)
    assert outcome.error < 1e-5, outcome.worst_path
    assert any(abs(g).max() > 1e-4 for g in one.gradients)
