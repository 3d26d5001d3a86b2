"""Graphs: nodes are the samples, and edges number them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh


NODES, EDGES = 64, 40
AXES = {"nodes": 0, "senders": None, "receivers": None, "labels": 0}
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def _random(*shape: int, seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _numbers(count: int, below: int, seed: int) -> Any:
    found = np.random.default_rng(seed).integers(0, below, count)
    return jnp.asarray(found, jnp.int32)


GRAPH = {
    "nodes": _random(NODES, 8, seed=0),
    "senders": _numbers(EDGES, NODES, 1),
    "receivers": _numbers(EDGES, NODES, 3),
    "labels": _numbers(NODES, 4, 2),
}
PARAMS = {
    "embed": 0.3 * _random(8, 32, seed=1),
    "message": 0.3 * _random(32, 32, seed=2),
    "out": 0.3 * _random(32, 4, seed=3),
}


def loss(params: Any, graph: Any, count: int = NODES) -> Any:
    x = jnp.tanh(graph["nodes"] @ params["embed"])
    sent = (x @ params["message"])[graph["senders"]]
    x = jnp.tanh(x + jax.ops.segment_sum(sent, graph["receivers"], num_segments=count))
    each = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["out"], graph["labels"]
    )
    return each.mean()


def of_any_size(params: Any, graph: Any) -> Any:
    return loss(params, graph, graph["nodes"].shape[0])


def planned(loss_fn: Any = of_any_size, **options: Any) -> wh.Plan:
    cluster = wh.cluster("cpu:8").with_memory(14_000)
    given = {"cluster": cluster, "batch_axes": AXES, "optimizer": OPTIMIZER}
    return wh.plan(loss_fn, PARAMS, GRAPH, **{**given, **options})


@pytest.mark.parametrize("loss_fn", [loss, of_any_size])
def test_one_micro_batch_is_taken_where_edges_number_nodes(loss_fn: Any) -> None:
    plan = planned(loss_fn)
    assert plan.num_micro_batches == 1


def test_a_step_on_a_graph_equals_one_device() -> None:
    plan = planned(cluster="cpu:8")
    step = wh.compile(plan, of_any_size, PARAMS, optimizer=OPTIMIZER, batch_axes=AXES)
    _, metrics = step(step.init_from(PARAMS), GRAPH)
    np.testing.assert_allclose(metrics["loss"], loss(PARAMS, GRAPH), rtol=1e-5)


def test_more_micro_batches_lose_edges_and_are_refused() -> None:
    with pytest.raises(wh.PlanError, match="takes samples of the batch by an index"):
        planned(cluster="cpu:8", num_micro_batches=2)


def test_a_loss_that_takes_no_part_of_a_graph_says_which_part_it_was_given() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        planned(loss, num_micro_batches=2)
    said, cause = str(caught.value), caught.value.__cause__
    assert "accepts the batch of 64 samples, but no micro-batch of 32" in said
    assert f"{type(cause).__name__}: " in said and "(test_graph_batches.py:" in said
    assert (
        "whalejax: raised in loss_fn, traced without values for a micro-batch of 32 of "
        "the batch's 64 samples"
    ) in getattr(cause, "__notes__", [])


def test_what_a_loss_raises_on_the_whole_batch_is_passed_on() -> None:
    def never(params: Any, batch: Any) -> Any:
        return jnp.reshape(params["message"], (-1, 7)).sum() + jnp.sum(batch["x"])

    with pytest.raises(TypeError, match="reshape"):
        planned(never, num_micro_batches=2)


def test_tables_that_all_samples_read_keep_their_micro_batches() -> None:
    def by_place(params: Any, batch: Any) -> Any:
        places = params["embed"][batch["places"]]
        return jnp.mean((batch["x"] @ params["message"] @ places.T) ** 2)

    plan = wh.plan(
        by_place,
        {"embed": _random(8, 32, seed=1), "message": PARAMS["message"]},
        {"x": _random(NODES, 32, seed=0), "places": _numbers(4, 8, 1)},
        cluster="cpu:8",
        batch_axes={"x": 0, "places": None},
        num_micro_batches=2,
    )
    assert plan.num_micro_batches == 2
