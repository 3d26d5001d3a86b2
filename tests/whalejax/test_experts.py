"""Mixtures of experts on meshes of data, experts and tensor, for both routings.

Gradients and the numbers of load against one device in float64, and what is moved
against what the plan says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from typing import Any, Final

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.equality import (
    FLOAT64_TOLERANCE,
    OneDevice,
    build,
    check,
    compiled,
    on_one_device,
)
from whalejax import hlo, models
from whalejax.jobs import abstract_model


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

ROUTINGS: Final = ("capacity", "dropless")
SIZES: Final = {
    "layers": 1,
    "vocab": 64,
    "embed": 32,
    "heads": 4,
    "mlp": 96,
    "experts": 8,
}
BATCH: Final = 16
ALL: Final = {"data": 2, "expert": 2, "tensor": 2}
MESHES: Final = (
    {"data": 2},
    {"expert": 2},
    {"tensor": 2},
    {"data": 2, "expert": 2},
    {"data": 2, "tensor": 2},
    {"expert": 2, "tensor": 2},
    {"context": 2, "expert": 2},
    ALL,
)
DEFAULT: Final = (
    ("capacity", {"expert": 2}),
    ("dropless", {"context": 2, "expert": 2}),
    ("dropless", ALL),
)
"""What runs by default; the newest versions run the last of them, too."""


def _routed() -> list[Any]:
    """Every way to route on every mesh."""
    found = []
    for pair in itertools.product(ROUTINGS, MESHES):
        marks = [] if pair in DEFAULT else [pytest.mark.full]
        marks += [pytest.mark.smoke] * (pair == DEFAULT[-1])
        found.append(pytest.param(*pair, marks=marks, id=f"{pair[0]}-{pair[1]}"))
    return found


def job_of(routing: str, **options: Any) -> wh.Job:
    """The training of a small sparse transformer."""
    options = {**SIZES, "annotated": False, "batch_size": BATCH, **options}
    return models.job("moe-test", routing=routing, **options)


@functools.cache
def reference(routing: str, count: int = 1) -> OneDevice:
    """What one device computes, in float64."""
    job = job_of(routing, dtype="float64", param_dtype="float64")
    return on_one_device(job, count, model=build(job))


def here(num_devices: int) -> wh.Cluster:
    """So many of this machine's devices."""
    found = wh.Cluster.detect(calibrate=False)
    node = dataclasses.replace(found.nodes[0], count=num_devices)
    level = dataclasses.replace(found.levels[0], size=num_devices)
    return dataclasses.replace(found, nodes=(node,), levels=(level,))


def on(mesh: dict[str, int]) -> dict[str, Any]:
    """The options that plan for a mesh on as many of this machine's devices."""
    devices = math.prod(mesh.values())
    return {"mesh": mesh, "devices": devices, "cluster": here(devices)}


def planned_bytes(plan: wh.Plan) -> Counter[str]:
    """Bytes by kind of collective in a step."""
    found: Counter[str] = Counter()
    for c in plan.collectives:
        found[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("routing", "mesh"), _routed())
def test_every_mesh_computes_what_one_device_does(
    routing: str, mesh: dict[str, int]
) -> None:
    with jax.enable_x64(True):
        one = reference(routing)
        found = check(one, steps=2, zero=0, **on(mesh))
    # The load is among the metrics.
    assert found.error <= FLOAT64_TOLERANCE, found.worst_path
    assert found.compilations == 1
    assert one.metrics["max_load"] > 1.1
    if routing == "dropless":
        assert one.metrics["dropped"] == 0
        assert one.metrics["passes"] > 1
    else:
        assert one.metrics["dropped"] > 0.005
        assert one.metrics["passes"] == 1
    shards = {
        axis
        for leaf in found.plan.leaves
        for axes in leaf.compute_spec
        for axis in axes
        if "experts" in leaf.path
    }
    assert shards == {"expert", "tensor"} & set(mesh)


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_micro_batches_have_a_load_and_a_balance_of_their_own(routing: str) -> None:
    with jax.enable_x64(True):
        one = reference(routing, 2)
        found = check(one, zero=0, **on(ALL))
        whole = reference(routing)
    assert found.error <= FLOAT64_TOLERANCE, found.worst_path
    # Were they taken over the global batch, the metrics would be these.
    assert abs(one.metrics["aux"] - whole.metrics["aux"]) > 1e-4
    noted(found.plan)


def noted(plan: wh.Plan) -> None:
    """Two micro-batches have a balance each, and the plan says so."""
    (note,) = [text for text in plan.notes if "per_micro_batch=True" in text]
    assert f"each of the micro-batches of {BATCH // 2} of the batch's {BATCH}" in note


def test_a_balance_for_each_micro_batch_is_noted() -> None:
    job, options = job_of("dropless"), on({"expert": 2})
    noted(compiled(job, abstract_model(job), num_micro_batches=2, **options).plan)


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_balance_of_a_part_of_the_batch_is_another(routing: str) -> None:
    """So the equality above is of statistics over all devices' samples."""
    with jax.enable_x64(True):
        one = reference(routing)
        parts = on_one_device(one.job, 8, model=one.model)
    for name in ("aux", "max_load"):
        assert parts.metrics[name] > one.metrics[name] + 1e-3
    gradients = zip(parts.gradients, one.gradients, one.paths, strict=True)
    (error,) = [np.linalg.norm(a - b) for a, b, path in gradients if "router" in path]
    assert error > 1e-6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_is_moved_is_what_is_planned(routing: str) -> None:
    job = job_of(routing, mlp=320)
    step = compiled(job, build(job), zero=0, **on(ALL))
    found = hlo.collectives(step.lower().compile().as_text())
    planned = planned_bytes(step.plan)
    assert found.nbytes == planned
    assert set(planned) >= {"all-to-all", "all-reduce"}


@pytest.mark.full
def test_further_passes_exchange_tokens_as_the_first_does() -> None:
    def exchanges(routing: str) -> int:
        job = job_of(routing)
        step = compiled(job, build(job), zero=0, **on({"expert": 8}))
        found = hlo.collectives(step.lower().compile().as_text())
        assert set(found.counts) == {"all-to-all", "all-reduce"}
        return sum(i.count for i in found.of("all-to-all"))

    # Two each way; a further pass goes out and back once more in the backward pass,
    # and a queue of 24 tokens may need two besides the first of 9 places.
    assert exchanges("capacity") == 4
    assert exchanges("dropless") == 4 + 2 * 6


@pytest.mark.full
def test_the_plan_says_that_it_counts_every_pass() -> None:
    job = job_of("dropless", layers=2)
    plan = compiled(job, build(job), **on({"data": 8})).plan
    (note,) = [text for text in plan.notes if "branches" in text]
    assert note == (
        "one of 2 branches at overflow runs in each of 2 iterations; the work of all "
        "branches is counted as an upper bound"
    )
