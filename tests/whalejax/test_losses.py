"""What a loss function may return, and the batches of a job."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import whalejax as wh
from whalejax.user_code.losses import normalise


def test_a_plain_mean_has_weight_one() -> None:
    result = normalise(jnp.float32(3))
    assert (float(result.total), result.weight, result.weighted) == (3.0, 1.0, False)
    assert not result.metrics and not result.variables


def test_a_weighted_loss_keeps_its_parts() -> None:
    result = normalise(wh.WeightedLoss(jnp.float32(6), jnp.int32(4)))
    assert (float(result.total), int(result.weight), result.weighted) == (6, 4, True)


@pytest.mark.parametrize(
    ("aux", "metrics", "variables"),
    [
        ({"accuracy": 1}, {"accuracy": 1}, {}),
        (wh.Aux(metrics={"a": 1}, variables={"b": 2}), {"a": 1}, {"b": 2}),
        ([1, 2], {"aux": [1, 2]}, {}),
        (None, {}, {}),
    ],
)
def test_aux_in_every_form(aux: Any, metrics: Any, variables: Any) -> None:
    result = normalise((jnp.float32(1), aux))
    assert (result.metrics, result.variables) == (metrics, variables)


def test_weighted_losses_add_up_to_the_mean_over_all() -> None:
    total = wh.WeightedLoss(6.0, 2.0) + wh.WeightedLoss(1.0, 5.0)
    assert total == wh.WeightedLoss(7.0, 7.0)
    assert total.mean == 1.0


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
def test_a_weight_of_zero_gives_what_arrays_give(kind: Any) -> None:
    for weight in (0, 0.0, kind(0)):
        assert np.isnan(wh.WeightedLoss(kind(0), weight).mean)
        assert np.isposinf(wh.WeightedLoss(kind(1), weight).mean)
        assert np.isnan(wh.WeightedLoss(kind("nan"), weight).mean)


def test_both_return_types_pass_through_jit() -> None:
    def make(x: jax.Array) -> Any:
        return wh.WeightedLoss(x, x + 1), wh.Aux(metrics={"m": x}, variables={"v": x})

    loss, aux = jax.jit(make)(jnp.float32(2))
    assert (float(loss.total), float(loss.weight)) == (2.0, 3.0)
    assert (float(aux.metrics["m"]), float(aux.variables["v"])) == (2.0, 2.0)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path((loss, aux))]
    assert paths == [
        "[0].total",
        "[0].weight",
        "[1].metrics['m']",
        "[1].variables['v']",
    ]


BAD = [
    (
        jnp.ones((4, 3)),
        "loss_fn: the loss has shape (4, 3); expected a scalar of shape (). Take the "
        "mean over samples, as in `losses.mean()`.",
    ),
    (
        jnp.int32(1),
        "loss_fn: the loss has dtype int32; expected a floating-point scalar, because "
        "it is differentiated.",
    ),
    (
        jnp.complex64(1),
        "loss_fn: the loss has the complex dtype complex64; expected a real",
    ),
    (None, "loss_fn: the loss is NoneType; expected a scalar array"),
    ("low", "loss_fn: the loss is str; expected a scalar array"),
    (
        (jnp.float32(1), {}, {}),
        "loss_fn returned a tuple of 3 values; expected the loss alone or a pair",
    ),
    (
        (jnp.float32(1), {"loss": 1}),
        "loss_fn returned a metric named 'loss'; that name is taken",
    ),
    (
        wh.WeightedLoss(jnp.ones(3), jnp.float32(1)),
        "loss_fn: WeightedLoss.total has shape (3,); expected a scalar",
    ),
    (
        wh.WeightedLoss(jnp.float32(1), jnp.ones(3)),
        "loss_fn: WeightedLoss.weight has shape (3,); expected a scalar",
    ),
]


@pytest.mark.parametrize(("result", "text"), BAD)
def test_what_is_no_loss_is_refused(result: Any, text: str) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        normalise(result)
    assert text in str(caught.value)


def test_arrays_of_a_job_are_walked_through_over_and_over() -> None:
    job = wh.Job(len, len, {"x": np.arange(5), "y": np.arange(10.0)}, None, 4)
    assert job.batch_at(0)["x"].tolist() == [0, 1, 2, 3]
    assert job.batch_at(1)["x"].tolist() == [4, 0, 1, 2]
    assert job.batch_at(1)["y"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert job.batch_at(0, 7)["x"].tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_shapes_are_a_batch_to_plan_with() -> None:
    shapes = {"x": jax.ShapeDtypeStruct((8, 3), jnp.float32)}
    job = wh.Job(len, len, shapes, None)
    assert job.batch_at(0, 4) == {"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}


def test_a_job_calls_its_batch_function() -> None:
    job = wh.Job(len, len, lambda step, size: (step, size), None, batch_size=3)
    assert job.batch_at(5) == (5, 3)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            wh.Job(len, len, {"x": np.arange(3)}, None, name="mine"),
            "mine: no batch size is known. Give Job(batch_size=...) or --batch",
        ),
        (
            wh.Job(len, len, {"x": np.float32(3)}, None, batch_size=2),
            "job: batch['x'] has shape (); expected samples along dimension 0.",
        ),
    ],
)
def test_a_job_without_samples_is_refused(job: wh.Job, text: str) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        job.batch_at(0)
    assert text in str(caught.value)
