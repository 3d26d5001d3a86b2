"""Memory of a layout, by term, from the same rows and layouts as the cost.

What the backward pass reads again is known per operation (``Op.saves``); inside a
checkpointed region only its inputs are kept and one instance is rebuilt at a time.
Broadcasts and casts are not counted: the compiler repeats them where they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.cost import Setting
from whalejax.planner.dimensions import Dimensions, Layout
from whalejax.planner.graph import LOOPS, Graph, Op
from whalejax.planner.layout import Table, shards, spec_of
from whalejax.planner.plan import LeafPlan, MemoryTerms


_REPEATED = ("broadcast_in_dim", "convert_element_type", "iota", "copy")
"""Operations the compiler repeats rather than keep their result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Equal tensors that memory must hold, counted.

    Attributes:
        layout, sizes: atoms of each dimension.
        nbytes: of one of them, unsharded.
        task_graph: whose table lays it out.
        count: how many.
    """

    layout: Layout
    sizes: Layout
    nbytes: int
    task_graph: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """What a forward and backward pass holds, folded.

    Attributes:
        saved: kept from forward to backward.
        rebuilt: for each different checkpointed region, what it saves inside when it
            runs again; one at a time is alive.
        largest: the largest temporaries of single operations.
    """

    saved: tuple[Kept, ...]
    rebuilt: tuple[tuple[Kept, ...], ...]
    largest: tuple[Kept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Optimizer state: bytes that follow a parameter, by its path, and the rest."""

    by_path: Mapping[str, int]
    other_bytes: int = 0


def residents(graph: Graph, dims: Dimensions, weight: Sequence[bool]) -> Residents:
    """Find what the backward pass needs.

    Args:
        graph: the captured loss.
        dims: its logical dimensions.
        weight: for every tensor, whether it depends on parameters alone.
    """
    maker: dict[int, Op] = {t: op for op in graph.ops for t in op.results}
    saved: dict[int, tuple[int, int]] = {}
    inside: dict[int, dict[int, tuple[int, int]]] = {}
    for op in graph.ops:
        slots = op.operands + op.results
        for slot in op.saves:
            tensor = _origin(slots[slot], maker)
            if weight[tensor] or graph.tensors[tensor].kind != "value":
                continue
            made = maker.get(tensor)
            if op.remat is None or (made is not None and made.remat != op.remat):
                saved[tensor] = (op.trip, op.task_graph)
            else:
                inside.setdefault(op.remat, {})[tensor] = (1, op.task_graph)
        if op.remat is not None:
            for tensor in op.operands:
                made = maker.get(tensor)
                outside = made is None or made.remat != op.remat
                value = graph.tensors[tensor].kind == "value"
                if outside and value and not weight[tensor]:
                    saved[tensor] = (op.trip, op.task_graph)
    rebuilt = {_fold(graph, dims, entry) for entry in inside.values()}
    return Residents(
        saved=_fold(graph, dims, saved),
        rebuilt=tuple(rebuilt),
        largest=_largest(graph, dims, weight),
    )


def _origin(tensor: int, maker: Mapping[int, Op]) -> int:
    while tensor in maker and maker[tensor].kind in _REPEATED:
        operands = maker[tensor].operands
        if not operands:
            break
        tensor = operands[0]
    return tensor


def _fold(
    graph: Graph, dims: Dimensions, entries: Mapping[int, tuple[int, int]]
) -> tuple[Kept, ...]:
    counts: Counter[tuple[Layout, Layout, int, int]] = Counter()
    for tensor, (trip, task_graph) in entries.items():
        nbytes = graph.tensors[tensor].nbytes
        counts[dims.layouts[tensor], dims.sizes[tensor], nbytes, task_graph] += trip
    return tuple(
        Kept(layout=a, sizes=b, nbytes=n, task_graph=t, count=c)
        for (a, b, n, t), c in counts.items()
    )


def _largest(
    graph: Graph, dims: Dimensions, weight: Sequence[bool], keep: int = 8
) -> tuple[Kept, ...]:
    entries = {
        t: (1, op.task_graph)
        for op in graph.ops
        for t in op.results
        if not weight[t] and op.kind not in _REPEATED and op.kind not in LOOPS
    }
    order = sorted(entries, key=lambda t: -graph.tensors[t].nbytes)
    return _fold(graph, dims, {t: entries[t] for t in order[:keep]})


def kept_bytes(
    kept: Sequence[Kept], tables: Mapping[int, Table], s: Setting
) -> list[float]:
    """Bytes on one device of each entry, in one micro-batch, counts multiplied."""
    found = []
    for entry in kept:
        spec = spec_of(entry.layout, entry.sizes, tables[entry.task_graph], s.mesh)
        nbytes = entry.nbytes * entry.count / shards(spec, s.mesh)
        if any(role in s.batch_roles for atoms in entry.layout for role in atoms):
            nbytes /= s.num_micro_batches
        found.append(nbytes)
    return found


def memory_of(
    leaves: Sequence[LeafPlan],
    leaf_bytes: Sequence[int],
    found: Residents,
    tables: Mapping[int, Table],
    s: Setting,
    optimizer: OptimizerBytes,
    state_bytes: int,
    cast_bytes: float,
) -> MemoryTerms:
    """Memory on one device.

    Args:
        leaves: layouts of the parameters.
        leaf_bytes: bytes of each, unsharded, as stored.
        found: what a pass holds.
        tables: compute table of each TaskGraph.
        s: mesh and micro-batches.
        optimizer: bytes of its state, unsharded.
        state_bytes: bytes of what is not trained.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
    """
    params = gradients = state = working = 0.0
    gathered = [0.0]
    for leaf, nbytes in zip(leaves, leaf_bytes, strict=True):
        params += nbytes / shards(leaf.param_spec, s.mesh)
        gradients += nbytes / shards(leaf.gradient_spec, s.mesh)
        owned = optimizer.by_path.get(leaf.path, 0)
        state += owned / shards(leaf.optimizer_spec, s.mesh)
        used = nbytes * cast_bytes / shards(leaf.compute_spec, s.mesh)
        if leaf.compute_spec != leaf.param_spec:
            gathered.append(used)
        elif cast_bytes != 1.0:
            working += used
        if leaf.gradient_spec != leaf.compute_spec:
            gathered.append(nbytes / shards(leaf.compute_spec, s.mesh))
    saved = math.fsum(kept_bytes(found.saved, tables, s))
    rebuilt = max(
        (math.fsum(kept_bytes(r, tables, s)) for r in found.rebuilt), default=0.0
    )
    largest = max(kept_bytes(found.largest, tables, s), default=0.0)
    working += rebuilt + 2 * largest + 2 * max(gathered)
    if s.num_micro_batches > 1:
        working += gradients
    return MemoryTerms(
        params_bytes=int(params),
        gradients_bytes=int(gradients),
        optimizer_bytes=int(state) + optimizer.other_bytes,
        state_bytes=state_bytes,
        activations_bytes=int(saved),
        working_bytes=int(working),
    )
