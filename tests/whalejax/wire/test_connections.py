"""Encrypted connections: what others see, change or send has no effect."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from msgspec import Meta

from tests.whalejax.keys import KEY, OTHER
from whalejax.wire import acceptor as acceptors
from whalejax.wire import connection as connections
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.connection import (
    Channel,
    ConnectionClosedError,
    OtherProtocol,
    WireTimeoutError,
    WrongKey,
    dial,
    listen,
)
from whalejax.wire.keys import Key, _context, issue_key, load_key, make_key, revoke_key
from whalejax.wire.messages import (
    DATA_BYTES,
    Arrays,
    Message,
    Messages,
    WireError,
)


SECONDS = 120.0


class Values(Message):
    n: Annotated[int, Meta(ge=0)] = 0
    text: str = ""
    arrays: Arrays = ()


TAKES = Messages(Values)


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


class Listener:
    """Takes connections, and keeps what comes over them."""

    def __init__(self, key: Key = KEY, *, reads: bool = True, **options: Any) -> None:
        listening = listen()
        self.address: tuple[str, int] = listening.getsockname()
        self.came: list[Values] = []
        self.channels: list[Channel] = []
        self.ended: list[str] = []
        self.reads = reads
        self.acceptor = Acceptor(listening, key, self._take, **options)

    def _take(self, channel: Channel) -> None:
        if channel not in self.channels:
            self.channels.append(channel)
        if not self.reads and not channel.is_closed:
            return
        try:
            while (said := channel.next(TAKES)) is not None:
                self.came.append(said)
        except ConnectionClosedError as error:
            self.ended.append(str(error))
        except WireError as error:
            self.ended.append(str(error))
            channel.close()


@contextlib.contextmanager
def listener(key: Key = KEY, **options: Any) -> Iterator[Listener]:
    found = Listener(key, **options)
    try:
        yield found
    finally:
        found.acceptor.close()


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection, of which the second is read by hand."""
    given = {"most_bytes": DATA_BYTES, **options}
    with listener(reads=False, **given) as found:
        channel = dial(found.address, KEY, most_bytes=given["most_bytes"])
        until(lambda: found.acceptor._channels)
        (other,) = found.acceptor._channels
        yield channel, other
        channel.close()


def push(channel: Channel, data: bytes) -> None:
    """Send bytes that are no message, encrypted as all."""
    part = memoryview(data)
    while part.nbytes:
        part = part[channel._write(part) :]


def frame(message: Any) -> bytes:
    """The bytes that are a message."""
    with pair() as (channel, _):
        return b"".join(channel._frame(message))


# What is sent.


def test_messages_go_both_ways() -> None:
    array = np.arange(200_000, dtype=np.float32)
    with pair() as (one, other):
        one.send(Values(n=1, arrays=(array,)))
        found = other.receive(TAKES, seconds=SECONDS)
        np.testing.assert_array_equal(found.arrays[0], array)
        other.post(Values(n=2))
        other.send(Values(n=3))
        assert [one.receive(TAKES, seconds=SECONDS).n for _ in "ab"] == [2, 3]
        other.send(Values(n=4))
        one.shut_down()  # What came before can still be received.
        until(lambda: one.is_closed)
        with contextlib.suppress(ConnectionClosedError):
            assert one.receive(TAKES, seconds=SECONDS).n == 4
        with pytest.raises(ConnectionClosedError):
            one.receive(TAKES, seconds=SECONDS)


