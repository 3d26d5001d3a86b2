"""Llama: a decoder-only transformer with grouped keys, rotary positions and a gate.

Sizes as published (Touvron et al., "Llama 2", 2023; Grattafiori et al., "The Llama 3
Herd of Models", 2024). It has no marks: the planner decides everything. Its layers are
stacked and scanned, so that depth does not increase tracing time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

import whalejax as wh
from whalejax.models import text_data
from whalejax.models.common.batches import Batch, default_batch_size
from whalejax.models.common.layers import (
    Array,
    causal_attention,
    cross_entropy,
    embedding,
    rematted,
    stacked_blocks,
)
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import warmed_adamw


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of a Llama; the defaults are the test size.

    Attributes:
        vocab: Different tokens.
        sequence: Longest sequence, in tokens.
        embed: Width of the residual stream.
        heads: Attention heads; divides ``embed``.
        kv_heads: Heads of keys and values; divides ``heads``.
        mlp: Width inside the feed-forward layers.
        layers: Number of blocks.
        rope_base: Wavelength of the slowest rotation, over 2 pi.
        scan_layers: Whether to stack the blocks' parameters and scan over them.
        remat: Recomputation of each block in the backward pass: none, dots or full.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = 512
    sequence: int = 24
    embed: int = 64
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 192
    layers: int = 2
    rope_base: float = 10_000.0
    scan_layers: bool = True
    remat: str | bool = "none"
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, LlamaConfig]] = {
    "test": LlamaConfig(),
    "7b": LlamaConfig(
        vocab=32_000,
        sequence=4096,
        embed=4096,
        heads=32,
        kv_heads=32,
        mlp=11_008,
        layers=32,
    ),
    "8b": LlamaConfig(
        vocab=128_256,
        sequence=8192,
        embed=4096,
        heads=32,
        kv_heads=8,
        mlp=14_336,
        layers=32,
        rope_base=500_000.0,
    ),
    "70b": LlamaConfig(
        vocab=32_000,
        sequence=4096,
        embed=8192,
        heads=64,
        kv_heads=8,
        mlp=28_672,
        layers=80,
    ),
    "405b": LlamaConfig(
        vocab=128_256,
        sequence=8192,
        embed=16_384,
        heads=128,
        kv_heads=8,
        mlp=53_248,
        layers=126,
        rope_base=500_000.0,
    ),
}


class Block(nnx.Module):
    """Attention and gated feed-forward, each after a norm and added to its input."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds: dict[str, Any] = {
            "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        plain = {**kinds, "use_bias": False}
        plain["kernel_init"] = nnx.initializers.normal(0.02)
        head_dim = config.embed // config.heads
        self.attention_norm = nnx.RMSNorm(config.embed, **kinds)
        self.query = nnx.LinearGeneral(config.embed, (config.heads, head_dim), **plain)
        self.key = nnx.LinearGeneral(config.embed, (config.kv_heads, head_dim), **plain)
        self.value = nnx.LinearGeneral(
            config.embed, (config.kv_heads, head_dim), **plain
        )
        self.output = nnx.LinearGeneral(
            (config.heads, head_dim), config.embed, axis=(-2, -1), **plain
        )
        self.mlp_norm = nnx.RMSNorm(config.embed, **kinds)
        self.gate = nnx.Linear(config.embed, config.mlp, **plain)
        self.up = nnx.Linear(config.embed, config.mlp, **plain)
        self.down = nnx.Linear(config.mlp, config.embed, **plain)

    def __call__(self, x: Array) -> Array:
        """Applies the block to ``x`` ``[batch, sequence, embed]``."""
        config, y = self.config, self.attention_norm(x)
        query = rotated(self.query(y), config.rope_base)
        key = rotated(self.key(y), config.rope_base)
        shared = config.heads // config.kv_heads
        key, value = (jnp.repeat(h, shared, axis=2) for h in (key, self.value(y)))
        x = x + self.output(causal_attention(query, key, value))
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def rotated(x: Array, base: float) -> Array:
    """Applies rotary positions (Su et al., "RoFormer", 2021) by rotating halves.

    Args:
        x: ``[batch, sequence, heads, head_dim]``; ``head_dim`` even.
        base: Wavelength of the slowest rotation, over 2 pi.

    Returns:
        Array of the same shape and dtype.
    """
    length, half = x.shape[1], x.shape[3] // 2
    speed = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * speed[None]
    cos, sin = (f(angle).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    turned = (left * cos - right * sin, right * cos + left * sin)
    return jnp.concatenate(turned, axis=-1)


class Llama(nnx.Module):
    """The full model: tokens in, logits out.

    >>> model = Llama(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 24), "int32")).shape
    (2, 24, 512)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kinds: dict[str, Any] = {
            "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        self.tokens = embedding(
            config.vocab,
            config.embed,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        if config.scan_layers:
            self.blocks = stacked_blocks(
                config.layers, lambda split: Block(config, rngs=split), rngs
            )
        else:
            self.blocks = nnx.List(
                [Block(config, rngs=rngs) for _ in range(config.layers)]
            )
        self.norm = nnx.RMSNorm(config.embed, **kinds)
        self.head = nnx.Linear(
            config.embed,
            config.vocab,
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.02),
            **kinds,
        )

    def __call__(self, tokens: Array) -> Array:
        """Computes logits ``[batch, sequence, vocab]`` of ``tokens`` ``[batch,
        sequence]``.
        """
        x = self.tokens(tokens)
        apply = rematted(Block.__call__, self.config.remat)
        if self.config.scan_layers:
            scanned = nnx.scan(
                lambda carry, block: apply(block, carry),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            x = scanned(x, self.blocks)  # type: ignore[no-untyped-call]
        else:
            for block in self.blocks:
                x = apply(block, x)
        logits: Array = self.head(self.norm(x))
        return logits


def loss_fn(model: Llama, batch: Mapping[str, Any]) -> Array:
    """Computes the mean cross-entropy of the next token, in nats.

    Args:
        model: The Llama.
        batch: ``tokens`` ``int32[batch, sequence + 1]``.

    >>> model = Llama(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss_fn(model, {"tokens": jnp.zeros((2, 25), "int32")}).shape
    ()
    """
    tokens = jnp.asarray(batch["tokens"])
    return jnp.mean(cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))


def job(
    size: str = "test",
    *,
    batch_size: int | None = None,
    learning_rate: float = 3e-4,
    warmup_steps: int = 10,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: training of a Llama on synthetic tokens.

    Args:
        size: One of ``SIZES``.
        batch_size: Sequences in a global batch; 32, at test size 16.
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises.
        seed: Seed of the sequence of batches.
        changes: Fields of ``LlamaConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["tokens"].shape
    (16, 25)
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "seed")
    config = change(pick(size, SIZES, "Llama size"), changes, options=options)

    def batch(step: int, count: int) -> Batch:
        return text_data.tokens(config.vocab, config.sequence, step, count, seed=seed)

    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: Llama(config, rngs=nnx.Rngs(key)),
        batch=batch,
        optimizer=warmed_adamw(learning_rate, warmup_steps, b2=0.95),
        batch_size=default_batch_size(size, batch_size, 32),
        name=f"llama-{size}",
    )
