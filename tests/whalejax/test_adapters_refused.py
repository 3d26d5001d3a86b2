"""States of training that are given as a model are refused, by what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import whalejax as wh
from whalejax.adapters.base import adapt


PARAMS = {"w": jnp.ones((3, 2))}
TX = optax.adam(0.1)


class WithStatistics(TrainState):
    """A state with what its model updates itself, as Flax's examples have it."""

    batch_stats: Any


class Momentum(NamedTuple):
    """An optimizer's state in the user's own module that says nothing."""

    trace: Any


class MomentumState(NamedTuple):
    """The same, named as such."""

    trace: Any


class Holder(nnx.Module):
    """A module that keeps its optimizer."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.tuner = nnx.Optimizer(self.layer, TX, wrt=nnx.Param)


def loss(model: Any, batch: Any) -> Any:
    return jnp.float32(0.0)


def state(kind: type[TrainState] = TrainState, **more: Any) -> TrainState:
    made: TrainState = kind.create(
        apply_fn=nn.Dense(2).apply, params=PARAMS, tx=TX, **more
    )
    return made


def refused(model: Any) -> str:
    with pytest.raises(wh.WhaleError) as caught:
        adapt(model, loss)
    return str(caught.value)


def test_a_linen_train_state() -> None:
    assert refused(state()) == (
        "model: 1 problem\n"
        "  1. it is a TrainState with an optimizer state, which would be trained as "
        "if it were the model's. Give model=state.params, or {'params': state.params} "
        "and its other collections beside that, and optimizer=state.tx"
    )


def test_it_is_refused_wherever_it_stands_and_abstract_too() -> None:
    shapes = jax.eval_shape(lambda: state(WithStatistics, batch_stats=PARAMS))
    assert "it is a WithStatistics with an optimizer state" in refused(shapes)
    assert "  1. state: it is a TrainState" in refused({"state": state()})
    with pytest.raises(wh.WhaleError, match=r"Give model=state\.params"):
        wh.plan(loss, state(), jnp.ones((8, 3)), cluster="h100:8")


def test_an_nnx_optimizer() -> None:
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    text = refused(nnx.Optimizer(layer, TX, wrt=nnx.Param))
    assert "it is the Optimizer around a module" in text
    assert "Give the module itself as model, and optimizer=optimizer.tx" in text
    both = refused((layer, nnx.Optimizer(layer, TX, wrt=nnx.Param)))
    assert "  1. 1: it is the Optimizer" in both
    assert "  1. tuner: it is the Optimizer" in refused(Holder())


def test_states_of_optax() -> None:
    text = refused((PARAMS, TX.init(PARAMS)))
    assert "  1. 1.0: it is ScaleByAdamState, an optimizer's state, whose" in text
    assert "Give the parameters alone, and the optimizer as optimizer=" in text
    assert "it is TraceState" in refused({"opt": optax.trace(0.9).init(PARAMS)})
    chain = optax.chain(optax.clip(1.0), optax.adam(0.1))
    assert "it is EmptyState" in refused(chain.init(PARAMS))


def test_a_state_of_the_users_own_optimizer() -> None:
    assert "it is MomentumState" in refused((PARAMS, MomentumState(trace=PARAMS)))
    # A name alone says nothing: this may be a model.
    assert adapt(Momentum(trace=PARAMS), loss).param_paths == ("trace.w",)


def test_models_are_still_models() -> None:
    fields = {"params": {"opt_state": jnp.ones(3), "tx": jnp.ones(2)}}
    assert adapt(fields, loss).kind == "linen"
    assert adapt(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), loss).kind == "nnx"
    assert adapt(state().params, loss).param_paths == ("w",)


class Positions(nnx.Module):
    """A linear layer, beside an array in some place."""

    def __init__(self, rngs: nnx.Rngs, place: str) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        array = jnp.arange(8.0)
        if place == "attribute":
            self.rates = array
        elif place == "data":
            self.rates = nnx.data(array)
        elif place == "variable":
            self.rates = nnx.Variable(array)
        elif place == "NumPy":
            self.rates = np.arange(8.0, dtype=np.float32)
        elif place == "tuple":
            self.rates = (array, array)
        elif place == "function":
            self.rates = lambda: array
        self.place = place

    def __call__(self, x: Any) -> Any:
        rates: Any = self.rates
        rates = rates() if self.place == "function" else rates
        rates = rates[0] if self.place == "tuple" else rates
        return self.linear(x * jnp.asarray(rates)[None])


class Around(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, place: str) -> None:
        if place == "norm":
            self.inner: Any = nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        else:
            self.inner = Positions(rngs, place)

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


def squared(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize(
    ("place", "holds"),
    [
        ("attribute", "inner.rates is"),
        ("tuple", "inner.rates (tuple) holds"),
        ("function", "inner.rates (function) holds"),
        ("norm", "inner.scales (dict) holds"),
    ],
)
def test_arrays_of_which_a_described_module_has_no_values(
    place: str, holds: str
) -> None:
    model = nnx.eval_shape(lambda: Around(nnx.Rngs(0), place))
    with pytest.raises(wh.WhaleError) as caught:
        adapt(model, squared)
    assert str(caught.value) == (
        f"model: 1 problem\n  1. {holds} a plain array, float32[8], of which "
        "nnx.eval_shape leaves no value. Give the module itself, built without "
        "nnx.eval_shape; or make it a variable, as in nnx.Variable(jnp.arange(8.0)), "
        "or a NumPy array"
    )


@pytest.mark.parametrize("place", ["data", "variable", "NumPy"])
def test_arrays_that_a_described_module_describes(place: str) -> None:
    model = nnx.eval_shape(lambda: Around(nnx.Rngs(0), place))
    assert adapt(model, squared).param_paths == (
        *("inner.linear.bias", "inner.linear.kernel"),
    )
