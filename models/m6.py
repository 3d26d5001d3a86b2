"""M6: images and text in, text out, of ten billion parameters, in Flax Linen.

It has a feature that the other models lack: the encoder reads a sequence of the patches
of an image and the tokens of a text. The decoder generates text. Where a replica does
not fit, parameters must be sharded, divided into stages or offloaded. The layers are
those of T5. By default nothing is marked, and the planner decides everything.
``M6Config(annotated=True)`` adds three marks:

- in ``M6.__call__``: ``with when(..., wh.replicate()):`` around embeddings, encoder and
  decoder makes them data-parallel;
- in ``logits_of`` and ``loss_over``, which ``t5`` shares:
  ``with when(..., wh.split()):`` around head and cross-entropy splits the two.

After the M6-10B of Jia et al., "Whale: Efficient Giant Model Training over
Heterogeneous GPUs" (2022). The paper gives 24 encoder layers, 24 decoder layers,
Adafactor, and ten billion parameters. The rest is our choice: a width of 4,096, 32
heads of 128, feed-forward layers of 12,800, and a vocabulary of 21,128, in total 9.96
billion parameters. An image has 16 patches of 2,048 numbers, as from a convolutional
network, and one projection embeds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import whalejax as wh
from whalejax.models.common.batches import (
    Batch,
    default_batch_size,
    denoising_batch,
    generator,
)
from whalejax.models.common.layers import Array, when
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import slowing_adafactor
from whalejax.models.common.seq2seq import (
    Decoder,
    Encoder,
    logits_of,
    loss_over,
    word_table,
)
from whalejax.models.common.seq2seq_layers import Seq2SeqConfig, dense, kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class M6Config(Seq2SeqConfig):
    """Sizes and switches of an M6: those of ``Seq2SeqConfig`` and of the image.

    Attributes:
        patches: Number of patches of an image.
        patch_dim: Numbers in a patch.
    """

    patches: int = 16
    patch_dim: int = 2048


SIZES: Final[Mapping[str, M6Config]] = {
    "10b": M6Config(
        vocab=21_128,
        inputs=496,
        embed=4096,
        heads=32,
        head_dim=128,
        mlp=12_800,
        layers=24,
        scan_layers=True,
    ),
    "test": M6Config(
        vocab=512,
        inputs=72,
        targets=24,
        embed=48,
        heads=8,
        head_dim=10,
        mlp=320,
        layers=2,
        buckets=12,
        longest_distance=40,
        patches=8,
        patch_dim=28,
    ),
}


class M6(nn.Module):
    """The full model: an image and a text in, logits of another text out.

    >>> import jax
    >>> tokens, real = jnp.zeros((2, 72), "int32"), jnp.ones((2, 72), bool)
    >>> arguments = (jnp.zeros((2, 8, 28)), tokens, real, jnp.zeros((2, 24), "int32"))
    >>> module = M6(SIZES["test"])
    >>> jax.eval_shape(module.init_with_output, jax.random.key(0), *arguments)[0].shape
    (2, 24, 512)
    """

    config: M6Config

    @nn.compact
    def __call__(
        self,
        image: Array,
        inputs: Array,
        input_padding: Array,
        before: Array,
        *,
        deterministic: bool = True,
    ) -> Array:
        """Computes the logits of each target token, given the tokens before it.

        Args:
            image: ``float[batch, patches, patch_dim]``.
            inputs: ``int32[batch, inputs]``.
            input_padding: ``bool[batch, inputs]``, true for real tokens. No position
                attends to padding.
            before: ``int32[batch, targets]``, the token before each target: a start
                token and the text; padding follows the real tokens.
            deterministic: Whether to omit dropout; otherwise pass a ``dropout`` key.

        Returns:
            ``[batch, targets, vocab]``.
        """
        config = self.config
        words = word_table(config)
        with when(config.annotated, wh.replicate()):
            text = words(inputs)
            x = jnp.concatenate([self._embed(image.astype(text.dtype)), text], axis=1)
            padding = jnp.pad(
                input_padding, ((0, 0), (config.patches, 0)), constant_values=True
            )
            memory = Encoder(config, name="encoder")(
                x, padding, deterministic=deterministic
            )
            y = Decoder(config, name="decoder")(
                words(before), memory, padding, deterministic=deterministic
            )
        return logits_of(config, words, y)

    def _embed(self, image: Array) -> Array:
        config = self.config
        # Relative positions do not distinguish rows from columns of an image.
        places = nn.Embed(
            config.patches,
            config.embed,
            embedding_init=nn.initializers.normal(1.0),
            name="places",
            **kinds(config),
        )
        embedded: Array = dense(config, config.embed, config.patch_dim, "patches")(
            image
        )
        return embedded + places(jnp.arange(config.patches))[None]


def make_model(config: M6Config, key: Array) -> Any:
    """Returns initial Linen variables ``{"params": ...}``."""
    shape = (1, config.inputs)
    return M6(config).init(
        key,
        jnp.zeros((1, config.patches, config.patch_dim), jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.ones(shape, bool),
        jnp.zeros((1, config.targets), jnp.int32),
    )


def make_loss(
    config: M6Config, *, deterministic: bool = False
) -> Callable[[Any, Mapping[str, Any], Array], wh.WeightedLoss]:
    """Returns the loss of one configuration: the mean over the real targets.

    Args:
        config: Configuration of the model.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(variables, batch, rng)`` with the batch of T5 and ``image``
        ``float[batch, patches, patch_dim]``.

    >>> loss_fn = make_loss(SIZES["test"], deterministic=True)
    >>> callable(loss_fn)
    True
    """
    names = ("image", "inputs", "input_padding")
    return loss_over(M6(config), names, deterministic=deterministic)


def job(
    size: str = "10b",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-2,
    constant_steps: int = 10_000,
    deterministic: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: an M6 predicts hidden spans of synthetic texts with images.

    Args:
        size: One of ``SIZES``.
        batch_size: Texts in a global batch; 128, at test size 16.
        learning_rate: Learning rate of Adafactor, relative to the parameter's size.
        constant_steps: Number of steps before the rate decays with the inverse square
            root of the step.
        deterministic: Whether to omit dropout.
        seed: Seed of the sequence of batches.
        changes: Fields of ``M6Config``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["image"].shape
    (16, 8, 28)
    """
    options = ("batch_size", "learning_rate", "constant_steps", "deterministic", "seed")
    config = change(pick(size, SIZES, "M6 size"), changes, options=options)
    return wh.Job(
        loss_fn=make_loss(config, deterministic=deterministic),
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: captioned_batch(config, step, count, seed=seed),
        optimizer=slowing_adafactor(learning_rate, constant_steps),
        batch_size=default_batch_size(size, batch_size, 128),
        name=f"m6-{size}",
    )


def captioned_batch(config: M6Config, step: int, size: int, *, seed: int) -> Batch:
    """Returns texts with hidden spans, and images that encode the first hidden word.

    >>> captioned_batch(SIZES["test"], 0, 2, seed=0)["image"].shape
    (2, 8, 28)
    """
    texts = denoising_batch(
        step,
        size,
        inputs=config.inputs,
        targets=config.targets,
        vocab=config.vocab,
        seed=seed,
    )
    shape = (size, config.patches, config.patch_dim)
    noise = generator(seed + (1 << 35), step).standard_normal(shape, dtype=np.float32)
    # The start token and the sentinel precede the first hidden word.
    turns = texts["targets"][:, 2, None] * np.arange(1, config.patch_dim + 1)[None]
    pattern = np.sin(turns / config.vocab * 2 * np.pi)[:, None].astype(np.float32)
    return {**texts, "image": noise + pattern}
