"""The layers of an encoder and a decoder, and their configuration, in Flax Linen.

As in T5, an RMS norm precedes each layer, and layers have no biases. The attention
scores have a bias for relative positions, which all layers of a stack share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp

from whalejax.models.common.distances import relative_buckets
from whalejax.models.common.layers import Array, widened


_NORM_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes and switches of an encoder and a decoder; the defaults are T5-base's.

    Attributes:
        vocab: Number of different tokens.
        inputs: Number of tokens in a sequence that the encoder reads.
        targets: Number of tokens in a sequence that the decoder predicts.
        embed: Width of the residual stream.
        heads: Number of attention heads.
        head_dim: Width of a head; ``heads * head_dim`` may differ from ``embed``.
        mlp: Width inside the feed-forward layers.
        layers: Number of layers of the encoder, and of the decoder.
        buckets: Even number of buckets of relative distances. The encoder uses half of
            them for each direction.
        longest_distance: Distance up to which buckets widen. The last bucket of a
            direction also has all larger distances.
        dropout_rate: Dropout rate after embeddings and final norms, of attention
            weights, inside feed-forward layers, and before each residual addition.
        scan_layers: Whether to stack the layers' parameters and scan over them.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = 32_128
    inputs: int = 512
    targets: int = 128
    embed: int = 768
    heads: int = 12
    head_dim: int = 64
    mlp: int = 3072
    layers: int = 12
    buckets: int = 32
    longest_distance: int = 128
    dropout_rate: float = 0.1
    scan_layers: bool = False
    annotated: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"


class RelativeBias(nn.Module):
    """Bias of a stack's attention scores, by distance."""

    config: Seq2SeqConfig
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> Array:
        """Returns the bias ``[1, heads, length, length]``."""
        config = self.config
        table = nn.Embed(
            config.buckets,
            config.heads,
            embedding_init=nn.initializers.normal(config.embed**-0.5),
            name="table",
            **kinds(config),
        )
        call = relative_buckets(
            length,
            length,
            buckets=config.buckets,
            longest_distance=config.longest_distance,
            bidirectional=self.bidirectional,
        )
        return jnp.transpose(table(call), (2, 0, 1))[None]


class Attention(nn.Module):
    """Attention with unscaled scores, but scaled initial weights of the query."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        memory: Array,
        seen: Array,
        bias: Array | None,
        *,
        deterministic: bool,
    ) -> Array:
        """Attends from each position of one sequence to those of another.

        Args:
            x: Sequence of the queries, ``[batch, queries, embed]``.
            memory: Sequence of the keys and values, ``[batch, keys, embed]``; ``x``
                itself in self-attention.
            seen: Mask of the keys that each query reads, at least one. ``bool`` that
                broadcasts to ``[batch, heads, queries, keys]``.
            bias: Bias of the scores, ``[1, heads, queries, keys]``, or None.
            deterministic: Whether to omit dropout.

        Returns:
            Array ``[batch, queries, embed]``.
        """
        config = self.config
        narrow = config.embed**-0.5
        query = self._project("query", x, narrow * config.head_dim**-0.5)
        key = self._project("key", memory, narrow)
        value = self._project("value", memory, narrow)
        scores = widened(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        if bias is not None:
            scores = scores + bias.astype(scores.dtype)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        weights = dropped(config, weights.astype(value.dtype), deterministic)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        y: Array = nn.DenseGeneral(
            config.embed,
            axis=(-2, -1),
            use_bias=False,
            kernel_init=nn.initializers.normal(
                (config.heads * config.head_dim) ** -0.5
            ),
            name="out",
            **kinds(config),
        )(mixed)
        return y

    def _project(self, name: str, x: Array, deviation: float) -> Array:
        config = self.config
        y: Array = nn.DenseGeneral(
            (config.heads, config.head_dim),
            use_bias=False,
            kernel_init=nn.initializers.normal(deviation),
            name=name,
            **kinds(config),
        )(x)
        return y


class FeedForward(nn.Module):
    """Two dense layers with a ReLU between them."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """Applies the layer to ``x``, an array ``[batch, sequence, embed]``."""
        config = self.config
        hidden = nn.relu(dense(config, config.mlp, config.embed, "up")(x))
        hidden = dropped(config, hidden, deterministic)
        y: Array = dense(config, config.embed, config.mlp, "down")(hidden)
        return y


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each after a norm and added to its input."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self, x: Array, seen: Array, bias: Array, *, deterministic: bool
    ) -> Array:
        """Applies the layer to ``x``, an array ``[batch, sequence, embed]``."""
        config = self.config
        y = norm(config, "attention_norm")(x)
        y = Attention(config, name="attention")(
            y, y, seen, bias, deterministic=deterministic
        )
        x = x + dropped(config, y, deterministic)
        y = FeedForward(config, name="mlp")(
            norm(config, "mlp_norm")(x), deterministic=deterministic
        )
        return x + dropped(config, y, deterministic)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, and feed-forward."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        memory: Array,
        remembered: Array,
        earlier: Array,
        bias: Array,
        *,
        deterministic: bool,
    ) -> Array:
        """Applies the layer to the decoder's residual stream.

        Args:
            x: Residual stream, ``[batch, targets, embed]``.
            memory: Output of the encoder, ``[batch, inputs, embed]``.
            remembered: Mask of the encoder's real tokens, ``bool[batch, 1, 1,
                inputs]``.
            earlier: Mask of self-attention, ``bool[1, 1, targets, targets]``.
            bias: Bias of self-attention's scores, ``[1, heads, targets, targets]``.
            deterministic: Whether to omit dropout.
        """
        config = self.config
        y = norm(config, "attention_norm")(x)
        y = Attention(config, name="attention")(
            y, y, earlier, bias, deterministic=deterministic
        )
        x = x + dropped(config, y, deterministic)
        y = norm(config, "cross_norm")(x)
        y = Attention(config, name="cross")(
            y, memory, remembered, None, deterministic=deterministic
        )
        x = x + dropped(config, y, deterministic)
        y = FeedForward(config, name="mlp")(
            norm(config, "mlp_norm")(x), deterministic=deterministic
        )
        return x + dropped(config, y, deterministic)


def kinds(config: Seq2SeqConfig) -> dict[str, Any]:
    """Returns the dtype arguments of Flax layers."""
    return {
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }


def norm(config: Seq2SeqConfig, name: str) -> nn.RMSNorm:
    """Returns an RMS norm."""
    return nn.RMSNorm(epsilon=_NORM_EPSILON, name=name, **kinds(config))


def dense(config: Seq2SeqConfig, width: int, inputs: int, name: str) -> nn.Dense:
    """Returns a dense layer whose result has the variance of its input."""
    init = nn.initializers.normal(inputs**-0.5)
    return nn.Dense(width, use_bias=False, kernel_init=init, name=name, **kinds(config))


def dropped(config: Seq2SeqConfig, x: Array, deterministic: bool) -> Array:
    """Applies dropout to single elements."""
    y: Array = nn.Dropout(config.dropout_rate)(x, deterministic=deterministic)
    return y
