"""Memory of programs that convolve, against what the TPU compiler said of them."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.memory import saved_tensors


class Segmenter(nnx.Module):
    """Two convolutions of three with what stands behind each, and a class a place."""

    def __init__(self, rngs: nnx.Rngs, dims: int, channels: int, norm: str) -> None:
        self.convolutions = nnx.List(
            [
                nnx.Conv(before, channels, (3,) * dims, use_bias=False, rngs=rngs)
                for before in (3, channels)
            ]
        )
        self.norms = nnx.List([self._norm(norm, channels, rngs) for _ in range(2)])
        self.head = nnx.Linear(channels, 4, rngs=rngs)

    @staticmethod
    def _norm(norm: str, channels: int, rngs: nnx.Rngs) -> nnx.Module:
        if norm == "batch":
            return nnx.BatchNorm(channels, rngs=rngs)
        if norm == "group":
            return nnx.GroupNorm(channels, num_groups=8, rngs=rngs)
        return nnx.Sequential()

    def __call__(self, x: jax.Array) -> jax.Array:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        return self.head(x)


def loss(model: Segmenter, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["x"]).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.mean(found)


def segmenting(
    dims: int, channels: int, norm: str, samples: int, extent: int, **options: Any
) -> wh.Plan:
    """One v6e, bfloat16, all samples at once."""
    model = nnx.eval_shape(lambda: Segmenter(nnx.Rngs(0), dims, channels, norm))
    space = (samples, *(extent,) * dims)
    batch = {
        "x": jax.ShapeDtypeStruct((*space, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct(space, jnp.int32),
    }
    return wh.plan(
        loss,
        model,
        batch,
        optimizer=optax.adam(1e-3),
        cluster="v6e:1x1",
        precision="bf16",
        num_micro_batches=1,
        **options,
    )


@pytest.mark.parametrize(
    ("dims", "channels", "norm", "samples", "extent", "compiled"),
    [
        # Gigabytes of the heap, libtpu 0.0.42.1.
        (2, 64, "group", 8, 512, 2.50),
        (2, 64, "group", 4, 512, 4.66),
        (2, 64, "batch", 2, 512, 1.21),
        (3, 32, "group", 2, 128, 18.1),
        (3, 32, "group", 1, 128, 4.15),
        (3, 32, "group", 2, 64, 2.38),
        (3, 32, "batch", 2, 128, 9.07),
        (3, 32, "none", 2, 128, 7.40),
    ],
)
def test_few_samples_take_more_than_their_share(
    dims: int, channels: int, norm: str, samples: int, extent: int, compiled: float
) -> None:
    found = segmenting(dims, channels, norm, samples, extent).memory.total_bytes
    assert 0.85 * compiled <= found / 1e9 <= 1.35 * compiled


class Patches(nnx.Module):
    """What a vision transformer does: convolved patches, and a gate of samples."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, 64, (4, 4), strides=4, padding="VALID", rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x + self.up(self.norm(x)) * jnp.mean(x, (1, 2), keepdims=True)
        return self.head(x)


def test_patches_are_no_convolutions_of_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory() -> int:
        model = nnx.eval_shape(lambda: Patches(nnx.Rngs(0)))
        batch = {
            "x": jax.ShapeDtypeStruct((4, 512, 512, 3), jnp.float32),
            "y": jax.ShapeDtypeStruct((4, 128, 128), jnp.int32),
        }
        settings: dict[str, Any] = {"optimizer": optax.adam(1e-3), "precision": "bf16"}
        plan = wh.plan(loss, model, batch, cluster="v6e:1x1", **settings)
        return plan.memory.total_bytes

    found = memory()
    monkeypatch.setattr(saved_tensors, "FEW_SAMPLES", 0)
    assert memory() == found


class Sequences(nnx.Module):
    """Convolutions along one dimension, then a dense layer of all or of the mean."""

    def __init__(self, rngs: nnx.Rngs, *, flattened: bool) -> None:
        widths = (1, 16, 16, 16)
        self.convolutions = nnx.List(
            [nnx.Conv(width, 16, (3,), rngs=rngs) for width in widths]
        )
        self.flattened = flattened
        self.head = nnx.Linear(16 * 4096 if flattened else 16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for convolution in self.convolutions:
            x = nnx.relu(convolution(x))
        return self.head(x.reshape(x.shape[0], -1) if self.flattened else x.mean(1))


def test_an_extent_that_is_flattened_at_the_end_shares_no_lanes_before() -> None:
    """Its channels are padded to whole lanes, as where nothing is flattened."""

    def memory(*, flattened: bool) -> int:
        model = nnx.eval_shape(lambda: Sequences(nnx.Rngs(0), flattened=flattened))
        batch = {
            "x": jax.ShapeDtypeStruct((64, 4096, 1), jnp.float32),
            "y": jax.ShapeDtypeStruct((64, 8), jnp.float32),
        }
        return wh.plan(
            lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
            model,
            batch,
            optimizer=optax.sgd(0.1),
            cluster="v5e:1x1",
        ).memory.total_bytes

    assert memory(flattened=True) > memory(flattened=False)


def test_forward_alone_keeps_nothing_beside() -> None:
    """A frozen network in front, of whose gradient nothing is asked."""

    def frozen(model: Segmenter, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for convolution, norm in zip(model.convolutions, model.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        logits = model.head(jax.lax.stop_gradient(x)).astype(jnp.float32)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(found)

    model = nnx.eval_shape(lambda: Segmenter(nnx.Rngs(0), 2, 64, "group"))
    batch = {
        "x": jax.ShapeDtypeStruct((4, 256, 256, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((4, 256, 256), jnp.int32),
    }
    settings: dict[str, Any] = {"optimizer": optax.adam(1e-3), "cluster": "v6e:1x1"}
    one = wh.plan(frozen, model, batch, **settings, precision="bf16")
    other = wh.plan(loss, model, batch, **settings, precision="bf16")
    assert 2 * one.memory.total_bytes < other.memory.total_bytes


@pytest.mark.relaxed_promotion
def test_windows_that_choose_read_their_operand_from_memory() -> None:
    """CosmoFlow at 128³: of its first pooling there are three tensors of 4.3 GB.

    The compiled size is that of libtpu 0.0.42.1.
    """
    job = models.job("cosmoflow")
    batch = {
        name: jax.ShapeDtypeStruct((64, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in job.batch_at(0, 1).items()
    }
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        batch,
        optimizer=job.optimizer,
        cluster="v5e:2x2",
        precision="bf16",
        mesh={"data": 4},
        num_micro_batches=2,
    )
    assert plan.memory.total_bytes / 1e9 == pytest.approx(14.68, rel=0.05)


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the extra tpu-compile (libtpu) is not installed",
)
def test_the_compiler_says_so() -> None:
    found = segmenting(2, 64, "batch", 2, 256).verify(timeout_seconds=1500)
    peak = found.memory[-1]
    assert found.fits and peak.name == "peak" and peak.compiled and peak.predicted
    assert 0.85 * peak.compiled <= peak.predicted <= 1.35 * peak.compiled
