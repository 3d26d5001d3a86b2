"""The encoder and the decoder that ``t5`` and ``m6`` share, in Flax Linen.

They are apart from the models so that the two differ only in what goes into the
encoder. The layers are those of T5: normed before, with RMS norms and without biases,
and with relative positions, which are a bias of the attention scores that all layers of
a stack share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp

import whalejax as wh
from whalejax.meshes import WhaleError
from whalejax.models._layers import Array, cross_entropy, when, widened


_NORM_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqConfig:
    """Sizes and switches of an encoder and a decoder; the defaults are T5-base's.

    Attributes:
        vocab: different tokens.
        inputs: tokens in a sequence that the encoder reads.
        targets: tokens in a sequence that the decoder makes.
        embed: width of the residual stream.
        heads: attention heads.
        head_dim: width of a head; ``heads * head_dim`` need not be ``embed``.
        mlp: width inside the feed-forward layers.
        layers: of the encoder, and as many of the decoder.
        buckets: of relative distances that are told apart, even; the encoder uses one
            half for each direction.
        longest_distance: that the last bucket of a direction would reach.
        dropout_rate: after embeddings and last norms, on attention weights, inside the
            feed-forward layers and before each addition.
        scan_layers: stack the parameters of a stack's layers and scan over them.
        annotated: put the marks in.
        dtype: compute dtype; follows parameters and inputs where None.
        param_dtype: dtype of the parameters.
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


def bucket_starts(buckets: int, longest_distance: int) -> tuple[int, ...]:
    """The smallest distance of every bucket but the first, for one direction.

    The first half of the buckets hold one distance each; the others grow geometrically
    up to the longest distance (Raffel et al., 2020, section 2.1).

    Args:
        buckets: how many, for one direction.
        longest_distance: what the last bucket would reach; above half the buckets.

    Raises:
        WhaleError: the longest distance is too short for that many buckets.

    >>> bucket_starts(8, 64)
    (1, 2, 3, 4, 8, 16, 32)
    """
    exact = buckets // 2
    if longest_distance <= exact:
        raise WhaleError(
            f"longest_distance is {longest_distance}; expected more than {exact}, "
            f"which is half of the {buckets} buckets of one direction. Give a longer "
            "distance or fewer buckets."
        )
    wide = buckets - exact
    # Powers of integers, since a rounded logarithm would move a border.
    starts = (
        next(
            distance
            for distance in range(exact, longest_distance + 1)
            if distance**wide >= longest_distance**step * exact ** (wide - step)
        )
        for step in range(1, wide)
    )
    return (*range(1, exact + 1), *starts)


def relative_buckets(
    queries: int,
    keys: int,
    *,
    buckets: int,
    longest_distance: int,
    bidirectional: bool,
) -> Array:
    """Which bucket each pair of positions is in.

    Args:
        queries: number of positions that look.
        keys: number of positions that are looked at.
        buckets: how many there are.
        longest_distance: that the last bucket of a direction would reach.
        bidirectional: later keys have the upper half of the buckets; otherwise they
            are in the bucket of distance 0.

    Returns:
        ``int32[queries, keys]``, from 0 to ``buckets - 1``.

    >>> options = {"buckets": 8, "longest_distance": 16}
    >>> relative_buckets(1, 4, bidirectional=True, **options).tolist()
    [[0, 5, 6, 6]]
    >>> relative_buckets(4, 1, bidirectional=False, **options)[:, 0].tolist()
    [0, 1, 2, 3]
    """
    looking = jnp.arange(queries, dtype=jnp.int32)[:, None]
    ahead = jnp.arange(keys, dtype=jnp.int32)[None, :] - looking
    one_way = buckets // 2 if bidirectional else buckets
    starts = jnp.asarray(bucket_starts(one_way, longest_distance), jnp.int32)
    distance = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
    passed = distance[:, :, None] >= starts[None, None]
    found = jnp.sum(passed.astype(jnp.int32), axis=-1, dtype=jnp.int32)
    return jnp.where(ahead > 0, found + one_way, found) if bidirectional else found


