"""Rules, against index letters written by hand and against the numbers themselves.

A case is written like an einsum: one letter for each dimension of each operand and
result. Capital letters must stay whole, ``.`` is free and ``1`` has one element. Where
a function works at any size, every letter that a result holds is also tested by
computing two halves and comparing their concatenation with the whole.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.model.graph import Graph, Op
from whalejax.planner.model.logical_dimensions import analyse


Shape = tuple[int, ...]


def graph_of(function: Callable[..., Any], *arguments: Any) -> Graph:
    """The graph of a function whose first argument is the only parameter."""

    def loss(params: Any, batch: Any) -> Any:
        results = function(params["a"], *batch["rest"])
        leaves = [leaf for leaf in jax.tree.leaves(results)]
        # A callback takes the results as they are, so that nothing else reads them.
        jax.debug.callback(lambda *_: None, *leaves)
        return jnp.sum(params["a"].astype(jnp.float32))

    batch = {"rest": list(arguments[1:]), "x": jnp.ones((2,))}
    axes = {"rest": [None] * (len(arguments) - 1), "x": 0}
    adapter = adapt({"a": arguments[0]}, loss)
    return capture(adapter, batch, batch_axes=axes).graph


def letters(op: Op, graph: Graph) -> str:
    """An operation's factors as an einsum-like text."""
    names: dict[tuple[int, int], str] = {}
    fresh = iter(string.ascii_lowercase)
    for factor in sorted(op.factors, key=lambda f: min(f.members)):
        letter = next(fresh)
        whole = factor.needs_all
        for member in factor.members:
            names[member] = letter.upper() if whole else letter
    texts = []
    for slot, tensor in enumerate((*op.operands, *op.results)):
        shape = graph.tensors[tensor].shape
        texts.append(
            "".join(
                "1" if size == 1 else names.get((slot, dim), ".")
                for dim, size in enumerate(shape)
            )
        )
    operands, results = texts[: len(op.operands)], texts[len(op.operands) :]
    return f"{','.join(operands)}->{','.join(results)}"


@dataclass(frozen=True)
class Case:
    """One primitive: how to bring it about and its letters."""

    primitive: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    expected: str
    any_size: bool = True

    def arguments(self) -> list[jax.Array]:
        """Numbers without ties, so that sorting and maxima are unique."""
        draw = np.random.default_rng(0)
        return [
            jnp.asarray(draw.permutation(int(np.prod(s))).reshape(s) + 1.0, jnp.float32)
            for s in self.shapes
        ]

    def __str__(self) -> str:
        return f"{self.primitive}:{self.expected}"


def einsum(text: str) -> Callable[..., jax.Array]:
    return lambda *args: jnp.einsum(text, *args)


