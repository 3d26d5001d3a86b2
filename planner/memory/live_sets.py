"""Live sets: the tensors and parameters in memory in each span of a step.

They are computed once for a program, and ``peak`` computes their bytes under a layout.
Searches may divide the same operations into different TaskGraphs. ``AnalysedProgram``
shares the results that depend on the operations alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.row_builder import Views
from whalejax.planner.memory.liveness import (
    TensorUses,
    Timeline,
    Works,
    regathered_operands,
)
from whalejax.planner.memory.saved_tensors import SavedTensorGroup, TensorEntry
from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import CONVOLUTION, Graph
from whalejax.planner.model.reshape_factors import slots_of
from whalejax.planner.sharding.offload_candidates import sliced_leaves, waiting_values
from whalejax.planner.sharding.operation_rows import OperationRows
from whalejax.planner.sharding.parameter_layout import LeafFacts
from whalejax.planner.sharding.sequence_parallel import SequenceSplits


T = TypeVar("T")

Counts = Mapping[int, float]
"""Number of tensors by the index of their entry or kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLiveSets:
    """Live tensors of each span of the forward pass, then of the backward pass.

    Attributes:
        kinds: Distinct kinds of tensors.
        saved: Number of saved tensors of each kind, by span.
        postponed: Number of tensors of each kind, by span, that live longer if the
            compiler postpones products of weights' gradients.
        working: Temporaries by kind before the span computes its own gradients. One row
            at a time is live.
        making: Temporaries by kind while the span computes its own gradients.
        starts: First row of each span in ``working`` and in ``making``.
        gradients: Number of parameters with a gradient in memory, by span and group.
        held: Whether the span computes with a parameter of the group, by span and
            group. Of parameters that are stored in shards, one is gathered at a time.
        made: Whether the span computes a gradient of the group, by span and group.
        reread: Number of parameters, by span and group, that products in a loop read in
            full in every iteration. They are gathered before the loop.
        turns: Number of loop iterations that read slices of the parameters, by group.
        cast: Number of parameters, by group, whose copies in the compute dtype live
            throughout the step. With loops over layers these are all parameters, else
            inputs of checkpointed regions. Others are cast when they are read.
        waiting: Number of offloaded tensors of each kind.
    """

    kinds: tuple[SavedTensorGroup, ...]
    saved: np.ndarray
    postponed: np.ndarray
    working: np.ndarray
    making: np.ndarray
    starts: tuple[np.ndarray, np.ndarray]
    gradients: np.ndarray
    held: np.ndarray
    made: np.ndarray
    reread: np.ndarray
    turns: np.ndarray
    cast: np.ndarray
    waiting: np.ndarray


