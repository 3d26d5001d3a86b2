"""Checkpoints of tables: written under one placement, read under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.runtime.table_step import TableStep


def loss(net: Any, batch: Any) -> jax.Array:
    """Of products of users and items."""
    users, items = net["user"][batch["user"]], net["item"][batch["items"]].sum(1)
    return jnp.mean(jnp.tanh((users * items) @ net["w"]).sum(1) ** 2)


def make_net() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"user": (41, 32), "item": (23, 32), "w": (32, 5)}
    return {
        name: jnp.asarray(random.standard_normal(shape), jnp.float32)
        for name, shape in shapes.items()
    }


def make_batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "user": random.integers(0, 41, 24).astype(np.int32),
        "items": random.integers(0, 23, (24, 3)).astype(np.int32),
    }


def make_step(ranks: int, split: str, rate: float = 0.1) -> TableStep:
    optimizer = optax.sgd(0.01, momentum=0.9)
    plan = wh.plan_tables(
        loss,
        make_net(),
        make_batch(0),
        rows=wh.sparse_optimizer("adagrad", rate),
        optimizer=optimizer,
        cluster=f"cpu:{ranks}",
        pins={"user": split, "item": split},
    )
    return wh.compile_tables(
        plan, loss, make_net(), optimizer=optimizer, devices=jax.devices()[:ranks]
    )


def test_four_ranks_by_columns_to_three_by_rows(tmp_path: Path) -> None:
    four, three = make_step(4, "columns"), make_step(3, "rows")
    state = four.init_from(make_net())
    for number in range(3):
        state, _ = four(state, make_batch(number))
    four.save(tmp_path / "saved", state)
    restored = three.restore(tmp_path / "saved")
    assert int(restored.step) == 3
    for before, after in (
        (four.table_values(state), three.table_values(restored)),
        (four.row_states(state), three.row_states(restored)),
        (state.params, restored.params),
        (state.opt_state, restored.opt_state),
    ):
        jax.tree.map(np.testing.assert_array_equal, before, after)
    first, second = four(state, make_batch(3)), three(restored, make_batch(3))
    assert float(first[1]["loss"]) == pytest.approx(float(second[1]["loss"]), rel=1e-6)
    tables = four.table_values(first[0]), three.table_values(second[0])
    for name, table in tables[0].items():
        np.testing.assert_allclose(table, tables[1][name], atol=1e-6)


def test_a_damaged_checkpoint_and_another_model_are_refused(tmp_path: Path) -> None:
    step = make_step(2, "rows")
    step.save(tmp_path / "saved", step.init_from(make_net()))
    with pytest.raises(wh.WhaleError, match="this path exists already"):
        step.save(tmp_path / "saved", step.init_from(make_net()))
    plan = wh.plan_tables(
        loss,
        make_net(),
        make_batch(0),
        rows=wh.sparse_optimizer("sgd", 0.1),
        optimizer=optax.sgd(0.1),
        cluster="cpu:2",
    )
    other = wh.compile_tables(
        plan, loss, make_net(), optimizer=optax.sgd(0.1), devices=jax.devices()[:2]
    )
    with pytest.raises(wh.WhaleError, match="sum_of_squares"):
        other.restore(tmp_path / "saved")
    largest = max(
        (p for p in (tmp_path / "saved").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(wh.WhaleError, match="saved"):
        step.restore(tmp_path / "saved")
