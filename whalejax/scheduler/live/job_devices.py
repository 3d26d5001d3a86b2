"""Names of the devices that are divided among jobs, on one host or several."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from whalejax.meshes import Cluster, Node
from whalejax.meshes.units import count_text
from whalejax.processes.local_gpus import visible_gpus
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_hosts import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class JobDevices:
    """Devices that are divided among jobs.

    Attributes:
        kinds: Kind of each device by the device's name, in the order in which jobs get
            devices. A kind is empty if all devices are alike. On named hosts, a
            device's name begins with the host and a ``/``.
        platforms: Platform of each kind, ``"cpu"`` or ``"gpu"``.
        has_hosts: Whether the devices are on named hosts.
        engine: Engine that allocates whole hosts to jobs; None if jobs share hosts.
    """

    kinds: Mapping[str, str]
    platforms: Mapping[str, str]
    has_hosts: bool = False
    engine: Engine | None = None

    @property
    def names(self) -> list[str]:
        """Names of the devices."""
        return [*self.kinds]

    def masks(self, names: Sequence[str]) -> list[str]:
        """Returns the names of devices in the form that a run's supervisor expects.

        On named hosts it is the host, a ``/``, and a GPU's ``CUDA_VISIBLE_DEVICES``; on
        this machine only the latter. The list is empty for CPUs of this machine.

        Args:
            names: Names of the devices, by slot; all of one kind.

        >>> devices = JobDevices({"a/cpu0": "", "b/cpu0": ""}, {"": "cpu"}, True)
        >>> devices.masks(["b/cpu0"])
        ['b/']
        """
        is_masked = any(self.platform(name) == "gpu" for name in names)
        if not self.has_hosts:
            return [*names] if is_masked else []
        return [name if is_masked else f"{_host(name)}/" for name in names]

    def platform(self, name: str) -> str:
        """Returns the platform of a device; empty for an unknown device."""
        return self.platforms.get(self.kinds.get(name, ""), "")

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the number of the named devices of each kind."""
        none = dict.fromkeys(self.platforms, 0)
        return {**none, **Counter(self.kinds[name] for name in names)}

    def hosts_of(self, names: Iterable[str]) -> list[str]:
        """Returns the hosts of the named devices; empty if all are on this machine."""
        return [*dict.fromkeys(map(_host, names))] if self.has_hosts else []

    def of_host(self, host: str) -> list[str]:
        """Returns the names of a host's devices."""
        return [name for name in self.kinds if _host(name) == host]

    @property
    def units(self) -> dict[str, int]:
        """Number of devices that a job gets together, by kind.

        It is all devices of a host if an engine allocates hosts, else 1.
        """
        units = dict.fromkeys(self.platforms, 1)
        if self.engine is not None:
            hosts = Counter(map(_host, self.kinds))
            units.update(
                (kind, hosts[_host(name)]) for name, kind in self.kinds.items()
            )
        return units

    def near(self, hosts: Collection[str], free: Sequence[str]) -> list[str]:
        """Returns free devices in the order in which a job gets them.

        Devices on the job's own hosts come first, then devices on the hosts with most
        free devices.

        Args:
            hosts: Names of the job's hosts.
            free: Names of devices that no job holds.

        >>> some = JobDevices({}, {}, True)
        >>> some.near(["b"], ["a/0", "a/1", "b/1"])
        ['b/1', 'a/0', 'a/1']
        """
        if not self.has_hosts:
            return [*free]
        counts = Counter(map(_host, free))
        return sorted(free, key=lambda n: (_host(n) not in hosts, -counts[_host(n)]))


def _host(name: str) -> str:
    return name.partition("/")[0]


def job_devices(
    cluster: Cluster, hosts: Sequence[str] = (), engine: Engine | None = None
) -> JobDevices:
    """Returns the devices of a cluster that can be divided among jobs.

    Args:
        cluster: Cluster to divide.
        hosts: Host of each of its nodes; empty for this machine, which has at most one
            node of CPUs and one of GPUs.
        engine: Engine that allocates the hosts; None for named hosts.

    Raises:
        JobError: A kind is neither CPU nor GPU, the nodes do not match the hosts, or
            this machine has fewer GPUs. With an engine, also if nodes of one kind have
            different numbers of devices.
    """
    nodes = cluster.nodes
    if hosts and len(hosts) != len(nodes):
        raise JobError(
            f"--hosts has {count_text(len(hosts), 'name')}, and {cluster.describe()} "
            f"has {count_text(len(nodes), 'node')}. Give one host for each node"
        )
    for kind in cluster.kinds:
        if kind.platform not in ("cpu", "gpu"):
            raise JobError(
                f"jobs serve divides CPUs and GPUs; {kind.name} is {kind.platform}"
            )
    for kind in cluster.kinds if engine is not None else ():
        counts = sorted({node.count for node in nodes if node.kind.name == kind.name})
        if len(counts) > 1:
            raise JobError(
                f"with --{engine} a job holds whole nodes, and nodes of {kind.name} "
                f"have {' and '.join(map(str, counts))} devices. Give nodes of one "
                "size, such as the smallest"
            )
    alike = len(cluster.kinds) == 1
    platforms = {"" if alike else kind.name: kind.platform for kind in cluster.kinds}
    kinds: dict[str, str] = {}
    if not hosts:
        _check_one_machine(cluster)
    for index, node in enumerate(nodes):
        names = _names_here(node) if not hosts else _names_on(node, hosts[index])
        kinds.update(dict.fromkeys(names, "" if alike else node.kind.name))
    return JobDevices(kinds, platforms, bool(hosts), engine)


def _check_one_machine(cluster: Cluster) -> None:
    nodes = cluster.nodes
    if max(Counter(node.kind.platform for node in nodes).values()) > 1:
        first = nodes[0]
        raise JobError(
            f"{cluster.describe()} has {count_text(len(nodes), 'host')}, and without "
            "--hosts jobs run on this one alone. Give --hosts, one for each node, or a "
            f"cluster of one, such as {first.kind.name}:{first.count}"
        )


def _names_on(node: Node, host: str) -> list[str]:
    word = "" if node.kind.platform == "gpu" else "cpu"
    return [f"{host}/{word}{number}" for number in range(node.count)]


def _names_here(node: Node) -> list[str]:
    if node.kind.platform == "cpu":
        return [f"cpu{number}" for number in range(node.count)]
    there, count = visible_gpus(), node.count
    if len(there) < count:
        kind = node.kind.name
        raise JobError(
            f"--cluster has {count} {kind}, and this host shows "
            f"{count_text(len(there), 'GPU')} ({', '.join(there) or 'none'}). Give "
            f"{kind}:{len(there) or 'N'} on a host with GPUs, or unset "
            "CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
        )
    return [*there[:count]]
