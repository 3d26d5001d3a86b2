"""Processes come together before JAX joins them; who is missing is named by all."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import pytest

from tests.processes import free_port
from tests.whalejax.keys import KEY, OTHER
from whalejax.distributed import rendezvous as meeting_place
from whalejax.distributed.first_connection import reach
from whalejax.distributed.rendezvous import (
    Arrival,
    Go,
    LostProcess,
    LostProcessError,
    MissingRanks,
    ProcessPlace,
    RendezvousClient,
    RendezvousServer,
    missing_ranks_text,
    rendezvous,
)
from whalejax.meshes.errors import WhaleError
from whalejax.wire.addresses import joined_address
from whalejax.wire.connection import UNENCRYPTED, Channel
from whalejax.wire.keys import Key
from whalejax.wire.messages import Messages, encode


class Process:
    """A thread that stands for a process: what it has found, and why it was to end."""

    made: ClassVar[list[RendezvousServer | RendezvousClient]] = []

    def __init__(self, place: ProcessPlace) -> None:
        self.place = place
        self.ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            made = rendezvous(self.place, self.ends.put)
            self.made.append(made)
            self._found.put(made)
        except WhaleError as error:
            self._found.put(error)

    def found(self) -> Any:
        return self._found.get(timeout=60)

    def told(self) -> str:
        return self.ends.get(timeout=60)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while Process.made:
        Process.made.pop().close()


def place_of(count: int, host: str = "127.0.0.1", **more: Any) -> ProcessPlace:
    given = {"seconds": 60.0, "join_seconds": 60.0, "key": KEY, **more}
    address = joined_address(host, free_port())
    return ProcessPlace(coordinator=address, count=count, rank=0, **given)


def rank_of(place: ProcessPlace, rank: int, **more: Any) -> ProcessPlace:
    return dataclasses.replace(place, rank=rank, **more)


@contextlib.contextmanager
def raw(place: ProcessPlace) -> Iterator[socket.socket]:
    """A connection, as soon as process 0 listens."""
    address = ("127.0.0.1", int(place.coordinator.rpartition(":")[2]))
    while True:
        try:
            link = socket.create_connection(address, 30)
            break
        except ConnectionRefusedError:
            continue
    with link:
        yield link


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("key", [None, KEY])
def test_all_come_together_and_are_joined(host: str, key: Key | None) -> None:
    place = place_of(3, host, key=key)
    processes = [Process(rank_of(place, rank)) for rank in (2, 1, 0)]
    found = [process.found() for process in processes]
    assert [type(one) for one in found] == [
        RendezvousClient,
        RendezvousClient,
        RendezvousServer,
    ]
    # The port is free again, for JAX's own service.
    meeting_place._listen(place).close()
    for one in found:
        one.mark_joined()
    with found[2]._changed:
        assert found[2]._changed.wait_for(lambda: len(found[2]._joined) == 3, 60)
    assert all(process.ends.empty() for process in processes)


def test_one_that_never_comes_is_named_by_all() -> None:
    place = place_of(4, seconds=3.0)
    processes = [
        Process(place),
        *(Process(rank_of(place, r, seconds=60)) for r in (1, 3)),
    ]
    found = [process.found() for process in processes]
    for error in found:
        assert isinstance(error, LostProcessError) and error.rank == 2
        assert f"process 2 of 4 has not come to {place.coordinator} in 3 s" in str(
            error
        )
        assert "has it a process_id of its own" in str(error)


def test_who_loses_patience_before_process_0_names_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_place, "_MARGIN_SECONDS", 1.0)
    place = place_of(3)
    first = Process(place)
    with raw(place):
        pass
    error = Process(rank_of(place, 1, seconds=2.0)).found()
    assert isinstance(error, LostProcessError) and error.rank == 2
    assert "process 2 of 3 has not come" in str(error)
    # It came and left, which all that know the secret believe at once.
    assert "process 1 (pid " in str(first.found())


def test_process_0_that_never_comes_is_named() -> None:
    error = Process(rank_of(place_of(2), 1, seconds=0.5)).found()
    assert isinstance(error, LostProcessError) and error.rank == 0
    assert "nothing listens at 127.0.0.1" in str(error)


def guest(place: ProcessPlace, rank: int) -> Channel:
    """A process that says who it is, and then nothing more."""
    channel = reach(place.coordinator, place.key, time.monotonic() + 60)
    channel.send(Arrival(rank=rank, count=place.count, where="a test"))
    return channel


def frame(text: bytes) -> bytes:
    return UNENCRYPTED + len(text).to_bytes(4, "big") + bytes(8) + text


STRANGE: Final = (
    b"",
    b"",
    b"[]\n",
    UNENCRYPTED,
    UNENCRYPTED + b"\xff" * 12,
    frame(b"\x91" * 50_000),
    frame(encode(Go())[0]),
    frame(encode(Arrival(rank=7, count=2, where=""))[0]),
    frame(encode(Arrival(rank=0, count=2, where=""))[0]),
    frame(encode(Arrival(rank=1, count=9, where=""))[0]),
    b"\xff" * 400_000,
)


@pytest.mark.parametrize("key", [None, KEY])
def test_strangers_end_nothing_and_keep_nobody_waiting(key: Key | None) -> None:
    place = place_of(2, key=key)
    first = Process(place)
    with contextlib.ExitStack() as stack:
        for said in STRANGE:
            link = stack.enter_context(raw(place))
            with contextlib.suppress(OSError):  # it may have heard enough
                link.sendall(said)
        second = Process(rank_of(place, 1))
        for process in (first, second):
            found = process.found()
            assert isinstance(found, RendezvousServer | RendezvousClient), found
            found.mark_joined()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"key": OTHER}, "its key and that of this process are of different runs"),
        ({"key": None}, "one side was given a key"),
        ({"count": 3}, "num_processes is 3 in process 1 and 2 in process 0"),
    ],
)
def test_who_does_not_belong_is_told_so(more: dict[str, Any], says: str) -> None:
    place = place_of(2)
    first = Process(place)
    error = Process(rank_of(place, **{"rank": 1, **more})).found()
    assert isinstance(error, WhaleError) and says in str(error)
    # The one that belongs comes all the same.
    for process in (first, Process(rank_of(place, 1))):
        process.found().mark_joined()


def test_two_processes_of_one_number() -> None:
    place = place_of(4)
    processes = [Process(place), Process(rank_of(place, 1))]
    with contextlib.closing(guest(place, 2)) as other:
        said = Messages(Go, MissingRanks, LostProcess)
        # The first of number 1 is there.
        while other.receive(said, seconds=30) != MissingRanks(ranks=[3]):
            pass
        error = Process(rank_of(place, 1)).found()
        assert "process_id 1 was given to two processes: pid " in str(error)
        processes.append(Process(rank_of(place, 3)))
        for process in processes:
            assert isinstance(process.found(), RendezvousServer | RendezvousClient)


def test_one_that_ends_before_jax_has_joined_it_ends_all() -> None:
    place = place_of(3)
    processes = [Process(rank_of(place, rank)) for rank in range(3)]
    found = [process.found() for process in processes]
    found[0].mark_joined()
    found[2].close()
    for process in processes[:2]:
        assert "process 2 (pid " in (said := process.told())
        assert "came and ended before JAX had joined all" in said


def test_one_that_stands_still_before_jax_has_joined_it_is_named() -> None:
    place = place_of(3, join_seconds=2.0)
    processes = [Process(rank_of(place, rank)) for rank in range(2)]
    with contextlib.closing(guest(place, 2)):
        for process in processes:
            assert isinstance(process.found(), RendezvousServer | RendezvousClient)
        for process in processes:
            assert process.told() == (
                "process 2 stands still, before JAX had joined all"
            )


def test_process_0_that_ends_before_jax_has_joined_all_ends_the_others() -> None:
    place = place_of(2)
    processes = [Process(rank_of(place, rank)) for rank in range(2)]
    found = [process.found() for process in processes]
    found[0].close()
    assert processes[1].told() == "process 0 ended before JAX had joined all"


def test_many_are_not_all_named() -> None:
    said = missing_ranks_text(list(range(1, 100)), 100)
    assert said == "processes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 89 more of 100 have"


def test_a_coordinator_of_another_machine_is_said() -> None:
    with pytest.raises(WhaleError, match=r"no-such\.invalid has no address here"):
        rendezvous(
            ProcessPlace(
                coordinator="no-such.invalid:1",
                count=1,
                rank=0,
                seconds=1,
                join_seconds=1,
            ),
            lambda _: None,
        )
