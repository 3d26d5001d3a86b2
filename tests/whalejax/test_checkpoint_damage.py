"""Damaged checkpoints are refused before anything is used; failed saves leave nothing.

Mutants are drawn with fixed seeds, and judged without arrays where a hash differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import whalejax as wh
from tests.whalejax.runs import fresh_state, host_leaves, run_script, shared_step
from tests.whalejax.test_checkpoint import data_files, without_hashes
from whalejax.state import checkpoint, checkpoint_files
from whalejax.state.checkpoint import UncheckedCheckpoint
from whalejax.state.checkpoint_record import RECORD, DamagedCheckpoint, read_record


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests only read."""
    step = shared_step()
    path = tmp_path_factory.mktemp("saved") / "one"
    step.save(path, fresh_state(step))
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    target = tmp_path / "copy"
    shutil.copytree(saved, target)
    return target


# Damage.


def test_one_bit_is_found_in_any_file(copy: Path) -> None:
    for file in sorted(p for p in copy.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        place = len(whole) // 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoint.checked(copy)
        text = str(caught.value)
        if file.name != RECORD:
            name = file.relative_to(copy).as_posix()
            assert text.startswith(
                f"{copy} is damaged; restore another checkpoint: 1 problem\n  1. {name}"
                " was changed: its SHA-256 begins with "
            )
        file.write_bytes(whole)
    checkpoint.checked(copy)


def test_nothing_is_read_of_a_damaged_checkpoint(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(checkpoint, "read_leaves")
    biggest = max(data_files(copy), key=lambda file: file.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[-1] ^= 1
    biggest.write_bytes(content)
    for only in (None, "model"):
        with pytest.raises(DamagedCheckpoint, match="was changed: its SHA-256"):
            shared_step().restore(copy, only=only)  # type: ignore[arg-type]


def test_a_record_that_was_changed_is_named(copy: Path) -> None:
    record = json.loads((copy / RECORD).read_text())
    (copy / RECORD).write_text(json.dumps({**record, "samples": 7}))
    with pytest.raises(DamagedCheckpoint) as caught:
        shared_step().restore(copy)
    assert str(caught.value) == (
        f"{copy} is damaged: its record whalejax.json was changed since it was written:"
        " its hash differs. Restore another checkpoint"
    )
    # Written otherwise, and saying the same.
    (copy / RECORD).write_text(json.dumps(record, indent=7, sort_keys=True))
    assert read_record(copy).samples == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"file_sha256": {}},
        {"samples": -1},
        {"samples": True},
        {"batch_size": "8"},
        {"leaves": [{"section": "params"}]},
        {"file_bytes": {"../one": 3}, "file_sha256": {"../one": ""}},
        {"file_bytes": None},
    ],
)
def test_records_that_say_what_cannot_be(copy: Path, changes: dict[str, Any]) -> None:
    """A hash that is right does not make a record one."""
    from whalejax.state.checkpoint_record import _hash_of

    record = {**json.loads((copy / RECORD).read_text()), **changes}
    (copy / RECORD).write_text(
        json.dumps({**record, "record_sha256": _hash_of(record)})
    )
    with pytest.raises(DamagedCheckpoint, match="its record whalejax.json cannot be"):
        shared_step().restore(copy)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b"[]", b"null", b'"x"', b""]
)
def test_records_that_are_none(copy: Path, content: bytes) -> None:
    (copy / RECORD).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="is not a whole checkpoint") as caught:
        shared_step().restore(copy)
    assert len(str(caught.value)) < len(str(copy)) + 400


