"""The search over spatial axes against brute force, and the numbers of halos."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.planner.plans import adam
from whalejax import jobs
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.models import job as model_job
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.windows import Window
from whalejax.planner.search.layout_search import Search, ranked
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd_search import decided_on


@functools.cache
def graph_of(batch: int, extent: int = 32) -> Graph:
    job = model_job("cosmoflow-test", extent=extent, channels=(16, 32))
    model = jobs.abstract_model(job)
    shapes = {
        "volumes": jax.ShapeDtypeStruct((batch, extent, extent, extent, 2), "float32"),
        "targets": jax.ShapeDtypeStruct((batch, 2), "float32"),
    }
    captured: Graph = capture(adapt(model, job.loss_fn), shapes).graph
    return captured


def asked(graph: Graph, **options: Any) -> Request:
    return Request(optimizer=adam(graph), num_devices=8, **options)


def brute_force(graph: Graph, cluster: wh.Cluster) -> list[Any]:
    """Every mesh of eight devices, each fixed by itself and searched alone."""
    found = analyse_graph(graph)
    plans = []
    axes = ("data", "fsdp", "expert", "context", "depth", "height", "width", "tensor")
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(axes)):
        if np.prod(sizes) != 8 or sizes[2] > 1 or sizes[3] > 1:
            continue
        mesh = dict(zip(axes, sizes, strict=True))
        search = Search(found.graph, found.dims, cluster, asked(graph, mesh=mesh))
        plans += search.run()
    return ranked(plans)


@pytest.mark.sampled(2)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    ("batch", "memory_bytes"),
    [(1, 2**34), (2, 2**34), (8, 2**34), (64, 2**34), (8, 2**23)],
    ids=["one sample", "two", "eight", "many", "short of memory"],
)
def test_space_is_shared_where_brute_force_shares_it(
    batch: int, memory_bytes: int
) -> None:
    graph, cluster = graph_of(batch), wh.cluster("v100:8")
    kind = dataclasses.replace(cluster.slowest, memory_bytes=memory_bytes)
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in cluster.nodes)
    cluster = dataclasses.replace(cluster, nodes=nodes)
    best = brute_force(graph, cluster)[0]
    found = decided_on(graph, cluster, asked(graph)).weighed[0]
    assert found.fits
    assert {a: n for a, n in found.mesh.items() if n > 1} == {
        a: n for a, n in best.mesh.items() if n > 1
    }
    assert found.time == best.time and found.memory == best.memory
    shared = any(found.mesh.get(a, 1) > 1 for a in ("depth", "height", "width"))
    assert shared or batch >= 8


def test_models_without_space_have_the_meshes_that_they_had() -> None:
    job = model_job("mlp-test")
    batch = job.batch_at(0)
    graph = capture(adapt(jobs.abstract_model(job), job.loss_fn), batch).graph
    found = decided_on(graph, wh.cluster("v100:8"), asked(graph))
    axes = {axis for one in found.weighed for axis in one.mesh}
    assert axes == {"data", "fsdp", "expert", "context", "tensor"}
    assert found.search.spaces() == []


def by_hand(window: Window, size: int, result: int, parts: int) -> tuple[int, int]:
    """Elements beyond a part, from what each element of the result reads."""
    own, made = size // parts, result // parts
    below = above = 0
    for part in range(parts):
        first = part * made * window.stride - window.low
        last = ((part + 1) * made - 1) * window.stride - window.low + window.span - 1
        if part:
            below = max(below, part * own - first)
        if part < parts - 1:
            above = max(above, last - (part + 1) * own + 1)
    return below, above


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("span", [1, 2, 3, 5, 7])
def test_halos_are_those_counted_by_hand(span: int, stride: int, parts: int) -> None:
    size = 12 * parts * stride
    low = max(span - stride, 0) // 2
    window = Window(dim=1, out=1, span=span, stride=stride, low=low)
    found = window.halo(size, size // stride, parts)
    assert found == by_hand(window, size, size // stride, parts)
    assert found == (low, max(0, span - low - stride))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("span", "stride"), [(1, 2), (3, 1), (3, 2), (4, 3), (5, 1)])
def test_what_a_device_reads_is_what_its_windows_read(
    span: int, stride: int, parts: int
) -> None:
    """Of every padding, down to none and below, that leaves equal parts."""
    for size, low, high in itertools.product(
        range(3 * parts, 9 * parts, parts), range(-2, span + 2), range(-2, span + 2)
    ):
        result = (size + low + high - span) // stride + 1
        window = Window(dim=1, out=1, span=span, stride=stride, low=low)
        if result < parts or result % parts:
            continue
        halo = window.halo(size, result, parts)
        assert halo == by_hand(window, size, result, parts)
        reach = window.reach(size, result, parts)
        own, made = size // parts, result // parts
        for part in range(parts):
            first = part * own - reach[0] + window.start(size, result, parts, part)
            assert first == part * made * stride - low
            last = first + window.read(size, result, parts)
            assert part * own - reach[0] <= first
            assert last <= (part + 1) * own + reach[1]
            # Beyond what a neighbour sends lies padding.
            assert part == 0 or first >= part * own - halo[0]
            assert part == parts - 1 or last <= (part + 1) * own + halo[1]
