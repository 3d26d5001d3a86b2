"""The decoder's graph: sizes, parameters, FLOPs and dimensions as its columns say."""

from __future__ import annotations

import dataclasses

import pytest

from whalejax.estimates.decoder import REGIONS, DecoderSizes, decoder_graph
from whalejax.planner.model.logical_dimensions import analyse


GPT = DecoderSizes(
    layers=6,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    ffn=256,
    vocab=512,
    seq=32,
)
LLAMA = dataclasses.replace(
    GPT, kv_heads=2, gated=True, norm_bias=False, positions=False, tied=False
)
MOE = dataclasses.replace(LLAMA, experts=4, topk=2)
BATCH = 4


@pytest.mark.parametrize("sizes", [GPT, LLAMA, MOE], ids=["gpt", "llama", "moe"])
def test_the_graph_has_the_parameters_that_the_sizes_say(sizes: DecoderSizes) -> None:
    graph = decoder_graph(sizes, BATCH)
    layer = sum(t.size for t in graph.params if t.path.startswith("layer."))
    ends = sum(t.size for t in graph.params if not t.path.startswith("layer."))
    # Norms count as scales here; the biases of a GPT's are too small to be written.
    small = sizes.hidden * 2
    assert abs(layer - sizes.layer_params) <= small
    assert ends == sizes.embedding_params + sizes.head_params + sizes.hidden


@pytest.mark.parametrize("sizes", [GPT, LLAMA, MOE], ids=["gpt", "llama", "moe"])
def test_its_products_take_two_flops_for_each_weight_and_token(
    sizes: DecoderSizes,
) -> None:
    graph = decoder_graph(sizes, BATCH)
    total = sum(op.flops * op.trip for op in graph.ops)
    tokens = BATCH * sizes.seq
    scores = 4 * sizes.layers * sizes.heads * sizes.head_dim * sizes.seq
    lookups = sizes.embedding_params - (sizes.hidden * sizes.vocab if sizes.tied else 0)
    weights = sizes.active_params - lookups
    norms = 5 * sizes.hidden * sizes.layers
    expected = tokens * (2 * weights + scores)
    assert expected - 2 * tokens * norms <= total <= expected


def test_depth_is_a_trip_count() -> None:
    few, many = (
        decoder_graph(dataclasses.replace(GPT, layers=n), BATCH) for n in (2, 100)
    )
    assert len(few.ops) == len(many.ops)
    assert {op.trip for op in many.ops} == {1, 100}


def test_the_dimensions_are_the_ones_of_a_transformer() -> None:
    graph = decoder_graph(LLAMA, BATCH)
    dims = analyse(graph)
    sizes = sorted(role.size for role in dims.roles)
    # Batch, kv heads, query heads to each, head width of keys and of the rest, twice
    # the sequence, embed, feed-forward, and the two vocabularies.
    for size in (BATCH, 2, 8, 32, 32, 64, 256, 512, 512):
        assert size in sizes
    assert not any(role.unshardable for role in dims.roles if role.size == 256)


def test_a_fused_attention_kernel_does_half_of_the_scores() -> None:
    shares = {
        flash: {
            op.share
            for op in decoder_graph(dataclasses.replace(GPT, flash=flash), BATCH).ops
            if op.matmul and op.matmul[3] > 1
        }
        for flash in (True, False)
    }
    assert shares == {True: {0.5}, False: {1.0}}


def test_regions_have_operations() -> None:
    graph = decoder_graph(MOE, BATCH)
    used = {graph.task_graphs[op.task_graph].name for op in graph.ops}
    assert used == set(REGIONS)
