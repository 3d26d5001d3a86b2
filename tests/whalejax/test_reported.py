"""What losses report is merged as they say, by every executor: mean, sum, rows."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.adapters.base import adapt
from whalejax.api.losses import Merged
from whalejax.capture import capture


BATCH: Final = 16


def outputs(model: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, model["layers"])
    return h @ model["head"]


def losses(model: Any, x: Any) -> Any:
    return (outputs(model, x) ** 2).sum(-1)


def scanned(model: Any, x: Any) -> Any:
    z = outputs(model, x)
    each = (z**2).sum(-1)
    reports = wh.Aux(
        metrics={
            "mean": x.mean(),
            "plain": {"z": z, "pred": z.argmax(-1), "turned": z.T},
            "tokens": z.reshape(-1, 2),
            "classes": x.mean(0),
        },
        means={"widths": jnp.asarray([1, 2])},
        sums={"norm": {"two": (x**2).sum()}, "rows": jnp.int8(x.shape[0])},
        samples={"each": each, "high": each > 1.0, "x": x},
    )
    return wh.WeightedLoss(each.sum(), x.shape[0] * jnp.ones(())), reports


def staged(model: Any, x: Any) -> Any:
    with wh.pipeline(num_stages=2, schedule="gpipe"):
        h = x
        for name in ("first", "second"):
            h = h + jnp.tanh(h @ model[name])
        z = h @ model["head"]
        each = (z**2).sum(-1)
        reports = wh.Aux(
            metrics={"z": z, "pred": z.argmax(-1)},
            samples={"each": each},
            sums={"all": each.sum()},
        )
        return each.mean(), reports


def ran(loss: Any, model: Any, x: Any, **options: Any) -> tuple[wh.Plan, Any, Any]:
    """A plan, and what a step and an evaluation report."""
    options = {"cluster": "cpu:2", **options}
    plan = wh.plan(loss, model, x, optimizer=optax.sgd(0.1), **options)
    devices = jax.devices()[: plan.num_devices]
    step = wh.compile(plan, loss, model, optimizer=optax.sgd(0.1), devices=devices)
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
        {"shares": (3, 1), "mesh": {"stage": 2}, "cluster": "cpu:4"},
    ],
    ids=["whole", "accumulated", "lockstep", "unlike shares", "unlike pipelines"],
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
        z, plain = np.asarray(outputs(model, x)), found["plain"]
        np.testing.assert_allclose(plain["z"], z, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(plain["turned"], z.T, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(plain["pred"], z.argmax(-1))
        tokens = z.reshape(-1, 2)
        np.testing.assert_allclose(found["tokens"], tokens, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["classes"], x.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["widths"], [1, 2], rtol=1e-6)


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
    z = h @ np.asarray(model["head"])
    each = (z**2).sum(-1)
    for found in reports:
        np.testing.assert_allclose(found["z"], z, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["pred"], z.argmax(-1))
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
        (twice, "n in several of metrics=, means=, sums= and samples="),
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


W: Final = jax.ShapeDtypeStruct((8, 10), jnp.float32)
X: Final = jax.ShapeDtypeStruct((32, 8), jnp.float32)


def merged(report: Any, count: int = 2) -> Any:
    """How the report of a loss is put together, by the loss's program alone."""

    def loss(w: Any, x: Any) -> Any:
        z = x @ w
        return (z**2).mean(), report(z)

    found = capture(adapt(W, loss), X, num_micro_batches=count)
    tree = found.out_tree.unflatten(range(found.out_tree.num_leaves))[2]
    return tree["aux"]


@pytest.mark.parametrize("count", [1, 2, 32])
@pytest.mark.parametrize(
    "report, where",
    [
        (lambda z: z, (0, 1, 1)),
        (lambda z: z.argmax(-1), (0, 1, 1)),
        (lambda z: z.T, (1, 1, 1)),
        (lambda z: jnp.repeat(z, 3, axis=0), (0, 1, 3)),
        (lambda z: jnp.stack([z, z]), (1, 1, 1)),
        (lambda z: jnp.stack([z, z]).reshape(-1, 10), (0, 2, 1)),
        (lambda z: z.reshape(-1, 5), (0, 1, 2)),
        (lambda z: z[jnp.arange(len(z)), z.argmax(-1)], (0, 1, 1)),
        (lambda z: jax.vmap(jnp.linalg.norm)(z), (0, 1, 1)),
        (lambda z: jnp.sort(z, axis=-1)[:, :3], (0, 1, 1)),
        (lambda z: z - z.mean(0, keepdims=True), (0, 1, 1)),
        (
            lambda z: jax.lax.scan(lambda c, w: (c + w, c), z[:, 0], z.T)[1],
            (1, 1, 1),
        ),
    ],
)
def test_rows_are_found_where_they_stand(
    report: Any, where: tuple[int, int, int], count: int
) -> None:
    found = merged(report, count)
    assert isinstance(found, Merged) and found.how == "rows"
    assert (found.axis, found.outer, found.inner) == where


@pytest.mark.parametrize("count", [1, 2, 32])
def test_what_has_no_rows_stays_a_mean_or_a_sum(count: int) -> None:
    for report in (
        lambda z: z.mean(0),
        lambda z: z.mean(),
        lambda z: (z > 0).sum(0),
        lambda z: jnp.sort(z.mean(0)),
        lambda z: jnp.linspace(0.0, 1.0, 7),
    ):
        assert not isinstance(merged(report, count), Merged)


@pytest.mark.parametrize(
    "report, why",
    [
        (lambda z: z[:4], "holds some of the samples, or mixes them"),
        (lambda z: z[::-1], "holds some of the samples, or mixes them"),
        (lambda z: jnp.sort(z, axis=0), "holds some of the samples, or mixes them"),
        (lambda z: z.reshape(4, -1), "holds some of the samples, or mixes them"),
        (lambda z: z @ z.T, "has samples along several dimensions"),
        (lambda z: z[0], "is of one sample of the micro-batch"),
        (lambda z: jnp.zeros(16), "has a dimension as long as a micro-batch whose"),
        (
            lambda z: jax.pure_callback(
                lambda z: z[:, 0], jax.ShapeDtypeStruct((16,), z.dtype), z
            ),
            "has a dimension as long as a micro-batch whose",
        ),
    ],
)
def test_what_cannot_be_put_together_is_refused(report: Any, why: str) -> None:
    with pytest.raises(wh.WhaleError, match=why) as raised:
        merged(report)
    assert "metrics['aux'] of shape" in str(raised.value)
    assert "micro-batches of 16 samples report" in str(raised.value)
    assert "wh.Aux(samples={...}), what is to be added up" in str(raised.value)
    assert "num_micro_batches=1" in str(raised.value)
    merged(report, 1)  # Of one micro-batch there is nothing to put together.


def test_a_loss_of_single_samples_only() -> None:
    text = "metrics.'aux'. of shape .1, 10. is of a loss that cannot be traced with two"
    with pytest.raises(wh.WhaleError, match=text):
        merged(lambda z: z.reshape(1, 10), 32)
    assert not isinstance(merged(lambda z: z.reshape(1, 10).sum(), 32), Merged)


def test_a_plan_that_chooses_micro_batches_refuses_too() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = x
        for part in w:
            h = jnp.tanh(h @ part)
        return h.mean(), h[:5]

    w = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((2**20, 4096), jnp.float32)
    text = "metrics\\['aux'\\] of shape \\(5, 4096\\) holds some of the samples"
    with pytest.raises(wh.WhaleError, match=text):
        wh.plan(loss, w, x, cluster="h100:1", remat="none", loss_chunks=1)