class StepLiveness:
    """Liveness of the tensors of a step, without their TaskGraphs.

    Args:
        dims: Logical dimensions of the loss.
        uses: Producers and readers of the tensors.
        waiting: Number of offloaded copies by tensor.
        regathers: Whether the backward pass gathers the weights of products again.

    Attributes:
        entries: Index of each distinct tensor, by its layout, its bytes, the operation
            whose TaskGraph sets its sharding, and its least samples.
        layouts: Index of each distinct layout with the sizes of its logical dimensions.
        saved: Number of saved tensors of each entry, by span (forward before backward).
        postponed: Number of tensors of each entry that are saved in addition, by span,
            if products of weights' gradients are postponed.
        works: Temporaries of each span, before and while it computes gradients.
        waits: Number of offloaded tensors of each entry.
        used: Use of each parameter in each span of the forward pass: 2 for a product, 1
            for another operation, 0 for none.
        ahead: ``used``, extended to spans that read a product's result in another form.
        waited: Whether each parameter's gradient is in memory while the backward pass
            is in a span, by span and parameter.
        given: Whether a checkpointed region has the parameter as input, by parameter.
        reread: Whether a product in a loop reads the full parameter in every iteration,
            by span of the forward pass and parameter.
    """

    def __init__(
        self,
        dims: Dimensions,
        uses: TensorUses,
        waiting: Mapping[int, int],
        *,
        regathers: bool,
    ) -> None:
        graph = uses.graph
        timeline = Timeline(uses, waiting, regathers=regathers)
        spans = timeline.spans
        self.dims = dims
        self.entries: dict[tuple[int, int, int, int], int] = {}
        self.layouts: dict[tuple[Layout, Layout], int] = {}
        self._layout_of: dict[int, int] = {}
        self._number_of: dict[TensorEntry, int] = {}
        self.joined = {atoms for layout in dims.layouts for atoms in layout}
        self.slid = _slid_roles(graph, dims)
        # TPU convolutions have the batch or the channels in lanes, which sets layouts.
        self.ends = any(op.kind == CONVOLUTION for op in graph.ops)
        saved = [timeline.made_before(span.end) for span in spans]
        saved += [
            timeline.saved_before(span.end) + timeline.gradients_before(span)
            for span in spans
        ]
        works: list[tuple[Works, Works]]
        works = [([*timeline.ahead(span)], []) for span in spans]
        works += [timeline.behind(span) for span in spans]
        beside = [timeline.few_samples.before(span.end) for span in spans]
        self.saved = [
            self._numbered(row + also)
            for row, also in zip(saved, [*beside, *beside], strict=True)
        ]
        postponed = [timeline.postponed_behind(span) for span in spans]
        nothing = [Counter[TensorEntry]() for _ in spans]
        self.postponed = [self._numbered(row) for row in (*nothing, *postponed)]
        self.works = [
            tuple([self._numbered(row) for row in rows] for rows in pair)
            for pair in works
        ]
        self.waits = self._numbered(timeline.waits())
        self.used = uses.used({})
        self.ahead = uses.used(timeline.written_until())
        firsts = np.array([span.first for span in spans])
        self.waited = np.array(uses.last, int) >= firsts[:, None]
        self.reread = uses.reread
        self.given = np.array(
            [any(graph.ops[at].remat is not None for at in u) for u in uses.users],
            bool,
        )

    def _numbered(self, row: Mapping[TensorEntry, float]) -> Counts:
        result: dict[int, float] = {}
        for entry, times in row.items():
            number = self._number_of.get(entry)
            if number is None:
                number = self._number_of[entry] = self._number(entry)
            result[number] = result.get(number, 0.0) + times
        return result

    def _number(self, entry: TensorEntry) -> int:
        tensor, nbytes, at, few = entry
        layout = self._layout_of.get(tensor)
        if layout is None:
            pair = self.dims.layouts[tensor], self.dims.sizes[tensor]
            layout = self.layouts.setdefault(pair, len(self.layouts))
            self._layout_of[tensor] = layout
        return self.entries.setdefault((layout, nbytes, at, few), len(self.entries))


def _slid_roles(graph: Graph, dims: Dimensions) -> set[int]:
    return {
        role
        for op in graph.ops
        for factor in op.factors
        if factor.kind == "halo"
        for slot, dim in factor.members
        for role in dims.layouts[slots_of(op)[slot]][dim]
    }


def moments(graph: Graph, facts: LeafFacts, course: StepLiveness) -> SpanLiveSets:
    """Returns the live sets of all spans.

    Args:
        graph: Captured loss.
        facts: Parameters of the model.
        course: Liveness of the same loss.
    """
    kinds = _Kinds(graph, course)
    groups = np.zeros((len(facts.group_of), len(facts.groups)))
    groups[np.arange(len(facts.group_of)), list(facts.group_of)] = 1.0
    used, none = course.used, np.zeros((len(course.used), len(facts.groups)))
    turns = np.array([float(group.slices) for group, _ in facts.groups])
    looped = bool((turns > 1).any())
    works = [[kinds.table(pair[at]) for pair in course.works] for at in (0, 1)]
    starts = [np.cumsum([0, *map(len, several[:-1])]) for several in works]
    return SpanLiveSets(
        kinds=tuple(kinds.kinds),
        saved=np.array([kinds.full(row) for row in course.saved]),
        postponed=np.array([kinds.full(row) for row in course.postponed]),
        working=np.concatenate(works[0]),
        making=np.concatenate(works[1]),
        starts=(starts[0], starts[1]),
        gradients=np.concatenate([none, course.waited @ groups]),
        # The backward pass of a product reads the parameter and computes its gradient.
        held=np.concatenate(
            [(course.ahead >= 1) @ groups > 0, (used == 2) @ groups > 0]
        )
        * 1.0,
        made=np.concatenate([none, ((used >= 1) @ groups > 0) * 1.0]),
        reread=np.concatenate([course.reread @ groups, course.reread @ groups]),
        turns=turns,
        cast=(course.given | looped) @ groups,
        waiting=np.array(kinds.full(course.waits)),
    )


