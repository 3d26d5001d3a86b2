"""Steps of one layout take each other's states, and move those of another one."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh


pytestmark = pytest.mark.relaxed_promotion  # Adam's counts

X: Final = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
KEYS: Final = jax.random.split(jax.random.key(0), 2)
MODEL: Final = {
    "layers": jax.random.normal(KEYS[0], (2, 8, 8)) * 0.3,
    "head": jax.random.normal(KEYS[1], (8, 4)),
}
TX: Final = optax.adam(0.01)


def loss(model: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, model["layers"])
    return ((h @ model["head"]) ** 2).mean()


def absolute(model: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, model["layers"])
    return jnp.abs(h @ model["head"]).mean()


def step_of(loss_fn: Any = loss, x: Any = X, tx: Any = TX, **options: Any) -> Any:
    options = {"cluster": "cpu:2", "num_micro_batches": 1, **options}
    if "shares" not in options:
        options = {"mesh": {"data": 2}, **options}
    plan = wh.plan(loss_fn, MODEL, x, optimizer=tx, **options)
    devices = jax.devices()[: plan.num_devices]
    return wh.compile(plan, loss_fn, MODEL, optimizer=tx, devices=devices)


@pytest.fixture(scope="module")
def step() -> Any:
    return step_of()


def trained(step: Any) -> Any:
    return step(step.init_from(MODEL), X)[0]


def same(a: Any, b: Any) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return bool(np.array_equal(_raw(x), _raw(y)))

    return all(jax.tree.leaves(jax.tree.map(equal, _parts(a), _parts(b))))


def _parts(state: Any) -> Any:
    return state.params, state.opt_state, state.step, state.rng


def _raw(x: Any) -> Any:
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def test_steps_of_one_layout_take_each_others_states(step: Any) -> None:
    state = trained(step)
    expected = step.eval(state, X)["loss"]
    alone = step_of(tx=None)  # evaluates, and knows of no optimizer
    assert float(alone.eval(state, X)["loss"]) == float(expected)
    for other, x in (
        (step_of(), X),
        (step_of(absolute), X),
        (step_of(x=X[:8]), X[:8]),
    ):
        before = state
        state, _ = other(state, x)
        with pytest.raises(wh.WhaleError, match="consumed by a step"):
            step.eval(before, X)
    assert int(state.step) == 4
    state, metrics = step(state, X)
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"fsdp": 2}},
        {"mesh": {"data": 1}, "cluster": "cpu:1"},
        {"mesh": {"stage": 2}, "num_micro_batches": 2},
        {"shares": (3, 1), "num_micro_batches": 4},
    ],
    ids=["fsdp", "one device", "lockstep", "unlike shares"],
)
def test_other_layouts_are_moved(step: Any, options: dict[str, Any]) -> None:
    state = trained(step)
    other = step_of(**options)
    if "shares" not in options:  # whose copies lie as those of data parallelism
        with pytest.raises(wh.WhaleError, match="lie otherwise than this step") as told:
            other(state, X)
        assert "state = step.adopt(state)" in str(told.value)
        assert "state.params['layers'] lies as" in str(told.value)
    moved = other.adopt(state)
    assert same(moved, state) and moved.origin is other._origin
    moved, there = other(moved, X)
    kept, here = step(state, X)  # its buffers were not donated with the copy's
    assert float(there["loss"]) == pytest.approx(float(here["loss"]), rel=1e-5)
    back = step.adopt(moved)
    np.testing.assert_allclose(
        back.params["head"], kept.params["head"], rtol=1e-4, atol=1e-5
    )


def apart(model: Any, x: Any) -> Any:
    h = x + jnp.tanh(x @ model["first"])
    return ((h @ model["head"]) ** 2).mean()


def test_states_of_stages_apart_are_moved() -> None:
    model = {"first": MODEL["layers"][0], "head": MODEL["head"]}

    def compiled(**options: Any) -> Any:
        plan = wh.plan(apart, model, X, optimizer=TX, cluster="cpu:2", **options)
        devices = jax.devices()[:2]
        return wh.compile(plan, apart, model, optimizer=TX, devices=devices)

    one = compiled(mesh={"data": 2}, num_micro_batches=2)
    other = compiled(mesh={"stage": 2}, num_micro_batches=2)
    assert other.plan.apart
    state = one(one.init_from(model), X)[0]
    moved = other.adopt(state)
    assert same(moved, state)
    moved, _ = other(moved, X)
    state, _ = one(state, X)
    back = one.adopt(moved)
    np.testing.assert_allclose(back.params["first"], state.params["first"], rtol=1e-4)
    assert float(one.eval(back, X)["loss"]) > 0


def test_what_is_no_state_of_this_model_is_refused(step: Any) -> None:
    state = trained(step)
    momentum = step_of(tx=optax.sgd(0.1, momentum=0.9))
    for call in (momentum.adopt, lambda state: momentum(state, X)):
        with pytest.raises(wh.WhaleError, match="another model's or optimizer's") as e:
            call(state)
        assert "state.opt_state[0].trace['head'] is not there; expected" in str(e.value)
        assert "step.init_from(state.model)" in str(e.value)
    evaluated = step_of(tx=None)
    assert float(momentum.eval(state, X)["loss"]) == float(
        evaluated.eval(evaluated.adopt(state), X)["loss"]
    )
    for wrong in (None, {}, state.params):
        for call in (step.adopt, lambda x: step.eval(x, X), lambda x: step(x, X)):
            with pytest.raises(wh.WhaleError, match="expected the TrainState that"):
                call(wrong)


def test_consumed_arrays_are_refused_in_words(step: Any, tmp_path: Any) -> None:
    old = step.init_from(MODEL)
    new, _ = step(old, X)
    mixed = [
        dataclasses.replace(new, params=old.params),
        dataclasses.replace(new, opt_state=old.opt_state),
        dataclasses.replace(old, step=new.step),
    ]
    calls = [
        lambda state: step(state, X),
        lambda state: step.eval(state, X),
        lambda state: state.model,
        step.adopt,
        lambda state: step.save(tmp_path / "a", state),
    ]
    for state in mixed:
        for call in calls:
            with pytest.raises(wh.WhaleError, match="arrays of this state") as told:
                call(state)
            assert "were consumed by a step" in str(told.value)
            assert "restore a checkpoint" in str(told.value)
    assert not (tmp_path / "a").exists()
    for call in calls:
        with pytest.raises(wh.WhaleError, match="this state was consumed by a step"):
            call(old)
    # A state that was put together of whole parts goes on.
    step(dataclasses.replace(new, step=jnp.int32(7)), X)


def test_one_array_in_two_places_is_refused(step: Any) -> None:
    state = step.init_from(MODEL)
    twice = dataclasses.replace(state, params={**state.params})
    mu = twice.opt_state[0]._replace(mu=twice.params)
    twice = dataclasses.replace(twice, opt_state=(mu, *twice.opt_state[1:]))
    with pytest.raises(wh.WhaleError, match="are one array, and a step reuses") as told:
        step(twice, X)
    assert "state.params['head'] and state.opt_state[0].mu['head']" in str(told.value)
    assert float(step.eval(twice, X)["loss"]) > 0
    step(state, X)
