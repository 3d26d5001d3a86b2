"""The sequential recommender: jagged histories, and its eleven tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
import whalejax.models as models
from whalejax.models import hstu
from whalejax.tables.layout import make_layout


def test_what_lies_behind_a_history_changes_nothing() -> None:
    config = hstu.SIZES["test"]
    model = hstu.HSTU(config, rngs=nnx.Rngs(0))
    batch = dict(hstu.history_batch(config, 0, 8, seed=0))
    expected = np.asarray(model(batch))
    behind = np.arange(config.sequence) >= batch["length"][:, None]
    assert behind.any()
    for name in hstu.FEATURES:
        if name != "user":
            batch[name] = np.where(behind, 0, batch[name])
    np.testing.assert_array_equal(model(batch), expected)
    batch["item"] = (batch["item"] + 1) % config.rows[0]
    assert (np.abs(np.asarray(model(batch)) - expected) > 0).all()


@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_the_loss_falls(on_one_device: Callable[..., Any]) -> None:
    job = models.job("hstu-test", batch_size=64)
    device = on_one_device("hstu-test", batch_size=64)
    losses = device.losses([job.batch_at(i) for i in range(40)], job.optimizer)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05


def test_eleven_tables_of_full_size_are_placed() -> None:
    job = models.job("hstu-dlrm-v4", batch_size=64, sequence=128)
    model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
    plan = wh.plan_tables(
        job.loss_fn,
        model,
        job.batch_at(0),
        rows=wh.sparse_optimizer("adagrad", 0.01),
        optimizer=job.optimizer,
        cluster="v5p:4x4x4",
    )
    assert len(plan.tables) == 11
    assert sum(table.rows for table in plan.placement.tables) == 297_050_000
    assert plan.placement.memory_bytes.max() < 2 * plan.placement.memory_bytes.mean()
    assert plan.placement.shards_of("tables.cross_0.embedding")[0].shards > 1


def test_a_batch_without_room_is_refused_by_what_can_be_changed() -> None:
    job = models.job("hstu-dlrm-v4", batch_size=8192)
    model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((8192, *x.shape[1:]), x.dtype),
        job.batch_at(0, 2),
    )
    words = r"batch of 8,192 samples; a smaller batch leaves more"
    with pytest.raises(wh.WhaleError, match=words):
        wh.plan_tables(
            *(job.loss_fn, model, batch),
            rows=wh.sparse_optimizer("row_adagrad", 0.01),
            optimizer=job.optimizer,
            cluster="h100:2x8",
        )


@pytest.mark.relaxed_promotion  # layers of Flax promote
def test_steps_with_tables_are_those_of_one_device() -> None:
    job = models.job("hstu-test", batch_size=64)
    model = job.make_model(jax.random.key(0))
    plan = wh.plan_tables(
        job.loss_fn,
        model,
        job.batch_at(0),
        rows=wh.sparse_optimizer("adagrad", 0.05),
        optimizer=job.optimizer,
        cluster="cpu:4",
    )
    step = wh.compile_tables(
        *(plan, job.loss_fn, model),
        optimizer=job.optimizer,
        devices=jax.devices()[:4],
    )
    layout, program = step.programs.layout, step.programs.program
    plain = make_layout(plan.placement, program.lookups, step.programs.names)
    samples = job.batch_size
    assert layout.gathered
    assert 2 * layout.exchanged_bytes(samples, 4) < plain.exchanged_bytes(samples, 4)
    state = step.init_from(model)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def one(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(
            lambda p: job.loss_fn(nnx.merge(graph, p, rest), batch)
        )(params)
        updates, state = job.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    opt_state = job.optimizer.init(params)
    for number in range(3):
        batch = job.batch_at(number)
        params, opt_state, value = one(params, opt_state, batch)
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=2e-6)
    trained = nnx.state(step.model(state), nnx.Param)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, trained
    )
