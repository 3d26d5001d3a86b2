"""Merges equal operations of a graph into cost rows, each with a count.

A graph is merged once for each division into TaskGraphs. ``Views`` has the results that
do not depend on the division.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import (
    ATTENTION,
    LOOPS,
    RAGGED,
    TRANSCENDENTAL,
    Graph,
    Op,
    makes_weights,
    rereads,
)
from whalejax.planner.model.normalizations import Dataflow, normalization_kernels
from whalejax.planner.model.reshape_factors import slots_of
from whalejax.planner.sharding.fused_parameters import FusedLayout, reading
from whalejax.planner.sharding.operation_rows import (
    Flow,
    OperationRows,
    Product,
    Row,
    Slot,
    Use,
    repeats,
)


T = TypeVar("T")


def build_rows(graph: Graph, dims: Dimensions, *, fuses: bool = True) -> OperationRows:
    """Returns the operations of a graph, merged into cost rows.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        fuses: Whether the compiler fuses elementwise neighbours. If not, every
            operation outside a kernel writes its result. Default: True.
    """
    return Views(graph, dims, fuses=fuses).rows(graph)


Readers = tuple[tuple[tuple[int, int], int], ...]
"""(Kind, TaskGraph) of a value's readers, with the number of readers of each."""


@dataclass(frozen=True, slots=True)
class _Value:
    """Tensor with its producer and readers, without their TaskGraphs.

    Attributes:
        kind: Index in ``Views.flow_kinds``.
        home: Operation whose TaskGraph owns the tensor, or None.
        uses: (Index in ``Views.use_kinds``, operation) of each reader. The operation is
            None for readers in the TaskGraph of ``home``.
        calm: Whether the tensor is transferred only to readers in other TaskGraphs.
        trip: Number of transfers of the tensor.
        scope: Scope of the producer or of a reader.
    """

    kind: int
    home: int | None
    uses: tuple[tuple[int, int | None], ...]
    calm: bool
    trip: int
    scope: str


