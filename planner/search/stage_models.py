"""Cuts a model into parts, and makes the models of its stages.

Segments are the operations between neighbouring cut points. In a layout of the full
model, each segment has a time, a memory and a transfer to the next. Sums over the
segments of a part estimate the part.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import count_text
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
from whalejax.planner.pipeline.heterogeneous_stages import (
    HeterogeneousPlacement,
    StageDevices,
    allot,
    by_memory,
    grounds,
    has_several_kinds,
)
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.pipeline.program_cut import (
    Division,
    Units,
    divide_program,
    divided_by_marks,
)
from whalejax.planner.pipeline.schedules import Schedule
from whalejax.planner.pipeline.stage_cuts import Layer, Stage, cut
from whalejax.planner.pipeline.stage_graph import places_of, stage_graph
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate, Request
from whalejax.planner.search.spmd_search import (
    ProgramCache,
    search_refusal,
    searches,
)
from whalejax.planner.search.stage_time import handed_seconds
from whalejax.planner.sharding.layout import Table, shards
from whalejax.planner.sharding.operation_rows import OperationRows


class SegmentOperations:
    """Operations of a model by segment, for any layout.

    Attributes:
        units: Program as a list of units.
        analysed: Graph of the program, with its logical dimensions.
        borders: Cut points in order, one before each segment but the first. Each has
            the name of the first parameter that its segment reads and no earlier one.
        at: Unit at which each segment but the first starts.
    """

    def __init__(
        self, units: Units, analysed: GraphAnalysis, *, copies_kernels: bool
    ) -> None:
        self.units = units
        self.analysed = analysed
        self._copies_kernels = copies_kernels
        order = sorted(units.borders.items(), key=lambda pair: pair[1])
        at = [border for _, border in order]
        # If two names mean one cut point, the first is used.
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
        """Graph with a TaskGraph per (segment, TaskGraph) pair, and the pairs."""
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
        """(Segment, original TaskGraph) pair of each region of the rows."""
        return self._regions[1]

    @functools.cached_property
    def rows(self) -> OperationRows:
        """Cost rows of operations; their TaskGraphs are the regions of ``spots``."""
        return build_rows(self._regions[0], self.analysed.dims)

    @functools.cached_property
    def saved(self) -> Sequence[SavedTensorGroup]:
        """Saved tensors; their TaskGraphs are the regions of ``spots``."""
        graph = self._regions[0]
        weight = graph.weight_tensors()
        copies = self._copies_kernels
        result = residents(graph, self.analysed.dims, weight, copies_kernels=copies)
        return result.saved


class Segments:
    """Segments of a model in one layout.

    Attributes:
        folded: Operations of the model by segment.
        search, scored: Search that found the layout, and the evaluated layout.
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
        """Returns the cut points of parts with given numbers of segments."""
        ends, borders = itertools.accumulate(counts), self.folded.borders
        return tuple(borders[end - 1] for end in ends if end <= len(borders))

    @property
    def setting(self) -> CostSetting:
        """Mesh sizes and micro-batches for the cost rows."""
        return self.search.setting(self.scored.mesh, self.scored.num_micro_batches)

    @functools.cached_property
    def _tables(self) -> dict[int, Table]:
        spots = self.folded.spots
        return {i: self.scored.tables[home] for i, (_, home) in enumerate(spots)}

    @functools.cached_property
    def seconds(self) -> list[float]:
        """Seconds of one micro-batch's forward and backward pass in each segment."""
        rows, spots = self.folded.rows, self.folded.spots
        s, result = self.setting, [0.0] * self.folded.count
        launch = self.search.cluster.slowest.launch_seconds
        # Segments have equal layers, so most rows differ only in their segment.
        known: dict[Hashable, float] = {}
        for row in rows.ops:
            table = self._tables[row.task_graph]
            key = id(table), row.cost_key
            if key not in known:
                cost = row_cost(row, row_hits(row, table, s), s)
                seconds = cost.compute_seconds + cost.launches * launch
                known[key] = float(
                    seconds + sum(as_run(c, s)[1] for c in cost.collectives)
                )
            result[spots[row.task_graph][0]] += known[key]
        for flow in rows.flows:
            for c in flow_cost(flow, self._tables, s):
                result[spots[flow.task_graph][0]] += float(as_run(c, s)[1])
        return result

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """Segments as layers of a chain."""
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
        """Returns the estimated seconds of each part for one micro-batch."""
        return tuple(
            sum(self.seconds[i] * share for i, share in each.items())
            for each in self._shares(division)
        )

    def layers_of(self, division: Division) -> list[Layer]:
        """Returns the parts of a division as layers of a chain."""
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
        """Returns each segment's static bytes. Parameters are in their first reader."""
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
        """Returns the seconds of each segment's transfers; 0 for the last one."""
        crossing = self.folded.units.border_bytes
        s, mesh = self.setting, self.scored.mesh
        shared = mesh["data"] * mesh["fsdp"] * s.num_micro_batches
        handed_seconds = [
            2 * self.handed(crossing[at] / shared) for at in self.folded.at
        ]
        return [*handed_seconds, 0.0]


