"""Converts frozen dataclasses to plain JSON data and back, strictly.

People edit, copy and keep plan files. So reading a file refuses unknown entries, and
names the path of each. The standard library writes dataclasses but does not read them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from whalejax.meshes.errors import is_shown_as_written, quoted
from whalejax.meshes.units import count_text


MOST_NUMBER: Final = 2**100
"""Largest accepted number: more than the FLOPs of all computers in a year."""

_PLAIN = frozenset((str, int, float, bool, type(None)))


class DataError(ValueError):
    """Data that do not describe the expected class."""


def encode(value: Any) -> Any:
    """Returns a dataclass tree as JSON data (dicts, lists, numbers, text, None)."""
    if type(value) in _PLAIN:  # First, as a plan has tens of thousands of such values.
        return value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        left_out = _unless_default(type(value))
        return {
            name: encode(own)
            for name in _stored_fields(value)
            for own in [getattr(value, name)]
            if name not in left_out or own != left_out[name]
        }
    return value


def decode(kind: Any, data: Any, path: str = "") -> Any:
    """Returns the value of an annotated type that JSON data describe.

    Args:
        kind: Type annotation: a dataclass, a tuple, a union with None, a Literal or a
            plain type.
        data: Data from ``json.loads``.
        path: Path of the data in the file, for errors; default: empty.

    Raises:
        DataError: An entry is wrong; names the entry, its value and the expected type.
    """
    if type(data) is kind and kind in _PLAIN:
        return _checked(data, path)
    origin = get_origin(kind)
    if hasattr(kind, "from_json"):
        return kind.from_json(data)
    if dataclasses.is_dataclass(kind):
        return _decode_class(kind, data, path)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, path)
    if origin in (types.UnionType, Union):
        if data is None and type(None) in get_args(kind):
            return None
        inner = [a for a in get_args(kind) if a is not type(None)]
        if type(data) in inner:
            return decode(type(data), data, path)
        return decode(inner[0], data, path)
    if origin is Literal:
        if data not in get_args(kind):
            known = get_args(kind)
            raise DataError(f"{path} is {quoted(data)}; expected one of {known}")
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(_checked(data, path))
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise DataError(f"{path} is {quoted(data)}; expected {kind.__name__}")
    return data


def _checked(data: Any, path: str) -> Any:
    """Returns a plain value; refuses hidden characters and invalid numbers."""
    if isinstance(data, str):
        if not is_shown_as_written(data):
            raise DataError(
                f"{path} is {quoted(data)}; expected text without control and "
                "bidirectional characters"
            )
    elif isinstance(data, int | float):
        if not abs(data) <= MOST_NUMBER or not math.isfinite(data):
            raise DataError(f"{path} is {quoted(data)}; expected a finite number")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _stored_fields(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.metadata.get("kept", True)]


@functools.cache
def _unless_default(kind: Any) -> dict[str, Any]:
    """Returns the fields that files have only with other values than default."""
    return {
        f.name: f.default
        for f in dataclasses.fields(kind)
        if f.metadata.get("unless_default", False)
    }


def _decode_class(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise DataError(
            f"{path or 'the file'} is {quoted(data):.60}; expected an object"
        )
    hints = _hints(kind)
    names = _stored_fields(kind)
    unknown = sorted(map(str, set(data) - set(names)))
    missing = sorted(set(names) - set(data) - set(_unless_default(kind)))
    if unknown or missing:
        words = [f"has unknown entries {quoted(unknown)}"] if unknown else []
        words += [f"lacks {missing}"] if missing else []
        raise DataError(f"{path or 'the top level'} {' and '.join(words)}")
    given = [name for name in names if name in data]
    return kind(**{n: decode(hints[n], data[n], f"{path}.{n}") for n in given})


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise DataError(f"{path} is {quoted(data):.60}; expected a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(decode(args[0], x, f"{path}[{i}]") for i, x in enumerate(data))
    if len(args) != len(data):
        raise DataError(
            f"{path} has {count_text(len(data), 'entry')}; expected {len(args)}"
        )
    pairs = zip(args, data, strict=True)
    return tuple(decode(a, x, f"{path}[{i}]") for i, (a, x) in enumerate(pairs))
