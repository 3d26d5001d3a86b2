"""Dimensions that a program merges by a reshape stay apart, so that each shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax import hlo
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.sharding.fused_parameters import merging_reshapes


BATCH, SEQ, EMBED, HEADS, WIDTH = 16, 8, 16, 8, 4

Array = jax.Array
Loss = Callable[[Any, Array], Array]
SHAPES: Final = {
    "in": (EMBED, EMBED),
    "query": (EMBED, HEADS * WIDTH),
    "key": (EMBED, HEADS * WIDTH),
    "value": (EMBED, HEADS * WIDTH),
    "out": (HEADS * WIDTH, EMBED),
    "up": (EMBED, 64),
    "down": (64, EMBED),
    "bias": (64,),
}


def parameters(*names: str) -> dict[str, Array]:
    keys = jax.random.split(jax.random.key(0), len(names))
    return {
        name: jax.random.normal(key, SHAPES[name]) / 4
        for name, key in zip(names, keys, strict=True)
    }


def time_major(p: Any, x: Array) -> Array:
    """Rows of all times in one dimension, of which the batch is the minor part."""
    h = x.transpose(1, 0, 2) @ p["in"]
    rows = h.reshape(SEQ * BATCH, EMBED)
    rows = jax.nn.relu(rows @ p["up"] + p["bias"][None]) @ p["down"]
    return jnp.mean((rows.reshape(SEQ, BATCH, EMBED) + h) ** 2)


def in_one_batch(p: Any, x: Array) -> Array:
    """Attention by products over batch and heads in one dimension."""

    def heads(name: str) -> Array:
        y = (x @ p[name]).reshape(BATCH, SEQ, HEADS, WIDTH)
        return y.transpose(0, 2, 1, 3).reshape(BATCH * HEADS, SEQ, WIDTH)

    scores = heads("query") @ heads("key").swapaxes(1, 2)
    hidden = jnp.triu(jnp.ones((SEQ, SEQ), bool), 1)
    weights = jax.nn.softmax(jnp.where(hidden[None], -1e9, scores))
    y = (weights @ heads("value")).reshape(BATCH, HEADS, SEQ, WIDTH)
    y = y.transpose(0, 2, 1, 3).reshape(BATCH, SEQ, HEADS * WIDTH)
    return jnp.mean((y @ p["out"] + x) ** 2)


def tokens_in_one(p: Any, x: Array) -> Array:
    """Attention over a sequence, and then tokens in one dimension."""
    weights = jax.nn.softmax(jnp.einsum("bse,bte->bst", x @ p["in"], x))
    y = jnp.einsum("bst,bte->bse", weights, x)
    rows = y.reshape(BATCH * SEQ, EMBED)
    rows = jax.nn.gelu(rows @ p["up"]) @ p["down"]
    return jnp.mean((rows.reshape(x.shape) + x) ** 2)


def everything(p: Any, x: Array) -> Array:
    """Whatever carries parts along, and some that cannot."""
    rows = x.transpose(1, 0, 2).reshape(SEQ * BATCH, EMBED)

    def layer(carry: Array, scale: Array) -> tuple[Array, Array]:
        carry = jax.checkpoint(lambda c: jax.nn.relu(c @ p["in"]) * scale)(carry)
        return carry, carry[:, :2]

    rows, firsts = jax.lax.scan(layer, rows, jnp.arange(1.0, 4.0))
    both = jnp.concatenate([rows, jnp.cumsum(rows, 1)], axis=1)
    ranked = jnp.sort(both, axis=1)[:, ::-1] + jnp.argmax(both, 1)[:, None].astype(
        both.dtype
    )
    most = jnp.max(ranked, axis=1, keepdims=True)
    one, two = jnp.split(ranked / (1 + most), 2, axis=1)
    picked = jax.lax.top_k(one, 3)[0].sum(1) + jnp.take(two, jnp.array([1, 3]), 1)[:, 0]
    square = rows.T @ one
    tail = rows[BATCH:].sum() + firsts.sum() + rows[3:5].sum()
    return jnp.mean(picked**2) + jnp.mean(square) + tail + jnp.mean(one * two)


CASES: Final[list[tuple[Loss, tuple[str, ...], list[dict[str, int]]]]] = [
    (time_major, ("in", "up", "down", "bias"), [{"data": 8}]),
    (
        in_one_batch,
        ("query", "key", "value", "out"),
        [{"tensor": 8}, {"data": 2, "tensor": 4}],
    ),
    (tokens_in_one, ("in", "up", "down"), [{"context": 8}]),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "names"),
    [*((loss, names) for loss, names, _ in CASES), (everything, ("in",))],
)
def test_the_program_computes_the_same(loss: Loss, names: tuple[str, ...]) -> None:
    params = parameters(*names)
    x = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED))
    captured = capture(adapt(params, loss), x)
    leaves, tree = jax.tree.flatten(params)
    traced = jax.make_jaxpr(lambda *a: loss(tree.unflatten(a[:-1]), a[-1]))(*leaves, x)
    assert str(captured.jaxpr) != str(traced)
    run = jax.extend.core.jaxpr_as_fun(captured.jaxpr)
    found = jax.jit(jax.grad(lambda p: run(*jax.tree.leaves(p), x)[0]))(params)
    for got, want in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(jax.jit(jax.grad(loss))(params, x)),
        strict=True,
    ):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "names", "mesh"),
    [(loss, names, mesh) for loss, names, meshes in CASES for mesh in meshes],
)
def test_the_minor_part_is_sharded(
    loss: Loss, names: tuple[str, ...], mesh: dict[str, int]
) -> None:
    """Nothing is gathered for it, and all is as predicted."""
    params = parameters(*names)
    x = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED))
    assert merging_reshapes(capture(adapt(params, loss), x).graph)[1] == 0
    optimizer = optax.sgd(1.0)
    plan = wh.plan(
        loss,
        params,
        x,
        optimizer=optimizer,
        mesh=mesh,
        cluster=wh.Cluster.detect(calibrate=False),
        attention="gather",
    )
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    found = hlo.collectives(step.lower().compile().as_text())
    predicted = sum(c.payload_bytes * c.times(1) for c in plan.collectives)
    assert predicted == sum(found.nbytes.values())


def test_what_still_computes_a_minor_part_whole_is_named() -> None:
    """Images of a time-major batch in one dimension: no convolution takes two."""

    def loss(p: Any, x: Array) -> Array:
        frames = x.transpose(1, 0, 2, 3, 4).reshape(4 * BATCH, 6, 6, 3)
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            frames, p["kernel"], (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.mean(y**2)

    params = {"kernel": jnp.ones((3, 3, 3, 8))}
    x = jnp.ones((BATCH, 4, 6, 6, 3))
    plan = wh.plan(loss, params, x, mesh={"data": 8}, cluster="h100:8")
    (note,) = (n for n in plan.notes if "minor part" in n)
    assert note.startswith("batch is the minor part of a dimension for ")
    assert "operations (the first: conv_general_dilated" in note
    assert not any("minor part" in n for n in _plan_of(time_major).notes)


def _plan_of(loss: Loss) -> wh.Plan:
    params = parameters("in", "up", "down", "bias")
    x = jnp.ones((BATCH, SEQ, EMBED))
    return wh.plan(loss, params, x, mesh={"data": 8}, cluster="h100:8")
