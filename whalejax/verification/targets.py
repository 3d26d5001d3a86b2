"""Targets of compilation: the names of a cluster in the TPU and GPU compilers.

The text for a target is that of a cluster (``v5p:4x4x4``, ``h100:2x8``, ``local``).
This module has the targets with a compiler, and their names in the compilers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.catalogue import entries
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError


TPU_NAMES: Final = {
    "v4": "v4",
    "v5e": "v5e",
    "v5p": "v5p",
    "v6e": "v6e",
    "v7x": "tpu7x",
}
"""Names in libtpu, by kind of the catalogue."""

CHIP_CONFIGS: Final = {"v4": "megacore"}
"""Chip configuration by kind, where libtpu's default is not JAX's."""

GPU_KINDS: Final = ("h100",)
"""Kinds of the catalogue with properties in ``gpus.toml``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a compilation.

    Attributes:
        platform: ``"tpu"``, ``"gpu"``, or ``"local"`` for the devices of this machine.
        words: Target as the user writes it.
        kind: Kind of device in the catalogue; empty for the devices of this machine.
        topology: Compiler's name of the topology.
        slices: Number of TPU slices joined by a network.
        num_devices: Number of devices of all slices or nodes.
        memory_bytes: Memory of one device, from the catalogue; 0 if unknown.
    """

    platform: str
    words: str
    kind: str
    topology: str
    slices: int
    num_devices: int
    memory_bytes: int

    def document(self) -> dict[str, Any]:
        """Returns the target as plain data."""
        return dataclasses.asdict(self)


class VerifyError(WhaleError):
    """A plan that could not be compiled for reasons of the compiler or the machine."""


class NoCompiler(VerifyError):
    """No compiler for these devices is installed; the message has the remedy."""


def target_text() -> str:
    """Returns the text that lists the topologies with a compiler."""
    tpus = ", ".join(
        f"{name}:{'x'.join('4' * _dims(name))}" for name in sorted(TPU_NAMES)
    )
    gpus = ", ".join(f"{name}:8 and {name}:2x8" for name in GPU_KINDS)
    return f"{tpus} (any size that exists), {gpus}, and local"


def target_of(plan: Plan, topology: str | None = None) -> Target:
    """Returns the target of a plan's compilation.

    Args:
        plan: Plan to compile.
        topology: Text of a cluster; default: the plan's own cluster.

    Raises:
        WhaleError: The topology is unknown, or has no compiler.
        PlanError: The target has another number of devices than the plan.
    """
    if topology is None:
        target = _target(plan.cluster, plan.cluster.describe())
    elif topology.strip().lower() == "local":
        target = _local(plan.cluster)
    else:
        try:
            cluster = parse_cluster(topology)
        except WhaleError as error:
            raise WhaleError(
                f"topology {topology}: {error}\nThere are compilers for {target_text()}"
            ) from error
        target = _target(cluster, topology)
    if target.platform != "local" and target.num_devices != plan.cluster.num_devices:
        raise PlanError(
            f"this plan is for {count_text(plan.cluster.num_devices, 'device')} "
            f"({plan.cluster.describe()}), but {target.words} has "
            f"{target.num_devices}. Plan again for it, or give a topology with the "
            "plan's number of devices"
        )
    return target


def _target(cluster: Cluster, words: str) -> Target:
    names = [kind.name for kind in cluster.kinds]
    if cluster.platform == "cpu":
        return _local(cluster)
    if len(names) > 1:
        raise NoCompiler(
            f"{words} has devices of several kinds ({', '.join(names)}); a program is "
            "compiled for one kind. Give a --topology of one of them"
        )
    shape: dict[str, Any] = {
        "words": words,
        "kind": names[0],
        "num_devices": cluster.num_devices,
        "memory_bytes": cluster.memory_bytes,
    }
    if names[0] in TPU_NAMES:
        lengths = "x".join(map(str, _lengths(cluster)))
        return Target(
            platform="tpu",
            topology=f"{TPU_NAMES[names[0]]}:{lengths}",
            slices=len(cluster.nodes),
            **shape,
        )
    if names[0] in GPU_KINDS:
        counts = {node.count for node in cluster.nodes}
        if len(counts) > 1:
            raise NoCompiler(
                f"{words} has nodes of {sorted(counts)} devices; nodes must be equal"
            )
        return Target(
            platform="gpu",
            topology=f"1x{len(cluster.nodes)}x{counts.pop()}",
            slices=1,
            **shape,
        )
    raise NoCompiler(
        f"there is no compiler for {words} (kind {names[0]}). There are "
        f"compilers for {target_text()}"
    )


def _local(cluster: Cluster) -> Target:
    is_cpu = cluster.platform == "cpu"
    return Target(
        platform="local",
        words="local",
        kind="cpu" if is_cpu else "",
        topology="",
        slices=1,
        num_devices=cluster.num_devices,
        memory_bytes=cluster.memory_bytes if is_cpu else 0,
    )


def _dims(name: str) -> int:
    torus = entries()[name].torus
    return 2 if torus is None else torus.dims


def _lengths(cluster: Cluster) -> tuple[int, ...]:
    """Returns lengths of the torus, outermost first; the compiler needs 1s last."""
    lengths = [level.size for level in reversed(cluster.levels) if level.torus]
    return (*lengths, *[1] * (_dims(cluster.kinds[0].name) - len(lengths)))
