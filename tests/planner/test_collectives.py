"""Times of collectives over several levels, against sums written out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes import Cluster, cluster
from whalejax.meshes.cluster import Level
from whalejax.planner.cost.collectives import (
    axis_parts,
    collective_seconds,
    may_reduce_whole,
    runs_as,
)
from whalejax.planner.plan_entries import CollectiveKind


def two_levels(inner: int, outer: int) -> Cluster:
    """Nodes of ``inner`` devices at 100 GB/s and 1 us, joined at 10 GB/s and 5 us."""
    base = cluster(f"h100:{outer}x{inner}" if outer > 1 else f"h100:{inner}")
    levels = [
        Level(
            name="near",
            size=inner,
            bandwidth_bytes_per_second=100e9,
            latency_seconds=1e-6,
        )
    ]
    if outer > 1:
        levels.append(
            Level(
                name="far",
                size=outer,
                bandwidth_bytes_per_second=10e9,
                latency_seconds=5e-6,
            )
        )
    return dataclasses.replace(base, levels=tuple(levels))


def mesh(**axes: int) -> dict[str, int]:
    """All planned axes, outermost first."""
    return {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, **axes}


def parts(axes: tuple[str, ...], sizes: dict[str, int], machine: Cluster) -> list[str]:
    """Pieces of the axes as text, innermost first."""
    return [f"{p.level.name} {p.size}" for p in axis_parts(axes, sizes, machine)]


@pytest.mark.parametrize(
    ("axes", "sizes", "wanted"),
    [
        (("tensor",), mesh(data=4, tensor=8), ["near 8"]),
        (("data",), mesh(data=4, tensor=8), ["far 4"]),
        (("data",), mesh(data=32), ["near 8", "far 4"]),
        (("data",), mesh(data=16, tensor=2), ["near 4", "far 4"]),
        (("tensor",), mesh(tensor=16, data=2), ["near 8", "far 2"]),
        (("data",), mesh(tensor=16, data=2), ["far 2"]),
        (("data", "fsdp"), mesh(data=4, fsdp=8), ["near 8", "far 4"]),
        (("data", "tensor"), mesh(data=4, fsdp=2, tensor=4), ["near 4", "far 4"]),
        (("expert",), mesh(data=4, tensor=8), []),
    ],
)
def test_axes_are_cut_at_the_levels(
    axes: tuple[str, ...], sizes: dict[str, int], wanted: list[str]
) -> None:
    assert parts(axes, sizes, two_levels(8, 4)) == wanted


def test_a_group_that_straddles_nodes_is_charged_the_outer_link() -> None:
    # Nodes of six and an axis of four: devices 4 to 7 stand in two nodes.
    machine = two_levels(6, 2)
    assert parts(("tensor",), mesh(data=3, tensor=4), machine) == ["near 2", "far 2"]
    assert parts(("data",), mesh(data=3, tensor=4), machine) == ["far 3"]


@given(
    inner=st.sampled_from([1, 2, 4, 6, 8]),
    outer=st.sampled_from([1, 2, 3, 4]),
    data=st.data(),
)
def test_a_level_is_never_charged_for_less_than_a_group_spans(
    inner: int, outer: int, data: st.DataObject
) -> None:
    machine = two_levels(inner, outer)
    count = inner * outer
    tensor = data.draw(
        st.sampled_from([d for d in range(1, count + 1) if not count % d])
    )
    sizes = mesh(data=count // tensor, tensor=tensor)
    for axis, stride in (("tensor", 1), ("data", tensor)):
        found = axis_parts((axis,), sizes, machine)
        assert math.prod(p.size for p in found) == sizes[axis]
        near = math.prod(p.size for p in found if p.level.name == "near")
        groups = [
            [first + k * stride for k in range(sizes[axis])]
            for first in range(count)
            if first // stride % sizes[axis] == 0
        ]
        for group in groups:
            # Runs of ``near`` neighbours of the group lie in one node.
            for run in (group[i : i + near] for i in range(0, len(group), near)):
                assert len({device // inner for device in run}) == 1


B = 8_000_000
NEAR, FAR, LN, LF = 100e9, 10e9, 1e-6, 5e-6


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (
            "all-reduce",
            # Reduce-scatter and all-gather inside, all-reduce of an eighth between.
            2 * (LN + B * 7 / 8 / NEAR) + 2 * (LF + B / 8 * 3 / 4 / FAR),
        ),
        ("all-gather", (LN + B * 7 / 8 / NEAR) + (LF + B / 8 * 3 / 4 / FAR)),
        ("reduce-scatter", (LN + B * 7 / 8 / NEAR) + (LF + B / 8 * 3 / 4 / FAR)),
        ("all-to-all", (LN + B * 7 / 8 / NEAR) + (LF + B * 3 / 4 / FAR)),
    ],
)
def test_collectives_are_hierarchical(kind: CollectiveKind, wanted: float) -> None:
    machine = two_levels(8, 4)
    found = axis_parts(("data",), mesh(data=32), machine)
    assert collective_seconds(kind, B, found) == pytest.approx(wanted, rel=1e-12)


def test_full_bytes_are_not_charged_to_both_levels() -> None:
    found = axis_parts(("data",), mesh(data=32), two_levels(8, 4))
    naive = 2 * (LN + B * 7 / 8 / NEAR) + 2 * (LF + B * 3 / 4 / FAR)
    assert collective_seconds("all-reduce", B, found) < naive / 3


def test_two_axes_cost_what_one_of_their_size_does() -> None:
    machine = two_levels(8, 4)
    one = axis_parts(("data",), mesh(data=32), machine)
    two = axis_parts(("data", "fsdp"), mesh(data=4, fsdp=8), machine)
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert collective_seconds(kind, B, one) == collective_seconds(kind, B, two)


def test_a_measured_slowdown_multiplies_one_level() -> None:
    machine = two_levels(8, 1)
    (level,) = machine.levels
    slow = dataclasses.replace(level, slowdown=(("all-to-all", 3.0),))
    machine = dataclasses.replace(machine, levels=(slow,))
    found = axis_parts(("data",), mesh(data=8), machine)
    once = LN + B * 7 / 8 / NEAR
    assert collective_seconds("all-to-all", B, found) == pytest.approx(3 * once)
    assert collective_seconds("all-gather", B, found) == pytest.approx(once)


def test_threads_over_one_memory_move_the_whole_payload() -> None:
    machine = two_levels(8, 1)
    (level,) = (dataclasses.replace(v, shared=True) for v in machine.levels)
    machine = dataclasses.replace(machine, levels=(level,))
    pair = axis_parts(("tensor",), mesh(data=4, tensor=2), machine)
    both = axis_parts(("data", "tensor"), mesh(data=4, tensor=2), machine)
    assert [part.size for part in (*pair, *both)] == [2, 8]
    assert collective_seconds("all-gather", B, pair) == pytest.approx(2 * LN + B / NEAR)
    assert collective_seconds("all-reduce", B, both) == pytest.approx(
        2 * (8 * LN + B / NEAR)
    )


def test_without_a_switch_a_pair_has_one_link() -> None:
    machine = two_levels(4, 1)
    (level,) = (dataclasses.replace(v, peers=3) for v in machine.levels)
    machine = dataclasses.replace(machine, levels=(level,))
    pair = axis_parts(("tensor",), mesh(data=2, tensor=2), machine)
    both = axis_parts(("data", "tensor"), mesh(data=2, tensor=2), machine)
    assert [part.size for part in (*pair, *both)] == [2, 4]
    # A third of the bandwidth between two, all of it among four.
    assert collective_seconds("all-gather", B, pair) == pytest.approx(
        LN + B / 2 / (NEAR / 3)
    )
    assert collective_seconds("all-gather", B, both) == pytest.approx(
        LN + B * 3 / 4 / NEAR
    )
    permute = collective_seconds("collective-permute", B, both)
    assert permute == pytest.approx(LN / 3 + B / (NEAR / 3))


def test_no_axis_costs_nothing() -> None:
    assert collective_seconds("all-reduce", B, ()) == 0.0


@pytest.mark.parametrize(
    "name", ["v5e:2x4", "v5e:4x4", "v5p:2x2x1", "v5p:2x2x4", "v6e:4x4", "h100:2x8"]
)
def test_whether_any_reduce_scatter_runs_as_an_all_reduce(name: str) -> None:
    """The quick answer is that of all pairs of axes that share the devices."""
    machine = cluster(name)
    found = False
    for size in range(1, machine.num_devices + 1):
        if machine.num_devices % size == 0:
            sizes = {"data": machine.num_devices // size, "tensor": size}
            for axes in (("data",), ("tensor",), ("data", "tensor")):
                parts = axis_parts(axes, sizes, machine)
                runs = runs_as("reduce-scatter", parts, machine)
                found = found or runs == "all-reduce"
    assert may_reduce_whole(machine) == found
