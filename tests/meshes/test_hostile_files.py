"""Cluster files that are damaged or hostile: a WhaleError, or a usable cluster.

Names reach terminals, pages and charts, so that control characters are refused wherever
a cluster comes from; what an error quotes is escaped and short.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing import fuzzed
from tests.mutants import deep
from whalejax.meshes import Cluster, DeviceKind, WhaleError, cluster, device_kind
from whalejax.meshes.errors import Problems
from whalejax.meshes.formats.cluster_toml import from_data
from whalejax.meshes.formats.paddle_json import from_data as from_paddle
from whalejax.meshes.read_file import toml_text


HIDDEN = ["a\x1b[31mb", "a\x00b", "a\nb", "a\u202eb", "a\u200fb", "a\u2028b", "\x7f"]
BASE = cluster("h100:2x4")


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(WhaleError) as caught:
        call()
    text = str(caught.value)
    assert len(text) < 3000
    return text


def titled(kind: DeviceKind, title: str) -> DeviceKind:
    source = dataclasses.replace(kind.sources[0], title=title)
    return dataclasses.replace(kind, sources=(source,))


@pytest.mark.parametrize("name", HIDDEN)
def test_names_that_cannot_be_shown(name: str, tmp_path: Path) -> None:
    kind = device_kind("h100")
    data = BASE.to_json()
    renamed = {**data, "kinds": {name: data["kinds"]["h100"]}}
    renamed["nodes"] = [{"kind": name, "count": 4, "repeat": 2}]
    path = tmp_path / "it.toml"
    path.write_text(toml_text(renamed), encoding="utf-8")
    for call in (
        lambda: dataclasses.replace(kind, name=name),
        lambda: dataclasses.replace(kind, label=name),
        lambda: titled(kind, name),
        lambda: dataclasses.replace(BASE.levels[0], name=name),
        lambda: dataclasses.replace(BASE.levels[0], slowdown=((name, 2.0),)),
        lambda: Cluster.from_json(renamed),
        lambda: Cluster.load(path),
    ):
        text = refused(call)
        assert "control characters" in text
        assert not set("\x1b\x00\u202e\u200f\u2028\x7f").intersection(text)


def test_a_name_is_no_essay() -> None:
    with pytest.raises(WhaleError, match="expected at most 1000 characters"):
        dataclasses.replace(device_kind("h100"), label="x" * 20_000)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e308, 10**400, -1])
def test_numbers_that_no_device_has(number: Any) -> None:
    kind = device_kind("h100")
    for name in ("memory_bytes", "memory_bytes_per_second", "price_per_hour", "cores"):
        assert name in refused(lambda n=name: dataclasses.replace(kind, **{n: number}))
    for name in ("bandwidth_bytes_per_second", "latency_seconds"):
        level = dataclasses.replace(BASE.levels[0], **{name: number})
        levels = (level, BASE.levels[1])
        assert name in refused(lambda v=levels: dataclasses.replace(BASE, levels=v))
    data = BASE.to_json()
    data["kinds"]["h100"]["memory_bytes_per_second"] = number
    assert "memory_bytes_per_second" in refused(lambda: from_data(data, "it"))


FILES: dict[str, bytes] = {
    "deep": b"a = " + b"[" * 50_000,
    "deep tables": b"[" + b".".join([b"a"] * 3000) + b"]",
    "4,300 digits": b"a = " + b"9" * 5000,
    "no UTF-8": b'a = "\xff"',
    "20 kB of a key": b"k" * 20_000 + b" = 1",
    "20 kB of a name": b'[[nodes]]\ncount = 1\nkind = "' + b"k" * 20_000 + b'"',
    "20 kB of a value": b'nodes = "' + b"v" * 20_000 + b'"',
    "many nodes": b'[[nodes]]\nkind = "h100"\ncount = 8\nrepeat = 131072\n' * 5,
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_bytes(FILES[name])
    refused(lambda: Cluster.load(path))


@pytest.mark.parametrize("read", [Cluster.from_json, lambda d: from_paddle(d, "it")])
def test_data_that_is_none(read: Callable[[Any], Any]) -> None:
    itself: dict[str, Any] = {}
    itself["nodes"] = [itself]
    for data in ({"nodes": deep(900)}, {"machines": deep(900)}, itself):
        assert "more than 64 deep" in refused(lambda d=data: read(d))


def test_json_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    for content in (b"[" * 50_000, b"9" * 5000, b'"\xff"', b'{"a": 1, "a": 1}', b"NaN"):
        path.write_bytes(content)
        assert "cannot be read as JSON" in refused(lambda: Cluster.from_paddle(path))
    path.write_text(json.dumps({"machines": "v" * 20_000, "k" * 20_000: "v"}))
    refused(lambda: Cluster.from_paddle(path))


@pytest.mark.parametrize(
    "text", ["h100:" + "9" * 5000, "h100:²", "x" * 20_000, "h\x1b[2J:8", "h100:9999999"]
)
def test_texts_that_are_none(text: str) -> None:
    assert "\x1b" not in refused(lambda: cluster(text))


@pytest.mark.parametrize("kind", ["toml", "paddle"])
@pytest.mark.parametrize(
    ("first", "count"), [(0, 50), pytest.param(50, 950, marks=pytest.mark.full)]
)
def test_damaged_files_are_refused_or_clusters(
    kind: str, first: int, count: int
) -> None:
    found = fuzzed(kind, first, count)
    assert not found["failures"]
    assert found["refused"] + found["valid"] == count


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    os.mkfifo(path)
    assert "no regular file, but a pipe or a device" in refused(
        lambda: Cluster.load(path)
    )


def test_a_kind_without_rates(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text(
        "[kinds.a]\nplatform = 'gpu'\nmemory_bytes = 1000000\n"
        "memory_bytes_per_second = 1e9\nflops_per_second = {}\n"
        "[[nodes]]\nkind = 'a'\ncount = 1\n"
    )
    text = refused(lambda: Cluster.load(path))
    assert "kinds.a.flops_per_second: empty, expected a table such as" in text


def test_of_many_problems_some_are_listed() -> None:
    problems = Problems("it")
    for number in range(200):
        problems.add(f"problem {number}")
    assert problems.text().endswith("  20. problem 19\n  … and 180 more")
