"""ResNet: statistics run over the whole batch, and the model remembers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from whalejax.models import resnet


TEST = resnet.SIZES["test"]
loss_of = nnx.jit(resnet.loss_fn)


def make() -> resnet.ResNet:
    job = resnet.job("test")
    made: resnet.ResNet = nnx.jit(job.make_model)(jax.random.key(0, impl="rbg"))
    return made


@pytest.fixture
def batch() -> Any:
    return resnet.job("test").batch_at(0)


def test_a_loss_call_updates_the_running_statistics(batch: Any) -> None:
    model = make()
    seen = np.asarray(model.stem.conv(jnp.asarray(batch["images"])), np.float64)
    loss_of(model, batch)
    mean, variance = seen.mean((0, 1, 2)), seen.var((0, 1, 2))
    norm = model.stem.norm
    np.testing.assert_allclose(norm.mean[...], 0.1 * mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * variance, rtol=1e-4)


def test_training_normalises_over_the_whole_batch(batch: Any) -> None:
    model = make()
    whole = float(loss_of(model, batch))
    halves = [
        float(loss_of(model, {k: v[part] for k, v in batch.items()}))
        for part in (slice(0, 8), slice(8, 16))
    ]
    assert abs(whole - np.mean(halves)) > 1e-3


def test_evaluation_uses_the_remembered_statistics(batch: Any) -> None:
    model = make()
    loss_of(model, batch)
    model.eval()
    before = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    images = jnp.asarray(batch["images"])
    logits_of = nnx.jit(resnet.ResNet.__call__)
    whole, half = logits_of(model, images), logits_of(model, images[:8])
    np.testing.assert_allclose(half, whole[:8], rtol=1e-4, atol=1e-5)
    after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.full
def test_shapes_of_the_real_size() -> None:
    config = resnet.SIZES["resnet50"]
    model = nnx.eval_shape(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)))
    assert len(model.blocks) == 16
    assert model.stem.conv.kernel.shape == (7, 7, 3, 64)
    assert model.classifier.kernel.shape == (2048, 1000)
    features = nnx.eval_shape(
        lambda m, x: m.features(x),
        model,
        jax.ShapeDtypeStruct((2, 224, 224, 3), "float32"),
    )
    assert features.shape == (2, 2048)


@pytest.mark.parametrize(
    ("param_dtype", "wide"), [("bfloat16", jnp.float32), ("float32", jnp.float32)]
)
def test_statistics_are_never_narrow(param_dtype: str, wide: Any) -> None:
    config = replace(TEST, param_dtype=param_dtype)
    model = nnx.eval_shape(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)))
    statistics = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert {leaf.dtype for leaf in statistics} == {jnp.dtype(wide)}


@pytest.mark.relaxed_promotion  # Flax's norms compare float64 with float32
def test_statistics_are_float64_in_a_float64_model(batch: Any) -> None:
    with jax.enable_x64(True):
        config = replace(TEST, param_dtype="float64")
        model = nnx.eval_shape(lambda: resnet.ResNet(config, rngs=nnx.Rngs(0)))
        for _ in range(2):
            statistics = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
            assert {leaf.dtype for leaf in statistics} == {jnp.dtype("float64")}
            model = nnx.eval_shape(_after_a_call, model, batch)


def _after_a_call(model: resnet.ResNet, batch: Any) -> resnet.ResNet:
    resnet.loss_fn(model, batch)
    return model
