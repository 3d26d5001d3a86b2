"""Reads tables of training runs as CSV files, and checks their columns and cells.

It refuses damaged and invented tables. ``read_table`` interprets their rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whalejax.estimates import vocabulary
from whalejax.meshes.errors import Problems, WhaleError, quoted
from whalejax.meshes.formats.cluster_text import MAX_DEVICES
from whalejax.meshes.read_file import UnreadableFileError, read_text


COLUMNS = (
    "source url_or_repo_path model params_b layers hidden heads kv_heads ffn vocab seq "
    "experts topk device num_devices devices_per_node dp fsdp zero_stage tp sp pp vpp "
    "cp ep micro_batch global_batch remat precision step_time_s tflops_per_device mfu "
    "tokens_per_s_per_device peak_mem_gib"
).split()
"""Columns that are read, in addition to ``OPTIONAL``; all other columns are copied."""

OPTIONAL = ("notes", "head_dim", "compile", "loss_chunks")
"""Columns that few tables have. ``notes`` may describe a mixed pipeline. ``head_dim``
is the width of a head if it is not ``hidden / heads``. ``compile`` says whether the
step is compiled. ``loss_chunks`` is the number of chunks of the logits.
"""

NEEDED = ("layers", "hidden", "seq", "global_batch", "num_devices")
"""Columns without which a row has no prediction."""

_POSITIVE = frozenset(
    (
        "layers hidden heads kv_heads ffn vocab seq num_devices devices_per_node dp "
        "fsdp tp pp vpp cp ep micro_batch global_batch head_dim loss_chunks"
    ).split()
)
_NUMBERS = _POSITIVE | {
    "params_b",
    "experts",
    "topk",
    "zero_stage",
    "step_time_s",
    "tflops_per_device",
    "mfu",
    "tokens_per_s_per_device",
    "peak_mem_gib",
}

REST = frozenset(("dp", "fsdp"))
"""Columns in which -1 means the rest of the devices, as in MaxText."""

_READ = frozenset((*COLUMNS, *OPTIONAL))

_MOST: Mapping[str, int] = {
    **{"layers": 10**4, "hidden": 2**20, "heads": 2**16, "kv_heads": 2**16},
    **{"ffn": 2**24, "vocab": 2**26, "seq": 2**26, "head_dim": 2**16},
    **{"experts": 2**16, "topk": 2**16, "zero_stage": 9, "params_b": 10**9},
    **{"num_devices": MAX_DEVICES, "devices_per_node": MAX_DEVICES},
    **{"dp": MAX_DEVICES, "fsdp": MAX_DEVICES, "tp": 2**12, "pp": 2**8, "vpp": 2**10},
    **{"cp": MAX_DEVICES, "ep": MAX_DEVICES, "micro_batch": 2**24},
    **{"global_batch": 2**36, "loss_chunks": 2**26},
}
"""Largest number by column, above that of any run; other columns have ``_MEASURED``."""

_MEASURED = 1e15
"""Largest number in a measured column."""

_LONGEST_CELL = 4000
"""Largest number of characters of a cell that is read; copied cells have no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvTable:
    """CSV file: its header, and its rows with their line numbers.

    Attributes:
        header: Names of the columns.
        rows: Cell by name of the column, for each row.
        lines: Line number of each row.
        unread: Reason why each row cannot be read; empty for readable rows.
    """

    header: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    lines: tuple[int, ...]
    unread: tuple[str, ...]


