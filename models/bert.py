"""BERT: a bidirectional, post-norm encoder in Flax Linen, with its masked-word head.

It is an example of Linen variables, dropout keys as arguments of the loss, padded
sequences, and a loss whose mean covers only hidden tokens. It runs on one device
unchanged. By default nothing is marked, and the planner decides everything.
``BertConfig(annotated=True)`` adds three marks:

- in ``Bert.__call__``: ``with when(..., wh.replicate()):`` around embeddings and
  encoder makes them data-parallel;
- in ``Bert.__call__`` and in the loss of ``make_loss``: ``with when(..., wh.split()):``
  around the masked-word head and around its cross-entropy splits the two.

``BertConfig(logical_names=True)`` names the dimensions of kernels and tables by Flax's
logical partitioning metadata: ``embed``, ``heads``, ``kv``, ``mlp``, ``vocab``,
``positions`` and ``segments``.

After Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding" (2018), without the next-sentence task and its pooler.
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
    chain_tokens,
    default_batch_size,
    generator,
    lengths,
)
from whalejax.models.common.layers import Array, cross_entropy, when
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import warmed_adamw


_MASK_TOKEN: Final = 0
_NORM_EPSILON: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Sizes and switches of a BERT; the defaults are BERT-base's.

    Attributes:
        vocab: Different tokens.
        positions: Length of the longest sequence, for which positions are learned.
        sequence: Tokens in a training sequence.
        embed: Width of the residual stream.
        heads: Attention heads; divides ``embed``.
        mlp: Width inside the feed-forward layers.
        layers: Number of encoder layers.
        dropout_rate: Dropout rate after the embeddings, of attention weights, and
            before each residual addition.
        logical_names: Whether kernels and tables have Flax's partitioning metadata.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = 30_522
    positions: int = 512
    sequence: int = 128
    embed: int = 768
    heads: int = 12
    mlp: int = 3072
    layers: int = 12
    dropout_rate: float = 0.1
    logical_names: bool = False
    annotated: bool = False
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, BertConfig]] = {
    "base": BertConfig(),
    "large": BertConfig(embed=1024, heads=16, mlp=4096, layers=24),
    "test": BertConfig(
        vocab=512, positions=40, sequence=24, embed=48, heads=8, mlp=320, layers=2
    ),
}


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each added to its input and then normalized."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: Array, mask: Array, *, deterministic: bool) -> Array:
        """Applies the layer to ``x`` ``[batch, sequence, embed]``."""
        config, kinds = self.config, _kinds(self.config)
        attended = nn.MultiHeadDotProductAttention(
            num_heads=config.heads,
            kernel_init=_init(config, "embed", "heads", "kv"),
            out_kernel_init=_init(config, "heads", "kv", "embed"),
            dropout_rate=config.dropout_rate,
            # A mask shared by all samples would make them dependent.
            broadcast_dropout=False,
            deterministic=deterministic,
            name="attention",
            **kinds,
        )(x, mask=mask)
        x = x + nn.Dropout(config.dropout_rate)(attended, deterministic=deterministic)
        x = nn.LayerNorm(epsilon=_NORM_EPSILON, name="attention_norm", **kinds)(x)
        hidden = nn.Dense(
            config.mlp, kernel_init=_init(config, "embed", "mlp"), name="up", **kinds
        )(x)
        hidden = nn.Dense(
            config.embed,
            kernel_init=_init(config, "mlp", "embed"),
            name="down",
            **kinds,
        )(nn.gelu(hidden, approximate=False))
        x = x + nn.Dropout(config.dropout_rate)(hidden, deterministic=deterministic)
        y: Array = nn.LayerNorm(epsilon=_NORM_EPSILON, name="mlp_norm", **kinds)(x)
        return y


class Bert(nn.Module):
    """The encoder and its masked-word head, which shares the word embeddings."""

    config: BertConfig

    @nn.compact
    def __call__(
        self, tokens: Array, padding: Array, *, deterministic: bool = True
    ) -> Array:
        """Returns the logits of every position.

        Args:
            tokens: ``int32[batch, sequence]``.
            padding: ``bool[batch, sequence]``, true for real tokens. No position
                attends to padding.
            deterministic: Whether to omit dropout; otherwise pass a ``dropout`` key.

        Returns:
            ``[batch, sequence, vocab]``.
        """
        config, kinds = self.config, _kinds(self.config)
        words = _table(config, config.vocab, "vocab", "words")
        with when(config.annotated, wh.replicate()):
            x = self._embed(words, tokens, deterministic=deterministic)
            for i in range(config.layers):
                x = EncoderLayer(config, name=f"layer_{i}")(
                    x, padding[:, None, None, :], deterministic=deterministic
                )
        with when(config.annotated, wh.split()):
            x = nn.Dense(
                config.embed,
                kernel_init=_init(config, "embed", None),
                name="head_dense",
                **kinds,
            )(x)
            x = nn.gelu(x, approximate=False)
            x = nn.LayerNorm(epsilon=_NORM_EPSILON, name="head_norm", **kinds)(x)
            logits: Array = words.attend(x)
            bias: Array = self.param(
                "head_bias",
                _with_logical_names(config, nn.initializers.zeros, "vocab"),
                (config.vocab,),
                kinds["param_dtype"],
            )
            return logits + bias.astype(logits.dtype)[None, None]

    def _embed(self, words: nn.Embed, tokens: Array, *, deterministic: bool) -> Array:
        config = self.config
        places = _table(config, config.positions, "positions", "places")
        segments = _table(config, 2, "segments", "segments")
        # There is only one segment, as the two-sentence task is omitted.
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))[None]
        x = x + segments(jnp.zeros((1, 1), jnp.int32))
        x = nn.LayerNorm(epsilon=_NORM_EPSILON, name="embed_norm", **_kinds(config))(x)
        y: Array = nn.Dropout(config.dropout_rate)(x, deterministic=deterministic)
        return y


def _kinds(config: BertConfig) -> dict[str, Any]:
    return {
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }


def _init(config: BertConfig, *names: str | None) -> Any:
    return _with_logical_names(config, nn.initializers.truncated_normal(0.02), *names)


def _with_logical_names(config: BertConfig, init: Any, *names: str | None) -> Any:
    return nn.with_logical_partitioning(init, names) if config.logical_names else init


def _table(config: BertConfig, count: int, dimension: str, name: str) -> nn.Embed:
    return nn.Embed(
        count,
        config.embed,
        embedding_init=_init(config, dimension, "embed"),
        name=name,
        **_kinds(config),
    )


def make_model(config: BertConfig, key: Array) -> Any:
    """Returns initial Linen variables ``{"params": ...}``."""
    shape = (1, config.sequence)
    return Bert(config).init(key, jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))


def make_loss(
    config: BertConfig, *, deterministic: bool = False
) -> Callable[[Any, Mapping[str, Any], Array], wh.WeightedLoss]:
    """Returns the masked-word loss of one configuration.

    Args:
        config: Configuration of the model.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(variables, batch, rng)`` with a batch of ``tokens`` and ``targets``
        ``int32[batch, sequence]``, ``padding`` ``bool[batch, sequence]`` (true for real
        tokens) and ``predicted`` ``bool[batch, sequence]`` (true for hidden tokens).
        The mean is over hidden tokens.

    >>> loss_fn = make_loss(SIZES["test"], deterministic=True)
    >>> callable(loss_fn)
    True
    """
    module = Bert(config)

    def loss_fn(
        variables: Any, batch: Mapping[str, Any], rng: Array
    ) -> wh.WeightedLoss:
        logits: Any = module.apply(
            variables,
            jnp.asarray(batch["tokens"]),
            jnp.asarray(batch["padding"]),
            deterministic=deterministic,
            rngs=None if deterministic else {"dropout": rng},
        )
        with when(config.annotated, wh.split()):
            nats = cross_entropy(logits, jnp.asarray(batch["targets"]))
            counts = jnp.asarray(batch["predicted"]).astype(nats.dtype)
            return wh.WeightedLoss(jnp.sum(nats * counts), jnp.sum(counts))

    return loss_fn


def job(
    size: str = "base",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-4,
    warmup_steps: int = 100,
    deterministic: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: masked-word training of a BERT on synthetic, padded sequences.

    Args:
        size: One of ``SIZES``.
        batch_size: Sequences in a global batch; 32, at test size 16.
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises.
        deterministic: Whether to omit dropout.
        seed: Seed of the sequence of batches.
        changes: Fields of ``BertConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> sorted(job("test").batch_at(0))
    ['padding', 'predicted', 'targets', 'tokens']
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "deterministic", "seed")
    config = change(pick(size, SIZES, "BERT size"), changes, options=options)
    return wh.Job(
        loss_fn=make_loss(config, deterministic=deterministic),
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: masked_batch(config, step, count, seed=seed),
        optimizer=warmed_adamw(learning_rate, warmup_steps),
        batch_size=default_batch_size(size, batch_size, 32),
        name=f"bert-{size}",
    )


def masked_batch(config: BertConfig, step: int, size: int, *, seed: int) -> Batch:
    """Returns a batch in which 15 % of the real tokens are hidden.

    The first token is always hidden, so that each batch has a target.

    >>> batch = masked_batch(SIZES["test"], 0, 4, seed=0)
    >>> bool(batch["predicted"][:, 0].all())
    True
    """
    length = config.sequence
    targets = chain_tokens(step, size, length=length, vocab=config.vocab, seed=seed)
    real = lengths(step, size, longest=length, seed=seed)
    padding = np.arange(length)[None, :] < real[:, None]
    draws = generator(seed + (1 << 33), step).random((size, length))
    predicted = (draws < 0.15) & padding
    predicted[:, 0] = True
    tokens = np.where(predicted, _MASK_TOKEN, targets).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "padding": padding,
        "predicted": predicted,
    }
