"""Timeline of an elastic run: its members, generations, steps and repeated steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from whalejax.display.page import FILLS, INK, Picture, drawing, list_html, words
from whalejax.journals.status import (
    STATE_OF,
    Events,
    RunJournal,
    RunStatus,
    journals_of,
    run_status,
)
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text


_LEFT, _WIDTH, _LANE, _GAP, _TOP, _RIGHT = 70.0, 860.0, 20.0, 4.0, 20.0, 20.0
_MOST_LANES = 60
_LONG_STEP = 3.0
"""Multiple of the median step time above which a step is drawn as a gap."""

_FILL_OF = {
    "starting": FILLS[7],
    "compiling": FILLS[3],
    "standing by": FILLS[6],
    "leaving": FILLS[4],
    "ending": FILLS[8],
}
_TRAINING = FILLS[0], FILLS[2]
"""Fills of even and odd generations."""

_STEPS, _AGAIN = FILLS[9], FILLS[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpan:
    """Period in which a member had one state.

    Attributes:
        name: Name of the member.
        state: State, as ``whalejax status`` names it.
        start_seconds, end_seconds: Seconds since the run began.
        generation: Generation in which the member trained; None if it did not train.
    """

    name: str
    state: str
    start_seconds: float
    end_seconds: float
    generation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Period of a step, from the commit of the previous step to its own.

    Attributes:
        step: Number of the step.
        generation: Generation that committed it.
        start_seconds, end_seconds: Seconds since the run began.
        again: Whether the step repeats one whose result was lost.
        waited: Whether the step took more than three times the median, because a
            generation was formed or a member was waited for.
    """

    step: int
    generation: int
    start_seconds: float
    end_seconds: float
    again: bool
    waited: bool


class RunTimeline(Picture):
    """Timeline of an elastic run, from its journal.

    Attributes:
        status: Status of the run, as ``whalejax status`` shows it.
        spans: Periods of each member, by member and time.
        steps: Committed steps, in order.
        steps_again: Number of repeated steps.
        waited_seconds: Sum over the steps with ``waited`` of their seconds above the
            median.
    """

    def __init__(self, journal: RunJournal) -> None:
        """Draws the timeline of a journal.

        Args:
            journal: Journal of the run.
        """
        self.status = run_status(journal)
        began = journal.events[0]["time"]
        self.spans = tuple(_spans(journal.events, began + self.status.seconds))
        median = self.status.step_seconds or 0.0
        self.steps = tuple(_steps(journal.commits, began, median))
        self.steps_again = sum(step.again for step in self.steps)
        self.waited_seconds = sum(
            step.end_seconds - step.start_seconds - median
            for step in self.steps
            if step.waited
        )
        title, *lines = self._words()
        svg = _timeline_svg(self, title)
        super().__init__(
            html=f"<h3>{escape(title)}</h3>{svg}{list_html(lines)}",
            text="\n".join((title, *lines)),
            svg=svg,
        )

    def _words(self) -> list[str]:
        run = self.status
        goodput = "" if run.goodput is None else f", goodput {run.goodput:.3f}"
        found = [
            f"Elastic run: {run.state}, {run.seconds:g} s, {run.steps_done} steps, "
            f"{count_text(len(run.generations), 'generation')}, "
            f"{len(run.lost)} lost or failed{goodput}",
            f"{count_text(self.steps_again, 'step')} repeated; "
            f"{self.waited_seconds:.1f} s of waits between steps",
        ]
        for one in run.generations:
            step = max(one.step, 0)
            names = ", ".join(one.members)
            text = f"generation {one.number} at {one.seconds:g} s, step {step}: {names}"
            mine = (s for s in self.steps if s.generation == one.number)
            first = next(mine, None)
            if first is not None:
                after = max(first.end_seconds - one.seconds, 0.0)
                text += f"; its first step came {after:.1f} s later"
            found.append(text)
        found += [f"{m.name} {m.state} at {m.seconds:g} s: {m.why}" for m in run.lost]
        return found


@names_arguments("wh.run_timeline")
def run_timeline(
    folder: str | os.PathLike[str], *, run: int | None = None
) -> RunTimeline:
    """Returns an elastic run's timeline: a drawing in a notebook, else text.

    It shows the state of each member over time, the generations, and the steps. Steps
    that were repeated after their result was lost, and waits, are marked.

    Args:
        folder: Folder of the run's checkpoints (``--save``), or of the logs of
            ``whalejax launch``.
        run: Number of the run in the folder, from 1; default: the newest run.

    Returns:
        The timeline, which ``RunTimeline.save`` writes to a file.

    Raises:
        WhaleError: An argument is invalid, or the run does not exist.
    """
    problems = Arguments("wh.run_timeline")
    problems.path("folder", folder, "the folder of a run")
    problems.whole("run", run, least=1, none=True)
    problems.raise_if_any()
    journals = journals_of(Path(folder))
    if run is not None and run > len(journals):
        raise WhaleError(
            f"wh.run_timeline: run is {run}; expected 1 to {len(journals)}, the number "
            f"of runs in {folder}. Leave run out for the newest"
        )
    return RunTimeline(journals[-1 if run is None else run - 1])


