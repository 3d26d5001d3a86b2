"""Layouts of the parameters: as computed with, as stored, and of what follows them.

Storage is a second table beside the compute tables: ZeRO and FSDP shard what is kept
(parameters, gradients, optimizer state) over axes on which the computation splits the
batch. Logical dimensions are tried in one order for all parameters, those that cover
most bytes first, so that the outcome reads like a table of rules.

The module is long because all that a layout asks of a parameter is found together, from
the operations that read it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.expert_regions import weight_homes
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
from whalejax.planner.sharding.precision_regions import read_bytes
from whalejax.planner.sharding.strategies import cut_roles


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Optimizer state: bytes that follow a parameter, by its path, and the rest.

    Attributes:
        by_path: Bytes that follow a parameter.
        other_bytes: All others.
        operations: Roots, quotients and the like that an update evaluates for each
            element of a parameter, where they take time beside memory: on CPUs.
    """

    by_path: Mapping[str, int]
    other_bytes: int = 0
    operations: float = 0.0

    @property
    def followed_bytes(self) -> int:
        """Returns the bytes that follow parameters, of all of them: not counts of steps
        and the like.
        """
        return sum(self.by_path.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafGroup:
    """Parameters that every layout treats alike, as those of equal layers.

    Attributes:
        shape: Shape of each parameter.
        layout, sizes: Their atoms.
        fused: Sharding where products see more of them than they can name, or None.
        home: The TaskGraph that computes with them first.
        order: Dimensions that storage may shard, best first.
        pinned: The dimension that metadata puts on ``fsdp``, or None.
        gathers: Number of gathers in a micro-batch, where they are stored in shards:
            once for each form in which the forward pass reads them, and again where the
            backward pass needs them.
        turns: Number of gathers after which XLA's CPU compiler transposes the result,
            if it is sharded along the last dimension; convolutions transpose what their
            backward pass reads themselves, and looked-up tables are read as they are.
        uses: Number of operations that read all of it, slices in proportion; each has a
            gradient of its own for what it reads.
        multiplied: Whether they are float32 and products alone read them.
        narrowed: Bytes of one of them as it is read, over its stored bytes and over
            what ``Request.cast_bytes`` says of all: where only some TaskGraphs
            compute in 16 bits, where it is no float32, and where it is quantised; else
            1.
        nbytes: Bytes of one of them.
        trained: Whether they have gradients and an optimizer.
        held: (dimension, mesh axis) of what metadata has stored in shards, and is
            computed with as a whole.
        slices: A loop reads one of so many slices at a time, along the first
            dimension, and each is gathered by itself; 1 where none does.
        looked_up: Operations take some of their rows, and nothing else reads them.
        chunked: Their gradient is added up over chunks of tokens, as wide as they are
            stored.
        optimizer_bytes: Optimizer state that follows one of them.
        operations: Roots and the like in its update; see ``OptimizerBytes``.
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
    def gradient_bytes(self) -> int:
        """Returns the bytes of one unsharded gradient; 0 where there is none."""
        return self.nbytes if self.trained else 0

    @property
    def updated_bytes(self) -> int:
        """Returns the bytes that an update moves: it reads the gradient, reads and
        writes the rest.
        """
        if not self.trained:
            return 0
        return 3 * self.nbytes + 2 * self.optimizer_bytes

    def moved_bytes(self, compiler: CompilerProfile, selected: Any = False) -> Any:
        """Bytes of one of them as it is brought to those who compute with it.

        Args:
            compiler: Compiler of the program.
            selected: Whether its rows are in shards; or arrays of that. What is looked
                up among them is selected before anything multiplies it, and moves as
                wide as it is.
        """
        if not self.multiplied or not compiler.narrow_products:
            return self.nbytes / 1
        if self.looked_up and isinstance(selected, np.ndarray):
            return np.where(selected, self.nbytes / 1, self.nbytes / 2)
        return self.nbytes / (1 if self.looked_up and selected else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafLayout:
    """Layouts of the parameters of one group; see ``plan.LeafPlan``."""

    compute: Spec
    param: Spec
    gradient: Spec
    optimizer: Spec

    @property
    def has_sharded_rows(self) -> bool:
        """Whether the rows that are taken of them lie in shards."""
        return any(self.compute[-2:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafFacts:
    """Facts about the parameters that the search needs, computed once.

    Attributes:
        tensors: The parameters.
        groups: (group, how many parameters it stands for).
        group_of: For each parameter, the index of its group.
        role_names: For each parameter, names of the roles of each dimension.
        storage: Roles in the order in which storage tries them.
        common: Roles that values have and parameters lack: of the batch, and those
            that meet themselves, as a sequence does.
        optimizer_other_bytes: Optimizer state that follows no parameter.
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
        """TaskGraph that computes with each parameter first."""
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
        """Collects the facts.

        Args:
            graph: The captured loss.
            dims: Its logical dimensions.
            reading: Forms in which the parameters are read.
            optimizer: Bytes of its state.
            narrowed: Only some TaskGraphs compute in 16 bits.
            cast_bytes: Bytes of a float32 parameter in the computing type, over its
                own.
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
        """The same parameters, where other TaskGraphs compute with them.

        Args:
            homes: From ``weight_homes``.
        """
        pairs = zip(self.tensors, self.group_of, strict=True)
        groups, group_of = _count_equal_groups(
            [replace(self.groups[i][0], home=homes.get(t.id, 0)) for t, i in pairs]
        )
        return replace(self, groups=groups, group_of=group_of)

    def with_stored_axes(
        self, stored: Mapping[int, tuple[tuple[int, str], ...]]
    ) -> LeafFacts:
        """The same parameters, some of which metadata has stored in shards.

        Args:
            stored: Stored axes by tensor id; see ``LeafGroup.with_stored_axes``.
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
        """The plan of every parameter.

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
    """Mesh axes over which the gradient of a parameter is summed, outermost first.

    Args:
        group: The parameter.
        layout: Its layouts.
        table: Compute table of the TaskGraph that reads it first.
        mesh: Axis sizes.
        common: Roles of all values: of the batch, and of the sequence.
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
    """Equal groups once, with how often each is there; and for each which it is."""
    counts = Counter(groups)
    places = {group: place for place, group in enumerate(counts)}
    return tuple(counts.items()), tuple(places[group] for group in groups)


def _gathers(graph: Graph, weight: Sequence[bool]) -> Counter[int]:
    """Returns the gathers of each parameter in a micro-batch, if it is stored in
    shards.

    Every product gathers its own, and again for its backward pass where that reads it:
    where the other operand is data, nothing does. What else reads a parameter shares
    one that is kept. A region that is computed again gathers again what its backward
    pass reads. A table that is looked up and multiplied with is gathered in two forms,
    because the compiler transposes shards.
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
                # One that is cut into chunks is followed by its backward pass.
                gathers[t] += 1 + (others and op.chunks == 1)
                continue
            again = others and op.remat is not None and op.kind not in LINEAR
            before = shared.get((t, op.remat))
            gathers[t] += (before is None) + (again and not before)
            shared[t, op.remat] = again or bool(before)
    return Counter({t.id: max(1, gathers[t.id]) for t in graph.params})


def _chunked(graph: Graph, weight: Sequence[bool]) -> set[int]:
    """Tensors made of weights alone that a product reads which is cut into chunks."""
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
    """Returns the readers of each parameter, through casts, slices and the like.

    Returns:
        For each tensor the kind of every operation, and the part of it that is read.
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
    """Returns ``LeafGroup.narrowed``."""
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
    """Returns ``LeafGroup.uses``."""
    return max(1.0, round(sum(part for _, part in readers), 3))


def _turns(readers: Sequence[tuple[str, float]], gathers: int) -> int:
    """Returns ``LeafGroup.turns``."""
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
"""Columns below which storage cuts the rows of tables that are looked up and no more.

A device's part of its columns fills no lanes of a TPU: compilers write the table and
its optimizer state with 128 columns to add a gradient, whose rows lie in memory one by
one (libtpu 0.0.42, v5e: 16 of 128 columns take 8 times their bytes)."""


Readers = Mapping[int, Sequence[tuple[str, float]]]
"""By tensor, the kind of every operation that reads it and the part that it reads."""


def looked_up_tables(graph: Graph, readers: Readers | None = None) -> set[int]:
    """Ids of the parameters of which operations take some rows, and read nothing else.

    Args:
        graph: The captured loss.
        readers: Readers of each parameter, where they are known.
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
    """Whether some parameters hold at least half of all bytes.

    Args:
        some: Their ids.
        params: All of them.
    """
    here = sum(t.nbytes for t in params if t.id in some)
    return bool(some) and 2 * here >= sum(t.nbytes for t in params)


def _narrow(tables: Collection[int], params: Sequence[Tensor]) -> set[int]:
    """Tables of fewer than ``NARROW`` columns, where tables are most parameters."""
    if not are_most(tables, params):
        return set()
    return {t.id for t in params if t.id in tables and t.shape[-1] < NARROW}


def _order(
    pinned: int | None, layout: Layout, rank: Mapping[int, int], narrow: bool
) -> tuple[int, ...]:
    """Dimensions that storage may shard: the pinned one first, then by role.

    Of a narrow table the columns, its last dimension, are the last choice.
    """
    usable = [d for d, atoms in enumerate(layout) if atoms and atoms[0] in rank]
    last = len(layout) - 1 if narrow else None
    return tuple(
        sorted(usable, key=lambda d: (d != pinned, d == last, rank[layout[d][0]]))
    )


def batch_homes(graph: Graph) -> tuple[tuple[int, int | None], ...]:
    """The leaves of the batch: each tensor, and the TaskGraph that reads it first."""
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
    """Layouts of the leaves of the batch, as the operations that read them first want.

    Args:
        homes: From ``batch_homes``.
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
    """Lays out the parameters, group by group.

    Args:
        facts: Facts about the parameters.
        tables: Compute table of each TaskGraph.
        mesh: Axis sizes.
        zero: Level over ``data``: 0, 1 or 2.
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
