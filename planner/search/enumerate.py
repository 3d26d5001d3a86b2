"""The search: every mesh, table and ZeRO level, and the cheapest that fits.

Exact enumeration over the factorisations of the devices into ``data``, ``fsdp``,
``expert`` and ``tensor``, over the logical dimensions that each model axis may shard in
each TaskGraph, and over what is sharded in storage. ``context``, which shards the
sequence, gets a size where the user fixes one, or where nothing fits without it. The
cost of a TaskGraph under one table depends on nothing outside it but the layouts at its
borders, so tables are costed once for each mesh and combined by adding.

Among plans within half a percent of the fastest, the one with less memory is taken, and
among equals the one that communicates less: predictions are not finer than that.

The module is long because ``Search`` is one class: all its steps share what was
costed once for each mesh.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.topology import HIDES_UPDATES_ON
from whalejax.planner.cost.operation_cost import RowCost, Setting, row_flops, row_hits
from whalejax.planner.cost.row_cost_cache import Prices
from whalejax.planner.cost.step_time import step_time
from whalejax.planner.entries import Collective
from whalejax.planner.memory.peak import largest_gather
from whalejax.planner.memory.saved_tensors import Residents, residents
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.expert_regions import weight_homes
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.windows import Window
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.combining import (
    CombiningCosts,
    added,
    combine_seconds,
    may_combine,
    with_buffers,
    zero_levels,
)
from whalejax.planner.search.host_offload import UPDATED_IN_OTHER_SHARDS, Hosting
from whalejax.planner.search.layout_memory import LayoutMemory, MemoryTable, StepLayout
from whalejax.planner.search.ranking import best_first
from whalejax.planner.search.request import Request as Request
from whalejax.planner.search.request import Scored as Scored
from whalejax.planner.sharding.layout import (
    SPATIAL_AXES,
    Table,
    divisors,
    replicas,
)
from whalejax.planner.sharding.leaf_shard_counts import layout_shard_counts
from whalejax.planner.sharding.metadata_constraints import pinned_axes
from whalejax.planner.sharding.operation_rows import Row, Rows
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafLayout,
    ignores_pin,
    lay_out,
    sharded_share,
)
from whalejax.planner.sharding.sequence_parallel import Split, shared_roles
from whalejax.planner.sharding.strategies import (
    NOTHING_TO_SPLIT,
    Options,
    choices,
    sharded_by_split,
)
from whalejax.planner.terms import MemoryTerms, TimeTerms


PLANNED_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh axes that the search gives sizes to, outermost first; beside them those of space
where samples are shared (``SPATIAL_AXES``)."""

BATCH_DOES_NOT_DIVIDE = "the batch does not divide by the devices that share it"
NO_SEQUENCE = "no dimension for a context axis"
NO_SPACE = "no dimension for a spatial axis"
SPACE_DOES_NOT_DIVIDE = "an extent does not divide by its spatial axis"
SEQUENCE_DOES_NOT_DIVIDE = "the sequence does not divide by context"
IGNORES_A_PIN = "metadata fixes a dimension that the axis does not divide"
HALO_IS_WIDER = "a halo is wider than what a device has of the dimension"
"""Reasons to refuse a layout."""

MANY_SPACES = 1000
"""Meshes with spatial axes from which not all of them are looked at."""

SPACE_SLACK = 1.1
"""How much slower than the best a plan that shares space may be for its memory to be
weighed; more than what ties and what is listed beside the best."""

LEAST_SHARE = 0.5
"""Part of the parameters' bytes that an axis must shard to count as sharding them."""


