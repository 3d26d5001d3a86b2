"""Adasum over the ranks of ``data``: its algebra, any number of ranks, whole steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import AxisType, Mesh

import whalejax as wh
from tests.adasum import (
    differ,
    difference,
    on_devices,
    reference,
    scaled_pair,
    tree,
)
from tests.compilations import count_compilations
from tests.processes import finish, start
from whalejax import hlo
from whalejax.lowering.spmd.adasum import adasum_reduce
from whalejax.planner.cost.adasum_cost import COLUMN, DOT_NUMBERS


TIGHT = 1e-6
"""Of the norm of a tensor, against float64 of the same inputs."""

NEAR = 1e-5
"""The same where gradients of one device are compared, which round otherwise."""

LAYERS, WIDTH = 3, 8


# Algebra.


@functools.cache
def _two() -> Any:
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    ones = np.ones(2, np.float32)
    return jax.jit(lambda x: adasum_reduce([x], ones, [((),)], [1], mesh)[0])


def _of(a: Any, b: Any) -> np.ndarray:
    return np.asarray(_two()(np.asarray([a, b], np.float32)), np.float64)


_NUMBERS = st.floats(-8, 8, width=32).map(lambda x: x if abs(x) > 0.125 else 0.0)
_VECTORS = arrays.arrays(np.float32, 12, elements=_NUMBERS)


@settings(max_examples=25)
@given(_VECTORS, st.sampled_from([-2.0, -1.0, 0.25, 1.0, 3.0]))
def test_parallel_tensors_are_averaged(a: np.ndarray, c: float) -> None:
    near = TIGHT * np.linalg.norm(a)
    assert np.linalg.norm(_of(a, c * a) - (1 + c) / 2 * a) <= near


@settings(max_examples=25)
@given(_VECTORS, _VECTORS)
def test_orthogonal_tensors_are_added_up(a: np.ndarray, b: np.ndarray) -> None:
    one, other = a * (np.arange(12) < 6), b * (np.arange(12) >= 6)
    assert np.array_equal(_of(one, other), one + other)


@settings(max_examples=25)
@given(_VECTORS)
def test_zero_is_neutral(a: np.ndarray) -> None:
    nothing = np.zeros_like(a)
    assert np.array_equal(_of(a, nothing), a) and np.array_equal(_of(nothing, a), a)


@settings(max_examples=25)
@given(_VECTORS, _VECTORS, st.integers(-120, 121))
def test_homogeneous_whatever_the_scale(
    a: np.ndarray, b: np.ndarray, power: int
) -> None:
    """From the smallest normal floats to the largest, of which squares are none."""
    found = _of(np.ldexp(a, power), np.ldexp(b, power))
    expected = np.ldexp(_of(a, b), power)
    least = np.finfo(np.float32).tiny  # What is smaller the compiler may take for 0.
    assert np.array_equal(found, np.where(abs(expected) < least, 0, expected))


@settings(max_examples=25)
@given(_VECTORS, _VECTORS, st.integers(-110, 121), st.integers(-110, 121))
def test_two_ranks_of_unlike_scales(
    a: np.ndarray, b: np.ndarray, i: int, j: int
) -> None:
    found = np.ldexp(_of(np.ldexp(a, i), np.ldexp(b, j)), -max(i, j))
    expected = scaled_pair(a.astype(np.float64), b.astype(np.float64), i, j)
    assert difference(found, expected) <= TIGHT


@settings(max_examples=25)
@given(_VECTORS, _VECTORS, st.integers(-900, 1000), st.integers(-900, 1000))
def test_the_whole_range_of_float64(
    a: np.ndarray, b: np.ndarray, i: int, j: int
) -> None:
    one, other = a.astype(np.float64), b.astype(np.float64)
    with jax.enable_x64(True):
        given = np.stack([np.ldexp(one, i), np.ldexp(other, j)])
        found = np.ldexp(np.asarray(_two()(given)), -max(i, j))
    assert difference(found, scaled_pair(one, other, i, j)) <= 1e-12


def test_sums_of_some_ranks_may_exceed_what_floats_hold() -> None:
    """The first two are orthogonal, the third is parallel to their sum."""
    ranks = np.ldexp(np.asarray([[1, 1], [1, -1], [1, 0]], np.float32), 127)
    (found,) = on_devices([ranks], [1])
    assert np.array_equal(found, np.ldexp(np.asarray([1.5, 0], np.float32), 127))


def test_another_order_of_ranks_gives_another_result() -> None:
    draw = np.random.default_rng(0).normal(size=(4, 50))
    other = tree([draw[i] for i in (0, 2, 1, 3)])
    assert difference(other, tree(draw)) > 0.01


# Any number of ranks.


def _tensors(ranks: int) -> tuple[list[np.ndarray], list[int]]:
    """Float16 numbers as float32: vectors, stacked layers, and a number alone."""
    draw = np.random.default_rng(ranks)
    shapes = {(3, 40, 8): 3, (7,): 1, (): 1, (4, 130): 1}
    stacked = [
        (draw.normal(size=(ranks, *s)) + 2 * draw.normal(size=s))
        .astype(np.float16)
        .astype(np.float32)
        for s in shapes
    ]
    return stacked, [*shapes.values()]


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4, 5, 6, 7, 8))]
)
def test_ranks_agree_with_the_definition(ranks: int) -> None:
    stacked, slices = _tensors(ranks)
    found = on_devices(stacked, slices)
    for x, own, several in zip(found, stacked, slices, strict=True):
        assert differ(x) == 0
        assert difference(x, reference(own, several), several) <= TIGHT


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 3, "tensor": 2}]
)
def test_dot_products_are_summed_over_axes_that_share_a_parameter(
    mesh: dict[str, int],
) -> None:
    stacked, slices = _tensors(mesh["data"])
    fsdp = ("fsdp",) if "fsdp" in mesh else ()
    specs = [((), fsdp, ("tensor",)), ((),), (), (fsdp, ("tensor",))]
    found = on_devices(stacked, slices, specs=specs, mesh=mesh)
    for x, own, several in zip(found, stacked, slices, strict=True):
        assert differ(x) == 0
        assert difference(x, reference(own, several), several) <= TIGHT


@pytest.mark.full
def test_layers_may_lie_on_several_devices() -> None:
    draw = np.random.default_rng(1).normal(size=(2, 4, 10)).astype(np.float32)
    mesh = {"data": 2, "fsdp": 2}
    (found,) = on_devices([draw], [4], specs=[(("fsdp",), ())], mesh=mesh)
    assert difference(found, reference(draw, 4), 4) <= TIGHT


@pytest.mark.full
def test_ranks_of_a_node_are_averaged_by_the_weights_of_their_samples() -> None:
    draw = np.random.default_rng(2).normal(size=(4, 30)).astype(np.float32)
    by = [1.0, 3.0, 0.0, 2.0]
    draw[2] = 0.0
    (found,) = on_devices([draw], [1], weights=by, node=2)
    nodes = [draw[:2].sum(0) / 4.0, draw[2:].sum(0) / 2.0]
    assert difference(found, tree(nodes)) <= TIGHT


# Whole steps.


def _scanned(params: Any, batch: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w["kernel"] + w["bias"][None]), None

    h, _ = jax.lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return ((h @ params["out"] - batch["y"]) ** 2).mean()


def _unrolled(params: Any, batch: Any) -> Any:
    layers = [
        {"kernel": params[f"kernel{i}"], "bias": params[f"bias{i}"]}
        for i in range(LAYERS)
    ]
    h = batch["x"] @ params["into"]
    for w in layers:
        h = jnp.tanh(h @ w["kernel"] + w["bias"][None])
    return ((h @ params["out"] - batch["y"]) ** 2).mean()


def _model(scanned: bool = True) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    kernel = 0.5 * jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH))
    bias = 0.1 * jax.random.normal(keys[2], (LAYERS, WIDTH))
    ends = {
        "into": 0.5 * jax.random.normal(keys[0], (4, WIDTH)),
        "out": 0.5 * jax.random.normal(keys[3], (WIDTH, 2)),
    }
    if scanned:
        return {"layers": {"kernel": kernel, "bias": bias}, **ends}
    each = {f"kernel{i}": kernel[i] for i in range(LAYERS)}
    return {**each, **{f"bias{i}": bias[i] for i in range(LAYERS)}, **ends}


def _batch(samples: int = 16) -> Any:
    draw = np.random.default_rng(3)
    shapes = {"x": (samples, 4), "y": (samples, 2)}
    return {k: jnp.asarray(draw.normal(size=s), jnp.float32) for k, s in shapes.items()}


_KEEPS = optax.chain(optax.trace(decay=0.0), optax.scale(-0.125))
"""Keeps the gradient that it is given."""


def _step(mesh: dict[str, int], scanned: bool = True, **options: Any) -> Any:
    loss, model = (_scanned if scanned else _unrolled), _model(scanned)
    devices = int(np.prod([*mesh.values()]))
    asked = {"optimizer": _KEEPS, "combine": "adasum"} | options
    tx = asked["optimizer"]
    cluster = asked.pop("cluster", f"cpu:{devices}")
    plan = wh.plan(loss, model, _batch(), cluster=cluster, mesh=mesh, **asked)
    step = wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices()[:devices])
    return step, model


def _expected(ranks: int) -> Any:
    """Gradients of every rank's own samples by one device, combined."""
    model, batch = _model(), _batch()
    cut = jax.tree.map(lambda x: x.reshape(ranks, -1, *x.shape[1:]), batch)
    each = [
        jax.grad(_scanned)(model, jax.tree.map(lambda x, r=r: x[r], cut))
        for r in range(ranks)
    ]
    return jax.tree_util.tree_map_with_path(
        lambda path, *own: reference(
            np.stack(own), LAYERS if path[0].key == "layers" else 1
        ),
        *each,
    )


