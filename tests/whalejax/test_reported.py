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
from whalejax.capture import capture
from whalejax.user_code.losses import ReportedValue


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
            "most": z.max(0),
            "some": (z < 0).any(),
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
            metrics={"z": z, "pred": z.argmax(-1), "least": z.min()},
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


@pytest.mark.sampled(1)
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
        np.testing.assert_allclose(found["most"], z.max(0), rtol=1e-5)
        assert int(found["some"]) == 1
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
        np.testing.assert_allclose(found["least"], z.min(), rtol=1e-4)


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("cpu:2", {"mesh": {"data": 2}}),
        ("cpu:8", {"shares": [8]}),
        ("cpu:8", {"shares": [8, 0]}),
        ("h100:8", {}),
    ],
)
def test_what_is_reported_as_it_was_given_has_a_price(
    cluster: str, options: dict[str, Any]
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        each = (jnp.tanh(batch["x"] @ model["w"]) ** 2).sum(-1)
        return each.mean(), wh.Aux(samples={"number": batch["number"]})

    model = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    batch = {
        "x": jax.ShapeDtypeStruct((BATCH, 8), jnp.float32),
        "number": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    plan = wh.plan(loss, model, batch, cluster=cluster, **options)
    assert plan.time.step_seconds > 0
    if options == {"mesh": {"data": 2}}:
        (gathered,) = (c for c in plan.collectives if c.what == "border")
        # All numbers of the batch, once in each micro-batch, nowhere but at its end.
        assert (gathered.kind, gathered.axes) == ("all-gather", ("data",))
        assert (gathered.payload_bytes, gathered.count) == (4 * BATCH, 1)


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
    assert isinstance(found, ReportedValue) and found.how == "rows"
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
        (lambda z: z.max(), "max"),
        (lambda z: z.min(0), "min"),
        (lambda z: -z.max(0, keepdims=True), "min"),
        (lambda z: 1 - jnp.tanh(jnp.stack([z.min(), z.min()])), "max"),
        (lambda z: jnp.maximum(z.max(0), 1.0).max(), "max"),
        (lambda z: z.astype(int).max(), "max"),
        (lambda z: (z > 0).any(), "max"),
        (lambda z: (z > 0).all(0).astype(int), "min"),
        (lambda z: ~(z > 0).all(0).all(), "max"),
        (lambda z: jnp.linspace(0.0, 1.0, 7), "same"),
        (lambda z: jnp.zeros(16), "same"),
        (lambda z: jnp.int32(10), "same"),
        (lambda z: 3, "same"),
    ],
)
def test_means_sums_ends_and_what_no_sample_changes(
    report: Any, how: str | None, count: int
) -> None:
    found = merged(report, count)
    assert (found.how if isinstance(found, ReportedValue) else None) == how


