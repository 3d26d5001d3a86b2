"""The model as plain data: tensors, operations, marks and TaskGraphs.

Capture (``whalejax.capture``) writes these from a traced loss; the planner reads
nothing else of the model. It is a module of its own because it is the one border
between JAX and the planner: no JAX type crosses it.

Every operation is described the way an einsum is: a *factor* is one index letter and
lists in which dimensions of which operands and results that letter stands. Sharding,
collectives, FLOPs and memory all follow from the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whalejax.planner.model.windows import Window


LOOPS = ("scan", "while", "cond")
"""Kinds of operations that tie values across a loop or branches and compute nothing."""

CONVOLUTION = "conv_general_dilated"
"""The kind of operations that convolve."""

RAGGED = frozenset(("ragged_dot_general", "ragged_dot"))
"""Kinds of products of rows that are sorted by group, each by its group's matrix."""

CHOOSING_WINDOWS = frozenset(("reduce_window_max", "reduce_window_min"))
"""Kinds of poolings whose gradient goes to the element that was chosen."""

LINEAR_WINDOWS = frozenset(("reduce_window_sum",))
"""Kinds of poolings whose backward pass reads nothing of the forward's."""

ATTENTION = "attention"
"""The kind of operations that are attention as a whole: two products and a softmax, run
a block at a time, with keys and values that go round where the sequence is sharded."""

LOOKUPS = frozenset(("gather", "dynamic_slice"))
"""Operations that take some of a table."""

_PASSING = frozenset(
    (*"transpose copy concatenate stack broadcast_in_dim gather".split(), *LOOPS)
)
"""Operations that give what they read, in another place, and compute nothing."""

TRANSCENDENTAL = frozenset(
    (
        "exp exp2 expm1 log log1p log2 tanh logistic sin cos tan atan2 "
        "erf erfc erf_inv pow lgamma digamma"
    ).split()
)
"""Operations whose every element takes an exponential or the like."""

LINEAR = frozenset(
    (
        "add add_any sub neg convert_element_type copy transpose reduce_sum cumsum "
        "broadcast_in_dim concatenate pad rev slice gather dropout dispatch"
    ).split()
)
"""Operations whose backward pass needs no value of the forward's but, perhaps, a mask
or indices."""

