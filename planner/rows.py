"""Cost rows: operations and layout changes, folded over equal layers.

An unrolled model of a hundred layers has ten thousand operations and some fifty
different ones. A row is one of the different ones with its count, seen in roles; the
cost and the memory models walk rows and never operations, so depth costs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from whalejax.planner.dimensions import Dimensions, Layout, roles_of
from whalejax.planner.fused import Fused, Reading, reading
from whalejax.planner.graph import ATTENTION, LOOPS, Graph, Op


_TRANSCENDENTAL = frozenset(
    (
        "exp exp2 expm1 log log1p log2 tanh logistic sin cos tan atan2 "
        "erf erfc erf_inv pow lgamma digamma"
    ).split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An operand or result as its operation sees it.

    Attributes:
        layout, sizes: roles and sizes of the atoms of each dimension.
        nbytes: bytes of the whole tensor.
        itemsize_bytes: bytes of one element.
        differentiable: a gradient flows through it.
        weight: it depends on parameters alone.
    """

    layout: Layout
    sizes: Layout
    nbytes: int
    itemsize_bytes: int
    differentiable: bool
    weight: bool

    @property
    def roles(self) -> frozenset[int]:
        """Every role that stands in it."""
        return roles_of(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product in roles: which of them are rows, columns and so on.

    Attributes:
        m, k, n, batch: sizes, unsharded.
        m_roles, k_roles, n_roles, batch_roles: the roles behind each.
        dtype: numpy name of the operands' type.
        left_gradient, right_gradient: that operand needs a gradient, which is one
            more product of the same FLOPs in the backward pass.
        share: part of it that is done, below 1 where a mask hides some.
        zigzag: of attention in blocks: rows are dealt out in zig-zag order.
    """

    m: int
    k: int
    n: int
    batch: int
    m_roles: frozenset[int]
    k_roles: frozenset[int]
    n_roles: frozenset[int]
    batch_roles: frozenset[int]
    dtype: str
    left_gradient: bool
    right_gradient: bool
    share: float = 1.0
    zigzag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal operations, counted.

    Attributes:
        kind: the primitive.
        task_graph: where it stands.
        count: executions in one forward pass.
        operands, results: what it reads and writes.
        product: the matrix product, or None.
        reads, writes: slots that cross main memory when elementwise neighbours fuse.
        transcendental: every element of its result costs an exp, tanh or the like.
        remat: it runs again in the backward pass.
        fused: it is part of a kernel that computes it again for the backward pass.
        scope: one place in the model, for reports.
    """

    kind: str
    task_graph: int
    count: int
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    product: Product | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    transcendental: bool
    remat: bool
    fused: bool
    scope: str

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Operands, then results."""
        return self.operands + self.results


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One kind of reader of a value.

    Attributes:
        view: the value as the reader sees it.
        task_graph: where the reader stands.
        present: every role of the reading operation.
        readers: how many such operations there are.
    """

    view: Slot
    task_graph: int
    present: frozenset[int]
    readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Equal values on their way from what makes them to all who read them.

    Attributes:
        source: the value as it is made, or as its first reader sees a leaf.
        task_graph: where it is made.
        present: every role of the operation that makes it; empty for a leaf.
        reduced: roles that this operation sums over.
        parameter: the operation computes with parameters alone.
        uses: its readers, in program order.
        fused: how it lies before it is read, where that is another layout; or None.
        count: how often in one forward pass.
        remat: the operation runs again in the backward pass.
        read_remat: a reader does, so that bringing the value there is repeated.
        multiplied: it is float32, and products alone read it.
        scope: one place where it is read or made.
    """

    source: Slot
    task_graph: int
    present: frozenset[int]
    reduced: frozenset[int]
    parameter: bool
    uses: tuple[Use, ...]
    fused: Fused | None
    count: int
    remat: bool
    read_remat: bool
    multiplied: bool
    scope: str

    @property
    def still(self) -> bool:
        """No layout can make it move or need a sum."""
        return (
            not self.reduced
            and self.fused is None
            and all(
                use.task_graph == self.task_graph
                and use.view.layout == self.source.layout
                and (self.source.weight or use.present <= self.source.roles)
                for use in self.uses
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All of a model's rows.

    Attributes:
        ops: operations.
        flows: values that some layout moves or sums, between operations.
        reading: in which forms the parameters are read.
    """

    ops: tuple[Row, ...]
    flows: tuple[Flow, ...]
    reading: Reading

    @property
    def weight(self) -> tuple[bool, ...]:
        """For every tensor, whether it depends on parameters alone."""
        return self.reading.weight


def build_rows(graph: Graph, dims: Dimensions, *, fuses: bool = True) -> Rows:
    """Fold a graph's operations into rows.

    Args:
        graph: the captured loss.
        dims: its logical dimensions.
        fuses: a compiler fuses elementwise neighbours; otherwise every operation that
            is in no kernel writes its result.
    """
    builder = _Builder(graph, dims, fuses)
    ops: Counter[Row] = Counter()
    flows: Counter[Flow] = Counter()
    scopes: dict[object, str] = {}
    for index, op in enumerate(graph.ops):
        row = builder.row(index, op)
        if row is not None:
            ops[row] += op.trip
            scopes.setdefault(row, op.scope)
    for tensor in range(len(graph.tensors)):
        flow, trip, scope = builder.flow(tensor)
        if not flow.still:
            flows[flow] += trip
            scopes.setdefault(flow, scope)
    return Rows(
        ops=tuple(replace(r, count=c, scope=scopes[r]) for r, c in ops.items()),
        flows=tuple(replace(f, count=c, scope=scopes[f]) for f, c in flows.items()),
        reading=builder.reading,
    )


class _Builder:
    """Views operations in roles; remembers who makes and who reads each tensor."""

    def __init__(self, graph: Graph, dims: Dimensions, fuses: bool) -> None:
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
        self.multiplied = graph.only_multiplied()
        self.fusing = [self._fuses(op) for op in graph.ops]
        read = {t for op in graph.ops if op.results for t in op.operands} | self.whole
        for index, op in enumerate(graph.ops):
            # Flax's loops hand their slices back, and nobody reads them.
            idle = op.kind in LOOPS and len(op.operands) == 1 == len(op.results)
            if idle and op.results[0] not in read:
                continue
            for slot, t in enumerate(op.operands):
                self.readers[t].append((index, slot))
                if self.home[t] is None:
                    self.home[t] = op.task_graph
            for t in op.results:
                self.maker[t] = index
                self.home[t] = None if self.weight[t] else op.task_graph

    def slot(self, index: int, slot: int, tensor: int) -> Slot:
        """A tensor as an operation sees it."""
        layout = self.dims.seen.get((index, slot), self.dims.layouts[tensor])
        return self._slot(tensor, layout)

    def _slot(self, tensor: int, layout: Layout) -> Slot:
        t = self.graph.tensors[tensor]
        return Slot(
            layout=layout,
            sizes=self.dims.sizes[tensor],
            nbytes=t.nbytes,
            itemsize_bytes=t.itemsize_bytes,
            differentiable=t.differentiable,
            weight=self.weight[tensor],
        )

    def row(self, index: int, op: Op) -> Row | None:
        """An operation, or None for one that computes nothing."""
        if op.reshape or op.kind in LOOPS or op.kind == "slice":
            return None
        count = len(op.operands)
        operands = tuple(self.slot(index, s, t) for s, t in enumerate(op.operands))
        results = tuple(
            self.slot(index, count + s, t) for s, t in enumerate(op.results)
        )
        return Row(
            kind=op.kind,
            task_graph=op.task_graph,
            count=0,
            operands=operands,
            results=results,
            product=self._product(op, operands, results),
            reads=self._reads(op),
            writes=self._writes(op),
            transcendental=op.kind in _TRANSCENDENTAL,
            remat=self.again[index],
            fused=op.kernel is not None,
            scope="",
        )

    def _product(
        self, op: Op, operands: tuple[Slot, ...], results: tuple[Slot, ...]
    ) -> Product | None:
        if op.matmul is None:
            return None
        left, right = operands[0].roles, operands[1].roles
        out = results[0].roles
        m, k, n, batch = op.matmul
        if op.kind == ATTENTION:
            # Its rows are of the sequence that its columns are of, and stay apart.
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
                share=op.share,
                zigzag=op.zigzag,
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
            share=op.share,
        )

    def _reads(self, op: Op) -> tuple[int, ...]:
        """Operands that come from memory: not those fused in from a neighbour."""
        return tuple(
            slot
            for slot, tensor in enumerate(op.operands)
            if self._in_memory(tensor) and self._reads_first(op, tensor)
        )

    def _reads_first(self, op: Op, tensor: int) -> bool:
        """Whether no earlier operation of its kernel has read the value."""
        if op.kernel is None:
            return True
        ops = (self.graph.ops[index] for index, _ in self.readers[tensor])
        first = next(r for r in ops if r.kernel == op.kernel)
        return first.position == op.position

    def _writes(self, op: Op) -> tuple[int, ...]:
        """Results that go to memory: not those that only elementwise readers fuse."""
        count = len(op.operands)
        return tuple(
            count + slot
            for slot, tensor in enumerate(op.results)
            if self._in_memory(tensor)
        )

    def _in_memory(self, tensor: int) -> bool:
        """Whether a value is ever written: it stays on chip between fused neighbours.

        A fusion has one result, so a value with several readers is written for them.
        """
        maker = self.maker[tensor]
        readers = {index for index, _ in self.readers[tensor]}
        if maker is None or not readers:
            return True
        op = self.graph.ops[maker]
        if op.kernel is not None and all(
            self.graph.ops[i].kernel == op.kernel for i in readers
        ):
            return False
        if not (self.fuses and op.elementwise) or len(readers) > 1:
            return True
        return not all(self.fusing[i] for i in readers)

    @staticmethod
    def _fuses(op: Op) -> bool:
        return op.elementwise or op.kind.startswith(("reduce", "arg"))

    def _present(self, index: int) -> tuple[frozenset[int], frozenset[int]]:
        """Roles of an operation's factors, and those of them that it sums over."""
        op = self.graph.ops[index]
        if op.reshape or op.kind in LOOPS:
            return frozenset(), frozenset()
        count = len(op.operands)
        slots = op.operands + op.results
        present: set[int] = set()
        kept: set[int] = set()
        for factor in op.factors:
            for slot, dim in factor.members:
                layout = self.dims.seen.get(
                    (index, slot), self.dims.layouts[slots[slot]]
                )
                present.update(layout[dim])
                if slot >= count:
                    kept.update(layout[dim])
        return frozenset(present), frozenset(present - kept)

    def flow(self, tensor: int) -> tuple[Flow, int, str]:
        """A value with its maker and readers, how often it moves, and where."""
        ops = self.graph.ops
        maker = self.maker[tensor]
        home = self.home[tensor]
        present, reduced = frozenset[int](), frozenset[int]()
        if maker is not None:
            present, reduced = self._present(maker)
        readers = self.readers[tensor]
        uses = Counter(
            Use(
                view=self.slot(index, slot, tensor),
                task_graph=ops[index].task_graph,
                present=self._present(index)[0],
            )
            for index, slot in readers
        )
        if tensor in self.whole:
            empty = tuple(() for _ in self.dims.layouts[tensor])
            where = home if home is not None else 0
            view = self._slot(tensor, empty)
            uses[Use(view=view, task_graph=where, present=frozenset())] += 1
        around = [ops[index] for index, _ in readers]
        if maker is not None:
            around.insert(0, ops[maker])
        flow = Flow(
            source=self._slot(tensor, self.dims.layouts[tensor]),
            task_graph=home if home is not None else 0,
            present=present,
            reduced=reduced,
            parameter=maker is not None and self.weight[tensor],
            uses=tuple(replace(use, readers=n) for use, n in uses.items()),
            fused=self._lies(tensor),
            count=0,
            remat=maker is not None and self.again[maker],
            read_remat=any(self._again(ops[index], tensor) for index, _ in readers),
            multiplied=self.multiplied[tensor],
            scope="",
        )
        if not around:
            return flow, 0, ""
        return flow, self._moves(maker, readers), around[0].scope

    def _lies(self, tensor: int) -> Fused | None:
        """How a fused parameter lies, where it is read in the form of this tensor."""
        ops = (self.graph.ops[index] for index, _ in self.readers[tensor])
        if all(op.kind in LOOPS or self._of_weights(op) for op in ops):
            return None
        return self.reading.fused.get(tensor)

    def _of_weights(self, op: Op) -> bool:
        return bool(op.results) and all(self.weight[t] for t in op.results)

    def _again(self, op: Op, tensor: int) -> bool:
        """Whether a reader takes a value anew for its backward pass."""
        if op.remat is not None:
            return True
        others = (t for t in op.operands if t != tensor)
        return (
            op.regathers
            and tensor in self.reading.fused
            and any(self.graph.tensors[t].differentiable for t in others)
        )

    def _moves(self, maker: int | None, readers: list[tuple[int, int]]) -> int:
        """How often a value moves: as often as its readers take it.

        What closes a loop stands outside and takes the value in every turn.
        """
        ops = self.graph.ops
        made = ops[maker].trip if maker is not None else 1
        taken = [
            max(ops[i].trip, made) if ops[i].kind in LOOPS else ops[i].trip
            for i, _ in readers
        ]
        return max(taken, default=made)
