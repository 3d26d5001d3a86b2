"""Sequences that one operation needs whole: sharded for all the others.

Shifts, running sums, class tokens and convolutions run on the whole sequence; what is
sharded besides gives the losses and parameters of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh


BATCH, SEQ, EMBED, HEADS, VOCAB = 2, 8, 8, 2, 12

Array = jax.Array
Loss = Callable[[Any, Array], Array]


def parameters() -> dict[str, Any]:
    shapes = {
        "words": (VOCAB, EMBED),
        "places": (SEQ, EMBED),
        "qkv": (3, EMBED, HEADS, EMBED // HEADS),
        "out": (HEADS, EMBED // HEADS, EMBED),
        "begin": (EMBED,),
        "taps": (3, EMBED, EMBED),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / 2
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def attend(params: Any, x: Array, mask: Array | None = None) -> Array:
    """A layer of causal attention, or under a mask."""
    query, key, value = (
        jnp.einsum("bse,ehd->bshd", x, params["qkv"][i]) for i in range(3)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, None]
    seen = seen if mask is None else mask
    low = jnp.full_like(scores, -1e9)
    weights = jax.nn.softmax(
        jnp.where(jnp.broadcast_to(seen, scores.shape), scores, low)
    )
    return x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, value, params["out"])


def embedded(params: Any, tokens: Array) -> Array:
    return params["words"][tokens] + params["places"][None]


def cross_entropy(params: Any, x: Array, labels: Array) -> Array:
    return jnp.mean(per_token(x @ params["words"].T, labels))


def per_token(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def first_cut_off(params: Any, tokens: Array) -> Array:
    logits = attend(params, embedded(params, tokens)) @ params["words"].T
    return jnp.mean(per_token(logits[:, :-1], tokens[:, 1:]))


def shifted_right(params: Any, tokens: Array) -> Array:
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return cross_entropy(params, attend(params, embedded(params, before)), tokens)


def written_one_further(params: Any, tokens: Array) -> Array:
    before = jnp.zeros_like(tokens).at[:, 1:].set(tokens[:, :-1]).at[:, 0].set(1)
    return cross_entropy(params, attend(params, embedded(params, before)), tokens)


def rolled(params: Any, tokens: Array) -> Array:
    x = attend(params, embedded(params, tokens))
    return cross_entropy(params, x, jnp.roll(tokens, -1, axis=1))


def after_a_begin_token(params: Any, tokens: Array) -> Array:
    x = params["words"][tokens[:, :-1]]
    begin = jnp.broadcast_to(params["begin"][None, None], (x.shape[0], 1, EMBED))
    x = jnp.concatenate([begin, x], axis=1) + params["places"][None]
    return cross_entropy(params, attend(params, x), tokens)


def counted_places(params: Any, tokens: Array) -> Array:
    real = tokens > 0
    places = jnp.cumsum(real.astype(tokens.dtype), axis=1) - 1
    x = params["words"][tokens] + params["places"][places]
    return cross_entropy(params, attend(params, x), tokens)


def class_token(params: Any, tokens: Array) -> Array:
    x = params["words"][tokens[:, 1:]]
    begin = jnp.broadcast_to(params["begin"][None, None], (x.shape[0], 1, EMBED))
    x = jnp.concatenate([begin, x], axis=1) + params["places"][None]
    return cross_entropy(params, attend(params, x)[:, 0], tokens[:, 0])


def convolved(params: Any, tokens: Array) -> Array:
    x = embedded(params, tokens)
    near = jax.lax.conv_general_dilated(
        x, params["taps"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return cross_entropy(params, attend(params, x + near), tokens)


def differences(params: Any, tokens: Array) -> Array:
    x = attend(params, embedded(params, tokens))
    rough = jnp.sum(jnp.square(x[:, 1:] - x[:, :-1])) / x.size
    return cross_entropy(params, x, tokens) + rough


LOSSES: Final[tuple[Loss, ...]] = (
    first_cut_off,
    shifted_right,
    written_one_further,
    rolled,
    after_a_begin_token,
    counted_places,
    class_token,
    convolved,
    differences,
)


def planned(loss: Loss, cluster: str = "cpu:2", **options: Any) -> wh.Plan:
    return wh.plan(
        loss,
        jax.eval_shape(parameters),
        jax.ShapeDtypeStruct((BATCH, SEQ), np.int32),
        **{
            "cluster": cluster,
            "optimizer": optax.sgd(0.5),
            "num_micro_batches": 1,
            **options,
        },
    )


CONTEXT: Final[dict[str, Any]] = {"mesh": {"data": 1, "context": 2}}


def assert_equal_after_two_steps(loss: Loss, **options: Any) -> wh.Plan:
    """A plan's two steps against two of one device, in float64."""
    with jax.enable_x64(True):
        plan = planned(loss, **options)
        first = jax.jit(parameters)()
        optimizer = optax.sgd(0.5)
        rng = np.random.default_rng(0)
        batches = rng.integers(0, VOCAB, (2, BATCH, SEQ)).astype(np.int32)
        wanted, rest = first, optimizer.init(first)
        gradient = jax.jit(jax.grad(loss))
        for batch in batches:
            changes, rest = optimizer.update(gradient(wanted, batch), rest)
            wanted = optax.apply_updates(wanted, changes)
        step = wh.compile(
            plan, loss, first, optimizer=optimizer, devices=jax.devices()[:2]
        )
        state = step.init_from(first)
        for batch in batches:
            state, _ = step(state, batch)
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted), strict=True)
        for got, want in pairs:
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    return plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_sequence_is_sharded_around_what_needs_it_whole(loss: Loss) -> None:
    plan = assert_equal_after_two_steps(loss, **CONTEXT)
    assert plan.axis_sizes["context"] == 2
    (note,) = {n for n in plan.notes if "is needed unsharded by" in n}
    assert "and their results sharded" in note


