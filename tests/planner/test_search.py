"""The search: all is enumerated, the best is taken, and the regimes are right."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.planner.graphs import GraphBuilder, Sizes, gpt
from tests.planner.plans import HUGE, WIDE, plan_of, search_of
from whalejax.meshes import cluster
from whalejax.planner.model.graph import Graph, Mark
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.layout_search import Search, meshes, ranked
from whalejax.planner.search.ranking import TIE
from whalejax.planner.search.request import LayoutCandidate
from whalejax.planner.sharding.layout import shards


def searched(graph: Graph, machine: str = "h100:8", **options: object) -> Search:
    """A search that has run."""
    search = search_of(graph, analyse(graph), machine, **options)
    search.run()
    return search


# Enumeration.


@pytest.mark.parametrize("count", [1, 2, 6, 8, 12, 64])
def test_meshes_are_all_factorisations(count: int) -> None:
    numbers = range(1, count + 1)
    brute = (
        {
            (data, fsdp, expert, count // (data * fsdp * expert))
            for data, fsdp, expert in itertools.product(numbers, repeat=3)
            if count % (data * fsdp * expert) == 0
        }
        if count <= 12
        else None
    )
    axes = ["data", "fsdp", "expert", "context", "tensor"]
    assert all(list(mesh) == axes for mesh in meshes(2))
    assert all(mesh.pop("context") == 1 for mesh in meshes(count))
    assert [m for m in meshes(12, 4) if m["context"] == 4] == list(meshes(12, 4))
    assert len(list(meshes(12, 4))) == len(list(meshes(3)))
    found = [(m["data"], m["fsdp"], m["expert"], m["tensor"]) for m in meshes(count)]
    assert len(found) == len(set(found))
    if brute is not None:
        assert set(found) == brute
    # 2^6 into four factors: the ways to put six twos into four boxes.
    assert count != 64 or len(found) == 84


def test_every_mesh_of_a_plain_model_is_weighed() -> None:
    search = searched(gpt(2, WIDE))
    weighed = {tuple(s.mesh.values()) for s in search.scored}
    every = (mesh for context in (1, 2, 4, 8) for mesh in meshes(8, context))
    assert weighed == {tuple(m.values()) for m in every if m["expert"] == 1}
    levels: dict[tuple[int, ...], set[int]] = {}
    for s in search.scored:
        levels.setdefault(tuple(s.mesh.values()), set()).add(s.zero)
    for mesh, found in levels.items():
        assert found == ({0, 1, 2} if mesh[0] > 1 else {0}), mesh


def test_every_set_of_dimensions_is_weighed_on_the_tensor_axis() -> None:
    graph = gpt(2, WIDE)
    search = searched(graph, mesh={"tensor": 8})
    (choice,) = search.options.choices.values()
    sizes = search.options.sizes
    fitting = {
        tuple(r for r in roles if sizes[r] % 8 == 0) for roles in choice.sets
    } - {()}
    assert {s.tables[0]["tensor"] for s in search.scored} == fitting


def test_what_is_fixed_is_obeyed() -> None:
    search = searched(gpt(2, WIDE), mesh={"fsdp": 4}, zero=1, num_micro_batches=2)
    assert {s.mesh["fsdp"] for s in search.scored} == {4}
    assert {s.zero for s in search.scored} == {1}
    assert {s.num_micro_batches for s in search.scored} == {2}
    rest = [
        (s.mesh["data"], s.mesh["context"], s.mesh["tensor"]) for s in search.scored
    ]
    assert set(rest) == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}


# Choice.


def test_the_winner_is_the_minimum_of_everything_weighed() -> None:
    for sizes in (WIDE, dataclasses.replace(WIDE, batch=8), Sizes()):
        search = searched(gpt(3, sizes))
        best, *_ = ranked([s for s in search.scored if s.fits])
        fitting = [s for s in search.scored if s.fits]
        fastest = min(s.time.step_seconds for s in fitting)
        tied = [s for s in fitting if s.time.step_seconds <= fastest * (1 + TIE)]
        assert best in tied
        for s in tied:
            assert (best.memory.total_bytes, best.wire_bytes) <= (
                s.memory.total_bytes,
                s.wire_bytes,
            )


@pytest.fixture(scope="module")
def some() -> LayoutCandidate:
    """A weighed plan to make others of."""
    return searched(gpt(1), mesh={"data": 8}).scored[0]


def like(
    some: LayoutCandidate, step: float, memory: int, wire: int = 0
) -> LayoutCandidate:
    """A weighed plan with this time, memory and traffic."""
    return dataclasses.replace(
        some,
        time=dataclasses.replace(type(some.time)(), compute_seconds=step),
        memory=type(some.memory)(params_bytes=memory),
        wire_bytes=wire,
    )


def test_ties_go_to_less_memory_then_to_less_communication(
    some: LayoutCandidate,
) -> None:
    fast = like(some, 1.000, memory=90)
    lean = like(some, 1.004, memory=50)
    slow = like(some, 1.006, memory=10)
    assert ranked([fast, lean, slow])[0] is lean
    talking, quiet = like(some, 1.0, 50, wire=2000), like(some, 1.0, 50, wire=1000)
    assert ranked([talking, quiet]) == [quiet, talking]


def test_a_hair_more_than_a_tie_is_slower(some: LayoutCandidate) -> None:
    fast, lean = like(some, 1.0, memory=90), like(some, 1.0051, memory=10)
    assert ranked([lean, fast]) == [fast, lean]


def test_plans_behind_the_first_are_in_order(some: LayoutCandidate) -> None:
    steps = [like(some, 1.0 + i, memory=1) for i in range(50)]
    assert ranked(steps[::-1]) == steps


# Regimes.


def stored(plan: Plan) -> float:
    """Bytes of parameters on one device, over all of them."""
    nbytes = [
        (leaf.shape, 4 * _size(leaf.shape), shards(leaf.param_spec, plan.axis_sizes))
        for leaf in plan.leaves
    ]
    return sum(n / parts for _, n, parts in nbytes) / sum(n for _, n, _ in nbytes)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def test_a_small_model_and_a_large_batch_are_data_parallel() -> None:
    plan = plan_of(gpt(4, dataclasses.replace(WIDE, batch=512)))
    # Sharding what is stored costs nothing that can be told apart, and saves memory.
    assert {axis for axis, _ in plan.axes} <= {"data", "fsdp"}
    plain = next(c for c in plan.candidates if c.layout == "data 8")
    assert abs(plain.step_seconds / plan.time.step_seconds - 1) < TIE


@pytest.mark.full
def test_parameters_that_do_not_fit_are_sharded() -> None:
    graph = gpt(30, HUGE)
    whole = sum(t.nbytes for t in graph.params)
    limit = cluster("h100:8").memory_bytes
    assert whole > limit
    plan = plan_of(graph)
    assert stored(plan) <= 0.5
    assert plan.memory.total_bytes <= limit
    plain = [c for c in plan.candidates if c.layout.startswith("data 8")]
    assert all("lacks" in c.verdict for c in plain)
    with pytest.raises(PlanError, match=r"no plan fits: the nearest \(data 8"):
        plan_of(graph, mesh={"data": 8})


@pytest.mark.full
def test_optimizer_state_that_does_not_fit_is_sharded_first() -> None:
    # Parameters and gradients fit on each device, with Adam's moments they do not.
    graph = gpt(8, dataclasses.replace(HUGE, batch=512))
    plan = plan_of(graph)
    assert plan.memory.optimizer_bytes < sum(2 * t.nbytes for t in graph.params) / 2


def test_a_batch_smaller_than_the_machine_leads_to_tensor() -> None:
    plan = plan_of(gpt(8, dataclasses.replace(HUGE, batch=2)))
    assert plan.axis_sizes["tensor"] >= 4
    sharded = {n for r in plan.compute for a, names in r.axes for n in names}
    assert "blocks.*.down.kernel[0]" in sharded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", [32, 64, 128])
def test_tensor_stays_inside_the_node_where_activations_outweigh_weights(
    batch: int,
) -> None:
    plan = plan_of(gpt(8, dataclasses.replace(HUGE, batch=batch, seq=4096)), "h100:4x8")
    assert plan.axis_sizes.get("tensor", 1) <= 8
    assert plan.num_devices == 32


def test_micro_batches_are_taken_where_activations_do_not_fit() -> None:
    graph = gpt(8, dataclasses.replace(WIDE, batch=512))
    free = plan_of(graph)
    assert free.num_micro_batches == 1
    tight = cluster("h100:8").with_memory(free.memory.total_bytes // 3)
    plan = plan_of(graph, tight, mesh={"data": 8})
    assert plan.num_micro_batches > 1
    assert plan.memory.total_bytes <= tight.memory_bytes
    assert plan.memory.activations_bytes < free.memory.activations_bytes


@pytest.mark.full
def test_more_devices_are_not_predicted_slower() -> None:
    graph = gpt(8, dataclasses.replace(HUGE, batch=256))
    few, many = plan_of(graph, "h200:1x8"), plan_of(graph, "h200:2x8")
    assert many.time.step_seconds < few.time.step_seconds


def test_the_same_graph_gives_the_same_plan() -> None:
    graph = gpt(3, WIDE)
    assert plan_of(graph) == plan_of(graph)


# Marks.


def marked_head(split: Mark, replicate: Mark, *, classes: int = 1_000_000) -> Graph:
    """A backbone of 25M parameters under one mark, a wide classifier under another."""
    p = GraphBuilder()
    x = p.batch("x", 64, 4096)
    p.mark(replicate, "replicate")
    h = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("up", 4096, 4096)))
    h = p.einsum("bi,ij->bj", h, p.param("down", 4096, 2048))
    p.mark(split, "split")
    logits = p.einsum("bi,ic->bc", h, p.param("head.kernel", 2048, classes))
    return p.graph(p.einsum("bc->", p.unary("exp", logits)))


def test_whales_hybrid_splits_the_classes_and_replicates_the_backbone() -> None:
    graph = marked_head(Mark(kind="split"), Mark(kind="replicate"))
    plan = plan_of(graph)
    assert plan.axes == (("tensor", 8),)
    head = plan.leaf("head.kernel")
    assert head.compute_spec == ((), ("tensor",))
    assert plan.leaf("up").compute_spec == ((), ())
    by_name = {r.task_graph: dict(r.axes) for r in plan.compute}
    assert by_name["replicate"]["tensor"] == ("batch",)
    assert by_name["split"]["tensor"] == ("head.kernel[1]",)
    assert plan.batch[0].spec == (("tensor",), ())
    assert "2 marked TaskGraphs obeyed" in plan.notes


def test_a_count_on_the_mark_leaves_the_rest_to_data() -> None:
    split = Mark(kind="split", attributes=(("devices", "2"),))
    graph = marked_head(split, Mark(kind="replicate"), classes=100_000)
    plan = plan_of(graph)
    sizes = plan.axis_sizes
    assert sizes["tensor"] == 2
    assert sizes.get("data", 1) * sizes.get("fsdp", 1) == 4


def test_fresh_memory_is_a_term_of_the_step() -> None:
    graph = gpt(2, WIDE)
    machine = cluster("h100:8")
    kind = dataclasses.replace(machine.slowest, fresh_bytes_per_second=1e9)
    slow = dataclasses.replace(
        machine, nodes=tuple(dataclasses.replace(n, kind=kind) for n in machine.nodes)
    )
    for found, rate in ((machine, None), (slow, 1e9)):
        plan = plan_of(graph, found, mesh={"data": 8})
        fresh = plan.memory.temporary_bytes / rate if rate else 0.0
        assert plan.time.allocation_seconds == pytest.approx(fresh)
