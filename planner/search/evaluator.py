"""Evaluates the time and memory of layouts of one program, as arrays.

Plans, their alternatives and the thousands of layouts of a search are all evaluated
here. A single case is an array of length one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.layout_cases import LayoutCases, LayoutGrid
from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.cost.step_time import StepTime, TimeColumns
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.search.adasum_limits import (
    BUFFERS,
    CombiningCosts,
    GradientCombineCost,
    combine_seconds,
)
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.host_offload import HostMemoryLimits, Offload
from whalejax.planner.search.layout_memory import (
    LayoutMemory,
    MemoryColumns,
    StepLayout,
)
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import MESH_AXES, STAGE, Table
from whalejax.planner.sharding.operation_rows import OperationRows
from whalejax.planner.sharding.parameter_layout import LeafFacts, lay_out


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
        """Memory of the layouts."""
        return LayoutMemory(
            graph=self.graph,
            program=self.program,
            facts=self.facts,
            hosting=self.hosting,
            dims=self.dims,
        )

    @functools.cached_property
    def step_time(self) -> StepTime:
        """Time of the layouts."""
        return StepTime(
            rows=self.rows,
            facts=self.facts,
            dims=self.dims,
            cluster=self.cluster,
            cast_bytes=self.request.cast_bytes,
            traced_parts=self.graph.num_micro_batches,
        )

    @functools.cached_property
    def batch_roles(self) -> frozenset[int]:
        """Roles of the batch."""
        return frozenset(role.index for role in self.dims.batch)

    @functools.cached_property
    def _combining(self) -> CombiningCosts:
        return CombiningCosts(
            self.graph, self.dims, self.facts, self.cluster, self.request.combine
        )

    def setting(self, mesh: Mapping[str, Any], count: Any) -> CostSetting:
        """Returns the cost setting of rows on a mesh with ``count`` micro-batches.

        Args:
            mesh: Sizes of the axes, or arrays with the sizes of many meshes.
            count: Number of micro-batches, or an array of such numbers.
        """
        # The graph was traced with one part of the batch; the search varies the total
        # number of parts.
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
            zero: ZeRO level over ``data``.
            count: Number of micro-batches of a step.
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
        """Returns the time of a step, without transfers to host memory.

        Args:
            cases: Layouts with their ZeRO levels and micro-batches.
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
        self, cases: LayoutCases, seconds: float, *, sequence_parallel: bool
    ) -> tuple[np.ndarray, TimeColumns]:
        """Returns the times of the cases that can be fast enough.

        Transfers to host memory do not count.

        Args:
            cases: Layouts with their ZeRO levels and micro-batches.
            seconds: Largest seconds of a step.
            sequence_parallel: Whether to include cases that are fast enough only with
                the sequence sharded between products.

        Returns:
            Indices of the cases, and their times.
        """
        if self.request.combine == "mean" and seconds < np.inf:
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
            cases: Layouts with their ZeRO levels and micro-batches.
            offload: Names of the offloaded memory terms.
            postpones: Whether the compiler postpones products of weights' gradients
                if gradients are not summed.
            in_flight: Number of micro-batches whose activations are saved at once; by
                default that of the request.
            times: Time terms of the cases, if known.
        """
        number = len(cases)
        gathered = np.zeros(number)
        if self.cluster.compiler.reduces_at_end:
            gathered = (self.times(cases) if times is None else times).gathered
        held = self.request.in_flight if in_flight is None else in_flight
        terms: dict[str, np.ndarray] = {}
        host = np.zeros(number)
        # In a batch all cases have the same tables.
        pairs = zip(cases.batches, cases.cuts(self.facts), strict=True)
        for (tables, rows), (_, cuts) in pairs:
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
            here = self.layout_memory.of(laid, self.setting(mesh, count))
            host[rows] = here.host
            for name, values in here.terms.items():
                terms.setdefault(name, np.zeros(number))[rows] = values
        return self._with_buffers(cases, MemoryColumns(terms=terms, host=host))

    def _with_buffers(self, cases: LayoutCases, found: MemoryColumns) -> MemoryColumns:
        """Returns the larger of two peaks: within the step, or while ranks combine."""
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
            cases: Layouts with their ZeRO levels.
            offload: Names of the offloaded memory terms.
        """
        least_memory = np.zeros(len(cases))
        for rows, cuts in cases.cuts(self.facts):
            least_memory[rows] = self.layout_memory.least(cuts, offload)
        return least_memory

    def serves(self, cases: LayoutCases, offload: Offload) -> np.ndarray:
        """Returns whether each case can offload a parameter, if ``offload`` names
        parameters.
        """
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
            cases: Layouts with their ZeRO levels and micro-batches.
            offload: Names of the offloaded memory terms.
            times: Time terms of the cases.
            memory: Memory terms of the cases; without them activations are left out.
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
