"""Displays the result of ``wh.search`` in notebooks, as a table and as a chart.

The chart needs the extra ``whalejax[notebook]``. altair draws it, and vl-convert
bundles its JavaScript, so that it is interactive without a network.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from whalejax.display.plan_pages import plan_html
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import gigabytes
from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.planner.plan.report.search_data import SearchData
from whalejax.planner.plan_data import PlanData


if TYPE_CHECKING:
    import os


UNFOLDED_PLANS = 10
"""Maximum number of folded plans below the table or the chart."""


def bundle(found: SearchData) -> dict[str, str]:
    """Returns the result of a search as HTML and as text, by MIME type."""
    return bundle_of(found_html(found), str(found))


def found_html(found: SearchData) -> str:
    """Returns a table of plans, the folded plans, and the clusters without a plan."""
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
    """Chart of the step time and peak memory of each evaluated plan.

    Attributes:
        altair: Altair chart, which can be changed or combined with others.
        rows: Data of the chart: a dictionary for each plan; see ``points``.
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
            f"{len(self.rows)} plans evaluated; {len(front)} on the Pareto front of "
            "step time and memory:"
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
        """Writes the chart to a file, as a page (``.html``) or an image (``.svg``).

        Raises:
            WhaleError: The extension is unknown, or the file cannot be written.
        """
        check_path(path)
        extension = str(path).rpartition(".")[2].lower()
        if extension == "html":
            write(path, page(self._html(), "Plans that were evaluated"))
        elif extension == "svg":
            write(path, self._svg())
        else:
            raise WhaleError(
                f"path is {path}; expected a name that ends in .html or .svg"
            )

    def _html(self) -> str:
        """Returns the chart with its JavaScript, and the plans to which points link."""
        chart: str = self.altair.to_html(
            inline=True,
            fullhtml=False,
            embed_options={"actions": False, "renderer": "svg"},
        )
        linked = sorted({row["plan"] for row in self.rows if row["plan"] is not None})
        return chart + "".join(self._link_to_plan(i) for i in linked[:UNFOLDED_PLANS])

    def _link_to_plan(self, index: int) -> str:
        plan, name = self._found[index], self._found.names[index]
        inner = f'<div id="{_anchor(plan)}">{plan_html(plan)}</div>'
        return details_html(f"found[{index}]: {name}", inner)

    def _svg(self) -> str:
        converter = importlib.import_module("vl_convert")
        svg: str = converter.vegalite_to_svg(self.altair.to_dict())
        return svg


def chart(found: SearchData) -> SearchChart:
    """Returns the chart of a search; see ``SearchResult.chart``."""
    return SearchChart(found)


def _anchor(plan: PlanData) -> str:
    return f"whalejax-plan-{plan.hash}"


def points(found: SearchData) -> list[dict[str, Any]]:
    """Returns a dictionary for each evaluated plan, with its numbers also as text."""
    rows = []
    fitting = [i for i, w in enumerate(found.weighed) if w.candidate.fits]
    candidates = [found.weighed[i].candidate for i in fitting]
    best = pareto([(c.step_seconds, c.memory_bytes) for c in candidates])
    front = {fitting[i] for i in best}
    for number, one in enumerate(found.weighed):
        candidate = one.candidate
        linked = (
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
                "link": "" if linked is None else f"#{_anchor(found[linked])}",
            }
        )
    return rows


def pareto(pairs: Sequence[tuple[float, float]]) -> set[int]:
    """Returns the indices of the Pareto-optimal pairs; smaller is better.

    >>> sorted(pareto([(1, 9), (2, 5), (3, 7), (4, 5), (5, 1)]))
    [0, 1, 4]
    """
    front = set()
    least = float("inf")
    for _, second, index in sorted((*p, i) for i, p in enumerate(pairs)):
        if second < least:
            front.add(index)
            least = second
    return front


def _pareto_chart(alt: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """Draws the plans as points, and a line through their Pareto front."""
    unit, scale = unit_of([row["seconds"] for row in rows], _SECONDS)
    size, shrink = unit_of([row["bytes"] for row in rows], _BYTES)
    values = [
        {**row, "x": row["seconds"] * scale, "y": row["bytes"] * shrink} for row in rows
    ]
    data = alt.Data(values=values)
    axis = alt.Axis(tickCount=6)
    spread = alt.Scale(zero=False, padding=12)
    x = alt.X("x:Q", title=f"predicted step time ({unit})", scale=spread, axis=axis)
    title = f"predicted peak memory per device ({size})"
    y = alt.Y("y:Q", title=title, scale=spread, axis=axis)
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
        tooltip=[alt.Tooltip(f"{name}:N", title=title) for name, title in _TOOLTIP],
    )
    heading = alt.Title(
        "Plans that were evaluated",
        subtitle="Large points on the dashed line: the Pareto front"
        + ". Hollow: does not fit" * any(not row["fits"] for row in rows),
    )
    chart = alt.layer(front, shown)
    return styled(chart.properties(width=600, height=340, title=heading))


_TOOLTIP = (
    ("cluster", "cluster"),
    ("layout", "mesh"),
    ("step", "step"),
    ("costs", "largest costs"),
    ("memory", "memory"),
    ("of", "memory of a device"),
    ("price", "price a step"),
    ("verdict", "verdict"),
    ("plan", "found[…]"),
)
"""Keys of ``points`` in a tooltip, and their titles."""

_SECONDS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_BYTES = (("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3))
