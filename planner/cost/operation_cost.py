"""Cost of each operation under a layout: compute, collectives and memory traffic.

One rule covers all operations. In the forward pass, roles that operands have and
results lack are summed. If a mesh axis shards such a role, the result is reduced over
that axis. In the backward pass, the cotangent of an operand is summed over every role
of the operation that the operand lacks. The rule yields Megatron's all-reduces, the
data-parallel gradient reduction, synchronised batch statistics and the
vocabulary-parallel loss.

The module is long because time, collectives and memory traffic of a row all follow from
this rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.topology import IMAGE_TURNS, KERNEL_TURNS, CompilerProfile
from whalejax.planner.cost.blocked_attention import (
    block_products,
    block_seconds,
    is_zigzag,
)
from whalejax.planner.cost.collectives import (
    axis_parts,
    collective_seconds,
    runs_as,
)
from whalejax.planner.cost.halo_exchange import BackwardHalo, exchanges
from whalejax.planner.model.dimensions import Dimensions, Layout
from whalejax.planner.model.graph import ATTENTION, CONVOLUTION, LINEAR
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.sharding.fused_parameters import FusedLayout, lying
from whalejax.planner.sharding.layout import Spec, Table, axis_roles, spec_of
from whalejax.planner.sharding.operation_rows import Flow, Product, Row, Slot, Use
from whalejax.planner.sharding.shard_counts import (
    ShardCounts,
    spec_shard_counts,
    table_shard_counts,
)


_READ_IN_PART = frozenset({"slice", "gather", "dynamic_slice"})
"""Operations that read only those elements of their operand that they return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Cost of one row in one micro-batch, in both passes.

    Attributes:
        compute_seconds: Seconds of matrix products and memory traffic.
        collectives: Collectives of the row.
        launches: Number of kernels, each with the fixed cost of a launch.
    """

    compute_seconds: float
    collectives: tuple[Collective, ...] = ()
    launches: float = 0.0


@dataclass(frozen=True, slots=True)
class CostSetting:
    """Meshes and micro-batches for which rows are evaluated.

    Attributes:
        mesh: Axis sizes; arrays stand for many meshes.
        num_micro_batches: Number of micro-batches in a step, or an array of numbers.
        cluster: Cluster of the meshes.
        dims: Logical dimensions of the model.
        batch_roles: Logical dimensions of the batch.
        like: One of the meshes, if ``mesh`` has arrays and all meshes shard the same
            roles. None if meshes may shard different roles.
        known: Shard counts of tensors on these meshes that were computed before, if
            they are kept.
    """

    mesh: Mapping[str, Any]
    num_micro_batches: Any
    cluster: Cluster
    dims: Dimensions
    batch_roles: frozenset[int] = field(default=frozenset())
    like: Mapping[str, int] | None = None
    known: dict[Hashable, ShardCounts] | None = None

    @property
    def shape(self) -> Mapping[str, int]:
        """Mesh that decides which axis shards which role."""
        return self.mesh if self.like is None else self.like

    def take(self, rows: np.ndarray) -> CostSetting:
        """Returns the setting of some of the meshes."""
        count = self.num_micro_batches
        return dataclasses.replace(
            self,
            mesh={axis: size[rows] for axis, size in self.mesh.items()},
            num_micro_batches=count[rows] if isinstance(count, np.ndarray) else count,
            known=None,
        )

    @property
    def has_unlike_meshes(self) -> bool:
        """Whether many meshes differ in the axes that shard roles."""
        arrays = any(isinstance(size, np.ndarray) for size in self.mesh.values())
        return arrays and self.like is None

    def shard_counts(
        self,
        layout: Layout,
        sizes: Layout,
        table: Table,
        fused: FusedLayout | None = None,
    ) -> ShardCounts:
        """Returns the shard counts of a tensor on the mesh, or on each mesh.

        Args:
            layout, sizes: Logical dimensions in each dimension, and their sizes.
            table: Compute table of the TaskGraph.
            fused: Sharding of a fused parameter; None for any other tensor.
        """
        if self.known is not None:
            key = layout, sizes, id(table), fused
            if key not in self.known:
                alone = dataclasses.replace(self, known=None)
                self.known[key] = alone.shard_counts(layout, sizes, table, fused)
            return self.known[key]
        if self.has_unlike_meshes:
            return table_shard_counts(layout, sizes, table, self.mesh, fused)
        return spec_shard_counts(
            lying(layout, sizes, fused, table, self.shape), self.mesh
        )


def _parts(roles: frozenset[int], hits: Mapping[str, int], s: CostSetting) -> Any:
    return math.prod(s.mesh[axis] for axis, role in hits.items() if role in roles)


def local_bytes(slot: Slot, hits: Mapping[str, int], s: CostSetting) -> Any:
    """Returns the bytes of a tensor slot on one device in one micro-batch."""
    roles = slot.roles
    nbytes: Any = slot.nbytes / _parts(roles, hits, s)
    if roles & s.batch_roles:
        nbytes /= s.num_micro_batches
    return nbytes


def hits_of(present: frozenset[int], table: Table, s: CostSetting) -> dict[str, int]:
    """Returns the role that each mesh axis shards in an operation with these roles."""
    hits: dict[str, int] = {}
    taken: dict[int, int] = {}
    for axis, role in axis_roles(present, table, s.shape).items():
        parts = taken.get(role, 1) * s.shape[axis]
        if s.dims.roles[role].divisible % parts == 0:
            hits[axis] = role
            taken[role] = parts
    return hits


def present_roles(row: Row) -> frozenset[int]:
    """Returns all roles of an operation."""
    return frozenset[int]().union(*(slot.roles for slot in row.slots))


def row_hits(row: Row, table: Table, s: CostSetting) -> dict[str, int]:
    """Returns the role of this operation that each mesh axis shards."""
    return hits_of(present_roles(row), table, s)


def row_cost(row: Row, hits: Mapping[str, int], s: CostSetting) -> RowCost:
    """Returns the cost of one row, given the role that each mesh axis shards."""
    kind = slowest_kind(row, s.cluster)
    ahead, behind, launches = row_seconds(row, hits, s, kind)
    if row.remat:
        behind += ahead
    return RowCost(
        compute_seconds=(ahead + behind) * row.count,
        collectives=(
            *gradients_of(row, hits, s),
            *rounds_of(row, hits, s),
            *halos_of(row, hits, s),
        ),
        launches=launches * row.count,
    )


def slowest_kind(row: Row, cluster: Cluster) -> DeviceKind:
    """Returns the device kind that is slowest in an operation."""
    product = row.product
    return cluster.slowest if product is None else cluster.slowest_for(product.dtype)


def row_seconds(
    row: Row, hits: Mapping[str, int], s: CostSetting, kind: DeviceKind
) -> tuple[Any, Any, float]:
    """Returns the time of an operation's passes on one device, and its kernels.

    Args:
        row: Row of the operation.
        hits: Role that each mesh axis shards.
        s: Mesh and micro-batches; results are arrays if these are.
        kind: Kind of device.

    Returns:
        Seconds of the forward pass, seconds of the backward pass without remat, and
        number of kernels of both.
    """
    forward, backward = memory_traffic(row, hits, s)
    if row.product is not None and row.kind == ATTENTION:
        return block_seconds(local_product(row.product, hits, s), row.product, kind)
    if row.product is None:
        slots = transcendental_slots(row)
        count: Any = sum(local_bytes(x, hits, s) / x.itemsize_bytes for x in slots)
        ahead = kind.elementwise_seconds(forward, count)
        launches = kernels_of(row, s.cluster.compiler)
        return ahead, kind.elementwise_seconds(backward), launches
    one = _product_seconds(row.product, hits, s, kind)
    if row.kind == CONVOLUTION and kind.convolution_share is not None:
        one = one / kind.convolution_share
    first, *again = row.product.times(s.cluster.compiler)
    twice = row.product.left_gradient + row.product.right_gradient
    ahead = _larger(one * first, kind.elementwise_seconds(forward))
    one = one * (sum(again) / max(1, twice))
    behind = twice * _larger(one, kind.elementwise_seconds(backward / max(1, twice)))
    turned, turned_back = _turned_bytes(row, hits, s)
    return (
        ahead + kind.turned_seconds(turned),
        behind + kind.turned_seconds(turned_back),
        1.0 + twice,
    )


def _turned_bytes(row: Row, hits: Mapping[str, int], s: CostSetting) -> tuple[Any, Any]:
    """Returns transposed bytes of both passes, for compilers that copy kernels."""
    if not s.cluster.compiler.copies_kernels:
        return 0.0, 0.0
    if row.kind != CONVOLUTION:
        turned = None if row.product is None else row.product.turned
        if turned is None or not any(
            x.weight and x.differentiable for x in row.operands
        ):
            return 0.0, 0.0
        return 0.0, local_bytes(row.slots[turned], hits, s)
    image, kernel = row.operands
    ahead, behind = (turns * local_bytes(kernel, hits, s) for turns in KERNEL_TURNS)
    seen = sum(local_bytes(x, hits, s) for x in (image, *row.results))
    return (
        ahead,
        behind * image.differentiable + IMAGE_TURNS * seen * kernel.differentiable,
    )


def _larger(one: Any, other: Any) -> Any:
    if isinstance(one, float) and isinstance(other, float):
        return max(one, other)
    return np.maximum(one, other)


def _gradient(row: Row) -> bool:
    return any(slot.differentiable for slot in row.results)


def memory_traffic(
    row: Row, hits: Mapping[str, int], s: CostSetting
) -> tuple[Any, Any]:
    """Returns the bytes of memory traffic of a micro-batch, forward and backward."""
    forward, backward = traffic_slots(row, s.cluster.compiler)
    return (
        sum((times * local_bytes(slot, hits, s) for slot, times in forward), 0.0),
        sum((times * local_bytes(slot, hits, s) for slot, times in backward), 0.0),
    )


SlotCounts = Sequence[tuple[Slot, float]]
"""Tensor slots of an operation, each with its number of transfers."""


def traffic_slots(row: Row, compiler: CompilerProfile) -> tuple[SlotCounts, SlotCounts]:
    """Returns the slots that pass through memory, with their numbers of transfers.

    Args:
        row: Row of the operation.
        compiler: Model of the compiler that fuses operations.

    Returns:
        Slots of the forward pass, and slots of the backward pass.
    """
    slots = row.slots
    if row.kind in _READ_IN_PART:
        # As much is read as written. The backward pass adds to the operand's gradient.
        result = row.results[0]
        return [(result, 2)], [(result, 2)] if result.differentiable else []
    reads, writes = row.kernel_memory_slots(compiler)
    read = [(slots[i], 1) for i in reads]
    written = [(slots[i], 1) for i in writes]
    if not _gradient(row):
        return [*read, *written], []
    # The backward pass reads the results' cotangents and writes the operands' ones. It
    # also reads the operands, unless the operation is linear.
    back = [*written, *((slot, 1) for slot, _ in read if slot.differentiable)]
    return [*read, *written], back if row.kind in LINEAR else [*back, *read]


def transcendental_slots(row: Row) -> tuple[Slot, ...]:
    """Returns the results of which each element costs an exp, tanh or the like."""
    return row.results[:1] if row.transcendental else ()


def kernels_of(row: Row, compiler: CompilerProfile) -> float:
    """Returns the number of kernels of both passes of a row without a product."""
    return bool(row.kernel_memory_slots(compiler)[1]) * (2.0 if _gradient(row) else 1.0)


def local_product(
    p: Product, hits: Mapping[str, int], s: CostSetting
) -> tuple[Any, Any, Any, Any]:
    """Returns the rows, depth, columns and count of a product on one device."""

    def local(size: int, roles: frozenset[int]) -> Any:
        scale = s.num_micro_batches if roles & s.batch_roles else 1
        return _larger(1.0, size / _parts(roles, hits, s) / scale)

    return (
        local(p.m, p.m_roles),
        local(p.k, p.k_roles),
        local(p.n, p.n_roles),
        local(p.batch, p.batch_roles),
    )


def row_flops(row: Row, hits: Mapping[str, int], s: CostSetting) -> Any:
    """Returns a row's FLOPs of products in both passes, per device and micro-batch."""
    if row.product is None:
        return 0
    local = local_product(row.product, hits, s)
    first, *again = row.product.times(s.cluster.compiler)
    if row.kind == ATTENTION:
        first, *again = block_products(local, row.product)
    times = first * (1 + row.remat) + sum(again)
    return 2 * math.prod(local) * times * row.count


