"""A multi-layer perceptron in plain JAX: parameters are a dictionary of arrays.

It needs no framework: the model is a pytree, and the loss is a function of it. It runs
on one device unchanged. In ``loss_fn`` nothing is marked, and the planner decides
everything. ``annotated_loss_fn`` has two more lines:

- ``with wh.replicate():`` around the hidden layers makes them data-parallel;
- ``with wh.split():`` around the last layer and the cross-entropy splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh
from whalejax.models.common.batches import Batch, default_batch_size, generator
from whalejax.models.common.layers import Array, cross_entropy
from whalejax.models.common.names import change, pick


Params: TypeAlias = dict[str, dict[str, Array]]

_HEAD: Final = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of an MLP.

    Attributes:
        inputs: Features of a sample.
        hidden: Width of each hidden layer.
        classes: Width of the last layer.
        annotated: Whether the job uses ``annotated_loss_fn``.
        param_dtype: Dtype of the parameters; inputs are cast to it.
    """

    inputs: int = 784
    hidden: tuple[int, ...] = (1024, 512)
    classes: int = 16
    annotated: bool = False
    param_dtype: str = "float32"


SIZES: Final[Mapping[str, MLPConfig]] = {
    "default": MLPConfig(),
    "test": MLPConfig(inputs=24, hidden=(320, 48), classes=40),
}


def make_model(config: MLPConfig, key: Array) -> Params:
    """Returns initial parameters: ``{"layer_0": {"w": ..., "b": ...}, ..., "head":
    ...}``.

    >>> sorted(make_model(SIZES["test"], jax.random.key(0)))
    ['head', 'layer_0', 'layer_1']
    """
    widths = (config.inputs, *config.hidden, config.classes)
    names = [f"layer_{i}" for i in range(len(config.hidden))] + [_HEAD]
    keys = jax.random.split(key, len(names))
    dtype = jnp.dtype(config.param_dtype)
    return {
        name: {
            "w": jax.nn.initializers.he_normal()(keys[i], widths[i : i + 2], dtype),
            "b": jnp.zeros((widths[i + 1],), dtype),
        }
        for i, name in enumerate(names)
    }


def loss_fn(params: Params, batch: Mapping[str, Any]) -> Array:
    """Computes the mean cross-entropy of the class, in nats.

    Args:
        params: Parameters of ``make_model``.
        batch: ``inputs`` ``float[batch, inputs]`` and ``labels`` ``int32[batch]``.

    >>> params = make_model(SIZES["test"], jax.random.key(0))
    >>> batch = {"inputs": jnp.ones((2, 24)), "labels": jnp.zeros(2, "int32")}
    >>> loss_fn(params, batch).shape
    ()
    """
    return _classify(params, _features(params, batch), batch)


def annotated_loss_fn(params: Params, batch: Mapping[str, Any]) -> Array:
    """Computes the loss with marks around the hidden layers and the head."""
    with wh.replicate():
        x = _features(params, batch)
    with wh.split():
        return _classify(params, x, batch)


def _features(params: Params, batch: Mapping[str, Any]) -> Array:
    x = jnp.asarray(batch["inputs"]).astype(params[_HEAD]["w"].dtype)
    for i in range(len(params) - 1):
        x = jax.nn.relu(_dense(params[f"layer_{i}"], x))
    return x


def _classify(params: Params, x: Array, batch: Mapping[str, Any]) -> Array:
    logits = _dense(params[_HEAD], x)
    return jnp.mean(cross_entropy(logits, jnp.asarray(batch["labels"])))


def _dense(layer: dict[str, Array], x: Array) -> Array:
    return x @ layer["w"] + layer["b"][None]


def job(
    size: str = "default",
    *,
    batch_size: int | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **changes: Any,
) -> wh.Job:
    """Returns a job: an MLP learns a fixed random linear classifier.

    Args:
        size: One of ``SIZES``.
        batch_size: Samples in a global batch; default: 128, or 16 at size ``test``.
        learning_rate: Learning rate of Adam.
        seed: Seed of the sequence of batches, and of the classifier.
        changes: Fields of ``MLPConfig``.

    Raises:
        WhaleError: Unknown size or field.

    >>> job("test").batch_at(0)["inputs"].shape
    (16, 24)
    """
    options = ("batch_size", "learning_rate", "seed")
    config = change(pick(size, SIZES, "MLP size"), changes, options=options)
    return wh.Job(
        loss_fn=annotated_loss_fn if config.annotated else loss_fn,
        make_model=lambda key: make_model(config, key),
        batch=lambda step, count: labelled_batch(config, step, count, seed=seed),
        optimizer=optax.adam(learning_rate),
        batch_size=default_batch_size(size, batch_size, 128),
        name="mlp" if size == "default" else f"mlp-{size}",
    )


def labelled_batch(config: MLPConfig, step: int, size: int, *, seed: int) -> Batch:
    """Returns normal inputs, each with the class that a fixed linear map ranks first.

    >>> labelled_batch(SIZES["test"], 0, 2, seed=0)["labels"].shape
    (2,)
    """
    # The classifier has a separate key, so that it is the same in every step.
    teacher = generator(seed + (1 << 32), 0).standard_normal(
        (config.inputs, config.classes), dtype=np.float32
    )
    inputs = generator(seed, step).standard_normal(
        (size, config.inputs), dtype=np.float32
    )
    labels = np.argmax(inputs @ teacher, axis=1).astype(np.int32)
    return {"inputs": inputs, "labels": labels}
