"""Plans for more meshes than are looked at one by one."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.batched import prefilter
from whalejax.planner.search.enumerate import PLANNED_AXES, Search
from whalejax.planner.search.ranking import TIE


# Where host memory may serve, optimizers are traced, which promote.
pytestmark = pytest.mark.relaxed_promotion

decide: Any = importlib.import_module("whalejax.planner.search.spmd")


def planned(name: str, cluster: str | wh.Cluster, batch: int, **options: Any) -> Plan:
    job = models.job(name)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch)),
        optimizer=optax.adam(1e-3),
        cluster=cluster,
        **options,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cluster"),
    [("gpt-test", "a100-80:4x8"), ("moe-test", "v100-16:4x8")],
)
def test_the_promising_meshes_hold_the_best(
    name: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    score = Search.score

    def counted(self: Search, *arguments: Any) -> None:
        looked_at[-1] += 1
        score(self, *arguments)

    monkeypatch.setattr(Search, "score", counted)
    found = []
    for many in (prefilter.MANY, 10**9):
        monkeypatch.setattr(decide, "MANY", many)
        looked_at.append(0)
        found.append(planned(name, cluster, 64).time.step_seconds)
    assert found[0] <= found[1] * (1 + TIE)
    assert looked_at[0] < looked_at[1]


def test_meshes_obey_what_is_fixed() -> None:
    plan = planned("gpt-test", "a100-80:16x8", 128, mesh={"tensor": 2})
    assert plan.axis_sizes["tensor"] == 2
    assert plan.num_devices == 128


def test_where_the_promising_do_not_fit_every_mesh_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def nothing(*arguments: Any) -> dict[prefilter.Variant, dict[Any, float]]:
        asked.append(arguments)
        return {((), (), 1): {(1,) * len(PLANNED_AXES): 1.0}}

    monkeypatch.setattr(decide, "promising", nothing)
    assert planned("gpt-test", "a100-80:8x8", 64).num_devices == 64
    assert asked


@pytest.mark.full
def test_where_nothing_fits_the_nearest_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = wh.cluster("a100-80:8x8")
    kind = dataclasses.replace(small.kinds[0], memory_bytes=40_000)
    node = dataclasses.replace(small.nodes[0], kind=kind)
    small = dataclasses.replace(small, nodes=(node,) * len(small.nodes))
    needed = []
    for many in (prefilter.MANY, 10**9):
        monkeypatch.setattr(decide, "MANY", many)
        with pytest.raises(wh.PlanError, match="needs") as caught:
            planned("gpt-test", small, 64, offload=())
        needed.append(str(caught.value).partition(" plans we")[0][:-2])
    assert needed[0] == needed[1]
