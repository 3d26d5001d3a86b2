"""Layouts of parameters, gradients and optimizer state, in computation and storage.

ZeRO and FSDP shard stored parameters, gradients and optimizer state over axes along
which the computation divides the batch. All parameters try logical dimensions in one
order, those with most bytes first.

The module is long because everything that layouts need about a parameter comes from the
operations that read it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.model.analysis import weight_homes
from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import (
    CONVOLUTION,
    LINEAR,
    LOOKUPS,
    LOOPS,
    Graph,
    Tensor,
    makes_weights,
)
from whalejax.planner.model.repeated_layers import sliced_params
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.sharding.fused_parameters import (
    FusedLayout,
    ParameterForms,
    lying,
)
from whalejax.planner.sharding.layout import Spec, Table, extend_spec, spec_of
from whalejax.planner.sharding.metadata_constraints import pins_of
from whalejax.planner.sharding.program_regions import read_bytes
from whalejax.planner.sharding.strategies import cut_roles


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Bytes of the optimizer state, by parameter and in total.

    Attributes:
        by_path: Bytes of state per parameter, by its path.
        other_bytes: Bytes of all other state.
        operations: Number of roots, quotients and the like per element in an update.
            On CPUs, they take longer than the memory access.
    """

    by_path: Mapping[str, int]
    other_bytes: int = 0
    operations: float = 0.0

    @property
    def key(self) -> Hashable:
        """Key that equal bytes share."""
        return tuple(self.by_path.items()), self.other_bytes, self.operations

    @property
    def followed_bytes(self) -> int:
        """Total bytes of the state of parameters, without step counts and the like."""
        return sum(self.by_path.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGroup:
    """Parameters with equal layouts in every plan, such as those of equal layers.

    Attributes:
        shape: Shape of each parameter.
        layout, sizes: Roles in each dimension, major role first, and their sizes.
        fused: Sharding of a fused parameter; None if it is not fused.
        home: TaskGraph that first computes with the parameters.
        order: Dimensions that storage may shard, best first.
        pinned: Dimension that metadata shards over ``fsdp``, or None.
        gathers: Number of gathers of a parameter in a micro-batch if it is stored in
            shards: one for each form that the forward pass reads, and one more if the
            backward pass needs it.
        turns: Number of gathers that XLA's CPU compiler transposes if the last
            dimension is sharded. It is 1 for convolutions, which transpose their
            operands themselves, and 0 for looked-up tables.
        uses: Number of operations that read a parameter, each of which computes a
            gradient of it. A reader of a slice counts as the slice's fraction.
        multiplied: Whether the parameters are float32 and only products read them.
        narrowed: Bytes of a parameter as read, divided by its stored bytes and by
            ``Request.cast_bytes``. It differs from 1 if only some TaskGraphs compute in
            16 bits, and for quantised dtypes and dtypes other than float32.
        nbytes: Bytes of one parameter.
        trained: Whether the parameters have gradients and optimizer state.
        held: (Dimension, mesh axis) pairs that metadata shards in storage, but the
            computation does not.
        slices: Number of slices along the first dimension, if a loop reads and gathers
            one at a time; else 1.
        looked_up: Whether only lookups of rows read the parameters.
        chunked: Whether the gradient is summed over chunks of tokens, in the stored
            dtype.
        optimizer_bytes: Bytes of optimizer state of one parameter.
        operations: Number of roots, quotients and the like in one parameter's update.
    """

    shape: tuple[int, ...]
    layout: Layout
    sizes: Layout
    fused: FusedLayout | None
    home: int
    order: tuple[int, ...]
    pinned: int | None
    gathers: int
    turns: int
    uses: float
    multiplied: bool
    nbytes: int
    optimizer_bytes: int
    operations: float = 0.0
    narrowed: float = 1.0
    trained: bool = True
    held: tuple[tuple[int, str], ...] = ()
    slices: int = 1
    chunked: bool = False
    looked_up: bool = False

    @property
    def sharding(self) -> Hashable:
        """Properties that decide the number of shards in each layout."""
        stored = self.order, self.held, self.trained
        return self.shape, self.layout, self.sizes, self.fused, self.home, stored

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one unsharded gradient; 0 without a gradient."""
        return self.nbytes if self.trained else 0

    @property
    def updated_bytes(self) -> int:
        """Bytes that an update moves.

        It reads the gradient, and reads and writes the parameter and its state.
        """
        if not self.trained:
            return 0
        return 3 * self.nbytes + 2 * self.optimizer_bytes

    def moved_bytes(self, compiler: CompilerProfile, selected: Any = False) -> Any:
        """Returns the bytes of one parameter in a transfer to its readers.

        Args:
            compiler: Compiler of the program.
            selected: Whether looked-up rows are sharded, or an array over meshes;
                default: False. Such rows move in the stored dtype.
        """
        if not self.multiplied or not compiler.narrow_products:
            return self.nbytes / 1
        if self.looked_up and isinstance(selected, np.ndarray):
            return np.where(selected, self.nbytes / 1, self.nbytes / 2)
        return self.nbytes / (1 if self.looked_up and selected else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafLayout:
    """Layouts of the parameters of one group; see ``LeafPlan``."""

    compute: Spec
    param: Spec
    gradient: Spec
    optimizer: Spec

    @property
    def has_sharded_rows(self) -> bool:
        """Whether the rows that lookups read are sharded."""
        return any(self.compute[-2:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafFacts:
    """Properties of the parameters that the search needs, computed once.

    Attributes:
        tensors: Parameters of the model.
        groups: (Group, number of its parameters) pairs.
        group_of: Index of each parameter's group.
        role_names: Names of the roles in each parameter's dimensions.
        storage: Roles in the order in which storage tries them.
        common: Roles that values have and parameters do not: batch and sequences.
        optimizer_other_bytes: Bytes of optimizer state that belong to no parameter.
    """

    tensors: tuple[Tensor, ...]
    groups: tuple[tuple[LeafGroup, int], ...]
    group_of: tuple[int, ...]
    role_names: tuple[tuple[tuple[str, ...], ...], ...]
    storage: tuple[int, ...]
    common: frozenset[int]
    optimizer_other_bytes: int

    @property
    def homes(self) -> tuple[int, ...]:
        """TaskGraph that first computes with each parameter."""
        return tuple(self.groups[index][0].home for index in self.group_of)

    @classmethod
    def of(
        cls,
        graph: Graph,
        dims: Dimensions,
        reading: ParameterForms,
        optimizer: OptimizerBytes,
        *,
        narrowed: bool = False,
        cast_bytes: float = 1.0,
    ) -> LeafFacts:
        """Returns the properties of a loss's parameters.

        Args:
            graph: Captured loss.
            dims: Logical dimensions of the loss.
            reading: Forms in which the parameters are read.
            optimizer: Bytes of the optimizer state.
            narrowed: Whether only some TaskGraphs compute in 16 bits; default: False.
            cast_bytes: Bytes of a float32 parameter in computation, over its stored
                bytes; default: 1.
        """
        tensors = graph.params
        homes = weight_homes(graph, reading.weight)
        gathers, storage = _gathers(graph, reading.weight), reading.storage
        multiplied = graph.only_multiplied()
        read = _read(graph, reading.weight, narrowed, cast_bytes)
        readers = _readers(graph, reading.weight)
        rank = {role: place for place, role in enumerate(storage)}
        sliced, chunked = sliced_params(graph), _chunked(graph, reading.weight)
        tables = looked_up_tables(graph, readers)
        narrow = _narrow(tables, tensors)
        groups = []
        for t in tensors:
            stored = (dim for dim, axis in pins_of(t) if axis == "fsdp")
            pinned = next((dim for dim in stored if t.shape[dim] > 1), None)
            groups.append(
                LeafGroup(
                    shape=t.shape,
                    layout=dims.layouts[t.id],
                    sizes=dims.sizes[t.id],
                    fused=reading.fused.get(t.id),
                    home=homes.get(t.id, 0),
                    order=_order(pinned, dims.layouts[t.id], rank, t.id in narrow),
                    pinned=pinned,
                    gathers=gathers[t.id],
                    turns=_turns(readers[t.id], gathers[t.id]),
                    uses=_uses(readers[t.id]),
                    multiplied=multiplied[t.id],
                    nbytes=t.nbytes,
                    optimizer_bytes=optimizer.by_path.get(t.path, 0),
                    operations=0.0
                    if t.frozen
                    else optimizer.operations * math.prod(t.shape),
                    narrowed=read.get(t.id, 1.0),
                    trained=not t.frozen,
                    slices=t.shape[0] if t.id in sliced else 1,
                    chunked=t.id in chunked,
                    looked_up=t.id in tables,
                )
            )
        counted, group_of = _count_equal_groups(groups)
        return cls(
            tensors=tensors,
            groups=counted,
            group_of=group_of,
            role_names=tuple(_role_names(t, dims) for t in tensors),
            storage=storage,
            common=cut_roles(graph, dims) | {r.index for r in dims.batch},
            optimizer_other_bytes=optimizer.other_bytes,
        )

    def at(self, homes: Mapping[int, int]) -> LeafFacts:
        """Returns the same parameters with other owner TaskGraphs.

        Args:
            homes: Result of ``weight_homes``.
        """
        pairs = zip(self.tensors, self.group_of, strict=True)
        groups, group_of = _count_equal_groups(
            [replace(self.groups[i][0], home=homes.get(t.id, 0)) for t, i in pairs]
        )
        return replace(self, groups=groups, group_of=group_of)

    def with_stored_axes(
        self, stored: Mapping[int, tuple[tuple[int, str], ...]]
    ) -> LeafFacts:
        """Returns the same parameters with the storage axes that metadata fixes.

        Args:
            stored: (Dimension, mesh axis) pairs by tensor id, as in ``LeafGroup.held``.
        """
        if not stored:
            return self
        pairs = zip(self.tensors, self.group_of, strict=True)
        groups, group_of = _count_equal_groups(
            [replace(self.groups[i][0], held=stored.get(t.id, ())) for t, i in pairs]
        )
        return replace(self, groups=groups, group_of=group_of)

    def leaves(
        self,
        layouts: Sequence[LeafLayout],
        tables: Mapping[int, Table],
        mesh: Mapping[str, int],
    ) -> tuple[LeafPlan, ...]:
        """Returns the layouts of every parameter, as plans store them.

        Args:
            layouts: Layout of each group.
            tables: Compute table of each TaskGraph.
            mesh: Axis sizes.
        """
        summed = [
            summed_over(group, layout, tables[group.home], mesh, self.common)
            for (group, _), layout in zip(self.groups, layouts, strict=True)
        ]
        return tuple(
            LeafPlan(
                path=tensor.path,
                shape=tensor.shape,
                dtype=tensor.dtype,
                roles=names,
                compute_spec=layouts[index].compute,
                param_spec=layouts[index].param,
                gradient_spec=layouts[index].gradient,
                optimizer_spec=layouts[index].optimizer,
                gathers=self._gathers(index, layouts[index]),
                summed=summed[index],
                trained=not tensor.frozen,
            )
            for tensor, names, index in zip(
                self.tensors, self.role_names, self.group_of, strict=True
            )
        )

    def _gathers(self, index: int, layout: LeafLayout) -> int:
        return self.groups[index][0].gathers * (layout.compute != layout.param)


def summed_over(
    group: LeafGroup,
    layout: LeafLayout,
    table: Table,
    mesh: Mapping[str, int],
    common: frozenset[int],
) -> tuple[str, ...]:
    """Returns the mesh axes over which a gradient is reduced, outermost first.

    Args:
        group: Group of the parameter.
        layout: Layouts of the parameter.
        table: Compute table of the first TaskGraph that reads the parameter.
        mesh: Axis sizes.
        common: Roles of the batch and of sequences.
    """
    if not group.trained:
        return ()
    own = {a for axes in layout.compute for a in axes}
    others = common - {role for atoms in group.layout for role in atoms}
    return tuple(
        axis
        for axis, size in mesh.items()
        if size > 1 and axis not in own and others.intersection(table.get(axis, ()))
    )


def _count_equal_groups(
    groups: Sequence[LeafGroup],
) -> tuple[tuple[tuple[LeafGroup, int], ...], tuple[int, ...]]:
    counts = Counter(groups)
    places = {group: place for place, group in enumerate(counts)}
    return tuple(counts.items()), tuple(places[group] for group in groups)


def _gathers(graph: Graph, weight: Sequence[bool]) -> Counter[int]:
    """Returns the number of gathers of each parameter in a micro-batch.

    The parameters are stored in shards. Every product gathers a copy of its own, and
    another in its backward pass if the other operand needs a gradient. Other readers
    share one saved copy. A checkpointed region gathers again what its backward pass
    reads. A table that is looked up and multiplied is gathered in two forms, as the
    compiler transposes shards.
    """
    gathers: Counter[int] = Counter()
    shared: dict[tuple[int, int | None], bool] = {}
    for op in reversed(graph.ops):
        if makes_weights(op, weight):
            for t in {t for t in op.operands if weight[t]}:
                gathers[t] += sum(gathers[r] for r in op.results)
            continue
        if op.kind in LOOPS:
            continue
        others = any(
            graph.tensors[t].differentiable for t in op.operands if not weight[t]
        )
        for t in {t for t in op.operands if weight[t]}:
            if op.regathers and op.remat is None:
                # The backward pass of a chunk follows at once, so one gather suffices.
                gathers[t] += 1 + (others and op.chunks == 1)
                continue
            again = others and op.remat is not None and op.kind not in LINEAR
            before = shared.get((t, op.remat))
            gathers[t] += (before is None) + (again and not before)
            shared[t, op.remat] = again or bool(before)
    return Counter({t.id: max(1, gathers[t.id]) for t in graph.params})


def _chunked(graph: Graph, weight: Sequence[bool]) -> set[int]:
    result: set[int] = set()
    for op in reversed(graph.ops):
        if op.chunks > 1 and op.matmul is not None:
            result.update(t for t in op.operands if weight[t])
        elif result.intersection(op.results) and makes_weights(op, weight):
            result.update(t for t in op.operands if weight[t])
    return result


def _readers(
    graph: Graph, weight: Sequence[bool]
) -> dict[int, list[tuple[str, float]]]:
    """Returns (kind, fraction that it reads) of each parameter's readers.

    Readers are found through casts, slices and the like.
    """
    readers: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    for op in reversed(graph.ops):
        if op.kind in LOOPS:
            continue
        made = makes_weights(op, weight)
        for t in {t for t in op.operands if weight[t]}:
            size = max(1, graph.tensors[t].size)
            if not made:
                readers[t].append((op.kind, 1.0))
            for r in op.results if made else ():
                part = min(1.0, graph.tensors[r].size / size)
                readers[t] += [(kind, part * of) for kind, of in readers[r]]
    return readers


def _read(
    graph: Graph, weight: Sequence[bool], narrowed: bool, cast_bytes: float
) -> dict[int, float]:
    wide = {t.id: t.dtype == "float32" for t in graph.params}
    result = {number: 1.0 if w else 1.0 / cast_bytes for number, w in wide.items()}
    if not narrowed and not graph.frozen_bytes:
        return result
    for number, share in read_bytes(graph, weight).items():
        if share > 1.0 and graph.tensors[number].frozen:
            result[number] = share / cast_bytes
        elif narrowed:
            result[number] = min(1.0, share)
    return result


def _uses(readers: Sequence[tuple[str, float]]) -> float:
    return max(1.0, round(sum(part for _, part in readers), 3))


def _turns(readers: Sequence[tuple[str, float]], gathers: int) -> int:
    kinds = {kind for kind, _ in readers}
    if CONVOLUTION in kinds:
        return 1
    return 0 if LOOKUPS & kinds else gathers


def _role_names(tensor: Tensor, dims: Dimensions) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(dims.roles[role].name for role in atoms)
        for atoms in dims.layouts[tensor.id]
    )


NARROW = 512
"""Number of columns below which storage shards the columns of lookup tables last.

A shard of the columns would not fill the lanes of a TPU. To add a gradient, compilers
pad each row of the table and of its optimizer state to 128 columns. So 16 columns take
8 times their bytes (libtpu 0.0.42, v5e).
"""


Readers = Mapping[int, Sequence[tuple[str, float]]]
"""(Kind, fraction that it reads) of every operation that reads a tensor, by tensor."""


def looked_up_tables(graph: Graph, readers: Readers | None = None) -> set[int]:
    """Returns the ids of the parameters that only lookups of rows read.

    Args:
        graph: Captured loss.
        readers: Readers of each parameter, if known; default: None.
    """
    if readers is None:
        readers = _readers(graph, graph.weight_tensors())
    sliced = sliced_params(graph)
    tables = set[int]()
    for t in graph.params:
        kinds = {kind for kind, _ in readers.get(t.id, ())}
        if len(t.shape) > 1 and kinds and kinds <= LOOKUPS and t.id not in sliced:
            tables.add(t.id)
    return tables


def are_most(some: Collection[int], params: Sequence[Tensor]) -> bool:
    """Returns whether some parameters have at least half of all bytes.

    Args:
        some: Ids of the parameters to compare.
        params: All parameters.
    """
    here = sum(t.nbytes for t in params if t.id in some)
    return bool(some) and 2 * here >= sum(t.nbytes for t in params)


def _narrow(tables: Collection[int], params: Sequence[Tensor]) -> set[int]:
    if not are_most(tables, params):
        return set()
    return {t.id for t in params if t.id in tables and t.shape[-1] < NARROW}


def _order(
    pinned: int | None, layout: Layout, rank: Mapping[int, int], narrow: bool
) -> tuple[int, ...]:
    """Returns the dimensions that storage may shard: the pinned one, then by role.

    The columns of a narrow table, its last dimension, come last.
    """
    usable = [d for d, atoms in enumerate(layout) if atoms and atoms[0] in rank]
    last = len(layout) - 1 if narrow else None
    return tuple(
        sorted(usable, key=lambda d: (d != pinned, d == last, rank[layout[d][0]]))
    )


def batch_homes(graph: Graph) -> tuple[tuple[int, int | None], ...]:
    """Returns (leaf of the batch, TaskGraph that reads it first) pairs.

    The TaskGraph is None if no operation reads the leaf.
    """
    homes: dict[int, int] = {}
    for op in graph.ops:
        for t in op.operands:
            homes.setdefault(t, op.task_graph)
    return tuple((t.id, homes.get(t.id)) for t in graph.tensors if t.kind == "batch")


def batch_specs(
    homes: Sequence[tuple[int, int | None]],
    dims: Dimensions,
    tables: Mapping[int, Table],
    mesh: Mapping[str, int],
) -> tuple[Spec, ...]:
    """Returns the layouts of the batch's leaves, in the tables of their first readers.

    Args:
        homes: Result of ``batch_homes``.
        dims: The model's logical dimensions.
        tables: Compute table of each TaskGraph.
        mesh: Axis sizes.
    """
    first = next(iter(tables))
    return tuple(
        spec_of(
            dims.layouts[t],
            dims.sizes[t],
            tables[first if home is None else home],
            mesh,
        )
        for t, home in homes
    )


def lay_out(
    facts: LeafFacts,
    tables: Mapping[int, Table],
    mesh: Mapping[str, int],
    zero: int,
) -> tuple[LeafLayout, ...]:
    """Returns the layouts of each group of parameters.

    Args:
        facts: Properties of the parameters.
        tables: Compute table of each TaskGraph.
        mesh: Axis sizes.
        zero: ZeRO stage over ``data``: 0, 1 or 2.
    """
    out = []
    for group, _ in facts.groups:
        table = tables[group.home]
        compute = lying(group.layout, group.sizes, group.fused, table, mesh)
        param: Spec = compute
        for dim, axis in group.held:
            param = extend_spec(param, group.shape, axis, mesh, (dim,))
        param = extend_spec(param, group.shape, "fsdp", mesh, group.order)
        owned: Spec = param
        if group.trained:
            owned = extend_spec(param, group.shape, "data", mesh, group.order)
        out.append(
            LeafLayout(
                compute=compute,
                param=param,
                gradient=owned if zero >= 2 else param,
                optimizer=owned if zero >= 1 else param,
            )
        )
    return tuple(out)
