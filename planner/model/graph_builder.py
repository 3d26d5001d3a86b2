"""Builds graphs of programs by hand, without tracing.

``GraphBuilder`` takes operations in einsum notation and manages tensor ids and factors.
It serves models of which only sizes are known, such as published runs, and tests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from whalejax.planner.model.graph import (
    Factor,
    Graph,
    Mark,
    Op,
    TaskGraph,
    Tensor,
    TensorKind,
)


class GraphBuilder:
    """Builder of a graph; tensors have one dtype unless ``cast`` changes it.

    Attributes:
        here: Index of the TaskGraph of the next operations.
        trip: Number of executions of the next operations, as in the layers of a scan.
        remat: Id of the checkpointed region of the next operations, or None.
        kernels: Number of fused kernels.
    """

    def __init__(self, dtype: str = "float32", itemsize_bytes: int = 4) -> None:
        self.dtype = dtype
        self.itemsize_bytes = itemsize_bytes
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.task_graphs: list[TaskGraph] = [TaskGraph(index=0)]
        self.here = 0
        self.trip = 1
        self.remat: int | None = None
        self.batch_dims: list[tuple[int, int]] = []
        self.kernels = 0
        self._kernel: int | None = None
        self._share = 1.0

    def _tensor(
        self, shape: tuple[int, ...], kind: TensorKind = "value", path: str = ""
    ) -> int:
        index = len(self.tensors)
        flows = kind == "param" or (kind == "value")
        self.tensors.append(
            Tensor(
                id=index,
                shape=shape,
                dtype=self.dtype,
                itemsize_bytes=self.itemsize_bytes,
                kind=kind,
                path=path,
                differentiable=flows,
            )
        )
        return index

    def param(self, path: str, *shape: int) -> int:
        """Adds a trained leaf."""
        return self._tensor(shape, "param", path)

    def batch(self, path: str, *shape: int) -> int:
        """Adds a batch leaf, with its samples along dimension 0."""
        index = self._tensor(shape, "batch", path)
        self.batch_dims.append((index, 0))
        return index

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self.tensors[tensor].shape

    def mark(self, mark: Mark, name: str) -> None:
        """Adds a TaskGraph with a mark, which the next operations belong to."""
        self.here = len(self.task_graphs)
        self.task_graphs.append(TaskGraph(index=self.here, marks=(mark,), name=name))

    def region(self, name: str) -> None:
        """Adds a TaskGraph without a mark, for operations if ``here`` is its index."""
        self.task_graphs.append(TaskGraph(index=len(self.task_graphs), name=name))

    @contextlib.contextmanager
    def kernel(self, *, fused: bool = True, share: float = 1.0) -> Iterator[None]:
        """Puts the operations of the body into one kernel, as of flash attention.

        Args:
            fused: Whether the operations form a kernel; if not, they stay separate.
                Default: True.
            share: Fraction of their work that is done; default: 1.
        """
        before = self._kernel, self._share
        if fused:
            self._kernel, self.kernels = self.kernels, self.kernels + 1
            self._share = share
        try:
            yield
        finally:
            self._kernel, self._share = before

    def part(self, operand: int, dim: int, size: int | None = None) -> int:
        """Adds a slice along a dimension, which disappears without ``size``."""
        shape = self.shape(operand)
        kept = [d for d in range(len(shape)) if d != dim]
        out = list(shape)
        out[dim : dim + 1] = [] if size is None else [size]
        place = {d: d - (size is None and d > dim) for d in kept}
        factors = tuple(
            Factor(members=((0, d), (1, place[d]))) for d in kept if shape[d] > 1
        )
        return self._op("slice", (operand,), tuple(out), factors, elementwise=True)

    def carry(self, operand: int) -> int:
        """Adds a value that enters or leaves a loop."""
        factors = tuple(
            Factor(members=((0, dim), (1, dim)))
            for dim, size in enumerate(self.shape(operand))
            if size > 1
        )
        trip, self.trip = self.trip, 1
        result = self._op("scan", (operand,), self.shape(operand), factors)
        self.trip = trip
        return result

    def dispatch(self, operand: int, *shape: int) -> int:
        """Adds a dispatch of tokens, as by a router.

        Factors tie only the first and the last dimensions.
        """
        last = len(self.shape(operand)) - 1
        factors = (
            Factor(members=((0, 0), (1, 0))),
            Factor(members=((0, last), (1, len(shape) - 1))),
        )
        return self._op("dispatch", (operand,), shape, factors)

    def _op(
        self,
        kind: str,
        operands: tuple[int, ...],
        shape: tuple[int, ...],
        factors: tuple[Factor, ...],
        *,
        elementwise: bool = False,
        reshape: bool = False,
        matmul: tuple[int, int, int, int] | None = None,
        saves: tuple[int, ...] = (),
    ) -> int:
        like = self.tensors[operands[0]]
        result = self._tensor(shape)
        if like.kind != "batch":
            self.tensors[result] = replace(
                self.tensors[result],
                dtype=like.dtype,
                itemsize_bytes=like.itemsize_bytes,
            )
        flops = 0 if matmul is None else 2 * math.prod(matmul)
        self.ops.append(
            Op(
                kind=kind,
                position=(len(self.ops),),
                operands=operands,
                results=(result,),
                factors=factors,
                elementwise=elementwise,
                reshape=reshape,
                flops=flops,
                matmul=matmul,
                saves=saves,
                trip=self.trip,
                task_graph=self.here,
                remat=self.remat,
                kernel=self._kernel,
                share=self._share if matmul else 1.0,
            )
        )
        return result

    def einsum(self, spec: str, *operands: int) -> int:
        """Adds an einsum of one or two operands, such as ``"bse,em->bsm"``."""
        ins, _, out = spec.partition("->")
        terms = ins.split(",")
        members: dict[str, list[tuple[int, int]]] = {}
        sizes: dict[str, int] = {}
        for slot, letters in enumerate((*terms, out)):
            for dim, letter in enumerate(letters):
                members.setdefault(letter, []).append((slot, dim))
                if slot < len(operands):
                    sizes[letter] = self.shape(operands[slot])[dim]
        factors = tuple(
            Factor(members=tuple(places))
            for letter, places in members.items()
            if sizes[letter] > 1
        )
        shape = tuple(sizes[letter] for letter in out)
        if len(operands) == 1:
            kind = "reduce_sum" if len(out) < len(terms[0]) else "transpose"
            return self._op(kind, operands, shape, factors)
        left, right = terms
        groups = (
            [x for x in left if x in out and x not in right],
            [x for x in left if x in right and x not in out],
            [x for x in right if x in out and x not in left],
            [x for x in left if x in right and x in out],
        )
        m, k, n, batch = (math.prod(sizes[x] for x in group) for group in groups)
        return self._op(
            "dot_general",
            operands,
            shape,
            factors,
            matmul=(m, k, n, batch),
            saves=(0, 1),
        )

    def add(self, *operands: int, kind: str = "add") -> int:
        """Adds an elementwise operation; size-1 dimensions broadcast."""
        shapes = [self.shape(t) for t in operands]
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        result = len(operands)
        factors = []
        for dim, size in enumerate(shape):
            if size > 1:
                slots = [s for s, sizes in enumerate(shapes) if sizes[dim] == size]
                places = ((slot, dim) for slot in (*slots, result))
                factors.append(Factor(members=tuple(places)))
        return self._op(kind, operands, shape, tuple(factors), elementwise=True)

    def keeps(self, *slots: int) -> None:
        """Sets the slots of the latest operation that the backward pass reads."""
        self.ops[-1] = replace(self.ops[-1], saves=slots)

    def unary(self, kind: str, operand: int) -> int:
        """Adds an elementwise operation of one operand, whose result is saved."""
        result = self.add(operand, kind=kind)
        self.ops[-1] = replace(self.ops[-1], saves=(1,))
        return result

    def cast(self, operand: int, dtype: str, itemsize_bytes: int) -> int:
        """Adds a cast; operations on its result compute in the new dtype."""
        result = self.add(operand, kind="convert_element_type")
        self.tensors[result] = replace(
            self.tensors[result], dtype=dtype, itemsize_bytes=itemsize_bytes
        )
        return result

    def reshape(self, operand: int, *shape: int) -> int:
        """Adds a reshape in row-major order."""
        assert math.prod(shape) == math.prod(self.shape(operand))
        return self._op("reshape", (operand,), shape, (), reshape=True)

    def broadcast(self, operand: int, *shape: int) -> int:
        """Adds a broadcast to a shape with more leading dimensions."""
        offset = len(shape) - len(self.shape(operand))
        factors = tuple(
            Factor(members=((0, dim), (1, dim + offset)))
            for dim, size in enumerate(self.shape(operand))
            if size > 1
        )
        return self._op("broadcast_in_dim", (operand,), shape, factors)

    def gather(self, table: int, indices: int) -> int:
        """Adds a lookup of rows of a table."""
        rows, width = self.shape(table)
        del rows
        shape = (*self.shape(indices), width)
        out = len(shape) - 1
        factors = [Factor(members=((0, 0),)), Factor(members=((0, 1), (2, out)))]
        factors += [Factor(members=((1, d), (2, d))) for d in range(out)]
        return self._op("gather", (table, indices), shape, tuple(factors))

    def graph(self, loss: int) -> Graph:
        """Returns the graph so far, with a scalar tensor as its loss."""
        first, dim = self.batch_dims[0]
        return Graph(
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            task_graphs=tuple(self.task_graphs),
            loss=loss,
            batch_size=self.shape(first)[dim],
            batch_dims=tuple(self.batch_dims),
            model_hash="by-hand",
        )
