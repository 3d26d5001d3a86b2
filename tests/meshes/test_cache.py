"""The cache of measurements: what counts as a hit, and surviving bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whalejax.meshes import cluster
from whalejax.meshes.calibration import cache


KEY: dict[str, str | int | float] = {
    "cpu_model": "Maker Chip",
    "cpu_cores": 2.0,
    "num_devices": 8,
}


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALEJAX_CACHE", str(tmp_path / "cache"))


def test_directory_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.directory({"WHALEJAX_CACHE": "/w", "XDG_CACHE_HOME": "/x"}) == Path(
        "/w"
    )
    assert cache.directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/whalejax")
    monkeypatch.setenv("HOME", "/h")
    assert cache.directory({}) == Path("/h/.cache/whalejax")


def test_what_is_stored_is_found_for_the_same_machine_and_budget() -> None:
    assert cache.load(KEY, 1) is None
    one = cluster("h100:2x8")
    cache.store(KEY, 10, one)
    assert cache.load(KEY, 10) == one
    assert cache.load(KEY, 5) == one
    assert cache.load(KEY, 20) is None
    assert cache.load({**KEY, "num_devices": 4}, 10) is None


def test_storing_replaces_and_leaves_nothing_else_behind() -> None:
    cache.store(KEY, 10, cluster("h100:8"))
    cache.store(KEY, 10, cluster("h200:8"))
    assert cache.load(KEY, 10) == cluster("h200:8")
    assert list(cache.directory().iterdir()) == [cache.file_of(KEY)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"machine": 3}', "\udcff", "null"]
)
def test_a_corrupt_file_is_no_file(text: str) -> None:
    cache.store(KEY, 10, cluster("h100:8"))
    cache.file_of(KEY).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert cache.load(KEY, 10) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster", {"nodes": []}),
        ("cluster", 3),
        ("format", 0),
        ("budget_seconds", "x"),
        ("budget_seconds", None),
        ("machine", {}),
    ],
)
def test_a_file_with_an_unfit_part_is_no_file(key: str, value: object) -> None:
    cache.store(KEY, 10, cluster("h100:8"))
    path = cache.file_of(KEY)
    record = json.loads(path.read_text())
    record[key] = value
    path.write_text(json.dumps(record))
    assert cache.load(KEY, 10) is None


def test_a_write_cut_short_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(KEY, 10, cluster("h100:8"))

    def cut_short(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", cut_short)
    with pytest.raises(KeyboardInterrupt):
        cache.store(KEY, 10, cluster("h200:8"))
    assert cache.load(KEY, 10) == cluster("h100:8")
    assert list(cache.directory().iterdir()) == [cache.file_of(KEY)]


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("WHALEJAX_CACHE", str(blocked / "cache"))
    with pytest.warns(UserWarning, match="not be stored in .* Set WHALEJAX_CACHE"):
        cache.store(KEY, 10, cluster("h100:8"))
    assert cache.load(KEY, 10) is None