def padding_mask(params: Any, tokens: Array) -> Array:
    """One leaf says what is real for queries and for keys."""
    real = tokens > 0
    mask = real[:, None, :, None] & real[:, None, None, :]
    x = attend(params, embedded(params, tokens), mask)
    each = per_token(x @ params["words"].T, tokens)
    return jnp.sum(jnp.where(real, each, 0)) / tokens.size


def masked_heads(params: Any, tokens: Array) -> Array:
    """The number of each head is trained, and multiplies what the softmax gives."""
    x = embedded(params, tokens)
    query, key, value = (
        jnp.einsum("bse,ehd->bshd", x, params["qkv"][i]) for i in range(3)
    )
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    weights = jnp.einsum("...hqk,h->...hqk", weights, params["begin"][:HEADS])
    x = x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, value, params["out"])
    return cross_entropy(params, x, tokens)


def masked_heads_of_samples(params: Any, tokens: Array) -> Array:
    """The same by a multiplication, and for each sample."""
    x = embedded(params, tokens)
    query, key, value = (
        jnp.einsum("bse,ehd->bshd", x, params["qkv"][i]) for i in range(3)
    )
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
    by_sample = (tokens[:, :HEADS] / VOCAB).astype(weights.dtype)
    weights = weights * by_sample[:, :, None, None]
    x = x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, value, params["out"])
    return cross_entropy(params, x, tokens)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "loss", [padding_mask, masked_heads, masked_heads_of_samples, first_cut_off]
)
def test_attention_goes_round(loss: Loss) -> None:
    plan = assert_equal_after_two_steps(loss, attention="ring", **CONTEXT)
    assert plan.attention == (("*", "ring"),)
    assert any(c.what == "ring" for c in plan.collectives)


def test_what_differs_by_column_cannot_go_round() -> None:
    def columns(params: Any, tokens: Array) -> Array:
        x = embedded(params, tokens)
        query, key, value = (
            jnp.einsum("bse,ehd->bshd", x, params["qkv"][i]) for i in range(3)
        )
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        weights = weights * (tokens > 0).astype(weights.dtype)[:, None, None]
        x = x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, value, params["out"])
        return cross_entropy(params, x, tokens)

    with pytest.raises(wh.PlanError, match="its weights are changed after the softmax"):
        planned(columns, attention="ring", **CONTEXT)
