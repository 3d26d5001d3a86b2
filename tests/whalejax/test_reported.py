"""What losses report is merged as they say, by every executor: mean, sum, rows."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.adapters import adapt
from whalejax.capture import capture
from whalejax.losses import Merged


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
    tree = found.apart().out_tree
    tree = tree.unflatten(range(tree.num_leaves))[2]
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


@pytest.mark.parametrize("count", [2, 32])
@pytest.mark.parametrize(
    "report, how",
    [
        (lambda z: z.mean(0), None),
        (lambda z: z.mean(), None),
        (lambda z: 1 - 2 * (z.argmax(-1) == 3).mean(), None),
        (lambda z: (z > 0).sum(0), "sum"),
        (lambda z: z.sum() / 10, "sum"),
        (lambda z: jnp.ones(len(z)) @ z, "sum"),
        (len, "sum"),
        (
            lambda z: jax.lax.scan(
                lambda c, w: (c + w, (c * w).sum()), jnp.zeros(len(z)), z.T
            )[1],
            "sum",
        ),
        (lambda z: jnp.zeros(10, int).at[z.argmax(-1)].add(1), "sum"),
        (lambda z: jax.jit(lambda z: jnp.where(z > 0, z, 0.0).sum(0))(z), "sum"),
        (lambda z: jax.lax.cond(len(z) > 0, jnp.mean, jnp.mean, z), None),
        (lambda z: jnp.linspace(0.0, 1.0, 7), "same"),
        (lambda z: jnp.zeros(16), "same"),
        (lambda z: jnp.int32(10), "same"),
        (lambda z: 3, "same"),
    ],
)
def test_means_sums_and_what_no_sample_changes(
    report: Any, how: str | None, count: int
) -> None:
    found = merged(report, count)
    assert (found.how if isinstance(found, Merged) else None) == how


@pytest.mark.parametrize(
    "report, why",
    [
        (lambda z: z[:4], "holds some of the samples, or mixes them"),
        (lambda z: z[::-1], "holds some of the samples, or mixes them"),
        (lambda z: jnp.sort(z, axis=0), "holds some of the samples, or mixes them"),
        (lambda z: z.reshape(4, -1), "holds some of the samples, or mixes them"),
        (lambda z: z @ z.T, "has samples along several dimensions"),
        (lambda z: z[0], "is of one sample of the micro-batch"),
        (lambda z: z[:16], "is made in another way where the batch has more"),
        (lambda z: z[:20], "is made in another way where the batch has more"),
        (lambda z: jnp.triu(z), "cannot be put together of the values of micro-bat"),
        (lambda z: jnp.arange(len(z)), "depends on more than one sample in every row"),
        (
            lambda z: z - z.mean(0, keepdims=True),
            "is neither a sum nor a mean over the samples",
        ),
        (lambda z: jax.nn.softmax(z, 0), "is neither a sum nor a mean over the"),
        (lambda z: jnp.sort(z.mean(0)), "is neither a sum nor a mean over the samples"),
        (lambda z: z.argmax(0), "is neither a sum nor a mean over the samples"),
        (lambda z: z.astype(int).max(), "is neither a sum nor a mean over the samples"),
        (lambda z: (z.reshape(4, -1).sum(0) ** 2).mean(), "cannot be put together"),
        (lambda z: (z > 0).sum().astype(bool), "is neither a sum nor a mean over the"),
        (lambda z: (z > 0).sum() // 2, "is neither a sum nor a mean over the samples"),
        (
            lambda z: jax.lax.cond(z.mean() > 0, jnp.mean, lambda z: z.mean() + 1, z),
            "is neither a sum nor a mean over the samples",
        ),
        (lambda z: jnp.linspace(0, 1, 500)[(z > 0).sum()], "is neither a sum nor a"),
        (lambda z: z[(jnp.arange(len(z)) + 1) % len(z)], "cannot be put together"),
        (lambda z: z.max(), "is neither a sum nor a mean over the samples"),
        (lambda z: z.var(0), "is neither a sum nor a mean over the samples"),
        (lambda z: (z > 0).any(), "is neither a sum nor a mean over the samples"),
        (lambda z: jax.nn.logsumexp(z, 0), "is neither a sum nor a mean over the"),
        (lambda z: z.sum() / len(z) ** 2, "depends on the number of samples"),
        (lambda z: z.mean() + z.sum(), "is neither a sum nor a mean over the samples"),
        (
            lambda z: jax.pure_callback(
                lambda z: z[:, 0], jax.ShapeDtypeStruct((16,), z.dtype), z
            ),
            "is neither a sum nor a mean over the samples",
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
    with pytest.raises(wh.WhaleError, match=text) as raised:
        wh.plan(loss, w, x, cluster="h100:1", remat="none", loss_chunks=1)
    assert "the planner chose num_micro_batches=" in str(raised.value)


def each_kind(z: Any) -> dict[str, Any]:
    """Values that micro-batches, or passes over samples, put together exactly."""
    right = z.argmax(-1) == 0
    return {
        "z": z,
        "turned": z.T,
        "pred": z.argmax(-1),
        "top": jax.lax.top_k(z, 2),
        "flat": z.ravel(),
        "phase": jnp.exp(jax.lax.complex(z[:, 0], z[:, 1])),
        "share": right.mean(),
        "classes": z.mean(0),
        "moments": {"two": (z**2).mean() * 2.0 - 1.0},
        "right": right.sum(),
        "each class": (z > 0).sum(0),
        "total": z.sum(),
        "by hand": (z**2).sum() / len(z),
        "ten": jnp.int32(10),
        "three": 3,
        "samples": len(z),
        "numbers": jnp.arange(3),
        "half": jnp.full(2, 0.5),
    }


def masked(z: Any, x: Any) -> tuple[Any, Any, Any]:
    """A weight that differs between micro-batches, its mean, and a plain mean."""
    mask = (x[:, 0] > 0).astype(z.dtype)
    each = (z**2).sum(-1)
    mean = (z[:, 0] * mask).sum() / jnp.maximum(mask.sum(), 1.0)
    return (each * mask).sum(), mask.sum(), mean


def check_kinds(found: Any, model: Any, x: Any) -> None:
    z = jnp.asarray(x @ model)
    wanted = each_kind(z)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path({k: found[k] for k in wanted})[0],
        jax.tree.leaves(wanted),
        strict=True,
    ):
        assert a.shape == np.shape(b), path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(path))
    np.testing.assert_allclose(found["masked"], masked(z, x)[2], rtol=1e-4)


def kinds_loss(model: Any, x: Any) -> Any:
    z = x @ model
    total, weight, mean = masked(z, x)
    return wh.WeightedLoss(total, weight), {**each_kind(z), "masked": mean}


def weights_and_samples() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(3))
    x = np.asarray(jax.random.normal(keys[1], (BATCH, 8)))
    return np.asarray(jax.random.normal(keys[0], (8, 8))), x


def test_training_reports_what_one_device_does() -> None:
    model, x = weights_and_samples()
    options = {"mesh": {"data": 2}, "num_micro_batches": 4}
    for found in ran(kinds_loss, model, x, **options)[1:]:
        check_kinds(found, model, x)


def test_fewer_samples_report_what_one_device_does() -> None:
    model, x = weights_and_samples()
    plan = wh.plan(kinds_loss, model, x, cluster="cpu:1", num_micro_batches=1)
    step = wh.compile(plan, kinds_loss, model, devices=jax.devices()[:1])
    state = step.init_from(model)
    check_kinds(step.eval(state, x[:13]), model, x[:13])
    check_kinds(step.eval(state, x), model, x)


UNCLEAR: Final = {
    "first": lambda z: z[:4],
    "best": lambda z: z.argmax(0),
    "most": lambda z: z.max(),
    "whole": lambda z: z.astype(int).max(),
    "upper": lambda z: jnp.triu(z),
    "quarters": lambda z: z.reshape(4, -1),
    "any": lambda z: (z > 0).any(),
    "kinds": lambda z: jnp.unique(z[:, 0] > 0, size=2).astype(int),
    "shared": lambda z: jax.nn.softmax(z, 0),
    "centred": lambda z: z - z.mean(0, keepdims=True),
    "spread": lambda z: z.var(0),
    "peak": lambda z: jax.nn.logsumexp(z, axis=0),
}


def unclear_loss(model: Any, x: Any) -> Any:
    z = x @ model
    return (z**2).mean(), {name: report(z) for name, report in UNCLEAR.items()}


@pytest.mark.parametrize("count", [4, 8])
def test_training_refuses_all_that_is_unclear_at_once(count: int) -> None:
    model, x = weights_and_samples()
    with pytest.raises(wh.WhaleError) as raised:
        wh.plan(unclear_loss, model, x, cluster="cpu:2", num_micro_batches=count)
    text = str(raised.value)
    assert [n for n in UNCLEAR if f"metrics[{n!r}]" not in text] == []
    assert "wh.Aux(samples={...})" in text


def test_fewer_samples_are_refused_if_a_value_is_unclear() -> None:
    model, x = weights_and_samples()
    plan = wh.plan(unclear_loss, model, x, cluster="cpu:1", num_micro_batches=1)
    step = wh.compile(plan, unclear_loss, model, devices=jax.devices()[:1])
    state = step.init_from(model)
    np.testing.assert_array_equal(step.eval(state, x)["first"].shape, (4, 8))
    with pytest.raises(wh.WhaleError) as raised:
        step.eval(state, x[:13])
    text = str(raised.value)
    assert [n for n in UNCLEAR if f"metrics[{n!r}]" not in text] == []
    assert "the batch has 13 samples, the plan is for 16" in text
    assert "wh.Aux(means=..., sums=..., samples=...)" in text


def scanned_samples(model: Any, x: Any) -> Any:
    z = x @ model
    total, running = jax.lax.scan(lambda c, row: (c + row, c * row), z[0], z)
    mapped = jax.lax.map(lambda row: row.max(), z)
    return (z**2).mean(), {"mapped": mapped, "running": running, "total": total}


def test_scans_over_samples() -> None:
    model, x = weights_and_samples()
    plan = wh.plan(scanned_samples, model, x, cluster="cpu:1", num_micro_batches=1)
    step = wh.compile(plan, scanned_samples, model, devices=jax.devices()[:1])
    state = step.init_from(model)
    with pytest.raises(wh.WhaleError, match="metrics\\['running'\\]") as raised:
        step.eval(state, x[:13])
    assert "metrics['total']" in str(raised.value)


@pytest.mark.parametrize("count", [1, 4])
def test_random_keys_are_no_values(count: int) -> None:
    def loss(model: Any, x: Any, rng: Any) -> Any:
        return (x @ model).mean(), {"key": rng}

    model, x = weights_and_samples()
    with pytest.raises(wh.WhaleError, match="metrics\\['key'\\] is a random key"):
        wh.plan(loss, model, x, cluster="cpu:2", num_micro_batches=count)
