"""The wide search against every case tried one by one, and its parts against theirs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tests.planner.graphs import stacked
from tests.planner.oracle import Oracle
from whalejax.estimates.decoder import DecoderSizes, decoder_graph
from whalejax.meshes import Cluster, cluster
from whalejax.planner.balance.shares import pieces_at, smallest_pace
from whalejax.planner.cost.collectives import (
    axis_parts,
    collective_seconds,
    runs_as,
    span_rates,
    spans_of,
)
from whalejax.planner.errors import PlanError
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.schedules import most_in_flight, schedule
from whalejax.planner.pipeline.simulate import (
    STEADY_AFTER,
    any_cut_share,
    compiled,
    simulate,
)
from whalejax.planner.plan.plan_any import decide_any
from whalejax.planner.search.batched.branch_and_bound import WideSearch
from whalejax.planner.search.batched.cases import Cases, Placement
from whalejax.planner.search.batched.mesh_grid import ORDERS, Frames
from whalejax.planner.search.batched.partition import cut_layers
from whalejax.planner.search.batched.step_time import CaseCosts, settle, weigh
from whalejax.planner.search.enumerate import Search
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import GRID_AXES
from whalejax.planner.sharding.parameter_layout import OptimizerBytes


MOST_CHOICES = 9000
"""Cases that a machine tries one by one in a few seconds."""


def decoder(batch: int, regions: int = 1, **sizes: int) -> Graph:
    """A decoder in one TaskGraph, or with the head in one of its own."""
    given_sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512, **sizes}
    shape = DecoderSizes(**given_sizes)  # type: ignore[arg-type]
    graph = stacked(decoder_graph(shape, batch), shape.layers)
    head = len(graph.task_graphs) - 1
    return dataclasses.replace(
        graph,
        ops=tuple(
            dataclasses.replace(
                op, task_graph=int(regions > 1 and op.task_graph == head)
            )
            for op in graph.ops
        ),
        task_graphs=tuple(
            dataclasses.replace(region, index=index)
            for index, region in enumerate(graph.task_graphs[:regions])
        ),
    )


def request_of(graph: Graph, machine: Cluster, cast_bytes: float = 1.0) -> Request:
    return Request(
        optimizer=OptimizerBytes(by_path={t.path: 4 * t.size for t in graph.params}),
        num_devices=machine.num_devices,
        cast_bytes=cast_bytes,
    )


def with_memory(machine: Cluster, device: float, host: float | None) -> Cluster:
    """The same devices with so many bytes, on them and on their hosts."""
    kinds = {
        kind.name: dataclasses.replace(
            kind,
            memory_bytes=int(device),
            host_memory_bytes=None if host is None else int(host),
            host_link_bytes_per_second=16e9,
        )
        for kind in machine.kinds
    }
    nodes = tuple(
        dataclasses.replace(node, kind=kinds[node.kind.name]) for node in machine.nodes
    )
    return dataclasses.replace(machine, nodes=nodes)


@pytest.mark.full
@settings(
    max_examples=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@example(1, 1024, 32_000, 1024, 3, 1, "v5e:2x2", 1.5, 4.0, 0.5)
@given(
    layers=st.integers(1, 6),
    hidden=st.sampled_from([256, 1024]),
    vocab=st.sampled_from([512, 32_000]),
    seq=st.sampled_from([128, 1024]),
    batch=st.integers(1, 4),
    regions=st.sampled_from([1, 1, 2]),
    text=st.sampled_from(
        [
            "h100:2",
            "v5e:2x2",
            "h100:2x2",
            "a100-80:2+h100:2",
            "a100-80:2+v100-32:1",
            "v100-32:6",
            "h100:4+a100-80:4",
            "h100:8",
        ]
    ),
    room=st.sampled_from([0.6, 1.5, 4.0, 20.0]),
    host=st.sampled_from([None, 4.0]),
    cast=st.sampled_from([1.0, 0.5]),
)
def test_nothing_beats_the_plan_that_was_found(
    layers: int,
    hidden: int,
    vocab: int,
    seq: int,
    batch: int,
    regions: int,
    text: str,
    room: float,
    host: float | None,
    cast: float,
) -> None:
    graph = decoder(
        batch,
        regions,
        layers=layers,
        hidden=hidden,
        ffn=3 * hidden,
        vocab=vocab,
        seq=seq,
    )
    whole = sum(t.nbytes for t in graph.params)
    machine = with_memory(cluster(text), room * whole, host and host * whole)
    search = WideSearch(graph, machine, request_of(graph, machine, cast))
    search.run()
    assume(search.tally.covered <= MOST_CHOICES)
    assert search.tally.best == pytest.approx(Oracle(search).best(), rel=1e-9)
    assert search.tally.gap == 0 or search.tally.best == math.inf


def test_it_covers_what_the_oracle_counts() -> None:
    graph = decoder(2, layers=3, hidden=256, ffn=768, seq=128)
    machine = with_memory(cluster("h100:2x2"), 1e12, None)
    search = WideSearch(graph, machine, request_of(graph, machine))
    search.run()
    assert search.model.layers == 3
    assert search.tally.covered == sum(1 for _ in Oracle(search).choices())
    assert 0 < search.tally.weighed


def test_a_plain_case_costs_what_a_plain_plan_costs() -> None:
    graph = decoder(8, layers=1, hidden=256, ffn=768, seq=128)
    machine = cluster("h100:8")
    request = dataclasses.replace(request_of(graph, machine), num_micro_batches=1)
    analysed = analyse_graph(graph)
    search = Search(analysed.graph, analysed.dims, machine, request)
    search.run()
    wide = WideSearch(graph, machine, request)
    wide.run()
    plain = {}
    for case in wide.cases:
        f = case.frames
        usual = f.stage[0] == 1 and not (f.ring[0] or f.order[0] or f.offload[0])
        if usual and not case.variant.sequence_parallel and not f.remat[0]:
            mesh = (int(f.data[0]), int(f.fsdp[0]), int(f.zero[0]))
            plain[mesh] = case
    compared = 0
    for scored in search.scored:
        mesh = (scored.mesh["data"], scored.mesh["fsdp"], scored.zero)
        if mesh in plain and scored.mesh["tensor"] == 1:
            case = plain[mesh]
            assert case.step_seconds == pytest.approx(
                scored.time.step_seconds, rel=1e-4
            )
            # The wide search adds up what need not be there at the same moment.
            assert scored.memory.total_bytes <= case.memory_bytes * (1 + 1e-4)
            compared += 1
    assert compared


@pytest.mark.parametrize(
    "kind",
    [
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
        "collective-permute",
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        *("h100:2x4", "v5e:2x4", "v5e:4x4", "v5e:2x2x4", "a100-80:3x4"),
        *("v5p:2x2x2", "v5p:4x4x4", "threads"),
    ],
)
def test_rates_of_links_are_those_of_one_mesh(kind: str, text: str) -> None:
    machine = cluster("h100:8" if text == "threads" else text)
    if text == "threads":
        levels = [dataclasses.replace(v, shared=True) for v in machine.levels]
        machine = dataclasses.replace(machine, levels=tuple(levels))
    total = machine.num_devices
    meshes = [
        sizes
        for sizes in itertools.product(range(1, total + 1), repeat=3)
        if math.prod(sizes) == total
    ]

    def size_of(axis: str, sizes: tuple[int, ...]) -> int:
        names = ["data", "context", "tensor"]
        return sizes[names.index(axis)] if axis in names else 1

    for order in ORDERS:
        inside = [axis for axis in reversed(order)]
        columns = [np.array([size_of(a, m) for m in meshes]) for a in inside]
        which = [np.full(len(meshes), GRID_AXES.index(a)) for a in inside]
        spans = spans_of(
            ("data", "tensor"),
            list(zip(which, columns, strict=True)),
            GRID_AXES,
            machine,
        )
        per_byte, per_time = span_rates(kind, spans, machine)  # type: ignore[arg-type]
        for index, sizes in enumerate(meshes):
            mesh = {axis: size_of(axis, sizes) for axis in order}
            parts = axis_parts(("data", "tensor"), mesh, machine)
            run = runs_as(kind, parts, machine)  # type: ignore[arg-type]
            expected = collective_seconds(run, 1e6, parts) if parts else 0.0
            assert 1e6 * per_byte[index] + per_time[index] == pytest.approx(expected)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seconds=st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.7]), min_size=3, max_size=3),
    fixed=st.lists(st.sampled_from([0.0, 0.4, 2.0, 30.0]), min_size=3, max_size=3),
    total=st.integers(1, 12),
)
def test_the_smallest_pace_is_the_smallest(
    counts: list[int], seconds: list[float], fixed: list[float], total: int
) -> None:
    groups = list(zip(counts, seconds, fixed, strict=False))
    workers, each, besides = (
        [np.array([float(g[i])]) for g in groups] for i in range(3)
    )
    found = float(smallest_pace(workers, each, besides, total)[0])
    ends = sorted(e + k * t for _, t, e in groups for k in range(1, total + 1))
    expected = next(
        end
        for end in ends
        if sum(n * max(0, math.floor((end - e) / t + 1e-9)) for n, t, e in groups)
        >= total
    )
    assert found == pytest.approx(expected)
    together = pieces_at(np.array([found]), workers, each, besides)[1]
    assert float(together[0]) >= total


@pytest.mark.parametrize(
    ("name", "stages", "parts", "chunks"),
    [
        ("1f1b", 4, 8, 1),
        ("1f1b-ahead", 3, 7, 1),
        ("gpipe", 3, 5, 1),
        ("interleaved", 4, 8, 3),
        ("1f1b", 1, 3, 1),
    ],
)
def test_many_simulations_are_one_each(
    name: str, stages: int, parts: int, chunks: int
) -> None:
    table = schedule(name, stages, parts, chunks)
    random = np.random.default_rng(0)
    forward, backward = random.random((2, stages * chunks, 5))
    transfer = random.random(5)
    found = compiled(table).step_seconds(forward, backward, transfer)
    for case in range(5):
        one = simulate(table, forward[:, case], backward[:, case], transfer[case])
        assert found[case] == pytest.approx(one.step_seconds)
    assert table.in_flight == tuple(
        most_in_flight(name, stages, stage, parts, chunks) for stage in range(stages)
    )


def test_an_impossible_request_names_what_lacks() -> None:
    graph = decoder(4, layers=4, hidden=1024, ffn=3072, seq=128)
    machine = with_memory(cluster("h100:2"), 1e6, None)
    with pytest.raises(PlanError) as caught:
        decide_any(graph, machine, request_of(graph, machine))
    text = str(caught.value)
    assert text.startswith(
        "no plan fits, with anything computed again or moved to host"
    )
    assert " bytes) of 1 MB per device" in text
    machine = with_memory(cluster("h100:2"), 7e7, 1.2e7)
    with pytest.raises(PlanError, match="of host memory per device"):
        decide_any(graph, machine, request_of(graph, machine))


def test_every_kind_must_hold_an_even_share() -> None:
    graph = decoder(4, layers=2, hidden=256, ffn=768, seq=128)
    machine = cluster("a100-80:2+h100:2")
    small = dataclasses.replace(machine.kinds[1], memory_bytes=10**6)
    nodes = tuple(
        dataclasses.replace(n, kind=small) if n.kind.name == "h100" else n
        for n in machine.nodes
    )
    machine = dataclasses.replace(machine, nodes=nodes)
    request = dataclasses.replace(
        request_of(graph, machine), mesh={"data": 4, "stage": 1}
    )
    search = WideSearch(graph, machine, request)
    assert not search.run()


def test_a_long_pipeline_is_timed_by_its_own_pace() -> None:
    table = schedule("1f1b", 4, 64)
    forward, backward = np.ones((4, 1)), 2 * np.ones((4, 1))
    whole = simulate(table, [1.0] * 4, [2.0] * 4, 0.5).step_seconds
    handed = np.array([0.5])
    long = float(compiled(table).step_seconds(forward, backward, handed)[0])
    some, fewer = (
        float(
            compiled(schedule("1f1b", 4, n)).step_seconds(forward, backward, handed)[0]
        )
        for n in (STEADY_AFTER * 4, (STEADY_AFTER - 1) * 4)
    )
    assert long == pytest.approx(whole)
    assert some + (64 - STEADY_AFTER * 4) * (some - fewer) / 4 == pytest.approx(whole)


@given(
    cut=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    parts=st.integers(1, 8),
)
def test_no_cut_beats_the_least_of_all_cuts(cut: list[int], parts: int) -> None:
    table = schedule("1f1b", len(cut), parts)
    found = simulate(table, cut, [2 * n for n in cut]).step_seconds
    one = np.ones(1)
    share = any_cut_share(parts * one, len(cut) * one, one)[0]
    assert found >= 3 * sum(cut) * share * (1 - 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["a100-80:8", "a100-80:4+v100-32:4"])
@pytest.mark.parametrize("layers", [6, 7, 11])
def test_no_schedule_is_faster_than_its_bound(
    monkeypatch: pytest.MonkeyPatch, text: str, layers: int
) -> None:
    kept = WideSearch._settle
    settled: collections.Counter[bool] = collections.Counter()

    def checked(
        self: WideSearch, placement: Placement, frames: Frames, found: CaseCosts
    ) -> None:
        piped = np.flatnonzero(frames.stage > 1)
        if placement.by != "replicas" and len(piped):
            some = frames.take(piped)
            cases = Cases(self.model, some, placement, None)
            cut_layers(cases)
            exact = weigh(cases)
            bound = exact.pipeline.copy()
            settle(cases, exact, np.arange(len(some)), some.micro_batches)
            assert (exact.pipeline >= bound * (1 - 1e-9)).all()
            uneven = (some.chunks > 1) & (layers % (some.stage * some.chunks) > 0)
            settled[True] += int(uneven.sum())
            settled[False] += int((~uneven).sum())
        kept(self, placement, frames, found)

    monkeypatch.setattr(WideSearch, "_settle", checked)
    graph = decoder(16, hidden=256, ffn=1024, layers=layers, seq=512)
    machine = cluster(text)
    for stages in (2, 4):
        asked = dataclasses.replace(request_of(graph, machine), mesh={"stage": stages})
        WideSearch(graph, machine, asked).run()
    assert settled[False]
    assert settled[True] or "+" in text


def test_too_many_task_graphs_are_said() -> None:
    sizes = DecoderSizes(
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=768,
        vocab=512,
        seq=128,
    )
    graph = decoder_graph(sizes, 4)
    machine = cluster("h100:4")
    search = WideSearch(graph, machine, request_of(graph, machine))
    assert search.limits and all("so many TaskGraphs" in text for text in search.limits)
