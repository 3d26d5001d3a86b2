"""Capture of whole models: tensors, operations, positions, gradients, speed of growth.

Expected numbers are worked out by hand from the sizes in ``capture_zoo``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import whalejax as wh
from tests.whalejax.capture_zoo import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    MLP,
    SEQ,
    VOCAB,
    ConvNet,
    Transformer,
    captured,
    conv_batch,
    conv_loss,
    conv_net,
    linen_batch,
    linen_loss,
    linen_variables,
    mlp_batch,
    mlp_loss,
    mlp_params,
    transformer,
    transformer_batch,
    transformer_loss,
)
from whalejax import _compat
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.capture.walk import inner_jaxprs, recursion
from whalejax.planner.model.graph import Graph, Op
from whalejax.planner.model.logical_dimensions import analyse


pytestmark = pytest.mark.relaxed_promotion

FORMS = ("unrolled", "remat", "jit", "scan")
ZOO = {
    "mlp": lambda: captured(mlp_params(), mlp_loss, mlp_batch()),
    **{
        form: lambda form=form: captured(
            transformer(form), transformer_loss, transformer_batch()
        )
        for form in FORMS
    },
    "tied": lambda: captured(
        transformer(tied=True), transformer_loss, transformer_batch()
    ),
    "linen": lambda: captured(linen_variables(), linen_loss, linen_batch()),
    "conv": lambda: captured(conv_net(), conv_loss, conv_batch()),
}


@pytest.fixture(scope="module", params=list(ZOO))
def model(request: pytest.FixtureRequest) -> Captured:
    """Every model of the zoo, captured."""
    result: Captured = ZOO[request.param]()
    return result


def flops(graph: Graph) -> int:
    """Forward FLOPs of one micro-batch."""
    return sum(op.flops * op.trip for op in graph.ops)


# What holds for every model.


def test_every_primitive_has_a_rule(model: Captured) -> None:
    assert model.graph.unknown_primitives == ()


def test_every_parameter_is_read_and_trained(model: Captured) -> None:
    read = {t for op in model.graph.ops for t in op.operands}
    params = model.graph.params
    assert [p.path for p in params] == list(model.adapter.param_paths)
    assert all(p.id in read and p.differentiable for p in params)


def test_the_first_tensors_are_the_inputs_in_order(model: Captured) -> None:
    body, _ = _compat.open_jaxpr(model.jaxpr)
    for index, var in enumerate(body.invars):
        tensor = model.graph.tensors[index]
        assert tensor.shape == var.aval.shape
        assert tensor.dtype == str(var.aval.dtype)
        assert tensor.kind in ("param", "state", "batch", "rng")
    assert all(
        t.kind in ("value", "const") for t in model.graph.tensors[len(body.invars) :]
    )


def test_the_graph_is_closed_and_in_order(model: Captured) -> None:
    graph = model.graph
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))
    made = Counter(t for op in graph.ops for t in op.results)
    assert max(made.values()) == 1
    known = {t.id for t in graph.tensors if t.kind != "value"}
    late = 0
    for op in graph.ops:
        late += sum(t not in known for t in op.operands)
        known.update(op.results)
    assert late == 0
    assert graph.tensors[graph.loss].shape == ()


def test_factors_are_sound(model: Captured) -> None:
    for op in model.graph.ops:
        slots = op.operands + op.results
        seen: set[tuple[int, int]] = set()
        for factor in op.factors:
            sizes = {model.graph.tensors[slots[s]].shape[d] for s, d in factor.members}
            assert len(sizes) == 1 and sizes.pop() > 1, op
            assert seen.isdisjoint(factor.members), op
            seen.update(factor.members)
        assert set(op.saves) <= set(range(len(slots)))


def positions(jaxpr: Any, prefix: tuple[int, ...] = ()) -> dict[Any, list[Any]]:
    """Every equation's result shapes by position, by an evaluator's recursion."""
    found: dict[Any, list[Any]] = {}
    body, _ = _compat.open_jaxpr(jaxpr)
    for index, equation in enumerate(body.eqns):
        here = (*prefix, index)
        found[here] = [getattr(v.aval, "shape", ()) for v in equation.outvars]
        if recursion(equation) is not None:
            for number, inner in enumerate(inner_jaxprs(equation)):
                found.update(positions(inner, (*here, number)))
    return found


def test_positions_are_those_of_a_recursing_evaluator(model: Captured) -> None:
    expected = positions(model.jaxpr)
    assert set(model.outputs) == set(expected)
    tensors = model.graph.tensors
    for place, ids in model.outputs.items():
        shapes = [() if t is None else tensors[t].shape for t in ids]
        assert shapes == expected[place]
    assert {op.position for op in model.graph.ops} <= set(expected)


def test_results_are_unflattened_by_the_out_tree(model: Captured) -> None:
    total, weight, metrics, rest = jax.tree.unflatten(
        model.out_tree, range(len(model.results))
    )
    assert (total, weight) == (0, 1)
    assert len(jax.tree.leaves(rest)) == len(model.adapter.rest_paths)
    assert model.results[0] == model.graph.loss
    assert len(jax.tree.leaves(metrics)) == len(model.results) - 2 - len(
        model.adapter.rest_paths
    )


# FLOPs in closed form.


def transformer_flops(layers: int, samples: int = BATCH) -> int:
    """Products of the transformer: projections, attention, MLP, head."""
    tokens, width = samples * SEQ, HEADS * HEAD_DIM
    block = 4 * EMBED * width + 2 * SEQ * width + 2 * EMBED * MLP
    return 2 * tokens * (layers * block + EMBED * VOCAB)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layers", [1, 3])
def test_transformer_flops(form: str, layers: int) -> None:
    graph = captured(
        transformer(form, layers), transformer_loss, transformer_batch()
    ).graph
    assert flops(graph) == transformer_flops(layers)


def test_flops_are_those_of_one_micro_batch() -> None:
    graph = captured(
        transformer(), transformer_loss, transformer_batch(12), num_micro_batches=3
    ).graph
    assert flops(graph) == transformer_flops(2, samples=4)
    assert (graph.batch_size, graph.num_micro_batches) == (4, 3)


def test_linen_flops() -> None:
    tokens = BATCH * SEQ
    products = 5 * EMBED + 4 * EMBED**2 + 2 * SEQ * EMBED + EMBED * VOCAB
    assert flops(ZOO["linen"]().graph) == 2 * tokens * products


def test_conv_flops() -> None:
    first = 12 * 14 * (9 * 3) * 8
    second = 3 * 4 * (9 * 8) * 16  # after pooling to 6 x 7 and a stride of two
    depthwise = 3 * 4 * 9 * 16
    head = 16 * 11
    expected = 2 * BATCH * (first + second + depthwise + head)
    assert flops(ZOO["conv"]().graph) == expected


# Loops, remat, calls.


def test_a_scanned_body_stands_once_and_runs_often() -> None:
    graph = captured(
        transformer("scan", 5), transformer_loss, transformer_batch()
    ).graph
    trips = Counter(op.trip for op in graph.ops if op.kind == "dot_general")
    assert trips == {5: 8, 1: 1}


def test_layers_of_a_scan_are_one_dimension_needed_whole() -> None:
    graph = captured(
        transformer("scan", 5), transformer_loss, transformer_batch()
    ).graph
    (layers,) = [op for op in graph.ops if op.kind == "scan" and not op.results]
    (factor,) = layers.factors
    assert factor.kind == "unshardable"
    paths = {graph.tensors[t].path for t in layers.operands} - {""}
    assert paths == {p.path for p in graph.params if p.path.startswith("blocks")}


def test_scanned_and_unrolled_layers_have_the_same_dimensions() -> None:
    def sizes(form: str) -> list[int]:
        graph = captured(
            transformer(form, 4), transformer_loss, transformer_batch()
        ).graph
        roles = analyse(graph).roles
        return sorted(role.size for role in roles if role.size != 4)

    # heads, query-key and value head dims, batch, seq, key-seq, embed, mlp, vocab
    # of the embedding and of the head.
    expected = sorted(
        [HEADS, HEAD_DIM, HEAD_DIM, BATCH, SEQ, SEQ, EMBED, MLP, VOCAB, VOCAB]
    )
    assert sizes("unrolled") == sizes("scan") == expected


def test_every_checkpointed_call_has_an_id_of_its_own() -> None:
    graph = ZOO["remat"]().graph
    regions = Counter(op.remat for op in graph.ops if op.kind == "dot_general")
    assert regions == {0: 8, 1: 8, None: 1}
    scanned = Counter(
        op.remat for op in ZOO["scan"]().graph.ops if op.kind == "dot_general"
    )
    assert scanned == {0: 8, None: 1}
    assert {op.remat for op in ZOO["unrolled"]().graph.ops} == {None}


def test_a_while_loop_is_counted_once_and_reported() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def body(x: jax.Array) -> jax.Array:
            return jax.lax.stop_gradient(jnp.tanh(x @ params["w"]))

        x = jax.lax.while_loop(lambda x: x.sum() > 0, body, batch["x"])
        return jnp.mean(x @ params["w"])

    shape = jax.ShapeDtypeStruct((BATCH, 8), jnp.float32)
    result = captured({"w": jnp.ones((8, 8))}, loss, {"x": shape})
    assert result.notes == (
        "a while loop runs an unknown number of times; the work of one "
        "iteration is counted",
    )
    assert flops(result.graph) == 2 * 2 * BATCH * 8 * 8
    carries = [op for op in result.graph.ops if op.kind == "while"]
    assert [len(op.factors) for op in carries] == [2, 2]


def test_branches_are_tied_together() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jax.lax.cond(
            params["w"][0, 0] > 0,
            lambda x: x @ params["w"],
            lambda x: x * 2,
            batch["x"],
        )
        return jnp.mean(x)

    shape = jax.ShapeDtypeStruct((BATCH, 8), jnp.float32)
    graph = captured({"w": jnp.ones((8, 8))}, loss, {"x": shape}).graph
    (join,) = [op for op in graph.ops if op.kind == "cond"]
    assert [f.members for f in join.factors] == [
        ((0, 0), (1, 0), (2, 0)),
        ((0, 1), (1, 1), (2, 1)),
    ]
    product = next(op for op in graph.ops if op.kind == "dot_general")
    assert product.position == (*join.position, 1, 0)


def test_branches_in_a_loop_are_all_counted_and_reported() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def turn(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("some"):
                x = jax.lax.cond(number < 2, lambda x: x @ params["w"], lambda x: x, x)
            return x, None

        return jnp.mean(jax.lax.scan(turn, batch["x"], jnp.arange(3))[0])

    shape = jax.ShapeDtypeStruct((BATCH, 8), jnp.float32)
    params = {"w": jnp.ones((8, 8))}
    result = captured(params, loss, {"x": shape})
    assert result.notes == (
        "one of 2 branches at some runs in each of 3 iterations; the work of all "
        "branches is counted as an upper bound",
    )
    assert flops(result.graph) == 3 * 2 * BATCH * 8 * 8
    plan = wh.plan(loss, params, {"x": shape}, cluster="h100:2", num_micro_batches=1)
    assert result.notes[0] in plan.notes


def test_a_tied_embedding_is_one_parameter_read_twice() -> None:
    graph = ZOO["tied"]().graph
    (table,) = [p for p in graph.params if p.shape == (VOCAB, EMBED)]
    readers = {op.kind for op in graph.ops if table.id in op.operands}
    assert table.path == "embed.embedding"
    assert "gather" in readers and readers & {"dot_general", "transpose"}


def test_constants_are_constants() -> None:
    table = np.arange(BATCH * VOCAB, dtype=np.float32).reshape(BATCH, VOCAB)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch["x"] @ params["up"]["w"] @ params["down"]["w"] * table)

    graph = captured(mlp_params(), loss, mlp_batch()).graph
    assert [t.shape for t in graph.tensors if t.kind == "const"] == [table.shape]


# Gradients and what they read.


def op_of(graph: Graph, kind: str) -> Op:
    return next(op for op in graph.ops if op.kind == kind)


def test_the_batch_and_what_follows_stop_gradient_have_no_gradient() -> None:
    def loss(params: Any, batch: Any) -> Any:
        frozen = jax.lax.stop_gradient(batch["x"] @ params["up"]["w"])
        live = batch["x"] @ params["up"]["w"]
        return jnp.mean((frozen * live) @ params["down"]["w"])

    graph = captured(mlp_params(), loss, mlp_batch()).graph
    mul = op_of(graph, "mul")
    assert [graph.tensors[t].differentiable for t in mul.operands] == [False, True]
    assert mul.saves == (0,)  # the frozen factor, to scale the live one's gradient
    assert not any(t.differentiable for t in graph.tensors if t.kind == "batch")


def test_values_that_nothing_reads_are_not_counted() -> None:
    params = {"w": jnp.zeros((8, 4)), "unread": jnp.zeros((8, 1024))}
    batch = jnp.zeros((16, 8))

    def read(params: Any, batch: Any) -> Any:
        out = batch @ params["w"]
        jax.debug.callback(lambda x: None, jnp.cos(out).max())  # an effect
        return jnp.mean(out)

    def loss(params: Any, batch: Any) -> Any:
        jnp.sort(jnp.tanh(batch @ params["unread"]), axis=0)
        return read(params, batch)

    wide, narrow = (captured(params, f, batch).graph for f in (loss, read))
    assert [op.kind for op in wide.ops] == [op.kind for op in narrow.ops]
    assert {"cos", "dot_general"} <= {op.kind for op in wide.ops}
    assert flops(wide) == flops(narrow)


def test_a_mark_around_values_that_nothing_reads_has_no_effect() -> None:
    params = {"w": jnp.zeros((8, 4)), "unread": jnp.zeros((8, 16))}

    def loss(params: Any, batch: Any) -> Any:
        with wh.replicate():
            out = batch @ params["w"]
        with wh.split():
            jax.jit(jnp.tanh)(batch @ params["unread"])
        return jnp.mean(out)

    found = captured(params, loss, jnp.zeros((16, 8)))
    assert found.graph.undeclared_marks == ()
    assert [str(m) for t in found.graph.task_graphs for m in t.marks] == ["replicate()"]
    assert found.notes == (
        "split() covers only values that no result of the loss needs: no effect",
    )


def test_what_only_metrics_read_has_no_gradient() -> None:
    def loss(params: Any, batch: Any) -> Any:
        out = batch["x"] @ params["up"]["w"]
        return jnp.mean(out), {"largest": jnp.max(jnp.exp(out))}

    graph = captured(mlp_params(), loss, mlp_batch()).graph
    exp = op_of(graph, "exp")
    assert exp.saves == ()
    assert not graph.tensors[exp.results[0]].differentiable


@pytest.mark.parametrize(
    ("function", "kind", "saves"),
    [
        (jnp.exp, "exp", (1,)),
        (jnp.tanh, "tanh", (1,)),
        (jnp.sin, "sin", (0,)),
        (jnp.log, "log", (0,)),
        (lambda x: x + 1, "add", ()),
        (lambda x: x * x, "mul", (0, 1)),
        (lambda x: x * 3, "mul", ()),
        (lambda x: 1 / x, "div", (0,)),
        (lambda x: x / 3, "div", ()),
        (lambda x: x**3, "integer_pow", (0,)),
        (lambda x: x.T, "transpose", ()),
        (lambda x: jnp.where(x > 0, x, 0), "select_n", (0,)),
        (lambda x: x.max(0), "reduce_max", (0, 1)),
        (lambda x: x.sum(0), "reduce_sum", ()),
        (lambda x: x @ x.T, "dot_general", (0, 1)),
    ],
)
def test_what_the_backward_pass_reads(
    function: Any, kind: str, saves: tuple[int, ...]
) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(function(params["w"] * batch["x"][0, 0]))

    graph = captured({"w": jnp.ones((4, 4))}, loss, mlp_batch()).graph
    found = [op.saves for op in graph.ops if op.kind == kind]
    assert saves in found


def test_a_carry_is_differentiable_through_the_loop() -> None:
    """The carry starts at zero and depends on parameters only by the loop's end."""

    def loss(params: Any, batch: Any) -> Any:
        def step(carry: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(carry) + batch["x"] @ w, None

        start = jnp.zeros((BATCH, 8))
        carry, _ = jax.lax.scan(step, start, params["w"])
        return jnp.mean(carry)

    shape = jax.ShapeDtypeStruct((BATCH, 8), jnp.float32)
    graph = captured({"w": jnp.ones((3, 8, 8))}, loss, {"x": shape}).graph
    tanh = op_of(graph, "tanh")
    assert graph.tensors[tanh.operands[0]].differentiable
    assert tanh.saves == (1,)


# The batch, the key, the hash.


def test_batch_axes_and_leaves_without_samples() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"].T @ params["up"]["w"]
        return jnp.mean(x * batch["scale"])

    batch = {
        "x": jax.ShapeDtypeStruct((EMBED, 8), jnp.float32),
        "scale": jax.ShapeDtypeStruct((MLP,), jnp.float32),
    }
    params = {"up": mlp_params()["up"]}
    result = captured(
        params, loss, batch, num_micro_batches=4, batch_axes={"x": 1, "scale": None}
    )
    shapes = {t.path: t.shape for t in result.graph.tensors if t.kind == "batch"}
    assert shapes == {"batch.x": (EMBED, 2), "batch.scale": (MLP,)}
    (dims,) = result.graph.batch_dims
    assert (result.graph.tensors[dims[0]].path, dims[1]) == ("batch.x", 1)
    assert result.batch_axes == (None, 1)


def test_the_key_is_an_input_where_the_loss_takes_one() -> None:
    graph = ZOO["linen"]().graph
    (key,) = [t for t in graph.tensors if t.kind == "rng"]
    assert (key.dtype, key.shape, key.itemsize_bytes) == ("key<fry>", (), 8)
    own = capture(
        adapt(linen_variables(), linen_loss),
        linen_batch(),
        jax.random.key(0, impl="rbg"),
    ).graph
    assert [t.dtype for t in own.tensors if t.kind == "rng"] == ["key<rbg>"]


def test_arrays_and_shapes_capture_alike() -> None:
    real = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), mlp_batch())
    abstract = jax.eval_shape(mlp_params)
    assert (
        captured(abstract, mlp_loss, mlp_batch()).graph
        == captured(mlp_params(), mlp_loss, real).graph
    )


