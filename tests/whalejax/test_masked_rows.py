"""Rows all of whose scores are masked: in blocks they give what one device gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.whalejax.attentions import context_mesh, in_blocks
from whalejax.capture.patterns.attention_pattern import attention_of
from whalejax.capture.patterns.named_calls import is_attention, with_calls
from whalejax.planner.cost import blocked_attention


BATCH, LENGTH, DEPTH = 2, 16, 3
Array = Any
Function = Callable[[Array, Array, Array, Array], Array]


def _causal() -> Array:
    place = jnp.arange(LENGTH)
    return (place[:, None] >= place[None])[None, None]


def _by_hand(masked: Callable[[Array, Array], Array]) -> Function:
    """Attention whose scores are masked by the padding ``[batch, 1, 1, columns]``."""

    def function(q: Array, k: Array, v: Array, pad: Array) -> Array:
        scores = masked(jnp.einsum("bqhd,bkhd->bhqk", q, k), pad[:, None, None])
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return function


def _one_mask(number: Callable[[Any], float]) -> Function:
    return _by_hand(lambda s, pad: jnp.where(_causal() & pad, s, number(s.dtype)))


def _jax_nn(q: Array, k: Array, v: Array, pad: Array) -> Array:
    return jax.nn.dot_product_attention(
        q, k, v, mask=pad[:, None, None], is_causal=True
    )


def _linen(q: Array, k: Array, v: Array, pad: Array) -> Array:
    rows = jnp.ones((BATCH, LENGTH))
    mask = nn.combine_masks(
        nn.make_causal_mask(rows), nn.make_attention_mask(rows, pad)
    )
    return nn.dot_product_attention(q, k, v, mask=mask)


def _nnx(q: Array, k: Array, v: Array, pad: Array) -> Array:
    return nnx.dot_product_attention(q, k, v, mask=_causal() & pad[:, None, None])


def _strict(q: Array, k: Array, v: Array, pad: Array) -> Array:
    """The first row sees nothing, whatever the padding."""
    del pad
    place = jnp.arange(LENGTH)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where((place[:, None] > place[None])[None, None], scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


FORMS: dict[str, tuple[Function, int]] = {
    "jax.nn": (_jax_nn, 2),
    "grouped heads": (_jax_nn, 1),
    "lower beside": (
        _by_hand(
            lambda s, p: jnp.where(_causal(), jnp.where(p, s, -1e30), -1e31),
        ),
        2,
    ),
    "higher beside": (
        _by_hand(
            lambda s, p: jnp.where(_causal(), jnp.where(p, s, -1e31), -1e30),
        ),
        2,
    ),
    "added": (
        _by_hand(
            lambda s, p: jnp.where(_causal(), s, -1e30) + jnp.where(p, 0.0, -1e30),
        ),
        2,
    ),
    "infinite": (_one_mask(lambda _: -jnp.inf), 2),
    "strict": (_strict, 2),
    "linen": (_linen, 2),
    "nnx": (_nnx, 2),
    "-1e9": (_one_mask(lambda _: -1e9), 2),
    "-1e30": (_one_mask(lambda _: -1e30), 2),
    "finfo.min": (_one_mask(lambda dtype: float(jnp.finfo(dtype).min)), 2),
    "0.7 finfo.min": (_one_mask(lambda dtype: 0.7 * float(jnp.finfo(dtype).min)), 2),
}
CASES = [
    pytest.param(
        name,
        size,
        marks=()
        if name in list(FORMS)[:7] and (size == 4 or name == "jax.nn")
        else pytest.mark.full,
    )
    for name in FORMS
    for size in (1, 4)
]


def _arguments(shared: int, dtype: Any = np.float64) -> list[Array]:
    """Queries, keys, values, and padding on the left of one sequence of two."""
    draw = np.random.default_rng(0).normal
    shapes = [(BATCH, LENGTH, heads, DEPTH) for heads in (2, shared, shared)]
    pad = np.arange(LENGTH) >= np.array([[0], [5]])
    return [*(jnp.asarray(draw(size=s), dtype) for s in shapes), jnp.asarray(pad)]


def _gradients(function: Callable[..., Any]) -> Any:
    def loss(*values: Array) -> Array:
        found = function(*values)
        weights = jnp.cos(jnp.arange(found.size, dtype=found.dtype))
        return (found * weights.reshape(found.shape)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK", 4)
    monkeypatch.setattr(blocked_attention, "_LONGEST", 0)


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_row_without_a_visible_key_is_as_on_one_device(name: str, size: int) -> None:
    function, shared = FORMS[name]
    with jax.enable_x64(True):
        arguments = _arguments(shared)
        program, reasons = with_calls(
            jax.make_jaxpr(function)(*arguments), [True] * 3 + [False]
        )
        assert not reasons and any(map(is_attention, program.jaxpr.eqns))
        loss, expected = _gradients(function)(*arguments)
        blocks = _gradients(in_blocks(program, context_mesh(size)))
        other, found = blocks(*arguments)
        # jax.nn computes its softmax in float32 whatever it is given.
        near = 1e-6 if function in (_jax_nn, _nnx) else 1e-12
        np.testing.assert_allclose(other, loss, rtol=near)
        for one, gradient in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, gradient, rtol=0, atol=10 * near)


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("name", "share", "filled"),
    [
        ("jax.nn", 36 / 64, 0.7 * float(np.finfo(np.float32).min)),
        ("lower beside", 36 / 64, -1e31),
        ("infinite", 36 / 64, -math.inf),
        ("added", 1.0, None),
    ],
)
def test_blocks_are_left_out_where_what_they_give_is_known(
    name: str, share: float, filled: float | None
) -> None:
    function, shared = FORMS[name]
    arguments = _arguments(shared, np.float32)
    program, _ = with_calls(jax.make_jaxpr(function)(*arguments), [True] * 3 + [False])
    (call,) = filter(is_attention, program.jaxpr.eqns)
    one = attention_of(call.params["jaxpr"])
    where = 8, 8, one.rows[0][1], one.column[2]
    assert 1.0 - float(one.scores.masked_blocks(*where).mean()) == share
    assert one.scores.filled(*where) == (
        filled if filled is None else pytest.approx(filled, rel=1e-6)
    )


@pytest.mark.relaxed_promotion
def test_where_each_row_sees_itself_nothing_is_added() -> None:
    """A cap, and no mask but a causal one."""

    def capped(q: Array, k: Array, v: Array, pad: Array) -> Array:
        del pad
        scores = 5.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5.0)
        scores = jnp.where(_causal(), scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    arguments = _arguments(2, np.float32)
    program, _ = with_calls(jax.make_jaxpr(capped)(*arguments), [True] * 3 + [False])
    (call,) = filter(is_attention, program.jaxpr.eqns)
    one = attention_of(call.params["jaxpr"])
    where = 8, 8, one.rows[0][1], one.column[2]
    assert one.scores.masked_blocks(*where).any() and one.scores.filled(*where) is None


@pytest.mark.full
def test_a_plan_with_padding_on_the_left_gives_the_loss_of_one_device() -> None:
    width, heads, length = 8, 2, 8
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: 0.3 * jax.random.normal(key, (width, width))
        for name, key in zip("qkv", keys, strict=False)
    }
    batch = {
        "x": jax.random.normal(keys[3], (8, length, width)),
        "pad": jnp.ones((8, length), bool).at[:, :3].set(False),
    }

    def loss(p: Any, b: Any) -> Array:
        q, k, v = ((b["x"] @ p[n]).reshape(-1, length, heads, 4) for n in "qkv")
        found = jax.nn.dot_product_attention(
            q, k, v, mask=b["pad"][:, None, None], is_causal=True
        )
        return jnp.mean(found**2)

    plan = wh.plan(
        loss,
        params,
        batch,
        optimizer=optax.sgd(1.0),
        cluster="cpu:8",
        mesh={"context": 4, "data": 2},
        attention="ring",
    )
    step = wh.compile(plan, loss, params, optimizer=optax.sgd(1.0))
    state, metrics = step(step.init_from(params), batch)
    np.testing.assert_allclose(metrics["loss"], loss(params, batch), rtol=1e-5)
    for name, gradient in jax.grad(loss)(params, batch).items():
        change = params[name] - state.params[name]
        np.testing.assert_allclose(change, gradient, atol=1e-6)
