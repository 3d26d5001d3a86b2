"""Cost rows: operations and layout changes, folded over equal layers.

An unrolled model of a hundred layers has ten thousand operations and some fifty
different ones. A row is one of the different ones with its count, seen in roles; the
cost and the memory models walk rows and never operations, so depth costs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from whalejax.planner.dimensions import Dimensions, Layout
from whalejax.planner.graph import LOOPS, Graph, Op


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
        return frozenset(role for atoms in self.layout for role in atoms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product in roles: which of them are rows, columns and so on.

    Attributes:
        m, k, n, batch: sizes, unsharded.
        m_roles, k_roles, n_roles, batch_roles: the roles behind each.
        dtype: numpy name of the operands' type.
        left_gradient, right_gradient: that operand needs a gradient, which is one
            more product of the same FLOPs in the backward pass.
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
    scope: str

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Operands, then results."""
        return self.operands + self.results

    @property
    def reduced(self) -> frozenset[int]:
        """Roles of the operands that no result holds: summed over in the forward."""
        results = frozenset[int]().union(*(s.roles for s in self.results))
        return frozenset[int]().union(*(s.roles for s in self.operands)) - results


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A value that is needed in another layout than the one it was made in.

    Attributes:
        source, target: the two views of it.
        source_graph, target_graph: TaskGraphs whose tables apply.
        count: how often in one forward pass.
        remat: the move is repeated in the backward pass.
        scope: where the value is used.
    """

    source: Slot
    target: Slot
    source_graph: int
    target_graph: int
    count: int
    remat: bool
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All of a model's rows.

    Attributes:
        ops: operations.
        moves: layout changes at cuts and at borders of TaskGraphs.
        weight: for every tensor, whether it depends on parameters alone.
    """

    ops: tuple[Row, ...]
    moves: tuple[Move, ...]
    weight: tuple[bool, ...]


def build_rows(graph: Graph, dims: Dimensions) -> Rows:
    """Fold a graph's operations into rows.

    Args:
        graph: the captured loss.
        dims: its logical dimensions.
    """
    builder = _Builder(graph, dims)
    ops: Counter[Row] = Counter()
    moves: Counter[Move] = Counter()
    scopes: dict[object, str] = {}
    for index, op in enumerate(graph.ops):
        row = builder.row(index, op)
        if row is not None:
            ops[row] += op.trip
            scopes.setdefault(row, op.scope)
        for move in builder.moves(index, op):
            moves[move] += op.trip
            scopes.setdefault(move, op.scope)
    return Rows(
        ops=tuple(replace(r, count=c, scope=scopes[r]) for r, c in ops.items()),
        moves=tuple(replace(m, count=c, scope=scopes[m]) for m, c in moves.items()),
        weight=builder.weight,
    )


class _Builder:
    """Views operations in roles; remembers who makes and who reads each tensor."""

    def __init__(self, graph: Graph, dims: Dimensions) -> None:
        self.graph = graph
        self.dims = dims
        count = len(graph.tensors)
        self.weight = graph.weight_tensors()
        self.maker: list[Op | None] = [None] * count
        self.readers: list[list[Op]] = [[] for _ in range(count)]
        self.home: list[int | None] = [None] * count
        for op in graph.ops:
            for t in op.operands:
                self.readers[t].append(op)
                if self.home[t] is None:
                    self.home[t] = op.task_graph
            for t in op.results:
                self.maker[t] = op
                self.home[t] = None if self.weight[t] else op.task_graph

    def slot(self, index: int, slot: int, tensor: int, *, own: bool = False) -> Slot:
        t = self.graph.tensors[tensor]
        layout = self.dims.layouts[tensor]
        if not own:
            layout = self.dims.seen.get((index, slot), layout)
        return Slot(
            layout=layout,
            sizes=self.dims.sizes[tensor],
            nbytes=t.nbytes,
            itemsize_bytes=t.itemsize_bytes,
            differentiable=t.differentiable,
            weight=self.weight[tensor],
        )

    def row(self, index: int, op: Op) -> Row | None:
        if op.reshape or op.kind in LOOPS:
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
            remat=op.remat is not None,
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
        )

    def _reads(self, op: Op) -> tuple[int, ...]:
        """Operands that come from memory: not those fused in from a neighbour."""
        found = []
        for slot, tensor in enumerate(op.operands):
            maker = self.maker[tensor]
            fused = op.elementwise or op.kind.startswith(("reduce", "arg"))
            if maker is None or not (fused and maker.elementwise):
                found.append(slot)
        return tuple(found)

    def _writes(self, op: Op) -> tuple[int, ...]:
        """Results that go to memory: not those that only elementwise readers fuse."""
        count = len(op.operands)
        found = []
        for slot, tensor in enumerate(op.results):
            readers = self.readers[tensor]
            fuses = op.elementwise and readers
            if not (fuses and all(self._fuses(r) for r in readers)):
                found.append(count + slot)
        return tuple(found)

    @staticmethod
    def _fuses(op: Op) -> bool:
        return op.elementwise or op.kind.startswith(("reduce", "arg"))

    def moves(self, index: int, op: Op) -> list[Move]:
        found = []
        for slot, tensor in enumerate(op.operands):
            home = self.home[tensor]
            source_graph = op.task_graph if home is None else home
            cut = (index, slot) in self.dims.seen
            if not cut and source_graph == op.task_graph:
                continue
            source = self.slot(index, slot, tensor, own=True)
            target = self.slot(index, slot, tensor)
            if not source.roles and not target.roles:
                continue
            found.append(
                Move(
                    source=source,
                    target=target,
                    source_graph=source_graph,
                    target_graph=op.task_graph,
                    count=0,
                    remat=op.remat is not None,
                    scope="",
                )
            )
        return found
