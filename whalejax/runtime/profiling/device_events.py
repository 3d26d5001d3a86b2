"""Reads a trace of ``jax.profiler`` into the events of each device in each step.

JAX's reader of traces (``jax.profiler.ProfileData``) returns planes of events. An event
with an instruction of a compiled program (``hlo_op``) is work of a device. On CPU the
event names the device, on other platforms the plane does. All other events are the
host's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text


STEP_NAME: Final = "whalejax_step"
"""Name of the host's span around each step."""

_DEVICE_PLANE: Final = re.compile(r"/device:\w+:(\d+)")
_OPS_LINES: Final = ("XLA Ops", "Async XLA Ops", "Stream")
_LOOPS: Final = ("while", "conditional", "call")
"""Instructions that contain other instructions, such as loops."""

Spans = np.ndarray[Any, Any]
"""Sorted, disjoint spans: one row of start and end in nanoseconds for each."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An instruction that a device ran.

    Attributes:
        device: Index of the device in the process.
        name: Name of the instruction in its program.
        module: Name of the program.
        start_ns, end_ns: Start and end in nanoseconds, by the clock of the trace.
    """

    device: int
    name: str
    module: str
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class TraceData:
    """Steps and instructions of a trace.

    Attributes:
        steps: (start, end) of each step on the host, in nanoseconds.
        events: Instructions of all devices, in the order of the file.
    """

    steps: tuple[tuple[float, float], ...]
    events: tuple[DeviceEvent, ...]


def read_trace(folder: Path) -> TraceData:
    """Reads the steps and instructions of a trace.

    Args:
        folder: Folder that ``jax.profiler.trace`` wrote.

    Raises:
        WhaleError: No trace exists, or it has no step or no instruction.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise WhaleError(f"{folder} holds no trace of jax.profiler")
    steps: list[tuple[float, float]] = []
    events: list[DeviceEvent] = []
    for file in files:
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            on_device = _DEVICE_PLANE.match(plane.name)
            for line in plane.lines:
                if on_device and not line.name.startswith(_OPS_LINES):
                    continue
                for event in line.events:
                    if event.name.startswith(STEP_NAME) and not on_device:
                        start = float(event.start_ns)
                        steps.append((start, start + float(event.duration_ns)))
                    else:
                        device_event = _device_event(event, on_device)
                        events += [device_event] if device_event else []
    if not steps or not events:
        raise WhaleError(
            f"the trace in {folder} has {count_text(len(steps), 'step')} and "
            f"{len(events)} instructions of devices; profiling needs both. Is another "
            "profiler running?"
        )
    return TraceData(tuple(sorted(steps)), tuple(events))


def _device_event(event: Any, plane: re.Match[str] | None) -> DeviceEvent | None:
    """Returns the event of a device; None for events of the host and for containers."""
    stats = dict(event.stats)
    name = stats.get("hlo_op")
    if name is None or event.duration_ns <= 0:
        return None
    if str(name).partition(".")[0] in _LOOPS:
        return None
    device: Any = stats.get("device_ordinal", plane[1] if plane else 0)
    start = float(event.start_ns)
    return DeviceEvent(
        device=int(device),
        name=str(name),
        module=str(stats.get("hlo_module", "")),
        start_ns=start,
        end_ns=start + float(event.duration_ns),
    )


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Merges overlapping or adjacent spans.

    >>> union([(5, 6), (0, 2), (1, 3)]).tolist()
    [[0.0, 3.0], [5.0, 6.0]]
    """
    result: list[list[float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        elif end > start:
            result.append([float(start), float(end)])
    return np.array(result, dtype=np.float64).reshape(-1, 2)


def length(spans: Spans) -> float:
    """Returns the total length of spans in seconds."""
    return float((spans[:, 1] - spans[:, 0]).sum()) / 1e9


def within(spans: Spans, start: float, end: float) -> Spans:
    """Returns the parts of spans between two times.

    >>> within(union([(0, 3), (5, 6)]), 2, 5.5).tolist()
    [[2.0, 3.0], [5.0, 5.5]]
    """
    cut = np.clip(spans, start, end)
    kept: Spans = cut[cut[:, 1] > cut[:, 0]]
    return kept


def without(spans: Spans, others: Spans) -> Spans:
    """Returns the parts of spans that ``others`` do not cover.

    >>> without(union([(0, 10)]), union([(2, 3), (5, 12)])).tolist()
    [[0.0, 2.0], [3.0, 5.0]]
    """
    result: list[tuple[float, float]] = []
    for start, end in spans:
        begin = start
        for low, high in within(others, start, end):
            if low > begin:
                result.append((begin, low))
            begin = high
        if end > begin:
            result.append((begin, end))
    return union(result)


def by_device(events: Sequence[DeviceEvent]) -> Mapping[int, list[DeviceEvent]]:
    """Returns events by device index, sorted by start."""
    device: dict[int, list[DeviceEvent]] = {}
    for event in sorted(events, key=lambda one: (one.device, one.start_ns)):
        device.setdefault(event.device, []).append(event)
    return device
