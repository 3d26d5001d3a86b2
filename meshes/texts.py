"""Checks and quotes text that comes from outside, such as names in files.

A name in a file reaches terminals, pages and charts. Control characters move a
terminal's cursor, bidirectional marks reorder a line, newlines forge a second one.
Files with such characters are refused, and text quoted by errors is escaped and
shortened.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any, Final


MOST_QUOTED: Final = 200
"""Maximum number of characters of a value in an error."""

MOST_NAME: Final = 1000
"""Maximum number of characters of a name, as terminals and charts show it in full."""

MOST_LINE: Final = 4000
"""Maximum number of characters of one line of an error."""

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories: control and format characters (including escapes, marks of
direction and of zero width), surrogates, line separators."""


def is_invisible(character: str) -> bool:
    """Whether a character changes the display of others, or shows nothing itself.

    >>> [is_invisible(c) for c in "aµ→ \\x1b\\u202e\\n"]
    [False, False, False, False, True, True, True]
    """
    return not character.isprintable() and unicodedata.category(character) in _HIDDEN


def is_shown_as_written(text: str) -> bool:
    """Whether no character of a text is ``is_invisible``."""
    return text.isprintable() or not any(map(is_invisible, text))


def visible(text: str, keep: str = "") -> str:
    r"""Returns the text with every hidden character escaped.

    Args:
        text: Any text.
        keep: Characters that stay unchanged.

    >>> visible("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(c)[1:-1] if is_invisible(c) and c not in keep else c for c in text
    )


def clipped(text: str, most: int = MOST_QUOTED) -> str:
    """Returns the text, or its beginning and its length.

    >>> clipped("x" * 300, 8)
    'xxxxxxxx… (300 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def quoted(value: object, write: Callable[[Any], str] = repr) -> str:
    """Returns a value as text for an error: on one line, escaped, and shortened.

    Args:
        value: Value from a file or a user.
        write: Function that converts the value to text.

    >>> quoted({"a": 1}), quoted("x\\n")
    ("{'a': 1}", "'x\\\\n'")
    """
    try:
        text = write(value)
    except (RecursionError, ValueError, TypeError, OverflowError):
        # Nested too deeply, an integer of thousands of digits, or a surrogate in the
        # text.
        return f"a {type(value).__name__} that cannot be shown"
    return clipped(visible(text))


def as_json(value: object) -> str:
    """Returns a value quoted as JSON.

    >>> as_json({"a": None})
    '{"a": null}'
    """
    return quoted(value, lambda given: json.dumps(given, default=str))


def message(text: str) -> str:
    """Returns an error's text: line breaks stay, other hidden characters are escaped.

    >>> message("a\\x07b\\nc")
    'a\\\\x07b\\nc'
    """
    if text.isprintable() and len(text) <= MOST_LINE:
        return text
    lines = visible(text, keep="\n\t").split("\n")
    return "\n".join(clipped(line, MOST_LINE) for line in lines)
