"""A deep learning recommendation model: embedding bags and dot interactions, in NNX.

Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (arXiv:1906.00091). The bottom network maps the dense features
to a vector, and each categorical feature has a table of vectors. The top network
computes a logit from the inner products of all pairs of vectors.

A feature has one id per sample, or a bag of ids whose vectors are summed. An id of -1
means none. The model runs on one device unchanged, and nothing is marked.
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
from whalejax.models.click_data import ClickData
from whalejax.models.common.batches import default_batch_size
from whalejax.models.common.layers import Array
from whalejax.models.common.names import change, pick
from whalejax.planner.tables.published import (
    DLRM_V2_LOOKUPS,
    DLRM_V2_ROWS,
    KAGGLE_ROWS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig:
    """Sizes of a recommendation model.

    The defaults are the published ones for the Criteo-Kaggle data.

    Attributes:
        rows: Rows of each table, one per categorical feature.
        scale: Factor by which rows are multiplied; a table has at least three rows.
        bags: Number of ids in a sample, for each table.
        embed: Width of the tables, and of the bottom network's result.
        dense: Dense features of a sample.
        bottom: Widths of the bottom network's hidden layers.
        top: Widths of the top network's hidden layers.
        skew: Exponent of the power law of synthetic ids; 0 makes them uniform.
        param_dtype: Dtype of the parameters; dense features are cast to it.
    """

    rows: tuple[int, ...] = KAGGLE_ROWS
    scale: float = 1.0
    bags: tuple[int, ...] = (1,) * len(KAGGLE_ROWS)
    embed: int = 16
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    skew: float = 1.05
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.bags):
            raise wh.WhaleError(
                f"DLRMConfig has {count_text(len(self.rows), 'table')} in rows and "
                f"{len(self.bags)} bags; expected as many of each"
            )

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table after scaling."""
        if self.scale == 1.0:
            return self.rows
        return tuple(max(min(n, 3), round(n * self.scale)) for n in self.rows)

    @property
    def data(self) -> ClickData:
        """Synthetic samples of these features."""
        return ClickData(
            rows=self.table_rows, bags=self.bags, dense=self.dense, skew=self.skew
        )


SIZES: Final[Mapping[str, DLRMConfig]] = {
    "kaggle": DLRMConfig(),
    "quick": DLRMConfig(scale=0.01, bottom=(128, 64), top=(128, 64)),
    "v2": DLRMConfig(
        rows=DLRM_V2_ROWS,
        bags=DLRM_V2_LOOKUPS,
        embed=128,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        skew=0.0,
    ),
    "test": DLRMConfig(
        rows=(97, 3, 31, 5, 64),
        bags=(1, 3, 1, 4, 1),
        embed=8,
        dense=6,
        bottom=(24,),
        top=(40,),
    ),
}


class MLP(nnx.Module):
    """Linear layers with a ReLU between them."""

    def __init__(
        self, widths: tuple[int, ...], *, param_dtype: str, rngs: nnx.Rngs
    ) -> None:
        kind = jnp.dtype(param_dtype)
        self.layers = nnx.List(
            nnx.Linear(n, m, param_dtype=kind, dtype=kind, rngs=rngs)
            for n, m in zip(widths[:-1], widths[1:], strict=True)
        )

    def __call__(self, x: Array) -> Array:
        """Maps ``[batch, widths[0]]`` to ``[batch, widths[-1]]``."""
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else jax.nn.relu(x))
        return x


def sum_bags(table: nnx.Embed, ids: Array) -> Array:
    """Returns the sum of the rows of each sample's bag, ``[batch, width]``.

    Args:
        table: The table.
        ids: ``int32[batch]`` or ``int32[batch, bag]``; -1 means no id.
    """
    ids = ids.reshape(len(ids), -1)
    rows = table(jnp.maximum(ids, 0))
    return jnp.sum(jnp.where((ids >= 0)[..., None], rows, 0), axis=1)


def _table(rows: int, width: int, param_dtype: str, rngs: nnx.Rngs) -> nnx.Embed:
    limit = float(1 / np.sqrt(rows))

    def initial(key: Array, shape: Any, dtype: Any = None, **_: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    kind = jnp.dtype(param_dtype)
    return nnx.Embed(
        rows, width, dtype=kind, param_dtype=kind, embedding_init=initial, rngs=rngs
    )


class DLRM(nnx.Module):
    """The full model: features in, logits out.

    >>> model = DLRM(SIZES["test"], rngs=nnx.Rngs(0))
    >>> batch = SIZES["test"].data.batch(0, 2)
    >>> model(batch).shape
    (2,)
    """

    def __init__(self, config: DLRMConfig, *, rngs: nnx.Rngs) -> None:
        kind = config.param_dtype
        self.tables = nnx.Dict(
            {
                f"c{i}": _table(rows, config.embed, kind, rngs)
                for i, rows in enumerate(config.table_rows)
            }
        )
        bottom = (config.dense, *config.bottom, config.embed)
        self.bottom = MLP(bottom, param_dtype=kind, rngs=rngs)
        vectors = len(config.rows) + 1
        inputs = config.embed + vectors * (vectors - 1) // 2
        self.top = MLP((inputs, *config.top, 1), param_dtype=kind, rngs=rngs)

    def __call__(self, batch: Mapping[str, Any]) -> Array:
        """Computes logits ``[batch]``.

        Args:
            batch: ``dense`` ``float[batch, dense]``, and ids by the name of their
                table.
        """
        kind = self.bottom.layers[0].kernel.dtype
        x = self.bottom(jnp.asarray(batch["dense"]).astype(kind))
        bags = [
            sum_bags(table, jnp.asarray(batch[name]))
            for name, table in self.tables.items()
        ]
        vectors = jnp.stack([x, *bags], axis=1)
        products = jnp.einsum("nfe,nge->nfg", vectors, vectors)
        rows, columns = np.tril_indices(vectors.shape[1], -1)
        pairs = products[:, rows, columns]
        logits: Array = self.top(jnp.concatenate([x, pairs], axis=1))
        return logits[:, 0]


def loss_fn(model: nnx.Module, batch: Mapping[str, Any]) -> Array:
    """Computes the mean binary cross-entropy of ``label``, in nats.

    >>> model = DLRM(SIZES["test"], rngs=nnx.Rngs(0))
    >>> loss_fn(model, SIZES["test"].data.batch(0, 2)).shape
    ()
    """
    logits = model(batch)
    labels = jnp.asarray(batch["label"]).astype(logits.dtype)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))


def job(
    size: str = "quick",
    *,
    batch_size: int | None = None,
    learning_rate: float = 0.02,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: training on synthetic clicks from a hidden model of small rank.

    Args:
        size: One of ``SIZES``.
        batch_size: Samples in a global batch; 2,048, at test size 16.
        learning_rate: Learning rate of Adagrad.
        seed: Seed of the sequence of batches, and of the hidden model.
        changes: Fields of ``DLRMConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["c1"].shape
    (16, 3)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "DLRM size"), changes, options=options)
    return wh.Job(
        loss_fn=loss_fn,
        make_model=lambda key: DLRM(config, rngs=nnx.Rngs(key)),
        batch=lambda step, count: config.data.batch(step, count, seed=seed),
        optimizer=optax.adagrad(learning_rate),
        batch_size=default_batch_size(size, batch_size, 2048),
        name="dlrm" if size == "quick" else f"dlrm-{size}",
    )
