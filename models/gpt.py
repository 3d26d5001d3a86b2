"""GPT: a pre-norm, decoder-only transformer in Flax NNX.

The model of the quick start has 3.3M parameters and reads bytes. It runs on one device
unchanged. Two lines annotate it:

- in ``GPT.hidden_states``: ``with when(..., wh.replicate()):`` around embedding, blocks
  and last norm makes them data-parallel;
- in ``loss_fn``: ``with when(..., wh.split()):`` around head and cross-entropy splits
  them, along the dimension with the lowest cost.

``GPTConfig(annotated=False)`` leaves both out and the planner decides everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import whalejax as wh
from whalejax.models import text_data
from whalejax.models.common.batches import Batch, default_batch_size, lengths
from whalejax.models.common.layers import (
    Array,
    CausalSelfAttention,
    cross_entropy,
    embedding,
    rematted,
    stacked_blocks,
    when,
)
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import warmed_adamw


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes and switches of a GPT; the defaults are the quick start's.

    Attributes:
        vocab: Size of the vocabulary; 256 for bytes.
        sequence: Longest sequence, in tokens.
        embed: Width of the residual stream.
        heads: Attention heads; divides ``embed``.
        mlp: Width inside the feed-forward layers.
        layers: Number of blocks of the residual stream.
        shared_layers: Consecutive layers that share the weights of one block, as in
            ALBERT; divides ``layers``. 1 shares none.
        dropout_rate: Dropout rate after the embedding and before each residual
            addition. The keys are NNX RNG state of the model.
        tied_embedding: Whether the head is the transposed embedding table.
        fused_qkv: Whether query, key and value share one attention kernel.
        scan_layers: Whether to stack the blocks' parameters and scan over them.
        remat: Recomputation of each block in the backward pass: none, dots or full.
        annotated: Whether to add the marks.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = text_data.BYTES
    sequence: int = 128
    embed: int = 256
    heads: int = 8
    mlp: int = 1024
    layers: int = 4
    shared_layers: int = 1
    dropout_rate: float = 0.0
    tied_embedding: bool = False
    fused_qkv: bool = False
    scan_layers: bool = False
    remat: str | bool = "none"
    annotated: bool = True
    dtype: str | None = None
    param_dtype: str = "float32"


def _published(embed: int, heads: int, layers: int) -> GPTConfig:
    """Returns a GPT-2 size; the vocabulary of 50,257 is padded to a multiple of 128."""
    return GPTConfig(
        vocab=50_304,
        sequence=1024,
        embed=embed,
        heads=heads,
        mlp=4 * embed,
        layers=layers,
        tied_embedding=True,
    )


SIZES: Final[Mapping[str, GPTConfig]] = {
    "quick": GPTConfig(),
    "test": GPTConfig(vocab=512, sequence=24, embed=48, mlp=320, layers=2),
    "small": _published(768, 12, 12),
    "medium": _published(1024, 16, 24),
    "large": _published(1280, 20, 36),
    "xl": _published(1600, 25, 48),
}


class Block(nnx.Module):
    """Pre-norm attention and feed-forward layers, each with a residual connection."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dtype = None if config.dtype is None else jnp.dtype(config.dtype)
        param_dtype = jnp.dtype(config.param_dtype)
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        # Keeps the residual stream at a variance near 1; blocks have two additions.
        output_scale = 0.02 * (2 * config.layers) ** -0.5
        self.attention_norm = nnx.LayerNorm(config.embed, rngs=rngs, **kinds)
        self.attention = CausalSelfAttention(
            config.embed,
            config.heads,
            fused=config.fused_qkv,
            output_scale=output_scale,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(config.embed, rngs=rngs, **kinds)
        self.up = nnx.Linear(
            config.embed,
            config.mlp,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
            **kinds,
        )
        self.down = nnx.Linear(
            config.mlp,
            config.embed,
            kernel_init=nnx.initializers.normal(output_scale),
            rngs=rngs,
            **kinds,
        )
        self.dropout = _dropout(config, rngs)

    def __call__(self, x: Array) -> Array:
        """Applies the block to ``x`` ``[batch, sequence, embed]``."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = jax.nn.gelu(self.up(self.mlp_norm(x)))
        return x + self.dropout(self.down(hidden))


class GPT(nnx.Module):
    """The full model: tokens in, logits out.

    >>> model = GPT(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 24), "int32")).shape
    (2, 24, 512)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = embedding(
            config.vocab,
            config.embed,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(
                rngs.params(),
                (config.sequence, config.embed),
                jnp.dtype(config.param_dtype),
            )
        )
        self.dropout = _dropout(config, rngs)
        self.blocks = _make_blocks(config, rngs)
        kinds: dict[str, Any] = {
            "dtype": None if config.dtype is None else jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        self.norm = nnx.LayerNorm(config.embed, rngs=rngs, **kinds)
        if not config.tied_embedding:
            self.head = nnx.Linear(
                config.embed,
                config.vocab,
                use_bias=False,
                kernel_init=nnx.initializers.normal(0.02),
                rngs=rngs,
                **kinds,
            )

    def __call__(self, tokens: Array) -> Array:
        """Computes logits ``[batch, sequence, vocab]`` of ``tokens`` ``[batch,
        sequence]``.
        """
        return self.logits(self.hidden_states(tokens))

    def hidden_states(self, tokens: Array) -> Array:
        """Computes the residual stream before the head, ``[batch, sequence,
        embed]``.
        """
        with when(self.config.annotated, wh.replicate()):
            x = self.tokens(tokens)
            x = x + self.positions[: tokens.shape[1]].astype(x.dtype)[None]
            hidden: Array = self.norm(self._run_blocks(self.dropout(x)))
            return hidden

    def logits(self, hidden: Array) -> Array:
        """Computes logits ``[batch, sequence, vocab]`` from the residual stream."""
        if self.config.tied_embedding:
            return self.tokens.attend(hidden)
        return self.head(hidden)

    def _run_blocks(self, x: Array) -> Array:
        apply = rematted(Block.__call__, self.config.remat)

        def several(block: Block, x: Array) -> Array:
            for _ in range(self.config.shared_layers):
                x = apply(block, x)
            return x

        if not self.config.scan_layers:
            for block in self.blocks:
                x = several(block, x)
            return x
        scanned = nnx.scan(
            lambda carry, block: several(block, carry),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        result: Array = scanned(x, self.blocks)  # type: ignore[no-untyped-call]
        return result


def _dropout(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns the dropout layer; at rate 0 it stores no RNG state."""
    return nnx.Dropout(
        config.dropout_rate, rngs=rngs if config.dropout_rate > 0 else None
    )


def _make_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Any:
    shared = config.shared_layers
    if shared < 1 or config.layers % shared:
        raise wh.WhaleError(
            f"GPT: shared_layers is {shared} with layers={config.layers}; expected a "
            "divisor of layers, such as 1 to share no weights, or "
            f"{config.layers} to share the weights of one block in all layers"
        )
    count = config.layers // shared
    if not config.scan_layers:
        return nnx.List([Block(config, rngs=rngs) for _ in range(count)])

    return stacked_blocks(count, lambda split: Block(config, rngs=split), rngs)


def loss_fn(model: GPT, batch: Mapping[str, Any]) -> Array | wh.WeightedLoss:
    """Computes the mean cross-entropy of the next token, in nats.

    Args:
        model: The GPT.
        batch: ``tokens`` ``int32[batch, sequence + 1]`` and, if sequences are padded,
            ``mask`` ``[batch, sequence]``, true for real targets.

    Returns:
        Mean over all targets, or a weighted loss over the real ones.

    >>> model = GPT(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss_fn(model, {"tokens": jnp.zeros((2, 25), "int32")}).shape
    ()
    """
    tokens = jnp.asarray(batch["tokens"])
    hidden = model.hidden_states(tokens[:, :-1])
    with when(model.config.annotated, wh.split()):
        nats = cross_entropy(model.logits(hidden), tokens[:, 1:])
        if "mask" not in batch:
            return jnp.mean(nats)
        real = jnp.asarray(batch["mask"]).astype(nats.dtype)
        return wh.WeightedLoss(jnp.sum(nats * real), jnp.sum(real))


def job(
    size: str = "quick",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1.5e-3,
    warmup_steps: int = 10,
    padded: bool = False,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a GPT trains on the standard library's bytes or synthetic tokens.

    Args:
        size: One of ``SIZES``.
        batch_size: Sequences in a global batch; default: 32, or 16 at size ``test``.
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises.
        padded: Whether sequences have different lengths, with a ``mask`` in the batch.
        seed: Seed of the sequence of batches.
        changes: Fields of ``GPTConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["tokens"].shape
    (16, 25)
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "padded", "seed")
    config = change(pick(size, SIZES, "GPT size"), changes, options=options)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: GPT(config, rngs=nnx.Rngs(key)),
        batch=lambda step, count: _batch(config, step, count, padded=padded, seed=seed),
        optimizer=warmed_adamw(learning_rate, warmup_steps, b2=0.95),
        batch_size=default_batch_size(size, batch_size, 32),
        name="gpt" if size == "quick" else f"gpt-{size}",
    )


def _batch(
    config: GPTConfig, step: int, count: int, *, padded: bool, seed: int
) -> Batch:
    batch = text_data.tokens(config.vocab, config.sequence, step, count, seed=seed)
    if not padded:
        return batch
    real = lengths(step, count, longest=config.sequence, seed=seed)
    return {**batch, "mask": np.arange(config.sequence)[None, :] < real[:, None]}
