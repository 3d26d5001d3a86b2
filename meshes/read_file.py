"""Reads files from any source completely, or refuses them with a reason.

Parsers of the standard library fail in a dozen ways on damaged or hostile files: bytes
that are no UTF-8, nesting that exhausts the stack, integers of thousands of digits,
``Infinity`` and duplicate keys in JSON. Here each becomes one error.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from typing import Any, Final

from whalejax.meshes.errors import quoted


MOST_BYTES: Final = 2**28
"""Largest size of a file: plans of thousands of parameters take a few MiB."""

MOST_DEPTH: Final = 64
"""Maximum depth of lists and tables: plans and clusters need fewer than 20."""


class UnreadableFileError(ValueError):
    """A file, or its parsed data, that cannot be used; the text has the reason."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file.

    Args:
        path: Path of a regular file: pipes and devices may block or never end.

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
    except ValueError as error:  # a path that no system accepts
        raise UnreadableFileError(str(error)) from None


def _at_once(path: str, flags: int) -> int:
    """Opens a file; does not wait for the writer of a pipe."""
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
        # Python also refuses integers of more than 4,300 digits in this way.
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
    return f"lists or tables stand inside each other more than {MOST_DEPTH} deep"


def _no_constant(name: str) -> Any:
    raise UnreadableFileError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise UnreadableFileError(
            f"{quoted(text)} is larger than any number that is computed"
        )
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnreadableFileError(f"the key {quoted(twice)} stands twice in one table")
    return once
