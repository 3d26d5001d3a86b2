"""Plain data of a plan's embedding tables, which ``planner.tables`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whalejax.planner.json_codec import DataError


@dataclass(frozen=True, slots=True)
class TablesData:
    """The placement of tables with everything derived from it, as a JSON object.

    Attributes:
        document: Entries of ``whalejax.tables.table_plan_record.TablesRecord``, and the
            placements.
    """

    document: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object."""
        return self.document

    @classmethod
    def from_json(cls, data: Any) -> TablesData:
        """Returns the data of a file, which later readers check.

        Raises:
            DataError: The data are no such object.
        """
        if not isinstance(data, dict) or "placement" not in data:
            raise DataError("tables is no object with a placement")
        return cls(data)

    @property
    def program(self) -> dict[str, Any]:
        """Parts of the document that change the program."""
        sections = self.document.get("sections") or {}
        kept = ("staleness", "processes", "queue_depth")
        return {
            "shards": self.document["placement"].get("shards"),
            "hottest": self.document["placement"].get("hottest"),
            "beside": (self.document.get("beside") or {}).get("shards"),
            "rows": self.document.get("rows"),
            "loss": self.document.get("program_hash"),
            "sections": {name: sections.get(name) for name in kept},
        }
