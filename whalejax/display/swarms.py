"""Swarms as lines: the square-cube law over links, and simulated runs in time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from whalejax.display.page import FILLS, Picture, drawing, list_html, words
from whalejax.planner.pipeline.square_cube import StageOverLink


WIDTHS = (1, 2, 4, 8)
"""Widths of the model that are drawn, relative to the plan's."""

_LEFT, _TOP, _WIDTH, _HEIGHT, _RIGHT, _BOTTOM = 50.0, 10.0, 520.0, 220.0, 130.0, 40.0
_POINTS = 60
_DECADES = {
    1e6: "1 Mb/s",
    1e7: "10",
    1e8: "100",
    1e9: "1 Gb/s",
    1e10: "10",
    1e11: "100",
}
_FRAME = (
    f'<rect x="{_LEFT:g}" y="{_TOP:g}" width="{_WIDTH:g}" height="{_HEIGHT:g}" '
    'fill="none" stroke="currentColor" stroke-width=".5"/>'
)


class SquareCubeChart(Picture):
    """Part of the time that the stage which waits most computes, by its link.

    Attributes:
        lines: Pairs of (bytes per second, utilization) by width relative to the plan's,
            with computing and sending at once.
        apart: the same at the plan's own width, where a device waits for its link.
    """

    def __init__(self, text: str, stages: Sequence[StageOverLink]) -> None:
        """Draws the chart.

        Args:
            text: Text of the table.
            stages: each stage over some link.
        """
        rates = [10 ** (6 + 5 * n / _POINTS) / 8 for n in range(_POINTS + 1)]
        self.lines = {
            width: [(rate, least(stages, rate, width, overlap=True)) for rate in rates]
            for width in WIDTHS
        }
        self.apart = [(rate, least(stages, rate, 1, overlap=False)) for rate in rates]
        title, *rest = text.splitlines()
        svg = self._chart_svg(title)
        table = escape("\n".join(rest))
        super().__init__(
            html=f"<h3>Square-cube law: {escape(title)}</h3>{svg}<pre>{table}</pre>",
            text=text,
            svg=svg,
        )

    def _chart_svg(self, title: str) -> str:
        inner = [_FRAME]
        for part in (0.0, 0.5, 1.0):
            y = _TOP + (1 - part) * _HEIGHT
            inner.append(words(_LEFT - 6, y + 4, f"{part:.0%}", anchor="end"))
        for bits, name in _DECADES.items():
            x = _x(bits / 8)
            inner.append(words(x, _TOP + _HEIGHT + 16, name, anchor="middle"))
        middle = _LEFT + _WIDTH / 2
        under = _TOP + _HEIGHT + 34
        inner.append(words(middle, under, "link of a peer", anchor="middle"))
        for number, (width, points) in enumerate(self.lines.items()):
            inner += _curve(points, FILLS[number], f"width × {width}", number)
        dashed = 'stroke-dasharray="5 4"'
        count = len(self.lines)
        inner += _curve(self.apart, "currentColor", "× 1, no overlap", count, dashed)
        return drawing(
            _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM, title, "".join(inner)
        )


class SimulatedChart(Picture):
    """Micro-batches of committed steps over time.

    Attributes:
        points: (seconds, micro-batches done by then) of every commit.
        empty_seconds: during which some stage had nobody.
    """

    def __init__(
        self,
        text: str,
        seconds: float,
        points: Sequence[tuple[float, int]],
        empty_seconds: float,
    ) -> None:
        """Draws the chart.

        Args:
            text: Text of the run; its first line is the title.
            seconds: simulated.
            points: Time and number of every commit.
            empty_seconds: during which some stage had nobody.
        """
        self.points = tuple(points)
        self.empty_seconds = empty_seconds
        title = text.partition("\n")[0]
        most = max((done for _, done in points), default=0) or 1
        across = [
            (
                _LEFT + _WIDTH * at / (seconds or 1.0),
                _TOP + _HEIGHT * (1 - done / most),
            )
            for at, done in ((0.0, 0), *points)
        ]
        # A step's micro-batches count when it is committed.
        stairs = [
            corner
            for before, after in itertools.pairwise(across)
            for corner in (before, (after[0], before[1]), after)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stairs)
        under = _TOP + _HEIGHT
        inner = [
            _FRAME,
            f'<polyline points="{path}" fill="none" stroke="{FILLS[0]}" '
            f'stroke-width="2"><title>{escape(title)}</title></polyline>',
            words(_LEFT - 6, _TOP + 8, f"{most:,}", anchor="end"),
            words(_LEFT - 6, under + 4, "0", anchor="end"),
            words(_LEFT + _WIDTH, under + 16, f"{seconds:,.0f} s", anchor="middle"),
            words(
                _LEFT + _WIDTH / 2, under + 34, "micro-batches by time", anchor="middle"
            ),
        ]
        height = _TOP + _HEIGHT + _BOTTOM
        svg = drawing(_LEFT + _WIDTH + _RIGHT, height, title, "".join(inner))
        lines = list_html(text.splitlines()[1:])
        super().__init__(
            html=f"<h3>{escape(title)}</h3>{svg}{lines}", text=text, svg=svg
        )


def least(
    stages: Sequence[StageOverLink], rate: float, width: float, *, overlap: bool
) -> float:
    """Utilization of the stage that waits most, over another link and at a width.

    Args:
        stages: over any link.
        rate: bytes per second of the link.
        width: Width of the model, relative to its own.
        overlap: devices compute while their links work.
    """
    found = [stage.with_link_speed(rate).at(width) for stage in stages]
    return min(one.overlapped if overlap else one.utilization for one in found)


def _x(rate: float) -> float:
    return _LEFT + _WIDTH * (math.log10(8 * rate) - 6) / 5


def _curve(
    points: Sequence[tuple[float, float]],
    colour: str,
    name: str,
    number: int,
    more: str = "",
) -> list[str]:
    """A line, and its name on the right."""
    path = " ".join(f"{_x(x):.1f},{_TOP + (1 - y) * _HEIGHT:.1f}" for x, y in points)
    y = _TOP + 14 + 18 * number
    left = _LEFT + _WIDTH + 10
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f"{more}><title>{escape(name)}</title></polyline>",
        f'<line x1="{left:g}" y1="{y - 4:g}" x2="{left + 16:g}" y2="{y - 4:g}" '
        f'stroke="{colour}" stroke-width="3" {more}/>',
        words(left + 22, y, name),
    ]
