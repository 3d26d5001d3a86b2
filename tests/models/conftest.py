"""What the tests of the models share: a job's loss and gradients on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
import whalejax.models as models
from whalejax.user_code.losses import normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice:
    """A model as a plain function of its trained arrays, without any plan.

    Attributes:
        params: the trained arrays, as a pytree.
        value_and_grad: compiled, of ``(params, batch)``.
    """

    params: Any
    value_and_grad: Callable[[Any, Any], tuple[jax.Array, Any]]

    def loss_and_gradients(
        self, batch: Any
    ) -> tuple[float, list[np.ndarray[Any, Any]]]:
        """The loss and every gradient leaf of one batch."""
        value, gradients = self.value_and_grad(self.params, batch)
        return float(value), [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]

    def losses(self, batches: list[Any], optimizer: Any) -> list[float]:
        """The loss of each batch, with a step of the optimizer after it."""

        @jax.jit
        def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        params, state = self.params, jax.jit(optimizer.init)(self.params)
        found: list[float] = []
        for batch in batches:
            value, gradients = self.value_and_grad(params, batch)
            params, state = update(params, state, gradients)
            found.append(float(value))
        return found


def fast_key(seed: int) -> jax.Array:
    """A key whose numbers compile in a fraction of the default generator's time."""
    return jax.random.key(seed, impl="rbg")


def take_apart(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The trained arrays of a model, and what makes a model of such arrays."""
    if not isinstance(model, nnx.Module):
        return model, lambda params: params
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, rest, copy=True)


def loss_of(job: wh.Job, model: Any, batch: Mapping[str, Any]) -> jax.Array:
    """The job's loss as a scalar; a loss that draws is given a fixed key."""
    draws = ("bert", "gnmt", "m6", "t5", "vgg")
    rng = (fast_key(1),) if job.name.startswith(draws) else ()
    result = normalise(job.loss_fn(model, batch, *rng))
    value: jax.Array = result.total / result.weight
    return value


@functools.cache
def place(name: str, **overrides: Any) -> OneDevice:
    """A reference model on one device; asked again, the same one."""
    job = models.job(name, **overrides)
    params, rebuilt = take_apart(nnx.jit(job.make_model)(fast_key(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_of(job, rebuilt(params), batch)

    return OneDevice(params=params, value_and_grad=jax.jit(jax.value_and_grad(loss)))


def differentiate(
    job: wh.Job, *, cast_to: str | None = None
) -> tuple[Callable[[Any, Any], tuple[Any, Any, Any]], Any]:
    """The function (model, batch) → (loss, parameters, gradients), to be traced.

    Args:
        job: whose loss.
        cast_to: the dtype that the loss sees the parameters in, if another.

    Returns:
        The function, and an abstract model and a batch to trace it with.
    """

    def whole(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        params, rebuilt = take_apart(model)
        if cast_to is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(cast_to), params)
        loss, gradients = jax.value_and_grad(
            lambda params: loss_of(job, rebuilt(params), batch)
        )(params)
        return loss, params, gradients

    abstract = nnx.eval_shape(lambda: job.make_model(fast_key(0)))
    return whole, (abstract, job.batch_at(0))


@pytest.fixture(scope="session")
def on_one_device() -> Callable[..., OneDevice]:
    """Makes a reference model a plain function of its trained arrays."""
    return place


@pytest.fixture(scope="session")
def differentiated() -> Callable[..., Any]:
    """A job's loss and gradients as a function to be traced without running it."""
    return differentiate
