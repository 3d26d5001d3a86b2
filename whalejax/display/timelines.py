"""Timeline of a predicted step, with a lane for each stage of a pipeline.

It is also written as a trace in Chrome's trace event format, which Perfetto
(https://ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from whalejax.display.page import FILLS, INK, Picture, drawing, stage_names, words
from whalejax.meshes.units import count_text
from whalejax.meshes.units import milliseconds as seconds_text
from whalejax.planner.pipeline.simulate import TimedSchedule, paced_beside
from whalejax.planner.plan_data import PlanData


_LEFT, _WIDTH, _LANE, _GAP, _TOP, _RIGHT = 70.0, 860.0, 26.0, 4.0, 6.0, 20.0
_MOST_BLOCKS = 4000
"""Maximum number of slices that are drawn as such; see ``_columns`` for more."""

_COLUMNS = 300
_SHADING = "whalejax-bubble"
_MOST_LANES = 64
_KINDS = {
    "forward": (FILLS[0], 0.0, 0.68, "at the top of a lane"),
    "backward": (FILLS[1], 0.32, 0.68, "at its foot"),
    "weight": (FILLS[2], 0.2, 0.6, "in its middle: gradients of parameters"),
}
"""Fill, top and height as fractions of a lane, and legend text of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A computation in a lane.

    Attributes:
        lane: Index of the lane.
        kind: ``"forward"``, ``"backward"``, ``"weight"``, or a term of the step time.
        start_seconds, end_seconds: Seconds since the step began.
        micro_batch, chunk: Numbers of the micro-batch and the virtual stage; None for
            a term.
    """

    lane: int
    kind: str
    start_seconds: float
    end_seconds: float
    micro_batch: int | None = None
    chunk: int | None = None

    @property
    def name(self) -> str:
        """Name as text."""
        if self.micro_batch is None:
            return self.kind
        part = f" part {self.chunk}" if self.chunk else ""
        return f"{self.kind} {self.micro_batch}{part}"


class StepTimeline(Picture):
    """Predicted timeline of one step of a plan.

    Attributes:
        lanes: Name of each lane.
        slices: Slices of the step; those of a lane are in order of time.
        end_seconds: End of the last slice.
        bubble: Fraction of the lanes' time until ``end_seconds`` in which they wait.
        step_seconds: Time of the complete step, including work after the last slice.
    """

    def __init__(self, plan: PlanData) -> None:
        self.step_seconds = plan.time.step_seconds
        self.bubble = 0.0
        if plan.stages is None:
            self.lanes: tuple[str, ...] = ("a device",)
            self.slices = tuple(_terms(plan))
        else:
            lines = paced_beside(plan)
            self.lanes = stage_names([line.table.num_stages for line in lines])
            self.slices = tuple(_slices(lines))
        self.end_seconds = max((s.end_seconds for s in self.slices), default=0.0)
        if plan.stages is not None and self.end_seconds:
            busy = sum(s.end_seconds - s.start_seconds for s in self.slices)
            self.bubble = 1.0 - busy / (self.end_seconds * len(self.lanes))
        self._staged = plan.stages is not None
        words_ = self._words(plan)
        svg = _step_svg(self, words_[0])
        rest = "".join(f"<p>{escape(line)}</p>" for line in words_[1:])
        super().__init__(
            html=f"<h3>{escape(words_[0])}</h3>{svg}{rest}",
            text="\n".join((*words_, *_lane_texts(self))),
            svg=svg,
        )

    def _words(self, plan: PlanData) -> list[str]:
        """Returns the texts above and below the drawing."""
        step = seconds_text(self.step_seconds)
        if not self._staged:
            return [
                f"Timeline: {step} a step predicted, by term",
                "The plan has no stages. The terms are in order of their size, not of "
                "time.",
            ]
        stages = plan.stages
        assert stages is not None
        number = (
            f"{count_text(len(self.lanes), 'stage')}, "
            f"{count_text(plan.num_micro_batches, 'micro-batch')}"
        )
        if plan.pipelines:
            each, length = " and ".join(map(str, plan.shares)), plan.axis_sizes["stage"]
            several = count_text(len(plan.pipelines), "pipeline")
            number = f"{several} of {length} stages, {each} micro-batches"
        found = [
            f"Timeline: {stages.schedule}, {number}: {len(self.slices):,} rows in "
            f"{seconds_text(self.end_seconds)}, bubble {self.bubble:.1%}"
        ]
        if stages.turns:
            reads = "reads saved values"
            if stages.stash == "inputs":
                reads = "first computes the forward pass again"
            found.append(
                "All stages wait for each other after each turn. The backward pass "
                f"{reads}."
            )
        once = self.step_seconds - self.end_seconds
        if once > 1e-3 * self.step_seconds:
            found.append(
                f"The last {seconds_text(once)} of the predicted step of {step} follow "
                "the schedule: work once per step, such as the update."
            )
        if len(self.slices) > _MOST_BLOCKS:
            found.append(
                "Each column shows what takes most of its time. "
                'timeline.save("trace.json") has all rows, for https://ui.perfetto.dev.'
            )
        if len(self.lanes) > _MOST_LANES:
            found.append(
                f"The first {_MOST_LANES} of {len(self.lanes)} lanes are drawn."
            )
        return found

    def trace(self) -> dict[str, Any]:
        """Returns the timeline as a Chrome trace.

        Returns:
            JSON data with a complete event for each slice and a thread for each lane.
            Times are microseconds, rounded to nanoseconds. Gaps are waits.
        """
        events: list[dict[str, Any]] = [
            _metadata_event("process_name", 0, "predicted step")
        ]
        for number, name in enumerate(self.lanes):
            events.append(_metadata_event("thread_name", number, name))
            order = {"sort_index": number}
            events.append(
                {**_metadata_event("thread_sort_index", number, ""), "args": order}
            )
        free = [0] * len(self.lanes)
        for one in self.slices:
            # Rounding errors must not make events of a lane overlap.
            begin = max(free[one.lane], round(one.start_seconds * 1e9))
            end = max(begin, round(one.end_seconds * 1e9))
            free[one.lane] = end
            known = {"micro_batch": one.micro_batch, "chunk": one.chunk}
            events.append(
                {
                    "ph": "X",
                    "name": one.name,
                    "cat": one.kind,
                    "pid": 0,
                    "tid": one.lane,
                    "ts": begin / 1000,
                    "dur": (end - begin) / 1000,
                    "args": {k: v for k, v in known.items() if v is not None},
                }
            )
        other = {"step_seconds": self.step_seconds, "bubble": self.bubble}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def _forms(self) -> dict[str, str]:
        return {**super()._forms(), ".json": json.dumps(self.trace())}


def timeline(plan: PlanData) -> StepTimeline:
    """Returns the timeline of a plan; see ``Plan.timeline``."""
    return StepTimeline(plan)


def _slices(lines: Sequence[TimedSchedule]) -> Iterator[Slice]:
    first = 0
    for line in lines:
        for one in line.rows:
            yield Slice(
                lane=first + one.row.stage,
                kind=one.row.action,
                start_seconds=one.start_seconds,
                end_seconds=one.end_seconds,
                micro_batch=one.row.micro_batch,
                chunk=one.row.chunk,
            )
        first += line.table.num_stages


def _terms(plan: PlanData) -> Iterator[Slice]:
    now = 0.0
    for name, seconds in plan.time.by_size():
        end = now + seconds
        yield Slice(lane=0, kind=name, start_seconds=now, end_seconds=end)
        now = end


def _metadata_event(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": lane, "args": {"name": name}}


def _lane_texts(line: StepTimeline) -> Iterator[str]:
    if not line._staged:
        for one in line.slices:
            yield f"{one.kind}: {seconds_text(one.end_seconds - one.start_seconds)}"
        return
    busy = [0.0] * len(line.lanes)
    for one in line.slices:
        busy[one.lane] += one.end_seconds - one.start_seconds
    for name, seconds in zip(line.lanes, busy, strict=True):
        share = seconds / line.end_seconds if line.end_seconds else 0.0
        yield f"{name}: busy {seconds_text(seconds)} ({share:.1%})"


# The drawing.


def _step_svg(line: StepTimeline, label: str) -> str:
    lanes = line.lanes[:_MOST_LANES]
    scale = _WIDTH / line.end_seconds if line.end_seconds else 0.0
    inner = [_shading()]
    for number, name in enumerate(lanes):
        y = _top(number)
        inner.append(words(_LEFT - 8, y + 17, name, anchor="end"))
        inner.append(
            f'<rect x="{_LEFT:g}" y="{y:g}" width="{_WIDTH:g}" height="{_LANE:g}" '
            'fill="none" stroke="currentColor" stroke-width=".5"/>'
        )
    drawn = [one for one in line.slices if one.lane < len(lanes)]
    if not line._staged:
        inner += _named_blocks(drawn, scale)
    elif len(drawn) <= _MOST_BLOCKS:
        inner += _blocks(drawn, scale, line.end_seconds)
    else:
        inner += _columns(drawn, line.end_seconds)
    bottom = _top(len(lanes))
    inner += _axis(line.end_seconds, scale, bottom)
    inner += _legend(line, bottom + 44)
    height = bottom + (56 if line._staged else 24 + 18 * len(drawn))
    drawn_text = "".join(inner)
    # A page may have several drawings with this pattern.
    own = f"{_SHADING}-{hashlib.sha256(drawn_text.encode()).hexdigest()[:10]}"
    drawn_text = drawn_text.replace(_SHADING, own)
    return drawing(_LEFT + _WIDTH + _RIGHT, height, label, drawn_text)


def _top(lane: int) -> float:
    return _TOP + lane * (_LANE + _GAP)


def _shading() -> str:
    """Returns a pattern of diagonal lines for waits."""
    return (
        f'<defs><pattern id="{_SHADING}" width="6" height="6" '
        'patternUnits="userSpaceOnUse"><path d="M0 6L6 0" stroke="currentColor" '
        'stroke-width=".6" opacity=".6"/></pattern></defs>'
    )


def _place(one: Slice) -> tuple[str, float, float]:
    fill, top, height, _ = _KINDS[one.kind]
    return fill, _top(one.lane) + top * _LANE, height * _LANE


def _blocks(slices: Sequence[Slice], scale: float, end_seconds: float) -> Iterator[str]:
    yield _bubbles(_gaps(slices, end_seconds), scale)
    for one in slices:
        fill, y, height = _place(one)
        x = _LEFT + one.start_seconds * scale
        width = (one.end_seconds - one.start_seconds) * scale
        yield (
            f'<rect x="{x:.2f}" y="{y:.4g}" width="{width:.2f}" height="{height:.4g}" '
            f'fill="{fill}" stroke="{INK}" stroke-width=".4"><title>{one.name}, '
            f"{seconds_text(one.end_seconds - one.start_seconds)}</title></rect>"
        )
        text = str(one.micro_batch)
        if width > 7 * len(text) + 3:
            yield words(round(x + width / 2, 1), y + 13, text, anchor="middle", ink=INK)


def _gaps(
    slices: Sequence[Slice], end_seconds: float
) -> Iterator[tuple[int, float, float]]:
    """Yields lane, start and end of each gap between slices, in seconds."""
    by_lane: dict[int, list[Slice]] = {}
    for one in slices:
        by_lane.setdefault(one.lane, []).append(one)
    for lane, found in by_lane.items():
        begins = [one.start_seconds for one in found] + [end_seconds]
        ends = [0.0] + [one.end_seconds for one in found]
        for end, begin in zip(ends, begins, strict=True):
            if begin > end:
                yield lane, end, begin


def _bubbles(gaps: Iterable[tuple[int, float, float]], scale: float) -> str:
    boxes = []
    for lane, begin, end in gaps:
        width = (end - begin) * scale
        if width > 0.05:
            corner = f"M{_LEFT + begin * scale:.1f} {_top(lane):g}h{width:.1f}"
            boxes.append(f"{corner}v{_LANE:g}h-{width:.1f}z")
    path = f'<path fill="url(#{_SHADING})" d="{"".join(boxes)}">'
    return f"{path}<title>bubble</title></path>" if boxes else ""


def _columns(slices: Sequence[Slice], end_seconds: float) -> Iterator[str]:
    """Draws a path for each kind, through the columns in which it takes most time."""
    paths: dict[str, list[str]] = {}
    gaps: list[tuple[int, float, float]] = []
    step = _WIDTH / _COLUMNS
    for lane, found in groupby(sorted(slices, key=lambda s: s.lane), lambda s: s.lane):
        mostly = _mostly([*found], end_seconds)
        for kind, columns in groupby(range(_COLUMNS), key=lambda c: mostly[c]):
            run = [*columns]
            if not kind:
                gaps.append((lane, run[0] * step, (run[-1] + 1) * step))
            else:
                _, top, height, _ = _KINDS[kind]
                x, y = _LEFT + run[0] * step, _top(lane) + top * _LANE
                width = len(run) * step
                corner = f"M{x:.1f} {y:.1f}h{width:.1f}"
                paths.setdefault(kind, []).append(
                    f"{corner}v{height * _LANE:.1f}h-{width:.1f}z"
                )
    yield _bubbles(gaps, 1.0)
    for kind, parts in paths.items():
        yield f'<path fill="{_KINDS[kind][0]}" d="{"".join(parts)}"/>'


def _mostly(slices: Sequence[Slice], end_seconds: float) -> list[str]:
    """Returns the kind that takes most time in each column of a lane; "" for waits."""
    width = end_seconds / _COLUMNS
    parts: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
    for one in slices:
        first = min(_COLUMNS - 1, int(one.start_seconds / width))
        last = min(_COLUMNS - 1, int(one.end_seconds / width))
        for column in range(first, last + 1):
            begin = max(one.start_seconds, column * width)
            end = min(one.end_seconds, (column + 1) * width)
            held = parts[column]
            held[one.kind] = held.get(one.kind, 0.0) + max(0.0, end - begin)
    found = []
    for held in parts:
        idle = width - sum(held.values())
        kind = max(held, key=lambda k: held[k], default="")
        found.append(kind if kind and held[kind] >= idle else "")
    return found


def _named_blocks(slices: Sequence[Slice], scale: float) -> Iterator[str]:
    """Draws terms on one lane with numbers, and a legend of the numbers below."""
    for number, one in enumerate(slices):
        x = _LEFT + one.start_seconds * scale
        width = (one.end_seconds - one.start_seconds) * scale
        fill, text = FILLS[number % len(FILLS)], f"{number + 1}"
        size = f'width="{width:.2f}" height="{_LANE:g}"'
        yield (
            f'<rect x="{x:.2f}" y="{_TOP:g}" {size} fill="{fill}" stroke="{INK}" '
            f'stroke-width=".4"><title>{escape(one.kind)}</title></rect>'
        )
        if width > 10:
            yield words(
                round(x + width / 2, 1), _TOP + 17, text, anchor="middle", ink=INK
            )
        y = _top(1) + 36 + 18 * number
        part = seconds_text(one.end_seconds - one.start_seconds)
        yield words(_LEFT, y, f"{text}  {one.kind}  {part}")


def _axis(end_seconds: float, scale: float, y: float) -> Iterator[str]:
    for fifth in range(6):
        seconds = end_seconds * fifth / 5
        x = _LEFT + seconds * scale
        anchor = ("start", "middle", "end")[(fifth > 0) + (fifth == 5)]
        yield f'<path d="M{x:.1f} {y:g}v4" stroke="currentColor"/>'
        yield words(round(x, 1), y + 16, seconds_text(seconds), anchor=anchor)


def _legend(line: StepTimeline, y: float) -> Iterator[str]:
    if not line._staged:
        return
    x = _LEFT
    kinds = dict.fromkeys(one.kind for one in line.slices)
    for kind in (k for k in _KINDS if k in kinds):
        fill, _, _, where = _KINDS[kind]
        yield f'<rect x="{x:g}" y="{y - 9:g}" width="14" height="10" fill="{fill}"/>'
        text = f"{kind}, {where}"
        yield words(x + 19, y, text)
        x += 40 + 6.2 * len(text)
    yield (
        f'<rect x="{x:g}" y="{y - 9:g}" width="14" height="10" '
        f'fill="url(#{_SHADING})" stroke="currentColor" stroke-width=".5"/>'
    )
    yield words(x + 19, y, "bubble")
