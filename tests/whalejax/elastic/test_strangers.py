"""Whoever connects without the key, or sends what is no message, changes nothing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.whalejax.elastic.test_supervisor import live, register
from tests.whalejax.keys import KEY, OTHER
from tests.whalejax.messages import Loose, received
from tests.whalejax.wire.test_connections import push
from whalejax.elastic.member_connections import Peers
from whalejax.elastic.supervisor import supervisor as supervisors
from whalejax.elastic.supervisor.supervisor import Supervised, Supervisor
from whalejax.elastic.supervisor_client import Control
from whalejax.membership.settings import SupervisorSettings
from whalejax.meshes.errors import WhaleError
from whalejax.wire import acceptor as acceptors
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.connection import (
    _HEADER,
    Channel,
    ConnectionClosedError,
    WrongKey,
    dial,
    listen,
)
from whalejax.wire.connection_loop import loop
from whalejax.wire.keys import Key, make_key
from whalejax.wire.messages import DATA_BYTES, WireError
from whalejax.wire.run_messages import (
    TO_MEMBER,
    TO_PEER,
    TO_SUPERVISOR,
    GradientPart,
    MemberWelcome,
    PeerHello,
    Total,
)


SECONDS = 120.0
NUMBERS = itertools.count(1)
A = Total(generation=1, step=2)


def until(true: Callable[[], object]) -> None:
    """Wait for something that other threads do."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def report(kind: str, **fields: Any) -> Any:
    """What a member says, with a number."""
    return received(kind, {"number": next(NUMBERS), **fields})


