"""A sequential recommender of five HSTU layers over jagged histories, in Flax NNX.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
for Generative Recommendations" (arXiv:2402.17152). Attention weights are the SiLU of
the scores instead of a softmax, and a gate multiplies the result. The tables are those
of DLRMv4 in MLPerf Training v6.1: item, artist, album, user, and seven crosses. The
vector of an event is the sum of a row of each table.

Histories have different lengths, and positions after the last event are masked. The
label tells whether the item of the last event was liked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import whalejax as wh
from whalejax.meshes.units import count_text
from whalejax.models.click_data import power_law_ids
from whalejax.models.common.batches import (
    Batch,
    default_batch_size,
    generator,
    lengths,
)
from whalejax.models.common.layers import Array
from whalejax.models.common.names import change, pick
from whalejax.planner.tables.published import DLRM_V4_ROWS


FEATURES: Final = tuple(DLRM_V4_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Sizes of a sequential recommender.

    Attributes:
        rows: Rows of each table, in the order of ``FEATURES``.
        embed: Width of tables and layers.
        heads: Attention heads.
        head_dim: Width of a head's queries, keys and values.
        layers: Number of HSTU layers.
        sequence: Events of the longest history.
        skew: Exponent of the power law of synthetic ids.
        param_dtype: Dtype of the parameters.
    """

    rows: tuple[int, ...] = tuple(DLRM_V4_ROWS.values())
    embed: int = 512
    heads: int = 4
    head_dim: int = 128
    layers: int = 5
    sequence: int = 2048
    skew: float = 1.05
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.rows) != len(FEATURES):
            raise wh.WhaleError(
                f"HSTUConfig has {count_text(len(self.rows), 'table')} in rows; "
                f"expected {len(FEATURES)}: {', '.join(FEATURES)}"
            )


SIZES: Final[Mapping[str, HSTUConfig]] = {
    "dlrm-v4": HSTUConfig(),
    "test": HSTUConfig(
        rows=(61, 13, 29, 17, 97, 80, 41, 33, 19, 11, 7),
        embed=16,
        heads=2,
        head_dim=8,
        layers=2,
        sequence=12,
    ),
}


class HSTULayer(nnx.Module):
    """Pointwise aggregated attention with a gate, and a residual connection."""

    def __init__(self, config: HSTUConfig, *, rngs: nnx.Rngs) -> None:
        kind = jnp.dtype(config.param_dtype)
        self.heads = config.heads
        width = config.heads * config.head_dim
        kinds: Any = {"param_dtype": kind, "dtype": kind, "rngs": rngs}
        self.norm = nnx.LayerNorm(config.embed, **kinds)
        self.inputs = nnx.Linear(config.embed, 4 * width, **kinds)
        self.inner_norm = nnx.LayerNorm(width, **kinds)
        self.output = nnx.Linear(width, config.embed, **kinds)

    def __call__(self, x: Array, mask: Array) -> Array:
        """Applies the layer to ``x`` ``[batch, sequence, embed]``.

        Args:
            x: Vectors of events.
            mask: ``bool[batch, sequence, sequence]``, true where an event attends to
                another.
        """
        batch, sequence, _ = x.shape
        mixed = jax.nn.silu(self.inputs(self.norm(x)))
        gate, *parts = jnp.split(mixed, 4, axis=-1)
        shape = (batch, sequence, self.heads, -1)
        query, key, value = (part.reshape(shape) for part in parts)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key)
        weights = jax.nn.silu(scores / np.sqrt(query.shape[-1]))
        seen = jnp.broadcast_to(mask[:, None], weights.shape)
        weights = jnp.where(seen, weights, 0) / sequence
        summed = jnp.einsum("nhqk,nkhd->nqhd", weights, value)
        summed = self.inner_norm(summed.reshape(batch, sequence, -1))
        return x + self.output(summed * gate)


