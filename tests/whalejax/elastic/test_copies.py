"""Copies of shards in the memory of the machine: other layouts read them to the bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.test_spread import in_order, within
from whalejax.elastic import copies, copying
from whalejax.elastic.copies import BadCopies, Copied, Copies, read_copies, whole_sets
from whalejax.elastic.copying import Copying
from whalejax.elastic.spread_programs import SpreadPrograms
from whalejax.elastic.supervisor.memory_folder import memory_folder, remove_copies


pytestmark = pytest.mark.relaxed_promotion


def programs(mesh: dict[str, int], micro_batches: int) -> SpreadPrograms:
    return SpreadPrograms(
        example.make(),
        mesh=mesh,
        batch=None,
        micro_batches=micro_batches,
        precision="f32",
        seed=0,
    )


@pytest.fixture(scope="module")
def made() -> SpreadPrograms:
    return programs({"fsdp": 4, "data": 2}, 1)


def copied(folder: Path, made: SpreadPrograms, state: Any, step: int) -> Copied:
    one = Copied(step=step, generation=3, count=1)
    there = Copies(folder)
    there.begin(state, made.plan, one, 0)
    there.wait()
    assert not there.problem()
    return one


def test_other_layouts_read_copies_to_the_bit(
    tmp_path: Path, made: SpreadPrograms
) -> None:
    state, _ = made.begun(None)
    state, _ = made.step(state, made.batch(0))
    known = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    one = copied(tmp_path / "c", made, state, 1)
    assert whole_sets(tmp_path / "c") == [one]
    for mesh, count in (({"data": 2, "tensor": 4}, 1), ({"stage": 2, "data": 4}, 4)):
        other = programs(mesh, count)
        back = read_copies(tmp_path / "c", one, other.step.abstract_state(), other.plan)
        leaves = jax.tree.leaves((back.params, back.opt_state))
        for x, y in zip(known, leaves, strict=True):
            np.testing.assert_array_equal(x, y)
        assert (int(back.step), back.samples) == (1, example.SIZE)
        jax.block_until_ready(other.step(back, other.batch(1)))


def test_copies_that_were_changed_or_are_not_whole_are_not_used(
    tmp_path: Path, made: SpreadPrograms
) -> None:
    state, _ = made.begun(None)
    folder = tmp_path / "c"
    one = copied(folder, made, state, 0)
    given = made.step.abstract_state(), made.plan
    (path,) = one.files(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCopies, match="is not as it was written"):
        read_copies(folder, one, *given)
    path.write_bytes(b"short")
    with pytest.raises(BadCopies, match="copies of step 0 cannot be read"):
        read_copies(folder, one, *given)
    path.rename(folder / "0-3-0of2")  # One of two processes did not write its own.
    assert whole_sets(folder) == []
    folder.chmod(0o755)
    with pytest.raises(BadCopies, match="is not this user's alone"):
        Copies(folder)


def test_the_newest_set_is_taken_and_older_ones_go(
    tmp_path: Path, made: SpreadPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "memory_folder", lambda run: run / "c")
    told: list[str] = []
    makes = Copying(
        made.step,
        tmp_path,
        1,
        every=None,
        mtbf=200.0,
        tell=lambda step, why: told.append(why),
    )
    state, _ = made.begun(None)
    assert makes.newest(0) is None and not makes.is_due(0) and makes.is_due(1)
    for done in (1, 2, 3):
        state, _ = made.step(state, made.batch(done - 1))
        makes.copy(state, done)
        makes.wait()
    assert [s.step for s in whole_sets(tmp_path / "c")] == [3, 2]
    back = makes.newest(2)
    assert back is not None and int(back.step) == 3
    assert makes.newest(3) is None
    # A damaged one is told of, and the next older is taken.
    newest = whole_sets(tmp_path / "c")[0].files(tmp_path / "c")[0]
    newest.write_bytes(b"short")
    back = makes.newest(1)
    assert back is not None and int(back.step) == 2 and len(told) == 1
    makes._cost, makes._seconds = 1.0, 0.5
    assert makes.steps() == 39  # Daly: 19.3 s of work between copies of 1 s.

    def full(path: Path, mode: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copies.Path, "open", full)
    makes.copy(state, 4)
    makes.copy(state, 5)
    assert told[1:] == ["No space left on device"] and not makes.is_due(100)


def test_the_supervisor_removes_them(tmp_path: Path) -> None:
    there = Copies(memory_folder(tmp_path))
    remove_copies(tmp_path)
    assert not there.folder.exists()
    remove_copies(tmp_path)


@pytest.mark.full
def test_a_loss_costs_no_more_than_the_steps_since_a_copy(tmp_path: Path) -> None:
    def work(run: Any) -> None:
        run.until_steps_of(3)
        run.shrink(2, 2)

    counts, events = within(
        tmp_path,
        "fsdp",
        work,
        seats=3,
        steps=30,
        micro_batches=None,
        save_every=1000,
        copy_every=1,
    )
    assert in_order([3, 2], counts)
    told = [e["source"] for e in events if e["event"] == "recovered"]
    assert told[0] == "a new state" and len(told) >= 2
    assert all(source.startswith("copies in memory, of step") for source in told[1:])
    assert not memory_folder(tmp_path / "elastic" / "key").exists()
