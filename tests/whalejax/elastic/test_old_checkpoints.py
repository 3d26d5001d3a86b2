"""Old checkpoints are removed; what cannot be removed is no failure of the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whalejax.state import async_checkpoints
from whalejax.state.async_checkpoints import Saver, remove_old_checkpoints
from whalejax.wire.run_messages import Report, Saved


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder of a step counts as a checkpoint, the newest first."""

    def newest_first(folder: Path) -> list[Path]:
        found = [p for p in folder.iterdir() if p.name.removeprefix("step_").isdigit()]
        return sorted(found, reverse=True)

    monkeypatch.setattr(async_checkpoints, "checkpoints", newest_first)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "leaf").write_text("1")


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    make(tmp_path, "step_000001", "step_000001.deleted", "step_000002")
    remove_old_checkpoints(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_checkpoint_is_saved_though_an_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    class Writer:
        def copy_state(self, state: Any) -> Any:
            return state

        def save(self, path: Path, state: Any, before_it_appears: Any) -> None:
            before_it_appears()
            make(path.parent, path.name)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    make(tmp_path, "step_000001")
    reports: list[Report] = []
    saver = Saver(Writer(), tmp_path, 1, 1, reports.append)
    monkeypatch.setattr(Path, "rename", fail)
    saver._write(tmp_path, None, 2)
    (report,) = reports
    assert isinstance(report, Saved) and report.step == 2
    assert any("old checkpoints stay" in str(one.message) for one in recwarn)
