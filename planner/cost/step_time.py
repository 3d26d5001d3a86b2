"""Time of a step of one program, under one layout or many.

A single plan is an array of one case, so plans and searches share this computation.
Rows of the program are evaluated for all cases at once. Cases differ in the axes that
shard a role, so collectives are computed once for all cases with equal axes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.fitted_constants import WHOLE, constants
from whalejax.planner.cost.adasum_cost import within_ranks
from whalejax.planner.cost.collectives import CollectiveRates, spans_of
from whalejax.planner.cost.layout_cases import AxisHits, LayoutCases, LayoutGroups
from whalejax.planner.cost.memory_rows import MemoryRows
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    FlowStep,
    flow_collectives,
    flow_key,
    flow_steps,
    gradients_of,
    halos_of,
    hits_of,
    present_roles,
    rounds_of,
    row_seconds,
    slowest_kind,
)
from whalejax.planner.cost.optimizer_step import (
    reduced_gradients,
    storage_gathers,
    turning_seconds,
    update_seconds,
    whole_shares,
)
from whalejax.planner.cost_terms import TimeTerms
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import ATTENTION
from whalejax.planner.plan_entries import Collective
from whalejax.planner.sharding.layout import SPATIAL_AXES
from whalejax.planner.sharding.operation_rows import Flow, OperationRows, Row
from whalejax.planner.sharding.parameter_layout import LeafFacts
from whalejax.planner.sharding.shard_counts import (
    distinct_columns,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumns:
    """``TimeTerms`` of many cases.

    Attributes:
        terms: Seconds of each term of ``TimeTerms``, by name and case.
        ahead, behind: Compute seconds of one micro-batch in the forward pass, and in
            the backward pass, by case.
        between: Compute seconds of a step in operations that ``tensor`` does not shard,
            by case.
        wire: Payload bytes of all collectives of a step, by case.
        gathered: Bytes of the largest value that is gathered between producer and
            readers, by case.
        collectives: Collectives as the compiler runs them; only for a single case.
    """

    terms: Mapping[str, np.ndarray]
    ahead: np.ndarray
    behind: np.ndarray
    between: np.ndarray
    wire: np.ndarray
    gathered: np.ndarray
    collectives: tuple[Collective, ...] = ()

    @classmethod
    def none(cls) -> TimeColumns:
        nothing = np.zeros(0)
        return cls(
            terms={},
            ahead=nothing,
            behind=nothing,
            between=nothing,
            wire=nothing,
            gathered=nothing,
        )

    @classmethod
    def concatenate(cls, many: Sequence[TimeColumns]) -> TimeColumns:
        """Returns the cases of several columns as one."""
        arrays = {
            name: np.concatenate([getattr(one, name) for one in many])
            for name in _ARRAYS
        }
        terms = {
            name: np.concatenate([one.terms[name] for one in many])
            for name in many[0].terms
        }
        alone = many[0].collectives if len(many) == 1 else ()
        return cls(terms=terms, **arrays, collectives=alone)

    def take(self, rows: np.ndarray) -> TimeColumns:
        """Returns the cases at the given indices."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        terms = {name: values[rows] for name, values in self.terms.items()}
        return TimeColumns(terms=terms, **arrays)

    @property
    def step(self) -> np.ndarray:
        """Seconds of the step, by case."""
        return sum(self.terms.values(), np.zeros(len(self.ahead)))

    def sequence_parallel(self, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the likely and least step seconds with a sharded sequence, by case.

        At best, ``tensor`` divides the operations between products evenly, and no value
        is resharded. An all-reduce becomes a reduce-scatter and an all-gather of as
        many bytes. Several readers share the all-gather, so at least half of the
        all-reduce's time remains.

        Args:
            tensor: Size of the ``tensor`` axis, by case.
        """
        none = np.zeros(len(tensor))
        less = self.between * (1 - 1 / tensor) + self.terms.get("border", none)
        likely = self.step - np.where(tensor > 1, less, 0.0)
        half = self.terms.get("activation", none) / 2
        return likely, likely - np.where(tensor > 1, half, 0.0)

    def at(self, index: int) -> TimeTerms:
        """Returns the terms of one case."""
        return TimeTerms(
            **{f"{name}_seconds": float(v[index]) for name, v in self.terms.items()}
        )


_ARRAYS = ("ahead", "behind", "between", "wire", "gathered")
"""Fields of ``TimeColumns`` that are arrays over the cases."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of the layouts of one program.

    Attributes:
        rows: Operations and values of the program.
        facts: Parameters of the model, in groups of equal ones.
        dims: Logical dimensions of the loss.
        cluster: Devices, links and their compiler.
        cast_bytes: Ratio of a parameter's bytes in computation to its stored bytes.
        memory_rows: Operations of the program without products.
        traced_parts: Number of micro-batches into which the traced loss divides the
            batch.
    """

    rows: OperationRows
    facts: LeafFacts
    dims: Dimensions
    cluster: Cluster
    cast_bytes: float
    memory_rows: MemoryRows
    traced_parts: int = 1
    _present: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    _keys: dict[int, Hashable] = field(default_factory=dict, init=False)

    def of(
        self, cases: LayoutCases, combined: Sequence[Collective] | None = None
    ) -> TimeColumns:
        """Returns the predicted time of a step, by case.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
            combined: Collectives with which ranks of ``data`` combine gradients in the
                update. Gradients, losses and statistics are then reduced only over the
                other axes. Default: None, which reduces over all axes together.

        Returns:
            Time terms by case; with all collectives for a single case.
        """
        inside, inverse = self._costs_inside(cases, combined)
        inside.communicate()
        return _with_storage(inside, inverse, cases)

    def near(
        self, cases: LayoutCases, seconds: Any, *, sequence_parallel: bool
    ) -> tuple[np.ndarray, TimeColumns]:
        """Returns the predicted time of the cases that may be as fast as a known step.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
            seconds: Seconds of the known step, or an array of them by case.
            sequence_parallel: Whether to include cases that may be as fast only with
                the sequence sharded between products.

        Returns:
            Indices of the cases whose computation takes no longer, and their time
            terms.
        """
        inside, inverse = self._costs_inside(cases, None)
        parts, tensor = inside.cases.count, inside.cases.mesh["tensor"]
        computes = inside.compute * parts
        if sequence_parallel:
            computes = computes - inside.between * (1 - 1 / tensor) * parts
        computes += inside.launches * inside.cases.count * self.launch_seconds
        rows = np.flatnonzero(computes[inverse] <= seconds)
        kept = np.unique(inverse[rows])
        inside.take(kept)
        inside.communicate()
        place = np.zeros(len(computes), dtype=np.int64)
        place[kept] = np.arange(len(kept))
        return rows, _with_storage(inside, place[inverse[rows]], cases.take(rows))

    def _costs_inside(
        self, cases: LayoutCases, combined: Sequence[Collective] | None
    ) -> tuple[_MicroBatchCosts, np.ndarray]:
        """Returns the costs of distinct cases, and the index of each case's costs."""
        # Costs inside a micro-batch are equal at every ZeRO stage.
        first, inverse = distinct_columns([cases.row, cases.count])
        return _MicroBatchCosts(self, cases.take(first), combined), inverse

    def flow_key(self, flow: Flow) -> Hashable:
        """Returns ``operation_cost.flow_key``, computed once."""
        if id(flow) not in self._keys:
            s = CostSetting({}, 1, self.cluster, self.dims)
            self._keys[id(flow)] = flow_key(flow, s)
        return self._keys[id(flow)]

    @property
    def launch_seconds(self) -> float:
        """Seconds of one kernel launch."""
        return float(self.cluster.slowest.launch_seconds)

    def present(self, row: Row) -> frozenset[int]:
        """Returns the logical dimensions of an operation."""
        if id(row) not in self._present:
            self._present[id(row)] = present_roles(row)
        return self._present[id(row)]


class _MicroBatchCosts:
    """Compute time and collectives inside the micro-batches of some cases.

    Attributes:
        links: Collectives other than gradient reductions.
        gradients: Bytes of reduced gradients, by mesh axes and case.
        compute, ahead: Compute seconds of one micro-batch, and of its forward pass.
        between: Compute seconds of one micro-batch in operations that ``tensor`` does
            not shard.
        launches: Number of kernels of one micro-batch.
        covers: Compute seconds that overlap with transfers of ring attention.
    """

    def __init__(
        self,
        model: StepTime,
        cases: LayoutCases,
        combined: Sequence[Collective] | None,
    ) -> None:
        self.model, self.combined = model, combined
        self.batch_roles = frozenset(r.index for r in model.dims.batch)
        self.gradients: dict[tuple[str, ...], np.ndarray] = {}
        number, plain = len(cases), model.memory_rows
        self.divisible = [role.divisible for role in model.dims.roles]
        self._use(cases)
        self.compute, self.ahead, self.between = plain.seconds(
            cases, self.parts, model.cluster.slowest, self.divisible
        )
        self.launches, self.covers = np.full(number, plain.launches), np.zeros(number)
        for row in plain.products:
            self._product(row)

    def _use(self, cases: LayoutCases) -> None:
        self.cases, self.number = cases, len(cases)
        self.parts = cases.count // self.model.traced_parts

    def take(self, rows: np.ndarray) -> None:
        self._use(self.cases.take(rows))
        self.compute, self.ahead = self.compute[rows], self.ahead[rows]
        self.between = self.between[rows]
        self.launches, self.covers = self.launches[rows], self.covers[rows]

    def communicate(self) -> None:
        self.links = _Links(self.cases, self.model.cluster)
        if not self.number:
            return
        for row in self.model.memory_rows.communicating:
            self._collectives(row)
        for flow in self.model.rows.flows:
            self._flow(flow)

    def _hits(self, home: int, present: frozenset[int]) -> AxisHits:
        return self.cases.grid.hits(home, present, self.divisible)

    def _setting(self, mesh: Mapping[str, Any]) -> CostSetting:
        model = self.model
        return CostSetting(
            mesh, self.parts, model.cluster, model.dims, self.batch_roles
        )

    def _groups(
        self, key: Hashable, columns: Callable[[], Sequence[np.ndarray]]
    ) -> LayoutGroups[Any]:
        grid = self.cases.grid
        if key not in grid.groups:
            alone = len(grid) == 1
            grid.groups[key] = LayoutGroups(() if alone else columns(), len(grid))
        return grid.groups[key]

    def _at(self, layout: int) -> CostSetting:
        return self._setting(self.cases.grid.mesh_at(layout))

    def _product(self, row: Row) -> None:
        present, model = self.model.present(row), self.model
        # The number of shards counts, whichever axes make them.
        hits = self._hits(row.task_graph, present)
        first, inverse = self.cases.distinct(row.task_graph, present, self.divisible)
        layouts, parts = self.cases.row[first], self.parts[first]
        names = {f"role {role}": role for role in hits.parts}
        mesh = {name: hits.parts[role][layouts] for name, role in names.items()}
        s = dataclasses.replace(self._setting(mesh), num_micro_batches=parts)
        kind = slowest_kind(row, model.cluster)
        ahead, behind, launches = row_seconds(row, names, s, kind)
        seconds = (ahead + behind + ahead * row.remat) * row.count
        seconds, launches = (
            np.broadcast_to(x, len(first))[inverse] for x in (seconds, launches)
        )
        self.compute += seconds
        self.between += np.where(hits.tensor[self.cases.row], 0.0, seconds)
        # The backward pass takes twice as long as the forward pass, and may recompute
        # it once.
        self.ahead += seconds / (3 + row.remat)
        self.launches += launches * row.count
        if row.kind == ATTENTION:
            self.covers += seconds

    def _collectives(self, row: Row) -> None:
        present, mesh = self.model.present(row), self.cases.mesh
        home, grid = row.task_graph, self.cases.grid
        spatial = SPATIAL_AXES if row.repeats is not None else ()

        def columns() -> Sequence[np.ndarray]:
            sizes = (grid.mesh[axis] for axis in spatial)
            return [self._hits(home, present).code, *sizes]

        def axes_at(layout: int) -> tuple[object, ...]:
            s = self._at(layout)
            hits = hits_of(present, grid.tables[int(grid.table[layout])][home], s)
            # Halo exchanges also depend on the sizes of the axes.
            return tuple(hits.items()), tuple((a, s.mesh[a]) for a in spatial)

        divisible = tuple([self.divisible[role] for role in sorted(present)])
        groups = self._groups(("axes", home, present, divisible, spatial), columns)
        for (hits, _), rows in groups.of(self.cases.row, axes_at):
            if hits:
                axes = dict(hits)
                s = self._setting({axis: mesh[axis][rows] for axis in axes})
                s = dataclasses.replace(
                    s,
                    num_micro_batches=self.parts[rows],
                    like=self.cases.mesh_at(int(rows[0])),
                )
                self._collect(rows, gradients_of(row, axes, s))
                self._collect(rows, rounds_of(row, axes, s))
                self._collect(rows, halos_of(row, axes, s))

    def _flow(self, flow: Flow) -> None:
        grid, mesh = self.cases.grid, self.cases.mesh

        def columns() -> Sequence[np.ndarray]:
            home, source = flow.task_graph, flow.source
            result = [
                grid.codes(source.layout, source.sizes, home, flow.fused),
                self._hits(home, flow.present).code,
            ]
            for use in flow.uses:
                where, view = use.task_graph, use.view
                result.append(grid.codes(view.layout, view.sizes, where))
                result.append(self._hits(where, use.present).code)
            return result

        def steps_at(layout: int) -> tuple[FlowStep, ...]:
            tables = grid.tables[int(grid.table[layout])]
            return flow_steps(flow, tables, self._at(layout))

        groups = self._groups(self.model.flow_key(flow), columns)
        has_batch = bool(flow.source.roles & self.batch_roles)
        for steps, rows in groups.of(self.cases.row, steps_at):
            used = {axis for step in steps for axes in step.divided for axis in axes}
            sizes = {axis: mesh[axis][rows] for axis in used}
            found = flow_collectives(flow, steps, sizes, self.parts[rows], has_batch)
            self._collect(rows, found)

    def _collect(self, rows: np.ndarray, found: Sequence[Collective]) -> None:
        """Adds collectives, but only the bytes of gradient reductions."""
        for c in found if self.combined is None else within_ranks(found):
            if c.what == "gradient":
                if c.axes not in self.gradients:
                    self.gradients[c.axes] = np.zeros(self.number)
                self.gradients[c.axes][rows] += c.payload_bytes * c.count
            else:
                self.links.add(rows, c)


def _with_storage(
    inside: _MicroBatchCosts, inverse: np.ndarray, cases: LayoutCases
) -> TimeColumns:
    """Returns the times with storage and update; ``inverse`` has each case's index."""
    model, everyone = inside.model, np.arange(len(cases))
    if not len(cases):
        return TimeColumns.none()
    links = inside.links.at(inverse, cases)
    storage = _Storage(model, cases, links)
    for axes, payload in inside.gradients.items():
        storage.reduce(axes, payload[inverse])
    for c in inside.combined or ():
        links.add(everyone, c)
    for rows, c in storage.late:
        links.add(rows, c)
    seconds, count = links.seconds, cases.count
    hidden = constants().platforms.get(model.cluster.platform, WHOLE)
    shown = seconds["ring"]
    if model.cluster.platform != "cpu":  # CPU devices share their cores.
        shown = np.maximum(0.0, shown - inside.covers[inverse] * count)
    launches = inside.launches[inverse] * count
    compute, ahead = inside.compute[inverse], inside.ahead[inverse]
    terms = {
        "compute": compute * count,
        "launch": launches * model.launch_seconds,
        "gradient": seconds["gradient"] * (1 - hidden.overlap_gradients)
        + seconds["combined"],
        "parameter": seconds["parameter"] * (1 - hidden.overlap_parameters),
        "activation": seconds["activation"] + shown,
        "border": seconds["border"] + seconds["halo"],
        "update": storage.update,
    }
    return TimeColumns(
        terms=terms,
        ahead=ahead,
        behind=compute - ahead,
        between=inside.between[inverse] * count,
        wire=links.wire,
        gathered=links.gathered,
        collectives=tuple(links.run),
    )


class _Storage:
    """Costs of storage and update; ``late`` has the collectives after the update."""

    def __init__(self, model: StepTime, cases: LayoutCases, links: _Links) -> None:
        self.cases, self.links = cases, links
        self.compiler, number = model.cluster.compiler, len(cases)
        self.odd, self.kept = np.zeros(number), np.zeros(number)
        self.update = np.zeros(number)
        self.late: list[tuple[np.ndarray, Collective]] = []
        facts, cast = model.facts, model.cast_bytes
        for rows, cuts in cases.cuts(facts):
            mesh = {axis: size[rows] for axis, size in cases.mesh.items()}
            for some, c in storage_gathers(facts, cuts, mesh, self.compiler, cast):
                if c.phase == "update":
                    self.late.append((rows[some], c))
                else:
                    links.add(rows[some], c)
            links.seconds["parameter"][rows] += turning_seconds(
                facts, cuts, model.cluster, cast, cases.count[rows]
            )
            shares = whole_shares(facts, cuts, self.compiler, cast)
            self.odd[rows], self.kept[rows] = shares
            self.update[rows] = update_seconds(facts, cuts, model.cluster)

    def reduce(self, axes: tuple[str, ...], payload: np.ndarray) -> None:
        for over_data in (False, True):
            rows = np.flatnonzero(((self.cases.zero >= 2) == over_data) & (payload > 0))
            for c in reduced_gradients(
                axes,
                payload[rows],
                {axis: size[rows] for axis, size in self.cases.mesh.items()},
                self.compiler,
                over_data=over_data,
                odd=self.odd[rows],
                kept=self.kept[rows],
            ):
                nbytes: Any = c.payload_bytes
                some = np.flatnonzero(nbytes)
                c = dataclasses.replace(c, payload_bytes=nbytes[some])
                self.links.add(rows[some], c)


class _Links:
    """Collectives of some cases, and the sums of their seconds so far.

    Attributes:
        seconds: Seconds of all collectives of a step, by purpose and case.
        wire: Payload bytes of all collectives, by case.
        gathered: Payload bytes of the largest gather between TaskGraphs, by case.
        run: Collectives as the compiler runs them; only for a single case.
        gathers: Indices in ``run`` of the gathers of parameters.
    """

    def __init__(self, cases: LayoutCases, cluster: Cluster) -> None:
        self.cases, self.cluster = cases, cluster
        number = len(cases)
        self.seconds: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(number))
        self.wire, self.gathered = np.zeros(number), np.zeros(number)
        self.run: list[Collective] = []
        self.gathers: dict[object, int] = {}
        first, self.place = distinct_columns([*cases.mesh.values()])
        self.mesh = {axis: sizes[first] for axis, sizes in cases.mesh.items()}
        self.spans = functools.cache(self._spans)
        self.rates = functools.cache(self._rates)

    def at(self, inverse: np.ndarray, cases: LayoutCases) -> _Links:
        """Returns the sums so far for ``cases``; ``inverse`` has the index of each."""
        result = copy.copy(self)
        result.cases = cases
        result.seconds = defaultdict(
            lambda: np.zeros(len(cases)),
            {what: values[inverse] for what, values in self.seconds.items()},
        )
        result.wire, result.gathered = self.wire[inverse], self.gathered[inverse]
        result.place = self.place[inverse]
        return result

    def _spans(self, axes: tuple[str, ...]) -> Any:
        names = list(self.mesh)
        ordered = [
            (np.full(len(self.mesh[axis]), names.index(axis)), self.mesh[axis])
            for axis in reversed(names)
        ]
        return spans_of(axes, ordered, names, self.cluster)

    def _rates(self, kind: Any, axes: tuple[str, ...]) -> CollectiveRates:
        return CollectiveRates(kind, self.spans(axes), self.cluster)

    def add(self, rows: np.ndarray, c: Collective) -> None:
        """Adds a collective in some cases; payload and count may be arrays."""
        if not len(rows):
            return
        rates = self.rates(c.kind, c.axes)
        payload: Any = c.payload_bytes + np.zeros(len(rows))
        times = c.count * (1 if c.phase == "update" else self.cases.count[rows])
        # Collectives of the update have no computation to overlap with.
        late = c.phase == "update" and c.what in ("gradient", "moments")
        once, turned = rates.seconds(payload, self.place[rows])
        self.seconds["combined" if late else c.what][rows] += once * times
        self.wire[rows] += payload * times
        if c.what == "border" and c.kind == "all-gather":
            nbytes = np.where(turned, 0.0, payload)
            self.gathered[rows] = np.maximum(self.gathered[rows], nbytes)
        if len(self.cases) == 1:
            self._list(c, payload, turned)

    def _list(self, c: Collective, payload: np.ndarray, turned: np.ndarray) -> None:
        """Lists a collective of a single case; merges equal gathers of parameters."""
        one = dataclasses.replace(
            c,
            kind="all-reduce" if turned[0] else c.kind,
            payload_bytes=int(payload[0]),
            count=int(np.ravel(c.count)[0]),
        )
        if c.what == "parameter" and not c.scope:
            key = one.kind, one.axes, one.phase, one.payload_bytes
            place = self.gathers.setdefault(key, len(self.run))
            if place < len(self.run):
                both = self.run[place].count + one.count
                self.run[place] = dataclasses.replace(one, count=both)
                return
        self.run.append(one)
