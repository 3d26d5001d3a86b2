"""Charts of swarms: utilization over link speeds, and simulated runs over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from whalejax.display.charts import DASHES, LACKING, TONES, svg_of
from whalejax.display.page import Picture, cell, list_html, table
from whalejax.planner.pipeline.square_cube import StageOverLink


WIDTHS: Final = (1, 2, 4, 8)
"""Widths of the model in the chart, relative to the planned model."""

_POINTS: Final = 60
_WIDTH: Final = 560
_WINDOWS: Final = 60
"""Number of windows of a simulated run; throughput is averaged in each."""


class SquareCubeChart(Picture):
    """Utilization of the least busy stage over the bandwidth of peers' links.

    Utilization is the fraction of time in which a stage computes. In wider models it is
    higher, because computation grows faster than transfers (square-cube law).

    Attributes:
        lines: Pairs of bytes per second and utilization by width of the model, relative
            to the planned model. Computation and transfers overlap.
        apart: Pairs of the same kind for the planned model, without overlap.
    """

    def __init__(
        self,
        text: str,
        stages: Sequence[StageOverLink],
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
    ) -> None:
        """Draws the chart.

        Args:
            text: Text of the table; its first line is the title.
            stages: Computation and transfers of each stage.
            head: Names of the columns of the table.
            rows: Cells of each row of the table.
        """
        rates = [10 ** (6 + 5 * n / _POINTS) / 8 for n in range(_POINTS + 1)]
        self.lines = {
            width: [(rate, least(stages, rate, width, overlap=True)) for rate in rates]
            for width in WIDTHS
        }
        self.apart = [(rate, least(stages, rate, 1, overlap=False)) for rate in rates]
        title = text.partition("\n")[0]
        svg = svg_of(self._draw)
        cells = ("".join(cell(text, number=True) for text in row) for row in rows)
        super().__init__(
            html=f"<h3>Square-cube law: {escape(title)}</h3>{svg or LACKING}"
            f"{table(head, cells)}",
            text=text,
            svg=svg,
        )

    def _draw(self, alt: Any) -> Any:
        named = {f"width × {width}": points for width, points in self.lines.items()}
        named["width × 1, no overlap"] = self.apart
        values = [
            {"line": name, "link": 8 * rate / 1e6, "busy": busy}
            for name, points in named.items()
            for rate, busy in points
        ]
        names = [*named]
        tones = alt.Scale(domain=names, range=TONES[: len(names)])
        dashes = alt.Scale(domain=names, range=DASHES[: len(names)])
        legend = alt.Legend(title=None, orient="bottom", columns=3)
        return (
            alt.Chart(alt.Data(values=values))
            .mark_line(strokeWidth=2)
            .encode(
                x=alt.X(
                    "link:Q",
                    title="link of a peer, one way (Mb/s)",
                    scale=alt.Scale(type="log"),
                    axis=alt.Axis(format="~s", tickCount=6),
                ),
                y=alt.Y(
                    "busy:Q",
                    title="least busy stage computes (fraction of time)",
                    axis=alt.Axis(format="%", tickCount=5),
                    scale=alt.Scale(domain=[0, 1]),
                ),
                color=alt.Color("line:N", scale=tones, legend=legend, sort=names),
                strokeDash=alt.StrokeDash(
                    "line:N", scale=dashes, legend=legend, sort=names
                ),
            )
            .properties(width=_WIDTH, height=240)
        )


class SimulatedChart(Picture):
    """Chart of the peers of each stage and of throughput, over simulated time.

    Attributes:
        points: Time of each commit in seconds, and micro-batches committed until then.
        serving: Time of each change in seconds, and number of peers of each stage from
            then on.
        empty_seconds: Seconds during which some stage had no peer.
    """

    def __init__(
        self,
        text: str,
        seconds: float,
        points: Sequence[tuple[float, int]],
        serving: Sequence[tuple[float, tuple[int, ...]]],
        empty_seconds: float,
    ) -> None:
        """Draws the chart.

        Args:
            text: Text of the run; its first line is the title.
            seconds: Simulated seconds.
            points: See the attribute.
            serving: See the attribute.
            empty_seconds: See the attribute.
        """
        self.points, self.serving = tuple(points), tuple(serving)
        self.empty_seconds, self._seconds = empty_seconds, seconds
        title = text.partition("\n")[0]
        svg = svg_of(self._draw)
        lines = list_html(text.splitlines()[1:])
        super().__init__(
            html=f"<h3>{escape(title)}</h3>{svg or LACKING}{lines}", text=text, svg=svg
        )

    def rates(self) -> list[tuple[float, float]]:
        """Returns the start and the micro-batches per second of each window."""
        window = self._seconds / _WINDOWS or 1.0
        done = [0] * (_WINDOWS + 1)
        before = 0
        for at, count in self.points:
            done[min(int(at / window), _WINDOWS - 1)] += count - before
            before = count
        return [(n * window, done[n] / window) for n in range(_WINDOWS)]

    def _draw(self, alt: Any) -> Any:
        x = alt.X(
            "minutes:Q",
            title="simulated time (min)",
            scale=alt.Scale(domain=[0, self._seconds / 60], nice=False),
        )
        stages = len(self.serving[0][1]) if self.serving else 0
        names = [f"stage {number}" for number in range(stages)]
        changes = [*self.serving, *[(self._seconds, s) for _, s in self.serving[-1:]]]
        served = [
            {"minutes": at / 60, "stage": names[number], "peers": count}
            for at, counts in changes
            for number, count in enumerate(counts)
        ]
        legend = alt.Legend(title=None, orient="right")
        tones = alt.Scale(domain=names, range=[TONES[n % 7] for n in range(stages)])
        dashes = alt.Scale(domain=names, range=[DASHES[n % 6] for n in range(stages)])
        peers = (
            alt.Chart(alt.Data(values=served))
            .mark_line(interpolate="step-after", strokeWidth=2)
            .encode(
                x=x,
                y=alt.Y("peers:Q", title="peers serving", axis=alt.Axis(tickMinStep=1)),
                color=alt.Color("stage:N", scale=tones, legend=legend),
                strokeDash=alt.StrokeDash("stage:N", scale=dashes, legend=legend),
            )
            .properties(width=_WIDTH, height=150)
        )
        steps = self.rates()
        steps.append((self._seconds, steps[-1][1]))  # the end of the last window
        rates = [{"minutes": at / 60, "rate": rate} for at, rate in steps]
        speed = (
            alt.Chart(alt.Data(values=rates))
            .mark_area(interpolate="step-after", color=TONES[0], opacity=0.5)
            .encode(x=x, y=alt.Y("rate:Q", title="micro-batches a second, committed"))
            .properties(width=_WIDTH, height=150)
        )
        return alt.vconcat(peers, speed)


def least(
    stages: Sequence[StageOverLink], rate: float, width: float, *, overlap: bool
) -> float:
    """Returns the utilization of the least busy stage, with another link and width.

    Args:
        stages: Computation and transfers of each stage.
        rate: Bytes per second of the link.
        width: Width of the model, relative to the planned model.
        overlap: Whether devices compute during transfers.
    """
    found = [stage.with_link_speed(rate).at(width) for stage in stages]
    return min(one.overlapped if overlap else one.utilization for one in found)