def _assert_near(found: Any, expected: Any, near: float = NEAR) -> None:
    pairs = jax.tree_util.tree_map_with_path(
        lambda path, x, y: difference(x, y, LAYERS if path[0].key == "layers" else 1),
        found,
        expected,
    )
    assert max(jax.tree.leaves(pairs)) <= near, pairs


def _combining(plan: wh.Plan) -> Counter[Any]:
    return Counter(
        {
            (c.kind, frozenset(c.axes), c.payload_bytes): c.count
            for c in plan.collectives
            if c.phase == "update" and c.what == "gradient"
        }
    )


def test_a_step_combines_as_planned() -> None:
    """Four micro-batches on two ranks of two tensor-parallel devices."""
    mesh = {"data": 2, "tensor": 2}
    step, model = _step(mesh, num_micro_batches=4)
    state = step.init_from(model)
    with count_compilations() as compiled:
        for _ in range(2):
            state, metrics = step(state, _batch())
            if int(state.step) == 1:
                _assert_near(state.opt_state[0].trace, _expected(2))
                assert np.isclose(metrics["loss"], _scanned(model, _batch()))
    assert compiled.count == 1
    assert sum(map(differ, jax.tree.leaves(state.params))) == 0
    found = hlo.collectives(step.lower().compile().as_text()).instructions
    there = Counter(
        (i.kind, frozenset(i.axes(step.plan.axis_sizes) or ()), i.payload_bytes)
        for i in found
        for _ in range(i.count)
    )
    planned = _combining(step.plan)
    assert sum(planned.values()) == 3 and not planned - there
    over_data = Counter({k: n for k, n in there.items() if "data" in k[1]})
    assert not {k for k in over_data - planned if k[2] > 64}
    assert "Adasum of gradients" in step.plan.describe()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 8])
