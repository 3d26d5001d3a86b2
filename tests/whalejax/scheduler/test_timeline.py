"""The Gantt chart of a scheduler's jobs, from its journal."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from whalejax.display.job_chart import HeldDevices, JobChart, JobLane
from whalejax.scheduler.live.job_book import JOURNAL


ZERO = 1_700_000_000.0


def job(name: str, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": "mlp",
        "steps": steps,
        "devices": [1, 4],
        "folder": "/",
    }


def options(speeds: Mapping[int, float]) -> list[dict[str, Any]]:
    return [
        {"kind": "", "devices": n, "samples_per_second": speed, "layout": ""}
        for n, speed in speeds.items()
    ]


def journal(folder: Path, *events: tuple[float, str, dict[str, Any]]) -> Path:
    lines = [
        json.dumps({"event": event, "time": ZERO + at, **fields})
        for at, event, fields in events
    ]
    (folder / JOURNAL).write_text("\n".join(lines) + "\n")
    return folder


def two_jobs(folder: Path) -> Path:
    """One that has four devices and gives two of them to another."""
    speeds = {1: 10.0, 2: 20.0, 4: 40.0}
    planned = {"batch": 10, "options": options(speeds)}
    return journal(
        folder,
        (0, "opened", {"cluster": "4×CPU", "num_devices": 4}),
        (0, "added", {"job": job("first", 100)}),
        (1, "planned", {"name": "first", **planned}),
        (1, "placed", {"name": "first", "size": 4}),
        (2, "devices", {"name": "first", "devices": ["a", "b", "c", "d"]}),
        (10, "added", {"job": job("second", 20)}),
        (10, "planned", {"name": "second", **planned}),
        (12, "devices", {"name": "first", "devices": ["a", "b"]}),
        (12, "devices", {"name": "second", "devices": ["c", "d"]}),
        (24, "ended", {"name": "second", "how": "complete", "why": ""}),
        (24, "devices", {"name": "first", "devices": ["a", "b", "c", "d"]}),
        (34, "ended", {"name": "first", "how": "complete", "why": ""}),
    )


def test_lanes_are_the_devices_that_jobs_held(tmp_path: Path) -> None:
    chart = wh.jobs_timeline(two_jobs(tmp_path))
    first, second = chart.lanes
    assert [(o.start_seconds, o.end_seconds, o.devices) for o in first.held] == [
        (2.0, 12.0, 4),
        (12.0, 24.0, 2),
        (24.0, 34.0, 4),
    ]
    assert second.held == (
        HeldDevices(start_seconds=12.0, end_seconds=24.0, devices=2),
    )
    assert (second.arrival_seconds, second.end_seconds) == (10.0, 24.0)
    assert chart.seconds == 34.0
    assert chart.utilisation == pytest.approx((40 + 24 + 40 + 24) / (34 * 4))
    assert "second: added at 10 s, devices 2, complete at 24 s" in chart.text


def test_predictions_are_those_of_the_simulator(tmp_path: Path) -> None:
    """Alone the first makes 40 samples a second; later both share four devices."""
    chart = wh.jobs_timeline(two_jobs(tmp_path))
    first, second = chart.lanes
    assert first.predicted[0].devices == 4
    assert first.predicted[0].start_seconds == 0.0
    assert second.predicted[0].start_seconds >= 10.0
    work = sum((o.end_seconds - o.start_seconds) * o.devices for o in first.predicted)
    assert work * 10 == pytest.approx(1000)  # samples, at 10 a second and device
    assert chart.predicted_utilisation is not None
    assert 0.9 < chart.predicted_utilisation <= 1.0
    alone = wh.jobs_timeline(tmp_path, predicted=False)
    assert alone.predicted_utilisation is None
    assert not any(lane.predicted for lane in alone.lanes)


def test_a_job_that_goes_on_has_no_end(tmp_path: Path) -> None:
    folder = journal(
        tmp_path,
        (0, "opened", {"cluster": "2×CPU"}),  # as an earlier version wrote it
        (0, "added", {"job": job("only", 100)}),
        (5, "devices", {"name": "only", "devices": ["a", "b"]}),
    )
    chart = wh.jobs_timeline(folder)
    (lane,) = chart.lanes
    assert lane.end_seconds is None
    assert lane.predicted == ()  # It was not planned yet.
    assert chart.devices == 2
    assert lane.held[0].end_seconds == pytest.approx(chart.seconds)
    assert "goes on" in chart.text


def test_the_drawing_is_well_formed_and_labelled(tmp_path: Path) -> None:
    chart = wh.jobs_timeline(two_jobs(tmp_path))
    root = ET.fromstring(chart.svg)
    names = [x.text for x in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"first", "second", "4 devices", "0 s"} <= set(names)
    bars = [x for x in root.iter("{http://www.w3.org/2000/svg}rect")]
    width = float(root.attrib["viewBox"].split()[2])
    for one in bars:
        assert 0 <= float(one.attrib["x"]) <= width
        assert float(one.attrib["x"]) + float(one.attrib["width"]) <= width
    chart.save(tmp_path / "jobs.html")
    assert "<svg" in (tmp_path / "jobs.html").read_text()


def test_many_jobs_are_counted(tmp_path: Path) -> None:
    held = (HeldDevices(start_seconds=0.0, end_seconds=1.0, devices=1),)
    lanes = [
        JobLane(
            name=f"job{i}",
            arrival_seconds=0.0,
            end_seconds=1.0,
            outcome="complete",
            held=held,
        )
        for i in range(45)
    ]
    assert "5 more jobs not drawn" in JobChart(lanes, 45, 1.0).svg


def test_a_folder_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wh.WhaleError, match="has no jobs.jsonl"):
        wh.jobs_timeline(tmp_path)
    folder = journal(tmp_path, (0, "opened", {"cluster": "2×CPU"}))
    with pytest.raises(wh.WhaleError, match="no job was added"):
        wh.jobs_timeline(folder)
