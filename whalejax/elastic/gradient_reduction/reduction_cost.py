"""Costs of reducing gradients by messages and by the platform's collectives.

With messages each process is a full replica, and the failure of one delays the others
only briefly. With collectives all processes are one program, which restarts if one
fails. Costs of links come from the planner, costs of failures from ``wh.goodput``, and
the bytes of messages from ``message_all_reduce``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

from whalejax.elastic.gradient_reduction.message_all_reduce import rounds_of, sent_bytes
from whalejax.journals.reduction_choice import (
    COLLECTIVES,
    MESSAGES,
    GradientReduction,
)
from whalejax.membership.assignment import assign_micro_batches, shares
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.cluster_data import Level, Node
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.plan.goodput import goodput_of
from whalejax.planner.plan.plan import Plan


RESTART_SECONDS: Final = 32.0
"""Seconds from the loss of a process until all have restarted and run a step: the mean
of five runs (``recovery.cold_seconds`` of ``scripts/elastic.json``)."""

RECOVERY_SECONDS: Final = 0.5
"""Seconds without a step when a replica fails or joins: the mean of five runs there."""

WIRE_BYTES_PER_SECOND: Final = 5.5e8
"""Rate at which one core receives and checks messages, which is slower than sending.
Measured with 64 MiB in a message over loopback, on an AMD EPYC (family 25, model 17),
2026-11-27."""

ADDED_BYTES_PER_SECOND: Final = 1e9
"""Rate of sums in host memory, by one core of the same machine."""

MESSAGE_SECONDS: Final = 1e-3
"""Seconds of one round of nearly empty messages, on the same machine."""

AGREED_SECONDS: Final = 2.5e-3
"""Seconds before each step in which processes with collectives agree whether to stop.
Measured with two processes on the same machine."""

HOST_LINK_BYTES_PER_SECOND: Final = 15.75e9
"""Default rate between a device and its host: 16 lanes of PCI Express 3."""

NETWORK_BYTES_PER_SECOND: Final = 3.125e9
"""Default rate of a host's network cards: 25 Gb/s."""


