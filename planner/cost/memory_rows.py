"""Time of operations that are limited by memory, for all cases at once.

Most operations of a program have no matrix product. Their time follows from the bytes
that they read and write. On a device, a tensor's size is divided by the shards of its
logical dimensions. If it has the batch, it is also divided by the number of
micro-batches. So for operations with the same logical dimensions, one small matrix
product gives the bytes in all cases: [operations, divisors] times [divisors, cases]. On
devices whose time is proportional to bytes, the operations are summed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.layout_cases import AxisHits, LayoutCases
from whalejax.planner.cost.operation_cost import (
    kernels_of,
    present_roles,
    traffic_slots,
    transcendental_slots,
)
from whalejax.planner.model.graph import ATTENTION
from whalejax.planner.sharding.operation_rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Operations of one TaskGraph with the same logical dimensions.

    Attributes:
        home: TaskGraph of the operations.
        present: Logical dimensions of the operations.
        divisors: (Logical dimensions, whether with the batch) of the tensors.
        forward, backward: Unsharded bytes that each operation moves in one pass, by
            divisor; [operations, divisors].
        transcendentals: Number of exp, tanh and the like in a forward pass, by divisor.
        ahead, behind: Number of forward passes and of backward passes, by operation.
        ahead_share: Fraction of each operation's time in the forward pass.
    """

    home: int
    present: frozenset[int]
    divisors: tuple[tuple[frozenset[int], bool], ...]
    forward: np.ndarray
    backward: np.ndarray
    transcendentals: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    ahead_share: np.ndarray

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        compiler: CompilerProfile,
        batch_roles: frozenset[int],
        *,
        summed: bool,
    ) -> RowBlock:
        """Returns the block of some operations.

        Args:
            rows: Operations without products, of one TaskGraph, with equal roles.
            compiler: Model of the compiler that fuses them.
            batch_roles: Logical dimensions of the batch.
            summed: Whether to sum the bytes of operations with equal numbers of passes.
        """
        divisors: dict[tuple[frozenset[int], bool], int] = {}
        entries: list[tuple[int, int, int, float]] = []
        lines: dict[object, tuple[int, Row]] = {}
        for number, row in enumerate(rows):
            line, _ = lines.setdefault(
                row.remat if summed else number, (len(lines), row)
            )
            scale = row.count if summed else 1
            costly = [(x, 1 / x.itemsize_bytes) for x in transcendental_slots(row)]
            for table, slots in enumerate((*traffic_slots(row, compiler), costly)):
                for slot, times in slots:
                    shared = slot.roles, bool(slot.roles & batch_roles)
                    divisor = divisors.setdefault(shared, len(divisors))
                    entries.append((table, line, divisor, scale * times * slot.nbytes))
        tables = np.zeros((3, len(lines), len(divisors)))
        for table, line, divisor, amount in entries:
            tables[table, line, divisor] += amount
        kept = [row for _, row in lines.values()]
        remat = np.array([float(row.remat) for row in kept])
        count = np.array([1.0 if summed else float(row.count) for row in kept])
        return cls(
            home=rows[0].task_graph,
            present=present_roles(rows[0]),
            divisors=tuple(divisors),
            forward=tables[0],
            backward=tables[1],
            transcendentals=tables[2],
            ahead=(1 + remat) * count,
            behind=count,
            ahead_share=1 / (3 + remat),
        )

    def seconds(
        self, hits: AxisHits, cases: LayoutCases, parts: Any, kind: DeviceKind
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of one micro-batch, and the forward pass's part of them.

        Args:
            hits: Mesh axes that shard the logical dimensions.
            cases: Layouts.
            parts: Number of micro-batches in a step, by case.
            kind: Kind of the devices.
        """
        inverse = np.empty((len(self.divisors), len(cases)))
        for row, (roles, batch) in zip(inverse, self.divisors, strict=True):
            row[:] = hits.inverse(roles)[cases.row]
            if batch:
                row /= parts

        def total(table: np.ndarray) -> Any:
            # For few operations, starting the threads of ``@`` takes longer.
            return np.einsum("rd,dn->rn", table, inverse) if table.any() else 0.0

        ahead = kind.elementwise_seconds(
            total(self.forward), total(self.transcendentals)
        )
        both = self.ahead[:, None] * ahead + self.behind[
            :, None
        ] * kind.elementwise_seconds(total(self.backward))
        return both.sum(axis=0), (self.ahead_share[:, None] * both).sum(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRows:
    """Operations of a program, divided by how their time is computed.

    Attributes:
        products: Operations with matrix products.
        communicating: Operations of any kind that have collectives in some layouts.
        blocks: Operations without products, in blocks with equal logical dimensions.
        launches: Number of kernels of all operations in ``blocks``.
    """

    products: tuple[Row, ...]
    communicating: tuple[Row, ...]
    blocks: tuple[RowBlock, ...]
    launches: float

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        compiler: CompilerProfile,
        batch_roles: frozenset[int],
        *,
        summed: bool,
    ) -> MemoryRows:
        """Divides the operations of a program into kinds.

        Args:
            rows: Cost rows of all operations.
            compiler, batch_roles, summed: Arguments of ``RowBlock.of``.
        """
        places: dict[object, list[Row]] = {}
        products = [x for x in rows if x.product or x.kind == ATTENTION]
        plain = [x for x in rows if not (x.product or x.kind == ATTENTION)]
        for row in plain:
            places.setdefault((row.task_graph, present_roles(row)), []).append(row)
        return cls(
            products=tuple(products),
            communicating=tuple(row for row in rows if _communicates(row)),
            blocks=tuple(
                RowBlock.of(several, compiler, batch_roles, summed=summed)
                for several in places.values()
            ),
            launches=sum((kernels_of(x, compiler) * x.count for x in plain), 0.0),
        )

    def seconds(
        self, cases: LayoutCases, parts: Any, kind: DeviceKind, divisible: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the compute seconds of one micro-batch, by case.

        Args:
            cases: Layouts.
            parts: Number of micro-batches in a step, by case.
            kind: Kind of the devices.
            divisible: Number that the shard count must divide, by logical dimension.

        Returns:
            Seconds of both passes, the forward pass's part of them, and seconds of both
            passes in operations that ``tensor`` does not shard.
        """
        compute, ahead, between = np.zeros((3, len(cases)))
        for block in self.blocks:
            hits = cases.grid.hits(block.home, block.present, divisible)
            both, first = block.seconds(hits, cases, parts, kind)
            compute += both
            ahead += first
            between += np.where(hits.tensor[cases.row], 0.0, both)
        return compute, ahead, between


def _communicates(row: Row) -> bool:
    rings = row.kind == ATTENTION and row.product is not None
    weights = any(x.weight and x.differentiable for x in row.operands)
    return rings or weights or row.repeats is not None
