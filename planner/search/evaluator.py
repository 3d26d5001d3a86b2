"""Evaluates the time and memory of layouts of one program, as arrays.

Single plans, their alternatives and the thousands of layouts of a search are all
evaluated here. A single layout is an array of length one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.layout_cases import LayoutCases, LayoutGrid
from whalejax.planner.cost.memory_rows import MemoryRows
from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.cost.step_time import StepTime, TimeColumns
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.memory.live_sets import (
    AnalysedProgram,
    SpanLiveSets,
)
from whalejax.planner.memory.peak import WHOLE_PROGRAM, PeakMemory, StageShare, peak_of
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.stage_graph import HANDED
from whalejax.planner.search.adasum_limits import (
    BUFFERS,
    CombiningCosts,
    GradientCombineCost,
    combine_seconds,
)
from whalejax.planner.search.host_offload import HostMemoryLimits, Offload
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import MESH_AXES, STAGE, Table
from whalejax.planner.sharding.operation_rows import OperationRows
from whalejax.planner.sharding.parameter_layout import LeafFacts, batch_homes, lay_out
from whalejax.planner.sharding.shard_counts import (
    LeafShardCounts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Cases: layouts with their step options. Arrays have one number per case.

    Attributes:
        tables: Compute table of each TaskGraph, which all cases share.
        cuts: Shard counts of each group of parameters.
        accumulates: Whether gradients of several micro-batches are summed, by case.
        offload: Names of the offloaded memory terms, which all cases share.
        in_flight: Number of micro-batches whose activations are saved at a time.
        gathered: Bytes of the largest value that is gathered along the sequence.
        postpones: Whether the compiler postpones products of weights' gradients.
        stage: Part of the program on one device; default: all of it.
    """

    tables: Mapping[int, Table]
    cuts: Sequence[LeafShardCounts]
    accumulates: np.ndarray
    offload: tuple[str, ...] = ()
    in_flight: Any = 1.0
    gathered: Any = 0.0
    postpones: bool = False
    stage: StageShare = WHOLE_PROGRAM

    def take(self, rows: np.ndarray) -> StepLayout:
        """Returns the cases at the given indices."""

        def some(value: Any) -> Any:
            return value[..., rows] if isinstance(value, np.ndarray) else value

        return dataclasses.replace(
            self,
            cuts=[cut.take(rows) for cut in self.cuts],
            accumulates=self.accumulates[rows],
            in_flight=some(self.in_flight),
            gathered=some(self.gathered),
            stage=self.stage.take(rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """``MemoryTerms`` of many cases, in whole bytes.

    Attributes:
        terms: Bytes on one device, by name of the term; one number per case.
        host: Bytes in host memory, by case.
    """

    terms: Mapping[str, np.ndarray]
    host: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Bytes of all terms on a device, by case."""
        return sum(self.terms.values(), np.zeros(len(self.host)))

    def take(self, rows: np.ndarray) -> MemoryColumns:
        """Returns the cases at the given indices."""
        terms = {name: values[rows] for name, values in self.terms.items()}
        return MemoryColumns(terms=terms, host=self.host[rows])

    def with_rows(self, rows: np.ndarray, other: MemoryColumns) -> MemoryColumns:
        """Returns a copy with the values of ``other`` at the given indices."""

        def mixed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            result = before.copy()
            result[rows] = after
            return result

        names = {**self.terms, **other.terms}
        nothing = np.zeros(len(self.host))
        return MemoryColumns(
            terms={
                name: mixed(self.terms.get(name, nothing), other.terms[name])
                for name in names
            },
            host=mixed(self.host, other.host),
        )

    def at(self, index: int) -> MemoryTerms:
        """Returns the memory terms of one case."""
        result = {f"{name}_bytes": int(v[index]) for name, v in self.terms.items()}
        return MemoryTerms(**result, host_bytes=int(self.host[index]))


@dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Memory of layouts of one program.

    Attributes:
        graph: Captured loss.
        program: Analysed operations of the loss.
        facts: Parameters of the model, in groups of equal ones.
        hosting: Limits on the state in host memory.
        dims: Logical dimensions of the loss.
    """

    graph: Graph
    program: AnalysedProgram
    facts: LeafFacts
    hosting: HostMemoryLimits
    dims: Dimensions

    @functools.cached_property
    def homes(self) -> tuple[tuple[int, int | None], ...]:
        """(Leaf of the batch, first TaskGraph that reads it) pairs."""
        return batch_homes(self.graph)

    def of(self, one: StepLayout, s: CostSetting) -> MemoryColumns:
        """Returns the peak memory of a step.

        Args:
            one: Layouts of the cases.
            s: Mesh sizes and numbers of micro-batches of the cases.

        Returns:
            Bytes of each memory term, by case.
        """
        number = len(one.accumulates)
        gathers = np.full(number, "params" in one.offload)
        for cut in one.cuts if self.program.regathered else ():
            gathers = gathers | (cut.compute.num_shards != cut.param.num_shards)
        names = [f.name for f in dataclasses.fields(PeakMemory)]
        result = {name: np.zeros(number) for name in names}
        for regathers in (False, True):
            rows = np.flatnonzero(gathers == regathers)
            if not len(rows):
                continue
            alone = len(rows) == number
            some = one if alone else one.take(rows)
            here = self._peaks(some, s if alone else s.take(rows), regathers=regathers)
            for name in names:
                result[name][rows] = getattr(here, name)
        shares = None if one.stage is WHOLE_PROGRAM else one.stage.group_shares
        moved = np.floor(self.hosting.state_bytes(one.cuts, one.offload, shares))
        host = result.pop("host") + moved
        result["optimizer"] = result["optimizer"] - moved
        if "gradients" in one.offload:
            host = host + result["gradients"]
            result["gradients"] = np.zeros(number)
        result["state"] = np.full(number, float(self.hosting.request.state_bytes))
        result["batch"] = self._batch_bytes(one.tables, s) + np.zeros(number)
        by_leaf = self._batch_bytes(one.tables, s, only_gradients=True)
        result["gradients"] = result["gradients"] + one.accumulates * by_leaf
        return MemoryColumns(terms=result, host=host)

    def least(self, cuts: Sequence[LeafShardCounts], offload: tuple[str, ...]) -> Any:
        """Returns the bytes of permanent state in device memory, by case.

        They are parameters, optimizer state and other state of the model.

        Args:
            cuts: Shard counts of each group of parameters.
            offload: Names of the offloaded memory terms.
        """
        result: Any = self.hosting.request.state_bytes
        away = self.hosting.host_param_counts(cuts, offload)
        for (group, count), cut, hosted in zip(
            self.facts.groups, cuts, away, strict=True
        ):
            result = result + (count - hosted) * group.nbytes / cut.param.num_shards
            result = result + count * group.optimizer_bytes / cut.optimizer.num_shards
        return result - self.hosting.state_bytes(cuts, offload)

    def _peaks(self, one: StepLayout, s: CostSetting, *, regathers: bool) -> PeakMemory:
        number = len(one.accumulates)
        away = np.zeros((len(one.cuts), number))
        for row, count in zip(
            away, self.hosting.host_param_counts(one.cuts, one.offload), strict=True
        ):
            row[:] = count
        return peak_of(
            self.facts,
            one.cuts,
            self.moments("activations" in one.offload, regathers),
            one.tables,
            s,
            cast_bytes=self.hosting.request.cast_bytes,
            accumulates=one.accumulates,
            away=away,
            in_flight=one.in_flight,
            gathered=one.gathered,
            postpones=one.postpones,
            stage=one.stage,
        )

    def moments(self, apart: bool, regathers: bool) -> SpanLiveSets:
        """Returns the live tensors of each span.

        Args:
            apart: Whether activations are in host memory.
            regathers: Whether the backward pass gathers the weights of products again.
        """
        course = self.program.course(apart=apart, regathers=regathers)
        return self.program.live_sets(self.graph, self.facts, course)

    def _batch_bytes(
        self,
        tables: Mapping[int, Table],
        s: CostSetting,
        *,
        only_gradients: bool = False,
    ) -> Any:
        """Returns the bytes of one device's part of the batch.

        They do not depend on the number of micro-batches. With ``only_gradients``, only
        leaves whose gradients the step returns count.
        """
        given = self.hosting.request.batch_bytes
        if not given:
            return 0
        first = next(iter(tables))
        batch_bytes: Any = 0
        for nbytes, (tensor, home) in zip(given, self.homes, strict=True):
            leaf = self.graph.tensors[tensor]
            is_read = leaf.differentiable and not leaf.path.startswith(HANDED)
            if only_gradients and not is_read:
                continue
            table = tables[first if home is None else home]
            cut = s.shard_counts(
                self.dims.layouts[tensor], self.dims.sizes[tensor], table
            )
            batch_bytes = batch_bytes + nbytes // cut.num_shards
        return batch_bytes


SEARCHED_AXES = tuple(axis for axis in MESH_AXES if axis != STAGE)
"""Mesh axes of a plan without stages, outermost first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Time and memory of layouts of one program.

    Attributes:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        cluster: Devices, links and their compiler.
        request: Options of the search.
        program: Analysed operations of the loss.
        rows: Cost rows of the loss.
        facts: Parameters of the model, in groups of equal ones.
    """

    graph: Graph
    dims: Dimensions
    cluster: Cluster
    request: Request
    program: AnalysedProgram
    rows: OperationRows
    facts: LeafFacts

    @functools.cached_property
    def hosting(self) -> HostMemoryLimits:
        """Limits on the state in host memory."""
        return HostMemoryLimits(self.program, self.cluster, self.request, self.facts)

    @functools.cached_property
    def layout_memory(self) -> LayoutMemory:
        """Evaluator of the layouts' memory."""
        return LayoutMemory(
            graph=self.graph,
            program=self.program,
            facts=self.facts,
            hosting=self.hosting,
            dims=self.dims,
        )

    @functools.cached_property
    def step_time(self) -> StepTime:
        """Evaluator of the layouts' time."""
        return StepTime(
            rows=self.rows,
            facts=self.facts,
            dims=self.dims,
            cluster=self.cluster,
            cast_bytes=self.request.cast_bytes,
            memory_rows=self._memory_rows,
            traced_parts=self.graph.num_micro_batches,
        )

    @property
    def _memory_rows(self) -> MemoryRows:
        compiler, batch = self.cluster.compiler, self.batch_roles
        summed = self.cluster.slowest.is_linear_in_bytes
        return self.program.once(
            ("memory rows", compiler, batch, summed),
            lambda rows: MemoryRows.of(rows.ops, compiler, batch, summed=summed),
            self.rows,
        )

    @functools.cached_property
    def batch_roles(self) -> frozenset[int]:
        """Logical dimensions of the batch."""
        return frozenset(role.index for role in self.dims.batch)

    @functools.cached_property
    def _combining(self) -> CombiningCosts:
        return CombiningCosts(
            self.graph, self.dims, self.facts, self.cluster, self.request.combine
        )

    def setting(self, mesh: Mapping[str, Any], count: Any) -> CostSetting:
        """Returns the mesh sizes and micro-batches for cost rows.

        Args:
            mesh: Sizes of the axes, or arrays with the sizes of many meshes.
            count: Number of micro-batches, or an array of such numbers.
        """
        # The graph has one traced micro-batch, which the search may divide further.
        return CostSetting(
            mesh,
            count // self.graph.num_micro_batches,
            self.cluster,
            self.dims,
            self.batch_roles,
        )

    def case(
        self,
        mesh: Mapping[str, int],
        tables: Mapping[int, Table],
        zero: int,
        count: int,
    ) -> LayoutCases:
        """Returns one layout as an array of one case.

        Args:
            mesh: Size of each axis; a missing axis has size 1.
            tables: Compute table of each TaskGraph.
            zero: ZeRO stage over ``data``.
            count: Number of micro-batches in a step.
        """
        first = np.zeros(1, dtype=np.int64)
        grid = LayoutGrid(
            tables=[tables],
            table=first,
            mesh={axis: np.array([mesh.get(axis, 1)]) for axis in SEARCHED_AXES},
        )
        return LayoutCases(
            grid=grid, row=first, zero=np.array([zero]), count=np.array([count])
        )

    def times(self, cases: LayoutCases) -> TimeColumns:
        """Returns the time of a step, without transfers to and from host memory.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
        """
        if self.request.combine == "mean":
            return self.step_time.of(cases)
        times = []
        for index in range(len(cases)):
            met = self._combine_cost(cases, index)
            one = self.step_time.of(cases.take(np.array([index])), met.collectives)
            more = combine_seconds(met.nbytes, self.cluster)
            terms = {**one.terms, "update": one.terms["update"] + more}
            times.append(dataclasses.replace(one, terms=terms))
        return TimeColumns.concatenate(times)

    def near(
        self, cases: LayoutCases, seconds: Any, *, sequence_parallel: bool
    ) -> tuple[np.ndarray, TimeColumns]:
        """Returns the times of the cases that may be fast enough.

        Transfers to and from host memory do not count.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
            seconds: Largest step time in seconds, or an array of them by case.
            sequence_parallel: Whether to include cases that are fast enough only if the
                sequence is sharded between products.

        Returns:
            Indices of the cases, and their times.
        """
        if self.request.combine == "mean" and np.any(seconds < np.inf):
            return self.step_time.near(
                cases, seconds, sequence_parallel=sequence_parallel
            )
        return np.arange(len(cases)), self.times(cases)

    def _combine_cost(self, cases: LayoutCases, index: int) -> GradientCombineCost:
        mesh = cases.mesh_at(index)
        tables, zero = cases.tables_at(index), int(cases.zero[index])
        layouts = lay_out(self.facts, tables, mesh, zero)
        return self._combining.of(layouts, mesh)

    def memory(
        self,
        cases: LayoutCases,
        offload: Offload,
        *,
        postpones: bool = False,
        in_flight: float | None = None,
        times: TimeColumns | None = None,
    ) -> MemoryColumns:
        """Returns the peak memory of a step.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
            offload: Names of the offloaded memory terms.
            postpones: Whether the compiler postpones products of weights' gradients
                where gradients are not summed; default: False.
            in_flight: Number of micro-batches whose activations are saved at a time;
                default: the request's number.
            times: Time terms of the cases, if they are known.
        """
        number = len(cases)
        gathered = np.zeros(number)
        if self.cluster.compiler.reduces_at_end:
            gathered = (self.times(cases) if times is None else times).gathered
        held = self.request.in_flight if in_flight is None else in_flight
        terms: dict[str, np.ndarray] = {}
        host = np.zeros(number)
        # Each batch has the cases with one set of tables.
        pairs = zip(cases.batches, cases.cuts(self.facts), strict=True)
        for batch, ((tables, rows), (_, cuts)) in enumerate(pairs):
            mesh = {axis: sizes[rows] for axis, sizes in cases.mesh.items()}
            count = cases.count[rows]
            accumulates = count > 1
            laid = StepLayout(
                tables=tables,
                cuts=cuts,
                accumulates=accumulates,
                offload=offload,
                in_flight=held,
                gathered=gathered[rows],
                postpones=postpones and not accumulates.any(),
            )
            s = dataclasses.replace(
                self.setting(mesh, count), known=cases.shard_counts(batch)
            )
            here = self.layout_memory.of(laid, s)
            host[rows] = here.host
            for name, values in here.terms.items():
                terms.setdefault(name, np.zeros(number))[rows] = values
        return self._with_buffers(cases, MemoryColumns(terms=terms, host=host))

    def _with_buffers(self, cases: LayoutCases, found: MemoryColumns) -> MemoryColumns:
        """Adds Adasum's buffers to ``working``, as far as they raise the peak."""
        if self.request.combine == "mean":
            return found
        indices = range(len(cases))
        nbytes = np.array([self._combine_cost(cases, i).nbytes for i in indices])
        total, terms = found.total, {**found.terms}
        resting = total - terms["activations"] - terms["working"]
        over = np.maximum(0.0, resting + BUFFERS * nbytes - total)
        terms["working"] = terms["working"] + over
        return MemoryColumns(terms=terms, host=found.host)

    def least_memory(self, cases: LayoutCases, offload: Offload) -> np.ndarray:
        """Returns the bytes that a device needs throughout a step, by case.

        Args:
            cases: Layouts with their ZeRO stages.
            offload: Names of the offloaded memory terms.
        """
        least_memory = np.zeros(len(cases))
        for rows, cuts in cases.cuts(self.facts):
            least_memory[rows] = self.layout_memory.least(cuts, offload)
        return least_memory

    def serves(self, cases: LayoutCases, offload: Offload) -> np.ndarray:
        """Returns whether each case can offload parameters, or need not."""
        serves = np.full(len(cases), "params" not in offload)
        for rows, cuts in cases.cuts(self.facts) if not serves.all() else ():
            counts = self.hosting.host_param_counts(cuts, offload)
            serves[rows] = sum(counts, np.zeros(len(rows))) > 0
        return serves

    def offload_seconds(
        self,
        cases: LayoutCases,
        offload: Offload,
        times: TimeColumns,
        memory: MemoryColumns | None = None,
    ) -> np.ndarray:
        """Returns the seconds that offload transfers add to a step, by case.

        Args:
            cases: Layouts with their ZeRO stages and numbers of micro-batches.
            offload: Names of the offloaded memory terms.
            times: Time terms of the cases.
            memory: Memory terms of the cases; default: None, which leaves transfers of
                activations out.
        """
        offload_seconds = np.zeros(len(cases))
        for rows, cuts in cases.cuts(self.facts) if offload else ():
            state = self.hosting.state_bytes(cuts, offload)
            params = self.hosting.params_bytes(cuts, offload)
            waiting = 0.0
            if memory is not None:
                waiting = memory.host[rows] - state - params
            offload_seconds[rows] = self.hosting.seconds(
                state,
                params,
                waiting,
                (times.ahead[rows], times.behind[rows]),
                cases.count[rows],
            )
        return offload_seconds

    def lacks(self, memory: MemoryColumns) -> tuple[np.ndarray, np.ndarray]:
        """Returns the missing bytes of device memory and of host memory, by case."""
        room = min(kind.host_memory_bytes or np.inf for kind in self.cluster.kinds)
        device = memory.total - self.cluster.memory_bytes
        return np.maximum(0.0, device), np.maximum(0.0, memory.host - room)

    def fits(self, memory: MemoryColumns) -> np.ndarray:
        """Returns whether each case fits in device memory and host memory."""
        device, host = self.lacks(memory)
        result: np.ndarray = (device == 0) & (host == 0)
        return result