@pytest.mark.parametrize(
    "report, why",
    [
        (lambda z: z[:4], "has some of the samples, or mixes them"),
        (lambda z: z[::-1], "has some of the samples, or mixes them"),
        (lambda z: jnp.sort(z, axis=0), "has some of the samples, or mixes them"),
        (lambda z: z.reshape(4, -1), "has some of the samples, or mixes them"),
        (lambda z: z @ z.T, "has samples along several dimensions"),
        (lambda z: z[0], "is of one sample of the micro-batch"),
        (lambda z: z[:16], "is made in another way where the batch has more"),
        (lambda z: z[:20], "is made in another way where the batch has more"),
        (lambda z: jnp.triu(z), "cannot be computed from the values of micro-bat"),
        (lambda z: jnp.arange(len(z)), "depends on more than one sample in every row"),
        (
            lambda z: z - z.mean(0, keepdims=True),
            "is neither a sum nor a mean over the samples",
        ),
        (lambda z: jax.nn.softmax(z, 0), "is neither a sum nor a mean over the"),
        (lambda z: jnp.sort(z.mean(0)), "is neither a sum nor a mean over the samples"),
        (lambda z: z.argmax(0), "is neither a sum nor a mean over the samples"),
        (lambda z: z.argmax(0).max(), "is neither a sum nor a mean over the samples"),
        (lambda z: z.max().astype(int), "is neither a sum nor a mean over the samples"),
        (lambda z: z.reshape(4, -1).sum(0), "cannot be put together"),
        (lambda z: (z > 0).sum().astype(bool), "is neither a sum nor a mean over the"),
        (lambda z: (z > 0).sum() // 2, "is neither a sum nor a mean over the samples"),
        (
            lambda z: jax.lax.cond(
                z.mean() > 0, lambda z: z.mean(0), lambda z: z.mean(0) + 1, z
            ),
            "is neither a sum nor a mean over the samples",
        ),
        (lambda z: jnp.ones((500, 2))[(z > 0).sum()], "is neither a sum nor a"),
        (lambda z: z[(jnp.arange(len(z)) + 1) % len(z)], "cannot be put together"),
        (lambda z: z.var(0), "is neither a sum nor a mean over the samples"),
        (lambda z: z.max(0) * 2, "is neither a sum nor a mean over the samples"),
        (
            lambda z: z - z.max(0, keepdims=True),
            "is neither a sum nor a mean over the samples",
        ),
        (lambda z: z.max(0) - z.min(0), "is neither a sum nor a mean over the samples"),
        (lambda z: z.max(0) + len(z), "is neither a sum nor a mean over the samples"),
        (lambda z: jax.nn.logsumexp(z, 0), "is neither a sum nor a mean over the"),
        (lambda z: z.sum(0) / len(z) ** 2, "depends on the number of samples"),
        (lambda z: len(z) ** 2, "depends on the number of samples"),
        (lambda z: z.mean(0) + z.sum(0), "is neither a sum nor a mean over the"),
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
    text = "metrics.'aux'. of shape .1, 10. is of a loss that cannot be traced with"
    with pytest.raises(wh.WhaleError, match=text):
        merged(lambda z: z.reshape(1, 10), 32)
    assert not isinstance(merged(lambda z: z.reshape(1, 10).sum(), 32), ReportedValue)


def test_a_plan_that_chooses_micro_batches_refuses_too() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = x
        for part in w:
            h = jnp.tanh(h @ part)
        return h.mean(), h[:5]

    w = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((2**20, 4096), jnp.float32)
    text = "metrics\\['aux'\\] of shape \\(5, 4096\\) has some of the samples"
    with pytest.raises(wh.WhaleError, match=text) as raised:
        wh.plan(loss, w, x, cluster="h100:1", remat="none", loss_chunks=1)
    assert "the planner chose num_micro_batches=" in str(raised.value)


EXACT: Final[dict[str, Any]] = {
    "hits": lambda z: z.argmax(-1) == 3,
    "z": lambda z: z,
    "turned": lambda z: z.T,
    "pred": lambda z: z.argmax(-1),
    "top": lambda z: jax.lax.top_k(z, 2),
    "flat": lambda z: z.ravel(),
    "folded": lambda z: z.reshape(-1, 4),
    "phase": lambda z: jnp.exp(jax.lax.complex(z[:, 0], z[:, 1])),
    "softmax": lambda z: jax.nn.softmax(z, -1),
    "running": lambda z: jnp.cumsum(z, -1),
    "mapped": lambda z: jax.vmap(lambda row: row / (1 + row.max()))(z),
    "high": lambda z: (z > 0).astype(int),
    "share": lambda z: (z.argmax(-1) == 0).mean(),
    "classes": lambda z: z.mean(0),
    "stacked": lambda z: jnp.stack([z.mean(), (z**2).mean()]),
    "moments": lambda z: {"two": (z**2).mean() * 2.0 - 1.0},
    "by hand": lambda z: (z**2).sum() / len(z),
    "right": lambda z: (z.argmax(-1) == 0).sum(),
    "each class": lambda z: (z > 0).sum(0),
    "histogram": lambda z: jnp.zeros(8, int).at[z.argmax(-1)].add(1),
    "total": lambda z: z.sum(),
    "samples": len,
    "most": lambda z: z.max(),
    "size": lambda z: jnp.abs(z).max(),
    "least": lambda z: z.min(0),
    "below": lambda z: 1.0 - jnp.tanh(z.max()),
    "whole": lambda z: z.astype(int).max(),
    "last": lambda z: z.argmax(-1).max(),
    "any": lambda z: (z > 3).any(0).astype(int),
    "all": lambda z: (z > -3).all(0).astype(int),
    "none": lambda z: (~(z > 100).any()).astype(int),
    "some truths": lambda z: (z > 3).any(0),
    "no truth": lambda z: ~(z > 100).any(),
    "truth": lambda z: jnp.bool_(True),
    "ten": lambda z: jnp.int32(10),
    "three": lambda z: 3,
    "numbers": lambda z: jnp.arange(3),
    "half": lambda z: jnp.full(2, 0.5),
}
"""Values that micro-batches, or passes over samples, put together exactly."""

NOTED: Final[dict[str, Any]] = {
    "spread": lambda z: z.var(),
    "root": lambda z: jnp.sqrt((z**2).mean()),
    "norm": lambda z: jnp.linalg.norm(z),
    "median": lambda z: jnp.median(z),
    "peak": lambda z: jax.nn.logsumexp(z),
    "twice": lambda z: z.max() * 2.0,
    "balance": lambda z: (z.mean(0) * (z > 0).mean(0)).sum(),
    "one": lambda z: z[0, 0],
    "some": lambda z: z[:4].mean(),
    "both": lambda z: z.mean() + z.sum(),
    "inverse": lambda z: 1.0 / len(z),
}
"""Numbers of which micro-batches report the mean, and the plan says so."""

REFUSED: Final[dict[str, Any]] = {
    "first": lambda z: z[:4],
    "best": lambda z: z.argmax(0),
    "where": lambda z: z[:, 0].argmax(),
    "rounded": lambda z: z.max().astype(int),
    "upper": lambda z: jnp.triu(z @ z.T),
    "quarters": lambda z: z.reshape(4, -1),
    "kinds": lambda z: jnp.unique(z[:, 0] > 0, size=2).astype(int),
    "shared": lambda z: jax.nn.softmax(z, 0),
    "centred": lambda z: z - z.mean(0, keepdims=True),
    "spread": lambda z: z.var(0),
    "peak": lambda z: jax.nn.logsumexp(z, axis=0),
    "sorted": lambda z: jnp.sort(z, axis=0),
    "turned": lambda z: z[::-1],
    "sums": lambda z: jnp.cumsum(z, 0),
    "order": lambda z: jnp.arange(len(z)),
    "pairs": lambda z: (z > 0).sum() // 2,
    "many": lambda z: (z > 0).sum() > 3,
    "squares": lambda z: len(z) ** 2,
    "scanned": lambda z: jax.lax.scan(lambda c, row: (c + row, c), z[0], z)[1],
    "range": lambda z: z.max(0) - z.min(0),
}
"""Values of which no parts can be put together."""


def masked(z: Any, x: Any) -> tuple[Any, Any, Any]:
    """A weight that differs between micro-batches, its mean, and a plain mean."""
    mask = (x[:, 0] > 0).astype(z.dtype)
    each = (z**2).sum(-1)
    mean = (z[:, 0] * mask).sum() / jnp.maximum(mask.sum(), 1.0)
    return (each * mask).sum(), mask.sum(), mean


def reporting(*tables: Any, weighted: bool = False) -> Any:
    """A loss that reports all values of some tables."""

    def loss(model: Any, x: Any) -> Any:
        z = x @ model
        found = {name: report(z) for table in tables for name, report in table.items()}
        if not weighted:
            return (z**2).mean(), found
        total, weight, mean = masked(z, x)
        return wh.WeightedLoss(total, weight), {**found, "masked": mean}

    return loss


def check_table(found: Any, table: Any, model: Any, x: Any) -> None:
    z = jnp.asarray(x @ model)
    # In one program: alone, each operation is compiled anew for each shape.
    wanted = jax.jit(lambda z: {name: report(z) for name, report in table.items()})(z)
    own = {name: found[name] for name in wanted}
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(own)[0],
        jax.tree.leaves(wanted),
        strict=True,
    ):
        assert a.shape == np.shape(b), path
        assert (a.dtype == bool) == (jnp.asarray(b).dtype == bool), path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(path))
    if "masked" in found:
        np.testing.assert_allclose(found["masked"], masked(z, x)[2], rtol=1e-4)


def weights_and_samples() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(3))
    x = np.asarray(jax.random.normal(keys[1], (BATCH, 8)))
    return np.asarray(jax.random.normal(keys[0], (8, 8))), x


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "count, weighted", [(1, False), (1, True), (2, False), (4, False), (4, True)]
)
def test_the_table_is_what_one_device_reports(count: int, weighted: bool) -> None:
    model, x = weights_and_samples()
    loss, tx = reporting(EXACT, weighted=weighted), optax.sgd(0.1)
    options: Any = {"mesh": {"data": 2}, "num_micro_batches": count}
    plan = wh.plan(loss, model, x, optimizer=tx, cluster="cpu:2", **options)
    assert not [note for note in plan.notes if "metrics[" in note]
    step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices()[:2])
    state = step.init_from(model)
    for samples in (BATCH, 13):
        found = step.eval(state, x[:samples])
        check_table(found, EXACT, model, x[:samples])
    check_table(step(state, x)[1], EXACT, model, x)


