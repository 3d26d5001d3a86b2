"""Results that searches of one program share, whichever TaskGraphs it is cut into.

Searches beside each other plan the same operations in other TaskGraphs. What depends on
the operations alone is found once, when the first of them asks for it.
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
    """The operations of one captured loss.

    Args:
        graph: The loss.
        dims: Its logical dimensions.
        compiler: Model of the compiler's treatment of the operations.
        views: The operations in roles, where they are known.

    Attributes:
        views: The operations in roles.
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
        """Copies of activations that may wait in host memory, by tensor."""
        return waiting_values(self.graph)

    @functools.cached_property
    def sliced(self) -> frozenset[int]:
        """Parameters of which loops over layers read a slice at a time."""
        return sliced_leaves(self.graph)

    @functools.cached_property
    def regathered(self) -> bool:
        """Whether memory depends on weights being gathered again."""
        return bool(regathered_operands(self.graph, self.views.weight))

    @functools.cached_property
    def uses(self) -> TensorUses:
        """Returns the makers and readers of each tensor, for every liveness."""
        return TensorUses(self.graph, self.views.weight, self.compiler)

    def course(self, *, apart: bool, regathers: bool) -> StepLiveness:
        """Returns the live tensors of each span of a step.

        Args:
            apart: Activations wait in host memory.
            regathers: Products gather their weights again for their backward pass.
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
