"""Plans for more meshes than are looked at one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits
from whalejax.planner.search import layout_search
from whalejax.planner.search.layout_search import Search


# Where host memory may serve, optimizers are traced, which promote.
pytestmark = pytest.mark.relaxed_promotion


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
def test_what_is_near_the_best_holds_the_best(
    name: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []
    use_host_memory = Search.use_host_memory

    def counted(self: Search, bound: float) -> None:
        use_host_memory(self, bound)
        evaluated[-1] += self.weighed

    monkeypatch.setattr(Search, "use_host_memory", counted)
    found = []
    limits = layout_search.LISTED, layout_search.MOST_LISTED
    for meshes, layouts in (limits, (10**9, 10**9)):
        monkeypatch.setattr(layout_search, "LISTED", meshes)
        monkeypatch.setattr(layout_search, "MOST_LISTED", layouts)
        evaluated.append(0)
        found.append(planned(name, cluster, 64))
    assert found[0].axis_sizes == found[1].axis_sizes
    assert found[0].time == found[1].time and found[0].memory == found[1].memory
    assert evaluated[0] < evaluated[1]


def test_meshes_obey_what_is_fixed() -> None:
    plan = planned("gpt-test", "a100-80:16x8", 128, mesh={"tensor": 2})
    assert plan.axis_sizes["tensor"] == 2
    assert plan.num_devices == 128


@pytest.mark.full
def test_where_nothing_fits_the_nearest_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = wh.cluster("a100-80:8x8")
    kind = dataclasses.replace(small.kinds[0], memory_bytes=40_000)
    node = dataclasses.replace(small.nodes[0], kind=kind)
    small = dataclasses.replace(small, nodes=(node,) * len(small.nodes))
    needed = []
    for listed in (layout_search.LISTED, 10**9):
        monkeypatch.setattr(layout_search, "LISTED", listed)
        with pytest.raises(wh.PlanError, match="needs") as caught:
            planned("gpt-test", small, 64, offload=())
        found = caught.value
        assert isinstance(found, NothingFits)
        needed.append(found.lacks_bytes)
    assert needed[0] == needed[1]
