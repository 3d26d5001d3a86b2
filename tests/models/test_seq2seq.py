"""T5 and M6: what each position sees, how distances are told, sizes, batches."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
import whalejax.models as models
from tests.models.conftest import fast_key
from tests.models.test_sizes import count
from whalejax.models import m6, t5
from whalejax.models.common import distances, seq2seq_layers
from whalejax.models.common.batches import denoising_batch


MODULES: Final[dict[str, ModuleType]] = {"t5": t5, "m6": m6}
BOTH: Final = pytest.mark.parametrize("name", MODULES)
EITHER: Final = pytest.mark.parametrize(
    "name", ["t5", pytest.param("m6", marks=pytest.mark.full)]
)
"""What is alike in both: the larger one in the whole suite."""

ORDER: Final = {
    "t5": ("inputs", "input_padding"),
    "m6": ("image", "inputs", "input_padding"),
}


@functools.cache
def variables(name: str) -> Any:
    module = MODULES[name]
    make = functools.partial(module.make_model, module.SIZES["test"])
    return jax.jit(make)(fast_key(0))


@functools.cache
def applied(name: str) -> Any:
    config = MODULES[name].SIZES["test"]
    return jax.jit({"t5": t5.T5, "m6": m6.M6}[name](config).apply)


@functools.cache
def losses(name: str, deterministic: bool) -> Any:
    module = MODULES[name]
    return jax.jit(module.make_loss(module.SIZES["test"], deterministic=deterministic))


def arguments(name: str, batch: Any) -> tuple[Any, ...]:
    """What the model is given of a batch."""
    return (*(batch[key] for key in ORDER[name]), batch["targets"][:, :-1])


def logits(name: str, batch: Any) -> np.ndarray[Any, Any]:
    return np.asarray(applied(name)(variables(name), *arguments(name, batch)))


def batch_of(name: str, size: int = 4) -> dict[str, Any]:
    return dict(models.job(f"{name}-test").batch_at(0, size))


def replaced(tokens: Any, where: Any) -> Any:
    """Other tokens in some places."""
    return np.where(where, (tokens + 100) % 400, tokens).astype(np.int32)


# What is seen.


@pytest.mark.full
@BOTH
def test_padded_inputs_are_never_seen(name: str) -> None:
    batch = batch_of(name)
    padding = batch["input_padding"]
    assert 0 < padding.sum() < padding.size
    changed = {**batch, "inputs": replaced(batch["inputs"], ~padding)}
    before = logits(name, batch)
    np.testing.assert_array_equal(before, logits(name, changed))
    changed = {**batch, "inputs": replaced(batch["inputs"], padding)}
    assert (before != logits(name, changed)).any(axis=(1, 2)).all()


@pytest.mark.sampled(1)
@EITHER
@pytest.mark.parametrize("place", [0, 7, 23])
def test_later_targets_are_not_seen(name: str, place: int) -> None:
    batch = batch_of(name)
    where = np.arange(batch["targets"].shape[1])[None] == place
    changed = {**batch, "targets": replaced(batch["targets"], where)}
    before, after = logits(name, batch), logits(name, changed)
    # The logits of a place are of the token that follows it.
    np.testing.assert_array_equal(before[:, :place], after[:, :place])
    assert (before != after).any(axis=2)[:, place:].all()


@BOTH
def test_the_mean_runs_over_real_targets(name: str) -> None:
    batch = batch_of(name)
    result = losses(name, True)(variables(name), batch, fast_key(0))
    assert isinstance(result, wh.WeightedLoss)
    scores, real = logits(name, batch).astype(np.float64), batch["target_padding"]
    nats = np.log(np.exp(scores).sum(-1))
    wanted = batch["targets"][:, 1:]
    nats -= np.take_along_axis(scores, wanted[..., None], axis=-1)[..., 0]
    assert 0 < real.sum() < real.size
    assert float(result.weight) == real.sum()
    np.testing.assert_allclose(float(result.total), nats[real].sum(), rtol=1e-5)
    padded = np.pad(~real, ((0, 0), (1, 0)))
    changed = {**batch, "targets": replaced(batch["targets"], padded)}
    again = losses(name, True)(variables(name), changed, fast_key(0))
    assert float(again.total) == float(result.total)


def test_every_patch_is_seen() -> None:
    batch = batch_of("m6")
    before = logits("m6", batch)
    for patch in range(m6.SIZES["test"].patches):
        image = batch["image"].copy()
        image[:, patch] += 1.0
        after = logits("m6", {**batch, "image": image})
        assert (before != after).any(axis=(1, 2)).all(), patch


@pytest.mark.full
@EITHER
def test_dropout_follows_its_key(name: str) -> None:
    def total(deterministic: bool, seed: int) -> float:
        found = losses(name, deterministic)(
            variables(name), batch_of(name), fast_key(seed)
        )
        return float(found.total)

    assert total(False, 1) == total(False, 1) != total(False, 2)
    assert total(True, 1) == total(True, 2) != total(False, 1)


@pytest.mark.full
@EITHER
def test_samples_drop_independently(name: str) -> None:
    """Two equal rows differ under dropout."""
    one = arguments(name, batch_of(name, 1))
    twice = (np.concatenate([part] * 2) for part in one)
    module = {"t5": t5.T5, "m6": m6.M6}[name](MODULES[name].SIZES["test"])
    found = jax.jit(
        lambda key, *given: module.apply(
            variables(name), *given, deterministic=False, rngs={"dropout": key}
        )
    )(fast_key(0), *twice)
    assert (found[0] != found[1]).any()


def stacked(tree: dict[str, Any], layers: int) -> dict[str, Any]:
    """The parameters or gradients of separate layers in the shape of scanned ones."""
    found = dict(tree)
    for stack in ("encoder", "decoder"):
        rest = dict(tree[stack])
        each = [rest.pop(f"layer_{i}") for i in range(layers)]
        rest["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        found[stack] = rest
    return found


@pytest.mark.full
@BOTH
def test_scanned_layers_compute_the_same(name: str) -> None:
    module, batch = MODULES[name], batch_of(name)

    def total(config: Any, params: Any) -> Any:
        loss_fn = module.make_loss(config, deterministic=True)
        return loss_fn({"params": params}, batch, fast_key(0)).total

    config, params = module.SIZES["test"], variables(name)["params"]
    loss, gradients = jax.jit(jax.value_and_grad(functools.partial(total, config)))(
        params
    )
    scanned = replace(config, scan_layers=True)
    found, found_gradients = jax.jit(
        jax.value_and_grad(functools.partial(total, scanned))
    )(stacked(params, config.layers))
    made = jax.eval_shape(functools.partial(module.make_model, scanned), fast_key(0))
    assert jax.tree.structure(made["params"]) == jax.tree.structure(found_gradients)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    expected = jax.tree.leaves(stacked(gradients, config.layers))
    for leaf, wanted in zip(jax.tree.leaves(found_gradients), expected, strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(leaf, wanted, atol=1e-5 * scale)


@pytest.mark.full
@EITHER
def test_scanned_layers_differ_at_first_and_in_dropout(name: str) -> None:
    module = MODULES[name]
    config = replace(module.SIZES["test"], scan_layers=True, dropout_rate=0.5)
    made = jax.jit(functools.partial(module.make_model, config))(fast_key(0))
    kernel = made["params"]["encoder"]["layers"]["mlp"]["up"]["kernel"]
    assert (kernel[0] != kernel[1]).all()
    loss_fn = jax.jit(module.make_loss(config))
    one, other = (loss_fn(made, batch_of(name), fast_key(i)).total for i in (1, 2))
    assert float(one) != float(other)


# Distances.


def published_bucket(
    ahead: int, *, buckets: int, longest_distance: int, bidirectional: bool
) -> int:
    """The bucket of one distance, by the logarithm of the paper's released code."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(longest_distance / exact)
    # What is a whole number must not be rounded below it.
    wide = exact + math.floor(share * (buckets - exact) + 1e-9)
    return first + min(wide, buckets - 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (12, 40), (8, 16)])
