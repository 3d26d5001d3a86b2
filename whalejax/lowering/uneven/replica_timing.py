"""Times the replicas of a step and applies the shares that ``measured_shares`` chooses.

Every process gets the same measurements and computes the same shares, so shares need no
further communication. Shares may also be set by hand, equally in all processes. With
their measurements, replicas send a checksum of their shares.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.lowering.micro_batch_rows import MicroBatchRows
from whalejax.lowering.sample_shares import PortionLayout, checked_shares
from whalejax.lowering.spmd.spmd_executor import Program
from whalejax.lowering.step_runner import StepRunner
from whalejax.lowering.uneven.timer import Stopwatch
from whalejax.planner.balance.measured_shares import Rebalance
from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.uneven_replicas import most_shares


_TOLD: Final = 3
"""Number of values that a replica sends: its pace, a checksum of its shares, and
``_MARKS`` minus the checksum. If the processes of a replica disagree, one of both has a
maximum over the processes that is too large."""

_MARKS: Final = 2**24
"""Whole numbers up to this one are exact in float32."""


class AdaptiveSharesRunner(StepRunner):
    """A step runner whose shares follow measured times.

    Attributes:
        rebalances: Whether shares follow the measured times of replicas.
        program: Loss, optimizer and plan of the full model.
        batch_shardings: Shardings of a micro-batch's leaves.
    """

    program: Program
    batch_shardings: tuple[NamedSharding, ...]

    def __init__(self, plan: Plan, mine: Sequence[int]) -> None:
        """Starts with the shares of a plan.

        Args:
            plan: Plan with uneven shares.
            mine: Numbers of the replicas with devices of this process.
        """
        self._plan = plan
        self._mine = list(mine)
        self.shares = plan.shares
        self.rebalances = len(plan.shares) > 1
        self._stopwatches = {r: Stopwatch() for r in self._mine}
        self._begins: dict[int, Any] = {}
        self._told: Any = None

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of micro-batches of each replica in the next step."""
        return self._balance.shares

    @shares.setter
    def shares(self, shares: Sequence[int]) -> None:
        most = most_shares(self._plan)
        self._balance = Rebalance(checked_shares(shares, self._plan, most), most)

    @property
    def seconds(self) -> tuple[float, ...]:
        return self._balance.seconds

    def layout(self, structure: Any) -> PortionLayout:
        """Returns the layout of this process's batches, which are its micro-batches.

        Args:
            structure: Tree of a batch.
        """
        return PortionLayout(
            structure=structure,
            leaves=self._plan.batch,
            shardings=self.batch_shardings,
            axes=self.program.batch_axes,
            cut=MicroBatchRows.of(self._plan),
            mine=self.numbers,
        )

    def numbers(self) -> list[int]:
        """Returns the indices of this process's micro-batches in the next step."""
        return [m for r in self._mine for m in micro_batch_ranges(self.shares)[r]]

    def _start(self) -> list[int]:
        timed = [r for r in self._mine if self.shares[r] and r in self._begins]
        for r in timed:  # Programs run while others are still being issued.
            self._stopwatches[r].start(self._begins[r])
        return timed

    def _pace(self, replica: int, row: Mesh) -> Any:
        seconds = self._stopwatches[replica].seconds if self.rebalances else 0.0
        return told_pace(seconds, self.shares, replica, row)

    def _settle(self, paces: Any) -> None:
        told, self._told = self._told, (paces, self.shares)
        if told is None:
            return
        # All shards are equal, so any local one can be read.
        paces, shares = told
        said = np.asarray(paces.addressable_shards[0].data).reshape(_TOLD, -1)
        _check_marks(said[1:], shares)
        if self.rebalances:
            self._balance.saw(said[0].tolist())


def _mark_of(shares: Sequence[int]) -> int:
    """Returns a checksum of shares, equal for others in one of 16 million cases."""
    return zlib.crc32(repr(tuple(shares)).encode()) % _MARKS


def _check_marks(said: np.ndarray, shares: Sequence[int]) -> None:
    mark = _mark_of(shares)
    others = np.flatnonzero((said != [[mark], [_MARKS - mark]]).any(axis=0)).tolist()
    if others:
        which = ", ".join(map(str, others))
        raise PlanError(
            f"replica{'s' * (len(others) > 1)} {which} ran with other shares than "
            f"{list(shares)}, those of process {jax.process_index()}: step.shares was "
            "set in some processes only, so samples were left out or counted twice. "
            "Return to a checkpoint, and set the same shares in all processes before "
            "the same step"
        )


def told_size(replicas: int) -> int:
    """Returns the length of the exchanged array of paces."""
    return _TOLD * replicas


def told_pace(seconds: float, shares: Sequence[int], replica: int, row: Mesh) -> Any:
    """Packs the measured pace of this process for the other replicas.

    Several processes of a replica measure different values. The maximum of each column
    over them is used.

    Args:
        seconds: Measured seconds of a micro-batch; 0 if this process measured none.
        shares: Current number of micro-batches of every replica.
        replica: Number of the replica.
        row: Mesh of the devices that send the pace.

    Returns:
        ``[devices, told_size(replicas)]``, with a row on each device.
    """
    mark = _mark_of(shares)
    mine = np.zeros((_TOLD, len(shares)), np.float32)
    mine[:, replica] = seconds, mark, _MARKS - mark
    mine = mine.reshape(1, -1)
    return jax.make_array_from_single_device_arrays(
        (row.size, mine.size),
        NamedSharding(row, PartitionSpec(row.axis_names)),
        [jax.device_put(mine, device) for device in row.local_devices],
    )