def test_scanned_and_unrolled_layers_are_combined_alike(ranks: int) -> None:
    samples = {3: 15, 8: 16}[ranks]
    found = []
    for scanned in (True, False):
        loss, model = (_scanned if scanned else _unrolled), _model(scanned)
        plan = wh.plan(
            *(loss, model, _batch(samples)),
            cluster=f"cpu:{ranks}",
            mesh={"data": ranks},
            combine="adasum",
            optimizer=_KEEPS,
        )
        step = wh.compile(
            *(plan, loss, model), optimizer=_KEEPS, devices=jax.devices()[:ranks]
        )
        state, _ = step(step.init_from(model), _batch(samples))
        found.append(state.opt_state[0].trace)
    stacked, alone = found
    for i in range(LAYERS):
        for name in ("kernel", "bias"):
            one, other = stacked["layers"][name][i], alone[f"{name}{i}"]
            assert difference(one, np.asarray(other, np.float64)) <= NEAR


@pytest.mark.full
def test_float16_skips_a_step_on_all_ranks_at_once() -> None:
    step, model = _step({"data": 2}, precision="f16", num_micro_batches=2)
    state = step.init_from(model)
    batch = _batch()
    far = {**batch, "x": batch["x"].at[0].set(jnp.inf)}
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, far)
    assert int(metrics["skipped_steps"]) == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, state.params))
    for _ in range(8):  # The first scales are too large for some gradients.
        skipped = int(metrics["skipped_steps"])
        state, metrics = step(state, batch)
        if int(metrics["skipped_steps"]) == skipped:
            break
    _assert_near(state.opt_state[0].trace, _expected(2), near=2e-2)


