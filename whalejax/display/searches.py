"""Displays the result of ``wh.search`` in notebooks: a table, and a chart of all
candidates.

The table needs nothing; the chart needs the extra ``whalejax[notebook]``: altair draws
it, and vl-convert brings what it needs to move without a network.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whalejax.display.bundles import plan_html
from whalejax.display.charts import TONE, TONES, needed, styled, unit_of
from whalejax.display.page import (
    bundle_of,
    cell,
    check_path,
    details_html,
    fragment,
    list_html,
    page,
    table,
    write,
)
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import gigabytes
from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.planner.plan.report.search_data import SearchData
from whalejax.planner.plan_data import PlanData


if TYPE_CHECKING:
    import os


UNFOLDED_PLANS = 10
"""Plans that the table brings with it, to unfold."""


def bundle(found: SearchData) -> dict[str, str]:
    """MIME type to text."""
    return bundle_of(found_html(found), str(found))


def found_html(found: SearchData) -> str:
    """The table, every plan folded below it, and where there is none."""
    plural = "s" if len(found) > 1 else ""
    rows = ("".join(cell(text) for text in row) for row in found.rows())
    refused = [f"{one.name}: {one.reason}" for one in found.refused]
    return "".join(
        (
            f"<h3>{len(found)} plan{plural}, fastest step first</h3>",
            table(found.head(), rows),
            _plans(found),
            f"<h4>No plan on</h4>{list_html(refused)}" if refused else "",
            f"<h4>Notes</h4>{list_html(found.notes)}" if found.notes else "",
        )
    )


def _plans(found: SearchData) -> str:
    html = []
    for index, plan in enumerate(found[:UNFOLDED_PLANS]):
        name = f"{index}: {found.names[index]}"
        html.append(details_html(name, plan_html(plan)))
    left = len(found) - UNFOLDED_PLANS
    if left > 0:
        html.append(f"<p>… and {left} more: found[{UNFOLDED_PLANS}] is the next.</p>")
    return "".join(html)


# The chart.


class SearchChart:
    """Step time and peak memory of every plan that was evaluated.

    Attributes:
        altair: The chart as altair has it, to be changed or combined.
        rows: Its data, a dictionary for each point.
    """

    def __init__(self, found: SearchData) -> None:
        self._alt = needed("altair")
        needed("vl_convert")
        self.rows = points(found)
        self._found = found
        self.altair: Any = _pareto_chart(self._alt, self.rows)

    def __str__(self) -> str:
        front = [row for row in self.rows if row["front"]]
        lines = [
            f"{len(self.rows)} plans evaluated; {len(front)} that no other beats in "
            "step time and memory both:"
        ]
        for row in sorted(front, key=lambda row: row["seconds"]):
            lines.append(
                f"  {row['step']}, {row['memory']}: {row['cluster']}, {row['layout']}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        html = fragment(self._html())
        return {
            "text/html": html,
            "image/svg+xml": self._svg(),
            "text/plain": str(self),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file, as a page (``.html``) or a drawing (``.svg``).

        Raises:
            WhaleError: Another ending, or the file cannot be written there.
        """
        check_path(path)
        ending = str(path).rpartition(".")[2].lower()
        if ending == "html":
            write(path, page(self._html(), "Plans that were evaluated"))
        elif ending == "svg":
            write(path, self._svg())
        else:
            raise WhaleError(
                f"{path}: a chart is written as .html or .svg; not .{ending}"
            )

    def _html(self) -> str:
        """The chart with its programs inside, and the plans that its points lead to."""
        chart: str = self.altair.to_html(
            inline=True,
            fullhtml=False,
            embed_options={"actions": False, "renderer": "svg"},
        )
        led = sorted({row["plan"] for row in self.rows if row["plan"] is not None})
        return chart + "".join(self._link_to_plan(i) for i in led[:UNFOLDED_PLANS])

    def _link_to_plan(self, index: int) -> str:
        """A plan, with its address inside of what unfolds: browsers unfold it then."""
        plan, name = self._found[index], self._found.names[index]
        inner = f'<div id="{_anchor(plan)}">{plan_html(plan)}</div>'
        return details_html(f"found[{index}]: {name}", inner)

    def _svg(self) -> str:
        converter = importlib.import_module("vl_convert")
        svg: str = converter.vegalite_to_svg(self.altair.to_dict())
        return svg


def chart(found: SearchData) -> SearchChart:
    """The chart of a search; see ``SearchResult.chart``."""
    return SearchChart(found)


