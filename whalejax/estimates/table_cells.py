"""Cells of one row of a table, with the notes of reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cells:
    """One row that is being read.

    Attributes:
        row: Column to cell.
        notes: Notes on values that were inferred.
    """

    row: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """Returns the cell without blanks around it; empty if there is none."""
        return (self.row.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        """Returns the integer of the cell; None if empty or -1 (the rest)."""
        whole = self.number(column)
        return None if whole is None or whole < 0 else int(whole)

    def number(self, column: str) -> float | None:
        """Returns the number of the cell, or None if it is empty."""
        text = self.text(column)
        return float(text) if text else None

    def or_else(self, column: str, value: int, why: str) -> int:
        """Returns the cell, or a default that is noted."""
        or_else = self.whole(column)
        if or_else is not None:
            return or_else
        self.notes.append(f"{column} {value} ({why})")
        return value
