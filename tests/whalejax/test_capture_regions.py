"""From marks to TaskGraphs: folding, instances, stages, and what no mark reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import whalejax as wh
from tests.whalejax.capture_zoo import (
    captured,
    linen_batch,
    linen_loss,
    linen_variables,
    transformer,
    transformer_batch,
    transformer_loss,
)
from whalejax.planner.model.graph import Graph, TaskGraph
from whalejax.user_code.annotations import Annotation


pytestmark = pytest.mark.relaxed_promotion

WIDTH = 8
WEIGHTS = {"w": jnp.ones((4, WIDTH, WIDTH)), "head": jnp.ones((WIDTH, 12))}
BATCH = {"x": jax.ShapeDtypeStruct((6, WIDTH), jnp.float32)}


def graph_of(body: Callable[[Any, jax.Array], jax.Array]) -> Graph:
    """The graph of a loss that takes the mean of what a body computes."""
    return captured(
        WEIGHTS, lambda params, batch: jnp.mean(body(params, batch["x"])), BATCH
    ).graph


def summary(graph: Graph) -> list[tuple[str, str, int]]:
    """Name, marks and repeats of each TaskGraph."""
    return [
        (t.name, " > ".join(map(str, t.marks)), t.repeats) for t in graph.task_graphs
    ]


def products(graph: Graph) -> list[str]:
    """The TaskGraph of each matrix product, in order."""
    return [
        graph.task_graphs[op.task_graph].name
        for op in graph.ops
        if op.kind == "dot_general"
    ]


def test_without_marks_there_is_one_region() -> None:
    graph = graph_of(lambda p, x: x @ p["head"])
    assert graph.task_graphs == (TaskGraph(index=0),)


def test_siblings_and_what_stands_between() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.replicate():
            x = x @ p["w"][0]
        x = x @ p["w"][1]
        with wh.split(devices=2):
            return x @ p["head"]

    graph = graph_of(body)
    assert summary(graph) == [
        ("default", "", 1),
        ("replicate", "replicate()", 1),
        ("split", "split(devices=2)", 1),
    ]
    assert products(graph) == ["replicate", "default", "split"]
    assert graph.ops[-1].task_graph == 0  # the mean after the split head
    assert graph.task_graphs[2].strategy == wh.split(devices=2).mark


def test_equal_layers_fold_and_unequal_ones_do_not() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        for i in range(4):
            with wh.replicate():
                x = jnp.tanh(x)
            with wh.split():
                x = x @ p["w"][i]
        with wh.split():
            return x @ p["head"]

    # The last layer and the head stand side by side under one mark: one region.
    assert summary(graph_of(body)) == [
        ("default", "", 1),
        ("replicate", "replicate()", 4),
        ("split", "split()", 3),
        ("split.2", "split()", 1),
    ]


def test_marks_inside_a_region_do_not_tear_it() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.replicate():
            for i in range(3):
                x = jnp.tanh(x)
                with wh.split():
                    x = x @ p["w"][i]
            return x

    graph = graph_of(body)
    assert summary(graph) == [
        ("default", "", 1),
        ("replicate", "replicate()", 1),
        ("split", "replicate() > split()", 3),
    ]
    outer, inner = graph.task_graphs[1:]
    assert inner.path[:1] == outer.path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["unrolled", "remat", "jit", "scan"])
def test_a_transformer_has_one_region_for_each_half_of_a_block(form: str) -> None:
    graph = captured(transformer(form, 3), transformer_loss, transformer_batch()).graph
    repeats = 1 if form == "scan" else 3
    assert summary(graph) == [
        ("default", "", 1),
        ("replicate", "replicate()", repeats),
        ("split", "split(axis=mlp)", repeats),
    ]
    halves = ["replicate"] * 6 + ["split"] * 2
    assert products(graph) == halves * repeats + ["default"]


FORMS: dict[str, Callable[..., jax.Array]] = {
    "plain": lambda f, w, x: f(w, x),
    "jit": lambda f, w, x: jax.jit(f)(w, x),
    "remat": lambda f, w, x: jax.checkpoint(f)(w, x),
    "vmap": lambda f, w, x: jax.vmap(f, in_axes=(None, 0))(w, x),
    "scan": lambda f, w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, length=2)[0],
    "cond": lambda f, w, x: jax.lax.cond(w[0, 0] > 0, f, f, w, x),
    "while": lambda f, w, x: jax.lax.fori_loop(0, w.shape[0], lambda _, c: f(w, c), x),
    "grad": lambda f, w, x: jax.grad(lambda v: f(w, v).sum())(x),
    "custom": lambda f, w, x: custom(f)(w, x),
    "all": lambda f, w, x: jax.jit(jax.checkpoint(jax.vmap(f, in_axes=(None, 0))))(
        w, x
    ),
}


def custom(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function with a derivative rule of its own."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda w, x: (function(w, x), (w, x)), lambda kept, g: (kept[0], g))
    return wrapped


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_mark_is_seen_through(form: str, ran_before: bool) -> None:
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        with wh.split(axis="mlp"):
            return jnp.tanh(x @ w)

    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.replicate():
            return FORMS[form](layer, p["w"][0], x)

    if ran_before:
        jax.jit(jax.grad(lambda p, x: jnp.mean(body(p, x))))(WEIGHTS, jnp.ones((6, 8)))
    graph = graph_of(body)
    marks = {
        tuple(map(str, graph.task_graphs[op.task_graph].marks))
        for op in graph.ops
        if op.kind == "dot_general"
    }
    assert marks == {("replicate()", "split(axis=mlp)")}


def test_the_instance_comes_from_the_place_of_the_call() -> None:
    """One jitted block, traced once and called four times, is four stages."""

    @jax.jit
    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        with wh.stage(devices=2):
            return jnp.tanh(x @ w)

    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.pipeline():
            for i in range(4):
                x = block(p["w"][i], x)
            return x

    stages = [t.marks[-1] for t in graph_of(body).task_graphs if t.name != "default"]
    assert [str(mark) for mark in stages] == ["pipeline()"] + [
        f"stage(devices=2, i={i})" for i in range(4)
    ]


def test_stages_of_two_pipelines_stay_apart() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        for i in (0, 2):
            with wh.pipeline():
                for k in (i, i + 1):
                    with wh.stage():
                        x = x @ p["w"][k] if k < 3 else x @ p["head"]
        return x

    graph = graph_of(body)
    places = [t.path for t in graph.task_graphs if t.marks]
    assert [str(t.marks[-1]) for t in graph.task_graphs if t.marks] == [
        "stage(i=0)",
        "stage(i=1)",
        "stage(i=0)",
        "stage(i=1)",
    ]
    pipelines = [path[0] for path in places]
    assert pipelines[0] == pipelines[1] != pipelines[2] == pipelines[3]


def test_linen_scopes_stand_between() -> None:
    graph = captured(linen_variables(), linen_loss, linen_batch()).graph
    assert summary(graph) == [("default", "", 1), ("split", "split()", 1)]
    scopes = {op.scope for op in graph.ops if op.task_graph == 1}
    assert any("LinenNet" in s and "MultiHeadDotProductAttention" in s for s in scopes)


def test_numbered_copies_of_a_linen_module_fold() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            with wh.split():
                x = nn.Dense(WIDTH)(x)
            return jnp.tanh(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = Layer()(x)
            return x

    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((1, WIDTH)))

    def loss(variables: Any, batch: Any) -> jax.Array:
        return jnp.mean(net.apply(variables, batch["x"]))  # type: ignore[arg-type]

    assert summary(captured(variables, loss, BATCH).graph) == [
        ("default", "", 1),
        ("split", "split()", 3),
    ]


def test_marks_that_reach_nothing_are_told() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.split(axis="mlp"):
            x = x @ p["head"]
        with wh.split(axis="heads"):
            pass
        with wh.replicate():
            with wh.split(axis="experts"):
                y = x
        return y

    assert graph_of(body).undeclared_marks == (
        "split(axis=heads)",
        "replicate()",
        "split(axis=experts)",
    )


def nested(*marks: Annotation) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A jitted product under marks."""

    def function(w: jax.Array, x: jax.Array) -> jax.Array:
        if not marks:
            return x @ w
        with marks[0]:
            return nested(*marks[1:])(w, x)

    return jax.jit(function)


def test_nesting_that_a_cached_trace_hid_is_found() -> None:
    """The inner marks were entered while tracing elsewhere, where they were legal."""
    inner = nested(wh.replicate())
    other = nested(wh.pipeline())

    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.split(devices=2):
            return other(p["w"][1], inner(p["w"][0], x))

    x = jnp.ones((6, WIDTH))
    inner(WEIGHTS["w"][0], x)
    other(WEIGHTS["w"][1], x)
    with pytest.raises(wh.WhaleError) as caught:
        graph_of(body)
    text = str(caught.value)
    assert text.startswith("annotations of the model: 2 problems\n  1. replicate() ")
    assert "1. replicate() is inside split(devices=2), which is not allowed" in text
    assert "2. pipeline() is inside split(devices=2), which is not allowed" in text


def test_nesting_that_python_sees_is_refused_while_tracing() -> None:
    def body(p: Any, x: jax.Array) -> jax.Array:
        with wh.stage():
            return x @ p["head"]

    with pytest.raises(wh.WhaleError, match="no pipeline around it"):
        graph_of(body)
