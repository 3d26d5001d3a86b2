"""Messages as bytes: a map in msgpack, and arrays behind it as they lie in memory.

Nothing that was received is unpickled or run. Sizes, types and depth are checked before
memory is taken for them, because a process may be sent anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np

from whalejax.meshes.errors import WhaleError


MOST_TEXT_BYTES: Final = 1 << 20
"""Of the map of one message."""

MOST_ARRAY_BYTES: Final = 1 << 30
"""Of all arrays of one message together."""

CONTROL_BYTES: Final = 1 << 20
"""Of a whole message between a member and the supervisor."""

DATA_BYTES: Final = MOST_TEXT_BYTES + MOST_ARRAY_BYTES
"""Of a whole message between members, which carries gradients and states."""

MOST_ARRAYS: Final = 4096
_MOST_DIMENSIONS: Final = 32
_MOST_ENTRIES: Final = 65536

_NUMPY_DTYPES: Final = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
_OTHER_DTYPES: Final = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class WireError(WhaleError):
    """What came over a connection is no message of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one process tells another.

    Attributes:
        kind: what it is, such as ``"beat"``.
        fields: of that kind, by name; plain values.
        arrays: NumPy arrays behind them.
    """

    kind: str
    fields: Mapping[str, Any]
    arrays: tuple[np.ndarray, ...] = ()


def encode(
    message: Message, most_bytes: int = DATA_BYTES
) -> tuple[bytes, list[memoryview]]:
    """A message as bytes: its map, and the memory of its arrays.

    Args:
        message: its arrays are not copied where they are contiguous.
        most_bytes: that the receiver takes.

    Raises:
        WireError: it is larger than a receiver takes.
    """
    arrays = [np.ascontiguousarray(x) for x in message.arrays]
    told = [
        [str(x.dtype), list(np.shape(a))]
        for x, a in zip(arrays, message.arrays, strict=True)
    ]
    text: Any = msgpack.packb([message.kind, dict(message.fields), told])
    views = [memoryview(x.reshape(-1).view(np.uint8).data) for x in arrays]
    total = sum(view.nbytes for view in views)
    if why := too_large(len(text), total, most_bytes):
        raise WireError(
            f"a message of kind {message.kind!r} has {why}. Send it in parts"
        )
    if len(views) > MOST_ARRAYS:
        raise WireError(
            f"a message of kind {message.kind!r} has {len(views)} arrays, of at most "
            f"{MOST_ARRAYS}. Send it in parts"
        )
    return text, views


def too_large(text_bytes: int, array_bytes: int, most_bytes: int) -> str:
    """What is too much of a message of these sizes; nothing where it is taken.

    Args:
        text_bytes: of its map.
        array_bytes: of its arrays.
        most_bytes: that the receiver takes of one message.

    >>> too_large(100, 100, 150)
    '100 bytes of values and 100 of arrays, of at most 150 together'
    """
    fits = text_bytes <= MOST_TEXT_BYTES and array_bytes <= MOST_ARRAY_BYTES
    if fits and text_bytes + array_bytes <= most_bytes:
        return ""
    return (
        f"{text_bytes} bytes of values and {array_bytes} of arrays, of at most "
        f"{most_bytes} together"
    )


def decode(text: bytes | memoryview, data: bytes | bytearray | memoryview) -> Message:
    """The message that these bytes are.

    Args:
        text: its map.
        data: its arrays, one behind the other; they are not copied.

    Raises:
        WireError: they are none, with what is wrong.
    """
    try:
        found = msgpack.unpackb(
            text,
            raw=False,
            strict_map_key=True,
            max_str_len=MOST_TEXT_BYTES,
            max_bin_len=MOST_TEXT_BYTES,
            max_array_len=_MOST_ENTRIES,
            max_map_len=_MOST_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a message is no msgpack ({str(error)[:80]})") from None
    match found:
        case [str(kind), dict(fields), list(told)]:
            _check_plain(fields)
            return Message(kind=kind, fields=fields, arrays=_arrays(told, data))
    raise WireError("a message is no kind, map and arrays")


def _check_plain(fields: Mapping[Any, Any]) -> None:
    if not all(isinstance(name, str) for name in fields):
        raise WireError("a message has a field without a name")


def _arrays(
    told: Sequence[Any], data: bytes | bytearray | memoryview
) -> tuple[np.ndarray, ...]:
    if len(told) > MOST_ARRAYS:
        raise WireError(f"a message has {len(told)} arrays; at most {MOST_ARRAYS}")
    found, place, view = [], 0, memoryview(data)
    for one in told:
        match one:
            case [str(name), list(shape)]:
                dtype, size = dtype_of(name), _size(shape)
            case _:
                raise WireError("an array of a message has no dtype and shape")
        end = place + size * dtype.itemsize
        if end > len(view):
            raise WireError(
                f"a message has {len(view)} bytes of arrays, and less than its arrays "
                f"have ({name} of shape {shape})"
            )
        flat = np.frombuffer(view[place:end], np.uint8).view(dtype)
        found.append(flat.reshape(shape))
        place = end
    if place != len(view):
        raise WireError(f"a message has {len(view) - place} bytes behind its arrays")
    return tuple(found)


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name.

    Raises:
        WireError: it is none that is sent.

    >>> dtype_of("float32").itemsize
    4
    """
    if name in _NUMPY_DTYPES:
        return np.dtype(name)
    if name in _OTHER_DTYPES:
        import ml_dtypes

        other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return other
    raise WireError(f"an array of a message has dtype {name[:40]!r}")


def _size(shape: Sequence[Any]) -> int:
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size <= MOST_ARRAY_BYTES for size in shape
    ):
        raise WireError(f"an array of a message has shape {str(shape)[:80]}")
    # NumPy takes no shape whose other sizes are too large, also where one is 0.
    if math.prod(size or 1 for size in shape) > MOST_ARRAY_BYTES:
        raise WireError(
            f"an array of a message has shape {str(shape)[:80]}, of more than "
            f"{MOST_ARRAY_BYTES} elements"
        )
    return math.prod(shape)