class Views:
    """Operations and values in terms of roles, without TaskGraphs.

    They have the producer and the readers of each tensor. Graphs that differ only in
    the TaskGraphs of their operations share them.
    """

    def __init__(self, graph: Graph, dims: Dimensions, *, fuses: bool = True) -> None:
        self.graph = graph
        self.dims = dims
        self.fuses = fuses
        count = len(graph.tensors)
        self.reading = reading(graph, dims)
        self.weight = self.reading.weight
        self.maker: list[int | None] = [None] * count
        self.readers: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self.home: list[int | None] = [None] * count
        self.whole = frozenset(graph.whole)
        self.again = graph.runs_again()
        self.turned = graph.turned()
        self.rereads = rereads(graph, self.weight)
        self.multiplied = graph.only_multiplied()
        self.fusing = [
            op.elementwise or op.kind.startswith(("reduce", "arg")) for op in graph.ops
        ]
        self._read()
        self.places = [{index for index, _ in several} for several in self.readers]
        self.own_kernels = [op.kernel for op in graph.ops]
        self.kernels = self.own_kernels
        if fuses:
            flow = Dataflow(graph=graph, maker=self.maker, readers=self.readers)
            self.kernels = normalization_kernels(flow)
        self._layouts: dict[Hashable, int] = {}
        self._slot_numbers: dict[Slot, int] = {}
        self.slot_kinds: list[Slot] = []
        self.slots = [self._slot(t, dims.layouts[t]) for t in range(count)]
        self.slots_of = [
            tuple(self.slot(index, s, t) for s, t in enumerate(slots_of(op)))
            for index, op in enumerate(graph.ops)
        ]
        self._role_sets: dict[Hashable, tuple[frozenset[int], frozenset[int]]] = {}
        self.present = [self._present(i) for i in range(len(graph.ops))]
        self.in_memory, self.in_memory_of_kernels = (
            [self._in_memory(t, kernels) for t in range(count)]
            for kernels in (self.own_kernels, self.kernels)
        )
        self._rows: dict[Row, int] = {}
        self._flow_numbers: dict[Flow, int] = {}
        self._use_numbers: dict[tuple[int, frozenset[int]], int] = {}
        self._known_rows: dict[Hashable, int] = {}
        self._known_flows: dict[Hashable, tuple[int, bool]] = {}
        self.ops = [self._numbered(index, op) for index, op in enumerate(graph.ops)]
        self.values = [self._value(tensor) for tensor in range(count)]
        self.row_kinds, self.flow_kinds = [*self._rows], [*self._flow_numbers]
        self.use_kinds = [
            Use(view=self.slot_kinds[view], task_graph=0, present=present)
            for view, present in self._use_numbers
        ]
        # Most rows are equal in all divisions.
        self._row = functools.cache(self._make_row)
        self._flow = functools.cache(self._make_flow)

    def rows(self, graph: Graph) -> OperationRows:
        """Returns the operations of a graph, merged into cost rows.

        Args:
            graph: Graph that differs only in the TaskGraphs of its operations.
        """
        ops, flows = self._op_rows(graph), self._flows(graph)
        return OperationRows(
            ops=tuple(self._row(*key) for key in ops),
            flows=tuple(self._flow(*key) for key in flows),
            reading=self.reading,
        )

    def _op_rows(self, graph: Graph) -> list[tuple[int, int, int, str]]:
        counts: Counter[tuple[int, int]] = Counter()
        scopes: dict[tuple[int, int], str] = {}
        for op, kind in zip(graph.ops, self.ops, strict=True):
            if kind is not None:
                key = kind, op.task_graph
                counts[key] += op.trip
                scopes.setdefault(key, op.scope)
        return [(*key, count, scopes[key]) for key, count in counts.items()]

    def _flows(self, graph: Graph) -> list[tuple[int, int, Readers, int, str]]:
        homes = [op.task_graph for op in graph.ops]
        counts: Counter[tuple[int, int, Readers]] = Counter()
        scopes: dict[tuple[int, int, Readers], str] = {}
        for value in self.values:
            home = 0 if value.home is None else homes[value.home]
            uses = [(k, home if i is None else homes[i]) for k, i in value.uses]
            if value.calm and all(where == home for _, where in uses):
                continue
            key = value.kind, home, tuple(Counter(uses).items())
            counts[key] += value.trip
            scopes.setdefault(key, value.scope)
        return [(*key, count, scopes[key]) for key, count in counts.items()]

    def _make_row(self, kind: int, home: int, count: int, scope: str) -> Row:
        row = self.row_kinds[kind]
        return replace(row, task_graph=home, count=count, scope=scope)

    def _make_flow(
        self, kind: int, home: int, uses: Readers, count: int, scope: str
    ) -> Flow:
        flow = replace(self.flow_kinds[kind], task_graph=home, count=count, scope=scope)
        readers = (
            replace(self.use_kinds[k], task_graph=where, readers=n)
            for (k, where), n in uses
        )
        return replace(flow, uses=tuple(readers))

    def _read(self) -> None:
        graph = self.graph
        read = {t for op in graph.ops if op.results for t in op.operands} | self.whole
        for index, op in enumerate(graph.ops):
            # Flax's loops return slices of parameters that no operation reads.
            idle = op.kind in LOOPS and len(op.operands) == 1 == len(op.results)
            if idle and op.results[0] not in read:
                continue
            for slot, t in enumerate(op.operands):
                self.readers[t].append((index, slot))
                if self.home[t] is None:
                    self.home[t] = index
            for t in op.results:
                self.maker[t] = index
                self.home[t] = None if self.weight[t] else index

    def slot(self, index: int, slot: int, tensor: int) -> int:
        """Returns the index in ``slot_kinds`` of a tensor in an operation's layout."""
        layout = self.dims.seen.get((index, slot))
        return self.slots[tensor] if layout is None else self._slot(tensor, layout)

    def _slot(self, tensor: int, layout: Layout) -> int:
        t, sizes, weight = self.graph.tensors[tensor], self.dims.sizes, self.weight
        key = (
            layout,
            sizes[tensor],
            t.shape,
            t.itemsize_bytes,
            t.differentiable,
            weight[tensor],
        )
        number = self._layouts.get(key)
        if number is None:
            # Tensors of different shapes may have equal slots.
            slot = Slot(
                layout=layout,
                sizes=sizes[tensor],
                nbytes=t.nbytes,
                itemsize_bytes=t.itemsize_bytes,
                differentiable=t.differentiable,
                weight=weight[tensor],
            )
            number = self._layouts[key] = _number(slot, self._slot_numbers)
            if number == len(self.slot_kinds):
                self.slot_kinds.append(slot)
        return number

    def _numbered(self, index: int, op: Op) -> int | None:
        if op.reshape or op.kind in LOOPS or op.kind == "slice":
            return None
        count = len(op.operands)
        slots = self.slots_of[index]
        reads = (
            self._reads(index, op, self.in_memory, self.own_kernels),
            self._reads(index, op, self.in_memory_of_kernels, self.kernels),
        )
        writes = tuple(
            tuple(count + s for s, t in enumerate(op.results) if there[t])
            for there in (self.in_memory, self.in_memory_of_kernels)
        )
        again = (
            repeats(self.graph, self.dims, self.maker, self.again, index)
            if op.windows
            else None
        )
        product = op.matmul and (
            op.matmul,
            op.column if op.kind == ATTENTION else None,
            self.graph.tensors[op.operands[0]].dtype,
            op.share,
            op.mask,
            op.flops,
            self.turned.get(index),
            _groups(self.graph, op),
        )
        where = self.again[index], op.kernel is not None, self.rereads[index]
        key = op.kind, count, slots, reads, writes, again, product, where, op.windows
        number = self._known_rows.get(key)
        if number is None:
            kinds = tuple(self.slot_kinds[s] for s in slots)
            row = Row(
                kind=op.kind,
                task_graph=0,
                count=0,
                operands=kinds[:count],
                results=kinds[count:],
                product=self._product(index, op, kinds[:count], kinds[count:]),
                reads=reads[0],
                writes=writes[0],
                reads_in_kernel=reads[1],
                writes_in_kernel=writes[1],
                transcendental=op.kind in TRANSCENDENTAL,
                remat=self.again[index],
                fused=op.kernel is not None,
                scope="",
                windows=op.windows,
                rereads=self.rereads[index],
                repeats=again,
            )
            number = self._known_rows[key] = _number(row, self._rows)
        return number

    def _product(
        self,
        index: int,
        op: Op,
        operands: tuple[Slot, ...],
        results: tuple[Slot, ...],
    ) -> Product | None:
        if op.matmul is None:
            return None
        left, right = operands[0].roles, operands[1].roles
        out = results[0].roles
        m, k, n, batch = op.matmul
        if op.kind == ATTENTION:
            # Attention's rows and columns are along one sequence, with separate sizes.
            rows = frozenset(operands[1].layout[op.column])
            return Product(
                m=m,
                k=k,
                n=n,
                batch=batch,
                m_roles=rows,
                k_roles=frozenset(),
                n_roles=frozenset(),
                batch_roles=left - rows,
                dtype=self.graph.tensors[op.operands[0]].dtype,
                left_gradient=operands[0].differentiable,
                right_gradient=operands[1].differentiable,
                mask=op.mask,
                width=op.flops // (2 * m * n * batch) - k,
            )
        return Product(
            m=m,
            k=k,
            n=n,
            batch=batch,
            m_roles=(left & out) - right,
            k_roles=(left & right) - out,
            n_roles=(right & out) - left,
            batch_roles=left & right & out,
            dtype=self.graph.tensors[op.operands[0]].dtype,
            left_gradient=operands[0].differentiable,
            right_gradient=operands[1].differentiable,
            turned=self.turned.get(index),
            share=op.share,
            groups=_groups(self.graph, op),
        )

    def _reads(
        self,
        index: int,
        op: Op,
        in_memory: Sequence[bool],
        kernels: Sequence[int | None],
    ) -> tuple[int, ...]:
        """Returns the operands that are read from memory, as no neighbour is fused."""
        reads = [slot for slot, t in enumerate(op.operands) if in_memory[t]]
        kernel = kernels[index]
        if kernel is None:
            return tuple(reads)

        def reads_first(tensor: int) -> bool:
            here = (i for i, _ in self.readers[tensor] if kernels[i] == kernel)
            return index == next(here)

        return tuple(slot for slot in reads if reads_first(op.operands[slot]))

    def _in_memory(self, tensor: int, kernels: Sequence[int | None]) -> bool:
        """Returns whether a value is written to memory, instead of staying on chip.

        A value stays on chip between fused neighbours. A fusion has one result, so a
        value with several readers is written.
        """
        maker, readers = self.maker[tensor], self.places[tensor]
        if maker is None or not readers:
            return True
        op, kernel = self.graph.ops[maker], kernels[maker]
        if kernel is not None and all(kernels[i] == kernel for i in readers):
            return False
        if not (self.fuses and op.elementwise) or len(readers) > 1:
            return True
        return not all(self.fusing[i] for i in readers)

    def _present(self, index: int) -> tuple[frozenset[int], frozenset[int]]:
        op = self.graph.ops[index]
        if op.reshape or op.kind in LOOPS:
            return frozenset(), frozenset()
        count, slots = len(op.operands), self.slots_of[index]
        key = id(op.factors), slots  # Equal layers have the same objects.
        if key not in self._role_sets:
            present: set[int] = set()
            kept: set[int] = set()
            for factor in op.factors:
                for slot, dim in factor.members:
                    roles = self.slot_kinds[slots[slot]].layout[dim]
                    present.update(roles)
                    if slot >= count:
                        kept.update(roles)
            self._role_sets[key] = frozenset(present), frozenset(present - kept)
        return self._role_sets[key]

    def _value(self, tensor: int) -> _Value:
        ops = self.graph.ops
        maker, readers = self.maker[tensor], self.readers[tensor]
        present, reduced = frozenset[int](), frozenset[int]()
        if maker is not None:
            present, reduced = self.present[maker]
        numbers, slots, roles = self._use_numbers, self.slots_of, self.present
        uses: list[tuple[int, int | None]] = [
            (_number((slots[index][slot], roles[index][0]), numbers), index)
            for index, slot in readers
        ]
        home = self.home[tensor]
        if tensor in self.whole:
            empty = tuple(() for _ in self.dims.layouts[tensor])
            use = _number((self._slot(tensor, empty), frozenset[int]()), numbers)
            uses.append((use, home))
        first = readers[0][0] if maker is None and readers else maker
        source, fused = self._source(tensor), self._lies(tensor)
        parameter = maker is not None and self.weight[tensor]
        remat = maker is not None and self.again[maker]
        read_remat = any(
            self._is_reread(ops[index], tensor) for index in self.places[tensor]
        )
        different = tuple(dict.fromkeys(use for use, _ in uses))
        key = (
            (source, present, reduced, parameter, different, fused),
            (remat, read_remat, self.multiplied[tensor]),
        )
        known = self._known_flows.get(key)
        if known is None:
            flow = Flow(
                source=self.slot_kinds[source],
                task_graph=0,
                present=present,
                reduced=reduced,
                parameter=parameter,
                uses=self._uses(different),
                fused=fused,
                count=0,
                remat=remat,
                read_remat=read_remat,
                multiplied=self.multiplied[tensor],
                scope="",
            )
            number = _number(replace(flow, uses=()), self._flow_numbers)
            known = self._known_flows[key] = number, flow.still
        kind, calm = known
        return _Value(
            kind=kind,
            home=home,
            uses=tuple(uses),
            calm=calm,
            trip=self._moves(maker, readers),
            scope="" if first is None else ops[first].scope,
        )

    def _source(self, tensor: int) -> int:
        """Returns a value's slot at its producer, which may need a full sequence."""
        maker = self.maker[tensor]
        if maker is not None:
            op = self.graph.ops[maker]
            place = (maker, len(op.operands) + op.results.index(tensor))
            if place in self.dims.whole:
                return self._slot(tensor, self.dims.seen[place])
        return self.slots[tensor]

    def _uses(self, numbers: Sequence[int]) -> tuple[Use, ...]:
        kinds = [*self._use_numbers]
        return tuple(
            Use(view=self.slot_kinds[view], task_graph=0, present=present)
            for view, present in map(kinds.__getitem__, numbers)
        )

    def _lies(self, tensor: int) -> FusedLayout | None:
        """Returns the sharding of a fused parameter, if it is read in this form."""
        fused = self.reading.fused.get(tensor)
        if fused is None:
            return None
        ops = (self.graph.ops[index] for index, _ in self.readers[tensor])
        if all(op.kind in LOOPS or makes_weights(op, self.weight) for op in ops):
            return None
        return fused

    def _is_reread(self, op: Op, tensor: int) -> bool:
        """Returns whether a reader gathers a value again for its backward pass."""
        if op.remat is not None:
            return True
        others = (t for t in op.operands if t != tensor)
        return (
            op.regathers
            and tensor in self.reading.fused
            and any(self.graph.tensors[t].differentiable for t in others)
        )

    def _moves(self, maker: int | None, readers: list[tuple[int, int]]) -> int:
        """Returns the number of transfers of a value, one per read.

        An operation that closes a loop is outside the loop and reads the value in every
        iteration. A value that a loop returns unchanged is transferred once.
        """
        ops = self.graph.ops
        made = ops[maker].trip if maker is not None else 1
        taken = [
            max(ops[i].trip, made) if ops[i].kind in LOOPS else ops[i].trip
            for i, _ in readers
        ]
        return max(taken, default=made)


def _number(key: T, numbers: dict[T, int]) -> int:
    return numbers.setdefault(key, len(numbers))


def _groups(graph: Graph, op: Op) -> int:
    return graph.tensors[op.operands[2]].shape[-1] if op.kind in RAGGED else 1
