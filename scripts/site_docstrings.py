"""Prepares docstrings for the site: griffe reads them through this extension.

Markdown takes lines that begin with ``>>>`` for quotations; a fence around them makes
them code. Parameters that share a description (``a, b: ...``) are listed one by one.
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
    """Returns a docstring with a fence around every example and its output."""
    return _EXAMPLE.sub(
        lambda match: f"{match['indent']}```pycon\n{match[0]}\n{match['indent']}```",
        docstring,
    )


def one_by_one(docstring: str) -> str:
    """Returns a docstring in which each parameter has its own description."""
    return _TOGETHER.sub(
        lambda match: "\n".join(
            f"{match['indent']}{name}: {match['text']}"
            for name in match["names"].split(", ")
        ),
        docstring,
    )


class Shown(griffe.Extension):
    """Extension that prepares every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Prepares a docstring; griffe calls this for each object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))