def test_buckets_are_the_published_ones(
    buckets: int, longest: int, bidirectional: bool
) -> None:
    options: dict[str, Any] = {
        "buckets": buckets,
        "longest_distance": longest,
        "bidirectional": bidirectional,
    }
    found = np.asarray(distances.relative_buckets(150, 170, **options))
    expected = [
        [published_bucket(key - query, **options) for key in range(170)]
        for query in range(150)
    ]
    np.testing.assert_array_equal(found, expected)
    used = set(found.ravel().tolist())
    # Distance 0 is in the lower half, so the upper half's first bucket stays empty.
    empty = {buckets // 2} if bidirectional else set()
    assert used == set(range(buckets)) - empty


def test_too_short_a_longest_distance_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        distances.bucket_starts(16, 8)
    assert str(caught.value) == (
        "longest_distance is 8; expected more than 8, which is half of the 16 buckets "
        "of one direction. Give a longer distance or fewer buckets."
    )


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_is_that_of_the_distance(bidirectional: bool) -> None:
    config = t5.SIZES["test"]
    module = seq2seq_layers.RelativeBias(config, bidirectional=bidirectional)
    bias, made = jax.jit(lambda key: module.init_with_output(key, 9))(fast_key(0))
    table = np.asarray(made["params"]["table"]["embedding"])
    assert table.shape == (config.buckets, config.heads)
    assert bias.shape == (1, config.heads, 9, 9)
    for query in range(9):
        for key in range(9):
            bucket = published_bucket(
                key - query,
                buckets=config.buckets,
                longest_distance=config.longest_distance,
                bidirectional=bidirectional,
            )
            np.testing.assert_array_equal(bias[0, :, query, key], table[bucket])


@BOTH
def test_layers_share_the_bias_of_their_stack(name: str) -> None:
    params = variables(name)["params"]
    config = MODULES[name].SIZES["test"]
    for stack in ("encoder", "decoder"):
        tables = [
            path
            for path, leaf in jax.tree.leaves_with_path(params[stack])
            if leaf.shape == (config.buckets, config.heads)
        ]
        assert len(tables) == 1
    biases = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree.leaves_with_path(params)
        if "bias" in jax.tree_util.keystr(path)
    }
    assert not biases


