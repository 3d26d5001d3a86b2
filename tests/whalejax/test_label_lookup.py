"""Labels' logits by comparison: the numbers and gradients of the gather."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import GatherScatterMode as Mode

import whalejax as wh
from whalejax.lowering.spmd.label_lookup import picked, picks_from_rows
from whalejax.meshes import cluster


LABELS = np.array([[0, 6, 3, -1, 7, 2]], np.int32)  # Two of them are out of bounds.


def gathers(function: Any, *given: Any) -> list[Any]:
    closed = jax.make_jaxpr(function)(*given)
    found, open_ = [], [closed.jaxpr]
    while open_:
        for equation in open_.pop().eqns:
            found += [equation] if equation.primitive.name == "gather" else []
            open_ += [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
    return found


def looked_up(mode: Mode, fill: float | None = None, axis: int = -1) -> Any:
    def look(table: Any, labels: Any) -> Any:
        places = jnp.expand_dims(labels, axis)
        return jnp.take_along_axis(table, places, axis, mode=mode, fill_value=fill)

    return look


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    ("mode", "fill"),
    [(Mode.CLIP, None), (Mode.FILL_OR_DROP, None), (Mode.FILL_OR_DROP, 2.5)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_picked_is_what_the_gather_gives(
    axis: int, mode: Mode, fill: float | None, dtype: str
) -> None:
    drawn = np.random.default_rng(0)
    shape = (1, 6, 7) if axis == -1 else (1, 7, 6)
    table = jnp.asarray(drawn.normal(size=shape), dtype)
    # NumPy's negative indices count from the end; what gathers read is given here.
    look = looked_up(mode, fill, axis)
    (equation,) = gathers(look, table, LABELS)
    assert picks_from_rows(equation)
    size = equation.invars[1].aval.shape
    indices = jnp.asarray(LABELS).reshape(size)

    def gathered(x: Any) -> Any:
        return equation.primitive.bind(x, indices, **equation.params)

    def compared(x: Any) -> Any:
        return picked(equation, [x, indices])[0]

    weights = jnp.arange(1.0, 7.0, dtype=dtype).reshape(gathered(table).shape)
    for one, other in zip(
        jax.vjp(gathered, table)[1](weights),
        jax.vjp(compared, table)[1](weights),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    one, other = (np.asarray(f(table), np.float32) for f in (gathered, compared))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("table", "labels", "wanted"),
    [
        ((1, 6, 7), (1, 6), True),
        ((6, 7), (6,), True),
        ((2, 6, 7), (2, 6), False),  # Compilers do these well.
    ],
)
def test_which_are_picked(
    table: tuple[int, ...], labels: tuple[int, ...], wanted: bool
) -> None:
    look = looked_up(Mode.CLIP)
    zeros = jnp.zeros(labels, jnp.int32)
    (equation,) = gathers(look, jnp.zeros(table), zeros)
    assert picks_from_rows(equation) is wanted
    (equation,) = gathers(look, jnp.zeros(table, jnp.int32), zeros)
    assert not picks_from_rows(equation)


def test_rows_of_a_table_are_gathered() -> None:
    table, places = jnp.zeros((9, 4)), jnp.zeros((6,), jnp.int32)
    for equation in gathers(lambda t, p: t[p], table, places):
        assert not picks_from_rows(equation)


def scattered(text: str) -> list[str]:
    """Types of what the scatters of a program give."""
    return re.findall(r'stablehlo\.scatter".*?-> (tensor<[^>]*>)', text, re.DOTALL)


def test_a_step_of_one_sample_scatters_nothing() -> None:
    """Losses and parameters are those of the step as it was written."""

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = jnp.tanh(batch["x"]) @ model["head"]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(nats)

    drawn = np.random.default_rng(1)
    model = {"head": drawn.normal(size=(8, 32)).astype(np.float32)}
    batch = {
        "x": drawn.normal(size=(1, 16, 8)).astype(np.float32),
        "y": drawn.integers(0, 32, size=(1, 16)).astype(np.int32),
    }
    tx = optax.sgd(0.5)
    plan = wh.plan(loss_fn, model, batch, optimizer=tx, cluster=cluster("cpu:1"))
    step = wh.compile(plan, loss_fn, model, optimizer=tx, devices=jax.devices()[:1])
    written = jax.jit(jax.value_and_grad(loss_fn)).lower(model, batch)
    assert "tensor<1x16x32xf32>" in scattered(written.as_text())
    assert "tensor<1x16x32xf32>" not in scattered(step.lower().as_text())
    state = step.init(lambda key: model, rng=jax.random.key(0))
    state, metrics = step(state, batch)
    loss, gradients = jax.jit(jax.value_and_grad(loss_fn))(model, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    wanted = model["head"] - 0.5 * gradients["head"]
    np.testing.assert_allclose(state.params["head"], wanted, rtol=1e-5, atol=1e-7)