def test_the_hash_tells_models_batches_and_marks_apart() -> None:
    def marked(params: Any, batch: Any) -> Any:
        with wh.split():
            return mlp_loss(params, batch)

    wide = {**mlp_params(), "extra": jnp.ones(3)}
    hashes = [
        captured(mlp_params(), mlp_loss, mlp_batch()).graph.model_hash,
        captured(mlp_params(), mlp_loss, mlp_batch(12)).graph.model_hash,
        captured(wide, mlp_loss, mlp_batch()).graph.model_hash,
        captured(mlp_params(), marked, mlp_batch()).graph.model_hash,
    ]
    assert len(set(hashes)) == 4
    for one in hashes:
        model, _, operations = one.partition("-")
        assert len(model) == 16 and len(operations) == 8
        assert int(model, 16) >= 0 and int(operations, 16) >= 0
    again = captured(mlp_params(), mlp_loss, mlp_batch(), num_micro_batches=2)
    assert again.graph.model_hash == hashes[0]


def test_a_weighted_loss_is_known_as_one() -> None:
    def loss(params: Any, batch: Any) -> Any:
        valid = (batch["y"] > 0).astype(jnp.float32)
        out = batch["x"] @ params["up"]["w"] @ params["down"]["w"]
        return wh.WeightedLoss(jnp.sum(out * valid), jnp.sum(valid))

    result = captured(mlp_params(), loss, mlp_batch())
    assert result.graph.weighted
    assert not captured(mlp_params(), mlp_loss, mlp_batch()).graph.weighted
    assert result.results[1] is not None  # the weight is a value of the program