def read_table(path: str | Path, *, strict: bool = True) -> CsvTable:
    """Reads a CSV file with a header.

    Args:
        path: Path of the file.
        strict: Whether to refuse a file with an unreadable row; default: True. If not,
            ``unread`` has the reason.

    Raises:
        WhaleError: The file cannot be read, or its header lacks columns or repeats one.
            With ``strict``, also rows of another length and wrong cells. Lists all
            problems with line and column.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise WhaleError(f"{path} cannot be read ({error.strerror})") from error
    except UnreadableFileError as error:
        raise WhaleError(f"{path} is not text in UTF-8: {error}") from error
    problems = Problems(str(path), WhaleError)
    reader = csv.reader(text.splitlines(keepends=True))
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise WhaleError(f"{path}, line {reader.line_num}: {error}") from error
    if not lines:
        raise WhaleError(
            f"{path} is empty; expected a header line with {COLUMNS[0]}, …"
        )
    _, names = lines[0]
    header = tuple(name.strip() for name in names)
    missing = [name for name in (*NEEDED, "device") if name not in header]
    if missing:
        problems.add(f"line 1: no column {', '.join(missing)}")
    for name in sorted({n for n in header if header.count(n) > 1}):
        problems.add(f"line 1: the column {quoted(name)} occurs twice")
    problems.raise_if_any()
    rows, numbers, unread = [], [], []
    for line, cells in lines[1:]:
        result: list[str] = []
        if len(cells) != len(header):
            result.append(f"{len(cells)} cells, the header has {len(header)}")
            cells = [*cells, *[""] * len(header)][: len(header)]
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        result += [] if result else _wrong_cells(row)
        rows.append(row)
        numbers.append(line)
        unread.append("; ".join(result))
        for text in result:
            joint = ":" if text[0].isdigit() else ","
            problems.add(f"line {line}{joint} {text}")
    if strict:
        problems.raise_if_any()
    return CsvTable(
        header=header, rows=tuple(rows), lines=tuple(numbers), unread=tuple(unread)
    )


def _wrong_cells(row: Mapping[str, str]) -> list[str]:
    wrong_cells = [_wrong(column, cell) for column, cell in row.items()]
    return [text for text in wrong_cells if text]


def _wrong(column: str, cell: str) -> str:
    at = f"column {column}"
    if column in _READ and len(cell) > _LONGEST_CELL:
        return f"{at}: {quoted(cell)}; expected at most {_LONGEST_CELL} characters"
    if column == "compile" and cell and vocabulary.compiled(cell) is None:
        return f"{at}: {quoted(cell)}; expected compiled or eager, or nothing"
    if column not in _NUMBERS or not cell:
        return ""
    wanted = _expected_text(column)
    try:
        value = float(cell)
    except ValueError:
        return f"{at}: {quoted(cell)} is not a number; expected {wanted}"
    if column in REST and value == -1:
        return ""
    if not math.isfinite(value):
        return f"{at}: {quoted(cell, str)} is not a number; expected {wanted}"
    most = _MOST.get(column, _MEASURED)
    if value > most:
        return f"{at}: {quoted(cell, str)}; expected at most {most:.15g}"
    if column == "micro_batch":
        good = value > 0
    elif column in _POSITIVE:
        good = value >= 1 and value == int(value)
    else:
        good = value >= 0
    return "" if good else f"{at}: {quoted(cell, str)}; expected {wanted}"


def _expected_text(column: str) -> str:
    if column == "micro_batch":
        return "a number above 0"
    if column in _POSITIVE:
        return "a whole number of at least 1"
    return "a number of at least 0"


@dataclass(slots=True)
class Cells:
    """Row that is being interpreted.

    Attributes:
        row: Cell by name of the column.
        notes: Notes on values that were inferred.
    """

    row: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """Returns the cell without blanks around it; empty if the row has none."""
        return (self.row.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        """Returns the integer of the cell; None if it is empty or -1 (the rest)."""
        whole = self.number(column)
        return None if whole is None or whole < 0 else int(whole)

    def number(self, column: str) -> float | None:
        """Returns the number of the cell; None if it is empty."""
        text = self.text(column)
        return float(text) if text else None

    def or_else(self, column: str, value: int, why: str) -> int:
        """Returns the integer of the cell, or else a default that is noted."""
        or_else = self.whole(column)
        if or_else is not None:
            return or_else
        self.notes.append(f"{column} {value} ({why})")
        return value
