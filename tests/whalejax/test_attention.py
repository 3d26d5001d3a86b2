"""Attention is found in any form, and computed in blocks round a ring, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import whalejax as wh
from tests.whalejax.attentions import context_mesh, in_blocks
from whalejax import _compat, hlo
from whalejax.capture.patterns.attention_pattern import AttentionPattern, attention_of
from whalejax.capture.patterns.named_calls import is_attention, with_calls
from whalejax.models.common.layers import causal_attention


BATCH, LENGTH, HEADS, DEPTH = 2, 32, 4, 8
Array = Any
Function = Callable[..., Any]


def _grouped(q: Array, k: Array, v: Array) -> Array:
    return wh.attention(q, k, v, is_causal=True)


def _plain(q: Array, k: Array, v: Array) -> Array:
    return wh.attention(q, k, v)


def _padded(q: Array, k: Array, v: Array, m: Array) -> Array:
    return wh.attention(q, k, v, mask=(m > 0)[:, None, None, :])


def _padded_causal(q: Array, k: Array, v: Array, m: Array) -> Array:
    return wh.attention(q, k, v, mask=(m > 0)[:, None, None, :], is_causal=True)


def _window(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(5, 0)
    )


def _biased(q: Array, k: Array, v: Array) -> Array:
    slopes = 0.5 ** jnp.arange(1.0, HEADS + 1)[:, None, None]
    place = jnp.arange(LENGTH)
    away = abs(place[:, None] - place[None])
    return wh.attention(q, k, v, bias=-(slopes * away.astype(jnp.float32))[None])


def _linen(q: Array, k: Array, v: Array) -> Array:
    mask = nn.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    return nn.dot_product_attention(q, k, v, mask=mask)


def _linen_padded(q: Array, k: Array, v: Array, m: Array) -> Array:
    mask = nn.make_attention_mask(jnp.ones_like(m), m > 0)
    return nn.dot_product_attention(q, k, v, mask=mask)


def _nnx(q: Array, k: Array, v: Array) -> Array:
    return nnx.dot_product_attention(q, k, v)


def _capped(q: Array, k: Array, v: Array) -> Array:
    scores = 5.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5.0)
    place = jnp.arange(LENGTH)
    scores = jnp.where((place[:, None] >= place[None])[None, None], scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _keys_as_values(q: Array, k: Array, v: Array) -> Array:
    both = k + v
    return wh.attention(q, both, both)


def _segments(q: Array, k: Array, v: Array, m: Array) -> Array:
    same = m[:, None, :, None] == m[:, None, None, :]
    return wh.attention(q, k, v, mask=same)


@dataclass(frozen=True)
class Form:
    """A way to write attention.

    Attributes:
        function: of query, key, value and perhaps a mask ``[batch, sequence]``.
        shared: heads of keys and values.
        masked: it takes that mask.
        seen: part of the scores that no fixed mask hides, in 8 parts.
    """

    function: Function
    shared: int = HEADS
    masked: bool = False
    causal: bool = False


FORMS = {
    "grouped causal": Form(_grouped, shared=2, causal=True),
    "plain": Form(_plain),
    "padded": Form(_padded, shared=2, masked=True),
    "padded causal": Form(_padded_causal, masked=True, causal=True),
    "window": Form(_window, shared=1, causal=True),
    "fixed bias": Form(_biased),
    "linen": Form(_linen, causal=True),
    "linen padded": Form(_linen_padded, masked=True),
    "nnx": Form(_nnx),
    "own": Form(causal_attention, causal=True),
    "capped": Form(_capped, causal=True),
    "segments": Form(_segments, masked=True),
    "keys as values": Form(_keys_as_values),
}


def _arguments(form: Form, dtype: Any = np.float32) -> list[Any]:
    draw = np.random.default_rng(0).normal
    shapes = [(BATCH, LENGTH, n, DEPTH) for n in (HEADS, form.shared, form.shared)]
    found: list[Any] = [jnp.asarray(draw(size=s), dtype) for s in shapes]
    if form.masked:
        # Two segments; the first position is in the first, so that no row is empty.
        ends = np.array([[LENGTH], [LENGTH - 7]])
        found.append(jnp.asarray(np.arange(LENGTH) < ends, np.int32))
    return found


def _called(form: Form, arguments: list[Any]) -> tuple[Any, tuple[str, ...]]:
    program = jax.make_jaxpr(form.function)(*arguments)
    return with_calls(program, [True] * 3 + [False] * form.masked)


def _found(program: Any) -> list[Any]:
    return [e for e in program.jaxpr.eqns if is_attention(e)]


def _gradients(function: Function) -> Any:
    """Of a weighted sum of the output, with the output itself."""
    weights = jnp.cos(jnp.arange(BATCH * LENGTH * HEADS * DEPTH, dtype=jnp.float32))

    def loss(*values: Any) -> Any:
        found = function(*values).astype(jnp.float32)
        return (found * weights.reshape(found.shape)).sum(), found

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def _counts(compiled: Any) -> Any:
    """Collectives of a compiled program, by kind."""
    return hlo.collectives(compiled.as_text()).counts


def _error(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(jnp.linalg.norm((a - b).astype(jnp.float32)))
        / float(jnp.linalg.norm(a.astype(jnp.float32)))
        for a, b in pairs
    )


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_found_and_computed_in_blocks(name: str) -> None:
    form = FORMS[name]
    arguments = _arguments(form)
    program, reasons = _called(form, arguments)
    assert len(_found(program)) == 1 and not reasons
    expected = _gradients(form.function)(*arguments)
    for size in (1, 4):
        blocks = _gradients(in_blocks(program, context_mesh(size)))
        compiled = blocks.lower(*arguments).compile()
        assert _error(expected, compiled(*arguments)) < 2e-6
        counts = _counts(compiled)
        assert not counts.get("all-gather") and not counts.get("all-to-all")
        # Keys and values go round twice, and their cotangents once more, home; with a
        # causal mask all is dealt out, in two halves each, and brought back.
        ring = 2 * (size - 1) + 2 * (size - 1) + 2 * size
        dealt = 2 * 4 + 2 * 5
        wanted = (ring + dealt * form.causal) * (size > 1)
        assert counts.get("collective-permute", 0) == wanted


@pytest.mark.sampled(1)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", ["own", "plain"])
def test_sixteen_bits_are_as_near_as_one_device_is(name: str) -> None:
    form = FORMS[name]
    exact = _gradients(form.function)(*_arguments(form))
    half = _arguments(form, jnp.bfloat16)
    program, _ = _called(form, half)
    plain = _gradients(form.function)(*half)
    blocks = _gradients(in_blocks(program, context_mesh(4)))(*half)
    assert _error(exact, blocks) <= 1.5 * _error(exact, plain)


def test_a_length_that_cannot_be_halved_keeps_its_order() -> None:
    form = Form(causal_attention)
    arguments = [x[:, :12] for x in _arguments(form)]
    program, _ = _called(form, arguments)
    expected = jax.jit(form.function)(*arguments)
    assert (
        _error(expected, jax.jit(in_blocks(program, context_mesh(4)))(*arguments))
        < 1e-6
    )


def _dropped(q: Array, k: Array, v: Array) -> Array:
    return nn.dot_product_attention(
        q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.1, deterministic=False
    )


def _shown(q: Array, k: Array, v: Array) -> Array:
    weights = nn.dot_product_attention_weights(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v) * weights.max()


def _trained_bias(q: Array, k: Array, v: Array, b: Array) -> Array:
    return wh.attention(q, k, v, bias=b)


def _attend(weights: Function, mask: Any = None) -> Function:
    """Attention with a softmax of its own, of scores and their maximum, and a mask."""

    def function(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if mask is not None:
            scores = jnp.where(mask()[None, None], scores, -1e30)
        level = scores.max(-1, keepdims=True)
        return jnp.einsum("bhqk,bkhd->bqhd", weights(scores, level), v)

    return function


def _of_exp(total: Function) -> Function:
    def weights(s: Array, m: Array) -> Array:
        raised = jnp.exp(s - m)
        return raised / total(raised)

    return weights


def _floored(s: Array, m: Array) -> Array:
    raised = jnp.maximum(jnp.exp(s - m), 0.3)
    return raised / raised.sum(-1, keepdims=True)


def _turned(s: Array, m: Array) -> Array:
    raised = jnp.exp(s - m).swapaxes(-1, -2)
    return raised / raised.sum(-1, keepdims=True)


def _compared(positions: Function, how: Function) -> Function:
    def mask() -> Array:
        found = positions()
        return how(found[:, None], found[None])

    return mask


def _softmax(s: Array, m: Array) -> Array:
    del m
    return jax.nn.softmax(s)


LOOK_ALIKE = {
    "floored": _attend(_floored),
    "clipped": _attend(
        lambda s, m: (e := jnp.exp(jnp.maximum(s - m, -1.0))) / e.sum(-1, keepdims=True)
    ),
    "turned": _attend(_turned),
    "other rows": _attend(_of_exp(lambda e: e.sum(-1)[:, :, None, :])),
    "stopped": _attend(
        _of_exp(lambda e: jax.lax.stop_gradient(e.sum(-1, keepdims=True)))
    ),
    "truncated": _attend(
        _softmax,
        _compared(
            lambda: (jnp.arange(LENGTH) * (1 / 64.0)).astype(jnp.int32),
            lambda a, b: a == b,
        ),
    ),
    "unsigned": _attend(
        _softmax,
        _compared(
            lambda: jnp.arange(LENGTH, dtype=jnp.uint32),
            lambda a, b: (a - b >= jnp.uint32(20)) | (a == b),
        ),
    ),
    "wrapping": _attend(
        _softmax,
        _compared(
            lambda: jnp.arange(LENGTH, dtype=jnp.int32) * 150_000_000,
            lambda a, b: (a + 0 * b < 0) | (a == b),
        ),
    ),
    "narrow": _attend(
        _softmax,
        _compared(
            lambda: jnp.arange(LENGTH, dtype=jnp.bfloat16) * 100,
            lambda a, b: a >= b,
        ),
    ),
    "cast to a mask": _attend(
        _softmax,
        _compared(
            lambda: jnp.arange(LENGTH) - 40,
            lambda a, b: (a + 0 * b).astype(bool) & (a >= b),
        ),
    ),
}


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", LOOK_ALIKE)
def test_what_only_looks_like_attention_keeps_its_numbers(name: str) -> None:
    form = Form(LOOK_ALIKE[name])
    arguments = _arguments(form)
    program, _ = _called(form, arguments)
    expected = _gradients(form.function)(*arguments)
    found = _gradients(in_blocks(program, context_mesh(4)))(*arguments)
    assert _error(expected, found) < 5e-6


@pytest.mark.relaxed_promotion
def test_rows_that_see_nothing_share_their_gradient_out() -> None:
    """Padding in front, without a causal mask: such rows look at all keys alike."""
    form = Form(_padded, masked=True)
    *arrays, _ = _arguments(form)
    nothing = jnp.zeros((BATCH, LENGTH), jnp.int32)
    program, _ = _called(form, [*arrays, nothing])
    expected = _gradients(form.function)(*arrays, nothing)
    found = _gradients(in_blocks(program, context_mesh(4)))(*arrays, nothing)
    value, other = expected[0][2], found[0][2]
    assert float(jnp.abs(value - other).max()) < 1e-5 * float(jnp.abs(value).max())


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 1), (1, 1, 1), (1, 4, 2)])
def test_single_samples_and_heads_are_found(shape: tuple[int, int, int]) -> None:
    batch, heads, shared = shape
    q = jnp.ones((batch, LENGTH, heads, DEPTH))
    k = jnp.ones((batch, LENGTH, shared, DEPTH))
    program = jax.make_jaxpr(_grouped)(q, k, k)
    called, reasons = with_calls(program, [True] * 3)
    assert len(_found(called)) == 1, reasons


def test_padding_leaves_a_causal_mask_causal() -> None:
    arguments = _arguments(FORMS["padded causal"])
    program, _ = _called(FORMS["padded causal"], arguments)
    one = attention_of(_found(program)[0].params["jaxpr"])
    hidden = one.scores.masked_blocks(8, 8, one.rows[0][1], one.column[2])
    assert hidden[np.triu_indices(8, 1)].all()


def test_what_a_loop_comes_to_train_is_trained() -> None:
    def function(q: Array, k: Array, v: Array) -> Array:
        def turn(carry: Array, _: None) -> tuple[Array, Array]:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + carry[:, None, None]
            found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            return carry + k.sum((2, 3)), found

        start = jnp.zeros((BATCH, LENGTH))
        return jax.lax.scan(turn, start, None, length=2)[1]

    arguments = _arguments(Form(function))
    called, reasons = _called(Form(function), arguments)
    (loop,) = (e for e in called.jaxpr.eqns if e.primitive.name == "scan")
    inner = _compat.open_jaxpr(_compat.inner_jaxprs(loop)[0])[0]
    assert not any(map(is_attention, inner.eqns))
    assert reasons and "a trained value" in reasons[0]


def test_queries_without_a_sequence_are_left() -> None:
    def pooled(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bhd,bkhd->bhk", q[:, 0], k)
        return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(scores), v)

    called, reasons = _called(Form(pooled), _arguments(Form(pooled)))
    assert not _found(called)
    assert reasons and "its queries have no dimension of their own" in reasons[0]


def test_attention_to_one_key_is_left() -> None:
    arguments = _arguments(Form(_plain))
    arguments[1:] = [x[:, :1] for x in arguments[1:]]
    called, reasons = _called(Form(_plain), arguments)
    assert not _found(called) and "it has a single key" in reasons[0]


def test_rows_that_are_whole_read_keys_that_are_whole() -> None:
    """Where only keys are sharded, they are put together, and nothing goes round."""
    form = FORMS["own"]
    arguments = _arguments(form)
    program, _ = _called(form, arguments)
    expected = jax.jit(form.function)(*arguments)
    blocks = jax.jit(in_blocks(program, context_mesh(4), rows=False))
    compiled = blocks.lower(*arguments).compile()
    assert _error(expected, compiled(*arguments)) < 1e-6
    assert not _counts(compiled).get("collective-permute")


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_dropped, "its weights are changed after the softmax"),
        (_shown, "its scores or weights are used elsewhere too"),
        (_trained_bias, "its scores are shifted or scaled by a trained value"),
    ],
)
def test_what_cannot_be_cut_up_stays_and_says_why(function: Function, why: str) -> None:
    arguments = _arguments(Form(function))
    if function is _trained_bias:
        arguments.append(jnp.ones((1, HEADS, LENGTH, LENGTH)))
    program = jax.make_jaxpr(function)(*arguments)
    called, reasons = with_calls(program, [True] * len(arguments))
    assert not _found(called)
    assert len(reasons) == 1 and why in reasons[0]


def test_a_softmax_over_other_things_is_no_attention() -> None:
    def gate(x: Array, w: Array, v: Array) -> Array:
        return jax.nn.softmax(jnp.tanh(x) + 1.0) @ w @ v

    values = [jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones((8, 2))]
    called, _ = with_calls(jax.make_jaxpr(gate)(*values), [True] * 3)
    assert not _found(called)


def _one(function: Function) -> AttentionPattern:
    arguments = _arguments(Form(function))
    program, _ = with_calls(jax.make_jaxpr(function)(*arguments), [True] * 3)
    return attention_of(_found(program)[0].params["jaxpr"])


@pytest.mark.relaxed_promotion
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 6),
    st.integers(-6, 6),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.sampled_from(["and", "or", "not", "where"]),
)
def test_blocks_said_to_be_hidden_hold_no_score(
    width: int, shift: int, parts: int, how: str
) -> None:
    def mask(rows: Any, columns: Any) -> Any:
        near, past = abs(rows - columns) <= width, rows + shift >= columns
        return {
            "and": lambda: near & past,
            "or": lambda: near | past,
            "not": lambda: ~(near & past),
            "where": lambda: jnp.where(past, near, rows > 2 * columns),
        }[how]()

    def function(q: Array, k: Array, v: Array) -> Array:
        place = jnp.arange(LENGTH)
        seen = mask(place[:, None], place[None])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(seen[None, None], scores, jnp.finfo(scores.dtype).min)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    one = _one(function)
    hidden = one.scores.masked_blocks(parts, parts, one.rows[0][1], one.column[2])
    place = np.arange(LENGTH)
    seen = np.asarray(mask(place[:, None], place[None]))
    step = LENGTH // parts
    visible = seen.reshape(parts, step, parts, step).any(axis=(1, 3))
    assert not (hidden & visible).any()
    if how == "and" and shift >= 0 and step > width:
        assert hidden[np.tril_indices(parts, -2)].all(), "a band hides what is far"


@pytest.mark.relaxed_promotion
def test_only_causal_masks_are_found_causal() -> None:
    def share(function: Function) -> float:
        one = _one(function)
        hidden = one.scores.masked_blocks(8, 8, one.rows[0][1], one.column[2])
        return 1.0 - float(hidden.mean())

    assert math.isclose(share(causal_attention), 36 / 64)
    assert share(_plain) == share(_biased) == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"key": jnp.ones((2, 8, 3, 16))},
            "query has 4 heads and key 3, which does not divide 4",
        ),
        (
            {"value": jnp.ones((2, 9, 4, 16))},
            "value has shape (2, 9, 4, 16); expected that of key, (2, 8, 4, 16)",
        ),
        (
            {"mask": jnp.ones((2, 8), bool)},
            "mask has shape (2, 8); expected one that broadcasts to [batch, heads, "
            "rows, columns] = (2, 4, 8, 8)",
        ),
        (
            {"mask": jnp.ones((2, 1, 8, 8))},
            "mask is float32; expected bool, False where a score is hidden",
        ),
        (
            {"query": jnp.ones((2, 8, 64))},
            "query has shape (2, 8, 64); expected four dimensions",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_said(change: dict[str, Any], said: str) -> None:
    whole = dict.fromkeys(("query", "key", "value"), jnp.ones((2, 8, 4, 16)))
    with pytest.raises(wh.WhaleError) as error:
        wh.attention(**{**whole, **change})
    assert said in str(error.value)
