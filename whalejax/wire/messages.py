"""Messages as bytes: a Struct in msgpack, followed by arrays as they are in memory.

A receiver accepts a union of Structs and refuses anything else on arrival, so readers
of a message need no further checks. Received data is never unpickled or run. Sizes,
types and depth are checked before memory is allocated.
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

from whalejax.meshes.errors import WhaleError, visible


MOST_TEXT_BYTES: Final = 1 << 20
"""Maximum bytes of the values of one message."""

MOST_ARRAY_BYTES: Final = 1 << 30
"""Maximum bytes of all arrays of one message together."""

CONTROL_BYTES: Final = 1 << 20
"""Maximum bytes of a message between a member and the supervisor."""

DATA_BYTES: Final = MOST_TEXT_BYTES + MOST_ARRAY_BYTES
"""Maximum bytes of a message between members, such as gradients and states."""

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
"""Type of numbers with bounds, so that NaN is refused."""
Size = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=20_000)]
Arrays = Annotated[tuple[np.ndarray, ...], Meta(max_length=MOST_ARRAYS)]


class WireError(WhaleError):
    """Data on a connection is not a valid message."""


class MalformedError(WireError):
    """A complete frame is not an accepted message."""


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class _KeywordsOnly(msgspec.StructMeta):
    """Makes all fields keyword-only, in subclasses too."""

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
    """Message between processes; ``arrays`` has its arrays, if any."""

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
    """A message that is answered by another message or a refusal."""


def answer_type(question: type[Question[A]]) -> type[A]:
    """Returns the type of a question's answer, as its class declares it."""
    for base in getattr(question, "__orig_bases__", ()):
        if get_origin(base) is Question:
            return cast(type[A], get_args(base)[0])
    raise TypeError(f"{question.__name__} names no answer")


class Messages(Generic[M]):
    """The messages that one receiver accepts.

    Attributes:
        kinds: Types of the messages, by name on the wire.
    """

    def __init__(self, *types: type[M]) -> None:
        """Accepts only messages of these types."""
        self.kinds: Mapping[str, type[M]] = {
            str(one.__struct_config__.tag): one for one in types
        }
        self._union: Any = functools.reduce(operator.or_, types)

    def decode(
        self, text: bytes | memoryview, data: bytes | bytearray | memoryview = b""
    ) -> M:
        """Decodes a message.

        Args:
            text: Bytes of its values.
            data: Bytes of its arrays, one after the other; they are not copied.

        Raises:
            WireError: The bytes are not an accepted message.
        """
        view, place = memoryview(data), 0

        def array(_: type, described: Any) -> np.ndarray:
            nonlocal place
            dtype, shape = _described(described)
            begin, place = place, place + math.prod(shape) * dtype.itemsize
            if place > len(view):
                raise MalformedError(
                    f"a message has {len(view)} bytes of arrays, fewer than its "
                    f"arrays need ({dtype} of shape {shape})"
                )
            flat = np.frombuffer(view[begin:place], np.uint8).view(dtype)
            return flat.reshape(shape)

        try:
            message = msgspec.msgpack.decode(text, type=self._union, dec_hook=array)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = visible(str(error))[:_LONGEST_ERROR]
            raise MalformedError(
                f"a message is not one of those accepted here: {why}"
            ) from None
        if place != len(view):
            raise MalformedError(
                f"a message has {len(view) - place} bytes after its arrays"
            )
        return cast(M, message)


def encode(
    message: Message, most_bytes: int = DATA_BYTES
) -> tuple[bytes, list[memoryview]]:
    """Encodes a message as the bytes of its values, and the memory of its arrays.

    Args:
        message: Message; contiguous arrays are not copied.
        most_bytes: Largest size that the receiver accepts.

    Raises:
        WireError: The message is larger than a receiver accepts.
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
    """Returns text with the sizes of a message that is too large, or an empty text.

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
    # NumPy refuses a too large shape even if one size is 0.
    if math.prod(size or 1 for size in shape) > MOST_ARRAY_BYTES:
        raise MalformedError(
            f"an array of a message has shape {str(shape)[:80]}, of more than "
            f"{MOST_ARRAY_BYTES} elements"
        )
    return dtype, shape


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name.

    Raises:
        MalformedError: Messages have no arrays of that dtype.

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
