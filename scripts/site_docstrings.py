"""Docstrings as the site shows them: griffe reads them through this extension.

Markdown takes lines that begin with ``>>>`` for quotations; a fence around them makes
them the code that the doctests run. Parameters that share a description (``a, b: ...``)
are listed one by one, each under its own name.
"""

from __future__ import annotations

import re
from typing import Any, Final

import griffe  # pyright: ignore[reportMissingImports] (of the extra docs)


_EXAMPLE: Final = re.compile(r"^(?P<indent> *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)
_TOGETHER: Final = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)",
    re.MULTILINE,
)


def fenced(docstring: str) -> str:
    """A docstring with a fence around every example and what it prints."""
    return _EXAMPLE.sub(
        lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```",
        docstring,
    )


def one_by_one(docstring: str) -> str:
    """A docstring whose parameters each have a description of their own."""
    return _TOGETHER.sub(
        lambda found: "\n".join(
            f"{found['indent']}{name}: {found['text']}"
            for name in found["names"].split(", ")
        ),
        docstring,
    )


class Shown(griffe.Extension):
    """Every docstring that is read, as it is shown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))