class RelativeBias(nn.Module):
    """What the layers of a stack add to their attention scores, by distance."""

    config: Seq2SeqConfig
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> Array:
        """The bias ``[1, heads, length, length]``."""
        config = self.config
        table = nn.Embed(
            config.buckets,
            config.heads,
            embedding_init=nn.initializers.normal(config.embed**-0.5),
            name="table",
            **kinds(config),
        )
        found = relative_buckets(
            length,
            length,
            buckets=config.buckets,
            longest_distance=config.longest_distance,
            bidirectional=self.bidirectional,
        )
        return jnp.transpose(table(found), (2, 0, 1))[None]


class Attention(nn.Module):
    """Attention whose scores are not scaled: the query's initial values are."""

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
        """Attend from each position of one sequence to those of another.

        Args:
            x: ``[batch, queries, embed]``.
            memory: ``[batch, keys, embed]``; ``x`` itself in self-attention.
            seen: ``bool``, broadcasts to ``[batch, heads, queries, keys]``; every
                query sees a key.
            bias: added to the scores, ``[1, heads, queries, keys]``.
            deterministic: leave dropout out.

        Returns:
            ``[batch, queries, embed]``.
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
    """Two products with a rectifier in between."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """One feed-forward layer over ``x`` ``[batch, sequence, embed]``."""
        config = self.config
        hidden = nn.relu(dense(config, config.mlp, config.embed, "up")(x))
        hidden = dropped(config, hidden, deterministic)
        y: Array = dense(config, config.embed, config.mlp, "down")(hidden)
        return y


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normed before and added to its input."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(
        self, x: Array, seen: Array, bias: Array, *, deterministic: bool
    ) -> Array:
        """One layer over ``x`` ``[batch, sequence, embed]``."""
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
        """One layer over ``x`` ``[batch, targets, embed]``.

        Args:
            x: the residual stream.
            memory: what the encoder made, ``[batch, inputs, embed]``.
            remembered: which of it is real, ``bool[batch, 1, 1, inputs]``.
            earlier: what self-attention sees, ``bool[1, 1, targets, targets]``.
            bias: of self-attention's scores, ``[1, heads, targets, targets]``.
            deterministic: leave dropout out.
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


class Encoder(nn.Module):
    """The layers over what is read, and a last norm."""

    config: Seq2SeqConfig

    @nn.compact
    def __call__(self, x: Array, padding: Array, *, deterministic: bool) -> Array:
        """What the decoder attends to.

        Args:
            x: ``[batch, sequence, embed]``.
            padding: ``bool[batch, sequence]``, true where a position is real.
            deterministic: leave dropout out.

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
            memory: what the encoder made, ``[batch, inputs, embed]``.
            padding: ``bool[batch, inputs]``, true where a position is real.
            deterministic: leave dropout out.

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
        layer: the class of the layers.
        config: the model's configuration.
        x: the residual stream, ``[batch, sequence, embed]``.
        context: what every layer is given besides.
        deterministic: leave dropout out.
    """
    if not config.scan_layers:
        for i in range(config.layers):
            made = layer(config, name=f"layer_{i}")
            x = made(x, *context, deterministic=deterministic)
        return x

    def body(module: Any, x: Array, *context: Array) -> tuple[Array, None]:
        return module(x, *context, deterministic=deterministic), None

    scanned: Any = nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=config.layers,
    )
    y: Array = scanned(layer(config, name="layers"), x, *context)[0]
    return y


def kinds(config: Seq2SeqConfig) -> dict[str, Any]:
    """The dtypes that a layer of Flax is given."""
    return {
        "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }


def norm(config: Seq2SeqConfig, name: str) -> nn.RMSNorm:
    """A norm by the root of the mean square."""
    return nn.RMSNorm(epsilon=_NORM_EPSILON, name=name, **kinds(config))


def dense(config: Seq2SeqConfig, width: int, inputs: int, name: str) -> nn.Dense:
    """A product whose result has the variance of its input."""
    init = nn.initializers.normal(inputs**-0.5)
    return nn.Dense(width, use_bias=False, kernel_init=init, name=name, **kinds(config))


def dropped(config: Seq2SeqConfig, x: Array, deterministic: bool) -> Array:
    """The array with some elements left out, every one on its own."""
    y: Array = nn.Dropout(config.dropout_rate)(x, deterministic=deterministic)
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
        module: the model, with its configuration as ``config``.
        names: of what the encoder is given of a batch, in order.
        deterministic: leave dropout out; the key is then not used.

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