@pytest.mark.full
def test_clipping_and_evaluation() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(0.01), _KEEPS)
    step, model = _step({"data": 2}, optimizer=clipped, zero=1)
    state, metrics = step(step.init_from(model), _batch())
    norm = optax.tree.norm(state.opt_state[1][0].trace)
    assert np.isclose(norm, 0.01, rtol=1e-5)
    fresh = step.init_from(model)
    assert np.isclose(step.eval(fresh, _batch())["loss"], metrics["loss"])


@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_updates_of_ranks_are_combined_and_their_moments_averaged(
    tmp_path: Any,
) -> None:
    tx = optax.adam(0.01)
    step, model = _step({"data": 2}, optimizer=tx, combine="adasum_updates")
    state, _ = step(step.init_from(model), _batch())
    ranks, states = [], []
    for r in range(2):
        own = jax.tree.map(lambda x, r=r: x.reshape(2, -1, *x.shape[1:])[r], _batch())
        grads = jax.grad(_scanned)(model, own)
        changes, after = tx.update(grads, tx.init(model), model)
        ranks.append(changes)
        states.append(after)
    expected = jax.tree_util.tree_map_with_path(
        lambda path, *own: reference(
            np.stack(own), LAYERS if path[0].key == "layers" else 1
        ),
        *ranks,
    )
    moved = jax.tree.map(lambda x, y: x - y, state.params, model)
    _assert_near(moved, expected, near=1e-3)
    mean = jax.tree.map(lambda x, y: (x + y) / 2, states[0][0].mu, states[1][0].mu)
    _assert_near(state.opt_state[0].mu, jax.tree.map(np.asarray, mean))
    step.save(tmp_path / "saved", state)
    kept = jax.tree.map(np.asarray, state.opt_state)
    for combine in ("adasum_updates", "mean"):
        other, _ = _step({"data": 2}, optimizer=tx, combine=combine)
        read = other.restore(tmp_path / "saved")
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, read.opt_state))
        other(read, _batch())


@pytest.mark.full
def test_ranks_of_a_node_are_averaged_before_nodes_combine() -> None:
    four = wh.cluster("cpu:4")
    node = dataclasses.replace(four.nodes[0], count=2)
    inside = dataclasses.replace(four.levels[0], size=2)
    across = dataclasses.replace(inside, name="network", latency_seconds=1e-4)
    machine = dataclasses.replace(four, nodes=(node, node), levels=(inside, across))
    step, model = _step({"data": 4}, combine="adasum_nodes", cluster=machine)
    state, _ = step(step.init_from(model), _batch())
    _assert_near(state.opt_state[0].trace, _expected(2))
    assert any("2 groups of 2 ranks" in note for note in step.plan.notes)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", {"*": "bf16"}])
def test_gradients_in_16_bits_are_combined_in_32(precision: Any) -> None:
    step, model = _step({"data": 2}, precision=precision)
    state, _ = step(step.init_from(model), _batch())
    _assert_near(state.opt_state[0].trace, _expected(2), near=5e-2)


