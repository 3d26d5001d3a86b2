"""Encoder, decoder, head and loss that ``t5`` and ``m6`` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

import whalejax as wh
from whalejax.models.common.layers import Array, cross_entropy, when
from whalejax.models.common.seq2seq_layers import (
    DecoderLayer,
    EncoderLayer,
    RelativeBias,
    Seq2SeqConfig,
    dropped,
    kinds,
    norm,
)


class Encoder(nn.Module):
    """Layers of the encoder, and a final norm."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(self, x: Array, padding: Array, *, deterministic: bool) -> Array:
        """Encodes the inputs for the decoder's attention.

        Args:
            x: ``[batch, sequence, embed]``.
            padding: ``bool[batch, sequence]``, true for real positions.
            deterministic: Whether to omit dropout.

        Returns:
            ``[batch, sequence, embed]``.
        """
        config = self.config
        bias = RelativeBias(config, bidirectional=True, name="distance")(x.shape[1])
        x = through_layers(
            EncoderLayer,
            config,
            dropped(config, x, deterministic),
            padding[:, None, None, :],
            bias,
            deterministic=deterministic,
        )
        return dropped(config, norm(config, "norm")(x), deterministic)


class Decoder(nn.Module):
    """Layers of the decoder, and a final norm."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self, x: Array, memory: Array, padding: Array, *, deterministic: bool
    ) -> Array:
        """Returns the residual stream before the head.

        Args:
            x: ``[batch, targets, embed]``, of the tokens before each target.
            memory: Output of the encoder, ``[batch, inputs, embed]``.
            padding: ``bool[batch, inputs]``, true for real positions.
            deterministic: Whether to omit dropout.

        Returns:
            ``[batch, targets, embed]``.
        """
        config, length = self.config, x.shape[1]
        bias = RelativeBias(config, bidirectional=False, name="distance")(length)
        earlier = jnp.tril(jnp.ones((length, length), bool))[None, None]
        x = through_layers(
            DecoderLayer,
            config,
            dropped(config, x, deterministic),
            memory,
            padding[:, None, None, :],
            earlier,
            bias,
            deterministic=deterministic,
        )
        return dropped(config, norm(config, "norm")(x), deterministic)


def through_layers(
    layer: Callable[..., Any],
    config: Seq2SeqConfig,
    x: Array,
    *context: Array,
    deterministic: bool,
) -> Array:
    """Returns the residual stream after all layers of a stack.

    Args:
        layer: Class of the layers.
        config: Configuration of the model.
        x: The residual stream, ``[batch, sequence, embed]``.
        context: Other arguments of each layer.
        deterministic: Whether to omit dropout.
    """
    if not config.scan_layers:
        for i in range(config.layers):
            made = layer(config, name=f"layer_{i}")
            x = made(x, *context, deterministic=deterministic)
        return x

    def body(module: Any, x: Array, *context: Array) -> tuple[Array, None]:
        return module(x, *context, deterministic=deterministic), None

    broadcast: Any = nn.broadcast
    scanned: Any = nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=broadcast,
        length=config.layers,
    )
    y: Array = scanned(layer(config, name="layers"), x, *context)[0]
    return y


def word_table(config: Seq2SeqConfig) -> nn.Embed:
    """Returns the embeddings that encoder, decoder and head share."""
    return nn.Embed(
        config.vocab,
        config.embed,
        embedding_init=nn.initializers.normal(1.0),
        name="words",
        **kinds(config),
    )


def logits_of(config: Seq2SeqConfig, words: nn.Embed, x: Array) -> Array:
    """Computes logits ``[batch, targets, vocab]`` with the word embeddings.

    The embeddings have variance 1, so the residual stream is scaled down.
    """
    with when(config.annotated, wh.split()):
        logits: Array = words.attend(x * config.embed**-0.5)
        return logits


def loss_over(
    module: Any, names: Sequence[str], *, deterministic: bool
) -> Callable[[Any, Mapping[str, Any], Array], wh.WeightedLoss]:
    """Returns the loss of a model: its mean cross-entropy over the real targets.

    Args:
        module: Model with its configuration as ``config``.
        names: Names of the encoder's inputs in a batch, in order.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(variables, batch, rng)`` with a batch of the named inputs, ``targets``
        ``int32[batch, targets + 1]``, which begin with a start token, and
        ``target_padding`` ``bool[batch, targets]``, true for real targets.
    """

    def loss_fn(
        variables: Any, batch: Mapping[str, Any], rng: Array
    ) -> wh.WeightedLoss:
        targets = jnp.asarray(batch["targets"])
        logits: Any = module.apply(
            variables,
            *(jnp.asarray(batch[name]) for name in names),
            targets[:, :-1],
            deterministic=deterministic,
            rngs=None if deterministic else {"dropout": rng},
        )
        with when(module.config.annotated, wh.split()):
            nats = cross_entropy(logits, targets[:, 1:])
            real = jnp.asarray(batch["target_padding"]).astype(nats.dtype)
            return wh.WeightedLoss(jnp.sum(nats * real), jnp.sum(real))

    return loss_fn
