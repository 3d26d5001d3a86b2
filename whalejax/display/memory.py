"""Chart of memory per device by term, with a bar for each stage."""

from __future__ import annotations

from html import escape

from whalejax.display.page import (
    FILLS,
    INK,
    Picture,
    drawing,
    stage_names,
    table,
    words,
)
from whalejax.display.page import cell as td
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.plan_data import PlanData


_LEFT, _WIDTH, _BAR, _GAP, _RIGHT = 90.0, 640.0, 26.0, 12.0, 130.0
_LETTERS = "abcdefghij"
_MOST_BARS = 64
_LITTLE = 0.05
"""Fraction of a device's memory below which the largest bar sets the scale."""


class MemoryChart(Picture):
    """Predicted memory per device, by term.

    Attributes:
        bars: Terms and memory of the device, by stage; "a device" without stages.
    """

    def __init__(self, plan: PlanData) -> None:
        self.bars = _bars(plan)
        svg = _memory_svg(self.bars)
        super().__init__(
            html=f"<h3>{escape(_title(self.bars))}</h3>{svg}{_legend(self.bars)}",
            text=_text(self.bars),
            svg=svg,
        )


Bars = dict[str, tuple[MemoryTerms, int]]


def memory_chart(plan: PlanData) -> MemoryChart:
    """Returns the chart of a plan; see ``Plan.memory_chart``."""
    return MemoryChart(plan)


def _bars(plan: PlanData) -> Bars:
    each = [one.stage_plans for one in plan.pipelines or (plan,)]
    terms = [one.memory for apart in each for one in apart]
    if plan.pipelines:
        terms = [one.with_exchange_buffer for one in terms]
    if terms:
        rooms = [one.cluster.memory_bytes for apart in each for one in apart]
        names = stage_names([len(apart) for apart in each])
        return dict(zip(names, zip(terms, rooms, strict=True), strict=True))
    return {"a device": (plan.memory, plan.cluster.memory_bytes)}


def _title(bars: Bars) -> str:
    name, (memory, room) = max(bars.items(), key=_share)
    where = f", fullest on {name}" if len(bars) > 1 else ""
    return (
        f"Memory: {gigabytes(memory.total_bytes)} of {gigabytes(room)} "
        f"per device predicted{where}"
    )


def _share(bar: tuple[str, tuple[MemoryTerms, int]]) -> float:
    _, (memory, room) = bar
    return memory.total_bytes / max(1, room)


def _whole(bars: Bars) -> int:
    """Returns the bytes at full width: the largest memory of a device.

    If the largest bar exceeds this or is below ``_LITTLE`` of it, returns that bar.
    """
    most = max(memory.total_bytes for memory, _ in bars.values())
    room = max(room for _, room in bars.values())
    return most if most < room * _LITTLE else max(most, room)


def _names(bars: Bars) -> list[str]:
    names = next(iter(bars.values()))[0].by_name()
    return [n for n in names if any(m.by_name()[n] for m, _ in bars.values())]


def _memory_svg(bars: Bars) -> str:
    shown = [*bars.items()][:_MOST_BARS]
    scale = _WIDTH / max(1, _whole(bars))
    names, inner = _names(bars), []
    for number, (name, (memory, room)) in enumerate(shown):
        y = 4 + number * (_BAR + _GAP)
        inner.append(words(_LEFT - 8, y + 17, name, anchor="end"))
        x = _LEFT
        for index, term in enumerate(names):
            nbytes = memory.by_name()[term]
            width = nbytes * scale
            if nbytes:
                inner.append(
                    f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_BAR:g}"'
                    f' fill="{FILLS[index]}" stroke="currentColor" stroke-width=".5">'
                    f"<title>{term} {gigabytes(nbytes)}</title></rect>"
                )
                if width > 12:
                    middle = x + width / 2
                    letter = _LETTERS[index]
                    inner.append(
                        words(middle, y + 17, letter, anchor="middle", ink=INK)
                    )
            x += width
        total = f"{gigabytes(memory.total_bytes)} of {gigabytes(room)}"
        inner.append(words(_LEFT + _WIDTH + 8, y + 17, total))
        end = _LEFT + room * scale
        if end > _LEFT + _WIDTH + 1:
            continue
        inner.append(
            f'<path d="M{end:.2f} {y - 3:g}v{_BAR + 6:g}" stroke="currentColor" '
            'stroke-width="2"/>'
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{room * scale:.2f}" '
            f'height="{_BAR:g}" fill="none" stroke="currentColor" stroke-width=".5"/>'
        )
    height = 4 + len(shown) * (_BAR + _GAP)
    return drawing(_LEFT + _WIDTH + _RIGHT, height, _title(bars), "".join(inner))


def _legend(bars: Bars) -> str:
    names = _names(bars)
    rows = []
    for index, term in enumerate(names):
        sizes = [memory.by_name()[term] for memory, _ in bars.values()]
        swatch = (
            '<td><svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">'
            f'<rect x=".5" y=".5" width="17" height="17" fill="{FILLS[index]}" '
            f'stroke="currentColor"/>'
            f"{words(9, 13, _LETTERS[index], anchor='middle', ink=INK)}</svg></td>"
        )
        low, high = min(sizes), max(sizes)
        span = (
            gigabytes(high) if low == high else f"{gigabytes(low)} – {gigabytes(high)}"
        )
        rows.append(swatch + td(term) + td(span, number=True))
    found = table((), rows)
    room = max(room for _, room in bars.values())
    if _whole(bars) < room:
        found += (
            f"<p>The plan uses little of {gigabytes(room)}; the full width is "
            f"{gigabytes(_whole(bars))}.</p>"
        )
    if len(bars) > _MOST_BARS:
        found += f"<p>The first {_MOST_BARS} of {len(bars)} stages are drawn.</p>"
    return found


def _text(bars: Bars) -> str:
    lines = [_title(bars)]
    for name, (memory, _) in bars.items():
        terms = memory.by_name()
        sizes = ", ".join(f"{n} {gigabytes(terms[n])}" for n in terms if terms[n])
        lines.append(f"{name}: {gigabytes(memory.total_bytes)} ({sizes})")
    return "\n".join(lines)
