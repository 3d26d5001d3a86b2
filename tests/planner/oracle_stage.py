"""One micro-batch inside a pipeline stage, for the oracle: sums, and no array."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from whalejax.planner.cost.operation_cost import (
    Setting,
    flow_cost,
    gradients_of,
    row_hits,
    row_seconds,
)
from whalejax.planner.memory.saved_tensors import kept_bytes
from whalejax.planner.search.batched.branch_and_bound import WideSearch
from whalejax.planner.search.batched.cells import Links
from whalejax.planner.search.batched.layout_variants import Variant
from whalejax.planner.sharding.layout import GRID_AXES


class Inner:
    """One micro-batch inside a stage: what depends on the variant and its sizes."""

    def __init__(
        self,
        search: WideSearch,
        links: Links,
        variant: Variant,
        sizes: tuple[int, int, int, int],
    ) -> None:
        self.links = links
        samples, expert, context, tensor = sizes
        data = search.graph.batch_size // (samples * expert)
        mesh: dict[str, int] = dict.fromkeys(GRID_AXES, 1)
        mesh |= {"data": data, "expert": expert, "context": context, "tensor": tensor}
        batch = frozenset(r.index for r in links.dims.batch)
        self.s = Setting(mesh, 1, search.cluster, links.dims, batch)
        self.variant = variant
        self.work: dict[Any, float] = defaultdict(float)
        self.gradients: dict[Any, float] = defaultdict(float)
        self.traffic: list[tuple[int, int, Any]] = []
        self.saved: dict[Any, float] = defaultdict(float)
        for row in links.rows.ops:
            self._row(row, search)
        for flow in links.rows.flows:
            spot = flow.task_graph
            if flow.source.weight and flow.uses:
                spot = flow.uses[0].task_graph
            home, place = self._where(spot)
            for c in flow_cost(flow, variant.spots, self.s):
                self.traffic.append((home, place, c))
        self._memory()

    def _where(self, spot: int) -> tuple[int, int]:
        found = self.links.chain.spots[spot]
        return found.task_graph, found.place

    def _row(self, row: Any, search: WideSearch) -> None:
        hits = row_hits(row, self.variant.spots[row.task_graph], self.s)
        home, place = self._where(row.task_graph)
        weighs = sum(slot.weight for slot in row.operands[:2]) == 1
        sequence = self.variant.spots[0]["context"]
        for kind, device in enumerate(search.cluster.kinds):
            ahead, behind, launches = row_seconds(row, hits, self.s, device)
            ahead, behind = (
                ahead * row.count,
                behind * row.count + ahead * row.count * row.remat,
            )
            self.work["ahead", home, place, kind] += ahead
            self.work["behind", home, place, kind] += behind
            if row.product is None or not weighs:
                self.work["again", home, place, kind] += ahead
            if self.links.meets_itself(row, sequence):
                self.work["attention", "forward", kind] += ahead
                self.work["attention", "backward", kind] += behind
            self.work["launch", home, place, kind] += (
                launches * row.count * device.launch_seconds
            )
        for c in gradients_of(row, hits, self.s):
            self.gradients[c.axes, place] += c.payload_bytes * c.count

    def _memory(self) -> None:
        tables, kept = self.variant.spots, self.links.residents
        for entry in kept.saved:
            home, place = self._where(entry.task_graph)
            nbytes = kept_bytes((entry,), tables, self.s)[0]
            self.saved[home, place, "none"] += nbytes
            if entry.made == "product":
                self.saved[home, place, "dots"] += nbytes
            if entry.made == "name":
                self.saved[home, place, "named"] += nbytes
        for home, entries in self.links.entries.items():
            for entry in entries:
                place = self._where(entry.task_graph)[1]
                nbytes = kept_bytes((entry,), tables, self.s)[0]
                for policy in ("dots", "named", "full"):
                    self.saved[home, place, policy] += nbytes
        self.rebuilt = max(
            (sum(kept_bytes(r, tables, self.s)) for r in kept.rebuilt), default=0.0
        )
        self.largest = max(kept_bytes(kept.largest, tables, self.s), default=0.0)
        self.stream = sum(kept_bytes(self.links.stream, tables, self.s))


def shares_of(total: int, counts: Sequence[int], paces: Sequence[float]) -> list[int]:
    """What the busiest replica of each kind takes, where the last is done first."""
    ends = sorted(k * pace for pace in paces for k in range(total + 1))
    for end in ends:
        each = [math.floor(end / pace * (1 + 1e-12) + 1e-9) for pace in paces]
        if sum(n * k for n, k in zip(counts, each, strict=True)) >= total:
            return each
    raise AssertionError("one replica alone could take all")


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)
