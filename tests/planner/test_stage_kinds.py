"""Stages on unlike kinds, against every order of the devices and every cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax.meshes import cluster
from whalejax.planner.pipeline.heterogeneous_stages import (
    StageDevices,
    allot,
    by_memory,
    has_several_kinds,
    least_seconds,
)
from whalejax.planner.pipeline.schedules import schedule
from whalejax.planner.pipeline.stage_cuts import Layer
from whalejax.planner.plan_errors import PlanError


KINDS = ("rtx3090", "v100-32", "a100-40")
"""The first has least memory, and the chains below may make it the fastest."""

MEMORY = (4.0, 8.0, 16.0)


def ground(block: int, name: str, memory: float, ratio: float) -> StageDevices:
    one = cluster(f"{name}:1").with_memory(int(memory))
    return StageDevices(block=block, cluster=one, ratio=ratio)


def best_pace(
    chains: dict[str, list[Layer]], lying: list[StageDevices], held: tuple[int, ...]
) -> float:
    """The pace of the best of all orders and cuts; infinite where none fits."""
    layers = next(iter(chains.values()))
    count, best = len(layers), math.inf
    for order in itertools.permutations(lying):
        for inside in itertools.combinations(range(1, count), len(order) - 1):
            pace = 0.0
            spans = itertools.pairwise((0, *inside, count))
            for one, n, (a, b) in zip(order, held, spans, strict=True):
                need = sum(x.static_bytes + n * x.activation_bytes for x in layers[a:b])
                own = chains[one.kind.name][a:b]
                seconds = sum(x.seconds for x in own) * one.ratio
                seconds += layers[a - 1].transfer_seconds if a else 0.0
                fits = need <= one.kind.memory_bytes
                pace = max(pace, seconds if fits else math.inf)
            best = min(best, pace)
    return best


@settings(max_examples=80)
@given(st.data())
def test_no_order_and_no_cut_is_faster(data: st.DataObject) -> None:
    """Every kind has times of its own for each layer, and memory of its own."""
    count = data.draw(st.integers(2, 6))
    whole = st.integers(1, 6).map(float)
    sizes = [(data.draw(whole), data.draw(whole) / 2) for _ in range(count)]
    names = data.draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=3))
    ratios = {name: data.draw(st.sampled_from([0.5, 1.0, 2.0])) for name in KINDS}
    scale = data.draw(st.sampled_from([1.0, 2.0, 100.0]))
    lying = [
        ground(i, name, scale * MEMORY[KINDS.index(name)], ratios[name])
        for i, name in enumerate(names)
    ]
    chains = {
        one.kind.name: [
            Layer(
                seconds=data.draw(whole),
                static_bytes=static,
                activation_bytes=kept,
                transfer_seconds=0.5,
            )
            for static, kept in sizes
        ]
        for one in by_memory(lying)
    }
    table = schedule("1f1b", len(names), 8)
    best = best_pace(chains, lying, table.in_flight)
    if math.isinf(best):
        with pytest.raises(PlanError):
            allot(chains, lying, table, {})
        return
    found = allot(chains, lying, table, {})
    assert max(found.placed.cut.seconds) == pytest.approx(best)
    assert sorted(found.placed.order) == list(range(len(names)))
    assert found.least_seconds <= 8 * best * (1 + 1e-9)
    assert found.least_seconds <= found.seconds * (1 + 1e-9)
    beside = allot(chains, lying, table, {}, hidden=True)
    assert max(beside.work) <= max(found.work) * (1 + 1e-9)
    assert max(beside.work) == pytest.approx(max(beside.placed.cut.seconds))
    needs = zip(found.needs_bytes, found.placed.order, strict=True)
    assert all(need <= lying[i].kind.memory_bytes for need, i in needs)


def test_a_fast_kind_with_little_memory_holds_what_fits() -> None:
    lying = [ground(0, "rtx3090", 12.0, 0.5), ground(1, "v100-32", 60.0, 1.0)]
    layers = [Layer(seconds=1.0, static_bytes=1.0, activation_bytes=1.0)] * 12
    chains = {one.kind.name: layers for one in lying}
    found = allot(chains, lying, schedule("1f1b", 2, 8), {})
    # The fast one is last, where it holds one micro-batch: six layers of 2 bytes.
    assert found.placed.order == (1, 0) and found.placed.cut.counts == (6, 6)
    assert found.work == (6.0, 3.0)
    # Eight turns of the slow one, which waits for the fast one's first or its all.
    assert found.seconds == pytest.approx(8 * 6 + 1)
    assert found.equal_seconds == pytest.approx(8 * 6 + 3)
    assert not found.equal_fits
    assert found.least_seconds == pytest.approx(8 * 4.0)
    less = allot(chains, lying, schedule("1f1b", 2, 8), {"rtx3090": 4.0})
    assert less.placed.cut.counts == (8, 4)


def test_kinds_stand_by_memory_each_once() -> None:
    lying = [
        ground(i, name, memory, 1.0)
        for i, (name, memory) in enumerate(
            [("v100-32", 8.0), ("rtx3090", 4.0), ("v100-32", 8.0)]
        )
    ]
    assert [one.block for one in by_memory(lying)] == [1, 0]
    assert has_several_kinds(lying) and not has_several_kinds(lying[:1] * 2)
    assert not has_several_kinds([lying[0], replace(lying[2], ratio=2.0)])


def test_layers_that_are_cut_anywhere_keep_all_busy() -> None:
    # Three quarters of the work go to the stage that is three times as fast.
    assert least_seconds([[1.0] * 4, [3.0] * 4]) == pytest.approx(3.0)
    # What is slow on one of them lies on the other.
    assert least_seconds([[1.0, 9.0], [9.0, 1.0]]) == pytest.approx(1.0)
