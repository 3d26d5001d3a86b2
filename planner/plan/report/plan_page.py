"""Makes the text of ``print(plan)``.

The text consists of lines with styles and needs no library. ``whalejax show`` prints
the same lines in colour. Colour alone carries no information.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.cost_terms import NO_EFFECT, OBEYED
from whalejax.planner.plan.report.headline import headline
from whalejax.planner.plan.report.parameter_table import parameter_rows
from whalejax.planner.plan.report.plan_traffic import INSIDE, mesh_of, traffic
from whalejax.planner.plan.report.table_text import tables_text
from whalejax.planner.plan.report.text_layout import (
    Line,
    check_lines,
    paragraph,
    plain,
    table,
)
from whalejax.planner.plan.report.why import (
    gap_words,
    layout_text,
    mesh_words,
    pipeline_words,
    shape_text,
    sharded_bytes,
    spec_text,
    whole_dimensions,
    whole_reasons,
)
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import RegionTable
from whalejax.planner.sharding.layout import STAGE


BAR_CELLS = 24
"""Columns of a bar of 100%."""

SHOWN_ROWS = 12
"""Number of rows of parameters, and of traffic, unless all are requested."""

SHOWN_REASONS = 5
"""Number of reasons why parameters stay unsharded, unless all are requested."""

TRAFFIC = ("traffic", "over", "of", "times a step", "bytes a step")
"""Columns of ``traffic_rows``."""

_Form = Callable[[float], str]


def page_width() -> int | None:
    """Returns the output's columns: ``COLUMNS``, the terminal's, or else None."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns or None
    return None


def page(plan: PlanData, *, all_rows: bool) -> str:
    """Returns the plan as text, as wide as the terminal; without one, as long lines."""
    check_lines(None, all_rows)
    return plain(plan_lines(plan, page_width(), all_rows=all_rows))


def plan_lines(plan: PlanData, width: int | None, *, all_rows: bool) -> list[Line]:
    """Returns the plan as lines of text.

    Args:
        plan: The plan.
        width: Columns of a line; None for lines of any length.
        all_rows: Whether to show all parameters, traffic and reasons, not only the
            largest.
    """
    tables: list[Line] = [((line, ""),) for line in tables_text(plan).splitlines()]
    lines = [
        *tables,
        *([()] if tables else []),
        *paragraph("Plan", _head(plan), width, " · "),
        *headline(plan, width),
        *_step(plan, width),
        *_memory(plan, width),
        *paragraph("mesh", crossings(plan), width, " · "),
        *_regions(plan, width),
        *_stages(plan, width),
        *(paragraph("shares", share_words(plan), width, " · ") if plan.shares else ()),
        (),
        *_parameters(plan, width, all_rows),
        (),
        *_traffic(plan, width, all_rows),
        (),
    ]
    for name, texts in (
        ("whole", whole_words(plan, all_rows)),
        ("hints", hints(plan)),
        ("note", other_notes(plan)),
    ):
        for text in texts:
            lines += paragraph(name, [text], width)
    return [*lines, *_next(plan, width)]


def _head(plan: PlanData) -> list[str]:
    return [plan.cluster.describe(), *layout_text(plan).split(" · ")]


# Time and memory.


