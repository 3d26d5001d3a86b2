"""Dimension analysis: the dimensions that a human would name, and no others."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.graphs import GraphBuilder, Sizes, gpt, mlp
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.model.analysis import expert_roles
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan_entries import starred
from whalejax.planner.sharding.operation_rows import Flow


HUMAN = {
    "batch": 16,
    "tokens[1]": 24,
    "tokens.embedding[1]": 48,
    "tokens.embedding[0]": 512,
    "head.kernel[1]": 512,
    "blocks.*.output.kernel[0]": 8,
    "blocks.*.key.kernel[2]": 6,
    "blocks.*.output.kernel[1]": 10,
    "blocks.*.up.kernel[1]": 320,
    "dim24": 24,
}
"""The ten dimensions of a GPT: what a human calls batch, sequence, embed, vocabulary
in and out, heads, width of key and value, mlp and the sequence of the keys."""


def named(dims: Dimensions) -> dict[str, int]:
    """Every name a role may be called by, to its size; one name a role."""
    return {_common(r.aliases, r.name): r.size for r in dims.roles}


def _common(aliases: tuple[str, ...], name: str) -> str:
    return next((n for n in HUMAN if n in (name, *aliases)), name)


def layout(graph: Graph, dims: Dimensions, path: str) -> tuple[tuple[str, ...], ...]:
    """Names of the roles of a leaf."""
    tensor = next(t for t in graph.tensors if t.path == path)
    return tuple(
        tuple(_common(dims.roles[r].aliases, dims.roles[r].name) for r in atoms)
        for atoms in dims.layouts[tensor.id]
    )


def assert_disequal(graph: Graph, dims: Dimensions) -> None:
    """No tensor holds one role twice; every atom has its role's size.

    A spatial dimension has a size at each resolution of the model.
    """
    for tensor in graph.tensors:
        held = [r for atoms in dims.layouts[tensor.id] for r in atoms]
        assert len(held) == len(set(held)), (tensor, dims.layouts[tensor.id])
        sizes = [n for atoms in dims.sizes[tensor.id] for n in atoms]
        for size, role in zip(sizes, (dims.roles[r] for r in held), strict=True):
            assert size == role.size or (role.space and size % role.common == 0)


@pytest.mark.parametrize("layers", [2, 12, 126])
def test_unrolled_layers_fold_to_the_ten_human_roles(layers: int) -> None:
    graph = gpt(layers)
    dims = analyse(graph)
    assert named(dims) == HUMAN
    assert_disequal(graph, dims)
    copies = {r.name: r.copies for r in dims.roles}
    assert {n for n, c in copies.items() if c == layers} == {
        "blocks.*.output.kernel[0]",
        "blocks.*.key.kernel[2]",
        "blocks.*.output.kernel[1]",
        "blocks.*.down.kernel[0]",
        "dim24",
    }
    assert [r.name for r in dims.batch] == ["batch"]


def test_one_layer_is_named_by_its_own_path() -> None:
    assert "blocks.0.up.kernel[1]" in {
        alias for r in analyse(gpt(1)).roles for alias in r.aliases
    }


def test_nothing_is_tied_by_size_alone() -> None:
    equal = Sizes(
        batch=64, seq=64, embed=64, heads=64, key=64, value=64, mlp=64, vocab=64
    )
    graph, other = gpt(12, equal), gpt(12)
    dims, unequal = analyse(graph), analyse(other)
    assert_disequal(graph, dims)
    assert len(dims.roles) == len(unequal.roles) == 10
    partner: dict[int, int] = {}
    for t, u in zip(graph.tensors, other.tensors, strict=True):
        for a, b in zip(dims.layouts[t.id], unequal.layouts[u.id], strict=True):
            for one, two in zip(a, b, strict=True):
                assert partner.setdefault(one, two) == two
    assert len(set(partner.values())) == 10


def test_layers_that_differ_in_size_do_not_fold() -> None:
    p, loss = mlp(16, (20, 30, 40, 35, 50))
    roles = analyse(p.graph(loss)).roles
    assert sorted(r.size for r in roles) == [16, 20, 30, 35, 40, 50]
    assert all(r.copies == 1 for r in roles)


def test_square_layers_in_a_row_alternate_between_two_roles() -> None:
    p, loss = mlp(16, (64,) * 8)
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    inner = [dims.layouts[t.id] for t in graph.params][1:-1]
    rows = {spec[0] for spec in inner}
    assert rows == {spec[1] for spec in inner}
    assert len(rows) == 2
    assert all(a[1] == b[0] for a, b in zip(inner, inner[1:], strict=False))
    # Seen as one role they would pass for experts: a batch dimension of a product.
    assert not expert_roles(graph, dims)


def test_a_reshape_into_heads_is_the_identity_on_atoms() -> None:
    graph = gpt(3, flat_heads=True)
    dims = analyse(graph)
    assert len(dims.roles) == 10
    assert_disequal(graph, dims)
    heads, width = layout(graph, dims, "blocks.1.value.kernel")[1]
    assert layout(graph, dims, "blocks.1.output.kernel")[0] == (heads, width)
    query_heads, query_width = layout(graph, dims, "blocks.1.query.kernel")[1]
    assert query_heads == heads
    assert query_width != width
    sizes = {r.name: r.size for r in dims.roles}
    assert (sizes[heads], sizes[width], sizes[query_width]) == (8, 10, 6)
    embed = layout(graph, dims, "blocks.1.query.kernel")[0]
    assert embed == layout(graph, dims, "tokens.embedding")[1:2][0]


def test_fused_query_key_value_has_heads_as_a_middle_atom() -> None:
    graph = gpt(3, fused=True, tied=True)
    dims = analyse(graph)
    three, heads, width = layout(graph, dims, "blocks.2.qkv.kernel")[1]
    sizes = {r.name: r.size for r in dims.roles}
    assert [sizes[n] for n in (three, heads, width)] == [3, 8, 6]
    assert layout(graph, dims, "blocks.2.output.kernel")[0] == (heads, width)


def test_a_tied_embedding_has_one_vocabulary() -> None:
    dims = analyse(gpt(2, tied=True))
    assert [r.size for r in dims.roles].count(512) == 1
    assert len(dims.roles) == 9


def test_attention_is_cut_at_key_and_value() -> None:
    graph = gpt(4)
    dims = analyse(graph)
    assert len(dims.cuts) == 8
    sequence, keys = dims.find("tokens[1]"), dims.find("dim24")
    assert sequence is not None and keys is not None
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        assert op.kind == "dot_general"
        tensor = op.operands[cut.slot]
        held = dims.layouts[tensor]
        assert cut.nbytes == graph.tensors[tensor].nbytes
        # Whole in the sequence as made, by the keys' own role as the product needs it.
        assert held[cut.dim] == (sequence.index,)
        assert dims.seen[cut.op, cut.slot][cut.dim] == (keys.index,)
        maker = next(o for o in graph.ops if tensor in o.results)
        weight = graph.tensors[maker.operands[1]].path
        assert weight.split(".")[2] in ("key", "value")


def test_the_order_of_operands_does_not_move_the_cuts() -> None:
    one, other = gpt(4), gpt(4, swapped=True)

    def cut_weights(graph: Graph) -> list[str]:
        dims = analyse(graph)
        found = []
        for cut in dims.cuts:
            tensor = graph.ops[cut.op].operands[cut.slot]
            maker = next(o for o in graph.ops if tensor in o.results)
            found.append(graph.tensors[maker.operands[1]].path)
        return sorted(found)

    assert cut_weights(one) == cut_weights(other)


def grouped_queries(
    *, swapped: bool = False, value: int = 12, key_heads: int = 2
) -> Graph:
    """Attention of eight heads over fewer of keys and values."""
    p = GraphBuilder()
    x = p.batch("x", 16, 32, 48)
    q = p.einsum("bse,eghd->bsghd", x, p.param("q", 48, key_heads, 8 // key_heads, 12))
    k = p.einsum("bse,egd->bsgd", x, p.param("k", 48, key_heads, 12))
    v = p.einsum("bse,egd->bsgd", x, p.param("v", 48, key_heads, value))
    scores = (
        p.einsum("btgd,bsghd->bghst", k, q)
        if swapped
        else p.einsum("bsghd,btgd->bghst", q, k)
    )
    weights = p.unary("exp", scores)
    y = (
        p.einsum("btgd,bghst->bsghd", v, weights)
        if swapped
        else p.einsum("bghst,btgd->bsghd", weights, v)
    )
    o = p.param("o", key_heads, 8 // key_heads, value, 48)
    return p.graph(p.einsum("bse->", p.add(x, p.einsum("bsghd,ghde->bse", y, o))))


@pytest.mark.parametrize("swapped", [False, True])
def test_of_few_keys_and_many_queries_the_keys_change_layout(swapped: bool) -> None:
    graph = grouped_queries(swapped=swapped)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    assert sum(cut.nbytes for cut in dims.cuts) == 98_304
    assert sum(cut.other_nbytes for cut in dims.cuts) == 393_216


@pytest.mark.parametrize("value", [6, 12, 24, 96])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("swapped", [False, True])
def test_attention_is_cut_at_its_cheap_side_however_wide_the_values(
    swapped: bool, key_heads: int, value: int
) -> None:
    graph = grouped_queries(swapped=swapped, value=value, key_heads=key_heads)
    dims = analyse(graph)
    shapes = [
        graph.tensors[graph.ops[cut.op].operands[cut.slot]].shape for cut in dims.cuts
    ]
    assert sorted(shapes) == sorted(
        [(16, 32, key_heads, 12), (16, 32, key_heads, value)]
    )
    assert_seen_once(graph, dims)


def assert_seen_once(graph: Graph, dims: Dimensions) -> None:
    """No operation sees one role twice in a tensor."""
    for (index, slot), layout in dims.seen.items():
        held = [r for atoms in layout for r in atoms]
        assert len(held) == len(set(held)), (graph.ops[index].kind, slot, layout)


def test_the_opposite_order_is_weighed_where_a_cut_is_dear() -> None:
    """Products whose cheap sides lie at different ends: one order cannot serve both."""
    p = GraphBuilder()
    x = p.batch("x", 4, 32, 8)
    small = p.einsum("bsi,ij->bsj", x, p.param("small", 8, 4))
    large = p.einsum("bsi,ij->bsj", x, p.param("large", 8, 64))
    scores = p.einsum("bsj,btj->bst", small, small)
    mixed = p.einsum("bst,btk->bsk", scores, large)
    total = p.add(p.einsum("bsk->bs", mixed), p.einsum("bsj->bs", small))
    graph = p.graph(p.einsum("bs->", total))
    dims = analyse(graph)
    assert_seen_once(graph, dims)
    moved = sum(
        graph.tensors[(graph.ops[op].operands + graph.ops[op].results)[slot]].nbytes
        for op, slot in dims.seen
    )
    # The small values and the large ones, once each.
    assert moved <= 4 * 32 * (4 + 64) * 4


def test_rows_counted_by_a_triangle_are_gathered() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 32, 8)
    picks = p.unary("exp", p.einsum("bsi,ie->bse", x, p.param("w", 8, 6)))
    earlier = p.batch("earlier", 32, 32)
    before = p.einsum("st,bte->bse", earlier, picks)
    graph = p.graph(p.einsum("bse->", p.add(before, picks)))
    dims = analyse(graph)
    assert_seen_once(graph, dims)
    (flow,) = moved(graph, dims)
    assert flow.source.nbytes == 4 * 32 * 6 * 4


def test_a_mask_is_cut_at_its_cheap_second_operand() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 32, 8)
    w = p.param("w", 8, 8)
    y = p.einsum("bsi,ij->bsj", x, w)
    scores = p.einsum("bsj,btj->bst", y, p.einsum("bsi,ij->bsj", x, w))
    real = p.batch("real", 4, 32)
    rows, columns = p.reshape(real, 4, 32, 1), p.reshape(real, 4, 1, 32)
    mask = p.add(rows, columns, kind="and")
    loss = p.einsum("bst->", p.add(scores, mask, kind="select_n"))
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    small = [c for c in dims.cuts if graph.ops[c.op].kind in ("and", "reshape")]
    assert small and all(c.nbytes == 4 * 32 * 4 for c in small)
    assert len(dims.cuts) == 2


def moved(graph: Graph, dims: Dimensions) -> list[Flow]:
    """Values that some reader sees in another layout than they are made in."""
    return [
        flow
        for flow in build_rows(graph, dims).flows
        if any(use.view.layout != flow.source.layout for use in flow.uses)
    ]


def test_a_square_kernel_in_the_residual_stream_is_cut_at_the_sum() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 8)
    w0, w1 = p.param("in", 8, 32), p.param("square", 32, 32)
    h = p.einsum("bi,ie->be", x, w0)
    h = p.add(h, p.einsum("be,ef->bf", h, w1))
    loss = p.einsum("be->", h)
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    (cut,) = dims.cuts
    assert graph.ops[cut.op].kind == "add"
    assert (cut.dim, cut.nbytes) == (1, 4 * 32 * 4)
    assert len(moved(graph, dims)) == 1


def test_a_kernel_used_twice_in_a_row_is_cut() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 32)
    w = p.param("w", 32, 32)
    loss = p.einsum("bi->", p.einsum("bi,ij->bj", p.einsum("bi,ij->bj", x, w), w))
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    assert len(dims.cuts) == 1


def test_a_reshape_that_would_tie_a_role_to_itself_is_cut_there() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 32)
    w = p.param("w", 32, 32)
    flat = p.reshape(p.einsum("bi,ij->bj", x, w), 4, 32, 1)
    loss = p.einsum("bij->", p.add(flat, p.reshape(x, 4, 32, 1)))
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    (cut,) = dims.cuts
    assert graph.ops[cut.op].kind in ("reshape", "add")
    assert moved(graph, dims)


def test_a_reshape_sees_no_role_twice() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 32)
    w = p.param("w", 32, 32)
    square = p.einsum("bi,ij->ij", x, w)
    turned = p.reshape(p.einsum("bi,bj->ij", x, x), 32, 1, 32)
    graph = p.graph(p.einsum("iaj->", p.add(turned, p.reshape(square, 32, 1, 32))))
    dims = analyse(graph)
    assert_disequal(graph, dims)
    assert_seen_once(graph, dims)


def test_a_reshape_that_no_grouping_explains_needs_its_operand_whole() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 6)
    w = p.param("w", 6, 12)
    y = p.einsum("bi,ij->bj", x, w)
    a = p.reshape(y, 4, 2, 6)
    b = p.reshape(y, 4, 3, 4)
    loss = p.add(p.einsum("bij->", a), p.einsum("bij->", b))
    graph = p.graph(loss)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    # The first grouping stands; the second has to gather what it regroups.
    assert dims.sizes[y] == ((4,), (2, 6))
    assert dims.layouts[a][1:] == tuple((r,) for r in dims.layouts[y][1])
    (index,) = [i for i, op in enumerate(graph.ops) if op.results == (b,)]
    assert dims.seen[index, 0] == (dims.layouts[y][0], ())
    (flow,) = moved(graph, dims)
    assert flow.source.layout == dims.layouts[y]
    assert [use.view.layout[1] == () for use in flow.uses] == [False, True]


def test_refinement_of_one_dimension_reaches_its_namesakes() -> None:
    p = GraphBuilder()
    x = p.batch("x", 4, 5)
    w = p.param("w", 5, 24)
    y = p.einsum("bi,ij->bj", x, w)
    z = p.add(y, p.reshape(p.reshape(y, 4, 6, 4), 4, 24))
    loss = p.einsum("bijk->", p.reshape(z, 4, 2, 3, 4))
    graph = p.graph(loss)
    dims = analyse(graph)
    assert dims.sizes[w] == ((5,), (2, 3, 4))
    assert dims.layouts[z] == dims.layouts[y]
    assert not dims.cuts


SHAPES = ((24,), (2, 12), (12, 2), (3, 8), (4, 6), (2, 3, 4), (4, 3, 2), (2, 2, 6))


@settings(max_examples=80)
@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6), st.booleans())
def test_any_chain_of_reshapes_is_understood_or_gathered(
    shapes: list[tuple[int, ...]], back: bool
) -> None:
    """A reshape holds the same roles on both sides, or needs its operand whole."""
    p = GraphBuilder()
    x = p.einsum("bi,ij->bj", p.batch("x", 5, 7), p.param("w", 7, 24))
    y = x
    for shape in shapes:
        y = p.reshape(y, 5, *shape)
    if back:
        y = p.add(x, p.reshape(y, 5, 24))
    graph = p.graph(y)
    dims = analyse(graph)
    assert_disequal(graph, dims)
    for index, op in enumerate(graph.ops):
        if op.reshape:
            needed = dims.seen.get((index, 0), dims.layouts[op.operands[0]])
            before = [r for atoms in needed for r in atoms]
            after = [r for atoms in dims.layouts[op.results[0]] for r in atoms]
            assert [r for r in after if r in before] == before
            if (index, 0) not in dims.seen:
                assert before == after
    assert dims.roles[dims.layouts[y][0][0]].is_batch


def test_logical_names_of_the_model_name_the_roles() -> None:
    graph = gpt(3)
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    tensors = tuple(
        dataclasses.replace(t, names=names.get(t.path.split(".")[-2], ()))
        if t.kind == "param" and "blocks" in t.path
        else t
        for t in graph.tensors
    )
    dims = analyse(dataclasses.replace(graph, tensors=tensors))
    mlp_role, embed = dims.find("mlp"), dims.find("embed")
    assert mlp_role is not None and (mlp_role.name, mlp_role.size) == ("mlp", 320)
    assert embed is not None and "tokens.embedding[1]" in embed.aliases


def test_a_name_is_looked_up_before_an_alias() -> None:
    p, loss = mlp(16, (64,) * 8)
    dims = analyse(p.graph(loss))
    for role in dims.roles:
        assert dims.find(role.name) == role
    assert dims.find("no such name") is None


def test_an_operation_without_a_rule_blocks_its_dimensions() -> None:
    graph = gpt(2)
    index = next(i for i, op in enumerate(graph.ops) if op.kind == "tanh")
    op = graph.ops[index]
    factors = tuple(
        dataclasses.replace(f, kind="unshardable")
        for f in op.factors
        if (0, 2) in f.members
    )
    odd = dataclasses.replace(op, kind="fft", factors=factors, unknown=True)
    ops = (*graph.ops[:index], odd, *graph.ops[index + 1 :])
    dims = analyse(dataclasses.replace(graph, ops=ops))
    role = next(r for r in dims.roles if r.size == 320)
    assert role.unshardable == "no rule for the primitive 'fft'"


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("blocks.3.up.kernel", "blocks.*.up.kernel"),
        ("layer_11.conv2d.kernel", "layer_*.conv2d.kernel"),
        ("encoder12", "encoder*"),
        ("l2_norm.scale", "l2_norm.scale"),
    ],
)
def test_numbers_at_the_end_of_a_component_are_starred(path: str, wanted: str) -> None:
    assert starred(path) == wanted
