"""Gating against a loop over tokens, and the sparse layer against a loop over both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from whalejax.models import moe
from whalejax.models.common import gating
from whalejax.models.common.gating import capacity


queue = jax.jit(gating.queue, static_argnames="choices")
seats = jax.jit(gating.seats, static_argnames="places")
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
    queues = queue(jnp.asarray(scores), choices=choices)
    found = seats(queues, places=places)
    np.testing.assert_array_equal(found.dispatch, expected)
    np.testing.assert_allclose(found.combine, weighted, rtol=1e-5, atol=1e-7)
    asked = choices * 3 * 12
    dropped = gating.dropped(queues, places=places)
    np.testing.assert_allclose(dropped, turned_away / asked, atol=1e-6)
    assert (turned_away > 0) == (places < 12)


@pytest.mark.parametrize("choices", [1, 2])
def test_passes_serve_every_token_once(choices: int) -> None:
    scores = np.random.default_rng(1).normal(size=(3, 12, 4)).astype(np.float32)
    scores[..., 0] += 1.0
    queues = queue(jnp.asarray(scores), choices=choices)
    unlimited, weighted, _ = loop(scores, choices, 12)
    taken = [seats(queues, places=5, first=first) for first in (0, 5, 10)]
    assert 5 < int(gating.longest(queues)) <= 10
    assert not np.any(taken[2].dispatch)
    # Whoever has place 5 to 9 in its queue has 0 to 4 in the second pass.
    parts = [unlimited[..., :5], unlimited[..., 5:10]]
    for found, expected in zip(taken[:2], parts, strict=True):
        np.testing.assert_array_equal(found.dispatch, expected)
    weights = sum(np.asarray(part.combine).sum(-1) for part in taken)
    np.testing.assert_allclose(weights, weighted.sum(-1), rtol=1e-5, atol=1e-7)


def test_the_load_is_that_of_the_whole_batch() -> None:
    scores = np.random.default_rng(2).normal(size=(4, 12, 5)).astype(np.float32)
    asked = np.zeros((4, 5))
    for group, row in enumerate(np.argsort(-scores, axis=-1)[..., :2]):
        asked[group] = np.bincount(row.ravel(), minlength=5)
    queues = queue(jnp.asarray(scores), choices=2)
    total = asked.sum(0)
    np.testing.assert_allclose(queues.max_load, total.max() / total.mean(), rtol=1e-6)
    assert int(gating.longest(queues)) == asked.max()
    alone = [asked[i].max() / asked[i].mean() for i in range(4)]
    assert np.mean(alone) > 1.01 * total.max() / total.mean()


def test_balance_is_taken_over_the_whole_batch() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 12, 5)).astype(np.float32)
    chances = softmax(scores)
    first = np.eye(5)[chances.argmax(-1)]
    expected = 5 * (first.mean((0, 1)) * chances.mean((0, 1))).sum()
    found = queue(jnp.asarray(scores), choices=2).balance
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    groups = [
        float(queue(jnp.asarray(scores[i : i + 1]), choices=2).balance)
        for i in range(4)
    ]
    assert abs(np.mean(groups) - expected) > 1e-3


def test_even_use_is_balanced() -> None:
    scores = 10.0 * np.tile(np.eye(4, dtype=np.float32), (1, 3, 1))
    queues = queue(jnp.asarray(scores), choices=1)
    np.testing.assert_allclose(queues.balance, 1.0, rtol=1e-5)
    np.testing.assert_allclose(queues.max_load, 1.0, rtol=1e-6)
    assert float(gating.dropped(queues, places=3)) == 0.0


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


@pytest.mark.parametrize("routing", ["capacity", "dropless"])
@pytest.mark.parametrize("gating", ["top_2", "switch"])
def test_the_layer_is_that_of_a_loop(gating: Any, routing: Any) -> None:
    config = replace(
        moe.SIZES["test"],
        embed=16,
        mlp=24,
        experts=4,
        gating=gating,
        routing=routing,
        capacity_factor=1.0,
    )
    layer = moe.SparseFeedForward(config, rngs=nnx.Rngs(0))
    run = nnx.jit(moe.SparseFeedForward.__call__)
    x = np.random.default_rng(1).normal(size=(2, 12, 16)).astype(np.float32)
    y, load = run(layer, jnp.asarray(x))
    scores = x @ np.asarray(layer.router[...])
    choices = {"top_2": 2, "switch": 1}[gating]
    places = 3 * choices
    longest = int(loop(scores, choices, 12)[0].sum((1, 3)).max())
    assert longest > places
    dropless = routing == "dropless"
    assert float(load.passes) == (-(-longest // places) if dropless else 1)
    assert (float(load.dropped) == 0) == dropless
    _, combine, _ = loop(scores, choices, 12 if dropless else places)
    weights = combine.sum(-1)
    up, down = np.asarray(layer.experts.up[...]), np.asarray(layer.experts.down[...])
    expected = np.zeros_like(x)
    for group, token, expert in np.ndindex(*weights.shape):
        answer = np.maximum(x[group, token] @ up[expert], 0) @ down[expert]
        expected[group, token] += weights[group, token, expert] * answer
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


SMALL: Final = {"embed": 16, "heads": 2, "mlp": 24, "experts": 4}
LOADS: Final = ("balance", "dropped", "max_load", "passes")


@pytest.mark.full
@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.full), 2.0])
def test_the_scanned_layers_report_what_the_unrolled_ones_do(factor: float) -> None:
    """Also where one pass has room for all, so that there is none to loop over."""
    found = []
    for scanned in (False, True):
        options = {"scan_layers": scanned, "capacity_factor": factor, **SMALL}
        job = moe.job("test", routing="dropless", **options)
        model = nnx.jit(job.make_model)(jax.random.key(0))
        if scanned:
            nnx.update(model, _stacked(found[0][0]))
        result = nnx.jit(moe.loss_fn)(model, job.batch_at(0, 4))
        found.append((model, result))
    (loss, metrics), (same_loss, same_metrics) = (result for _, result in found)
    np.testing.assert_allclose(same_loss, loss, rtol=1e-5)
    assert (float(metrics["passes"]) > 1) == (factor == 1.0)
    for name, value in metrics.items():
        np.testing.assert_allclose(same_metrics[name], value, rtol=1e-5)


def _stacked(model: moe.MoE) -> Any:
    """The state of a model with its blocks' parameters stacked."""
    state = nnx.to_pure_dict(nnx.state(model))
    blocks = [block for _, block in sorted(state["blocks"].items())]
    state["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return state


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
    balances = [float(load.balance) for load in loads]
    expected = {name: [getattr(load, name) for load in loads] for name in LOADS}
    expected["aux"] = expected.pop("balance")
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(metrics[name], np.mean(values), rtol=1e-6)
    np.testing.assert_allclose(loss, nats.mean() + 0.01 * np.mean(balances), rtol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gating", ["top_2", "switch"])
def test_the_router_learns_from_both_terms(gating: Any) -> None:
    config = replace(moe.SIZES["test"], gating=gating)
    graph, state = nnx.split(moe.SparseFeedForward(config, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (4, 12, config.embed))

    @jax.jit
    def router_gradients(state: Any) -> Any:
        def terms(state: Any) -> Any:
            y, load = nnx.merge(graph, state, copy=True)(x)
            return jnp.mean(jnp.square(y)), load.balance

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
