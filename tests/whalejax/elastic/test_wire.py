"""Keys, frames and authenticated connections: what is refused changes nothing."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from msgspec import Meta

from tests.whalejax.messages import arrives
from whalejax.meshes.errors import WhaleError
from whalejax.wire.connection import (
    Channel,
    Closed,
    TooLate,
    accept,
    dial,
    listen,
)
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import (
    CONTROL_BYTES,
    DATA_BYTES,
    Arrays,
    Message,
    Messages,
    WireError,
    encode,
)


KEY = b"k" * 32


def pair() -> tuple[Channel, Channel]:
    """Both ends of an authenticated connection."""
    listening = listen()
    found: list[Channel] = []
    thread = threading.Thread(
        target=lambda: found.append(accept(listening.accept()[0], KEY))
    )
    thread.start()
    dialled = dial(listening.getsockname(), KEY)
    thread.join()
    listening.close()
    return dialled, found[0]


def data(views: list[memoryview]) -> bytes:
    return b"".join(views)


# Keys.


def test_a_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "key"
    make_key(path)
    first = load_key(path)
    make_key(path)
    assert load_key(path) == first and len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["key"]
    path.chmod(0o640)
    with pytest.raises(WhaleError, match=r"mode 640.*expected 600\. Run chmod 600"):
        load_key(path)


def test_bad_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="cannot be read"):
        load_key(tmp_path / "none")
    short = tmp_path / "short"
    short.write_text("abc")
    short.chmod(0o600)
    with pytest.raises(WhaleError, match="holds a key of 3 bytes; expected at least"):
        load_key(short)
    with pytest.raises(WhaleError, match="cannot be read|no regular file"):
        load_key(tmp_path)


# Frames.


class Values(Message):
    """A message for tests."""

    a: Annotated[list[int | None], Meta(max_length=9)] = []
    n: int = 0
    arrays: Arrays = ()


class Other(Message):
    g: Annotated[float, Meta(ge=0)]


TAKES = Messages[Values | Other](Values, Other)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 4), np.int8),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.arange(8, dtype=np.int64).reshape(2, 4).T,
        np.array([True, False]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_come_as_they_went(array: np.ndarray) -> None:
    found = arrives(Values(a=[1, None], arrays=(array,)), TAKES)
    assert found.kind == "values" and found.a == [1, None]
    (there,) = found.arrays
    assert there.dtype == array.dtype and there.shape == array.shape
    assert there.tobytes() == array.tobytes()


def described(*arrays: Any) -> bytes:
    """A message whose arrays are described so."""
    return msgspec.msgpack.encode({"kind": "values", "arrays": arrays})


@pytest.mark.parametrize(
    ("told", "size", "said"),
    [
        ([["float32", [3]]], 8, "less than its arrays"),
        ([["float32", [1]]], 8, "4 bytes behind its arrays"),
        ([["object", [1]]], 8, "dtype 'object'"),
        ([["float32", [-1]]], 8, "has shape"),
        ([["float32", [True]]], 4, "has shape"),
        ([["int8", [1 << 29, 1 << 29]]], 8, "elements"),
        ([["float32"]], 8, "no dtype and shape"),
        ([["float32", [1] * 40]], 4, "has shape"),
    ],
)
def test_wrong_arrays_are_refused(told: Any, size: int, said: str) -> None:
    with pytest.raises(WireError, match=said):
        TAKES.decode(described(*told), bytes(size))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `kind`"),
        ({"kind": "x"}, "Invalid value 'x' - at `\\$.kind`"),
        ({"kind": "values", 1: 2}, "Expected `str`, got `int`"),
        ({"kind": "values", "more": 2}, "unknown field `more`"),
        ({"kind": "values", "n": True}, "Expected `int`, got `bool` - at `\\$.n`"),
        ({"kind": "values", "a": [1] * 10}, "length <= 9 - at `\\$.a`"),
        ({"kind": "other"}, "missing required field `g`"),
        ({"kind": "other", "g": float("nan")}, ">= 0.0 - at `\\$.g`"),
        ({"kind": "other", "g": 1, "arrays": []}, "unknown field `arrays`"),
        ({"kind": "x\x1b[2J"}, r"Invalid value 'x\\x1b\[2J'"),
        (None, "Expected `object`, got `None`"),
        ("x", "Expected `object`, got `str`"),
    ],
    ids=str,
)
def test_other_values_are_refused(value: object, said: str) -> None:
    with pytest.raises(WireError, match=f"none that may come here: .*{said}"):
        TAKES.decode(msgspec.msgpack.encode(value))


def test_no_extension_type_is_taken() -> None:
    value = {"kind": "values", "n": msgspec.msgpack.Ext(5, b"abc")}
    with pytest.raises(WireError, match="Expected `int`, got `ext`"):
        TAKES.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("size", [b"\xdd\xff\xff\xff\xff", b"\xdf\x0f\xff\xff\xff"])
def test_announced_lengths_take_no_memory(size: bytes) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WireError):
        TAKES.decode(b"\x82\xa4kind\xa6values\xa1a" + size)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + (1 << 17)


def test_ten_thousand_malformed_frames_decode_to_nothing_else() -> None:
    drawn = random.Random(0)
    good, views = encode(Values(n=3, a=[1, 2], arrays=(np.arange(5.0),)))
    body = data(views)
    refused = 0
    for _ in range(10_000):
        text, tail = bytearray(good), bytearray(body)
        match drawn.randrange(4):
            case 0:
                text = bytearray(drawn.randbytes(drawn.randrange(64)))
            case 1:
                text[drawn.randrange(len(text))] = drawn.randrange(256)
            case 2:
                del text[drawn.randrange(len(text)) :]
            case _:
                del tail[drawn.randrange(len(tail)) :]
        try:
            found = TAKES.decode(bytes(text), bytes(tail))
        except WireError:
            refused += 1
        else:
            # A changed byte may still be a message; it holds what such a one may.
            assert type(found) is Values and type(found.n) is int
            assert all(x is None or type(x) is int for x in found.a)
            assert all(isinstance(x, np.ndarray) for x in found.arrays)
    assert refused > 7000


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(WireError, match="Send it in parts"):
        encode(Values(a=[1 << 40] * (1 << 18)))


# Connections.


def test_messages_go_both_ways() -> None:
    one, other = pair()
    array = np.arange(200_000, dtype=np.float32)
    thread = threading.Thread(target=one.send, args=(Values(n=1, arrays=(array,)),))
    thread.start()
    found = other.receive(TAKES, seconds=60)
    thread.join()
    np.testing.assert_array_equal(found.arrays[0], array)
    other.send(Other(g=1.0))
    assert one.receive(TAKES, seconds=60).kind == "other"
    one.close()
    with pytest.raises(Closed):
        other.receive(TAKES, seconds=60)
    other.close()


def test_who_has_another_key_is_refused_on_both_sides() -> None:
    listening = listen()
    said: list[str] = []

    def take() -> None:
        try:
            accept(listening.accept()[0], KEY)
        except WireError as error:
            said.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(WireError, match="refused the key of this process"):
        dial(listening.getsockname(), b"other" * 8)
    thread.join()
    listening.close()
    assert len(said) == 1 and "does not have the key of this run" in said[0]


def test_an_address_that_answers_nothing_is_given_up() -> None:
    with listen() as listening, pytest.raises(TooLate, match="answered nothing"):
        dial(listening.getsockname(), KEY, seconds=0.05)
    with pytest.raises(Closed):
        dial(("127.0.0.1", 1), KEY)


class _Raw:
    """One end of a connection whose bytes a test writes itself."""

    def __init__(self, most_bytes: int = DATA_BYTES) -> None:
        mine, theirs = socket.socketpair()
        self.link = mine
        self.channel = Channel(theirs, b"s" * 32, b"t" * 32, most_bytes)
        self.sender = Channel(mine, b"t" * 32, b"s" * 32, most_bytes)

    def close(self) -> None:
        self.sender.close()
        self.channel.close()


@pytest.mark.parametrize("place", [0, 14, -1])
def test_a_changed_frame_is_refused(place: int) -> None:
    raw, tap = _Raw(), _Raw()
    tap.sender.send(Values(n=1))
    frame = bytearray(_drained(tap))
    frame[place] ^= 1
    raw.link.sendall(frame)
    raw.link.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError):
        raw.channel.receive(TAKES, seconds=60)
    raw.close()
    tap.close()


def test_a_frame_counts_once_and_in_its_place() -> None:
    raw, tap = _Raw(), _Raw()
    frames = []
    for number in range(2):
        tap.sender.send(Values(n=number))
        frames.append(_drained(tap))
    raw.link.sendall(frames[0])
    assert raw.channel.receive(TAKES, seconds=60) == Values(n=0)
    raw.link.sendall(frames[0])
    with pytest.raises(WireError, match="wrong MAC"):
        raw.channel.receive(TAKES, seconds=60)
    raw.close()
    tap.close()


def test_an_announced_size_takes_no_memory() -> None:
    raw = _Raw()
    raw.link.sendall(b"\xff" * 44)
    with pytest.raises(WireError, match="wrong MAC"):
        raw.channel.receive(TAKES, seconds=60)
    raw.close()


def test_who_takes_nothing_is_given_up() -> None:
    raw = _Raw()
    big = Values(arrays=(np.zeros(1 << 22),))
    with pytest.raises(TooLate, match="took nothing"):
        raw.channel.send(big, gives_up=lambda: True)
    raw.close()


def _drained(tap: _Raw) -> bytes:
    """The bytes that were sent so far."""
    link = tap.channel._link
    found = b""
    while True:
        try:
            found += link.recv(1 << 16)
        except BlockingIOError:
            return found


def test_a_key_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "key")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WhaleError, match="belongs to user"):
        load_key(tmp_path / "key")


# Sizes.


@pytest.mark.parametrize(
    ("told", "size"),
    [
        ([["float32", [0, *[1 << 30] * 10]]], 0),
        ([["int8", [*[1 << 30] * 10, 0]]], 0),
        ([["float64", [1 << 30, 1 << 30, 0]]], 0),
        ([["float32", [0]]] * 5000, 0),
    ],
)
def test_shapes_without_elements_have_limits_too(told: Any, size: int) -> None:
    with pytest.raises(WireError, match="has shape|length <= 4096"):
        TAKES.decode(described(*told), bytes(size))


def test_empty_arrays_of_plain_shapes_are_taken() -> None:
    (found,) = TAKES.decode(described(["float32", [0, 1000, 1000]])).arrays  # type: ignore[union-attr]
    assert found.shape == (0, 1000, 1000)


@pytest.mark.parametrize(
    ("text_bytes", "array_bytes"),
    [(1 << 20, 1 << 30), (100, 1 << 20), (1 << 20, 1), (1 << 31, 0), (0, 1 << 63)],
)
def test_control_connections_take_at_most_a_mebibyte(
    text_bytes: int, array_bytes: int
) -> None:
    raw = _Raw(CONTROL_BYTES)
    raw.link.sendall(raw.sender._header(text_bytes, array_bytes))
    with pytest.raises(WireError, match="of at most 1048576"):
        raw.channel.receive(TAKES, seconds=60)
    big = Values(arrays=(np.zeros(1 << 17),))
    with pytest.raises(WireError, match="Send it in parts"):
        raw.channel.send(big)
    raw.close()


def test_only_a_data_connection_takes_large_frames() -> None:
    raw = _Raw()
    big = Values(arrays=(np.arange(1 << 18, dtype="f8"),))
    thread = threading.Thread(target=raw.sender.send, args=(big,))
    thread.start()
    (found,) = raw.channel.receive(TAKES, seconds=60).arrays
    thread.join()
    np.testing.assert_array_equal(found, big.arrays[0])
    raw.close()


def test_nothing_is_read_of_a_frame_whose_header_is_forged() -> None:
    raw = _Raw()
    header = bytearray(raw.sender._header(1 << 20, 1 << 30))
    header[3] ^= 1
    raw.link.sendall(header + bytes(1 << 14))
    with pytest.raises(WireError, match="wrong MAC"):
        raw.channel.receive(TAKES, seconds=60)
    left = raw.channel._link.recv(1 << 16)
    assert len(left) == 1 << 14
    raw.close()


def test_of_who_does_not_authenticate_little_is_read() -> None:
    with listen() as listening:
        with socket.create_connection(listening.getsockname()) as stranger:
            link, _ = listening.accept()
            again = socket.socket(fileno=os.dup(link.fileno()))
            stranger.sendall(bytes(1 << 15))
            with pytest.raises(WireError, match="does not have the key"):
                accept(link, KEY)
            assert link.fileno() == -1
            assert len(again.recv(1 << 16)) > (1 << 15) - 200
            again.close()


def test_both_sides_send_the_parts_of_a_frame_at_once() -> None:
    """Else an answer waits for the other side's acknowledgement, 40 ms on Linux."""
    for end in pair():
        assert end._link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        end.close()
