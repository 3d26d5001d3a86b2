"""A sparse transformer in Flax NNX: experts in place of one feed-forward network.

The model follows M6 (Lin et al., "M6: A Chinese Multimodal Pretrainer", 2021), whose
giant versions are mixtures of experts. It runs on one device unchanged; one line
annotates it:

- in ``Experts.__call__``: ``with when(..., wh.split(axis="experts")):`` around the two
  einsums of the expert networks splits them by expert.

Everything else follows the default strategy, as in ``wh.plan(...,
default=wh.replicate())``: gating, attention and the embedding stay data-parallel, with
exchanges of tokens before and after the experts. ``MoEConfig(annotated=False)`` omits
the mark.

An expert has a fixed number of places for tokens. With ``routing="capacity"``, tokens
without a place are dropped (Lepikhin et al., "GShard", 2020). With ``"dropless"``, as
in MegaBlocks (Gale et al., 2022), further passes over all experts serve these tokens.
Each pass has the static shapes of ``"capacity"``, and shards in the same way over the
batch, the experts and their width. The number of passes is determined in each step, and
is equal on all devices. The first pass costs as much as ``"capacity"``; further passes
also run forward a second time. With evenly used experts, one or two passes suffice. If
one expert gets all tokens, the number is the number of experts, divided by
``capacity_factor`` and by the choices per token.

``jax.lax.ragged_dot`` with sorted tokens would need fewer products on TPUs. But for the
experts' gradients, compilers multiply every token by every expert, and XLA:CPU does so
in every product.

The balance loss multiplies averages over the full batch, so it is not the mean of the
losses of micro-batches. The load numbers are those of a micro-batch, on any mesh.
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
from whalejax.meshes import WhaleError
from whalejax.models import text_data
from whalejax.models.common.batches import Batch
from whalejax.models.common.gating import (
    Queues,
    capacity,
    dropped,
    longest,
    queue,
    seats,
)
from whalejax.models.common.layers import (
    Array,
    CausalSelfAttention,
    cross_entropy,
    embedding,
    rematted,
    stacked_blocks,
    when,
    widened,
)
from whalejax.models.common.names import change, pick
from whalejax.models.common.optimizers import warmed_adamw


_CHOICES: Final[Mapping[str, int]] = {"switch": 1, "top_2": 2}
_ROUTINGS: Final[Mapping[str, str]] = {r: r for r in ("capacity", "dropless")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and switches of a sparse transformer.

    The defaults have the widths and the depth (4 + 4 layers) of the small T5 with
    experts in the examples of Whale's release; the number of experts is our choice.

    Attributes:
        vocab: Different tokens; 256 for bytes.
        sequence: Longest sequence, in tokens; also the tokens of a gating group.
        embed: Width of the residual stream.
        heads: Attention heads; divides ``embed``.
        mlp: Width inside each expert.
        experts: Experts in each layer.
        layers: Number of blocks.
        gating: ``"top_2"`` or ``"switch"``.
        routing: ``"capacity"`` drops tokens without a place; ``"dropless"`` serves them
            in further passes.
        capacity_factor: Places of an expert in a pass, relative to the number that an
            even distribution of tokens needs.
        balance_weight: Weight of the balance loss.
        logical_names: Whether Flax metadata names the experts' dimensions.
        annotated: Whether to add the mark; needs ``logical_names`` for its ``axis``.
        scan_layers: Whether to stack the blocks' parameters and scan over them; their
            dimensions then have no names.
        remat: Recomputation of each block in the backward pass: none, dots or full.
        dtype: Compute dtype; None follows parameters and inputs.
        param_dtype: Dtype of the parameters.
    """

    vocab: int = text_data.BYTES
    sequence: int = 128
    embed: int = 512
    heads: int = 8
    mlp: int = 2048
    experts: int = 16
    layers: int = 8
    gating: Literal["top_2", "switch"] = "top_2"
    routing: Literal["capacity", "dropless"] = "capacity"
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
        # Not eagerly, because the names are dimensions and no mesh exists yet.
        return nnx.Param(value, out_sharding=names, eager_sharding=False)

    def __call__(self, x: Array) -> Array:
        """Maps tokens ``[experts, groups, capacity, embed]`` to the same shape."""
        with when(self.annotated, wh.split(axis=self.axis)):
            up, down = self.up[...].astype(x.dtype), self.down[...].astype(x.dtype)
            hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", x, up))
            return jnp.einsum("egch,ehm->egcm", hidden, down)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a layer's experts, as scalars over the micro-batch.

    Attributes:
        balance: 1 if all experts are used equally, else more.
        dropped: Fraction of the choices of experts that are dropped; 0 if dropless.
        max_load: Number of tokens of the busiest expert, relative to the mean.
        passes: Number of passes over the experts; 1 unless dropless.
    """

    balance: Array
    dropped: Array
    max_load: Array
    passes: Array


class SparseFeedForward(nnx.Module):
    """Gating, dispatch, experts and combination. A sequence is a gating group."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        init = nnx.initializers.normal(0.02)
        shape = (config.embed, config.experts)
        self.router = nnx.Param(
            init(rngs.params(), shape, jnp.dtype(config.param_dtype))
        )
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Load]:
        """Returns ``[batch, sequence, embed]``, and the load of the experts."""
        config = self.config
        choices = _CHOICES[config.gating]
        # In float32, scores of experts are not equal because of rounding.
        scores = jnp.einsum("gsm,me->gse", widened(x), widened(self.router[...]))
        queues = queue(scores, choices=choices)
        places = capacity(x.shape[1], config.experts, choices, config.capacity_factor)
        y = self._served(x, queues, places, 0)
        if config.routing == "dropless":
            needed = longest(queues)
            y = y + self._overflow(x, queues, needed, places)
            passes = jnp.ceil(needed.astype(scores.dtype) / places)
            lost = jnp.zeros_like(passes)
        else:
            lost = dropped(queues, places=places)
            passes = jnp.ones_like(lost)
        load = Load(
            balance=queues.balance,
            dropped=lost,
            max_load=queues.max_load,
            passes=passes,
        )
        return y, load

    def _served(
        self, x: Array, queues: Queues, places: int, first: int | Array
    ) -> Array:
        """Returns the results of one pass; zero for tokens without a place in it."""
        routing = seats(queues, places=places, first=first)
        sent = jnp.einsum("gsec,gsm->egcm", routing.dispatch.astype(x.dtype), x)
        answers = self.experts(sent)
        return jnp.einsum("gsec,egcm->gsm", routing.combine.astype(x.dtype), answers)

    def _overflow(self, x: Array, queues: Queues, needed: Array, places: int) -> Array:
        """Returns the results of all later passes, which serve ``needed`` places.

        The passes save nothing for the backward pass, because a loop would store the
        largest possible number of passes. The loop is skipped if the first pass served
        all tokens.
        """
        # A token chooses an expert once, so no queue is longer than its group.
        starts = range(places, x.shape[1], places)
        if not starts:
            return jnp.zeros_like(x)

        def served(first: Array) -> Array:
            return self._served(x, queues, places, first)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one(first: Array) -> Array:
            return _if_needed(first < needed, served, first, x)

        def turn(y: Array, first: Array) -> tuple[Array, None]:
            return y + one(first), None

        def loop(firsts: Array) -> Array:
            return jax.lax.scan(turn, jnp.zeros_like(x), firsts)[0]

        @jax.checkpoint
        def every(firsts: Array) -> Array:
            return _if_needed(places < needed, loop, firsts, x)

        with jax.named_scope("overflow"):
            answers: Array = every(jnp.asarray(starts, jnp.int32))
        return answers


