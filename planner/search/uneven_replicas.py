"""Unequal replicas on mixed devices: their shares of a step, times and memory.

With ZeRO-1, each replica stores and updates an equal slice of each parameter's
optimizer state, whatever its share of micro-batches. Then all replicas gather the
parameters. State is replicated if it has no divisible dimension, or if the optimizer
needs it unsharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.balance.shares import (
    Device,
    check_pieces,
    makespan,
    micro_batch_ranges,
)
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective, LeafPlan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import extend_spec, shards
from whalejax.planner.step_options import option_words


DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices of the optimizer's state, one for each replica.

    Attributes:
        leaves: Parameters with the layout of their state.
        state_bytes: Bytes of optimizer state on one device.
        whole_bytes: Bytes on one device if every replica stored the full state.
        gather: Collective that gathers the updated parameters, and its seconds.
    """

    leaves: tuple[LeafPlan, ...]
    state_bytes: int
    whole_bytes: int
    gather: tuple[Collective, float]

    def note(self, replicas: int) -> str:
        """Returns the note on the memory that slices save."""
        return (
            f"ZeRO-1: each of {replicas} replicas stores and updates a slice of the "
            f"optimizer state, {gigabytes(self.state_bytes)} per device instead of "
            f"{gigabytes(self.whole_bytes)}; then they gather the parameters, "
            f"{gigabytes(self.gather[0].payload_bytes)} a step"
        )


def sliceable(request: Request) -> frozenset[str]:
    """Returns the paths of the parameters whose state can be divided into slices.

    Args:
        request: Options of the search.
    """
    return request.sliced() if request.sliced is not None else frozenset()


def check_zero(request: Request) -> None:
    """Refuses ZeRO stages that replicas with unequal shares do not support.

    Args:
        request: Options of the search.

    Raises:
        PlanError: The ZeRO stage shards gradients, or the optimizer or offload leaves
            no state to divide.
    """
    if not request.zero:
        return
    if request.zero > 1:
        raise PlanError(
            f"zero is {request.zero}, but replicas with unequal shares sum full "
            "gradients. Give zero=1, which shards the optimizer state, or plan for "
            "devices of one kind, without shares="
        )
    if request.offload:
        raise PlanError(
            f"zero is 1 and offload is {', '.join(request.offload)}, but slices of the "
            "optimizer state are in device memory. Leave zero or offload out"
        )
    if not sliceable(request):
        raise PlanError(
            "zero is 1, but this optimizer has no state that it updates element by "
            "element (norms over a parameter, as in LAMB, need the full state): "
            "replicas have nothing to divide. Leave zero out, or choose another "
            "optimizer"
        )


def with_slices(request: Request, replicas: int) -> Request:
    """Returns the request for one replica that stores a slice of the state.

    Args:
        request: Request for a replica that stores the full state.
        replicas: Number of replicas that divide the state.
    """
    paths = sliceable(request)
    by_path = {
        path: nbytes // replicas if path in paths else nbytes
        for path, nbytes in request.optimizer.by_path.items()
    }
    state = dataclasses.replace(request.optimizer, by_path=by_path)
    return dataclasses.replace(request, optimizer=state, offload=())


def sliced(plan: PlanData, cluster: Cluster, replicas: int, request: Request) -> Slices:
    """Returns the slices of the optimizer state of a plan's parameters.

    Args:
        plan: Plan of one replica.
        cluster: Cluster of all replicas.
        replicas: Number of replicas.
        request: Request with the bytes of the full state.

    Raises:
        PlanError: No parameter has a dimension that the number of replicas divides.
    """
    mesh = {DATA: replicas, **plan.axis_sizes}
    paths = sliceable(request)
    leaves = tuple(_cut(leaf, mesh, paths) for leaf in plan.leaves)
    if leaves == plan.leaves:
        raise PlanError(
            "zero is 1, but no parameter whose optimizer state can be divided has a "
            f"dimension that is divisible by {replicas} replicas. Leave zero out, or "
            "use another number of replicas"
        )
    gathered = sum(
        leaf.nbytes // shards(leaf.param_spec, mesh) for leaf in leaves if leaf.trained
    )
    gather = Collective(
        kind="all-gather",
        axes=(DATA,),
        phase="update",
        what="parameter",
        payload_bytes=gathered,
        count=1,
    )
    parts = axis_parts((DATA,), mesh, cluster)
    return Slices(
        leaves=leaves,
        state_bytes=_state_bytes(leaves, mesh, request),
        whole_bytes=_state_bytes(plan.leaves, mesh, request),
        gather=(gather, collective_seconds(gather.kind, gathered, parts)),
    )


