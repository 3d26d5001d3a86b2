"""Stages in lockstep: they compute what one device does; what they cannot, is said."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.crossing import crossed
from tests.equality import (
    FLOAT64_TOLERANCE,
    OneDevice,
    build,
    check,
    compiled,
    distance,
    on_one_device,
    peak_bytes,
)
from whalejax import hlo, jobs, models
from whalejax.lowering.pipeline_spmd.lockstep_executor import turns_of
from whalejax.planner.pipeline.schedules import schedule


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

BATCH: Final = 16


def job_of(name: str, *, layers: int = 4, **options: Any) -> wh.Job:
    kinds = {"param_dtype": "float64", "dtype": "float64"}
    return models.job(name, layers=layers, batch_size=BATCH, **{**kinds, **options})


@functools.cache
def gpt(**options: Any) -> OneDevice:
    """A scanned GPT of four layers on one device, in float64."""
    count = options.pop("count", 4)
    return on_one_device(job_of("gpt-test", scan_layers=True, **options), count)


class Keyed:
    """Layers in one scan that take keys, between a table that both ends read."""

    def __init__(self, pipeline: Any = None, length: int = 4) -> None:
        self.pipeline = pipeline
        self.length = length

    def make(self, key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "table": jax.random.normal(a, (40, 16)) * 0.3,
            "layers": {
                "up": jax.random.normal(b, (self.length, 16, 24)) * 0.2,
                "down": jax.random.normal(c, (self.length, 24, 16)) * 0.2,
            },
        }

    def layer(self, x: Any, layer: Any) -> tuple[Any, None]:
        weights, key = layer
        hidden = jnp.tanh(x @ weights["up"])
        kept = jax.random.bernoulli(key, 0.8, hidden.shape)
        return x + jnp.where(kept, hidden, 0) @ weights["down"], None

    def loss(self, model: Any, batch: Any, rng: Any) -> wh.WeightedLoss:
        x = model["table"][batch["tokens"]]
        layers = model["layers"], jax.random.split(rng, self.length)
        if self.pipeline is None:
            x, _ = jax.lax.scan(self.layer, x, layers)
        else:
            with self.pipeline:
                x, _ = jax.lax.scan(self.layer, x, layers)
        logits = jax.nn.log_softmax(x @ model["table"].T)
        chosen = jnp.take_along_axis(logits, batch["tokens"][:, None], 1)[:, 0]
        weights = batch["weights"].astype(chosen.dtype)
        return wh.WeightedLoss(-(chosen * weights).sum(), weights.sum())

    def batch(self, step: int, count: int) -> Any:
        tokens = (np.arange(count) * 7 + step) % 40
        return {"tokens": tokens, "weights": np.arange(count) % 3}

    def job(self) -> wh.Job:
        return wh.Job(
            self.loss, self.make, self.batch, optax.sgd(0.1), batch_size=BATCH
        )


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("devices", "mesh", "options"),
    [
        (4, {"stage": 4}, {"remat": "full"}),
        (8, {"stage": 2, "data": 2, "tensor": 2}, {"sequence_parallel": True}),
    ],
    ids=["remat", "sequence"],
)
def test_stages_compute_what_one_device_does(
    devices: int, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        found = check(gpt(), steps=3, devices=devices, mesh=mesh, **options)
    assert found.plan.axis_sizes == mesh
    assert found.compilations == 1
    assert found.error <= FLOAT64_TOLERANCE


@pytest.mark.full
def test_one_micro_batch() -> None:
    with jax.enable_x64(True):
        found = check(gpt(count=1), devices=2, mesh={"stage": 2})
    assert found.error <= FLOAT64_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh"),
    crossed(["1f1b", "gpipe"], [{"stage": 4}, {"stage": 2, "data": 2}]),
)
def test_keys_weights_and_shared_tables(name: str, mesh: dict[str, int]) -> None:
    mark = wh.pipeline(num_stages=mesh["stage"], num_micro_batches=4, schedule=name)
    with jax.enable_x64(True):
        one = on_one_device(Keyed(mark).job(), 4)
        found = check(one, steps=2, devices=4, mesh={**mesh, "tensor": 1})
        step = found.step
        state = step.init_from(one.model, rng=one.key)
        evaluated = step.eval(state, one.batch)
    assert found.error <= FLOAT64_TOLERANCE
    assert found.plan.stages is not None
    assert found.plan.stages.schedule == f"{name}-lockstep"
    assert float(evaluated["loss"]) == pytest.approx(one.loss, rel=1e-12)


@pytest.mark.full
def test_grouped_heads_seen_in_another_form() -> None:
    with jax.enable_x64(True):
        one = on_one_device(job_of("llama-test"), 2)
        found = check(one, devices=4, mesh={"stage": 2, "tensor": 2})
    assert found.error <= FLOAT64_TOLERANCE


@functools.cache
def program(count: int, batch: int = BATCH) -> tuple[wh.Plan, Any]:
    """A plan of two stages, and its compiled program."""
    job = job_of(
        "gpt-test", scan_layers=True, annotated=False, dtype=None, param_dtype="float32"
    )
    job = wh.Job(
        job.loss_fn, job.make_model, job.batch, job.optimizer, batch_size=batch
    )
    step = compiled(
        job, build(job), devices=2, mesh={"stage": 2}, num_micro_batches=count
    )
    return step.plan, step.lower().compile()


def test_stages_hand_on_activations_and_add_up_what_all_hold() -> None:
    plan, compiled_step = program(4)
    found = hlo.collectives(compiled_step.as_text())
    planned: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for c in plan.collectives:
        planned[c.kind] += c.payload_bytes * plan.times(c)
        counts[c.kind] += plan.times(c)
    measured: Counter[str] = Counter()
    for i in found.instructions:
        measured[i.kind] += i.payload_bytes * i.count
    assert set(measured) == {"collective-permute", "all-reduce"}
    assert measured["collective-permute"] == planned["collective-permute"]
    assert counts["collective-permute"] == 2 * (4 + 2)  # two ways, M + 2 (S - 1) turns
    # The loss's total and weight go with the gradients.
    assert measured["all-reduce"] == planned["all-reduce"] + 8


@pytest.mark.full
def test_memory_does_not_grow_with_micro_batches() -> None:
    few, many = (
        program(count, 4 * count)[1].memory_analysis().temp_size_in_bytes
        for count in (8, 32)
    )
    assert many <= 1.02 * few


def test_memory_is_as_predicted() -> None:
    plan, compiled_step = program(4)
    peak = peak_bytes(compiled_step)
    assert plan.memory.total_bytes == pytest.approx(peak, rel=0.15)


def test_turns_are_those_of_the_table() -> None:
    turns = turns_of(schedule("1f1b-lockstep", 3, 5))
    assert turns.shape == (5 + 2 * 2, 3, 2)
    for stage in range(3):
        ahead, back = turns[:, stage, 0], turns[:, stage, 1]
        assert [*ahead[ahead >= 0]] == [*range(5)] == [*back[back >= 0]]
        assert ahead[stage] == 0 and back[2 * 2 - stage] == 0


@pytest.mark.full
def test_checkpoints_move_between_plans_with_and_without_stages(
    tmp_path: Path,
) -> None:
    job = job_of("gpt-test", scan_layers=True, dtype=None, param_dtype="float32")
    model = build(job)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    options = {"optimizer": tx, "num_micro_batches": 4}
    staged = compiled(job, model, devices=4, mesh={"stage": 4}, **options)
    whole = compiled(job, model, devices=2, mesh={"data": 1, "tensor": 2}, **options)
    state, _ = staged(staged.init_from(model), job.batch_at(0))
    staged.save(tmp_path / "one", state)
    other = whole.restore(tmp_path / "one")
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((other.params, other.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    whole.save(tmp_path / "two", other)
    again = staged.restore(tmp_path / "two")
    _, one = staged(again, job.batch_at(1))
    _, two = whole(other, job.batch_at(1))
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-5)


@pytest.mark.full
def test_clipping_sees_all_stages() -> None:
    job = job_of("gpt-test", scan_layers=True, dtype=None, param_dtype="float32")
    model = build(job)
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    after = []
    for mesh, devices in (({"stage": 4}, 4), ({"data": 1}, 1)):
        step = compiled(
            job, model, devices=devices, mesh=mesh, optimizer=tx, num_micro_batches=4
        )
        state, _ = step(step.init_from(model), job.batch_at(0))
        after.append([np.asarray(x) for x in jax.tree.leaves(state.params)])
    for a, b in zip(*after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_scaled_losses() -> None:
    job = models.job("gpt-test", scan_layers=True, layers=4, batch_size=BATCH)
    model = build(job)
    losses, gradients = [], []
    for mesh, devices in (({"stage": 2}, 2), ({"data": 1}, 1)):
        step = compiled(
            job,
            model,
            devices=devices,
            mesh=mesh,
            precision="f16",
            num_micro_batches=4,
        )
        state, metrics = step(step.init_from(model), job.batch_at(0))
        losses.append(float(metrics["loss"]))
        leaves = jax.tree.leaves(state.opt_state["gradient"])
        gradients.append([np.asarray(g) for g in leaves])
        assert int(metrics["skipped_steps"]) == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert distance(*gradients) <= 0.05


@pytest.mark.full
def test_the_planner_chooses_the_micro_batches_and_says_so() -> None:
    job = models.job("gpt-test", scan_layers=True, layers=4)
    plan = wh.plan(
        job.loss_fn,
        build(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        cluster="h100:4",
        mesh={"stage": 4},
    )
    assert plan.num_micro_batches > 1
    assert plan.time.bubble_seconds > 0
    text = str(plan)
    assert "stage 4" in text and "1f1b-lockstep, 1 layer each" in text
    again = wh.Plan.from_document(plan.document())
    assert again == plan and again.hash == plan.hash
    layers = plan.leaf("blocks.up.kernel")
    assert layers.shape[0] == 4 and layers.param_spec[0][0] == "stage"


def test_attention_in_blocks_is_refused() -> None:
    job = models.job("gpt-test", scan_layers=True)
    with pytest.raises(wh.WhaleError, match="do not run attention in blocks in this"):
        wh.plan(
            job.loss_fn,
            build(job),
            job.batch_at(0),
            cluster="h100:2",
            mesh={"stage": 2},
            attention="ring",
        )


def summing(model: Any, x: Any) -> Any:
    x, sums = jax.lax.scan(lambda x, w: (x @ w, x.sum()), x, model["layers"])
    return x.mean() + sums.mean()


def giving(model: Any, x: Any) -> Any:
    x, means = jax.lax.scan(lambda x, w: (x @ w, x.mean()), x, model["layers"])
    return (x @ model["head"]).mean() + means.mean()


@pytest.mark.parametrize("schedule", ["auto", "gpipe", "zb-h1"])
def test_a_scan_that_gives_values_is_told_to_carry_them(schedule: str) -> None:
    """What one program lacks comes first, and a warning points at the caller."""
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    stack = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    carry = "Let the scan carry these values: return (x, total + "

    def planned(loss: Any, stages: int) -> wh.Plan:
        def asked(model: Any, x: Any) -> Any:
            with wh.pipeline(num_stages=stages, schedule=schedule):
                return loss(model, x)

        model = {"layers": stack, "head": w}
        adam = optax.adam(1e-3)
        return wh.plan(asked, model, x, optimizer=adam, cluster="h100:4")

    with pytest.warns(UserWarning, match="one of 2 stages takes") as warned:
        plan = planned(giving, 2)
    assert [w.filename for w in warned] == [__file__]
    (note,) = [n for n in plan.notes if n.startswith("one of 2 stages takes")]
    assert note == str(warned[0].message) and "(an even part is 50%)" in note
    first, _, other = note.partition("rite the layers out")
    assert other and (carry in first) == (schedule != "zb-h1")
    with pytest.raises(wh.PlanError, match="at most 2 parts that read") as caught:
        planned(giving, 4)
    assert type(caught.value) is wh.PlanError and caught.value.__cause__ is None
    before, _, _ = str(caught.value).partition("at most 2 parts")
    assert (carry in before) == (schedule != "zb-h1")


def reversed_layers(model: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, model["layers"], reverse=True)
    return x.mean()


def scanned_to(model: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, model["layers"])
    return x


def scanned(model: Any, x: Any) -> Any:
    return scanned_to(model, x).mean()


def matching(model: Any, x: Any) -> Any:
    logits = jax.nn.log_softmax(scanned_to(model, x) @ model["head"])
    return -jnp.take_along_axis(logits, jnp.zeros((64, 1), "int32"), 1).mean()


def penalised(model: Any, x: Any) -> Any:
    return scanned(model, x) + 1e-3 * jnp.sum(model["layers"] ** 2)


def staged(model: Any, x: Any) -> Any:
    with wh.pipeline(), wh.stage():
        return scanned(model, x)


def contradicting(model: Any, x: Any) -> Any:
    with wh.pipeline(num_stages=4, schedule="zb-h1"):
        return scanned(model, x)


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (summing, {}, "each returns 1 value per layer (metrics"),
        (penalised, {}, "their parameters are read outside the scan too"),
        (
            reversed_layers,
            {},
            "from the last to the first. Reverse their order",
        ),
        (scanned, {"mesh": {"stage": 8}}, "stage is 8, but the model has 6 layers"),
        (scanned, {"mesh": {"stage": 8}}, "needs at least one; expected at most 6"),
        (
            scanned,
            {"mesh": {"stage": 3}, "cluster": "h100:8", "allow_idle": False},
            "stage 3 uses 3 of 8 devices",
        ),
        (
            scanned,
            {"offload": "optimizer"},
            "stages keep nothing in host memory in this version",
        ),
        (matching, {"loss_chunks": 2}, "stages compute all logits of a micro-batch at"),
        (scanned, {"num_micro_batches": 5}, "do not divide into 5 micro-batches"),
        (staged, {}, "one stage is marked, and a pipeline needs two"),
        (contradicting, {}, "asks for num_stages 4, but mesh={'stage': 2} for 2"),
        (contradicting, {"mesh": {"data": 8}}, "needs 32 devices; there are 8"),
        (
            contradicting,
            {"mesh": {"stage": 4}, "cluster": "h100:4"},
            "one program for all stages does not follow zb-h1",
        ),
    ],
)
def test_what_stages_cannot_do_is_said(
    loss: Callable[..., Any], options: dict[str, Any], text: str
) -> None:
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    stack = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    model = {"layers": stack, "head": w}
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    options = {"mesh": {"stage": 2}, "cluster": "h100:8", **options}
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(loss, model, x, optimizer=optax.adam(1e-3), **options)
    assert text in str(caught.value)


def test_a_stage_computes_forward_twice_and_backward_once() -> None:
    def loss(model: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        x, _ = jax.lax.scan(layer, x, (model["up"], model["down"]))
        return (x**2).mean()

    model = {
        "up": jax.ShapeDtypeStruct((8, 4096, 16384), jnp.float32),
        "down": jax.ShapeDtypeStruct((8, 16384, 4096), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((65536, 4096), jnp.float32)
    one, two = (
        wh.plan(
            loss,
            model,
            x,
            optimizer=optax.sgd(0.1),
            cluster=f"h100:{stages}",
            mesh={"stage": stages},
            num_micro_batches=32,
            remat="none",
        )
        for stages in (1, 2)
    )
    seconds = 2 * two.time.compute_seconds / one.time.compute_seconds
    assert seconds == pytest.approx(4 / 3, rel=0.01)
    flops = 2 * two.product_flops / one.product_flops
    assert flops == pytest.approx(4 / 3 * 33 / 32, rel=0.01)  # one turn is a bubble


def test_what_has_no_batch_is_handed_on_whole() -> None:
    def loss(model: Any, x: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, matrix = carry
            return (x @ w, matrix + w), None

        (x, matrix), _ = jax.lax.scan(layer, (x, jnp.zeros((64, 64))), model)
        return (x**2).mean() + (matrix**2).mean()

    model = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    handed = [
        next(
            c.payload_bytes for c in plan.collectives if c.kind == "collective-permute"
        )
        for count in (2, 8)
        for plan in [
            wh.plan(
                loss,
                model,
                jax.ShapeDtypeStruct((64, 64), jnp.float32),
                optimizer=optax.sgd(0.1),
                cluster="h100:2",
                mesh={"stage": 2},
                num_micro_batches=count,
            )
        ]
    ]
    matrix, x = 64 * 64 * 4, 64 * 64 * 4
    assert handed == [(matrix + x // count) // 2 for count in (2, 8)]


@pytest.mark.parametrize("size", [1, 67])
def test_batches_of_which_no_usual_number_of_parts_can_be_made(size: int) -> None:
    plan = wh.plan(
        scanned,
        {"layers": jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)},
        jax.ShapeDtypeStruct((size, 64), jnp.float32),
        optimizer=optax.sgd(0.1),
        cluster="h100:2",
        mesh={"stage": 2},
    )
    assert plan.num_micro_batches == 1


def staged_gpt(**options: Any) -> wh.Plan:
    """Two stages of a GPT whose layers keep much more than they are given."""
    kinds = {"dtype": None, "param_dtype": "float32"}
    sizes = {"layers": 8, "scan_layers": True, "annotated": False}
    job = models.job("gpt-test", **sizes, **kinds)
    options = {"cluster": "h100:2", "mesh": {"stage": 2}, **options}
    plan: wh.Plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=optax.sgd(0.1),
        num_micro_batches=8,
        **options,
    )
    return plan


@pytest.mark.full
def test_residuals_are_kept_where_they_fit() -> None:
    kept = staged_gpt()
    given = staged_gpt(remat="none")
    assert kept.stages is not None and given.stages is not None
    assert (kept.stages.stash, kept.remat) == ("residuals", (("*", "dots"),))
    assert (given.stages.stash, given.remat) == ("inputs", ())
    assert kept.time.step_seconds < given.time.step_seconds
    assert kept.product_flops == pytest.approx(3 / 4 * given.product_flops, rel=0.1)
    assert "residuals kept" in str(kept) and "inputs kept" in str(given)
    assert "one program runs all stages in lockstep" in " ".join(kept.notes)
    room = kept.memory.total_bytes - 1
    tight = wh.cluster("h100:2").with_memory(room)
    small = staged_gpt(cluster=tight)
    assert small.stages is not None and small.stages.stash == "inputs"
    assert small.memory.total_bytes <= room
    with pytest.raises(wh.PlanError, match=r"stage 2 × .*before activations of micro"):
        staged_gpt(cluster=wh.cluster("h100:2").with_memory(10_000))
