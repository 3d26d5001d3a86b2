"""Layers are found, and written once where they are alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from whalejax import models
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.capture.precision import at_precision
from whalejax.jobs import abstract_model
from whalejax.meshes import cluster
from whalejax.planner.model import repeated_layers as layers_module
from whalejax.planner.model.dimension_analysis import analyse
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.layer_chain import (
    ENDS,
    EVERYWHERE,
    FIRST,
    LAST,
    LAYER,
    chain_of,
)
from whalejax.planner.model.repeated_layers import find_layers
from whalejax.planner.search.batched.branch_and_bound import WideSearch
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.parameter_layout import OptimizerBytes


def captured(name: str, **options: Any) -> Graph:
    job = models.job(name, **options)
    return capture(adapt(abstract_model(job), job.loss_fn), job.batch_at(0, 16)).graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-test", {"layers": 6}),
        ("bert-test", {"layers": 6}),
        ("moe-test", {"layers": 6}),
    ],
)
def test_equal_layers_are_written_once(name: str, options: dict[str, Any]) -> None:
    graph = captured(name, **options)
    found = find_layers(graph)
    assert found.count == 6 and not found.scanned
    assert len(found.graph.ops) < 0.6 * len(graph.ops)
    # All the work is still there.
    assert sum(op.flops * op.trip for op in found.graph.ops) == sum(
        op.flops * op.trip for op in graph.ops
    )
    assert sum(found.leaf_times.get(t.path, 1) for t in found.graph.params) == len(
        graph.params
    )
    assert [t.id for t in found.graph.tensors] == list(range(len(found.graph.tensors)))


@pytest.mark.full
def test_what_is_written_once_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("gpt-test", layers=6)
    machine = cluster("h100:4")
    request = Request(
        optimizer=OptimizerBytes(by_path={t.path: 8 * t.size for t in graph.params}),
        num_devices=4,
    )
    once = WideSearch(graph, machine, request)
    once.run()
    monkeypatch.setattr(layers_module, "FEWEST", 10**6)
    whole = WideSearch(graph, machine, request)
    whole.run()
    assert len(whole.graph.ops) > 2 * len(once.graph.ops)
    assert once.tally.best == pytest.approx(whole.tally.best, rel=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_scan_is_found_by_what_it_slices(precision: str) -> None:
    job = models.job("llama-test", layers=5, embed=128)
    adapter = at_precision(adapt(abstract_model(job), job.loss_fn), precision)
    # nnx.RMSNorm widens bfloat16 by implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        found = find_layers(capture(adapter, job.batch_at(0, 16)).graph)
    assert found.scanned and found.count == 5
    dims = analyse(found.graph)
    chain = chain_of(found.graph, dims, found, [])
    assert {spot.place for spot in chain.spots} == {FIRST, LAYER, LAST}
    (stream,) = chain.stream()
    assert chain.graph.tensors[stream].shape == (16, 24, 128)
    inside = [t for t, place in chain.leaf_places().items() if place == LAYER]
    assert len(inside) == 9
    assert EVERYWHERE not in chain.leaf_places().values()


def test_layers_that_differ_stay_as_they_are() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        for index, layer in enumerate(net["layers"]):
            x = x @ layer
            x = jnp.tanh(x) if index == 3 else jnp.sin(x)
        return jnp.mean(x)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    graph = capture(adapt({"layers": [w] * 6}, loss), x).graph
    found = find_layers(graph)
    assert found.count == 6
    assert found.graph == graph


def stack(count: int, extra: int = 0) -> dict[str, Any]:
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    net: dict[str, Any] = {"layers": {str(i): {"w": w} for i in range(count)}}
    return net | {f"extra{i}": w for i in range(extra)}


def through(order: Any) -> Any:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        for index in order:
            x = jnp.tanh(x @ net["layers"][str(index)]["w"])
        return jnp.mean(x)

    return loss


X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.parametrize(
    ("order", "count"),
    [
        (range(6), 6),
        (range(5), 5),
        ([0, 1, 2, 4, 5], 5),
        (range(5, -1, -1), 6),
        ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], 1),
    ],
)
def test_layers_are_numbered_by_use(order: Any, count: int) -> None:
    graph = capture(adapt(stack(6), through(order)), X).graph
    assert find_layers(graph).count == count


def test_all_parameters_are_counted_once() -> None:
    graph = capture(adapt(stack(6, extra=3), through(range(6))), X).graph
    request = Request(optimizer=OptimizerBytes(by_path={}), num_devices=1)
    search = WideSearch(graph, cluster("h100:1"), request)
    (case, *_) = search.run()
    stored = case.weighed.memory_terms(case.row).params_bytes
    assert stored == 9 * 256 * 256 * 4


def test_a_loop_over_time_is_no_stack_of_layers() -> None:
    def loss(net: Any, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ net["w"] + one), None

        last, _ = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return jnp.mean(last)

    net = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 32, 256), jnp.float32)
    assert find_layers(capture(adapt(net, loss), x).graph).count == 1


def test_shared_parameters_lie_where_they_are_read() -> None:
    graph = captured("gpt-test", layers=4, tied_embedding=True)
    layers = find_layers(graph)
    chain = chain_of(layers.graph, analyse(layers.graph), layers, [])
    places = {
        chain.graph.tensors[t].path: place for t, place in chain.leaf_places().items()
    }
    assert places["tokens.embedding"] == ENDS
    assert places["blocks.0.up.kernel"] == LAYER

    def loss(net: Any, x: jax.Array) -> jax.Array:
        for index in range(4):
            x = jnp.tanh(x @ net["layers"][str(index)]["w"]) + net["extra0"][:1]
        return jnp.mean(x)

    layers = find_layers(capture(adapt(stack(4, extra=1), loss), X).graph)
    chain = chain_of(layers.graph, analyse(layers.graph), layers, [])
    (shared,) = [t.id for t in chain.graph.params if t.path == "extra0"]
    assert chain.leaf_places()[shared] == EVERYWHERE


def test_without_repeated_layers_there_is_one() -> None:
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    graph = capture(adapt({"w": w}, lambda net, x: (x @ net["w"]).mean()), x).graph
    found = find_layers(graph)
    assert found.count == 1 and set(found.layer_of) == {0}
    assert dataclasses.replace(found).graph is graph
