"""T5: an encoder and a decoder in Flax Linen, which share their word embeddings.

It has features that the other models lack. Every decoder layer attends to the output of
the encoder, a sequence of another length. All layers of a stack read the same
parameter, the bias of attention scores by distance. One table is the embedding of both
stacks and the head. It runs on one device unchanged. By default nothing is marked, and
the planner decides everything. ``T5Config(annotated=True)`` adds three marks:

- in ``T5.__call__``: ``with when(..., wh.replicate()):`` around embeddings, encoder and
  decoder makes them data-parallel;
- in ``logits_of`` around the head, and in ``loss_over`` around the cross-entropy, both
  shared with ``m6``: ``with when(..., wh.split()):`` splits what it contains.

After Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer" (2020), in version 1.0, whose sizes the paper gives. The later
version 1.1 has gates and a separate head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax.numpy as jnp

import whalejax as wh
from whalejax.models.common.batches import Batch, default_batch_size, denoising_batch
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
from whalejax.models.common.seq2seq_layers import Seq2SeqConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(Seq2SeqConfig):
    """Sizes and switches of a T5, all of them from ``Seq2SeqConfig``.

    Targets have 128 tokens: the published 114, padded to a size that is easily sharded.
    """


SIZES: Final[Mapping[str, T5Config]] = {
    "small": T5Config(embed=512, heads=8, mlp=2048, layers=6),
    "base": T5Config(),
    "large": T5Config(embed=1024, heads=16, mlp=4096, layers=24),
    "test": T5Config(
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
    ),
}


class T5(nn.Module):
    """The full model: a text in, logits of another out.

    >>> import jax
    >>> tokens, real = jnp.zeros((2, 72), "int32"), jnp.ones((2, 72), bool)
    >>> arguments = (tokens, real, jnp.zeros((2, 24), "int32"))
    >>> module = T5(SIZES["test"])
    >>> jax.eval_shape(module.init_with_output, jax.random.key(0), *arguments)[0].shape
    (2, 24, 512)
    """

    config: T5Config

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        input_padding: Array,
        before: Array,
        *,
        deterministic: bool = True,
    ) -> Array:
        """Computes the logits of each target token, given the tokens before it.

        Args:
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
            memory = Encoder(config, name="encoder")(
                words(inputs), input_padding, deterministic=deterministic
            )
            x = Decoder(config, name="decoder")(
                words(before),
                memory,
                input_padding,
                deterministic=deterministic,
            )
        return logits_of(config, words, x)


def make_model(config: T5Config, key: Array) -> Any:
    """Returns initial Linen variables ``{"params": ...}``."""
    shape = (1, config.inputs)
    return T5(config).init(
        key,
        jnp.zeros(shape, jnp.int32),
        jnp.ones(shape, bool),
        jnp.zeros((1, config.targets), jnp.int32),
    )


def make_loss(
    config: T5Config, *, deterministic: bool = False
) -> Callable[[Any, Mapping[str, Any], Array], wh.WeightedLoss]:
    """Returns the loss of one configuration: the mean over the real targets.

    Args:
        config: Configuration of the model.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(variables, batch, rng)`` with a batch of ``inputs`` ``int32[batch,
        inputs]``, ``targets`` ``int32[batch, targets + 1]``, which begin with a start
        token, and masks of real tokens: ``input_padding`` ``bool[batch, inputs]`` and
        ``target_padding`` ``bool[batch, targets]``.

    >>> loss_fn = make_loss(SIZES["test"], deterministic=True)
    >>> callable(loss_fn)
    True
    """
    names = ("inputs", "input_padding")
    return loss_over(T5(config), names, deterministic=deterministic)


def job(
    size: str = "base",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-2,
    constant_steps: int = 10_000,
    deterministic: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a T5 predicts hidden spans of synthetic texts.

    Adafactor, its learning rate and the batch are the published ones of pre-training.

    Args:
        size: One of ``SIZES``.
        batch_size: Texts in a global batch; default: 128, or 16 at test size.
        learning_rate: Learning rate of Adafactor, relative to the parameter's size.
        constant_steps: Number of steps before the rate decays with the inverse square
            root of the step.
        deterministic: Whether to omit dropout.
        seed: Seed of the sequence of batches.
        changes: Fields of ``T5Config``.

    Raises:
        WhaleError: Unknown size or field.

    >>> sorted(job("test").batch_at(0))
    ['input_padding', 'inputs', 'target_padding', 'targets']
    """
    options = ("batch_size", "learning_rate", "constant_steps", "deterministic", "seed")
    config = change(pick(size, SIZES, "T5 size"), changes, options=options)
    return wh.Job(
        loss_fn=make_loss(config, deterministic=deterministic),
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: text_batch(config, step, count, seed=seed),
        optimizer=slowing_adafactor(learning_rate, constant_steps),
        batch_size=default_batch_size(size, batch_size, 128),
        name=f"t5-{size}",
    )


def text_batch(config: T5Config, step: int, size: int, *, seed: int) -> Batch:
    """Returns texts with hidden spans.

    >>> text_batch(SIZES["test"], 0, 2, seed=0)["inputs"].shape
    (2, 72)
    """
    return denoising_batch(
        step,
        size,
        inputs=config.inputs,
        targets=config.targets,
        vocab=config.vocab,
        seed=seed,
    )