ROOM = 1000
"""Factor on device memory in the search for a model or a stage. Later, each stage
decides which layouts fit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Layout of a model, or of the model of a stage.

    Attributes:
        analysed: Analysed graph of this model.
        search: Search that found the layout.
        scored: Evaluated layout.
    """

    analysed: GraphAnalysis
    search: Search
    scored: LayoutCandidate


def laid_out(
    graph: Graph, cluster: Cluster, request: Request, known: ProgramCache
) -> list[StageLayout]:
    """Returns every evaluated layout of a model on devices with ``ROOM`` times the
    memory.

    Args:
        graph, cluster, request, known: Arguments of ``spmd_plan.decide``.

    Raises:
        PlanError: The model has no layout.
    """
    roomy = cluster.with_memory(ROOM * cluster.memory_bytes)
    pairs = searches(graph, roomy, request, None, known).found
    out = [
        StageLayout(analysed=analysed, search=search, scored=scored)
        for analysed, search in pairs
        for scored in search.scored
    ]
    if not out:
        raise search_refusal([search for _, search in pairs], open_remat=False)
    return out


@dataclass(slots=True, kw_only=True, eq=False)
class DivisibleProgram:
    """Program that may be cut, with results that all pipeline plans share.

    Attributes:
        graph: Captured loss.
        units: The loss as a list of units.
        known: Programs that were analysed before.
        stages: Model of each stage, with its search results, by cut points, number of
            parts, and the numbers of the stage's parts.
    """

    graph: Graph
    units: Units
    known: ProgramCache = field(default_factory=ProgramCache)
    stages: dict[tuple[object, ...], tuple[Graph, ProgramCache]] = field(
        default_factory=dict
    )

    _folded: dict[tuple[int, bool], SegmentOperations] = field(default_factory=dict)

    def ops_by_segment(
        self, analysed: GraphAnalysis, cluster: Cluster
    ) -> SegmentOperations:
        """Returns the operations of an analysed graph by segment, computed once."""
        copies = cluster.compiler.copies_kernels
        key = id(analysed.graph), copies  # The result keeps the graph alive.
        if key not in self._folded:
            operations = SegmentOperations(self.units, analysed, copies_kernels=copies)
            self._folded[key] = operations
        return self._folded[key]

    def by_marks(self) -> Division:
        """Returns the division at the ``stage`` marks."""
        return divided_by_marks(self.units, self.units.labels(self.graph))


class TooFewParts(PlanError):
    """The model cannot be cut into the requested number of parts.

    Attributes:
        cut: Message on the parts, without other ways to divide the model.
    """

    cut: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """Model that is cut into parts.

    Attributes:
        division: Operations of each part.
        paces: Estimated seconds of one micro-batch on each part. On equal devices the
            micro-batch is that of ``ModelCuts.count``.
        graphs: Model of each stage, with its search results.
        grounds: Devices of each stage.
        allotted: Placement of the parts on mixed devices; None if devices are equal.
    """

    division: Division
    paces: tuple[float, ...]
    graphs: tuple[tuple[Graph, ProgramCache], ...]
    grounds: tuple[StageDevices, ...]
    allotted: HeterogeneousPlacement | None

    @property
    def cut_key(self) -> tuple[object, ...]:
        """Cut points and devices, which identify the cut."""
        return self.division.starts, tuple(ground.block for ground in self.grounds)


