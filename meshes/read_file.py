"""Reads JSON and TOML files from any source, or refuses them with a reason.

Damaged or hostile files may contain invalid UTF-8, very deep nesting, integers of
thousands of digits, ``Infinity`` or duplicate keys. Each raises an
``UnreadableFileError``.

``FileTable`` checks every key of a table. It records wrong types, missing values and
unknown keys with their paths, so that one error lists them all.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

from whalejax.meshes.errors import (
    MOST_NAME,
    Problems,
    WhaleError,
    as_json,
    clipped,
    is_shown_as_written,
    quoted,
    visible,
)


MOST_BYTES: Final = 2**28
"""Largest size of a file. Plans with thousands of parameters take a few MiB."""

MOST_DEPTH: Final = 64
"""Maximum depth of lists and tables. Plans and clusters need less than 20."""


class UnreadableFileError(ValueError):
    """A file or its data cannot be used; the text has the reason."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file.

    Args:
        path: Path of a regular file. Pipes and devices are refused, since they may
            block or never end.

    Raises:
        OSError: The file is missing, or cannot be opened.
        UnreadableFileError: The file is not regular, too large, or no UTF-8.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UnreadableFileError(
                    "it is no regular file, but a pipe or a device"
                )
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UnreadableFileError(f"it has more than {MOST_BYTES} bytes")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"byte {error.start} is no UTF-8") from None
    except UnreadableFileError:
        raise
    except ValueError as error:  # an invalid path
        raise UnreadableFileError(str(error)) from None


def open_trace(
    path: str | os.PathLike[str], kind: type[WhaleError] = WhaleError
) -> csv.DictReader[str]:
    """Returns a reader of a trace in CSV, whose first line names the columns.

    Args:
        path: Path of the file.
        kind: Type of the raised errors.

    Raises:
        WhaleError: Or ``kind``, if the file or its first line cannot be read.
    """
    try:
        reader = csv.DictReader(read_text(path).splitlines())
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise kind(f"trace {path}: line 1: {_no_row(error)}") from error
    except (UnreadableFileError, OSError) as error:
        said = getattr(error, "strerror", None) or error
        raise kind(f"trace {path}: it cannot be read ({said})") from error
    return reader


