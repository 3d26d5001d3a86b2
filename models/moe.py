"""A sparse transformer in Flax NNX: experts in place of one feed-forward network.

In the manner of M6 (Lin et al., "M6: A Chinese Multimodal Pretrainer", 2021), whose
giant versions are mixtures of experts. It runs on one device as it is; one line
annotates it:

- in ``Experts.__call__``: ``with when(..., wh.split(axis="experts")):`` around the two
  einsums of the expert networks splits them by expert.

Everything else is left to the default strategy, as in
``wh.plan(..., default=wh.replicate())``: gating, attention and the embedding stay
data-parallel, and between the two lie the exchanges of tokens.
``MoEConfig(annotated=False)`` leaves the mark out.

The balance loss averages over the whole batch before it multiplies, so it is no mean
over samples: a part of the batch has another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import whalejax as wh
from whalejax.models import text
from whalejax.models._batches import Batch
from whalejax.models._gating import Routing, capacity, route
from whalejax.models._layers import (
    Array,
    CausalSelfAttention,
    cross_entropy,
    embedding,
    rematted,
    stacked_blocks,
    when,
    widened,
)
from whalejax.models._names import change, pick
from whalejax.models._optimizers import warmed_adamw


_CHOICES: Final[Mapping[str, int]] = {"switch": 1, "top_2": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and switches of a sparse transformer.

    The defaults have the widths and the depth (4 + 4 layers) of the small T5 with
    experts in the examples of Whale's release; the number of experts is our own.

    Attributes:
        vocab: different tokens; 256 reads bytes.
        sequence: longest sequence, in tokens; also the tokens of a gating group.
        embed: width of the residual stream.
        heads: attention heads; divides ``embed``.
        mlp: width inside each expert.
        experts: experts in each layer.
        layers: number of blocks.
        gating: ``"top_2"`` or ``"switch"``.
        capacity_factor: places at the experts over what an even spread would need.
        balance_weight: what the balance loss counts for.
        logical_names: name the experts' dimensions by Flax metadata.
        annotated: put the mark in; needs ``logical_names`` for its ``axis``.
        scan_layers: stack the blocks' parameters and scan over them; their dimensions
            then bear no names.
        remat: what each block recomputes in the backward pass: none, dots or full.
        dtype: compute dtype; follows parameters and inputs where None.
        param_dtype: dtype of the parameters.
    """

    vocab: int = text.BYTES
    sequence: int = 128
    embed: int = 512
    heads: int = 8
    mlp: int = 2048
    experts: int = 16
    layers: int = 8
    gating: Literal["top_2", "switch"] = "top_2"
    capacity_factor: float = 1.5
    balance_weight: float = 0.01
    logical_names: bool = True
    annotated: bool = True
    scan_layers: bool = False
    remat: str | bool = "none"
    dtype: str | None = None
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, MoEConfig]] = {
    "small": MoEConfig(),
    "test": MoEConfig(vocab=512, sequence=24, embed=48, mlp=320, layers=2),
}


class Experts(nnx.Module):
    """One two-layer network per expert, applied to that expert's tokens."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.annotated = config.annotated
        self.named = config.logical_names and not config.scan_layers
        self.axis = "experts" if self.named else None
        shape = (config.experts, config.embed, config.mlp)
        self.up = self._kernel(config, shape, ("experts", "embed", "mlp"), rngs)
        shape = (config.experts, config.mlp, config.embed)
        self.down = self._kernel(config, shape, ("experts", "mlp", "embed"), rngs)

    def _kernel(
        self,
        config: MoEConfig,
        shape: tuple[int, int, int],
        names: tuple[str, str, str],
        rngs: nnx.Rngs,
    ) -> nnx.Param[Array]:
        init = nnx.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", batch_axis=0
        )
        value = init(rngs.params(), shape, jnp.dtype(config.param_dtype))
        if not self.named:
            return nnx.Param(value)
        # Not eagerly: these are names of dimensions, and no mesh is there yet.
        return nnx.Param(value, out_sharding=names, eager_sharding=False)

    def __call__(self, x: Array) -> Array:
        """Tokens ``[experts, groups, capacity, embed]`` in and out."""
        with when(self.annotated, wh.split(axis=self.axis)):
            up, down = self.up[...].astype(x.dtype), self.down[...].astype(x.dtype)
            hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", x, up))
            return jnp.einsum("egch,ehm->egcm", hidden, down)


class SparseFeedForward(nnx.Module):
    """Gating, dispatch, experts and combination; the rows of a batch are the groups."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        init = nnx.initializers.normal(0.02)
        shape = (config.embed, config.experts)
        self.router = nnx.Param(
            init(rngs.params(), shape, jnp.dtype(config.param_dtype))
        )
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Routing]:
        """Output ``[batch, sequence, embed]``, and where the tokens went."""
        config = self.config
        choices = _CHOICES[config.gating]
        # Scores in float32: two experts must not tie for want of digits.
        scores = jnp.einsum("gsm,me->gse", widened(x), widened(self.router[...]))
        places = capacity(x.shape[1], config.experts, choices, config.capacity_factor)
        routing = route(scores, choices=choices, places=places)
        sent = jnp.einsum("gsec,gsm->egcm", routing.dispatch.astype(x.dtype), x)
        answers = self.experts(sent)
        y = jnp.einsum("gsec,egcm->gsm", routing.combine.astype(x.dtype), answers)
        return y, routing


