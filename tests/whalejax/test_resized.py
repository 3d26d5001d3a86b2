"""Another batch is another graph, told from the one that was traced where it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture, loss_programs
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.rebatch import rebatch_graph


VARIANTS: dict[str, Callable[[Captured], Captured]] = {
    "as written": lambda loss: loss,
    "remat dots": lambda loss: loss.with_remat((("*", "dots"),)),
    "ring, remat full": lambda loss: loss.with_attention((("*", "ring"),)).with_remat(
        (("*", "full"),)
    ),
    "chunks": lambda loss: loss.with_chunks(4),
}


def captured(name: str, batch_size: int, **options: Any) -> Captured:
    job = models.job(name, **options)
    batch = jax.eval_shape(lambda: job.batch_at(0, batch_size))
    model = adapt(jobs.abstract_model(job), job.loss_fn).without_values()
    return capture(model, batch)


def like(graph: Graph | None, other: Graph) -> Graph | None:
    """A graph with the hash of another, which ``resized`` leaves to its caller."""
    if graph is None:
        return None
    return dataclasses.replace(graph, model_hash=other.model_hash)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-test", {}),
        ("gpt-test", {"scan_layers": True}),
        ("bert-test", {"annotated": True}),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_graph_of_a_trace(
    name: str, options: dict[str, Any], variant: str
) -> None:
    few, many = (
        VARIANTS[variant](captured(name, n, **options)).graph for n in (10, 30)
    )
    assert few != many
    assert like(rebatch_graph(few, 30), many) == many
    assert like(rebatch_graph(many, 10), few) == few


def shares_of(net: Any, x: Any) -> Any:
    """A capacity that the model computes from the batch."""
    capacity = x.shape[0] * 3 // 4
    return (x[:capacity] @ net["w"]).mean()


def across(net: Any, x: Any) -> Any:
    """Samples that meet one another."""
    y = x @ net["w"]
    return (y @ y.T).mean()


def as_long(net: Any, x: Any) -> Any:
    """A dimension that is as long as the batch, and nothing says that it is it."""
    return (x @ net["w"]).mean() + jnp.arange(x.shape[0], dtype=x.dtype).mean()


def one_by_one(net: Any, x: Any) -> Any:
    """Samples that Python loops over: as many operations as there are samples."""
    return sum((x[i : i + 1] @ net["w"]).sum() for i in range(x.shape[0]))


def taken_apart(net: Any, x: Any) -> Any:
    """The same, with a split."""
    return sum((one @ net["w"]).sum() for one in jnp.split(x, x.shape[0]))


def single_numbers(net: Any, x: Any) -> Any:
    """Numbers of single samples."""
    return sum((x[i, 0] * net["w"]).sum() for i in range(x.shape[0]))


def as_many_rows(net: Any, x: Any) -> Any:
    """A part of a parameter, as long as the batch."""
    return ((x + net["w"][: x.shape[0]]) @ net["w"]).mean()


def as_often(net: Any, x: Any) -> Any:
    """A loop whose length the loss computes from the batch."""

    def again(_: Any, y: Any) -> Any:
        return jnp.tanh(y @ net["w"])

    return jax.lax.fori_loop(0, x.shape[0] - 1, again, x).mean()


NET = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}


def samples(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, 16), jnp.float32)


@pytest.mark.parametrize(
    "loss",
    [
        *(shares_of, across, one_by_one, taken_apart, single_numbers),
        *(as_many_rows, as_often),
    ],
)
def test_what_cannot_be_told_is_not_guessed(loss: Callable[..., Any]) -> None:
    graph = capture(adapt(NET, loss), samples(8)).graph
    assert rebatch_graph(graph, 32) is None


def test_one_sample_is_no_batch() -> None:
    graph = capture(adapt(NET, as_long), samples(8)).graph
    assert rebatch_graph(graph, 1) is None


def planned(loss: Callable[..., Any], count: int, **options: Any) -> wh.Plan:
    return wh.plan(
        loss, NET, samples(count), cluster="h100:2x8", mesh={"tensor": 1}, **options
    )


@pytest.mark.parametrize("loss", [shares_of, across, as_long])
def test_another_batch_is_planned_as_if_it_had_been_asked_for(
    loss: Callable[..., Any],
) -> None:
    assert planned(loss, 64).what_if(batch=128) == planned(loss, 128)


@pytest.fixture(scope="module")
def estimate() -> wh.Plan:
    return gpt(64)


def gpt(batch_size: int, **options: Any) -> wh.Plan:
    job = models.job("gpt-test", scan_layers=True)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, batch_size)),
        **{"cluster": "h100:2x8", **options},
    )


def answer(plan: wh.Plan) -> wh.Plan:
    """A plan without what depends on the order in which others were looked at.

    That is the notes, which say how many were, and which slower ones were weighed.
    """
    return dataclasses.replace(plan, notes=(), candidates=plan.candidates[:1])


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "a100-80:2x8"},
        {"cluster": "a100-80:8"},
        {"remat": "full"},
        {"num_micro_batches": 4},
        {"mesh": {"fsdp": 2, "tensor": 2}},
    ],
    ids=str,
)
def test_other_questions_are_answered_as_if_they_came_first(
    estimate: wh.Plan, changes: dict[str, Any]
) -> None:
    assert answer(estimate.what_if(**changes)) == answer(gpt(64, **changes))


@pytest.mark.full
@pytest.mark.relaxed_promotion  # optax promotes its step count
def test_the_order_of_questions_decides_no_tie() -> None:
    job = models.job("moe-test")
    first = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        jax.eval_shape(lambda: job.batch_at(0, 64)),
        optimizer=optax.adam(1e-3),
        cluster=wh.cluster("h100:2").with_memory(24_000_000),
    )
    assert first.axis_sizes == {"expert": 2}
    other = first.what_if(mesh={"tensor": 2})
    assert other.time.step_seconds == first.time.step_seconds
    assert other.what_if(mesh=None).axis_sizes == {"expert": 2}


def test_another_batch_is_not_traced(
    estimate: wh.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = gpt(256)

    def never(*args: Any, **options: Any) -> Captured:
        raise AssertionError("the model is traced again")

    monkeypatch.setattr(loss_programs, "capture", never)
    assert answer(estimate.what_if(batch=256)) == answer(fresh)
    with pytest.raises(AssertionError, match="is traced again"):
        estimate.what_if(precision="bf16")


def test_chunks_of_another_batch_are_checked_without_a_trace(
    estimate: wh.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(wh.PlanError, match="computes the logits") as fresh:
        gpt(256, loss_chunks=10**6)
    planned_fresh = gpt(256, loss_chunks=4)

    def never(*args: Any, **options: Any) -> Captured:
        raise AssertionError("the model is traced again")

    monkeypatch.setattr(loss_programs, "capture", never)
    assert answer(estimate.what_if(batch=256, loss_chunks=4)) == answer(planned_fresh)
    with pytest.raises(wh.PlanError) as resized:
        estimate.what_if(batch=256, loss_chunks=10**6)
    assert str(resized.value) == str(fresh.value)


def test_other_clusters_ask_the_optimizer_only_once_what_may_be_offloaded() -> None:
    counted = {"updates": 0}
    inner = optax.sgd(1e-3, momentum=0.9)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        counted["updates"] += 1
        return inner.update(updates, state, params)

    net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    plan = wh.plan(
        lambda net, x: ((x @ net["w"]) ** 2).mean(),
        net,
        x,
        optimizer=optax.GradientTransformation(inner.init, update),
        cluster="h100:2",
        offload="optimizer",
    )
    before = counted["updates"]
    plan.what_if(cluster="h100:4")
    # The operations of an update are counted for each plan.
    assert counted["updates"] - before == 1