def numbered_rows(
    reader: csv.DictReader[str], problems: Problems
) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yields each row of a trace with its line, up to the first that is not CSV.

    Args:
        reader: Reader of the trace.
        problems: Collector of the error.
    """
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:  # such as a cell of more than 131,072 characters
        problems.add(f"line {reader.line_num + 1}: {_no_row(error)}")


def _no_row(error: csv.Error) -> str:
    return f"it is no row of a CSV file ({error})"


def _at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def parse_json(text: str) -> Any:
    """Returns the data of a JSON text.

    Raises:
        UnreadableFileError: The text is no JSON, contains ``NaN``, ``Infinity``, a
            number too large for a float or a duplicate key, or is nested too deeply.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    return _parsed(
        text,
        lambda given: json.loads(
            given,
            parse_constant=_no_constant,
            parse_float=_float,
            object_pairs_hook=_once,
        ),
    )


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the data of a TOML text.

    Raises:
        UnreadableFileError: The text is no TOML, or is nested too deeply.
    """
    data: dict[str, Any] = _parsed(text, tomllib.loads)
    return data


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        data = parse(text)
    except RecursionError:
        raise UnreadableFileError(_too_deep()) from None
    except UnreadableFileError:
        raise
    except ValueError as error:
        # Integers of more than 4,300 digits raise this error too.
        raise UnreadableFileError(str(error)) from None
    check_depth(data)
    return data


def check_depth(data: Any) -> None:
    """Refuses lists and tables nested deeper than any valid data.

    Args:
        data: Data of JSON or TOML.

    Raises:
        UnreadableFileError: The data are nested deeper than ``MOST_DEPTH``, or cyclic.
    """
    level = [data]
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [v for v in item.values() if isinstance(v, dict | list)]
            elif isinstance(item, list):
                inner += [v for v in item if isinstance(v, dict | list)]
        if not inner:
            return
        level = inner
    raise UnreadableFileError(_too_deep())


def _too_deep() -> str:
    return f"lists or tables are nested more than {MOST_DEPTH} deep"


def _no_constant(name: str) -> Any:
    raise UnreadableFileError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise UnreadableFileError(f"{quoted(text)} is too large for a 64-bit float")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnreadableFileError(f"the key {quoted(twice)} is given twice in a table")
    return once


T = TypeVar("T")
_MISSING: Any = object()
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST_KEY = 60
_HINTS = 20
"""Maximum number of unknown keys for which the nearest known key is suggested."""


class FileTable:
    """One table of a file, read key by key.

    Methods for single values take a default; without one, the key is required. Errors
    are recorded, and the method returns the default or a valid replacement.

    Args:
        data: Parsed data.
        path: Path of the table in the file, for messages; empty at the top.
        problems: Collector of the errors.
    """

    def __init__(self, data: object, path: str, problems: Problems) -> None:
        self.path = path
        self.problems = problems
        self.asked: list[str] = []
        self.data: Mapping[str, Any] = {}
        if isinstance(data, Mapping):
            self.data = data
        else:
            self.problem("", data, "a table")

    def at(self, key: str) -> str:
        """Returns the path of a key, as error messages show it."""
        key = clipped(visible(key), _LONGEST_KEY)
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def problem(self, key: str, value: object, expected: str) -> None:
        """Records an invalid value and what was expected."""
        self.problems.add(f"{self.at(key)}: got {as_json(value)}, expected {expected}")

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def _get(self, key: str, expected: str, default: object) -> Any:
        self.asked.append(key)
        if key in self.data:
            return self.data[key]
        if default is _MISSING:
            self.problems.add(f"{self.at(key)}: missing, expected {expected}")
        return _MISSING

    @overload
    def integer(self, key: str) -> int: ...
    @overload
    def integer(self, key: str, default: T) -> int | T: ...
    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """Returns an integer."""
        value = self._get(key, "a whole number", default)
        if value is _MISSING:
            return 1 if default is _MISSING else default
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 32e9
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.problem(key, value, "a whole number")
        return 1

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: T) -> float | T: ...
    def number(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a number."""
        value = self._get(key, "a number", default)
        if value is _MISSING:
            return 1.0 if default is _MISSING else default
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                value = math.inf
        self.problem(key, value, "a number")
        return 1.0

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: T) -> str | T: ...
    def text(self, key: str, default: Any = _MISSING) -> Any:
        """Returns a string."""
        value = self._get(key, "a string", default)
        if value is _MISSING:
            return "" if default is _MISSING else default
        if isinstance(value, str):
            if len(value) <= MOST_NAME and is_shown_as_written(value):
                return value
            what = "a string without control characters, of at most"
            self.problem(key, value, f"{what} {MOST_NAME} characters")
            return ""
        self.problem(key, value, "a string")
        return ""

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: T) -> bool | T: ...
    def boolean(self, key: str, default: Any = _MISSING) -> Any:
        """Returns ``true`` or ``false``."""
        value = self._get(key, "true or false", default)
        if value is _MISSING:
            return False if default is _MISSING else default
        if isinstance(value, bool):
            return value
        self.problem(key, value, "true or false")
        return False

    def table(self, key: str) -> FileTable:
        """Returns a table; an empty one if the key is missing."""
        value = self._get(key, "a table", {})
        return FileTable(
            {} if value is _MISSING else value, self.at(key), self.problems
        )

    def tables(self, key: str) -> list[FileTable]:
        """Returns a list of tables; an empty one if the key is missing."""
        value = self._get(key, "a list of tables", [])
        if value is _MISSING:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.problem(key, value, "a list of tables")
            return []
        path = self.at(key)
        return [FileTable(v, f"{path}.{i}", self.problems) for i, v in enumerate(value)]

    def numbers(self) -> tuple[tuple[str, float], ...]:
        """Returns the full table as (key, number) pairs, in order."""
        return tuple((key, self.number(key)) for key in self.data)

    def report_unknown_keys(self) -> None:
        """Records every key that was not read, with the nearest known key."""
        known = ", ".join(self.asked)
        for place, key in enumerate(k for k in self.data if k not in self.asked):
            looked_up = place < _HINTS and len(key) <= _LONGEST_KEY
            near = difflib.get_close_matches(key, self.asked, n=1) if looked_up else []
            hint = f"Did you mean {near[0]}? " if near else ""
            self.problems.add(f"{self.at(key)}: unknown key. {hint}Known: {known}")


def toml_text(data: Mapping[str, Any]) -> str:
    """Returns a TOML document without ``None`` values.

    Args:
        data: Strings, numbers, booleans, tables, and lists of tables. Tables with only
            numbers are written in one line.

    Example:
        >>> print(toml_text({"a": 1, "b": {"c": "x", "d": {"e": 0.5}}}), end="")
        a = 1
        <BLANKLINE>
        [b]
        c = "x"
        d = {e = 0.5}
    """
    return "\n".join(_toml_lines(data, "")) + "\n"


def _toml_lines(data: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    below: list[str] = []
    for key, value in data.items():
        path = prefix + _key(key)
        if value is None:
            continue
        if isinstance(value, Mapping) and not _is_inline(value):
            inner = _toml_lines(value, f"{path}.")
            # A table of only tables needs no header.
            head = [] if inner and inner[0] == "" else ["", f"[{path}]"]
            below += head + inner
        elif isinstance(value, list | tuple):
            for item in value:
                below += ["", f"[[{path}]]", *_toml_lines(item, f"{path}.")]
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    return lines + below


def _is_inline(table: Mapping[str, Any]) -> bool:
    return bool(table) and all(isinstance(v, int | float) for v in table.values())


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are valid in TOML. DEL, which JSON allows, must be escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    return _string(str(value))
