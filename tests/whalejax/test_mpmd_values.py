"""Stages hold, hand on and report values of every kind, as one device does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import FLOAT64_TOLERANCE, check, compiled, on_one_device
from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)


WIDTH = 8


def batch(step: int, count: int) -> Any:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(count, WIDTH)) for name in ("x", "y")}


def make(key: Any) -> Any:
    weights = {
        name: jax.random.normal(k, (WIDTH, WIDTH)) * 0.3
        for name, k in zip("abc", jax.random.split(key, 3), strict=True)
    }
    numbers = {"first": 1.1, "second": 0.9, "told": 0.5}
    return {**weights, **{name: jnp.asarray(x) for name, x in numbers.items()}}


def loss(model: Any, batch: Any) -> Any:
    """Two parameters without dimensions, and one that is only reported."""
    h = jnp.tanh(batch["x"] @ model["a"]) * model["first"]
    h = jnp.tanh(h @ model["b"]) * model["second"] + model["first"]
    h = (h @ model["c"]) * model["second"]
    penalty = 0.01 * sum((model[name] ** 2).sum() for name in "abc")
    metrics = {"told": model["told"], "size": jnp.abs(h).mean()}
    return ((h - batch["y"]) ** 2).mean() + penalty, wh.Aux(metrics=metrics)


def job() -> wh.Job:
    return wh.Job(loss, make, batch, optax.sgd(0.1), batch_size=16)


def runner_of(step: Any) -> StageProgramsExecutor:
    runner = step._runner
    assert isinstance(runner, StageProgramsExecutor)
    return runner


@pytest.mark.smoke
def test_numbers_as_parameters_and_what_is_only_reported() -> None:
    with jax.enable_x64(True):
        found = check(on_one_device(job(), 4), steps=2, devices=3, mesh={"stage": 3})
    assert found.error <= FLOAT64_TOLERANCE
    # The penalty on all parameters brings none of them to the last stage.
    read = [site.place.params for site in runner_of(found.step).sites]
    paths = found.step.adapter.param_paths
    weights = [[paths[n] for n in place if paths[n] in "abc"] for place in read]
    assert weights == [["a"], ["b"], ["c"]]


def twice() -> optax.GradientTransformation:
    """Momentum whose state holds the same value under two names, and reads both."""

    def init(params: Any) -> Any:
        return {name: jax.tree.map(jnp.zeros_like, params) for name in "ab"}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        new = jax.tree.map(
            lambda a, b, g: 0.5 * a + 0.4 * b + g, state["a"], state["b"], updates
        )
        return jax.tree.map(lambda x: -0.1 * x, new), {"a": new, "b": new}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("inner", "optimizer"),
    [
        pytest.param({}, twice(), marks=pytest.mark.full),
        pytest.param({"fsdp": 2}, twice(), marks=pytest.mark.full),
        pytest.param(
            {"fsdp": 2},
            optax.adafactor(0.1, min_dim_size_to_factor=4),
            marks=pytest.mark.relaxed_promotion,
        ),
    ],
)
def test_a_state_of_another_kind_or_shape(
    inner: dict[str, int], optimizer: optax.GradientTransformation
) -> None:
    """One holds a value twice, one means over rows and columns of its squares."""
    with jax.enable_x64(True):
        one = job()
        model = make(jax.random.key(0))
        params = []
        for mesh in ({"stage": 2, **inner}, {}):
            step = compiled(
                one,
                model,
                devices=int(np.prod([*mesh.values()])),
                mesh=mesh,
                optimizer=optimizer,
                num_micro_batches=2,
            )
            state = step.init_from(model)
            for index in range(3):
                state, _ = step(state, batch(index, 16))
            params.append(jax.tree.leaves(state.params))
            held = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
            part = int(np.prod([*inner.values()])) if mesh else 1
            assert {len(x.sharding.device_set) for x in held} == {part}
        for x, y in zip(*params, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-12)


def test_a_marked_stage_looks_up_and_hands_on_what_it_finds() -> None:
    def looked_up(model: Any, tokens: Any) -> Any:
        with wh.pipeline(num_micro_batches=2):
            with wh.stage():
                hidden = model["table"][tokens]
            with wh.stage():
                wide = jnp.tanh(hidden @ model["a"])
            with wh.stage():
                return ((wide @ model["b"] + hidden) ** 2).mean()

    def tables(key: Any) -> Any:
        table = jax.random.normal(key, (40, WIDTH))
        return {"table": table, **{k: make(key)[k] for k in "ab"}}

    with jax.enable_x64(True):
        tokens = wh.Job(
            looked_up, tables, lambda i, n: np.arange(n) % 40, optax.sgd(0.1), 16
        )
        found = check(on_one_device(tokens, 2), devices=3)
    assert found.error <= FLOAT64_TOLERANCE
    read = [site.place.params for site in runner_of(found.step).sites]
    paths = found.step.adapter.param_paths
    assert [[paths[n] for n in place] for place in read] == [["table"], ["a"], ["b"]]


def test_a_marked_stage_without_parameters() -> None:
    def scored(model: Any, batch: Any) -> Any:
        with wh.pipeline(num_micro_batches=2):
            with wh.stage():
                h = jnp.tanh(batch["x"] @ model["a"])
            with wh.stage():
                return ((h - batch["y"]) ** 2).mean()

    with jax.enable_x64(True):
        alone = wh.Job(scored, make, batch, optax.sgd(0.1), batch_size=16)
        found = check(on_one_device(alone, 2), devices=4)
    assert found.error <= FLOAT64_TOLERANCE
    read = [site.place.params for site in runner_of(found.step).sites]
    assert [len(place) for place in read] == [1, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_a_model_says_while_it_runs_is_said_once(schedule: str) -> None:
    said: list[float] = []

    def talking(model: Any, batch: Any) -> Any:
        with wh.pipeline(num_stages=2, schedule=schedule):
            h = jnp.tanh(batch["x"] @ model["a"])
            jax.debug.callback(lambda x: said.append(float(x)), h.sum())
            h = jnp.tanh(h @ model["b"])
            jax.debug.callback(lambda x: said.append(float(x)), h.sum())
            return ((h @ model["c"] - batch["y"]) ** 2).mean()

    with jax.enable_x64(True):
        model = {name: make(jax.random.key(0))[name] for name in "abc"}
        quiet = wh.Job(talking, make, batch, optax.sgd(0.1), batch_size=16)
        step = compiled(quiet, model, devices=2, num_micro_batches=4)
        runner_of(step)
        state, _ = step(step.init_from(model), batch(0, 16))
        jax.effects_barrier()
        assert len(said) == len(set(said)) == 2 * 4
        step.eval(state, batch(0, 16))
        jax.effects_barrier()
    assert len(said) == len(set(said)) == 2 * 2 * 4


def test_layers_in_a_scan_say_it_once_as_well() -> None:
    """One program for all stages would do it again, so they get their own."""
    said: list[float] = []

    def layer(h: Any, weights: Any) -> Any:
        h = jnp.tanh(h @ weights)
        jax.debug.callback(lambda x: said.append(float(x)), h.sum())
        return h, None

    def talking(model: Any, batch: Any) -> Any:
        h, _ = jax.lax.scan(layer, batch["x"], model["layers"])
        return ((h @ model["out"] - batch["y"]) ** 2).mean()

    def stacked(key: Any) -> Any:
        weights = jax.random.normal(key, (5, WIDTH, WIDTH)) * 0.3
        return {"layers": weights[:4], "out": weights[4]}

    with jax.enable_x64(True):
        job = wh.Job(talking, stacked, batch, optax.sgd(0.1), batch_size=16)
        model = stacked(jax.random.key(0))
        options: Any = {"num_micro_batches": 4, "mesh": {"stage": 2}}
        with pytest.warns(UserWarning, match="one of 2 stages takes 77% of the time"):
            step = compiled(job, model, devices=2, **options)
        runner_of(step)
        step(step.init_from(model), batch(0, 16))
        jax.effects_barrier()
    assert len(said) == len(set(said)) == 4 * 4
    assert "the loss prints or calls back, which one program" in str(step.plan)
