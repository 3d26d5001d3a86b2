"""Computing in float16: losses scaled, overflows skipped and counted, states kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import keep_gradient
from whalejax.cli import main
from whalejax.lowering.loss_scale import (
    FIRST_SCALE,
    GROWS_AFTER,
    LossScale,
    all_finite,
)
from whalejax.runtime import loop


pytestmark = pytest.mark.relaxed_promotion  # optax relies on it

SIZE, BATCH = 64, 32


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch @ params["up"])
    return ((hidden @ params["down"]) ** 2).mean() * 1e-3


def net() -> Any:
    random = np.random.default_rng(0)
    return {
        "up": random.standard_normal((SIZE, 4 * SIZE)).astype(np.float32) / 8,
        "down": random.standard_normal((4 * SIZE, SIZE)).astype(np.float32) / 16,
    }


def data(scale: float = 1.0) -> Any:
    random = np.random.default_rng(1)
    return (random.standard_normal((BATCH, SIZE)) * scale).astype(np.float32)


def step_of(devices: int = 8, optimizer: Any = None, **options: Any) -> wh.TrainStep:
    options = {"precision": "f16", "mesh": {"fsdp": devices}, **options}
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    plan = wh.plan(
        loss_fn,
        net(),
        data(),
        optimizer=optimizer,
        cluster=f"h100:{devices}",
        **options,
    )
    return wh.compile(
        plan, loss_fn, net(), optimizer=optimizer, devices=jax.devices()[:devices]
    )


def gradients(devices: int, precision: str, **options: Any) -> list[np.ndarray]:
    step = step_of(devices, keep_gradient(), precision=precision, **options)
    state, _ = step(step.init_from(net()), data())
    return [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]


def error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"data": 8}},
        {"mesh": {"fsdp": 4, "tensor": 2}},
        {"mesh": {"fsdp": 8}, "num_micro_batches": 4},
        {"mesh": {"fsdp": 8}, "remat": "full"},
    ],
)
def test_it_is_as_near_to_float32_as_one_device(
    precision: str, options: dict[str, Any]
) -> None:
    exact = gradients(1, "f32", mesh={})
    alone = error(gradients(1, precision, mesh={}), exact)
    assert 1e-5 < alone < 2e-2
    assert error(gradients(8, precision, **options), exact) <= 1.5 * alone


def test_small_gradients_do_not_vanish() -> None:
    """Without a scale the gradients of this loss are below float16's smallest."""
    exact = gradients(1, "f32", mesh={})
    smallest = float(jnp.finfo(jnp.float16).smallest_subnormal)
    per_token = max(np.abs(g).max() for g in exact) / BATCH
    assert per_token < 100 * smallest
    assert error(gradients(8, "f16", mesh={"fsdp": 8}), exact) < 1e-2


@pytest.mark.sampled(1)
@pytest.mark.smoke
@pytest.mark.parametrize("offload", [(), "optimizer"])
def test_an_overflow_is_skipped_and_counted(offload: Any) -> None:
    step = step_of(offload=offload)
    state = step.init_from(net())
    state, metrics = step(state, data())
    assert float(metrics["loss_scale"]) == FIRST_SCALE
    assert int(metrics["skipped_steps"]) == 0
    before = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    state, metrics = step(state, data(1e6))
    assert float(metrics["loss_scale"]) == FIRST_SCALE / 2
    assert int(metrics["skipped_steps"]) == 1
    after = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(state.step) == 2, "the next step has keys and data of its own"
    state, metrics = step(state, data())
    assert int(metrics["skipped_steps"]) == 1
    assert np.isfinite(float(metrics["loss"]))
    moved = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    assert any((a != b).any() for a, b in zip(moved, after, strict=False))


def test_the_scale_grows_and_falls() -> None:
    scale = LossScale.initial()
    yes, no = jnp.asarray(True), jnp.asarray(False)
    ripe = dataclasses.replace(scale, good_steps=jnp.asarray(GROWS_AFTER - 1))
    grown = ripe.after(yes)
    assert float(grown.scale) == 2 * FIRST_SCALE and int(grown.good_steps) == 0
    fallen = ripe.after(no)
    assert float(fallen.scale) == FIRST_SCALE / 2 and int(fallen.good_steps) == 0
    assert int(fallen.skipped_steps) == 1
    least = dataclasses.replace(scale, scale=jnp.float32(1.0)).after(no)
    assert float(least.scale) == 1.0
    assert int(scale.after(yes).good_steps) == 1


def test_finite_is_every_number() -> None:
    ones = jnp.ones(3)
    assert bool(all_finite([ones, ones]))
    assert not bool(all_finite([ones, ones.at[1].set(jnp.inf)]))
    assert not bool(all_finite([ones.at[1].set(jnp.nan)]))


def test_checkpoints_move_between_precisions(tmp_path: Path) -> None:
    half, wide = step_of(), step_of(precision="bf16")
    state, _ = half(half.init_from(net()), data(1e6))
    half.save(tmp_path / "half", state)
    again = half.restore(tmp_path / "half")
    assert again.loss_scale is not None
    assert int(again.loss_scale.skipped_steps) == 1
    plain = wide.restore(tmp_path / "half")
    assert plain.loss_scale is None
    np.testing.assert_array_equal(plain.params["up"], again.params["up"])
    wide.save(tmp_path / "wide", plain)
    fresh = half.restore(tmp_path / "wide")
    assert fresh.loss_scale is not None
    assert float(fresh.loss_scale.scale) == FIRST_SCALE
    fresh, metrics = half(fresh, data())
    assert int(metrics["skipped_steps"]) == 0


def test_training_goes_on_after_an_overflow(tmp_path: Path) -> None:
    step = step_of()
    wild = 2
    found = loop.train(
        step,
        step.init_from(net()),
        lambda i: data(1e6 if i == wild else 1.0),
        steps=5,
    )
    assert len(found.losses) == 5
    assert found.state.loss_scale is not None
    assert int(found.state.loss_scale.skipped_steps) == 1
    with pytest.raises(wh.WhaleError, match="the loss is"):
        loop.train(step, step.init_from(net()), lambda i: data(np.nan), steps=30)


def test_the_command_line_shows_skipped_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        """
import jax.numpy as jnp
import numpy as np
import optax
import whalejax as wh

def make():
    x = np.ones((64, 8), np.float32)
    x[8:16] = 1e6  # the second batch
    return wh.Job(
        lambda net, x: ((x @ net["w"]) ** 2).mean() * 1e-2,
        lambda: {"w": jnp.ones((8, 8))},
        x,
        optax.sgd(1e-6),
        batch_size=8,
    )
"""
    )
    words = f"train {tmp_path}/train.py:make --cluster cpu:8 --steps 4 --precision f16"
    main.main(words.split())
    said = capsys.readouterr().out.replace("\n", " ")
    assert "1 step changed nothing, because gradients overflowed in float16" in said
    assert "the loss scale is now 16384" in said


def test_small_numbers_that_float16_does_not_hold_stay() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ w)
        return ((h / (jnp.abs(h) + 1e-9)) * x).mean()

    w, x = np.eye(16, dtype="f"), np.linspace(-1, 1, 8 * 16, dtype="f").reshape(8, 16)
    plan = wh.plan(loss, w, x, cluster="cpu:8", precision={"*": "f16"}, optimizer=None)
    step = wh.compile(plan, loss, w)
    state = step.init_from(w)
    expected = float(loss(w, x))
    assert float(step.eval(state, x)["loss"]) == pytest.approx(expected, rel=1e-2)
