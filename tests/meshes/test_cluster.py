"""Clusters as data: what they say of themselves and what they refuse."""

from __future__ import annotations

import dataclasses
import json

import pytest

from whalejax.meshes import (
    Cluster,
    CompilerProfile,
    Level,
    Node,
    WhaleError,
    cluster,
    device_kind,
)


PROFILE = CompilerProfile(merge_partials=True, reduce_scatter=True)


def _level(size: int, **changes: float) -> Level:
    level = Level(
        name="link", size=size, bandwidth_bytes_per_second=1e9, latency_seconds=1e-6
    )
    return dataclasses.replace(level, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h100:8", "8×H100 (1 node of 8, nvlink)"),
        ("h100:4x8", "32×H100 (4 nodes of 8, nvlink + infiniband)"),
        (
            "v100-32:8+p100-16:8",
            "8×V100-32 + 8×P100-16 (2 nodes of 8, nvlink + infiniband)",
        ),
        (
            "v100-32:4+p100-16:8",
            "4×V100-32 + 8×P100-16 (2 nodes of 4 and 8, nvlink + infiniband)",
        ),
        ("v5p:4x4x4", "64×TPU v5p (torus 4×4×4)"),
        ("v5e:2x16x16", "512×TPU v5e (2 slices, torus 16×16, dcn)"),
        ("v7x:2x2x1", "8×TPU v7x (torus 2×2, d2d)"),
        ("cpu:8", "8×CPU (1 node of 8, host)"),
    ],
)
def test_describes_itself_in_one_line(text: str, line: str) -> None:
    assert cluster(text).describe() == line
    assert str(cluster(text)) == line


def test_properties_of_mixed_devices() -> None:
    mixed = cluster("v100-32:8+p100-16:8")
    assert mixed.num_devices == 16
    assert [kind.name for kind in mixed.kinds] == ["v100-32", "p100-16"]
    assert not mixed.is_uniform
    assert mixed.memory_bytes == 16 * 2**30
    assert mixed.slowest.name == "p100-16"
    turing = cluster("rtx3090:1+v100-32:1")
    assert turing.slowest_for("float16").name == "rtx3090"
    assert turing.slowest.name == turing.slowest_for("bfloat16").name == "v100-32"
    assert mixed.platform == "gpu"


def test_compilers_by_platform() -> None:
    assert cluster("v5e:8").compiler == dataclasses.replace(
        PROFILE,
        reduces_in_parts=False,
        fuses_products=True,
        narrow_products=True,
        groups_rows=True,
        hides_updates=True,
        lanes=128,
        scatters_whole_torus=False,
        scatters_beyond_torus=False,
        gathers_whole_torus=False,
        scatters_odd_tiles=False,
    )
    assert cluster("h100:8").compiler == dataclasses.replace(
        PROFILE, reduces_in_parts=False, fuses_normalizations=True, keeps_masks=True
    )
    assert cluster("cpu:8").compiler == CompilerProfile(
        merge_partials=False,
        reduce_scatter=False,
        copies_kernels=True,
        repeats=False,
        widens=True,
        reduces_at_end=True,
        gathers_first=True,
        merges_regions=True,
    )


def test_hash_names_the_hardware_and_not_how_fast_it_was_measured() -> None:
    one = cluster("h100:8")
    assert len(one.hash) == 12
    assert one.hash == cluster("H100:1x8").hash
    assert one.hash == one.with_memory(2**30).hash
    levels = (dataclasses.replace(one.levels[0], latency_seconds=1.0),)
    assert one.hash == dataclasses.replace(one, levels=levels).hash
    others = ["h100:4", "h100:2x8", "h200:8", "a100:8", "v5p:2x4", "v5p:8"]
    hashes = {cluster(text).hash for text in others}
    assert len(hashes) == len(others)
    assert one.hash not in hashes
    plain = CompilerProfile(merge_partials=False, reduce_scatter=True)
    assert one.hash != dataclasses.replace(one, compiler=plain).hash


def test_with_memory_changes_every_kind() -> None:
    small = cluster("v100-32:8+p100-16:8").with_memory(4 * 2**30)
    assert [kind.memory_bytes for kind in small.kinds] == [4 * 2**30] * 2
    fields = {source.field for kind in small.kinds for source in kind.sources}
    assert "memory_bytes" not in fields


def test_json_round_trip_through_text() -> None:
    for text in ("h100:4x8", "v100-32:8+p100-16:8", "v7x:2x4x4x4", "cpu:3"):
        one = cluster(text)
        assert Cluster.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_slowdown_of_a_collective() -> None:
    level = dataclasses.replace(_level(2), slowdown=(("all-to-all", 3.0),))
    assert level.slowdown_of("all-to-all") == 3.0
    assert level.slowdown_of("all-reduce") == 1.0


def test_refuses_everything_unfit_at_once() -> None:
    kind = device_kind("h100")
    other = dataclasses.replace(kind, memory_bytes=1)
    with pytest.raises(WhaleError) as error:
        Cluster(
            nodes=(
                Node(kind=kind, count=4),
                Node(kind=other, count=0),
                Node(kind=device_kind("v5e"), count=2),
            ),
            levels=(
                _level(0),
                _level(4, bandwidth_bytes_per_second=0.0, latency_seconds=-1.0),
            ),
            compiler=PROFILE,
        )
    assert str(error.value) == (
        "cluster: 7 problems\n"
        "  1. nodes.1.count: got 0, expected at least 1\n"
        "  2. nodes: got kinds of gpu and tpu, expected one platform, as one program "
        "runs on all devices. Plan for each platform alone\n"
        "  3. nodes: got two different kinds named 'h100'. Give one of them another "
        "name\n"
        "  4. levels.0 (link).size: got 0, expected at least 1\n"
        "  5. levels.1 (link).bandwidth_bytes_per_second: got 0.0, expected a number "
        "above zero\n"
        "  6. levels.1 (link).latency_seconds: got -1.0, expected at least zero\n"
        "  7. levels: sizes 0 × 4 make 0 devices, but the nodes have 6. The sizes of "
        "the levels, innermost first, must multiply to the number of devices"
    )


@pytest.mark.parametrize("peers", [-1, 2])
def test_fewer_links_than_members_are_refused(peers: int) -> None:
    kind = device_kind("h100")
    with pytest.raises(WhaleError, match=r"peers: got .*, expected at least 3") as e:
        Cluster(
            nodes=(Node(kind=kind, count=4),),
            levels=(_level(4, peers=peers),),
            compiler=PROFILE,
        )
    assert "leave peers out if a switch joins the members" in str(e.value)


def test_refuses_to_be_empty() -> None:
    with pytest.raises(WhaleError) as error:
        Cluster(nodes=(), levels=(), compiler=PROFILE)
    assert str(error.value) == (
        "cluster: 2 problems\n"
        "  1. nodes: got none, expected at least one\n"
        "  2. levels: sizes none make 0 devices, but the nodes have 0. The sizes of "
        "the levels, innermost first, must multiply to the number of devices"
    )
