"""State that no sample changes advances once a step, on every plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from tests.equality import LEARNING_RATE, free_links, keep_gradient
from whalejax.adapters.base import adapt


WIDTH, SAMPLES = 8, 16


class State(nnx.Variable[Any]):
    """What is neither trained nor a statistic of the batch."""


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(0.3 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, h: Any) -> Any:
        return jnp.tanh(h @ self.w[...])


class Warm(nnx.Module):
    """Counts its calls, cools down, follows its weights; and counts its samples."""

    def __init__(self, rngs: nnx.Rngs, staged: bool = False) -> None:
        self.mark = wh.stage if staged else contextlib.nullcontext
        self.first, self.second = Layer(rngs), Layer(rngs)
        self.calls = State(jnp.int32(0))
        self.temperature = State(jnp.float32(4.0))
        self.teacher = State(jnp.zeros((WIDTH, WIDTH)))
        self.seen = State(jnp.int32(0))
        self.positive = State(jnp.float32(0.0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        self.temperature[...] *= 0.5
        kept = jax.lax.stop_gradient(self.first.w[...])
        self.teacher[...] = 0.75 * self.teacher[...] + 0.25 * kept
        self.seen[...] += x.shape[0]
        self.positive[...] += (x > 0).sum().astype(jnp.float32)
        with self.mark():
            h = self.first(x)
        with self.mark():
            taught = 0.1 * (h @ self.teacher[...])
            return self.second(h) / self.temperature[...] + taught


def mean_loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def staged(count: int) -> Callable[[Any, Any], Any]:
    def loss(model: Any, x: Any) -> Any:
        with wh.pipeline(num_micro_batches=count):
            return mean_loss(model, x)

    return loss


class Deep(nnx.Module):
    """Stacked layers; state that a step changes by all their weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)
        self.calls = State(jnp.int32(0))
        self.norm = State(jnp.float32(0.0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        norm = jnp.sum(jax.lax.stop_gradient(self.layers.w[...]) ** 2)
        self.norm[...] = 0.5 * self.norm[...] + norm

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, h: Any) -> Any:
            return layer(h)

        return run(self.layers, x) * self.calls[...].astype(x.dtype)


def alone(loss: Any, model: Any, batch: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of two steps of one device with the whole batch, and the state then."""
    adapter = adapt(model, loss)
    params, rest = adapter.take_apart(model)

    def value(params: Any, rest: Any) -> tuple[Any, Any]:
        result = adapter.loss(params, rest, batch)
        return result.total, result.rest

    losses = []
    for _ in range(2):
        (found, rest), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(
            params, rest
        )
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)
        losses.append(float(found))
    return losses, jax.tree.map(np.asarray, rest)


def two_steps(
    loss: Any, model: Any, batch: Any, **options: Any
) -> tuple[list[float], dict[str, Any], wh.Plan]:
    given: dict[str, Any] = {"optimizer": keep_gradient()}
    plan = wh.plan(loss, model, batch, cluster=free_links(8), **given, **options)
    step = wh.compile(plan, loss, model, **given, devices=jax.devices()[:8])
    state, losses = step.init_from(model), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.rest), plan


def samples() -> Any:
    return jax.random.normal(jax.random.key(1), (SAMPLES, WIDTH))


@pytest.fixture(scope="module")
def expected() -> Any:
    return alone(mean_loss, Warm(nnx.Rngs(0)), samples())


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole": (mean_loss, {"num_micro_batches": 1}),
    "parts": (mean_loss, {"num_micro_batches": 2, "mesh": {"data": 4, "tensor": 2}}),
    "of one sample": (mean_loss, {"num_micro_batches": 16, "mesh": {"tensor": 8}}),
    "shares": (mean_loss, {"shares": [2] * 8}),
    "stages": (staged(4), {"mesh": {"stage": 2}}),
    "pipelines": (staged(4), {"mesh": {"stage": 2}, "shares": [1, 3]}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_once_a_step(expected: Any, way: str) -> None:
    (loss, options), (losses, state) = WAYS[way], expected
    model = Warm(nnx.Rngs(0), staged=loss is not mean_loss)
    found, rest, plan = two_steps(loss, model, samples(), **options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(rest[name], value, rtol=1e-5, err_msg=name)
    told = [note for note in plan.notes if "not trained, and changed by" in note]
    assert len(told) == (plan.num_micro_batches > 1)


def test_the_plan_names_what_samples_change() -> None:
    model = nnx.eval_shape(lambda: Warm(nnx.Rngs(0)))
    plan = wh.plan(
        mean_loss,
        model,
        samples(),
        cluster=free_links(8),
        num_micro_batches=2,
    )
    (note,) = (n for n in plan.notes if "not trained, and" in n)
    assert note == (
        "positive, seen: not trained, and changed by the batch or by random numbers, "
        "so 2 times a step, with every micro-batch, as on one device with as much "
        "accumulation; num_micro_batches=1 changes it once"
    )


@pytest.mark.full
def test_layers_in_stages() -> None:
    losses, state = alone(mean_loss, Deep(nnx.Rngs(0)), samples())
    options: Any = {"mesh": {"stage": 2}, "num_micro_batches": 4}
    found, rest, _ = two_steps(mean_loss, Deep(nnx.Rngs(0)), samples(), **options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert rest["calls"] == state["calls"] == 2
    np.testing.assert_allclose(rest["norm"], state["norm"], rtol=1e-5)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        calls = self.variable("state", "calls", lambda: jnp.float32(0.0))
        calls.value = calls.value + 1
        return nn.Dense(4)(x) * calls.value


def test_linen_collections() -> None:
    model, x = Counting(), samples()
    variables = model.init(jax.random.key(0), x)

    def loss(variables: Any, x: Any) -> Any:
        y, updates = model.apply(variables, x, mutable=["state"])
        return jnp.mean(y**2), wh.Aux(variables=updates)

    wanted = float(loss(variables, x)[0])
    losses, rest, _ = two_steps(loss, variables, x, num_micro_batches=4)
    np.testing.assert_allclose(losses[0], wanted, rtol=1e-5)
    calls: Any = variables["state"]["calls"]
    assert jax.tree.leaves(rest) == [calls + 2]
