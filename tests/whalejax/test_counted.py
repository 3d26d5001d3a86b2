"""A loop with a number of turns from outside: values, gradients and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from whalejax.lowering.pipeline_spmd.dynamic_layers import DynamicLoop, run_dynamic_loop


LAYERS, WIDTH = 4, 8


def turn(given: Sequence[Any]) -> list[Any]:
    """A layer that reads constants, its own weights and a key, some of it again."""
    scale, x, w, bias, key = given
    mask = jnp.tril(jnp.ones((WIDTH, WIDTH), scale.dtype)) * scale[None, :]

    def again(h: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.split(key)[0], 0.7, h.shape)
        return jnp.where(kept, jnp.sin(h), 0)

    hidden = jnp.tanh(x @ w + bias[None, :]) @ mask
    return [x + jax.checkpoint(again)(hidden, key), hidden]


def operands() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (WIDTH,), (3, WIDTH), (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH)
    arrays = [
        jax.random.normal(key, shape, jnp.float64) * 0.5
        for key, shape in zip(keys, shapes, strict=False)
    ]
    return (*arrays, jax.random.split(keys[4], LAYERS))


def unrolled(count: int, scale: Any, x: Any, w: Any, bias: Any, keys: Any) -> Any:
    for i in range(count):
        x, _ = turn([scale, x, w[i], bias[i], keys[i]])
    return jnp.sum(x**2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_as_many_turns(masked: bool) -> None:
    turns = DynamicLoop(
        body=turn, num_consts=1, num_carries=1, most=LAYERS, masked=masked
    )

    runs: list[int] = []

    def loss(count: Any, *given: Any) -> Any:
        runs.append(1)
        (x,) = run_dynamic_loop(turns, count, given)
        return jnp.sum(x**2)

    with jax.enable_x64(True):
        given = operands()
        run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)))
        for count in range(LAYERS + 1):
            found = run(jnp.int32(count), *given)
            assert runs == [1]  # compiled once
            wanted = jax.value_and_grad(unrolled, argnums=(1, 2, 3, 4))(count, *given)
            for a, b in zip(
                jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_turns_too_many_do_not_spoil_gradients() -> None:
    def overflowing(given: Sequence[Any]) -> list[Any]:
        x, w = given
        return [jnp.exp(x * w)]

    turns = DynamicLoop(
        body=overflowing, num_consts=0, num_carries=1, most=3, masked=True
    )
    stack = jnp.asarray([9.0, 1.0, 1.0])
    gradient = jax.grad(lambda w: run_dynamic_loop(turns, 1, (jnp.float32(1), w))[0])(
        stack
    )
    np.testing.assert_allclose(gradient, [np.exp(np.float32(9)), 0, 0], rtol=1e-6)


def test_what_is_the_same_in_all_turns_is_kept_once() -> None:
    size = 256

    def masking(given: Sequence[Any]) -> list[Any]:
        scale, x, w = given
        mask = jnp.tril(jnp.ones((size, size))) * scale  # no turn's own
        return [jnp.tanh(x * w) @ mask]

    turns = DynamicLoop(body=masking, num_consts=1, num_carries=1, most=64)

    def gradient(count: Any, *given: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(run_dynamic_loop(turns, count, (*given[:2], w))[0])

        return jax.grad(loss)(given[2])

    given = jnp.float32(0.01), jnp.ones((1, size)), jnp.ones((64, 1, 1))
    memory = jax.jit(gradient).lower(jnp.int32(9), *given).compile().memory_analysis()
    assert memory is not None
    # 64 masks would be eight times as much.
    assert memory.temp_size_in_bytes < 8 * 4 * size**2
