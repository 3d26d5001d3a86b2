"""What one device does: local sizes and collectives, against what papers say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from tests.planner.runs import SIZES, run
from whalejax.estimates.workload import (
    HEAD,
    LAYER,
    MicroBatchWork,
    levels_of,
    wires,
    work_of,
)


STREAM = 2 * 2 * SIZES.seq * SIZES.hidden
"""Bytes of the residual stream: two samples in bf16."""


def layer_traffic(work: MicroBatchWork) -> Counter[tuple[str, bool]]:
    """Collectives of one layer by kind and direction."""
    found = Counter[tuple[str, bool]]()
    for t in work.traffic:
        if t.place == LAYER:
            found[t.kind, t.forward] += round(t.count)
    return found


def test_tensor_parallelism_is_megatrons() -> None:
    work = work_of(run(num_devices=4, tensor=4))
    # Two all-reduces of the stream in each direction (Shoeybi et al., 2019).
    assert layer_traffic(work) == {("all-reduce", True): 2, ("all-reduce", False): 2}
    payloads = {t.payload_bytes for t in work.traffic if t.place == LAYER}
    assert payloads == {STREAM}


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    work = work_of(run(num_devices=4, tensor=4, sequence_parallel=True))
    found = layer_traffic(work)
    # Forward and backward two gathers and two scatters (Korthikanti et al., 2022).
    for kind in ("all-gather", "reduce-scatter"):
        assert (found[kind, True], found[kind, False]) == (2, 2)
    assert found["all-reduce", True] == 0


def test_a_mask_in_place_costs_ten_passes_over_the_gradient_of_scores() -> None:
    changes = {"flash": False, "eager": True}
    kernels = work_of(run(num_devices=1, sizes=changes)).kernels
    scores = 2 * 2 * SIZES.heads * SIZES.seq**2
    (mask,) = (k for k in kernels if k.backward_bytes == 10 * scores)
    assert (mask.forward_bytes, mask.scores) == (2 * scores, True)


def test_the_last_norm_is_no_layers() -> None:
    kernels = work_of(run(num_devices=1)).kernels
    norms = [k for k in kernels if not k.product and k.place == LAYER]
    assert all(k.count == round(k.count) for k in norms)
    assert any(not k.product and k.place == HEAD for k in kernels)


def test_context_parallelism_gathers_keys_and_values() -> None:
    work = work_of(run(num_devices=4, context=4))
    found = layer_traffic(work)
    assert found["all-gather", True] == 2
    assert found["reduce-scatter", False] == 2


def test_experts_exchange_tokens_there_and_back() -> None:
    changes = {"experts": 8, "topk": 2}
    work = work_of(run(num_devices=4, data=4, expert=4, sizes=changes))
    found = layer_traffic(work)
    assert found["all-to-all", True] == 2
    assert found["all-to-all", False] == 2


@pytest.mark.parametrize("experts", [0, 8])
def test_products_divide_by_tensor_and_context(experts: int) -> None:
    sizes = {"experts": experts, "topk": 2 if experts else 0}

    def flops(**changes: Any) -> float:
        work = work_of(run(num_devices=8, sizes=sizes, **changes))
        return sum(
            2 * k.m * k.k * k.n * k.batch * k.share * k.count
            for k in work.kernels
            if k.product
        )

    whole = flops()
    # Every tensor rank routes all tokens.
    assert flops(tensor=4) == pytest.approx(whole / 4, rel=0.01 if experts else 1e-9)
    assert flops(context=4) == pytest.approx(whole / 4)


def test_a_layer_does_not_depend_on_how_many_there_are() -> None:
    few = work_of(run(sizes={"layers": 2}))
    many = work_of(run(sizes={"layers": 96}))
    assert few == many


def test_what_a_layer_saves_shrinks_with_rematerialization() -> None:
    saved = work_of(run(source="vtrain", sizes={"flash": False})).saved_bytes
    assert saved["none"] > saved["selective"] > saved["full"] > 0
    assert saved["full"] == STREAM
    # The scores of all heads, kept once before and once after their softmax.
    scores = 2 * 2 * SIZES.heads * SIZES.seq**2
    assert saved["none"] - saved["selective"] >= scores


def test_fused_attention_keeps_no_scores() -> None:
    apart = work_of(run(sizes={"flash": False})).saved_bytes
    fused = work_of(run()).saved_bytes
    assert fused["none"] == pytest.approx(apart["selective"], rel=0.05)


def test_the_loss_is_behind_the_layers() -> None:
    work = work_of(run())
    head = [k for k in work.kernels if k.place == HEAD and k.product]
    assert [(k.n, k.k) for k in head] == [(SIZES.vocab, SIZES.hidden)]


def test_axes_lie_on_nodes_from_the_innermost() -> None:
    found = run(num_devices=64, tensor=4, data=16)
    assert levels_of(found, ("tensor",)) == (4, 1)
    assert levels_of(found, ("fsdp", "data")) == (2, 8)
    wide = run(num_devices=64, tensor=16, data=4)
    assert levels_of(wide, ("tensor",)) == (8, 2)


def test_wires_are_hierarchical() -> None:
    (inside, steps), (between, hops) = wires("all-gather", 800.0, (8, 2))
    assert (inside, between) == (700.0, 50.0)
    assert (steps, hops) == (7, 1)
    assert wires("all-reduce", 800.0, (8, 1))[0][0] == 1400.0


def test_a_layer_keeps_what_eager_programs_keep() -> None:
    """Korthikanti et al. (2022), equation 2: 34 bytes for each token and width, two of
    them masks of dropout, with scores computed again, over all ranks with sequence
    parallelism. A gate makes it three networks' widths for two.
    """
    gpt: dict[str, Any] = {"gated": False, "norm_bias": True}
    for tensor in (1, 8):
        one = run(tensor=tensor, sequence_parallel=tensor > 1, micro_batch=1, sizes=gpt)
        each = one.sizes.seq * one.sizes.hidden / tensor
        assert work_of(one).saved_bytes["none"] == pytest.approx(32 * each)
        llama = dataclasses.replace(
            one, sizes=dataclasses.replace(one.sizes, gated=True, norm_bias=False)
        )
        wide = one.sizes.ffn / one.sizes.hidden
        kept = work_of(llama).saved_bytes["none"]
        assert kept == pytest.approx(2 * (8 + 3 * wide) * each)


def test_experts_are_sent_what_each_tensor_rank_has_of_the_sequence() -> None:
    alike: dict[str, Any] = {"num_devices": 8, "data": 2, "expert": 2, "micro_batch": 1}
    sizes = {"experts": 8, "topk": 2}
    alone, shared = (
        run(tensor=n, sequence_parallel=n > 1, sizes=sizes, **alike) for n in (1, 4)
    )
    sent = [
        {t.payload_bytes for t in work_of(one).traffic if t.kind == "all-to-all"}
        for one in (alone, shared)
    ]
    assert {nbytes / 4 for nbytes in sent[0]} == sent[1]
