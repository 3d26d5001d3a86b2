"""A process that trains alone saves the state at which its loop is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import whalejax as wh
from tests.whalejax.elastic.test_noise_scale import job
from whalejax.elastic.member import error_text


def train(folder: Path, last: int, *, fails: bool = False) -> list[int]:
    """Trains to a step, at which the loop is left; returns the steps of this call."""
    steps = []
    run = wh.train_elastic(job(), steps=9, save=folder, num_micro_batches=4)
    for state, _ in run:
        steps.append(int(state.step))
        if steps[-1] == last:
            if fails:
                raise KeyError("a bug in the body")
            break
    run.close()
    return steps


def test_a_loop_that_is_left_saves_its_state(tmp_path: Path) -> None:
    assert train(tmp_path, 3) == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000003"]
    assert train(tmp_path, 5) == [4, 5]
    assert train(tmp_path, 9) == [6, 7, 8, 9]


def test_an_error_of_the_body_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a bug in the body"):
        train(tmp_path, 3, fails=True)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000003"]


def test_an_error_of_a_user_has_its_class_and_line() -> None:
    try:
        raise RuntimeError("disk gone")
    except RuntimeError as error:
        text = error_text(error)
    assert re.fullmatch(r"RuntimeError: disk gone \(at test_left_loops.py:\d+\)", text)
    assert error_text(wh.WhaleError("the run is over")) == "the run is over"
