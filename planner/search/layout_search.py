"""Search over every mesh, table and ZeRO level for the fastest layout that fits.

The search enumerates the factorisations of the devices into ``data``, ``fsdp``,
``expert``, ``context`` and ``tensor``. For each, it enumerates the logical dimensions
that each model axis may shard in each TaskGraph, and the shardings of stored state.
``Evaluator`` evaluates all layouts as arrays. With very many meshes, the search
predicts only the time of layouts that are clearly slower than the best.

Predictions are not precise to half a percent. So among the plans within half a percent
of the fastest, the search chooses by least memory, then by least communication.

The module is long because ``Search`` is one class: enumeration and evaluation share the
request and the results of other searches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.topology import HIDES_UPDATES_ON
from whalejax.planner.cost.layout_cases import LayoutCases, LayoutGrid
from whalejax.planner.cost.operation_cost import CostSetting, row_flops, row_hits
from whalejax.planner.cost.step_time import TimeColumns
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.memory.live_sets import AnalysedProgram
from whalejax.planner.memory.saved_tensors import Residents, residents
from whalejax.planner.model.analysis import weight_homes
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.windows import Window
from whalejax.planner.plan_entries import Collective
from whalejax.planner.search.adasum_limits import may_combine, zero_levels
from whalejax.planner.search.evaluator import SEARCHED_AXES, Evaluator, MemoryColumns
from whalejax.planner.search.host_offload import UPDATED_IN_OTHER_SHARDS, Offload
from whalejax.planner.search.ranking import best_first
from whalejax.planner.search.request import LayoutCandidate as LayoutCandidate
from whalejax.planner.search.request import Request as Request
from whalejax.planner.sharding.layout import (
    SPATIAL_AXES,
    Table,
    divisors,
    replicas,
)
from whalejax.planner.sharding.metadata_constraints import pinned_axes
from whalejax.planner.sharding.operation_rows import OperationRows, Row
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafLayout,
    lay_out,
)
from whalejax.planner.sharding.sequence_parallel import SequenceSplit, shared_roles
from whalejax.planner.sharding.shard_counts import ignores_pins, sharded_shares
from whalejax.planner.sharding.strategies import (
    NOTHING_TO_SPLIT,
    Options,
    choices,
    sharded_by_split,
)


PLANNED_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh axes whose sizes are searched, outermost first. ``SPATIAL_AXES`` follow on
meshes that shard the space of samples.
"""

BATCH_DOES_NOT_DIVIDE = "the batch does not divide by the devices that share it"
NO_SEQUENCE = "no dimension for a context axis"
NO_SPACE = "no dimension for a spatial axis"
SPACE_DOES_NOT_DIVIDE = "an extent does not divide by its spatial axis"
SEQUENCE_DOES_NOT_DIVIDE = "the sequence does not divide by context"
IGNORES_A_PIN = "metadata fixes a dimension that the axis does not divide"
HALO_IS_WIDER = "a halo is wider than a device's part of the dimension"
"""Reasons to refuse a mesh."""

MANY_SPACES = 1000
"""Number of meshes with spatial axes above which the search skips some of them."""

SPACE_SLACK = 1.1
"""Multiple of the best step time up to which plans that shard space are evaluated. It
exceeds the margins for ties and for listed alternatives.
"""

LISTED = 40
"""Largest number of meshes to evaluate whatever their times."""

MOST_LISTED = 512
"""Largest number of layouts to evaluate whatever their times."""

NEAR = 1.02
"""Multiple of the best step time up to which plans of very many meshes are evaluated.
It exceeds the margin for ties.
"""

MANY_TABLES = 8
"""Largest number of different tables in a block of layouts. A block with more keeps
only the layouts with one of them.
"""

ROUNDED = 2**10
"""Largest rounding error of memory sums, in bytes."""

FIRST_BLOCK, BLOCK = 32, 256
"""Number of layouts in a block, whose memory is computed together. The first number is
for the first block while the step time has no bound, the second for other blocks.
"""

MOST_PAIRS = 4096
"""Largest number of (layout, number of micro-batches) pairs to evaluate at once."""

LEAST_SHARE = 0.5
"""Smallest fraction of the parameters' bytes that a storage axis must shard."""


def meshes(
    num_devices: int, context: int = 1, space: Mapping[str, int] | None = None
) -> Iterator[dict[str, int]]:
    """Yields every factorisation of the devices into mesh axes, outermost axis first.

    Args:
        num_devices: Product of all axis sizes.
        context: Size of the ``context`` axis, a divisor of ``num_devices``; default: 1.
        space: Sizes of spatial axes, of which meshes omit those of size 1; default:
            none.
    """
    sizes = divisors(num_devices)
    spatial = {a: (space or {}).get(a, 1) for a in SPATIAL_AXES}
    spatial = {axis: size for axis, size in spatial.items() if size > 1}
    inner = context * math.prod(spatial.values())
    for tensor, expert in itertools.product(sizes, sizes):
        rest, over = divmod(num_devices, tensor * expert * inner)
        if over:
            continue
        for fsdp in sizes:
            if rest % fsdp == 0:
                yield {
                    "data": rest // fsdp,
                    "fsdp": fsdp,
                    "expert": expert,
                    "context": context,
                    **spatial,
                    "tensor": tensor,
                }