def test_many_threads_send_whole_messages() -> None:
    with listener(most_bytes=DATA_BYTES) as found:
        channel = dial(found.address, KEY, most_bytes=DATA_BYTES)

        def sends(first: int) -> None:
            for n in range(first, first + 50):
                more = (np.full(9_000, n),)
                if n % 3:
                    channel.send(Values(n=n, arrays=more))
                else:
                    channel.post(Values(n=n, arrays=more))

        threads = [threading.Thread(target=sends, args=(k * 50,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(found.came) == 200)
        assert sorted(said.n for said in found.came) == [*range(200)]
        assert all((said.arrays[0] == said.n).all() for said in found.came)
        channel.close()


def test_one_thread_reads_all_connections() -> None:
    with listener() as found:
        dial(found.address, KEY).close()  # Begins that thread, where none does yet.
        before = threading.active_count()
        channels = [dial(found.address, KEY) for _ in range(60)]
        for n, channel in enumerate(channels):
            channel.send(Values(n=n))
        until(lambda: len(found.came) == 60)
        assert threading.active_count() == before
        for channel in channels:
            channel.close()


def test_who_dials_at_once_gets_in() -> None:
    with listener() as found:
        inside: list[Channel] = []
        failed: list[str] = []

        def dials() -> None:
            try:
                inside.append(dial(found.address, KEY, seconds=SECONDS))
            except WireError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=dials) for _ in range(150)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and len(inside) == 150
        for channel in inside:
            channel.close()


def test_both_sides_send_the_parts_of_a_frame_at_once() -> None:
    """Else an answer waits for the other side's acknowledgement, 40 ms on Linux."""
    with pair() as ends:
        for end in ends:
            assert end._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end._link.version() == "TLSv1.3"


# Who listens in between.


class Between:
    """Hands on what two processes send each other, and may do something to it."""

    def __init__(
        self, address: tuple[str, int], change: Callable[[bytes, int], bytes] | None
    ) -> None:
        self.seen, self._change = b"", change
        self._listening = listen()
        self.address: tuple[str, int] = self._listening.getsockname()
        self._there = address
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        came, _ = self._listening.accept()
        goes = socket.create_connection(self._there)
        other, number = {came: goes, goes: came}, 0
        with selectors.DefaultSelector() as selector, came, goes:
            for link in other:
                selector.register(link, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    link: Any = key.fileobj
                    try:
                        data = link.recv(1 << 16)
                        self.seen += data
                        if link is came and self._change is not None:
                            data, number = self._change(data, number), number + 1
                        other[link].sendall(data)
                    except OSError:
                        return
                    if not data:
                        return

    def close(self) -> None:
        self._listening.close()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def test_nothing_can_be_read_on_the_way() -> None:
    secret, array = "a secret of this run", np.arange(1 << 14, dtype=np.float32)
    with listener(most_bytes=DATA_BYTES) as found:
        between = Between(found.address, None)
        channel = dial(between.address, KEY, most_bytes=DATA_BYTES)
        channel.send(Values(n=7, text=secret, arrays=(array,)))
        until(lambda: found.came)
        channel.close()
        between.close()
    assert found.came[0].text == secret
    assert len(between.seen) > array.nbytes
    for plain in (secret, "values", "arrays", "float32", "everyone", KEY.run):
        assert plain.encode() not in between.seen, plain
    chunks = [array.tobytes()[n : n + 16] for n in range(0, array.nbytes, 4096)]
    assert not any(chunk in between.seen for chunk in chunks)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_changed_on_the_way_has_no_effect(seed: int) -> None:
    """A bit that is turned, what is left out, repeated, or comes in another order."""
    drawn = random.Random(seed)
    at = drawn.randrange(8)

    def change(data: bytes, number: int) -> bytes:
        if number != at or not data:
            return data
        place = drawn.randrange(len(data))
        match seed % 4:
            case 0:
                one = data[place] ^ (1 << drawn.randrange(8))
                return data[:place] + bytes([one]) + data[place + 1 :]
            case 1:
                return data[:place] + data[place + 1 :]
            case 2:
                return data + data
            case _:
                half = len(data) // 2
                return data[half:] + data[:half]

    with listener() as found:
        between = Between(found.address, change)
        sent = 0
        with contextlib.suppress(WireError):
            channel = dial(between.address, KEY, seconds=3.0)
            for n in range(20):
                channel.send(Values(n=n, text="x" * 50))
                sent = n + 1
                time.sleep(0.001)  # Each in a record that is handed on alone.
            channel.close()
        between.close()
        until(lambda: not found.acceptor._channels)
        came = [said.n for said in found.came]
        # Those before what was changed, each once and in order, and none after it.
        assert came == [*range(len(came))] and len(came) <= sent
        assert len(came) < 20


# Other bytes.


def test_ten_thousand_frames_that_are_none_end_only_their_connections() -> None:
    """Malformed, cut short, repeated in part: encrypted, by who has a key."""
    drawn = random.Random(3)
    good = frame(Values(n=5, text="abc", arrays=(np.arange(5.0),)))
    with listener(most_bytes=1 << 20) as found:
        keeps = dial(found.address, KEY, most_bytes=1 << 20)
        wrong = 0
        while wrong < 10_000:
            channel = dial(found.address, KEY, most_bytes=1 << 20)
            data = b""
            for _ in range(50):  # One that is taken for a message ends nothing.
                wrong += 1
                text = bytearray(good)
                match drawn.randrange(4):
                    case 0:
                        text = bytearray(drawn.randbytes(drawn.randrange(1, 90)))
                    case 1:
                        text[drawn.randrange(len(text))] ^= 1 << drawn.randrange(8)
                    case 2:
                        del text[drawn.randrange(1, len(text)) :]
                    case _:
                        text += text[: drawn.randrange(1, len(text))]
                data += text
            with contextlib.suppress(WireError):
                push(channel, data)
            channel.close()
        keeps.send(Values(n=1, text="still here"))
        until(lambda: any(said.text == "still here" for said in found.came))
        assert all(type(said) is Values and said.n >= 0 for said in found.came)
        until(lambda: len(found.acceptor._channels) == 1)
        assert len(found.ended) >= 200
        keeps.close()


@pytest.mark.parametrize(
    ("text_bytes", "array_bytes"),
    [(1 << 20, 1 << 30), (100, 1 << 20), (1 << 20, 1), (1 << 31, 0), (0, 1 << 63)],
)
def test_control_connections_take_at_most_a_mebibyte(
    text_bytes: int, array_bytes: int
) -> None:
    with pair(most_bytes=1 << 20) as (one, other):
        push(one, connections._HEADER.pack(text_bytes, array_bytes))
        with pytest.raises(WireError, match="of at most 1048576"):
            other.receive(TAKES, seconds=SECONDS)
        with pytest.raises(WireError, match="Send it in parts"):
            one.send(Values(arrays=(np.zeros(1 << 17),)))


def test_an_announced_size_takes_no_memory() -> None:
    with pair() as (one, other):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        push(one, connections._HEADER.pack(10, 1 << 30) + bytes(1000))
        until(lambda: not other._in_header)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + (1 << 17)


def test_half_a_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FRAME_SECONDS", 0.01)
    with pair() as (one, other):
        push(one, connections._HEADER.pack(10, 0) + b"abc")
        with pytest.raises(ConnectionClosedError, match="sent half a message"):
            other.receive(TAKES, seconds=SECONDS)


def test_the_deadline_is_that_of_the_whole_message() -> None:
    """Whose beginning may have come in time."""
    with pair() as (one, other):
        push(one, connections._HEADER.pack(10, 0) + b"abc")
        until(lambda: not other._in_header)
        with pytest.raises(WireTimeoutError):
            other.receive(TAKES, seconds=0.0, until=time.monotonic() + 0.01)
    with pair() as (one, other):
        with pytest.raises(WireTimeoutError, match="sent nothing in time"):
            other.receive(TAKES, seconds=0.01)


# Who does not read, and who says nothing.


def test_who_reads_nothing_keeps_nobody_waiting() -> None:
    """It is ended once too much waits for it; others hear all that is said."""
    with listener(most_bytes=DATA_BYTES) as found:
        slow = dial(found.address, KEY, most_bytes=DATA_BYTES)
        until(lambda: found.acceptor._channels)
        (to_slow,) = found.acceptor._channels
        slow._loop.call(lambda: slow._loop.watch(slow._link, slow, 0))
        fast = dial(found.address, KEY, most_bytes=DATA_BYTES)
        until(lambda: len(found.acceptor._channels) == 2)
        (to_fast,) = found.acceptor._channels - {to_slow}
        said = 0
        with pytest.raises(ConnectionClosedError, match="takes nothing"):
            while True:
                to_slow.post(Values(n=said, text="x" * 100_000))
                to_fast.post(Values(n=said))
                assert fast.receive(TAKES, seconds=SECONDS).n == said
                said += 1
        assert said * 100_000 < 10 * connections.MOST_POSTED_BYTES
        to_fast.post(Values(n=9999))
        assert fast.receive(TAKES, seconds=SECONDS).n == 9999
        fast.close()
        slow.close()


def test_who_takes_nothing_is_given_up_by_who_waits() -> None:
    with pair() as (one, other):
        other._is_paused = True
        other._loop.call(other._watch)
        big = Values(arrays=(np.zeros(1 << 22),))
        with pytest.raises(WireTimeoutError, match="took nothing"):
            one.send(big, gives_up=lambda: True)


def test_who_sends_more_than_is_read_waits() -> None:
    with pair() as (one, other):
        sent = []

        def sends() -> None:
            for n in range(300):
                one.send(Values(n=n, arrays=(np.zeros(1 << 15),)))
                sent.append(n)

        thread = threading.Thread(target=sends)
        thread.start()
        until(lambda: other._is_paused)
        assert len(other._frames) <= connections._MOST_WAITING
        assert thread.is_alive()
        came = [other.receive(TAKES, seconds=SECONDS).n for _ in range(300)]
        thread.join()
        assert came == sent == [*range(300)]


def test_an_address_that_answers_nothing_is_given_up() -> None:
    with (
        listen() as listening,
        pytest.raises(WireTimeoutError, match="answered nothing"),
    ):
        dial(listening.getsockname(), KEY, seconds=0.05)
    with pytest.raises(ConnectionClosedError):
        dial(("127.0.0.1", 1), KEY)
    with pytest.raises(ConnectionClosedError, match=r"^\[::1\]:1"):
        dial(("::1", 1), KEY)


def test_of_a_stranger_nothing_is_read_as_a_message() -> None:
    with listener() as found:
        for data in (bytes(1 << 15), b"GET / HTTP/1.1\r\n\r\n", frame(Values())):
            with socket.create_connection(found.address) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(data)
                    while stranger.recv(1 << 16):
                        pass
        assert not found.came and not found.channels
        refused = found.acceptor.take_refused(1.0)
        assert refused is not None and refused.count == 3
        assert "does not speak 'whalejax 6'" in refused.why


# Certificates.


def unchecked(path: Path) -> Key:
    """A key as one loads it that expires while a process runs."""
    authority = path.read_text()[path.read_text().rindex("-----BEGIN CERT") :]
    accepts, dials = (_context(path, authority, server=x) for x in (True, False))
    return Key(path=path, name="late", run="", accepts=accepts, dials=dials)


def why_refused(found: Listener) -> str:
    until(lambda: found.acceptor._refused)
    refused = found.acceptor.take_refused(time.monotonic() + 9.0)
    assert refused is not None
    return refused.why


def test_another_run_is_refused_on_both_sides() -> None:
    with listener() as found:
        with pytest.raises(WrongKey, match="are of different runs"):
            dial(found.address, OTHER)
        assert "its key and that of this process are of different runs" in why_refused(
            found
        )


def test_an_expired_certificate_is_refused_on_both_sides(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    issue_key(tmp_path / "key", "late", tmp_path / "late", days=-0.5)
    good, late = load_key(tmp_path / "key"), unchecked(tmp_path / "late")
    with listener(good) as found:
        with pytest.raises(
            WrongKey, match="refused the key of this process, whose certificate has exp"
        ):
            dial(found.address, late)
        assert "its certificate has expired. Give it another key" in why_refused(found)
    with listener(late) as found:
        with pytest.raises(
            WrongKey, match="its certificate has expired. Give it anoth"
        ):
            dial(found.address, good)
        assert "refused the key of this process, whose certif" in why_refused(found)


def test_a_revoked_certificate_is_refused_and_its_connections_end(
    tmp_path: Path,
) -> None:
    make_key(tmp_path / "key")
    for name in ("a", "b"):
        issue_key(tmp_path / "key", name, tmp_path / name)
    key, a, b = (load_key(tmp_path / name) for name in ("key", "a", "b"))
    with listener(key) as found:
        channels = [dial(found.address, one) for one in (a, b)]
        until(lambda: len(found.acceptor._channels) == 2)
        assert {c.name for c in found.acceptor._channels} == {"a", "b"}
        revoke_key(tmp_path / "key", "a")
        with pytest.raises(ConnectionClosedError):
            channels[0].receive(TAKES, seconds=SECONDS)
        with pytest.raises(
            WrongKey,
            match=r"refused the key of.*'a' was revoked\. Make that process an",
        ):
            dial(found.address, a)
        assert "'a' was revoked" in why_refused(found)
        channels[1].send(Values(n=3))  # The other one stays.
        until(lambda: [said.n for said in found.came] == [3])
        dial(found.address, key).close()
        channels[1].close()
    with listener(b) as found:
        revoke_key(tmp_path / "key", "b")
        with pytest.raises(WrongKey, match="the certificate of 'b' was revoked"):
            dial(found.address, key)


# Versions.


def test_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as found:
        monkeypatch.setattr(acceptors, "PROTOCOL", "whalejax 7")
        with pytest.raises(
            OtherProtocol,
            match="speaks 'whalejax 7', and this process 'whalejax 6'. Install the",
        ):
            dial(found.address, KEY)


def test_who_signs_and_does_not_encrypt_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an earlier version: one that dials waits to be greeted, and reads 51 bytes."""
    monkeypatch.setattr(acceptors, "_SILENT_SECONDS", 0.01)
    with listener() as found:
        with socket.create_connection(found.address) as old:
            said = b""
            while some := old.recv(1 << 12):
                said += some
        assert b"speaks 'whalejax 6'." in said and len(said) > 51
        assert not said.startswith(b"WHALEJAX-ELASTIC-2\n")
        assert "said nothing" in why_refused(found)
    with listen() as listening:

        def greets() -> None:
            link, _ = listening.accept()
            with link, contextlib.suppress(OSError):
                link.sendall(b"WHALEJAX-ELASTIC-2\n" + os.urandom(32))
                link.recv(1 << 12)

        thread = threading.Thread(target=greets)
        thread.start()
        with pytest.raises(
            OtherProtocol, match="no process of a run of this version.*TLS 1.3"
        ):
            dial(listening.getsockname(), KEY)
        thread.join()