@dataclass(slots=True, kw_only=True)
class ModelCuts:
    """Cuts of one program; each is computed once.

    Attributes:
        whole: Program to cut.
        cluster: All devices.
        marked: Whether ``stage`` marks set the cut points.
        count: Number of micro-batches with which the full model is searched on equal
            devices. A cut scales its activations to the number of the schedule.
    """

    whole: DivisibleProgram
    cluster: Cluster
    marked: bool
    count: int
    _found: dict[tuple[object, ...], ModelCut] = field(default_factory=dict)
    _chains: dict[tuple[object, ...], Segments] = field(default_factory=dict)

    def of(
        self,
        table: Schedule,
        request: Request,
        reserved: Mapping[str, float] | None = None,
        *,
        hidden: bool = False,
    ) -> ModelCut:
        """Returns the model, cut into the parts of a schedule.

        Args:
            table: Pipeline schedule.
            request: Options for the full model on the devices of one stage.
            reserved: Bytes per device that belong to no layer, by device kind; default:
                none.
            hidden: Whether transfers between stages overlap with computation. If not
                (the default), they add to the time of the receiving stage.

        Raises:
            TooFewParts: The model has fewer parts than the schedule.
            PlanError: The model has no layout, or mixed devices cannot be divided into
                stages of one kind each.
        """
        reserved = reserved or {}
        if self.cluster.is_uniform:
            request = replace(request, num_micro_batches=self.count)
        # The key has all inputs of the cut.
        sizes = table.num_stages, table.num_chunks, table.num_micro_batches
        key = *sizes, hidden, *sorted(reserved.items())
        if key not in self._found:
            self._found[key] = self._cut(table, request, reserved, hidden)
        return self._found[key]

    def _cut(
        self,
        table: Schedule,
        request: Request,
        reserved: Mapping[str, float],
        hidden: bool,
    ) -> ModelCut:
        stages, chunks = table.num_stages, table.num_chunks
        lying = grounds(self.whole.graph, self.cluster, request.num_devices, stages)
        segments = self._segments(lying, request, stages)
        first = next(iter(segments.values()))
        allotted = None
        if has_several_kinds(lying):
            division, allotted = self._place_on_kinds(
                segments, table, lying, reserved, hidden
            )
            paces = allotted.placed.cut.seconds
            lying = tuple(lying[block] for block in allotted.placed.order)
        else:
            division, paces = self._division(first, table, lying[0].cluster, hidden)
        return ModelCut(
            division=division,
            paces=paces,
            graphs=tuple(
                self._stage(first, division, places_of(stage, stages, chunks))
                for stage in range(stages)
            ),
            grounds=lying,
            allotted=allotted,
        )

    def _stage(
        self, segments: Segments, division: Division, places: Sequence[int]
    ) -> tuple[Graph, ProgramCache]:
        key = division.starts, len(division.parts), tuple(places)
        if key not in self.whole.stages:
            dims = segments.folded.analysed.dims
            result = stage_graph(self.whole.graph, dims, division, places)
            self.whole.stages[key] = result, ProgramCache()
        return self.whole.stages[key]

    def _segments(
        self, lying: tuple[StageDevices, ...], request: Request, stages: int
    ) -> dict[str, Segments]:
        """Returns the segments of the model by kind of device.

        All kinds have the mesh and ZeRO stage of the kind with least memory.
        """
        segments = {}
        for ground in by_memory(lying):
            name = ground.kind.name
            key = stages, name, request.num_micro_batches
            if key not in self._chains:
                laid = laid_out(
                    self.whole.graph, ground.cluster, request, self.whole.known
                )
                best = min(laid, key=lambda one: one.scored.time.step_seconds)
                self._chains[key] = self._segments_of(best, stages)
            segments[name] = self._chains[key]
            scored = segments[name].scored
            request = replace(request, mesh=scored.mesh, zero=scored.zero)
        return segments

    def _segments_of(self, best: StageLayout, stages: int) -> Segments:
        mesh = {STAGE: stages, **best.scored.mesh}
        return Segments(
            self.whole.ops_by_segment(best.analysed, best.search.cluster),
            best.search,
            best.scored,
            lambda nbytes: handed_seconds(nbytes, mesh, self.cluster),
        )

    def _place_on_kinds(
        self,
        segments: Mapping[str, Segments],
        table: Schedule,
        lying: tuple[StageDevices, ...],
        reserved: Mapping[str, float],
        hidden: bool,
    ) -> tuple[Division, HeterogeneousPlacement]:
        first = next(iter(segments.values()))
        division = self.whole.by_marks() if self.marked else None
        chains = {
            name: one.layers_of(division) if division else one.layers
            for name, one in segments.items()
        }
        if division is None and len(first.layers) < table.num_stages:
            raise _too_few(table, len(first.layers))
        try:
            result = allot(chains, lying, table, reserved, hidden=hidden)
        except PlanError:
            # The search of each stage counts more memory, and decides what fits.
            roomy = dict.fromkeys(segments, -float("inf"))
            result = allot(chains, lying, table, roomy, hidden=hidden)
        starts = first.starts(result.placed.cut.counts)
        return division or divide_program(self.whole.units, starts), result

    def _division(
        self, segments: Segments, table: Schedule, part: Cluster, hidden: bool
    ) -> tuple[Division, tuple[float, ...]]:
        if self.marked:
            division = self.whole.by_marks()
            return division, segments.seconds_of(division)
        held = 1 if table.num_chunks > 1 else None
        places = [
            Stage(
                memory_bytes=float("inf") if held else part.memory_bytes,
                in_flight=held or table.in_flight[place],
            )
            for place in range(table.num_places)
        ]
        # The segments have ``count`` micro-batches.
        layers = [
            replace(
                layer,
                activation_bytes=layer.activation_bytes
                * self.count
                / table.num_micro_batches,
                transfer_seconds=0.0 if hidden else layer.transfer_seconds,
            )
            for layer in segments.layers
        ]
        if len(layers) < len(places):
            raise _too_few(table, len(layers))
        try:
            result = cut(layers, places)
        except PlanError:
            # The search of each stage counts more memory, and decides what fits.
            result = cut(layers, [Stage()] * len(places))
        return divide_program(
            self.whole.units, segments.starts(result.counts)
        ), result.seconds


def _too_few(table: Schedule, parts: int) -> TooFewParts:
    chunks = table.num_chunks
    each = f" with {chunks} parts each" if chunks > 1 else ""
    most = f"{count_text(parts, 'part')} that read{'s' * (parts == 1)}"
    error = TooFewParts(
        f"stage is {table.num_stages}{each}, but the model can be cut into at most "
        f"{most} parameters of their own (loops and checkpointed regions are not "
        f"cut). Use at most {max(1, parts // chunks)}"
    )
    error.cut = str(error)
    return error
