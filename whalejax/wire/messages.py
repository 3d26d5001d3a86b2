"""Messages as bytes: a Struct in msgpack, and arrays behind it as they lie in memory.

What may come somewhere is a union of Structs, and anything else is refused where it
arrives: what reads a message needs no further care. Nothing that was received is
unpickled or run, and sizes, types and depth are checked before memory is taken.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

import msgspec
import numpy as np
from msgspec import Meta

from whalejax.meshes.errors import WhaleError
from whalejax.meshes.texts import visible


MOST_TEXT_BYTES: Final = 1 << 20
"""Of the values of one message."""

MOST_ARRAY_BYTES: Final = 1 << 30
"""Of all arrays of one message together."""

CONTROL_BYTES: Final = 1 << 20
"""Of a whole message between a member and the supervisor."""

DATA_BYTES: Final = MOST_TEXT_BYTES + MOST_ARRAY_BYTES
"""Of a whole message between members, which carries gradients and states."""

MOST_ARRAYS: Final = 4096
_MOST_DIMENSIONS: Final = 32
_LONGEST_ERROR: Final = 200

_NUMPY_DTYPES: Final = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
_OTHER_DTYPES: Final = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

Whole = Annotated[int, Meta(ge=-1, lt=1 << 53)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
"""So that it is no NaN."""
Size = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=20_000)]
Arrays = Annotated[tuple[np.ndarray, ...], Meta(max_length=MOST_ARRAYS)]


class WireError(WhaleError):
    """Raised for data on a connection that is no valid message."""


class MalformedError(WireError):
    """A whole frame came that is none of the messages that may come."""


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class _KeywordsOnly(msgspec.StructMeta):
    """Makes what holds of a message's own fields hold of those of its subclasses."""

    def __new__(cls, *given: Any, **config: Any) -> Any:
        return super().__new__(cls, *given, **{"kw_only": True, **config})


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message(
    msgspec.Struct,
    metaclass=_KeywordsOnly,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=_snake,
):
    """Message between processes; one that has arrays keeps them in ``arrays``."""

    @property
    def kind(self) -> str:
        """Name of the message on the wire, such as ``"beat"``."""
        return str(self.__struct_config__.tag)

    @property
    def fields(self) -> dict[str, Any]:
        """Values of the message by name, for a journal."""
        return msgspec.structs.asdict(self)


M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message)


class Question(Message, Generic[A]):
    """A message that is answered, with a message of another type or with words."""


def answer_type(question: type[Question[A]]) -> type[A]:
    """Returns the type of a question's answer, as its class declares it."""
    for base in getattr(question, "__orig_bases__", ()):
        if get_origin(base) is Question:
            return cast(type[A], get_args(base)[0])
    raise TypeError(f"{question.__name__} names no answer")


class Messages(Generic[M]):
    """The messages that may come at one place.

    Attributes:
        kinds: Their types, by name on the wire.
    """

    def __init__(self, *types: type[M]) -> None:
        """Accepts messages of these types and no other."""
        self.kinds: Mapping[str, type[M]] = {
            str(one.__struct_config__.tag): one for one in types
        }
        self._union: Any = functools.reduce(operator.or_, types)

    def decode(
        self, text: bytes | memoryview, data: bytes | bytearray | memoryview = b""
    ) -> M:
        """The message that these bytes are.

        Args:
            text: Its values.
            data: Its arrays, one behind the other; they are not copied.

        Raises:
            WireError: They are none of these, with what is wrong.
        """
        view, place = memoryview(data), 0

        def array(_: type, described: Any) -> np.ndarray:
            nonlocal place
            dtype, shape = _described(described)
            begin, place = place, place + math.prod(shape) * dtype.itemsize
            if place > len(view):
                raise MalformedError(
                    f"a message has {len(view)} bytes of arrays, and less than its "
                    f"arrays have ({dtype} of shape {shape})"
                )
            flat = np.frombuffer(view[begin:place], np.uint8).view(dtype)
            return flat.reshape(shape)

        try:
            message = msgspec.msgpack.decode(text, type=self._union, dec_hook=array)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = visible(str(error))[:_LONGEST_ERROR]
            raise MalformedError(
                f"a message is none that may come here: {why}"
            ) from None
        if place != len(view):
            raise MalformedError(
                f"a message has {len(view) - place} bytes behind its arrays"
            )
        return cast(M, message)


def encode(
    message: Message, most_bytes: int = DATA_BYTES
) -> tuple[bytes, list[memoryview]]:
    """A message as bytes: its values, and the memory of its arrays.

    Args:
        message: Its arrays are not copied where they are contiguous.
        most_bytes: Largest size that the receiver accepts.

    Raises:
        WireError: It is larger than a receiver takes.
    """
    views: list[memoryview] = []

    def describe(array: Any) -> Any:
        flat = np.ascontiguousarray(array)
        views.append(memoryview(flat.reshape(-1).view(np.uint8).data))
        return [str(array.dtype), list(np.shape(array))]

    text = msgspec.msgpack.encode(message, enc_hook=describe)
    total = sum(view.nbytes for view in views)
    why = too_large(len(text), total, most_bytes)
    if len(views) > MOST_ARRAYS:
        why = f"{len(views)} arrays, of at most {MOST_ARRAYS}"
    if why:
        raise WireError(
            f"a message of kind {message.kind!r} has {why}. Send it in parts"
        )
    return text, views


def too_large(text_bytes: int, array_bytes: int, most_bytes: int) -> str:
    """Describes the excess of a message of these sizes; empty where it is accepted.

    Args:
        text_bytes: Bytes of its values.
        array_bytes: Bytes of its arrays.
        most_bytes: Largest size of one message that the receiver accepts.

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


def _described(described: Any) -> tuple[np.dtype[Any], list[int]]:
    match described:
        case [str(name), list(shape)]:
            dtype = dtype_of(name)
        case _:
            raise MalformedError("an array of a message has no dtype and shape")
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size <= MOST_ARRAY_BYTES for size in shape
    ):
        raise MalformedError(f"an array of a message has shape {str(shape)[:80]}")
    # NumPy takes no shape whose other sizes are too large, also where one is 0.
    if math.prod(size or 1 for size in shape) > MOST_ARRAY_BYTES:
        raise MalformedError(
            f"an array of a message has shape {str(shape)[:80]}, of more than "
            f"{MOST_ARRAY_BYTES} elements"
        )
    return dtype, shape


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name.

    Raises:
        MalformedError: It is none that is sent.

    >>> dtype_of("float32").itemsize
    4
    """
    if name in _NUMPY_DTYPES:
        return np.dtype(name)
    if name in _OTHER_DTYPES:
        import ml_dtypes

        other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return other
    raise MalformedError(f"an array of a message has dtype {name[:40]!r}")
