"""What marks and metadata allow: sets of roles, pins, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.graphs import GraphBuilder, gpt, mlp
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph, Mark, Tensor
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.metadata_constraints import role_names, unplanned_pins
from whalejax.planner.sharding.strategies import (
    NEEDS_AN_AXIS,
    NO_EXPERTS,
    NO_TENSOR,
    Options,
    _maximal,
    choices,
    idle_marks,
    sharded_by_split,
)


def mark(kind: str, **attributes: str) -> Mark:
    """A mark with these arguments as text."""
    assert kind in ("replicate", "split")
    return Mark(
        kind="split" if kind == "split" else "replicate",
        attributes=tuple(sorted(attributes.items())),
    )


def hybrid(split: Mark, *, heads: int = 1) -> Graph:
    """A replicated backbone ``[24 → 320 → 48]`` and a marked head ``[48 → 40]``."""
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    p.mark(mark("replicate"), "replicate")
    h = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("up.kernel", 24, 320)))
    h = p.einsum("bi,ij->bj", h, p.param("down.kernel", 320, 48))
    logits = h
    for i in range(heads):
        p.mark(split, "split" if i == 0 else f"split.{i + 1}")
        logits = p.einsum("bi,ij->bj", h, p.param(f"head{i or ''}.kernel", 48, 40))
    return p.graph(p.einsum("bj->", p.unary("exp", logits)))


def options_of(graph: Graph, default: str | None = None) -> tuple[Options, Dimensions]:
    """The choices of a graph."""
    dims = analyse(graph)
    return choices(graph, dims, build_rows(graph, dims), default), dims


def refused(graph: Graph) -> str:
    """Text of the refusal."""
    with pytest.raises(PlanError) as caught:
        options_of(graph)
    return str(caught.value)


def pinned(graph: Graph, **pins: tuple[str | None, ...]) -> Graph:
    """The graph with metadata of some leaves, by their path with ``_`` for dots."""

    def change(t: Tensor) -> Tensor:
        found = pins.get(t.path.replace(".", "_"))
        return t if found is None else dataclasses.replace(t, pinned=found)

    return dataclasses.replace(graph, tensors=tuple(change(t) for t in graph.tensors))


def mesh(**axes: int) -> dict[str, int]:
    """All planned axes, 1 where not given."""
    return {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, **axes}


# Which roles go together.


@given(st.integers(1, 7), st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_maximal_sets_equal_brute_force(
    count: int, edges: set[tuple[int, int]]
) -> None:
    meet: dict[int, set[int]] = {r: set() for r in range(count)}
    for a, b in edges:
        if a != b and max(a, b) < count:
            meet[a].add(b)
            meet[b].add(a)

    def apart(roles: tuple[int, ...]) -> bool:
        return all(b not in meet[a] for a, b in itertools.combinations(roles, 2))

    every = [
        frozenset(s)
        for n in range(1, count + 1)
        for s in itertools.combinations(range(count), n)
        if apart(s)
    ]
    maximal = {s for s in every if not any(s < other for other in every)}
    found = [frozenset(s) for s in _maximal(list(range(count)), meet)]
    assert set(found) == maximal
    assert len(found) == len(maximal)


def test_megatron_is_a_set_of_a_gpt_and_heads_come_before_widths() -> None:
    graph = gpt(12)
    options, dims = options_of(graph)
    sets = [sorted(dims.roles[r].size for r in s) for s in options.choices[0].sets if s]
    # Embed alone holds most weight; then what Megatron shards.
    assert sets[:3] == [[48], [8, 320, 512, 512], [6, 10, 320, 512, 512]]
    offered = {r for s in options.choices[0].sets for r in s}
    sizes = {dims.roles[r].size for r in offered}
    # The sequence meets itself, and the batch is not for the tensor axis.
    assert sizes == {48, 8, 6, 10, 320, 512}


def test_many_unlike_layers_do_not_blow_up() -> None:
    p, loss = mlp(16, tuple(range(40, 120)))
    options, dims = options_of(p.graph(loss))
    sets = options.choices[0].sets
    assert len(sets) == 32
    held = [
        sum(t.nbytes for t in p.tensors if t.kind == "param" and _holds(dims, t, s))
        for s in sets
    ]
    assert held == sorted(held, reverse=True)
    # Every kernel but the two at the ends has both its dimensions in some set.
    assert held[0] >= 0.9 * sum(t.nbytes for t in p.tensors if t.kind == "param")


def _holds(dims: Dimensions, tensor: Tensor, roles: tuple[int, ...]) -> bool:
    return any(r in roles for atoms in dims.layouts[tensor.id] for r in atoms)


def test_a_minor_atom_is_not_offered() -> None:
    options, dims = options_of(gpt(2, fused=True))
    offered = {r for s in options.choices[0].sets for r in s}
    assert options.minor
    assert not offered & options.minor
    assert {dims.roles[r].size for r in options.minor} == {8, 6}


# Tables.


def test_replicate_lends_every_axis_to_the_batch() -> None:
    options, dims = options_of(hybrid(mark("split")))
    (table,) = options.tables(1, mesh(data=2, tensor=4))
    assert table == dict.fromkeys(table, options.batch) | {"context": ()}


def test_split_shards_something_and_what_is_free_may_not() -> None:
    options, dims = options_of(hybrid(mark("split")))
    tables = options.tables(2, mesh(tensor=8))
    assert {dims.roles[t["tensor"][0]].size for t in tables} == {48, 40}
    free, dims = options_of(gpt(1))
    tables = free.tables(0, mesh(tensor=2))
    assert free.batch in [t["tensor"] for t in tables]


def test_only_what_the_axis_divides_is_offered() -> None:
    options, dims = options_of(hybrid(mark("split")))
    assert {
        dims.roles[t["tensor"][0]].size for t in options.tables(2, mesh(tensor=16))
    } == {48}
    assert options.tables(2, mesh(tensor=7)) == []


def test_the_mark_names_the_dimension() -> None:
    options, dims = options_of(hybrid(mark("split", axis="head.kernel.1")))
    (table,) = options.tables(2, mesh(tensor=8))
    assert [dims.roles[r].name for r in table["tensor"]] == ["head.kernel[1]"]
    assert options.tables(2, mesh(tensor=16)) == []


@pytest.mark.parametrize("name", ["head.kernel.1", "head.kernel[1]"])
def test_names_that_a_user_may_write(name: str) -> None:
    options, dims = options_of(hybrid(mark("split", axis=name)))
    assert [dims.roles[r].size for r in options.choices[2].named_roles] == [40]


def test_a_dimension_of_one_of_many_layers_is_found_by_its_path() -> None:
    graph = gpt(3)
    split = mark("split", axis="blocks.1.up.kernel.1")
    region = dataclasses.replace(graph.task_graphs[0], marks=(split,), name="split")
    options, dims = options_of(dataclasses.replace(graph, task_graphs=(region,)))
    assert [dims.roles[r].size for r in options.choices[0].named_roles] == [320]


def test_the_end_of_a_path_is_enough_where_it_is_unique() -> None:
    graph = gpt(3)
    split = mark("split", axis="up.kernel.1")
    region = dataclasses.replace(graph.task_graphs[0], marks=(split,), name="split")
    options, dims = options_of(dataclasses.replace(graph, task_graphs=(region,)))
    assert [dims.roles[r].size for r in options.choices[0].named_roles] == [320]


def test_a_role_is_written_without_the_layers_in_front() -> None:
    dims = analyse(gpt(3))
    role = next(r for r in dims.roles if r.size == 320)
    assert role_names(role) == ["down.kernel.0", "up.kernel.1"]


def test_metadata_fixes_the_dimension() -> None:
    graph = pinned(gpt(2), head_kernel=("tensor", None))
    options, dims = options_of(graph)
    embed = dims.find("head.kernel[0]")
    assert embed is not None
    tables = options.tables(0, mesh(tensor=2))
    assert tables and all(embed.index in t["tensor"] for t in tables)
    axes = ("data", "fsdp", "expert", "tensor")
    lent = {axis: options.batch for axis in axes}
    assert options.tables(0, mesh(data=8)) == [lent | {"context": options.sequence}]


# Meshes.


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"tensor": 8}, ""),
        ({"data": 4, "tensor": 2}, ""),
        ({"data": 8}, NEEDS_AN_AXIS),
        ({"fsdp": 8}, NEEDS_AN_AXIS),
        ({"expert": 8}, NO_EXPERTS),
        ({}, ""),
    ],
)
def test_a_mesh_serves_the_marks_or_says_why_not(
    axes: dict[str, int], reason: str
) -> None:
    options, _ = options_of(hybrid(mark("split")))
    assert sharded_by_split(options, mesh(**axes)) == reason


def test_a_count_of_devices_fixes_the_model_axes() -> None:
    options, _ = options_of(hybrid(mark("split", devices="4")))
    assert sharded_by_split(options, mesh(data=2, tensor=4)) == ""
    assert sharded_by_split(options, mesh(tensor=8)) == "a split asks for 4 devices"


def test_without_weights_to_shard_there_is_no_tensor_axis() -> None:
    options, _ = options_of(gpt(1), "replicate")
    assert sharded_by_split(options, mesh(tensor=8)) == NO_TENSOR


def test_a_split_around_nothing_that_can_be_sharded_has_no_effect() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    h = p.einsum("bi,ij->bj", x, p.param("w", 24, 40))
    loss = p.einsum("bj->", h)
    p.mark(mark("split"), "split")
    graph = p.graph(p.add(loss, loss))
    options, _ = options_of(graph)
    assert sharded_by_split(options, mesh(data=8)) == ""
    assert idle_marks(graph, options) == [
        "split: split() has no effect: it covers no dimension that can be sharded"
    ]


def test_a_split_without_weights_shards_its_activations() -> None:
    p = GraphBuilder()
    x = p.batch("x", 16, 24)
    h = p.einsum("bi,ij->bj", x, p.param("w", 24, 40))
    p.mark(mark("split"), "split")
    options, dims = options_of(p.graph(p.einsum("bj->", p.unary("exp", h))))
    (table,) = options.tables(1, mesh(tensor=8))
    assert [dims.roles[r].size for r in table["tensor"]] == [40]


# Everything wrong with hints, to the letter.


def test_a_name_that_names_nothing() -> None:
    assert refused(hybrid(mark("split", axis="hed.kernel.1"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='hed.kernel.1') names no dimension of that region. "
        "Nearest: head.kernel.1, head.kernel.0, down.kernel.1"
    )


def test_a_name_that_means_several() -> None:
    assert refused(hybrid(mark("split", axis="kernel.1"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='kernel.1') may mean down.kernel.1, head.kernel.1. "
        "Write the whole path of a leaf"
    )


def test_the_batch_is_not_for_split() -> None:
    assert refused(hybrid(mark("split", axis="batch"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='batch') cannot be sharded: it is the batch, which "
        "belongs to replicate. Name another dimension, or leave axis= out"
    )


def test_metadata_against_a_mark() -> None:
    assert refused(pinned(hybrid(mark("split")), up_kernel=(None, "tensor"))) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. up.kernel dim 1: its metadata shards it over tensor, but replicate "
        "replicates it. Drop one of the two hints"
    )


def test_metadata_against_the_dimension_that_a_mark_names() -> None:
    graph = pinned(
        hybrid(mark("split", axis="head.kernel.1")), head_kernel=("tensor", None)
    )
    assert refused(graph) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. split: split(axis='head.kernel.1'), and head.kernel dim 0: its metadata "
        "shards it over tensor: both dimensions are in one operation, which an axis "
        "can shard along only one. Drop one of the two"
    )


def test_two_dimensions_on_one_axis() -> None:
    graph = pinned(hybrid(mark("split")), head_kernel=("tensor", "tensor"))
    text = refused(graph)
    assert (
        "head.kernel: its metadata puts the axis tensor on dim 0 (48) and dim 1 (40), "
        "but one axis can shard only one dimension of a tensor. Keep one of them"
    ) in text


def test_metadata_on_what_is_computed_whole_is_for_storage() -> None:
    graph = pinned(gpt(1, fused=True), blocks_0_output_kernel=("tensor", None))
    options, _ = options_of(graph)
    (tensor,) = (t for t in graph.params if t.path == "blocks.0.output.kernel")
    assert options.stored == {tensor.id: ((0, "tensor"),)}


def test_of_two_dimensions_that_meet_that_of_more_bytes_is_computed_in_shards() -> None:
    p = GraphBuilder()
    x = p.einsum("bi,i->bi", p.batch("x", 16, 24), p.param("norm.scale", 24))
    h = p.unary("tanh", p.einsum("bi,ij->bj", x, p.param("up.kernel", 24, 320)))
    graph = p.graph(p.einsum("bj->", h))
    options, dims = options_of(
        pinned(graph, up_kernel=(None, "tensor"), norm_scale=("tensor",))
    )
    assert [graph.tensors[t].path for t in options.stored] == ["norm.scale"]
    (table,) = options.tables(0, mesh(tensor=8))
    assert [dims.roles[r].size for r in table["tensor"]] == [320]


def test_an_axis_on_a_dimension_of_size_1_is_noted() -> None:
    p = GraphBuilder()
    x = p.einsum("bi,ki->bki", p.batch("x", 16, 24), p.param("keys", 1, 24))
    graph = pinned(p.graph(p.einsum("bki->", p.unary("exp", x))), keys=("tensor", None))
    options, _ = options_of(graph)
    assert options.stored == {}
    assert unplanned_pins(graph, mesh(tensor=8)) == [
        "the metadata names the mesh axis tensor for dimensions of size 1, where that "
        "name has no effect: keys dim 0"
    ]


def test_splits_of_different_widths() -> None:
    graph = hybrid(mark("split", devices="4"), heads=2)
    last = dataclasses.replace(
        graph.task_graphs[3], marks=(mark("split", devices="2"),)
    )
    graph = dataclasses.replace(graph, task_graphs=(*graph.task_graphs[:3], last))
    assert refused(graph) == (
        "the hints cannot be obeyed: 1 problem\n"
        "  1. the split regions ask for different numbers of devices (split over 4, "
        "split.2 over 2), but they share one mesh. Give them one number, or leave "
        "devices= out"
    )


def test_all_problems_are_listed_at_once() -> None:
    graph = pinned(
        hybrid(mark("split", axis="nothing")),
        up_kernel=(None, "tensor"),
        head_kernel=("tensor", "tensor"),
    )
    text = refused(graph)
    assert text.startswith("the hints cannot be obeyed: 3 problems\n")
    for path in ("up.kernel", "head.kernel", "split(axis='nothing')"):
        assert path in text


def test_an_axis_of_size_1_in_the_metadata_is_noted() -> None:
    graph = pinned(gpt(1), head_kernel=("expert", None))
    assert unplanned_pins(graph, mesh(tensor=8)) == [
        "1 leaf names the mesh axis expert (head.kernel), which has size 1 in this "
        "plan: the name has no effect"
    ]
    graph = pinned(graph, tokens_embedding=("expert", None))
    assert unplanned_pins(graph, mesh(tensor=8)) == [
        "2 leaves name the mesh axis expert (tokens.embedding first), which "
        "has size 1 in this plan: the name has no effect"
    ]
    assert unplanned_pins(graph, mesh(expert=8)) == []
