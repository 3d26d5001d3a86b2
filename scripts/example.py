"""Trains as several processes, on one host or on many.

    whalejax launch --processes 2 scripts/example.py

A copy of it is a start for your own script; only the first call is special: it asks the
launcher or the cluster for the ranks. The plan is for the devices of all processes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


def loss_fn(model, batch):
    hidden = jnp.tanh(batch["x"] @ model["first"])
    return ((hidden @ model["second"] - batch["y"]) ** 2).mean()


def make_model(key):
    first, second = jax.random.split(key)
    return {
        "first": 0.1 * jax.random.normal(first, (64, 256)),
        "second": 0.1 * jax.random.normal(second, (256, 8)),
    }


def main() -> None:
    """Trains on noise, and prints the loss."""
    wh.init_distributed()
    model = jax.eval_shape(make_model, jax.random.key(0))
    noise = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    batch = {"x": noise, "y": np.ones((32, 8), "float32")}
    tx = optax.adam(1e-2)
    # CPU processes cannot be measured together, so they are described.
    on_cpu = jax.default_backend() == "cpu"
    cluster = f"cpu:{jax.device_count()}" if on_cpu else None
    plan = wh.plan(loss_fn, model, batch, optimizer=tx, cluster=cluster)
    step = wh.compile(plan, loss_fn, model, optimizer=tx)
    state = step.init(make_model, rng=jax.random.key(0))
    metrics = {}
    for _ in range(20):
        state, metrics = step(state, batch)
    if jax.process_index() == 0:
        loss = float(metrics["loss"])
        print(f"{jax.process_count()} processes, {plan.axis_sizes}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
