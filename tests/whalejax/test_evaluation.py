"""Evaluation: in evaluation mode by default, of whole batches and of smaller ones."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import whalejax as wh
from whalejax.adapters.base import adapt
from whalejax.lowering.pipeline_mpmd.stage_programs_executor import (
    StageProgramsExecutor,
)
from whalejax.lowering.runner import OneProgram
from whalejax.lowering.uneven.pipeline_executor import UnevenPipelinesExecutor
from whalejax.lowering.uneven.replica_executor import UnevenReplicasExecutor
from whalejax.runtime.ragged_batch import passes


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

SIZE: Final = 16
TX: Final = optax.adam(0.01)

rng = np.random.default_rng(0)
BATCH: Final = {
    "x": rng.normal(size=(SIZE, 8)).astype(np.float32),
    "y": rng.integers(0, 4, SIZE).astype(np.int32),
}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(self.norm(nnx.relu(self.up(x)))))


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        layers = jax.random.normal(rngs.params(), (2, 8, 8))
        self.layers = nnx.Param(layers)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            return h + jnp.tanh(h @ w), None

        return self.head(jax.lax.scan(layer, self.drop(x), self.layers[...])[0])


def loss(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])
    right = z.argmax(-1) == batch["y"]
    metrics = {"z": z, "right": right.sum(), "share": right.mean()}
    return losses.mean(), wh.Aux(metrics=metrics, sums={"all": losses.sum()})


def weighted(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])
    counts = batch["y"] > 0
    return wh.WeightedLoss((losses * counts).sum(), counts.sum().astype(z.dtype))


def step_of(model: Any, loss_fn: Any = loss, **options: Any) -> wh.TrainStep:
    options = {"optimizer": TX, "cluster": "cpu:2", **options}
    if type(model) is Net and options["optimizer"] is not None:
        # Batch normalisation of each micro-batch, where there are several.
        options.setdefault("per_micro_batch", True)
    plan = wh.plan(loss_fn, model, BATCH, **options)
    return wh.compile(
        plan,
        loss_fn,
        model,
        optimizer=options["optimizer"],
        devices=jax.devices()[: plan.num_devices],
    )


def outputs(model: nnx.Module) -> tuple[Any, Any]:
    """What a model says of each sample of the batch after ``eval()``, and its loss."""
    model.eval()
    z = np.asarray(nnx.jit(lambda model, x: model(x))(model, BATCH["x"]))
    exponents = z.astype(np.float64) - z.max(-1, keepdims=True)
    logs = exponents - np.log(np.exp(exponents).sum(-1, keepdims=True))
    return z, -logs[np.arange(SIZE), BATCH["y"]]


def check_evaluations(step: wh.TrainStep, state: Any) -> None:
    """Evaluations say what the model says on one device after ``eval()``."""
    z, losses = outputs(state.model)
    right = z.argmax(-1) == BATCH["y"]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for count in (SIZE, 7):
        found = step.eval(state, {name: x[:count] for name, x in BATCH.items()})
        close(found["loss"], losses[:count].mean())
        close(found["z"], z[:count])
        close(found["share"], right[:count].mean())
        close(found["all"], losses[:count].sum())
        assert int(found["right"]) == right[:count].sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, options, runner",
    [
        (Net, {"mesh": {"data": 2}, "num_micro_batches": 2}, OneProgram),
        pytest.param(
            Net,
            {"shares": (3, 1), "num_micro_batches": 4},
            UnevenReplicasExecutor,
            marks=pytest.mark.full,
        ),
        (Net, {"mesh": {"stage": 2}, "num_micro_batches": 2}, StageProgramsExecutor),
        pytest.param(
            Net,
            {"mesh": {"stage": 2}, "shares": (3, 1), "cluster": "cpu:4"},
            UnevenPipelinesExecutor,
            marks=pytest.mark.full,
        ),
        (Scanned, {"mesh": {"stage": 2}, "num_micro_batches": 2}, OneProgram),
    ],
)
def test_evaluation_mode_is_the_default(
    kind: Any, options: dict[str, Any], runner: type
) -> None:
    model = kind(nnx.Rngs(0))
    step = step_of(model, **options)
    assert type(step._runner) is runner
    state, _ = step(step.init_from(model), BATCH)
    check_evaluations(step, state)
    in_training = float(step.eval(state, BATCH, training=True)["loss"])
    assert abs(in_training - float(step.eval(state, BATCH)["loss"])) > 1e-3


def test_smaller_batches_with_weights() -> None:
    model = Net(nnx.Rngs(0))
    step = step_of(model, weighted, num_micro_batches=2, optimizer=None)
    state = step.init_from(model)
    _, losses = outputs(model)
    counts = BATCH["y"] > 0
    assert not counts[4]  # A pass of its own has no weight.
    for count in (1, 5, 15):
        found = step.eval(state, {name: x[:count] for name, x in BATCH.items()})
        wanted = (losses * counts)[:count].sum() / counts[:count].sum()
        assert float(found["loss"]) == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(wh.WhaleError, match=r"shape \(0, 8\); the plan is for"):
        step.eval(state, {name: x[:0] for name, x in BATCH.items()})


def test_passes_take_every_sample_once() -> None:
    for whole in (1, 7, 12, 32):
        for samples in range(1, whole + 1):
            found = [*passes(samples, whole)]
            assert sum(count for _, count in found) == samples
            ends = [first + count for first, count in found]
            assert [first for first, _ in found] == [0, *ends[:-1]]
            assert all(whole % count == 0 for _, count in found)


def test_a_smaller_batch_of_more_than_a_mean_is_refused() -> None:
    model = Net(nnx.Rngs(0))
    step = step_of(model, mesh={"data": 2})
    state = step.init_from(model)
    small = {name: x[:5] for name, x in BATCH.items()}
    with pytest.raises(wh.WhaleError, match="with a sum over all of them") as told:
        step.eval(state, small, training=True)
    assert "the batch has 5 samples, the plan is for 16" in str(told.value)
    with pytest.raises(wh.WhaleError, match=r"shape \(5, 8\); the plan is for"):
        step(state, small)


def test_modes_that_were_set_stay() -> None:
    model = Net(nnx.Rngs(0))
    step = step_of(model, mesh={"data": 2})
    state = step.init_from(model)
    assert not state.model.drop.deterministic
    state.model.eval()
    assert state.model.drop.deterministic and state.model.norm.use_running_average
    before = np.asarray(state.params["up"]["kernel"])
    state, trained = step(state, BATCH)
    assert state.model.drop.deterministic  # of the next state, too
    assert np.abs(np.asarray(state.model.up.kernel[...]) - before).max() > 0
    # The step itself trains as it was compiled.
    again, wanted = step(step.init_from(model), BATCH)
    assert float(trained["loss"]) == float(wanted["loss"])
    assert not again.model.drop.deterministic
    state.model.train()
    assert not state.model.drop.deterministic
    assert not model.drop.deterministic


def test_models_without_modes_are_traced_once() -> None:
    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.up(x)

    plain = adapt(Plain(nnx.Rngs(0)), loss)
    assert plain.evaluating() is None
    assert adapt({"w": jnp.ones(3)}, lambda m, b: m["w"].sum()).evaluating() is None
    several = {"nets": [Net(nnx.Rngs(0))]}
    assert adapt(several, loss).without_values().evaluating() is not None
    evaluated = Net(nnx.Rngs(0))
    evaluated.eval()
    assert adapt(evaluated, loss).evaluating() is None


def test_an_eval_that_changes_variables_is_refused() -> None:
    class Growing(Net):
        def eval(self, **attributes: Any) -> None:
            super().eval(**attributes)
            self.more = nnx.Param(jnp.ones(3))

    with pytest.raises(wh.WhaleError, match="adds or removes variables .more.") as told:
        adapt(Growing(nnx.Rngs(0)), loss).evaluating()
    assert "Evaluate with training=True" in str(told.value)


def test_a_linen_loss_for_evaluation_takes_the_same_states() -> None:
    class LinenNet(linen.Module):
        @linen.compact
        def __call__(self, x: Any, *, training: bool) -> Any:
            x = linen.Dropout(0.5, deterministic=not training)(x)
            return linen.Dense(4)(x)

    net = LinenNet()

    def linen_loss(variables: Any, batch: Any, rng: Any, *, training: bool) -> Any:
        z: Any = net.apply(
            variables, batch["x"], training=training, rngs={"dropout": rng}
        )
        return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"]).mean()

    def training(variables: Any, batch: Any, rng: Any) -> Any:
        return linen_loss(variables, batch, rng, training=True)

    def evaluation(variables: Any, batch: Any, rng: Any) -> Any:
        return linen_loss(variables, batch, rng, training=False)

    variables = net.init(jax.random.key(0), BATCH["x"], training=False)
    options = {"mesh": {"data": 2}, "num_micro_batches": 1}
    step = step_of(variables, training, **options)
    other = step_of(variables, evaluation, optimizer=None, **options)
    state, _ = step(step.init_from(variables), BATCH)
    key = jax.random.key(0)
    wanted = float(evaluation(jax.device_get(state.model), BATCH, key))
    assert float(other.eval(state, BATCH)["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert abs(float(step.eval(state, BATCH)["loss"]) - wanted) > 1e-3
