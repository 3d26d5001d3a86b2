"""Stages with programs of their own compute what one device does, cut anywhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.equality import (
    FLOAT64_TOLERANCE,
    OneDevice,
    build,
    check,
    compiled,
    on_one_device,
)
from tests.stages import scheduled
from whalejax import models
from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)
from whalejax.lowering.pipeline_mpmd.step import SchedulePass
from whalejax.planner.plan.plan import Stages


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

BATCH: Final = 16


def full(*values: Any) -> Any:
    """A case that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.full)


class Marked:
    """As marked: skips, a tied table, a scalar, keys, weights, shapes that differ."""

    def __init__(self, schedule: str = "auto", *, rows: bool = False) -> None:
        self.pipeline = wh.pipeline(schedule=schedule)
        self.rows = rows

    def make(self, key: Any) -> Any:
        keys = iter(jax.random.split(key, 5))

        def weights(*shape: int) -> Any:
            return jax.random.normal(next(keys), shape) * 0.3

        return {
            "table": weights(40, 16),
            "up": weights(16, 24),
            "down": weights(24, 16),
            "mid": weights(16, 32),
            "gain": jnp.asarray(0.7),
            "back": weights(32, 16),
            "bias": jnp.zeros(40),
        }

    def loss(self, model: Any, batch: Any, rng: Any) -> Any:
        with wh.replicate(), self.pipeline:
            with wh.stage():
                x = model["table"][batch["tokens"]]
                h = jnp.tanh(x @ model["up"])
                h = jnp.where(jax.random.bernoulli(rng, 0.8, h.shape), h, 0)
            with wh.stage():
                y = h @ model["down"] + x
                z = jnp.tanh(y @ model["mid"]) * model["gain"]
            with wh.stage():
                out = z @ model["back"] + x * y.mean()
                logits = jax.nn.log_softmax(out @ model["table"].T + model["bias"])
                chosen = jnp.take_along_axis(logits, batch["tokens"][:, None], 1)[:, 0]
                weight = batch["weights"].astype(chosen.dtype)
                total = -(chosen * weight).sum()
        metrics = {"size": jnp.abs(z).mean()}
        if self.rows:
            metrics["chosen"] = chosen
        return wh.WeightedLoss(total, weight.sum()), wh.Aux(metrics=metrics)

    def batch(self, step: int, count: int) -> Any:
        tokens = (np.arange(count) * 7 + step) % 40
        return {"tokens": tokens, "weights": np.arange(count) % 3}

    def job(self) -> wh.Job:
        return wh.Job(
            self.loss,
            self.make,
            self.batch,
            optax.sgd(0.1),
            batch_size=24,
            per_micro_batch=True,
        )


def job_of(name: str, **options: Any) -> wh.Job:
    kinds = {"param_dtype": "float64", "dtype": "float64"}
    return models.job(name, batch_size=BATCH, **{**kinds, **options})


@functools.cache
def one_device(name: str, count: int = 4, **options: Any) -> OneDevice:
    return on_one_device(job_of(name, **options), count)


