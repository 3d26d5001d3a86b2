"""A model is taken from a checkpoint without the optimizer that trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import whalejax as wh
from tests.whalejax.runs import (
    batch_at,
    described_cluster,
    fresh_state,
    host_leaves,
    make_job,
    make_params,
    shared_step,
    step_of,
)
from whalejax.runtime.train_step import TrainStep


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion

SCHEDULED = optax.sgd(optax.cosine_decay_schedule(0.1, 50), momentum=0.9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps under Adam, with shapes of an even number."""
    step = shared_step()
    state = fresh_state(step)
    for index in range(3):
        state, _ = step(state, batch_at(index, 16))
    path = tmp_path_factory.mktemp("saved") / "one"
    step.save(path, state)
    return path


def evaluating() -> TrainStep:
    """A step of the job without an optimizer."""
    job = make_job()
    model = jax.eval_shape(make_params, jax.random.key(0))
    plan = wh.plan(job.loss_fn, model, job.batch_at(0), cluster=described_cluster())
    return wh.compile(plan, job.loss_fn, model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("runner", "options"),
    [
        ("OneProgram", {}),
        ("OneProgram", {"precision": "f16"}),
        ("StageProgramsExecutor", {"mesh": {"stage": 2}}),
        pytest.param(
            "UnevenReplicasExecutor",
            {"shares": [3, 1], "num_devices": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "UnevenPipelinesExecutor",
            {"mesh": {"stage": 2}, "shares": [3, 1], "num_devices": 4},
            marks=pytest.mark.full,
        ),
    ],
)
def test_another_optimizer_takes_the_model(
    saved: Path, runner: str, options: dict[str, Any]
) -> None:
    whole = shared_step().restore(saved)
    step = step_of(make_job(optimizer=SCHEDULED), **options)
    assert type(step._runner).__name__ == runner
    found = step.restore(saved, only="model", keep_schedule=False)
    assert host_leaves(found.params) == host_leaves(whole.params)
    assert (int(found.step), found.samples) == (3, 48)
    assert host_leaves(found.rng) == host_leaves(whole.rng)
    begun = fresh_state(step)
    assert host_leaves(found.opt_state) == host_leaves(begun.opt_state)
    for leaf, sharding in zip(
        jax.tree.leaves(found), jax.tree.leaves(step.shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    found, metrics = step(found, batch_at(3, 16))
    assert np.isfinite(metrics["loss"])
    assert (int(found.step), found.samples) == (4, 64)


def test_the_optimizer_begins_with_the_model_that_was_read(saved: Path) -> None:
    """An average of the parameters begins with them, and not with zeros."""
    step = step_of(make_job(optimizer=optax.contrib.schedule_free_sgd(0.1)))
    found = step.restore(saved, only="model")
    assert host_leaves(found.opt_state.z) == host_leaves(found.params)


def test_evaluation_takes_the_model(saved: Path) -> None:
    step, trained = evaluating(), shared_step()
    found = step.restore(saved, only="model")
    loss = step.eval(found, batch_at(0, 16))["loss"]
    expected = trained.eval(trained.restore(saved), batch_at(0, 16))["loss"]
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    # The same optimizer may be asked to begin anew too.
    again = trained.restore(saved, only="model")
    assert int(again.opt_state[0].count) == 0 and int(again.step) == 3


def test_the_remedy_is_named(saved: Path) -> None:
    for step in (evaluating(), step_of(make_job(optimizer=SCHEDULED))):
        with pytest.raises(wh.WhaleError) as caught:
            step.restore(saved)
        title = str(caught.value).splitlines()[0]
        assert title.startswith(
            f"{saved} is a checkpoint of another model or optimizer. The model is the "
            'same: step.restore(path, only="model") takes it, keeps the step counter '
            "and begins the optimizer anew; keep_schedule=True lets its schedule go "
            "on: "
        )


def rate(count: Any) -> Any:
    """A schedule that tells its count."""
    return 0.01 * (1 + count)


SCHEDULES = {
    "a schedule": optax.sgd(rate),
    "moments before it": optax.adam(rate),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(rate),
    "of a group": optax.multi_transform(
        {"all": optax.sgd(rate)}, lambda params: jax.tree.map(lambda _: "all", params)
    ),
    "every second step": optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(saved: Path, name: str) -> None:
    """From the updates that the other optimizer made; moments begin anew."""
    step = step_of(make_job(optimizer=SCHEDULES[name]))
    anew = step.restore(saved, only="model", keep_schedule=False)
    found = step.restore(saved, only="model", keep_schedule=True)
    before, after = (
        jax.tree_util.tree_flatten_with_path(x.opt_state)[0] for x in (anew, found)
    )
    changed = {
        jax.tree_util.keystr(path): (int(old), int(new))
        for (path, old), (_, new) in zip(before, after, strict=True)
        if not np.array_equal(old, new)
    }
    assert set(changed.values()) == {(0, 3)}, changed
    assert all(place.endswith(".count") for place in changed)
    for one, sharding in zip(
        jax.tree.leaves(found), jax.tree.leaves(step.shardings), strict=True
    ):
        assert one.sharding.is_equivalent_to(sharding, one.ndim)
    found, metrics = step(found, batch_at(3, 16))
    assert np.isfinite(metrics["loss"])


def test_a_schedule_that_begins_anew_is_said(saved: Path) -> None:
    step = step_of(make_job(optimizer=SCHEDULED))
    with pytest.warns(UserWarning) as caught:
        found = step.restore(saved, only="model")
    assert int(found.step) == 3
    assert str(caught[0].message) == (
        "the optimizer begins anew, and its schedule counts from 0, although the "
        "checkpoint's optimizer had made 3 updates. Pass keep_schedule=True to "
        "continue from 3, or False to begin it anew without this warning"
    )


def test_there_must_be_a_schedule_to_keep(saved: Path) -> None:
    with pytest.raises(wh.WhaleError, match="nothing in this optimizer's state counts"):
        shared_step().restore(saved, only="model", keep_schedule=True)
    with pytest.raises(wh.WhaleError, match='without only="model" all of the'):
        shared_step().restore(saved, keep_schedule=True)


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.Dense(24, use_bias=False, name="w")(x)
        return linen.Dense(4, use_bias=False, name="o")(jnp.tanh(hidden))


class OfNNX(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.full((8, 24), 0.1))
        self.o = nnx.Param(jnp.full((24, 4), 0.1))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.w[...]) @ self.o[...]


def by_kind(kind: str) -> tuple[Any, Any, str]:
    """A model, its loss, and the path of a leaf."""
    if kind == "nnx":
        return lambda model, x: jnp.mean(model(x) ** 2), OfNNX(), "w"
    arrays = {"w": jnp.full((8, 24), 0.1), "o": jnp.full((24, 4), 0.1)}
    if kind == "pytree":

        def plain(p: Any, x: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["w"]) @ p["o"]) ** 2)

        return plain, arrays, "w"

    def of_linen(variables: Any, x: Any) -> Any:
        found: Any = OfLinen().apply(variables, x)
        return jnp.mean(found**2)

    params = {name: {"kernel": x} for name, x in arrays.items()}
    return of_linen, {"params": params}, "w.kernel"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["pytree", "linen", "nnx"])
