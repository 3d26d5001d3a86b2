"""The fullest moment of a step, on programs whose memory can be told by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from tests.planner.graphs import GraphBuilder
from tests.planner.plans import plan_of
from whalejax.meshes import cluster
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.model.graph import Graph, LoopResidual


DEVICES = 4
BATCH, WIDTH = 4096, 128
VALUE = 2 * BATCH * WIDTH // DEVICES
"""Bytes of one value on one device."""


def memory(graph: Graph, machine: str = "v5e:2x2", axis: str = "data") -> MemoryTerms:
    """Memory of a program where every device does the same."""
    count = cluster(machine).num_devices
    return plan_of(
        graph, machine, mesh={axis: count}, zero=0, num_micro_batches=1
    ).memory


def gelu(p: GraphBuilder, x: int) -> int:
    """Something like it: the input is read twice, and the result costs a tanh."""
    bent = p.unary("tanh", x)
    result = p.add(x, bent, kind="mul")
    p.keeps(0, 1)
    return result


def feed_forward() -> Graph:
    p = GraphBuilder("bfloat16", 2)
    x = p.batch("x", BATCH, WIDTH)
    x = p.einsum("bi,ij->bj", x, p.param("up", WIDTH, WIDTH))
    x = p.einsum("bi,ij->bj", gelu(p, x), p.param("down", WIDTH, WIDTH))
    x = p.einsum("bi,ij->bj", x, p.param("head", WIDTH, WIDTH))
    return p.graph(p.einsum("bj->", x))


def test_what_fusions_compute_again_is_not_kept() -> None:
    # Before the nonlinearity, after "down": what else there is follows from these.
    assert memory(feed_forward()).activations_bytes == 2 * VALUE


def test_a_library_product_needs_its_operand_in_memory() -> None:
    # The nonlinearity's result too.
    assert memory(feed_forward(), "h100:4").activations_bytes == 3 * VALUE


def test_a_product_that_gathers_its_weight_again_needs_its_operand_in_memory() -> None:
    # It is a checkpointed region of its own, and fusions end at its border.
    found = memory(feed_forward(), axis="fsdp")
    assert found.activations_bytes == 3 * VALUE


def test_what_is_narrower_than_its_sources_is_kept_beside_them() -> None:
    def program(wide: bool) -> Graph:
        p = GraphBuilder("bfloat16", 2)
        x = p.einsum(
            "bi,ij->bj", p.batch("x", BATCH, WIDTH), p.param("a", WIDTH, WIDTH)
        )
        if wide:
            x = p.cast(p.unary("exp", p.cast(x, "float32", 4)), "bfloat16", 2)
        else:
            x = p.add(p.unary("exp", x), kind="neg")
        x = p.einsum("bi,ij->bj", x, p.param("b", WIDTH, WIDTH))
        x = p.einsum("bi,ij->bj", x, p.param("c", WIDTH, WIDTH))
        return p.graph(p.einsum("bj->", x))

    # The exponential, and what the third product reads.
    assert memory(program(wide=False)).activations_bytes == 2 * VALUE
    # The exponential is twice as wide, and what is read of it in 16 bits is there too.
    assert memory(program(wide=True)).activations_bytes == 4 * VALUE


def test_float32_that_products_alone_read_is_kept_in_half_on_tpu() -> None:
    p = GraphBuilder()
    x = p.einsum("bi,ij->bj", p.batch("x", BATCH, WIDTH), p.param("a", WIDTH, WIDTH))
    x = p.einsum("bi,ij->bj", x, p.param("b", WIDTH, WIDTH))
    x = p.einsum("bi,ij->bj", x, p.param("c", WIDTH, WIDTH))
    graph = p.graph(p.einsum("bj->", x))
    tpu, gpu = memory(graph), memory(graph, "h100:4")
    # Two values: what the second and the third product read.
    assert gpu.activations_bytes == 2 * tpu.activations_bytes == 2 * (2 * VALUE)
    assert gpu.params_bytes == tpu.params_bytes


def residual(layers: int) -> Graph:
    p = GraphBuilder("bfloat16", 2)
    x = p.batch("x", BATCH, WIDTH)
    x = p.einsum("bi,ij->bj", x, p.param("in", WIDTH, WIDTH))
    for i in range(layers):
        y = p.einsum("bi,ij->bj", x, p.param(f"up.{i}", WIDTH, WIDTH))
        x = p.add(x, y)
    x = p.einsum("bi,ij->bj", x, p.param("head", WIDTH, WIDTH))
    return p.graph(p.einsum("bj->", x))


def test_the_sums_of_a_residual_stream_are_kept_once_each() -> None:
    found = [memory(residual(n)).activations_bytes for n in (2, 3, 7)]
    assert found[1] - found[0] == VALUE
    assert found[2] - found[1] == 4 * VALUE


def test_a_loop_keeps_what_its_differentiation_says() -> None:
    graph = residual(1)
    kept = next(op.results[0] for op in graph.ops if op.kind == "add")
    stacked = LoopResidual(tensor=kept, nbytes=DEVICES * VALUE // 2, trip=5)
    looped = dataclasses.replace(
        graph,
        stacked=(stacked,),
        ops=tuple(
            dataclasses.replace(op, trip=5) if 0 < i < 3 else op
            for i, op in enumerate(graph.ops)
        ),
    )
    # Five turns' halves, and what stands outside: the sum that the head reads.
    assert memory(looped).activations_bytes == 5 * VALUE // 2 + 5 * VALUE


def cross_entropy(widened: bool, *, hidden: bool = False) -> Graph:
    """Scores of which one is looked up, and all are summed as exponentials."""
    p = GraphBuilder("bfloat16", 2)
    x = p.batch("x", BATCH, WIDTH)
    if hidden:
        x = p.einsum("bi,ij->bj", x, p.param("up", WIDTH, WIDTH))
    scores = p.einsum("bi,iv->bv", x, p.param("head", WIDTH, 8 * WIDTH))
    if widened:
        scores = p.cast(scores, "float32", 4)
    picked = p.gather(scores, p.batch("index", BATCH))
    total = p.einsum("bv->b", p.unary("exp", scores))
    return p.graph(p.add(p.einsum("bv->", picked), p.einsum("b->", total)))


def test_what_a_lookup_reads_stands_in_memory_in_its_own_type() -> None:
    narrow, wide = memory(cross_entropy(False)), memory(cross_entropy(True))
    scores = 2 * BATCH * 8 * WIDTH // DEVICES
    # The scores, and their gradients on both sides of the nonlinearity.
    assert narrow.temporary_bytes - narrow.gradients_bytes == 2 * scores
    # Going forward: the scores as they are made, and twice as wide.
    assert wide.temporary_bytes - wide.gradients_bytes == 3 * scores


def test_a_gathered_head_is_there_while_logits_are_written_wider() -> None:
    found = memory(cross_entropy(True), axis="fsdp")
    scores, head = 2 * BATCH * 8 * WIDTH // DEVICES, 2 * WIDTH * 8 * WIDTH
    assert found.temporary_bytes - found.gradients_bytes == 3 * scores + head


@pytest.mark.parametrize("chunks", [1, 8])
def test_a_head_of_chunks_is_gathered_once_and_its_gradient_is_added_up(
    chunks: int,
) -> None:
    graph = cross_entropy(True, hidden=True)
    cut = [*graph.ops[:1], *(replace(op, chunks=chunks) for op in graph.ops[1:])]
    graph = replace(graph, ops=tuple(cut))
    plan = plan_of(graph, "v5e:2x2", mesh={"fsdp": 4}, zero=0, num_micro_batches=1)
    (leaf,) = (leaf for leaf in plan.leaves if leaf.path == "head")
    assert leaf.gathers == (2 if chunks == 1 else 1)
    scores, head = 2 * BATCH * 8 * WIDTH // DEVICES, 2 * WIDTH * 8 * WIDTH
    if chunks > 1:
        # Scores of a chunk and both their gradients, the head, and its own gradient.
        made = 3 * scores // chunks + 2 * head
        memory = plan.memory
        assert memory.temporary_bytes - memory.gradients_bytes >= made


@pytest.mark.parametrize(("width", "padded"), [(128, 128), (96, 96), (130, 130)])
def test_a_dimension_that_fills_lanes_is_found(width: int, padded: int) -> None:
    p = GraphBuilder("bfloat16", 2)
    x = p.batch("x", BATCH, width)
    x = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("in", width, width)))
    x = p.einsum("bi,ij->bj", x, p.param("out", width, width))
    found = memory(p.graph(p.einsum("bj->", x)))
    # The batch, a multiple of 128, lies in lanes.
    assert found.working_bytes == 2 * 2 * BATCH * padded // DEVICES


def test_a_tensor_without_such_a_dimension_grows() -> None:
    def working(machine: str) -> int:
        p = GraphBuilder("bfloat16", 2)
        x = p.batch("x", 4 * 96, 8)
        x = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("in", 8, 200)))
        x = p.einsum("bi,ij->bj", x, p.param("out", 200, 8))
        return memory(p.graph(p.einsum("bj->", x)), machine).working_bytes

    # 200 becomes 256: less waste than 96 becoming 128.
    assert working("v5e:2x2") == working("h100:4") * 256 // 200


def test_a_long_chain_of_cheap_operations_is_followed() -> None:
    p = GraphBuilder("bfloat16", 2)
    x = p.einsum("bi,ij->bj", p.batch("x", BATCH, WIDTH), p.param("a", WIDTH, WIDTH))
    for _ in range(2000):
        x = p.add(x, kind="neg")
    x = p.einsum("bi,ij->bj", x, p.param("b", WIDTH, WIDTH))
    assert memory(p.graph(p.einsum("bj->", x))).activations_bytes == VALUE


def test_gradients_reduced_whole_wait_whole_for_the_optimizer() -> None:
    def found(machine: str) -> MemoryTerms:
        p = GraphBuilder("bfloat16", 2)
        x = p.batch("x", 64, 1024)
        for i in range(3):
            x = p.einsum("bi,ij->bj", x, p.param(f"w{i}", 1024, 1024))
        graph = p.graph(p.einsum("bj->", x))
        return memory(graph, machine, "fsdp")

    # Over a whole torus of two equal lengths nothing is scattered; over 4x8 it is.
    three = 3 * 2 * 1024 * 1024
    assert found("v5e:4x4").gradients_bytes == three
    assert found("v5e:4x8").gradients_bytes == three // 32


def test_what_is_read_is_undone_before_a_gradient_is_made() -> None:
    p = GraphBuilder("bfloat16", 2)
    x = p.batch("x", 64, 32)
    x = p.einsum("bi,iv->bv", x, p.param("head", 32, 4096))
    found = memory(p.graph(p.einsum("bv->", p.unary("exp", x))), "h100:4")
    # The scores and twice their gradient, before the head's own gradient is there.
    assert found.temporary_bytes == 3 * 2 * 64 * 4096 // 4
