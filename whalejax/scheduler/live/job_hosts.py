"""Hosts of jobs: named hosts, or hosts that Slurm or Ray allocates."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from typing import Final, Literal

from whalejax.elastic.engines.engine_shells import (
    ray_shell,
    slurm_options,
    slurm_shell,
)
from whalejax.meshes import Cluster, Node


Engine = Literal["slurm", "ray"]
"""Scheduler of a larger cluster, which allocates hosts to jobs."""

_PLACEHOLDERS: Final = ("{kind}", "{devices}")
_SRUN: Final = ("srun:", 'Try "srun')
_ACCEPTED: Final = (" queued ", " allocated ", " allocation ", " task ", " step ")
_MAY_PASS: Final = (
    *("slurm controller", "timed out", "connect", "transmitted"),
    *("temporarily", "policy", "inactive"),
)
"""Words in errors of a Slurm that is unreachable or full, not of wrong options."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """Hosts whose devices are divided among jobs.

    Attributes:
        shells: Remote shells by host, in the order of the cluster's nodes. The host's
            name and a command are appended to each.
        room: Largest number of devices on one host.
        address: Address of this machine at which agents reach supervisors.
        engine: Engine that allocates each host to one job; None for named hosts.
    """

    shells: dict[str, list[str]]
    room: int
    address: str
    engine: Engine | None = None

    @property
    def names(self) -> list[str]:
        """Names of the hosts."""
        return [*self.shells]


def named_hosts(
    cluster: Cluster, names: Sequence[str], shell: Sequence[str], address: str
) -> JobHosts:
    """Returns named hosts, which are reached by a remote shell.

    Args:
        cluster: Cluster with a node for each host.
        names: Names of the hosts.
        shell: Remote shell, to which a host's name and a command are appended.
        address: Address of this machine at which the hosts reach it.
    """
    shells = {name: [*shell] for name in names}
    return JobHosts(shells=shells, room=_room(cluster), address=address)


def slurm_hosts(cluster: Cluster, options: str, address: str = "") -> JobHosts:
    """Returns hosts from Slurm: one allocation for each, while a job holds it.

    Args:
        cluster: Cluster with a node for each host.
        options: Options of ``srun``, in which ``{kind}`` stands for the kind of a
            node's devices, and ``{devices}`` for their number. The number of devices
            of a task is put first.
        address: Address of this machine at which the hosts reach it; default: its name.

    Raises:
        WhaleError: There is no ``srun`` here, a quotation in the options is not closed,
            or they name the allocation, as jobs are found by its name.
    """
    words = slurm_options(options)

    def shell(node: Node) -> list[str]:
        what = "gpus" if node.kind.platform == "gpu" else "cpus"
        filled = [f"--{what}-per-task={node.count}"]
        for word in words:
            for name, value in zip(
                _PLACEHOLDERS, (node.kind.name, str(node.count)), strict=True
            ):
                word = word.replace(name, value)
            filled.append(word)
        return slurm_shell(filled)

    return _engine_hosts(cluster, "slurm", [*map(shell, cluster.nodes)], address)


def slurm_refusal(output: str) -> str:
    """Returns the line in which ``srun`` says why it refuses its options.

    Args:
        output: Whole output of a command of ``srun`` that has failed.

    Returns:
        The line. It is empty if Slurm has accepted the request or may accept it later.

    >>> slurm_refusal("srun: error: Invalid --time specification")
    'srun: error: Invalid --time specification'
    >>> slurm_refusal("srun: job 6 queued and waiting for resources")
    ''
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not all(line.startswith(_SRUN) for line in lines):
        return ""
    if any(word in line for line in lines for word in (*_ACCEPTED, *_MAY_PASS)):
        return ""
    errors = [line for line in lines if line.startswith(_SRUN[0])]
    return errors[-1] if errors else ""


def ray_hosts(cluster: Cluster, ray: str, address: str = "") -> JobHosts:
    """Returns hosts from Ray: one actor for each, while a job holds it.

    Args:
        cluster: Cluster with a node for each host.
        ray: Address of the Ray cluster, or ``"auto"``.
        address: Address of this machine at which the hosts reach it; default: its name.
    """

    def shell(node: Node) -> list[str]:
        is_gpu = node.kind.platform == "gpu"
        cpus, gpus = (1, node.count) if is_gpu else (node.count, 0)
        return ray_shell(ray, cpus=cpus, gpus=gpus)

    return _engine_hosts(cluster, "ray", [*map(shell, cluster.nodes)], address)


def _engine_hosts(
    cluster: Cluster, engine: Engine, shells: Sequence[list[str]], address: str
) -> JobHosts:
    names = [f"{engine}-{number}" for number in range(len(shells))]
    return JobHosts(
        shells=dict(zip(names, shells, strict=True)),
        room=_room(cluster),
        address=address or socket.gethostname(),
        engine=engine,
    )


def _room(cluster: Cluster) -> int:
    return max(node.count for node in cluster.nodes)
