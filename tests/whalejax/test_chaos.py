"""What the bench of signals keeps is what its seed draws, and adds up as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from scripts import bench_chaos


KEPT: Final[dict[str, Any]] = json.loads(bench_chaos.FILE.read_text())


def test_the_kept_cases_are_those_of_the_seed() -> None:
    for index, record in enumerate(KEPT["cases"]):
        case = bench_chaos.drawn(KEPT["seed"], index)
        assert {name: record[name] for name in case.__slots__} == {
            name: getattr(case, name) for name in case.__slots__
        }
        assert record["commit"] in KEPT["commits"]
    assert bench_chaos.summary(KEPT["cases"]) == KEPT["result"]


def test_what_is_counted() -> None:
    case: dict[str, Any] = {"sent": True, "rank": 1, "hangs": False, "wrong": False}
    records = [
        {**case, "named": 1},
        {**case, "named": 0},
        {**case, "hangs": True, "named": None},
        {**case, "wrong": True, "resumed_right": False},
        {"sent": False},
    ]
    assert bench_chaos.summary(records) == {
        "signals": 4,
        "hangs": 1,
        "wrong_curves": 1,
        "blamed_right": 0.3333,
        "failed": 3,
        "resumed": 1,
    }


@pytest.mark.parametrize(
    ("losses", "right"),
    [
        ({}, True),
        ({5: 2.0, 6: 1.0}, True),
        ({5: 2.0, 7: 0.5}, False),
        ({5: 2.0, 6: 1.0001}, False),
        ({6: float("nan")}, False),
    ],
)
def test_a_curve_is_right_if_no_step_is_missing(
    losses: dict[int, float], right: bool
) -> None:
    assert bench_chaos.is_right(losses, {5: 2.0, 6: 1.0, 7: 0.5}) is right


def test_a_measurement_that_is_cut_off_is_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    record = {"index": 3, "sent": False, "commit": "abc"}
    bench_chaos.write(path, 7, {3: record})
    seed, data, known = bench_chaos.read(path)
    assert (seed, known) == (7, {3: record}) and data["commits"] == ["abc"]