def _anchor(plan: PlanData) -> str:
    return f"whalejax-plan-{plan.hash}"


def points(found: SearchData) -> list[dict[str, Any]]:
    """One row for each plan that was evaluated: its numbers, and the same as text."""
    rows = []
    front = pareto(
        [
            (w.candidate.step_seconds, w.candidate.memory_bytes)
            for w in found.weighed
            if w.candidate.fits
        ]
    )
    fitting = [i for i, w in enumerate(found.weighed) if w.candidate.fits]
    front = {fitting[i] for i in front}
    for number, one in enumerate(found.weighed):
        candidate = one.candidate
        led = (
            one.index if one.index is not None and one.index < UNFOLDED_PLANS else None
        )
        rows.append(
            {
                "cluster": one.name,
                "layout": candidate.layout,
                "seconds": candidate.step_seconds,
                "bytes": candidate.memory_bytes,
                "step": seconds_text(candidate.step_seconds),
                "memory": gigabytes(candidate.memory_bytes),
                "of": gigabytes(one.capacity_bytes),
                "fits": candidate.fits,
                "verdict": candidate.verdict,
                "price": one.step_price_text,
                "costs": ", ".join(
                    f"{name} {seconds_text(seconds)}" for name, seconds in one.costs(3)
                ),
                "front": number in front,
                "plan": one.index,
                "link": "" if led is None else f"#{_anchor(found[led])}",
            }
        )
    return rows


def pareto(pairs: Sequence[tuple[float, float]]) -> set[int]:
    """Numbers of the pairs that no other is at most as large as in both parts.

    >>> sorted(pareto([(1, 9), (2, 5), (3, 7), (4, 5), (5, 1)]))
    [0, 1, 4]
    """
    found = set()
    least = float("inf")
    for first, second, number in sorted((*p, i) for i, p in enumerate(pairs)):
        del first
        if second < least:
            found.add(number)
            least = second
    return found


def _pareto_chart(alt: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Points over the line of those that no other beats, all in middle tones."""
    unit, scale = unit_of([row["seconds"] for row in rows], _SECONDS)
    size, shrink = unit_of([row["bytes"] for row in rows], _BYTES)
    values = [
        {**row, "x": row["seconds"] * scale, "y": row["bytes"] * shrink} for row in rows
    ]
    data = alt.Data(values=values)
    few = alt.Axis(tickCount=6)
    wide = alt.Scale(zero=False, padding=12)
    x = alt.X("x:Q", title=f"predicted step time ({unit})", scale=wide, axis=few)
    title = f"predicted peak memory per device ({size})"
    y = alt.Y("y:Q", title=title, scale=wide, axis=few)
    base = alt.Chart(data)
    front = (
        base.transform_filter("datum.front")
        .mark_line(interpolate="step-after", color=TONE, strokeDash=[5, 3])
        .encode(x=x, y=y)
    )
    names = [*dict.fromkeys(row["cluster"] for row in rows)]
    tones = alt.Scale(domain=names, range=TONES)
    legend = alt.Legend(orient="bottom", columns=4)
    sized = alt.condition("datum.front", alt.value(140), alt.value(50))
    shown = base.mark_point(opacity=0.7).encode(
        x=x,
        y=y,
        size=sized,
        fill=alt.Fill("cluster:N", title="cluster", scale=tones, legend=legend),
        stroke=alt.Stroke("cluster:N", title="cluster", scale=tones, legend=legend),
        fillOpacity=alt.condition("datum.fits", alt.value(0.9), alt.value(0)),
        shape=alt.Shape(
            "cluster:N", title="cluster", scale=alt.Scale(domain=names), legend=legend
        ),
        href="link:N",
        tooltip=[alt.Tooltip(f"{name}:N", title=said) for name, said in _HOVER],
    )
    heading = alt.Title(
        "Plans that were evaluated",
        subtitle="Large, on the dashed line: no other is faster and smaller"
        + ". Hollow: does not fit" * any(not row["fits"] for row in rows),
    )
    chart = alt.layer(front, shown)
    return styled(chart.properties(width=600, height=340, title=heading))


_HOVER = (
    ("cluster", "cluster"),
    ("layout", "mesh"),
    ("step", "step"),
    ("costs", "largest costs"),
    ("memory", "memory"),
    ("of", "of"),
    ("price", "price a step"),
    ("verdict", "verdict"),
    ("plan", "found[…]"),
)
"""What hovering shows, and what it is called."""

_SECONDS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_BYTES = (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3))
