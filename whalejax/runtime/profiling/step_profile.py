"""Measured and predicted times: ``step.profile(state, batch)``, ``whalejax profile``.

Some steps are traced. The step time of each device is the sum of compute, exposed
collectives by kind and mesh axes, and gaps. Gaps are waits for the host before the
first instruction, between instructions, and after the last one. Means over devices and
steps are compared with the plan's terms.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.hlo import HloError, Instruction, collectives
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.plan.report.plan_page import page_width
from whalejax.planner.plan.report.plan_traffic import traffic
from whalejax.planner.plan.report.text_layout import Line, paragraph, plain, table
from whalejax.planner.plan_data import PlanData
from whalejax.runtime.planned_traffic import (
    Finding,
    compared_traffic,
    unplanned_traffic,
)
from whalejax.runtime.profiling.device_events import (
    STEP_NAME,
    DeviceEvent,
    Spans,
    TraceData,
    by_device,
    length,
    read_trace,
    union,
    within,
    without,
)


WARM_UP_STEPS: Final = 2
"""Number of steps before the trace; the first one compiles."""

LEAST_SHARE: Final = 0.01
"""Minimum fraction of a step's traffic of an unplanned collective that is listed."""

_COMPUTING: Final = ("compute", "launch", "update", "allocation", "offload")
"""Terms of a plan that count as compute."""

