"""What a step computes where types, weights or frozen weights are out of the common."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.compilations import count_compilations


pytestmark = pytest.mark.relaxed_promotion

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
BATCH = {"x": X, "y": Y}


def step_for(loss: Any, model: Any, batch: Any = None, **options: Any) -> wh.TrainStep:
    """A step with plain gradient descent on eight CPU devices."""
    batch = BATCH if batch is None else batch
    kept = {k: options[k] for k in ("trainable", "batch_axes") if k in options}
    plan = wh.plan(
        loss, model, batch, optimizer=optax.sgd(1.0), cluster="h100:8", **options
    )
    return wh.compile(
        plan, loss, model, optimizer=optax.sgd(1.0), devices=jax.devices(), **kept
    )


# Types.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parts", [1, 2])
def test_complex_gradients_keep_their_imaginary_part(parts: int) -> None:
    model = {"w": jnp.full((8, 4), 0.1 + 0.2j, jnp.complex64)}

    def loss(net: Any, batch: Any) -> Any:
        return jnp.mean(jnp.abs(batch["x"] @ net["w"] - batch["y"]) ** 2)

    step = step_for(loss, model, num_micro_batches=parts)
    state, _ = step(step.init_from(model), BATCH)
    expected = model["w"] - jax.grad(loss)(model, BATCH)["w"]
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-4, atol=1e-6)
    assert np.abs(np.imag(state.params["w"]) - 0.2).max() > 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_weight_beyond_the_narrow_type(dtype: str, parts: int) -> None:
    model = {"w": jnp.full((8, 4), 0.1, dtype)}

    def loss(net: Any, batch: Any) -> Any:
        y = batch["x"].astype(dtype) @ net["w"]
        return wh.WeightedLoss(jnp.sum(y * y), jnp.float32(70001.0 / parts))

    # The weight is of a micro-batch, which only the parts of one step can know.
    step = step_for(loss, model, num_micro_batches=parts, per_micro_batch=parts > 1)
    state, metrics = step(step.init_from(model), BATCH)
    total = float(np.sum((X.astype(np.float64) @ np.full((8, 4), 0.1)) ** 2))
    assert float(metrics["loss"]) == pytest.approx(total / 70001, rel=2e-2)
    assert not np.array_equal(state.params["w"], model["w"]) or dtype == "bfloat16"


@pytest.mark.parametrize("parts", [1, 16])
def test_metrics_are_summed_in_types_that_hold_the_sum(parts: int) -> None:
    model = {"w": jnp.ones((8, 4))}

    def loss(net: Any, batch: Any) -> Any:
        found = {
            "half": jnp.asarray(0.9, jnp.bfloat16),
            "count": jnp.asarray(100, jnp.int8),
            "flag": jnp.asarray(True),
        }
        same = {f"the {name}": value for name, value in found.items()}
        half = {"half": found.pop("half")}
        reports = wh.Aux(metrics=same, means=half, sums=found)
        return jnp.mean(batch["x"] @ net["w"]), reports

    step = step_for(loss, model, num_micro_batches=parts, default=wh.split())
    state = step.init_from(model)
    evaluated = step.eval(state, BATCH)
    _, trained = step(state, BATCH)
    for metrics in (evaluated, trained):
        assert float(metrics["half"]) == pytest.approx(0.9, rel=4e-3)
        assert (int(metrics["count"]), int(metrics["flag"])) == (100 * parts, parts)
        assert float(metrics["the half"]) == pytest.approx(0.9, rel=4e-3)
        assert (int(metrics["the count"]), int(metrics["the flag"])) == (100, 1)
    assert {k: v.dtype for k, v in evaluated.items()} == {
        k: v.dtype for k, v in trained.items()
    }


def test_weakly_typed_parameters_compile_once() -> None:
    model = {"w": jnp.full((8, 4), 0.1)}
    assert model["w"].weak_type

    def loss(net: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ net["w"] - batch["y"]) ** 2)

    step = step_for(loss, model)
    state = step.init(lambda: model, rng=jax.random.key(0))
    with count_compilations() as compiles:
        for _ in range(3):
            state, _ = step(state, BATCH)
    assert compiles.count == 1


# Frozen weights.


class Tuned(nnx.Module):
    """A frozen layer, statistics, and a head; the call goes through a transform."""

    def __init__(self, transform: Any, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self._transform = transform

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(model: Tuned, x: jax.Array) -> jax.Array:
            return model.head(model.norm(model.body(x)))

        found: jax.Array = self._transform(run)(self, x)
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, lambda f: f])
def test_frozen_weights_keep_every_bit_in_bfloat16(transform: Any) -> None:
    def loss(model: Tuned, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    model = Tuned(transform, nnx.Rngs(0))
    step = step_for(loss, model, trainable="head.*", precision="bf16")
    state, _ = step(step.init_from(model), BATCH)
    np.testing.assert_array_equal(state.model.body.kernel[...], model.body.kernel[...])
    assert not np.array_equal(state.model.norm.mean[...], model.norm.mean[...])
    assert not np.array_equal(state.model.head.kernel[...], model.head.kernel[...])


# Memory and life.


def test_a_leaf_without_samples_is_not_copied_for_each_micro_batch() -> None:
    table = np.ones((512, 512), np.float32)

    def loss(net: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ net["w"]) + 0.0 * jnp.sum(batch["table"])

    batch, axes = {"x": X, "table": table}, {"x": 0, "table": None}
    temporaries = []
    for parts in (2, 8):
        step = step_for(
            loss,
            {"w": jnp.ones((8, 4))},
            batch,
            batch_axes=axes,
            mesh={"tensor": 4, "data": 2},
            num_micro_batches=parts,
        )
        compiled = step.lower().compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] < temporaries[0] + table.nbytes


@pytest.mark.full
def test_a_step_and_the_model_it_was_made_from_are_let_go() -> None:
    model = {"w": jnp.ones((8, 4))}
    array = weakref.ref(model["w"])

    def loss(net: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ net["w"] - batch["y"]) ** 2)

    step = step_for(loss, model)
    state, _ = step(step.init_from(model), BATCH)
    del model
    gc.collect()
    assert array() is None
    gone = weakref.ref(step)
    del step, state
    gc.collect()
    assert gone() is None


def test_a_consumed_state_is_refused(tmp_path: Any) -> None:
    def loss(net: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ net["w"] - batch["y"]) ** 2)

    step = step_for(loss, {"w": jnp.ones((8, 4))})
    state = step.init_from({"w": jnp.ones((8, 4))})
    step(state, BATCH)
    for use in (
        lambda: step(state, BATCH),
        lambda: step.eval(state, BATCH),
        lambda: step.save(tmp_path / "checkpoint", state),
        lambda: state.model,
    ):
        with pytest.raises(wh.PlanError, match="donated to a step.*state, metrics ="):
            use()


def test_a_model_that_is_one_array_shards_its_optimizer_state() -> None:
    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ w)

    w = jnp.ones((8, 64))
    plan = wh.plan(
        loss, w, BATCH, optimizer=optax.adam(1.0), cluster="h100:8", mesh={"fsdp": 8}
    )
    step = wh.compile(plan, loss, w, optimizer=optax.adam(1.0), devices=jax.devices())
    state, _ = step(step.init_from(w), BATCH)
    spec = state.params.sharding.spec
    assert any(spec)
    assert state.opt_state[0].mu.sharding.spec == spec