def test_what_was_trained_may_be_frozen_and_the_other_way_round(
    tmp_path: Path, kind: str
) -> None:
    loss_fn, model, path = by_kind(kind)
    optimizer, batch = optax.adam(0.1), jnp.ones((4, 8))

    def step_that_trains(trainable: Any) -> TrainStep:
        plan = wh.plan(
            loss_fn,
            model,
            batch,
            optimizer=optimizer,
            cluster="cpu:1",
            trainable=trainable,
        )
        return wh.compile(
            plan,
            loss_fn,
            model,
            optimizer=optimizer,
            trainable=trainable,
            devices=jax.devices()[:1],
        )

    steps = [step_that_trains(None), step_that_trains("o*")]
    states = [step.init_from(model) for step in steps]
    roles = ["trained", "not trained"]
    for was in (0, 1):
        target = tmp_path / str(was)
        steps[was].save(target, states[was])
        other = steps[1 - was]
        with pytest.raises(wh.WhaleError) as caught:
            other.restore(target)
        title, *lines = str(caught.value).splitlines()
        assert "The model is the same: " in title and 'only="model"' in title
        assert lines[0].endswith(
            f"{path}: float32[8, 24], {roles[was]} where the checkpoint was saved; "
            f"float32[8, 24], {roles[1 - was]} in this step"
        )
        found = other.restore(target, only="model")
        expected = states[1 - was]
        for one, like in zip(
            jax.tree.leaves((found.params, found.rest)),
            jax.tree.leaves((expected.params, expected.rest)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, like)


def test_another_model_has_no_such_remedy(saved: Path) -> None:
    def wider(key: jax.Array) -> Any:
        params = make_params(key)
        return {**params, "up": jnp.zeros((12, 640)), "down": jnp.zeros((640, 8))} | {
            "bias": jnp.zeros(640)
        }

    step = step_of(make_job(make_model=wider))
    for only in (None, "model"):
        with pytest.raises(
            wh.WhaleError, match="another model or optimizer: "
        ) as caught:
            step.restore(saved, only=only)  # type: ignore[arg-type]
        assert "restore(path" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4  # Nothing of the optimizer.


def test_only_a_model_can_be_asked_for(saved: Path) -> None:
    other: Any = "params"
    with pytest.raises(
        wh.WhaleError, match="only is 'params'; expected one of 'model', or No"
    ):
        shared_step().restore(saved, only=other)


class Net(nnx.Module):
    """What is trained in part later."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(12, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.norm(self.base(x)))


def net_loss(model: Net, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.full
def test_what_was_trained_may_be_frozen(tmp_path: Path) -> None:
    """And what was frozen may be trained; leaves are found by their names."""

    def make() -> Net:
        return Net(nnx.Rngs(0))

    model, tx, batch = nnx.eval_shape(make), optax.adam(0.1), batch_at(0, 16)
    steps = []
    for trainable in (None, "head.*"):
        plan = wh.plan(
            net_loss,
            model,
            batch,
            optimizer=tx,
            cluster=described_cluster(),
            trainable=trainable,
        )
        steps.append(
            wh.compile(plan, net_loss, model, optimizer=tx, trainable=trainable)
        )
    for number, (first, second) in enumerate((steps, reversed(steps))):
        state, _ = first(first.init(make, rng=jax.random.key(0)), batch)
        first.save(tmp_path / str(number), state)
        found = second.restore(tmp_path / str(number), only="model")
        values = [jax.tree.leaves(nnx.state(s.model)) for s in (state, found)]
        assert host_leaves(values[0]) == host_leaves(values[1])
        assert len(jax.tree.leaves(found.params)) != len(jax.tree.leaves(state.params))
        second(found, batch)