COMPUTE, BEFORE, BETWEEN, AFTER = (
    "compute",
    "host before",
    "host between",
    "host after",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTerm:
    """A part of a step, predicted and measured.

    Attributes:
        name: ``"compute"``, a collective such as ``"all-reduce over data"``, or a gap:
            ``"host before"``, ``"host between"``, ``"host after"``.
        predicted_seconds: Predicted time; None if the plan has no such term.
        measured_seconds: Mean over devices and steps; for a collective, only the
            exposed time.
        hidden_seconds: Time of a collective that is overlapped with compute.
    """

    name: str
    predicted_seconds: float | None
    measured_seconds: float
    hidden_seconds: float = 0.0

    @property
    def difference(self) -> float:
        """Measured minus predicted seconds."""
        return self.measured_seconds - (self.predicted_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepProfile:
    """Measured times of some steps, with the plan's predictions.

    Attributes:
        step_seconds: Mean time of a step.
        predicted_step_seconds: Step time that the plan predicts.
        steps: Number of steps that were traced.
        terms: Parts of the step, the longest first; their sum is the step time.
        unplanned: Collectives that the plan does not have, the largest first, each with
            its line of the user's code.
        trace: Traced data, for the file that ``save`` writes.
        plan: Plan of the steps.
    """

    step_seconds: float
    predicted_step_seconds: float
    steps: int
    terms: tuple[ProfileTerm, ...]
    unplanned: tuple[Finding, ...] = ()
    trace: TraceData = field(default=TraceData((), ()), repr=False)
    plan: PlanData | None = field(default=None, repr=False)

    @property
    def unexplained(self) -> float:
        """Fraction of the step time that no term explains."""
        explained = sum(term.measured_seconds for term in self.terms)
        return abs(self.step_seconds - explained) / self.step_seconds

    def document(self) -> dict[str, Any]:
        """Returns the profile as plain JSON data."""
        return {
            "whalejax_profile": 1,
            "step_seconds": self.step_seconds,
            "predicted_step_seconds": self.predicted_step_seconds,
            "steps": self.steps,
            "unexplained": self.unexplained,
            "terms": [
                {
                    "name": term.name,
                    "predicted_seconds": term.predicted_seconds,
                    "measured_seconds": term.measured_seconds,
                    "hidden_seconds": term.hidden_seconds,
                }
                for term in self.terms
            ],
            "unplanned": [
                {"what": one.what, "nbytes": one.nbytes, "place": one.place}
                for one in self.unplanned
            ],
        }

    def lines(self, width: int | None) -> list[Line]:
        """Returns the lines of the table and of notable differences.

        Args:
            width: Columns of a line; None does not wrap lines.
        """
        ratio = self.step_seconds / self.predicted_step_seconds
        head = (
            f"{milliseconds(self.step_seconds)} measured over "
            f"{count_text(self.steps, 'step')}, "
            f"{milliseconds(self.predicted_step_seconds)} predicted ({ratio:.2f} times)"
        )
        rows = [
            [
                term.name,
                _seconds(term.predicted_seconds),
                milliseconds(term.measured_seconds),
                f"{term.measured_seconds / self.step_seconds:.1%}",
                milliseconds(term.hidden_seconds) if term.hidden_seconds else "",
            ]
            for term in self.terms
        ]
        names = ["part", "predicted", "measured", "of the step", "hidden"]
        lines = [
            *paragraph("step", [head], width),
            (),
            *table(names, rows, width, right=[1, 2, 3, 4]),
            (),
        ]
        for term in sorted(self.terms, key=lambda one: -abs(one.difference))[:3]:
            more = "longer" if term.difference > 0 else "shorter"
            text = f"{term.name} is {milliseconds(abs(term.difference))} {more}"
            lines += paragraph("differs", [f"{text} than predicted"], width)
        for one in self.unplanned:
            where = f", at {one.place}" if one.place else ""
            text = f"{one.what}: {gigabytes(one.nbytes)} a step{where}"
            lines += paragraph("new", [text], width)
        return lines

    def __str__(self) -> str:
        return plain(self.lines(page_width()))

    def __repr__(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        """Writes the trace and the plan's times as one file for Perfetto.

        Open it at https://ui.perfetto.dev, or in ``chrome://tracing``.

        Args:
            path: Path of a JSON file; an existing file is replaced.

        Raises:
            WhaleError: The file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self._trace_events()), encoding="utf-8")
        except OSError as error:
            raise WhaleError(
                f"{path}: the profile cannot be written there ({error.strerror})"
            ) from error

    def _trace_events(self) -> dict[str, Any]:
        origin = self.trace.steps[0][0] if self.trace.steps else 0.0
        events: list[dict[str, Any]] = []

        def add(place: tuple[int, int], name: str, start: float, long: float) -> None:
            where = {"ph": "X", "pid": place[0], "tid": place[1]}
            events.append({**where, "name": name, "ts": start, "dur": long})

        for number, (start, end) in enumerate(self.trace.steps):
            add((0, 0), f"step {number}", (start - origin) / 1e3, (end - start) / 1e3)
            begin = (start - origin) / 1e3
            for name, seconds in self.plan.time.by_size() if self.plan else ():
                add((1, 0), f"{name} (predicted)", begin, seconds * 1e6)
                begin += seconds * 1e6
        for event in self.trace.events:
            start, long = event.start_ns - origin, event.end_ns - event.start_ns
            add((2, event.device), event.name, start / 1e3, long / 1e3)
        for process, name in enumerate(("steps", "predicted", "devices, measured")):
            named = {"ph": "M", "pid": process, "name": "process_name"}
            events.append({**named, "args": {"name": name}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(seconds)


def profiled(
    plan: PlanData,
    program: Callable[[], str],
    run: Callable[[Any], Any],
    state: Any,
    steps: int,
) -> tuple[Any, StepProfile]:
    """Traces some steps, and divides them into parts.

    Args:
        plan: Plan of the steps.
        program: Function that returns the compiled program's text, or an empty text for
            several programs.
        run: Function from a state to the next one, which runs a step to completion.
        state: State to train; its buffers are donated.
        steps: Number of steps to trace.

    Returns:
        The state after the last step, and the profile.

    Raises:
        WhaleError: Another profiler is running, or the trace has no step.
    """
    for _ in range(WARM_UP_STEPS):
        state = run(state)
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder)
        except RuntimeError as error:
            raise WhaleError(
                f"another profiler is running ({error}). Stop it before profiling a "
                "step: jax.profiler.stop_trace()"
            ) from error
        try:
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(STEP_NAME):
                    state = run(state)
        finally:
            jax.profiler.stop_trace()
        trace = read_trace(Path(folder))
    return state, profile_of(plan, program(), trace)


def profile_of(plan: PlanData, program: str, trace: TraceData) -> StepProfile:
    """Returns the profile of a plan's steps from a trace.

    Args:
        plan: Plan of the steps.
        program: Text of the compiled program, or empty.
        trace: Steps and instructions.
    """
    instructions = _instructions(program)
    names = {instruction.instruction: instruction for instruction in instructions}
    mesh = plan.axis_sizes
    measured: dict[str, float] = {}
    hidden: dict[str, float] = {}
    devices = by_device(trace.events)
    for events in devices.values():
        for start, end in trace.steps:
            parts, beside = _split_step_time(events, start, end, names, mesh)
            for sums, result in ((measured, parts), (hidden, beside)):
                for name, seconds in result.items():
                    sums[name] = sums.get(name, 0.0) + seconds
    count = len(trace.steps) * len(devices)
    predicted = predicted_terms(plan, by_axes=bool(program))
    terms = [
        ProfileTerm(
            name=name,
            predicted_seconds=predicted.get(name),
            measured_seconds=measured.get(name, 0.0) / count,
            hidden_seconds=hidden.get(name, 0.0) / count,
        )
        for name in {**measured, **predicted}
    ]
    seconds = sum(end - start for start, end in trace.steps) / 1e9 / len(trace.steps)
    return StepProfile(
        step_seconds=seconds,
        predicted_step_seconds=plan.time.step_seconds,
        steps=len(trace.steps),
        terms=tuple(sorted(terms, key=lambda term: -term.measured_seconds)),
        unplanned=_unplanned(plan, instructions),
        trace=trace,
        plan=plan,
    )


def predicted_terms(plan: PlanData, *, by_axes: bool = True) -> dict[str, float]:
    """Returns the seconds of a plan's terms, by the names that measured terms have.

    A collective's seconds include the part that compute hides.

    Args:
        plan: Plan of the steps.
        by_axes: Whether traces show the mesh axes of a collective. With several
            programs they show only its kind, and no transfers between stages.
    """
    computing = (getattr(plan.time, f"{name}_seconds") for name in _COMPUTING)
    terms: dict[str, float] = {COMPUTE: sum(computing)}
    for row in traffic(plan):
        if not by_axes and row.kind not in _KINDS:
            continue
        name = _collective_name(row.kind, row.axes if by_axes else ())
        terms[name] = terms.get(name, 0.0) + row.seconds
    return terms


def _split_step_time(
    events: Sequence[DeviceEvent],
    start: float,
    end: float,
    names: Mapping[str, Instruction],
    mesh: Mapping[str, int],
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of a step's parts, and of its hidden collectives, by name."""
    computing: list[tuple[float, float]] = []
    sending: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.end_ns <= start or event.start_ns >= end:
            continue
        kind = _collective_of(event.name, names, mesh)
        spans = computing if kind is None else sending.setdefault(kind, [])
        spans.append((event.start_ns, event.end_ns))
    compute = within(union(computing), start, end)
    step_time, hidden = {COMPUTE: length(compute)}, dict[str, float]()
    covered = compute
    for name, spans in sorted(sending.items()):
        whole = within(union(spans), start, end)
        exposed = without(whole, covered)
        step_time[name] = length(exposed)
        hidden[name] = length(whole) - length(exposed)
        covered = union([*_pairs(covered), *_pairs(exposed)])
    gaps = without(union([(start, end)]), covered)
    first = covered[0, 0] if len(covered) else end
    last = covered[-1, 1] if len(covered) else end
    step_time[BEFORE] = length(within(gaps, start, first))
    step_time[BETWEEN] = length(within(gaps, first, last))
    step_time[AFTER] = length(within(gaps, last, end))
    return step_time, hidden


def _pairs(spans: Spans) -> list[tuple[float, float]]:
    return [(float(start), float(end)) for start, end in spans]


def _instructions(program: str) -> tuple[Instruction, ...]:
    if not program:
        return ()
    try:
        return collectives(program).instructions
    except HloError:
        return ()


def _collective_of(
    name: str, names: Mapping[str, Instruction], mesh: Mapping[str, int]
) -> str | None:
    """Returns the name of a collective, or None for an instruction that computes."""
    base = name.replace("-done", "-start")
    collective = (
        names.get(name) or names.get(base) or names.get(base.replace("-start", ""))
    )
    if collective is not None:
        return _collective_name(collective.kind, collective.axes(mesh))
    kind = name.partition(".")[0].removesuffix("-start").removesuffix("-done")
    unknown = None if names else ()
    return _collective_name(kind, unknown) if kind in _KINDS else None


_KINDS: Final = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)


def _collective_name(kind: str, axes: Sequence[str] | None) -> str:
    if axes is None:
        return f"{kind} over other groups"
    return f"{kind} over {'+'.join(axes)}" if axes else kind


def _unplanned(
    plan: PlanData, instructions: Sequence[Instruction]
) -> tuple[Finding, ...]:
    """Returns unplanned collectives above ``LEAST_SHARE`` of all traffic."""
    mesh = plan.axis_sizes
    sent = [
        {
            "kind": instruction.kind,
            "axes": instruction.axes(mesh),
            "count": instruction.count,
            "payload_bytes": instruction.payload_bytes,
            "name": instruction.name,
            "places": instruction.places,
        }
        for instruction in instructions
    ]
    if not sent:
        return ()
    return unplanned_traffic(
        plan, compared_traffic(plan, sent), sent, least=LEAST_SHARE
    )
