"""Models that others wrote, as they come from their packages, and what they must do.

Each is planned, compiled on eight devices and stepped twice; losses and parameters are
compared with those of plain JAX on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import whalejax as wh


STEPS: Final = 2
TOLERANCE: Final = 2e-4
"""Of a parameter's change over two steps in float32: these models normalise, and
sums over unlike numbers of devices round differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with its loss, ready to be planned.

    Attributes:
        loss_fn: (model, batch) to a scalar.
        model: an NNX module or a pytree of arrays, initialised.
        batch: the global batch; eight samples, or a multiple.
        options: of ``wh.plan``, beyond what every model is given.
    """

    loss_fn: Callable[[Any, Any], Any]
    model: Any
    batch: Any
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One public model.

    Attributes:
        name: what it is.
        family: the package or kind; of most, one runs by default.
        make: builds it at a size for tests.
    """

    name: str
    family: str
    make: Callable[[], Built]


MODELS: Final[dict[str, Foreign]] = {}


def foreign(family: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register what a function builds under the function's name."""

    def register(make: Callable[[], Built]) -> Callable[[], Built]:
        MODELS[make.__name__] = Foreign(name=make.__name__, family=family, make=make)
        return make

    return register


def key(seed: int = 0) -> jax.Array:
    """A random key."""
    return jax.random.key(seed)


def tokens(samples: int, length: int, below: int, seed: int = 1) -> jax.Array:
    """Random token ids, (samples, length), none of them 0."""
    return jax.random.randint(key(seed), (samples, length), 1, below)


def images(samples: int, *shape: int, seed: int = 2) -> jax.Array:
    """Random numbers, (samples, *shape)."""
    return jax.random.normal(key(seed), (samples, *shape), jnp.float32)


def optimizer() -> optax.GradientTransformation:
    """Gradient descent with momentum: the second step depends on the first."""
    return optax.sgd(0.01, momentum=0.9)


def one_device(built: Built) -> tuple[list[float], list[np.ndarray]]:
    """Losses of two steps in plain JAX, and the parameters after them."""
    parts = None
    trained, loss_fn = built.model, built.loss_fn
    if isinstance(built.model, nnx.Module):
        graph, trained, rest = nnx.split(built.model, nnx.Param, ...)
        parts = graph, rest

        def of_state(params: Any, rest: Any, batch: Any) -> Any:
            module = nnx.merge(graph, params, rest, copy=True)
            loss = built.loss_fn(module, batch)
            return loss, nnx.state(module, nnx.Not(nnx.Param))

        loss_fn = of_state
    tx = optimizer()
    state = tx.init(trained)
    losses = []

    @jax.jit
    def step(params: Any, state: Any, rest: Any) -> Any:
        if parts is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, built.batch)
        else:
            (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                params, rest, built.batch
            )
        updates, state = tx.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state, rest

    rest = None if parts is None else parts[1]
    for _ in range(STEPS):
        loss, trained, state, rest = step(trained, state, rest)
        losses.append(float(loss))
    return losses, [np.asarray(x) for x in jax.tree.leaves(trained)]


def on_eight(built: Built) -> tuple[wh.Plan, list[float], list[np.ndarray]]:
    """The same two steps, planned and compiled for eight devices."""
    tx = optimizer()
    options = {"num_micro_batches": 1, "cluster": "cpu:8", **built.options}
    plan = wh.plan(built.loss_fn, built.model, built.batch, optimizer=tx, **options)
    step = wh.compile(
        plan,
        built.loss_fn,
        built.model,
        optimizer=tx,
        batch=built.batch,
        batch_axes=built.options.get("batch_axes", 0),
    )
    state = step.init_from(built.model)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, built.batch)
        losses.append(float(metrics["loss"]))
    model = state.model
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    return plan, losses, [np.asarray(x) for x in jax.tree.leaves(model)]


def check(built: Built) -> wh.Plan:
    """Hold two steps on eight devices against two on one."""
    model = built.model
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    before = [np.array(x) for x in jax.tree.leaves(model)]
    expected, wanted = one_device(built)
    plan, losses, found = on_eight(built)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    changes = [np.linalg.norm(w - b) for w, b in zip(wanted, before, strict=True)]
    floor = 1e-3 * float(np.sqrt(np.mean(np.square(changes))))
    for b, change, x, y in zip(before, changes, found, wanted, strict=True):
        rounding = STEPS * np.finfo(np.float32).eps * float(np.linalg.norm(b))
        allowed = TOLERANCE * max(float(change), floor) + rounding
        assert np.linalg.norm(x - y) <= allowed
    assert any(change > 0 for change in changes)
    return plan
