"""Cost rows: equal operations and layout changes of all layers, with their number.

An unrolled model of a hundred layers has ten thousand operations, of which about fifty
are distinct. A row is a distinct operation in terms of roles, with a count. Cost and
memory models iterate over rows instead of operations, so depth costs nothing.

Usually the backward pass still has the neighbours' elements that the forward pass
received. In a loop or a checkpointed region, the operand is saved or recomputed without
them, and the halo exchange is repeated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.model.dimensions import Dimensions, Layout, op_roles, roles_of
from whalejax.planner.model.graph import (
    CONVOLUTION,
    LINEAR_WINDOWS,
    LOOPS,
    Graph,
    Op,
)
from whalejax.planner.model.score_mask import ScoreMask
from whalejax.planner.model.windows import Window
from whalejax.planner.sharding.fused_parameters import FusedLayout, ParameterForms


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Loops and checkpointed regions around an operation with windows.

    Attributes:
        runs_again: Whether the backward pass recomputes the operation.
        reads_operand: Whether the operation's backward pass reads the windows'
            elements.
        in_loop: Whether the operation runs several times in one forward pass.
        in_region: Whether the operation is in a checkpointed region.
        around_loop: Whether the region contains the full loop of the operation, which
            then runs again before the backward loop.
        mergeable: Whether the region receives the operand, or computes it without a sum
            over samples or space. Compilers can then merge exchanges of both passes.
    """

    runs_again: bool
    reads_operand: bool
    in_loop: bool = False
    in_region: bool = False
    around_loop: bool = False
    mergeable: bool = False


def repeats(
    graph: Graph,
    dims: Dimensions,
    maker: Sequence[int | None],
    again: Sequence[bool],
    index: int,
) -> Repeats:
    """Returns the loops and checkpointed regions around one operation.

    Args:
        graph: Captured loss.
        dims: Logical dimensions of the loss.
        maker: Index of the operation that produces each tensor, or None.
        again: Whether the backward pass recomputes each operation.
        index: Index of the operation.
    """
    op = graph.ops[index]
    kernel = op.kind == CONVOLUTION
    read = op.operands[1] if kernel else op.operands[0]
    around = op.trip > 1 and _holds_loop(graph, op)
    return Repeats(
        runs_again=again[index] or around,
        reads_operand=op.kind not in LINEAR_WINDOWS
        and graph.tensors[read].differentiable,
        in_loop=op.trip > 1,
        in_region=op.remat is not None,
        around_loop=around,
        mergeable=op.remat is not None and not _sums_before(graph, dims, maker, index),
    )


def _holds_loop(graph: Graph, op: Op) -> bool:
    return op.remat is not None and any(
        loop.kind in LOOPS
        and loop.remat == op.remat
        and op.position[: len(loop.position)] == loop.position
        for loop in graph.ops
    )


def _sums_before(
    graph: Graph, dims: Dimensions, maker: Sequence[int | None], index: int
) -> bool:
    """Returns whether the region sums over samples or space to compute the operand."""
    region = graph.ops[index].remat
    waiting, seen = [graph.ops[index].operands[0]], set[int]()
    while waiting:
        made = maker[waiting.pop()]
        if made is None or made in seen or graph.ops[made].remat != region:
            continue
        seen.add(made)
        op = graph.ops[made]
        if op.kind not in LOOPS and not op.reshape and _sums(made, op, dims):
            return True
        waiting.extend(op.operands)
    return False