def row_ahead(
    row: Row, hits: Mapping[str, int], s: CostSetting
) -> tuple[Any, Any, Any]:
    """Returns the cost of a row's forward pass on one device in one micro-batch.

    Returns:
        Seconds, number of kernels, and FLOPs of products.
    """
    seconds, _, launches = row_seconds(row, hits, s, slowest_kind(row, s.cluster))
    if row.product is None:
        return seconds * row.count, (launches > 0) * row.count, 0
    local = local_product(row.product, hits, s)
    times: Any = row.product.times(s.cluster.compiler)[0]
    if row.kind == ATTENTION:
        times, _ = block_products(local, row.product)
    flops = 2 * math.prod(local) * times * row.count
    return seconds * row.count, row.count, flops


def _product_seconds(
    p: Product, hits: Mapping[str, int], s: CostSetting, kind: DeviceKind
) -> Any:
    m, k, n, batch = local_product(p, hits, s)
    return kind.matmul_seconds(p.dtype, m, k, n, count=batch) * p.share


def whole_bytes(nbytes: Any) -> Any:
    """Returns bytes without their fraction: an integer, or an array of integers."""
    return int(nbytes) if isinstance(nbytes, float | int) else np.floor(nbytes)


def _axes_on(roles: frozenset[int], hits: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis, role in hits.items() if role in roles)