def reduce_window(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def conv(**options: Any) -> Callable[..., jax.Array]:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        strides = options.get("strides", (1, 1))
        groups = options.get("groups", 1)
        return lax.conv_general_dilated(
            x,
            w,
            strides,
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=groups,
        )

    return function


CASES = [
    # Elementwise.
    Case("add", lambda x, y: x + y, ((4, 6), (4, 6)), "ab,ab->ab"),
    Case("mul", lambda x, y: x * y, ((4, 6), (1, 6)), "ab,1b->ab"),
    Case("add", lambda x, y: x + y, ((4, 1), (1, 6)), "a1,1b->ab"),
    Case("exp", jnp.exp, ((4, 6),), "ab->ab"),
    Case("mul", lambda x: x * 2, ((4, 6),), "ab->ab"),
    Case(
        "select_n",
        lambda x, y: jnp.where(x > y, x, y),
        ((4, 6), (4, 6)),
        "ab,ab,ab->ab",
    ),
    Case("clamp", lambda x: lax.clamp(2.0, x, 5.0), ((4, 6),), "ab->ab"),
    Case(
        "optimization_barrier",
        lambda x, y: lax.optimization_barrier((x, y)),
        ((4, 6), (8,)),
        "ab,c->ab,c",
        any_size=False,
    ),
    # Products.
    Case("dot_general", einsum("be,em->bm"), ((4, 6), (6, 8)), "ab,bc->ac"),
    Case(
        "dot_general",
        einsum("bqhd,bkhd->bhqk"),
        ((2, 4, 6, 8), (2, 10, 6, 8)),
        "abcd,aecd->acbe",
    ),
    Case(
        "conv_general_dilated",
        conv(),
        ((4, 6, 8, 10), (3, 3, 10, 12)),
        "aBCd,EFdg->aBCg",
    ),
    Case(
        "conv_general_dilated",
        conv(),
        ((4, 6, 8, 10), (1, 1, 10, 12)),
        "abcd,11de->abce",
    ),
    Case(
        "conv_general_dilated",
        conv(strides=(2, 1)),
        ((4, 6, 8, 10), (3, 3, 10, 12)),
        "aBCd,EFdg->aHCg",
    ),
    Case(
        "conv_general_dilated",
        conv(groups=10),
        ((4, 6, 8, 10), (3, 3, 1, 10)),
        "aBCD,EF1G->aBCH",
    ),
    Case(
        "ragged_dot_general",
        lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3])),
        ((4, 6), (2, 6, 8)),
        "Ab,Cbd,C->Ad",
        any_size=False,
    ),
    # Moving and cutting.
    Case("transpose", lambda x: x.transpose(1, 0, 2), ((4, 6, 8),), "abc->bac"),
    Case(
        "broadcast_in_dim",
        lambda x: lax.broadcast(x, (3,)),
        ((4, 6),),
        "ab->.ab",
    ),
    Case("slice", lambda x: x[:, 1:3], ((4, 6),), "aB->a."),
    Case("slice", lambda x: lax.slice_in_dim(x, 1, 2, axis=1), ((4, 6),), "ab->a1"),
    Case(
        "dynamic_slice",
        lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(1), 2, axis=1),
        ((4, 6),),
        "aB,->a.",
    ),
    Case(
        "dynamic_update_slice",
        lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)),
        ((4, 6), (4, 2)),
        "aB,aC->aB",
    ),
    Case("pad", lambda x: jnp.pad(x, ((0, 0), (1, 2))), ((4, 6),), "aB,->aC"),
    Case(
        "concatenate",
        lambda x, y: jnp.concatenate([x, y], axis=1),
        ((4, 6), (4, 2)),
        "aB,aC->aD",
    ),
    Case("stack", lambda x, y: lax.stack([x, y], 1), ((4, 6), (4, 6)), "ab,ab->aCb"),
    Case("unstack", lambda x: lax.unstack(x, 1), ((4, 2, 6),), "aBc->ac,ac"),
    Case("tile", lambda x: lax.tile(x, (1, 3)), ((4, 6),), "aB->aC"),
    Case("rev", lambda x: lax.rev(x, (1,)), ((4, 6),), "aB->aB"),
    Case(
        "split",
        lambda x: lax.split(x, (2, 4), axis=1),
        ((4, 6),),
        "aB->aC,aD",
    ),
    Case(
        "split",
        lambda x: lax.split(x, (2, 2, 2), axis=1),
        ((4, 6),),
        "aBc->ac,ac,ac",
        any_size=False,
    ),
    # By index.
    Case(
        "gather",
        lambda x, i: jnp.take(x, i.astype(jnp.int32) % 6, axis=0),
        ((6, 8), (2, 4)),
        "ab,cd1->cdb",
    ),
    Case(
        "gather",
        lambda x, i: jnp.take_along_axis(x, i.astype(jnp.int32) % 6, axis=1),
        ((4, 6), (4, 2)),
        "ab,ac1->ac",
    ),
    Case(
        "scatter-add",
        lambda x, y: x.at[jnp.array([1, 3, 3])].add(y),
        ((6, 8), (3, 8)),
        "ab,c1,cb->ab",
        any_size=False,
    ),
    Case(
        "scatter",
        lambda x, y: x.at[jnp.array([1, 3, 4])].set(y),
        ((6, 8), (3, 8)),
        "ab,C1,Cb->ab",
        any_size=False,
    ),
    # Reductions.
    Case("reduce_sum", lambda x: x.sum(1), ((4, 6, 8),), "abc->ac"),
    Case("reduce_max", lambda x: x.max((0, 2)), ((4, 6, 8),), "abc->b"),
    Case("argmax", lambda x: x.argmax(1), ((4, 6),), "ab->a"),
    Case(
        "reduce",
        lambda x, y: lax.reduce(
            (x, y),
            (0.0, 0.0),
            lambda p, q: (p[0] + q[0], p[1] * q[1]),
            (1,),
        ),
        ((4, 6), (4, 6)),
        "ab,ab->a,a",
    ),
    Case("cumsum", lambda x: jnp.cumsum(x, 1), ((4, 6),), "aB->aB"),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=1), ((4, 6),), "aB->aB"),
    Case("sort", lambda x: lax.sort(x, dimension=1), ((4, 6),), "aB->aB"),
    Case("top_k", lambda x: lax.top_k(x, 2), ((4, 6),), "aB->ac,ac"),
    Case("reduce_window_max", reduce_window, ((4, 6, 8),), "aBc->aDc"),
    Case(
        "reduce_window_max",
        lambda x: lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), ((0, 0), (1, 1), (1, 1))
        ),
        ((4, 6, 8),),
        "aBC->aDE",
    ),
    Case("cholesky", lambda x: jnp.linalg.cholesky(x), ((4, 6, 6),), "aBC->aDE", False),
    Case("fft", lambda x: jnp.fft.fft(x).real, ((4, 6),), "aB->aC"),
]


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("case", CASES, ids=str)
def test_letters_are_those_written_by_hand(case: Case) -> None:
    graph = graph_of(case.function, *case.arguments())
    found = [letters(op, graph) for op in graph.ops if op.kind == case.primitive]
    assert case.expected in found
    assert not graph.unknown_primitives


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (lambda w, x: conv()(x, w), "conv_general_dilated"),
        (
            lambda w, x: conv()(
                lax.reduce_window(
                    x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
                ),
                w,
            ),
            "reduce_window_max",
        ),
    ],
)
def test_dimensions_that_would_need_a_halo_are_named(
    function: Callable[..., Any], primitive: str
) -> None:
    x, w = jnp.ones((4, 6, 8, 10)), jnp.ones((5, 5, 10, 12))
    graph = graph_of(function, w, x)
    reasons = {role.size: role.unshardable for role in analyse(graph).roles}
    assert "(a halo)" in reasons[6] and "(a halo)" in reasons[8]
    assert "needs it whole" in reasons[5]
    assert any(primitive in reason for reason in reasons.values())


