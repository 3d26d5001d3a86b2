"""A Linen model with dropout and batch normalisation, the two that go by the batch.

No reference model has both: the statistics run over all samples and change with every
call, and the dropout masks come from a key that the loss is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


FEATURES, HIDDEN, CLASSES = 20, 64, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Switches of the model.

    Attributes:
        dropout_rate: after each hidden layer.
        annotated: replicate the hidden layers and split the head.
        dtype: of parameters, statistics and computation.
    """

    dropout_rate: float = 0.25
    annotated: bool = False
    dtype: str = "float32"


class Hidden(nn.Module):
    """Two layers, each normed over the batch and then dropped out."""

    options: Options

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Features ``[batch, hidden]`` of ``x`` ``[batch, features]``."""
        kinds = _kinds(self.options)
        for i in range(2):
            x = nn.Dense(HIDDEN, name=f"dense_{i}", **kinds)(x)
            x = nn.BatchNorm(use_running_average=False, name=f"norm_{i}", **kinds)(x)
            x = nn.Dropout(self.options.dropout_rate)(nn.relu(x), deterministic=False)
        return x


class Classifier(nn.Module):
    """The hidden layers and a head."""

    options: Options

    def setup(self) -> None:
        """Name the two parts, so that each can be called by itself."""
        self.hidden = Hidden(self.options)
        self.head = nn.Dense(CLASSES, **_kinds(self.options))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits ``[batch, classes]`` of ``x`` ``[batch, features]``."""
        if not self.options.annotated:
            return self.head(self.hidden(x))
        with wh.replicate():
            x = self.hidden(x)
        with wh.split():
            return self.head(x)


def _kinds(options: Options) -> dict[str, Any]:
    dtype = jnp.dtype(options.dtype)
    return {"dtype": dtype, "param_dtype": dtype}


def job(*, batch_size: int = 32, **changes: Any) -> wh.Job:
    """Training of the model on noise.

    Args:
        batch_size: samples in a global batch.
        changes: fields of ``Options``.
    """
    options = Options(**changes)
    module = Classifier(options)

    def loss_fn(variables: Any, batch: Mapping[str, Any], rng: Any) -> Any:
        inputs = jnp.asarray(batch["inputs"]).astype(options.dtype)
        logits, updated = module.apply(
            variables, inputs, rngs={"dropout": rng}, mutable=["batch_stats"]
        )
        labels = jnp.asarray(batch["labels"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = (jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype)
        metrics = {"accuracy": jnp.mean(right)}
        return jnp.mean(losses), wh.Aux(metrics=metrics, variables=updated)

    def make_model(key: jax.Array) -> Any:
        inputs = jnp.zeros((2, FEATURES), options.dtype)
        variables = module.init({"params": key, "dropout": key}, inputs)
        # Flax makes running statistics in float32, and the first update widens them.
        return jax.tree.map(lambda leaf: leaf.astype(options.dtype), variables)

    def batch(step: int, size: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(step)
        inputs = random.standard_normal((size, FEATURES), dtype=np.float32)
        labels = random.integers(0, CLASSES, size).astype(np.int32)
        return {"inputs": inputs, "labels": labels}

    return wh.Job(
        loss_fn=loss_fn,
        make_model=make_model,
        batch=batch,
        optimizer=optax.sgd(0.1),
        batch_size=batch_size,
        name="linen",
        per_micro_batch=True,  # Batch normalisation sees the samples computed together.
    )
