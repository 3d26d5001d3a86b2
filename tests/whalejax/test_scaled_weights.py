"""Attention weights times factors that are the same for all keys, in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.attentions import context_mesh, in_blocks
from whalejax.capture.patterns.named_calls import is_attention, with_calls


BATCH, LENGTH, HEADS, DEPTH = 2, 8, 2, 4
Array = Any
Change = Callable[[Array, Array, Array], Array]


def _heads(factor: Array) -> Array:
    return factor[None, :, None, None]


def _rows(factor: Array) -> Array:
    return factor[None, None, :, None]


def _keys(factor: Array) -> Array:
    return factor[None, None, None, :]


def _attention(change: Change) -> Callable[..., Array]:
    """Attention whose weights are changed by numbers of heads and of places."""

    def function(q: Array, k: Array, v: Array, heads: Array, places: Array) -> Array:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        changed = change(weights, heads, places)
        return jnp.einsum("bhqk,bkhd->bqhd", changed, v)

    return function


def _arguments() -> list[Array]:
    draw = np.random.default_rng(0).normal
    shapes = [(BATCH, LENGTH, HEADS, DEPTH)] * 3 + [(HEADS,), (LENGTH,)]
    return [jnp.asarray(draw(size=s), np.float32) for s in shapes]


def _gradients(function: Callable[..., Array]) -> Any:
    def loss(*values: Array) -> Array:
        return jnp.sin(function(*values)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))


MOVED: dict[str, Change] = {
    "heads, halved": lambda w, h, r: w * _heads(h) * 0.5,
    "over heads": lambda w, h, r: w / (1 + _heads(h) ** 2),
    "rows and heads": lambda w, h, r: 0.5 * (_heads(h) * w) / (_rows(r) ** 2 + 1),
    "rows": lambda w, h, r: w * _rows(r),
}
KEPT: dict[str, Change] = {
    "keys": lambda w, h, r: w * _keys(r),
    "keys, halved": lambda w, h, r: w * _keys(r) * 0.5,
    "over keys": lambda w, h, r: _heads(h) * (w / (1 + _keys(r) ** 2)),
    "a mask": lambda w, h, r: jnp.where(_keys(r) > 0, w, 0.0) * 2.0,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MOVED)
def test_factors_that_keys_share_scale_the_output(name: str) -> None:
    function, arguments = _attention(MOVED[name]), _arguments()
    program = jax.make_jaxpr(function)(*arguments)
    called, reasons = with_calls(program, [True] * 5)
    assert not reasons and sum(map(is_attention, called.jaxpr.eqns)) == 1
    loss, expected = _gradients(function)(*arguments)
    other, found = _gradients(in_blocks(called, context_mesh(4)))(*arguments)
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for one, gradient in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_factors_that_differ_from_key_to_key_are_said(name: str) -> None:
    arguments = _arguments()
    program = jax.make_jaxpr(_attention(KEPT[name]))(*arguments)
    called, (reason,) = with_calls(program, [True] * 5)
    assert not any(map(is_attention, called.jaxpr.eqns))
    assert "its weights are changed after the softmax" in reason
    assert "by different factors for different keys" in reason


def test_ring_attention_that_cannot_be_says_that_its_weights_are_changed() -> None:
    shape = jax.ShapeDtypeStruct((DEPTH, DEPTH), jnp.float32)
    function = _attention(KEPT["keys, halved"])

    def loss(p: dict[str, Array], b: dict[str, Array]) -> Array:
        heads, places = jnp.ones(HEADS), b["places"]
        return jnp.mean(function(*(b["x"] @ p[n] for n in "qkv"), heads, places) ** 2)

    with pytest.raises(wh.PlanError, match="by different factors for different keys"):
        wh.plan(
            loss,
            dict.fromkeys("qkv", shape),
            {
                "x": jax.ShapeDtypeStruct((8, LENGTH, HEADS, DEPTH), jnp.float32),
                "places": jax.ShapeDtypeStruct((LENGTH,), jnp.float32),
            },
            cluster="cpu:8",
            mesh={"context": 4, "data": 2},
            attention="ring",
        )
