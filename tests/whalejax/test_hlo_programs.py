"""What real compilers write: loops without a count, fusions, groups, products."""

from __future__ import annotations

import itertools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalejax import hlo
from whalejax.hlo.groups import axes_between, axes_of, groups_of, pairs_of
from whalejax.hlo.hlo_text import Module


def loop(
    condition: str, body: str, init: str, *, parts: int = 2, before: str = ""
) -> Module:
    """A program with one loop over a counter and other whole numbers."""
    state = f"({', '.join(['s32[]'] * parts)})"
    elements = [
        f"  %c{i} = s32[] get-tuple-element(%s), index={i}" for i in range(parts)
    ]
    lines = [
        before,
        f"%cond (s: {state}) -> pred[] {{",
        f"  %s = {state} parameter(0)",
        *elements,
        *condition.strip().splitlines(),
        "}",
        f"%body (s: {state}) -> {state} {{",
        f"  %s = {state} parameter(0)",
        *elements,
        "  %one = s32[] constant(1)",
        "  %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}",
        *body.strip().splitlines(),
        "}",
        "ENTRY %main () -> s32[] {",
        *init.strip().splitlines(),
        f"  %w = {state} while(%t), condition=%cond, body=%body",
        "  ROOT %r = s32[] get-tuple-element(%w), index=0",
        "}",
    ]
    return hlo.read("\n".join(lines))


UP: Final = """
  %n = s32[] add(%c0, %one)
  ROOT %u = (s32[], s32[]) tuple(%n, %c1)
"""
FROM_0_TO_8: Final = """
  %zero = s32[] constant(0)
  %eight = s32[] constant(8)
  %t = (s32[], s32[]) tuple(%zero, %eight)
"""


@pytest.mark.parametrize(
    ("compare", "count"), [("LT", 8), ("LE", 9), ("NE", 8)], ids=["lt", "le", "ne"]
)
def test_a_counter_is_followed_to_a_constant(compare: str, count: int) -> None:
    module = loop(
        f"""
  %bound = s32[] constant(8)
  ROOT %p = pred[] compare(%c0, %bound), direction={compare}""",
        UP,
        FROM_0_TO_8,
    )
    assert hlo.collectives(module).counts == {"all-gather": count}


def test_a_bound_may_be_carried_and_stand_on_the_left() -> None:
    condition = "  ROOT %p = pred[] compare(%c1, %c0), direction=GT"
    assert hlo.collectives(loop(condition, UP, FROM_0_TO_8)).counts["all-gather"] == 8


def test_a_counter_may_start_late_step_by_more_and_hide_in_fusions() -> None:
    before = """
%step (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}
%smaller (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}"""
    module = loop(
        """
  %bound = s32[] constant(20)
  ROOT %p = pred[] fusion(%c0, %bound), kind=kLoop, calls=%smaller""",
        """
  %three = s32[] constant(3)
  %n = s32[] fusion(%c0, %three), kind=kLoop, calls=%step
  %same = s32[] copy(%c1)
  ROOT %u = (s32[], s32[]) tuple(%n, %same)""",
        """
  %five = s32[] constant(5)
  %t = (s32[], s32[]) tuple(%five, %five)""",
        before=before,
    )
    # 5, 8, 11, 14, 17.
    assert hlo.collectives(module).counts["all-gather"] == 5


def test_a_counter_may_fall() -> None:
    module = loop(
        """
  %bound = s32[] constant(0)
  ROOT %p = pred[] compare(%c0, %bound), direction=GT""",
        """
  %n = s32[] subtract(%c0, %one)
  ROOT %u = (s32[], s32[]) tuple(%n, %c1)""",
        """
  %seven = s32[] constant(7)
  %t = (s32[], s32[]) tuple(%seven, %seven)""",
    )
    assert hlo.collectives(module).counts["all-gather"] == 7


