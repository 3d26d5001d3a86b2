"""The encoder and the decoder that ``t5`` and ``m6`` share, their head and their loss.

They are apart from the models so that the two differ only in what goes into the
encoder.
"""

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
    """The layers over what is read, and a last norm."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(self, x: Array, padding: Array, *, deterministic: bool) -> Array:
        """Encodes the inputs for the decoder's attention.

        Args:
            x: ``[batch, sequence, embed]``.
            padding: ``bool[batch, sequence]``, true where a position is real.
            deterministic: Leave dropout out.

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
    """The layers over what is made, and a last norm."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self, x: Array, memory: Array, padding: Array, *, deterministic: bool
    ) -> Array:
        """The residual stream before the head.

        Args:
            x: ``[batch, targets, embed]``, of the tokens before each target.
            memory: Output of the encoder, ``[batch, inputs, embed]``.
            padding: ``bool[batch, inputs]``, true where a position is real.
            deterministic: Leave dropout out.

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
    """The residual stream after all layers of a stack.

    Args:
        layer: The class of the layers.
        config: The model's configuration.
        x: The residual stream, ``[batch, sequence, embed]``.
        context: Further arguments of every layer.
        deterministic: Leave dropout out.
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
    """The embeddings that encoder, decoder and head share."""
    return nn.Embed(
        config.vocab,
        config.embed,
        embedding_init=nn.initializers.normal(1.0),
        name="words",
        **kinds(config),
    )


def logits_of(config: Seq2SeqConfig, words: nn.Embed, x: Array) -> Array:
    """Logits ``[batch, targets, vocab]`` by the word embeddings.

    These have variance 1 so that the tokens do; the stream is made smaller instead.
    """
    with when(config.annotated, wh.split()):
        logits: Array = words.attend(x * config.embed**-0.5)
        return logits


def loss_over(
    module: Any, names: Sequence[str], *, deterministic: bool
) -> Callable[[Any, Mapping[str, Any], Array], wh.WeightedLoss]:
    """The loss of a model: the mean of its cross-entropy over the real targets.

    Args:
        module: The model, with its configuration as ``config``.
        names: Names of the encoder's inputs in a batch, in order.
        deterministic: Leave dropout out; the key is then not used.

    Returns:
        ``loss_fn(variables, batch, rng)``, where the batch holds what is named,
        ``targets`` ``int32[batch, targets + 1]``, of which the first is a start token,
        and ``target_padding`` ``bool[batch, targets]``, true where one of the others
        is real.
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
