"""Numbers of the program's text, which are no operands of what computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from whalejax.capture.rules.behaviour import Equation
from whalejax.capture.rules.rule_table import behaviour


CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "sum": lambda: jnp.sum(0.5),
    "mean": lambda: jnp.mean(1.0),
    "prod": lambda: jnp.prod(2.0),
    "max": lambda: jnp.max(1.0),
    "all": lambda: jnp.all(True).astype(jnp.float32),
    "any": lambda: jnp.any(False).astype(jnp.float32),
    "argmax": lambda: jnp.argmax(1.0).astype(jnp.float32),
    "median": lambda: jnp.median(1.0),
    "cumsum": lambda: jnp.cumsum(3.0)[0],
    "logsumexp": lambda: jax.nn.logsumexp(1.0),
    "reshape": lambda: jnp.reshape(1.5, (1, 1))[0, 0],
    "squeeze": lambda: lax.squeeze(1.5, ()),
    "reduce": lambda: lax.reduce(1.0, 0.0, lambda a, b: a + b, ()),
    "reduce_precision": lambda: lax.reduce_precision(1.5, 8, 7),
    "einsum": lambda: jnp.einsum(",->", 2.0, 3.0),
    "dot_general": lambda: lax.dot_general(2.0, 3.0, (((), ()), ((), ()))),
}
SCALED: Final[dict[str, Callable[[jax.Array], jax.Array]]] = {
    "einsum": lambda x: jnp.einsum(",bi->bi", 2.0, x),
    "dot_general": lambda x: lax.dot_general(x, 2.0, (((), ()), ((), ()))),
    "outer": lambda x: jnp.outer(jnp.float32(2.0), x).reshape(x.shape),
}
SCALAR: Final = (((), ()), ((), ()))


def run(loss: Callable[[Any, Any], jax.Array]) -> None:
    """Plan a loss, run a step, and compare with the gradient of one device."""
    rng = np.random.default_rng(0)
    model = {"w": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)}
    batch = {"x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    options: dict[str, Any] = {"optimizer": optax.sgd(1.0)}
    mesh = {"data": 2, "tensor": 2, "fsdp": 2}
    plan = wh.plan(loss, model, batch, cluster="cpu:8", mesh=mesh, **options)
    step = wh.compile(plan, loss, model, **options)
    state, metrics = step(step.init_from(model), batch)
    value, gradient = jax.value_and_grad(loss)(model, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    want = model["w"] - gradient["w"]
    np.testing.assert_allclose(state.model["w"], want, rtol=1e-5, atol=1e-6)


def test_constants_in_a_loss() -> None:
    """As flows of normalizing flows that turn nothing have: ``jnp.sum(0.0)``."""

    def loss(p: Any, b: Any) -> jax.Array:
        constants = sum(constant() for constant in CONSTANTS.values())
        return jnp.mean((b["x"] @ p["w"]) ** 2) + constants

    run(loss)


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_is_planned(name: str) -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((b["x"] @ p["w"]) ** 2) * (1 + CONSTANTS[name]())

    model, batch = {"w": jnp.ones((4, 4))}, {"x": jnp.ones((8, 4))}
    assert wh.plan(loss, model, batch, cluster="h100:2").axis_sizes


def test_a_layer_of_constants_in_vmap() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        y = jax.vmap(lambda x: (jnp.sum(0.5) + x) @ p["w"])(b["x"])
        return jnp.mean(y**2)

    run(loss)


def test_products_with_a_number_are_multiplications() -> None:
    def loss(p: Any, b: Any) -> jax.Array:
        x = b["x"]
        for scaled in SCALED.values():
            x = scaled(x)
        return jnp.mean((x @ p["w"]) ** 2)

    run(loss)


def test_a_product_with_a_scalar_has_no_rows_of_its_own() -> None:
    equation = Equation(
        name="dot_general",
        params={"dimension_numbers": SCALAR},
        inputs=((), (4, 8)),
        outputs=((4, 8),),
    )
    rule = behaviour(equation)
    assert rule.elementwise and rule.matmul is None