# Sizes.


def closed_form(config: seq2seq_layers.Seq2SeqConfig) -> int:
    """Parameters of an encoder and a decoder with one table of words."""
    attention = 4 * config.embed * config.heads * config.head_dim
    mlp = 2 * config.embed * config.mlp
    encoder = attention + mlp + 2 * config.embed
    decoder = 2 * attention + mlp + 3 * config.embed
    last_norms = 2 * config.embed
    distances = 2 * config.buckets * config.heads
    words = config.vocab * config.embed
    return config.layers * (encoder + decoder) + last_norms + distances + words


# The paper says about 60, 220 and 770 million; the released checkpoints have these.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("size", "published"),
    [("small", 60_506_624), ("base", 222_903_552), ("large", 737_668_096)],
)
def test_t5_sizes_are_the_published_ones(size: str, published: int) -> None:
    made = jax.eval_shape(t5.job(size).make_model, jax.random.key(0))
    assert count(made) == published == closed_form(t5.SIZES[size])


def test_m6_has_ten_billion_parameters() -> None:
    config = m6.SIZES["10b"]
    made = jax.eval_shape(m6.job("10b").make_model, jax.random.key(0))
    image = (config.patches + config.patch_dim) * config.embed
    assert count(made) == closed_form(config) + image
    assert count(made) == pytest.approx(10e9, rel=0.01)
    assert config.layers == 24


def test_dimensions_of_the_test_sizes_differ() -> None:
    for module, own in ((t5, []), (m6, ["patches", "patch_dim"])):
        config = module.SIZES["test"]
        names = ("vocab", "inputs", "targets", "embed", "head_dim", "mlp", "buckets")
        widths = [getattr(config, name) for name in (*names, *own)]
        assert len(set(widths)) == len(widths)
        divided = (config.vocab, config.inputs, config.targets, config.embed)
        assert all(n % 8 == 0 for n in (*divided, config.heads, config.mlp))


# Batches.


def test_targets_fill_the_gaps_of_the_inputs() -> None:
    sizes = {"inputs": 80, "targets": 24, "vocab": 512}
    batch = denoising_batch(3, 64, seed=0, **sizes)
    segments, first = 4, 2
    rule = 512 - segments - first
    seen = set()
    for row in range(64):
        given = batch["inputs"][row][batch["input_padding"][row]].tolist()
        wanted = batch["targets"][row, 1:][batch["target_padding"][row]].tolist()
        assert wanted.pop() == 1
        spans = {wanted[i]: wanted[i + 1 : i + 4] for i in range(0, len(wanted), 4)}
        assert list(spans) == [511 - i for i in range(len(spans))]
        text = [word for token in given for word in spans.get(token, [token])]
        assert len(text) == 20 * len(spans)
        chain = np.asarray(text) - first
        noise = (chain[1:] - 5 * chain[:-1] - 3) % rule
        assert set(noise.tolist()) <= {0, 1, 2, 3}
        seen.add(len(spans))
    assert seen == {1, 2, 3, 4}
    assert not batch["inputs"][~batch["input_padding"]].any()
    assert not batch["targets"][:, 1:][~batch["target_padding"]].any()
    assert not batch["targets"][:, 0].any()


def test_images_tell_the_first_hidden_word() -> None:
    config = replace(m6.SIZES["test"], patches=4096)
    batch = m6.captioned_batch(config, 0, 6, seed=0)
    turns = np.arange(1, config.patch_dim + 1)[None] * batch["targets"][:, 2, None]
    expected = np.sin(turns / config.vocab * 2 * np.pi)
    np.testing.assert_allclose(batch["image"].mean(axis=1), expected, atol=0.1)


def test_texts_without_place_for_a_segment_are_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        models.job("t5-test", targets=4).batch_at(0)
    assert str(caught.value) == (
        "texts of 72 inputs and 4 targets; expected at least 18 inputs and 5 targets, "
        "which a text of 20 tokens takes."
    )
