"""Memory of the tensors that a layout saves for the backward pass, and of temporaries.

``Op.saves`` lists the values that an operation's backward pass reads. A checkpointed
region saves only its inputs, and one region is recomputed at a time. Broadcasts and
casts do not count, as the compiler repeats them in each reader.

If a device has few samples, TPU compilers move a part of an extent into the batch of a
convolution. They also write the operand and the result in that form. Layouts differ in
the samples on a device. So ``SavedTensorGroup.least_samples`` has the smallest number
with which such a buffer exists.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.model.dimensions import Dimensions, Layout, roles_of
from whalejax.planner.model.graph import CONVOLUTION, LOOPS, Graph, Op
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.shard_counts import ShardCounts


SPREAD = frozenset({"broadcast_in_dim", "iota"})
"""Operations with large results of small operands, which every compiler repeats."""

_REPEATED = SPREAD | frozenset({"convert_element_type", "copy"})
"""Operations that the compiler repeats instead of saving their results."""

CHEAP = _REPEATED | frozenset(
    {
        "add",
        "add_any",
        "sub",
        "mul",
        "neg",
        "max",
        "min",
        "select_n",
        "square",
        "integer_pow",
        "sign",
        "abs",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    }
)
"""Elementwise operations that fusions repeat in the backward pass. Their results are
saved only if another operation writes them to memory.
"""


SMALL: Final = 16
"""Factor by which ignored tensors, such as row maxima, are smaller than others."""

FEW_SAMPLES: Final = 8
"""Number of samples on a device from which TPU compilers leave convolutions unchanged.

