"""States of training that are given as a model are refused, by what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
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
