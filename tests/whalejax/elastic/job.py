"""A small job whose committed samples can be counted: metrics hold their numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


SIZE = 16
WIDTH = 8


def make_model(key: Any) -> dict[str, Any]:
    a, b = jax.random.split(key)
    return {
        "w": jax.random.normal(a, (WIDTH, 16), dtype=float) * 0.3,
        "v": jax.random.normal(b, (16, 2), dtype=float) * 0.3,
    }


def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["w"])
    # Random keys must not depend on who runs a micro-batch.
    kept = jax.random.bernoulli(rng, 0.9, hidden.shape)
    error = (hidden * kept) @ model["v"] - batch["y"]
    return jnp.mean(error**2), wh.Aux(samples={"number": batch["number"]})


def batch(step: int, size: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    dtype = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    return {
        "x": drawn.normal(size=(size, WIDTH)).astype(dtype),
        "y": drawn.normal(size=(size, 2)).astype(dtype),
        "number": np.arange(step * size, (step + 1) * size, dtype=np.int32),
    }


def make() -> wh.Job:
    return wh.Job(loss_fn, make_model, batch, optax.adam(1e-2), batch_size=SIZE)
