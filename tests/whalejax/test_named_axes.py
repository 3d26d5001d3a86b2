"""Axes that a loss names, as code for ``jax.pmap`` does, stand for all samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import whalejax as wh
from tests.equality import check, free_links, on_one_device
from tests.whalejax.capture_zoo import captured
from whalejax.user_code.losses import Job


class Normal(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, axis_name: str | None = "batch") -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(nnx.relu(self.dense(x)))


def samples() -> Any:
    return jax.random.normal(jax.random.key(1), (16, 8))


def unnamed(model: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(model(x)) ** 2)


def named(model: Any, x: Any) -> Any:
    @jax.jit
    def means(y: Any) -> Any:
        return lax.pmean(y, "batch")

    x = x + lax.axis_index("batch").astype(x.dtype)  # its place, of one: 0
    total = lax.psum(jnp.sum(means(jnp.tanh(model(x))) ** 2), "batch")
    count = lax.psum(jnp.float32(x.size), "batch") + lax.axis_index("batch").astype(
        x.dtype
    )
    return total / count


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"num_micro_batches": 2, "per_micro_batch": True}]
)
def test_statistics_and_means_are_those_of_all(options: dict[str, Any]) -> None:
    count = options.get("num_micro_batches", 1)
    job = Job(unnamed, lambda: None, samples(), None, batch_size=16)
    one = on_one_device(job, count, model=Normal(nnx.Rngs(0), None))
    job = Job(named, lambda: None, samples(), None, batch_size=16)
    one = dataclasses.replace(one, job=job, model=Normal(nnx.Rngs(0)))
    outcome = check(one, **options)
    assert outcome.error < 1e-5, outcome.worst_path
    note = (
        'the loss names the axis "batch": it stands for all samples of a micro-batch, '
        "so that pmean and psum over it change nothing"
    )
    assert note in outcome.plan.notes


@pytest.mark.parametrize("reduce", [lax.pmean, lax.psum, lax.pmax])
def test_reductions_over_places_are_known(reduce: Any) -> None:
    """With ``axis_index``, the axis is a dimension of what is computed."""

    def loss(model: Any, x: Any) -> Any:
        place = lax.axis_index("batch").astype(x.dtype)
        each = lax.stop_gradient(reduce(x, "batch") + place) @ model["w"]
        return lax.pmean(jnp.mean(reduce(each, "batch") ** 2), "batch")

    found = captured({"w": jnp.ones((8, 8))}, loss, samples())
    assert found.graph.unknown_primitives == ()
    whole = found.graph.batch_size
    assert found.independence(whole // 2, whole, None).proven
    collectives = {"psum", "pmax"} & {op.kind for op in found.graph.ops}
    assert collectives


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.pmean(x, "batch", axis_index_groups=[[0, 1]]),
        lambda x: lax.ppermute(x, "batch", [(0, 1), (1, 0)]),
        lambda x: lax.all_to_all(x, "batch", 0, 0),
    ],
)
def test_what_needs_several_members_says_what_the_axis_is(collective: Any) -> None:
    with pytest.raises((RuntimeError, AssertionError, ValueError)) as caught:
        captured(
            {"w": jnp.ones((8, 8))}, lambda m, x: jnp.mean(collective(x)), samples()
        )
    notes = " ".join(caught.value.__notes__)
    assert 'axis "batch" stands for all samples and has size 1.' in notes
    assert "ppermute, all_to_all" in notes


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False, axis_name="devices")(x)


def test_linen_names_its_own_axis() -> None:
    model, x = Linen(), samples()
    shapes = jax.eval_shape(
        lambda: nn.BatchNorm(use_running_average=False).init(jax.random.key(0), x)
    )

    def loss(variables: Any, x: Any) -> Any:
        y, updates = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(y**2), wh.Aux(variables=updates)

    shapes = {kind: {"BatchNorm_0": tree} for kind, tree in shapes.items()}
    plan = wh.plan(loss, shapes, x, cluster=free_links(8))
    assert any('the axis "devices"' in note for note in plan.notes)


def test_another_name_is_still_an_error() -> None:
    def loss(p: Any, x: Any) -> Any:
        return (x @ p["w"]).mean() * undefined  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError, match="undefined"):
        wh.plan(loss, {"w": np.ones((8, 8), "f")}, samples(), cluster="h100:8")