def _cut(leaf: LeafPlan, mesh: Mapping[str, int], paths: Collection[str]) -> LeafPlan:
    if leaf.path not in paths:
        return leaf
    dims = sorted(range(len(leaf.shape)), key=lambda dim: -leaf.shape[dim])
    spec = extend_spec(leaf.param_spec, leaf.shape, DATA, mesh, dims)
    return dataclasses.replace(leaf, optimizer_spec=spec)


def _state_bytes(
    leaves: Collection[LeafPlan], mesh: Mapping[str, int], request: Request
) -> int:
    state = request.optimizer
    held: int = state.other_bytes
    for leaf in leaves:
        held += state.by_path.get(leaf.path, 0) // shards(leaf.optimizer_spec, mesh)
    return held


def slices_of(plan: PlanData, node: int) -> tuple[slice, ...]:
    """Returns the result of ``Plan.batch_slices``."""
    if not is_whole(node, 0):
        raise PlanError(
            f"node is {short_repr(node)}; expected the number of a node, from 0"
        )
    if not plan.shares:
        raise PlanError(
            "every device of this plan takes a part of each micro-batch, so nodes "
            "have no micro-batches of their own. step.batch_rows of the compiled step "
            "has the samples of a process"
        )
    counts = [node.count for node in plan.cluster.nodes]
    if not 0 <= node < len(counts):
        raise PlanError(
            f"node is {node}; the plan is for {count_text(len(counts), 'node')}, "
            "numbered from 0. step.batch_rows() has the samples of processes that are "
            "not nodes"
        )
    size = plan.num_devices // len(plan.shares)
    start, end = sum(counts[:node]), sum(counts[: node + 1])
    mine = micro_batch_ranges(plan.shares)[start // size : -(-end // size)]
    total = plan.num_micro_batches
    return tuple(slice(m, None, total) for numbers in mine for m in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesCase:
    """Replicas to evaluate: their size, number of micro-batches and ZeRO stage.

    Attributes:
        size: Number of devices of a replica.
        count: Total number of micro-batches of all replicas.
        zero: ZeRO stage over replicas: 1 if each stores a slice of the optimizer state.
    """

    size: int
    count: int
    zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Plan of unequal replicas, with the time and memory of each.

    Attributes:
        case: Case that was evaluated.
        plan: Plan of one replica for one of its micro-batches, on the device kind with
            least memory.
        kinds: Kinds of each replica's devices.
        seconds: Seconds of a micro-batch on each replica.
        after: Seconds of the update of one replica.
        exchange: Collective that reduces gradients over replicas, and its seconds.
        slices: Slices of the optimizer state; None if each replica stores all of it.
        shares: Number of micro-batches of each replica.
    """

    case: SharesCase
    plan: PlanData
    kinds: tuple[DeviceKind, ...]
    seconds: tuple[float, ...]
    after: float
    exchange: tuple[Collective, float]
    slices: Slices | None
    shares: tuple[int, ...] = ()

    @property
    def memory(self) -> MemoryTerms:
        """Memory of a device of the replica with the most micro-batches."""
        return self._memory_of(max(self.shares))

    def _memory_of(self, share: int) -> MemoryTerms:
        alone = self.plan.memory
        if self.slices is not None:
            kept = self.slices.state_bytes
            alone = dataclasses.replace(alone, optimizer_bytes=kept)
        return dataclasses.replace(
            alone,
            batch_bytes=alone.batch_bytes * share,
            # The exchange needs a buffer of the size of the gradient sums.
            working_bytes=alone.working_bytes + alone.gradients_bytes,
        )

    @property
    def devices(self) -> list[Device]:
        """Device of each replica: its memory, and the bytes of a micro-batch on it."""
        static = self._memory_of(0).total_bytes
        piece = self._memory_of(1).total_bytes - static
        return [
            Device(
                name=kind.display_name(),
                seconds=seconds,
                memory_bytes=kind.memory_bytes,
                static_bytes=static,
                piece_bytes=piece,
            )
            for kind, seconds in zip(self.kinds, self.seconds, strict=True)
        ]

    @property
    def most(self) -> list[int]:
        """Largest number of micro-batches that fits in each replica's memory."""
        return [device.most(self.case.count) for device in self.devices]

    @property
    def lacks_bytes(self) -> int:
        """Bytes that a device of the tightest replica lacks; negative if all fit."""
        pairs = zip(self.shares, self.devices, strict=True)
        return int(max(one.needs(k) - one.memory_bytes for k, one in pairs))

    @property
    def fits(self) -> bool:
        """Whether each replica has memory for its micro-batches."""
        return self.lacks_bytes <= 0

    @property
    def step_seconds(self) -> float:
        """Predicted step time."""
        return self.pace + self.exchange[1] + self.gather_seconds + self.after

    @property
    def gather_seconds(self) -> float:
        """Seconds in which replicas gather the updated parameters."""
        return 0.0 if self.slices is None else self.slices.gather[1]

    @property
    def pace(self) -> float:
        """Seconds until the last replica has computed its micro-batches."""
        return makespan(self.shares, self.seconds)

    @property
    def layout(self) -> str:
        """Text of the layout."""
        inner = "".join(f" × {axis} {n}" for axis, n in self.plan.axes)
        total = self.plan.num_micro_batches
        words = f"data {len(self.kinds)}{inner}, {self.share_words} of {total} "
        zero = [f"ZeRO-{self.case.zero}"] if self.case.zero else []
        each = (
            f"{words}micro-batches",
            *zero,
            *option_words(self.plan, self.plan.axis_sizes),
        )
        return ", ".join(each)

    @property
    def share_words(self) -> str:
        """Shares by kind, such as ``V100 21–22, P100 10``."""
        by_kind: dict[str, list[int]] = {}
        for kind, share in zip(self.kinds, self.shares, strict=True):
            by_kind.setdefault(kind.display_name(), []).append(share)
        return ", ".join(
            f"{name} {min(few)}" + (f"–{max(few)}" if len(set(few)) > 1 else "")
            for name, few in by_kind.items()
        )


def nothing_fits(found: Sequence[Replicas], asked: Sequence[int] | None) -> PlanError:
    """Returns the error that no replicas fit, with the numbers of the nearest.

    Args:
        found: Evaluated replicas.
        asked: Shares that the user requested, or None.
    """
    nearest = min(found, key=lambda one: one.lacks_bytes)
    if asked is not None and min(nearest.most) > 0:
        try:
            check_pieces(asked, sum(asked), nearest.devices)
        except PlanError as error:
            return error
    share, device = max(
        zip(nearest.shares, nearest.devices, strict=True),
        key=lambda pair: pair[1].needs(pair[0]) - pair[1].memory_bytes,
    )
    lacks, room = nearest.lacks_bytes, int(device.memory_bytes)
    short = f"and lacks {gigabytes(lacks)} ({lacks} bytes) of {gigabytes(room)}"
    if device.static_bytes > room:
        needs = gigabytes(int(device.static_bytes))
        text = (
            f"no shares fit ({nearest.layout}): {device.name} needs {needs} without "
            f"any micro-batch, with the buffers of the gradient reduction, {short}. "
            "Give a replica more devices (mesh=), divide the model into stages "
            f'(mesh={{"stage": 2}}), or plan without {device.name}'
        )
    else:
        count, most = nearest.case.count, sum(nearest.most)
        held, remedy = most, "Take a smaller batch, more micro-batches, more devices, "
        if most >= count:  # other shares fit
            held = sum(map(min, nearest.shares, nearest.most))
            remedy = "Leave shares= out to follow memory, take more devices, "
        text = (
            f"memory holds {held} of {count_text(count, 'micro-batch')} "
            f"({nearest.layout}): with {share} of them, and buffers to exchange "
            f"gradients, {device.name} needs {gigabytes(int(device.needs(share)))} "
            f"{short}. {remedy}or a mesh with more devices in a replica"
        )
    return NothingFits(text, lacks_bytes=lacks, of_bytes=room, nearest=nearest.layout)


def device_kinds(cluster: Cluster) -> list[DeviceKind]:
    """Returns the kind of each device, in node order."""
    return [node.kind for node in cluster.nodes for _ in range(node.count)]


def devices_of_kind(cluster: Cluster, kind: DeviceKind, size: int) -> Cluster:
    """Returns a cluster with a number of devices of one kind.

    Args:
        cluster: Devices of several kinds.
        kind: Kind of the devices to select.
        size: Number of devices to select.
    """
    first = sorted(cluster.nodes, key=lambda node: node.kind.name != kind.name)
    return dataclasses.replace(cluster, nodes=tuple(first)).part(size)


def most_shares(plan: PlanData) -> tuple[int, ...]:
    """Returns the largest number of micro-batches that fits each replica of a plan.

    Plans of parallel pipelines do not record these numbers, so nothing limits them.

    Args:
        plan: Plan whose replicas take unequal shares.
    """
    total, largest = sum(plan.shares), max(plan.shares)
    if plan.pipelines:
        return (total,) * len(plan.shares)
    memory, size = plan.memory, plan.num_devices // len(plan.shares)
    kinds = device_kinds(plan.cluster)
    every = (
        Device(
            seconds=1.0,
            memory_bytes=kind.memory_bytes,
            static_bytes=memory.total_bytes - memory.batch_bytes,
            piece_bytes=memory.batch_bytes / largest,
        )
        for kind in kinds[::size]
    )
    pairs = zip(plan.shares, every, strict=True)
    return tuple(max(share, device.most(total)) for share, device in pairs)
