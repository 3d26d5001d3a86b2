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
from whalejax.state import adopt_state


pytestmark = pytest.mark.relaxed_promotion  # Adam's counts

RANDOM: Final = np.random.default_rng(0)
X: Final = RANDOM.normal(size=(16, 8)).astype(np.float32)
MODEL: Final = {
    "layers": jnp.asarray(0.3 * RANDOM.normal(size=(2, 8, 8)).astype(np.float32)),
    "head": jnp.asarray(RANDOM.normal(size=(8, 4)).astype(np.float32)),
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


@pytest.mark.full
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
        with pytest.raises(wh.WhaleError, match="donated to a step"):
            step.eval(before, X)
    assert int(state.step) == 4
    state, metrics = step(state, X)
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.sampled(1)
def test_a_traced_state_is_refused_with_what_to_do(step: Any) -> None:
    state = trained(step)
    for call in (step, step.eval):
        with pytest.raises(wh.PlanError, match="call it outside jax.jit, jax.grad"):
            jax.jit(call)(state, X)
    step(state, X)  # Nothing was donated.


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
        with pytest.raises(wh.WhaleError, match="have other shardings than") as told:
            other(state, X)
        assert "state = step.adopt(state)" in str(told.value)
        assert "state.params['layers'] has" in str(told.value)
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


@pytest.mark.full
def test_states_of_stages_apart_are_moved() -> None:
    model = {"first": MODEL["layers"][0], "head": MODEL["head"]}

    def compiled(**options: Any) -> Any:
        plan = wh.plan(apart, model, X, optimizer=TX, cluster="cpu:2", **options)
        devices = jax.devices()[:2]
        return wh.compile(plan, apart, model, optimizer=TX, devices=devices)

    one = compiled(mesh={"data": 2}, num_micro_batches=2)
    other = compiled(mesh={"stage": 2}, num_micro_batches=2)
    assert other.plan.stage_plans
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
        with pytest.raises(wh.WhaleError, match="another model or optimizer") as e:
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
            assert "donated to a step" in str(told.value)
            assert "restore a checkpoint" in str(told.value)
    assert not (tmp_path / "a").exists()
    for call in calls:
        with pytest.raises(wh.WhaleError, match="this state was donated to a step"):
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


def _ends(step: Any) -> dict[str, Any]:
    """States that no step of this layout can take, by what is to be said of them."""
    state, replace = step.init_from(MODEL), dataclasses.replace
    wide = {**MODEL, "head": jnp.ones((8, 6))}
    return {
        "state = step.adopt(state)": jax.device_put(state, jax.devices()[0]),
        "state.opt_state[0].mu['head'] is not there": replace(state, opt_state=None),
        "state.opt_state[0].count is not there": replace(
            state, opt_state=optax.sgd(0.1).init(MODEL)
        ),
        "state.params['more'] is float32[1]; expected not there": replace(
            state, params={**state.params, "more": jnp.ones(1)}
        ),
        "state.params['head'] is float32[8, 6]; expected float32[8, 4]": replace(
            state, params=wide
        ),
        "state.params['head'] is int32[8, 4]; expected float32": replace(
            state, params=jax.tree.map(lambda x: x.astype(int), state.params)
        ),
        "state.params['head'] is bfloat16[8, 4]; expected float32": replace(
            state, params=jax.tree.map(lambda x: x.astype("bfloat16"), state.params)
        ),
        "state.params['head'] is a str; expected float32": replace(
            state, params={**state.params, "head": "2"}
        ),
        "expected a jax.Array with values": step.abstract_state(),
    }


def test_parts_put_into_ones_own_state_are_compared(step: Any, tmp_path: Any) -> None:
    for text, state in _ends(step).items():
        with pytest.raises(wh.WhaleError) as told:
            step(state, X)
        assert text in str(told.value)
        read = "opt_state" not in text
        if read:
            with pytest.raises(wh.WhaleError):
                step.eval(state, X)
        if "adopt" not in text:  # a checkpoint may be of any layout
            with pytest.raises(wh.WhaleError):
                step.save(tmp_path / "a", state)
            with pytest.raises(wh.WhaleError):
                step.adopt(state)
    assert not (tmp_path / "a").exists()


def test_arrays_that_lie_nowhere_are_put_where_they_belong(step: Any) -> None:
    state = step.init_from(MODEL)
    loose = dataclasses.replace(
        state, step=jnp.int32(4), params=jax.tree.map(np.asarray, state.params)
    )
    expected = float(step.eval(state, X)["loss"])
    assert float(step.eval(loose, X)["loss"]) == expected
    after, _ = step(loose, X)
    assert int(after.step) == 5 and after.samples == 16


@pytest.mark.parametrize("samples", [-5, 2.5, "a", True])
def test_samples_that_are_no_number(step: Any, samples: Any, tmp_path: Any) -> None:
    state = dataclasses.replace(step.init_from(MODEL), samples=samples)
    for call in (
        lambda: step(state, X),
        lambda: step.adopt(state),
        lambda: step.save(tmp_path / "a", state),
    ):
        with pytest.raises(wh.WhaleError, match=r"state\.samples is"):
            call()
    assert not (tmp_path / "a").exists()


def test_samples_of_numpy_are_saved(step: Any, tmp_path: Any) -> None:
    state = dataclasses.replace(step.init_from(MODEL), samples=np.int64(8))
    step.save(tmp_path / "a", state)
    assert step.restore(tmp_path / "a").samples == 8


def test_a_state_without_an_origin_has_no_model(step: Any, tmp_path: Any) -> None:
    state = dataclasses.replace(step.init_from(MODEL), origin=None)
    with pytest.raises(wh.WhaleError, match="the origin of this state is None"):
        _ = state.model
    assert step.adopt(state).model["head"].shape == (8, 4)
    step.save(tmp_path / "a", state)
    assert step(state, X)[0].origin is step._origin


def test_layouts_are_compared_once(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = step(step.init_from(MODEL), X)[0]
    step.eval(state, X)
    monkeypatch.setattr(adopt_state, "_other_leaves", lambda *_: pytest.fail("again"))
    for _ in range(2):
        state, _ = step(state, X)
        step.eval(state, X)
