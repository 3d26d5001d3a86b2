"""Cells of one row of a table, and what is noted while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cells:
    """One row on its way to a run.

    Attributes:
        row: Column to cell.
        notes: Notes on values that were inferred.
    """

    row: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """The cell without blanks around it; empty where there is none."""
        return (self.row.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        """The number of the cell, or None where it is empty or -1, the rest."""
        whole = self.number(column)
        return None if whole is None or whole < 0 else int(whole)

    def number(self, column: str) -> float | None:
        """The number of the cell, whole or not, or None where it is empty."""
        text = self.text(column)
        return float(text) if text else None

    def or_else(self, column: str, value: int, why: str) -> int:
        """The cell, or a value that is noted."""
        or_else = self.whole(column)
        if or_else is not None:
            return or_else
        self.notes.append(f"{column} {value} ({why})")
        return value
