"""The recommender: against NumPy, what it learns, and its data in order of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
import whalejax.models as models
from whalejax.models import click_data, dlrm
from whalejax.models.click_data import area_under_curve, power_law_ids


def trained_auc(make: Callable[..., nnx.Module], rate: float) -> float:
    """AUC on the last flights of the year after one pass over those before."""
    data = click_data.flights()
    config = dlrm.DLRMConfig(
        rows=data.rows, bags=(1,) * len(data.rows), dense=5, bottom=(64,), top=(64, 32)
    )
    graph, params, rest = nnx.split(make(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adagrad(rate)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        gradients = jax.grad(lambda p: dlrm.loss_fn(nnx.merge(graph, p, rest), batch))(
            params
        )
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, size, last = optimizer.init(params), 512, 300_000
    for number in range(last // size):
        params, state = step(params, state, data.batch(number, size))
    later = data.window(last, data.size)
    logits = nnx.merge(graph, params, rest)(later)
    return area_under_curve(later["label"], np.asarray(logits))


def test_logits_are_those_of_the_paper() -> None:
    config = dlrm.SIZES["test"]
    model = dlrm.DLRM(config, rngs=nnx.Rngs(3))
    batch = config.data.batch(5, 9)

    def mlp(net: dlrm.MLP, x: np.ndarray) -> np.ndarray:
        for number, layer in enumerate(net.layers):
            assert layer.bias is not None
            x = np.maximum(x, 0) if number else x
            x = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        return x

    x = mlp(model.bottom, batch["dense"])
    vectors = [x]
    for name, table in model.tables.items():
        weights, ids = np.asarray(table.embedding[...]), batch[name].reshape(9, -1)
        vectors.append(
            np.stack([weights[row[row >= 0]].sum(0) for row in ids]).astype(np.float32)
        )
    pairs = [
        (vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)
    ]
    expected = mlp(model.top, np.concatenate([x, np.stack(pairs, 1)], 1))[:, 0]
    np.testing.assert_allclose(model(batch), expected, atol=1e-5)


def test_bags_are_of_every_size() -> None:
    data = dlrm.SIZES["test"].data
    sizes = (data.batch(0, 400)["c3"] >= 0).sum(1)
    assert set(sizes.tolist()) == {0, 1, 2, 3, 4}


def test_ids_follow_a_power_law() -> None:
    uniform = (np.arange(200_000) + 0.5) / 200_000
    counts = np.bincount(power_law_ids(uniform, 1000, 1.05), minlength=1000)
    slope = np.polyfit(np.log(np.arange(10, 300)), np.log(counts[9:299]), 1)[0]
    assert slope == pytest.approx(-1.05, abs=0.05)
    even = np.bincount(power_law_ids(uniform, 1000, 0.0), minlength=1000)
    assert even.min() == even.max() == 200


def test_published_sizes() -> None:
    assert sum(dlrm.SIZES["kaggle"].table_rows) == 33_762_577
    assert sum(dlrm.SIZES["v2"].bags) == 214
    assert dlrm.SIZES["quick"].table_rows[2] == 101_312
    with pytest.raises(wh.WhaleError, match="26 tables in rows and 2 bags"):
        models.job("dlrm", bags=(1, 2))


@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_the_hidden_model_is_learnt(on_one_device: Callable[..., Any]) -> None:
    job = models.job("dlrm-test", batch_size=512, learning_rate=0.1)
    device = on_one_device("dlrm-test", batch_size=512)
    losses = device.losses([job.batch_at(i) for i in range(150)], job.optimizer)
    assert np.mean(losses[-20:]) < np.mean(losses[:5]) - 0.02


def test_flights_are_in_order_of_time() -> None:
    data = click_data.flights()
    assert data.size == 336_776 - 9_430
    assert dict(zip(data.names, data.rows, strict=True))["dest"] == 105
    month = data.columns["c6"]
    names = np.unique(np.array([str(m) for m in range(1, 13)]))
    assert (np.diff(names[month].astype(int)) >= 0).all()
    first, second = data.batch(0, 100), data.batch(1, 100)
    whole = data.window(0, 200)
    for name in whole:
        joined = np.concatenate([first[name], second[name]])
        assert (joined == whole[name]).all()
    with pytest.raises(wh.WhaleError, match="there are only 327,346"):
        data.batch(327, 1001)


class LogisticRegression(nnx.Module):
    """A weight for every id and dense feature."""

    def __init__(self, config: dlrm.DLRMConfig, *, rngs: nnx.Rngs) -> None:
        kind = config.param_dtype
        self.tables = nnx.Dict(
            {
                f"c{i}": dlrm._table(rows, 1, kind, rngs)
                for i, rows in enumerate(config.table_rows)
            }
        )
        self.dense = dlrm.MLP((config.dense, 1), param_dtype=kind, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        kind = self.dense.layers[0].kernel.dtype
        logits = self.dense(jnp.asarray(batch["dense"]).astype(kind))[:, 0]
        for name, table in self.tables.items():
            logits = logits + dlrm.sum_bags(table, jnp.asarray(batch[name]))[:, 0]
        return logits


@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_late_flights_are_told_better_than_by_logistic_regression() -> None:
    linear = trained_auc(LogisticRegression, 0.1)
    deep = trained_auc(dlrm.DLRM, 0.1)
    assert 0.6 < linear < deep


def test_area_under_curve_counts_pairs() -> None:
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 50), random.integers(0, 9, 50)
    wins = [
        (a > b) + 0.5 * (a == b)
        for a in scores[labels == 1]
        for b in scores[labels == 0]
    ]
    assert area_under_curve(labels, scores) == pytest.approx(np.mean(wins))
    with pytest.raises(wh.WhaleError, match="0 of 3 labels are 1"):
        area_under_curve([0, 0, 0], [1, 2, 3])


def test_a_missing_id_has_no_row() -> None:
    table = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    ids = np.array([2, -1, 4], np.int32)
    single = np.asarray(dlrm.sum_bags(table, ids))
    assert not single[1].any()
    np.testing.assert_array_equal(single[[0, 2]], table.embedding[...][ids[[0, 2]]])
    np.testing.assert_array_equal(dlrm.sum_bags(table, ids[:, None]), single)