_LEAST_MTBF: Final = 1e-3
"""Shortest mean time between failures in seconds; a shorter one would underflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionProcesses:
    """The processes over which gradients are reduced.

    Attributes:
        count: Largest number of processes.
        hosts: Number of hosts, with equal numbers of processes.
        each: Devices of one process, the same for every process.
        network_bytes_per_second: Rate of one host's network card, which messages use.
        has_fabric: Whether collectives use another network, such as InfiniBand, instead
            of the network card.
    """

    count: int
    hosts: int
    each: Cluster
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND
    has_fabric: bool = False

    @property
    def platform(self) -> str:
        """``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self.each.platform

    def devices(self) -> Cluster:
        """Returns the devices of all processes."""
        name, size = self.each.kinds[0].name, self.each.num_devices
        try:
            if self.platform == "gpu" and self.hosts > 1:
                here = math.ceil(self.count / self.hosts) * size
                return self._with_network_card(
                    parse_cluster(f"{name}:{self.hosts}x{here}")
                )
            return parse_cluster(f"{name}:{self.count * size}")
        except WhaleError:  # The catalogue lacks the kind, or such a network.
            return self._joined_by_hosts()

    def _with_network_card(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with the network card as the link between hosts."""
        if self.has_fabric:
            return cluster
        *inner, outer = cluster.levels
        own = self.network_bytes_per_second / (cluster.num_devices // self.hosts)
        rate = min(outer.bandwidth_bytes_per_second, own)
        outer = dataclasses.replace(outer, bandwidth_bytes_per_second=rate)
        return Cluster.of(dataclasses.replace(cluster, levels=(*inner, outer)))

    def _joined_by_hosts(self) -> Cluster:
        """Returns the devices, connected only through their hosts."""
        kind = self.each.kinds[0]
        here = math.ceil(self.count / self.hosts) * self.each.num_devices
        link = kind.host_link_bytes_per_second or HOST_LINK_BYTES_PER_SECOND
        inner = Level(
            name="host",
            size=here,
            bandwidth_bytes_per_second=link,
            latency_seconds=MESSAGE_SECONDS,
        )
        outer = dataclasses.replace(
            inner,
            name="network",
            size=self.hosts,
            bandwidth_bytes_per_second=min(link, self.network_bytes_per_second / here),
        )
        return Cluster(
            nodes=(Node(kind=kind, count=here),) * self.hosts,
            levels=(inner, outer) if self.hosts > 1 else (inner,),
            compiler=self.each.compiler,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCosts:
    """Step time with each backend, in seconds.

    Attributes:
        messages, collectives: Seconds of an undisturbed step with that backend.
        with_failures: Both step times, in this order, with the mean cost of failures.
    """

    messages: float
    collectives: float
    with_failures: tuple[float, float]


def choose(
    replica: Plan | None, processes: ReductionProcesses, mtbf: float
) -> GradientReduction:
    """Chooses the backend of a run.

    If a replica does not fit in one process, that is collectives. On CPUs, and for one
    process, it is messages. In all other cases it is the cheaper backend.

    Args:
        replica: Plan of one process alone; None if the model does not fit.
        processes: Processes of the run.
        mtbf: Mean seconds between failures of any process.
    """
    one = f"{processes.each.num_devices} {processes.each.kinds[0].display_name()}"
    if replica is None:
        return GradientReduction(
            by=COLLECTIVES,
            why=f"the model does not fit on the devices of one process ({one}), so it "
            "is sharded over all",
        )
    if processes.count == 1:
        return GradientReduction(
            by=MESSAGES, why="there is one process, and nothing to reduce"
        )
    priced = price(replica, processes, mtbf)
    where = f" on {processes.hosts} hosts" if processes.hosts > 1 else ""
    times = (
        f"{count_text(processes.count, 'process')} of {one}{where}, "
        f"{gigabytes(gradient_bytes(replica))} of gradients: a step takes "
        f"{milliseconds(priced.with_failures[0])} by messages and "
        f"{milliseconds(priced.with_failures[1])} by collectives, if one fails every "
        f"{mtbf:,.0f} s"
    )
    if processes.platform == "cpu":
        # Both backends use the hosts' sockets, so the cost does not decide.
        return GradientReduction(
            by=MESSAGES,
            why="the default on CPUs, so that the loss of one process does not stop "
            f"the others; mesh='auto' uses collectives ({times})",
        )
    cheaper = priced.with_failures[0] <= priced.with_failures[1]
    return GradientReduction(by=MESSAGES if cheaper else COLLECTIVES, why=times)


def price(replica: Plan, processes: ReductionProcesses, mtbf: float) -> ReductionCosts:
    """Returns the step time with each backend."""
    count, micro_batches = processes.count, replica.num_micro_batches
    alone = replica.time.step_seconds
    most = max(shares([0.0] * count, micro_batches)) / micro_batches
    messages = alone * most + message_seconds(replica, processes)
    collectives = alone / count + all_reduce_seconds(replica, processes)
    collectives += AGREED_SECONDS
    copy = _copy_seconds(replica, processes)

    def goodput(seconds: float) -> tuple[float, float]:
        goodput = goodput_of(
            seconds,
            nodes=count,
            mtbf=max(mtbf, _LEAST_MTBF) * count,
            restart=RESTART_SECONDS,
            snapshot=copy,
            recovery=RECOVERY_SECONDS,
            micro_batches=micro_batches,
        )
        return goodput.elastic, goodput.restart

    return ReductionCosts(
        messages=messages,
        collectives=collectives,
        with_failures=(
            _seconds_with_failures(messages, goodput(messages)[0]),
            _seconds_with_failures(collectives, goodput(collectives)[1]),
        ),
    )


def _copy_seconds(replica: Plan, processes: ReductionProcesses) -> float:
    """Returns the seconds by which a copy of the shards in memory delays steps.

    These are the copy to the host, and the transfer to the next host if steps use the
    same network card.
    """
    state = replica.memory.params_bytes + replica.memory.optimizer_bytes
    seconds = state / processes.count / _host_link(processes)
    if processes.hosts > 1 and not processes.has_fabric:
        seconds += state / processes.hosts / processes.network_bytes_per_second
    return seconds


def _seconds_with_failures(seconds: float, goodput: float) -> float:
    return seconds / goodput if goodput > 0 else math.inf


def gradient_bytes(replica: Plan) -> int:
    """Returns the bytes of one sum of gradients, in the dtypes of the parameters."""
    return sum(leaf.nbytes for leaf in replica.trained)


def message_seconds(replica: Plan, processes: ReductionProcesses) -> float:
    """Returns the seconds of a reduction by messages.

    The gradients of each micro-batch go to the host and are summed there. The sums are
    exchanged, and the result goes back to the devices.
    """
    count, size = processes.count, gradient_bytes(replica)
    names = [str(n) for n in range(count)]
    given = assign_micro_batches(names, {}, replica.num_micro_batches).values()
    ran = max(sum(end - first for first, end in nodes) for nodes in given)
    parts = max(map(len, given))
    # On CPUs gradients are already in host memory.
    to_host = 0 if processes.platform == "cpu" else ran
    moved = (to_host + 1) * size / _host_link(processes)
    own, others = ran - parts, sum(map(len, given)) - 1
    added = (own + others / count) * size / ADDED_BYTES_PER_SECOND
    sent = sent_bytes(size, count, parts)
    together = count / processes.hosts
    # Processes of one host share its network card, but reach each other without it.
    crosses = sent * together * (count - together) / (count - 1)
    wire = max(
        sent / WIRE_BYTES_PER_SECOND, crosses / processes.network_bytes_per_second
    )
    return moved + added + wire + MESSAGE_SECONDS * rounds_of(size)


def all_reduce_seconds(replica: Plan, processes: ReductionProcesses) -> float:
    """Returns the seconds of the platform's all-reduce over all devices."""
    cluster = processes.devices()
    parts = axis_parts(("data",), {"data": cluster.num_devices}, cluster)
    return collective_seconds("all-reduce", gradient_bytes(replica), parts)


def _host_link(processes: ReductionProcesses) -> float:
    if processes.platform == "cpu":
        return ADDED_BYTES_PER_SECOND
    links = [k.host_link_bytes_per_second for k in processes.each.kinds]
    return min(link or HOST_LINK_BYTES_PER_SECOND for link in links)