def look() -> None:
    """What a member does while it waits."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Failing(socket.socket):
    """A listening socket that fails now and then."""

    errors: list[int]

    def accept(self) -> Any:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


@contextlib.contextmanager
def accepting(
    listening: socket.socket, serve: Callable[[Channel], None], **options: Any
) -> Iterator[tuple[Acceptor, tuple[str, int]]]:
    address = listening.getsockname()
    acceptor = Acceptor(listening, options.pop("key", KEY), serve, **options)
    try:
        yield acceptor, address
    finally:
        acceptor.close()


def echo(channel: Channel) -> None:
    with contextlib.suppress(WireError):
        while (said := channel.next(TO_PEER)) is not None:
            channel.post(said)


def test_a_listener_without_file_descriptors_goes_on_later() -> None:
    listening = Failing(fileno=listen().detach())
    listening.errors = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPROTO]
    with accepting(listening, echo) as (acceptor, address):
        channel = dial(address, KEY, seconds=SECONDS)
        channel.send(A)
        assert channel.receive(TO_PEER, seconds=SECONDS) == A
        refused = acceptor.take_refused(0.0)
        assert refused is not None and refused.count == 4
        assert "a connection was not accepted" in refused.why
        channel.close()


def test_who_says_nothing_keeps_nobody_out_and_leaves_nothing() -> None:
    before = descriptors()
    with accepting(listen(), echo, most_strangers=8) as (acceptor, address):
        idle = [socket.create_connection(address) for _ in range(100)]
        channel = dial(address, KEY, seconds=SECONDS)
        channel.send(A)
        assert channel.receive(TO_PEER, seconds=SECONDS) == A
        found = []
        # The oldest went; refusals are told at most once a second.
        until(lambda: acceptor._refused >= 92)
        for now in (0.0, 0.5, 0.9, 1.1):
            found.append(acceptor.take_refused(now))
        assert found[0] is not None and found[0].count >= 92
        assert found[1] is found[2] is None
        for link in idle:
            link.close()
        channel.close()
    until(lambda: descriptors() <= before)


def test_who_ends_no_handshake_goes_only_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptors, "_SPEAKING_SECONDS", 0.0)
    with accepting(listen(), echo, most_strangers=2) as (acceptor, address):
        speaking = [socket.create_connection(address) for _ in range(2)]
        for link in speaking:
            link.sendall(b"\x16")
        until(lambda: len(acceptor._strangers) == 2)
        until(lambda: all(s.speaks for s in [*acceptor._strangers]))
        for _ in range(3):  # Nobody waits, so nobody goes.
            acceptor._in_loop(lambda: acceptor.tick(time.monotonic()))
        assert acceptor.take_refused(0.0) is None
        channel = dial(address, KEY, seconds=SECONDS)
        until(lambda: acceptor._refused)
        refused = acceptor.take_refused(10.0)
        assert refused is not None and refused.count == 1
        assert refused.why.endswith(" finished no handshake, and others came")
        channel.close()
        for link in speaking:
            link.close()


def test_members_have_a_limit_of_their_own() -> None:
    with accepting(listen(), echo, most_channels=2) as (acceptor, address):
        channels = [dial(address, KEY, seconds=SECONDS) for _ in range(2)]
        for channel in channels:
            channel.send(A)
            assert channel.receive(TO_PEER, seconds=SECONDS) == A
        with pytest.raises(ConnectionClosedError) as error:
            dial(address, KEY, seconds=SECONDS)
        where = f"{address[0]}:{address[1]}"
        text = f"{where}: it has 2 connections, as many as it takes"
        assert str(error.value) == text
        channels[0].close()
        until(lambda: len(acceptor._channels) < 2)
        dial(address, KEY, seconds=SECONDS).close()
        channels[1].close()


def test_strangers_keep_no_member_out_of_a_run(tmp_path: Path) -> None:
    with live(tmp_path) as there:
        idle = [socket.create_connection(there.address) for _ in range(150)]
        channel, answer = there.join()
        assert answer.kind == "welcome"
        for link in idle:
            link.close()
        until(lambda: sum(e["count"] for e in there.events("stranger")) == 150)
        # Each line in the journal waits for the disk.
        assert len(there.events("stranger")) < 20
        channel.close()


def test_who_sends_more_than_is_read_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "_MOST_EVENTS", 4)
    run = Supervised(
        command=(), folder=tmp_path, settings=SupervisorSettings(least=1, most=1)
    )
    supervisor = Supervisor(run)
    with supervisor._held:
        channel: Any = object()
        said = report("ready")

        def tells() -> None:
            for _ in range(10):
                supervisor._tell(channel, said)

        thread = threading.Thread(target=tells)
        thread.start()
        until(lambda: supervisor._events.full())
        assert thread.is_alive() and supervisor._events.qsize() == 4
        while thread.is_alive():
            supervisor._take_events()
            thread.join(0.001)


# What is no message.


def mutated(drawn: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, with one of them of another kind or missing."""
    wrong = [None, -7, 1 << 60, 1.5, float("nan"), "x" * 30_000, [[1]], {"a": 1}, b"x"]
    found, name = dict(fields), drawn.choice([*fields, "more"])
    if drawn.random() < 0.2:
        found.pop(name, None)
    found[name] = drawn.choice(wrong)
    return found


