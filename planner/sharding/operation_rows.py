"""Cost rows: operations and layout changes, with equal ones of all layers counted.

An unrolled model of a hundred layers has ten thousand operations, of which some fifty
are different. A row is a different operation in terms of roles, with its count. The
cost and memory models iterate over rows instead of operations, so depth costs nothing.
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
    """Operand or result in the form that its operation uses.

    Attributes:
        layout, sizes: Roles and sizes of the atoms of each dimension.
        nbytes: Bytes of the unsharded tensor.
        itemsize_bytes: Bytes of one element.
        differentiable: Whether a gradient flows through it.
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
        """All roles of its dimensions."""
        return roles_of(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix product in terms of roles: those of its rows, columns and so on.

    Attributes:
        m, k, n, batch: Unsharded sizes.
        m_roles, k_roles, n_roles, batch_roles: Roles of each size.
        dtype: Numpy name of the operands' type.
        left_gradient, right_gradient: Whether that operand needs a gradient, which is
            one more product of the same FLOPs in the backward pass.
        share: Fraction of the product that is computed; below 1 if a mask hides some.
        turned: Slot of the operand that is transposed for its weight's gradient; see
            ``Graph.turned``.
        zigzag: Whether rows of blockwise attention are assigned in zig-zag order.
        groups: Number of matrices; each row is multiplied with one of them.
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
        """Returns the number of products: forward, and per operand's gradient."""
        rows = 1 if compiler.groups_rows else self.groups
        left, right = self.left_gradient, self.right_gradient
        return rows, left * rows, right * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal operations, counted.

    Attributes:
        kind: Name of the primitive.
        task_graph: TaskGraph of the operations.
        count: Number of executions in one forward pass.
        operands, results: Slots that it reads and writes.
        product: Matrix product, or None.
        reads, writes: Slots in main memory if elementwise neighbours fuse.
        reads_in_kernel, writes_in_kernel: Slots in main memory if a compiler also fuses
            a normalization of rows into one kernel.
        transcendental: Whether every element costs an exp, tanh or the like.
        remat: Whether it runs again in the backward pass.
        fused: Whether it is part of a kernel that recomputes it in the backward pass.
        scope: Example of its place in the model, for reports.
        windows: Windows along spatial dimensions; see ``Op.windows``.
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

    def kernel_memory_slots(
        self, compiler: CompilerProfile
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the slots that a compiler's kernels read and write in memory."""
        if compiler.fuses_normalizations:
            return self.reads_in_kernel, self.writes_in_kernel
        return self.reads, self.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One kind of reader of a value.

    Attributes:
        view: Value in the form that the reader uses.
        task_graph: TaskGraph of the reader.
        present: All roles of the reading operation.
        readers: Number of such operations.
    """

    view: Slot
    task_graph: int
    present: frozenset[int]
    readers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Equal values between their producer and all their readers.

    Attributes:
        source: Value in its producer's form; a leaf has its first reader's.
        task_graph: TaskGraph of the value's producer.
        present: All roles of the operation that produces it; empty for a leaf.
        reduced: Roles that this operation sums over.
        parameter: Whether the operation reads parameters alone.
        uses: Readers of the value, in program order.
        fused: Sharding of a fused value before it is read, if different; or None.
        count: Number of such values in one forward pass.
        remat: Whether the producer runs again in the backward pass.
        read_remat: Whether a reader runs again, so that the reshard is repeated.
        multiplied: Whether it is float32 and only products read it.
        scope: Example of a place where it is read or produced.
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
        """Whether it needs no reshard or reduction under any layout."""
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
        flows: Values between operations that some layout reshards or reduces.
        reading: Forms in which the parameters are read.
    """

    ops: tuple[Row, ...]
    flows: tuple[Flow, ...]
    reading: ParameterForms

    @property
    def weight(self) -> tuple[bool, ...]:
        """Whether each tensor depends on parameters alone."""
        return self.reading.weight