def bar_text(share: float, width: int) -> str:
    """Returns a bar in eighths of a character, from one eighth to the full width.

    >>> bar_text(0.5, 3), bar_text(0.0, 3)
    ('█▌', '▏')
    """
    eighths = max(1, round(min(share, 1.0) * width * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _bars(
    head: str, terms: Sequence[tuple[str, float]], whole: float, form: _Form
) -> list[Line | str]:
    pieces: list[Line | str] = [head]
    for number, (name, size) in enumerate(terms):
        bar = bar_text(size / max(whole, 1e-30), BAR_CELLS)
        pieces.append(((bar, f"bar {number}"), (f" {name} {form(size)}", "")))
    return pieces


def _step(plan: PlanData, width: int | None) -> list[Line]:
    seconds = plan.time.step_seconds
    head = f"{milliseconds(seconds)} predicted"
    pieces = _bars(head, plan.time.by_size(), seconds, milliseconds)
    return paragraph("step", pieces, width)


def _memory(plan: PlanData, width: int | None) -> list[Line]:
    total, limit = plan.memory.total_bytes, plan.room_bytes
    head = (
        f"{gigabytes(total)} of {gigabytes(limit)} ({total / limit:.1%}) per device "
        "predicted"
    )
    sizes = sorted(plan.memory.by_name().items(), key=lambda item: -item[1])
    terms = [(name, float(size)) for name, size in sizes if size]
    pieces = _bars(head, terms, limit, gigabytes)
    free = limit - total
    if free > 0:
        pieces.append(
            (
                ("░" * round(free / limit * BAR_CELLS), ""),
                (f" free {gigabytes(free)}", ""),
            )
        )
    if plan.memory.host_bytes:
        pieces.append(f"and {gigabytes(plan.memory.host_bytes)} of host memory")
    return paragraph("memory", pieces, width)


# The mesh, and what its axes shard.


def crossings(plan: PlanData) -> list[str]:
    """Returns a text for each axis: the links that it crosses and their speed."""
    mesh = mesh_of(plan)
    found = [
        _link_text(axis, mesh, plan.cluster, plan) for axis in mesh if axis != INSIDE
    ]
    for one in plan.pipelines or (plan,):
        for own in one.stage_plans:
            for axis, _ in own.axes:
                found.append(_link_text(axis, own.axis_sizes, own.cluster, own))
    return list(dict.fromkeys(found)) or ["one device, nothing to cross"]


def _link_text(
    axis: str, mesh: dict[str, int], cluster: Cluster, plan: PlanData
) -> str:
    parts = axis_parts((axis,), mesh, cluster)
    rates = {part.level.name: part.level.bandwidth_bytes_per_second for part in parts}
    words = [f"{name} at {gigabytes(rate)}/s" for name, rate in rates.items()]
    text = f"{axis} {mesh[axis]} crosses {' and '.join(words) or 'nothing'}"
    if axis in (STAGE, "data"):  # The axis name says what each device has.
        return text
    shares = sharded_bytes(plan, axis)
    whole = sum(leaf.nbytes for leaf in plan.leaves)
    if not shares:
        return f"{text}, shards no parameter"
    return f"{text}, shards {gigabytes(shares)} of {gigabytes(whole)} of parameters"


def _regions(plan: PlanData, width: int | None) -> Iterator[Line]:
    for region in plan.compute:
        marks = " > ".join(region.marks) or "unmarked"
        pieces = [
            f"{region.task_graph} ({marks})",
            region_axes(plan, region) or "whole",
        ]
        yield from paragraph("axes", pieces, width)


def region_axes(plan: PlanData, region: RegionTable) -> str:
    """Returns the text of the dimensions that each mesh axis shards in a TaskGraph."""
    axes = [f"{axis}: {', '.join(roles)}" for axis, roles in region.axes if roles]
    if plan.shares and not any(axis == "data" for axis, _ in region.axes):
        # Each replica has a program of its own.
        axes = ["data: micro-batches", *axes]
    return " · ".join(axes)


def _stages(plan: PlanData, width: int | None) -> Iterator[Line]:
    if plan.stages is not None:
        yield from paragraph("stages", pipeline_words(plan), width, " · ")
        yield from table(*stage_rows(plan), width)


def stage_rows(plan: PlanData) -> tuple[list[str], list[list[str]]]:
    """Returns the column names, and a row for each stage of a pipeline plan."""
    stages = plan.stages
    assert stages is not None
    if plan.pipelines:
        head = ["pipeline", "stage", "kind", "layers", "mesh", "memory per device"]
        return head, [
            [str(pipeline), str(number), own.cluster.kinds[0].display_name(), *rest]
            for pipeline, one in enumerate(plan.pipelines)
            for number, own in enumerate(one.stage_plans)
            for held in [gigabytes(own.memory.with_exchange_buffer.total_bytes)]
            for rest in [["as cut", mesh_words(own.axis_sizes), held]]
        ]
    count = dict(plan.axes).get("stage", 1)
    rows = []
    for number in range(count):
        parts = stages.layers[number::count]
        kind = stages.kinds[number : number + 1]
        row = [str(number), *kind, "+".join(map(str, parts)) or "as cut"]
        if plan.stage_plans:
            own = plan.stage_plans[number]
            held = gigabytes(own.memory.total_bytes)
            row += [mesh_words(own.axis_sizes), held]
        rows.append(row)
    head = ["stage", *["kind"] * bool(stages.kinds), "layers"]
    head += ["mesh", "memory per device"] * bool(plan.stage_plans)
    return head, rows


def share_words(plan: PlanData) -> list[str]:
    """Returns texts on the micro-batches of ranks or pipelines, if these differ."""
    each = max(1, plan.num_devices // len(plan.shares))
    kinds = [
        node.kind.display_name()
        for node in plan.cluster.nodes
        for _ in range(node.count)
    ]
    names = [
        " and ".join(dict.fromkeys(kinds[rank * each : (rank + 1) * each]))
        for rank in range(len(plan.shares))
    ]
    pieces = []
    first = 0
    for (kind, share), group in groupby(zip(names, plan.shares, strict=True)):
        last = first + len(list(group)) - 1
        one = "pipeline" if plan.pipelines else "rank"
        where = f"{one} {first}" if first == last else f"{one}s {first}–{last}"
        pieces.append(
            f"{where} ({kind}) {share} each"
            if first != last
            else f"{where} ({kind}) {share}"
        )
        first = last + 1
    return [*pieces, f"of {count_text(sum(plan.shares), 'micro-batch')}"]


# The parameters and the traffic.


def _parameters(plan: PlanData, width: int | None, all_rows: bool) -> list[Line]:
    rows = parameter_rows(plan)
    by_size = sorted(rows, key=lambda row: -row.device_bytes)
    shown = rows if all_rows else by_size[:SHOWN_ROWS]
    kept = {id(row) for row in shown}
    # Most plans compute with parameters in their stored layout, so one column suffices.
    gathers = any(row.leaf.param_spec != row.leaf.compute_spec for row in rows)
    cells = []
    for row in rows:
        if id(row) in kept:
            leaf = row.leaf
            used = [spec_text(leaf.compute_spec)] if gathers else []
            cells.append(
                [
                    row.label,
                    shape_text(leaf.shape),
                    spec_text(leaf.param_spec),
                    *used,
                    gigabytes(row.device_bytes) + " of host" * leaf.hosted,
                    row.collectives,
                ]
            )
    rest = [row for row in rows if id(row) not in kept]
    blanks = [""] * (3 if gathers else 2)
    if rest:
        nbytes = gigabytes(sum(row.device_bytes for row in rest))
        cells.append([f"… {len(rest)} smaller rows folded", *blanks, nbytes, ""])
    head = ["parameter", "shape", "stored as", *["used as"] * gathers]
    head += ["per device", "collectives a step, each"]
    return table(head, cells, width, right=[len(head) - 2])


def _traffic(plan: PlanData, width: int | None, all_rows: bool) -> list[Line]:
    rows = traffic_rows(plan)
    if not rows:
        return paragraph("traffic", ["none"], width)
    shown = rows if all_rows else rows[:SHOWN_ROWS]
    if len(rows) > len(shown):
        shown.append([f"… {len(rows) - len(shown)} smaller rows", *[""] * 4])
    return table(TRAFFIC, shown, width, right=[3, 4])


def traffic_rows(plan: PlanData) -> list[list[str]]:
    """Returns the rows of a step's traffic by kind, most bytes first."""
    return [
        [row.kind, row.route_text, row.what, str(row.times), gigabytes(row.nbytes)]
        for row in traffic(plan)
    ]


# Unsharded parameters, requests, and other notes.


def whole_words(plan: PlanData, all_rows: bool = False) -> list[str]:
    """Returns texts on the parameters that every device stores unsharded, by reason."""
    reasons = whole_reasons(plan)
    lines: list[str] = []
    most = len(reasons) if all_rows else SHOWN_REASONS
    for reason, leaves in reasons[:most]:
        nbytes = gigabytes(sum(leaf.nbytes for leaf in leaves))
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        lines.append(f"{leaves[0].path}{more} ({nbytes}): {reason}")
    rest = [leaf for _, leaves in reasons[most:] for leaf in leaves]
    if rest:
        nbytes = gigabytes(sum(leaf.nbytes for leaf in rest))
        others = f"for {len(reasons) - most} other reasons"
        lines.append(f"{len(rest)} parameters more ({nbytes}), {others}")
    return [*lines, *whole_dimensions(plan)]


def hints(plan: PlanData) -> list[str]:
    """Returns the annotations that were obeyed, and the requests without effect."""
    idle = [note for note in plan.notes if NO_EFFECT in note]
    obeyed, whole = [], []
    for region in plan.compute:
        words = f"{' > '.join(region.marks)} in {region.task_graph}"
        if region.marks and region.marks[-1].startswith("split") and region.is_whole:
            whole.append(f"{words}: one device holds all of it")
        elif region.marks and not any(
            note.startswith(f"{region.task_graph}: ") for note in idle
        ):
            obeyed.append(words)
    found = [f"obeyed: {', '.join(obeyed)}"] if obeyed else []
    return [*found, *(f"without effect: {note}" for note in (*whole, *idle))]


def other_notes(plan: PlanData) -> list[str]:
    """Returns the notes of a plan that ``hints`` does not return."""
    return [n for n in plan.notes if NO_EFFECT not in n and not n.endswith(OBEYED)]


def _next(plan: PlanData, width: int | None) -> list[Line]:
    others = [c for c in plan.candidates if c.verdict != "chosen"]
    lines = paragraph("next", [str(others[0])], width) if others else []
    words = gap_words(plan)
    return [*lines, *(paragraph("gap", [words], width) if words else ())]
