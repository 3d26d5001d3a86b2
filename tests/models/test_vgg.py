"""VGG: its sizes are the published ones, its two ends unlike, dropout has its key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from whalejax.models import vgg


TEST = vgg.SIZES["test"]


@pytest.fixture(scope="module")
def model() -> vgg.VGG:
    made: vgg.VGG = nnx.jit(lambda key: vgg.make_model(TEST, key))(
        jax.random.key(0, impl="rbg")
    )
    return made


@pytest.fixture(scope="module")
def batch() -> Any:
    return vgg.job("test").batch_at(0, 4)


def abstract(config: vgg.VGGConfig) -> vgg.VGG:
    made: vgg.VGG = nnx.eval_shape(lambda: vgg.make_model(config, jax.random.key(0)))
    return made


def count(part: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(part, nnx.Param)))


def closed_form(config: vgg.VGGConfig) -> tuple[int, int]:
    """Parameters of the convolutions, and of the classifier."""
    inputs, convolutions = 3, 0
    for outputs, repeats in zip(config.channels, config.convolutions, strict=True):
        for _ in range(repeats):
            convolutions += (9 * inputs + 1) * outputs
            inputs = outputs
    side = config.image_size // 2 ** len(config.channels)
    classifier = (side * side * inputs + 1) * config.hidden
    classifier += (config.hidden + 1) * (config.hidden + config.classes)
    return convolutions, classifier


def test_parameters_are_the_published_ones() -> None:
    # Those of the released configuration D; its paper says 138 million.
    config = vgg.SIZES["16"]
    assert closed_form(config) == (14_714_688, 123_642_856)
    assert sum(closed_form(config)) == 138_357_544
    made = abstract(config)
    assert sum(len(group) for group in made.groups) == 13
    assert made.first.kernel.size == 102_760_448


@pytest.mark.parametrize("size", vgg.SIZES)
def test_parameters_follow_the_closed_form(size: str) -> None:
    made = abstract(vgg.SIZES[size])
    convolutions, classifier = closed_form(vgg.SIZES[size])
    assert count(made.groups) == convolutions
    assert count(made) == convolutions + classifier


def test_shapes_of_the_real_size() -> None:
    made = abstract(vgg.SIZES["16"])
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), "float32")
    features = nnx.eval_shape(lambda m, x: m.features(x), made, images)
    assert features.shape == (2, 7, 7, 512)
    assert nnx.eval_shape(lambda m, x: m(x), made, images).shape == (2, 1000)


def test_the_first_dense_layer_reads_all_that_is_left_of_the_image(
    model: vgg.VGG, batch: Any
) -> None:
    """As one product over the flattened features."""
    images = jnp.asarray(batch["images"])
    features = nnx.jit(vgg.VGG.features)(model, images)
    assert features.shape == (4, 4, 4, 24)
    flat = np.asarray(features, np.float64).reshape(4, -1)
    for layer in (model.first, model.second, model.last):
        assert layer.bias is not None
        kernel = np.asarray(layer.kernel[...], np.float64)
        flat = flat @ kernel.reshape(-1, kernel.shape[-1])
        flat += np.asarray(layer.bias[...])
        flat = flat if layer is model.last else np.maximum(flat, 0.0)
    found = nnx.jit(vgg.VGG.__call__)(model, images)
    np.testing.assert_allclose(found, flat, rtol=1e-4, atol=1e-5)


def test_samples_do_not_depend_on_one_another(model: vgg.VGG, batch: Any) -> None:
    images = jnp.asarray(batch["images"])
    logits_of = nnx.jit(vgg.VGG.__call__)
    whole, half = logits_of(model, images), logits_of(model, images[:2])
    np.testing.assert_allclose(half, whole[:2], rtol=1e-4, atol=1e-5)
    assert (whole[0] != whole[1]).any()


def test_dropout_follows_its_key(model: vgg.VGG, batch: Any) -> None:
    keys = [jax.random.key(seed, impl="rbg") for seed in (1, 1, 2)]
    for deterministic in (False, True):
        loss_fn = nnx.jit(vgg.make_loss(TEST, deterministic=deterministic))
        one, again, other = (float(loss_fn(model, batch, key)) for key in keys)
        assert one == again
        assert (one == other) == deterministic


def test_without_a_key_nothing_drops(model: vgg.VGG, batch: Any) -> None:
    loss_fn = nnx.jit(vgg.make_loss(TEST, deterministic=True))
    loss = float(loss_fn(model, batch, jax.random.key(0, impl="rbg")))
    logits = nnx.jit(vgg.VGG.__call__)(model, jnp.asarray(batch["images"]))
    scores = np.asarray(logits, np.float64)
    nats = np.log(np.exp(scores).sum(-1)) - scores[np.arange(4), batch["labels"]]
    assert loss == pytest.approx(nats.mean(), rel=1e-5)


def test_images_that_shrink_to_nothing_are_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        vgg.job(image_size=28)
    assert str(caught.value) == (
        "image_size is 28; expected at least 32: 5 groups of convolutions halve the "
        "image each"
    )
