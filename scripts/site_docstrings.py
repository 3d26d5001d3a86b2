"""Examples of docstrings as code: griffe reads docstrings through this extension.

Markdown takes lines that begin with ``>>>`` for quotations; a fence around them makes
them the code that the doctests run.
"""

from __future__ import annotations

import re
from typing import Any, Final

import griffe  # pyright: ignore[reportMissingImports] (of the extra docs)


_EXAMPLE: Final = re.compile(r"^(?P<indent> *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """A docstring with a fence around every example and what it prints."""
    return _EXAMPLE.sub(
        lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```",
        docstring,
    )


class Doctests(griffe.Extension):
    """Fences the examples of every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
