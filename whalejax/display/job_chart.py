"""Gantt chart of the devices that jobs held, as measured and as predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from whalejax.display.page import FILLS, Picture, drawing, list_html, words
from whalejax.meshes.units import count_text


_LEFT, _WIDTH, _RIGHT, _TOP = 110.0, 820.0, 20.0, 12.0
_LANE, _BAR, _THIN, _GAP = 28.0, 17.0, 5.0, 8.0
_PANEL = 70.0
_MOST_LANES = 40
_PREDICTED = FILLS[7]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevices:
    """Period in which a job's number of devices did not change.

    Attributes:
        start_seconds, end_seconds: Seconds since the first job was added.
        devices: Number of devices, 1 or more.
    """

    start_seconds: float
    end_seconds: float
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLane:
    """One job of the chart.

    Attributes:
        name: Name of the job.
        arrival_seconds: Time at which the job was added, since the first job.
        end_seconds: Time of the job's end; None while it runs.
        outcome: Outcome, such as ``"complete"``; empty while the job runs.
        held: Periods with devices, in order of time.
        predicted: Simulated periods; empty if the jobs were not simulated.
    """

    name: str
    arrival_seconds: float
    end_seconds: float | None
    outcome: str
    held: tuple[HeldDevices, ...]
    predicted: tuple[HeldDevices, ...] = ()


class JobChart(Picture):
    """Gantt chart of jobs, with a lane for each job.

    The upper bar of a lane shows the devices that the job held, the thin bar below it
    those of the simulation. A panel shows the number of held devices over time.

    Attributes:
        lanes: Jobs in the order in which they were added.
        devices: Number of devices of the cluster.
        seconds: Time from the first arrival to the last end, or to now.
        utilisation: Fraction of device time that jobs held.
        predicted_utilisation: Fraction in the simulation; None without a simulation.
    """

    def __init__(self, lanes: Sequence[JobLane], devices: int, seconds: float) -> None:
        """Draws the chart.

        Args:
            lanes: Jobs in the order in which they were added.
            devices: Number of devices of the cluster.
            seconds: Time from the first arrival to the last end, or to now.
        """
        self.lanes, self.devices, self.seconds = tuple(lanes), devices, seconds
        held = [one for lane in self.lanes for one in lane.held]
        self.utilisation = _utilisation(held, devices, seconds)
        predicted = [one for lane in self.lanes for one in lane.predicted]
        end = max((one.end_seconds for one in predicted), default=0.0)
        self.predicted_utilisation = (
            _utilisation(predicted, devices, end) if predicted else None
        )
        title, *lines = self._texts()
        svg = _chart_svg(self, title)
        super().__init__(
            html=f"<h3>{escape(title)}</h3>{svg}{list_html(lines)}",
            text="\n".join((title, *lines)),
            svg=svg,
        )

    def _texts(self) -> Iterator[str]:
        expected = self.predicted_utilisation
        more = "" if expected is None else f" (predicted {expected:.0%})"
        yield (
            f"{count_text(len(self.lanes), 'job')} on "
            f"{count_text(self.devices, 'device')} in {self.seconds:.0f} s; devices "
            f"held {self.utilisation:.0%} of the time{more}"
        )
        for lane in self.lanes:
            numbers = " → ".join(str(one.devices) for one in lane.held) or "none"
            end = "goes on"
            if lane.end_seconds is not None:
                end = f"{lane.outcome} at {lane.end_seconds:.0f} s"
            if lane.predicted:
                end += f", predicted {lane.predicted[-1].end_seconds:.0f} s"
            yield (
                f"{lane.name}: added at {lane.arrival_seconds:.0f} s, devices "
                f"{numbers}, {end}"
            )


def _utilisation(held: Sequence[HeldDevices], devices: int, seconds: float) -> float:
    used = sum((one.end_seconds - one.start_seconds) * one.devices for one in held)
    return used / max(devices * seconds, 1e-9)


def _chart_svg(chart: JobChart, title: str) -> str:
    shown = chart.lanes[:_MOST_LANES]
    ends = [o.end_seconds for lane in shown for o in (*lane.held, *lane.predicted)]
    span = max([chart.seconds, *ends, 1e-9])
    inner: list[str] = []
    for number, lane in enumerate(shown):
        inner += _lane(lane, _TOP + number * (_LANE + _GAP), number, span)
    under = _TOP + len(shown) * (_LANE + _GAP)
    inner += _panel(chart, under, span)
    base = under + _PANEL
    inner.append(words(_LEFT, base + 16, "0 s"))
    inner.append(words(_LEFT + _WIDTH, base + 16, f"{span:.0f} s", anchor="end"))
    inner.append(_rectangle(_LEFT, base + 26, 12, 12, FILLS[0], "measured"))
    inner.append(words(_LEFT + 18, base + 36, "measured (number of devices)"))
    inner.append(_rectangle(_LEFT + 260, base + 30, 12, _THIN, _PREDICTED, "predicted"))
    inner.append(words(_LEFT + 278, base + 36, "predicted"))
    if len(chart.lanes) > len(shown):
        more = count_text(len(chart.lanes) - len(shown), "more job")
        inner.append(words(_LEFT + 420, base + 36, f"{more} not drawn"))
    return drawing(_LEFT + _WIDTH + _RIGHT, base + 46, title, "".join(inner))


def _lane(lane: JobLane, y: float, number: int, span: float) -> Iterator[str]:
    name = lane.name if len(lane.name) <= 15 else f"{lane.name[:14]}…"
    yield words(_LEFT - 8, y + _BAR * 0.75, name, anchor="end")
    x = _x(lane.arrival_seconds, span)
    yield (
        f'<line x1="{x:.2f}" y1="{y:g}" x2="{x:.2f}" y2="{y + _LANE:g}" '
        'stroke="currentColor" stroke-dasharray="2 2">'
        f"<title>{escape(lane.name)} is added</title></line>"
    )
    fill = FILLS[number % 7]
    for held, top, height, color in (
        (lane.held, y, _BAR, fill),
        (lane.predicted, y + _BAR + 3, _THIN, _PREDICTED),
    ):
        for one in held:
            x, until = _x(one.start_seconds, span), _x(one.end_seconds, span)
            text = (
                f"{lane.name}: {count_text(one.devices, 'device')}, "
                f"{one.start_seconds:.0f} to {one.end_seconds:.0f} s"
            )
            yield _rectangle(x, top, until - x, height, color, text)
            if height == _BAR and until - x > 14:
                middle = (x + until) / 2
                count = str(one.devices)
                yield words(middle, top + 13, count, anchor="middle", ink="#222")


def _panel(chart: JobChart, y: float, span: float) -> Iterator[str]:
    """Draws the number of held devices over time, under the lanes."""
    height = _PANEL - 22
    yield words(_LEFT - 8, y + 10, f"{chart.devices} devices", anchor="end")
    yield words(_LEFT - 8, y + height, "0 held", anchor="end")
    yield (
        f'<rect x="{_LEFT:g}" y="{y:g}" width="{_WIDTH:g}" height="{height:g}" '
        'fill="none" stroke="currentColor" stroke-width=".5"/>'
    )
    for predicted in (False, True):
        held = [
            one
            for lane in chart.lanes
            for one in (lane.predicted if predicted else lane.held)
        ]
        if not held:
            continue
        corners, before = [f"{_LEFT:.2f},{y + height:.2f}"], 0
        for at, count in _held_over_time(held):
            x, top = _x(at, span), y + height * (1 - before / chart.devices)
            corners.append(f"{x:.2f},{top:.2f}")
            before = count
            corners.append(f"{x:.2f},{y + height * (1 - before / chart.devices):.2f}")
        look = (
            'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
            if predicted
            else f'fill="{FILLS[0]}" fill-opacity=".6" stroke="none"'
        )
        kind = "predicted" if predicted else "measured"
        yield (
            f'<polyline points="{" ".join(corners)}" {look}>'
            f"<title>devices held, {kind}</title></polyline>"
        )


def _held_over_time(held: Iterable[HeldDevices]) -> list[tuple[float, int]]:
    """Returns the number of held devices after each change, in order of time.

    >>> first = HeldDevices(start_seconds=0.0, end_seconds=4.0, devices=2)
    >>> second = HeldDevices(start_seconds=1.0, end_seconds=4.0, devices=1)
    >>> _held_over_time([first, second])
    [(0.0, 2), (1.0, 3), (4.0, 0)]
    """
    changes: dict[float, int] = {}
    for one in held:
        changes[one.start_seconds] = changes.get(one.start_seconds, 0) + one.devices
        changes[one.end_seconds] = changes.get(one.end_seconds, 0) - one.devices
    total, steps = 0, []
    for at in sorted(changes):
        total += changes[at]
        steps.append((at, total))
    return steps


def _x(at: float, span: float) -> float:
    return _LEFT + _WIDTH * min(max(at / span, 0.0), 1.0)


def _rectangle(
    x: float, y: float, width: float, height: float, fill: str, text: str
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" '
        f'height="{height:g}" fill="{fill}" stroke="currentColor" stroke-width=".3">'
        f"<title>{escape(text)}</title></rect>"
    )