def _sums(
    roles: frozenset[int], hits: Mapping[str, int], s: CostSetting
) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each reduction that sums over some roles, in order.

    Compilers that do not merge partial sums reduce one dimension after the other.
    """
    axes = _axes_on(roles, hits)
    if s.cluster.compiler.merge_partials or not axes:
        return (axes,) if axes else ()
    by_role: dict[int, tuple[str, ...]] = {}
    for axis in axes:
        by_role[hits[axis]] = (*by_role.get(hits[axis], ()), axis)
    return tuple(by_role.values())


def gradients_of(
    row: Row, hits: Mapping[str, int], s: CostSetting
) -> tuple[Collective, ...]:
    """Returns the gradient reductions of the weights that a row reads.

    Iterations of a loop that read the same weights sum their gradients on each device.
    Compilers that merge partial sums reduce them once after the loop.
    """
    if not _gradient(row):
        return ()
    once = row.rereads if s.cluster.compiler.merge_partials else 1
    present = present_roles(row)
    return tuple(
        Collective(
            kind="all-reduce",
            axes=axes,
            phase="backward",
            what="gradient",
            payload_bytes=whole_bytes(local_bytes(operand, hits, s)),
            count=row.count // once,
            scope=row.scope,
        )
        for operand in row.operands
        if operand.weight and operand.differentiable
        for axes in _gradient_sums(row, present - operand.roles, hits, s)
    )


def _gradient_sums(
    row: Row, roles: frozenset[int], hits: Mapping[str, int], s: CostSetting
) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each reduction of a weight's gradient.

    If devices shard space, a convolution kernel's gradient is reduced over all
    dimensions together.
    """
    if row.kind != CONVOLUTION or not _spatial_axes(row, hits):
        return _sums(roles, hits, s)
    axes = _axes_on(roles, hits)
    return (axes,) if axes else ()


