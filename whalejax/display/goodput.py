"""Useful time over wall time by each way to go on after failures, as bars."""

from __future__ import annotations

from html import escape

from whalejax.display.page import FILLS, Picture, drawing, table, words
from whalejax.display.page import cell as td


_LEFT, _WIDTH, _BAR, _GAP, _RIGHT = 150.0, 500.0, 22.0, 10.0, 70.0


class GoodputChart(Picture):
    """Goodput as it was computed, and of a trace where one was played through.

    Attributes:
        bars: each way to go on, and its goodput.
    """

    def __init__(self, text: str, bars: dict[str, float]) -> None:
        """Draws the chart.

        Args:
            text: Text of the estimate; its first line is the title.
            bars: each way to go on, and its goodput from 0 to 1.
        """
        self.bars = bars
        title, *lines = text.splitlines()
        svg = _goodput_svg(self.bars, title)
        rows = [td(line) for line in lines if not line.startswith("goodput")]
        super().__init__(
            html=f"<h3>Goodput: {escape(title)}</h3>{svg}{table((), rows)}",
            text=text,
            svg=svg,
        )


def _goodput_svg(bars: dict[str, float], title: str) -> str:
    inner = []
    for number, (name, value) in enumerate(bars.items()):
        y = 4 + number * (_BAR + _GAP)
        fill = FILLS[number % 3]
        inner += [
            words(_LEFT - 8, y + 15, name, anchor="end"),
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{value * _WIDTH:.2f}" '
            f'height="{_BAR:g}" fill="{fill}" stroke="currentColor" stroke-width=".5">'
            f"<title>{escape(name)} {value:.4f}</title></rect>",
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{_WIDTH:g}" height="{_BAR:g}" '
            'fill="none" stroke="currentColor" stroke-width=".5"/>',
            words(_LEFT + _WIDTH + 8, y + 15, f"{value:.4f}"),
        ]
    height = 4 + len(bars) * (_BAR + _GAP)
    return drawing(_LEFT + _WIDTH + _RIGHT, height, title, "".join(inner))
