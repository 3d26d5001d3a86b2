"""Layouts and memory of many meshes at once against those of each mesh."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests.planner.one_layout import layout_shard_counts
from whalejax import jobs, models
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.capture.precision import at_precision
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.lowering.spmd.spmd_executor import offloadable_state
from whalejax.meshes import Cluster, cluster
from whalejax.meshes.measured_points import BandwidthPoint
from whalejax.planner.cost.layout_cases import LayoutCases, LayoutGrid
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    flow_cost,
    row_cost,
    row_hits,
)
from whalejax.planner.cost_terms import ALL
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.search.evaluator import SEARCHED_AXES, StepLayout
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.fused_parameters import FusedLayout, lying
from whalejax.planner.sharding.layout import Spec, Table, extend_spec, spec_of
from whalejax.planner.sharding.parameter_layout import lay_out
from whalejax.planner.sharding.sequence_parallel import shared_roles
from whalejax.planner.sharding.shard_counts import (
    ShardCounts,
    group_shard_counts,
    spec_shard_counts,
    table_shard_counts,
    with_storage_axis,
)


pytestmark = pytest.mark.relaxed_promotion  # Adam promotes its count.

AXES = ("data", "fsdp", "expert", "tensor")
ROLES = range(6)


def _same(cut: ShardCounts, spec: Spec, mesh: Mapping[str, int], at: int) -> bool:
    """Whether a cut is that of a layout in one of its meshes."""

    def here(value: Any) -> Any:
        return value[at] if isinstance(value, np.ndarray) else value

    one = spec_shard_counts(spec, mesh)
    used = {axis for axis, where in cut.axes.items() if here(where)}
    return [here(n) for n in cut.per_dim] == [*one.per_dim] and used == {*one.axes}


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_those_of_each_layout(seed: int) -> None:
    draw = random.Random(seed)
    roles = draw.sample(ROLES, k=5)
    layout = (tuple(roles[:1]), tuple(roles[1:3]), tuple(roles[3:4]))
    sizes = tuple(tuple(draw.choice((4, 6, 8, 12)) for _ in atoms) for atoms in layout)
    table: Table = {axis: tuple(draw.sample(ROLES, k=3)) for axis in AXES}
    # What only readers can name lends its axes to dimensions of their own.
    fused = FusedLayout(inner=((roles[2], 12),), others=(roles[0], roles[3]))
    meshes = [{axis: draw.choice((1, 2, 3, 4)) for axis in AXES} for _ in range(24)]
    columns = {axis: np.array([mesh[axis] for mesh in meshes]) for axis in AXES}
    columns["spare"] = np.array([draw.choice((1, 2)) for _ in meshes])
    shape = [int(np.prod(atoms)) for atoms in sizes]
    plain = table_shard_counts(layout, sizes, table, columns)
    lent = table_shard_counts(layout, sizes, table, columns, fused)
    more = with_storage_axis(lent, shape, "spare", columns, (2, 0))
    found = set()
    for at, mesh in enumerate(meshes):
        spec = lying(layout, sizes, fused, table, mesh)
        assert _same(plain, spec_of(layout, sizes, table, mesh), mesh, at)
        assert _same(lent, spec, mesh, at)
        one = {**mesh, "spare": int(columns["spare"][at])}
        assert _same(more, extend_spec(spec, shape, "spare", one, (2, 0)), one, at)
        found.add(spec)
    assert len(found) > 1  # one table gives unlike layouts


SMALL = {"embed": 256, "heads": 8, "mlp": 512, "sequence": 128, "vocab": 512}
PROGRAMS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "scanned": ("gpt-small", {**SMALL, "layers": 4, "scan_layers": True}, "bf16"),
    "written out": ("gpt-small", {**SMALL, "layers": 2, "scan_layers": False}, "bf16"),
    "experts": ("moe", {**SMALL, "layers": 2, "experts": 4}, "f32"),
}


def _cluster(text: str) -> Cluster:
    name, _, measured = text.partition(" ")
    machine = cluster(name)
    if not measured:
        return machine
    # Measured caches make small passes faster, so times of passes do not add up.
    rates = ((2**20, 4e12), (2**24, 2e12), (2**30, 1e12))
    points = tuple(BandwidthPoint(moved_bytes=n, bytes_per_second=r) for n, r in rates)
    nodes = tuple(
        replace(node, kind=replace(node.kind, memory_points=points))
        for node in machine.nodes
    )
    assert not nodes[0].kind.is_linear_in_bytes
    return replace(machine, nodes=nodes)


def _search(name: str, text: str, policy: str) -> Search:
    model, options, precision = PROGRAMS[name]
    job = models.job(model, **options)
    abstract = jobs.abstract_model(job)
    adapter = at_precision(adapt(abstract, job.loss_fn), precision)
    batch = jax.eval_shape(lambda: job.batch_at(0, 32))
    found = capture(adapter, batch, num_micro_batches=1, batch_axes=0)
    graph = found.with_remat(((ALL, policy),)).graph if policy != "none" else None
    analysed = analyse_graph(graph or found.graph)
    machine, adam = _cluster(text), optax.adam(1e-3)
    request = Request(
        optimizer=optimizer_bytes(adapter, adam, machine.platform),
        batch_bytes=tuple(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)),
        cast_bytes=0.5 if precision == "bf16" else 1.0,
        num_devices=machine.num_devices,
        hosted=lambda: offloadable_state(adapter, adam),
    )
    return Search(analysed.graph, analysed.dims, machine, request)


def _layouts(search: Search) -> dict[str, list[tuple[dict[str, int], Any, int, int]]]:
    """Mesh, tables, ZeRO and micro-batches of every layout, by its tables."""
    found: dict[str, list[tuple[dict[str, int], Any, int, int]]] = {}
    for context in (1, 2):
        for mesh in search.meshes(context):
            for tables in search._tables(mesh):
                for zero in (0, 1, 2) if mesh["data"] > 1 else (0,):
                    for count in search._micro_batches(mesh, tables):
                        row = mesh, tables, zero, count
                        found.setdefault(repr(tables), []).append(row)
    return found


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("text", ["h100:8", "v5e:4x4", "cpu:8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_of_many_layouts_is_that_of_each(
    name: str, text: str, policy: str
) -> None:
    """To the byte, whatever is in host memory."""
    search, draw, seen = _search(name, text, policy), random.Random(7), set()
    for rows in _layouts(search).values():
        tables, axes = rows[0][1], [*rows[0][0]]
        mesh = {axis: np.array([row[0][axis] for row in rows]) for axis in axes}
        zero, count = (np.array([row[i] for row in rows]) for i in (2, 3))
        groups = [group for group, _ in search.facts.groups]
        cuts = [group_shard_counts(x, tables[x.home], mesh, zero) for x in groups]
        s = CostSetting(
            mesh, count, search.cluster, search.dims, search.evaluator.batch_roles
        )
        for offload in ((), ("optimizer", "params")):
            laid = StepLayout(
                tables=tables, cuts=cuts, accumulates=count > 1, offload=offload
            )
            many = search.evaluator.layout_memory.of(laid, s)
            for at in draw.sample(range(len(rows)), k=min(8, len(rows))):
                sizes, _, level, parts = rows[at]
                layouts = lay_out(search.facts, tables, sizes, level)
                alone = StepLayout(
                    tables=tables,
                    cuts=layout_shard_counts(layouts, sizes),
                    accumulates=np.array([parts > 1]),
                    offload=offload,
                )
                one = search.evaluator.layout_memory.of(
                    alone, search.setting(sizes, parts)
                ).at(0)
                assert many.at(at) == one
                seen.add(one)
    assert len(seen) > 20


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("text", ["h100:8", "v5e:4x4", "cpu:8", "h100:8 measured"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_times_of_many_layouts_are_those_of_each(
    name: str, text: str, policy: str
) -> None:
    """In every term, with unlike tables, ZeRO levels and micro-batches at once."""
    search, draw = _search(name, text, policy), random.Random(11)
    every = [row for rows in _layouts(search).values() for row in rows]
    rows = draw.sample(every, k=min(60, len(every)))
    distinct = list({id(row[1]): row[1] for row in rows}.values())
    places = {id(tables): place for place, tables in enumerate(distinct)}
    grid = LayoutGrid(
        tables=distinct,
        table=np.array([places[id(row[1])] for row in rows]),
        mesh={a: np.array([row[0].get(a, 1) for row in rows]) for a in SEARCHED_AXES},
    )
    cases = LayoutCases(
        grid=grid,
        row=np.arange(len(rows)),
        zero=np.array([row[2] for row in rows]),
        count=np.array([row[3] for row in rows]),
    )
    many = search.evaluator.times(cases)
    bound = float(np.median(many.step))
    near, times = search.evaluator.near(cases, bound, sequence_parallel=False)
    assert {*np.flatnonzero(many.step <= bound)} <= {*near.tolist()}
    np.testing.assert_allclose(times.step, many.step[near], rtol=1e-12)
    for at in draw.sample(range(len(rows)), k=12):
        one = search.evaluator.times(search.evaluator.case(*rows[at]))
        for term, seconds in one.terms.items():
            assert many.terms[term][at] == pytest.approx(float(seconds[0]), rel=1e-12)
        s = search.setting(rows[at][0], rows[at][3])
        tables = rows[at][1]
        costs = [
            row_cost(r, row_hits(r, tables[r.task_graph], s), s)
            for r in search.rows.ops
        ]
        computes = sum(cost.compute_seconds for cost in costs) * rows[at][3]
        assert many.terms["compute"][at] == pytest.approx(computes, rel=1e-12)
        own = [c for cost in costs for c in cost.collectives if c.what != "gradient"]
        own += [c for flow in search.rows.flows for c in flow_cost(flow, tables, s)]
        run = [as_run(c, s)[0] for c in own]
        assert [*one.collectives[: len(run)]] == run
        gathered = [
            c.payload_bytes
            for c in one.collectives
            if (c.what, c.kind) == ("border", "all-gather")
        ]
        assert many.gathered[at] == max(gathered, default=0)
        assert many.wire[at] == sum(
            c.payload_bytes * c.times(rows[at][3]) for c in one.collectives
        )


@pytest.mark.parametrize("text", ["h100:8", "v5e:4x4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sharding_the_sequence_takes_no_less_than_its_bound(
    name: str, text: str
) -> None:
    """Every layout with a tensor axis, at every number of micro-batches."""
    plain = _search(name, text, "none")
    allowed = {plain.request.num_devices: range(1, 33)}
    cases = plain.at_every_count(allowed)
    _, least = plain.evaluator.times(cases).sequence_parallel(cases.mesh["tensor"])
    bounds: dict[object, float] = {}
    shared: dict[frozenset[int], None] = {}
    for place in np.flatnonzero(cases.mesh["tensor"] > 1).tolist():
        bounds[_layout_key(cases, place, ())] = float(least[place])
        roles = shared_roles(cases.tables_at(place), plain.options.batch)
        shared.setdefault(roles)
    shared.pop(frozenset(), None)
    compared = 0
    for split in map(plain.program.splits.of, shared):
        apart = Search(
            split.graph,
            plain.dims,
            plain.cluster,
            plain.request,
            beside=plain,
            split=split,
        )
        twins = apart.at_every_count(allowed)
        # A program for one sample has no dimension by which they are told.
        assert twins.count.max(initial=0) < plain.graph.batch_size
        steps = apart.evaluator.times(twins).step
        for place, seconds in enumerate(steps.tolist()):
            key = _layout_key(twins, place, split.parents)
            if key in bounds:
                assert seconds >= bounds[key] * (1 - 1e-9), twins.mesh_at(place)
                compared += 1
    assert compared > 30


def _layout_key(cases: LayoutCases, place: int, without: Container[int]) -> object:
    """Mesh, tables, ZeRO level and micro-batches of a case.

    Args:
        cases, place: The case.
        without: TaskGraphs that are left out.
    """
    tables = sorted(
        (home, tuple(sorted(table.items())))
        for home, table in cases.tables_at(place).items()
        if home not in without
    )
    mesh = tuple(cases.mesh_at(place).items())
    return mesh, tuple(tables), int(cases.zero[place]), int(cases.count[place])
