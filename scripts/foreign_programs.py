"""Training programs as users write them, for ``verified_choices.py``.

Plain JAX and Flax's own layers, with no mark and no reference model's conventions. A
factory makes a ``wh.Job`` of shapes alone; its options are sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import whalejax as wh


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _labelled(model: Any, batch: Any) -> jax.Array:
    """Returns the cross-entropy of classes, of samples or of each pixel or token."""
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def _job(
    name: str,
    make_model: Callable[..., Any],
    batch: Any,
    loss_fn: Callable[..., Any] = _labelled,
    optimizer: Any = None,
) -> wh.Job:
    return wh.Job(
        loss_fn=loss_fn,
        make_model=make_model,
        batch=lambda step, size: batch(size),
        optimizer=optax.adamw(1e-4) if optimizer is None else optimizer,
        name=name,
    )


# Convolutions.


class _Double(nnx.Module):
    def __init__(self, ins: int, outs: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(ins, outs, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(outs, num_groups=8, rngs=rngs)
        self.second = nnx.Conv(outs, outs, (3, 3), rngs=rngs)
        self.again = nnx.GroupNorm(outs, num_groups=8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.silu(self.norm(self.first(x)))
        return nnx.silu(self.again(self.second(x)))


class _UNet(nnx.Module):
    def __init__(self, channels: int, depth: int, rngs: nnx.Rngs) -> None:
        widths = [channels * 2**level for level in range(depth + 1)]
        ins = [3, *widths]
        self.down = nnx.List(
            [_Double(a, b, rngs) for a, b in zip(ins, widths, strict=False)]
        )
        self.wider = nnx.List(
            [
                nnx.ConvTranspose(2 * n, n, (2, 2), strides=(2, 2), rngs=rngs)
                for n in widths[-2::-1]
            ]
        )
        self.up = nnx.List([_Double(2 * n, n, rngs) for n in widths[-2::-1]])
        self.head = nnx.Conv(channels, 4, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for block in self.down:
            x = block(nnx.max_pool(x, (2, 2), (2, 2)) if skips else x)
            skips.append(x)
        for skip, wider, block in zip(skips[-2::-1], self.wider, self.up, strict=True):
            x = block(jnp.concatenate([skip, wider(x)], -1))
        return self.head(x)


def unet(channels: int = 64, depth: int = 4, extent: int = 256) -> wh.Job:
    """Returns a 2-D U-Net that labels pixels."""
    return _job(
        "unet",
        lambda: _UNet(channels, depth, nnx.Rngs(0)),
        lambda n: {"x": _floats(n, extent, extent, 3), "y": _ints(n, extent, extent)},
    )


class _Residual(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = lambda n, size, stride: nn.Conv(  # noqa: E731
            n, (size,) * 3, (stride,) * 3, use_bias=False
        )
        y = nn.GroupNorm(num_groups=8)(conv(self.width, 3, self.stride)(x))
        y = nn.GroupNorm(num_groups=8)(conv(self.width, 3, 1)(nn.relu(y)))
        if y.shape != x.shape:
            x = nn.GroupNorm(num_groups=8)(conv(self.width, 1, self.stride)(x))
        return nn.relu(x + y)


class _ResNet3D(nn.Module):
    channels: int
    blocks: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.channels, (3, 7, 7), (1, 2, 2), use_bias=False)(x)
        x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        for level, count in enumerate(self.blocks):
            for place in range(count):
                stride = 2 if level and not place else 1
                x = _Residual(self.channels * 2**level, stride)(x)
        return nn.Dense(400)(jnp.mean(x, (1, 2, 3)))


def _linen_loss(module: nn.Module) -> Callable[..., jax.Array]:
    def loss_fn(variables: Any, batch: Any) -> jax.Array:
        return _labelled(lambda x: module.apply(variables, x), batch)

    return loss_fn


def resnet3d(
    channels: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    frames: int = 16,
    extent: int = 112,
) -> wh.Job:
    """Returns a 3-D ResNet that classifies videos."""
    module = _ResNet3D(channels, tuple(blocks))
    sample = frames, extent, extent, 3
    return _job(
        "resnet3d",
        lambda key: module.init(key, jnp.zeros((1, *sample))),
        lambda n: {"x": _floats(n, *sample), "y": _ints(n)},
        _linen_loss(module),
    )


# Transformers.


class _Layer(nnx.Module):
    def __init__(self, embed: int, heads: int, causal: bool, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(embed, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, embed, decode=False, rngs=rngs)
        self.again = nnx.LayerNorm(embed, rngs=rngs)
        self.up = nnx.Linear(embed, 4 * embed, rngs=rngs)
        self.down = nnx.Linear(4 * embed, embed, rngs=rngs)
        self.causal = causal

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0]) if self.causal else None
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.again(x))))


class _GPT(nnx.Module):
    def __init__(
        self, vocab: int, embed: int, heads: int, layers: int, sequence: int
    ) -> None:
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocab, embed, rngs=rngs)
        self.positions = nnx.Embed(sequence, embed, rngs=rngs)
        self.layers = nnx.List(
            [_Layer(embed, heads, True, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(embed, rngs=rngs)
        self.head = nnx.Linear(embed, vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def nnx_gpt(
    vocab: int = 50_304,
    embed: int = 1024,
    heads: int = 16,
    layers: int = 6,
    sequence: int = 1024,
) -> wh.Job:
    """Returns a GPT with unrolled layers."""
    return _job(
        "nnx_gpt",
        lambda: _GPT(vocab, embed, heads, layers, sequence),
        lambda n: {"x": _ints(n, sequence), "y": _ints(n, sequence)},
    )


class _ViT(nnx.Module):
    def __init__(
        self, embed: int, heads: int, layers: int, patch: int, extent: int
    ) -> None:
        rngs = nnx.Rngs(0)
        size = patch, patch
        self.patches = nnx.Conv(
            3, embed, size, strides=size, padding="VALID", rngs=rngs
        )
        self.places = nnx.Param(jnp.zeros((1, (extent // patch) ** 2, embed)))

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> _Layer:
            return _Layer(embed, heads, False, rngs)

        self.layers = stack(rngs)
        self.norm = nnx.LayerNorm(embed, rngs=rngs)
        self.head = nnx.Linear(embed, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.places[...]

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: _Layer) -> jax.Array:
            return layer(x)

        return self.head(self.norm(run(x, self.layers)).mean(1))


def vit(
    embed: int = 1024,
    heads: int = 16,
    layers: int = 16,
    patch: int = 16,
    extent: int = 224,
) -> wh.Job:
    """Returns a vision transformer with scanned layers."""
    return _job(
        "vit",
        lambda: _ViT(embed, heads, layers, patch, extent),
        lambda n: {"x": _floats(n, extent, extent, 3), "y": _ints(n)},
    )


# Experts.


class _DenseExperts(nn.Module):
    """Capacity slots of experts, filled and emptied by products with one-hot rows."""

    experts: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        groups, length, embed = x.shape
        slots = 2 * length // self.experts
        kernel = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", kernel, (self.experts, embed, self.hidden))
        down = self.param("down", kernel, (self.experts, self.hidden, embed))
        gates = nn.softmax(nn.Dense(self.experts, use_bias=False)(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), self.experts)
        place = jnp.cumsum(chosen, 1) * chosen - 1.0
        sent = jax.nn.one_hot(place.astype(jnp.int32), slots) * chosen[..., None]
        combine = sent * gates[..., None]
        inputs = jnp.einsum("gsec,gsd->egcd", sent, x)
        hidden = nn.gelu(jnp.einsum("egcd,edh->egch", inputs, up))
        outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
        return jnp.einsum("gsec,egcd->gsd", combine, outputs)


class _RaggedExperts(nn.Module):
    """Tokens sorted by expert, each multiplied with its expert's kernel."""

    experts: int
    hidden: int
    top: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        embed = x.shape[-1]
        kernel = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", kernel, (self.experts, embed, self.hidden))
        down = self.param("down", kernel, (self.experts, self.hidden, embed))
        tokens = x.reshape(-1, embed)
        gates, chosen = lax.top_k(
            nn.softmax(nn.Dense(self.experts, use_bias=False)(tokens)), self.top
        )
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=self.experts)
        hidden = nn.gelu(lax.ragged_dot(tokens[order // self.top], up, counts))
        outputs = lax.ragged_dot(hidden, down, counts)
        outputs = jnp.zeros_like(outputs).at[order].set(outputs)
        outputs = outputs.reshape(-1, self.top, embed) * gates[..., None]
        return outputs.sum(1).reshape(x.shape)


class _Sparse(nn.Module):
    """A decoder with experts as multilayer perceptrons."""

    vocab: int
    embed: int
    heads: int
    layers: int
    experts: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.embed)(ids)
        mask = nn.make_causal_mask(ids)
        for _ in range(self.layers):
            x = x + nn.SelfAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            x = x + self.experts()(nn.LayerNorm()(x))
        return nn.Dense(self.vocab, use_bias=False)(nn.LayerNorm()(x))


def _sparse(name: str, module: nn.Module, sequence: int) -> wh.Job:
    return _job(
        name,
        lambda key: module.init(key, jnp.zeros((1, sequence), jnp.int32)),
        lambda n: {"x": _ints(n, sequence), "y": _ints(n, sequence)},
        _linen_loss(module),
    )


def dense_experts(
    vocab: int = 32_000,
    embed: int = 1024,
    heads: int = 16,
    layers: int = 4,
    experts: int = 16,
    sequence: int = 1024,
) -> wh.Job:
    """Returns a mixture of experts that dispatches by products."""
    make_experts = lambda: _DenseExperts(experts, 4 * embed)  # noqa: E731
    return _sparse(
        "dense_experts", _Sparse(vocab, embed, heads, layers, make_experts), sequence
    )


def ragged_experts(
    vocab: int = 32_000,
    embed: int = 1536,
    heads: int = 12,
    layers: int = 4,
    experts: int = 32,
    top: int = 4,
    sequence: int = 2048,
) -> wh.Job:
    """Returns a mixture of experts that sorts its tokens."""
    make_experts = lambda: _RaggedExperts(experts, embed, top)  # noqa: E731
    return _sparse(
        "ragged_experts", _Sparse(vocab, embed, heads, layers, make_experts), sequence
    )


# Recurrent.


class _LSTM(nnx.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs), rngs=rngs)
                for _ in range(layers)
            ]
        )
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lstm(
    vocab: int = 32_000, width: int = 3072, layers: int = 3, length: int = 64
) -> wh.Job:
    """Returns a language model of stacked LSTMs."""
    return _job(
        "lstm",
        lambda: _LSTM(vocab, width, layers),
        lambda n: {"x": _ints(n, length), "y": _ints(n, length)},
    )


