"""Copies of shards in the memory of the machine: other layouts read them to the bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.whalejax.elastic import job as example
from tests.whalejax.elastic.test_spread import in_order, within
from tests.whalejax.keys import KEY, OTHER
from whalejax.elastic import copy_schedule
from whalejax.elastic.copy_schedule import ShardCopyManager
from whalejax.elastic.sharded_programs import SpreadPrograms
from whalejax.elastic.supervisor.memory_folder import (
    memory_folder,
    memory_folders,
    remove_copies,
)
from whalejax.state import remote_shard_copies as copy_machines
from whalejax.state import shard_copies as copies
from whalejax.state.remote_shard_copies import (
    CopyExchange,
    CopyHolder,
    Put,
    names_in,
)
from whalejax.state.shard_copies import (
    BadCopies,
    Copies,
    CopyFile,
    ShardCopySet,
    copy_file,
    read_copies,
    whole_sets,
)
from whalejax.wire.service import RefusedRequestError, UnreachableProcessError


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


def opens(folder: Path) -> Callable[[str], CopyFile]:
    return lambda name: copy_file(folder / name)


def copied(folder: Path, made: SpreadPrograms, state: Any, step: int) -> ShardCopySet:
    one = ShardCopySet(step=step, generation=3, count=1)
    there = Copies(folder)
    there.begin(made.copied_states().parts(state), state.samples, one, 0)
    there.wait()
    assert not there.problem()
    return one


def test_other_layouts_read_copies_to_the_bit(
    tmp_path: Path, made: SpreadPrograms
) -> None:
    state = made.restore_or_init(None)
    state, _ = made.step(state, made.batch(0))
    known = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    one = copied(tmp_path / "c", made, state, 1)
    assert whole_sets(names_in(tmp_path / "c")) == [one]
    for mesh, count in (({"data": 2, "tensor": 4}, 1), ({"stage": 2, "data": 4}, 4)):
        other = programs(mesh, count)
        back = read_copies(opens(tmp_path / "c"), one, other.copied_states())
        leaves = jax.tree.leaves((back.params, back.opt_state))
        for x, y in zip(known, leaves, strict=True):
            np.testing.assert_array_equal(x, y)
        assert (int(back.step), back.samples) == (1, example.SIZE)
        jax.block_until_ready(other.step(back, other.batch(1)))


def test_copies_that_were_changed_or_are_not_whole_are_not_used(
    tmp_path: Path, made: SpreadPrograms
) -> None:
    state = made.restore_or_init(None)
    folder = tmp_path / "c"
    one = copied(folder, made, state, 0)
    states = made.copied_states()
    (path,) = [folder / name for name in one.names]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCopies, match="was changed since it was written"):
        read_copies(opens(folder), one, states)
    path.write_bytes(b"short")
    with pytest.raises(BadCopies, match="copies of step 0 cannot be read"):
        read_copies(opens(folder), one, states)
    path.rename(folder / "0-3-0of2")  # One of two processes did not write its own.
    assert whole_sets(names_in(folder)) == []
    folder.chmod(0o755)
    with pytest.raises(BadCopies, match="belongs to another user, or others can"):
        Copies(folder)


def test_the_newest_set_is_taken_and_older_ones_go(
    tmp_path: Path, made: SpreadPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_schedule, "memory_folder", lambda key, run: key / "c")
    told: list[str] = []

    def makes_of(generation: int) -> ShardCopyManager:
        return ShardCopyManager(
            made.copied_states(),
            tmp_path,
            generation,
            every=None,
            mtbf=200.0,
            tell=lambda step, why: told.append(why),
        )

    makes = makes_of(1)
    state = made.restore_or_init(None)
    assert makes.newest(0) is None and not makes.is_due(0) and makes.is_due(1)
    for done in (1, 2, 3):
        state, _ = made.step(state, made.batch(done - 1))
        makes.copy(state, done)
        makes.wait()
    assert [s.step for s in whole_sets(names_in(tmp_path / "c"))] == [3, 2]
    back = makes.newest(2)
    assert back is not None and int(back.step) == 3
    assert makes.newest(3) is None
    # A damaged one is told of, and the next older is taken.
    (newest,) = whole_sets(names_in(tmp_path / "c"))[0].names
    (tmp_path / "c" / newest).write_bytes(b"short")
    makes = makes_of(2)
    back = makes.newest(1)
    assert back is not None and int(back.step) == 2 and len(told) == 1
    assert [s.step for s in whole_sets(names_in(tmp_path / "c"))] == [2]
    makes._cost, makes._seconds = 1.0, 0.5
    assert makes.steps() == 39  # Daly: 19.3 s of work between copies of 1 s.

    def full(path: Path, mode: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copies.Path, "open", full)
    # A set that was not written is told of, and later ones are tried.
    for done in (4, 5):
        makes.copy(state, done)
    makes.wait()
    assert told[1:] == ["No space left on device"] and makes.is_due(100)
    assert [s.step for s in whole_sets(names_in(tmp_path / "c"))] == [2]
    for done in (6, 7, 8):
        makes.copy(state, done)
    assert len(told) == 4 and "3 in a row failed, so no more copies" in told[-1]
    assert not makes.is_due(100)


def test_the_supervisor_removes_them(tmp_path: Path) -> None:
    first, second = (Copies(memory_folder(tmp_path, run)) for run in ("a1", "b2"))
    remove_copies(tmp_path, but="b2")  # What a run that was killed has left.
    assert not first.folder.exists() and memory_folders(tmp_path) == [second.folder]
    remove_copies(tmp_path)
    assert memory_folders(tmp_path) == []
    remove_copies(tmp_path)


BYTE = np.zeros(1, np.uint8)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[CopyExchange]]:
    """Two machines: a folder of copies each, and who answers for it."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir(mode=0o700)
    found = [CopyExchange(folder, KEY, "127.0.0.1") for folder in folders]
    yield found
    for one in found:
        one.close()