def _if_needed(
    needed: Array, run: Callable[[Array], Array], operand: Array, like: Array
) -> Array:
    result: Array = jax.lax.cond(
        needed, run, lambda _: jnp.zeros(like.shape, like.dtype), operand
    )
    return result


class Block(nnx.Module):
    """Attention and experts, each after a norm and added to its input."""

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

    def __call__(self, x: Array) -> tuple[Array, Load]:
        """Applies the block to ``x`` ``[batch, sequence, embed]``."""
        x = x + self.attention(self.attention_norm(x))
        y, load = self.sparse(self.sparse_norm(x))
        return x + y, load


class MoE(nnx.Module):
    """The full model: tokens in, logits out, and the load of every layer.

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
        """Computes logits ``[batch, sequence, vocab]``, and each layer's load.

        With scanned layers there is one load, whose arrays cover all layers.
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
            loads.append(jax.tree.map(jnp.mean, load))
        else:
            for block in self.blocks:
                x, load = apply(block, x)
                loads.append(load)
        return self.head(self.norm(x)), tuple(loads)


def _scanned(
    apply: Callable[..., tuple[Array, Load]], x: Array, block: Block
) -> tuple[Array, Load]:
    return apply(block, x)


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
    """Computes the mean cross-entropy of the next token in nats, plus the balance loss.

    Args:
        model: The sparse transformer.
        batch: ``tokens`` ``int32[batch, sequence + 1]``.

    Returns:
        Loss, and the means over layers of ``Load``'s numbers as metrics, with
        ``balance`` as ``aux``.

    >>> model = MoE(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss, metrics = loss_fn(model, {"tokens": jnp.zeros((2, 25), "int32")})
    >>> sorted(metrics)
    ['aux', 'dropped', 'max_load', 'passes']
    """
    tokens = jnp.asarray(batch["tokens"])
    logits, loads = model(tokens[:, :-1])
    nats = jnp.mean(cross_entropy(logits, tokens[:, 1:]))
    load = jax.tree.map(lambda *layers: sum(layers[1:], layers[0]) / len(loads), *loads)
    loss = nats + model.config.balance_weight * load.balance
    metrics = {
        "aux": load.balance,
        "dropped": load.dropped,
        "max_load": load.max_load,
        "passes": load.passes,
    }
    return loss, metrics


