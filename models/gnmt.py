"""GNMT: translation by recurrent layers and additive attention, in Flax NNX.

It has features that the other models lack. Loops over time compute the positions of a
sequence one after the other. Encoder and decoder have different shapes, with attention
between them, and read the same embedding. It runs on one device unchanged. Two lines
annotate it:

- in ``GNMT.hidden_states``: ``with when(..., wh.replicate()):`` around embedding,
  encoder and decoder makes them data-parallel;
- in the loss of ``make_loss``: ``with when(..., wh.split()):`` around classifier and
  cross-entropy splits them.

``GNMTConfig(annotated=False)`` leaves both out. After Wu et al., "Google's Neural
Machine Translation System" (2016), in the smaller form that MLPerf Training 0.5 to 0.7
measured as GNMT v2:

- four layers each, of width 1024; the encoder's first runs in both directions;
- residual connections from the third layer on;
- attention is Bahdanau's with a normalised scorer. The decoder's first layer makes the
  queries, and all later layers read the result for the same token. In the paper, the
  first layer reads the result for the previous token too. Without that, attention is
  outside the loops;
- one embedding of 32,320 tokens for both languages, and a separate classifier;
- dropout before every layer, label smoothing, and the correct tokens as the decoder's
  input (teacher forcing).

Omitted are decoding (beam search, length and coverage penalties), the second bias of
cuDNN's cells, and the clipping of cell states. A kernel of two concatenated inputs is
stored as two kernels, so that each dimension belongs to one input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import whalejax as wh
from whalejax.models.common.batches import (
    Batch,
    chain_tokens,
    default_batch_size,
    lengths,
)
from whalejax.models.common.layers import Array, cross_entropy, embedding, when, widened
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import warmed_adamw
from whalejax.models.common.recurrent import LSTM, AdditiveAttention, linear_kinds


_EDGE_TOKEN: Final = 0  # begins and ends a target, and pads
_MULTIPLIER: Final = 7
_OFFSET: Final = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class GNMTConfig:
    """Sizes and switches of a GNMT; the defaults are those of GNMT v2.

    Attributes:
        vocab: Different tokens of both languages. One of them starts, ends and pads.
        source_length: Tokens of a padded source sequence.
        target_length: Tokens of a padded target sequence, including the end token.
        embed: Width of the embedding.
        hidden: Width of every layer and of the attention.
        layers: Number of layers of the encoder and of the decoder, at least 2.
        dropout_rate: Dropout rate before every layer, with keys from that of the loss.
        label_smoothing: Share of a target that is distributed over the vocabulary.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = 32_320
    source_length: int = 50
    target_length: int = 50
    embed: int = 1024
    hidden: int = 1024
    layers: int = 4
    dropout_rate: float = 0.2
    label_smoothing: float = 0.1
    annotated: bool = True
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, GNMTConfig]] = {
    "base": GNMTConfig(),
    "test": GNMTConfig(
        vocab=320, source_length=14, target_length=10, embed=40, hidden=48, layers=3
    ),
}

Drop = Callable[[Array], Array]


def _kinds(config: GNMTConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}


class RecurrentEncoder(nnx.Module):
    """Recurrent layers over the source, the first in both directions."""

    def __init__(self, config: GNMTConfig, *, rngs: nnx.Rngs) -> None:
        kinds, width = _kinds(config, rngs), config.hidden
        self.forward = LSTM((config.embed,), width, **kinds)
        self.backward = LSTM((config.embed,), width, **kinds)
        inputs = [(width, width), *[(width,)] * (config.layers - 2)]
        self.upper = nnx.List(LSTM(widths, width, **kinds) for widths in inputs)

    def __call__(self, x: Array, real: Array, drop: Drop) -> Array:
        """Encodes ``x`` ``[batch, source, embed]`` as ``[batch, source, hidden]``."""
        x = drop(x)
        # The forward direction needs no mask: padding follows the real tokens, and
        # attention skips it.
        first, *rest = self.upper
        y = first(drop(self.forward(x)), drop(self.backward(x, backward_over=real)))
        for layer in rest:
            y = y + layer(drop(y))
        return y