class _Translating(nn.Module):
    vocab: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        source = nn.Embed(self.vocab, self.width)(x["source"])
        target = nn.Embed(self.vocab, self.width)(x["target"])
        for _ in range(self.layers):
            encoder = nn.RNN(nn.OptimizedLSTMCell(self.width), return_carry=True)
            carry, source = encoder(source)
            decoder = nn.RNN(nn.OptimizedLSTMCell(self.width))
            target = decoder(target, initial_carry=carry)
        return nn.Dense(self.vocab)(target)


def seq2seq(
    vocab: int = 32_000, width: int = 1024, layers: int = 2, length: int = 64
) -> wh.Job:
    """Returns LSTMs that read a sequence and write another."""
    module = _Translating(vocab, width, layers)
    both = lambda n: {"source": _ints(n, length), "target": _ints(n, length)}  # noqa: E731
    return _job(
        "seq2seq",
        lambda key: module.init(key, jax.tree.map(jnp.zeros_like, both(1))),
        lambda n: {"x": both(n), "y": _ints(n, length)},
        _linen_loss(module),
    )


# Tables.


def _clicked(lookup: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        vectors = lookup(model["tables"], batch["ids"])
        x = vectors.reshape(vectors.shape[0], -1)
        for kernel in model["hidden"]:
            x = jax.nn.relu(x @ kernel)
        logits = (x @ model["head"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    return loss_fn


def _recommender(
    name: str, lookup: Any, tables: Any, features: int, width: int
) -> wh.Job:
    widths = features * width, 512, 256

    def make_model(key: jax.Array) -> Any:
        normal = lambda *shape: jax.random.normal(key, shape) / math.sqrt(shape[-2])  # noqa: E731
        return {
            "tables": jax.tree.map(lambda t: normal(*t.shape), tables),
            "hidden": [
                normal(*sizes) for sizes in zip(widths, widths[1:], strict=False)
            ],
            "head": normal(widths[-1], 1),
        }

    return _job(
        name,
        make_model,
        lambda n: {"ids": _ints(n, features), "clicked": _floats(n)},
        _clicked(lookup),
        optax.adagrad(0.01),
    )


def stacked_tables(count: int = 26, rows: int = 1_300_000, columns: int = 64) -> wh.Job:
    """Returns embedding tables of categories, in one array."""
    lookup = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)
    tables = _floats(count, rows, columns)
    return _recommender("stacked_tables", lookup, tables, count, columns)


def separate_tables(
    count: int = 26, rows: int = 1_300_000, columns: int = 64
) -> wh.Job:
    """Returns embedding tables of categories, each an array of its own."""

    def lookup(tables: Any, ids: jax.Array) -> jax.Array:
        return jnp.stack([t[ids[:, n]] for n, t in enumerate(tables)], 1)

    tables = [_floats(rows, columns) for _ in range(count)]
    return _recommender("separate_tables", lookup, tables, count, columns)


PROGRAMS: Final[dict[str, Callable[..., wh.Job]]] = {
    make.__name__: make
    for make in (
        unet,
        resnet3d,
        nnx_gpt,
        vit,
        dense_experts,
        ragged_experts,
        lstm,
        seq2seq,
        stacked_tables,
        separate_tables,
    )
}
