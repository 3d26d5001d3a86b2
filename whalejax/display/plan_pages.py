"""Displays plans in notebooks, as static HTML.

The table of parameters shows the largest rows and folds others. Rows beyond
``_MOST_ROWS`` are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from whalejax.display.page import (
    FILLS,
    bar,
    bundle_of,
    cell,
    details_html,
    list_html,
    table,
)
from whalejax.meshes.units import gigabytes
from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.planner.plan.report.headline import headline_words
from whalejax.planner.plan.report.parameter_table import ParameterRow, parameter_rows
from whalejax.planner.plan.report.plan_page import (
    SHOWN_ROWS,
    TRAFFIC,
    crossings,
    hints,
    other_notes,
    region_axes,
    share_words,
    stage_rows,
    traffic_rows,
    whole_words,
)
from whalejax.planner.plan.report.why import layout_text, shape_text, spec_text
from whalejax.planner.plan_data import PlanData


UNFOLDED_ROWS = 300
"""Maximum number of parameter rows in the folded table; others are only counted."""


def bundle(plan: PlanData) -> dict[str, str]:
    """Returns the plan as HTML and as text, by MIME type.

    Args:
        plan: Plan to show.
    """
    return bundle_of(plan_html(plan), str(plan))


# Plans.


def plan_html(plan: PlanData) -> str:
    """Returns a plan as HTML without a style sheet."""
    return "".join(
        (
            f"<h3>Plan for {escape(plan.cluster.describe())}</h3>",
            f"<p>{escape(layout_text(plan))}</p>",
            _headline(plan),
            f'<div class="pair">{_time(plan)}{_memory(plan)}</div>',
            _mesh(plan),
            *_stages(plan),
            _parameters(plan),
            details_html("Mesh axis of each dimension", _regions(plan)),
            details_html("Traffic of a step", _traffic(plan)),
            *_note_sections(plan),
            *_candidate_table(plan),
        )
    )


def _headline(plan: PlanData) -> str:
    rows = (
        f'<th scope="row">{escape(name)}</th>' + cell(" · ".join(words))
        for name, words in headline_words(plan)
    )
    return table((), rows) if plan.work else ""


def _term_rows(
    pairs: Sequence[tuple[str, float]], whole: float, form: Callable[[float], str]
) -> Iterator[str]:
    for number, (name, size) in enumerate(pairs):
        share = size / whole if whole else 0.0
        yield (
            f'<th scope="row">{escape(name)}</th>'
            + bar(share, FILLS[number % len(FILLS)])
            + cell(form(size), number=True)
            + cell(f"{share:.1%}", number=True)
        )


def _time(plan: PlanData) -> str:
    seconds = plan.time.step_seconds
    rows = _term_rows(plan.time.by_size(), seconds, seconds_text)
    return table((), rows, caption=f"Step: {seconds_text(seconds)} predicted")


def _memory(plan: PlanData) -> str:
    """Returns a table with bars relative to the memory of a device."""
    memory, room = plan.memory, plan.room_bytes
    pairs = sorted(memory.by_name().items(), key=lambda pair: -pair[1])
    rows = [*_term_rows([pair for pair in pairs if pair[1]], room, gigabytes)]
    left = room - memory.total_bytes
    word = "free" if left >= 0 else "lacking"
    rows += [
        f'<th scope="row">{word}</th>'
        + bar(abs(left) / room, FILLS[7])
        + cell(gigabytes(abs(left)), number=True)
        + cell(f"{abs(left) / room:.1%}", number=True)
    ]
    used = gigabytes(memory.total_bytes)
    caption = f"Memory: {used} of {gigabytes(room)} per device predicted"
    found = table((), rows, caption=caption)
    if memory.host_bytes:
        found += f"<p>{gigabytes(memory.host_bytes)} of host memory for it</p>"
    return f"<div>{found}</div>"


def _mesh(plan: PlanData) -> str:
    return f"<h4>Mesh</h4>{list_html(crossings(plan))}"


def _stages(plan: PlanData) -> Iterator[str]:
    if plan.stages is not None:
        head, rows = stage_rows(plan)
        cells = ("".join(map(cell, row)) for row in rows)
        yield table(head, cells, caption=f"Stages: {plan.stages.words()}")
    if plan.shares:
        yield f"<h4>Shares</h4>{list_html(share_words(plan))}"


def _parameters(plan: PlanData) -> str:
    rows = parameter_rows(plan)
    if not rows:
        return "<p>No parameters.</p>"
    # One column suffices if all parameters are used in their stored layout.
    used = any(row.leaf.param_spec != row.leaf.compute_spec for row in rows)
    names = ["parameter", "shape", "stored as", *["used as"] * used, "per device"]
    names.append("collectives a step, each")
    by_size = sorted(rows, key=lambda row: -row.device_bytes)
    cells = [_parameter(row, used) for row in by_size[: SHOWN_ROWS + UNFOLDED_ROWS]]
    count = sum(row.count for row in rows)
    total = gigabytes(sum(row.device_bytes for row in rows))
    plural = "s" if count > 1 else ""
    caption = f"{count:,} array{plural} of parameters, {total} per device"
    found = table(names, cells[:SHOWN_ROWS], caption=caption)
    rest = by_size[SHOWN_ROWS:]
    if rest:
        size = gigabytes(sum(row.device_bytes for row in rest))
        hidden = len(rest) - UNFOLDED_ROWS
        more = table(names, cells[SHOWN_ROWS:])
        if hidden > 0:
            more += f"<p>… and {hidden:,} smaller rows; plan.leaves has them all.</p>"
        found += details_html(f"{len(rest):,} smaller rows, {size} per device", more)
    return found


def _parameter(row: ParameterRow, used: bool) -> str:
    leaf = row.leaf
    size = gigabytes(row.device_bytes) + " of host" * leaf.hosted
    return "".join(
        (
            cell(row.label, code=True),
            cell(shape_text(leaf.shape)),
            cell(spec_text(leaf.param_spec), code=True),
            cell(spec_text(leaf.compute_spec), code=True) if used else "",
            cell(size, number=True),
            cell(row.collectives),
        )
    )


def _regions(plan: PlanData) -> str:
    rows = (
        cell(region.task_graph)
        + cell(" > ".join(region.marks) or "unmarked")
        + cell(region_axes(plan, region) or "–")
        for region in plan.compute
    )
    return table(("TaskGraph", "marks", "axis: dimensions"), rows)


def _traffic(plan: PlanData) -> str:
    rows = [
        "".join(cell(text, number=place > 2) for place, text in enumerate(row))
        for row in traffic_rows(plan)
    ]
    return table(TRAFFIC, rows) if rows else "<p>None.</p>"


def _note_sections(plan: PlanData) -> Iterator[str]:
    for name, texts, opened in (
        ("What stays whole, and why", whole_words(plan), False),
        ("Hints", hints(plan), True),
        ("Notes", other_notes(plan), True),
    ):
        if texts:
            yield details_html(
                f"{name} ({len(texts)})", list_html(texts), opened=opened
            )


def _candidate_table(plan: PlanData) -> Iterator[str]:
    others = [c for c in plan.candidates if c.verdict != "chosen"]
    rows = (
        cell(c.layout)
        + cell(seconds_text(c.step_seconds), number=True)
        + cell(gigabytes(c.memory_bytes), number=True)
        + cell(c.verdict)
        for c in others
    )
    names = "layout", "step", "per device", ""
    if others:
        summary = f"{len(others)} other plan{'s' if len(others) > 1 else ''} evaluated"
        yield details_html(summary, table(names, rows))