class HSTU(nnx.Module):
    """The full model: histories in, a logit of each out.

    >>> model = HSTU(SIZES["test"], rngs=nnx.Rngs(0))
    >>> model(history_batch(SIZES["test"], 0, 2, seed=0)).shape
    (2,)
    """

    def __init__(self, config: HSTUConfig, *, rngs: nnx.Rngs) -> None:
        kind = jnp.dtype(config.param_dtype)
        kinds: Any = {"param_dtype": kind, "dtype": kind, "rngs": rngs}
        self.tables = nnx.Dict(
            {
                name: nnx.Embed(
                    rows,
                    config.embed,
                    embedding_init=nnx.initializers.normal(0.1),
                    **kinds,
                )
                for name, rows in zip(FEATURES, config.rows, strict=True)
            }
        )
        self.layers = nnx.List(
            HSTULayer(config, rngs=rngs) for _ in range(config.layers)
        )
        self.norm = nnx.LayerNorm(config.embed, **kinds)
        self.head = nnx.Linear(config.embed, 1, **kinds)

    def __call__(self, batch: Mapping[str, Any]) -> Array:
        """Computes logits ``[batch]``.

        Args:
            batch: Ids by the name of their table, ``int32[batch, sequence]`` or, for
                users, ``int32[batch]``; ``length`` ``int32[batch]``.
        """
        user = self.tables["user"](jnp.asarray(batch["user"]))
        x = user[:, None]
        for name in FEATURES:
            if name != "user":
                x = x + self.tables[name](jnp.asarray(batch[name]))
        length = jnp.asarray(batch["length"])
        place = jnp.arange(x.shape[1], dtype=length.dtype)
        present = place[None] < length[:, None]
        x = jnp.where(present[..., None], x, 0)
        causal = place[None, :] <= place[:, None]
        mask = present[:, None, :] & causal[None]
        for layer in self.layers:
            x = layer(x, mask)
        last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]
        logits: Array = self.head(self.norm(last))
        return logits[:, 0]


def loss_fn(model: HSTU, batch: Mapping[str, Any]) -> Array:
    """Computes the mean binary cross-entropy of ``label``, in nats.

    >>> model = HSTU(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss_fn(model, history_batch(SIZES["test"], 0, 2, seed=0)).shape
    ()
    """
    logits = model(batch)
    labels = jnp.asarray(batch["label"]).astype(logits.dtype)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def history_batch(config: HSTUConfig, step: int, size: int, *, seed: int) -> Batch:
    """Returns synthetic histories of different lengths.

    The last item is liked with probability 0.9 if its artist occurred before, else 0.1.

    Args:
        config: Sizes.
        step: Number of the batch.
        size: Number of histories.
        seed: Seed of the sequence of batches.

    >>> history_batch(SIZES["test"], 0, 2, seed=0)["item"].shape
    (2, 12)
    """
    random = generator(seed, step)
    batch: dict[str, Any] = {}
    for name, rows in zip(FEATURES, config.rows, strict=True):
        shape = (size,) if name == "user" else (size, config.sequence)
        ids = power_law_ids(random.random(shape), rows, config.skew)
        batch[name] = ids.astype(np.int32)
    length = lengths(step, size, longest=config.sequence, seed=seed)
    batch["length"] = length.astype(np.int32)
    last = batch["artist"][np.arange(size), length - 1]
    before = np.arange(config.sequence) < (length - 1)[:, None]
    again = ((batch["artist"] == last[:, None]) & before).any(1)
    drawn = random.random(size) < np.where(again, 0.9, 0.1)
    batch["label"] = drawn.astype(np.int32)
    return batch


def job(
    size: str = "test",
    *,
    batch_size: int | None = None,
    learning_rate: float = 0.05,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: an HSTU predicts whether a history's last item is liked.

    Args:
        size: One of ``SIZES``.
        batch_size: Histories in a global batch; 8,192, at test size 16.
        learning_rate: Learning rate of Adagrad.
        seed: Seed of the sequence of batches.
        changes: Fields of ``HSTUConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["user"].shape
    (16,)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "HSTU size"), changes, options=options)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: HSTU(config, rngs=nnx.Rngs(key)),
        batch=lambda step, count: history_batch(config, step, count, seed=seed),
        optimizer=optax.adagrad(learning_rate),
        batch_size=default_batch_size(size, batch_size, 8192),
        name=f"hstu-{size}",
    )
