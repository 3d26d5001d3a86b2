"""What ``whalejax calibrate`` writes, and what it does not write over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whalejax as wh
from tests.whalejax.runs import described_cluster
from whalejax.cli import main


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: list[str], capsys: Captured) -> str:
    """The message of a command that must fail as a user error."""
    assert main.main(words) == 2
    return capsys.readouterr().err


def test_calibrate_writes_what_cluster_takes(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def measured(budget_seconds: float, **_: object) -> wh.Cluster:
        asked.append(budget_seconds)
        return described_cluster()

    monkeypatch.setattr("whalejax.meshes.calibration.calibrate.measured", measured)
    assert main.main(["calibrate", "-o", "c.toml", "--seconds", "3"]) == 0
    assert "measured and written to c.toml" in capsys.readouterr().out
    assert asked == [3.0]
    assert main.main(["plan", "mlp", "--cluster", "c.toml"]) == 0


def _no_timing(*_: object) -> Any:
    raise wh.WhaleError("too short to be timed: give more")


@pytest.mark.full
def test_kinds_that_are_measured_apart_are_written_into_one_file(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []

    def calibrate(budget_seconds: float, use_cache: bool) -> wh.Cluster:
        measured.append(budget_seconds)
        return wh.cluster("cpu:8")

    monkeypatch.setattr("whalejax.meshes.calibration.calibrate.calibrate", calibrate)
    words = ["calibrate", "-o", "both.toml"]
    assert "'both.toml' does not exist" in refused([*words, "--append"], capsys)
    assert main.main([*words, "--kind", "fast"]) == 0
    assert "8×fast (1 node of 8, host), measured" in capsys.readouterr().out
    again = [*words, "--append", "--kind"]
    assert "already has a kind 'fast' (its kinds: fast)" in refused(
        [*again, "fast"], capsys
    )
    assert "letters, digits, - and _" in refused([*again, "my cpu"], capsys)
    assert len(measured) == 1  # Nothing is measured that could not be written.
    assert "--kind is ''; expected a word" in refused([*again, ""], capsys)
    model = ["--model", "mlp", "--samples", "64"]
    with monkeypatch.context() as failing:
        failing.setattr("whalejax.cli.measure_model.with_timing", _no_timing)
        assert "give more" in refused([*again, "slow", *model], capsys)
    assert main.main([*again, "slow", *model]) == 0  # Nothing was written before.
    said = capsys.readouterr().out
    assert "holds 8×fast + 8×slow (2 nodes of 8, host + host) now" in said
    assert "was not measured and is assumed to be host at 1.2 GB/s" in said
    both = wh.cluster("both.toml")
    assert [(n.kind.name, n.count) for n in both.nodes] == [("fast", 8), ("slow", 8)]
    assert [len(kind.timed_models) for kind in both.kinds] == [0, 1]
    assert main.main(["plan", "mlp", "--cluster", "both.toml"]) == 0
    assert "8×fast + 8×slow" in capsys.readouterr().out
    assert main.main([*words, "--append"]) == 0  # As JAX calls it.
    assert [k.name for k in wh.cluster("both.toml").kinds] == ["fast", "slow", "cpu"]
    assert "already has a kind 'cpu'" in refused([*words, "--append"], capsys)
    assert "would be replaced by fast" in refused([*words, "--kind", "fast"], capsys)
    assert len(measured) == 4 and len(wh.cluster("both.toml").kinds) == 3
    (here / "other.toml").write_text("a = [")
    words[-1] = "other.toml"
    assert "does not describe a cluster" in refused(words, capsys)
    (here / "other.toml").write_text("")
    assert main.main(words) == 0 == main.main(words)  # Of one kind, anew.


def test_files_that_cannot_be_read_again_are_not_written(
    here: Path, capsys: Captured
) -> None:
    said = refused(["calibrate", "-o", "mine.json"], capsys)
    assert "--output mine.json: the description is a TOML file" in said
    assert "Name it mine.toml" in said
    said = refused(["calibrate", "-o", "mine.toml", "--seconds", "-3"], capsys)
    assert "--seconds is -3; expected more than 0" in said
    assert not [*here.iterdir()]
