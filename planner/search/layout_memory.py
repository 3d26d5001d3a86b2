"""Memory of a layout by term, whoever searches: liveness, batch and host memory.

The search of plans that run and the exact stage of the array search ask here, so that a
row of either says the same of the same layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.memory.live_sets import Course, Moments, moments
from whalejax.planner.memory.peak import peak_of
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.host_offload import Hosting
from whalejax.planner.sharding.layout import Table, shards
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafLayout,
    batch_specs,
)
from whalejax.planner.terms import MemoryTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A layout, and how a step runs under it.

    Attributes:
        tables: compute table of each TaskGraph.
        layouts: of each group of parameters.
        offload: what lies in host memory.
        accumulates: gradients of several micro-batches are summed.
        in_flight: micro-batches whose activations are kept at once.
        gathered: bytes of the largest value that is gathered along the sequence.
        postpones: the compiler puts off products of weights' gradients.
    """

    tables: Mapping[int, Table]
    layouts: Sequence[LeafLayout]
    offload: tuple[str, ...] = ()
    accumulates: bool = False
    in_flight: float = 1.0
    gathered: float = 0.0
    postpones: bool = False


class MomentsByLayout:
    """What memory holds when, by what layouts ask of the lowering.

    Args:
        graph: the captured loss.
        facts: its parameters.
        program: its operations.
    """

    def __init__(
        self, graph: Graph, facts: LeafFacts, program: AnalysedProgram
    ) -> None:
        self.graph, self.facts, self.program = graph, facts, program
        self._found: dict[Course, Moments] = {}

    def of(self, one: Laid) -> Moments:
        """Moments under a layout."""
        gathers = any(layout.compute != layout.param for layout in one.layouts)
        course = self.program.course(
            apart="activations" in one.offload,
            regathers=gathers or "params" in one.offload,
        )
        if course not in self._found:
            self._found[course] = moments(self.graph, self.facts, course)
        return self._found[course]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemory:
    """What layouts of one program take.

    Attributes:
        facts: the parameters.
        hosting: what may lie in host memory.
        dims: the logical dimensions.
        homes: the TaskGraph of each leaf of the batch, from ``batch_homes``.
    """

    facts: LeafFacts
    hosting: Hosting
    dims: Dimensions
    homes: Sequence[tuple[int, int | None]]

    def of(self, found: Moments, one: Laid, s: Setting) -> MemoryTerms:
        """Memory on the fullest moment of a step.

        Args:
            found: what memory holds when, of all of the program or of a stage.
            one: the layout.
            s: mesh and micro-batches.
        """
        request, layouts = self.hosting.request, one.layouts
        terms = peak_of(
            self.facts,
            layouts,
            found,
            one.tables,
            s,
            state_bytes=request.state_bytes,
            cast_bytes=request.cast_bytes,
            accumulates=one.accumulates,
            away=self.hosting.away(layouts, one.offload),
            in_flight=one.in_flight,
            gathered=one.gathered,
            postpones=one.postpones,
        )
        moved = self.hosting.state_bytes(layouts, s.mesh, one.offload)
        return dataclasses.replace(
            terms,
            batch_bytes=self._batch_bytes(one.tables, s.mesh),
            optimizer_bytes=terms.optimizer_bytes - moved,
            host_bytes=terms.host_bytes + moved,
        )

    def _batch_bytes(self, tables: Mapping[int, Table], mesh: Mapping[str, int]) -> int:
        given = self.hosting.request.batch_bytes
        if not given:
            return 0
        specs = batch_specs(self.homes, self.dims, tables, mesh)
        pairs = zip(given, specs, strict=True)
        return sum(nbytes // shards(spec, mesh) for nbytes, spec in pairs)