def test_flax_metadata_reaches_the_tensors() -> None:
    kernel = next(t for t in ZOO["linen"]().graph.params if t.path == "Dense_0.kernel")
    assert kernel.names == ("features", None)
    assert kernel.pinned == (None, "tensor")


def test_the_traced_program_computes_the_loss() -> None:
    """The flat function's jaxpr, run as it is, gives the user's own numbers."""
    model = ConvNet(nnx.Rngs(0))
    draw = np.random.default_rng(0)
    batch = {
        "x": draw.normal(size=(4, 12, 14, 3)).astype(np.float32),
        "y": np.array([1, 2, 3, 4], np.int32),
    }
    result = captured(model, conv_loss, batch)
    leaves = [*jax.tree.leaves(result.adapter.params)]
    leaves += [*jax.tree.leaves(result.adapter.rest), *jax.tree.leaves(batch)]
    outputs = jax.jit(jax.extend.core.jaxpr_as_fun(result.jaxpr))(*leaves)
    _, _, _, rest = jax.tree.unflatten(result.out_tree, outputs)
    before = model.norm.mean[...]
    loss = nnx.jit(conv_loss)(model, batch)  # updates the model's own statistics
    after = model.norm.mean[...]
    np.testing.assert_allclose(outputs[0], loss, rtol=1e-6)
    np.testing.assert_allclose(rest["norm"]["mean"], after, rtol=1e-6)
    assert not np.allclose(before, after)


def test_the_work_grows_with_the_layers_and_no_faster() -> None:
    def count(layers: int) -> int:
        return len(
            captured(
                transformer(layers=layers), transformer_loss, transformer_batch()
            ).graph.ops
        )

    one, two, nine = count(1), count(2), count(9)
    assert nine - one == 8 * (two - one)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_ran_on_one_device_first_keeps_its_marks(form: str) -> None:
    """JAX caches traces; the marks are in the cached traces too."""
    model = Transformer(form, 1, nnx.Rngs(0))
    batch = {
        "tokens": jnp.zeros((2, SEQ), jnp.int32),
        "targets": jnp.zeros((2, SEQ), jnp.int32),
    }
    nnx.jit(nnx.value_and_grad(transformer_loss))(model, batch)
    graph = captured(model, transformer_loss, batch).graph
    regions = [
        str(graph.task_graphs[op.task_graph].strategy)
        for op in graph.ops
        if op.kind == "dot_general"
    ]
    assert regions == ["replicate()"] * 6 + ["split(axis=mlp)"] * 2 + ["None"]
