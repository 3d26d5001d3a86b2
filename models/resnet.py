"""ResNet with bottleneck blocks and batch normalisation, in Flax NNX.

It is an example of statistics over the batch: each ``nnx.BatchNorm`` averages over all
samples, and the loss updates running means in the model. It runs on one device
unchanged. Two lines annotate it:

- in ``ResNet.features``: ``with when(..., wh.replicate()):`` makes the backbone
  data-parallel;
- in ``loss_fn``: ``with when(..., wh.split()):`` around classifier and cross-entropy
  splits them, which pays when there are many classes.

``ResNetConfig(annotated=False)`` leaves both out. After He et al., "Deep Residual
Learning for Image Recognition" (2015), with the stride in the 3×3 convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import whalejax as wh
from whalejax.models.common.batches import (
    IMAGE_CHANNELS,
    default_batch_size,
    labelled_images,
)
from whalejax.models.common.layers import Array, cross_entropy, when, widened
from whalejax.models.common.names import change, pick


_EXPANSION: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes and switches of a ResNet; the defaults are ResNet-50's.

    Attributes:
        blocks: Number of bottleneck blocks of each stage. Stages after the first halve
            the image and double the channels.
        width: Channels inside the blocks of the first stage; their output has four
            times as many.
        classes: Width of the classifier.
        image_size: Height and width of the images in the job's batches, in pixels.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows the parameters.
        param_dtype: Dtype of the parameters.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    image_size: int = 224
    annotated: bool = True
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, ResNetConfig]] = {
    "resnet50": ResNetConfig(),
    "test": ResNetConfig(blocks=(1, 2), width=24, classes=40, image_size=20),
}


def _kinds(config: ResNetConfig) -> dict[str, Any]:
    return {
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }


class NormedConv(nnx.Module):
    """Convolution without bias, then batch normalisation."""

    def __init__(
        self,
        config: ResNetConfig,
        inputs: int,
        outputs: int,
        *,
        kernel: int,
        stride: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            strides=stride,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
            **_kinds(config),
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs, **_kinds(config))
        param_dtype = jnp.dtype(config.param_dtype)
        # Statistics are computed in float32 or wider. In a narrower type, running means
        # would change their type in the first step.
        self.norm.mean = nnx.BatchStat(widened(self.norm.mean[...].astype(param_dtype)))
        self.norm.var = nnx.BatchStat(widened(self.norm.var[...].astype(param_dtype)))

    def __call__(self, x: Array) -> Array:
        """Maps images ``[batch, height, width, channels]`` to the same layout."""
        y = self.conv(x)
        # Float32 statistics would otherwise widen bfloat16 values.
        normed: Array = self.norm(y).astype(y.dtype)
        return normed


class Bottleneck(nnx.Module):
    """1×1, 3×3 and 1×1 convolutions with a shortcut."""

    def __init__(
        self, config: ResNetConfig, inputs: int, width: int, stride: int, rngs: nnx.Rngs
    ) -> None:
        outputs = _EXPANSION * width
        self.reduce = NormedConv(config, inputs, width, kernel=1, rngs=rngs)
        self.spatial = NormedConv(
            config, width, width, kernel=3, stride=stride, rngs=rngs
        )
        self.expand = NormedConv(config, width, outputs, kernel=1, rngs=rngs)
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.shortcut = NormedConv(
                config, inputs, outputs, kernel=1, stride=stride, rngs=rngs
            )

    def __call__(self, x: Array) -> Array:
        """Applies the block to ``x`` ``[batch, height, width, channels]``."""
        residual = self.shortcut(x) if self.projects else x
        y = jax.nn.relu(self.reduce(x))
        y = jax.nn.relu(self.spatial(y))
        return jax.nn.relu(self.expand(y) + residual)


class ResNet(nnx.Module):
    """The full model: images in, logits out.

    >>> model = ResNet(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 20, 20, 3))).shape
    (2, 40)
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = NormedConv(
            config, IMAGE_CHANNELS, config.width, kernel=7, stride=2, rngs=rngs
        )
        blocks: list[Bottleneck] = []
        channels = config.width
        for stage, count in enumerate(config.blocks):
            width = config.width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(config, channels, width, stride, rngs))
                channels = _EXPANSION * width
        self.blocks = nnx.List(blocks)
        self.classifier = nnx.Linear(
            channels, config.classes, rngs=rngs, **_kinds(config)
        )

    def __call__(self, images: Array) -> Array:
        """Computes logits ``[batch, classes]`` of images ``[batch, height,
        width, 3]``.
        """
        return self.classifier(self.features(images))

    def features(self, images: Array) -> Array:
        """Computes the inputs of the classifier, ``[batch, channels]``."""
        with when(self.config.annotated, wh.replicate()):
            x = images.astype(self.stem.conv.kernel.dtype)
            x = jax.nn.relu(self.stem(x))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for block in self.blocks:
                x = block(x)
            return jnp.mean(x, axis=(1, 2))


def loss_fn(model: ResNet, batch: Mapping[str, Any]) -> Array:
    """Computes the mean cross-entropy of the class; updates the running statistics.

    Args:
        model: The ResNet, in training mode.
        batch: ``images`` ``float[batch, height, width, 3]`` and ``labels``
            ``int32[batch]``.

    >>> model = ResNet(SIZES["test"], rngs=nnx.Rngs(0))
    >>> batch = {"images": jnp.ones((2, 20, 20, 3)), "labels": jnp.zeros(2, "int32")}
    >>> loss_fn(model, batch).shape
    ()
    """
    features = model.features(jnp.asarray(batch["images"]))
    with when(model.config.annotated, wh.split()):
        logits = model.classifier(features)
        return jnp.mean(cross_entropy(logits, jnp.asarray(batch["labels"])))


def job(
    size: str = "resnet50",
    *,
    batch_size: int | None = None,
    learning_rate: float = 0.025,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: training of a ResNet on synthetic images with brightness as class.

    Args:
        size: One of ``SIZES``.
        batch_size: Images in a global batch; 64, at test size 16.
        learning_rate: Learning rate of SGD with momentum 0.9.
        seed: Seed of the sequence of batches.
        changes: Fields of ``ResNetConfig``, such as ``classes=100_000``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["images"].shape
    (16, 20, 20, 3)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "ResNet size"), changes, options=options)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: ResNet(config, rngs=nnx.Rngs(key)),
        batch=lambda step, count: labelled_images(
            step, count, side=config.image_size, classes=config.classes, seed=seed
        ),
        optimizer=optax.sgd(learning_rate, momentum=0.9),
        batch_size=default_batch_size(size, batch_size, 64),
        name=size if size == "resnet50" else f"resnet-{size}",
        per_micro_batch=True,  # Batch normalisation depends on the micro-batch.
    )
