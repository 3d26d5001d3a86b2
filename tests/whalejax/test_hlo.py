"""Collectives read from a program's text: kinds, shapes, bytes, loops, groups."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from whalejax import hlo
from whalejax.meshes.errors import WhaleError


ENTRY: Final = "ENTRY %main.1 (x: f32[4,3]) -> f32[4,3] {"


def program(*lines: str, before: str = "") -> str:
    """A program whose entry computation holds these instructions."""
    return "\n".join([before, ENTRY, *(f"  {line}" for line in lines), "}"])


def one(line: str) -> hlo.Instruction:
    """The single collective of a program with one instruction."""
    (found,) = hlo.collectives(program(line)).instructions
    return found


def test_a_tuple_is_one_instruction_with_many_results() -> None:
    found = one(
        "%ar = (f32[8]{0}, bf16[4,3]{1,0}, /*index=2*/f32[]) all-reduce(%a, %b, %c), "
        "channel_id=1, replica_groups={{0,4},{1,5}}, to_apply=%add, "
        'metadata={op_name="jit(f)/transpose(jvp())/dot_general"}'
    )
    assert found.kind == "all-reduce"
    assert found.shapes == (("f32", (8,)), ("bf16", (4, 3)), ("f32", ()))
    assert found.nbytes == 8 * 4 + 12 * 2 + 4
    assert found.count == 1
    assert found.group_size == 2
    assert found.name == "jit(f)/transpose(jvp())/dot_general"


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=1,'b'=8] {'b'}", 8),
        (
            "replica_groups=mesh['a'=4,'b'=3,'c'=2], "
            "device_ids=([2,4,3]T(1,0,2)) {'a','c'}",
            8,
        ),
        ("replica_groups=mesh['a'=8,'b'=2] {'a':(2)4,'b'}", 8),
        ("replica_groups={}", 0),
    ],
)
def test_groups(groups: str, size: int) -> None:
    assert one(f"%g = f32[8]{{0}} all-gather(%x), {groups}").group_size == size


@pytest.mark.parametrize(
    ("line", "kind", "shapes"),
    [
        (
            "%s = (f32[4,3]{1,0}, f32[16,3]{1,0:T(8,128)}) all-gather-start(%x)",
            "all-gather",
            [(16, 3)],
        ),
        (
            "%s = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) "
            "all-gather-start(%x, %y)",
            "all-gather",
            [(8,), (4,)],
        ),
        ("%s = f32[4,3]{1,0} all-reduce-start(%x)", "all-reduce", [(4, 3)]),
        (
            "%s = (f32[4]{0}, f32[2]{0}) all-reduce-start(%x, %y)",
            "all-reduce",
            [(4,), (2,)],
        ),
        (
            "%s = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x)",
            "collective-permute",
            [(4,)],
        ),
        (
            "%s = ((f32[8,3]{1,0}), f32[2,3]{1,0}, s32[]) reduce-scatter-start(%x)",
            "reduce-scatter",
            [(2, 3)],
        ),
    ],
)
def test_an_asynchronous_one_counts_once_with_its_results(
    line: str, kind: str, shapes: list[tuple[int, ...]]
) -> None:
    done = f"%d = f32[16,3]{{1,0}} {kind}-done(%s)"
    (found,) = hlo.collectives(program(line, done)).instructions
    assert found.kind == kind
    assert [shape for _, shape in found.shapes] == shapes


LOOP: Final = """\
%c (p: (s32[], f32[4])) -> pred[] {
  ROOT %p.1 = pred[] parameter(0)
}

%cond (p: (s32[], f32[4])) -> pred[] {
  ROOT %p.2 = pred[] parameter(0)
}

%elsewhere (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %p.3 = (s32[], f32[4]{0}) parameter(0)
}

%body.2 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %w = (s32[], f32[4]{0}) while(%t), condition=%cond, body=%inner.3INNER
}

%inner.3 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}
  %s = f32[2]{0} fusion(%g), kind=kLoop, calls=%fused
}

%fused (p: f32[8]) -> f32[2] {
  %t = f32[2]{0} all-to-all(%p), replica_groups={{0,1}}
}
"""
KNOWN: Final = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_loops_multiply_and_calls_are_entered() -> None:
    outer = f"%w = (s32[], f32[4]{{0}}) while(%t), condition=%c, body=%body.2{KNOWN}"
    before = LOOP.replace("INNER", KNOWN.replace("5", "3"))
    found = hlo.collectives(program(outer, before=before))
    assert found.counts == {"all-reduce": 5, "all-gather": 15, "all-to-all": 15}
    assert found.nbytes == {
        "all-reduce": 5 * 16,
        "all-gather": 15 * 32,
        "all-to-all": 15 * 8,
    }
    assert [i.count for i in found.of("all-gather")] == [15]


def test_a_loop_of_unknown_length_is_an_error_if_it_communicates() -> None:
    outer = f"%w = (s32[], f32[4]{{0}}) while(%t), condition=%c, body=%body.2{KNOWN}"
    with pytest.raises(WhaleError, match="loop with 2 collectives has no known trip"):
        hlo.collectives(program(outer, before=LOOP.replace("INNER", "")))
    quiet = "%w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%elsewhere"
    assert not hlo.collectives(program(quiet, before=LOOP)).instructions


COUNTED: Final = """\
%same (p: s32[]) -> s32[] {
  ROOT %p.1 = s32[] parameter(0)
}

