"""The text for a cluster: what it means, and what to say when it means nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes import Cluster, WhaleError, cluster, kind_names
from whalejax.meshes.catalogue import entries
from whalejax.meshes.fitted_constants import constants
from whalejax.meshes.formats.cluster_text import grammar, near_cube


NODE_KINDS = [n for n, e in entries().items() if e.torus is None and n != "cpu"]
TORUS_KINDS = [n for n, e in entries().items() if e.torus is not None]


def _levels(text: str) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in cluster(text).levels]


def test_levels_of_nodes() -> None:
    assert _levels("h100:8") == [("nvlink", 8)]
    assert _levels("h100:4x8") == [("nvlink", 8), ("infiniband", 4)]
    assert _levels("h100:1") == [("nvlink", 1)]
    assert _levels("h100:4x1") == [("infiniband", 4)]


def test_levels_of_unlike_nodes_take_the_slower_link() -> None:
    mixed = cluster("v100-32:8+p100-16:8")
    assert [level.size for level in mixed.levels] == [8, 2]
    share = constants().node_of("p100", "gpu")
    assert mixed.levels[0].bandwidth_bytes_per_second == pytest.approx(80e9 * share)
    wait = constants().platforms["gpu"].node_seconds
    assert mixed.levels[0].latency_seconds == pytest.approx(6.6e-6 + 7 * 0.6e-6 + wait)
    assert _levels("t4:4+h100:8") == [("pcie/nvlink", 4), ("ethernet/infiniband", 3)]
    assert _levels("v100:3+v100:8") == [("infiniband", 11)]


def test_levels_of_a_torus_are_innermost_first() -> None:
    assert _levels("v5p:4x4x8") == [("ici-z", 8), ("ici-y", 4), ("ici-x", 4)]
    assert _levels("v5e:2x4x8") == [("ici-y", 8), ("ici-x", 4), ("dcn", 2)]
    assert _levels("v5p:4x1x1") == [("ici-x", 4)]
    assert _levels("v5p:1") == [("ici", 1)]
    assert _levels("v7x:2x2x1") == [("d2d", 2), ("ici-y", 2), ("ici-x", 2)]


def test_a_ring_has_twice_the_bandwidth_of_a_line() -> None:
    ring, line = cluster("v5e:16x16").levels[0], cluster("v5e:8x8").levels[0]
    assert ring.bandwidth_bytes_per_second == 2 * line.bandwidth_bytes_per_second
    share = constants().platforms["tpu"].node
    found = [level.bandwidth_bytes_per_second for level in cluster("v5e:8x16").levels]
    assert found == pytest.approx([100e9 * share, 50e9 * share])


def test_cubes_wrap_only_as_a_whole() -> None:
    def bandwidths(text: str) -> set[float]:
        return {level.bandwidth_bytes_per_second for level in cluster(text).levels}

    (ring,) = bandwidths("v5p:4x4x4")
    for text in ("v5p:2x2x4", "v5p:4x4"):
        assert bandwidths(text) == {ring / 2}


def test_a_number_of_chips_becomes_the_usual_shape() -> None:
    assert _levels("v5e:8") == _levels("v5e:2x4")
    assert cluster("v5e:256").describe() == "256×TPU v5e (torus 16×16)"
    assert _levels("v5p:16") == _levels("v5p:2x2x4")


@given(st.integers(1, 5000), st.integers(1, 3))
def test_near_cube_keeps_the_product(chips: int, dims: int) -> None:
    lengths = near_cube(chips, dims)
    assert len(lengths) == dims
    assert math.prod(lengths) == chips
    assert list(lengths) == sorted(lengths)


def test_case_and_blanks_do_not_matter() -> None:
    assert cluster("  H100:4X8 ") == cluster("h100:4x8")
    assert cluster("v100-32:8 + p100-16:8") == cluster("v100-32:8+p100-16:8")


@st.composite
def _node_texts(draw: st.DrawFn) -> tuple[str, list[tuple[str, int]]]:
    terms, nodes = [], []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(NODE_KINDS))
        most = entries()[name].node_devices
        groups, size = draw(st.integers(1, 9)), draw(st.integers(1, most))
        plain = groups == 1 and draw(st.booleans())
        terms.append(f"{name}:{size}" if plain else f"{name}:{groups}x{size}")
        nodes += [(name, size)] * groups
    return "+".join(terms), nodes


@given(_node_texts())
def test_every_node_of_the_text_is_in_the_cluster(
    case: tuple[str, list[tuple[str, int]]],
) -> None:
    text, nodes = case
    parsed = cluster(text)
    assert [(node.kind.name, node.count) for node in parsed.nodes] == nodes
    assert math.prod(level.size for level in parsed.levels) == parsed.num_devices
    assert Cluster.from_json(parsed.to_json()) == parsed


@given(
    st.sampled_from(TORUS_KINDS),
    st.lists(st.integers(1, 16), min_size=2, max_size=4),
)
def test_every_torus_has_its_devices_or_an_error(name: str, numbers: list[int]) -> None:
    found = entries()[name]
    assert found.torus is not None
    text = f"{name}:{'x'.join(map(str, numbers))}"
    lengths = tuple(numbers[-found.torus.dims :])
    is_too_large = math.prod(lengths) > found.torus.max_chips
    is_too_long = len(numbers) > found.torus.dims + 1
    is_offered = len(numbers) == 1 or found.torus.has_slice(lengths)
    if is_too_long or is_too_large or not is_offered:
        with pytest.raises(WhaleError):
            cluster(text)
    else:
        parsed = cluster(text)
        assert parsed.num_devices == math.prod(numbers) * found.chip_devices
        assert Cluster.from_json(parsed.to_json()) == parsed


@pytest.mark.parametrize(
    "text",
    [
        *("v4:2x2x1", "v4:2x2x4", "v4:4x4x8", "v4:8x12x16", "v4:12x16x16"),
        *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x2", "v5e:8x16", "v5e:2x16x16"),
        *("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x12", "v5p:16x16x24"),
        *("v6e:1x1", "v6e:2x4", "v6e:8x8", "v6e:16x16", "v7x:2x2x1", "v7x:4x4x4"),
        "v5e:12",
    ],
)
def test_slices_that_the_vendor_offers(text: str) -> None:
    assert math.prod(level.size for level in cluster(text).levels) > 0


@pytest.mark.parametrize("text", ["v4:3x4x4", "v5e:3x4", "v5p:3x5x7", "v6e:16x32"])
def test_slices_that_nobody_offers(text: str) -> None:
    with pytest.raises(WhaleError, match="slice"):
        cluster(text)


def test_kinds_with_the_torus_of_another_have_their_own_slices() -> None:
    with pytest.warns(UserWarning, match="and with its links"):
        assert cluster("v3:4x8").num_devices == 32


@pytest.mark.parametrize("name", TORUS_KINDS)
def test_the_slices_next_to_any_lengths_are_offered(name: str) -> None:
    torus = entries()[name].torus
    assert torus is not None
    for lengths in [(3, 5, 7)[: torus.dims], (1,), (64,), (96,), (2, 9)]:
        near = torus.near_slices(lengths)
        assert near and all(torus.has_slice(shape) for shape in near)
        chips = [math.prod(shape) for shape in near]
        assert chips[0] <= math.prod(lengths) and all(
            more > math.prod(lengths) for more in chips[1:]
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "v5p:3x5x7",
            "'v5p:3x5x7' has slices of 3×5×7 chips, but the lengths of a slice of v5p "
            "are 1, 2 or 4 each, or all multiples of 4. Nearest: v5p:4x4x4 or "
            "v5p:4x4x8. Describe another torus in a TOML file",
        ),
        (
            "v5e:2x3x5",
            "'v5e:2x3x5' has slices of 3×5 chips, but slices of v5e are 1×1, 2×2, 2×4, "
            "4×4, 4×8, 8×8, 8×16 or 16×16. Nearest: v5e:2x2x4 or v5e:2x4x4. Describe "
            "another torus in a TOML file",
        ),
        ("h100x8", "'h100x8' has no colon. Write h100:8"),
        ("h100 8", "'h100 8' has no colon. Write h100:8"),
        (
            "a100-80",
            "'a100-80' does not say how many devices. Write a100-80:8 for one node of "
            "8, a100-80:4x8 for four nodes of 8",
        ),
        (
            "local:8",
            "'local:8': local means all devices of this machine; write it without a "
            "number",
        ),
        (
            "h100:8,a100:8",
            "'h100:8,a100:8' has a comma. Write + between nodes of several kinds, and "
            "several clusters as separate texts",
        ),
        (
            "4090:2",
            "unknown device kind '4090'. Did you mean rtx4090 or rtx-4090 or p40? Any "
            "other kind can be described in a TOML file",
        ),
        (
            "tpu",
            "unknown device kind 'tpu'. Did you mean tpu7x or cpu? Any other kind can "
            "be described in a TOML file",
        ),
        (
            "h100",
            "'h100' does not say how many devices. Write h100:8 for one node of 8, "
            "h100:4x8 for four nodes of 8",
        ),
        ("", "an empty part, expected KIND:N on both sides of every +"),
        ("h100:8+", "an empty part, expected KIND:N on both sides of every +"),
        (
            "/a/b",
            "'/a/b' is no KIND:N, no file that ends in .toml or .json, and not 'local'",
        ),
        (
            "h100:8x",
            "'h100:8x': expected numbers joined by x after h100:, such as 8 or 4x8, "
            "got '8x'",
        ),
        ("h100:0x8", "'h100:0x8' has a 0, expected numbers of at least 1"),
        (
            "h100:16",
            "'h100:16' puts 16 devices into one node; a node of h100 holds 8. Write "
            "h100:2x8, or describe the node in a TOML file",
        ),
        (
            "h100:2x4x8",
            "'h100:2x4x8' has 3 numbers; h100 is joined in nodes, expected h100:N or "
            "h100:MxN",
        ),
        (
            "h100:9999999x8",
            "'h100:9999999x8' has 79999992 devices, expected at most 1048576",
        ),
        (
            "xyz:8",
            "unknown device kind 'xyz'. Any other kind can be described in a TOML file",
        ),
        (
            "cpu:2x8",
            "'cpu:2x8' has 2 nodes; the catalogue knows no network for cpu. Describe "
            "the cluster in a TOML file with [[levels]]",
        ),
        (
            "v5e:2x2x2x2",
            "'v5e:2x2x2x2' has 4 numbers; v5e forms a torus of 2 dimensions, expected "
            "at most 2, or 3 with slices in front",
        ),
        (
            "v5e:32x16",
            "'v5e:32x16' has 512 chips in one slice; a slice of v5e has at most 256. "
            "Put the number of slices in front, as in v5e:2x4x4",
        ),
        (
            "v5e:2x4+h100:8",
            "v5e cannot be joined with other parts by +: one program runs on one "
            "slice, or on slices alike, as in v5e:2x2x4",
        ),
    ],
)
def test_error_text(text: str, problem: str) -> None:
    with pytest.raises(WhaleError) as error:
        cluster(text)
    assert (
        str(error.value) == f"cluster {text!r}: 1 problem\n  1. {problem}\n{grammar()}"
    )


def test_all_problems_of_a_text_at_once() -> None:
    with pytest.raises(WhaleError) as error:
        cluster("h100:16+v100+cpu:8+h100:0")
    lines = str(error.value).splitlines()
    assert lines[0] == "cluster 'h100:16+v100+cpu:8+h100:0': 3 problems"
    assert [line[:9] for line in lines[1:4]] == ["  1. 'h10", "  2. 'v10", "  3. 'h10"]


def test_mixing_with_cpu() -> None:
    with pytest.raises(WhaleError) as error:
        cluster("cpu:8+h100:8")
    assert "1. cpu cannot be joined with other parts by +: the catalogue knows no" in (
        str(error.value)
    )


def test_grammar_names_every_kind_and_its_examples_work() -> None:
    for name in kind_names():
        assert name in grammar()
    words = [line.split()[-1] for line in grammar().splitlines()[1:6]]
    assert [cluster(word).num_devices for word in words] == [8, 32, 64, 512, 16]


def test_a_file_by_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "Mixed.toml"
    cluster("h100:2x8").save(path)
    assert cluster(str(path)) == cluster("h100:2x8")


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("gb200:4", [("nvlink", 4)]),
        ("gb200:72", [("nvlink", 4), ("nvlink-domain", 18)]),
        ("gb200:18x4", [("nvlink", 4), ("nvlink-domain", 18)]),
        ("gb300:2x72", [("nvlink", 4), ("nvlink-domain", 18), ("infiniband", 2)]),
        ("gb200-nvl36:36", [("nvlink", 4), ("nvlink-domain", 9)]),
        ("gb200-nvl36:18x4", [("nvlink", 4), ("nvlink-domain", 9), ("infiniband", 2)]),
        ("b200:9x8", [("nvlink", 8), ("infiniband", 9)]),
    ],
)
def test_racks_that_one_switch_joins_are_a_level(
    text: str, levels: list[tuple[str, int]]
) -> None:
    found = cluster(text)
    assert [(level.name, level.size) for level in found.levels] == levels
    speeds = [level.bandwidth_bytes_per_second for level in found.levels]
    if levels[1:2] and levels[1][0] == "nvlink-domain":
        assert speeds[0] == speeds[1]


def test_a_rack_has_no_more_than_its_devices() -> None:
    with pytest.raises(WhaleError, match=r"Write gb200:20x4, or describe"):
        cluster("gb200:80")
