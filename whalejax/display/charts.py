"""Style of altair charts, and their conversion to static drawings.

Text and lines are grey, so that they are readable on light and dark pages. Without the
extra ``whalejax[notebook]``, a picture has its text and tables, and a note that names
the extra.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from whalejax.meshes.errors import WhaleError


TONE = "#808080"
"""Grey of text and lines, readable on white and on black (4:1 and 5:1)."""

TONES = ["#3b82d6", "#d9731a", "#3f9142", "#c03a6b", "#8a63c9", "#18938a", "#a07b12"]
"""Colours of series; each series has a shape or a dash pattern too."""

DASHES = [[1, 0], [8, 3], [3, 3], [10, 3, 2, 3], [2, 2], [6, 2, 2, 2]]
"""Dash patterns of lines, in the order of ``COLOURS``."""

LACKING = (
    '<p>The chart needs altair: pip install "whalejax[notebook]". The text has the '
    "same numbers.</p>"
)


def needed(
    name: str,
    what: str = "charts",
    instead: str = "print(found) shows the same as a table",
) -> Any:
    """Imports and returns a module of the extra ``whalejax[notebook]``.

    Args:
        name: Name of the module.
        what: Displays that need the module, for the error's text.
        instead: Alternative without the module, for the error's text.

    Raises:
        WhaleError: The module is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise WhaleError(
            f"{what} need {name}, which is not installed. Install it with "
            'pip install "whalejax[notebook]", or from a checkout pip install '
            f'".[notebook]"; {instead}'
        ) from None


def styled(chart: Any) -> Any:
    """Returns a chart with colours for light and dark pages.

    Args:
        chart: Altair chart.
    """
    middle = dict.fromkeys(
        ("labelColor", "titleColor", "domainColor", "tickColor"), TONE
    )
    return (
        chart.configure_view(stroke=TONE)
        .configure_axis(
            **middle,
            gridColor=TONE,
            gridOpacity=0.25,
            labelFontSize=12,
            titleFontSize=12,
        )
        .configure_legend(
            labelColor=TONE,
            titleColor=TONE,
            labelFontSize=12,
            titleFontSize=12,
            labelLimit=0,
        )
        .configure_title(color=TONE, subtitleColor=TONE, anchor="start", fontSize=13)
        .properties(background="transparent")
    )


def svg_of(draw: Callable[[Any], Any]) -> str:
    """Returns a chart as SVG; empty if the extra is not installed.

    Args:
        draw: Function from the module ``altair`` to the chart.
    """
    try:
        alt, converter = needed("altair"), needed("vl_convert")
    except WhaleError:
        return ""
    svg: str = converter.vegalite_to_svg(styled(draw(alt)).to_dict())
    svg = re.sub(r"^.*?<svg ", "<svg ", svg, count=1, flags=re.DOTALL)
    return svg.replace('class="marks"', 'class="drawn"', 1)


def unit_of(
    values: Sequence[float], units: Sequence[tuple[str, float]]
) -> tuple[str, float]:
    """Returns the first unit in which the largest value is at least 1, and its factor.

    >>> unit_of([0.002, 0.5], (("s", 1.0), ("ms", 1e3)))
    ('ms', 1000.0)
    """
    most = max(values, default=0.0)
    return next(((u, f) for u, f in units if most * f >= 1), units[-1])
