"""Cost rows: operations and layout changes, folded over equal layers.

An unrolled model of a hundred layers has ten thousand operations and some fifty
different ones. A row is one of the different ones with its count, seen in roles; the
cost and the memory models walk rows and never operations, so depth costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.model.dimensions import Layout, roles_of
from whalejax.planner.model.halo_repeats import Repeats
from whalejax.planner.model.windows import Window
from whalejax.planner.sharding.fused_parameters import FusedLayout, ParameterForms


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An operand or result as its operation sees it.

    Attributes:
        layout, sizes: Roles and sizes of the atoms of each dimension.
        nbytes: Bytes of the whole tensor.
        itemsize_bytes: Bytes of one element.
        differentiable: A gradient flows through it.
        weight: Whether it depends on parameters alone.
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
        m, k, n, batch: Sizes, unsharded.
        m_roles, k_roles, n_roles, batch_roles: The roles behind each.
        dtype: Numpy name of the operands' type.
        left_gradient, right_gradient: Whether that operand needs a gradient, which is
            one more product of the same FLOPs in the backward pass.
        share: Part of it that is done, below 1 where a mask hides some.
        turned: Slot of what is turned round for its weight's gradient; see
            ``Graph.turned``.
        zigzag: Whether rows of blockwise attention are assigned in zig-zag order.
        groups: Number of matrices of which each row meets one.
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
    turned: int | None = None
    zigzag: bool = False
    groups: int = 1

    def times(self, compiler: CompilerProfile) -> tuple[int, int, int]:
        """Returns the number of products of a compiler: forward, and for each operand's
        gradient.
        """
        rows = 1 if compiler.groups_rows else self.groups
        left, right = self.left_gradient, self.right_gradient
        return rows, left * rows, right * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal operations, counted.

    Attributes:
        kind: The primitive.
        task_graph: TaskGraph of the operations.
        count: Executions in one forward pass.
        operands, results: Slots that it reads and writes.
        product: The matrix product, or None.
        reads, writes: Slots that cross main memory when elementwise neighbours fuse.
        reads_in_kernel, writes_in_kernel: The same where a compiler also makes one
            kernel of a normalization of rows.
        transcendental: Every element of its result costs an exp, tanh or the like.
        remat: Whether it runs again in the backward pass.
        fused: Whether it is part of a kernel that recomputes it in the backward pass.
        scope: One place in the model, for reports.
        windows: Windows along spatial dimensions; see ``Op.windows``.
        repeats: Loops and checkpointed regions around an operation with windows, or
            None.
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

    def kernel_memory_slots(
        self, compiler: CompilerProfile
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots that a compiler's kernels read from memory, and those they write."""
        if compiler.fuses_normalizations:
            return self.reads_in_kernel, self.writes_in_kernel
        return self.reads, self.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One kind of reader of a value.

    Attributes:
        view: The value as the reader sees it.
        task_graph: TaskGraph of the reader.
        present: Every role of the reading operation.
        readers: Number of such operations.
    """

    view: Slot
    task_graph: int
    present: frozenset[int]
    readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Equal values on their way from what makes them to all who read them.

    Attributes:
        source: The value as it is made, or as its first reader sees a leaf.
        task_graph: TaskGraph of the value's maker.
        present: Every role of the operation that makes it; empty for a leaf.
        reduced: Roles that this operation sums over.
        parameter: The operation computes with parameters alone.
        uses: Its readers, in program order.
        fused: Sharding of a fused value before it is read, where that is another
            layout; or None.
        count: Number of such values in one forward pass.
        remat: The operation runs again in the backward pass.
        read_remat: A reader does, so that bringing the value there is repeated.
        multiplied: Whether it is float32 and products alone read it.
        scope: One place where it is read or made.
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
class OperationRows:
    """All of a model's rows.

    Attributes:
        ops: Operations.
        flows: Values that some layout moves or sums, between operations.
        reading: Forms in which the parameters are read.
        op_kinds, flow_kinds: A number for each of them, which those of the same
            ``Views`` share that differ in their TaskGraphs alone.
    """

    ops: tuple[Row, ...]
    flows: tuple[Flow, ...]
    reading: ParameterForms
    op_kinds: tuple[int, ...]
    flow_kinds: tuple[int, ...]

    @property
    def weight(self) -> tuple[bool, ...]:
        """Whether each tensor depends on parameters alone."""
        return self.reading.weight
