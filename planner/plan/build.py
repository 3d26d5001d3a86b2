"""Builds a ``Plan`` from the result of a search: tables, layouts, candidates and notes.

The search has made all decisions. This module writes them as the plain data that is
shown, saved and run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost.collectives import axis_parts, runs_as
from whalejax.planner.cost_terms import OBEYED, UNCOUNTED_MOVES, TimeTerms
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import whole_notes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.why import leaf_note
from whalejax.planner.plan_entries import (
    BatchLeaf,
    Candidate,
    LeafPlan,
    RegionTable,
    RoleInfo,
)
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate, Request
from whalejax.planner.sharding.fused_parameters import computed_whole
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.metadata_constraints import unplanned_pins
from whalejax.planner.sharding.parameter_layout import batch_homes, batch_specs
from whalejax.planner.sharding.strategies import idle_marks
from whalejax.planner.step_options import options_of


FROZEN_SHARE = 0.01
"""Fraction of a device's memory above which non-trainable leaves get a note."""

KEPT_CANDIDATES = 12
"""Largest number of evaluated candidates that fit and that a plan stores. A plan stores
up to four more candidates, which lack memory.
"""


def build_plan(
    analysed: GraphAnalysis,
    search: Search,
    weighed: Sequence[LayoutCandidate],
    cluster: Cluster,
    request: Request,
    precision: str,
    batch: Sequence[BatchLeaf],
    gap: float | None = None,
) -> Plan:
    """Returns the plan of the first candidate, with the best ones as ``candidates``.

    Args:
        analysed: The graph that was searched.
        search: Search that evaluated the candidates.
        weighed: Evaluated candidates, best first.
        cluster, request: Cluster and options that the plan was requested for.
        precision: Name of the precision that the plan stores, such as ``"bf16"``.
        batch: Leaves of the global batch.
        gap: Fraction of the step time by which another plan may be faster; None if
            unknown.
    """
    chosen = weighed[0]
    best = dataclasses.replace(chosen, memory=search.reported(chosen))
    weighed = [best, *weighed[1:]]
    graph, dims = analysed.graph, analysed.dims
    there = search.hosting.params_on_host(best.layouts, best.offload)
    leaves = tuple(
        dataclasses.replace(
            leaf, hosted=hosted, note=leaf_note(leaf, tensor, best.mesh, dims)
        )
        for leaf, tensor, hosted in zip(best.leaves, graph.params, there, strict=True)
    )
    storage_axes = [a for a in ("data", "fsdp") if best.mesh[a] > 1]
    names = tuple(dims.roles[r].name for r in search.facts.storage)
    return Plan(
        model_hash=graph.model_hash,
        cluster=cluster,
        axes=tuple((a, n) for a, n in best.mesh.items() if n > 1),
        num_micro_batches=best.num_micro_batches,
        zero=best.zero,
        **options_of(best),
        precision=precision,
        default=request.default or "",
        roles=role_infos(dims),
        compute=region_tables(analysed, best.tables, best.mesh),
        storage=tuple((axis, names) for axis in storage_axes),
        leaves=leaves,
        batch=batch_layouts(analysed, best.tables, best.mesh, batch),
        collectives=tuple(c for c in best.collectives if c.count),
        time=best.time,
        memory=best.memory,
        candidates=_candidates(search, weighed),
        notes=_notes(analysed, search, best, leaves),
        product_flops=search.product_flops(best),
        gap=gap,
    )


def role_infos(dims: Dimensions) -> tuple[RoleInfo, ...]:
    """Returns the logical dimensions in the form that plans store."""
    return tuple(
        RoleInfo(
            name=r.name,
            size=r.size,
            aliases=r.aliases,
            unshardable=r.unshardable,
            common=r.common,
        )
        for r in dims.roles
    )


def region_tables(
    analysed: GraphAnalysis, tables: Mapping[int, Table], mesh: Mapping[str, int]
) -> tuple[RegionTable, ...]:
    """Returns the tables in the form that plans store, by names."""
    dims = analysed.dims
    return tuple(
        RegionTable(
            task_graph=analysed.graph.task_graphs[index].name,
            marks=tuple(str(m) for m in analysed.graph.task_graphs[index].marks),
            axes=tuple(
                (axis, tuple(dims.roles[r].name for r in table.get(axis, ())))
                for axis, size in mesh.items()
                if size > 1
            ),
        )
        for index, table in tables.items()
    )