def _spans(events: Events, end: float) -> Iterable[MemberSpan]:
    began = events[0]["time"]
    changes: dict[str, list[tuple[float, str, int | None]]] = {}
    for said in events:
        at, event = said["time"] - began, said["event"]
        names = said["members"] if event == "begun" else [said.get("name", "")]
        state = "training" if event == "begun" else STATE_OF.get(event, "")
        for name in names if state or event in ("lost", "ended") else ():
            told = changes.setdefault(name, [])
            if event == "registered" and told and told[-1][1] != STATE_OF["started"]:
                continue  # the member rejoined a restarted supervisor
            told.append((at, state, said["generation"] if event == "begun" else None))
    for name, told in changes.items():
        ends = [*(at for at, _, _ in told[1:]), end - began]
        for (at, state, generation), until in zip(told, ends, strict=True):
            if state and until > at:
                yield MemberSpan(
                    name=name,
                    state=state,
                    start_seconds=at,
                    end_seconds=until,
                    generation=generation,
                )


def _steps(commits: Events, began: float, median: float) -> Iterable[StepSpan]:
    """Yields the steps between commits, without the first, whose start is unknown.

    ``median`` is the median of the step seconds; 0 if there are too few steps.
    """
    newest = 0
    for place, said in enumerate(commits):
        before = commits[max(place - 1, 0)]["time"]
        yield StepSpan(
            step=said["step"],
            generation=said["generation"],
            start_seconds=before - began,
            end_seconds=said["time"] - began,
            again=said["step"] <= newest,
            waited=0 < _LONG_STEP * median < said["time"] - before,
        )
        newest = max(newest, said["step"])


# The drawing: a lane of steps, and below it a lane for each member.


def _timeline_svg(found: RunTimeline, title: str) -> str:
    seconds = found.status.seconds or 1.0
    names = list(dict.fromkeys(span.name for span in found.spans))
    shown = names[:_MOST_LANES]
    inner = [words(_LEFT - 8, _TOP + _LANE * 0.7, "steps", anchor="end")]
    inner += _step_lane(found.steps, seconds)
    for lane, name in enumerate(shown, start=1):
        y = _TOP + lane * (_LANE + _GAP)
        inner.append(words(_LEFT - 8, y + _LANE * 0.7, name, anchor="end"))
        for span in found.spans:
            if span.name == name:
                inner.append(_block(span, y, seconds))
        inner += [
            _cross(_x(lost.seconds, seconds), y, f"{name} {lost.state}: {lost.why}")
            for lost in found.status.lost
            if lost.name == name
        ]
    under = _TOP + (len(shown) + 1) * (_LANE + _GAP)
    inner += _generation_lines(found.status, seconds, under)
    inner.append(words(_LEFT, under + 16, "0 s"))
    inner.append(words(_LEFT + _WIDTH, under + 16, f"{seconds:g} s", anchor="end"))
    even, odd = _TRAINING
    legend = [*_FILL_OF.items(), ("training", odd), ("next generation", even)]
    legend += [("steps", _STEPS), ("done again", _AGAIN)]
    for place, (name, fill) in enumerate(legend):
        x = _LEFT + 100 * place
        inner.append(_rectangle(x, under + 26, 12, 12, fill, name))
        inner.append(words(x + 18, under + 36, name))
    if len(names) > len(shown):
        more = f"{len(names) - len(shown)} more members are not drawn"
        inner.append(words(_LEFT, under + 54, more))
    return drawing(_LEFT + _WIDTH + _RIGHT, under + 62, title, "".join(inner))


def _x(at: float, seconds: float) -> float:
    return _LEFT + _WIDTH * min(max(at / seconds, 0.0), 1.0)


def _step_lane(steps: Sequence[StepSpan], seconds: float) -> list[str]:
    """Draws equal consecutive steps as one block, and steps with ``waited`` as gaps."""
    blocks: list[list[Any]] = []
    for step in steps:
        if step.waited or step.end_seconds <= step.start_seconds:
            continue
        last = blocks[-1] if blocks else None
        if last and last[1] == step.start_seconds and last[2] == step.again:
            last[1], last[4] = step.end_seconds, step.step
        else:
            blocks.append(
                [step.start_seconds, step.end_seconds, step.again, step.step, step.step]
            )
    return [
        _rectangle(
            _x(start, seconds),
            _TOP,
            _x(end, seconds) - _x(start, seconds),
            _LANE,
            _AGAIN if again else _STEPS,
            f"steps {first} to {last}" + ", repeated" * again,
        )
        for start, end, again, first, last in blocks
    ]


def _block(span: MemberSpan, y: float, seconds: float) -> str:
    x, until = _x(span.start_seconds, seconds), _x(span.end_seconds, seconds)
    text = f"{span.name} {span.state}"
    fill = _FILL_OF.get(span.state, _FILL_OF["ending"])
    if span.generation is not None:
        fill = _TRAINING[span.generation % 2]
        text += f" in generation {span.generation}"
    return _rectangle(x, y, until - x, _LANE, fill, text)


def _rectangle(
    x: float, y: float, width: float, height: float, fill: str, text: str
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" '
        f'fill="{fill}" stroke="currentColor" stroke-width=".3">'
        f"<title>{escape(text)}</title></rect>"
    )


def _cross(x: float, y: float, text: str) -> str:
    return (
        f'<path d="M{x - 5:.2f} {y + 5:.2f}l10 10m0 -10l-10 10" stroke="{INK}" '
        f'stroke-width="2"><title>{escape(text)}</title></path>'
    )


def _generation_lines(run: RunStatus, seconds: float, under: float) -> list[str]:
    found = []
    for one in run.generations:
        x = _x(one.seconds, seconds)
        found.append(
            f'<line x1="{x:.2f}" y1="{_TOP - 4:g}" x2="{x:.2f}" y2="{under:g}" '
            'stroke="currentColor" stroke-dasharray="3 3"/>'
        )
        found.append(words(x, _TOP - 8, str(one.number), anchor="middle"))
    return found