@pytest.mark.sampled(3)
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("case", [c for c in CASES if c.any_size], ids=str)
def test_halves_of_a_linked_dimension_make_up_the_whole(case: Case) -> None:
    arguments = case.arguments()
    operands, results = case.expected.split("->")
    texts = [t for t in operands.split(",")][: len(arguments)]
    whole = jax.tree.leaves(case.function(*arguments))
    checked = 0
    for letter in sorted({c for c in results if c.islower()}):
        if not any(letter in text for text in texts):
            continue
        halves = []
        for low in (True, False):
            cut = [
                _half(value, text.find(letter), low)
                for value, text in zip(arguments, texts, strict=True)
            ]
            halves.append(jax.tree.leaves(case.function(*cut)))
        for full, text, *parts in zip(whole, results.split(","), *halves, strict=True):
            dim = text.find(letter)
            if dim >= 0:
                joined = jnp.concatenate(parts, axis=dim)
                np.testing.assert_allclose(joined, full, rtol=1e-5, atol=1e-5)
                checked += 1
    assert checked


def _half(value: jax.Array, dim: int, low: bool) -> jax.Array:
    if dim < 0 or value.shape[dim] == 1:
        return value
    middle = value.shape[dim] // 2
    size = middle if low else value.shape[dim] - middle
    return lax.dynamic_slice_in_dim(value, 0 if low else middle, size, axis=dim)


@pytest.mark.parametrize("shape", [(6, 8), (4, 12), (2, 24)])
def test_a_reshape_only_regroups(shape: Shape) -> None:
    graph = graph_of(lambda x: x.reshape(3, 16), jnp.ones(shape))
    (op,) = [op for op in graph.ops if op.kind == "reshape"]
    assert op.reshape and not op.factors


def test_an_equal_split_is_a_reshape_and_a_pick() -> None:
    graph = graph_of(lambda x: jnp.split(x, 3, axis=1), jnp.ones((4, 6)))
    first, second = graph.ops[:2]
    assert (first.kind, first.reshape) == ("reshape", True)
    assert graph.tensors[first.results[0]].shape == (4, 3, 2)
    assert second.kind == "split" and second.operands == first.results
    assert first.position == second.position == (0,)


PRODUCTS = [
    (einsum("be,em->bm"), ((4, 6), (6, 8)), 2 * 4 * 6 * 8, (4, 6, 8, 1)),
    (
        einsum("bqhd,bkhd->bhqk"),
        ((2, 4, 6, 8), (2, 10, 6, 8)),
        2 * 2 * 6 * 4 * 10 * 8,
        (4, 8, 10, 12),
    ),
    (
        conv(),
        ((4, 6, 8, 10), (3, 3, 10, 12)),
        2 * (4 * 6 * 8) * (3 * 3 * 10) * 12,
        (4 * 6 * 8, 90, 12, 1),
    ),
    (
        conv(strides=(2, 2)),
        ((4, 6, 8, 10), (3, 3, 10, 12)),
        2 * (4 * 3 * 4) * (3 * 3 * 10) * 12,
        (4 * 3 * 4, 90, 12, 1),
    ),
    (
        conv(groups=10),
        ((4, 6, 8, 10), (3, 3, 1, 10)),
        2 * (4 * 6 * 8) * 9 * 10,
        (4 * 6 * 8, 9, 1, 10),
    ),
]


@pytest.mark.parametrize(("function", "shapes", "flops", "matmul"), PRODUCTS)
def test_flops_are_the_closed_form(
    function: Callable[..., Any],
    shapes: tuple[Shape, ...],
    flops: int,
    matmul: tuple[int, ...],
) -> None:
    graph = graph_of(function, *(jnp.ones(s) for s in shapes))
    (op,) = [op for op in graph.ops if op.matmul is not None]
    assert (op.flops, op.matmul) == (flops, matmul)
    assert sum(o.flops for o in graph.ops) == flops


def test_a_primitive_without_a_rule_is_named_and_kept_whole() -> None:
    def function(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: v, shape, x)

    graph = graph_of(function, jnp.ones((4, 6)))
    assert graph.unknown_primitives == ("pure_callback",)
    (op,) = [op for op in graph.ops if op.unknown]
    assert letters(op, graph) == "AB->CD"
