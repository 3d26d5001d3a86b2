"""Bar chart of the goodput of each way to recover from failures."""

from __future__ import annotations

from html import escape
from typing import Any

from whalejax.display.charts import LACKING, TONES, svg_of
from whalejax.display.page import Picture, cell, table


class GoodputChart(Picture):
    """Estimated goodput by way of recovery.

    Attributes:
        bars: Goodput by name, from 0 to 1; also that of a simulated trace, if any.
    """

    def __init__(self, text: str, bars: dict[str, float]) -> None:
        """Draws the chart.

        Args:
            text: Text of the estimate; its first line is the title.
            bars: Goodput by name, from 0 to 1.
        """
        self.bars = bars
        title, *lines = text.splitlines()
        svg = svg_of(self._draw)
        rows = [cell(line) for line in lines if not line.startswith("goodput")]
        super().__init__(
            html=f"<h3>Goodput: {escape(title)}</h3>{svg or LACKING}{table((), rows)}",
            text=text,
            svg=svg,
        )

    def _draw(self, alt: Any) -> Any:
        values = [
            {"way": name, "goodput": value, "shown": f"{value:.4f}"}
            for name, value in self.bars.items()
        ]
        base = alt.Chart(alt.Data(values=values)).encode(
            x=alt.X(
                "goodput:Q",
                title="goodput (useful time over wall time)",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", tickCount=5),
            ),
            y=alt.Y("way:N", title=None, sort=None, axis=alt.Axis(labelLimit=0)),
        )
        bars = base.mark_bar(color=TONES[0])
        shown = base.mark_text(align="right", dx=-6, color="#fff", fontWeight="bold")
        shown = shown.encode(text="shown:N")
        return alt.layer(bars, shown).properties(
            width=480, height=34 * len(self.bars) + 10
        )