def _sums(index: int, op: Op, dims: Dimensions) -> bool:
    count = len(op.operands)
    given = op_roles(index, op, dims)
    left = frozenset[int]().union(
        *(
            roles_of(dims.seen.get((index, count + slot), dims.layouts[t]))
            for slot, t in enumerate(op.results)
        )
    )
    return any(dims.roles[r].space or dims.roles[r].is_batch for r in given - left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Operand or result in the form that its operation uses.

    Attributes:
        layout, sizes: Roles in each dimension, major role first, and their sizes.
        nbytes: Bytes of the unsharded tensor.
        itemsize_bytes: Bytes of one element.
        differentiable: Whether a gradient flows through it.
        weight: Whether the tensor depends on parameters alone.
    """

    layout: Layout
    sizes: Layout
    nbytes: int
    itemsize_bytes: int
    differentiable: bool
    weight: bool

    @property
    def roles(self) -> frozenset[int]:
        """All roles of the tensor's dimensions."""
        return roles_of(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix product in terms of roles.

    Attributes:
        m, k, n, batch: Unsharded numbers of rows, summed elements, columns and
            products.
        m_roles, k_roles, n_roles, batch_roles: Roles of each of these.
        dtype: NumPy name of the operands' dtype.
        left_gradient, right_gradient: Whether that operand needs a gradient, which
            takes one more product of as many FLOPs in the backward pass.
        turned: Slot of the operand that is transposed for its weight's gradient, as in
            ``Graph.turned``.
        share: Fraction of the product that is computed, as in ``Op.share``.
        mask: Scores of an attention that are hidden whatever the data are, or None.
        groups: Number of matrices; each row is multiplied by one of them.
        width: Width of an attention's values, whose keys have width ``k``; else 0.
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
    turned: int | None = None
    share: float = 1.0
    mask: ScoreMask | None = None
    groups: int = 1
    width: int = 0

    def times(self, compiler: CompilerProfile) -> tuple[int, int, int]:
        """Returns the number of products: forward, and per operand's gradient."""
        rows = 1 if compiler.groups_rows else self.groups
        left, right = self.left_gradient, self.right_gradient
        return rows, left * rows, right * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal operations, with their number.

    Attributes:
        kind: Name of the primitive.
        task_graph: TaskGraph of the operations.
        count: Number of executions in one forward pass.
        operands, results: Slots that the operations read and write.
        product: Matrix product, or None.
        reads, writes: Slots that pass through memory if elementwise neighbours fuse.
        reads_in_kernel, writes_in_kernel: The same if a compiler also fuses
            normalizations of rows into one kernel.
        transcendental: Whether every element costs an exp, tanh or the like.
        remat: Whether the operations run again in the backward pass.
        fused: Whether they are part of a kernel that the backward pass recomputes.
        scope: Name stack of one of the operations, for reports.
        windows: Windows along spatial dimensions, as in ``Op.windows``.
        repeats: Loops and checkpointed regions around windows, or None.
        rereads: Number of consecutive executions that read the same weights, as in a
            loop over time.
    """

    kind: str
    task_graph: int
    count: int
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    product: Product | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    reads_in_kernel: tuple[int, ...]
    writes_in_kernel: tuple[int, ...]
    transcendental: bool
    remat: bool
    fused: bool
    scope: str
    windows: tuple[Window, ...] = ()
    repeats: Repeats | None = None
    rereads: int = 1

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Operands, then results."""
        return self.operands + self.results

    @property
    def cost_key(self) -> Hashable:
        """Key of rows that may differ only in TaskGraph and scope.

        Fields are compared by identity, so keys are valid only within one program.
        """
        parts = [getattr(self, name) for name in _COMPARED]
        return tuple([x if isinstance(x, int | str) else id(x) for x in parts])

    def kernel_memory_slots(
        self, compiler: CompilerProfile
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the slots that a compiler's kernels read from and write to memory."""
        if compiler.fuses_normalizations:
            return self.reads_in_kernel, self.writes_in_kernel
        return self.reads, self.writes


_COMPARED = tuple(f.name for f in fields(Row) if f.name not in ("task_graph", "scope"))
"""Fields of ``Row`` on which its cost depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Equal readers of a value.

    Attributes:
        view: Value in the form that the readers use.
        task_graph: TaskGraph of the readers.
        present: All roles of a reading operation.
        readers: Number of readers.
    """

    view: Slot
    task_graph: int
    present: frozenset[int]
    readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Equal values, with their producer and all readers.

    Attributes:
        source: Value in the producer's form; for a leaf, in the first reader's form.
        task_graph: TaskGraph of the producer.
        present: All roles of the producer; empty for a leaf.
        reduced: Roles that the producer sums over.
        parameter: Whether the producer reads parameters alone.
        uses: Readers of the value, in program order.
        fused: Sharding of a value that its readers split; None for any other value.
        count: Number of such values in one forward pass.
        remat: Whether the producer runs again in the backward pass.
        read_remat: Whether a reader runs again, so that reshards are repeated.
        multiplied: Whether the value is float32 and only products read it.
        scope: Name stack of a producer or reader, for reports.
    """

    source: Slot
    task_graph: int
    present: frozenset[int]
    reduced: frozenset[int]
    parameter: bool
    uses: tuple[Use, ...]
    fused: FusedLayout | None
    count: int
    remat: bool
    read_remat: bool
    multiplied: bool
    scope: str

    @property
    def still(self) -> bool:
        """Whether the value is never resharded or reduced, under any layout."""
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
class OperationRows:
    """All cost rows of a model.

    Attributes:
        ops: Rows of operations.
        flows: Values that some layout reshards or reduces.
        reading: Forms in which operations read the parameters.
    """

    ops: tuple[Row, ...]
    flows: tuple[Flow, ...]
    reading: ParameterForms

    @property
    def weight(self) -> tuple[bool, ...]:
        """Whether each tensor depends on parameters alone."""
        return self.reading.weight
