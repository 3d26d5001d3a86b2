"""Describes the running devices as a cluster. Starts JAX.

JAX tells the kind of each device, which devices share a host, and the coordinates of
TPUs. The catalogue adds the links, and calibration replaces numbers by measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from whalejax.meshes import host_facts
from whalejax.meshes.calibration.calibrate import calibrate as calibrate_local
from whalejax.meshes.catalogue import CatalogueEntry, Torus, entry, entry_of_device
from whalejax.meshes.cluster_data import COMPILERS, ClusterData, Level, Node
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.formats.cluster_text import near_cube, node_levels, torus_levels
from whalejax.meshes.units import count_text


def detect(calibrate: bool = True) -> ClusterData:
    """Returns the devices of this process and of all connected processes as a cluster.

    Args:
        calibrate: Whether to measure the local devices, or use the cached measurement.

    Raises:
        WhaleError: There are several CPU processes, or a kind is unknown.
    """
    devices = jax.devices()
    if devices[0].platform == "cpu" and jax.process_count() > 1:
        raise WhaleError(
            f"{jax.process_count()} CPU processes with "
            f"{count_text(len(devices), 'device')}; only "
            f"the devices of one process can be measured. On one machine, give "
            f'cluster="cpu:{len(devices)}", with rough times from the catalogue. Or '
            "describe the cluster in a TOML file, such as whalejax calibrate -o "
            "cluster.toml writes"
        )
    return assemble(devices, calibrate_local() if calibrate else None)


def assemble(devices: Sequence[Any], measured: ClusterData | None) -> ClusterData:
    """Returns a cluster of some devices, in their order.

    Args:
        devices: JAX devices, or objects with ``platform``, ``device_kind`` and
            ``process_index``, and optionally ``slice_index`` and ``coords``.
        measured: Measured node of the local devices, whose kind and link replace those
            of the catalogue; None without one.

    Raises:
        WhaleError: A kind is neither measured nor in the catalogue.
    """
    groups = _groups(devices)
    if measured is not None and len(groups) == 1 and devices[0].platform != "tpu":
        return measured
    entries = _entries([group[0] for group in groups])
    kinds = {kind.name: kind for kind in measured.kinds} if measured else {}
    nodes = tuple(
        Node(kind=kinds.get(e.kind.name, _local_memory(e.kind, devices)), count=len(g))
        for e, g in zip(entries, groups, strict=True)
    )
    torus = entries[0].torus
    if torus is not None:
        levels = _torus(groups, entries[0], torus)
    else:
        levels = node_levels(entries, [node.count for node in nodes])
        levels = _with_measured_inside(levels, measured)
    platform = entries[0].kind.platform
    return ClusterData(nodes=nodes, levels=levels, compiler=COMPILERS[platform])


def _groups(devices: Sequence[Any]) -> list[list[Any]]:
    """Groups GPUs and CPUs by host, and TPUs by slice; ``slice_index`` numbers both.

    Without ``slice_index``, TPUs are one slice, and others are grouped by process.
    """
    groups: dict[int, list[Any]] = {}
    for device in devices:
        index = getattr(device, "slice_index", None)
        if index is None:
            index = 0 if device.platform == "tpu" else device.process_index
        groups.setdefault(index, []).append(device)
    return list(groups.values())


def _entries(devices: Sequence[Any]) -> list[CatalogueEntry]:
    problems = Problems("devices")
    entries = []
    for device in devices:
        if device.platform == "cpu":
            entries.append(entry("cpu"))
            continue
        one = entry_of_device(device.device_kind)
        if one is None:
            problems.add(
                f"{device.device_kind!r} is not in the catalogue. Measure it with "
                f"whalejax calibrate -o cluster.toml, or describe it in a TOML file"
            )
        else:
            entries.append(one)
    problems.raise_if_any()
    return entries


def _local_memory(kind: DeviceKind, devices: Sequence[Any]) -> DeviceKind:
    """Returns a CPU kind with a device's share of the memory of this host."""
    if kind.platform != "cpu":
        return kind
    share = host_facts.host_memory_bytes() // len(devices)
    return dataclasses.replace(kind, memory_bytes=share)


def _with_measured_inside(
    levels: tuple[Level, ...], measured: ClusterData | None
) -> tuple[Level, ...]:
    """Returns levels with the measured link, if its number of devices is the same."""
    if measured is None or measured.levels[0].size != levels[0].size:
        return levels
    return (measured.levels[0], *levels[1:])


def _torus(
    groups: list[list[Any]], found: CatalogueEntry, torus: Torus
) -> tuple[Level, ...]:
    """Returns levels from the chips' coordinates; the first coordinate is innermost.

    If the chips do not fill a box, the lengths are those of the box nearest to a cube.
    """
    chips = len(groups[0]) // found.chip_devices
    coordinates = {tuple(device.coords) for device in groups[0]}
    spans = [max(axis) - min(axis) + 1 for axis in zip(*coordinates, strict=True)]
    lengths = tuple(reversed(spans[: torus.dims]))
    box = 1
    for length in lengths:
        box *= length
    if box != chips:
        lengths = near_cube(chips, torus.dims)
    names = "zyx"[-len(lengths) :]
    return torus_levels(found, torus, lengths, len(groups), names)
