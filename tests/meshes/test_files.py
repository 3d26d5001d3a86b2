"""Clusters in files: round trips, what may be left out, and every complaint."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes import (
    BandwidthPoint,
    Cluster,
    CompilerProfile,
    DeviceKind,
    Level,
    MatmulPoint,
    Node,
    Source,
    TimedModel,
    WhaleError,
    cluster,
    device_kind,
)
from whalejax.meshes.catalogue import entry
from whalejax.meshes.formats.cluster_toml import from_data
from whalejax.meshes.read_file import toml_text


POSITIVE = st.floats(1e-9, 1e18)
_SHOWN = st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"])
TEXTS = st.text(_SHOWN, min_size=1, max_size=12)
TITLES = st.text(_SHOWN, max_size=5)
KINDS = st.builds(
    DeviceKind,
    name=TEXTS,
    label=TITLES,
    platform=st.just("cpu"),
    memory_bytes=st.integers(1, 2**50),
    memory_bytes_per_second=POSITIVE,
    flops_per_second=st.dictionaries(
        st.sampled_from(["f32", "bf16"]), POSITIVE, min_size=1
    ).map(lambda d: tuple(d.items())),
    host_memory_bytes=st.none() | st.integers(1, 2**50),
    host_link_bytes_per_second=st.none() | POSITIVE,
    op_overhead_seconds=st.just(0.0) | POSITIVE,
    efficiency=st.floats(0.01, 1),
    matmul_half_size=st.just(0.0) | POSITIVE,
    matmul_points=st.lists(
        st.builds(
            MatmulPoint,
            dtype=st.just("f32"),
            m=st.integers(1, 9),
            k=st.integers(1, 9),
            n=st.integers(1, 9),
            flops_per_second=POSITIVE,
            batch=st.sampled_from([1, 8]),
        ),
        max_size=2,
    ).map(tuple),
    memory_points=st.lists(
        st.builds(
            BandwidthPoint, moved_bytes=st.integers(1, 9), bytes_per_second=POSITIVE
        ),
        max_size=2,
    ).map(tuple),
    transcendentals_per_second=st.none() | POSITIVE,
    fresh_bytes_per_second=st.none() | POSITIVE,
    turned_bytes_per_second=st.none() | POSITIVE,
    convolution_share=st.none() | POSITIVE,
    timed_models=st.lists(
        st.builds(
            TimedModel,
            weights=TEXTS,
            samples=st.integers(1, 9),
            seconds=POSITIVE,
            predicted_seconds=POSITIVE,
            title=TITLES,
        ),
        max_size=2,
    ).map(tuple),
    sources=st.lists(
        st.builds(Source, field=TEXTS, url=TEXTS, title=TITLES, date=TEXTS)
    ).map(tuple),
)


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=2, unique_by=lambda k: k.name))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    nodes = [Node(kind=draw(st.sampled_from(kinds)), count=c) for c in counts]
    ones = draw(st.lists(st.just(1), max_size=2))
    sizes = [*ones, sum(counts)]
    levels = [
        Level(
            name=draw(TEXTS),
            size=size,
            bandwidth_bytes_per_second=draw(POSITIVE),
            latency_seconds=draw(st.just(0.0) | POSITIVE),
            torus=draw(st.booleans()) and not peers,
            shared=draw(st.booleans()) and not peers,
            peers=peers,
            slowdown=draw(
                st.dictionaries(TEXTS, POSITIVE, max_size=2).map(
                    lambda d: tuple(d.items())
                )
            ),
        )
        for size in sizes
        for peers in [draw(st.sampled_from((0, size)))]
    ]
    profile = CompilerProfile(
        merge_partials=draw(st.booleans()),
        reduce_scatter=draw(st.booleans()),
        reduces_in_parts=draw(st.booleans()),
        keeps_masks=draw(st.booleans()),
        copies_kernels=draw(st.booleans()),
        fuses_products=draw(st.booleans()),
        fuses_normalizations=draw(st.booleans()),
        narrow_products=draw(st.booleans()),
        lanes=draw(st.sampled_from((1, 128))),
    )
    return Cluster(nodes=tuple(nodes), levels=tuple(levels), compiler=profile)


@given(_clusters())
def test_toml_round_trip(one: Cluster) -> None:
    text = toml_text(one.to_json())
    assert Cluster.of(from_data(tomllib.loads(text), "test")) == one


@given(_clusters())
def test_json_round_trip(one: Cluster) -> None:
    assert Cluster.from_json(one.to_json()) == one


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    one = cluster("v100-32:2x8+p100-16:8")
    one.save(path)
    assert Cluster.load(path) == one
    assert path.read_text().startswith(
        "# 16×V100-32 + 8×P100-16 (3 nodes of 8, nvlink + infiniband)\n"
    )
    assert path.read_text().count("[[nodes]]") == 2


def _load(text: str) -> Cluster:
    return Cluster.of(from_data(tomllib.loads(text), "cluster file"))


def _error(text: str) -> str:
    with pytest.raises(WhaleError) as error:
        _load(text)
    return str(error.value)


def test_eight_devices_of_four_gib_in_five_lines() -> None:
    small = _load(
        """
        [kinds.small]
        base = "h100"
        memory_bytes = 4294967296
        [[nodes]]
        kind = "small"
        count = 8
        """
    )
    assert small.memory_bytes == 4 * 2**30
    assert small.levels == cluster("h100:8").levels
    assert small.kinds[0].name == "small"
    assert small.kinds[0].peak_flops("bf16") == device_kind("h100").peak_flops("bf16")
    fields = [source.field for source in small.kinds[0].sources]
    assert "memory_bytes" not in fields
    assert "memory_bytes_per_second" in fields


def test_kinds_of_the_catalogue_need_no_table() -> None:
    text = """
        [[nodes]]
        kind = "V100"
        count = 8
        repeat = 2
        [[nodes]]
        kind = "p100-16"
        count = 8
        """
    assert _load(text) == cluster("v100-32:2x8+p100-16:8")


def test_own_kind_with_own_links() -> None:
    own = _load(
        """
        [kinds.abacus]
        platform = "gpu"
        memory_bytes = 1000
        memory_bytes_per_second = 10
        flops_per_second = { f32 = 5 }
        [[nodes]]
        kind = "abacus"
        count = 2
        [[levels]]
        name = "wire"
        size = 2
        bandwidth_bytes_per_second = 3
        latency_seconds = 0.5
        """
    )
    assert own.describe() == "2×abacus (1 node of 2, wire)"
    assert own.levels[0].latency_seconds == 0.5
    assert own.compiler == cluster("h100:8").compiler


def test_facts_that_nothing_asks_for_any_more_are_read() -> None:
    text = toml_text(cluster("v5e:2x2").to_json())
    older = text.replace("compiler = {", "compiler = {keeps_halos = true, ")
    assert older != text
    assert _load(older) == _load(text)


def test_every_problem_of_a_file_at_once() -> None:
    text = """
        nods = 1
        [compiler]
        merge_partials = "yes"
        [kinds.a]
        platform = "npu"
        memory_bytes = "4GB"
        memory_byts = 1
        [kinds.b]
        base = "h1000x"
        [[nodes]]
        kind = "a"
        count = 0
        [[nodes]]
        kind = "c"
        count = 2000000
        [[nodes]]
        kind = "nope"
        count = 1
        [[levels]]
        name = 3
        size = 1.5
        bandwidth_bytes_per_second = true
        """
    lines = _error(text).splitlines()
    bodies = [line.partition(". ")[2] for line in lines[1:]]
    assert lines[0] == "cluster file: 16 problems"
    assert bodies[:6] == [
        'compiler.merge_partials: got "yes", expected true or false',
        "compiler.reduce_scatter: missing, expected true or false",
        'kinds.a.platform: got "npu", expected one of cpu, gpu, tpu',
        'kinds.a.memory_bytes: got "4GB", expected a whole number',
        "kinds.a.memory_bytes_per_second: missing, expected a number",
        "kinds.a.flops_per_second: missing, expected a table such as "
        "{ f32 = 1e12, bf16 = 2e12 }",
    ]
    assert bodies[6].startswith("kinds.a.memory_byts: unknown key. Did you mean memory")
    assert "Known: base, label, platform, memory_bytes, " in bodies[6]
    assert bodies[7].startswith("kinds.b.base: unknown device kind 'h1000x'. Did you")
    assert bodies[8:10] == [
        "nodes.0.count: got 0, expected at least 1",
        "nodes.1.count: got 2000000, expected at most 1048576 devices",
    ]
    assert bodies[10].startswith(
        'nodes.2.kind: got "nope", expected one of [kinds] or the catalogue: a, b, p100'
    )
    assert bodies[11:] == [
        "levels.0.name: got 3, expected a string",
        "levels.0.size: got 1.5, expected a whole number",
        "levels.0.bandwidth_bytes_per_second: got true, expected a number",
        "levels.0.latency_seconds: missing, expected a number",
        "nods: unknown key. Did you mean nodes? Known: compiler, kinds, nodes, levels, "
        "links",
    ]


def test_numbers_of_levels_are_checked_beside_unknown_keys() -> None:
    text = """
        [[nodes]]
        kind = "h100"
        count = 4
        devices = [0, 1, 2, 3]
        [[nodes]]
        kind = "h100"
        count = 4
        devices = [3, 4, 5, 6]
        [[levels]]
        name = "wire"
        size = 8
        bandwidth_bytes_per_second = 0
        latency_seconds = -1
        """
    assert _error(text).splitlines() == [
        "cluster file: 4 problems",
        "  1. nodes.0.devices: unknown key. Known: kind, count, repeat",
        "  2. nodes.1.devices: unknown key. Known: kind, count, repeat",
        "  3. levels.0 (wire).bandwidth_bytes_per_second: got 0.0, expected a number "
        "above zero",
        "  4. levels.0 (wire).latency_seconds: got -1.0, expected at least zero",
    ]


def test_unfit_numbers_of_a_kind_carry_its_path() -> None:
    text = """
        [kinds.a]
        base = "h100"
        efficiency = 2
        [[nodes]]
        kind = "a"
        count = 1
        """
    assert (
        "1. kinds.a: device kind 'a': 1 problem\n       1. efficiency: got 2.0, "
        "expected a fraction above 0, at most 1"
    ) in _error(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nodes: missing, expected at least one [[nodes]] table"),
        ("nodes = 3", "nodes: got 3, expected a list of tables"),
        ("nodes = [3]", "nodes.0: got 3, expected a table"),
        (
            '[[nodes]]\nkind = "v5p"\ncount = 8',
            "levels: missing, and a torus of 'v5p' needs its lengths. Add one "
            "[[levels]] table for each level of links, innermost first",
        ),
        (
            '[[nodes]]\nkind = "cpu"\ncount = 8\nrepeat = 2',
            "levels: missing, and no network is known for 'cpu'. Add one [[levels]] "
            "table for each level of links, innermost first",
        ),
        (
            '[kinds.a]\nplatform = "cpu"\nmemory_bytes = 1\nmemory_bytes_per_second = '
            '1\nflops_per_second = {f32 = 1}\n[[nodes]]\nkind = "a"\ncount = 1',
            "levels: missing, and 'a' has no base to take them from. Add one "
            "[[levels]] table for each level of links, innermost first",
        ),
    ],
)
def test_one_problem(text: str, problem: str) -> None:
    assert f"  1. {problem}" in _error(text)


def test_levels_that_do_not_multiply_to_the_nodes() -> None:
    text = """
        [[nodes]]
        kind = "h100"
        count = 8
        [[levels]]
        name = "wire"
        size = 3
        bandwidth_bytes_per_second = 1
        latency_seconds = 0
        """
    assert _error(text) == (
        "cluster file: cluster: 1 problem\n"
        "  1. levels: sizes 3 make 3 devices, but the nodes have 8. The sizes of the "
        "levels, innermost first, must multiply to the number of devices"
    )


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    path = str(tmp_path / "no.toml")
    with pytest.raises(WhaleError) as error:
        cluster(path)
    assert str(error.value) == (
        f"cluster file {path!r} does not exist. whalejax calibrate -o {path} writes "
        f"one for this machine"
    )


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("a = ")
    with pytest.raises(WhaleError, match="cannot be read as TOML: Invalid value"):
        Cluster.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(WhaleError, match="cannot be read as TOML: byte 0 is no UTF-8"):
        Cluster.load(path)
    with pytest.raises(WhaleError, match="cannot be read as TOML: "):
        Cluster.load(tmp_path)


def test_a_file_that_gives_an_efficiency_is_obeyed(tmp_path: Path) -> None:
    def rate(line: str) -> float:
        path = tmp_path / "cluster.toml"
        path.write_text(
            f'[kinds.mine]\nbase = "h100"\n{line}\n'
            '[[nodes]]\nkind = "mine"\ncount = 8\n'
        )
        kind = Cluster.load(path).slowest
        return kind.matmul_flops_per_second("bf16", 8192, 8192, 8192)

    peak = entry("h100").kind.peak_flops("bf16")
    assert rate("efficiency = 0.25") == 0.25 * peak
    # Another name for a kind of the catalogue changes nothing.
    known = entry("h100").kind.matmul_flops_per_second("bf16", 8192, 8192, 8192)
    assert rate("") == pytest.approx(known)


def test_a_data_sheets_numbers_deliver_what_others_do() -> None:
    """Of a kind without a base, unless the file has measured ones."""
    text = """
    [kinds.mine]
    platform = "gpu"
    memory_bytes = 32e9
    memory_bytes_per_second = 900e9
    flops_per_second = { f32 = 14e12 }
    %s
    [[nodes]]
    kind = "mine"
    count = 1
    [[levels]]
    name = "one"
    size = 1
    bandwidth_bytes_per_second = 1e9
    latency_seconds = 1e-6
    """
    (sheet,), (own,) = (_load(text % own).kinds for own in ("", "efficiency = 0.9"))
    assert sheet.memory_bytes == own.memory_bytes == 32_000_000_000
    assert sheet.curve == "gpu" and sheet.launch_seconds > 0
    assert not own.curve and own.launch_seconds == 0


def test_more_devices_than_have_links_to_each_other_are_joined_otherwise() -> None:
    for count, peers in ((4, 3), (8, 0)):
        data = {"nodes": [{"kind": "gh200-96", "count": count}]}
        (level,) = from_data(data, "test").levels
        assert (level.size, level.peers) == (count, peers)
