"""Where links are known one by one, ranks that send much are put on fast ones."""

from __future__ import annotations

import dataclasses
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.planner.graphs import gpt
from tests.planner.plans import WIDE, plan_of
from whalejax.meshes import Cluster, WhaleError, cluster
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.sharding.device_order import ordered, traffic_bytes


FAST, SLOW = 100e9, 10e9


def linked(count: int, fast: set[frozenset[int]]) -> Cluster:
    """GPUs of which some pairs have fast links."""
    rows = [
        tuple(
            0.0 if a == b else FAST if frozenset((a, b)) in fast else SLOW
            for b in range(count)
        )
        for a in range(count)
    ]
    return dataclasses.replace(cluster(f"h100:{count}"), links=tuple(rows))


def planned(machine: Cluster, **mesh: int) -> Plan:
    return plan_of(gpt(2, WIDE), machine, mesh=mesh)


def seconds(plan: Plan, order: Any) -> float:
    """What all send, one after the other; written out."""
    traffic, rates = traffic_bytes(plan), plan.cluster.links
    return sum(
        traffic[i, j] / rates[order[i]][order[j]]
        for i in range(len(order))
        for j in range(len(order))
        if i != j
    )


def test_partners_get_the_fast_links() -> None:
    """Tensor parallel pairs send most: they are put on pairs that are joined fast."""
    machine = linked(4, {frozenset((0, 2)), frozenset((1, 3))})
    plan = ordered(planned(machine, data=2, tensor=2))
    pairs = {frozenset(plan.device_order[i : i + 2]) for i in (0, 2)}
    assert pairs == {frozenset((0, 2)), frozenset((1, 3))}
    best = min(seconds(plan, order) for order in permutations(range(4)))
    assert seconds(plan, plan.device_order) == pytest.approx(best)
    assert any("devices are ordered as" in note for note in plan.notes)
    assert Plan.from_document(plan.document()) == plan
    assert plan.hash != dataclasses.replace(plan, device_order=()).hash


def test_a_good_order_stays() -> None:
    machine = linked(4, {frozenset((0, 1)), frozenset((2, 3))})
    plan = planned(machine, data=2, tensor=2)
    assert ordered(plan) == plan and not plan.device_order
    without = planned(cluster("h100:4"), data=2, tensor=2)
    assert ordered(without) == without


def test_traffic_is_counted_as_rings() -> None:
    plan = planned(linked(8, set()), data=4, tensor=2)

    def sent(kind: CollectiveKind, *axes: str) -> np.ndarray:
        one = Collective(
            kind=kind,
            axes=axes,
            phase="update",
            what="gradient",
            payload_bytes=120,
            count=2,
        )
        return traffic_bytes(dataclasses.replace(plan, collectives=(one,)))

    ranks = np.arange(8)
    shares: dict[CollectiveKind, float] = {"all-reduce": 1.5, "all-gather": 0.75}
    for kind, share in shares.items():
        found = sent(kind, "data")
        assert (found[ranks, (ranks + 2) % 8] == 240 * share).all()
        assert found.sum() == 8 * 240 * share
    assert (sent("collective-permute", "tensor")[ranks, ranks ^ 1] == 240).all()
    whole = sent("all-reduce", "data", "tensor")
    assert (whole[ranks, (ranks + 1) % 8] == 240 * 1.75).all()
    assert whole.sum() == pytest.approx(8 * 240 * 1.75)
    spread = sent("all-to-all", "data")
    assert spread[0, [2, 4, 6]].tolist() == [60, 60, 60] and spread[0].sum() == 180
    assert not sent("all-reduce", "fsdp").any()


def test_links_are_checked() -> None:
    good = linked(2, set())
    with pytest.raises(WhaleError, match="links: expected 2 rows of 2 numbers"):
        dataclasses.replace(good, links=((0.0, 1.0),))
    with pytest.raises(WhaleError, match=r"links\.1\.0: got 0\.0, expected bytes per"):
        dataclasses.replace(good, links=((0.0, 1.0), (0.0, 0.0)))