def holder(exchange: CopyExchange, machine: str = "") -> CopyHolder:
    return CopyHolder(machine=machine, host=exchange.host, port=exchange.port)


def test_a_machine_that_is_lost_leaves_its_copies_on_another(
    tmp_path: Path,
    made: SpreadPrograms,
    machines: list[CopyExchange],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_machines, "_PART_BYTES", 1000)  # Files in several parts.
    first, second = machines
    state = made.restore_or_init(None)
    state, _ = made.step(state, made.batch(0))
    one = ShardCopySet(step=1, generation=3, count=1)
    there = Copies(tmp_path / "a")
    given = made.copied_states().parts, state.samples, one, 0
    there.begin(
        given[0](state), *given[1:], lambda path: first.send(path, holder(second))
    )
    there.wait()
    assert not there.problem()
    (name,) = one.names
    assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    (tmp_path / "a" / name).unlink()
    other = programs({"data": 2, "tensor": 4}, 1)
    states = other.copied_states()
    back = read_copies(lambda name: first.file(name, holder(second)), one, states)
    for x, y in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((back.params, back.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    second.close()
    with pytest.raises(BadCopies, match="copies of step 1 cannot be read"):
        read_copies(lambda name: first.file(name, holder(second)), one, states)
    given = made.copied_states().parts, state.samples, one, 0
    there.begin(
        given[0](state), *given[1:], lambda path: first.send(path, holder(second))
    )
    there.wait()
    assert "did not take copies of this machine" in there.problem()


def test_machines_are_asked_for_copies_alone(
    tmp_path: Path, machines: list[CopyExchange]
) -> None:
    first, second = machines
    (tmp_path / "secret").write_bytes(b"secret")
    for name in ("../secret", "secret", "1-1-0of1/../../secret", "1-1-0of1\n"):
        with pytest.raises(OSError, match="did not come"):
            first.file(name, holder(second))
        fields = {"name": name, "place": 0, "last": True}
        with pytest.raises((UnreachableProcessError, RefusedRequestError)):
            question = Put(**fields, arrays=(BYTE,))
            first._caller.ask((second.host, second.port), question, seconds=10.0)
    fields = {"name": "1-1-0of1", "place": 0, "last": True}
    address = second.host, second.port

    def put(fields: dict[str, Any], array: np.ndarray) -> None:
        first._caller.ask(address, Put(**fields, arrays=(array,)), seconds=10.0)

    with pytest.raises(RefusedRequestError, match="one array of bytes"):
        put(fields, np.zeros(1))
    with pytest.raises(RefusedRequestError, match="bytes before 5"):
        late = {**fields, "place": 5}
        (tmp_path / "b" / ".1-1-0of1.put").write_bytes(b"x")
        put(late, BYTE)
    (tmp_path / "b" / ".1-1-0of1.put").unlink()
    # The last part may come again where its answer was lost.
    put({**fields, "last": False}, BYTE)
    for _ in range(2):
        last = {**fields, "place": 1}
        put(last, BYTE)
    assert first.file("1-1-0of1", holder(second)).size == 2
    (tmp_path / "b" / "1-1-0of1").unlink()
    with pytest.raises(OSError, match="did not come"):
        first.file("1-1-0of1", holder(second))  # It has none.
    stranger = CopyExchange(tmp_path / "a", OTHER, "127.0.0.1")
    with pytest.raises(OSError, match="did not come"):
        stranger.file("1-1-0of1", holder(second))
    stranger.close()
    assert names_in(tmp_path / "b") == []


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
    assert not memory_folders(tmp_path / "elastic" / "key")