@pytest.mark.full
@pytest.mark.parametrize("parts", [1, 4])
def test_metrics_and_rows_are_those_of_the_global_batch(parts: int) -> None:
    model, batch = _model(), _batch()

    def loss(params: Any, batch: Any) -> Any:
        rows = batch["x"] @ params["into"]
        metrics = {"mean": rows.mean(), "most": rows.max(), "rows": rows[:, 0]}
        metrics["positive"] = (rows > 0).sum()
        aux = wh.Aux(metrics=metrics, samples={"asked": rows})
        return ((rows @ params["out"]) ** 2).mean(), aux

    ends = {name: model[name] for name in ("into", "out")}
    plan = wh.plan(
        *(loss, ends, batch),
        cluster="cpu:2",
        mesh={"data": 2},
        num_micro_batches=parts,
        combine="adasum",
        optimizer=_KEEPS,
    )
    step = wh.compile(*(plan, loss, ends), optimizer=_KEEPS, devices=jax.devices()[:2])
    _, metrics = step(step.init_from(ends), batch)
    rows = batch["x"] @ ends["into"]
    assert np.allclose(metrics["rows"], rows[:, 0], atol=1e-6)
    assert np.isclose(metrics["mean"], rows.mean(), atol=1e-6)
    assert np.isclose(metrics["most"], rows.max())
    assert metrics["positive"] == (rows > 0).sum()
    assert np.allclose(metrics["asked"], rows, atol=1e-6)


_PROCESS = """
import json
import numpy as np
from tests.whalejax.test_adasum import _batch, _step

step, model = _step({"data": 2, "tensor": 2}, num_micro_batches=2)
state = step.init_from(model)
rows = step.batch_rows()
state, metrics = step(state, jax.tree.map(lambda x: x[rows], _batch()))
everywhere = jax.sharding.NamedSharding(step.mesh, jax.P())
leaves = jax.tree.leaves(state.opt_state[0].trace)
whole = jax.jit(lambda x: x, out_shardings=everywhere)(leaves)
found = [np.asarray(x.addressable_data(0)).tolist() for x in whole]
print(json.dumps([float(metrics["loss"]), found]), flush=True)
"""


@pytest.mark.full
def test_ranks_of_two_processes_combine() -> None:
    outputs = finish(start(_PROCESS, devices=2))
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    tree = jax.tree.structure(_model())
    found = tree.unflatten([np.asarray(x) for x in first[1]])
    _assert_near(found, _expected(2))
    assert np.isclose(first[0], _scanned(_model(), _batch()))


# Bad input.


def _refusal(cluster: str = "cpu:4", **options: Any) -> str:
    loss, model = options.pop("loss", _scanned), options.pop("model", _model())
    asked = {"optimizer": optax.sgd(0.1), "combine": "adasum"} | options
    with pytest.raises(wh.WhaleError) as error:
        wh.plan(loss, model, _batch(), cluster=cluster, **asked)
    return str(error.value)


def test_one_rank_has_nothing_to_combine_with() -> None:
    assert (
        'combine is "adasum", and mesh= gives data 1 rank on 4 devices: one rank has '
        "nothing to combine with. Give data at least 2, and other axes less, or "
        "leave combine out"
    ) in _refusal(mesh={"data": 1, "tensor": 4})
    text = _refusal("cpu:1")
    assert "data is at most 1 on 1 device:" in text and "Use more devices" in text
    assert "data is at most 1 on 4 devices" in _refusal(mesh={"fsdp": 4})


@pytest.mark.relaxed_promotion
def test_several_problems_are_told_at_once() -> None:
    text = _refusal(mesh={"data": 1, "depth": 2, "stage": 2}, shares=[1, 1])
    for problem in (
        "mesh= gives data 1 rank on",
        "counts all ranks alike",
        "neither shares=",
    ):
        assert problem in text
    assert "mesh= fixes depth 2, and stages of a pipeline do not share" in text
    text = _refusal(shares=[3, 1], zero=2, num_micro_batches=4, mesh={"data": 2})
    assert "shares is [3, 1]" in text and "counts all ranks alike" in text
    assert 'zero is 2, but with combine "adasum" each rank has its full' in text
    text = _refusal(
        combine="adasum_updates", zero=1, offload="optimizer", optimizer=optax.adam(0.1)
    )
    assert "offload is optimizer" in text
    assert "expected 0. Give 0, or shard over the mesh axis fsdp" in text


