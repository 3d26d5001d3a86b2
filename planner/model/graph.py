"""The model as plain data: tensors, operations, marks and TaskGraphs.

Capture (``whalejax.capture``) makes these from a traced loss, and the planner reads
nothing else of the model. They have no JAX types, so the planner does not need JAX.

Every operation is described like an einsum. A *factor* is one index letter, with the
dimensions of operands and results that have it. Sharding, collectives, FLOPs and memory
all follow from the factors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whalejax.planner.model.score_mask import ScoreMask
from whalejax.planner.model.windows import Window


LOOPS = ("scan", "while", "cond")
"""Kinds of operations that tie values across loops or branches and compute nothing."""

CONVOLUTION = "conv_general_dilated"
"""Kind of convolutions."""

RAGGED = frozenset(("ragged_dot_general", "ragged_dot"))
"""Kinds of products of rows sorted by group with a matrix for each group."""

CHOOSING_WINDOWS = frozenset(("reduce_window_max", "reduce_window_min"))
"""Kinds of poolings whose gradient goes to the chosen element."""

LINEAR_WINDOWS = frozenset(("reduce_window_sum",))
"""Kinds of poolings whose backward pass reads no value of the forward pass."""

ATTENTION = "attention"
"""Kind of complete attention operations: two products and a softmax, computed in
blocks. If the sequence is sharded, they run as ring attention.
"""

LOOKUPS = frozenset(("gather", "dynamic_slice"))
"""Operations that read some elements of a table."""

_PASSING = frozenset(
    (*"transpose copy concatenate stack broadcast_in_dim gather".split(), *LOOPS)
)
"""Operations that move their operand's elements and compute nothing."""

TRANSCENDENTAL = frozenset(
    (
        "exp exp2 expm1 log log1p log2 tanh logistic sin cos tan atan2 "
        "erf erfc erf_inv pow lgamma digamma"
    ).split()
)
"""Operations that compute an exponential or the like of every element."""

LINEAR = frozenset(
    (
        "add add_any sub neg convert_element_type copy transpose reduce_sum cumsum "
        "broadcast_in_dim concatenate pad rev slice gather dropout dispatch"
    ).split()
)
"""Operations whose backward pass reads no value of the forward pass, except perhaps a
mask or indices.
"""