def meshes(
    num_devices: int, context: int = 1, space: Mapping[str, int] | None = None
) -> Iterator[dict[str, int]]:
    """Every factorisation into data, fsdp, expert and tensor, outermost first.

    Args:
        num_devices: the product of all axes.
        context: the size of that axis, a divisor of it.
        space: sizes of spatial axes; those that are 1 are left out of the meshes.
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
    """The spatial axes above 1 that a user fixes."""
    given = mesh or {}
    return {a: given[a] for a in SPATIAL_AXES if given.get(a, 1) > 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WideHalo:
    """An operation that needs more of a dimension than a neighbour has.

    Attributes:
        axis: the spatial axis.
        row: the operation.
        halo: elements that it needs of neighbours on one side.
        size: elements of the dimension, of all devices.
    """

    axis: str
    row: Row
    halo: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """One mesh under one table for each TaskGraph at one ZeRO level.

    Attributes:
        mesh, tables, zero, layouts: as in ``Scored``.
        counts: numbers of micro-batches that there can be, rising.
        costs: of rows, by the number of micro-batches, as far as they are known.
        times: of a step, the same.
        memories: the same, by what lies in host memory too.
    """

    mesh: dict[str, int]
    tables: dict[int, Table]
    zero: int
    layouts: tuple[LeafLayout, ...]
    counts: tuple[int, ...]
    costs: dict[int, tuple[RowCost, ...]]
    times: dict[int, tuple[TimeTerms, tuple[Collective, ...]]]
    memories: dict[tuple[int, tuple[str, ...]], MemoryTerms]


class Search:
    """One search over one captured model.

    Attributes:
        graph, dims, rows: what is planned.
        program: its operations, wherever they stand.
        prices: costs of the rows.
        hosting: what may lie in host memory.
        split: what stands between products is set apart in the graph, for sequence
            parallelism; the options are those of the search ``beside`` without.
        named_axes: mesh axes that metadata names.
        scored: every plan that was evaluated, after ``run``.
        bound: step time above which a plan is not worth its evaluation; of promising
            meshes it follows the best that is found.
        slack: how many times the best that is.
        refused: for each reason, how many meshes it ruled out.
    """

    def __init__(
        self,
        graph: Graph,
        dims: Dimensions,
        cluster: Cluster,
        request: Request,
        *,
        beside: Search | None = None,
        split: Split | None = None,
        bound: float = math.inf,
        slack: float = 1.0,
        program: AnalysedProgram | None = None,
    ) -> None:
        self.graph = graph
        self.bound, self.slack = bound, slack
        self.split = split
        self.dims = dims
        self.cluster = cluster
        self.request = request
        known = program if beside is None else beside.program
        self.program: AnalysedProgram = known or AnalysedProgram(
            graph, dims, cluster.compiler
        )
        self.rows: Rows = self.program.views.rows(graph)
        self.prices: Prices = Prices(
            self.rows, None if beside is None else beside.prices
        )
        self.facts: LeafFacts = (
            LeafFacts.of(
                graph,
                dims,
                self.rows.reading,
                request.optimizer,
                narrowed=request.narrowed,
                cast_bytes=request.cast_bytes,
            )
            if beside is None
            else beside.facts.at(weight_homes(graph, self.rows.weight))
        )
        self.options: Options = (
            choices(graph, dims, self.rows, request.default)
            if beside is None
            else beside.options
        )
        self.facts = self.facts.held(self.options.stored)
        self.hosting = Hosting(self.program, cluster, request, self.facts)
        self.combining = CombiningCosts(
            graph, dims, self.facts, cluster, request.combine
        )
        self.batch_roles = frozenset(r.index for r in dims.batch)
        self.named_axes = pinned_axes(graph)
        self.scored: list[Scored] = []
        self.refused: dict[str, int] = {}

    @functools.cached_property
    def memory(self) -> LayoutMemory:
        """What layouts take."""
        return LayoutMemory(
            graph=self.graph,
            program=self.program,
            facts=self.facts,
            hosting=self.hosting,
            dims=self.dims,
        )

    @functools.cached_property
    def memories(self) -> MemoryTable:
        """What the layouts take that are weighed."""
        return MemoryTable(self.memory, self.setting)

    @functools.cached_property
    def residents(self) -> Residents:
        """What a pass holds, all of it at once."""
        return residents(
            self.graph,
            self.dims,
            self.rows.weight,
            copies_kernels=self.cluster.compiler.copies_kernels,
        )

    def run(self) -> list[Scored]:
        """Evaluate everything.

        Returns:
            The plans that fit, best first; empty if none does (``scored`` then holds
            those that do not fit).
        """
        fixed = (self.request.mesh or {}).get("context")
        sizes = [fixed or 1]
        if fixed is None and self.options.sequence:
            sizes += [n for n in divisors(self.request.num_devices) if n > 1]
        self._score_meshes([m for context in sizes for m in self.meshes(context)])
        if self._wants_space():
            self._share_space()
        return ranked([s for s in self.scored if s.fits])

    def _share_space(self) -> None:
        """Evaluate every mesh on which devices share the space of samples.

        Those that shard nothing else come first: what they take bounds what of the
        others is worth its evaluation. Of very many meshes, those whose model axes are
        larger than in some plan that shares space and fits are not looked at.
        """
        every = [m for space in self.spaces() for m in self.meshes(space=space)]
        every.sort(key=lambda m: (m["tensor"] * m["expert"], m["fsdp"]))
        seen, most = len(self.scored), math.inf
        for mesh in every:
            model = mesh["tensor"] * mesh["expert"]
            if model > most:
                break
            self._score_meshes([mesh])
            fresh, seen = self.scored[seen:], len(self.scored)
            fitting = [one.time.step_seconds for one in fresh if one.fits]
            self.bound = min(self.bound, min(fitting, default=math.inf) * SPACE_SLACK)
            if fitting and len(every) > MANY_SPACES:
                most = model

    def _wants_space(self) -> bool:
        """The space of samples may be worth sharing: the user leaves it open, and
        samples are fewer than devices, memory is short, or weights have the dimension.

        Where every device can have samples of its own and enough memory, sharing a
        sample moves what is not moved otherwise, and gives nothing but shards of
        weights over space, as a dense layer behind convolutions has them.
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
        short = not self.scored or any(not one.roomy for one in self.scored)
        return few or weights or short

    def spaces(self) -> list[dict[str, int]]:
        """Sizes of the spatial axes that the model's extents allow and none fixes."""
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
        found = [one for one in every if 1 < math.prod(one.values()) <= count]
        return [one for one in found if count % math.prod(one.values()) == 0]

    def meshes(
        self, context: int | None = None, space: Mapping[str, int] | None = None
    ) -> list[dict[str, int]]:
        """The meshes that obey what the user fixed, by ``mesh``, marks and metadata.

        Of the axes that metadata names, as many are above size 1 as the devices and
        the user's ``mesh`` allow at once.

        Args:
            context: the size of that axis; None for the one that the user fixed.
            space: sizes of the spatial axes; None for those that the user fixed.
        """
        fixed, among = self.request.mesh or {}, self.request.among
        if space is not None or fixed_space(fixed):
            among = None  # What is promising was found without them.
        every = [
            mesh
            for mesh in meshes(
                self.request.num_devices,
                context or fixed.get("context", 1),
                fixed_space(fixed) if space is None else space,
            )
            if all(mesh.get(axis, 1) == size for axis, size in fixed.items())
            and replicas(mesh) % self.request.copies == 0
            and may_combine(self.request, mesh, self.cluster)
        ]
        found = [m for m in every if among is None or tuple(m.values()) in among]

        def obeyed(mesh: Mapping[str, int]) -> int:
            return sum(mesh.get(axis, 1) > 1 for axis in self.named_axes)

        most = max(map(obeyed, found), default=0)
        return [mesh for mesh in found if obeyed(mesh) == most]

    def _tables(self, mesh: Mapping[str, int]) -> Iterator[dict[int, Table]]:
        reason = self._no_context(mesh) or self._no_space(mesh)
        reason = reason or sharded_by_split(self.options, mesh)
        reason = self.hosting.nothing or reason
        if reason:
            self._refuse(reason)
            return
        size = self.graph.batch_size * self.graph.num_micro_batches
        size //= self.request.num_micro_batches or 1
        lists = [self.options.tables(g, mesh) for g in self.options.order]
        if not all(lists):
            self._refuse(NOTHING_TO_SPLIT)
        for combination in itertools.product(*lists):
            tables = dict(zip(self.options.order, combination, strict=True))
            if not self._uses_model_axes(mesh, tables):
                continue
            if self.split is not None:
                if not self._serves(self.split, mesh, tables):
                    continue
                options = self.options
                tables = self.split.tables(tables, options.batch, options.sequence)
            found = self.options.that_divide(tables, mesh, size)
            if found is None:
                self._refuse(BATCH_DOES_NOT_DIVIDE)
            else:
                yield found

    def _serves(
        self, split: Split, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> bool:
        """The products are sharded as the split takes it, and the sequence divides."""
        parts = mesh["context"] * mesh["tensor"]
        sizes = [self.options.sizes[r] for r in self.options.sequence]
        return (
            mesh["tensor"] > 1
            and shared_roles(tables, self.options.batch) == split.shared
            and all(size % parts == 0 for size in sizes)
        )

    def _no_context(self, mesh: Mapping[str, int]) -> str:
        """Why a mesh's context axis shards no sequence, or an empty text."""
        if mesh["context"] == 1:
            return ""
        if not self.options.sequence:
            return NO_SEQUENCE
        sizes = [self.options.sizes[r] for r in self.options.sequence]
        divides = all(size % mesh["context"] == 0 for size in sizes)
        return "" if divides else SEQUENCE_DOES_NOT_DIVIDE

    def _no_space(self, mesh: Mapping[str, int]) -> str:
        """Why a mesh's spatial axes share no space, or an empty text."""
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
        """Spatial axes whose dimension every window makes a fraction or multiple of.

        Then another extent changes all of the model's resolutions by the same factor.

        Args:
            mesh: sizes of the axes asked about.
        """
        shared = ((w, axis, ends) for _, w, axis, ends in self._shared_windows(mesh))
        # Beside attention some operations see the whole of what the axis shards.
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
        """Where windows reach further than into the next device's part."""
        for row, window, axis, (size, result) in self._shared_windows(mesh):
            halo = max(window.halo(size, result, mesh[axis]))
            if halo > size // mesh[axis]:
                yield WideHalo(axis=axis, row=row, halo=halo, size=size)

    def _shared_windows(
        self, mesh: Mapping[str, int]
    ) -> Iterator[tuple[Row, Window, str, tuple[int, int]]]:
        """Windows along dimensions that spatial axes shard.

        Yields:
            The operation, the window, the axis and the extents of operand and result.
        """
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

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _uses_model_axes(
        self, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> bool:
        """Some TaskGraph uses each model axis for more than the batch.

        Otherwise the mesh is another one, with that axis's devices in ``data``.
        """
        for axis in ("expert", "tensor"):
            uses = (t.get(axis, ()) for t in tables.values())
            if mesh[axis] > 1 and all(set(r) <= self.batch_roles for r in uses):
                return False
        return True

    def _score_meshes(self, every: Sequence[dict[str, int]]) -> None:
        """Evaluate meshes under all of their tables."""
        pairs = [(mesh, tables) for mesh in every for tables in self._tables(mesh)]
        for mesh, tables in pairs:
            counts = tuple(self._micro_batches(mesh, tables))
            self.memories.add(mesh, tables, self._zero_levels(mesh), counts)
        for mesh, tables in pairs:
            self.score(mesh, tables)

    def _zero_levels(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Levels of ZeRO that are tried."""
        levels: tuple[int, ...] = (0, 1, 2) if mesh["data"] > 1 else (0,)
        if self.request.zero is not None:
            levels = (self.request.zero,)
        return zero_levels(self.request, levels)

    def score(self, mesh: dict[str, int], tables: dict[int, Table]) -> None:
        """Evaluate one mesh under one table for each TaskGraph, at every ZeRO level.

        What can be is added to ``scored``.
        """
        costs: dict[int, tuple[RowCost, ...]] = {}
        shared = 0.0
        for zero in self._zero_levels(mesh):
            if shared > self.bound:
                break
            layouts = lay_out(self.facts, tables, mesh, zero)
            if ignores_pin(self.facts, layouts, mesh):
                self._refuse(IGNORES_A_PIN)
                continue
            if self._shards_nothing(mesh, zero, layouts):
                continue
            memories: dict[tuple[int, tuple[str, ...]], MemoryTerms] = {}
            counts = tuple(self._micro_batches(mesh, tables))
            case = _Case(mesh, tables, zero, layouts, counts, costs, {}, memories)
            if self.bound < math.inf:
                least = self._case_time(case, counts[0])[0]
                shared = least.step_seconds - _storage_seconds(least)
                if least.step_seconds > self.bound:
                    continue
            for offloads in self._offload_groups(case):
                asked = offloads
                offloads = [o for o in asked if self.hosting.serves(layouts, o)]
                if len(offloads) < len(asked) == 1:
                    self._refuse(UPDATED_IN_OTHER_SHARDS)
                    break
                found = [self._scored(case, offload) for offload in offloads]
                self.scored += found
                if fitting := [one.time.step_seconds for one in found if one.fits]:
                    if self.request.among is not None:
                        self.bound = min(self.bound, min(fitting) * self.slack)
                    break

    def _offload_groups(self, case: _Case) -> Iterator[list[tuple[str, ...]]]:
        """What may lie in host memory, in groups: the more where the less is too much.

        Where memory does not hold a case with most of it there, it holds none: what
        lies between is not looked at.
        """
        groups = self.hosting.options()
        yield next(groups)
        others = [
            *groups
        ]  # Which ask the optimizer, and only where the first do not do.
        if len(others) < 2 or self.cluster.compiler.reduces_at_end:
            yield from others
            return
        (most,) = others[-1]
        # Parameters that lie there pass through the device.
        corners = most, tuple(name for name in most if name != "params")
        last = case.counts[-1]
        if any(
            self.hosting.serves(case.layouts, some)
            and self._fits(self._memory(case, last, some, ()))
            for some in corners
        ):
            yield from others
        else:
            yield others[-1]

    def _least_seconds(self, case: _Case) -> float:
        """Step time with as few micro-batches as there can be, which is the least."""
        return self._case_time(case, case.counts[0])[0].step_seconds

    def _case_time(
        self, case: _Case, count: int
    ) -> tuple[TimeTerms, tuple[Collective, ...]]:
        if count not in case.times:
            s, costs = self.setting(case.mesh, count), case.costs
            costs[count] = costs.get(count) or self.prices.of(case.tables, s)
            met = self.combining.of(case.layouts, case.mesh)
            time, collectives = step_time(
                self.facts,
                case.layouts,
                costs[count],
                s,
                zero=case.zero,
                count=count,
                cast_bytes=self.request.cast_bytes,
                apart=met.collectives or None,
            )
            beside = combine_seconds(met.nbytes, self.cluster)
            case.times[count] = added(time, beside), collectives
        return case.times[count]

    def _scored(self, case: _Case, offload: tuple[str, ...]) -> Scored:
        """One plan."""
        count, memory = self._smallest_count(case, offload)
        asked = self.request.offload or ()
        time, collectives = self._case_time(case, count)
        cuts = layout_shard_counts(case.layouts, case.mesh)
        state, params = (
            of(cuts, offload)
            for of in (self.hosting.state_bytes, self.hosting.params_bytes)
        )
        waiting = memory.host_bytes - state - params
        costs = [*zip(self.rows.ops, case.costs[count], strict=False)]
        fits = self._fits(memory)
        fresh = self.cluster.slowest.fresh_seconds(memory.temporary_bytes)
        return Scored(
            mesh=case.mesh,
            zero=case.zero,
            **self.request.or_off(
                offload=offload, sequence_parallel=self.split is not None
            ),
            num_micro_batches=count,
            tables=case.tables,
            facts=self.facts,
            layouts=case.layouts,
            collectives=collectives,
            time=dataclasses.replace(
                time,
                allocation_seconds=fresh,
                offload_seconds=self.hosting.seconds(
                    state, params, waiting, costs, count
                ),
            ),
            memory=memory,
            fits=fits,
            roomy=fits and count == case.counts[0] and offload == asked,
            least_seconds=self._least_seconds(case),
        )

    def lacks(self, memory: MemoryTerms) -> tuple[int, int]:
        """Bytes that a plan lacks on a device, and of its part of the host."""
        room = min(k.host_memory_bytes or memory.host_bytes for k in self.cluster.kinds)
        device = memory.total_bytes - self.cluster.memory_bytes
        return max(0, device), max(0, memory.host_bytes - room)

    def _fits(self, memory: MemoryTerms) -> bool:
        """Devices hold it, and hosts what lies there."""
        return not any(self.lacks(memory))

    def _shards_nothing(
        self, mesh: Mapping[str, int], zero: int, layouts: tuple[LeafLayout, ...]
    ) -> bool:
        """A storage axis that divides little of the parameters is another plan's."""
        axes = ["fsdp"] * (mesh["fsdp"] > 1) + ["data"] * (zero > 0)
        fixed = {*(self.request.mesh or {}), *self.named_axes}
        for axis in axes:
            asked = axis in fixed or (axis == "data" and self.request.zero)
            if not asked and sharded_share(self.facts, layouts, axis) < LEAST_SHARE:
                self._refuse(f"{axis} would shard less than half of the parameters")
                return True
        return False

    def _smallest_count(
        self, case: _Case, offload: tuple[str, ...]
    ) -> tuple[int, MemoryTerms]:
        """The fewest micro-batches that fit, or the most that there can be.

        Memory falls with their number, but for what accumulation itself takes.
        """
        counts = case.counts

        def memory(place: int) -> MemoryTerms:
            key = counts[place], offload
            if key not in case.memories:
                waits = self.cluster.compiler.reduces_at_end
                run = self._case_time(case, key[0])[1] if waits else ()
                case.memories[key] = self._memory(case, *key, run)
            return case.memories[key]

        last = len(counts) - 1
        if self._fits(memory(0)):
            last = 0
        elif self._fits(memory(last)):
            fitting = range(1, last)
            last = 1 + bisect.bisect_left(
                fitting, True, key=lambda place: self._fits(memory(place))
            )
        return counts[last], memory(last)

    def _memory(
        self,
        case: _Case | Scored,
        count: int,
        offload: tuple[str, ...],
        collectives: Sequence[Collective],
        *,
        postpones: bool = False,
        in_flight: float | None = None,
    ) -> MemoryTerms:
        memory = None
        if not postpones and not collectives and in_flight is None:
            given = case.mesh, case.tables, case.zero, count, offload
            memory = self.memories.of(*given)
        if memory is None:
            held = self.request.in_flight if in_flight is None else in_flight
            memory = self._memory_alone(
                case, count, offload, collectives, postpones=postpones, in_flight=held
            )
        met = self.combining.of(case.layouts, case.mesh)
        return with_buffers(memory, met.nbytes) if met.nbytes else memory

    def _memory_alone(
        self,
        case: _Case | Scored,
        count: int,
        offload: tuple[str, ...],
        collectives: Sequence[Collective],
        *,
        postpones: bool,
        in_flight: float,
    ) -> MemoryTerms:
        s = self.setting(case.mesh, count)
        accumulates = s.num_micro_batches * self.graph.num_micro_batches > 1
        laid = StepLayout(
            tables=case.tables,
            cuts=layout_shard_counts(case.layouts, case.mesh),
            offload=offload,
            accumulates=np.array([accumulates]),
            postpones=postpones and not accumulates,
            in_flight=in_flight,
            gathered=largest_gather(collectives),
        )
        return self.memory.of(laid, s).at(0)

    def memory_of(self, scored: Scored, in_flight: float) -> MemoryTerms:
        """What a plan takes with so many micro-batches' activations at once.

        Args:
            scored: one of this search.
            in_flight: how many.
        """
        given = scored, scored.num_micro_batches, scored.offload, scored.collectives
        return self._memory(*given, in_flight=in_flight)

    def reported(self, scored: Scored) -> MemoryTerms:
        """What the compiled program of a plan takes.

        It takes more than it has to where its compiler puts products of weights'
        gradients off: it does so while memory holds what they read, and else for none.

        Args:
            scored: one of this search.
        """
        cluster, found = self.cluster, scored.memory
        hides = cluster.compiler.hides_updates and scored.fits
        if not hides or not {k.name for k in cluster.kinds} <= HIDES_UPDATES_ON:
            return found
        others = any(n > 1 for axis, n in scored.mesh.items() if axis != "data")
        # Vectors of all layers are gathered at once, behind the last gradient.
        pairs = zip(self.facts.groups, scored.layouts, strict=True)
        vectors = [one for (group, _), one in pairs if len(group.shape) == 1]
        if others or all(one.optimizer == one.param for one in vectors):
            return found
        given = scored, scored.num_micro_batches, scored.offload, scored.collectives
        more = self._memory(*given, postpones=True)
        fuller = more.total_bytes > found.total_bytes
        return more if fuller and self._fits(more) else found

    def setting(self, mesh: Mapping[str, Any], count: Any) -> Setting:
        """What rows are priced under, on a mesh with so many micro-batches.

        Args:
            mesh: sizes of the axes; arrays are of many meshes.
            count: micro-batches, or an array of them.
        """
        # The graph was traced at one part of its batch; what is searched is how many
        # parts there are in all.
        return Setting(
            mesh,
            count // self.graph.num_micro_batches,
            self.cluster,
            self.dims,
            self.batch_roles,
        )

    def _micro_batches(
        self, mesh: Mapping[str, int], tables: Mapping[int, Table]
    ) -> Iterator[int]:
        fixed = self.request.num_micro_batches
        if fixed is not None:
            yield fixed
            return
        parts = max(self.options.batch_parts(t, mesh) for t in tables.values())
        yield from divisors(self.graph.batch_size // parts)

    def product_flops(self, scored: Scored) -> int:
        """FLOPs of matrix products on one device in one step."""
        s = self.setting(scored.mesh, scored.num_micro_batches)
        total = sum(
            row_flops(row, row_hits(row, scored.tables[row.task_graph], s), s)
            for row in self.rows.ops
        )
        return int(round(total * scored.num_micro_batches))


def _ends(row: Row, window: Window) -> tuple[int, int]:
    """Extents of the operand and the result along which a window slides."""
    size = math.prod(row.operands[0].sizes[window.dim])
    return size, math.prod(row.results[0].sizes[window.out])


def _storage_seconds(time: TimeTerms) -> float:
    """What a level of ZeRO changes of a step."""
    return time.gradient_seconds + time.parameter_seconds + time.update_seconds


def ranked(scored: Sequence[Scored]) -> list[Scored]:
    """Best first: the fastest, ties broken by memory, then by communication."""
    return best_first(
        scored,
        seconds=lambda s: s.time.step_seconds,
        ties=lambda s: (s.memory.total_bytes, s.wire_bytes),
    )
