"""Where checkpoints are to be written: what cannot be is said before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalejax.cli.options import TrainCommand
from whalejax.cli.train_session import _check_save
from whalejax.meshes.errors import Problems, WhaleError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone/a", "gone/a: No such file or directory. Give another directory"),
        ("ring", "levels of symbolic links"),
        ("x" * 300, "too long"),
        ("file/a", "file, which is a file; expected a directory"),
    ],
)
def test_places_that_lead_nowhere(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "not-mounted")
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    (tmp_path / "file").touch()
    problems = Problems("train", WhaleError)
    assert (
        _check_save(TrainCommand(model="mlp", save=tmp_path / name), problems) is None
    )
    assert text in problems.text()


def test_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    problems = Problems("train", WhaleError)
    _check_save(TrainCommand(model="mlp", save=tmp_path / "a" / "b"), problems)
    assert not problems