@pytest.mark.parametrize(
    ("condition", "body", "init"),
    [
        # The bound moves too.
        (
            "  ROOT %p = pred[] compare(%c0, %c1), direction=LT",
            """
  %n = s32[] add(%c0, %one)
  %m = s32[] add(%c1, %one)
  ROOT %u = (s32[], s32[]) tuple(%n, %m)""",
            FROM_0_TO_8,
        ),
        # Both sides move towards each other.
        (
            "  ROOT %p = pred[] compare(%c0, %c1), direction=LT",
            """
  %n = s32[] add(%c0, %one)
  %m = s32[] subtract(%c1, %one)
  ROOT %u = (s32[], s32[]) tuple(%n, %m)""",
            FROM_0_TO_8,
        ),
        # The start is not known.
        (
            """
  %bound = s32[] constant(8)
  ROOT %p = pred[] compare(%c0, %bound), direction=LT""",
            UP,
            '  %t = (s32[], s32[]) custom-call(), custom_call_target="Sharding"',
        ),
        # It doubles.
        (
            """
  %bound = s32[] constant(8)
  ROOT %p = pred[] compare(%c0, %bound), direction=LT""",
            """
  %n = s32[] multiply(%c0, %c0)
  ROOT %u = (s32[], s32[]) tuple(%n, %c1)""",
            FROM_0_TO_8,
        ),
    ],
    ids=["moving-bound", "both-move", "unknown-start", "no-step"],
)
def test_what_cannot_be_followed_is_refused(
    condition: str, body: str, init: str
) -> None:
    with pytest.raises(hlo.HloError, match="no known trip count"):
        hlo.collectives(loop(condition, body, init))


def test_a_scan_of_jax_is_counted_without_its_stated_trip_count() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0]

    text = jax.jit(f).lower(jnp.ones((4, 4))).as_text(dialect="hlo")
    assert "known_trip_count" not in text
    assert hlo.product_flops(hlo.read(text)) == 7 * 2 * 4**3


# Fusions.


def test_a_collective_that_fusions_carry_on_counts_once() -> None:
    gather = (
        "  ROOT %g{0} = f32[8]{{0}} all-gather(%p{0}), channel_id=3, "
        'replica_groups={{{{0,1}}}}, frontend_attributes={{{{chain_id="7"}}}}'
    )
    parts = [
        "\n".join(
            [f"%f{i} (p: f32[4]) -> f32[8] {{", f"  %p{i} = f32[4]{{0}} parameter(0)"]
            + [gather.format(i), "}"]
        )
        for i in range(3)
    ]
    entry = [
        "ENTRY %main (x: f32[4]) -> f32[8] {",
        "  %x = f32[4]{0} parameter(0)",
        *(
            f"  %u{i} = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%f{i}"
            for i in range(3)
        ),
        "}",
    ]
    text = "\n".join([*parts, *entry])
    assert hlo.collectives(text).counts == {"all-gather": 1}
    # Without the mark of a chain they are three, whatever channel they share.
    plain = text.replace("chain_id", "other_id")
    assert hlo.collectives(plain).counts == {"all-gather": 3}


