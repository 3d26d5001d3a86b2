"""Lays out text of a given width: paragraphs that begin with a name, and tables.

Plans are also read where only the planner's own dependencies are installed. So
``print(plan)`` uses this module instead of a library. Terminals colour the text by the
style of each span.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from whalejax.meshes.checks import Arguments


WIDEST = 100_000
"""Columns of the widest line."""

Span = tuple[str, str]
"""Text and the name of its style: ``"name"``, ``"head"``, ``"bar 0"`` or ``""``."""

Line = tuple[Span, ...]
"""Spans of one line, or of a piece that is broken only if it exceeds a line."""

NAME_CELLS = 8
"""Columns of the name at the beginning of a paragraph."""

LEAST_CELLS = 12
"""Columns below which a column of a table is not wrapped."""

GAP = "  "

_ODD = re.compile("[\u0300-\u1fff\u2320-\u232f\u2e80-\U0010ffff]")
"""Unicode categories of characters that may take no column, or two."""


def check_lines(width: object, all_rows: object) -> None:
    """Refuses arguments with which lines cannot be laid out.

    Args:
        width: Columns of a line; None for lines of any length.
        all_rows: Whether to show all rows, not only the most important.

    Raises:
        WhaleError: An argument is wrong.
    """
    problems = Arguments("lines")
    problems.whole("width", width, least=1, most=WIDEST, none=True)
    problems.switch("all_rows", all_rows)
    problems.raise_if_any()


def cells(text: str) -> int:
    """Returns the columns that a text takes on a terminal.

    >>> cells("4×8 █▌"), cells("層")
    (6, 2)
    """
    if not _ODD.search(text):
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def plain(lines: Sequence[Line]) -> str:
    """Returns lines as text without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def line_cells(line: Line) -> int:
    """Returns the columns that a line takes."""
    return sum(cells(text) for text, _ in line)


def paragraph(
    name: str, pieces: Sequence[Line | str], width: int | None, gap: str = GAP
) -> list[Line]:
    """Lays out a name and, behind it, as many pieces per line as fit.

    Args:
        name: Name at the beginning.
        pieces: Pieces of text; only pieces that exceed a line are broken.
        width: Columns of a line; None puts everything into one line.
        gap: Text between pieces.
    """
    first, *others = indented(pieces, width, gap, NAME_CELLS)
    return [((name.ljust(NAME_CELLS), "name"), *first[1:]), *others]


def indented(
    pieces: Sequence[Line | str], width: int | None, gap: str = GAP, cells: int = 2
) -> list[Line]:
    """Lays out as many pieces per line as fit, indented by some blanks.

    Args:
        pieces, width, gap: Arguments of ``paragraph``, unchanged.
        cells: Number of blanks before each line; default: 2.
    """
    room = None if width is None else max(1, width - cells)
    lines: list[list[Span]] = []
    for piece in pieces:
        spans: Line = ((piece, ""),) if isinstance(piece, str) else piece
        for part in _broken(spans, room):
            together = line_cells((*lines[-1], (gap, ""), *part)) if lines else 0
            if lines and (room is None or together <= room):
                lines[-1] += [(gap, ""), *part]
            else:
                lines.append(list(part))
    blank = (" " * cells, "")
    return [(blank, *line) for line in lines or [[]]]


def _broken(spans: Line, room: int | None) -> list[Line]:
    if room is None or line_cells(spans) <= room:
        return [spans]
    lines: list[list[Span]] = [[]]
    for text, style in spans:
        for word in _words(text, room):
            used = line_cells(tuple(lines[-1]))
            if used and used + cells(word.rstrip()) > room:
                lines.append([])
                word = word.lstrip()
            lines[-1].append((word, style))
    return [_stripped(line) for line in lines if line]


def _stripped(line: Sequence[Span]) -> Line:
    *before, (text, style) = line
    return (*before, (text.rstrip(), style))


def _words(text: str, room: int) -> Iterator[str]:
    """Yields parts that fit: split at spaces, after . + × / , - or anywhere."""
    for word in re.findall(r"\s*\S+\s?|\s+", text):
        if cells(word.rstrip()) <= room:
            yield word
            continue
        for part in re.findall(r"[^.+×/,-]+[.+×/,-]?|[.+×/,-]", word):
            while cells(part) > room:
                yield part[:room]
                part = part[room:]
            yield part


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    right: Sequence[int] = (),
) -> list[Line]:
    """Lays out a table: wide cells wrap, and a table that is still too wide is a list.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
        width: Columns of a line; None for the table's own width.
        right: Indices of right-aligned columns.
    """
    columns = list(zip(head, *rows, strict=True))
    sizes = [max(map(cells, column)) for column in columns]
    if width is not None:
        least = [min(size, LEAST_CELLS) for size in sizes]
        room = width - len(GAP) * (len(sizes) - 1)
        if sum(least) > room:
            return list(_lists(head, rows, width))
        sizes = _shrunk(sizes, least, room)
    lines = list(_row(head, sizes, right, "head"))
    for row in rows:
        lines += _row(row, sizes, right, "")
    return lines


def _shrunk(sizes: list[int], least: list[int], room: int) -> list[int]:
    """Returns the columns' widths after the widest were reduced until all fit."""
    found = list(sizes)
    while sum(found) > room:
        spare = [size - low for size, low in zip(found, least, strict=True)]
        widest = max((i for i, s in enumerate(spare) if s), key=lambda i: found[i])
        found[widest] -= 1
    return found


def _row(
    row: Sequence[str], sizes: Sequence[int], right: Sequence[int], style: str
) -> Iterator[Line]:
    folded = [
        ["".join(text for text, _ in part) for part in _broken(((cell, ""),), size)]
        for cell, size in zip(row, sizes, strict=True)
    ]
    for height in range(max(map(len, folded))):
        texts = []
        for column, (parts, size) in enumerate(zip(folded, sizes, strict=True)):
            text = parts[height].strip() if height < len(parts) else ""
            blank = " " * (size - cells(text))
            texts.append(blank + text if column in right else text + blank)
        yield ((GAP.join(texts).rstrip(), style),)


def _lists(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Line]:
    """Yields each row as its first cell, then lines of column names and cells."""
    for row in rows:
        yield from _broken(((row[0], "head"),), width)
        named = [
            ((f"{name} ", ""), (cell, ""))
            for name, cell in zip(head[1:], row[1:], strict=True)
            if cell
        ]
        yield from indented(named, width, " · ")
