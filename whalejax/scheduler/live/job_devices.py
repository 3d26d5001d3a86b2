"""Names of the devices that are divided among jobs, on one host or several."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from whalejax.meshes import Cluster
from whalejax.processes.local_gpus import visible_gpus
from whalejax.scheduler.job_table import JobError


@dataclasses.dataclass(frozen=True, slots=True)
class JobDevices:
    """Devices that are divided among jobs.

    Attributes:
        names: Names of the devices; on named hosts, the host and a ``/`` come first.
        is_masked: Whether processes see only their own devices, by
            ``CUDA_VISIBLE_DEVICES``.
        has_hosts: Whether the devices are on named hosts.
    """

    names: list[str]
    is_masked: bool
    has_hosts: bool = False

    def masks(self, names: Sequence[str]) -> list[str]:
        """Returns the device names for the members of a run, as its supervisor gets
        them; empty if all may use all devices.

        Args:
            names: Names of the devices, by slot.

        >>> JobDevices(["a/cpu0", "b/cpu0"], False, True).masks(["b/cpu0"])
        ['b/']
        """
        if not self.has_hosts:
            return [*names] if self.is_masked else []
        return [name if self.is_masked else f"{_host(name)}/" for name in names]

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts; empty for this machine alone."""
        return [*dict.fromkeys(map(_host, self.names))] if self.has_hosts else []

    def of_host(self, host: str) -> list[str]:
        """Returns the names of a host's devices."""
        return [name for name in self.names if _host(name) == host]

    def near(self, own: Sequence[str], free: Sequence[str]) -> list[str]:
        """Returns free devices in the order in which a job gets them: first those on
        its own hosts, then those on hosts with most free devices.

        Args:
            own: Names of the job's devices.
            free: Names of devices that no job has.

        >>> some = JobDevices([], False, True)
        >>> some.near(["b/0"], ["a/0", "a/1", "b/1"])
        ['b/1', 'a/0', 'a/1']
        """
        if not self.has_hosts:
            return [*free]
        hosts, counts = {_host(name) for name in own}, Counter(map(_host, free))
        return sorted(free, key=lambda n: (_host(n) not in hosts, -counts[_host(n)]))


def _host(name: str) -> str:
    return name.partition("/")[0]


def job_devices(cluster: Cluster, hosts: Sequence[str] = ()) -> JobDevices:
    """Returns the devices of a cluster that can be divided among jobs.

    Args:
        cluster: The cluster.
        hosts: Host of each of its nodes; empty for this machine.

    Raises:
        JobError: The cluster has several kinds of devices or a kind that is neither CPU
            nor GPU, its nodes do not match the hosts, or it has too many devices.
    """
    nodes = cluster.nodes
    if len(nodes) > 1 and not hosts:
        raise JobError(
            f"{cluster.describe()} has {len(nodes)} hosts, and without --hosts jobs "
            "run on this one alone. Give --hosts, one for each node, or a cluster of "
            f"one, such as {cluster.kinds[0].name}:{nodes[0].count}"
        )
    if hosts and len(hosts) != len(nodes):
        raise JobError(
            f"--hosts has {len(hosts)} names, and {cluster.describe()} has "
            f"{len(nodes)} nodes. Give one host for each node"
        )
    if len(cluster.kinds) > 1:
        kinds = ", ".join(kind.name for kind in cluster.kinds)
        raise JobError(
            f"{cluster.describe()} has devices of several kinds ({kinds}); jobs serve "
            "divides devices that are alike. Serve one kind"
        )
    count, (kind,) = cluster.num_devices, cluster.kinds
    is_gpu = kind.platform == "gpu"
    if kind.platform not in ("cpu", "gpu"):
        raise JobError(
            f"jobs serve divides CPUs and GPUs; {kind.name} is {kind.platform}"
        )
    if hosts:
        word = "" if is_gpu else "cpu"
        names = [
            f"{host}/{word}{number}"
            for host, node in zip(hosts, nodes, strict=True)
            for number in range(node.count)
        ]
        return JobDevices(names, is_gpu, has_hosts=True)
    if not is_gpu:
        return JobDevices([f"cpu{n}" for n in range(count)], is_masked=False)
    there = visible_gpus()
    if len(there) < count:
        raise JobError(
            f"--cluster has {count} {kind.name}, and this host shows {len(there)} GPUs "
            f"({', '.join(there) or 'none'}). Give {kind.name}:{len(there) or 'N'} on "
            "a host with GPUs, or unset CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
        )
    return JobDevices([*there[:count]], is_masked=True)