class RecurrentDecoder(nnx.Module):
    """Recurrent layers over the target, which read the source by attention."""

    def __init__(self, config: GNMTConfig, *, rngs: nnx.Rngs) -> None:
        kinds, width = _kinds(config, rngs), config.hidden
        self.bottom = LSTM((config.embed,), width, **kinds)
        self.attention = AdditiveAttention(width, **kinds)
        self.upper = nnx.List(
            LSTM((width, width), width, **kinds) for _ in range(config.layers - 1)
        )

    def __call__(self, x: Array, encoded: Array, real: Array, drop: Drop) -> Array:
        """Decodes ``x`` ``[batch, target, embed]`` as ``[batch, target, hidden]``."""
        y = self.bottom(drop(x))
        context = self.attention(y, encoded, real)
        first, *rest = self.upper
        y = first(drop(y), drop(context))
        for layer in rest:
            y = y + layer(drop(y), drop(context))
        return y


class GNMT(nnx.Module):
    """The full model: source and target tokens in, logits out.

    >>> model = GNMT(SIZES["test"], rngs=nnx.Rngs(0))
    >>> source, target = jnp.zeros((2, 14), "int32"), jnp.zeros((2, 10), "int32")
    >>> model(source, jnp.ones((2, 14), bool), target).shape
    (2, 10, 320)
    """

    def __init__(self, config: GNMTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds = _kinds(config, rngs)
        self.tokens = embedding(config.vocab, config.embed, **kinds)
        self.encoder = RecurrentEncoder(config, rngs=rngs)
        self.decoder = RecurrentDecoder(config, rngs=rngs)
        self.classifier = nnx.Linear(
            config.hidden, config.vocab, **linear_kinds(**kinds)
        )

    def __call__(self, source: Array, real: Array, target: Array) -> Array:
        """Computes logits ``[batch, target, vocab]`` of the token after each target
        token.

        Args:
            source: ``int32[batch, source]``.
            real: ``bool[batch, source]``, true for source tokens that are no padding;
                at least one per sequence is real, and padding follows it.
            target: ``int32[batch, target]``.
        """
        return self.classifier(self.hidden_states(source, real, target))

    def hidden_states(
        self, source: Array, real: Array, target: Array, *, rng: Array | None = None
    ) -> Array:
        """Computes the inputs of the classifier, ``[batch, target, hidden]``.

        Args:
            source, real, target: Arguments of a call, unchanged.
            rng: Dropout key; without it there is no dropout.
        """
        with when(self.config.annotated, wh.replicate()):
            drop = _dropout(self.config.dropout_rate, rng)
            encoded = self.encoder(self.tokens(source), real, drop)
            return self.decoder(self.tokens(target), encoded, real, drop)


def _dropout(rate: float, rng: Array | None) -> Drop:
    if rng is None:
        return lambda x: x
    dropout = nnx.Dropout(rate)
    keys = (jax.random.fold_in(rng, call) for call in itertools.count())
    return lambda x: dropout(x, deterministic=False, rngs=next(keys))


def make_model(config: GNMTConfig, key: Array) -> GNMT:
    """Returns a newly initialised model."""
    return GNMT(config, rngs=nnx.Rngs(key))


def make_loss(
    config: GNMTConfig, *, deterministic: bool = False
) -> Callable[[GNMT, Mapping[str, Any], Array], wh.WeightedLoss]:
    """Returns the translation loss of one configuration, in nats per real target token.

    Args:
        config: Configuration of the model.
        deterministic: Whether to omit dropout; the key is then unused.

    Returns:
        ``loss_fn(model, batch, rng)`` with a batch of ``source`` ``int32[batch,
        source]`` and ``target`` ``int32[batch, target + 1]``, and masks of real tokens:
        ``source_mask`` ``bool[batch, source]`` and, for the predicted tokens,
        ``target_mask`` ``bool[batch, target]``.

    >>> callable(make_loss(SIZES["test"]))
    True
    """

    def loss_fn(model: GNMT, batch: Mapping[str, Any], rng: Array) -> wh.WeightedLoss:
        target = jnp.asarray(batch["target"])
        hidden = model.hidden_states(
            jnp.asarray(batch["source"]),
            jnp.asarray(batch["source_mask"]),
            target[:, :-1],
            rng=None if deterministic else rng,
        )
        with when(config.annotated, wh.split()):
            nats = _smoothed(
                model.classifier(hidden), target[:, 1:], config.label_smoothing
            )
            real = jnp.asarray(batch["target_mask"]).astype(nats.dtype)
            return wh.WeightedLoss(jnp.sum(nats * real), jnp.sum(real))

    return loss_fn


def _smoothed(logits: Array, targets: Array, smoothing: float) -> Array:
    """Computes the cross-entropy with label smoothing, in nats."""
    nats = cross_entropy(logits, targets)
    if smoothing == 0:
        return nats
    logits = widened(logits)
    spread = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return (1.0 - smoothing) * nats + smoothing * spread


def job(
    size: str = "base",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-3,
    warmup_steps: int = 200,
    deterministic: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a GNMT learns a word-by-word translation of synthetic sequences.

    Args:
        size: One of ``SIZES``.
        batch_size: Pairs of sequences in a global batch; 128, at test size 16.
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises.
        deterministic: Whether to omit dropout.
        seed: Seed of the sequence of batches.
        changes: Fields of ``GNMTConfig``.

    Raises:
        WhaleError: Unknown size or field, or fewer than two layers.

    >>> sorted(job("test").batch_at(0))
    ['source', 'source_mask', 'target', 'target_mask']
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "deterministic", "seed")
    config = change(pick(size, SIZES, "GNMT size"), changes, options=options)
    if config.layers < 2:
        raise wh.WhaleError(
            f"layers is {config.layers!r}; expected at least 2, since second layers "
            "join the directions of the encoder and read the decoder's attention"
        )
    return wh.Job(
        loss_fn=make_loss(config, deterministic=deterministic),
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: translated_batch(config, step, count, seed=seed),
        optimizer=warmed_adamw(learning_rate, warmup_steps, weight_decay=0.0),
        batch_size=default_batch_size(size, batch_size, 128),
        name="gnmt" if size == "base" else f"gnmt-{size}",
    )


def translated_batch(config: GNMTConfig, step: int, size: int, *, seed: int) -> Batch:
    """Returns sources that follow a rule, and their word-by-word translations.

    The translation of ``word`` is ``(7 * word + 11) mod words``, over all words except
    the start, end and padding token.

    >>> batch = translated_batch(SIZES["test"], 0, 4, seed=0)
    >>> bool((batch["target"][:, 0] == 0).all())
    True
    """
    words, longest = config.vocab - 1, config.source_length
    drawn = chain_tokens(step, size, length=longest, vocab=words, seed=seed)
    both = min(config.source_length, config.target_length - 1)
    count = lengths(step, size, longest=both, seed=seed)[:, None]
    mask = np.arange(longest)[None, :] < count
    source = np.where(mask, drawn + 1, _EDGE_TOKEN).astype(np.int32)
    translated = (_MULTIPLIER * drawn.astype(np.int64) + _OFFSET) % words + 1
    target = np.full((size, config.target_length + 1), _EDGE_TOKEN, np.int32)
    target[:, 1 : both + 1] = np.where(mask, translated, _EDGE_TOKEN)[:, :both]
    return {
        "source": source,
        "source_mask": mask,
        "target": target,
        # The end token is predicted too.
        "target_mask": np.arange(config.target_length)[None, :] <= count,
    }
