"""The time of a step of one program, under one layout or under many.

A single plan is an array of one case: what a plan says of a layout and what a search
says of it beside thousands of others is one computation. Rows of the program are
priced for all cases at once. Which mesh axis shards what differs between cases, so
that collectives are worked out once for all cases that agree in it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.fitted_constants import WHOLE, constants
from whalejax.planner.cost.adasum import within_ranks
from whalejax.planner.cost.collectives import CollectiveRates, spans_of
from whalejax.planner.cost.operation_cost import (
    Setting,
    flow_cost,
    gradients_of,
    halos_of,
    hits_of,
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
from whalejax.planner.entries import Collective
from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import ATTENTION
from whalejax.planner.sharding.fused_parameters import Fused
from whalejax.planner.sharding.layout import SPATIAL_AXES, Table
from whalejax.planner.sharding.leaf_shard_counts import (
    LeafShardCounts,
    leaf_shard_counts,
)
from whalejax.planner.sharding.operation_rows import Flow, Row, Rows
from whalejax.planner.sharding.parameter_layout import LeafFacts
from whalejax.planner.sharding.shard_counts import (
    distinct_columns,
    table_shard_counts,
)
from whalejax.planner.terms import TimeTerms


@dataclass(frozen=True, kw_only=True)
class LayoutCases:
    """Layouts of one program; arrays hold one number for each case.

    Attributes:
        tables: Distinct compute tables by TaskGraph.
        table: Index into ``tables`` of each case.
        mesh: Array of sizes of each mesh axis, outermost axis first.
        zero: ZeRO level over ``data``.
        count: Micro-batches of a step.
    """

    tables: Sequence[Mapping[int, Table]]
    table: np.ndarray
    mesh: Mapping[str, np.ndarray]
    zero: np.ndarray
    count: np.ndarray
    _cuts: dict[int, list[tuple[np.ndarray, Cuts]]] = field(
        default_factory=dict, init=False
    )

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: np.ndarray) -> LayoutCases:
        """Select some of the cases."""
        found = LayoutCases(
            tables=self.tables,
            table=self.table[rows],
            mesh={axis: sizes[rows] for axis, sizes in self.mesh.items()},
            zero=self.zero[rows],
            count=self.count[rows],
        )
        place = np.zeros(len(self), dtype=np.int64)
        for _, some in self.batches if self._cuts else ():
            place[some] = np.arange(len(some))
        for facts, known in self._cuts.items():
            of = {int(self.table[some[0]]): cuts for some, cuts in known}
            found._cuts[facts] = [
                (some, _taken(of[int(found.table[some[0]])], place[rows[some]]))
                for _, some in found.batches
            ]
        return found

    def with_count(self, count: np.ndarray) -> LayoutCases:
        """The same layouts with other numbers of micro-batches."""
        found = dataclasses.replace(self, count=count)
        found._cuts.update(self._cuts)
        return found

    def mesh_at(self, index: int) -> dict[str, int]:
        """Axis sizes of one case."""
        return {axis: int(sizes[index]) for axis, sizes in self.mesh.items()}

    @functools.cached_property
    def batches(self) -> list[tuple[Mapping[int, Table], np.ndarray]]:
        """Tables that some case has, with the indices of their cases."""
        found = [np.flatnonzero(self.table == i) for i in range(len(self.tables))]
        return [
            (t, rows) for t, rows in zip(self.tables, found, strict=True) if len(rows)
        ]

    def cuts(self, facts: LeafFacts) -> list[tuple[np.ndarray, Cuts]]:
        """Shard counts of each parameter group, for the cases of each batch."""
        if id(facts) not in self._cuts:
            self._cuts[id(facts)] = self._of_leaves(facts)
        return self._cuts[id(facts)]

    def _of_leaves(self, facts: LeafFacts) -> list[tuple[np.ndarray, Cuts]]:
        return [
            (rows, leaf_shard_counts(facts, tables, some.mesh, some.zero))
            for tables, rows in self.batches
            for some in [self.take(rows)]
        ]


Cuts = tuple[LeafShardCounts, ...]
"""Shard counts of each parameter group."""


def _taken(cuts: Cuts, rows: np.ndarray) -> Cuts:
    return tuple(cut.take(rows) for cut in cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumns:
    """``TimeTerms`` of many cases.

    Attributes:
        terms: Seconds of each term, by its name in ``TimeTerms`` and case.
        ahead, behind: Seconds that a forward and a backward pass of one micro-batch
            compute, by case.
        wire: Payload bytes of all collectives of a step, by case.
        gathered: Bytes of the largest value that is gathered on its way to its
            readers, by case.
        collectives: Every collective as the compiler runs it; of a single case alone.
    """

    terms: Mapping[str, np.ndarray]
    ahead: np.ndarray
    behind: np.ndarray
    wire: np.ndarray
    gathered: np.ndarray
    collectives: tuple[Collective, ...] = ()

    @classmethod
    def none(cls) -> TimeColumns:
        """No case."""
        nothing = np.zeros(0)
        return cls(
            terms={},
            ahead=nothing,
            behind=nothing,
            wire=nothing,
            gathered=nothing,
        )

    @classmethod
    def joined(cls, many: Sequence[TimeColumns]) -> TimeColumns:
        """Cases of several, one after the other."""
        arrays = {
            name: np.concatenate([getattr(one, name) for one in many])
            for name in ("ahead", "behind", "wire", "gathered")
        }
        terms = {
            name: np.concatenate([one.terms[name] for one in many])
            for name in many[0].terms
        }
        alone = many[0].collectives if len(many) == 1 else ()
        return cls(terms=terms, **arrays, collectives=alone)

    def take(self, rows: np.ndarray) -> TimeColumns:
        """Select some of the cases."""
        arrays = {
            name: getattr(self, name)[rows]
            for name in ("ahead", "behind", "wire", "gathered")
        }
        terms = {name: values[rows] for name, values in self.terms.items()}
        return TimeColumns(terms=terms, **arrays)

    @property
    def step(self) -> np.ndarray:
        """Seconds of the whole step, by case."""
        return sum(self.terms.values(), np.zeros(len(self.ahead)))

    def at(self, index: int) -> TimeTerms:
        """Terms of one case."""
        return TimeTerms(
            **{f"{name}_seconds": float(v[index]) for name, v in self.terms.items()}
        )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of the layouts of one program.

    Attributes:
        rows: Operations and values of the program.
        facts: Parameters of the model, in groups of equal ones.
        dims: Logical dimensions of the loss.
        cluster: Devices, links and their compiler.
        cast_bytes: Bytes of a parameter as computed with, over its stored bytes.
        traced_parts: Micro-batches into which the traced loss is split already.
    """

    rows: Rows
    facts: LeafFacts
    dims: Dimensions
    cluster: Cluster
    cast_bytes: float
    traced_parts: int = 1
    _present: dict[int, frozenset[int]] = field(default_factory=dict, init=False)

    def of(
        self, cases: LayoutCases, combined: Sequence[Collective] | None = None
    ) -> TimeColumns:
        """Predict the steps of many cases.

        Args:
            cases: Layouts with their ZeRO levels and micro-batches.
            combined: Collectives by which ranks of ``data`` combine in the update;
                their gradients, losses and statistics then are reduced over other axes
                alone. None where all are reduced at once.

        Returns:
            Terms by case; of a single case every collective, too.
        """
        inside, inverse = self._inside(cases, combined)
        inside.communicate()
        return _with_storage(inside, inverse, cases)

    def near(
        self, cases: LayoutCases, seconds: float
    ) -> tuple[np.ndarray, TimeColumns]:
        """Predict the steps of the cases that can be as fast as that.

        Args:
            cases: Layouts with their ZeRO levels and micro-batches.
            seconds: Seconds of a step.

        Returns:
            Indices of the cases whose computation alone takes no longer, and terms of
            those.
        """
        inside, inverse = self._inside(cases, None)
        computes = inside.compute * inside.cases.count
        computes += inside.launches * inside.cases.count * self.launch_seconds
        kept = np.flatnonzero(computes <= seconds)
        rows = np.flatnonzero(computes[inverse] <= seconds)
        inside.take(kept)
        inside.communicate()
        place = np.zeros(len(computes), dtype=np.int64)
        place[kept] = np.arange(len(kept))
        return rows, _with_storage(inside, place[inverse[rows]], cases.take(rows))

    def _inside(
        self, cases: LayoutCases, combined: Sequence[Collective] | None
    ) -> tuple[_Inside, np.ndarray]:
        """What the micro-batches of distinct cases compute, and which each is like."""
        # What happens inside a micro-batch is the same at every ZeRO level.
        columns = [cases.table, cases.count, *cases.mesh.values()]
        first, inverse = distinct_columns(columns)
        return _Inside(self, cases.take(first), combined), inverse

    @property
    def launch_seconds(self) -> float:
        """Seconds that a kernel's launch takes."""
        return float(self.cluster.slowest.launch_seconds)

    def present(self, row: Row) -> frozenset[int]:
        """Roles of an operation."""
        if id(row) not in self._present:
            roles = (slot.roles for slot in row.slots)
            self._present[id(row)] = frozenset[int]().union(*roles)
        return self._present[id(row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hits:
    """Which mesh axis shards which role of something, by case.

    Attributes:
        code: Number of each case, equal where the same axes shard the same roles.
        by_role: Each role that is sharded, under a name of its own.
        setting: Mesh of these names, whose sizes are the shards of each role.
    """

    code: np.ndarray
    by_role: Mapping[str, int]
    setting: Setting


class _Inside:
    """What happens in the micro-batches of some cases, while it is added up.

    Attributes:
        links: Collectives but for the reductions of gradients.
        gradients: Bytes of gradients that are reduced, by mesh axes and case.
        compute, ahead: Seconds that a micro-batch computes, and its forward pass.
        launches: Kernels of a micro-batch.
        covers: Seconds beside which a ring's rounds run.
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
        number = len(cases)
        self.compute, self.ahead = np.zeros(number), np.zeros(number)
        self.launches, self.covers = np.zeros(number), np.zeros(number)
        self._use(cases)
        for row in model.rows.ops:
            self._operation(row)

    def _use(self, cases: LayoutCases) -> None:
        self.cases, self.number = cases, len(cases)
        self.parts = cases.count // self.model.traced_parts
        self.largest = {
            axis: int(sizes.max(initial=1)) for axis, sizes in cases.mesh.items()
        }
        self.hits: dict[tuple[int, frozenset[int]], _Hits] = {}
        self.codes = functools.cache(self._codes)
        self.homes = functools.cache(self._homes)

    def take(self, rows: np.ndarray) -> None:
        """Go on with some of the cases."""
        hits = self.hits
        self._use(self.cases.take(rows))
        self.hits = {
            key: dataclasses.replace(one, code=one.code[rows])
            for key, one in hits.items()
        }
        self.compute, self.ahead = self.compute[rows], self.ahead[rows]
        self.launches, self.covers = self.launches[rows], self.covers[rows]

    def communicate(self) -> None:
        """Add the collectives of a micro-batch."""
        self.links = _Links(self.cases, self.model.cluster)
        if not self.number:
            return
        for row in self.model.rows.ops:
            self._collectives(row)
        for flow in self.model.rows.flows:
            self._flow(flow)

    # What shards what.

    def _homes(self, home: int) -> list[tuple[Table, np.ndarray]]:
        """Tables of a TaskGraph, with the indices of their cases."""
        found: dict[object, tuple[Table, list[np.ndarray]]] = {}
        for tables, rows in self.cases.batches:
            key = tuple(sorted(tables[home].items()))
            found.setdefault(key, (tables[home], []))[1].append(rows)
        return [(table, np.concatenate(some)) for table, some in found.values()]

    def hits_in(self, home: int, present: frozenset[int]) -> _Hits:
        """``hits_of`` in every case."""
        key = home, present
        if key not in self.hits:
            self.hits[key] = self._hits(home, present)
        return self.hits[key]

    def _hits(self, home: int, present: frozenset[int]) -> _Hits:
        code = np.zeros(self.number, dtype=np.int64)
        parts: dict[int, np.ndarray] = {}
        roles = {role: n for n, role in enumerate(sorted(present), 1)}
        for table, rows in self.homes(home):
            here: dict[int, Any] = {}
            for place, (axis, sizes) in enumerate(self.cases.mesh.items()):
                role = next((r for r in table.get(axis, ()) if r in present), None)
                if role is None or self.largest[axis] == 1:
                    continue
                size, before = sizes[rows], here.get(role, 1)
                more = before * size
                hit = (size > 1) & (self.model.dims.roles[role].divisible % more == 0)
                here[role] = np.where(hit, more, before)
                code[rows] += hit * (roles[role] * (len(roles) + 1) ** place)
            for role, size in here.items():
                if role not in parts:
                    parts[role] = np.ones(self.number)
                parts[role][rows] = size
        names = {f"role {role}": role for role in parts}
        mesh = {name: parts[role] for name, role in names.items()}
        return _Hits(
            code=np.unique(code, return_inverse=True)[1],
            by_role=names,
            setting=self._setting(mesh),
        )

    def _setting(self, mesh: Mapping[str, Any]) -> Setting:
        model = self.model
        return Setting(mesh, self.parts, model.cluster, model.dims, self.batch_roles)

    def _codes(
        self, layout: Layout, sizes: Layout, home: int, fused: Fused | None = None
    ) -> np.ndarray:
        """A number for every case, equal where a tensor has the same layout."""
        code = np.zeros(self.number, dtype=np.int64)
        for table, rows in self.homes(home):
            mesh = {axis: size[rows] for axis, size in self.cases.mesh.items()}
            cut = table_shard_counts(layout, sizes, table, mesh, fused)
            for place, axis in enumerate(self.cases.mesh):
                code[rows] += cut.axes.get(axis, 0) * (len(layout) + 1) ** place
        return np.unique(code, return_inverse=True)[1]

    def _alike(
        self, columns: Sequence[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, Mapping[int, Table], Setting]]:
        """Cases that agree in some columns.

        Yields:
            Their indices, the tables of one of them, and their setting.
        """
        first, inverse = distinct_columns(columns)
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(1, len(first)))
        for one, rows in zip(first.tolist(), np.split(order, bounds), strict=True):
            mesh = {axis: size[rows] for axis, size in self.cases.mesh.items()}
            some = dataclasses.replace(
                self._setting(mesh),
                num_micro_batches=self.parts[rows],
                like=self.cases.mesh_at(one),
            )
            yield rows, self.cases.tables[self.cases.table[one]], some

    # Rows of the program.

    def _operation(self, row: Row) -> None:
        present, model = self.model.present(row), self.model
        hits = self.hits_in(row.task_graph, present)
        kind = slowest_kind(row, model.cluster)
        ahead, behind, launches = row_seconds(row, hits.by_role, hits.setting, kind)
        seconds = (ahead + behind + ahead * row.remat) * row.count
        self.compute += seconds
        # The backward pass takes twice as long as the forward pass, which it may
        # contain once more.
        self.ahead += seconds / (3 + row.remat)
        self.launches += launches * row.count
        if row.kind == ATTENTION:
            self.covers += seconds

    def _collectives(self, row: Row) -> None:
        """Add what an operation communicates."""
        present = self.model.present(row)
        hits = self.hits_in(row.task_graph, present)
        rings = row.kind == ATTENTION and row.product is not None
        weights = any(x.weight and x.differentiable for x in row.operands)
        windows = row.repeats is not None
        if not (rings or weights or windows):
            return
        columns = [hits.code]
        if windows:
            columns += [self.cases.mesh[axis] for axis in SPATIAL_AXES]
        for rows, tables, s in self._alike(columns):
            axes = hits_of(present, tables[row.task_graph], s)
            if axes:
                self._collect(rows, gradients_of(row, axes, s))
                self._collect(rows, rounds_of(row, axes, s))
                self._collect(rows, halos_of(row, axes, s))

    def _flow(self, flow: Flow) -> None:
        source, home = flow.source, flow.task_graph
        columns = [
            self.codes(source.layout, source.sizes, home, flow.fused),
            self.hits_in(home, flow.present).code,
        ]
        for use in flow.uses:
            view = use.view
            columns.append(self.codes(view.layout, view.sizes, use.task_graph))
            columns.append(self.hits_in(use.task_graph, use.present).code)
        for rows, tables, s in self._alike(columns):
            self._collect(rows, flow_cost(flow, tables, s))

    def _collect(self, rows: np.ndarray, found: Sequence[Collective]) -> None:
        """Add collectives, and put the reductions of gradients by for the last."""
        for c in found if self.combined is None else within_ranks(found):
            if c.what == "gradient":
                if c.axes not in self.gradients:
                    self.gradients[c.axes] = np.zeros(self.number)
                self.gradients[c.axes][rows] += c.payload_bytes * c.count
            else:
                self.links.add(rows, c)


def _with_storage(
    inside: _Inside, inverse: np.ndarray, cases: LayoutCases
) -> TimeColumns:
    """Add what storage and the optimizer cost.

    Args:
        inside: What happens in the micro-batches of distinct cases.
        inverse: Which of those each case is like.
        cases: All of the cases.
    """
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
    if model.cluster.platform != "cpu":  # Where all devices share the cores.
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
        wire=links.wire,
        gathered=links.gathered,
        collectives=tuple(links.run),
    )


class _Storage:
    """What storage and the optimizer cost in some cases.

    Attributes:
        update: Seconds of the optimizer, by case.
        late: Collectives that follow the update, with their cases.
    """

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
        """Add the reductions of all gradients over some axes."""
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
    """Collectives of some cases, and their seconds while they are added up.

    Attributes:
        seconds: Of all collectives of a step, by what they are for and by case.
        wire: Payload bytes of all of them, by case.
        gathered: Payload bytes of the largest gather between TaskGraphs, by case.
        run: Collectives as they run; of a single case alone.
    """

    def __init__(self, cases: LayoutCases, cluster: Cluster) -> None:
        self.cases, self.cluster = cases, cluster
        number = len(cases)
        self.seconds: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(number))
        self.wire, self.gathered = np.zeros(number), np.zeros(number)
        self.run: list[Collective] = []
        first, self.place = distinct_columns([*cases.mesh.values()])
        self.mesh = {axis: sizes[first] for axis, sizes in cases.mesh.items()}
        self.spans = functools.cache(self._spans)
        self.rates = functools.cache(self._rates)

    def at(self, inverse: np.ndarray, cases: LayoutCases) -> _Links:
        """What was added up so far, for cases that are like these."""
        found = copy.copy(self)
        found.cases = cases
        found.seconds = defaultdict(
            lambda: np.zeros(len(cases)),
            {what: values[inverse] for what, values in self.seconds.items()},
        )
        found.wire, found.gathered = self.wire[inverse], self.gathered[inverse]
        found.place = self.place[inverse]
        return found

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
        """Add a collective in some cases; payload and count may be arrays over them."""
        if not len(rows):
            return
        rates = self.rates(c.kind, c.axes)
        payload: Any = c.payload_bytes + np.zeros(len(rows))
        times = c.count * (1 if c.phase == "update" else self.cases.count[rows])
        # What meets in the update has no computation to hide behind.
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
        """Keep what a single case runs; equal gathers of parameters are one."""
        one = dataclasses.replace(
            c,
            kind="all-reduce" if turned[0] else c.kind,
            payload_bytes=int(payload[0]),
            count=int(np.ravel(c.count)[0]),
        )
        if c.what == "parameter" and not c.scope:
            for place, known in enumerate(self.run):
                if dataclasses.replace(known, count=one.count) == one:
                    both = known.count + one.count
                    self.run[place] = dataclasses.replace(known, count=both)
                    return
        self.run.append(one)
