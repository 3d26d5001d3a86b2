"""Time, memory and transfers of a model's segments, between its cut points.

A model is cut into stages at cut points. The cost rows of a layout of the full model,
summed by segment, give the cost between any two of them.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    flow_cost,
    row_cost,
    row_hits,
)
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.memory.saved_tensors import (
    SavedTensorGroup,
    kept_bytes,
    residents,
)
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.graph import Graph, TaskGraph
from whalejax.planner.pipeline.program_cut import Division, Units
from whalejax.planner.pipeline.stage_cuts import Layer
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate
from whalejax.planner.sharding.layout import Table, shards
from whalejax.planner.sharding.operation_rows import OperationRows


class SegmentOperations:
    """Operations of a model by segment, for any layout.

    Attributes:
        units: Program in units.
        analysed: Graph of the program with its logical dimensions.
        borders: Name of the parameter whose first read starts each segment but the
            first, in order.
        at: Unit at which each of these segments starts.
    """

    def __init__(
        self, units: Units, analysed: GraphAnalysis, *, copies_kernels: bool
    ) -> None:
        self.units = units
        self.analysed = analysed
        self._copies_kernels = copies_kernels
        order = sorted(units.borders.items(), key=lambda pair: pair[1])
        at = [border for _, border in order]
        # If two names mean one cut point, the first is kept.
        self.borders = [
            name for i, (name, border) in enumerate(order) if border not in at[:i]
        ]
        self.at = sorted(set(at))

    def segment_of(self, unit: int) -> int:
        """Returns the segment of a unit."""
        return bisect_right(self.at, unit)

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.at) + 1

    @functools.cached_property
    def _regions(self) -> tuple[Graph, list[tuple[int, int]]]:
        """Graph with one TaskGraph for each pair of segment and original TaskGraph."""
        graph, spots = self.analysed.graph, dict[tuple[int, int], int]()
        ops = []
        for op in graph.ops:
            unit = self.units.unit_at(op.position)
            segment = 0 if unit is None else self.segment_of(unit)
            spot = spots.setdefault((segment, op.task_graph), len(spots))
            ops.append(replace(op, task_graph=spot))
        regions = tuple(TaskGraph(index=i) for i in range(len(spots)))
        result = replace(graph, ops=tuple(ops), task_graphs=regions)
        return result, list(spots)

    @property
    def spots(self) -> list[tuple[int, int]]:
        """Segment and original TaskGraph of each region."""
        return self._regions[1]

    @functools.cached_property
    def rows(self) -> OperationRows:
        """Cost rows of operations, by these regions."""
        return build_rows(self._regions[0], self.analysed.dims)

    @functools.cached_property
    def saved(self) -> Sequence[SavedTensorGroup]:
        """Saved tensors, by these regions."""
        graph = self._regions[0]
        weight = graph.weight_tensors()
        copies = self._copies_kernels
        result = residents(graph, self.analysed.dims, weight, copies_kernels=copies)
        return result.saved


class Segments:
    """Segments of a model in one layout.

    Attributes:
        folded: Operations of the model by segment.
        search, scored: Search that found the layout, and the layout.
        handed: Function from bytes to the seconds of their transfer to the next stage.
    """

    def __init__(
        self,
        folded: SegmentOperations,
        search: Search,
        scored: LayoutCandidate,
        handed: Callable[[float], float],
    ) -> None:
        self.folded = folded
        self.handed = handed
        self.search = search
        self.scored = scored

    def starts(self, counts: Sequence[int]) -> tuple[str, ...]:
        """Returns the cut points of parts, from the number of segments of each."""
        ends, borders = itertools.accumulate(counts), self.folded.borders
        return tuple(borders[end - 1] for end in ends if end <= len(borders))

    @property
    def setting(self) -> CostSetting:
        """Cost setting of the rows."""
        return self.search.setting(self.scored.mesh, self.scored.num_micro_batches)

    @functools.cached_property
    def _tables(self) -> dict[int, Table]:
        spots = self.folded.spots
        return {i: self.scored.tables[home] for i, (_, home) in enumerate(spots)}

    @functools.cached_property
    def seconds(self) -> list[float]:
        """Seconds of each segment's forward and backward pass of a micro-batch."""
        rows, spots = self.folded.rows, self.folded.spots
        s, result = self.setting, [0.0] * self.folded.count
        launch = self.search.cluster.slowest.launch_seconds
        for row in rows.ops:
            cost = row_cost(row, row_hits(row, self._tables[row.task_graph], s), s)
            seconds = cost.compute_seconds + cost.launches * launch
            for c in cost.collectives:
                seconds += as_run(c, s)[1]
            result[spots[row.task_graph][0]] += float(seconds)
        for flow in rows.flows:
            for c in flow_cost(flow, self._tables, s):
                result[spots[flow.task_graph][0]] += float(as_run(c, s)[1])
        return result

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """Segments as links of a chain."""
        saved, kept = self.folded.saved, [0.0] * self.folded.count
        sizes = kept_bytes(saved, self._tables, self.setting)
        for entry, nbytes in zip(saved, sizes, strict=True):
            kept[self.folded.spots[entry.task_graph][0]] += float(nbytes)
        static, handed = self._static_bytes(), self._handed_seconds()
        return [
            Layer(
                seconds=self.seconds[i],
                static_bytes=static[i],
                activation_bytes=kept[i],
                transfer_seconds=handed[i],
            )
            for i in range(self.folded.count)
        ]

    def seconds_of(self, division: Division) -> tuple[float, ...]:
        """Returns an estimate of the seconds of each part for a micro-batch."""
        return tuple(
            sum(self.seconds[i] * share for i, share in each.items())
            for each in self._shares(division)
        )

    def layers_of(self, division: Division) -> list[Layer]:
        """Returns the parts of a division as links of a chain."""
        layers = []
        for each in self._shares(division):
            links = [(self.layers[i], share) for i, share in each.items()]
            layers.append(
                Layer(
                    seconds=sum(x.seconds * share for x, share in links),
                    static_bytes=sum(x.static_bytes * share for x, share in links),
                    activation_bytes=sum(
                        x.activation_bytes * share for x, share in links
                    ),
                    transfer_seconds=links[-1][0].transfer_seconds if links else 0.0,
                )
            )
        return layers

    def _shares(self, division: Division) -> list[dict[int, float]]:
        """Returns the fraction of each segment that each part holds, by operations."""
        segment_of, units = self.folded.segment_of, self.folded.units
        sizes = Counter(map(segment_of, range(len(units.units))))
        return [
            {
                segment: count / sizes[segment]
                for segment, count in sorted(
                    Counter(map(segment_of, part.units)).items()
                )
            }
            for part in division.parts
        ]

    def _static_bytes(self) -> list[float]:
        """Returns each segment's static bytes; parameters count for the first
        reader.
        """
        facts, mesh = self.scored.facts, self.scored.mesh
        static_bytes, seen = [0.0] * self.folded.count, set[int]()
        units = self.folded.units
        for index, inputs in enumerate(units.inputs):
            if units.free[index]:
                continue
            for leaf in inputs - seen:
                seen.add(leaf)
                if leaf >= len(facts.group_of):
                    continue
                place = facts.group_of[leaf]
                group, layout = facts.groups[place][0], self.scored.layouts[place]
                static_bytes[self.folded.segment_of(index)] += (
                    group.nbytes / shards(layout.param, mesh)
                    + group.nbytes / shards(layout.gradient, mesh)
                    + group.optimizer_bytes / shards(layout.optimizer, mesh)
                )
        return static_bytes

    def _handed_seconds(self) -> list[float]:
        """Returns the seconds to send each segment's result, and its gradient back."""
        crossing = self.folded.units.border_bytes
        s, mesh = self.setting, self.scored.mesh
        shared = mesh["data"] * mesh["fsdp"] * s.num_micro_batches
        handed_seconds = [
            2 * self.handed(crossing[at] / shared) for at in self.folded.at
        ]
        return [*handed_seconds, 0.0]