CARRIED: Final = """
%start (p: f32[4]) -> (f32[4], f32[8]) {
  %p0 = f32[4]{0} parameter(0)
  %g0 = f32[8]{0} all-gather(%p0), channel_id=3, replica_groups={{0,1}}, \
frontend_attributes={chain_id="7"}
  ROOT %s0 = (f32[4]{0}, f32[8]{0}) custom-call(%g0), \
custom_call_target="AsyncCollectiveStart"
}
%step (p: f32[4], q: f32[8]) -> (f32[4], f32[8]) {
  %p1 = f32[4]{0} parameter(0)
  %q1 = f32[8]{0} parameter(1)
  %g1 = f32[8]{0} all-gather(%p1), channel_id=3, replica_groups={{0,1}}, \
frontend_attributes={chain_id="7"}
  ROOT %s1 = (f32[4]{0}, f32[8]{0}) tuple(%p1, %g1)
}
%cond (s: (s32[], f32[4], f32[8])) -> pred[] {
  %s = (s32[], f32[4], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %ten = s32[] constant(10)
  ROOT %c = pred[] compare(%i, %ten), direction=LT
}
%body (s: (s32[], f32[4], f32[8])) -> (s32[], f32[4], f32[8]) {
  %s = (s32[], f32[4], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %n = s32[] add(%i, %one)
  %b1 = f32[4]{0} get-tuple-element(%s), index=1
  %b2 = f32[8]{0} get-tuple-element(%s), index=2
  %f1 = (f32[4], f32[8]) fusion(%b1, %b2), kind=kOutput, calls=%step
  %r1 = f32[4]{0} get-tuple-element(%f1), index=0
  %r2 = f32[8]{0} get-tuple-element(%f1), index=1
  ROOT %u = (s32[], f32[4], f32[8]) tuple(%n, %r1, %r2)
}
ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %f0 = (f32[4], f32[8]) fusion(%x), kind=kCustom, calls=%start
  %e1 = f32[4]{0} get-tuple-element(%f0), index=0
  %e2 = f32[8]{0} get-tuple-element(%f0), index=1
  %t = (s32[], f32[4], f32[8]) tuple(%zero, %e1, %e2)
  %w = (s32[], f32[4], f32[8]) while(%t), condition=%cond, body=%body
  %d1 = f32[4]{0} get-tuple-element(%w), index=1
  %d2 = f32[8]{0} get-tuple-element(%w), index=2
  ROOT %done = (f32[4], f32[8]) fusion(%d1, %d2), kind=kCustom, calls=%step
}"""
"""A gather that is carried on in each turn of a loop, and ends after it."""


def test_a_collective_that_a_loop_carries_on_counts_once() -> None:
    assert hlo.collectives(CARRIED).counts == {"all-gather": 1}
    # One that each turn starts by itself is another, whatever chain it shares.
    turn = "  %f1 = (f32[4], f32[8]) fusion(%b1, %b2), kind=kOutput, calls=%step"
    began = turn.replace("f1", "f0").replace("%b1, %b2", "%b1").replace("step", "start")
    both = CARRIED.replace(turn, f"{turn}\n{began}")
    assert hlo.collectives(both).counts == {"all-gather": 11}
    # So is one that no chain connects.
    plain = CARRIED.replace("chain_id", "other_id")
    assert hlo.collectives(plain).counts == {"all-gather": 12}


def test_a_computation_that_is_called_twice_counts_twice() -> None:
    text = """
%g (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[8]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, \
frontend_attributes={chain_id="1"}
}
ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %one = f32[8]{0} call(%x), to_apply=%g
  ROOT %two = f32[8]{0} call(%x), to_apply=%g
}"""
    assert hlo.collectives(text).counts == {"all-gather": 2}


def test_what_sends_uncounted_is_refused() -> None:
    text = """
ENTRY %main (x: f32[4]) -> token[] {
  %x = f32[4]{0} parameter(0)
  ROOT %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1
}"""
    with pytest.raises(hlo.HloError, match="send s sends, and cannot be counted"):
        hlo.collectives(text)
    assert not hlo.collectives(
        text.replace("channel_id=1", "channel_id=1, is_host_transfer=true")
    ).instructions


def test_an_all_reduce_that_a_fusion_cuts_is_a_reduce_scatter() -> None:
    text = """
%cut (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  %r = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%a
  %i = s32[] constant(0)
  ROOT %d = f32[4]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={4}
}
ENTRY %main (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  ROOT %f = f32[4]{0} fusion(%x), kind=kCustom, calls=%cut
}"""
    (found,) = hlo.collectives(text).instructions
    assert found.kind == "reduce-scatter"
    assert found.nbytes == 16
    assert found.payload_bytes == 64
    assert found.axes({"data": 2, "fsdp": 4}) == ("fsdp",)


# Groups.

MESH: Final = {"a": 2, "b": 3, "c": 4}


