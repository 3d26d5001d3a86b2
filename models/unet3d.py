"""3-D U-Net: classifies every voxel of a volume.

It is an example of downsampling and upsampling: 3 × 3 × 3 convolutions at each
resolution, 2 × 2 × 2 max pooling on the way down, transposed convolutions on the way
up, and skip connections. Logits have the extents of the volume, so that all activations
can be sharded by depth, height and width. Normalisation is by groups or over the batch.
Nothing is annotated.

After Çiçek et al., "3D U-Net: Learning Dense Volumetric Segmentation from Sparse
Annotation" (2016), with padded convolutions, so that labels have the volume's extents.
In Flax NNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import optax
from flax import nnx

import whalejax as wh
from whalejax.models.common.batches import default_batch_size, segmented_volumes
from whalejax.models.common.layers import Array, cross_entropy
from whalejax.models.common.names import change, pick
from whalejax.models.common.volume_layers import check_extent, layer_options


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet3DConfig:
    """Sizes and switches; the defaults are those of the paper.

    Attributes:
        extent: Depth, height and width of a volume, in voxels.
        inputs: Channels of a volume.
        channels: Number of channels at each resolution, the highest first;
            extents halve from each to the next.
        groups: Number of channel groups in group normalisation.
        batch_norm: Whether to use batch normalisation instead.
        classes: Number of classes of a voxel.
        dtype: Compute dtype; that of the parameters if None.
        param_dtype: Dtype of the parameters.
    """

    extent: int = 128
    inputs: int = 1
    channels: tuple[int, ...] = (32, 64, 128, 256)
    groups: int = 8
    batch_norm: bool = False
    classes: int = 3
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, UNet3DConfig]] = {
    "paper": UNet3DConfig(),
    "test": UNet3DConfig(extent=16, channels=(4, 8), groups=2, classes=2),
}


class Block(nnx.Module):
    """Two 3 × 3 × 3 convolutions, each with normalisation and ReLU."""

    def __init__(
        self, config: UNet3DConfig, inputs: int, outputs: int, rngs: nnx.Rngs
    ) -> None:
        options = layer_options(config.dtype, config.param_dtype, rngs)
        self.convolutions = nnx.List(
            [
                nnx.Conv(before, outputs, (3, 3, 3), use_bias=False, **options)
                for before in (inputs, outputs)
            ]
        )
        self.norms = nnx.List(
            [
                nnx.BatchNorm(outputs, momentum=0.9, **options)
                if config.batch_norm
                else nnx.GroupNorm(outputs, num_groups=config.groups, **options)
                for _ in range(2)
            ]
        )

    def __call__(self, x: Array) -> Array:
        """Applies the block to ``x`` ``[batch, depth, height, width, channels]``."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)).astype(x.dtype))
        return x


class UNet3D(nnx.Module):
    """The full model: volumes in, logits of each voxel out.

    >>> model = UNet3D(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 16, 16, 16, 1))).shape
    (1, 16, 16, 16, 2)
    """

    def __init__(self, config: UNet3DConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        options = layer_options(config.dtype, config.param_dtype, rngs)
        widths = config.channels
        inputs, down = config.inputs, []
        for outputs in widths:
            down.append(Block(config, inputs, outputs, rngs))
            inputs = outputs
        self.down = nnx.List(down)
        up, widen = [], []
        for below, here in zip(widths[:0:-1], widths[-2::-1], strict=True):
            widen.append(
                nnx.ConvTranspose(
                    below,
                    here,
                    (2, 2, 2),
                    strides=(2, 2, 2),
                    padding="VALID",
                    **options,
                )
            )
            up.append(Block(config, 2 * here, here, rngs))
        self.widen, self.up = nnx.List(widen), nnx.List(up)
        self.head = nnx.Conv(widths[0], config.classes, (1, 1, 1), **options)

    def __call__(self, volumes: Array) -> Array:
        """Returns the logits ``[batch, depth, height, width, classes]`` of volumes."""
        x = volumes.astype(self.head.kernel.dtype)
        skips: list[Array] = []
        for number, block in enumerate(self.down):
            if number:
                x = nnx.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
            x = block(x)
            skips.append(x)
        skips.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(jnp.concatenate([skips.pop(), widen(x)], axis=-1))
        return self.head(x)


def make_model(config: UNet3DConfig, key: Array) -> UNet3D:
    """Returns a newly initialised model."""
    return UNet3D(config, rngs=nnx.Rngs(key))


def loss_fn(model: UNet3D, batch: Mapping[str, Any]) -> Array:
    """Computes the mean cross-entropy of the voxels, in nats.

    Args:
        model: The model.
        batch: ``volumes`` ``float[batch, depth, height, width, inputs]`` and ``labels``
            ``int32[batch, depth, height, width]``.
    """
    logits = model(jnp.asarray(batch["volumes"]))
    return jnp.mean(cross_entropy(logits, jnp.asarray(batch["labels"])))


def job(
    size: str = "paper",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a 3-D U-Net segments the large structures of random fields.

    Args:
        size: One of ``SIZES``; the test size has two resolutions.
        batch_size: Volumes in a global batch; if None 8, or 16 at test size.
        learning_rate: Learning rate of Adam.
        seed: Seed of the sequence of batches.
        changes: Fields of ``UNet3DConfig``.

    Raises:
        WhaleError: Unknown size or field, or an extent with too few factors of two.

    >>> job("test").batch_at(0)["labels"].shape
    (16, 16, 16, 16)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "3-D U-Net size"), changes, options=options)
    resolutions = len(config.channels)
    why = f"{resolutions - 1} poolings halve it"
    check_extent(config.extent, resolutions - 1, why)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: segmented_volumes(
            step,
            count,
            extent=config.extent,
            channels=config.inputs,
            classes=config.classes,
            seed=seed,
        ),
        optimizer=optax.adam(learning_rate),
        batch_size=default_batch_size(size, batch_size, 8),
        name="unet3d" if size == "paper" else f"unet3d-{size}",
    )
