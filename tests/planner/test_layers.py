"""Layers of models that are written out are found by the weights that they read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.model.repeated_layers import layer_starts


def stack(count: int, extra: int = 0) -> dict[str, Any]:
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    net: dict[str, Any] = {"layers": {str(i): {"w": w} for i in range(count)}}
    return net | {f"extra{i}": w for i in range(extra)}


def through(order: Any) -> Any:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        for index in order:
            x = jnp.tanh(x @ net["layers"][str(index)]["w"])
        return jnp.mean(x)

    return loss


X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.parametrize(
    ("order", "count"),
    [
        (range(6), 6),
        (range(5), 5),
        ([0, 1, 2, 4, 5], 5),
        (range(5, -1, -1), 6),
        ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], 0),
    ],
)
def test_layers_begin_where_their_weights_are_read(order: Any, count: int) -> None:
    graph = capture(adapt(stack(6), through(order)), X).graph
    starts = layer_starts(graph)
    assert len(starts) == (count + 1 if count else 0)
    assert list(starts) == sorted(set(starts))
    first = [graph.ops[index].operands for index in starts[:-1]]
    read = [graph.tensors[t].path for operands in first for t in operands]
    assert [path for path in read if path.startswith("layers")] == (
        [f"layers.{index}.w" for index in order][:count]
    )


def test_a_loop_over_time_is_no_stack_of_layers() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ net["w"] + one), None

        last, _ = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return jnp.mean(last)

    net = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 32, 256), jnp.float32)
    assert layer_starts(capture(adapt(net, loss), x).graph) == ()
