"""Turns of a lockstep pipeline: selection of work, transfers and ring buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.schedules import Schedule


def turns_of(table: Schedule) -> np.ndarray:
    """Returns the micro-batch of each stage in each turn of a lockstep schedule.

    Args:
        table: Schedule in which each stage runs at most one forward and one backward
            pass in a turn, with inputs that were sent in the previous turn.

    Returns:
        ``int32[turns, stages, 2]``: the micro-batch of the forward and of the backward
        pass, or -1.
    """
    count = 1 + max(map(table.turn, table.rows))
    turns = np.full((count, table.num_stages, 2), -1, np.int32)
    for row in table.rows:
        slot = ("forward", "backward").index(row.action)
        turns[table.turn(row), row.stage, slot] = row.micro_batch
    return turns


def chosen(
    numbers: Any, stage: Any, work: Callable[[], Any], idle: Any, *, branches: bool
) -> Any:
    """Returns ``work()`` if a stage has a micro-batch, else ``idle``.

    Stages take separate branches only if nothing in ``work`` is sharded. Otherwise all
    stages run ``work`` if any of them has a micro-batch, because they share its
    collectives.

    Args:
        numbers: Micro-batch of each stage, or -1.
        stage: Number of this stage.
        work: Function that does the work.
        idle: Result without a micro-batch.
        branches: Whether nothing in ``work`` is sharded.
    """
    here = numbers[stage] >= 0
    if branches:
        return jax.lax.cond(here, work, lambda: idle)

    def masked() -> Any:
        return jax.tree.map(lambda x, y: jnp.where(here, x, y), work(), idle)

    return jax.lax.cond(jnp.any(numbers >= 0), masked, lambda: idle)


def handed_on(carry: tuple[Any, ...], stages: int) -> tuple[Any, ...]:
    """Sends values to the next stage; the first one receives zeros."""
    pairs = [(i, i + 1) for i in range(stages - 1)]
    return tuple(jax.lax.ppermute(x, STAGE, pairs) for x in carry)


def handed_back(carry: tuple[Any, ...], stages: int) -> tuple[Any, ...]:
    """Sends values to the previous stage; the last one receives zeros."""
    pairs = [(i + 1, i) for i in range(stages - 1)]
    return tuple(jax.lax.ppermute(x, STAGE, pairs) for x in carry)


def put(ring: Any, value: Any, number: Any) -> Any:
    """Saves a value of a micro-batch in a ring buffer, unless its number is -1.

    Args:
        ring: Ring buffer with a slot for each micro-batch in flight.
        value: Value to save.
        number: Number of the micro-batch, or -1.
    """
    place = jnp.maximum(number, 0) % ring.shape[0]
    value = jnp.where(number >= 0, value, read_ring_slot(ring, place))
    return jax.lax.dynamic_update_index_in_dim(ring, value, place, axis=0)


def read_ring_slot(ring: Any, number: Any) -> Any:
    """Reads a micro-batch's slot of a ring buffer."""
    place = number % ring.shape[0]
    return jax.lax.dynamic_index_in_dim(ring, place, keepdims=False)


def where(here: Any, tree: Any, other: Any = None) -> Any:
    """Selects one tree where a condition holds, and another tree or zeros elsewhere."""
    other = jax.tree.map(jnp.zeros_like, tree) if other is None else other
    return jax.tree.map(lambda x, y: jnp.where(here, x, y), tree, other)
