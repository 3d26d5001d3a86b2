"""Sequence parallelism: found by the planner, run by constraints at borders."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import optax
import pytest

import whalejax as wh
from whalejax import hlo, models
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.jobs import abstract_model
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.search.spmd_search import analysed_for
from whalejax.planner.sharding.sequence_parallel import SUFFIX


SMALL: dict[str, dict[str, Any]] = {
    "gpt-test": {"annotated": False, "layers": 1},
    "mlp-test": {"annotated": False},
}


def asked(name: str = "gpt-test", batch: int = 16, **options: Any) -> wh.Plan:
    job = models.job(name, **options.pop("model", SMALL.get(name, {})))
    options = {"cluster": "h100:8", "optimizer": optax.sgd(0.1), "zero": 0, **options}
    return wh.plan(
        job.loss_fn,
        abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        **options,
    )


MESH = {"data": 2, "tensor": 4}
SIZES = {"embed": 2048, "heads": 16, "mlp": 5632, "sequence": 1024, "layers": 4}


def test_the_residual_stream_is_a_task_graph_of_its_own() -> None:
    job = models.job("llama-test", **SIZES)
    plan = asked(
        "llama-test",
        mesh={"data": 4, "tensor": 4},
        cluster="v5e:4x4",
        model=SIZES,
        sequence_parallel=True,
    )
    assert plan.sequence_parallel and "sequence parallel" in str(plan)
    tables = {region.task_graph: dict(region.axes) for region in plan.compute}
    assert set(tables) == {"default", "default" + SUFFIX}
    assert tables["default"]["tensor"] != tables["default" + SUFFIX]["tensor"]
    graph = capture(adapt(abstract_model(job), job.loss_fn), job.batch_at(0, 16)).graph
    analysed = analysed_for(plan, graph)
    between = [
        op
        for op in analysed.graph.ops
        if analysed.graph.task_graphs[op.task_graph].name.endswith(SUFFIX)
    ]
    assert any(op.kind == "rsqrt" for op in between)
    assert not any("bqhd" in op.scope for op in between), "heads are in attention"
    assert analyse_graph(graph).graph.task_graphs == graph.task_graphs


def test_an_all_reduce_becomes_a_gather_and_a_scatter() -> None:
    plain, sharded = (
        asked(mesh=MESH, sequence_parallel=flag) for flag in (False, True)
    )
    traffic = []
    for plan in (plain, sharded):
        found: Counter[str] = Counter()
        for c in plan.collectives:
            if c.axes == ("tensor",):
                found[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
        traffic.append(found)
    before, after = traffic
    assert set(before) == {"all-reduce"}
    assert set(after) == {"all-gather", "reduce-scatter"}
    # The result of the first lookup is scattered too, where it was added up.
    assert after["all-gather"] <= after["reduce-scatter"] * 1.01
    assert sharded.memory.activations_bytes < 0.8 * plain.memory.activations_bytes


@pytest.mark.smoke
def test_the_compiled_program_gathers_what_was_planned() -> None:
    job = models.job("gpt-test", **SMALL["gpt-test"])
    plan = asked(mesh=MESH, sequence_parallel=True)
    step = wh.compile(
        plan,
        job.loss_fn,
        abstract_model(job),
        optimizer=optax.sgd(0.1),
        devices=jax.devices(),
    )
    found = hlo.collectives(hlo.read(step.lower().compile().as_text()))
    gathered = sum(
        c.payload_bytes * c.times(plan.num_micro_batches)
        for c in plan.collectives
        if c.kind == "all-gather"
    )
    assert found.nbytes["all-gather"] == gathered
    # This compiler makes no reduce-scatter: it reduces whole, and cuts.
    assert set(found.counts) == {"all-gather", "all-reduce"}


def test_the_planner_takes_it_where_it_is_faster() -> None:
    plan = asked(
        "llama-test",
        mesh={"data": 2, "tensor": 8},
        cluster="v5e:4x4",
        model=SIZES,
        remat="none",
    )
    plain = plan.what_if(sequence_parallel=False)
    assert plan.sequence_parallel and not plain.sequence_parallel
    assert plan.time.step_seconds < plain.time.step_seconds
    assert plan.memory.total_bytes < plain.memory.total_bytes


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp-test", {}, "the model has no sequence: no dimension"),
        ("mlp-test", {"mesh": {"stage": 2}}, "the model has no sequence: no dimension"),
        ("gpt-test", {"mesh": {"data": 8}}, "mesh= sets tensor to 1"),
        pytest.param(
            "gpt-test",
            {"mesh": {"tensor": 1}},
            "mesh= sets tensor to 1",
            marks=pytest.mark.full,
        ),
        (
            "gpt-test",
            {"model": {**SMALL["gpt-test"], "sequence": 12}, "mesh": {"tensor": 8}},
            r"the sequence \(12\) does not divide",
        ),
    ],
)
def test_where_it_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        asked(name, sequence_parallel=True, **options)


def test_it_is_a_switch() -> None:
    with pytest.raises(wh.WhaleError, match="sequence_parallel is .yes.; expected"):
        asked(sequence_parallel="yes")


def test_it_is_taken_where_it_is_asked_for_though_slower() -> None:
    job = models.job("moe-test", layers=1, annotated=False)
    plan = wh.plan(
        job.loss_fn,
        abstract_model(job),
        job.batch_at(0, 32),
        optimizer=job.optimizer,
        cluster="h100:2",
        mesh={"tensor": 2},
        default=wh.split(),
        sequence_parallel=True,
        num_micro_batches=1,
        remat="none",
        offload=(),
    )
    assert plan.sequence_parallel
    other = plan.what_if(sequence_parallel=False)
    assert plan.time.step_seconds > other.time.step_seconds


def test_it_needs_two_samples_in_a_micro_batch() -> None:
    """A program for one has no dimension by which residual streams are told."""
    fixed: dict[str, Any] = {"mesh": {"tensor": 8}, "sequence_parallel": True}
    with pytest.raises(wh.WhaleError, match="a micro-batch has one sample"):
        asked("gpt-test", batch=16, num_micro_batches=16, **fixed)
    plan = asked("gpt-test", batch=16, num_micro_batches=8, **fixed)
    assert any(region.task_graph.endswith(SUFFIX) for region in plan.compute)