def stages_of(found: Any) -> Stages:
    stages = found.plan.stages
    assert stages is not None and stages.executor == "mpmd"
    return stages


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        full("auto", 6),
        pytest.param("zb-h1", 3, marks=pytest.mark.smoke),
        full("gpipe", 3),
        full("1f1b", 3),
        full("1f1b-ahead", 6),
        full("zb-h1", 6),
    ],
)
def test_marked_stages(schedule: str, devices: int) -> None:
    with jax.enable_x64(True):
        one = on_one_device(Marked(schedule).job(), 4)
        found = check(one, steps=2, devices=devices)
        state = found.step.init_from(one.model, rng=one.key)
        evaluated = found.step.eval(state, one.batch)
    assert found.error <= FLOAT64_TOLERANCE
    assert stages_of(found).starts == ()
    assert [plan.num_devices for plan in stages_of(found).plans] == [devices // 3] * 3
    assert float(evaluated["loss"]) == pytest.approx(one.loss, rel=1e-12)
    assert float(evaluated["size"]) == pytest.approx(one.metrics["size"], rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [("m6-test", 2, {"remat": "full"}), ("moe-test", 4, {})],
)
def test_models_and_remat_beside_those_of_the_matrix(
    name: str, devices: int, options: Any
) -> None:
    with jax.enable_x64(True):
        found = check(one_device(name), devices=devices, mesh={"stage": 2}, **options)
    assert found.error <= FLOAT64_TOLERANCE
    assert len(stages_of(found).plans) == 2


@pytest.mark.full
def test_stages_may_be_laid_out_differently() -> None:
    """What is replicated before the head and split in it needs no common mesh."""
    with jax.enable_x64(True):
        found = check(one_device("gpt-test", layers=2), devices=4, mesh={"stage": 2})
    first, second = (plan.axis_sizes for plan in stages_of(found).plans)
    assert "tensor" not in first and "tensor" in second
    assert found.error <= FLOAT64_TOLERANCE


class Noisy(nnx.Module):
    """Dropout on one stream in several stages, and running statistics."""

    def __init__(self, key: Any) -> None:
        rngs = nnx.Rngs(params=key, dropout=key)
        kinds: Any = {"rngs": rngs, "param_dtype": jnp.float64}
        self.first = nnx.Linear(16, 24, **kinds)
        self.second = nnx.Linear(24, 24, **kinds)
        self.third = nnx.Linear(24, 4, **kinds)
        self.norm = nnx.BatchNorm(24, dtype=jnp.float64, **kinds)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.drop(jnp.tanh(self.first(x)))
        h = self.norm(self.drop(jnp.tanh(self.second(h))))
        return self.third(self.drop(h))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # Flax
def test_streams_of_random_numbers_and_statistics() -> None:
    def batch(step: int, count: int) -> Any:
        rng = np.random.default_rng(step)
        return {"x": rng.normal(size=(count, 16)), "y": rng.normal(size=(count, 4))}

    def loss(model: Any, batch: Any) -> Any:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    with jax.enable_x64(True):
        job = wh.Job(
            loss, Noisy, batch, optax.sgd(0.1), batch_size=16, per_micro_batch=True
        )
        one = on_one_device(job, 4)
        found = check(one, steps=2, devices=3, mesh={"stage": 3})
        plain = compiled(job, one.model, devices=1, num_micro_batches=4)
        losses = [
            float(step.eval(step.init_from(one.model, rng=one.key), one.batch)["loss"])
            for step in (found.step, plain)
        ]
    assert found.error <= FLOAT64_TOLERANCE
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_stages_that_only_look_up_and_parameters_that_nothing_reads() -> None:
    def loss(model: Any, tokens: Any) -> Any:
        with wh.pipeline(num_micro_batches=2):
            with wh.stage():
                hidden = model["table"][tokens]
            with wh.stage():
                return jnp.tanh(hidden @ model["out"]).mean()

    def make(key: Any) -> Any:
        table, out = jax.random.normal(key, (40, 16)), jnp.ones((16, 4))
        return {"out": out, "table": table, "unread": jnp.ones(8)}

    with jax.enable_x64(True):
        job = wh.Job(loss, make, lambda i, n: np.arange(n) % 40, optax.sgd(0.1), 16)
        found = check(on_one_device(job, 2), devices=4)
    assert found.error <= FLOAT64_TOLERANCE
    assert "unread" in str(found.plan)


@pytest.mark.full
@pytest.mark.parametrize("schedule", [full("gpipe"), full("1f1b"), "zb-h1"])
def test_what_waits_is_what_the_table_says(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = scheduled(models.job("gpt-test", layers=4, batch_size=BATCH), 2, schedule)
    model = build(job)
    step = compiled(job, model, devices=2, num_micro_batches=8)
    runner = step._runner
    assert isinstance(runner, StageProgramsExecutor)
    most = [0, 0]
    do = SchedulePass.do

    def counted(self: SchedulePass, one: Any) -> None:
        do(self, one)
        for place in (0, 1):
            held = sum(1 for at, _ in self.live if at == place)
            most[place] = max(most[place], held)

    monkeypatch.setattr(SchedulePass, "do", counted)
    step(step.init_from(model), job.batch_at(0))
    assert tuple(most) == runner.table.in_flight


def _stepped(job: wh.Job, model: Any, **options: Any) -> tuple[Any, Any]:
    step = compiled(job, model, num_micro_batches=4, **options)
    state = step.init_from(model)
    for index in range(2):
        state, _ = step(state, job.batch_at(index))
    return step, state


def _pairs(a: Any, b: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Leaves of two trees as plain arrays."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return [(np.asarray(x), np.asarray(y)) for x, y in leaves]


@pytest.mark.full
def test_clipping_by_the_norm_over_all_stages_and_checkpoints(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        job = job_of("gpt-test", layers=2)
        model = build(job)
        clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
        options: Any = {"optimizer": clipped, "precision": "f32"}
        apart, state = _stepped(job, model, devices=4, mesh={"stage": 2}, **options)
        whole, expected = _stepped(job, model, devices=1, **options)
        for a, b in zip(
            *map(jax.tree.leaves, (state.params, expected.params)), strict=True
        ):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-9)
        for name, (source, target, held) in {
            "apart": (apart, whole, state),
            "whole": (whole, apart, expected),
        }.items():
            source.save(tmp_path / name, held)
            read = target.restore(tmp_path / name)
            kept = (held.params, held.opt_state, held.step)
            found = (read.params, read.opt_state, read.step)
            for a, b in _pairs(kept, found):
                np.testing.assert_array_equal(a, b)
            target(read, job.batch_at(2))
        whole_loss = jax.jit(job.loss_fn)(state.model, job.batch_at(0))
        assert float(whole_loss) == pytest.approx(
            float(jax.jit(job.loss_fn)(expected.model, job.batch_at(0))), rel=1e-9
        )
        apart(state, job.batch_at(0))
        with pytest.raises(wh.WhaleError, match="was donated to a step"):
            apart(state, job.batch_at(0))


@pytest.mark.full
def test_scaled_losses() -> None:
    precision: Any = "f16"
    job = models.job("gpt-test", layers=2, batch_size=BATCH)
    one = on_one_device(job, 4)
    narrow = on_one_device(job, 4, precision=precision)
    plain = dataclasses.replace(one, job=job)
    found = check(plain, devices=2, mesh={"stage": 2}, precision=precision)
    off = max(
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(narrow.gradients, one.gradients, strict=True)
        if np.linalg.norm(b) > 1e-3
    )
    assert found.distance <= 1.5 * off
    assert stages_of(found).plans[0].precision == precision


@pytest.mark.full
def test_the_number_of_stages_is_found() -> None:
    job = models.job("gpt-test", layers=4, batch_size=BATCH)

    def loss(model: Any, batch: Any) -> Any:
        with wh.pipeline():
            return job.loss_fn(model, batch)

    plan = wh.plan(
        loss, build(job), job.batch_at(0), optimizer=job.optimizer, cluster="h100:4"
    )
    assert plan.axis_sizes["stage"] in (2, 4)
    tried = {c.layout.split(",")[0].split(" ×")[0] for c in plan.candidates}
    assert tried == {"stage 2", "stage 4"}
    best = min(c.step_seconds for c in plan.candidates if c.fits)
    assert plan.time.step_seconds <= 1.1 * best  # 1F1B unless another is surely faster


@pytest.mark.full
def test_plans_are_saved_and_read(tmp_path: Path) -> None:
    job = models.job("gpt-test", layers=2, batch_size=BATCH)
    model = build(job)
    plan = wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0),
        optimizer=job.optimizer,
        cluster="h100:4",
        mesh={"stage": 2},
    )
    plan.save(tmp_path / "plan.json")
    read = wh.Plan.load(tmp_path / "plan.json")
    assert read == plan and read.hash == plan.hash
    assert "stages have programs of their own" in str(plan)
    assert "head.kernel" in plan.why("head.kernel")
    for refused, text in {
        plan.mesh: "every stage of this plan has a mesh",
        plan.flax_rules: "layouts of their own",
        plan.maxtext_flags: "layouts of their own",
    }.items():
        with pytest.raises(wh.WhaleError, match=text):
            refused()
    step = wh.compile(
        read, job.loss_fn, model, optimizer=job.optimizer, devices=jax.devices()[:4]
    )
    state, metrics = step(
        step.init(job.make_model, rng=jax.random.key(0)), job.batch_at(0)
    )
    assert np.isfinite(float(metrics["loss"])) and int(state.step) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.MultiSteps(optax.adam(1e-3), 2), "cond"),
        (optax.apply_if_finite(optax.adam(1e-3), 3), "concatenate"),
    ],
)
def test_optimizers_that_take_all_at_once_are_refused(
    optimizer: Any, name: str
) -> None:
    job = models.job("gpt-test", layers=2, batch_size=BATCH)
    options: Any = {"mesh": {"stage": 2}, "num_micro_batches": 2}
    model, batch = build(job), job.batch_at(0)
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(
            job.loss_fn,
            model,
            batch,
            optimizer=optimizer,
            cluster="h100:2",
            **options,
        )
    assert f"several stages in one operation ({name})" in str(caught.value)
    step = compiled(job, model, devices=2, **options)
    plan = dataclasses.replace(step.plan, optimizer_bytes=None)
    with pytest.raises(wh.WhaleError, match="several stages in one operation"):
        wh.compile(
            plan,
            job.loss_fn,
            model,
            optimizer=optimizer,
            devices=jax.devices()[:2],
        )