class Block(nnx.Module):
    """Attention and experts, each normed before and added to its input."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = CausalSelfAttention(
            config.embed,
            config.heads,
            output_scale=0.02 * (2 * config.layers) ** -0.5,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.sparse_norm = _norm(config, rngs)
        self.sparse = SparseFeedForward(config, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Routing]:
        """One block over ``x`` ``[batch, sequence, embed]``."""
        x = x + self.attention(self.attention_norm(x))
        y, routing = self.sparse(self.sparse_norm(x))
        return x + y, routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a layer's experts were used: ``Routing``'s ``balance`` and ``dropped``."""

    balance: Array
    dropped: Array


class MoE(nnx.Module):
    """The whole model: tokens in, logits out, and the load of every layer.

    >>> model = MoE(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 24), "int32"))[0].shape
    (2, 24, 512)
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = embedding(
            config.vocab,
            config.embed,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        init = nnx.initializers.normal(0.02)
        shape = (config.sequence, config.embed)
        self.positions = nnx.Param(
            init(rngs.params(), shape, jnp.dtype(config.param_dtype))
        )
        self.blocks = self._make_blocks(rngs)
        self.norm = _norm(config, rngs)
        self.head = nnx.Linear(
            config.embed,
            config.vocab,
            use_bias=False,
            kernel_init=init,
            dtype=_dtype(config),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )

    def _make_blocks(self, rngs: nnx.Rngs) -> Any:
        config = self.config
        if not config.scan_layers:
            return nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        return stacked_blocks(
            config.layers, lambda split: Block(config, rngs=split), rngs
        )

    def __call__(self, tokens: Array) -> tuple[Array, tuple[Load, ...]]:
        """Logits ``[batch, sequence, vocab]``, and each layer's load.

        Where layers are scanned there is one load, whose numbers are all layers'.
        """
        x = self.tokens(tokens)
        x = x + self.positions[: tokens.shape[1]].astype(x.dtype)[None]
        loads: list[Load] = []
        apply = rematted(Block.__call__, self.config.remat)
        if self.config.scan_layers:
            scanned = nnx.scan(
                functools.partial(_scanned, apply),
                in_axes=(nnx.Carry, 0),
                out_axes=(nnx.Carry, 0),
            )
            x, load = scanned(x, self.blocks)
            loads.append(Load(balance=jnp.mean(load[0]), dropped=jnp.mean(load[1])))
        else:
            for block in self.blocks:
                x, routing = apply(block, x)
                loads.append(Load(balance=routing.balance, dropped=routing.dropped))
        return self.head(self.norm(x)), tuple(loads)


def _scanned(
    apply: Callable[..., tuple[Array, Routing]], x: Array, block: Block
) -> tuple[Array, tuple[Array, Array]]:
    y, routing = apply(block, x)
    return y, (routing.balance, routing.dropped)


def _dtype(config: MoEConfig) -> Any:
    return None if config.dtype is None else jnp.dtype(config.dtype)


def _norm(config: MoEConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.embed,
        dtype=_dtype(config),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def loss_fn(model: MoE, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of the next token in nats, plus the weighted balance loss.

    Args:
        model: the sparse transformer.
        batch: ``tokens`` ``int32[batch, sequence + 1]``.

    Returns:
        The loss, and as metrics ``aux`` (balance, mean over layers; 1 is even) and
        ``dropped`` (fraction of choices without a place, mean over layers).

    >>> model = MoE(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss, metrics = loss_fn(model, {"tokens": jnp.zeros((2, 25), "int32")})
    >>> sorted(metrics)
    ['aux', 'dropped']
    """
    tokens = jnp.asarray(batch["tokens"])
    logits, loads = model(tokens[:, :-1])
    nats = jnp.mean(cross_entropy(logits, tokens[:, 1:]))
    aux = sum((r.balance for r in loads), jnp.zeros_like(nats)) / len(loads)
    dropped = sum((r.dropped for r in loads), jnp.zeros_like(nats)) / len(loads)
    loss = nats + model.config.balance_weight * aux
    return loss, {"aux": aux, "dropped": dropped}


def job(
    size: str = "small",
    *,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    warmup_steps: int = 10,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Training of a sparse transformer, on bytes of real text or on made-up tokens.

    Args:
        size: one of ``SIZES``.
        batch_size: sequences in a global batch.
        learning_rate: reached after the warm-up, then constant.
        warmup_steps: steps over which the learning rate rises.
        seed: which sequence of batches.
        changes: fields of ``MoEConfig``.

    Raises:
        WhaleError: unknown size, field or gating.

    >>> job("test", gating="switch").batch_at(0)["tokens"].shape
    (32, 25)
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "seed")
    config = change(pick(size, SIZES, "MoE size"), changes, options=options)
    pick(config.gating, _CHOICES, "gating")

    def batch(step: int, count: int) -> Batch:
        return text.tokens(config.vocab, config.sequence, step, count, seed=seed)

    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: MoE(config, rngs=nnx.Rngs(key)),
        batch=batch,
        optimizer=warmed_adamw(learning_rate, warmup_steps, b2=0.95),
        batch_size=batch_size,
        name="moe" if size == "small" else f"moe-{size}",
    )
