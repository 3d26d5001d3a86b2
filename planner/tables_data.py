"""Data of a plan's embedding tables: plain, which ``planner.tables`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whalejax.planner.json_codec import DataError


@dataclass(frozen=True, slots=True)
class TablesData:
    """The placement of tables and all that follows from it, as a JSON object.

    Attributes:
        document: Entries of ``whalejax.tables.table_plan_record.TablesRecord``.
    """

    document: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The object."""
        return self.document

    @classmethod
    def from_json(cls, data: Any) -> TablesData:
        """The data of a file, which is checked where it is used.

        Raises:
            DataError: It is no object.
        """
        if not isinstance(data, dict) or "placement" not in data:
            raise DataError("tables is no object with a placement")
        return cls(data)

    @property
    def program(self) -> dict[str, Any]:
        """Returns the parts that change the program."""
        sections = self.document.get("sections") or {}
        kept = ("staleness", "processes", "queue_depth")
        return {
            "shards": self.document["placement"].get("shards"),
            "beside": (self.document.get("beside") or {}).get("shards"),
            "rows": self.document.get("rows"),
            "loss": self.document.get("program_hash"),
            "sections": {name: sections.get(name) for name in kept},
        }