def job(
    size: str = "small",
    *,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    warmup_steps: int = 10,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: a sparse transformer on bytes of real text or synthetic tokens.

    Args:
        size: One of ``SIZES``.
        batch_size: Sequences in a global batch.
        learning_rate: Learning rate after the warm-up; constant from then on.
        warmup_steps: Steps over which the learning rate rises.
        seed: Seed of the sequence of batches.
        changes: Fields of ``MoEConfig``.

    Raises:
        WhaleError: Unknown size, field, gating or routing, or no places at experts.

    >>> job("test", gating="switch").batch_at(0)["tokens"].shape
    (32, 25)
    """
    options = ("batch_size", "learning_rate", "warmup_steps", "seed")
    config = change(pick(size, SIZES, "MoE size"), changes, options=options)
    pick(config.gating, _CHOICES, "gating")
    pick(config.routing, _ROUTINGS, "routing")
    if not config.capacity_factor > 0:
        raise WhaleError(
            f"capacity_factor is {config.capacity_factor!r}; expected a number above "
            "0, the experts' places over those that an even spread needs. To drop no "
            'token, give routing="dropless" with a capacity_factor of 1 or more'
        )

    def batch(step: int, count: int) -> Batch:
        return text_data.tokens(config.vocab, config.sequence, step, count, seed=seed)

    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: MoE(config, rngs=nnx.Rngs(key)),
        batch=batch,
        optimizer=warmed_adamw(learning_rate, warmup_steps, b2=0.95),
        batch_size=batch_size,
        name="moe" if size == "small" else f"moe-{size}",
        # The balance loss depends on the samples that are computed together.
        per_micro_batch=True,
    )
