"""Errors that list all problems, warnings, progress reports, and quoted text.

Checks collect problems in ``Problems``, which raises one error for all. Planning and
compiling report their activities by ``tell``, and ``whalejax.cli.progress`` shows them.

Names from files appear on terminals, pages and charts. Control characters and
bidirectional marks in a name could change what else is shown there. Files with such
characters are refused, and text in errors is escaped and shortened.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final


MOST_QUOTED: Final = 200
"""Maximum number of characters of a value in an error."""

MOST_NAME: Final = 1000
"""Maximum number of characters of a name, which terminals and charts show in full."""

MOST_LINE: Final = 4000
"""Maximum number of characters of one line of an error."""

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories of control and format characters, surrogates and line
separators."""


def is_invisible(character: str) -> bool:
    """Whether a character is not shown, or changes how others are shown.

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
    """Returns the text, or the beginning and the length of a longer text.

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
        # For instance, the value is nested too deeply or contains a surrogate.
        return f"a {type(value).__name__} that cannot be shown"
    return clipped(visible(text))


def as_json(value: object) -> str:
    """Returns a value quoted as JSON.

    >>> as_json({"a": None})
    '{"a": null}'
    """
    return quoted(value, lambda given: json.dumps(given, default=str))


def message(text: str) -> str:
    """Returns an error's text with hidden characters escaped, except line breaks.

    >>> message("a\\x07b\\nc")
    'a\\\\x07b\\nc'
    """
    if text.isprintable() and len(text) <= MOST_LINE:
        return text
    lines = visible(text, keep="\n\t").split("\n")
    return "\n".join(clipped(line, MOST_LINE) for line in lines)


MOST_LISTED: Final = 20
"""Maximum number of problems that one error lists."""


class WhaleError(ValueError):
    """Invalid input from the user; the message names a remedy.

    Args:
        text: Message. Its control characters are escaped, and long lines are cut.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(message(str(text)))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the line of the user's code that called the library.

    Args:
        text: Text of the warning.
        category: Category of the warning.
    """
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


class Problems:
    """Collects messages and raises one error that lists them all.

    As a context manager, it raises at the end of the block, unless the block itself
    failed.

    Args:
        title: Subject of the checks, such as ``"cluster 'h100'"``.
        kind: Exception to raise.

    Example:
        >>> problems = Problems("batch")
        >>> problems.add("x: size 6 is not divisible by 4. Use 4 or 8.")
        >>> bool(problems), len(problems)
        (True, 1)
        >>> print(problems.text())
        batch: 1 problem
          1. x: size 6 is not divisible by 4. Use 4 or 8.
    """

    def __init__(
        self, title: str = "input", kind: type[WhaleError] = WhaleError
    ) -> None:
        self.title = title
        self.kind = kind
        self.messages: list[str] = []
        self._known: set[str] = set()

    def add(self, text: str) -> None:
        """Records one problem; equal texts count once."""
        if text not in self._known:
            self._known.add(text)
            self.messages.append(text)

    def extend(self, other: Problems) -> None:
        """Records every problem of another collection."""
        for text in other.messages:
            self.add(text)

    def __len__(self) -> int:
        return len(self.messages)

    def __bool__(self) -> bool:
        return bool(self.messages)

    def text(self, title: str | None = None) -> str:
        """Returns the message: title, number of problems, and one line for each."""
        count = len(self.messages)
        noun = "problem" if count == 1 else "problems"
        lines = [f"{self.title if title is None else title}: {count} {noun}"]
        for number, text in enumerate(self.messages[:MOST_LISTED], start=1):
            indented = text.replace("\n", "\n     ")
            lines.append(f"  {number}. {indented}")
        if count > MOST_LISTED:
            lines.append(f"  … and {count - MOST_LISTED} more")
        return "\n".join(lines)

    def raise_if_any(
        self, kind: type[WhaleError] | None = None, title: str | None = None
    ) -> None:
        """Raises one error with every problem, or returns if there is none.

        Raises:
            WhaleError: At least one problem was recorded; of class ``kind`` if given.
        """
        if self.messages:
            raise (self.kind if kind is None else kind)(self.text(title))

    def __enter__(self) -> Problems:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.raise_if_any()


_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "whalejax_listener", default=None
)


def tell(what: str) -> None:
    """Reports the start of an activity, such as ``"tracing the model"``."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Receives the reports inside the block.

    Args:
        listener: Function that receives the name of each activity.

    >>> heard = []
    >>> with listening(heard.append):
    ...     tell("searching")
    >>> heard
    ['searching']
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
