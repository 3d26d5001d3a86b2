"""Gating against a loop over tokens, and the sparse layer against a loop over both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from whalejax.models import _gating, moe
from whalejax.models._gating import capacity


route = jax.jit(_gating.route, static_argnames=("choices", "places"))
Floats = npt.NDArray[np.floating[Any]]


def softmax(scores: Floats) -> Floats:
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def loop(scores: Floats, choices: int, places: int) -> tuple[Floats, Floats, int]:
    """Dispatch, combine and how many choices were turned away, token by token."""
    groups, tokens, experts = scores.shape
    dispatch = np.zeros((groups, tokens, experts, places))
    combine = np.zeros_like(dispatch)
    turned_away = 0
    for group in range(groups):
        chances = softmax(scores[group])
        ranked = np.argsort(-chances, axis=-1, kind="stable")[:, :choices]
        used = [0] * experts
        for choice in range(choices):
            for token in range(tokens):
                expert = ranked[token, choice]
                weight = chances[token, expert]
                if choices > 1:
                    weight /= chances[token, ranked[token]].sum()
                if used[expert] == places:
                    turned_away += 1
                    continue
                dispatch[group, token, expert, used[expert]] = 1.0
                combine[group, token, expert, used[expert]] = weight
                used[expert] += 1
    return dispatch, combine, turned_away


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("places", [1, 3, 12])
@pytest.mark.parametrize("choices", [1, 2])
def test_routing_is_that_of_a_loop(choices: int, places: int, seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=(3, 12, 4)).astype(np.float32)
    scores[..., 0] += 1.0  # a favourite, so that places run out
    expected, weighted, turned_away = loop(scores, choices, places)
    found = route(jnp.asarray(scores), choices=choices, places=places)
    np.testing.assert_array_equal(found.dispatch, expected)
    np.testing.assert_allclose(found.combine, weighted, rtol=1e-5, atol=1e-7)
    asked = choices * 3 * 12
    np.testing.assert_allclose(found.dropped, turned_away / asked, atol=1e-6)
    assert (turned_away > 0) == (places < 12)


def test_balance_is_taken_over_the_whole_batch() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 12, 5)).astype(np.float32)
    chances = softmax(scores)
    first = np.eye(5)[chances.argmax(-1)]
    expected = 5 * (first.mean((0, 1)) * chances.mean((0, 1))).sum()
    found = route(jnp.asarray(scores), choices=2, places=6).balance
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    groups = [
        float(route(jnp.asarray(scores[i : i + 1]), choices=2, places=6).balance)
        for i in range(4)
    ]
    assert abs(np.mean(groups) - expected) > 1e-3


def test_even_use_is_balanced() -> None:
    scores = 10.0 * np.tile(np.eye(4, dtype=np.float32), (1, 3, 1))
    routing = route(jnp.asarray(scores), choices=1, places=3)
    np.testing.assert_allclose(routing.balance, 1.0, rtol=1e-5)
    np.testing.assert_allclose(routing.dropped, 0.0, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        ((24, 16, 2, 1.5), 5),
        ((24, 16, 1, 1.5), 3),
        ((24, 2, 2, 9.0), 24),
        ((8, 64, 1, 1.0), 1),
    ],
)
def test_capacity_is_rounded_up_and_bounded(
    arguments: tuple[int, int, int, float], places: int
) -> None:
    assert capacity(*arguments) == places


@pytest.mark.parametrize("gating", ["top_2", "switch"])
def test_the_layer_is_that_of_a_loop(gating: Any) -> None:
    config = replace(
        moe.SIZES["test"],
        embed=16,
        mlp=24,
        experts=4,
        gating=gating,
        capacity_factor=1.0,
    )
    layer = moe.SparseFeedForward(config, rngs=nnx.Rngs(0))
    run = nnx.jit(moe.SparseFeedForward.__call__)
    x = np.random.default_rng(1).normal(size=(2, 12, 16)).astype(np.float32)
    y, routing = run(layer, jnp.asarray(x))
    assert float(routing.dropped) > 0
    scores = x @ np.asarray(layer.router[...])
    _, combine, _ = loop(
        scores, {"top_2": 2, "switch": 1}[gating], routing.dispatch.shape[-1]
    )
    weights = combine.sum(-1)
    up, down = np.asarray(layer.experts.up[...]), np.asarray(layer.experts.down[...])
    expected = np.zeros_like(x)
    for group, token, expert in np.ndindex(*weights.shape):
        answer = np.maximum(x[group, token] @ up[expert], 0) @ down[expert]
        expected[group, token] += weights[group, token, expert] * answer
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_metrics_and_loss_add_up() -> None:
    job = moe.job("test", layers=1)
    model = nnx.jit(job.make_model)(jax.random.key(0, impl="rbg"))
    tokens = jnp.asarray(job.batch_at(0, 8)["tokens"])

    @nnx.jit
    def both(model: moe.MoE, tokens: jax.Array) -> Any:
        return moe.loss_fn(model, {"tokens": tokens}), model(tokens[:, :-1])

    (loss, metrics), (logits, loads) = both(model, tokens)
    scores = np.asarray(logits, np.float64)
    nats = np.log(np.exp(scores).sum(-1))
    picked = np.asarray(tokens[:, 1:])[..., None]
    nats -= np.take_along_axis(scores, picked, axis=-1)[..., 0]
    assert set(metrics) == {"aux", "dropped"}
    balances = [float(load.balance) for load in loads]
    dropped = [float(load.dropped) for load in loads]
    np.testing.assert_allclose(metrics["aux"], np.mean(balances), rtol=1e-6)
    np.testing.assert_allclose(metrics["dropped"], np.mean(dropped), rtol=1e-6)
    np.testing.assert_allclose(loss, nats.mean() + 0.01 * np.mean(balances), rtol=1e-6)


@pytest.mark.parametrize("gating", ["top_2", "switch"])
def test_the_router_learns_from_both_terms(gating: Any) -> None:
    config = replace(moe.SIZES["test"], gating=gating)
    graph, state = nnx.split(moe.SparseFeedForward(config, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (4, 12, config.embed))

    @jax.jit
    def router_gradients(state: Any) -> Any:
        def terms(state: Any) -> Any:
            y, routing = nnx.merge(graph, state, copy=True)(x)
            return jnp.mean(jnp.square(y)), routing.balance

        of_answer = jax.grad(lambda state: terms(state)[0])(state)
        of_balance = jax.grad(lambda state: terms(state)[1])(state)
        return of_answer["router"][...], of_balance["router"][...]

    for gradient in router_gradients(state):
        assert float(jnp.abs(gradient).max()) > 0


def test_expert_dimensions_are_named() -> None:
    experts = moe.Experts(moe.SIZES["test"], rngs=nnx.Rngs(0))
    assert experts.up.get_metadata()["out_sharding"] == ("experts", "embed", "mlp")
    assert experts.down.get_metadata()["out_sharding"] == ("experts", "mlp", "embed")
    config = replace(moe.SIZES["test"], logical_names=False)
    plain = moe.Experts(config, rngs=nnx.Rngs(0))
    assert "out_sharding" not in plain.up.get_metadata()