%body (s: (s32[])) -> (s32[]) {
  %s.1 = (s32[]) parameter(0)
  %g = s32[] get-tuple-element(%s.1), index=0
  %one = s32[] constant(1)
  %a = s32[] add(%g, %one)
  %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t.1 = (s32[]) tuple(%a)
}

%cond (s: (s32[])) -> pred[] {
  %s.2 = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s.2), index=0
  %n = s32[] constant(5)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
"""


@pytest.mark.parametrize("key", ["calls", "to_apply"])
def test_the_first_number_of_a_loop_may_come_from_a_call(key: str) -> None:
    lines = [
        "%z = s32[] constant(2)",
        f"%k = s32[] call(%z), {key}=%same",
        "%t = (s32[]) tuple(%k)",
        "%w = (s32[]) while(%t), condition=%cond, body=%body",
    ]
    found = hlo.collectives(program(*lines, before=COUNTED))
    assert found.counts == {"all-reduce": 3}


BRANCHES: Final = """
%inner.1 (p: f32[4]) -> f32[8] {
  %g = f32[8]{0} all-gather(%p), replica_groups={{0,1}}
}

%quiet.1 (p: f32[4]) -> f32[8] {
  %s = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}
}

%outer.1 (p: f32[4]) -> f32[8] {
  %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%quiet.1, %inner.1}
}

%other.1 (p: f32[4]) -> f32[8] {
  %t = f32[4]{0} all-to-all(%p), replica_groups={{0,1}}
  %u = f32[3]{0} all-to-all(%p), replica_groups={{0,1}}
}
"""


def test_of_a_conditional_the_largest_branch_counts() -> None:
    one = "conditional(%i, %x, %x), branch_computations={%other.1, %outer.1}"
    found = hlo.collectives(program(f"%c = f32[8]{{0}} {one}", before=BRANCHES))
    assert found.counts == {"all-gather": 1}  # 32 bytes; the other branches 16 and 28
    twice = program(f"%c = f32[8]{{0}} {one}", f"%d = f32[8]{{0}} {one}")
    assert hlo.collectives(BRANCHES + twice).counts == {"all-gather": 2}


def test_products_of_branches_are_not_added_up() -> None:
    def made(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(
            x.sum() > 0,
            lambda x: jnp.tanh(x @ w),
            lambda x: jnp.tanh(jnp.tanh(x @ w) @ w),
            x,
        )

    text = jax.jit(made).lower(jnp.ones((8, 16)), jnp.ones((16, 16))).compile()
    module = hlo.read(text.as_text() or "")
    assert hlo.product_flops(module) == 2 * (2 * 8 * 16 * 16)


def test_text_without_an_entry_is_an_error() -> None:
    with pytest.raises(WhaleError, match="no ENTRY computation; expected HLO text"):
        hlo.collectives("module @jit_f { }")


def test_an_unknown_element_type_is_an_error() -> None:
    with pytest.raises(WhaleError, match="element type 'opaque' is not known"):
        hlo.collectives(program("%g = opaque[8]{0} all-gather(%x)"))


def test_every_kind_in_a_compiled_program() -> None:
    mesh = Mesh(
        [jax.devices()[i : i + 4] for i in (0, 4)],
        ("a", "b"),
        axis_types=(AxisType.Auto,) * 2,
    )

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jax.lax.psum(x, "a"),
            jax.lax.all_gather(x, "b", tiled=True),
            jax.lax.psum_scatter(x, "a", tiled=True),
            jax.lax.all_to_all(x, "b", 0, 0, tiled=True),
            jax.lax.ppermute(x, "b", [(0, 1), (1, 2)]),
        )

    both = PartitionSpec(("a", "b"))
    specs = (PartitionSpec("b"), PartitionSpec("a"), both, both, both)
    run = jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=specs, check_vma=False)
    text = jax.jit(run).lower(jnp.ones((32, 3))).compile().as_text()
    assert text is not None
    found = hlo.collectives(text)
    assert found.counts == dict.fromkeys(hlo.KINDS, 1)
    assert {i.kind: (i.nbytes, i.group_size) for i in found.instructions} == {
        "all-reduce": (4 * 3 * 4, 2),
        "all-gather": (16 * 3 * 4, 4),
        "reduce-scatter": (2 * 3 * 4, 2),
        "all-to-all": (4 * 3 * 4, 4),
        "collective-permute": (4 * 3 * 4, 0),
    }
