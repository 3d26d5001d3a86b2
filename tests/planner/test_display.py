"""Text displays, column by column; ``tests.planner.pages`` writes what they must be."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from tests.planner.pages import (
    FOLDER,
    PLANS,
    alone,
    found,
    many,
    other,
    pages,
    shared,
    spmd,
    staged,
)
from whalejax.meshes.units import gigabytes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.diff import signed
from whalejax.planner.plan.report.parameter_table import (
    collective_words,
    collectives_of,
    homes,
    parameter_rows,
)
from whalejax.planner.plan.report.plan_page import plan_lines
from whalejax.planner.plan.report.text_layout import (
    cells,
    line_cells,
    paragraph,
    plain,
    table,
)
from whalejax.planner.plan.report.why import layout_text


made = functools.cache(pages)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_displays_are_as_they_were(name: str) -> None:
    """After a change that is meant: ``python -m tests.planner.pages``."""
    assert made()[name] + "\n" == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_display_has_a_file() -> None:
    assert set(made()) == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [n for n in sorted(PLANS)])
@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    lines = plan_lines(PLANS[name](), width, all_rows=False)
    assert max(map(line_cells, lines)) <= width
    other_lines = [*spmd().diff(other()).lines(width), *found().lines(width)]
    assert max(map(line_cells, other_lines)) <= width


def test_nothing_is_lost_in_a_narrow_terminal() -> None:
    plan = spmd()
    squeezed = "".join(plain(plan_lines(plan, 40, all_rows=True)).split())
    texts = [row.label for row in parameter_rows(plan)]
    texts += [row.collectives for row in parameter_rows(plan)]
    texts += [*plan.notes[1:], layout_text(plan).replace(" · ", "")]
    for text in texts:
        assert "".join(text.split()) in squeezed.replace("·", ""), text


def test_without_a_width_every_note_is_one_line() -> None:
    text = plain(plan_lines(spmd(), None, all_rows=False))
    for note in spmd().notes[2:]:
        assert f"note    {note}" in text.splitlines()


def test_the_page_says_what_was_asked_for() -> None:
    text = plain(plan_lines(spmd(), None, all_rows=False))
    assert "hints   obeyed: split() in head\n" in text
    assert "hints   without effect: norms: split() has no effect: it covers" in text
    assert "marked TaskGraphs" not in text
    assert "whole   tokens[1] (129): slice needs it whole" in text
    assert "whole   embed.table (524 MB): dim 0 does not divide" in text
    assert "data 4 crosses infiniband at 50 GB/s" in text
    assert "tensor 4 crosses nvlink at 400 GB/s" in text


def test_memory_is_shown_against_its_capacity() -> None:
    text = plain(plan_lines(spmd(), None, all_rows=False))
    (line,) = [line for line in text.splitlines() if line.startswith("memory")]
    assert "60.2 GB of 80 GB (75.2%) per device predicted" in line
    # 24 columns stand for the 80 GB of a device.
    assert line.count("█") + line.count("░") <= 24
    assert "████████▉ activations 29.6 GB" in line and "free 19.8 GB" in line
    full = dataclasses.replace(
        spmd(), memory=dataclasses.replace(spmd().memory, host_bytes=10**9)
    )
    assert "and 1 GB of host memory" in plain(plan_lines(full, None, all_rows=False))


def test_collectives_of_a_parameter() -> None:
    plan = spmd()
    up = collectives_of(plan, plan.leaf("blocks.0.up.kernel"))
    assert [(c.kind, c.axes, c.count) for c in up] == [
        ("all-gather", ("fsdp",), 2),
        ("reduce-scatter", ("fsdp",), 1),
        ("all-reduce", ("data",), 1),
    ]
    # A quarter of 4096 × 16384 × 4 bytes is computed with on each device.
    assert [c.payload_bytes for c in up] == [67_108_864, 67_108_864, 33_554_432]
    rows = {row.label: row for row in parameter_rows(plan)}
    assert rows["blocks.*.up.kernel ×4"].collectives == (
        "4 all-gather over fsdp, 2 reduce-scatter over fsdp, 2 all-reduce over data"
    )
    assert rows["blocks.*.norm.scale ×4"].collectives == "2 all-reduce over data+fsdp"


@pytest.mark.parametrize("name", sorted(PLANS))
def test_words_of_collectives_are_those_of_each_parameter(name: str) -> None:
    """Rows share words; leaves that differ in one layout alone have their own."""
    plan = PLANS[name]()
    first = plan.leaves[0]
    whole = ((),) * len(first.shape)
    unlike = tuple(
        dataclasses.replace(first, path=f"x{field}x", **{field: whole})
        for field in ("compute_spec", "param_spec", "gradient_spec", "optimizer_spec")
    )
    plan = dataclasses.replace(plan, leaves=(*plan.leaves, *unlike))
    stored = homes(plan)
    for row in parameter_rows(plan):
        home = stored.get(row.leaf.path, plan)
        found = collectives_of(home, row.leaf, unlike=bool(plan.shares))
        expected = collective_words(found, home)
        assert row.collectives == expected


def test_what_the_compiler_runs_instead_is_what_is_shown() -> None:
    plan = spmd()
    gathers = dataclasses.replace(plan.collectives[0], kind="all-reduce")
    changed = dataclasses.replace(plan, collectives=(gathers, *plan.collectives[1:]))
    first = collectives_of(changed, changed.leaf("blocks.0.up.kernel"))[0]
    assert first.kind == "all-reduce"


def test_stages_and_shares_are_shown() -> None:
    text = plain(plan_lines(staged(), None, all_rows=False))
    assert [line.split() for line in text.splitlines() if line[:1].isdigit()] == [
        ["0", "3"],
        ["1", "2"],
        ["2", "2"],
        ["3", "1"],
    ]
    text = plain(plan_lines(shared(), None, all_rows=False))
    assert (
        "shares  ranks 0–1 (H100) 21 each · ranks 2–3 (V100-32) 10 each · "
        "of 62 micro-batches"
    ) in text


def test_ten_thousand_parameters_are_folded() -> None:
    plan = many()
    text = plain(plan_lines(plan, 100, all_rows=False))
    assert len(text.splitlines()) < 60 and "… 9988 smaller rows folded" in text
    full = plain(plan_lines(plan, 100, all_rows=True))
    assert len(full.splitlines()) > 10_000
    total = sum(row.device_bytes for row in parameter_rows(plan))
    assert total == sum(leaf.nbytes // 4 for leaf in plan.leaves)


def test_a_table_may_show_every_row() -> None:
    plan = dataclasses.replace(spmd(), leaves=many().leaves[:20])
    assert "… 8 smaller rows folded" in plan.table() == str(plan)
    full = plan.table(all_rows=True)
    assert "folded" not in full and all(leaf.path in full for leaf in plan.leaves)


def test_one_device_says_so() -> None:
    text = plain(plan_lines(alone(), None, all_rows=False))
    assert "mesh    one device, nothing to cross" in text
    assert "traffic none" in text and ": there is one device" in text


# Differences.


def test_equal_plans_have_no_differences() -> None:
    nothing = spmd().diff(spmd())
    assert not nothing and str(nothing) == "the plans are the same"


def test_only_what_changed_is_listed() -> None:
    diff = spmd().diff(other())
    assert [change.what for change in diff.changes] == [
        "mesh",
        "parts",
        "ZeRO",
        "remat",
    ]
    assert diff.step.more == pytest.approx(0.041)
    assert [term.what for term in diff.time_terms] == ["compute", "parameter"]
    assert [(t.what, t.more) for t in diff.memory_terms] == [
        ("activations", -20_600_000_000),
        ("params", 134_217_728),
    ]
    text = str(diff)
    assert "remat   dots → full" in text and "precision" not in text
    rows = {leaf.label: leaf for leaf in diff.leaves}
    up = rows["blocks.*.up.kernel ×4"]
    assert (up.before, up.after) == ("(fsdp, tensor)", "(–, tensor)")
    assert up.bytes_after == 2 * up.bytes_before == 4 * 4096 * 16_384 * 4 // 4
    assert up.seconds_before > 0 and up.collectives_after == "4 all-reduce over data"


def test_a_difference_is_the_other_way_round_backwards() -> None:
    there, back = spmd().diff(other()), other().diff(spmd())
    assert there.step.more == -back.step.more
    assert [(c.before, c.after) for c in there.changes] == [
        (c.after, c.before) for c in back.changes
    ]


def test_parameters_that_only_one_plan_has() -> None:
    fewer = dataclasses.replace(spmd(), leaves=spmd().leaves[1:])
    (row,) = spmd().diff(fewer).leaves
    assert row.label == "embed.table" and row.after == "" and row.bytes_after == 0
    assert "absent" in str(spmd().diff(fewer))


def test_a_difference_is_json() -> None:
    data = json.loads(json.dumps(spmd().diff(other()).document()))
    assert data["whalejax_diff"] == 1
    assert data["changes"][0]["what"] == "mesh"
    assert data["step"]["after"] - data["step"]["before"] == pytest.approx(0.041)


@pytest.mark.full
def test_all_differences_can_be_shown() -> None:
    plan = many()
    leaves = tuple(
        dataclasses.replace(leaf, param_spec=((), ())) for leaf in plan.leaves[:40]
    )
    diff = plan.diff(dataclasses.replace(plan, leaves=(*leaves, *plan.leaves[40:])))
    assert "… 28 rows that change less" in plain(diff.lines(100))
    assert len(diff.lines(100, all_rows=True)) >= 40


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(2e6, 1e6, "−1 MB"), (0, 5e9, "+5 GB"), (3, 3, "±0 B")],
)
def test_signs(before: float, after: float, text: str) -> None:
    assert signed(after - before, gigabytes) == text


# The taxonomy.


def test_the_taxonomy_names_every_axis_and_exchange() -> None:
    text = spmd().describe()
    for words in (
        "what is parallel",
        "data 4: data parallelism; shards batch in default, head, norms",
        "fsdp 2: data parallelism with parameters, gradients and optimizer state in",
        "tensor 4: operator (tensor) parallelism; shards mlp in default; vocab in head",
        "hybrid parallelism over 3 axes",
        "who is synchronous",
        "gradients: all-reduce over data, 2 GB a step and device, across infiniband",
        "there is no parameter server",
    ):
        assert words in text, words


def test_the_taxonomy_of_pipelines_shares_and_one_device() -> None:
    text = staged().describe()
    assert "stage 4: pipeline parallelism: 1f1b-lockstep, 1–3 layers each" in text
    assert "stages empty the pipeline at the end of each step" in text
    assert "ranks of data take unlike numbers of micro-batches" in shared().describe()
    even = dataclasses.replace(shared(), shares=(4,) * len(shared().shares)).describe()
    assert "ranks of data take 4 micro-batches each, and" in even
    assert "unlike numbers" not in even
    text = alone().describe()
    assert "nothing: one device computes everything" in text
    assert "one device waits for nobody" in text
    zero = dataclasses.replace(spmd(), zero=2).describe()
    assert "gradients and optimizer state in shards (ZeRO-2)" in zero


# Pieces.


@pytest.mark.parametrize(
    ("text", "expected"), [("abc", 3), ("4×8", 3), ("層.norm", 7), ("é", 1)]
)
def test_columns_of_a_text(text: str, expected: int) -> None:
    assert cells(text) == expected


def test_long_words_are_broken() -> None:
    lines = paragraph("note", ["x" * 30], 20)
    assert [line_cells(line) for line in lines] == [20, 20, 14]
    assert plain(lines).replace(" ", "").replace("\n", "") == "note" + "x" * 30


def test_tables_fold_and_become_lists() -> None:
    rows = [["a.long.path.of.a.parameter", "1×2×3", "12 MB"]]
    head = ["parameter", "shape", "per device"]
    wide = plain(table(head, rows, None, right=[2]))
    assert wide.splitlines()[1] == "a.long.path.of.a.parameter  1×2×3       12 MB"
    folded = plain(table(head, rows, 35, right=[2])).splitlines()
    assert len(folded) == 3 and folded[1].startswith("a.long.path.of")
    listed = plain(table(head, rows, 20, right=[2])).splitlines()
    assert "  shape 1×2×3" in listed and "  per device 12 MB" in listed


def test_a_page_comes_back_from_a_file(tmp_path: Path) -> None:
    for make in (spmd, staged, shared, alone):
        plan = make()
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert plan_lines(loaded, 80, all_rows=False) == plan_lines(
            plan, 80, all_rows=False
        )