@pytest.mark.full
def test_one_micro_batch_reports_all_as_it_is() -> None:
    model, x = weights_and_samples()
    for table in (NOTED, REFUSED):
        plan, trained, evaluated = ran(reporting(table), model, x, mesh={"data": 2})
        assert plan.num_micro_batches == 1
        for found in (trained, evaluated):
            check_table(found, table, model, x)


@pytest.mark.full
def test_a_mean_that_may_be_another_number_is_noted() -> None:
    model, x = weights_and_samples()
    options = {"mesh": {"data": 2}, "num_micro_batches": 4}
    plan, *reports = ran(reporting(NOTED, EXACT), model, x, **options)
    (note,) = [text for text in plan.notes if "metrics[" in text]
    names = note.partition(": reported as the mean over the 4 micro-batches")[0]
    assert names.split(", ") == [f"metrics[{name!r}]" for name in sorted(NOTED)]
    assert "is neither a sum nor a mean over the samples" in note
    assert "wh.Aux(means={...}) says that" in note and "num_micro_batches=1" in note
    parts = [jnp.asarray(x[m::4] @ model) for m in range(4)]
    for found in reports:
        check_table(found, EXACT, model, x)
        for name, report in NOTED.items():
            wanted = np.mean([report(z) for z in parts])
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_training_refuses_all_that_is_unclear_at_once(count: int) -> None:
    model, x = weights_and_samples()
    with pytest.raises(wh.WhaleError) as raised:
        loss = reporting(REFUSED)
        wh.plan(loss, model, x, cluster="cpu:2", num_micro_batches=count)
    text = str(raised.value)
    assert [n for n in REFUSED if f"metrics[{n!r}]" not in text] == []
    assert "wh.Aux(samples={...})" in text


@pytest.mark.parametrize("table", [NOTED, REFUSED], ids=["noted", "refused"])
def test_fewer_samples_are_refused_if_a_value_is_unclear(table: Any) -> None:
    model, x = weights_and_samples()
    loss = reporting(table)
    plan = wh.plan(loss, model, x, cluster="cpu:1", num_micro_batches=1)
    step = wh.compile(plan, loss, model, devices=jax.devices()[:1])
    state = step.init_from(model)
    with pytest.raises(wh.WhaleError) as raised:
        step.eval(state, x[:13])
    text = str(raised.value)
    assert [n for n in table if f"metrics[{n!r}]" not in text] == []
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