def twice(model: Any, x: Any) -> Any:
    """A second stage whose result the first reads again."""
    h, z = x, x
    for turn in range(2):
        with wh.pipeline():
            with wh.stage():
                h = jnp.tanh((h + z) @ model["a"])
            with wh.stage():
                z = jnp.tanh(h @ model["b"])
        del turn
    return z.mean()


def one_mark(model: Any, x: Any) -> Any:
    with wh.pipeline(), wh.stage():
        return jnp.tanh(x @ model["a"] @ model["b"]).mean()


def two_marks(model: Any, x: Any) -> Any:
    with wh.pipeline(schedule="interleaved"):
        with wh.stage():
            h = x @ model["a"]
        with wh.stage():
            return jnp.tanh(h @ model["b"]).mean()


def wide_marks(model: Any, x: Any) -> Any:
    with wh.pipeline():
        with wh.stage(devices=1):
            h = x @ model["a"]
        with wh.stage(devices=3):
            return jnp.tanh(h @ model["b"]).mean()


def nested_marks(model: Any, x: Any) -> Any:
    with wh.pipeline(), wh.stage():
        h = x @ model["a"]
        with wh.stage():
            return jnp.tanh(h @ model["b"]).mean()


def three_marks(model: Any, x: Any) -> Any:
    with wh.pipeline():
        with wh.stage():
            h = x @ model["a"]
        with wh.stage():
            h = jnp.tanh(h @ model["b"])
        with wh.stage():
            return h.mean()


