"""VGG-16: plain convolutions, then three dense layers with nearly all parameters.

The two ends of the model have different costs. At 224×224 pixels the classifier has
123.6M of 138.4M parameters, 102.8M of them in its first layer. The convolutions have
nearly all activations and FLOPs. So data parallelism suits the convolutions, and
sharded kernels suit the classifier. Pipeline stages cannot be even in both memory and
time. It runs on one device unchanged. Two lines annotate it, as in Krizhevsky, "One
weird trick for parallelizing convolutional neural networks" (2014):

- in ``VGG.features``: ``with when(..., wh.replicate()):`` makes the convolutions
  data-parallel;
- in the loss of ``make_loss``: ``with when(..., wh.split()):`` around classifier and
  cross-entropy splits them.

``VGGConfig(annotated=False)`` leaves both out. After Simonyan and Zisserman, "Very Deep
Convolutional Networks for Large-Scale Image Recognition" (2014), configuration D, in
Flax NNX. Initial kernels follow He et al., "Delving Deep into Rectifiers" (2015); the
paper begins with layers of a trained, shallower model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from whalejax.models.common.layers import Array, cross_entropy, when
from whalejax.models.common.names import change, pick


@dataclass(frozen=True, slots=True, kw_only=True)
class VGGConfig:
    """Sizes and switches of a VGG; the defaults are VGG-16's.

    Attributes:
        channels: Number of channels of each group of convolutions; the image is halved
            after each group.
        convolutions: Number of convolutions in each group.
        hidden: Width of the two dense layers before the last.
        classes: Width of the last dense layer.
        image_size: Height and width of the images, in pixels.
        dropout_rate: Dropout rate after both hidden dense layers, with keys from that
            of the loss.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows the parameters.
        param_dtype: Dtype of the parameters.
    """

    channels: tuple[int, ...] = (64, 128, 256, 512, 512)
    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    hidden: int = 4096
    classes: int = 1000
    image_size: int = 224
    dropout_rate: float = 0.5
    annotated: bool = True
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, VGGConfig]] = {
    "16": VGGConfig(),
    "test": VGGConfig(
        channels=(8, 16, 24),
        convolutions=(1, 2, 2),
        hidden=96,
        classes=40,
        image_size=32,
    ),
}


def _kinds(config: VGGConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "kernel_init": nnx.initializers.he_normal(),
        "rngs": rngs,
    }


class VGG(nnx.Module):
    """The full model: images in, logits out.

    >>> model = VGG(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 32, 32, 3))).shape
    (2, 40)
    """

    def __init__(self, config: VGGConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds = _kinds(config, rngs)
        inputs, groups = IMAGE_CHANNELS, []
        for outputs, count in zip(config.channels, config.convolutions, strict=True):
            group = []
            for _ in range(count):
                group.append(nnx.Conv(inputs, outputs, (3, 3), **kinds))
                inputs = outputs
            groups.append(nnx.List(group))
        self.groups = nnx.List(groups)
        side = config.image_size // 2 ** len(config.channels)
        # The kernel keeps the dimensions height, width and channels, so that they can
        # be sharded as in the activations.
        self.first = nnx.LinearGeneral(
            (side, side, inputs), config.hidden, axis=(-3, -2, -1), **kinds
        )
        self.second = nnx.Linear(config.hidden, config.hidden, **kinds)
        # Initial logits are near zero.
        kinds["kernel_init"] = nnx.initializers.normal(0.01)
        self.last = nnx.Linear(config.hidden, config.classes, **kinds)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(self, images: Array) -> Array:
        """Computes logits ``[batch, classes]`` of images ``[batch, height,
        width, 3]``.
        """
        return self.classify(self.features(images))

    def features(self, images: Array) -> Array:
        """Computes the inputs of the classifier, ``[batch, side, side, channels]``."""
        with when(self.config.annotated, wh.replicate()):
            x = images.astype(self.groups[0][0].kernel.dtype)
            for group in self.groups:
                for convolution in group:
                    x = jax.nn.relu(convolution(x))
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
            return x

    def classify(self, features: Array, *, rng: Array | None = None) -> Array:
        """Computes logits ``[batch, classes]`` of the features.

        Args:
            features: Result of ``features``.
            rng: Dropout key; without it there is no dropout.
        """
        keys = (None, None) if rng is None else jax.random.split(rng)
        x = self._drop(jax.nn.relu(self.first(features)), keys[0])
        x = self._drop(jax.nn.relu(self.second(x)), keys[1])
        return self.last(x)

    def _drop(self, x: Array, key: Array | None) -> Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


def make_model(config: VGGConfig, key: Array) -> VGG:
    """Returns a newly initialised model."""
    return VGG(config, rngs=nnx.Rngs(key))


def make_loss(
    config: VGGConfig, *, deterministic: bool = False
) -> Callable[[VGG, Mapping[str, Any], Array], Array]:
    """Returns the loss of one configuration: mean cross-entropy of the class, in nats.

    Args:
        config: Configuration of the model.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(model, batch, rng)`` with a batch of ``images`` ``float[batch, height,
        width, 3]`` and ``labels`` ``int32[batch]``.

    >>> callable(make_loss(SIZES["test"]))
    True
    """

    def loss_fn(model: VGG, batch: Mapping[str, Any], rng: Array) -> Array:
        features = model.features(jnp.asarray(batch["images"]))
        with when(config.annotated, wh.split()):
            logits = model.classify(features, rng=None if deterministic else rng)
            return jnp.mean(cross_entropy(logits, jnp.asarray(batch["labels"])))

    return loss_fn


def job(
    size: str = "16",
    *,
    batch_size: int | None = None,
    learning_rate: float = 0.01,
    deterministic: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: training of a VGG on synthetic images with brightness as class.

    Args:
        size: One of ``SIZES``; the test size has three groups with five convolutions.
        batch_size: Images in a global batch; 64, at test size 16.
        learning_rate: Learning rate of SGD with momentum 0.9.
        deterministic: Whether to omit dropout.
        seed: Seed of the sequence of batches.
        changes: Fields of ``VGGConfig``.

    Raises:
        WhaleError: Unknown size or field, or images too small for the groups' halvings.

    >>> job("test").batch_at(0)["images"].shape
    (16, 32, 32, 3)
    """
    options = ("batch_size", "learning_rate", "deterministic", "seed")
    config = change(pick(size, SIZES, "VGG size"), changes, options=options)
    smallest = 2 ** len(config.channels)
    if config.image_size < smallest:
        raise wh.WhaleError(
            f"image_size is {config.image_size!r}; expected at least {smallest}: "
            f"{len(config.channels)} groups of convolutions halve the image each"
        )

    return wh.Job(
        loss_fn=make_loss(config, deterministic=deterministic),
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: labelled_images(
            step, count, side=config.image_size, classes=config.classes, seed=seed
        ),
        optimizer=optax.sgd(learning_rate, momentum=0.9),
        batch_size=default_batch_size(size, batch_size, 64),
        name="vgg16" if size == "16" else f"vgg-{size}",
    )
