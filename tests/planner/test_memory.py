"""Memory by term, against sums written out by hand for a perceptron."""

from __future__ import annotations

import pytest

from tests.planner.graphs import GraphBuilder, mlp
from tests.planner.plans import plan_of
from whalejax.planner.cost_terms import MemoryTerms


BATCH, WIDTHS = 4096, (24, 320, 48, 40)
WEIGHTS = (24 * 320, 320 * 48, 48 * 40)
FLOAT = 4
PARAMS = FLOAT * sum(WEIGHTS)
GRADIENTS = FLOAT * (320 * 48 + 48 * 40)
"""Of the second product and of what lies behind it: the fullest moment is there."""
KEPT = FLOAT * BATCH * 320
"""The result of the first tanh, read by the second product's backward pass; the other
two were read before and are gone."""
LARGEST_WEIGHT = FLOAT * 320 * 48
LARGEST_VALUE = FLOAT * BATCH * 320


def memory(machine: str = "h100:8", **options: object) -> MemoryTerms:
    """Memory of the perceptron with Adam."""
    program, loss = mlp(BATCH, WIDTHS)
    return plan_of(program.graph(loss), machine, **options).memory


def test_one_device_holds_everything() -> None:
    found = memory("h100:1")
    assert found.params_bytes == PARAMS
    assert found.gradients_bytes == GRADIENTS
    assert found.optimizer_bytes == 2 * PARAMS + 4
    assert found.state_bytes == 0
    assert found.activations_bytes == KEPT
    assert found.working_bytes == 2 * LARGEST_VALUE


@pytest.mark.parametrize(
    ("zero", "gradients", "optimizer"),
    [
        (0, GRADIENTS, 2 * PARAMS),
        (1, GRADIENTS, 2 * PARAMS // 8),
        (2, GRADIENTS // 8, 2 * PARAMS // 8),
    ],
)
def test_zero_shards_what_it_says(zero: int, gradients: int, optimizer: int) -> None:
    found = memory(mesh={"data": 8}, zero=zero)
    assert found.params_bytes == PARAMS
    assert found.gradients_bytes == gradients
    assert found.optimizer_bytes == optimizer + 4
    assert found.activations_bytes == KEPT // 8


def test_fsdp_shards_all_and_gathers_one_layer_at_a_time() -> None:
    found = memory(mesh={"fsdp": 8})
    assert found.params_bytes == PARAMS // 8
    assert found.gradients_bytes == GRADIENTS // 8
    assert found.optimizer_bytes == 2 * PARAMS // 8 + 4
    assert found.activations_bytes == KEPT // 8
    # The weight in use and its gradient, and the temporaries.
    assert found.working_bytes == 2 * LARGEST_WEIGHT + 2 * LARGEST_VALUE // 8


def test_tensor_shards_weights_and_what_they_compute() -> None:
    program, loss = mlp(BATCH, WIDTHS)
    plan = plan_of(program.graph(loss), mesh={"tensor": 8})
    sharded = {leaf.path: leaf.compute_spec for leaf in plan.leaves}
    local = sum(
        FLOAT * n // (8 if any(spec) else 1)
        for n, spec in zip(WEIGHTS, sharded.values(), strict=True)
    )
    assert plan.memory.params_bytes == local
    assert plan.memory.optimizer_bytes == 2 * local + 4
    assert plan.memory.activations_bytes < KEPT


def test_micro_batches_keep_one_part_and_an_accumulator() -> None:
    whole, parts = (
        memory(mesh={"data": 8}, zero=0, num_micro_batches=n) for n in (1, 2)
    )
    assert parts.activations_bytes == whole.activations_bytes // 2
    # The sums of all gradients are there all the time, beside those just made.
    assert parts.gradients_bytes == PARAMS
    fresh = parts.working_bytes - whole.working_bytes // 2
    assert fresh == whole.gradients_bytes == GRADIENTS


def test_half_precision_keeps_masters() -> None:
    full, half = memory("h100:1"), memory("h100:1", cast_bytes=0.5)
    assert half.params_bytes == full.params_bytes
    # Where layers are unrolled, products cast what they read.
    assert half.working_bytes == full.working_bytes


def test_checkpointed_layers_are_given_casts() -> None:
    full, half = (checkpointed(3, True, cast_bytes=c) for c in (1.0, 0.5))
    layers = 3 * 2 * 64 * 256 * FLOAT
    assert half.working_bytes == full.working_bytes + layers // 2


def test_untrained_state_is_whole_on_every_device() -> None:
    found = memory(state_bytes=1000, mesh={"fsdp": 8})
    assert found.state_bytes == 1000
    assert found.total_bytes == sum(
        (
            found.params_bytes,
            found.gradients_bytes,
            found.optimizer_bytes,
            found.state_bytes,
            found.activations_bytes,
            found.working_bytes,
        )
    )


def checkpointed(layers: int, remat: bool, **options: object) -> MemoryTerms:
    """Layers of two tanh each, whose insides are recomputed or kept."""
    p = GraphBuilder()
    x = p.batch("x", BATCH, 64)
    x = p.einsum("bi,ij->bj", x, p.param("in", 64, 64))
    for i in range(layers):
        p.remat = i if remat else None
        h = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param(f"up.{i}", 64, 256)))
        x = p.unary("tanh", p.einsum("bj,ji->bi", h, p.param(f"down.{i}", 256, 64)))
    p.remat = None
    graph = p.graph(p.einsum("bi->", x))
    return plan_of(graph, "h100:1", **options).memory


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    layers = 5
    kept, recomputed = checkpointed(layers, False), checkpointed(layers, True)
    narrow, wide = FLOAT * BATCH * 64, FLOAT * BATCH * 256
    # In the last layer's last product all before it is kept.
    assert kept.activations_bytes == layers * (narrow + wide)
    assert recomputed.activations_bytes == layers * narrow
    # One layer's insides are rebuilt at a time.
    rebuilt = recomputed.working_bytes - kept.working_bytes
    assert rebuilt == wide


def test_a_loop_keeps_every_turn() -> None:
    def activations(trip: int) -> int:
        p = GraphBuilder()
        x = p.einsum("bi,ij->bj", p.batch("x", BATCH, 64), p.param("in", 64, 64))
        p.trip = trip
        h = p.unary("tanh", x)
        p.trip = 1
        h = p.einsum("bi,ij->bj", h, p.param("out", 64, 64))
        return plan_of(p.graph(p.einsum("bi->", h)), "h100:1").memory.activations_bytes

    assert activations(7) == 7 * activations(1)
