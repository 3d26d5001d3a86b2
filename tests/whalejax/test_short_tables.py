"""Tables of positions that are shorter than a sequence, which JAX does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.capture.table_reads import BEYOND


ROWS, SEQUENCE = 32, 24

Read = Callable[[Any, int], Any]


def taken(table: Any, length: int) -> Any:
    return jnp.take(table, jnp.arange(length), axis=0)


def indexed(table: Any, length: int) -> Any:
    return table[jnp.arange(length)]


def shifted(table: Any, length: int) -> Any:
    return table.astype(jnp.bfloat16)[jnp.arange(length - 2) + 2].astype(jnp.float32)


def in_layers(table: Any, length: int) -> Any:
    def layer(x: Any, _: Any) -> tuple[Any, None]:
        return x + table[jnp.arange(length)], None

    return jax.lax.scan(jax.checkpoint(layer), jnp.zeros((length, 8)), None, 2)[0]


def clipped(table: Any, length: int) -> Any:
    return jnp.take(table, jnp.arange(length), axis=0, mode="clip")


def wrapped(table: Any, length: int) -> Any:
    return table[jnp.arange(length) % ROWS]


def chosen(table: Any, length: int) -> Any:
    places = jnp.arange(length)
    return table[jnp.where(places < ROWS, places, ROWS - 1)]


def at_most(table: Any, length: int) -> Any:
    return table[jnp.minimum(jnp.arange(length), ROWS - 1)]


def masked(table: Any, length: int) -> Any:
    places = jnp.arange(length)
    return table[places * (places < ROWS).astype(places.dtype)]


def in_a_branch(table: Any, length: int) -> Any:
    places = jnp.arange(length)
    return jax.lax.cond(
        table.sum() > 0, lambda: table[places], lambda: table[places % ROWS]
    )


def planned(read: Read, sequence: int) -> wh.Plan:
    def loss(net: Any, batch: Any) -> Any:
        ids = batch["ids"]
        return jnp.tanh(
            net["words"][ids] + read(net["places"], ids.shape[1]).sum()
        ).mean()

    net = {
        "words": jax.ShapeDtypeStruct((64, 8), jnp.float32),
        "places": jax.ShapeDtypeStruct((ROWS, 8), jnp.float32),
    }
    batch = {"ids": jax.ShapeDtypeStruct((16, sequence), jnp.int32)}
    return wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:2")


@pytest.mark.parametrize("read", [taken, indexed, shifted, in_layers])
def test_rows_that_are_not_there_are_said(read: Read) -> None:
    plan = planned(read, SEQUENCE)
    assert not any(note.startswith(BEYOND) for note in plan.notes)
    assert plan.what_if(sequence=ROWS).time.step_seconds > 0
    words = (
        r"no sequences of 33. It reads beyond a table: places has 32 rows, and row 32"
    )
    with pytest.raises(wh.PlanError, match=words):
        plan.what_if(sequence=ROWS + 1)
    (note,) = [n for n in planned(read, 2 * ROWS).notes if n.startswith(BEYOND)]
    assert "places has 32 rows, and row 63 is read, counted from 0. JAX returns" in note
    assert ("NaN" in note) == (read is taken)


@pytest.mark.parametrize(
    "read", [clipped, wrapped, chosen, at_most, masked, in_a_branch]
)
def test_indices_that_a_model_limits_are_its_own(read: Read) -> None:
    assert not any(n.startswith(BEYOND) for n in planned(read, 2 * ROWS).notes)
    assert planned(read, SEQUENCE).what_if(sequence=2 * ROWS).time.step_seconds > 0


def test_keys_and_other_constants_of_a_loss_are_no_indices() -> None:
    key, scale = jax.random.key(0), jnp.linspace(0.0, 1.0, 8)[None]

    def loss(net: Any, batch: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, (1, 8)).astype(jnp.float32)
        return (jnp.tanh(batch["x"] @ net["w"]) * kept * scale).mean()

    net = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    plan = wh.plan(loss, net, batch, optimizer=optax.sgd(0.1), cluster="h100:2")
    assert not any(note.startswith(BEYOND) for note in plan.notes)
