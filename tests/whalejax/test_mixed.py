"""What plans for unlike devices say of their shares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.meshes.units import milliseconds


def noted(text: str, batch: int, mesh: Mapping[str, int], **asked: Any) -> wh.Plan:
    """The plan of a GPT whose layers are one scan, or written out for stages."""
    options = {"scan_layers": "stage" not in mesh, "annotated": False, "layers": 8}
    job = models.job("gpt-small", **options)
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=job.optimizer,
        cluster=text,
        mesh=mesh,
        **asked,
    )
    assert all(note in str(plan) for note in plan.notes)
    return plan


@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_replicas_say_shares_gain_and_bound() -> None:
    plan = noted("h100:2+a100-80:2", 24, {"data": 4}, num_micro_batches=24)
    (note,) = (n for n in plan.notes if n.startswith("shares: H100"))
    found = re.fullmatch(
        r"shares: H100 (\d+)(?:–\d+)?, A100-80 (\d+)(?:–\d+)? of (\d+) "
        r"micro-batches: ([\d.]+)× as fast as even shares \(at most ([\d.]+)×\)",
        note,
    )
    assert found, note
    fast, slow = int(found[1]), int(found[2])
    assert fast > slow >= 1
    assert 1 <= float(found[4]) <= float(found[5])


@pytest.mark.full
@pytest.mark.relaxed_promotion  # Adam's bias correction relies on it
def test_one_program_on_unlike_devices_says_that_shards_are_even() -> None:
    mesh = {"data": 2, "tensor": 2}
    plan = noted("h100:2+a100-80:2", 8, mesh, zero=2, runnable=False)
    assert any(n.startswith("split: shards are equal along tensor") for n in plan.notes)


@pytest.mark.parametrize("cluster", ["v100-32:2+p100-16:2", "v100-32:4"])
def test_plans_that_run_say_that_shards_are_even(cluster: str) -> None:
    def loss(model: Any, batch: jax.Array) -> jax.Array:
        with wh.split():
            return jnp.mean(jax.nn.logsumexp(batch @ model["head"], -1))

    plan = wh.plan(
        loss,
        {"head": jax.ShapeDtypeStruct((512, 4096), jnp.float32)},
        jax.ShapeDtypeStruct((256, 512), jnp.float32),
        cluster=cluster,
        mesh={"tensor": 2},
    )
    said = any(note.startswith("split: shards are equal") for note in plan.notes)
    assert plan.runnable and said == ("+" in cluster)


def twofold(inner: int, outer: int, samples: int, **options: Any) -> wh.Plan:
    """A plan of two products on a V100 and a P100, whose memory is half as large."""
    shape = jax.ShapeDtypeStruct
    return wh.plan(
        lambda w, b: ((jnp.tanh(b["x"] @ w["a"]) @ w["b"] - b["y"]) ** 2).mean(),
        {
            "a": shape((outer, inner), jnp.float32),
            "b": shape((inner, outer), jnp.float32),
        },
        {name: shape((samples, outer), jnp.float32) for name in "xy"},
        optimizer=optax.adam(1e-3),
        cluster="v100-32:1+p100-16:1",
        **options,
    )


@pytest.mark.relaxed_promotion  # Adam promotes its count
@pytest.mark.parametrize("options", [{}, {"shares": "even"}, {"mesh": {"data": 2}}])
def test_as_many_micro_batches_as_fit_are_found(options: dict[str, Any]) -> None:
    """Of 64 and more, the fewest: half of 32 needs 27 GB on a P100 of 17.2 GB."""
    plan = twofold(2**20, 64, 65_536, **options)
    assert plan.num_micro_batches == 64 and len(plan.shares) == 2
    with pytest.raises(wh.PlanError, match="more micro-batches than 32 or a smaller"):
        twofold(2**20, 64, 65_536, num_micro_batches=32)


@pytest.mark.relaxed_promotion  # Adam promotes its count
def test_larger_replicas_are_weighed_where_small_ones_take_many() -> None:
    """One device needs 512 micro-batches, four with tensor between them 64."""
    shape = jax.ShapeDtypeStruct
    plan = wh.plan(
        lambda w, b: ((jnp.tanh(b["x"] @ w["a"]) @ w["b"] - b["y"]) ** 2).mean(),
        {"a": shape((256, 2**20), "float32"), "b": shape((2**20, 256), "float32")},
        {name: shape((2**18, 256), "float32") for name in "xy"},
        optimizer=optax.adam(1e-3),
        cluster="v100-32:4+p100-16:4",
    )
    other = plan.what_if(mesh={"data": 8})
    assert plan.time.step_seconds < other.time.step_seconds / 1.5
    assert plan.axis_sizes["data"] < 8 and plan.num_micro_batches <= 64


@pytest.mark.relaxed_promotion  # Adam promotes its count
def test_who_lacks_memory_whatever_its_share_is_named() -> None:
    with pytest.raises(wh.PlanError) as caught:
        twofold(65_536, 8192, 64, shares=[5, 3], margin=0)
    said = str(caught.value)
    assert "P100-16 needs 17.2 GB without any micro-batch" in said
    assert "lacks 3.67 MB (" in said and "divide the model into stages" in said


@pytest.mark.relaxed_promotion
def test_a_plan_names_the_kind_that_is_faster_alone() -> None:
    sizes = {"layers": 2, "embed": 512, "heads": 8, "mlp": 2048, "vocab": 8192}
    job = models.job("bert-base", **sizes, sequence=256)

    def plan(machine: str, samples: int = 64) -> wh.Plan:
        batch = jax.eval_shape(lambda: job.batch_at(0, samples))
        given = job.loss_fn, jobs.abstract_model(job), batch
        adam = optax.adam(1e-4)
        return wh.plan(*given, optimizer=adam, cluster=machine, precision="bf16")

    both, fast = plan("h100:1x4+a100-40:1x4"), plan("h100:4")
    notes = [note for note in both.notes if "alone take" in note]
    assert len(notes) == 1 and notes[0].startswith("the 4 H100 alone take ")
    alone = milliseconds(fast.time.step_seconds)
    times = both.time.step_seconds / fast.time.step_seconds
    assert f"alone take {alone} a step, {times:.1f} × as fast" in notes[0]
    # Links of nodes with unlike sizes are as slow as the network, those of one are not.
    (other,) = [n for n in plan("h100:4+a100-40:3").notes if "alone take" in n]
    assert f"the 4 H100 alone take {alone} a step" in other
    layouts = [one.layout for one in both.candidates]
    assert len(layouts) == len({*layouts}), "a runner-up differs in its words"
    large = plan("h100:1x4+a100-40:1x4", 4096)
    assert not [note for note in large.notes if "alone take" in note]
