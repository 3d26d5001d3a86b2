"""What one search may keep in host memory, how much that is and what it takes.

It is apart from the search, which asks for each layout; what waits in host memory and
whose state lies there depends on the model and its optimizer alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost import RowCost
from whalejax.planner.graph import Graph
from whalejax.planner.layout import shards
from whalejax.planner.leaves import LeafFacts, LeafLayout
from whalejax.planner.rows import Row
from whalejax.planner.scored import Request
from whalejax.planner.terms import RUNNABLE_OFFLOADS
from whalejax.planner.waiting import exposed_seconds, waiting_values


Offload = tuple[str, ...]


@dataclass(frozen=True)
class Hosting:
    """Host memory, as one search asks for it.

    Attributes:
        graph: what is planned.
        cluster: the machine.
        request: what the user fixed.
        facts: the parameters.
    """

    graph: Graph
    cluster: Cluster
    request: Request
    facts: LeafFacts

    @functools.cached_property
    def waiting(self) -> dict[int, int]:
        """Copies of activations that may wait in host memory, by tensor."""
        return waiting_values(self.graph)

    @functools.cached_property
    def state(self) -> list[int]:
        """Bytes of each parameter's optimizer state that may lie in host memory."""
        if self.request.hosted is None:
            return [0] * len(self.facts.tensors)
        found = self.request.hosted()
        return [found.get(t.path, 0) for t in self.facts.tensors]

    @property
    def counted(self) -> bool:
        """The cluster says how much there is and how fast it is reached."""
        kinds = self.cluster.kinds
        return all(k.host_memory_bytes and k.host_link_bytes_per_second for k in kinds)

    @property
    def nothing_waits(self) -> bool:
        """The user wants activations there, and no layers are computed again."""
        return "activations" in (self.request.offload or ()) and not self.waiting

    def options(self) -> Iterator[list[Offload]]:
        """What may lie there, in groups: the more only where the less does not fit."""
        asked = self.request.offload
        yield [() if asked is None else asked]
        if asked is not None or not self.counted:
            return
        # Some optimizers need their state as a whole.
        there = {"optimizer": any(self.state), "activations": bool(self.waiting)}
        each = [name for name in RUNNABLE_OFFLOADS if there[name]]
        for size in range(1, len(each) + 1):
            yield [*itertools.combinations(each, size)]

    def state_bytes(
        self, layouts: Sequence[LeafLayout], mesh: Mapping[str, int], offload: Offload
    ) -> int:
        """Optimizer state of one device that lies in host memory.

        Args:
            layouts: of each group of parameters.
            mesh: sizes of the axes.
            offload: what is kept there.
        """
        if "optimizer" not in offload:
            return 0
        pairs = zip(self.state, self.facts.group_of, strict=True)
        return sum(
            nbytes // shards(layouts[group].optimizer, mesh) for nbytes, group in pairs
        )

    def seconds(
        self, state: int, waiting: int, costs: Sequence[tuple[Row, RowCost]], count: int
    ) -> float:
        """What moving to host memory and back adds to a step; 0 where nobody knows.

        Args:
            state: bytes of optimizer state on one device.
            waiting: bytes of activations of one micro-batch on one device.
            costs: each row of the model, and what it costs in one micro-batch.
            count: micro-batches in a step.
        """
        link = min(k.host_link_bytes_per_second or 0.0 for k in self.cluster.kinds)
        if not link:
            return 0.0
        # The backward pass takes twice as long as the forward pass, which it may
        # contain once more.
        ahead = math.fsum(c.compute_seconds / (3 + row.remat) for row, c in costs)
        behind = math.fsum(c.compute_seconds for _, c in costs) - ahead
        each = (exposed_seconds(waiting, link, compute) for compute in (ahead, behind))
        # A loop over pieces of state waits for each: nothing hides behind it.
        return 2 * state / link + count * float(sum(each))
