"""Replicas of unlike devices: what each takes of a step, and what its memory holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.units import gigabytes
from whalejax.planner.balance.shares import Device, check_pieces, makespan
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.zero1_slices import Slices
from whalejax.planner.step_options import option_words


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesCase:
    """Case to evaluate: a replica of each kind, and their number.

    Attributes:
        size: Devices of a replica.
        count: Micro-batches of all.
        zero: Level over replicas: 1 where each keeps a slice of the optimizer's state.
    """

    size: int
    count: int
    zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """A plan of unlike replicas, and what its ranks take.

    Attributes:
        case: Case that was evaluated.
        plan: Plan of one replica and one of its micro-batches, as the kind with the
            least memory would run it alone.
        kinds: Kinds of each replica's devices.
        seconds: Seconds of a micro-batch on each replica.
        after: Seconds of a replica's update.
        exchange: Exchange between replicas, with its seconds.
        slices: Slices of the optimizer's state; None where each replica keeps all of
            it.
        shares: Micro-batches of each.
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
        """Returns the memory of a device of the replica with the most micro-batches."""
        return self._memory_of(max(self.shares))

    def _memory_of(self, share: int) -> MemoryTerms:
        """Returns the memory with so many micro-batches, and what replicas exchange."""
        alone = self.plan.memory
        if self.slices is not None:
            kept = self.slices.state_bytes
            alone = dataclasses.replace(alone, optimizer_bytes=kept)
        return dataclasses.replace(
            alone,
            batch_bytes=alone.batch_bytes * share,
            # Beside the sums there is the buffer in which they cross.
            working_bytes=alone.working_bytes + alone.gradients_bytes,
        )

    @property
    def devices(self) -> list[Device]:
        """A device of each replica: its memory, and what a micro-batch adds."""
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
        """Micro-batches that each replica's memory holds, of those that there are."""
        return [device.most(self.case.count) for device in self.devices]

    @property
    def lacks_bytes(self) -> int:
        """Returns the bytes that a device of the tightest replica lacks; negative:
        room.
        """
        pairs = zip(self.shares, self.devices, strict=True)
        return int(max(one.needs(k) - one.memory_bytes for k, one in pairs))

    @property
    def fits(self) -> bool:
        """Every device holds its replica's micro-batches."""
        return self.lacks_bytes <= 0

    @property
    def step_seconds(self) -> float:
        """Predicted step time."""
        return self.pace + self.exchange[1] + self.gather_seconds + self.after

    @property
    def gather_seconds(self) -> float:
        """Returns the seconds in which replicas gather the updated slices."""
        return 0.0 if self.slices is None else self.slices.gather[1]

    @property
    def pace(self) -> float:
        """Seconds after which the last replica is done with its micro-batches."""
        return makespan(self.shares, self.seconds)

    @property
    def layout(self) -> str:
        """Describes the layout in words."""
        inner = "".join(f" × {axis} {n}" for axis, n in self.plan.axes)
        total = self.plan.num_micro_batches
        words = f"data {len(self.kinds)}{inner}, {self.share_words} of {total} "
        zero = [f"ZeRO-{self.case.zero}"] if self.case.zero else []
        each = (f"{words}micro-batches", *zero, *option_words(self.plan))
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
    """Returns the error for a lack of memory in all evaluated replicas, by the nearest
    of them.

    Args:
        found: Evaluated replicas.
        asked: The shares that the user wants, or None.
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
            f"no shares fit ({nearest.layout}): {device.name} needs {needs} before it "
            f"takes a micro-batch, with what replicas exchange, {short}. Give a "
            'replica more devices (mesh=), cut the model into stages (mesh={"stage": '
            f"2}}), or plan without {device.name}"
        )
    else:
        count, most = nearest.case.count, sum(nearest.most)
        held, remedy = most, "Take a smaller batch, more micro-batches, more devices, "
        if most >= count:  # dealt out in another way
            held = sum(map(min, nearest.shares, nearest.most))
            remedy = "Leave shares= out, which follow memory then, take more devices, "
        text = (
            f"memory holds {held} of {count} micro-batches ({nearest.layout}): with "
            f"{share} of them, and what replicas exchange, {device.name} needs "
            f"{gigabytes(int(device.needs(share)))} {short}. {remedy}or a mesh with "
            "more devices in a replica"
        )
    return NothingFits(text, lacks_bytes=lacks, of_bytes=room, nearest=nearest.layout)


def device_kinds(cluster: Cluster) -> list[DeviceKind]:
    """Returns the kind of each device, in node order."""
    return [node.kind for node in cluster.nodes for _ in range(node.count)]


def devices_of_kind(cluster: Cluster, kind: DeviceKind, size: int) -> Cluster:
    """Returns a cluster of so many devices of one kind.

    Args:
        cluster: Devices of several kinds.
        kind: One of them.
        size: Number of devices.
    """
    first = sorted(cluster.nodes, key=lambda node: node.kind.name != kind.name)
    return dataclasses.replace(cluster, nodes=tuple(first)).part(size)


def most_shares(plan: PlanData) -> tuple[int, ...]:
    """Micro-batches that the memory of each replica of a plan holds.

    Of pipelines side by side a plan does not say it, and they are not bounded.

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
