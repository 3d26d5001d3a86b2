"""What the tests of the models share: a job's loss and gradients on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from whalejax.losses import normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice:
    """A job as a plain function of its trained arrays, without any plan.

    Attributes:
        params: the trained arrays, as a pytree.
        loss: ``loss(params, batch)``, a scalar.
        optimizer: the job's own.
    """

    params: Any
    loss: Callable[[Any, Any], jax.Array]
    optimizer: Any

    def loss_and_gradients(
        self, batch: Any
    ) -> tuple[float, list[np.ndarray[Any, Any]]]:
        """The loss and every gradient leaf of one batch."""
        value, gradients = jax.jit(jax.value_and_grad(self.loss))(self.params, batch)
        return float(value), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]

    def losses(self, batches: list[Any]) -> list[float]:
        """The loss of each batch, with a step of the optimizer after it."""

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            value, gradients = jax.value_and_grad(self.loss)(params, batch)
            updates, state = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        params, state = self.params, self.optimizer.init(self.params)
        found: list[float] = []
        for batch in batches:
            params, state, value = step(params, state, batch)
            found.append(float(value))
        return found


def place(job: wh.Job, *, seed: int = 0) -> OneDevice:
    """The job on one device, its model made from a seed."""
    model = job.make_model(jax.random.key(seed))
    rng = (jax.random.key(seed + 1),) if job.name.startswith("bert") else ()
    if isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def rebuilt(params: Any) -> Any:
            return nnx.merge(graph, params, rest, copy=True)
    else:
        params = model

        def rebuilt(params: Any) -> Any:
            return params

    def loss(params: Any, batch: Mapping[str, Any]) -> jax.Array:
        result = normalise(job.loss_fn(rebuilt(params), batch, *rng))
        value: jax.Array = result.total / result.weight
        return value

    return OneDevice(params=params, loss=loss, optimizer=job.optimizer)


@pytest.fixture(scope="session")
def on_one_device() -> Callable[..., OneDevice]:
    """Makes a job a plain function of its trained arrays."""
    return place