def test_parameters_without_gradient_are_named() -> None:
    model = {**_model(), "unread": jnp.ones((3,))}
    assert (
        "1 of 5 trained parameters have no gradient, because the loss does not read "
        "them, or only behind stop_gradient: unread. They cannot be combined; leave "
        "them out of trainable="
    ) in _refusal(model=model)


def test_unknown_ways_stages_and_lone_nodes_are_refused() -> None:
    text = _refusal(combine="sum")
    assert re.search("combine is 'sum'; expected one of 'mean', 'adasum'", text)
    assert "leave combine out, or the axis stage" in _refusal(mesh={"stage": 2}).lower()
    with pytest.raises(wh.WhaleError, match="combine is 'sum'; expected one of"):
        dataclasses.replace(_plan(), combine="sum")
    text = _refusal(combine="adasum_nodes")
    assert "all 4 devices are on one node" in text and 'Choose "adasum"' in text


def test_statistics_of_the_global_batch_are_none_of_a_rank() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params["into"]
        return (((h - h.mean(0, keepdims=True)) @ params["out"]) ** 2).mean()

    ends = {name: x for name, x in _model().items() if name != "layers"}
    text = _refusal(loss=loss, model=ends)
    assert 'parts of ranks that combine by "adasum", of' in text
    assert "combines each sample with a sum over all of them" in text


def test_what_ranks_report_must_be_told_how_to_be_put_together() -> None:
    def loss(params: Any, batch: Any) -> Any:
        odd = jnp.sort(batch["x"][:, 0])[:3]
        return _scanned(params, batch), wh.Aux(metrics={"odd": odd})

    text = _refusal(loss=loss)
    assert "cannot be put together" in text and 'plan with combine="mean"' in text


# Plans.


@functools.cache
def _plan() -> wh.Plan:
    asked = {"cluster": "cpu:4", "combine": "adasum", "num_micro_batches": 1}
    return wh.plan(_scanned, _model(), _batch(), **asked)


def test_the_planner_gives_data_several_ranks() -> None:
    assert _plan().axis_sizes["data"] > 1 and _plan().combine == "adasum"
    assert _plan().what_if(combine="mean").combine == "mean"


def test_files_hold_the_way_where_it_is_not_the_mean() -> None:
    """So plans of before, which know of no other, are read as they are."""
    document = _plan().document()
    assert wh.Plan.from_document(document) == dataclasses.replace(
        _plan(), question=None
    )
    assert document["combine"] == "adasum"
    assert "combine" not in _plan().what_if(combine="mean").document()
    alone = {**document, "axes": [["fsdp", 4]], "zero": 2}
    with pytest.raises(wh.WhaleError) as error:
        wh.Plan.from_document(alone)
    assert "combine is adasum; data has 1 rank" in str(error.value)
    assert "it cannot be combined with zero 2" in str(error.value)


@pytest.mark.parametrize("combine", ["adasum", "adasum_updates"])
def test_ranks_send_as_much_as_an_all_reduce_does(combine: str) -> None:
    """Of tensors that divide; and the levels send numbers alone."""
    model = {"w": jax.ShapeDtypeStruct((4096, 64), jnp.float32)}
    batch = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    plan = wh.plan(
        *(lambda m, x: ((x @ m["w"]) ** 2).mean(), model, batch),
        cluster="h100:8",
        mesh={"data": 8},
        optimizer=optax.sgd(0.1, momentum=0.9),
        combine=combine,
    )
    nbytes = 4096 * 64 * 4
    sent = [c for c in plan.collectives if c.what == "gradient"]
    kinds = [c.kind for c in sent]
    assert kinds == ["all-to-all", *["all-gather"] * 4]
    assert sent[0].payload_bytes == nbytes + 8 * COLUMN * 4
    assert sent[-1].payload_bytes == nbytes
    assert [c.payload_bytes for c in sent[1:4]] == [
        DOT_NUMBERS * 8 * 4 * n for n in (4, 2, 1)
    ]
    moments = [c for c in plan.collectives if c.what == "moments"]
    assert [c.payload_bytes for c in moments] == [nbytes] * (combine != "adasum")
