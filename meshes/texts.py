"""Checks and quotes text that comes from outside, such as names in files.

A name in a file reaches terminals, pages and charts. Control characters move a
terminal's cursor, bidirectional marks reorder a line, newlines forge a second one:
files that hold them are refused, and what an error quotes is escaped and shortened.
Both rules stand here alone; the module is at the bottom of the import order.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any, Final


MOST_QUOTED: Final = 200
"""Characters of a value that an error shows."""

MOST_NAME: Final = 1000
"""Characters of a name; terminals and charts show it whole."""

MOST_LINE: Final = 4000
"""Characters of one line of an error."""

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories: control and format characters (among them escapes, marks of
direction and of zero width), halves of characters, separators of lines."""


def is_invisible(character: str) -> bool:
    """Whether a character changes how others are shown, or shows nothing itself.

    >>> [is_invisible(c) for c in "aµ→ \\x1b\\u202e\\n"]
    [False, False, False, False, True, True, True]
    """
    return not character.isprintable() and unicodedata.category(character) in _HIDDEN


def is_shown_as_written(text: str) -> bool:
    """Whether a text holds no character that is ``is_invisible``."""
    return text.isprintable() or not any(map(is_invisible, text))


def visible(text: str, keep: str = "") -> str:
    r"""The text with every hidden character as its escape.

    Args:
        text: Any.
        keep: Characters that stay as they are.

    >>> visible("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(c)[1:-1] if is_invisible(c) and c not in keep else c for c in text
    )


def clipped(text: str, most: int = MOST_QUOTED) -> str:
    """The text, or its beginning and how long it is.

    >>> clipped("x" * 300, 8)
    'xxxxxxxx… (300 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def quoted(value: object, write: Callable[[Any], str] = repr) -> str:
    """A value as an error shows it: on one line, escaped, and not at length.

    Args:
        value: Value of a file, or of a user.
        write: Function that makes text of it.

    >>> quoted({"a": 1}), quoted("x\\n")
    ("{'a': 1}", "'x\\\\n'")
    """
    try:
        text = write(value)
    except (RecursionError, ValueError, TypeError, OverflowError):
        # Too deep, an integer of thousands of digits, or a text cut in a character.
        return f"a {type(value).__name__} that cannot be shown"
    return clipped(visible(text))


def as_json(value: object) -> str:
    """A value quoted as JSON.

    >>> as_json({"a": None})
    '{"a": null}'
    """
    return quoted(value, lambda given: json.dumps(given, default=str))


def message(text: str) -> str:
    """The text of an error: lines as they are, everything else that is hidden escaped.

    >>> message("a\\x07b\\nc")
    'a\\\\x07b\\nc'
    """
    if text.isprintable() and len(text) <= MOST_LINE:
        return text
    lines = visible(text, keep="\n\t").split("\n")
    return "\n".join(clipped(line, MOST_LINE) for line in lines)