def fixed_space(mesh: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the spatial axes that the user fixes to sizes above 1."""
    given = mesh or {}
    return {a: given[a] for a in SPATIAL_AXES if given.get(a, 1) > 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WideHalo:
    """Operation whose halo is wider than the neighbouring device's part.

    Attributes:
        axis: Spatial axis that shards the dimension.
        row: Cost row of the operation.
        halo: Number of elements that the operation reads from one neighbour.
        size: Length of the unsharded dimension.
    """

    axis: str
    row: Row
    halo: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layouts:
    """Layouts that a search evaluates.

    ``cases`` have the smallest number of micro-batches of each layout, ``counts`` all
    possible numbers.
    """

    cases: LayoutCases
    counts: Sequence[tuple[int, ...]]
    meshes: Sequence[dict[str, int]]

    def take(self, rows: np.ndarray) -> _Layouts:
        if len(rows) == len(self.cases):
            return self
        return dataclasses.replace(self, cases=self.cases.take(rows))

    def counts_of(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        return [self.counts[place] for place in self.cases.row[rows].tolist()]

    def at(self, rows: np.ndarray, place: int) -> LayoutCases:
        count = np.array([counts[place] for counts in self.counts_of(rows)])
        return self.cases.take(rows).with_count(count)


@dataclasses.dataclass(frozen=True, slots=True)
class NearLayouts:
    """Layouts that may be near the best if they also shard the sequence.

    Attributes:
        meshes: Axis sizes of each mesh, one mesh per row.
        row: Index of each layout's mesh.
        likely, least: Likely step seconds of each layout, and a lower bound on them.
    """

    meshes: Sequence[Mapping[str, int]]
    row: np.ndarray
    likely: np.ndarray
    least: np.ndarray

    def sizes(self, best: float) -> set[tuple[int, ...]]:
        """Returns the axis sizes of the meshes that are likely to be fast enough."""
        rows = np.unique(self.row[self.likely <= best]).tolist()
        return {tuple(self.meshes[row].values()) for row in rows}

    def least_of_others(self, known: Collection[tuple[int, ...]]) -> float:
        """Returns the least step seconds of meshes whose sizes are not in ``known``."""
        rows = np.unique(self.row).tolist()
        others = [row for row in rows if tuple(self.meshes[row].values()) not in known]
        return float(self.least[np.isin(self.row, others)].min(initial=np.inf))


_Waiting = tuple[_Layouts, TimeColumns, np.ndarray]
"""Layouts, their times, and indices of layouts to evaluate, the fastest first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLayouts:
    """Layouts that searches of several programs of one loss share.

    Attributes:
        key, options: Program and options that determine the layouts.
        layouts: Layouts that searches made.
        refused: Number of refused meshes, by reason.
    """

    key: object
    options: Options
    layouts: _Layouts
    refused: Mapping[str, int]


class Search:
    """Search for the best layout of one captured loss.

    Attributes:
        graph, dims, rows: Graph of the loss, its logical dimensions and its cost rows.
        program: Analysed operations of the loss.
        hosting: Limits on the state in host memory.
        split: Division of TaskGraphs for sequence parallelism, or None. A search with a
            division takes the options of the search ``beside``, which has none.
        grids: Layouts that searches of other programs share.
        sizes: Axis sizes of the meshes to evaluate; None for all meshes.
        named_axes: Mesh axes that metadata names.
        scored: Evaluated plans. With very many meshes, only plans that fit, or the
            nearest to fitting.
        weighed: Number of evaluated layouts.
        follows: Whether there are very many meshes, so that ``bound`` follows the best
            plan.
        least_lacking: Step time of the fastest layout that lacks memory with its fewest
            micro-batches.
        least_skipped: Lower bound on the step times of skipped layouts.
        best: Step time of the best plan that other searches have found.
        slack: Multiple of the best step time up to which layouts are evaluated; with
            very many meshes at most ``NEAR``.
        bound: Step time above which layouts are not evaluated. With very many meshes,
            it falls as better plans are found.
        refused: Number of meshes that each reason ruled out.
    """

    def __init__(
        self,
        graph: Graph,
        dims: Dimensions,
        cluster: Cluster,
        request: Request,
        *,
        beside: Search | None = None,
        split: SequenceSplit | None = None,
        best: float = math.inf,
        slack: float = 1.0,
        program: AnalysedProgram | None = None,
        grids: MutableSequence[KnownLayouts] | None = None,
        sizes: Collection[tuple[int, ...]] | None = None,
    ) -> None:
        self.sizes = sizes
        self.graph = graph
        self.best, self.slack = best, slack
        self.bound = best * slack
        self.grids: MutableSequence[KnownLayouts] = [] if grids is None else grids
        self.split = split
        self.dims = dims
        self.cluster = cluster
        self.request = request
        known = program if beside is None else beside.program
        self.program: AnalysedProgram = known or AnalysedProgram(
            graph, dims, cluster.compiler
        )
        self.rows: OperationRows = self.program.rows(graph)
        self.options: Options = (
            self.program.once(
                ("choices", request.default),
                lambda graph: choices(graph, dims, self.rows, request.default),
                graph,
            )
            if beside is None
            else beside.options
        )
        self.facts: LeafFacts = (
            self._facts()
            if beside is None
            else self.program.once("split", self._split_facts, beside.facts, graph)
        )
        self.evaluator = Evaluator(
            graph=graph,
            dims=dims,
            cluster=cluster,
            request=request,
            program=self.program,
            rows=self.rows,
            facts=self.facts,
        )
        self.hosting = self.evaluator.hosting
        self.named_axes = pinned_axes(graph)
        self._begin(beside)

    def _facts(self) -> LeafFacts:
        narrowed, cast = self.request.narrowed, self.request.cast_bytes
        optimizer = self.request.optimizer

        def facts(graph: Graph) -> LeafFacts:
            return LeafFacts.of(
                graph,
                self.dims,
                self.rows.reading,
                optimizer,
                narrowed=narrowed,
                cast_bytes=cast,
            ).with_stored_axes(self.options.stored)

        what = "facts", self.request.default, narrowed, cast, optimizer.key
        return self.program.once(what, facts, self.graph)

    def _split_facts(self, facts: LeafFacts, graph: Graph) -> LeafFacts:
        return facts.at(weight_homes(graph, self.rows.weight))

    def _begin(self, beside: Search | None) -> None:
        self._combined: dict[object, tuple[list[dict[int, Table]], bool]] = {}
        self._divided: dict[object, dict[int, Table] | None] = {}
        self._distinct: dict[object, dict[int, Table]] = {}
        self.scored: list[LayoutCandidate] = []
        self.weighed = 0
        self.follows: bool = beside is not None and beside.follows
        self.least_lacking = self._lacks = self.least_skipped = math.inf
        self._nearest: LayoutCandidate | None = None
        self._lacking: list[_Waiting] = []
        self._postponed: list[_Waiting] = []
        self._passed: list[_Waiting] = []
        self._timed: dict[int, tuple[_Layouts, TimeColumns | None, np.ndarray]] = {}
        self._has_fit = False
        self.refused: dict[str, int] = {}

    @functools.cached_property
    def residents(self) -> Residents:
        """Tensors that live throughout a pass."""
        return residents(
            self.graph,
            self.dims,
            self.rows.weight,
            copies_kernels=self.cluster.compiler.copies_kernels,
        )

    def run(self) -> list[LayoutCandidate]:
        """Evaluates all layouts.

        Returns:
            Plans that fit, the best first. If none fits, the result is empty, and
            ``scored`` has the others.
        """
        self.search_layouts()
        self.use_host_memory(math.inf)
        return ranked([s for s in self.scored if s.fits])

    def search_layouts(self) -> None:
        """Evaluates every layout with the least possible offload.

        If many layouts lack memory and the step time has no bound yet, most of them are
        left for ``resume`` or ``use_host_memory``.
        """
        self._score_meshes(self._every_mesh())
        if self._wants_space():
            self._share_space()

    def _every_mesh(self, devices: int | None = None) -> list[dict[str, int]]:
        fixed = (self.request.mesh or {}).get("context")
        sizes = [fixed or 1]
        devices = devices or self.request.num_devices
        if fixed is None and self.options.sequence:
            sizes += [n for n in divisors(devices) if n > 1]
        every = (m for n in sizes for m in self.meshes(n, devices=devices))
        return [m for m in every if not self.sizes or tuple(m.values()) in self.sizes]

    def at_every_count(self, allowed: Mapping[int, Collection[int]]) -> LayoutCases:
        """Returns every layout with every number of micro-batches, without evaluation.

        Args:
            allowed: Possible numbers of micro-batches, by number of devices of a mesh.
        """
        layouts = self._layouts([m for n in allowed for m in self._every_mesh(n)])
        layouts = layouts.take(self._allowed(layouts.cases))
        every = np.arange(len(layouts.cases))
        devices = layouts.cases.devices.tolist()
        counts = [
            [n for n in several if n in allowed[size]]
            for several, size in zip(layouts.counts_of(every), devices, strict=True)
        ]
        each = np.repeat(every, [len(several) for several in counts])
        count = np.array([n for several in counts for n in several], dtype=np.int64)
        return layouts.cases.take(each).with_count(count)

    def _share_space(self) -> None:
        """Evaluates every mesh whose devices shard the space of samples.

        Meshes without model axes come first, as their times bound the others. With very
        many meshes, meshes with larger model axes than those of a fitting plan are
        skipped.
        """
        every = [m for space in self.spaces() for m in self.meshes(space=space)]
        every.sort(key=lambda m: (m["tensor"] * m["expert"], m["fsdp"]))
        seen, most = len(self.scored), math.inf
        for mesh in every:
            model = mesh["tensor"] * mesh["expert"]
            if model > most:
                self.least_skipped = self._evenly_shared()
                break
            self._score_meshes([mesh])
            fresh, seen = self.scored[seen:], len(self.scored)
            fitting = [one.time.step_seconds for one in fresh if one.fits]
            self.bound = min(self.bound, min(fitting, default=math.inf) * SPACE_SLACK)
            if fitting and len(every) > MANY_SPACES:
                most = model

    @property
    def has_one_sample(self) -> bool:
        """Whether even the largest micro-batch has one sample."""
        graph = self.graph
        count = self.request.num_micro_batches or graph.num_micro_batches
        return graph.batch_size * graph.num_micro_batches == count

    def _evenly_shared(self) -> float:
        ones = dict.fromkeys(SEARCHED_AXES, 1)
        tables = next(iter(self._combinations(ones, 1, 1, (1, 1, 1))), None)
        if tables is None:
            return 0.0  # The annotations allow no layout on one device.
        case = self.evaluator.case(ones, tables, 0, self.graph.num_micro_batches)
        compute = self.evaluator.times(case).terms["compute"]
        return float(compute[0]) / self.request.num_devices

    def _wants_space(self) -> bool:
        """Returns whether sharding the space of samples may pay off.

        It may if samples do not divide by the devices, if memory is short, or if
        weights have a spatial dimension, as in a dense layer after convolutions.
        Otherwise sharding a sample only adds communication. If the user fixed spatial
        axes, nothing else is tried.
        """
        request = self.request
        if not any(self.options.space.values()) or self.split is not None:
            return False
        if fixed_space(request.mesh) or request.num_devices == 1:
            return False
        batch = self.graph.batch_size * self.graph.num_micro_batches
        batch //= request.num_micro_batches or 1
        few = batch % request.num_devices != 0
        roles = (r for of in self.options.space.values() for r in of)
        weights = any(self.dims.roles[r].of_weights for r in roles)
        short = not self.scored or self.least_lacking < math.inf
        return few or weights or short

    def spaces(self) -> list[dict[str, int]]:
        """Returns the possible sizes of the spatial axes, by the model's extents."""
        fixed, count = self.request.mesh or {}, self.request.num_devices
        choices: list[list[int]] = []
        for axis in SPATIAL_AXES:
            roles = [self.dims.roles[r] for r in self.options.space[axis]]
            common = math.gcd(*(r.divisible for r in roles)) if roles else 1
            sizes = [n for n in divisors(count) if common % n == 0]
            choices.append([n for n in sizes if n == fixed.get(axis, n)] or [1])
        every: list[dict[str, int]] = [
            dict(zip(SPATIAL_AXES, sizes, strict=True))
            for sizes in itertools.product(*choices)
        ]
        spaces = [one for one in every if 1 < math.prod(one.values()) <= count]
        return [space for space in spaces if count % math.prod(space.values()) == 0]

    def meshes(
        self,
        context: int | None = None,
        space: Mapping[str, int] | None = None,
        devices: int | None = None,
    ) -> list[dict[str, int]]:
        """Returns the meshes that obey the user's ``mesh``, annotations and metadata.

        They give sizes above 1 to as many as possible of the axes that metadata names.

        Args:
            context: Size of the ``context`` axis; default: the size that the user
                fixed.
            space: Sizes of the spatial axes; default: the sizes that the user fixed.
            devices: Number of devices of a mesh; default: all.
        """
        fixed = self.request.mesh or {}
        result = [
            mesh
            for mesh in meshes(
                devices or self.request.num_devices,
                context or fixed.get("context", 1),
                fixed_space(fixed) if space is None else space,
            )
            if all(mesh.get(axis, 1) == size for axis, size in fixed.items())
            and replicas(mesh) % self.request.copies == 0
            and may_combine(self.request, mesh, self.cluster)
        ]

        def obeyed(mesh: Mapping[str, int]) -> int:
            return sum(mesh.get(axis, 1) > 1 for axis in self.named_axes)

        most = max(map(obeyed, result), default=0)
        return [mesh for mesh in result if obeyed(mesh) == most]

    def _tables(self, mesh: Mapping[str, int]) -> Iterator[dict[int, Table]]:
        reason = self._no_context(mesh) or self._no_space(mesh)
        reason = reason or sharded_by_split(self.options, mesh)
        reason = self.hosting.nothing or reason
        if reason:
            self._refuse(reason)
            return
        size = self.graph.batch_size * self.graph.num_micro_batches
        size //= self.request.num_micro_batches or 1
        space = tuple(mesh.get(axis, 1) for axis in SPATIAL_AXES)
        combinations = self._combinations(mesh, mesh["expert"], mesh["tensor"], space)
        for index, tables in enumerate(combinations):
            if self.split is not None and not self._serves(self.split, mesh, tables):
                continue
            # Only these sizes of a mesh decide whether the batch divides.
            key = mesh["data"] * mesh["fsdp"], mesh["expert"], mesh["tensor"], space
            if (index, key) not in self._divided:
                apart = self._set_apart(tables)
                fitting = self.options.that_divide(apart, mesh, size)
                self._divided[index, key] = self._shared_tables(fitting)
            divided = self._divided[index, key]
            if divided is None:
                self._refuse(BATCH_DOES_NOT_DIVIDE)
            else:
                yield divided

    def _shared_tables(
        self, tables: dict[int, Table] | None
    ) -> dict[int, Table] | None:
        """Returns one object for equal tables, which are evaluated together."""
        if tables is None:
            return None
        key = tuple((home, tuple(sorted(t.items()))) for home, t in tables.items())
        return self._distinct.setdefault(key, tables)

    def _set_apart(self, tables: dict[int, Table]) -> dict[int, Table]:
        if self.split is None:
            return tables
        return self.split.tables(tables, self.options.batch, self.options.sequence)

    def _combinations(
        self,
        mesh: Mapping[str, int],
        expert: int,
        tensor: int,
        space: tuple[int, ...],
    ) -> list[dict[int, Table]]:
        key = expert, tensor, space
        if key not in self._combined:
            lists = [self.options.tables(g, mesh) for g in self.options.order]
            combinations = (
                dict(zip(self.options.order, some, strict=True))
                for some in itertools.product(*lists)
            )
            result = [c for c in combinations if self._uses_model_axes(mesh, c)]
            self._combined[key] = result, all(lists)
        result, some = self._combined[key]
        if not some:
            self._refuse(NOTHING_TO_SPLIT)
        return result

    def _serves(
        self, split: SequenceSplit, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> bool:
        """Returns whether products are sharded as in the split."""
        parts = mesh["context"] * mesh["tensor"]
        sizes = [self.options.sizes[r] for r in self.options.sequence]
        return (
            mesh["tensor"] > 1
            and shared_roles(tables, self.options.batch) == split.shared
            and all(size % parts == 0 for size in sizes)
        )

    def _no_context(self, mesh: Mapping[str, int]) -> str:
        """Returns why a mesh's context axis shards no sequence, or an empty text."""
        if mesh["context"] == 1:
            return ""
        if not self.options.sequence:
            return NO_SEQUENCE
        sizes = [self.options.sizes[r] for r in self.options.sequence]
        divides = all(size % mesh["context"] == 0 for size in sizes)
        return "" if divides else SEQUENCE_DOES_NOT_DIVIDE

    def _no_space(self, mesh: Mapping[str, int]) -> str:
        """Returns why a mesh's spatial axes shard no space, or an empty text."""
        for axis in SPATIAL_AXES:
            size = mesh.get(axis, 1)
            if size == 1:
                continue
            roles = [self.dims.roles[r] for r in self.options.space[axis]]
            if not roles:
                return NO_SPACE
            if any(role.divisible % size for role in roles):
                return SPACE_DOES_NOT_DIVIDE
        return HALO_IS_WIDER if any(self.wide_halos(mesh)) else ""

    def scaled_space(self, mesh: Mapping[str, int]) -> set[str]:
        """Returns the spatial axes whose extents all windows scale by fixed factors.

        A change of such an extent changes all resolutions of the model by one factor.

        Args:
            mesh: Sizes of the spatial axes to check.
        """
        shared = ((w, axis, ends) for _, w, axis, ends in self._shared_windows(mesh))
        # Around attention, some operations read the unsharded dimension.
        whole = (
            (window, window.space, _ends(row, window))
            for row in self.rows.ops
            for window in row.windows
        )
        uneven = {
            axis
            for window, axis, (size, result) in (*shared, *whole)
            if size * window.spread != result * window.stride
        }
        return set(mesh) - uneven

    def wide_halos(self, mesh: Mapping[str, int]) -> Iterator[WideHalo]:
        """Yields the operations whose halo is wider than the neighbour's part."""
        for row, window, axis, (size, result) in self._shared_windows(mesh):
            halo = max(window.halo(size, result, mesh[axis]))
            if halo > size // mesh[axis]:
                yield WideHalo(axis=axis, row=row, halo=halo, size=size)

    def _shared_windows(
        self, mesh: Mapping[str, int]
    ) -> Iterator[tuple[Row, Window, str, tuple[int, int]]]:
        """Yields (operation, window, axis, extents) along sharded space."""
        axes = {
            role: axis
            for axis in SPATIAL_AXES
            if mesh.get(axis, 1) > 1
            for role in self.options.space[axis]
        }
        for row in self.rows.ops if axes else ():
            for window in row.windows:
                atoms = row.operands[0].layout[window.dim]
                axis = next((axes[role] for role in atoms if role in axes), None)
                if axis is not None:
                    yield row, window, axis, _ends(row, window)

    def _refuse(self, reason: str, times: int = 1) -> None:
        if times:
            self.refused[reason] = self.refused.get(reason, 0) + times

    def _uses_model_axes(
        self, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> bool:
        """Returns whether each model axis shards more than the batch in some TaskGraph.

        If an axis does not, a mesh with its devices in ``data`` instead is equivalent.
        """
        batch = self.evaluator.batch_roles
        for axis in ("expert", "tensor"):
            uses = (t.get(axis, ()) for t in tables.values())
            if mesh[axis] > 1 and all(set(r) <= batch for r in uses):
                return False
        return True

    # Evaluation.

    def _score_meshes(self, every: Sequence[dict[str, int]]) -> None:
        """Evaluates meshes under all of their tables, the fastest first."""
        layouts = self._layouts(every)
        layouts = layouts.take(self._allowed(layouts.cases))
        if not len(layouts.cases):
            return
        many = len(every) > LISTED or len(layouts.cases) > MOST_LISTED
        self.follows = self.follows or many
        if self.follows:
            self.bound = min(self.bound, self.best * NEAR)
        splits = self.split is None and self.request.sequence_parallel is not False
        near, times = self.evaluator.near(
            layouts.cases,
            self.bound,
            sequence_parallel=splits and bool(self.options.sequence),
        )
        self._score_layouts(layouts.take(near), times)

    def _score_layouts(self, layouts: _Layouts, times: TimeColumns) -> None:
        """Evaluates layouts with the least possible offload, the fastest first."""
        order = np.argsort(times.step, kind="stable")
        first = next(self.hosting.options())
        if self.follows and self.bound == math.inf:
            some, order = order[:FIRST_BLOCK], order[FIRST_BLOCK:]
            left = self._score_group(layouts, times, some, first)
            self._lacking.append((layouts, times, left))
            if self.bound == math.inf:
                # Another search may soon bound the step time.
                self._postponed.append((layouts, times, order))
                return
        left = self._score_group(layouts, times, order, first)
        self._lacking.append((layouts, times, left))

    def resume(self, best: float) -> None:
        """Evaluates the layouts that ``search_layouts`` postponed.

        Args:
            best: Step time of the best plan of all searches.
        """
        slack = min(self.slack, NEAR) if self.follows else self.slack
        self.bound = min(self.bound, best * slack)
        postponed, self._postponed = self._postponed, []
        for layouts, times, order in postponed:
            first = next(self.hosting.options())
            left = self._score_group(layouts, times, order, first)
            self._lacking.append((layouts, times, left))

    def _near_in_host_memory(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        groups: Sequence[Sequence[Offload]],
    ) -> np.ndarray:
        """Returns the indices of cases that can be fast enough with some offload."""
        if self.bound == math.inf or not groups:
            return rows
        cases, here = layouts.cases.take(rows), times.take(rows)
        # More offload needs more transfers.
        moves = [self.evaluator.offload_seconds(cases, o, here) for o in groups[0]]
        near = here.step + np.min(moves, axis=0) <= self.bound
        result: np.ndarray = rows[near]
        return result

    def far_from_fitting(self) -> bool:
        """Returns whether even the smallest layouts lack memory for permanent state.

        Activations and optimizer state do not count. The ``FIRST_BLOCK`` smallest of
        each block of layouts are evaluated.
        """
        if any(one.fits for one in self.scored):
            return False
        waiting = [one for one in (*self._postponed, *self._lacking) if len(one[-1])]
        for layouts, _, rows in waiting:
            least = self.evaluator.least_memory(layouts.cases.take(rows), ())
            some = rows[np.argsort(least, kind="stable")[:FIRST_BLOCK]]
            memory = self.evaluator.memory(layouts.at(some, -1), ())
            movable = memory.terms["activations"] + memory.terms["optimizer"]
            if (memory.total - movable <= self.cluster.memory_bytes).any():
                return False
        return bool(waiting)

    def fits_without_state(self, times: float) -> bool:
        """Returns whether a layout fits in scaled memory without its optimizer state.

        Activations are offloaded if that helps. Offload of the optimizer state is not
        evaluated, as that is slow for many parameters.

        Args:
            times: Available memory, as a multiple of a device's memory.
        """
        room = times * self.cluster.memory_bytes
        sets: list[Offload] = [()]
        if self.program.waiting:
            sets.append(("activations",))
        waiting = [one for one in (*self._postponed, *self._lacking) if len(one[-1])]
        for layouts, known, rows in waiting:
            for place, offload in itertools.product((0, -1), sets):
                cases = layouts.at(rows, place)
                memory = self._memory(layouts, known, rows, cases, offload)
                if (memory.total - memory.terms["optimizer"] <= room).any():
                    return True
        return any(one.fits for one in self.scored)

    def near_sequence_parallel(
        self, best: float
    ) -> dict[frozenset[int], list[NearLayouts]]:
        """Returns the layouts that may gain by sharding the sequence between products.

        Args:
            best: Largest lower bound on the step seconds of layouts to return.

        Returns:
            Layouts by the logical dimensions that ``tensor`` shards in their products.
            The dimensions with the likely fastest layout come first.
        """
        sequence_parallel: dict[frozenset[int], list[NearLayouts]] = {}

        def add(tables: Mapping[int, Table], one: NearLayouts) -> None:
            roles = shared_roles(tables, self.options.batch)
            if roles:
                sequence_parallel.setdefault(roles, []).append(one)

        waiting = (*self._lacking, *self._postponed, *self._passed)
        for layouts, times, lacking in waiting:
            grid, row = layouts.cases.grid, layouts.cases.row[lacking]
            tensor = grid.mesh["tensor"][row]
            seconds = times.take(lacking).sequence_parallel(tensor)
            near = np.flatnonzero((tensor > 1) & (seconds[1] <= best))
            row, (likely, least) = row[near], (one[near] for one in seconds)
            table = grid.table[row]
            for index in np.unique(table).tolist():
                some = np.flatnonzero(table == index)
                one = NearLayouts(layouts.meshes, row[some], likely[some], least[some])
                add(grid.tables[index], one)
        for plan in self.scored:
            likely, least = np.array([plan.sequence_parallel_seconds]).T
            if plan.fits and plan.mesh["tensor"] > 1 and least[0] <= best:
                first = np.zeros(1, dtype=np.int64)
                add(plan.tables, NearLayouts([plan.mesh], first, likely, least))
        each = {
            key: min(o.likely.min() for o in some)
            for key, some in sequence_parallel.items()
        }
        return {
            key: sequence_parallel[key]
            for key in sorted(each, key=lambda key: each[key])
        }

    def use_host_memory(self, best: float) -> None:
        """Evaluates layouts that lack memory again, with more offload.

        Some of them also need more than the fewest micro-batches.

        Args:
            best: Step time of the best plan of all searches.
        """
        self.resume(best)
        for layouts, times, lacking in self._lacking:
            step = times.step
            left = lacking[step[lacking] <= self.bound]
            _, *others = self.hosting.options() if len(left) else [[]]
            left = self._near_in_host_memory(layouts, times, left, others)
            others = others if len(left) else []
            if len(others) > 1 and not self.cluster.compiler.reduces_at_end:
                # A case that fits neither with the fewest nor with the most
                # micro-batches is not tried with numbers between them.
                hopeful = self._fits_in_corner(layouts, times, left, others)
                self._score_group(layouts, times, left[~hopeful], others[-1])
                left = left[hopeful]
            for group in others:
                left = self._score_group(layouts, times, left, group)
        nothing = best == math.inf and not self._has_fit
        if self.follows and self.weighed and nothing:
            if self._nearest is None:
                # Parameters fit in no layout, so the smallest layouts are evaluated.
                *_, group = self.hosting.options()
                self.keep_nearest(group[-1])
            else:
                self.scored.append(self._nearest)
        self._passed += self._lacking
        self._lacking = []

    def on_paper(self, best: float) -> list[LayoutCandidate]:
        """Returns plans that offload more than the executors of this version support.

        Args:
            best: Largest seconds of a step.
        """
        paper = copy.copy(self)
        paper.request = dataclasses.replace(self.request, estimate=True)
        paper.evaluator = dataclasses.replace(self.evaluator, request=paper.request)
        paper.hosting = paper.evaluator.hosting
        paper.scored, paper.bound = [], best
        for layouts, times, lacking in self._passed:
            left = lacking[times.step[lacking] <= best]
            group = paper.hosting.on_paper() if len(left) else []
            if group:
                left = paper._near_in_host_memory(layouts, times, left, [group])
                paper._score_group(layouts, times, left, group)
        return [o for o in paper.scored if o.fits and o.time.step_seconds <= best]

    def _may_hold(self, cases: LayoutCases, offload: Offload) -> np.ndarray:
        """Returns whether parameters and optimizer state may fit, by case.

        With few meshes all cases count, as errors report their missing memory.
        """
        if not self.follows:
            return np.ones(len(cases), dtype=bool)
        least = self.evaluator.least_memory(cases, offload)
        result: np.ndarray = least <= self.cluster.memory_bytes + ROUNDED
        return result

    def keep_nearest(self, offload: Offload = ()) -> None:
        """Adds layouts that lack the least memory to ``scored``, after none fitted.

        With few meshes, ``scored`` already has those that were evaluated.

        Args:
            offload: Names of the offloaded memory terms of these layouts.
        """
        waiting = (*self._postponed, *(self._lacking if self.follows else ()))
        for layouts, times, rows in waiting:
            if len(rows):
                cases = layouts.cases.take(rows)
                least = self.evaluator.least_memory(cases, offload)
                some = rows[np.argsort(least, kind="stable")[:FIRST_BLOCK]]
                self.scored += self._with_offload(layouts, times, some, offload)[0]
        if self._nearest is not None:
            self.scored.append(self._nearest)

    def _score_group(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        group: Sequence[Offload],
    ) -> np.ndarray:
        """Evaluates layouts with each of several offloads, the fastest first.

        Returns the indices of layouts that are too slow, or do not fit with the fewest
        micro-batches.
        """
        step, left = times.step, rows
        size = FIRST_BLOCK if self.bound == math.inf else BLOCK
        lacking = []
        while len(left) and step[left[0]] <= self.bound:
            some = left[step[left] <= self.bound]
            table = layouts.cases.table[some]
            if len(np.unique(table[:size])) > MANY_TABLES:
                # Memory is computed together for cases with equal tables.
                some = some[table == table[0]]
            some = some[:size]
            result, enough = self._in_host_memory(layouts, times, some, group)
            self.scored += result
            best = min(
                (s.time.step_seconds for s in result if s.fits), default=math.inf
            )
            if self.follows:
                self.bound = min(self.bound, best * min(self.slack, NEAR))
            lacking.append(some[~enough])
            left, size = left[~np.isin(left, some)], BLOCK
        every = np.concatenate([*lacking, left])
        return every[np.argsort(step[every], kind="stable")]

    def score(self, mesh: dict[str, int], tables: dict[int, Table]) -> None:
        """Evaluates one mesh with one table per TaskGraph at every ZeRO stage.

        The results are added to ``scored``.
        """
        layouts = self._on_grid([(mesh, tables)])
        layouts = layouts.take(self._allowed(layouts.cases))
        if len(layouts.cases):
            self._score_layouts(layouts, self.evaluator.times(layouts.cases))
            self.use_host_memory(math.inf)

    def _layouts(self, every: Sequence[dict[str, int]]) -> _Layouts:
        """Returns the layouts of meshes, from the shared ``grids`` if possible."""
        size = self.graph.batch_size, self.graph.num_micro_batches
        apart = self.split and (self.split.shared, self.split.parents)
        asked = self.request.zero, self.request.num_micro_batches, self.request.combine
        sizes = [tuple(mesh.items()) for mesh in every]
        key = sizes, size, apart, self.hosting.nothing, asked
        options = dataclasses.replace(self.options, homes={})
        for known in self.grids:
            if known.key == key and known.options == options:
                for reason, times in known.refused.items():
                    self._refuse(reason, times)
                return known.layouts
        before, self.refused = self.refused, {}
        pairs = [
            (mesh, tables)
            for mesh in every
            for tables in self._tables(mesh)
            if self._micro_batches(mesh, tables)
        ]
        layouts = self._on_grid(pairs)
        refused, self.refused = self.refused, before
        for reason, times in refused.items():
            self._refuse(reason, times)
        one = KnownLayouts(key=key, options=options, layouts=layouts, refused=refused)
        if len(every) > 1:
            self.grids.append(one)
        return layouts

    def _on_grid(
        self, pairs: Sequence[tuple[dict[str, int], dict[int, Table]]]
    ) -> _Layouts:
        distinct: dict[int, int] = {}
        table, levels, counts = [], [], []
        for mesh, tables in pairs:
            table.append(distinct.setdefault(id(tables), len(distinct)))
            counts.append(self._micro_batches(mesh, tables))
            levels.append(self._zero_levels(mesh))
        first = {index: place for place, index in reversed([*enumerate(table)])}
        meshes_of = [mesh for mesh, _ in pairs]
        grid = LayoutGrid(
            tables=[pairs[first[index]][1] for index in range(len(distinct))],
            table=np.array(table, dtype=np.int64),
            mesh={
                axis: np.array([m.get(axis, 1) for m in meshes_of], dtype=np.int64)
                for axis in SEARCHED_AXES
            },
        )
        rows = np.repeat(np.arange(len(pairs)), [len(zeros) for zeros in levels])
        cases = LayoutCases(
            grid=grid,
            row=rows,
            zero=np.array([z for zeros in levels for z in zeros], dtype=np.int64),
            count=np.array([parts[0] for parts in counts], dtype=np.int64)[rows],
        )
        return _Layouts(cases=cases, counts=counts, meshes=meshes_of)

    def _allowed(self, cases: LayoutCases) -> np.ndarray:
        number = len(cases)
        ignores = np.zeros(number, dtype=bool)
        shares = {axis: np.ones(number) for axis in ("fsdp", "data")}
        for rows, cuts in cases.cuts(self.facts):
            ignores[rows] = ignores_pins(self.facts, cuts)
            for axis, share in shares.items():
                share[rows] = sharded_shares(self.facts, cuts, axis)
        ignores &= cases.mesh["fsdp"] > 1
        self._refuse(IGNORES_A_PIN, int(ignores.sum()))
        allowed = ~ignores
        fixed = {*(self.request.mesh or {}), *self.named_axes}
        stores = {"fsdp": cases.mesh["fsdp"] > 1, "data": cases.zero > 0}
        for axis, here in stores.items():
            asked = axis in fixed or (axis == "data" and self.request.zero)
            # Storage axes that shard few of the parameters are not worth a plan.
            little = allowed & here & (shares[axis] < LEAST_SHARE)
            if not asked:
                why = f"{axis} would shard less than half of the parameters"
                self._refuse(why, int(little.sum()))
                allowed &= ~little
        return np.flatnonzero(allowed)

    def _zero_levels(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        levels: tuple[int, ...] = (0, 1, 2) if mesh["data"] > 1 else (0,)
        if self.request.zero is not None:
            levels = (self.request.zero,)
        return zero_levels(self.request, levels)

    def _fits_in_corner(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        groups: Sequence[Sequence[Offload]],
    ) -> np.ndarray:
        """Returns whether cases fit with the fewest or the most micro-batches.

        Offloaded optimizer state needs no device memory. So offloads without it are
        tried only if no offload includes it, or if host memory is short.
        """
        result = np.zeros(len(rows), dtype=bool)
        hosts = np.zeros(len(rows), dtype=bool)
        every = [offload for group in groups for offload in group]
        with_state = [one for one in every if "optimizer" in one]
        others = [one for one in every if "optimizer" not in one]
        for offload in (*with_state, *others):
            for place in (0, -1):
                stateless = offload in others and bool(with_state)
                left = np.flatnonzero(~result & (hosts | (not stateless)))
                if len(left):
                    cases = layouts.at(rows[left], place)
                    memory = self._memory(layouts, times, rows[left], cases, offload)
                    device, host = self.evaluator.lacks(memory)
                    serves = self.evaluator.serves(cases, offload)
                    result[left] = (device == 0) & (host == 0) & serves
                    hosts[left] |= host > 0
        return result

    def _in_host_memory(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        group: Sequence[Offload],
    ) -> tuple[list[LayoutCandidate], np.ndarray]:
        """Makes plans of some cases with each of several offloads.

        The second result is, by case, whether some plan fits with the fewest
        micro-batches.
        """
        result: list[LayoutCandidate] = []
        enough = np.zeros(len(rows), dtype=bool)
        cases, step = layouts.cases.take(rows), times.take(rows)
        for offload in group:
            serves = self.evaluator.serves(cases, offload)
            if self.request.offload is not None and not serves.all():
                self._refuse(UPDATED_IN_OTHER_SHARDS, int((~serves).sum()))
            least = step.step + self.evaluator.offload_seconds(cases, offload, step)
            near = serves & (least <= self.bound)
            holds = self._may_hold(cases, offload)
            if offload == (self.request.offload or ()) and (near & ~holds).any():
                lacks = float(step.step[near & ~holds].min())
                self.least_lacking = min(self.least_lacking, lacks)
            self.weighed += int((near & ~holds).sum())
            some = np.flatnonzero(near & holds)
            if len(some):
                plans, fits = self._with_offload(layouts, times, rows[some], offload)
                enough[some] |= fits
                result += plans
        return result, enough

    def _with_offload(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        offload: Offload,
    ) -> tuple[list[LayoutCandidate], np.ndarray]:
        """Makes plans with the fewest micro-batches that fit, or else with the most.

        With very many meshes, only plans that fit and the nearest to fitting are made.
        The second result is whether each case fits with the fewest micro-batches.
        """
        cases, memory = self._smallest_counts(layouts, times, rows, offload)
        fits = self.evaluator.fits(memory)
        asked = offload == (self.request.offload or ())
        enough = fits & (layouts.cases.count[rows] == cases.count)
        roomy = enough & asked
        self.weighed += len(rows)
        if asked and not roomy.all():
            least = float(times.step[rows[~roomy]].min())
            self.least_lacking = min(self.least_lacking, least)
        places = np.flatnonzero(fits) if self.follows else np.arange(len(rows))
        plans = self._plans(layouts, times, rows, places, cases, memory, offload)
        result = [
            dataclasses.replace(plan, fits=bool(fits[i]), roomy=bool(roomy[i]))
            for i, plan in zip(places.tolist(), plans, strict=True)
        ]
        self._has_fit = self._has_fit or bool(fits.any())
        if self.follows and not self._has_fit:
            device, host = self.evaluator.lacks(memory)
            nearest = int((device + host).argmin())
            if float(device[nearest] + host[nearest]) < self._lacks:
                self._lacks = float(device[nearest] + host[nearest])
                one = np.array([nearest])
                (self._nearest,) = self._plans(
                    layouts, times, rows, one, cases, memory, offload
                )
        return result, enough

    def _plans(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        places: np.ndarray,
        cases: LayoutCases,
        memory: MemoryColumns,
        offload: Offload,
    ) -> list[LayoutCandidate]:
        if not len(places):
            return []
        rows, cases, memory = rows[places], cases.take(places), memory.take(places)
        here = self._times_at(layouts, times, rows, cases)
        tensor = layouts.cases.mesh["tensor"][rows]
        likely, least = times.take(rows).sequence_parallel(tensor)
        moves = self.evaluator.offload_seconds(cases, offload, here, memory)
        fresh_seconds = self.cluster.slowest.fresh_seconds
        plans = []
        for place in range(len(rows)):
            terms = memory.at(place)
            plans.append(
                LayoutCandidate(
                    mesh=layouts.meshes[cases.row[place]],
                    zero=int(cases.zero[place]),
                    **self.request.or_off(
                        offload=offload, sequence_parallel=self.split is not None
                    ),
                    num_micro_batches=int(cases.count[place]),
                    tables=cases.tables_at(place),
                    facts=self.facts,
                    details=self,
                    time=dataclasses.replace(
                        here.at(place),
                        allocation_seconds=fresh_seconds(terms.temporary_bytes),
                        offload_seconds=float(moves[place]),
                    ),
                    memory=terms,
                    wire_bytes=int(here.wire[place]),
                    fits=False,
                    roomy=False,
                    sequence_parallel_seconds=(
                        float(likely[place]),
                        float(least[place]),
                    ),
                )
            )
        return plans

    def _times_at(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        cases: LayoutCases,
    ) -> TimeColumns:
        """Returns the times of layouts, each with its number of micro-batches.

        For few layouts, all numbers of micro-batches are evaluated at once, as later
        calls need them. That is hardly slower.
        """
        if (layouts.cases.count[rows] == cases.count).all():
            return times.take(rows)
        if id(layouts) not in self._timed:
            every = np.arange(len(layouts.cases))
            counts = layouts.counts_of(every)
            some = None
            if sum(map(len, counts)) <= MOST_PAIRS and self.request.combine == "mean":
                each = np.repeat(every, [len(count) for count in counts])
                count = np.array([n for count in counts for n in count], dtype=np.int64)
                some = self.evaluator.times(layouts.cases.take(each).with_count(count))
            start = np.cumsum([0, *map(len, counts)])
            self._timed[id(layouts)] = layouts, some, start
        _, known, start = self._timed[id(layouts)]
        if known is None:
            return self.evaluator.times(cases)
        pairs = zip(layouts.counts_of(rows), cases.count.tolist(), strict=True)
        return known.take(start[rows] + [counts.index(n) for counts, n in pairs])

    def _memory(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        cases: LayoutCases,
        offload: Offload,
    ) -> MemoryColumns:
        here = None
        if self.cluster.compiler.reduces_at_end:
            here = self._times_at(layouts, times, rows, cases)
        return self.evaluator.memory(cases, offload, times=here)

    def _smallest_counts(
        self,
        layouts: _Layouts,
        times: TimeColumns,
        rows: np.ndarray,
        offload: Offload,
    ) -> tuple[LayoutCases, MemoryColumns]:
        """Returns cases with the fewest micro-batches that fit, or else the most."""
        cases = layouts.at(rows, 0)
        memory = self._memory(layouts, times, rows, cases, offload)
        fits = self.evaluator.fits(memory)
        every = layouts.counts_of(rows)
        several = np.array([len(counts) > 1 for counts in every], dtype=bool)
        lacking = np.flatnonzero(~fits & several)
        if not len(lacking):
            return cases, memory
        most = layouts.at(rows[lacking], -1)
        held = self._memory(layouts, times, rows[lacking], most, offload)
        count = cases.count.copy()
        count[lacking] = most.count
        memory = memory.with_rows(lacking, held)
        between = [
            (place, parts)
            for place in lacking[self.evaluator.fits(held)].tolist()
            for parts in every[place][-2:0:-1]
        ]
        if between:
            places, counts = np.array(between).T
            tried = cases.take(places).with_count(counts)
            result = self._memory(layouts, times, rows[places], tried, offload)
            fitting = np.flatnonzero(self.evaluator.fits(result))
            # The last entry of each case has the fewest micro-batches.
            _, last = np.unique(places[fitting][::-1], return_index=True)
            chosen = fitting[::-1][last]
            count[places[chosen]] = counts[chosen]
            memory = memory.with_rows(places[chosen], result.take(chosen))
        return cases.with_count(count), memory

    def layouts_of(self, scored: LayoutCandidate) -> tuple[LeafLayout, ...]:
        """Returns the layout of each group of parameters in a plan of this search."""
        return lay_out(self.facts, scored.tables, scored.mesh, scored.zero)

    def collectives_of(self, scored: LayoutCandidate) -> tuple[Collective, ...]:
        """Returns the collectives of one step of a plan of this search."""
        return self.evaluator.times(self._case(scored)).collectives

    def _case(self, scored: LayoutCandidate) -> LayoutCases:
        given = scored.mesh, scored.tables, scored.zero, scored.num_micro_batches
        return self.evaluator.case(*given)

    def lacks(self, memory: MemoryTerms) -> tuple[int, int]:
        """Returns the bytes of device memory and of host memory that a plan lacks."""
        room = min(k.host_memory_bytes or memory.host_bytes for k in self.cluster.kinds)
        device = memory.total_bytes - self.cluster.memory_bytes
        return max(0, device), max(0, memory.host_bytes - room)

    def memory_of(self, scored: LayoutCandidate, in_flight: float) -> MemoryTerms:
        """Returns the memory of a plan if several micro-batches are in flight.

        Args:
            scored: Plan of this search.
            in_flight: Number of micro-batches in flight.
        """
        case, offload = self._case(scored), scored.offload
        return self.evaluator.memory(case, offload, in_flight=in_flight).at(0)

    def reported(self, scored: LayoutCandidate) -> MemoryTerms:
        """Returns the memory of a plan's compiled program.

        The program needs extra memory if its compiler postpones products of weights'
        gradients. The compiler postpones all of them if their operands fit, else none.

        Args:
            scored: Plan of this search.
        """
        cluster, result = self.cluster, scored.memory
        hides = cluster.compiler.hides_updates and scored.fits
        if not hides or not {k.name for k in cluster.kinds} <= HIDES_UPDATES_ON:
            return result
        others = any(n > 1 for axis, n in scored.mesh.items() if axis != "data")
        # Vectors of all layers are gathered together, after the last gradient.
        pairs = zip(self.facts.groups, scored.layouts, strict=True)
        vectors = [one for (group, _), one in pairs if len(group.shape) == 1]
        if others or all(vector.optimizer == vector.param for vector in vectors):
            return result
        case, offload = self._case(scored), scored.offload
        more = self.evaluator.memory(case, offload, postpones=True).at(0)
        fuller = more.total_bytes > result.total_bytes
        return more if fuller and not any(self.lacks(more)) else result

    def setting(self, mesh: Mapping[str, Any], count: Any) -> CostSetting:
        """Returns the mesh sizes and micro-batches for cost rows.

        Args:
            mesh: Sizes of the axes, or arrays with the sizes of many meshes.
            count: Number of micro-batches, or an array of such numbers.
        """
        return self.evaluator.setting(mesh, count)

    def _micro_batches(
        self, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> tuple[int, ...]:
        fixed = self.request.num_micro_batches
        if fixed is not None:
            return (fixed,)
        parts = max(self.options.batch_parts(t, mesh) for t in tables.values())
        size = self.graph.batch_size
        # With one sample, the values between products have no batch dimension to
        # detect.
        most = size if self.split is None else max(1, size - 1)
        return tuple(n for n in divisors(size // parts) if n <= most)

    def product_flops(self, scored: LayoutCandidate) -> int:
        """Returns the FLOPs of matrix products on one device in one step."""
        s = self.setting(scored.mesh, scored.num_micro_batches)
        total = sum(
            row_flops(row, row_hits(row, scored.tables[row.task_graph], s), s)
            for row in self.rows.ops
        )
        return int(round(total * scored.num_micro_batches))


def _ends(row: Row, window: Window) -> tuple[int, int]:
    size = math.prod(row.operands[0].sizes[window.dim])
    return size, math.prod(row.results[0].sizes[window.out])


def ranked(scored: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Returns plans by time; ties are broken by memory, then by communication."""
    return best_first(
        scored,
        seconds=lambda s: s.time.step_seconds,
        ties=lambda s: (s.memory.total_bytes, s.wire_bytes),
    )