def malformed(drawn: random.Random, channel: Channel, kinds: list[str]) -> None:
    """Send bytes that are no frame, or a frame that is no message that may come."""
    with contextlib.suppress(WireError, OSError):
        match drawn.randrange(5):
            case 0:
                push(channel, drawn.randbytes(drawn.randrange(1, 400)))
            case 1:
                push(channel, _HEADER.pack(1 << 20, 1 << 30))
            case 2:
                push(channel, _HEADER.pack(8, 0) + drawn.randbytes(8 + 32))
            case 3:
                kind = drawn.choice(["__init__", "effects", "x", "said", *kinds])
                array = np.zeros(drawn.randrange(9))
                fields = {"a": drawn.randrange(9), "arrays": (array,)}
                channel.send(Loose({"kind": kind, **fields}))  # type: ignore[arg-type]
            case _:
                fields = mutated(drawn, register())
                channel.send(Loose({"kind": "register", **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_malformed_frames_change_nothing_in_a_supervisor(
    tmp_path: Path, count: int
) -> None:
    drawn = random.Random(count)
    # The member answers after all frames, however slow the machine is.
    with live(tmp_path, lease_seconds=6000.0, prepare_seconds=6000.0) as there:
        one, _ = there.join()
        one.send(report("ready"))
        asked = until_kind(one, "prepare")
        membership, before = there.supervisor._state, descriptors()
        was = membership.generation, membership.phase, [*membership.members]
        for number in range(count):
            if number % 4:
                channel = dial(there.address, there.key, seconds=SECONDS)
                malformed(drawn, channel, [*TO_SUPERVISOR.kinds])
                channel.close()
            else:
                with socket.create_connection(there.address) as link:
                    link.sendall(drawn.randbytes(drawn.randrange(1, 300)))
        until(lambda: descriptors() <= before)
        assert was == (membership.generation, membership.phase, [*membership.members])
        generation = asked.generation
        one.send(report("prepared", generation=generation, step=-1, held=[]))
        assert until_kind(one, "begin").generation == generation
        one.send(report("finished", step=10))
        until_kind(one, "done")
        one.close()


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_malformed_frames_change_nothing_between_members(count: int) -> None:
    drawn, before = random.Random(count), descriptors()
    one, other = Peers(KEY), Peers(KEY)
    members = [("a", one.host, one.port), ("b", other.host, other.port)]
    thread = threading.Thread(target=one.connect, args=(3, "a", members, look))
    thread.start()
    other.connect(3, "b", members, look)
    thread.join()
    for number in range(count):
        address = (one.host, one.port)
        if number % 4:
            channel = dial(address, KEY, seconds=SECONDS, most_bytes=DATA_BYTES)
            malformed(drawn, channel, [*TO_PEER.kinds])
            channel.close()
        else:
            with socket.create_connection(address) as link:
                link.sendall(drawn.randbytes(drawn.randrange(1, 300)))
    sent = GradientPart(generation=3, step=1, nodes=[(0, 8)], arrays=(np.arange(4.0),))
    other.send("a", sent, look)
    (array,) = one.take("b", GradientPart, 1, look).arrays
    np.testing.assert_array_equal(array, np.arange(4.0))
    assert not one.broken and not one._inbox
    one.close()
    other.close()
    until(lambda: descriptors() <= before)


def until_kind(channel: Channel, kind: str) -> Any:
    while (said := channel.receive(TO_MEMBER, seconds=SECONDS)).kind != kind:
        pass
    return said


# Members that come, go and come again.


def test_members_leave_no_connection_behind() -> None:
    loop()  # Its thread and descriptors stay.
    before, threads = descriptors(), threading.active_count()
    one, other = Peers(KEY), Peers(KEY)
    members = [("a", one.host, one.port), ("b", other.host, other.port)]
    for generation in range(1, 6):
        thread = threading.Thread(
            target=one.connect, args=(generation, "a", members, look)
        )
        thread.start()
        other.connect(generation, "b", members, look)
        thread.join()
    until(lambda: threading.active_count() == threads)
    late = dial((one.host, one.port), KEY, most_bytes=DATA_BYTES)
    late.send(PeerHello(generation=2, name="b"))
    with pytest.raises(ConnectionClosedError):
        late.receive(TO_PEER, seconds=SECONDS)
    late.close()
    one.close()
    other.close()
    until(lambda: descriptors() <= before)
    until(lambda: threading.active_count() == threads)


def test_a_connection_that_takes_the_place_of_another_is_used() -> None:
    one = Peers(KEY)
    one.generation, one._name = 1, "a"
    hello = PeerHello(generation=1, name="b")
    first = dial((one.host, one.port), KEY, most_bytes=DATA_BYTES)
    first.send(hello)
    until(lambda: one._channels)
    second = dial((one.host, one.port), KEY, most_bytes=DATA_BYTES)
    second.send(hello)
    with pytest.raises(ConnectionClosedError):
        first.receive(TO_PEER, seconds=SECONDS)
    second.send(Total(generation=1, step=0))
    assert one.take("b", Total, 0, look).kind == "total"
    assert not one.broken
    first.close()
    second.close()
    one.close()


# Why a connection fails.


def test_a_listener_that_is_killed_has_not_refused_the_key(tmp_path: Path) -> None:
    """Its end in the middle of a handshake is no answer: it is asked again."""
    listening = listen()
    make_key(tmp_path / "key")
    host, port = listening.getsockname()
    control = Control(f"{host}:{port}", str(tmp_path / "key"), register)

    def serve(channel: Channel) -> None:
        if not channel.is_closed and channel.next(TO_SUPERVISOR) is not None:
            channel.post(MemberWelcome(run="r", name="x1", beat_seconds=1.0))

    def serves() -> None:
        for said in (0, 200):  # Before anything was said, and after a part.
            link, _ = listening.accept()
            link.sendall(answer(control.key, link.recv(1 << 12))[:said])
            link.close()
        with accepting(listening, serve, key=control.key):
            over.wait(SECONDS)

    over = threading.Event()
    thread = threading.Thread(target=serves)
    thread.start()
    control.open()
    assert control.name == "x1"
    control.close()
    over.set()
    thread.join()


def answer(key: Key, asked: bytes) -> bytes:
    """What a listener says to a process that begins to encrypt."""
    comes, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    comes.write(asked)
    with pytest.raises(ssl.SSLWantReadError):
        key.accepts.wrap_bio(comes, goes, server_side=True).do_handshake()
    return goes.read()


def test_a_refused_key_is_told_by_type() -> None:
    with accepting(listen(), echo) as (_, address):
        with pytest.raises(WrongKey, match="are of different runs"):
            dial(address, OTHER, seconds=SECONDS)


@pytest.mark.parametrize(
    "address",
    [("127.0.0.1", 1 << 20), ("ab\0cd", 1), ("a" * 300, 1), ("127.0.0.1", -1)],
)
def test_what_is_no_address_is_said(address: tuple[str, int]) -> None:
    with pytest.raises(ConnectionClosedError, match=address[0][:2]) as raised:
        dial(address, KEY, seconds=1.0)
    assert len(str(raised.value)) < 200 and "\0" not in str(raised.value)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "answered nothing in time"),
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(99), "is no process of a run"),
    ],
)
def test_what_is_no_supervisor_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes, why: str
) -> None:
    make_key(tmp_path / "key")
    monkeypatch.setattr("whalejax.elastic.supervisor_client.FIRST_SECONDS", 0.2)
    with listen() as listening:
        host, port = listening.getsockname()
        links: list[socket.socket] = []

        def serves() -> None:
            with contextlib.suppress(OSError):
                while True:
                    links.append(listening.accept()[0])
                    links[-1].sendall(says)

        thread = threading.Thread(target=serves)
        thread.start()
        control = Control(f"{host}:{port}", str(tmp_path / "key"), register)
        with pytest.raises(WhaleError, match=why):
            control.open()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for link in links:
            link.close()
    with pytest.raises(WhaleError, match="supervisor is 'x'; expected HOST:PORT"):
        Control("x", str(tmp_path / "key"), register)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("committed", {"seconds": float("nan")}),
        ("committed", {"seconds": float("inf")}),
        ("committed", {"seconds": -1.0}),
        ("register", {"port": 1 << 20}),
        ("register", {"port": -1}),
        ("register", {"host": "h" * 30_000}),
        ("beat", {"step": 1 << 60}),
        ("beat", {"step": True}),
    ],
)
def test_numbers_that_would_spread_are_refused(
    kind: str, changed: dict[str, Any]
) -> None:
    good: dict[str, Any] = {
        "register": register(),
        "beat": {"phase": "x", "step": 1, "done": 1},
        "committed": report(
            "committed", generation=1, step=1, loss=float("nan"), seconds=0.1, parts={}
        ).fields,
    }[kind]
    received(kind, good)  # A loss may be NaN.
    (name,) = changed
    with pytest.raises(WireError, match=rf"at `\$\.{name}`"):
        received(kind, {**good, **changed})
