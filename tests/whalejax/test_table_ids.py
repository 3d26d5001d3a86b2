"""Ids, keys and models of steps with tables: what a user keeps stays the user's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh


pytestmark = pytest.mark.relaxed_promotion


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.user = nnx.Embed(5000, 16, rngs=rngs, dtype=dtype)
        self.out = nnx.Linear(16, 1, rngs=rngs)


def loss_fn(net: Net, batch: Any) -> jax.Array:
    return jnp.mean((net.out(net.user(batch["ids"]))[:, 0] - batch["y"]) ** 2)


def batch_of(ids: Any) -> dict[str, Any]:
    return {"ids": np.asarray(ids), "y": np.zeros(len(ids), np.float32)}


def made(**options: Any) -> tuple[Any, Net]:
    net, tx = Net(nnx.Rngs(0)), optax.sgd(0.1)
    plan = wh.plan_tables(
        loss_fn,
        net,
        batch_of(np.arange(8)),
        rows=wh.sparse_optimizer("sgd", 0.1),
        optimizer=tx,
        cluster="cpu:2",
    )
    options["devices"] = jax.devices()[:2]
    return wh.compile_tables(plan, loss_fn, net, optimizer=tx, **options), net


@pytest.mark.parametrize("value", [2**32 + 7, 2**40, -(2**40)])
@pytest.mark.parametrize("out_of_range", ["error", "clip"])
def test_wide_ids_are_refused(value: int, out_of_range: str) -> None:
    step, net = made(out_of_range=out_of_range)
    state = step.init_from(net)
    batch = batch_of(np.full(8, value, np.int64))
    with pytest.raises(wh.WhaleError, match=rf"\['ids'\] has the value {value}, which"):
        step(state, batch)
    with pytest.raises(wh.WhaleError, match="does not fit in 32 bits"):
        wh.count_lookups(loss_fn, net, [batch])
    narrow = batch_of(np.arange(8, dtype=np.int64))
    _, metrics = step(state, narrow)
    assert np.isfinite(float(metrics["loss"]))


def test_models_and_keys_outlive_the_next_step() -> None:
    step, net = made()
    key = jax.random.key(3)
    state = step.init_from(net, rng=key)
    state, _ = step(state, batch_of(np.arange(8)))
    kept = step.model(state)
    state, _ = step(state, batch_of(np.arange(8)))
    values = jax.tree.leaves(nnx.state(kept, nnx.Param))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in values)
    assert np.isfinite(float(loss_fn(kept, batch_of(np.arange(8)))))
    assert jax.random.bits(key).shape == ()
    step.init_from(net, rng=key)


def test_a_table_behind_a_cast_is_named() -> None:
    net = Net(nnx.Rngs(0), dtype=jnp.bfloat16)
    with pytest.raises(wh.WhaleError, match="is cast in full before it is looked"):
        wh.plan_tables(
            loss_fn,
            net,
            batch_of(np.arange(8)),
            rows=wh.sparse_optimizer("sgd", 0.1),
            optimizer=optax.sgd(0.1),
            cluster="cpu:2",
        )


@pytest.mark.parametrize("flat", [lambda ids: ids.reshape(-1), lambda ids: ids.T])
def test_ids_without_samples_in_front_are_refused_by_name(flat: Any) -> None:
    def loss(net: Net, batch: Any) -> jax.Array:
        return jnp.mean(net.out(net.user(flat(batch["ids"])))) + jnp.mean(batch["y"])

    with pytest.raises(wh.WhaleError, match="ids is looked up by ids of shape"):
        wh.plan_tables(
            loss,
            Net(nnx.Rngs(0)),
            {"ids": np.zeros((8, 4), np.int32), "y": np.zeros(8, np.float32)},
            rows=wh.sparse_optimizer("sgd", 0.1),
            optimizer=optax.sgd(0.1),
            cluster="cpu:2",
        )


def test_a_checkpoint_of_another_optimizer_names_what_helps(tmp_path: Any) -> None:
    step, net = made()
    step.save(tmp_path / "saved", step.init_from(net))
    tx = optax.adam(0.1)
    plan = wh.plan_tables(
        loss_fn,
        net,
        batch_of(np.arange(8)),
        rows=wh.sparse_optimizer("adagrad", 0.1),
        optimizer=tx,
        cluster="cpu:2",
    )
    devices = jax.devices()[:2]
    other = wh.compile_tables(plan, loss_fn, net, optimizer=tx, devices=devices)
    with pytest.raises(wh.WhaleError, match="compile with the optimizers that saved"):
        other.restore(tmp_path / "saved")