def rounds_of(row: Row, hits: Mapping[str, int], s: CostSetting) -> list[Collective]:
    """Returns the transfers of ring attention with a sharded sequence.

    Keys and values go round the ring once in each pass. In the backward pass, their
    cotangents accompany them, and go one step further to their owner. In zig-zag order,
    all rows are first distributed, and results are sent back. Arrays in the mesh give
    arrays of payloads and counts.
    """
    if row.kind != ATTENTION or row.product is None:
        return []
    axes = _axes_on(row.product.m_roles, hits)
    size: Any = math.prod(s.mesh[axis] for axis in axes)
    if math.prod(s.shape[axis] for axis in axes) == 1:
        return []
    query, key, value = (local_bytes(slot, hits, s) for slot in row.operands[:3])
    output = local_bytes(row.results[0], hits, s)
    sums = (key + value) * max(1, 4 // row.operands[1].itemsize_bytes)
    again = 1 + row.remat
    sent = [("ring", "forward", key + value, (size - 1) * again)]
    if _gradient(row):
        sent.append(("ring", "backward", key + value, size - 1))
        sent.append(("ring", "backward", sums, size))
    dealt = is_zigzag(row.product.m, size, row.product.mask)
    if np.any(dealt):
        once = query + key + value + output
        sent.append(("border", "forward", once, dealt * again))
        if _gradient(row):
            # One number per row accompanies the output's cotangent.
            rows = query / row.operands[0].itemsize_bytes / row.product.k
            wide = max(4, row.operands[0].itemsize_bytes)
            sent.append(("border", "backward", once + rows * wide, dealt * 1))
    return [
        Collective(
            kind="collective-permute",
            axes=axes,
            phase=phase,
            what=what,
            payload_bytes=whole_bytes(payload),
            count=count * row.count,
            scope=row.scope,
        )
        for what, phase, payload, count in sent
    ]


def halos_of(row: Row, hits: Mapping[str, int], s: CostSetting) -> list[Collective]:
    """Returns the halo exchanges of devices that shard space."""
    axes = _spatial_axes(row, hits)
    if not axes or row.repeats is None:
        return []
    image, result = row.operands[0], row.results[0]
    extents = [tuple(map(math.prod, slot.sizes)) for slot in (image, result)]
    nbytes, compiler = local_bytes(image, hits, s), s.cluster.compiler
    multiplied = row.kind == CONVOLUTION and image.itemsize_bytes == 4
    backward = BackwardHalo(
        image=image.differentiable,
        merges=compiler.merges_regions,
        narrow=compiler.narrow_products and multiplied,
    )
    return [
        Collective(
            kind="collective-permute",
            axes=(exchange.axis,),
            phase=exchange.phase,
            what="halo",
            payload_bytes=whole_bytes(exchange.payload_bytes),
            count=exchange.count * row.count,
            scope=row.scope,
        )
        for exchange in exchanges(
            row.windows, axes, s.shape, extents, nbytes, row.repeats, backward
        )
    ]


def _spatial_axes(row: Row, hits: Mapping[str, int]) -> dict[int, str]:
    return {
        n: axis
        for axis, role in hits.items()
        for n, window in enumerate(row.windows)
        if role in row.operands[0].layout[window.dim]
    }


@dataclass(frozen=True, slots=True)
class FlowStep:
    """Collective of a value, without its bytes and repetitions.

    Attributes:
        kind, axes, phase, what: Fields of ``Collective``.
        divided: Groups of mesh axes. The bytes are divided by the sizes of one group
            after the other.
        narrow: Whether the compiler transfers half of the bytes.
        reads: Whether remat of a reader repeats the collective, instead of remat of the
            producer.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    phase: str
    what: str
    divided: tuple[tuple[str, ...], ...]
    narrow: bool = False
    reads: bool = False


def flow_cost(
    flow: Flow, tables: Mapping[int, Table], s: CostSetting
) -> tuple[Collective, ...]:
    """Returns the collectives of a value between producer and readers, in both passes.

    Args:
        flow: Value between its producer and its readers.
        tables: Compute table of each TaskGraph.
        s: Mesh, micro-batches and compiler.
    """
    steps, has_batch = flow_steps(flow, tables, s), flow.source.roles & s.batch_roles
    return flow_collectives(flow, steps, s.mesh, s.num_micro_batches, bool(has_batch))


def flow_collectives(
    flow: Flow,
    steps: Sequence[FlowStep],
    mesh: Mapping[str, Any],
    num_micro_batches: Any,
    has_batch: bool,
) -> tuple[Collective, ...]:
    """Returns the collectives of a value, with their payload bytes.

    Args:
        flow: Value between its producer and its readers.
        steps: Result of ``flow_steps``.
        mesh: Sizes of the mesh axes, or arrays of them.
        num_micro_batches: Number of micro-batches in a step, or an array of numbers.
        has_batch: Whether micro-batches divide the value.
    """
    nbytes: Any = float(flow.source.nbytes)
    if has_batch:
        nbytes /= num_micro_batches
    result = []
    for step in steps:
        local = nbytes
        for axes in step.divided:
            local = local / math.prod(mesh[axis] for axis in axes)
        runs_again = flow.read_remat if step.reads else flow.remat
        again = 2 if runs_again and step.phase == "forward" else 1
        result.append(
            Collective(
                kind=step.kind,
                axes=step.axes,
                phase=step.phase,
                what=step.what,
                payload_bytes=whole_bytes(local / 2 if step.narrow else local),
                count=flow.count * again,
                scope=flow.scope,
            )
        )
    return tuple(result)


def flow_steps(
    flow: Flow, tables: Mapping[int, Table], s: CostSetting
) -> tuple[FlowStep, ...]:
    """Returns the collectives of a value and of its cotangent, without their bytes.

    In the forward pass, partial sums are reduced at the producer, or reduce-scattered
    if every reader needs the value sharded over the same axis. Then the value is
    resharded once to each layout that a reader needs. The backward pass is the reverse:
    the readers' cotangents are reduced, each or as a sum, and resharded back.

    Args:
        flow: Value between its producer and its readers.
        tables: Compute table of each TaskGraph.
        s: Mesh, or one of many meshes that shard the same roles, and compiler.
    """
    slot, table = flow.source, tables[flow.task_graph]
    source = lying(slot.layout, slot.sizes, flow.fused, table, s.shape)
    targets = {use: _spec(use.view, use.task_graph, tables, s) for use in flow.uses}
    layouts = list(dict.fromkeys(targets.values()))
    path = _Path(flow, s)
    hits = hits_of(flow.present, tables[flow.task_graph], s)
    wanted = _common(layouts)
    here = source
    for axes in _sums(flow.reduced, hits, s):
        here = path.reduce(here, axes, wanted, "forward")
    for layout in layouts:
        path.bring(here, layout, "forward")
    if flow.source.differentiable:
        path.back(source, targets, tables)
    return tuple(path.found)


def flow_key(flow: Flow, s: CostSetting) -> Hashable:
    """Returns a key that values with equal ``flow_steps`` share.

    Args:
        flow: Value between its producer and its readers.
        s: Setting with the compiler and the logical dimensions.
    """
    uses = tuple(
        (use.view.layout, use.view.sizes, use.task_graph, use.present, use.readers)
        for use in flow.uses
    )
    slot = flow.source
    roles = sorted(flow.present.union(*(use.present for use in flow.uses)))
    return (
        (slot.layout, slot.sizes, slot.differentiable, slot.weight, flow.task_graph),
        (flow.present, flow.reduced, flow.parameter, flow.multiplied, flow.fused, uses),
        tuple([(role, s.dims.roles[role].divisible) for role in roles]),
        s.cluster.compiler,
    )


def _spec(
    slot: Slot, task_graph: int, tables: Mapping[int, Table], s: CostSetting
) -> Spec:
    return spec_of(slot.layout, slot.sizes, tables[task_graph], s.shape)


def _common(layouts: Sequence[Spec]) -> Mapping[str, int]:
    """Returns the dimension of each axis that shards the same one in all layouts."""
    common: dict[str, int] | None = None
    for layout in layouts:
        here = {axis: dim for dim, axes in enumerate(layout) for axis in axes}
        common = (
            here
            if common is None
            else {a: d for a, d in common.items() if here.get(a) == d}
        )
    return common or {}


class _Path:
    def __init__(self, flow: Flow, s: CostSetting) -> None:
        self.flow = flow
        self.s = s
        self.found: list[FlowStep] = []

    def reduce(
        self, spec: Spec, axes: Sequence[str], wanted: Mapping[str, int], phase: str
    ) -> Spec:
        """Reduces over axes, or scatters over ``wanted``; returns the layout."""
        scattered = (
            tuple(a for a in axes if a in wanted)
            if self.s.cluster.compiler.reduce_scatter
            else ()
        )
        left = tuple(a for a in axes if a not in scattered)
        held = tuple(axis for axes in spec for axis in axes)
        what = "parameter" if self.flow.parameter else "activation"
        self._add(FlowStep("reduce-scatter", scattered, phase, what, (held,)))
        self._add(FlowStep("all-reduce", left, phase, what, (held, scattered)))
        dims = list(spec)
        for axis in scattered:
            dims[wanted[axis]] = (*dims[wanted[axis]], axis)
        return tuple(dims)

    def bring(self, before: Spec, after: Spec, phase: str) -> None:
        """Adds the collectives that change a layout; slices need none."""
        if before == after:
            return
        old = {axis: d for d, axes in enumerate(before) for axis in axes}
        new = {axis: d for d, axes in enumerate(after) for axis in axes}
        mesh = self.s.mesh
        gathered = tuple(a for a in mesh if a in old and a not in new)
        exchanged = tuple(a for a in mesh if a in old and new.get(a, old[a]) != old[a])
        kept = tuple(a for a in old if a not in gathered)
        narrow = self.flow.multiplied and self.s.cluster.compiler.narrow_products
        both: tuple[tuple[CollectiveKind, tuple[str, ...]], ...]
        both = ("all-to-all", exchanged), ("all-gather", gathered)
        for kind, axes in both:
            self._add(
                FlowStep(
                    kind, axes, phase, "border", (kept,), narrow=narrow, reads=True
                )
            )

    def back(
        self, source: Spec, targets: Mapping[Use, Spec], tables: Mapping[int, Table]
    ) -> None:
        sums: dict[Spec, list[tuple[tuple[str, ...], ...]]] = {}
        for use, layout in targets.items():
            axes: tuple[tuple[str, ...], ...] = ()
            if not self.flow.source.weight:
                hits = hits_of(use.present, tables[use.task_graph], self.s)
                axes = _sums(use.present - use.view.roles, hits, self.s)
            sums.setdefault(layout, []).extend([axes] * use.readers)
        wanted = _common([source])
        for layout, partial in sums.items():
            if self.s.cluster.compiler.merge_partials:
                partial = list(dict.fromkeys(partial))
            kept = {a for axes in layout for a in axes}
            missing = {a: d for a, d in wanted.items() if a not in kept}
            here = layout
            for several in partial:
                here = layout
                for summed in several:
                    here = self.reduce(here, summed, missing, "backward")
            self.bring(here, source, "backward")

    def _add(self, step: FlowStep) -> None:
        if step.axes:
            self.found.append(step)


def as_run(collective: Collective, s: CostSetting) -> tuple[Collective, float]:
    """Returns the collective that the compiler runs for a planned one, and its time.

    Args:
        collective: Planned collective, with its number of repetitions.
        s: Mesh and cluster.

    Returns:
        Collective that runs, and the seconds of all its repetitions in one micro-batch.
    """
    parts = axis_parts(collective.axes, s.mesh, s.cluster)
    kind = runs_as(collective.kind, parts, s.cluster, collective.payload_bytes)
    if kind != collective.kind:
        collective = dataclasses.replace(collective, kind=kind)
    once = collective_seconds(kind, collective.payload_bytes, parts)
    return collective, once * collective.count