def batch_layouts(
    analysed: GraphAnalysis,
    tables: Mapping[int, Table],
    mesh: Mapping[str, int],
    batch: Sequence[BatchLeaf],
) -> tuple[BatchLeaf, ...]:
    """Returns the leaves of the batch with their layouts."""
    homes = batch_homes(analysed.graph)
    specs = batch_specs(homes, analysed.dims, tables, mesh)
    return tuple(
        dataclasses.replace(leaf, spec=spec)
        for leaf, spec in zip(batch, specs, strict=True)
    )


def _candidates(
    search: Search, weighed: Sequence[LayoutCandidate]
) -> tuple[Candidate, ...]:
    best = weighed[0]
    candidates: dict[str, Candidate] = {}
    for s in (s for s in weighed if s.fits):
        verdict = "chosen" if s is best else verdict_of(best.time, s.time)
        candidates.setdefault(s.layout, _candidate(s, verdict))
    limit = search.cluster.memory_bytes
    for s in (s for s in weighed if not s.fits):
        over = s.memory.total_bytes - limit
        text = f"lacks {gigabytes(over)} of {gigabytes(limit)} per device"
        candidates.setdefault(s.layout, _candidate(s, text))
    fitting = [c for c in candidates.values() if c.fits]
    refused = [c for c in candidates.values() if not c.fits]
    return (*fitting[:KEPT_CANDIDATES], *refused[:4])


def _candidate(s: LayoutCandidate, verdict: str) -> Candidate:
    return Candidate(
        layout=s.layout,
        time=s.time,
        memory=s.memory,
        fits=s.fits,
        verdict=verdict,
    )


def verdict_of(best: TimeTerms, other: TimeTerms) -> str:
    """Returns why a plan that fits was not chosen.

    The text has the slowdown, and the term of the step time that grew most.

    Args:
        best: Time of the chosen plan.
        other: Time of the other plan.
    """
    slower = other.step_seconds - best.step_seconds
    if slower <= 0:
        return "equally fast, more memory or communication"
    names = [f.name for f in dataclasses.fields(best)]
    worst = max(names, key=lambda n: getattr(other, n) - getattr(best, n))
    return f"{slower * 1e3:.2f} ms slower ({worst.removesuffix('_seconds')})"


def _notes(
    analysed: GraphAnalysis,
    search: Search,
    best: LayoutCandidate,
    leaves: Sequence[LeafPlan],
) -> tuple[str, ...]:
    graph, dims = analysed.graph, analysed.dims
    notes = [
        f"no rule for the primitive {name!r}: everything around it stays whole"
        for name in graph.unknown_primitives
    ]
    marked = [g for g in graph.task_graphs if g.marks]
    idle = idle_marks(graph, search.options)
    if len(marked) > len(idle):
        obeyed = len(marked) - len(idle)
        notes.append(f"{obeyed} {OBEYED[obeyed > 1]}")
    notes += [*idle, *unplanned_pins(graph, best.mesh)]
    notes += _held_notes(search, best.mesh, leaves)
    named = dict.fromkeys(name for t in graph.params for name in t.names if name)
    if named:
        notes.append(
            f"the metadata names the dimensions {', '.join(named)}; a name that means "
            "a mesh axis belongs into axis_names="
        )
    frozen = search.request.state_bytes
    if frozen > FROZEN_SHARE * search.cluster.memory_bytes:
        notes.append(
            f"what is not trained stays whole on every device: {gigabytes(frozen)}"
        )
    minor = sorted(dims.roles[r].name for r in _unsaid(analysed, search, best))
    if minor and best.mesh["tensor"] > 1:
        notes.append(
            f"not expressible as a PartitionSpec (minor part of a fused dimension): "
            f"{', '.join(minor)}"
        )
    notes += [*_cut_notes(graph, dims, best), *_hidden_notes(graph, dims, best)]
    notes += whole_notes(graph, dims, _sharded(best))
    notes += _torus_notes(search, best)
    if best.offload and not search.hosting.is_host_memory_known:
        notes.append(UNCOUNTED_MOVES)
    whole = [leaf for leaf in leaves if leaf.note]
    if whole:
        names = ", ".join(leaf.path for leaf in whole[:3])
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        notes.append(f"fsdp leaves {names}{more} whole; why(path) says why")
    return tuple(notes)


