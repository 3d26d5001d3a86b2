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
        # Two programs: the first is that of ``loss_and_gradients``, compiled once.
        value_and_grad = jax.jit(jax.value_and_grad(self.loss))

        @jax.jit
        def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        params, state = self.params, self.optimizer.init(self.params)
        found: list[float] = []
        for batch in batches:
            value, gradients = value_and_grad(params, batch)
            params, state = update(params, state, gradients)
            found.append(float(value))
        return found


def take_apart(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The trained arrays of a model, and what makes a model of such arrays."""
    if not isinstance(model, nnx.Module):
        return model, lambda params: params
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, rest, copy=True)


def loss_of(job: wh.Job, model: Any, batch: Mapping[str, Any]) -> jax.Array:
    """The job's loss as a scalar; a loss that draws is given a fixed key."""
    rng = (jax.random.key(1),) if job.name.startswith("bert") else ()
    result = normalise(job.loss_fn(model, batch, *rng))
    value: jax.Array = result.total / result.weight
    return value


def place(job: wh.Job) -> OneDevice:
    """The job on one device."""
    params, rebuilt = take_apart(nnx.jit(job.make_model)(jax.random.key(0)))
    return OneDevice(
        params=params,
        loss=lambda params, batch: loss_of(job, rebuilt(params), batch),
        optimizer=job.optimizer,
    )


def trace(job: wh.Job, *, cast_to: str | None = None) -> Any:
    """The jaxpr of loss and gradients, and their shapes; nothing is run.

    Args:
        job: what to trace.
        cast_to: the dtype that the loss sees the parameters in, if another.

    Returns:
        The jaxpr, and the shapes of (loss, parameters, gradients).
    """
    model = nnx.eval_shape(lambda: job.make_model(jax.random.key(0)))

    def whole(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        params, rebuilt = take_apart(model)
        if cast_to is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(cast_to), params)
        loss, gradients = jax.value_and_grad(
            lambda params: loss_of(job, rebuilt(params), batch)
        )(params)
        return loss, params, gradients

    return jax.make_jaxpr(whole, return_shape=True)(model, job.batch_at(0))


@pytest.fixture(scope="session")
def on_one_device() -> Callable[[wh.Job], OneDevice]:
    """Makes a job a plain function of its trained arrays."""
    return place


@pytest.fixture(scope="session")
def traced() -> Callable[..., Any]:
    """Traces a job, from its key to its gradients."""
    return trace
