"""Defines small models for the samples of ``bench_check.py``, as users write them.

Together they have something to shard for every mesh axis: samples, stacked layers,
experts, a sequence with attention, three dimensions of space, heads, widths and a
vocabulary. The code of some contains sizes, as users' code does.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import whalejax as wh


BATCH = 16
WIDTH = 32
HEADS = 4
VOCAB = 64
EXPERTS = 4


def _attention(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    """Applies causal attention with a constant number and width of heads."""
    batch, length, _ = x.shape
    query, key, value = (
        (x @ layer[name]).reshape(batch, length, HEADS, WIDTH // HEADS)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (WIDTH // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return x + mixed.reshape(batch, length, WIDTH) @ layer["output"]


def _experts(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    """Applies every expert to every token, weighted by a gate."""
    gate = jax.nn.softmax(x @ layer["gate"])
    inputs = jnp.einsum("bse,bsd->ebsd", gate, x)
    hidden = jax.nn.gelu(jnp.einsum("ebsd,edf->ebsf", inputs, layer["up"]))
    return x + jnp.einsum("ebsf,efd->bsd", hidden, layer["down"])


def _shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _layers(count: int, *, experts: bool) -> dict[str, Any]:
    names = ("query", "key", "value", "output")
    layer = {name: _shape(count, WIDTH, WIDTH) for name in names}
    if experts:
        layer["gate"] = _shape(count, WIDTH, EXPERTS)
        layer["up"] = _shape(count, EXPERTS, WIDTH, 2 * WIDTH)
        layer["down"] = _shape(count, EXPERTS, 2 * WIDTH, WIDTH)
    else:
        layer["up"] = _shape(count, WIDTH, 4 * WIDTH)
        layer["down"] = _shape(count, 4 * WIDTH, WIDTH)
    return layer


def _logits(net: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = net["embedding"][tokens]

    def layer(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = _attention(x, params)
        if "gate" in params:
            return _experts(x, params), None
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"], None

    x, _ = jax.lax.scan(layer, x, net["layers"])
    return x @ net["head"]


def _token_loss(net: dict[str, Any], tokens: jax.Array) -> jax.Array:
    logits = _logits(net, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _language_model(*, experts: bool, layers: int = 4) -> wh.Job:
    net = {
        "embedding": _shape(VOCAB, WIDTH),
        "layers": _layers(layers, experts=experts),
        "head": _shape(WIDTH, VOCAB),
    }
    return wh.Job(
        _token_loss,
        lambda: net,
        jax.ShapeDtypeStruct((BATCH, 33), jnp.int32),
        optax.adam(1e-3),
        batch_size=BATCH,
        name="experts" if experts else "tokens",
    )


def tokens() -> wh.Job:
    """Returns a decoder as plain arrays, with stacked layers."""
    return _language_model(experts=False)


def experts() -> wh.Job:
    """Returns the decoder with experts in place of its widest products."""
    return _language_model(experts=True, layers=2)


def _convolved(net: dict[str, Any], x: jax.Array) -> jax.Array:
    names = ("NDHWC", "DHWIO", "NDHWC") if x.ndim == 5 else ("NHWC", "HWIO", "NHWC")
    for name in ("first", "second"):
        strides = (1,) * (x.ndim - 2)
        x = jax.lax.conv_general_dilated(
            x, net[name], strides, "SAME", dimension_numbers=names
        )
        x = jax.nn.gelu(x)
    return x @ net["mix"]


def _convolution(dims: int) -> dict[str, Any]:
    return {
        "first": _shape(*(3,) * dims, 4, 8),
        "second": _shape(*(3,) * dims, 8, 8),
        "mix": _shape(8, 8),
    }


def _image_loss(net: dict[str, Any], x: jax.Array) -> jax.Array:
    return ((_convolved(net, x) - 1) ** 2).mean()


def images() -> wh.Job:
    """Returns two convolutions along two dimensions of space."""
    shape = jax.ShapeDtypeStruct((BATCH, 24, 24, 4), jnp.float32)
    net = _convolution(2)
    return wh.Job(_image_loss, lambda: net, shape, optax.sgd(0.1), BATCH, name="images")


def volumes() -> wh.Job:
    """Returns two convolutions along three dimensions of space."""
    shape = jax.ShapeDtypeStruct((BATCH, 24, 24, 24, 4), jnp.float32)
    net = _convolution(3)
    return wh.Job(
        _image_loss, lambda: net, shape, optax.adam(1e-3), BATCH, name="volumes"
    )


def _tower_loss(net: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    image_logits = _convolved(net["sight"], batch["volume"])
    image_logits = image_logits.mean((1, 2, 3)) @ net["project"]
    text_logits = _logits(net["language"], batch["tokens"][:, :-1])
    targets = batch["tokens"][:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(
        text_logits + image_logits[:, None], targets
    )
    return loss.mean()


def towers() -> wh.Job:
    """Returns volumes and tokens in one loss, for every axis but stages."""
    net = {
        "sight": _convolution(3),
        "project": _shape(8, VOCAB),
        "language": {
            "embedding": _shape(VOCAB, WIDTH),
            "layers": _layers(2, experts=True),
            "head": _shape(WIDTH, VOCAB),
        },
    }
    batch = {
        "volume": jax.ShapeDtypeStruct((BATCH, 24, 24, 24, 4), jnp.float32),
        "tokens": jax.ShapeDtypeStruct((BATCH, 33), jnp.int32),
    }
    return wh.Job(
        _tower_loss, lambda: net, batch, optax.adam(1e-3), BATCH, name="towers"
    )


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.0, decode=False, rngs=rngs
        )
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.dropout(self.narrow(nnx.gelu(self.wide(x))))


class _Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(12, WIDTH, rngs=rngs)
        self.blocks = nnx.List([_Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def _class_loss(model: _Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def classifier() -> wh.Job:
    """Returns an NNX transformer with dropout, two layers in a list."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(BATCH, 16, 12)).astype("float32"),
        "y": rng.integers(0, 10, BATCH).astype("int32"),
    }
    return wh.Job(
        _class_loss,
        lambda: _Classifier(nnx.Rngs(0)),
        batch,
        optax.adamw(1e-3),
        BATCH,
        name="classifier",
    )


class _Residual(nn.Module):
    """A Linen image classifier with batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = x + nn.Conv(16, (3, 3))(x)
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def _residual_loss(
    variables: dict[str, Any], batch: dict[str, jax.Array]
) -> tuple[jax.Array, wh.Aux]:
    logits, updates = _Residual().apply(variables, batch["x"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, wh.Aux(variables=updates)


def residual() -> wh.Job:
    """Returns a classifier whose code fixes all of its sizes."""
    image = jnp.zeros((1, 8, 8, 3))
    batch = {
        "x": jax.ShapeDtypeStruct((BATCH, 8, 8, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    return wh.Job(
        _residual_loss,
        lambda: _Residual().init(jax.random.key(0), image),
        batch,
        optax.sgd(0.1, momentum=0.9),
        BATCH,
        name="residual",
    )


MODELS = {
    make.__name__: make
    for make in (
        tokens,
        experts,
        images,
        volumes,
        towers,
        classifier,
        residual,
    )
}