def mutants(folder: Path, seed: int, count: int) -> Iterator[str]:
    """Damage a checkpoint in one place after another, and mend it each time.

    Bits and bytes are changed, cut out, cut off and put in, or a file goes; the record
    is hit as often as all other files together.
    """
    draw = random.Random(seed)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for _ in range(count):
        file = draw.choice(files) if draw.random() < 0.5 else folder / RECORD
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        some = draw.randint(1, 40)
        how = draw.choice(["flip", "byte", "cut", "truncate", "add", "double", "gone"])
        content = {
            "flip": [whole[:place], bytes([whole[place] ^ 1 << draw.randrange(8)])],
            "byte": [whole[:place], bytes([draw.randrange(256)])],
            "cut": [whole[:place]],
            "truncate": [whole[:place]],
            "add": [whole[:place], draw.randbytes(some), whole[place:]],
            "double": [whole[:place], whole[place : place + some], whole[place:]],
            "gone": [],
        }[how]
        if how in ("flip", "byte"):
            content.append(whole[place + 1 :])
        elif how == "cut":
            content.append(whole[place + some :])
        file.write_bytes(b"".join(content))
        if how == "gone":
            file.unlink()
        yield f"{how} at {place} of {file.relative_to(folder)}"
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 50), pytest.param(1, 1000, marks=pytest.mark.full)]
)
def test_no_damaged_checkpoint_is_believed(copy: Path, seed: int, count: int) -> None:
    step, believed = shared_step(), 0
    expected = host_leaves(fresh_state(step))
    whole = checkpoint.checked(copy)
    for what in mutants(copy, seed, count):
        try:
            found = checkpoint.checked(copy)
        except wh.WhaleError:
            continue
        believed += 1
        assert found == whole, what
        state = step.restore(copy)
        assert (host_leaves(state), state.samples) == (expected, 0), what
    # A blank more or less between words of the record does no harm.
    assert believed < count / 10


def test_what_orbax_cannot_read_is_no_damage_where_hashes_are_right(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as too little memory: another checkpoint would not help."""
    import orbax.checkpoint as ocp

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
    with pytest.raises(wh.WhaleError) as caught:
        shared_step().restore(copy)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert str(caught.value) == (
        f"{copy}: this checkpoint cannot be read (RESOURCE_EXHAUSTED: out of memory), "
        "though its files are as they were written. See that there is memory for it, or"
        " restore it under a plan that shards more"
    )


def test_a_record_that_may_not_be_read_is_no_damage(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("whalejax.state.checkpoint_record.read_text", fail)
    with pytest.raises(
        wh.WhaleError, match="Permission denied. Ask for permission"
    ) as caught:
        shared_step().restore(copy)
    assert not isinstance(caught.value, DamagedCheckpoint)


# Checkpoints without hashes.


def test_a_checkpoint_without_hashes_is_read_and_said_not_to_be_checked(
    copy: Path,
) -> None:
    without_hashes(copy)
    step = shared_step()
    with pytest.warns(UncheckedCheckpoint) as caught:
        state = step.restore(copy)
    assert host_leaves(state) == host_leaves(fresh_state(step))
    assert state.samples == 0
    assert str(caught[0].message) == (
        f"{copy} was written by a version that kept no hashes: the sizes of its files "
        "are right, and their contents could not be checked"
    )
    assert caught[0].filename == __file__


def test_a_record_cannot_lose_its_hashes_alone(copy: Path) -> None:
    record = json.loads((copy / RECORD).read_text())
    del record["record_sha256"]
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(DamagedCheckpoint, match="was changed since"):
        shared_step().restore(copy)


# What cannot be saved.


WRITES_TOO_MUCH = """
import resource, sys
from tests.whalejax import runs

step = runs.shared_step()
state = runs.fresh_state(step)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, most))
try:
    step.save(sys.argv[1], state)