def _groups(names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    ids = np.arange(24).reshape(2, 3, 4)
    joined = [list(MESH).index(n) for n in names]
    rest = [d for d in range(3) if d not in joined]
    width = int(np.prod([ids.shape[d] for d in joined]))
    rows = ids.transpose([*rest, *joined]).reshape(-1, width)
    return tuple(tuple(map(int, row)) for row in rows)


@pytest.mark.parametrize(
    "names",
    [n for k in (1, 2, 3) for n in itertools.combinations(MESH, k)],
    ids="-".join,
)
def test_groups_are_named_by_their_axes(names: tuple[str, ...]) -> None:
    groups = _groups(names)
    listed = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    assert groups_of(f"replica_groups={listed}, x=1", 24) == groups
    assert axes_of(groups, MESH) == names
    quoted = ",".join(f"'{n}'" for n in names)
    sizes = ",".join(f"'{n}'={s}" for n, s in MESH.items())
    by_mesh = groups_of(f"replica_groups=mesh[{sizes}] {{{quoted}}}", 24)
    assert axes_of(by_mesh, MESH) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("replica_groups=[12,2]<=[2,12]T(1,0)", ("a",)),
        ("replica_groups=[6,4]<=[24]", ("c",)),
        ("replica_groups=[2,12]<=[24]", ("b", "c")),
        # The axes of a program's own mesh, over devices in another order.
        (
            "replica_groups=mesh['x'=4,'y'=6], device_ids=([6,4]T(1,0)) {'y'}",
            ("a", "b"),
        ),
        # A part of an axis: every other device of c.
        ("replica_groups=mesh['x'=24] {'x':(1)2}", ("a",)),
        ("replica_groups={}", ("a", "b", "c")),
        ("replica_groups={{0,1},{2,3}}", None),
        ("replica_groups=[12,2]<=[24]", None),
    ],
)
def test_groups_in_other_words(text: str, names: tuple[str, ...] | None) -> None:
    assert axes_of(groups_of(text, 24), MESH) == names


def test_groups_in_an_unknown_form_are_refused() -> None:
    with pytest.raises(hlo.HloError, match="in an unknown form"):
        groups_of("replica_groups=everyone", 8)


def test_transfers_go_along_axes() -> None:
    pairs = pairs_of("source_target_pairs={{0,4},{4,8},{8,0}}")
    assert axes_between(pairs, MESH) == ("b",)


# Products.


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_flops_of_a_convolution_are_those_that_ones_count(data: Any) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    groups = draw(1, 2)
    size, window = (draw(3, 7), draw(3, 7)), (draw(1, 3), draw(1, 3))
    image = jnp.ones((draw(1, 3), 2 * groups, *size))
    kernel = jnp.ones((3 * groups, 2, *window))
    options: dict[str, Any] = {
        "window_strides": (draw(1, 3), draw(1, 2)),
        "padding": [(draw(0, 2), draw(0, 2)), (draw(0, 2), draw(0, 2))],
        "lhs_dilation": (draw(1, 3), draw(1, 2)),
        "rhs_dilation": (draw(1, 2), draw(1, 2)),
        "feature_group_count": groups,
    }

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, **options)

    text = jax.jit(f).lower(image, kernel).as_text(dialect="hlo")
    assert hlo.product_flops(hlo.read(text)) == 2 * int(f(image, kernel).sum())


def test_a_batched_product_as_tpus_write_it() -> None:
    # 8 samples of 8 heads: the window meets each input once.
    text = """
ENTRY %main (x: bf16[8,128,8,64], y: bf16[8,96,8,64]) -> bf16[8,8,128,96] {
  %x = bf16[8,128,8,64]{3,2,1,0} parameter(0)
  %y = bf16[8,96,8,64]{3,2,1,0} parameter(1)
  ROOT %c = bf16[8,8,128,96]{3,2,1,0} convolution(%x, %y), window={size=8x8 \
stride=7x7 lhs_dilate=8x8}, dim_labels=0b1f_0o1i->01bf
}"""
    assert hlo.product_flops(hlo.read(text)) == 2 * 8 * 8 * 128 * 96 * 64


