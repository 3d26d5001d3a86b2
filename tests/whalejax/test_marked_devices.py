"""How many devices a mark gives: one copy of the model has them, and others follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from tests.equality import FLOAT64_TOLERANCE, check, on_one_device
from whalejax import jobs, models


def weights(key: Any) -> Any:
    """Two square matrices."""
    names = ("a", "b")
    return {
        name: jax.random.normal(one, (16, 16)) * 0.3
        for name, one in zip(names, jax.random.split(key, 2), strict=True)
    }


def samples(step: int, count: int) -> Any:
    """Rows that differ."""
    return np.sin(np.arange(count * 16) + step).reshape(count, 16)


def job(loss: Callable[..., Any]) -> wh.Job:
    """One step of a loss of two matrices, 32 samples."""
    return wh.Job(
        lambda m, x, rng: loss(m, x), weights, samples, optax.sgd(0.1), batch_size=32
    )


def plan(loss: Callable[..., Any], **options: Any) -> wh.Plan:
    """On eight H100."""
    shapes = jax.eval_shape(weights, jax.random.key(0))
    options = {"cluster": "h100:8", **options}
    return wh.plan(loss, shapes, samples(0, 32), optimizer=optax.sgd(0.1), **options)


def plain(model: Any, x: Any) -> Any:
    """Without marks."""
    return jnp.tanh(x @ model["a"] @ model["b"]).mean()


def two_stages(
    *,
    around: int | None = None,
    each: int | None = None,
    last: int | None = None,
) -> Callable[..., Any]:
    """Two marked stages in a replicate, with a split in the last one if it is given."""

    def loss(model: Any, x: Any) -> Any:
        with wh.replicate(devices=around), wh.pipeline(num_micro_batches=4):
            with wh.stage(devices=each):
                h = jnp.tanh(x @ model["a"])
            with wh.stage(devices=each):
                inside: AbstractContextManager[Any] = nullcontext()
                if last is not None:
                    inside = wh.split(devices=last)
                with inside:
                    return jnp.tanh(h @ model["b"]).mean()

    return loss


def found_stages(devices: int, count: int | None = 2) -> Callable[..., Any]:
    """Stages to be found, in a replicate over so many devices."""

    def loss(model: Any, x: Any) -> Any:
        with (
            wh.replicate(devices=devices),
            wh.pipeline(num_stages=count, num_micro_batches=4),
        ):
            return plain(model, x)

    return loss


def split_stages(devices: int, around: int | None = None) -> Callable[..., Any]:
    """Two stages that are not marked, with a split in them."""

    def loss(model: Any, x: Any) -> Any:
        with (
            wh.replicate(devices=around),
            wh.pipeline(num_stages=2, num_micro_batches=4),
        ):
            h = jnp.tanh(x @ model["a"])
            with wh.split(devices=devices):
                return jnp.tanh(h @ model["b"]).mean()

    return loss


def many_parts(model: Any, x: Any) -> Any:
    """A pipeline whose micro-batches are smaller than an axis; the mean is outside."""
    with wh.pipeline(num_stages=2):
        h = jnp.tanh(x @ model["a"] @ model["b"])
    return h.mean()


def replicas_of(found: wh.Plan) -> list[int]:
    """Copies of what each stage holds."""
    assert found.stages is not None
    sizes = [one.axis_sizes for one in found.stages.plans]
    return [one.get("data", 1) * one.get("fsdp", 1) for one in sizes]


@pytest.mark.parametrize(
    ("loss", "copies"),
    [
        (two_stages(each=1), [4, 4]),
        (two_stages(around=2), [4, 4]),
        (two_stages(around=8, last=4), [1, 1]),
        (two_stages(around=4, last=2), [2, 2]),
        (two_stages(last=2), [2, 2]),
        (found_stages(2), [4, 4]),
        (split_stages(2), [2, 2]),
        (split_stages(2, around=4), [2, 2]),
        (split_stages(4, around=8), [1, 1]),
    ],
)
def test_stages_have_the_devices_that_marks_give(
    loss: Callable[..., Any], copies: list[int]
) -> None:
    least = replicas_of(plan(loss))
    assert all(found % wanted == 0 for found, wanted in zip(least, copies, strict=True))


def test_stages_are_found_among_the_devices_of_one_copy() -> None:
    found = plan(found_stages(4, None))
    assert found.stages is not None and len(found.stages.plans) in (2, 4)
    assert found.notes[0] == "1 marked TaskGraph obeyed"


@pytest.mark.parametrize("runnable", [True, False])
def test_one_copy_of_a_model_without_stages(*, runnable: bool) -> None:
    def loss(model: Any, x: Any) -> Any:
        with wh.replicate(devices=2):
            h = jnp.tanh(x @ model["a"])
        return jnp.tanh(h @ model["b"]).mean()

    found = plan(loss, mesh={"tensor": 2}, runnable=runnable)
    assert found.axis_sizes == {"data": 4, "tensor": 2}
    with pytest.raises(wh.WhaleError) as caught:
        plan(loss, mesh={"tensor": 4}, runnable=runnable)
    assert str(caught.value) == (
        "the marks' devices= put one copy of the model on 2 of 8 devices, so data × "
        "fsdp × context must be a multiple of 4, but with tensor 4 it is not. Change "
        "the marks or mesh="
    )


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (
            found_stages(3),
            {},
            "takes 3 devices (around them: 3), which does not divide",
        ),
        (
            found_stages(4),
            {"mesh": {"stage": 2, "tensor": 4}},
            "put one copy of the model on 4 of 8 devices",
        ),
        (
            found_stages(3),
            {"cluster": "h100:6"},
            "devices do not divide into 2 stages. Use devices=2 or a multiple of it",
        ),
        (
            two_stages(each=2),
            {"shares": [1, 1, 1, 1]},
            "shares makes 4 pipelines of 2 devices each: the marks cannot be obeyed",
        ),
        (two_stages(around=2, each=2), {}, "is around 2 stages, but one copy"),
        (
            two_stages(each=1),
            {"mesh": {"tensor": 4}},
            "one copy of the model on 2 of 8",
        ),
    ],
)
def test_devices_that_contradict_each_other(
    loss: Callable[..., Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        plan(loss, **options)
    assert text in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "count", "options"),
    [
        (two_stages(around=4, last=2), 4, {}),
        (split_stages(4), 4, {}),
        (many_parts, 16, {"mesh": {"tensor": 4}}),
        (many_parts, 32, {"mesh": {"tensor": 4}}),
    ],
)
def test_they_compute_what_one_device_does(
    loss: Callable[..., Any], count: int, options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        found = check(on_one_device(job(loss), count), devices=8, **options)
    assert found.error <= FLOAT64_TOLERANCE
    assert found.plan.stages is not None
    assert all("tensor" in one.axis_sizes for one in found.plan.stages.plans[1:])


@pytest.mark.full
@pytest.mark.relaxed_promotion  # Flax promotes in its norms
def test_marks_leave_the_sequence_open() -> None:
    gpt = models.job("gpt-test", layers=2, annotated=False)

    def marked(model: Any, batch: Any) -> Any:
        with wh.split(devices=2):
            return gpt.loss_fn(model, batch)

    def found(**options: Any) -> dict[str, int]:
        whole = {"optimizer": gpt.optimizer, "cluster": "h100:8", **options}
        batch = gpt.batch_at(0, 32)
        return wh.plan(marked, jobs.abstract_model(gpt), batch, **whole).axis_sizes

    sizes = {"context": 4, "tensor": 2}
    assert found(mesh={"context": 4}) == sizes
    assert found(mesh={"context": 4}, runnable=False) == sizes
    staged = found(mesh={"stage": 2})
    assert (staged["stage"], staged["tensor"]) == (2, 2)
    assert found(cluster="h100:7", allow_idle=True)["tensor"] == 2


def test_a_mark_lends_the_batch_also_where_it_does_not_divide() -> None:
    def loss(model: Any, x: Any) -> Any:
        with wh.replicate():
            h = jnp.tanh(x @ model["a"])
        with wh.split():
            return jnp.tanh(h @ model["b"]).mean()

    with pytest.raises(wh.WhaleError, match="2 in each of 16 micro-batches"):
        plan(loss, mesh={"tensor": 4, "data": 2}, num_micro_batches=16)
