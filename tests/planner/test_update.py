"""What storage costs on CPUs: arrays turned round, what an update evaluates, room."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planner.graphs import GraphBuilder
from tests.planner.one_layout import layout_shard_counts
from tests.planner.plans import adam, plan_of
from whalejax.meshes import Cluster, cluster
from whalejax.planner.cost.operation_cost import CostSetting, row_seconds
from whalejax.planner.cost.optimizer_step import (
    CUT_TURNS,
    GATHER_TURNS,
    turning_seconds,
    update_seconds,
)
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.sharding.fused_parameters import reading
from whalejax.planner.sharding.operation_rows import Row
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    OptimizerBytes,
    lay_out,
)


DEVICES = 4
RATE = 1e6


def machine() -> Cluster:
    """CPUs that turn arrays round slowly, and evaluate roots slowly."""
    found = cluster(f"cpu:{DEVICES}")
    kind = dataclasses.replace(
        found.slowest, turned_bytes_per_second=RATE, transcendentals_per_second=RATE
    )
    nodes = tuple(dataclasses.replace(node, kind=kind) for node in found.nodes)
    return dataclasses.replace(found, nodes=nodes)


def multiplied(rows: int, columns: int) -> Graph:
    """Data that a weight is multiplied with, behind another weight."""
    p = GraphBuilder()
    x = p.einsum("bi,ij->bj", p.batch("x", 16, 3), p.param("first", 3, rows))
    x = p.einsum("bi,ij->bj", x, p.param("w", rows, columns))
    return p.graph(p.einsum("bj->", x))


def looked_up(rows: int, columns: int) -> Graph:
    """A table of which rows are taken and which logits are products with."""
    p = GraphBuilder()
    table = p.param("table", rows, columns)
    x = p.gather(table, p.batch("tokens", 16, 24))
    logits = p.einsum("bse,ev->bsv", x, p.einsum("ve->ev", table))
    return p.graph(p.einsum("bsv->", logits))


def turned(graph: Graph, axis: str, zero: int, micro_batches: int = 1) -> float:
    """Bytes turned round in a step where an axis of four shards the storage."""
    mesh = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    mesh[axis] = DEVICES
    dims = analyse(graph)
    facts = LeafFacts.of(graph, dims, reading(graph, dims), adam(graph))
    tables = {t.index: {axis: (dims.batch[0].index,)} for t in graph.task_graphs}
    layouts = lay_out(facts, tables, mesh, zero)
    cuts = layout_shard_counts(layouts, mesh)
    return turning_seconds(facts, cuts, machine(), 1.0, micro_batches) * RATE


def test_what_is_gathered_along_its_last_dimension_is_turned() -> None:
    last = 4 * 7 * 64  # seven rows divide by no axis
    assert turned(multiplied(7, 64), "fsdp", 0) == GATHER_TURNS * 2 * last
    assert turned(multiplied(7, 64), "fsdp", 0, 3) == 3 * GATHER_TURNS * 2 * last
    assert turned(multiplied(64, 7), "fsdp", 0) == GATHER_TURNS * 4 * 3 * 64  # "first"


def test_an_update_cuts_and_gathers_along_the_last_dimension() -> None:
    assert turned(multiplied(7, 64), "data", 1, 3) == CUT_TURNS * 4 * 7 * 64


def test_tables_that_are_looked_up_are_read_as_they_lie() -> None:
    graph = looked_up(511, 32)
    assert turned(graph, "fsdp", 0) == 0
    assert turned(graph, "data", 1) == pytest.approx(CUT_TURNS * 4 * 511 * 32)


def test_kernels_of_convolutions_are_known_behind_a_cast() -> None:
    p = GraphBuilder()
    kernel = p.unary("convert_element_type", p.param("kernel", 16, 32))
    x = p.unary("tanh", p.batch("x", 8, 16))
    x = p.einsum("bi,ij->bj", x, kernel)
    graph = p.graph(p.einsum("bj->", x))
    convolved = dataclasses.replace(
        graph,
        ops=tuple(
            dataclasses.replace(op, kind="conv_general_dilated")
            if op.matmul is not None
            else op
            for op in graph.ops
        ),
    )
    dims = analyse(graph)
    facts = LeafFacts.of(
        convolved, dims, reading(graph, dims), OptimizerBytes(by_path={})
    )
    ((group, _),) = facts.groups
    assert (group.turns, group.uses) == (1, 1)


def test_an_update_takes_the_roots_of_its_own_shard() -> None:
    graph = multiplied(8, 64)
    dims, slow = analyse(graph), machine()
    mesh = {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    tables = {t.index: {"data": (dims.batch[0].index,)} for t in graph.task_graphs}
    elements = 8 * 64 + 3 * 8

    def seconds(zero: int, operations: float) -> float:
        bytes_of = dataclasses.replace(adam(graph), operations=operations)
        facts = LeafFacts.of(graph, dims, reading(graph, dims), bytes_of)
        layouts = lay_out(facts, tables, mesh, zero)
        return update_seconds(facts, layout_shard_counts(layouts, mesh), slow)

    assert seconds(0, 5.0) - seconds(0, 0.0) == pytest.approx(5 * elements / RATE)
    assert seconds(1, 5.0) - seconds(1, 0.0) == pytest.approx(5 * elements / RATE / 4)


def memory(graph: Graph, **options: object) -> MemoryTerms:
    """On four CPU devices that all take a part of the batch."""
    return plan_of(
        graph, "cpu:4", mesh={"data": 4}, num_micro_batches=1, **options
    ).memory


def test_cpus_hold_all_gradients_before_and_after_they_are_reduced() -> None:
    found = memory(multiplied(512, 512), zero=0)
    nbytes = 4 * (512 * 512 + 3 * 512)
    assert (found.gradients_bytes, found.working_bytes) == (nbytes, nbytes)
    assert found.activations_bytes == 0


def test_what_is_cut_afterwards_is_reduced_alone() -> None:
    found = memory(multiplied(512, 512), zero=1)
    assert found.gradients_bytes == 4 * (512 * 512 + 3 * 512)
    assert found.working_bytes == 4 * 512 * 512


def test_each_use_of_a_parameter_has_a_gradient_of_its_own() -> None:
    found = memory(looked_up(4096, 256), zero=0)
    assert found.gradients_bytes == found.working_bytes == 2 * 4 * 4096 * 256


def test_gradients_that_storage_leaves_whole_are_reduced_whole() -> None:
    p = GraphBuilder()
    x = p.einsum("bi,ij->bj", p.batch("x", 16, 64), p.param("w", 64, 128))
    odd = p.einsum("bi,ij->bj", p.batch("y", 16, 33), p.param("odd", 33, 35))
    graph = p.graph(p.add(p.einsum("bj->", x), p.einsum("bj->", odd)))
    found = plan_of(graph, "h100:4", mesh={"fsdp": 4}, num_micro_batches=1)
    gradients = {
        c.kind: c.payload_bytes for c in found.collectives if c.what == "gradient"
    }
    assert gradients == {"reduce-scatter": 4 * 64 * 128, "all-reduce": 4 * 33 * 35}


def test_the_operand_with_the_rows_of_a_weight_is_turned_for_its_gradient() -> None:
    plain, tied = multiplied(7, 64), looked_up(511, 32)
    assert [*plain.turned().values()] == [0, 0]
    (slot,) = tied.turned().values()
    assert slot == 2  # the cotangent of the logits: the table's rows are their columns


def test_turning_it_takes_time_on_cpus() -> None:
    graph = multiplied(8, 64)
    dims, slow = analyse(graph), machine()
    mesh = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    profile = dataclasses.replace(slow.compiler, copies_kernels=False)
    plain = dataclasses.replace(slow, compiler=profile)
    first, second = (r for r in build_rows(graph, dims).ops if r.product is not None)

    def behind(row: Row, on: Cluster) -> float:
        s = CostSetting(mesh, 1, on, dims)
        return float(row_seconds(row, {}, s, on.slowest)[1])

    for row, width in ((first, 3), (second, 8)):
        turned = behind(row, slow) - behind(row, plain)
        assert turned == pytest.approx(4 * 16 * width / RATE)