def marks_in_a_loop(model: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> tuple[Any, None]:
        with wh.stage():
            h = x @ model["a"]
        with wh.stage():
            return jnp.tanh(h @ model["b"]), None

    with wh.pipeline():
        return jax.lax.scan(body, x, length=3)[0].mean()


def a_mark_in_a_loop(model: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> tuple[Any, None]:
        with wh.stage():
            h = x @ model["b"]
        return jnp.tanh(h), None

    with wh.pipeline():
        with wh.stage():
            x = x @ model["a"]
        return jax.lax.scan(body, x, length=3)[0].mean()


def any_number(model: Any, x: Any) -> Any:
    with wh.pipeline():
        return plain(model, x)


def in_five_parts(model: Any, x: Any) -> Any:
    with wh.pipeline(num_stages=2, num_micro_batches=5):
        return plain(model, x)


def plain(model: Any, x: Any) -> Any:
    return jnp.tanh(x @ model["a"] @ model["b"]).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "options", "texts"),
    [
        (
            twice,
            {},
            ("values flow backwards between stages", "test_mpmd.py:", "stage 1"),
        ),
        (one_mark, {}, ("one stage is marked, and a pipeline needs two",)),
        (two_marks, {}, ("give each stage one", "choose another schedule")),
        (
            three_marks,
            {"cluster": "h100:2"},
            ("marks ask for 3 devices", "Mark at most 2 stages, or take 3 devices"),
        ),
        (wide_marks, {}, ("stages have equally many devices so far",)),
        (
            marks_in_a_loop,
            {},
            ("test_mpmd.py:", "has marks of stage 0, 1", "put marks around it"),
        ),
        (a_mark_in_a_loop, {}, ("has marks of stage 1 and operations of no stage",)),
        (nested_marks, {}, ("is inside stage", "not allowed")),
        (any_number, {"cluster": "h100:7"}, ("no number of stages that 7 devices",)),
        (plain, {"mesh": {"stage": 4}}, ("at most 2 parts", "Use at most 2")),
        (plain, {"mesh": {"stage": 2}, "num_micro_batches": 5}, ("5 micro-batches",)),
        (
            in_five_parts,
            {},
            ("asks for 5 micro-batches", "do not divide by 5. Use a batch"),
        ),
        (plain, {"mesh": {"stage": 2}, "offload": "optimizer"}, ("host memory",)),
        (
            plain,
            {"mesh": {"stage": 2}, "cluster": wh.cluster("h100:8").with_memory(1000)},
            ("needs", "on a device and there are", "short, on stage "),
        ),
    ],
)
def test_what_cannot_be_is_said(
    loss: Callable[..., Any], options: dict[str, Any], texts: tuple[str, ...]
) -> None:
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    options = {"cluster": "h100:8", **options}
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(loss, {"a": w, "b": w}, x, optimizer=optax.adam(1e-3), **options)
    for text in texts:
        assert text in str(caught.value)


def test_an_open_number_of_micro_batches_is_cut_like_a_fixed_one() -> None:
    """Activations of a batch fill a device; those of a micro-batch do not."""
    wide = jax.ShapeDtypeStruct((2048, 8192), "float32")
    narrow = jax.ShapeDtypeStruct((8192, 2048), "float32")
    weights = {f"w{number}": {"a": wide, "b": narrow} for number in range(8)}

    def loss(net: Any, x: Any) -> Any:
        for layer in net.values():
            x = x + jax.nn.gelu(x @ layer["a"]) @ layer["b"]
        return (x**2).mean()

    def starts(**options: Any) -> tuple[str, ...]:
        plan = wh.plan(
            loss,
            weights,
            jax.ShapeDtypeStruct((64, 1024, 2048), "float32"),
            optimizer=optax.adam(1e-3),
            cluster="v100-32:1x4",
            mesh={"stage": 4},
            **options,
        )
        assert plan.stages is not None and plan.num_micro_batches == 32
        return plan.stages.starts

    assert starts() == starts(num_micro_batches=32)
