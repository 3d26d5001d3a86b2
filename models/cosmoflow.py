"""CosmoFlow: a 3-D convolutional network that predicts parameters of a volume.

It is an example of samples that no single device can store, because activations grow
with the cube of the extent. At 512³, devices shard the depth, height and width of a
sample (``mesh={"depth": 2, "height": 2, "width": 2}``). The model has 3 × 3 × 3
convolutions, each followed by a 2 × 2 × 2 pooling, and three dense layers. Nothing is
annotated.

After Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale"
(2018), in the form of Oyama et al., "The Case for Strong Scaling in Deep Learning:
Training Large 3D CNNs with Hybrid Parallelism" (2020): sixteen channels that double,
seven convolutions for 512³ and five for 128³, dense layers of 2,048 and 256, and four
outputs. In Flax NNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import optax
from flax import nnx

import whalejax as wh
from whalejax.models.common.batches import default_batch_size, regression_volumes
from whalejax.models.common.layers import Array, widened
from whalejax.models.common.names import change, pick
from whalejax.models.common.volume_layers import check_extent, layer_options


@dataclass(frozen=True, slots=True, kw_only=True)
class CosmoFlowConfig:
    """Sizes and switches; the defaults are those for volumes of 128³.

    Attributes:
        extent: Depth, height and width of a volume, in voxels.
        inputs: Channels of a volume.
        channels: Channels of each convolution. After each, the extent is halved.
        hidden: Widths of the dense layers before the last.
        outputs: Number of predicted values.
        batch_norm: Whether a batch normalisation follows each convolution.
        dtype: Compute dtype; None follows the parameters.
        param_dtype: Dtype of the parameters.
    """

    extent: int = 128
    inputs: int = 4
    channels: tuple[int, ...] = (16, 32, 64, 128, 256)
    hidden: tuple[int, ...] = (2048, 256)
    outputs: int = 4
    batch_norm: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, CosmoFlowConfig]] = {
    "128": CosmoFlowConfig(),
    "512": CosmoFlowConfig(extent=512, channels=(16, 32, 64, 128, 256, 256, 256)),
    "test": CosmoFlowConfig(
        extent=16, inputs=2, channels=(4, 8), hidden=(16, 8), outputs=2
    ),
}


class CosmoFlow(nnx.Module):
    """The full model: volumes in, predicted numbers out.

    >>> model = CosmoFlow(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 16, 16, 16, 2))).shape
    (2, 2)
    """

    def __init__(self, config: CosmoFlowConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds = layer_options(config.dtype, config.param_dtype, rngs)
        inputs, convolutions, norms = config.inputs, [], []
        for outputs in config.channels:
            convolutions.append(nnx.Conv(inputs, outputs, (3, 3, 3), **kinds))
            if config.batch_norm:
                norms.append(nnx.BatchNorm(outputs, momentum=0.9, **kinds))
            inputs = outputs
        self.convolutions = nnx.List(convolutions)
        self.norms = nnx.List(norms)
        side = config.extent // 2 ** len(config.channels)
        # The kernel keeps the three dimensions of space, so that they can be sharded.
        self.first = nnx.LinearGeneral(
            (side, side, side, inputs), config.hidden[0], axis=(-4, -3, -2, -1), **kinds
        )
        widths = (*config.hidden, config.outputs)
        self.dense = nnx.List(
            [
                nnx.Linear(before, after, **kinds)
                for before, after in zip(widths, widths[1:], strict=False)
            ]
        )

    def __call__(self, volumes: Array) -> Array:
        """Maps ``[batch, depth, height, width, inputs]`` to ``[batch, outputs]``."""
        x = volumes.astype(self.convolutions[0].kernel.dtype)
        for number, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if self.config.batch_norm:
                x = self.norms[number](x).astype(x.dtype)
            x = nnx.max_pool(nnx.leaky_relu(x), (2, 2, 2), strides=(2, 2, 2))
        x = self.first(x)
        for layer in self.dense:
            x = layer(nnx.leaky_relu(x))
        return x


def make_model(config: CosmoFlowConfig, key: Array) -> CosmoFlow:
    """Returns a newly initialised model."""
    return CosmoFlow(config, rngs=nnx.Rngs(key))


def loss_fn(model: CosmoFlow, batch: Mapping[str, Any]) -> Array:
    """Computes the mean squared error.

    Args:
        model: The model.
        batch: ``volumes`` ``float[batch, depth, height, width, inputs]`` and
            ``targets`` ``float[batch, outputs]``.
    """
    fn = widened(model(jnp.asarray(batch["volumes"])))
    return jnp.mean((fn - jnp.asarray(batch["targets"])) ** 2)


def job(
    size: str = "128",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a CosmoFlow predicts the spectral index of random fields.

    Args:
        size: One of ``SIZES``; the test size has two convolutions.
        batch_size: Volumes in a global batch; 64, at test size 16.
        learning_rate: Learning rate of Adam.
        seed: Seed of the sequence of batches.
        changes: Fields of ``CosmoFlowConfig``.

    Raises:
        WhaleError: Unknown size or field, or an extent with too few factors of two.

    >>> job("test").batch_at(0)["volumes"].shape
    (16, 16, 16, 16, 2)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "CosmoFlow size"), changes, options=options)
    halvings = len(config.channels)
    why = f"{halvings} convolutions halve the volume each"
    check_extent(config.extent, halvings, why)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: regression_volumes(
            step,
            count,
            extent=config.extent,
            channels=config.inputs,
            outputs=config.outputs,
            seed=seed,
        ),
        optimizer=optax.adam(learning_rate),
        batch_size=default_batch_size(size, batch_size, 64),
        name="cosmoflow" if size == "128" else f"cosmoflow-{size}",
    )
