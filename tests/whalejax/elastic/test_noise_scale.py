"""The gradient-noise scale of a run, against that of a loss whose noise is known."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.elastic.noise_scale import NoiseScale


WIDTH, SPREAD = 50, 2.0
CENTER = np.linspace(-1.0, 1.0, WIDTH)


def distance(model: Any, batch: Any) -> Any:
    """Half the squared distance: a sample's gradient is ``w - x``."""
    return 0.5 * jnp.mean(jnp.sum((model["w"][None] - batch["x"]) ** 2, axis=-1))


def weighted(model: Any, batch: Any) -> wh.WeightedLoss:
    """The same with a weight for each sample."""
    each = 0.5 * jnp.sum((model["w"][None] - batch["x"]) ** 2, axis=-1)
    return wh.WeightedLoss(jnp.sum(each * batch["k"]), jnp.sum(batch["k"]))


def samples(step: int, size: int) -> dict[str, Any]:
    drawn = np.random.default_rng(step).standard_normal((size, WIDTH))
    x = (CENTER + SPREAD * drawn).astype(np.float32)
    return {"x": x, "k": np.full(size, 3.0, np.float32)}


def job(loss: Any = distance, rate: float = 0.0) -> wh.Job:
    return wh.Job(
        loss_fn=loss,
        make_model=lambda: {"w": jnp.zeros(WIDTH)},
        batch=samples,
        optimizer=optax.sgd(rate),
        batch_size=32,
    )


@pytest.mark.parametrize("loss", [distance, weighted])
def test_it_is_the_noise_over_the_signal(loss: Any) -> None:
    """Trace of the covariance over the squared norm of the mean: d·σ² / |μ|²."""
    run = wh.train_elastic(job(loss), steps=150, num_micro_batches=8, noise_scale=True)
    values = [float(m["noise_scale"]) for _, m in run if "noise_scale" in m]
    expected = WIDTH * SPREAD**2 / float(CENTER @ CENTER)
    assert np.mean(values[50:]) == pytest.approx(expected, rel=0.15)


def test_a_step_is_measured_by_its_micro_batches() -> None:
    """Against gradients by NumPy, to rounding."""
    run = wh.train_elastic(job(), steps=1, num_micro_batches=4, noise_scale=True)
    (_, metrics) = next(iter(run))
    x = samples(0, 32)["x"].astype(np.float64)
    parts = [-x[m::4].mean(0) for m in range(4)]
    total = -x.mean(0)
    by_hand = NoiseScale(batch=32, micro_batches=4)
    by_hand.update([float(p @ p) for p in parts], float(total @ total))
    assert by_hand.value is not None
    assert float(metrics["noise_scale"]) == pytest.approx(by_hand.value, rel=1e-4)


def test_measuring_changes_no_step() -> None:
    def losses(**more: Any) -> list[float]:
        run = wh.train_elastic(job(rate=0.1), steps=4, num_micro_batches=4, **more)
        return [float(m["loss"]) for _, m in run]

    assert losses(noise_scale=True) == losses()


def test_estimates_have_no_bias() -> None:
    """Means of many draws of both terms are the true ones, at unlike batches."""
    rng = np.random.default_rng(0)
    noise, signal = [], []
    for _ in range(4000):
        x = 1.0 + rng.standard_normal((12, 3))
        scale = NoiseScale(batch=12, micro_batches=3)
        means = [x[i::3].mean(0) for i in range(3)]
        scale.update([float(m @ m) for m in means], float(x.mean(0) @ x.mean(0)))
        noise.append(scale.noise)
        signal.append(scale.signal)
    assert np.mean(noise) / np.mean(signal) == pytest.approx(3.0 / 3.0, rel=0.05)


def test_a_step_without_own_micro_batches_is_left_out() -> None:
    scale = NoiseScale(batch=8, micro_batches=2)
    scale.update([], 1.0)
    assert scale.value is None


def test_bad_input_is_refused() -> None:
    with pytest.raises(wh.WhaleError, match="needs the gradients of 2 micro-batches"):
        next(
            iter(
                wh.train_elastic(job(), steps=1, num_micro_batches=1, noise_scale=True)
            )
        )
    with pytest.raises(wh.WhaleError, match="noise_scale is measured from micro-batc"):
        wh.train_elastic(job(), steps=1, mesh="auto", noise_scale=True)
    with pytest.raises(wh.WhaleError, match="noise_scale is 'yes'"):
        wh.train_elastic(job(), steps=1, noise_scale="yes")  # type: ignore[arg-type]
