"""A script of members that are priced as if each had a GPU, with batches of JAX's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import whalejax as wh
from whalejax.elastic.gradient_reduction import reduction_agreement
from whalejax.meshes import cluster


STEPS = 4
WIDTH = 512
"""So that messages take longer than collectives."""


def make_model(key: Any) -> dict[str, Any]:
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5}


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["x"] @ model["w"]) - batch["y"]) ** 2)


def batch(step: int, size: int) -> dict[str, Any]:
    a, b = jax.random.split(jax.random.key(step))
    shape = (size, WIDTH)
    return {"x": jax.random.normal(a, shape), "y": jax.random.normal(b, shape)}


def job() -> wh.Job:
    return wh.Job(loss_fn, make_model, batch, optax.sgd(0.1), batch_size=16)


def losses() -> list[float]:
    """Of all steps; of a run where a launcher has started this process."""
    return [
        float(metrics["loss"])
        for _, metrics in wh.train_elastic(
            job(), steps=STEPS, num_micro_batches=8, copy_every=0
        )
    ]


if __name__ == "__main__":
    reduction_agreement.own_devices = lambda: cluster("h100:1")
    losses()