def _joined_at_the_end(
    layout: Layout, joined: Container[tuple[int, ...]], slid: Set[int]
) -> int:
    """Returns ``SavedTensorGroup.last``. Dimensions of windows are not joined."""
    result, last = 1, layout[-1] if layout else ()
    while last and result < len(layout):
        before = layout[-result - 1]
        if not before or not slid.isdisjoint(before) or before + last not in joined:
            break
        last = before + last
        result += 1
    return result


class _Kinds:
    def __init__(self, graph: Graph, course: StepLiveness) -> None:
        homes = [*(op.task_graph for op in graph.ops), 0]
        places: dict[tuple[int, int, int, int], int] = {}
        self.kind_of = [
            places.setdefault((layout, nbytes, homes[at], few), len(places))
            for layout, nbytes, at, few in course.entries
        ]
        pairs = [*course.layouts]
        self.kinds = [
            SavedTensorGroup(
                layout=layout,
                sizes=sizes,
                nbytes=nbytes,
                task_graph=home,
                count=1,
                ends=course.ends,
                last=_joined_at_the_end(layout, course.joined, course.slid),
                least_samples=few,
            )
            for number, nbytes, home, few in places
            for layout, sizes in [pairs[number]]
        ]

    def full(self, row: Counts) -> list[float]:
        full = [0.0] * len(self.kinds)
        for entry, times in row.items():
            full[self.kind_of[entry]] += times
        return full

    def table(self, rows: Sequence[Counts]) -> np.ndarray:
        table = dict.fromkeys(tuple(self.full(row)) for row in rows)
        return np.array([*table] or [(0.0,) * len(self.kinds)])


class AnalysedProgram:
    """Analyses of the operations of one captured loss, each computed once.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        compiler: Model of the compiler.

    Attributes:
        views: Operations and values in terms of logical dimensions.
        splits: Divisions of the TaskGraphs for sequence parallelism.
    """

    def __init__(
        self, graph: Graph, dims: Dimensions, compiler: CompilerProfile
    ) -> None:
        self.graph = graph
        self.dims = dims
        self.compiler = compiler
        self.views = Views(graph, dims)
        self.splits = SequenceSplits(graph, dims)
        self._courses: dict[tuple[bool, bool], StepLiveness] = {}
        self._known: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def once(self, what: Hashable, make: Callable[..., T], *args: object) -> T:
        """Returns ``make(*args)``, computed once per ``what`` and ``args``.

        Args:
            what: Name of the result, with all arguments that are compared by value.
            make: Function that computes the result.
            args: Arguments of ``make``, which are compared by identity.
        """
        key = what, *map(id, args)
        if key not in self._known:
            # Ids are unique only among live objects, so the arguments are kept.
            self._known[key] = args, make(*args)
        result: T = self._known[key][1]
        return result

    def rows(self, graph: Graph) -> OperationRows:
        """Returns the cost rows of the loss, with the TaskGraphs of ``graph``."""
        return self.once("rows", self.views.rows, graph)

    def live_sets(
        self, graph: Graph, facts: LeafFacts, course: StepLiveness
    ) -> SpanLiveSets:
        """Returns ``moments(graph, facts, course)``, computed once."""
        return self.once("live sets", moments, graph, facts, course)

    @functools.cached_property
    def waiting(self) -> dict[int, int]:
        """Number of copies of each activation that may be in host memory, by tensor."""
        return waiting_values(self.graph)

    @functools.cached_property
    def sliced(self) -> frozenset[int]:
        """Parameters that loops over layers read slice by slice."""
        return sliced_leaves(self.graph)

    @functools.cached_property
    def regathered(self) -> bool:
        """Whether gathering weights again in the backward pass changes the memory."""
        return bool(regathered_operands(self.graph, self.views.weight))

    @functools.cached_property
    def uses(self) -> TensorUses:
        """Producers and readers of each tensor, for all liveness analyses."""
        return TensorUses(self.graph, self.views.weight, self.compiler)

    def course(self, *, apart: bool, regathers: bool) -> StepLiveness:
        """Returns the liveness of a step's tensors.

        Args:
            apart: Whether activations are in host memory.
            regathers: Whether the backward pass gathers the weights of products again.
        """
        key = apart, regathers and self.regathered
        if key not in self._courses:
            waiting = self.waiting if apart else {}
            self._courses[key] = StepLiveness(
                self.dims, self.uses, waiting, regathers=key[1]
            )
        return self._courses[key]
