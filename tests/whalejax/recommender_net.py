"""A recommender whose dense part is a scan over layers with attention."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

import whalejax as wh


SAMPLES: Final = 32
EVENTS: Final = 8
WIDTH: Final = 16
LAYERS: Final = 4
TABLES: Final = {"user": (37, WIDTH), "item": (29, WIDTH)}
ROWS: Final = wh.sparse_optimizer("adagrad", 0.05)
OPTIMIZER: Final = optax.sgd(0.05, momentum=0.9)


def loss(net: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Histories attend to themselves in every layer; users enter after the layers."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        q, k, v = (x @ weights[name] for name in "qkv")
        x = x + jax.nn.softmax(q @ k.transpose(0, 2, 1) / 4) @ v
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    x, _ = jax.lax.scan(layer, net["item"][batch["items"]], net["layers"])
    x = x.mean(1) * net["user"][batch["user"]]
    error = x @ net["out"] - batch["label"]
    return jnp.mean(error**2), {"largest": jnp.max(error), "rows": error}


def make_net() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) * 0.2, np.float32)

    shapes = {name: (WIDTH, WIDTH) for name in "qkv"}
    shapes |= {"up": (WIDTH, 64), "down": (64, WIDTH)}
    layers = {name: array(LAYERS, *shape) for name, shape in shapes.items()}
    tables = {name: array(*shape) for name, shape in TABLES.items()}
    return {**tables, "layers": layers, "out": array(WIDTH)}


def make_batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step + 1)
    return {
        "user": random.integers(0, 37, SAMPLES).astype(np.int32),
        "items": random.integers(0, 29, (SAMPLES, EVENTS)).astype(np.int32),
        "label": random.standard_normal(SAMPLES).astype(np.float32),
    }


def on_one_device(
    ranks: int = 1, **options: Any
) -> tuple[list[float], dict[str, Any], list[dict[str, Any]]]:
    """Losses, model and metrics of ordinary steps, with Adagrad of whole tables."""
    net = make_net()
    labels = {name: "rows" if name in TABLES else "dense" for name in net}
    both = {"rows": optax.adagrad(0.05), "dense": OPTIMIZER}
    optimizer = optax.multi_transform(both, labels)
    given = {"optimizer": optimizer, "cluster": f"cpu:{ranks}", **options}
    plan = wh.plan(loss, net, make_batch(0), **given)
    devices = jax.devices()[:ranks]
    step = wh.compile(plan, loss, net, optimizer=optimizer, devices=devices)
    state, losses, metrics = step.init_from(net), [], []
    for number in range(3):
        state, found = step(state, make_batch(number))
        losses.append(float(found["loss"]))
        metrics.append(jax.tree.map(np.asarray, found))
    return losses, jax.tree.map(np.asarray, state.model), metrics


def make_step(cluster: str, **options: Any) -> tuple[wh.Plan, Any]:
    net, count = make_net(), int(cluster.rpartition(":")[2])
    given = {"tables": ROWS, "optimizer": OPTIMIZER, "cluster": cluster, **options}
    plan = wh.plan(loss, net, make_batch(0), **given)
    devices = jax.devices()[:count]
    return plan, wh.compile(plan, loss, net, optimizer=OPTIMIZER, devices=devices)


def check_equal(step: Any, limit: float, **options: Any) -> None:
    """Compares three steps, their metrics and evaluations with one device's."""
    losses, expected, reported = on_one_device(**options)
    state = step.init_from(make_net())
    for number, value in enumerate(losses):
        batch = make_batch(number)
        found = float(step.eval(state, batch)["loss"])
        np.testing.assert_allclose(found, value, rtol=limit)
        state, metrics = step(state, batch)
        for name, one in reported[number].items():
            np.testing.assert_allclose(metrics[name], one, rtol=0, atol=10 * limit)
    model = step.model(state)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=10 * limit),
        model,
        expected,
    )
