"""Marked stages that cannot be, and hints that contradict each other, are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh


pytestmark = pytest.mark.relaxed_promotion  # NumPy's and optax's own numbers

Loss = Callable[[Any, Any], Any]

PARAMS = {
    "a": jax.ShapeDtypeStruct((16, 32), jnp.float32),
    "b": jax.ShapeDtypeStruct((32, 32), jnp.float32),
}
BATCH = {"x": jax.ShapeDtypeStruct((24, 16), jnp.float32)}


def planned(loss: Loss, **options: Any) -> wh.Plan:
    given = {"optimizer": optax.sgd(0.1), "cluster": "cpu:2", **options}
    return wh.plan(loss, PARAMS, BATCH, **given)


def last_unused(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        with wh.stage():
            h = jnp.tanh(b["x"] @ p["a"])
            total = (h**2).mean()
        with wh.stage():
            (h @ p["b"]).mean()
    return total


def first_unused(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        with wh.stage():
            (b["x"] @ p["b"][:16]).mean()
        with wh.stage():
            return (jnp.tanh(b["x"] @ p["a"]) ** 2).mean()


@pytest.mark.parametrize(("loss", "stage"), [(last_unused, 1), (first_unused, 0)])
def test_a_stage_that_the_loss_does_not_need_is_named(loss: Loss, stage: int) -> None:
    with pytest.raises(wh.PlanError) as caught:
        planned(loss)
    said = str(caught.value)
    assert "the loss does not need some stages" in said
    assert f"stage {stage} of 2, marked at wh.pipeline[num_micro_batches=4]/" in said
    assert "read none of its results. Use one, or drop the mark" in said


def energy(p: Any, x: Any) -> Any:
    with wh.stage():
        h = jnp.tanh(x @ p["a"])
    with wh.stage():
        return jnp.tanh(h @ p["b"]).sum()


def force(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        return (jax.grad(energy, argnums=1)(p, b["x"]) ** 2).mean()


def penalty(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        value, slope = jax.value_and_grad(energy, argnums=1)(p, b["x"])
        return value / 24 + (slope**2).mean()


def scoped(p: Any, b: Any) -> Any:
    def inner(x: Any) -> Any:
        with jax.named_scope("physics"):
            return energy(p, x)

    with wh.pipeline(num_micro_batches=4):
        return (jax.grad(inner)(b["x"]) ** 2).mean()


def jitted(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        slope = jax.grad(jax.jit(energy), argnums=1)(p, b["x"])
        return (slope**2).mean()


def checkpointed(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        slope = jax.grad(jax.checkpoint(energy), argnums=1)(p, b["x"])
        return (slope**2).mean()


def inside(p: Any, b: Any) -> Any:
    def piped(x: Any) -> Any:
        with wh.pipeline(num_micro_batches=4):
            return energy(p, x)

    return (jax.grad(piped)(b["x"]) ** 2).mean()


@pytest.mark.parametrize("loss", [force, penalty, scoped, jitted, checkpointed, inside])
@pytest.mark.parametrize("cluster", ["cpu:2", "cpu:3", "cpu:6"])
def test_a_derivative_through_stages_is_refused(loss: Loss, cluster: str) -> None:
    with pytest.raises(wh.WhaleError, match="the loss differentiates a function in"):
        planned(loss, cluster=cluster)


def test_a_derivative_inside_a_stage_is_none_through_stages() -> None:
    def loss(p: Any, b: Any) -> Any:
        with wh.pipeline(num_micro_batches=4):
            with wh.stage():
                h = jnp.tanh(b["x"] @ p["a"])
            with wh.stage():
                slope = jax.grad(lambda h: jnp.tanh(h @ p["b"]).sum())(h)
                return (slope**2).mean()

    assert len(planned(loss).stage_plans) == 2


def test_tangents_go_through_stages_with_their_values() -> None:
    def loss(p: Any, b: Any) -> Any:
        with wh.pipeline(num_micro_batches=4):
            ones = jnp.ones_like(b["x"])
            value, tangent = jax.jvp(lambda x: energy(p, x), (b["x"],), (ones,))
            return value / 24 + tangent**2

    assert len(planned(loss, per_micro_batch=True).stage_plans) == 2


def staged(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        with wh.stage():
            h = jnp.tanh(b["x"] @ p["a"])
        with wh.stage():
            return ((h @ p["b"]) ** 2).mean()


def plain(p: Any, b: Any) -> Any:
    return ((jnp.tanh(b["x"] @ p["a"]) @ p["b"]) ** 2).mean()


@pytest.mark.parametrize("loss", [staged, plain])
def test_an_optimizer_that_wants_more_than_a_step_has_is_named(loss: Loss) -> None:
    with pytest.raises(wh.WhaleError, match="missing 2 required keyword-only") as said:
        planned(loss, optimizer=optax.lbfgs())
    assert "value= (the loss), all that a step can give" in str(said.value)


def normed(p: Any, b: Any) -> Any:
    with wh.pipeline(num_micro_batches=4):
        h = b["x"] @ p["a"]
        h = (h - h.mean(0)) / (h.std(0) + 1e-3)
        return ((h @ p["b"]) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (
            staged,
            {"num_micro_batches": 8},
            "asks for num_micro_batches 4, but num_micro_batches=8 for 8. Drop one of",
        ),
        (
            normed,
            {"mesh": {"data": 2}},
            "num_micro_batches=4 of a mark: the loss is not proven to be a mean of",
        ),
    ],
)
def test_hints_that_contradict_each_other(
    loss: Loss, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(wh.PlanError) as caught:
        planned(loss, **options)
    assert text in str(caught.value)


def test_the_largest_of_all_samples_is_no_sum() -> None:
    def largest(p: Any, b: Any) -> Any:
        return ((b["x"] @ p["a"]) ** 2).max()

    with pytest.raises(wh.PlanError, match="applies reduce_max along the samples"):
        planned(largest, num_micro_batches=4)


@pytest.mark.parametrize("mesh", [{"tensor": 4}, {"data": 4}, {"fsdp": 2, "tensor": 2}])
def test_what_is_handed_on_is_priced_as_it_lies(mesh: dict[str, int]) -> None:
    """The borders' value is sharded over the axes of the products around it."""
    wide = {
        "a": jax.ShapeDtypeStruct((16, 512), jnp.float32),
        "b": jax.ShapeDtypeStruct((512, 32), jnp.float32),
    }
    plan = wh.plan(
        staged,
        wide,
        {"x": jax.ShapeDtypeStruct((64, 16), jnp.float32)},
        optimizer=optax.sgd(0.1),
        cluster="cpu:8",
        mesh=mesh,
    )
    assert plan.stages is not None
    _, last = plan.stages.paces
    assert last.handed_bytes == last.returned_bytes == 64 * 512 * 4 // 4 // 4