except ValueError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
step.save(sys.argv[1] + "-again", state)
"""


@pytest.mark.full
def test_files_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    """The system itself refuses, in the middle of what Orbax writes."""
    path = tmp_path / "run" / "a"
    done = run_script(WRITES_TOO_MUCH, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"{path}: this checkpoint could not be written (File too large); its files are "
        "removed. A file is larger than is allowed here: save to another file system, "
        "or raise the limit (ulimit -f). The state is as it was\n"
    )
    assert [file.name for file in path.parent.iterdir()] == ["a-again"]


@pytest.mark.parametrize(
    ("part", "number", "remedy"),
    [
        ("write_arrays", 28, "The disk is full: free some space, or save to another"),
        ("hashed", 5, "Save to another path, or mend the file system"),
        ("write_record", 122, "The quota is used up: remove something, or save else"),
        ("mkdir", 30, "The file system is read-only: save to another one"),
        ("rename", 13, "Ask for permission to write there, or save elsewhere"),
    ],
)
def test_every_part_of_a_save_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: int, remedy: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "a-file")

    step = shared_step()
    state = fresh_state(step)
    if part == "rename":
        make: Any = checkpoint.write_record

        def fail_later(*arguments: Any) -> None:
            make(*arguments)
            monkeypatch.setattr(Path, "rename", fail)

        monkeypatch.setattr(checkpoint, "write_record", fail_later)
    else:
        monkeypatch.setattr(Path if part == "mkdir" else checkpoint, part, fail)
    with pytest.raises(wh.WhaleError) as caught:
        step.save(tmp_path / "a", state)
    assert str(caught.value).startswith(
        f"{tmp_path / 'a'}: this checkpoint could not be written "
        f"({os.strerror(number)}); its files are removed. {remedy}"
    )
    assert not [*tmp_path.iterdir()]


def test_an_interrupted_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    step = shared_step()
    monkeypatch.setattr(checkpoint, "write_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step.save(tmp_path / "a", fresh_state(step))
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, before = set[str](), set[str]()
    flush, rename = os.fsync, Path.rename

    def note(opened: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{opened}"))
        flush(opened)

    def renamed(path: Path, target: Path) -> Any:
        if target == tmp_path / "a":
            inside = {str(one) for one in path.rglob("*")}
            assert inside | {str(path)} <= flushed
            before.update(flushed)
        return rename(path, target)

    step = shared_step()
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", renamed)
    step.save(tmp_path / "a", fresh_state(step))
    assert before
    assert str(tmp_path) in flushed - before


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    step = shared_step()
    state = fresh_state(step)
    long = tmp_path / ("x" * 300)
    with pytest.raises(wh.WhaleError, match="A part of the path is a file: give anoth"):
        step.save(tmp_path / "file" / "a", state)
    with pytest.raises(wh.WhaleError, match="File name too long.*Give a shorter path"):
        step.save(long, state)
    with pytest.raises(
        wh.WhaleError, match="File name too long. Give the path of a ch"
    ):
        step.restore(long)
    nowhere: Any
    for nowhere in (None, 5, b"a", ["a"]):
        with pytest.raises(
            wh.WhaleError, match="path is .*; expected the path of a folder that"
        ):
            step.save(nowhere, state)
        with pytest.raises(
            wh.WhaleError, match="path is .*; expected the path of a che"
        ):
            step.restore(nowhere)
    with pytest.raises(
        wh.WhaleError, match=r"path is 'a\\x00b'; expected the path of a folder"
    ):
        step.save("a\0b", state)


def test_two_processes_cannot_write_one_checkpoint(tmp_path: Path) -> None:
    step = shared_step()
    target = tmp_path / "a.b"
    with checkpoint_files.being_built(target):
        with pytest.raises(wh.WhaleError) as caught:
            step.save(target, fresh_state(step))
        assert str(caught.value) == (
            f"{target}: another process is writing a checkpoint to this path at this "
            "moment. Save to another path, or wait for it"
        )
    assert [*tmp_path.iterdir()] == [target]


def test_a_consumed_state_is_refused_in_words(tmp_path: Path) -> None:
    step = shared_step()
    state = fresh_state(step)
    half = dataclasses.replace(
        state, params=jax.tree.map(lambda x: x.copy(), state.params)
    )
    for leaf in jax.tree.leaves(half.params)[1:]:
        leaf.delete()
    with pytest.raises(wh.WhaleError) as caught:
        step.save(tmp_path / "a", half)
    assert str(caught.value) == (
        "2 of the 12 arrays of this state (state.params['down'] first) were deleted, "
        "or donated to a step, which reuses their memory. Use arrays of the state that "
        "the last step returned, and no older ones, or restore a checkpoint"
    )
    for leaf in jax.tree.leaves(half.opt_state):
        leaf.delete()
    with pytest.raises(wh.WhaleError, match="9 of the 12 arrays of this state"):
        step.save(tmp_path / "a", half)
    number: Any = 5
    with pytest.raises(
        wh.WhaleError, match="the state is int; expected the TrainState that"
    ):
        step.save(tmp_path / "a", number)
    assert not [*tmp_path.iterdir()]


def test_hashes_are_made_of_files_as_they_lie(saved: Path) -> None:
    record = read_record(saved)
    assert record.file_sha256 is not None
    name = max(record.file_bytes, key=record.file_bytes.__getitem__)
    whole = (saved / name).read_bytes()
    assert hashlib.sha256(whole).hexdigest() == record.file_sha256[name]
