"""Reads ``topo``, the form in which PaddlePaddle's launcher describes a cluster.

    {"topo": {"GPU-Tesla V100-SXM2-32GB": [{
      "hostname": "a", "memory": 300, "bandwidth": 16, "latency": 0,
      "devices": [...], "links": [...]}, ...]}}

Machines are listed by kind of device, and each numbers its devices from zero. Between
all machines, PaddlePaddle assumes the same bandwidth. The description of a single
machine without ``topo`` is accepted too. For all else, see ``paddle_json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from whalejax.meshes.read_file import FileTable


NIC_BANDWIDTH: Final = 24.0
"""GB/s that PaddlePaddle assumes for an unknown type of link or bandwidth."""

_BETWEEN_BYTES_PER_SECOND: Final = 12e9
"""Bandwidth that PaddlePaddle assumes between machines of a ``topo``."""

_WITHIN: Final = 1e18
"""Bytes per second from a device to its network card, so large that the card limits."""


def topo_machines(top: FileTable) -> list[FileTable] | None:
    """Returns the machines of a ``topo``, with globally unique device numbers.

    Args:
        top: Table of the complete description.

    Returns:
        Machines, or None if the description has another form.
    """
    if "topo" in top:
        meshes = top.table("topo")
        given = [
            (f"topo.{mesh}.{key}", machine)
            for mesh, several in meshes.data.items()
            for key, machine in _several(meshes, mesh, several)
        ]
    elif "devices" in top and "machines" not in top:
        top.asked += list(top.data)
        given = [("", top.data)]
    else:
        return None
    machines, first = [], 0
    for path, machine in given:
        numbered = _numbered(machine, first)
        first += max(1, len(_tables(machine, "devices")))
        machines.append(FileTable(numbered, path, top.problems))
    return machines


def _several(meshes: FileTable, mesh: str, several: Any) -> Iterator[tuple[str, Any]]:
    """Yields the machines of one kind, from a list or from a table by number."""
    if isinstance(several, Mapping):
        yield from several.items()
    elif isinstance(several, list):
        yield from ((str(i), machine) for i, machine in enumerate(several))
    else:
        meshes.problem(mesh, several, "a list of machines")


def _tables(machine: Any, key: str) -> list[Any]:
    given = machine.get(key) if isinstance(machine, Mapping) else None
    return given if isinstance(given, list) else []


def _numbered(machine: Any, first: int) -> Any:
    """Returns a machine whose devices are numbered from ``first``."""
    if not isinstance(machine, Mapping):
        return machine
    devices, links = _tables(machine, "devices"), _tables(machine, "links")
    numbers: dict[Any, int] = {}
    for device in devices:
        number = device.get("global_id") if isinstance(device, Mapping) else None
        if isinstance(number, int):
            numbers.setdefault(number, first + len(numbers))
    changed = dict(machine)
    for key, several, names in (
        ("devices", devices, ("global_id",)),
        ("links", links, ("source_global_id", "target_global_id")),
    ):
        if several:
            changed[key] = [_renamed(one, names, numbers) for one in several]
    return changed


def _renamed(table: Any, names: tuple[str, ...], numbers: Mapping[Any, int]) -> Any:
    if not isinstance(table, Mapping):
        return table
    renamed = {
        name: numbers.get(table[name], table[name])
        for name in names
        if isinstance(table.get(name), int)
    }
    return {**table, **renamed}


def join_topo(
    machines: Mapping[int, list[int]], links: dict[tuple[int, int], tuple[float, str]]
) -> list[tuple[int, int]]:
    """Gives each machine a network card, and joins the cards.

    Args:
        machines: Numbers of the devices of each machine.
        links: Links, to which those of the cards are added.

    Returns:
        Pairs of a card's number and its machine.
    """
    free = max((n for devices in machines.values() for n in devices), default=0) + 1
    cards = {machine: free + place for place, machine in enumerate(machines)}
    if len(cards) < 2:
        return []
    for machine, devices in machines.items():
        for device in devices:
            links[device, cards[machine]] = _WITHIN, "PIX"
    for a in cards.values():
        for b in cards.values():
            if a != b:
                links[a, b] = _BETWEEN_BYTES_PER_SECOND, "NET"
    return [(number, machine) for machine, number in cards.items()]
