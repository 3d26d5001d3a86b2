"""Plan of a model with tables: their placement, and a plan of the dense part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from whalejax.meshes.checks import short_repr
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.table_text import placed_text, placed_why
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.cpu_or_device import TableCost
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.sections import Sections
from whalejax.planner.tables.table import Table
from whalejax.tables.dense import lookup_axes
from whalejax.tables.device_use import DeviceUse
from whalejax.tables.sparse_optimizers import SparseOptimizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablesPlan:
    """Plan of a model with embedding tables; ``wh.plan_tables`` makes one.

    ``print`` shows it, and ``why(path)`` explains a table or a parameter.
    ``wh.compile_tables`` makes a step of it.

    Attributes:
        placement: Placement of the tables in processes, or of all tables if none is.
        dense: Plan of the dense part, which divides the batch.
        rows: Update rule of rows.
        refused: Reason why a looked-up parameter is not a table, by its path.
        model_paths: Path of every trained leaf.
        batch: Global batch as a structure of abstract arrays.
        sections: Sections, if tables are in processes of their own; None if all tables
            are on the devices of the dense part.
        program_hash: Hash of the traced loss.
        beside: Placement of the tables on the dense part's devices, if others are in
            processes; else None.
        cut: Costs of each table in either section, if there may be two.
        use: Memory and traffic of the tables on the dense part's devices.
    """

    placement: TablePlacement
    dense: Plan
    rows: SparseOptimizer
    refused: dict[str, str]
    model_paths: tuple[str, ...]
    batch: Any
    sections: Sections | None = None
    program_hash: str = ""
    beside: TablePlacement | None = None
    cut: tuple[TableCost, ...] = ()
    use: DeviceUse = DeviceUse()

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Tables, in the order of the model's leaves."""
        beside = () if self.beside is None else self.beside.tables
        found = {table.name: table for table in (*self.placement.tables, *beside)}
        return tuple(found[path] for path in self.model_paths if path in found)

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the tables."""
        return tuple(table.name for table in self.all_tables)

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes over which lookups and tables are divided, with their sizes."""
        return lookup_axes(self.dense)

    @property
    def trained(self) -> tuple[LeafPlan, ...]:
        """Trained parameters of the dense part, in the order of their tree."""
        return self.dense.trained

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.dense.num_micro_batches

    def why(self, path: str) -> str:
        """Returns the reason for the placement of a table or another parameter.

        Args:
            path: Dotted path of a parameter, or its beginning.

        Raises:
            PlanError: No parameter has that path.
        """
        if not isinstance(path, str):
            raise PlanError(
                f"path is {short_repr(path)}; expected the path of a parameter"
            )
        for name in self.tables:
            if name == path or name.startswith(f"{path}."):
                return placed_why(name, self.placement, self.beside, self.cut)
        others = [name for name in self.model_paths if name not in self.tables]
        for name in others:
            if name == path or name.startswith(f"{path}."):
                beside = self.refused.get(name)
                return self.dense.why(name) + (f"\n{beside}" if beside else "")
        raise PlanError(
            f"no parameter has the path {short_repr(path)}; there are "
            f"{', '.join(self.model_paths[:8])}"
        )

    def __str__(self) -> str:
        refused = "".join(f"\nno table: {text}" for text in self.refused.values())
        placed = placed_text(self.sections, self.placement, self.beside, self.cut)
        return f"{placed}{refused}\n\n{self.dense}"