TensorKind = Literal["param", "state", "batch", "rng", "const", "value"]
MarkKind = Literal["replicate", "split", "stage", "pipeline"]
FactorKind = Literal["linked", "unshardable", "halo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One annotation by the user around an operation.

    Attributes:
        kind: Name of the annotation: ``replicate``, ``split``, ``stage`` or
            ``pipeline``.
        attributes: (Name, text) pairs of its arguments, sorted by name, without omitted
            arguments.
    """

    kind: MarkKind
    attributes: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str | None:
        """Returns the text of one argument, or None if it was omitted."""
        return dict(self.attributes).get(name)

    @property
    def devices(self) -> int | None:
        """Requested number of devices, or None."""
        text = self.get("devices")
        return None if text is None else int(text)

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={text}" for name, text in self.attributes)
        return f"{self.kind}({inner})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Value of the traced program; ``Graph.tensors[id]`` is the tensor ``id``.

    Attributes:
        id: Index in ``Graph.tensors``.
        shape: Unsharded shape.
        dtype: NumPy name of the dtype, such as ``"float32"``.
        itemsize_bytes: Bytes of one element.
        kind: ``param``, ``state``, ``batch`` or ``rng`` for a leaf, else a constant or
            a value.
        path: Path of the leaf, such as ``"blocks.0.mlp.up.kernel"``; empty for values.
        names: Logical name of each dimension in the model's metadata, or None.
        pinned: Mesh axes that the model's metadata fixes for each dimension, or None.
        called: Names of these mesh axes in the model, in the same order.
        differentiable: Whether a gradient flows through the tensor: it is a trained
            parameter, or an inexact value that depends on one.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    kind: TensorKind = "value"
    path: str = ""
    names: tuple[str | None, ...] = ()
    pinned: tuple[str | None, ...] = ()
    called: tuple[str | None, ...] = ()
    differentiable: bool = False

    @property
    def frozen(self) -> bool:
        """Whether the tensor is a weight that is not trained."""
        return self.kind == "param" and not self.differentiable

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return self.size * self.itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Index letter of an operation, as in an einsum.

    Attributes:
        members: (slot, dimension) pairs that share the letter; all have the same size,
            above 1. Slots number the operands, then the results.
        kind: ``linked``, ``unshardable`` or ``halo``. Linked members are one dimension,
            which may be sharded; it is contracted if no result has it. An unshardable
            dimension is needed unsharded on every device. So is a halo dimension, as
            windows reach over shard edges, unless a spatial axis shards it (see
            ``Op.windows``).
    """

    members: tuple[tuple[int, int], ...]
    kind: FactorKind = "linked"

    @property
    def needs_all(self) -> bool:
        """Whether every device needs the full dimension."""
        return self.kind != "linked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Operation of the forward pass of the loss.

    Attributes:
        kind: Name of the primitive, such as ``"dot_general"``.
        position: Indices of the equation and of the inner jaxprs around it, outermost
            first. The lowering finds the equation by its position.
        operands: Tensor ids.
        results: Tensor ids.
        factors: Index letters. A dimension of size above 1 without a factor has no ties
            and no limit on sharding.
        reshape: Whether the operation only regroups dimensions in row-major order, so
            that operand 0 and result 0 have the same elements in the same order.
        elementwise: Whether the operation fuses and passes once over its operands.
        flops: Unsharded FLOPs of one execution of the forward pass, for matrix products
            and convolutions; else 0.
        matmul: Unsharded (m, k, n, batch) of the product, or None.
        saves: Slots whose values the backward pass reads.
        trip: Number of executions in one forward pass, the product of scan lengths.
        task_graph: Index in ``Graph.task_graphs``.
        remat: Id of the innermost checkpointed region around the operation, or None.
        kept: Whether that region's policy saves the results for the backward pass.
        scope: Name stack as text, for reports.
        unknown: Whether the primitive has no rule, so that dimensions stay unsharded.
        kernel: Id of the operation's fused kernel, or None. Values inside a kernel stay
            on chip and are recomputed for the backward pass.
        chunks: Number of chunks of the tokens, of which one is in memory at a time.
        share: Fraction of a product that is computed, below 1 in a graph made by hand
            whose fused attention skips masked scores.
        mask: Scores of an attention that are hidden whatever the data are, or None.
        windows: Windows along spatial dimensions of operand 0 and result 0.
    """

    kind: str
    position: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    factors: tuple[Factor, ...] = ()
    reshape: bool = False
    elementwise: bool = False
    flops: int = 0
    matmul: tuple[int, int, int, int] | None = None
    saves: tuple[int, ...] = ()
    trip: int = 1
    task_graph: int = 0
    remat: int | None = None
    kept: bool = False
    scope: str = ""
    unknown: bool = False
    kernel: int | None = None
    share: float = 1.0
    mask: ScoreMask | None = None
    chunks: int = 1
    windows: tuple[Window, ...] = ()

    @property
    def regathers(self) -> bool:
        """Whether sharded weights are gathered again for the backward pass.

        They are for products, whose weights are large and read in the backward pass.
        Other operations, such as a norm with its scale, keep their weights gathered.
        """
        return self.matmul is not None

    @property
    def column(self) -> int:
        """Sequence dimension of an attention's keys, whose factor only values share."""
        return next(
            dict(factor.members)[1]
            for factor in self.factors
            if {slot for slot, _ in factor.members} == {1, 2}
        )


def makes_weights(op: Op, weight: Sequence[bool]) -> bool:
    """Returns whether an operation has results that depend on parameters alone.

    Args:
        op: The operation.
        weight: Whether each tensor depends on parameters alone.
    """
    weights = op.results
    return bool(weights) and weight[weights[0]] and all(weight[t] for t in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Region of the loss with one strategy.

    Regions with the same marks at the same position of a repeated block are one
    TaskGraph. ``Op.task_graph`` assigns operations to TaskGraphs.

    Attributes:
        index: Index in ``Graph.task_graphs``; 0 has the operations without a mark.
        marks: Marks around the region, outermost first; empty without marks.
        name: Unique short name, such as ``"split"`` or ``"split.2"``.
        scope: Name stack of the region in the model, for reports.
        repeats: Number of separate parts of the program that belong to the region.
        path: Indices of the enclosing marks' instances, outermost first. TaskGraphs
            inside one ``pipeline`` share a prefix.
    """

    index: int
    marks: tuple[Mark, ...] = ()
    name: str = "default"
    scope: str = ""
    repeats: int = 1
    path: tuple[int, ...] = ()

    @property
    def strategy(self) -> Mark | None:
        """Innermost ``replicate`` or ``split`` mark, or None."""
        for mark in reversed(self.marks):
            if mark.kind in ("replicate", "split"):
                return mark
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResidual:
    """Value that every iteration of a loop saves for the backward pass.

    The differentiation of the loop chooses these values, and compilers keep them.

    Attributes:
        tensor: Id of a tensor of the loop's body with the same dimensions.
        nbytes: Unsharded bytes of one iteration's value.
        trip: Number of iterations.
        multiplied: Whether the value is float32 and only products read it.
        gathered: Whether only products read the value, so that it is saved in their
            form.
    """

    tensor: int
    nbytes: int
    trip: int
    multiplied: bool = False
    gathered: bool = False


class LoopResiduals(Sequence[LoopResidual]):
    """Residuals of a program's loops, computed when first read.

    They take a derivative of each loop, and many programs of a search do not need them.

    Args:
        compute: Function that returns the residuals.
    """

    def __init__(self, compute: Callable[[], tuple[LoopResidual, ...]]) -> None:
        self._compute = functools.cache(compute)

    def __len__(self) -> int:
        return len(self._compute())

    def __getitem__(self, index: Any) -> Any:
        return self._compute()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._compute() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._compute())

    def __reduce__(self) -> tuple[type, tuple[tuple[LoopResidual, ...]]]:
        return tuple, (self._compute(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured forward loss.

    Attributes:
        tensors: Tensors; a tensor's id is its index.
        ops: Operations in program order, with calls inlined and scan bodies once.
        task_graphs: TaskGraphs; index 0 has the operations without a mark.
        loss: Id of the scalar loss (its total, if the user gave a weight).
        batch_size: Traced size of the batch dimension.
        batch_dims: (tensor id, dimension) of the batch dimension of each batch leaf.
        num_micro_batches: Number of micro-batches into which the global batch was
            divided before tracing.
        weighted: Whether the user divides by a weight of their own (``WeightedLoss``).
        model_hash: Short hash of leaf paths, shapes, dtypes, batch and marks, then a
            dash and a hash of the operations.
        unknown_primitives: Distinct names of primitives without a rule.
        undeclared_marks: Texts of marks that cover no operation.
        whole: Ids of the loss's other results, such as statistics and metrics, which
            every device has unsharded.
        stacked: Values that loops save for the backward pass.
        without_gradient: Ids of the trained weights that no gradient of the loss
            reaches, although some operations read them.
    """

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    task_graphs: tuple[TaskGraph, ...]
    loss: int
    batch_size: int
    batch_dims: tuple[tuple[int, int], ...]
    num_micro_batches: int = 1
    weighted: bool = False
    model_hash: str = ""
    unknown_primitives: tuple[str, ...] = ()
    undeclared_marks: tuple[str, ...] = field(default=())
    whole: tuple[int, ...] = ()
    stacked: Sequence[LoopResidual] = ()
    without_gradient: frozenset[int] = frozenset()

    @property
    def params(self) -> tuple[Tensor, ...]:
        """Weights: trained ones in the order of their tree, then the others.

        The others are read too, but have no gradient.
        """
        return tuple(t for t in self.tensors if t.kind == "param")

    def unread_weights(self, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """Returns the trained weights on which the loss does not depend.

        Args:
            gradient: Whether weights count that are read only behind a
                ``stop_gradient``, so that they have no gradient; default: False.
        """
        results = {self.loss, *(self.whole if self.weighted else ())}
        read = self._read_by(results) - (self.without_gradient if gradient else set())
        return tuple(t for t in self.params if not t.frozen and t.id not in read)

    def unused_state(self) -> tuple[Tensor, ...]:
        """Returns the state that the loss neither changes nor reads for any result."""
        state = [t for t in self.tensors if t.kind == "state"]
        read = self._read_by({self.loss, *self.whole} - {t.id for t in state})
        return tuple(t for t in state if t.id in self.whole and t.id not in read)

    def _read_by(self, results: Collection[int]) -> set[int]:
        """Returns the given tensors, and all tensors on which they depend.

        A loop counts as reading all values that its body carries.
        """
        carried: dict[tuple[int, ...], list[int]] = {}
        for op in self.ops:
            if op.kind in LOOPS and op.results and len(op.operands) > 1:
                carried.setdefault(op.position, []).extend(op.operands)
        read = {*results}
        for op in reversed(self.ops):
            if not read.isdisjoint(op.results):
                read.update(op.operands)
                if op.kind in LOOPS:
                    read.update(carried.get(op.position, ()))
        return read

    @property
    def layers_in_a_loop(self) -> bool:
        """Whether at least half of the floating-point operations are in loops."""
        work = [(op.flops * op.trip, op.trip > 1) for op in self.ops]
        looped = sum(flops for flops, inside in work if inside)
        return looped > 0 and 2 * looped >= sum(flops for flops, _ in work)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights that are not trained."""
        return sum(t.nbytes for t in self.params if t.frozen)

    def homes(self) -> dict[int, int]:
        """Returns each tensor's owner: the TaskGraph that makes or first reads it."""
        homes: dict[int, int] = {}
        for op in self.ops:
            for t in op.operands:
                homes.setdefault(t, op.task_graph)
            homes.update(dict.fromkeys(op.results, op.task_graph))
        return homes

    def runs_again(self) -> tuple[bool, ...]:
        """Returns whether the backward pass recomputes each operation.

        In a remat region it recomputes the values that it reads, and their operands,
        but not the results of the region, which are saved.
        """
        needed: set[tuple[int | None, int]] = set()
        result = [False] * len(self.ops)
        for index in reversed(range(len(self.ops))):
            op = self.ops[index]
            if op.remat is None:
                continue
            slots = op.operands + op.results
            needed.update((op.remat, slots[slot]) for slot in op.saves)
            if not op.kept and any((op.remat, t) in needed for t in op.results):
                result[index] = True
                needed.update((op.remat, t) for t in op.operands)
        return tuple(result)

    def leaving(self) -> frozenset[int]:
        """Returns values that are assembled from chunks for unchunked operations."""
        made = {t: op.chunks for op in self.ops for t in op.results}
        return frozenset(
            t
            for op in self.ops
            for t in op.operands
            if op.chunks == 1 and made.get(t, 1) > 1
        )

    def only_multiplied(self) -> tuple[bool, ...]:
        """Returns whether each tensor is float32 and read only by products."""
        read = [False] * len(self.tensors)
        only_multiplied = [t.dtype == "float32" for t in self.tensors]
        only_multiplied[self.loss] = False
        for t in self.whole:
            only_multiplied[t] = False
        for op in reversed(self.ops):
            passes = op.reshape or op.kind in _PASSING
            for t in op.operands:
                read[t] = True
                if passes and op.results:
                    only_multiplied[t] = only_multiplied[t] and all(
                        only_multiplied[r] for r in op.results
                    )
                elif not passes:
                    only_multiplied[t] = only_multiplied[t] and op.kind in (
                        "dot_general",
                        CONVOLUTION,
                    )
        return tuple(f and r for f, r in zip(only_multiplied, read, strict=True))

    def turned(self) -> dict[int, int]:
        """Returns the operand that each product transposes for its weight's gradient.

        The rows of that gradient are the first dimension of the weight. Both operands
        of the gradient are contracted along their first dimension, and the one with the
        rows is transposed.

        Returns:
            Slot of the operand by operation index; a result's slot stands for its
            cotangent.
        """
        source = {t.id: t.id for t in self.params if t.differentiable}
        result: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if op.kind in ("transpose", "convert_element_type", "copy") and op.operands:
                if op.operands[0] in source:
                    source[op.results[0]] = source[op.operands[0]]
            if op.kind != "dot_general" or op.matmul is None:
                continue
            sides = [t in source for t in op.operands[:2]]
            if sum(sides) != 1:
                continue
            mine = sides.index(True)
            param = self.tensors[source[op.operands[mine]]]
            m, k, n, _ = op.matmul
            rows = param.shape[0] if param.shape else 0
            by_result = rows == (m, n)[mine] and rows != k
            result[index] = len(op.operands) if by_result else 1 - mine
        return result

    def weight_tensors(self) -> tuple[bool, ...]:
        """Returns whether each tensor depends on parameters alone."""
        weight = [t.kind == "param" for t in self.tensors]
        for op in self.ops:
            given = op.operands
            if given and weight[given[0]] and all(weight[t] for t in given):
                for t in op.results:
                    weight[t] = True
        return tuple(weight)


def rereads(graph: Graph, weight: Sequence[bool]) -> tuple[int, ...]:
    """Returns how many consecutive executions of each operation read the same weights.

    Args:
        graph: The captured loss.
        weight: Whether each tensor depends on parameters alone.
    """
    if all(op.trip == 1 for op in graph.ops):
        return (1,) * len(graph.ops)
    slices: dict[int, int] = {}
    result = []
    for op in graph.ops:
        known = [slices.get(t, 1) for t in op.operands if weight[t]]
        if makes_weights(op, weight):
            times = _slice_count(graph, op)
            for t in op.results:
                slices[t] = times * max(known, default=1)
        result.append(max((op.trip // n for n in known), default=1) or 1)
    return tuple(result)


def _slice_count(graph: Graph, op: Op) -> int:
    """Returns the number of slices that an operation reads in turn, or 1."""
    if not op.operands:
        return 1
    before, after = (graph.tensors[t].shape for t in (op.operands[0], op.results[0]))
    if op.kind in LOOPS and before[1:] == after and before:
        return before[0]
    if op.kind in ("dynamic_slice", "gather") and op.trip > 1:
        return max(1, min(op.trip, math.prod(before) // max(1, math.prod(after))))
    return 1
