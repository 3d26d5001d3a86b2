"""What losses report is merged as they say, by every executor: mean, sum, rows."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh


BATCH: Final = 16


def losses(model: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, model["layers"])
    return ((h @ model["head"]) ** 2).sum(-1)


def scanned(model: Any, x: Any) -> Any:
    each = losses(model, x)
    reports = wh.Aux(
        metrics={"mean": x.mean()},
        sums={"norm": {"two": (x**2).sum()}, "rows": jnp.int8(x.shape[0])},
        samples={"each": each, "high": each > 1.0, "x": x},
    )
    return wh.WeightedLoss(each.sum(), x.shape[0] * jnp.ones(())), reports


def staged(model: Any, x: Any) -> Any:
    with wh.pipeline(num_stages=2, schedule="gpipe"):
        h = x
        for name in ("first", "second"):
            h = h + jnp.tanh(h @ model[name])
        each = ((h @ model["head"]) ** 2).sum(-1)
        return each.mean(), wh.Aux(samples={"each": each}, sums={"all": each.sum()})


def ran(loss: Any, model: Any, x: Any, **options: Any) -> tuple[wh.Plan, Any, Any]:
    """A plan, and what a step and an evaluation report."""
    plan = wh.plan(loss, model, x, optimizer=optax.sgd(0.1), cluster="cpu:2", **options)
    step = wh.compile(
        plan, loss, model, optimizer=optax.sgd(0.1), devices=jax.devices()[:2]
    )
    state = step.init_from(model)
    evaluated = step.eval(state, x)
    return plan, step(state, x)[1], evaluated


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 2}, "num_micro_batches": 1},
        {"mesh": {"data": 2}, "num_micro_batches": 4},
        {"mesh": {"stage": 2}, "num_micro_batches": 4},
        {"shares": (3, 1), "num_micro_batches": 4},
    ],
    ids=["whole", "accumulated", "lockstep", "unlike shares"],
)
def test_sums_and_rows_of_all_samples(options: dict[str, Any]) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "layers": jax.random.normal(keys[0], (2, 8, 8)) * 0.3,
        "head": jax.random.normal(keys[1], (8, 4)),
    }
    x = np.asarray(jax.random.normal(keys[2], (BATCH, 8)))
    each = np.asarray(losses(model, x))
    for found in ran(scanned, model, x, **options)[1:]:
        np.testing.assert_allclose(found["each"], each, rtol=1e-5)
        np.testing.assert_array_equal(found["high"], each > 1.0)
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_allclose(found["norm"]["two"], (x**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(found["mean"], x.mean(), rtol=1e-4, atol=1e-6)
        assert int(found["rows"]) == BATCH


def test_stages_with_programs_of_their_own() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    model = {
        "first": jax.random.normal(keys[0], (8, 8)),
        "second": jax.random.normal(keys[1], (8, 8)),
        "head": jax.random.normal(keys[2], (8, 4)),
    }
    x = np.asarray(jax.random.normal(keys[3], (BATCH, 8)))
    plan, *reports = ran(staged, model, x, num_micro_batches=4)
    assert plan.stages is not None and plan.stages.executor == "mpmd"
    h = x + np.tanh(x @ model["first"])
    h = h + np.tanh(h @ model["second"])
    each = ((h @ np.asarray(model["head"])) ** 2).sum(-1)
    for found in reports:
        np.testing.assert_allclose(found["each"], each, rtol=1e-4)
        np.testing.assert_allclose(found["all"], each.sum(), rtol=1e-5)


def test_wrong_reports_are_said() -> None:
    def scalar(model: Any, x: Any) -> Any:
        return (x @ model).mean(), wh.Aux(samples={"mean": x.mean()})

    def twice(model: Any, x: Any) -> Any:
        return (x @ model).mean(), wh.Aux(metrics={"n": x.mean()}, sums={"n": x.sum()})

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (16, 8)))
    for loss, text in (
        (scalar, "has the scalar 'mean'; expected a row for each sample"),
        (twice, "n in several of metrics=, sums= and samples="),
    ):
        with pytest.raises(wh.WhaleError, match=text):
            wh.plan(loss, w, x, cluster="cpu:2")


def test_rows_that_are_no_samples_are_refused() -> None:
    def loss(model: Any, x: Any) -> Any:
        each = losses(model, x)
        return each.mean(), wh.Aux(samples={"halves": each.reshape(-1, 2)})

    model = {"layers": np.ones((2, 8, 8), "f"), "head": np.ones((8, 4), "f")}
    text = r"'halves' of shape \(8, 2\); expected 16 rows, one for each sample"
    with pytest.raises(wh.WhaleError, match=text):
        wh.plan(loss, model, np.ones((16, 8), "f"), cluster="cpu:2")