With fewer, they move a part of an extent into the batch (libtpu 0.0.42, v5e and v6e: 1
to 5 samples, not 8). Results then exist in two forms. From 2 samples on, values that
are computed from the statistics of each sample are written for every element.
"""

LARGE_EXTENT: Final = 64
"""Smallest extent of which compilers were observed to move a part."""


class TensorEntry(NamedTuple):
    """A tensor in memory.

    Attributes:
        tensor: Id of the tensor.
        nbytes: Unsharded bytes of the tensor.
        home: Index of the operation whose TaskGraph sets its sharding.
        least_samples: Attribute of ``SavedTensorGroup``.
    """

    tensor: int
    nbytes: int
    home: int
    least_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorGroup:
    """Group of equal tensors that memory must hold.

    Attributes:
        layout, sizes: Logical dimensions in each dimension, and their sizes.
        nbytes: Unsharded bytes of one tensor.
        task_graph: TaskGraph whose table sets the sharding.
        count: Number of equal tensors.
        made: Kind of the producer. ``"product"`` is a product of a value with a weight,
            ``"name"`` names a value for checkpointing, ``""`` is any other.
        ends: Whether only the first or last dimension can be in lanes.
        last: Number of trailing dimensions that another form of the value joins into
            one, such as groups of channels.
        least_samples: If above 0, smallest number of samples on a device with which the
            tensors are in memory. They also need fewer than ``FEW_SAMPLES`` samples,
            and an extent of at least ``LARGE_EXTENT``.
    """

    layout: Layout
    sizes: Layout
    nbytes: int
    task_graph: int
    count: int
    made: str = ""
    ends: bool = False
    last: int = 1
    least_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """Tensors that memory holds during both passes; equal ones are one group.

    Attributes:
        saved: Tensors that the forward pass saves for the backward pass.
        rebuilt: Tensors that the recomputation of each distinct checkpointed region
            saves. One region is live at a time.
        largest: Largest temporaries of single operations.
    """

    saved: tuple[SavedTensorGroup, ...]
    rebuilt: tuple[tuple[SavedTensorGroup, ...], ...]
    largest: tuple[SavedTensorGroup, ...]


def residents(
    graph: Graph,
    dims: Dimensions,
    weight: Sequence[bool],
    *,
    copies_kernels: bool,
) -> Residents:
    """Returns the tensors that the backward pass needs.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        weight: Whether each tensor depends on parameters alone.
        copies_kernels: Attribute of ``meshes.CompilerProfile``.
    """
    finder = _MaterializedTensors(graph, weight)
    saved: dict[int, tuple[int, int]] = {}
    inside: dict[int, dict[int, tuple[int, int]]] = {}
    turned: dict[int | None, list[Op]] = {}
    for op in graph.ops:
        slots = op.operands + op.results
        if copies_kernels and op.kind == CONVOLUTION:
            if graph.tensors[op.operands[0]].differentiable:
                turned.setdefault(op.remat, []).append(op)
        for slot in op.saves:
            for tensor in finder.behind(slots[slot]):
                if op.remat is None or finder.outside(tensor, op):
                    saved[tensor] = (op.trip, op.task_graph)
                else:
                    inside.setdefault(op.remat, {})[tensor] = (1, op.task_graph)
        if op.remat is not None:
            for tensor in op.operands:
                if finder.outside(tensor, op) and finder.counts(tensor):
                    saved[tensor] = (op.trip, op.task_graph)
    rebuilt = {
        fold_kept(graph, dims, inside.get(remat, {}))
        + _kernels(graph, dims, turned.get(remat, []), loops=False)
        for remat in dict.fromkeys((*inside, *turned))
        if remat is not None
    }
    kept = fold_kept(graph, dims, saved, _producer_kinds(graph, weight))
    return Residents(
        saved=kept + _kernels(graph, dims, turned.get(None, []), loops=True),
        rebuilt=tuple(rebuilt),
        largest=_largest(graph, dims, weight),
    )


def _kernels(
    graph: Graph, dims: Dimensions, convolutions: Sequence[Op], *, loops: bool
) -> tuple[SavedTensorGroup, ...]:
    kernels: list[SavedTensorGroup] = []
    for op in convolutions:
        times = op.trip if loops else 1
        entry = {op.operands[1]: (times, op.task_graph)}
        kernels += fold_kept(graph, dims, entry)
    return tuple(kernels)


class _MaterializedTensors:
    def __init__(self, graph: Graph, weight: Sequence[bool]) -> None:
        self.graph = graph
        self.weight = weight
        self.maker = {t: op for op in graph.ops for t in op.results}
        self.kernels: dict[int, set[int | None]] = {}
        for op in graph.ops:
            for t in op.operands:
                self.kernels.setdefault(t, set()).add(op.kernel)
        # Operands of products and lookups are always in memory.
        self.exists = {
            t
            for op in graph.ops
            if not (op.elementwise or op.reshape or op.kind.startswith("reduce"))
            for t in op.operands
        }

    def counts(self, tensor: int) -> bool:
        """Returns whether a tensor is a computed value that can be in memory.

        Values inside one fused kernel are never in memory.
        """
        if self.inner(tensor):
            return False
        return self.graph.tensors[tensor].kind == "value" and not self.weight[tensor]

    def inner(self, tensor: int) -> bool:
        made = self.maker.get(tensor)
        if made is None or made.kernel is None:
            return False
        return self.kernels.get(tensor) == {made.kernel}

    def outside(self, tensor: int, op: Op) -> bool:
        made = self.maker.get(tensor)
        return made is None or made.remat != op.remat

    def behind(self, tensor: int) -> set[int]:
        """Returns the tensors from which fusions recompute a value, or the value."""
        behind: set[int] = set()
        seen: set[int] = set()
        stack = [tensor]
        while stack:
            t = stack.pop()
            if t in seen:
                continue
            seen.add(t)
            op = self.maker.get(t)
            if not self.counts(t):
                # A fused kernel computes its inner values from its operands.
                stack.extend(op.operands if op is not None and self.inner(t) else ())
                continue
            rebuilt = op is not None and (
                op.reshape
                or op.kind in _REPEATED
                or (op.kind in CHEAP and t not in self.exists)
            )
            if rebuilt and op is not None:
                stack.extend(op.operands)
            else:
                behind.add(t)
        return behind


def _producer_kinds(graph: Graph, weight: Sequence[bool]) -> dict[int, str]:
    producer_kinds: dict[int, str] = {}
    for op in graph.ops:
        weighs = sum(weight[t] for t in op.operands[:2]) == 1 < len(op.operands)
        if op.kind == "name":
            producer_kinds.update(dict.fromkeys(op.results, "name"))
        elif op.matmul is not None and weighs:
            producer_kinds.update(dict.fromkeys(op.results, "product"))
    return producer_kinds


def fold_kept(
    graph: Graph,
    dims: Dimensions,
    entries: Mapping[int, tuple[int, int]],
    made: Mapping[int, str] | None = None,
) -> tuple[SavedTensorGroup, ...]:
    """Returns tensors that memory must hold, with equal ones as one group.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        entries: (Number of tensors, TaskGraph that sets the sharding) by tensor id.
        made: Attribute ``SavedTensorGroup.made`` of some tensors; default: none.
    """
    counts: Counter[tuple[Layout, Layout, int, int, str]] = Counter()
    cut = {t: op.chunks for op in graph.ops if op.chunks > 1 for t in op.results}
    whole = graph.leaving() if cut else frozenset()
    for tensor, (trip, task_graph) in entries.items():
        nbytes = graph.tensors[tensor].nbytes
        if tensor not in whole:
            nbytes //= cut.get(tensor, 1)
        kind = (made or {}).get(tensor, "")
        layout, sizes = dims.layouts[tensor], dims.sizes[tensor]
        counts[layout, sizes, nbytes, task_graph, kind] += trip
    return tuple(
        SavedTensorGroup(layout=a, sizes=b, nbytes=n, task_graph=t, count=c, made=k)
        for (a, b, n, t, k), c in counts.items()
    )


def _largest(
    graph: Graph, dims: Dimensions, weight: Sequence[bool], keep: int = 8
) -> tuple[SavedTensorGroup, ...]:
    entries = {
        t: (1, op.task_graph)
        for op in graph.ops
        for t in op.results
        if not weight[t] and op.kind not in _REPEATED and op.kind not in LOOPS
    }
    cut = {t: op.chunks for op in graph.ops if op.chunks > 1 for t in op.results}
    order = sorted(entries, key=lambda t: -graph.tensors[t].nbytes // cut.get(t, 1))
    kept = fold_kept(graph, dims, {t: entries[t] for t in order[:keep]})
    return tuple(dataclasses.replace(entry, count=1) for entry in kept)


def kept_bytes(
    kept: Sequence[SavedTensorGroup], tables: Mapping[int, Table], s: CostSetting
) -> list[Any]:
    """Returns the bytes of each group per device and micro-batch."""
    result = []
    known: dict[tuple[Layout, Layout, int], ShardCounts] = {}
    for entry in kept:
        key = entry.layout, entry.sizes, entry.task_graph
        if key not in known:
            known[key] = s.shard_counts(*key[:2], tables[entry.task_graph])
        cut = known[key]
        nbytes = entry.nbytes * entry.count / cut.num_shards
        if roles_of(entry.layout) & s.batch_roles:
            nbytes = nbytes / s.num_micro_batches
        if s.cluster.compiler.lanes > 1:
            nbytes = nbytes * _padding(entry, cut, s)
            if entry.least_samples:
                nbytes = nbytes * _few_samples(entry, cut, s)
        result.append(nbytes)
    return result


def _local_sizes(
    entry: SavedTensorGroup, cut: ShardCounts, s: CostSetting
) -> list[Any]:
    sizes = []
    for roles, atoms, parts in zip(entry.layout, entry.sizes, cut.per_dim, strict=True):
        size = math.prod(atoms) / parts
        if s.batch_roles.intersection(roles):
            size = size / s.num_micro_batches
        sizes.append(size)
    return sizes


def _few_samples(entry: SavedTensorGroup, cut: ShardCounts, s: CostSetting) -> Any:
    samples, *extents = _local_sizes(entry, cut, s)[: -entry.last] or [np.inf]
    largest = functools.reduce(np.maximum, extents, 0.0)
    few = (samples >= entry.least_samples) & (samples < FEW_SAMPLES)
    return np.where(few & (largest >= LARGE_EXTENT), 1.0, 0.0)


def _padding(entry: SavedTensorGroup, cut: ShardCounts, s: CostSetting) -> Any:
    """Returns a tensor's growth if its least padded dimension is padded to lanes."""
    lanes = s.cluster.compiler.lanes
    sizes = _local_sizes(entry, cut, s)
    if entry.ends:
        sizes = [*sizes[:1], math.prod(sizes[-entry.last :])] if sizes else []
    wasted = [np.ceil(n / lanes) * lanes / np.maximum(n, 1.0) for n in sizes]
    return functools.reduce(np.minimum, wasted) if wasted else 1.0


