"""Messages as bytes: what is none is refused, and takes no memory."""

from __future__ import annotations

import random
import resource
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from msgspec import Meta

from tests.whalejax.messages import arrives
from whalejax.wire.messages import (
    Arrays,
    Message,
    Messages,
    WireError,
    encode,
)


def data(views: list[memoryview]) -> bytes:
    return b"".join(views)


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
        ([["float32", [3]]], 8, "fewer than its arrays"),
        ([["float32", [1]]], 8, "4 bytes after its arrays"),
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
    with pytest.raises(WireError, match=f"not one of those accepted here: .*{said}"):
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