def _held_notes(
    search: Search, mesh: Mapping[str, int], leaves: Sequence[LeafPlan]
) -> list[str]:
    """Returns notes on dimensions that operations need in another layout than metadata.

    Such a dimension is gathered for an operation, or its axis shards another dimension.
    """
    specs = {leaf.path: leaf.param_spec for leaf in leaves}
    held: dict[str, list[str]] = {}
    elsewhere: dict[str, list[str]] = {}
    for number, pairs in search.options.stored.items():
        path = search.graph.tensors[number].path
        for dim, axis in pairs:
            if mesh[axis] == 1:
                continue
            spec = specs[path]
            if axis in spec[dim]:
                held.setdefault(axis, []).append(f"{path} dim {dim}")
                continue
            taken = next((d for d, axes in enumerate(spec) if axis in axes), None)
            other = "no dimension" if taken is None else f"dim {taken}"
            elsewhere.setdefault(axis, []).append(f"{path} dim {dim}, not {other}")
    return [
        *(
            f"stored over {axis} as the metadata says, and gathered where it is read, "
            "because operations there are cut along other dimensions or need all of "
            f"it: {_first_of(places)}"
            for axis, places in held.items()
        ),
        *(
            f"{axis} shards another dimension than the metadata says, because an "
            "operation that reads it is cut along that one and an axis shards a tensor "
            f"once: the metadata says {_first_of(places)}"
            for axis, places in elsewhere.items()
        ),
    ]


def _first_of(places: Sequence[str]) -> str:
    return places[0] + f" and {len(places) - 1} more" * (len(places) > 1)


def _sharded(best: LayoutCandidate) -> set[int]:
    return {
        role
        for table in best.tables.values()
        for axis, roles in table.items()
        if best.mesh[axis] > 1
        for role in roles
    }


def _hidden_notes(graph: Graph, dims: Dimensions, best: LayoutCandidate) -> list[str]:
    return [
        f"{dims.roles[role].name} is the minor part of a dimension for {count} "
        f"operations (the first: {op.kind}{f' at {op.scope}' if op.scope else ''}): no "
        "PartitionSpec names it there, so every device computes all of it, which the "
        "times do not count"
        for role, (op, count) in computed_whole(graph, dims, _sharded(best)).items()
    ]


def _cut_notes(graph: Graph, dims: Dimensions, best: LayoutCandidate) -> list[str]:
    sharded = _sharded(best)
    moved: dict[int, tuple[int, int]] = {}
    for cut in dims.cuts:
        op = graph.ops[cut.op]
        held = dims.layouts[(op.operands + op.results)[cut.slot]][cut.dim]
        for role in sharded.intersection(held):
            here, there = moved.get(role, (0, 0))
            moved[role] = (
                here + op.trip * cut.nbytes,
                there + op.trip * cut.other_nbytes,
            )
    return [
        f"{dims.roles[role].name} occurs twice in some operations, as a sequence does "
        f"in attention, and is sharded once: values of {gigabytes(here)} (unsharded) "
        "change layout for it"
        + (f"; of the other side it would be {gigabytes(there)}" * (here != there))
        for role, (here, there) in sorted(moved.items())
    ]


def _torus_notes(search: Search, best: LayoutCandidate) -> list[str]:
    """Returns notes on axes over which the compiler replaces reduce-scatter by
    all-reduce.

    Some compilers do so for the gradients if an axis spans all chips of a torus.
    """
    axes = ["fsdp", *(["data"] if best.zero >= 2 else [])]
    torus_notes = []
    for axis in axes:
        parts = axis_parts((axis,), best.mesh, search.cluster)
        if runs_as("reduce-scatter", parts, search.cluster) != "all-reduce":
            continue
        gathers = runs_as("all-gather", parts, search.cluster) == "all-reduce"
        also = " and gathers parameters by all-reduces too" if gathers else ""
        torus_notes.append(
            f"{axis} {best.mesh[axis]} spans all chips of a torus, over which this "
            f"compiler reduces gradients whole{also}: twice the traffic, which the "
            "predicted step counts"
        )
    return torus_notes


def _unsaid(analysed: GraphAnalysis, search: Search, best: LayoutCandidate) -> set[int]:
    """Returns parameters' minor roles that no model axis shards."""
    axes = ("expert", "tensor")
    cut = {r for t in best.tables.values() for a in axes for r in t.get(a, ())}
    return {
        role
        for t in analysed.graph.params
        for atoms in analysed.dims.layouts[t.id]
        for role in search.options.minor & set(atoms[1:])
        if cut.isdisjoint(atoms)
    }