def test_a_library_product_says_what_it_contracts() -> None:
    text = """
ENTRY %main (x: bf16[32,64], y: bf16[64,16]) -> bf16[32,16] {
  %x = bf16[32,64]{1,0} parameter(0)
  %y = bf16[64,16]{1,0} parameter(1)
  %g = (bf16[32,16]{1,0}, s8[4096]{0}) custom-call(%x, %y), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %r = bf16[32,16]{1,0} get-tuple-element(%g), index=0
}"""
    assert hlo.product_flops(hlo.read(text)) == 2 * 32 * 16 * 64


@pytest.mark.parametrize(
    ("target", "made", "first", "second"),
    [
        ("Forward", "4,7,7,32", "4,14,14,16", "32,3,3,16"),
        ("BiasActivationForward", "4,7,7,32", "4,14,14,16", "32,3,3,16"),
        ("BackwardInput", "4,14,14,16", "4,7,7,32", "32,3,3,16"),
        ("BackwardFilter", "32,3,3,16", "4,14,14,16", "4,7,7,32"),
    ],
)
def test_a_library_convolution_and_its_gradients_cost_the_same(
    target: str, made: str, first: str, second: str
) -> None:
    text = f"""
ENTRY %main (x: bf16[{first}], y: bf16[{second}]) -> bf16[{made}] {{
  %x = bf16[{first}]{{3,2,1,0}} parameter(0)
  %y = bf16[{second}]{{3,2,1,0}} parameter(1)
  %c = (bf16[{made}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %y), window={{size=3x3 \
stride=2x2 pad=0_1x0_1}}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$conv{target}"
  ROOT %r = bf16[{made}]{{3,2,1,0}} get-tuple-element(%c), index=0
}}"""
    # Of 7 x 3 positions along a side all but one fall on the image.
    assert hlo.product_flops(hlo.read(text)) == 2 * 4 * 32 * 16 * 20 * 20


def test_a_product_by_group_costs_what_its_rows_do() -> None:
    text = """
ENTRY %main (x: bf16[96,24], w: bf16[4,24,40], s: s32[4]) -> bf16[96,40] {
  %x = bf16[96,24]{1,0} parameter(0)
  %w = bf16[4,24,40]{2,1,0} parameter(1)
  %s = s32[4]{0} parameter(2)
  %ragged-dot-metadata = s32[5]{0} custom-call(%s), \
custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none = bf16[96,40]{1,0} custom-call(%ragged-dot-metadata, %x, %w), \
custom_call_target="tpu_custom_call", frontend_attributes={\
ragged_dot_tiling="128,24,40"}
}"""
    assert hlo.product_flops(hlo.read(text)) == 2 * 96 * 24 * 40


def test_an_unknown_call_is_refused_by_name() -> None:
    text = """
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
}"""
    with pytest.raises(hlo.HloError, match="custom call 'tpu_custom_call'"):
        hlo.product_flops(hlo.read(text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  %y = f32[4]{0} frobnicate(%x)", "opcode 'frobnicate' of y is not known"),
        ("  what is this?", "line of the program text is unknown"),
    ],
)
def test_nothing_is_dropped(line: str, message: str) -> None:
    with pytest.raises(hlo.HloError, match=message):
        hlo.read("ENTRY %main (x: f32[4]) -> f32[4] {\n" + line + "\n}")


# Places.


@pytest.mark.parametrize("parents", [(0, 1), (1, 2)], ids=["plain", "one-too-high"])
def test_places_are_read_from_tables(parents: tuple[int, int]) -> None:
    text = f"""
FileNames
1 "net.py"
2 "layers.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7}}
2 {{file_name_id=2 function_name_id=2 line=40}}

StackFrames
1 {{file_location_id=1 parent_frame_id={parents[0]}}}
2 {{file_location_id=2 parent_frame_id={parents[1]}}}

ENTRY %main (x: f32[4]) -> f32[8] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %g = f32[8]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}, \
metadata={{op_name="f/g" stack_frame_id=2}}
}}"""
    (found,) = hlo.collectives(text).instructions
    assert found.places == ("layers.py:40", "net.py:7")
    assert found.name == "f/g"
