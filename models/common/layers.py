"""Layers that several NNX models share: embeddings, attention, cross-entropy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from whalejax.meshes import WhaleError


Array: TypeAlias = jax.Array


def when(
    annotated: bool, mark: AbstractContextManager[Any]
) -> AbstractContextManager[Any]:
    """Returns the mark if the configuration is annotated, else a null context.

    >>> with when(False, contextlib.nullcontext()):
    ...     pass
    """
    return mark if annotated else contextlib.nullcontext()


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Returns the cross-entropy of integer targets in nats, in float32 or wider.

    Args:
        logits: ``[..., classes]``, any floating dtype.
        targets: ``[...]``, integers below ``classes``.

    Returns:
        Unreduced values ``[...]``.

    >>> float(cross_entropy(jnp.zeros((1, 4)), jnp.zeros((1,), "int32"))[0])
    1.3862943649291992
    """
    nats: Array = optax.softmax_cross_entropy_with_integer_labels(
        widened(logits), targets
    )
    return nats


def widened(x: Array) -> Array:
    """Returns the array in float32, or in its own dtype if that is wider.

    >>> widened(jnp.zeros((2,), "bfloat16")).dtype
    dtype('float32')
    """
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def embedding(
    count: int, features: int, *, dtype: str | None, param_dtype: str, rngs: nnx.Rngs
) -> nnx.Embed:
    """Returns an embedding table; without ``dtype`` it computes in that of its weights.

    ``nnx.Embed`` would fix the initial dtype of its weights, so results would stay
    float32 after the weights are cast to bfloat16.
    """
    table = nnx.Embed(
        count,
        features,
        param_dtype=jnp.dtype(param_dtype),
        embedding_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )
    table.dtype = None if dtype is None else jnp.dtype(dtype)
    return table


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    """Computes softmax attention in which no position sees a later one.

    Args:
        query: ``[batch, sequence, heads, head_dim]``.
        key: Array of the same shape.
        value: Array of the same shape.

    Returns:
        ``[batch, sequence, heads, head_dim]`` in the dtype of ``value``.
    """
    length, head_dim = query.shape[1], query.shape[3]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_dim**-0.5, key)
    scores = widened(scores)
    seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
    # Each position attends to itself, so no row is entirely -inf.
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


class CausalSelfAttention(nnx.Module):
    """Multi-head causal self-attention.

    The three projections are separate kernels of shape ``[embed, heads, head_dim]``, so
    heads are a separate dimension and can be sharded. ``fused`` makes one kernel
    ``[embed, 3 * heads * head_dim]`` instead, without a dimension of heads.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        fused: bool = False,
        output_scale: float = 0.02,
        dtype: str | None,
        param_dtype: str,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.head_dim = heads, embed // heads
        self.fused = fused
        common: dict[str, Any] = {
            "dtype": None if dtype is None else jnp.dtype(dtype),
            "param_dtype": jnp.dtype(param_dtype),
            "kernel_init": nnx.initializers.normal(0.02),
            "rngs": rngs,
        }
        if fused:
            self.query_key_value = nnx.Linear(embed, 3 * embed, **common)
        else:
            inner = (heads, self.head_dim)
            self.query = nnx.LinearGeneral(embed, inner, **common)
            self.key = nnx.LinearGeneral(embed, inner, **common)
            self.value = nnx.LinearGeneral(embed, inner, **common)
        common["kernel_init"] = nnx.initializers.normal(output_scale)
        self.output = nnx.LinearGeneral(
            (heads, self.head_dim), embed, axis=(-2, -1), **common
        )

    def __call__(self, x: Array) -> Array:
        """Attends from each position of ``x`` ``[batch, sequence, embed]``."""
        if self.fused:
            batch, length, _ = x.shape
            shape = (batch, length, 3, self.heads, self.head_dim)
            joint = self.query_key_value(x).reshape(shape)
            query, key, value = (joint[:, :, i] for i in range(3))
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        return self.output(causal_attention(query, key, value))


REMATS = ("none", "dots", "full")
"""Recomputation policies of a model for the backward pass."""


def rematted(call: Callable[..., Any], remat: str | bool) -> Callable[..., Any]:
    """Returns a block's call, recomputed in the backward pass.

    Args:
        call: Function whose first argument is the block.
        remat: ``"none"``; ``"dots"`` saves the results of products with weights;
            ``"full"`` saves only the block's input. True and False mean full and none.

    Raises:
        WhaleError: ``remat`` is another text.
    """
    policy = ("none", "full")[remat] if isinstance(remat, bool) else remat
    if policy not in REMATS:
        raise WhaleError(f"remat is {remat!r}; expected one of {', '.join(REMATS)}")
    if policy == "none":
        return call
    if policy == "full":
        return nnx.remat(call)
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return nnx.remat(call, policy=kept)


def stacked_blocks(
    layers: int, make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs
) -> Any:
    """Returns one block for all layers, with stacked parameters ``[layers, ...]``.

    Args:
        layers: Number of layers.
        make: Function from random keys to one block.
        rngs: Random keys of all blocks.
    """

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make_block(split: nnx.Rngs) -> nnx.Module:
        return make(split)

    return make_block(rngs)
