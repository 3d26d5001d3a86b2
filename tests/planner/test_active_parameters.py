"""Parameters that a token uses, where experts are computed one by one or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.planner.plan_entries import ModelWork


EXPERTS, WIDTH, HIDDEN, TOP = 8, 32, 64, 2
NET = {
    "words": jnp.zeros((100, WIDTH)),
    "router": jnp.zeros((WIDTH, EXPERTS)),
    "up": jnp.zeros((EXPERTS, WIDTH, HIDDEN)),
    "down": jnp.zeros((EXPERTS, HIDDEN, WIDTH)),
}
STACKS = NET["up"].size + NET["down"].size
WHOLE = STACKS + NET["words"].size + NET["router"].size
CHOSEN = WHOLE - STACKS + STACKS * TOP // EXPERTS


def routed(net: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    hidden = net["words"][batch["tokens"]].reshape(-1, WIDTH)
    scores, index = jax.lax.top_k(jax.nn.softmax(hidden @ net["router"]), TOP)
    gates = (jax.nn.one_hot(index, EXPERTS) * scores[..., None]).sum(1)
    return hidden, gates


def scanned(net: Any, batch: Any) -> jax.Array:
    """Every expert computes every token, one after the other."""
    hidden, gates = routed(net, batch)

    def expert(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down, gate = layer
        return total + gate[:, None] * (jax.nn.relu(hidden @ up) @ down), None

    layers = net["up"], net["down"], gates.T
    total, _ = jax.lax.scan(expert, jnp.zeros_like(hidden), layers)
    return (total**2).mean()


def unrolled(net: Any, batch: Any) -> jax.Array:
    hidden, gates = routed(net, batch)
    total = jnp.zeros_like(hidden)
    for e in range(EXPERTS):
        result = jax.nn.relu(hidden @ net["up"][e]) @ net["down"][e]
        total = total + gates[:, e : e + 1] * result
    return (total**2).mean()


def side_by_side(net: Any, batch: Any) -> jax.Array:
    hidden, gates = routed(net, batch)
    inner = jax.nn.relu(jnp.einsum("td,edf->tef", hidden, net["up"]))
    results = jnp.einsum("tef,efd->ted", inner, net["down"])
    return (jnp.einsum("ted,te->td", results, gates) ** 2).mean()


def with_capacity(net: Any, batch: Any) -> jax.Array:
    """Each expert computes as many tokens as an even load gives it."""
    hidden, gates = routed(net, batch)
    capacity = hidden.shape[0] * TOP // EXPERTS

    def expert(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        up, down, gate = layer
        weights, index = jax.lax.top_k(gate, capacity)
        result = jax.nn.relu(hidden[index] @ up) @ down
        return total.at[index].add(weights[:, None] * result), None

    layers = net["up"], net["down"], gates.T
    total, _ = jax.lax.scan(expert, jnp.zeros_like(hidden), layers)
    return (total**2).mean()


def work_of(loss: Callable[..., Any], net: Any) -> tuple[wh.Plan, ModelWork]:
    batch = {"tokens": jax.ShapeDtypeStruct((16, 8), jnp.int32)}
    plan = wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:1")
    assert plan.work is not None
    return plan, plan.work


@pytest.mark.parametrize("loss", [scanned, unrolled, side_by_side])
def test_experts_that_compute_every_token_are_said(loss: Callable[..., Any]) -> None:
    plan, work = work_of(loss, NET)
    assert (work.parameters, work.active, work.chosen) == (WHOLE, WHOLE, CHOSEN)
    assert work.step_flops > 6 * STACKS * work.tokens  # what is computed
    assert "chosen for a token, though every expert computes each" in str(plan)


def test_experts_in_a_loop_with_a_capacity() -> None:
    plan, work = work_of(with_capacity, NET)
    assert (work.parameters, work.active, work.chosen) == (WHOLE, CHOSEN, CHOSEN)
    assert work.step_flops < 2 * 6 * STACKS * work.tokens * TOP // EXPERTS
    assert "active for a token" in str(plan)


def test_layers_are_no_experts() -> None:
    """As many layers as a model has classes among which it chooses."""
    net = {
        "words": jnp.zeros((100, WIDTH)),
        "layers": jnp.zeros((EXPERTS, WIDTH, WIDTH)),
        "router": jnp.zeros((WIDTH, EXPERTS)),
    }

    def loss(net: Any, batch: Any) -> jax.Array:
        hidden = net["words"][batch["tokens"]].reshape(-1, WIDTH)
        hidden, _ = jax.lax.scan(
            lambda h, w: (jnp.tanh(h @ w), None), hidden, net["layers"]
        )
        best, _ = jax.lax.top_k(hidden @ net["router"], TOP)
        return (best**2).mean()

    _, work = work_of(loss, net)
    assert work.parameters == work.active == work.chosen
