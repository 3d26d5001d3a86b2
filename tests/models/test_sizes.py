"""Parameter counts of the real sizes against published figures; no memory is used."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from flax import nnx

from whalejax import models
from whalejax.meshes.errors import WhaleError
from whalejax.models import bert, gpt, moe, resnet


def count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nnx_count(make: Any) -> int:
    return count(nnx.state(nnx.eval_shape(make), nnx.Param))


# Sizes of "Language Models are Unsupervised Multitask Learners", whose vocabulary is
# 50,257; the exact counts are those of the released checkpoints.
@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
    ],
)
def test_gpt_sizes_are_the_published_ones(size: str, published: int) -> None:
    config = gpt.SIZES[size]
    # Stacked layers count the same and are traced once.
    job = gpt.job(size, vocab=50_257, scan_layers=True)
    assert nnx_count(lambda: job.make_model(jax.random.key(0))) == published
    padding = (config.vocab - 50_257) * config.embed
    assert config.vocab % 128 == 0
    assert 0 < padding < 0.001 * published


def test_stacked_and_separate_layers_count_the_same() -> None:
    counts = {
        nnx_count(lambda on=on: gpt.job(scan_layers=on).make_model(jax.random.key(0)))
        for on in (False, True)
    }
    assert len(counts) == 1


def test_the_quick_start_has_about_three_million_parameters() -> None:
    job = gpt.job()
    found = nnx_count(lambda: job.make_model(jax.random.key(0)))
    assert found == 3_323_392


# The paper says 110M and 340M, pooler and next-sentence head included; the released
# masked-word models, which leave both out, have exactly these.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("size", "published"), [("base", 109_514_298), ("large", 335_174_458)]
)
def test_bert_sizes_are_the_published_ones(size: str, published: int) -> None:
    made = jax.eval_shape(bert.job(size).make_model, jax.random.key(0))
    assert count(made["params"]) == published
    assert set(made) == {"params"}


@pytest.mark.full
def test_resnet50_has_the_published_parameters() -> None:
    job = resnet.job()
    assert nnx_count(lambda: job.make_model(jax.random.key(0))) == 25_557_032


@pytest.mark.full
def test_the_classifier_grows_with_the_classes() -> None:
    job = resnet.job(classes=100_000)
    backbone = 25_557_032 - 2049 * 1000
    found = nnx_count(lambda: job.make_model(jax.random.key(0)))
    assert found == backbone + 2049 * 100_000


@pytest.mark.full
def test_experts_hold_most_of_a_sparse_model() -> None:
    config = moe.SIZES["small"]
    model = nnx.eval_shape(lambda: moe.MoE(config, rngs=nnx.Rngs(0)))
    experts = config.layers * config.experts * 2 * config.embed * config.mlp
    state = nnx.state(model, nnx.Param)
    of_experts = sum(
        count(block["sparse"]["experts"]) for block in state["blocks"].values()
    )
    assert of_experts == experts
    assert experts > 0.9 * count(state)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt-test", {"heads": 5}, "heads is 5 and embed 48; heads must divide it"),
        ("llama-test", {"kv_heads": 3}, "kv_heads is 3 and heads 8"),
        ("gpt-test", {"dropout_rate": 2}, "dropout_rate is 2; expected a number, 0"),
        ("gpt-test", {"dropout_rate": "abc"}, "dropout_rate is 'abc'"),
        ("gpt-test", {"scan_layers": "maybe"}, "expected true or false"),
        ("gpt-test", {"dtype": "foo"}, "dtype is 'foo'; expected one of float32"),
        ("gpt-test", {"dtype": 5}, "dtype is 5; expected one of float32"),
        ("gpt-test", {"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ("gpt-test", {"learning_rate": -1.0}, "expected a number, 0 or more"),
        ("gpt-test", {"warmup_steps": 0}, "warmup_steps is 0; expected a number, 1"),
        ("mlp", {"hidden": 5}, "hidden is 5; expected whole numbers of at least 1"),
        ("gpt-test", {"seed": "one"}, "seed is 'one'; expected a number, 0 or more"),
        ("resnet50", {"image_size": 0}, "image_size is 0; expected a number, 1 or"),
    ],
)
def test_values_that_no_option_has(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(WhaleError) as error:
        models.job(name, **options)
    assert words in str(error.value)


def test_heads_of_their_own_width_need_not_divide() -> None:
    assert models.job("t5-test", heads=3).name == "t5-test"
