"""Cost rows and what they communicate, against formulas written out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.planner.graphs import GraphBuilder, Sizes, gpt
from whalejax.meshes import Cluster, cluster
from whalejax.meshes.cluster import COMPILERS
from whalejax.meshes.device_kinds import Platform
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    flow_cost,
    row_cost,
    row_hits,
)
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph, Mark
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan_entries import Collective
from whalejax.planner.sharding.fused_parameters import reading
from whalejax.planner.sharding.layout import (
    Table,
    extend_spec,
    local_bytes,
    shards,
    spec_of,
)
from whalejax.planner.sharding.parameter_layout import LeafFacts, OptimizerBytes


Z = Sizes()
LAYERS = 12
FLOAT = 4
BATCH, SEQ, EMBED = Z.batch, Z.seq, Z.embed
STREAM = BATCH * SEQ * EMBED
"""Elements of the residual stream."""


def mesh(**axes: int) -> dict[str, int]:
    """All planned axes, outermost first."""
    return {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, **axes}


def roles_of(dims: Dimensions, *sizes: int) -> tuple[int, ...]:
    """Roles by size; of the two sequences the one that holds tokens."""
    found = []
    for size in sizes:
        held = [r.index for r in dims.roles if r.size == size]
        found += held if size != SEQ else held[:1]
    return tuple(found)


CPU = dataclasses.replace(cluster("h100:8"), compiler=COMPILERS["cpu"])
"""A compiler that reduces every partial sum where it is made."""


def communicated(
    graph: Graph,
    table: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    *,
    dims: Dimensions | None = None,
    num_micro_batches: int = 1,
    machine: Cluster | None = None,
) -> list[Collective]:
    """Every collective of one pass under one table for the whole model."""
    dims = analyse(graph) if dims is None else dims
    rows = build_rows(graph, dims)
    s = CostSetting(
        sizes,
        num_micro_batches,
        machine or cluster("h100:8"),
        dims,
        frozenset(r.index for r in dims.batch),
    )
    tables: dict[int, Table] = {t.index: table for t in graph.task_graphs}
    found = []
    for row in rows.ops:
        found += row_cost(row, row_hits(row, table, s), s).collectives
    for flow in rows.flows:
        found += flow_cost(flow, tables, s)
    return found


def payload(found: list[Collective]) -> int:
    """Bytes of all collectives, repetitions counted."""
    return sum(c.payload_bytes * c.count for c in found)


# Rows.


def test_depth_costs_no_rows_and_doubles_their_counts() -> None:
    few, many = (
        build_rows(graph, analyse(graph)) for graph in (gpt(LAYERS), gpt(2 * LAYERS))
    )
    assert len(few.ops) == len(many.ops)
    assert len(few.flows) == len(many.flows)
    for one, two in zip(few.ops, many.ops, strict=True):
        assert one.kind == two.kind
        assert two.count == (2 * one.count if one.count > 1 else 1)
    assert sum(r.count > 1 for r in few.ops) == 10


def test_a_loop_multiplies_its_rows() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 8)
    w = p.param("w", 8, 16)
    p.trip = 5
    y = p.einsum("bi,ij->bj", x, w)
    p.trip = 1
    graph = p.graph(p.einsum("bj->", y))
    rows = build_rows(graph, analyse(graph)).ops
    assert [(r.kind, r.count) for r in rows] == [("dot_general", 5), ("reduce_sum", 1)]


def test_a_product_knows_which_roles_are_rows_and_columns() -> None:
    graph = gpt(1)
    dims = analyse(graph)
    rows = [r for r in build_rows(graph, dims).ops if r.product]
    sizes = {r.index: r.size for r in dims.roles}

    def named(roles: frozenset[int]) -> list[int]:
        return sorted(sizes[r] for r in roles)

    scores = next(r.product for r in rows if r.product and r.product.batch > 1)
    assert named(scores.batch_roles) == [8, 16]
    assert named(scores.m_roles) == [24] == named(scores.n_roles)
    assert scores.m_roles != scores.n_roles
    assert named(scores.k_roles) == [6]
    assert (scores.m, scores.k, scores.n, scores.batch) == (24, 6, 24, 128)


# Collectives of the whole model.


def test_data_parallelism_reduces_every_gradient_once() -> None:
    graph = gpt(LAYERS)
    dims = analyse(graph)
    found = communicated(graph, {"data": roles_of(dims, BATCH)}, mesh(data=8))
    params = sum(t.size for t in graph.params)
    gradients = [c for c in found if c.what == "gradient"]
    assert payload(gradients) == FLOAT * params
    # And the loss itself, one number.
    assert payload(found) == FLOAT * (params + 1)
    assert {c.kind for c in found} == {"all-reduce"}
    assert {c.axes for c in found} == {("data",)}


def test_data_parallelism_does_not_depend_on_its_degree() -> None:
    graph = gpt(2)
    dims = analyse(graph)
    table = {"data": roles_of(dims, BATCH)}
    two, eight = (communicated(graph, table, mesh(data=n)) for n in (2, 8))
    assert payload(two) == payload(eight)


def test_a_tied_embedding_is_reduced_once_for_each_use() -> None:
    tied, untied = gpt(2, tied=True), gpt(2)
    totals = []
    for graph in (tied, untied):
        table = {"data": roles_of(analyse(graph), BATCH)}
        totals.append(payload(communicated(graph, table, mesh(data=8))))
    assert totals[0] == totals[1]


@pytest.mark.parametrize(("compiler", "inputs"), [("gpu", 2), ("cpu", 4)])
def test_megatron_communicates_what_its_paper_says(
    compiler: Platform, inputs: int
) -> None:
    graph = gpt(LAYERS)
    dims = analyse(graph)
    table = {"tensor": roles_of(dims, Z.heads, Z.mlp, Z.vocab)}
    machine = dataclasses.replace(cluster("h100:8"), compiler=COMPILERS[compiler])
    found = communicated(graph, table, mesh(tensor=8), machine=machine)
    # Forward: behind the output and the down projection of each layer, behind the
    # embedding; and the sum of exponentials over the vocabulary.
    forward = 2 * LAYERS * STREAM + STREAM + BATCH * SEQ
    # Backward: at the inputs of attention and of the feed-forward of each layer, and
    # of the head; where partial sums are not added up first, at those of query, key
    # and value apart.
    backward = inputs * LAYERS * STREAM + STREAM
    phases = Counter[str]()
    for c in found:
        phases[c.phase] += c.payload_bytes * c.count
    assert phases == {"forward": FLOAT * forward, "backward": FLOAT * backward}


def test_tensor_times_data_divides_the_activations() -> None:
    graph = gpt(LAYERS)
    dims = analyse(graph)
    table = {
        "data": roles_of(dims, BATCH),
        "tensor": roles_of(dims, Z.heads, Z.mlp, Z.vocab),
    }
    found = communicated(graph, table, mesh(data=2, tensor=4), machine=CPU)
    by_what = Counter[str]()
    for c in found:
        by_what[c.what] += c.payload_bytes * c.count
    whole = {Z.heads, Z.mlp, Z.vocab}
    local = sum(
        t.size
        // (
            4
            if whole & {dims.roles[r].size for a in dims.layouts[t.id] for r in a}
            else 1
        )
        for t in graph.params
    )
    assert by_what["gradient"] == FLOAT * local
    activations = (6 * LAYERS + 2) * STREAM + BATCH * SEQ
    # One number more: the loss, reduced over data.
    assert by_what["activation"] == FLOAT * (activations // 2 + 1)


def test_sharding_embed_reduces_every_product_of_the_stream() -> None:
    graph = gpt(LAYERS)
    dims = analyse(graph)
    found = communicated(graph, {"tensor": roles_of(dims, EMBED)}, mesh(tensor=8))
    tokens = BATCH * SEQ
    heads = Z.heads * (2 * Z.key + Z.value)
    forward = LAYERS * (heads + Z.mlp) + Z.vocab
    backward = LAYERS * (Z.heads * Z.value + Z.mlp)
    assert payload(found) == FLOAT * tokens * (forward + backward)


def test_sharding_the_sequence_gathers_key_and_value() -> None:
    graph = gpt(LAYERS)
    dims = analyse(graph)
    found = communicated(graph, {"tensor": roles_of(dims, SEQ)}, mesh(tensor=8))
    gathers = [c for c in found if c.kind == "all-gather"]
    tokens = BATCH * SEQ
    assert payload(gathers) == FLOAT * LAYERS * tokens * Z.heads * (Z.key + Z.value)
    assert {c.what for c in gathers} == {"border"}
    assert {c.phase for c in gathers} == {"forward"}


def test_sums_over_two_dimensions_are_one_where_partial_sums_are_merged() -> None:
    graph = gpt(2)
    dims = analyse(graph)
    batch = dims.batch[0].index
    table = {"data": (batch,), "tensor": roles_of(dims, SEQ)}
    sizes = mesh(data=2, tensor=4)
    base = cluster("h100:8")
    profile = dataclasses.replace(base.compiler, merge_partials=False)
    apart = dataclasses.replace(base, compiler=profile)
    found = [communicated(graph, table, sizes, machine=m) for m in (base, apart)]
    once, twice = ([c for c in f if c.what == "gradient"] for f in found)
    assert {c.axes for c in once} == {("data", "tensor")}
    assert {c.axes for c in twice} == {("data",), ("tensor",)}
    assert payload(twice) == 2 * payload(once)


def test_micro_batches_divide_activations_and_not_gradients() -> None:
    graph = gpt(2)
    dims = analyse(graph)
    table = {
        "data": roles_of(dims, BATCH),
        "tensor": roles_of(dims, Z.heads, Z.mlp, Z.vocab),
    }
    whole = communicated(graph, table, mesh(data=2, tensor=4))
    parts = communicated(graph, table, mesh(data=2, tensor=4), num_micro_batches=4)
    for one, part in zip(whole, parts, strict=True):
        shared = one.what == "activation" and one.payload_bytes > FLOAT
        assert part.payload_bytes == one.payload_bytes // (4 if shared else 1)


def test_a_rematerialised_region_repeats_its_forward_collectives() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    a, b = p.param("a", 24, 32), p.param("b", 32, 24)
    p.remat = 1
    h = p.einsum("bi,ij->bj", x, a)
    y = p.unary("tanh", p.einsum("bj,ji->bi", h, b))
    p.remat = None
    graph = p.graph(p.einsum("bi->", y))
    dims = analyse(graph)
    found = communicated(graph, {"tensor": roles_of(dims, 32)}, mesh(tensor=8))
    (reduced,) = [c for c in found if c.phase == "forward"]
    assert (reduced.count, reduced.payload_bytes) == (2, FLOAT * 16 * 24)


def test_a_border_moves_what_changes_layout_and_fuses_where_specs_agree() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    p.mark(Mark(kind="replicate"), "replicate")
    h = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("up", 24, 48)))
    p.mark(Mark(kind="split"), "split")
    y = p.einsum("bj,jk->bk", h, p.param("head", 48, 40))
    graph = p.graph(p.einsum("bk->", y))
    dims = analyse(graph)
    rows = build_rows(graph, dims)
    batch = frozenset(r.index for r in dims.batch)
    s = CostSetting(mesh(tensor=8), 1, cluster("h100:8"), dims, batch)
    (flow,) = [
        f
        for f in rows.flows
        if 48 in {dims.roles[r].size for r in f.source.roles} and len(f.uses) == 1
        if f.uses[0].task_graph == 2 and not f.source.weight
    ]
    replicated: Table = {"tensor": tuple(batch)}

    def between(head: Table) -> list[tuple[str, str, int]]:
        found = flow_cost(flow, {0: {}, 1: replicated, 2: head}, s)
        return [(c.kind, c.phase, c.payload_bytes) for c in found]

    whole = FLOAT * 16 * 48
    # The head's classes are sharded: it reads all samples, and the cotangents that its
    # devices hold in part are added up where the samples belong.
    assert between({"tensor": roles_of(dims, 40)}) == [
        ("all-gather", "forward", whole),
        ("reduce-scatter", "backward", whole),
    ]
    assert between({"tensor": roles_of(dims, 48)}) == [
        ("all-to-all", "forward", whole // 8),
        ("all-to-all", "backward", whole // 8),
    ]
    assert between(replicated) == []


def test_partial_sums_are_scattered_where_every_reader_wants_them_sharded() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24, 32)
    p.mark(Mark(kind="split"), "split")
    h = p.einsum("bse,em->bsm", x, p.param("up", 32, 48))
    y = p.einsum("bsm,me->bse", h, p.param("down", 48, 32))
    p.mark(Mark(kind="replicate"), "replicate")
    z = p.unary("tanh", y)
    graph = p.graph(p.einsum("bse->", z))
    dims = analyse(graph)
    batch = frozenset(r.index for r in dims.batch)
    tables: dict[int, Table] = {
        0: {},
        1: {"tensor": roles_of(dims, 48)},
        2: {"tensor": tuple(r.index for r in dims.roles if r.size == 24)},
    }
    kinds = {}
    for name, machine in (("gpu", cluster("h100:8")), ("cpu", CPU)):
        s = CostSetting(mesh(tensor=8), 1, machine, dims, batch)
        flows = build_rows(graph, dims).flows
        kinds[name] = [
            (c.kind, c.phase)
            for f in flows
            if f.task_graph == 1 and 48 in {dims.roles[r].size for r in f.reduced}
            for c in flow_cost(f, tables, s)
        ]
    assert kinds["gpu"] == [("reduce-scatter", "forward"), ("all-gather", "backward")]
    assert kinds["cpu"] == [("all-reduce", "forward"), ("all-gather", "backward")]


def test_compute_divides_by_the_devices_that_share_it() -> None:
    graph = gpt(4, Sizes(batch=512, seq=64, embed=512, key=64, value=64, mlp=2048))
    dims = analyse(graph)
    batch = frozenset(r.index for r in dims.batch)

    def seconds(sizes: dict[str, int], table: Table) -> float:
        s = CostSetting(sizes, 1, cluster("h100:8"), dims, batch)
        rows = build_rows(graph, dims).ops
        return sum(row_cost(r, row_hits(r, table, s), s).compute_seconds for r in rows)

    alone = seconds(mesh(), {})
    shared = seconds(mesh(data=8), {"data": tuple(batch)})
    assert alone / 8 <= shared < alone / 4


def test_time_of_a_collective_counts_its_repetitions() -> None:
    s = CostSetting(mesh(data=8), 1, cluster("h100:8"), analyse(gpt(1)))
    one = Collective(
        kind="all-reduce",
        axes=("data",),
        phase="backward",
        what="gradient",
        payload_bytes=1000,
        count=1,
    )
    many = Collective(
        kind="all-reduce",
        axes=("data",),
        phase="backward",
        what="gradient",
        payload_bytes=1000,
        count=7,
    )
    assert as_run(many, s)[1] == pytest.approx(7 * as_run(one, s)[1])


# Layouts of tensors.


def test_a_spec_takes_the_first_role_that_fits_on_each_axis() -> None:
    table: Table = {"data": (0,), "tensor": (3, 2)}
    sizes = mesh(data=2, tensor=4)
    assert spec_of(((0,), (1,), (2,)), ((16,), (5,), (8,)), table, sizes) == (
        ("data",),
        (),
        ("tensor",),
    )


def test_two_axes_may_share_one_dimension_if_their_product_divides() -> None:
    table: Table = {"data": (0,), "tensor": (0,)}
    sizes = mesh(data=2, tensor=4)
    assert spec_of(((0,),), ((16,),), table, sizes) == (("data", "tensor"),)
    assert spec_of(((0,),), ((12,),), table, sizes) == (("data",),)


def test_only_the_major_atom_of_a_dimension_can_be_sharded() -> None:
    table: Table = {"tensor": (2,)}
    fused = ((0,), (1, 2, 3))
    assert spec_of(fused, ((5,), (3, 8, 6)), table, mesh(tensor=4)) == ((), ())
    major = ((0,), (2, 3))
    spec = spec_of(major, ((5,), (8, 6)), table, mesh(tensor=4))
    assert spec == ((), ("tensor",))


def test_storage_goes_behind_the_computation_where_it_divides() -> None:
    sizes = mesh(fsdp=4, tensor=2)
    spec = ((), ("tensor",))
    assert extend_spec(spec, (6, 16), "fsdp", sizes, (0, 1)) == ((), ("tensor", "fsdp"))
    assert extend_spec(spec, (8, 16), "fsdp", sizes, (0, 1)) == (("fsdp",), ("tensor",))
    assert extend_spec(spec, (6, 6), "fsdp", sizes, (0, 1)) == spec
    assert extend_spec((("fsdp",),), (8,), "fsdp", sizes, (0,)) == (("fsdp",),)
    assert shards(((), ("tensor", "fsdp")), sizes) == 8
    assert local_bytes(800, ((), ("tensor", "fsdp")), sizes) == 100


# Parameters stored in shards, and what stays whole.


def gathers_of(program: GraphBuilder, loss: int) -> dict[str, int]:
    """How often storage gathers each parameter in a micro-batch."""
    graph = program.graph(loss)
    dims = analyse(graph)
    facts = LeafFacts.of(graph, dims, reading(graph, dims), OptimizerBytes(by_path={}))
    return {
        t.path: facts.groups[index][0].gathers
        for t, index in zip(facts.tensors, facts.group_of, strict=True)
    }


def test_the_backward_pass_gathers_only_what_it_reads() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    first, bias = p.param("first", 24, 32), p.param("bias", 32)
    second = p.param("second", 32, 40)
    h = p.add(p.einsum("bi,ij->bj", x, first), p.reshape(bias, 1, 32))
    y = p.einsum("bj,jk->bk", p.unary("tanh", h), second)
    found = gathers_of(p, p.einsum("bk->", y))
    # No cotangent of the data is made, and a sum needs none of its terms.
    assert found == {"first": 1, "bias": 1, "second": 2}


def test_a_tied_table_is_gathered_in_both_of_its_forms() -> None:
    p = GraphBuilder()
    tokens = p.batch("tokens", 16, 24)
    table = p.param("table", 512, 32)
    x = p.gather(table, tokens)
    logits = p.einsum("bse,ev->bsv", x, p.einsum("ve->ev", table))
    found = gathers_of(p, p.einsum("bsv->", logits))
    # Looked up, multiplied with, and multiplied with again in the backward pass.
    assert found == {"table": 3}


def test_statistics_are_gathered_for_the_state_that_keeps_them_whole() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    h = p.einsum("bi,ij->bj", x, p.param("w", 24, 32))
    mean = p.einsum("bj->j", h)
    graph = p.graph(p.einsum("bj->", h))
    dims = analyse(graph)
    table = {"tensor": roles_of(dims, 32)}

    def gathered(whole: tuple[int, ...]) -> int:
        kept = dataclasses.replace(graph, whole=whole)
        found = communicated(kept, table, mesh(tensor=8))
        return payload([c for c in found if c.kind == "all-gather"])

    assert gathered(()) == 0
    assert gathered((mean,)) == FLOAT * 32
