"""Checks arguments of public functions, and fields of dataclasses.

Wrong arguments are refused at the call, before they cause errors inside Python or JAX.
Messages show values shortened and escaped, and a failing ``repr`` does no harm.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import reprlib
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, TypeVar, Union

import numpy as np

from whalejax.meshes.arguments.near_names import near_hint
from whalejax.meshes.errors import Problems, WhaleError, is_shown_as_written, visible


F = TypeVar("F")

LARGEST: Final = 2**63 - 1
"""Largest integer that is accepted where no smaller limit applies: that of int64."""

MOST_SAMPLES: Final = 2**40
"""Largest accepted number of samples in a global batch."""

_LARGEST_NUMBER: Final = sys.float_info.max

_LONGEST: Final = 60
"""Characters of a value in a message."""

_WHOLE: Final = (int, np.integer)
_REAL: Final = (int, float, np.integer, np.floating)
_short: Final = reprlib.Repr()
_short.maxdict, _short.maxlist, _short.maxtuple = 3, 4, 4
_short.maxstring = _short.maxother = 2 * _LONGEST


def short_repr(value: object) -> str:
    """Returns a value as a short line of escaped text for messages.

    Args:
        value: Any value, even one whose ``repr`` fails.

    >>> short_repr("a\\x1b[2J"), short_repr(10**5000)
    ("'a\\\\x1b[2J'", 'a whole number of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = _short.repr(value)
    except Exception:  # a foreign repr, which may do anything
        text = f"a {type(value).__name__}"
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def is_whole(value: object, least: int = -LARGEST, most: int = LARGEST) -> bool:
    """Whether a value is an integer within limits, but not a bool.

    >>> is_whole(3, 1), is_whole(True), is_whole(10**30)
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, _WHOLE):
        return False
    return bool(least <= value <= most)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number, but not a bool.

    >>> is_number(1.5), is_number(float("nan")), is_number("1")
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, _REAL):
        return False
    real: Any = value.item() if isinstance(value, np.generic) else value
    return bool(abs(real) <= _LARGEST_NUMBER)


def is_array(value: object) -> bool:
    """Whether a value is an array or an abstract array, but not a class or module.

    >>> is_array(np.zeros(3)), is_array(np), is_array(np.ndarray), is_array(3.0)
    (True, False, False, False)
    """
    shape: object = getattr(value, "shape", None)
    return isinstance(shape, tuple) and hasattr(value, "dtype")


def plain(value: Any) -> Any:
    """Returns a value with Python numbers in place of NumPy numbers.

    JSON and the types of options accept only Python numbers. Dictionaries, lists and
    tuples are converted recursively. One-dimensional arrays of integers become lists.
    Other values are returned unchanged.

    Args:
        value: Value of an option or a field, before or after its checks.

    >>> plain({"data": np.int64(2)}), plain(np.array([5, 3])), plain((np.int32(1), "a"))
    ({'data': 2}, [5, 3], (1, 'a'))
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [plain(item) for item in value]
        return items if type(value) is list else tuple(items)
    return value


def is_printable(value: object) -> bool:
    """Whether a value is a non-empty text that a terminal shows unchanged."""
    return isinstance(value, str) and is_shown_as_written(value) and bool(value.strip())


class Arguments(Problems):
    """Collects the problems of one call's arguments.

    Every check takes the name and the value of an argument, and returns whether the
    value is valid. It records wrong values. ``none=True`` allows None.

    Args:
        title: Called function, such as ``"wh.plan"``.
        kind: Exception to raise.

    Example:
        >>> given = Arguments("Feed")
        >>> given.whole("batch_size", -1, least=1)
        False
        >>> print(given.text())
        Feed: 1 problem
          1. batch_size is -1; expected a whole number, 1 or more
    """

    def refuse(self, name: str, value: object, expected: str) -> bool:
        """Records that a value is not what was expected."""
        self.add(f"{name} is {short_repr(value)}; expected {expected}")
        return False

    def whole(
        self,
        name: str,
        value: object,
        *,
        least: int = 0,
        most: int = LARGEST,
        none: bool = False,
        what: str = "a whole number",
    ) -> bool:
        """Checks for an integer within limits."""
        if (none and value is None) or is_whole(value, least, most):
            return True
        limits = f"{least} or more" if most == LARGEST else f"{least} to {most}"
        if least == -LARGEST:
            limits = "of 64 bits"
        return self.refuse(name, value, f"{what}, {limits}{_or_none(none)}")

    def number(
        self,
        name: str,
        value: object,
        *,
        above: float | None = None,
        least: float | None = None,
        none: bool = False,
        what: str = "a number",
    ) -> bool:
        """Checks for a finite number within limits."""
        if none and value is None:
            return True
        known: Any = value
        if is_number(value):
            if (above is None or known > above) and (least is None or known >= least):
                return True
        limit = "" if above is None else f" above {above:g}"
        limit = limit if least is None else f", {least:g} or more"
        return self.refuse(name, value, f"{what}{limit}{_or_none(none)}")

    def switch(self, name: str, value: object, *, none: bool = False) -> bool:
        """Checks for True or False."""
        if isinstance(value, bool) or (none and value is None):
            return True
        return self.refuse(name, value, f"True or False{_or_none(none)}")

    def words(
        self, name: str, value: object, what: str = "a text", *, none: bool = False
    ) -> bool:
        """Checks for a non-empty text without control characters."""
        if is_printable(value) or (none and value is None):
            return True
        hint = ""
        if isinstance(value, str) and value.strip():
            hint = ", without control characters"
        return self.refuse(name, value, f"{what}{hint}{_or_none(none)}")

    def path(self, name: str, value: object, what: str = "the path of a file") -> bool:
        """Checks for a path, as text or ``os.PathLike``."""
        text: object = None
        if isinstance(value, str | os.PathLike):
            text = os.fspath(value)
        if is_printable(text):
            return True
        return self.refuse(name, value, f"{what}, without control characters")

    def function(
        self, name: str, value: object, what: str, *, none: bool = False
    ) -> bool:
        """Checks for a callable."""
        if callable(value) or (none and value is None):
            return True
        return self.refuse(name, value, f"{what}{_or_none(none)}")

    def choice(
        self, name: str, value: object, known: Collection[str], *, none: bool = False
    ) -> bool:
        """Checks for one of several texts."""
        if (none and value is None) or (isinstance(value, str) and value in known):
            return True
        words = ", ".join(map(repr, known))
        hint = near_hint(value, known)
        return self.refuse(name, value, f"one of {words}{_or_none(none)}{hint}")

    def of(
        self,
        name: str,
        value: object,
        kinds: type | tuple[type, ...],
        what: str,
        *,
        none: bool = False,
    ) -> bool:
        """Checks for an instance of some types."""
        if isinstance(value, kinds) or (none and value is None):
            return True
        return self.refuse(name, value, f"{what}{_or_none(none)}")


def _or_none(none: bool) -> str:
    return ", or None" if none else ""


def check_fields(
    instance: Any, title: str, kind: type[WhaleError] = WhaleError
) -> None:
    """Refuses a dataclass with fields of other types than declared.

    NumPy numbers are accepted and converted to Python numbers. Items of tuples are
    checked too, numbers only by their types. Items of other containers are not checked,
    as these may be large.

    Args:
        instance: Instance of a dataclass with annotations that can be resolved.
        title: Title of the message.
        kind: Exception to raise.

    Raises:
        WhaleError: Some fields are wrong. The error has type ``kind`` and lists all.
    """
    problems = Arguments(title, kind)
    known: Any = type(instance)
    for name, hint, expected in _hints(known):
        value = getattr(instance, name)
        if not _fits(value, hint):
            problems.refuse(name, value, expected)
        elif _holds_numpy(value):
            object.__setattr__(instance, name, plain(value))
    problems.raise_if_any()


def _holds_numpy(value: Any) -> bool:
    if not isinstance(value, tuple):
        return isinstance(value, np.generic)
    kinds = set(map(type, value))  # a million items may have one type
    return any(issubclass(kind, np.generic) for kind in kinds) or (
        tuple in kinds and any(map(_holds_numpy, value))
    )


@functools.cache
def _hints(kind: Any) -> tuple[tuple[str, Any, str], ...]:
    """Returns name, type and type text of every checked field."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (field.name, hints[field.name], _words(hints[field.name]))
        for field in dataclasses.fields(kind)
        if field.init and hints[field.name] is not Any
    )


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, _REAL) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, _WHOLE) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str) and is_shown_as_written(value)
    if getattr(hint, "_is_protocol", False):
        return True
    if isinstance(hint, type) and not typing.get_args(hint):
        return bool(isinstance(value, hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:  # the dataclass itself checks the value
        return any(type(value) is type(argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _all_fit(value, arguments)
    if origin is not None and isinstance(origin, type):
        return isinstance(value, origin)
    return True


def _all_fit(value: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = arguments[0]
        if inner in (int, float):  # a million items may have one type
            allowed = _WHOLE if inner is int else _REAL
            kinds = set(map(type, value))
            return all(issubclass(k, allowed) and k is not bool for k in kinds)
        if isinstance(inner, type) and inner is not str and not typing.get_args(inner):
            return all(issubclass(k, inner) for k in set(map(type, value)))
        return all(_fits(item, inner) for item in value)
    return len(value) == len(arguments) and all(map(_fits, value, arguments))


def _words(hint: Any) -> str:
    if hint is type(None):
        return "None"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        inner = [_words(argument) for argument in arguments if argument is not Ellipsis]
        if arguments[-1] is Ellipsis:
            return f"a tuple, each {inner[0]}"
        return f"a tuple of {' and '.join(inner)}"
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text without control characters",
        bool: "True or False",
    }
    if hint in names:
        return names[hint]
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    return f"a {getattr(hint, '__name__', 'value')}"