TensorKind = Literal["param", "state", "batch", "rng", "const", "value"]
MarkKind = Literal["replicate", "split", "stage", "pipeline"]
FactorKind = Literal["linked", "unshardable", "halo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One annotation of the user's, as found on the way to an operation.

    Attributes:
        kind: Name of the primitive, one of four.
        attributes: Its arguments as (name, text) pairs, sorted by name; arguments
            that were left out are absent.
    """

    kind: MarkKind
    attributes: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str | None:
        """The text of one argument, or None where it was left out."""
        return dict(self.attributes).get(name)

    @property
    def devices(self) -> int | None:
        """The device count that was asked for, if any."""
        text = self.get("devices")
        return None if text is None else int(text)

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={text}" for name, text in self.attributes)
        return f"{self.kind}({inner})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the traced program; ``Graph.tensors[id]`` is the tensor ``id``.

    Attributes:
        id: Its index in ``Graph.tensors``.
        shape: Dimensions, unsharded.
        dtype: The numpy name, such as ``"float32"``.
        itemsize_bytes: Bytes of one element.
        kind: A leaf of the program (param, state, batch, rng), a constant, or a
            value computed on the way.
        path: The leaf's path such as ``"blocks.0.mlp.up.kernel"``; empty for values.
        names: The user's logical name of each dimension (Flax metadata) or None.
        pinned: Mesh axes that the user's metadata fixes for each dimension, or None.
        called: The model's own names of these mesh axes, in the same order.
        differentiable: A gradient flows through it (it is a trained parameter, or an
            inexact value that depends on one); of parameters, that they are trained.
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
        """Returns whether it is a weight that is not trained."""
        return self.kind == "param" and not self.differentiable

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, unsharded tensor."""
        return self.size * self.itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One index letter of an operation.

    Attributes:
        members: (slot, dimension) pairs that share the letter. Slots count the
            operands first and then the results. All have the same size, above 1.
        kind: ``linked``: the members are one dimension and may be sharded together
            (it is contracted where no result holds it); ``unshardable``: the
            operation needs the whole of this dimension on every device; ``halo``: so it
            does, because its windows reach over the edges of a shard, unless a spatial
            axis shards it (see ``Op.windows``).
    """

    members: tuple[tuple[int, int], ...]
    kind: FactorKind = "linked"

    @property
    def needs_all(self) -> bool:
        """Every device needs all of it."""
        return self.kind != "linked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation of the forward loss.

    Attributes:
        kind: The primitive's name, such as ``"dot_general"``.
        position: Position of the equation: indices of equations and of the inner jaxprs
            between, outermost first. Lowering finds the equation by it.
        operands: Tensor ids.
        results: Tensor ids.
        factors: Its index letters. A dimension above size 1 that stands in no factor
            is free: it is neither tied to another nor forbidden to shard.
        reshape: The operation only regroups dimensions in row-major order; operand 0
            and result 0 hold the same elements in the same order.
        elementwise: The result needs one pass over the operands and fuses.
        flops: Floating-point operations of one execution, unsharded, forward; only
            matrix products and convolutions count.
        matmul: (m, k, n, batch) of the product, unsharded, or None.
        saves: Slots whose values the backward pass reads.
        trip: Executions in one forward pass (the product of scan lengths).
        task_graph: Index into ``Graph.task_graphs``.
        remat: Id of the innermost checkpointed region around it, or None.
        kept: Whether that region's policy saves its results for the backward pass.
        scope: Name stack as text, for reports.
        unknown: No rule is known for the primitive; all its dimensions stay whole.
        kernel: Id of the fused kernel it is part of, or None. Values between the
            operations of one stay on chip and are computed again for the backward pass.
        share: Part of its work that is done, below 1 where a causal mask skips some.
        chunks: Into how many parts its tokens are cut, one part in memory at a time.
        zigzag: Attention whose mask is causal, so that rows are dealt out in zig-zag
            order.
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
    zigzag: bool = False
    chunks: int = 1
    windows: tuple[Window, ...] = ()

    @property
    def regathers(self) -> bool:
        """Weights that it reads in shards are gathered again for its backward pass.

        Those of products are large, and read there; what else reads weights (a norm's
        scale) keeps them.
        """
        return self.matmul is not None

    @property
    def column(self) -> int:
        """Returns the sequence dimension of an attention's keys.

        It is tied to the values, and to nothing else.
        """
        return next(
            dict(factor.members)[1]
            for factor in self.factors
            if {slot for slot, _ in factor.members} == {1, 2}
        )


def makes_weights(op: Op, weight: Sequence[bool]) -> bool:
    """Whether an operation gives something, and nothing that depends on data.

    Args:
        op: The operation.
        weight: For every tensor, whether it depends on parameters alone.
    """
    weights = op.results
    return bool(weights) and weight[weights[0]] and all(weight[t] for t in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """A region of the forward loss that one strategy applies to.

    Regions with the same marks at the same place of a repeated block are one
    TaskGraph; ``Op.task_graph`` says which operations belong to it.

    Attributes:
        index: Its place in ``Graph.task_graphs``; 0 is what no mark covers.
        marks: The marks around it, outermost first; empty for what is unmarked.
        name: A unique short name, such as ``"split"`` or ``"split.2"``.
        scope: Name stack of the region in the model, for reports.
        repeats: Number of separate places of the program that it stands for.
        path: The indices of the enclosing mark instances, outermost first; two
            TaskGraphs inside one ``pipeline`` share a prefix.
    """

    index: int
    marks: tuple[Mark, ...] = ()
    name: str = "default"
    scope: str = ""
    repeats: int = 1
    path: tuple[int, ...] = ()

    @property
    def strategy(self) -> Mark | None:
        """The innermost ``replicate`` or ``split`` mark, or None."""
        for mark in reversed(self.marks):
            if mark.kind in ("replicate", "split"):
                return mark
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResidual:
    """A value that every turn of a loop keeps for the backward pass.

    The loop's own differentiation decides what is kept, and compilers keep it as it is.

    Attributes:
        tensor: Id of a tensor of the loop's body with the same dimensions.
        nbytes: Bytes of one iteration's value, unsharded.
        trip: Number of iterations.
        multiplied: Whether it is float32 and products alone read it.
        gathered: Products alone read it, so that it is kept as they read it.
    """

    tensor: int
    nbytes: int
    trip: int
    multiplied: bool = False
    gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured forward loss.

    Attributes:
        tensors: Every tensor; a tensor's id is its index.
        ops: Operations in program order, calls inlined, scan bodies once.
        task_graphs: Regions; index 0 is what no mark covers.
        loss: Id of the scalar loss (its total, where the user gave a weight).
        batch_size: Size of the batch dimension that was traced.
        batch_dims: (tensor id, dimension) of the batch dimension of each batch leaf.
        num_micro_batches: Into how many parts the global batch was cut before tracing.
        weighted: The user divides by a weight of their own (``WeightedLoss``).
        model_hash: Short hash of leaf paths, shapes and dtypes, batch and marks.
        unknown_primitives: Names of primitives without a rule, each once.
        undeclared_marks: Text of marks that were entered and cover no operation.
        whole: Ids of what the loss gives beside itself (statistics, metrics); every
            device holds all of it.
        stacked: Values that loops save for the backward pass.
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
    stacked: tuple[LoopResidual, ...] = ()

    @property
    def params(self) -> tuple[Tensor, ...]:
        """The weights: those that are trained in the order of their tree, then others.

        A weight that is not trained is read as others are, and has no gradient.
        """
        return tuple(t for t in self.tensors if t.kind == "param")

    @property
    def layers_in_a_loop(self) -> bool:
        """Returns whether at least half of the floating-point operations are
        in loops.
        """
        work = [(op.flops * op.trip, op.trip > 1) for op in self.ops]
        looped = sum(flops for flops, inside in work if inside)
        return looped > 0 and 2 * looped >= sum(flops for flops, _ in work)

    @property
    def frozen_bytes(self) -> int:
        """Returns the bytes of the weights that are not trained."""
        return sum(t.nbytes for t in self.params if t.frozen)

    def homes(self) -> dict[int, int]:
        """Returns the owner of each tensor: the TaskGraph that makes it, or reads it
        first.
        """
        homes: dict[int, int] = {}
        for op in self.ops:
            for t in op.operands:
                homes.setdefault(t, op.task_graph)
            homes.update(dict.fromkeys(op.results, op.task_graph))
        return homes

    def runs_again(self) -> tuple[bool, ...]:
        """Whether the backward pass of its region computes each operation again.

        That is what the backward pass reads, and what this is made of; the result of
        a region is there already.
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
        """Values that are put together out of chunks, because others read them."""
        made = {t: op.chunks for op in self.ops for t in op.results}
        return frozenset(
            t
            for op in self.ops
            for t in op.operands
            if op.chunks == 1 and made.get(t, 1) > 1
        )

    def only_multiplied(self) -> tuple[bool, ...]:
        """Whether each tensor is float32 and read by products alone."""
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
        """Returns the operand that is transposed for the gradient of each product's
        weight.

        That gradient has the weight's first dimension as its rows, and contracts what
        is first in both of its operands: the one that has the rows is turned.

        Returns:
            Number of an operation to a slot: an operand, or the result, of whose shape
            the cotangent is.
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
        """Whether each tensor depends on parameters and on nothing else."""
        weight = [t.kind == "param" for t in self.tensors]
        for op in self.ops:
            given = op.operands
            if given and weight[given[0]] and all(weight[t] for t in given):
                for t in op.results:
                    weight[t] = True
        return tuple(weight)
