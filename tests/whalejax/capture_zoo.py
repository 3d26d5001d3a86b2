"""Small models that the capture tests look at: one per way of writing a model.

Every size is different from every other, so that two dimensions are tied only where
the rules say so and never because they happen to be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import whalejax as wh
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture


BATCH, SEQ, EMBED, HEADS, HEAD_DIM, MLP, VOCAB = 6, 10, 24, 3, 8, 40, 50


def mlp_params() -> dict[str, Any]:
    """A two-layer perceptron as a plain pytree."""
    return {
        "up": {"w": jnp.ones((EMBED, MLP)), "b": jnp.zeros((MLP,))},
        "down": {"w": jnp.ones((MLP, VOCAB))},
    }


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    """Mean squared error of the perceptron."""
    hidden = jax.nn.relu(batch["x"] @ params["up"]["w"] + params["up"]["b"][None])
    return jnp.mean((hidden @ params["down"]["w"] - batch["y"]) ** 2)


def mlp_batch(samples: int = BATCH) -> dict[str, Any]:
    """Shapes of the perceptron's batch."""
    return {
        "x": jax.ShapeDtypeStruct((samples, EMBED), jnp.float32),
        "y": jax.ShapeDtypeStruct((samples, VOCAB), jnp.float32),
    }


class Attention(nnx.Module):
    """Causal self-attention with one kernel for each of query, key and value."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        heads = (HEADS, HEAD_DIM)
        self.query = nnx.LinearGeneral(EMBED, heads, rngs=rngs)
        self.key = nnx.LinearGeneral(EMBED, heads, rngs=rngs)
        self.value = nnx.LinearGeneral(EMBED, heads, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, EMBED, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD_DIM**0.5
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(mask[None, None], scores, -1e9)
        weights = jax.nn.softmax(scores)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Block(nnx.Module):
    """A pre-norm transformer block whose two halves are marked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = Attention(rngs)
        self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with wh.replicate():
            x = x + self.attention(self.norm1(x))
        with wh.split(axis="mlp"):
            return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Embedding, blocks and a head; ``form`` says how the blocks are stacked."""

    def __init__(self, form: str, layers: int, rngs: nnx.Rngs, tied: bool = False):
        self.form, self.layers, self.tied = form, layers, tied
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)
        self.blocks: Any
        if form == "scan":
            make = nnx.vmap(Block, in_axes=0, out_axes=0, axis_size=layers)
            self.blocks = make(rngs.split(layers))
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.form == "scan":

            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def run(block: Block, x: jax.Array) -> jax.Array:
                return block(x)

            x = run(self.blocks, x)
        else:
            call: Callable[..., Any] = lambda block, x: block(x)  # noqa: E731
            call = {"unrolled": call, "remat": nnx.remat(call), "jit": nnx.jit(call)}[
                self.form
            ]
            for block in self.blocks:
                x = call(block, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.tied else self.head(x)


def transformer_loss(model: Transformer, batch: Any) -> jax.Array:
    """Mean next-token cross entropy."""
    logits = jax.nn.log_softmax(model(batch["tokens"]))
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)
    return -jnp.mean(picked)


def transformer_batch(samples: int = BATCH) -> dict[str, Any]:
    """Shapes of the transformer's batch."""
    shape = jax.ShapeDtypeStruct((samples, SEQ), jnp.int32)
    return {"tokens": shape, "targets": shape}


def transformer(form: str = "unrolled", layers: int = 2, tied: bool = False) -> Any:
    """An abstract transformer."""
    return nnx.eval_shape(lambda: Transformer(form, layers, nnx.Rngs(0), tied))


class LinenNet(nn.Module):
    """Attention, dropout and batch normalisation in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Dense(
            EMBED,
            kernel_init=nn.with_partitioning(
                nn.initializers.lecun_normal(), ("features", "tensor")
            ),
        )(x)
        with wh.split():
            x = x + nn.MultiHeadDotProductAttention(
                num_heads=HEADS, dropout_rate=0.1, deterministic=not train
            )(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(VOCAB)(x)


def linen_loss(variables: Any, batch: Any, rng: jax.Array) -> Any:
    """Mean squared error, with the updated statistics handed out."""
    out, updated = LinenNet().apply(
        variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": rng}
    )
    loss = jnp.mean((out - batch["y"]) ** 2)
    return loss, wh.Aux(metrics={"largest": jnp.max(out)}, variables=updated)


def linen_batch(samples: int = BATCH) -> dict[str, Any]:
    """Shapes of the Linen net's batch."""
    return {
        "x": jax.ShapeDtypeStruct((samples, SEQ, 5), jnp.float32),
        "y": jax.ShapeDtypeStruct((samples, SEQ, VOCAB), jnp.float32),
    }


def linen_variables() -> Any:
    """Abstract variables of the Linen net."""
    x = jnp.zeros((2, SEQ, 5))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.eval_shape(lambda: LinenNet().init(keys, x))


class ConvNet(nnx.Module):
    """Convolutions, batch normalisation, pooling and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 11, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with wh.replicate():
            x = nnx.relu(self.norm(self.first(x)))
            x = nnx.max_pool(x, (2, 2), (2, 2))
            x = self.depthwise(self.second(x))
            x = self.drop(jnp.mean(x, axis=(1, 2)))
        with wh.split():
            return self.head(x)


def conv_loss(model: ConvNet, batch: Any) -> jax.Array:
    """Mean cross entropy over classes."""
    logits = jax.nn.log_softmax(model(batch["x"]))
    hot = jax.nn.one_hot(batch["y"], 11)
    return -jnp.mean(jnp.sum(logits * hot, axis=-1))


def conv_batch(samples: int = BATCH) -> dict[str, Any]:
    """Shapes of the image batch."""
    return {
        "x": jax.ShapeDtypeStruct((samples, 12, 14, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((samples,), jnp.int32),
    }


def conv_net() -> Any:
    """An abstract convolutional net."""
    return nnx.eval_shape(lambda: ConvNet(nnx.Rngs(0)))


def captured(model: Any, loss_fn: Any, batch: Any, **options: Any) -> Captured:
    """Adapt and capture in one go."""
    return capture(adapt(model, loss_fn), batch, **options)