class FewSamples:
    """Saved values and temporaries that exist only with few samples on a device.

    Args:
        graph: Captured loss.
        lanes: Number of lanes of the compiler; with 1 there are no such buffers.
        is_value: Function that returns whether a tensor is computed from data.
        entry: Function from a tensor to its ``TensorEntry``.

    Attributes:
        kept: Saved values by operation. A convolution's operand is saved in two forms.
            A normalisation by statistics of samples saves the mean, the factor and the
            other operand, each as large as the result.
        convolves: Whether the compiler may move an extent of some convolution.
    """

    def __init__(
        self,
        graph: Graph,
        lanes: int,
        is_value: Callable[[int], bool],
        entry: Callable[[int], TensorEntry],
    ) -> None:
        self.graph = graph
        self.lanes = lanes
        self.kept: dict[int, Counter[TensorEntry]] = {}
        self.convolves = any(map(self._in_space, graph.ops))
        if not self.convolves:
            return
        spatial, statistics = self._spatial()
        doubled: set[tuple[int | None, int]] = set()
        for i, op in enumerate(graph.ops):
            if op.trip > 1 or not op.results:
                continue
            if not graph.tensors[op.results[0]].differentiable:
                continue
            key = op.remat, op.operands[0] if op.operands else -1
            if self._in_space(op) and is_value(key[1]) and key not in doubled:
                doubled.add(key)
                self.kept[i] = Counter({entry(key[1])._replace(least_samples=1): 1})
            if op.elementwise and not spatial.isdisjoint(op.operands):
                own = statistics.intersection(op.operands)
                if any(self._of_samples(t, op.results[0]) for t in own):
                    result = graph.tensors[op.results[0]]
                    one = TensorEntry(result.id, result.nbytes, i, least_samples=2)
                    self.kept[i] = Counter({one: 1 + (op.kind == "mul")})

    def _spatial(self) -> tuple[set[int], set[int]]:
        """Returns values computed from spatial convolutions, and their reductions."""
        spatial: set[int] = set()
        statistics: set[int] = set()
        for op in self.graph.ops:
            if self._in_space(op):
                spatial.update(op.results)
                continue
            reads = not spatial.isdisjoint(op.operands)
            same = op.elementwise or op.reshape
            if reads and same:
                spatial.update(op.results)
            elif reads and op.kind.startswith("reduce_"):
                statistics.update(op.results)
            elif same and not statistics.isdisjoint(op.operands):
                statistics.update(op.results)
        return spatial, statistics

    def _in_space(self, op: Op) -> bool:
        if op.kind != CONVOLUTION or op.trip > 1 or self.lanes == 1:
            return False
        overlaps = any(window.span > window.stride for window in op.windows)
        return overlaps and len(self.graph.tensors[op.results[0]].shape) >= 4

    def _of_samples(self, tensor: int, result: int) -> bool:
        """Returns whether a tensor has one number for all of a sample's extent."""
        small, large = self.graph.tensors[tensor], self.graph.tensors[result]
        own = small.shape[:2] == (*large.shape[:1], 1) != large.shape[:2]
        return own and small.nbytes * SMALL <= large.nbytes

    def before(self, end: int, region: int | None = None) -> Counter[TensorEntry]:
        """Returns the saved values of a region's operations before ``end``."""
        result: Counter[TensorEntry] = Counter()
        for i, entries in self.kept.items():
            if i < end and self.graph.ops[i].remat == region:
                result += entries
        return result

    def working(self, number: int) -> Counter[TensorEntry]:
        """Returns the temporaries of an operation's backward pass.

        They are the gradients on both sides of a normalisation, and a convolution's
        float32 result in two forms.
        """
        op = self.graph.ops[number]
        if not self.convolves:
            return Counter()
        if op.elementwise:
            return Counter(dict.fromkeys(self.kept.get(number, ()), 2))
        if not self._in_space(op):
            return Counter()
        tensor = self.graph.tensors[op.results[0]]
        if not tensor.differentiable:
            return Counter()
        nbytes = math.prod(tensor.shape) * 4
        return Counter({TensorEntry(tensor.id, nbytes, number, least_samples=1): 2})
