"""Analysis results that searches of one program share.

Searches may cut the same operations into different TaskGraphs. Results that depend on
the operations alone are computed once, at the first request.
"""

from __future__ import annotations

import functools

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.row_builder import Views
from whalejax.planner.memory.live_sets import StepLiveness
from whalejax.planner.memory.liveness import TensorUses, regathered_operands
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.sharding.offload_candidates import sliced_leaves, waiting_values


class AnalysedProgram:
    """Cached analyses of the operations of one captured loss.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        compiler: Model of the compiler's treatment of the operations.
        views: Operations in terms of roles, if known.

    Attributes:
        views: Operations in terms of roles.
    """

    def __init__(
        self,
        graph: Graph,
        dims: Dimensions,
        compiler: CompilerProfile,
        views: Views | None = None,
    ) -> None:
        self.graph = graph
        self.dims = dims
        self.compiler = compiler
        self.views: Views = views or Views(graph, dims)
        self._courses: dict[tuple[bool, bool], StepLiveness] = {}

    @functools.cached_property
    def waiting(self) -> dict[int, int]:
        """Number of copies of each activation that may be in host memory, by tensor."""
        return waiting_values(self.graph)

    @functools.cached_property
    def sliced(self) -> frozenset[int]:
        """Parameters that loops over layers read one slice at a time."""
        return sliced_leaves(self.graph)

    @functools.cached_property
    def regathered(self) -> bool:
        """Whether memory depends on gathering weights again in the backward pass."""
        return bool(regathered_operands(self.graph, self.views.weight))

    @functools.cached_property
    def uses(self) -> TensorUses:
        """Producers and readers of each tensor, which every liveness uses."""
        return TensorUses(self.graph, self.views.weight, self.compiler)

    def course(self, *, apart: bool, regathers: bool) -> StepLiveness:
        """Returns the live tensors of each span of a step.

        Args:
            apart: Whether activations are in host memory.
            regathers: Whether products gather their weights again backward.
        """
        key = apart, regathers and self.regathered
        if key not in self._courses:
            self._courses[key] = StepLiveness(
                self.graph,
                self.dims,
                self.views.weight,
                compiler=self.compiler,
                waiting=self.waiting if apart else {},
                regathers=key[1],
                uses=self.uses,
            )
        return self._courses[key]
