"""Reads PaddlePaddle's cluster descriptions: machines, devices and links, in JSON.

    {"machines": [{
      "hostname": "a", "addr": "10.0.0.1", "port": "6170",
      "devices": [{"global_id": 0, "local_id": 0, "type": "GPU", "memory": 32,
                   "model": "Tesla V100-SXM2-32GB", "sp_gflops": 15700}, ...],
      "links": [{"source_global_id": 0, "target_global_id": 1, "type": "NVL",
                 "bandwidth": 42}, ...]}]}

Bandwidths are in GB/s, latencies in ms and memory in GiB; numbers may be text. The
devices of the cluster are the accelerators, or the CPUs if there are none. Files have
no memory bandwidth, so the kind is that of the catalogue for the model's name.

Between devices without a direct link, the path over CPUs and network cards with the
largest bottleneck bandwidth counts. The devices of a machine share its network cards. A
link without a bandwidth has PaddlePaddle's default. For the form ``topo``, see
``paddle_topo``.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from whalejax.meshes.catalogue import CatalogueEntry, entry
from whalejax.meshes.cluster_data import COMPILERS, ClusterData, Level, Node
from whalejax.meshes.device_kinds import MOST_MEMORY_BYTES, DeviceKind
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.formats.cluster_text import node_levels
from whalejax.meshes.formats.device_aliases import read_device
from whalejax.meshes.formats.paddle_topo import NIC_BANDWIDTH, join_topo, topo_machines
from whalejax.meshes.read_file import (
    FileTable,
    UnreadableFileError,
    check_depth,
    parse_json,
    read_text,
)


TYPES: Final = ("GPU", "CPU", "NIC", "SWITCH", "DCU", "XPU", "NPU")
LINKS: Final = ("LOC", "SYS", "PHB", "PIX", "PIB", "NVL", "NVB", "NET", "NODE", "PXB")
_MOST_GIGA: Final = 1e9
"""Largest accepted GB/s and GFLOP/s, far above any link or device."""
_MOST_MEMORY: Final = MOST_MEMORY_BYTES / 2**30
_NUMBERS: Final = frozenset(
    ("global_id", "local_id", "sp_gflops", "dp_gflops", "hp_gflops", "memory", "width")
    + ("source_global_id", "target_global_id", "bandwidth", "latency", "hop")
)
_GIGA: Final = 1e9
_MEMORY_SLACK: Final = 0.08
"""Largest relative difference between powers of ten in datasheets and powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    number: int
    machine: int
    type: str
    entry: CatalogueEntry | None


@dataclass(slots=True, kw_only=True)
class _File:
    problems: Problems
    devices: dict[int, _Device] = field(default_factory=dict)
    links: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)

    def machines(self) -> dict[int, list[int]]:
        machines: dict[int, list[int]] = {}
        for device in self.devices.values():
            machines.setdefault(device.machine, []).append(device.number)
        return machines

    def computing(self) -> list[_Device]:
        """Returns the devices of the cluster, machine by machine."""
        devices = sorted(self.devices.values(), key=lambda d: (d.machine, d.number))
        gpus = [d for d in devices if d.type not in ("CPU", "NIC", "SWITCH")]
        return gpus or [d for d in devices if d.type == "CPU"]


def load(path: str | os.PathLike[str]) -> ClusterData:
    """Reads a cluster from PaddlePaddle's JSON.

    Args:
        path: Path of the file.

    Raises:
        WhaleError: The file does not exist, is no JSON, or is invalid; lists all
            problems.
    """
    name = os.fspath(path)
    try:
        data = parse_json(read_text(path))
    except FileNotFoundError:
        raise WhaleError(
            f"cluster file {name!r} does not exist. Files that end in .json are read "
            "as PaddlePaddle's descriptions of clusters"
        ) from None
    except (OSError, UnreadableFileError) as error:
        raise WhaleError(
            f"cluster file {name!r} cannot be read as JSON: {error}"
        ) from error
    if isinstance(data, dict) and "machines" not in data:
        what = "a plan" if "whalejax_plan" in data else "no description of a cluster"
        raise WhaleError(
            f"cluster file {name!r} is {what}: it has no list of machines. Files that "
            "end in .json are read as PaddlePaddle's descriptions of clusters; others "
            "are .toml files, or texts such as h100:2x8"
        )
    return from_data(data, f"cluster file {name!r}")


def from_data(data: Any, title: str) -> ClusterData:
    """Returns the cluster of a PaddlePaddle description.

    Args:
        data: Parsed JSON.
        title: Subject of the message.

    Raises:
        WhaleError: Lists every problem.
    """
    problems = Problems(title)
    try:
        check_depth(data)
    except UnreadableFileError as error:
        raise WhaleError(f"{title}: {error}") from None
    result = _read(data, problems)
    problems.raise_if_any()
    devices = result.computing()
    rates = _rates(result, devices)
    _check_joined(devices, rates, problems)
    problems.raise_if_any()
    nodes, entries = _nodes(devices)
    levels = _levels(result, devices, nodes, entries, rates)
    platform = nodes[0].kind.platform
    try:
        return ClusterData(
            nodes=nodes,
            levels=levels,
            compiler=COMPILERS[platform],
            links=tuple(map(tuple, rates)) if len(devices) > 1 else (),
        )
    except WhaleError as error:
        raise WhaleError(f"{title}: {error}") from None


# Reading.


def _read(data: Any, problems: Problems) -> _File:
    result = _File(problems=problems)
    top = FileTable(_as_numbers(data), "", problems)
    apart = topo_machines(top)
    machines = top.tables("machines") if apart is None else apart
    if not machines and not problems:
        problems.add("machines: missing, expected a list of at least one machine")
    if apart is None or "alpha_latency" in top:
        _check_alpha(top.table("alpha_latency"))
    top.report_unknown_keys()
    pending = [
        table for i, m in enumerate(machines) for table in _machine(m, i, result)
    ]
    for table in pending:
        _read_link(table, result)
    if apart is not None and not problems:
        for number, place in join_topo(result.machines(), result.links):
            result.devices[number] = _Device(
                number=number, machine=place, type="NIC", entry=None
            )
    if not result.computing() and not problems:
        problems.add("machines: no GPU and no CPU among their devices, expected some")
    return result


def _machine(machine: FileTable, place: int, found: _File) -> list[FileTable]:
    """Reads the devices of a machine, and returns the tables of its links."""
    for key in ("hostname", "addr", "device_type", "device_type_full"):
        machine.text(key, "")
    for key in ("sp_gflops", "dp_gflops", "memory", "bandwidth", "latency"):
        machine.number(key, 0.0)
    port = machine.data.get("port", "")
    machine.asked.append("port")
    if not (str(port).isdecimal() and len(str(port)) < 6) and port not in ("", None):
        machine.problem("port", port, "a number of a port")
    for table in machine.tables("devices"):
        _read_device(table, place, found)
    links = machine.tables("links")
    machine.report_unknown_keys()
    return links


def _as_numbers(data: Any, key: str = "") -> Any:
    if isinstance(data, Mapping):
        return {k: _as_numbers(v, str(k)) for k, v in data.items()}
    if isinstance(data, list):
        return [_as_numbers(item, key) for item in data]
    if isinstance(data, str) and key in _NUMBERS:
        for kind in (int, float):
            try:
                return kind(data)
            except ValueError:
                continue
    return data


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _check_alpha(table: FileTable) -> None:
    """Checks ``alpha_latency``, which is not used."""
    for key in ("inter", "intra", "base"):
        inner = table.table(key)
        # ``base`` may have a third, for latency between machines.
        algorithms = ("ring", "tree", "inter") if key == "base" else ("ring", "tree")
        for algorithm in algorithms:
            value = inner.data.get(algorithm)
            inner.asked.append(algorithm)
            known = value is None or (isinstance(value, str) and value in LINKS)
            if not known and not _is_number(value):
                inner.problem(algorithm, value, f"µs, or one of {', '.join(LINKS)}")
        inner.report_unknown_keys()
    table.asked.append("switch")
    switch = table.data.get("switch")
    if switch is not None and not _is_number(switch):
        table.problem("switch", switch, "µs")
    table.report_unknown_keys()


def _read_device(table: FileTable, machine: int, found: _File) -> None:
    number = table.integer("global_id")
    kind = table.text("type")
    if table.data.get("local_id") == kind:
        table.asked.append("local_id")  # PaddlePaddle writes it for network cards
    else:
        table.integer("local_id", 0)
    model = table.text("model", "").strip()
    memory = table.number("memory", None)
    rates = {
        dtype: table.number(key, None)
        for dtype, key in (("f32", "sp"), ("f64", "dp"), ("f16", "hp"))
        for key in (f"{key}_gflops",)
    }
    for key in ("arch", "vendor", "ip"):
        table.text(key, "")
    table.number("width", 0.0)
    table.report_unknown_keys()
    if kind not in TYPES:
        table.problem("type", kind, f"one of {', '.join(TYPES)}")
    values = {"memory": memory}
    values |= {
        f"{k}_gflops": v
        for k, v in zip(("sp", "dp", "hp"), rates.values(), strict=True)
    }
    for key, value in values.items():
        most = _MOST_MEMORY if key == "memory" else _MOST_GIGA
        if value is not None and not 0 < value <= most:
            table.problem(key, value, "a number above zero")
            return
    if number in found.devices:
        table.problem("global_id", number, "a number that no other device has")
        return
    known = None
    if kind not in ("NIC", "SWITCH"):
        known = _entry(table, kind, model, memory, rates)
    found.devices[number] = _Device(
        number=number, machine=machine, type=kind, entry=known
    )


def _entry(
    table: FileTable,
    kind: str,
    model: str,
    memory: float | None,
    rates: Mapping[str, float | None],
) -> CatalogueEntry | None:
    """Returns the catalogue's entry of a model, with the memory of the file."""
    if kind == "CPU":
        given = {t: v * _GIGA for t, v in rates.items() if v}
        base = entry("cpu")
        known = dict(base.kind.flops_per_second)
        changed = dataclasses.replace(
            base.kind,
            flops_per_second=tuple({**known, **given}.items()),
            curve="" if given else base.kind.curve,
            sources=(),
        )
        base = dataclasses.replace(base, kind=changed)
    else:
        try:
            base = read_device(model).entry
        except WhaleError as error:
            table.problems.add(
                f"{table.at('model')}: {error}. PaddlePaddle's files have no memory "
                "bandwidth for other kinds; describe this cluster in a TOML file"
            )
            return None
    if memory is None or not memory > 0:
        return base
    size = round(memory * 2**30)
    have = base.kind.memory_bytes
    if kind != "CPU" and abs(size - have) <= _MEMORY_SLACK * size:
        return base
    sources = tuple(s for s in base.kind.sources if s.field != "memory_bytes")
    other: DeviceKind = dataclasses.replace(
        base.kind, memory_bytes=size, sources=sources
    )
    return dataclasses.replace(base, kind=other)


def _read_link(table: FileTable, found: _File) -> None:
    ends = table.integer("source_global_id"), table.integer("target_global_id")
    kind = table.text("type")
    bandwidth = table.number("bandwidth", NIC_BANDWIDTH)
    latency = table.number("latency", None)
    # The number of switches is checked and not used.
    hop = 0 if table.data.get("hop") is None else table.integer("hop", 0)
    table.asked.append("hop")
    table.report_unknown_keys()
    if hop < 0:
        table.problem("hop", hop, "a whole number of at least zero")
    for key, number in zip(("source", "target"), ends, strict=True):
        if number not in found.devices:
            known = ", ".join(map(str, sorted(found.devices)[:12]))
            table.problem(f"{key}_global_id", number, f"a device's global_id: {known}")
            return
    if kind not in LINKS:
        table.problem("type", kind, f"one of {', '.join(LINKS)}")
    if not 0 < bandwidth <= _MOST_GIGA:
        table.problem("bandwidth", bandwidth, "GB/s above zero")
    if latency is not None:
        if not 0 <= latency <= _MOST_GIGA:
            table.problem("latency", latency, "ms, at least zero")
        found.latencies.append(latency * 1e-3)
    if ends in found.links:
        where = f"at most one link {ends[0]} → {ends[1]}"
        table.problem("source_global_id", ends[0], where)
    found.links[ends] = bandwidth * _GIGA, kind


# Links.


def _rates(found: _File, devices: Sequence[_Device]) -> list[list[float]]:
    """Returns bytes per second as ``[from][to]``; 0 without a path."""
    links = found.links
    direct = {
        (a.number, b.number): links.get((a.number, b.number))
        or links.get((b.number, a.number))
        for a in devices
        for b in devices
        if a is not b
    }
    if any(link is None for link in direct.values()):
        paths = _widest(found, devices)
    else:
        paths = {}
    return [
        [
            0.0
            if a is b
            else link[0]
            if (link := direct[a.number, b.number])
            else paths.get((a.number, b.number), 0.0)
            for b in devices
        ]
        for a in devices
    ]


def _widest(found: _File, devices: Sequence[_Device]) -> dict[tuple[int, int], float]:
    """Returns the largest bottleneck bandwidth of a path between each two devices."""
    numbers = list(found.devices)
    width = {}
    for (source, target), (rate, _) in found.links.items():
        width[source, target] = rate
        width.setdefault((target, source), rate)
    # CPUs and network cards forward data, other devices do not.
    inner = set(numbers) - {device.number for device in devices}
    for middle in sorted(inner):
        for a in numbers:
            first = width.get((a, middle), 0.0)
            if not first:
                continue
            for b in numbers:
                through = min(first, width.get((middle, b), 0.0))
                if a != b and through > width.get((a, b), 0.0):
                    width[a, b] = through
    cards: dict[int, int] = {}
    for device in found.devices.values():
        if device.type == "NIC":
            cards[device.machine] = cards.get(device.machine, 0) + 1
    sharing = {
        machine: len(list(group))
        for machine, group in groupby(devices, key=lambda d: d.machine)
    }
    shares = {m: min(1.0, cards.get(m, n) / n) for m, n in sharing.items()}
    return {
        (a.number, b.number): width[a.number, b.number]
        * (1.0 if a.machine == b.machine else min(shares[a.machine], shares[b.machine]))
        for a in devices
        for b in devices
        if (a.number, b.number) in width
    }


def _check_joined(
    devices: Sequence[_Device], rates: list[list[float]], problems: Problems
) -> None:
    for a, row in zip(devices, rates, strict=True):
        apart = [b.number for b, rate in zip(devices, row, strict=True) if not rate]
        apart = [number for number in apart if number != a.number]
        if apart:
            problems.add(
                f"links: no path joins device {a.number} and "
                f"{', '.join(map(str, apart[:8]))}; expected a link, or a path over "
                "CPUs and network cards (links from NIC to NIC join machines)"
            )


# The cluster.


def _nodes(devices: Sequence[_Device]) -> tuple[tuple[Node, ...], list[CatalogueEntry]]:
    nodes, entries = [], []
    for _, group in groupby(
        devices, key=lambda d: (d.machine, d.entry.kind if d.entry else None)
    ):
        members = list(group)
        known = members[0].entry
        assert known is not None
        nodes.append(Node(kind=known.kind, count=len(members)))
        entries.append(known)
    return tuple(nodes), entries


def _levels(
    found: _File,
    devices: Sequence[_Device],
    nodes: Sequence[Node],
    entries: Sequence[CatalogueEntry],
    rates: list[list[float]],
) -> tuple[Level, ...]:
    """Returns the catalogue's levels with the file's bandwidths and latencies."""
    machines = [
        [i for i, _ in group]
        for _, group in groupby(enumerate(devices), key=lambda p: p[1].machine)
    ]
    inside = [
        _ring_rate([[rates[a][b] for b in machine] for a in machine])
        for machine in machines
        if len(machine) > 1
    ]
    between = _ring_rate(
        [
            [
                min(max(rates[a][b] for b in other) for a in machine)
                if machine != other
                else 0.0
                for other in machines
            ]
            for machine in machines
        ]
    )
    counts = [node.count for node in nodes]
    levels: list[Level] = []
    for level in node_levels(_with_network(entries), counts):
        inner = not levels and bool(inside) and math.gcd(*counts) > 1
        rate = min(inside) if inner else between
        if not rate:
            rate = min(inside, default=level.bandwidth_bytes_per_second)
        latency = level.latency_seconds
        if found.latencies:
            latency = (level.size - 1) * max(found.latencies)
        levels.append(
            dataclasses.replace(
                level, bandwidth_bytes_per_second=rate, latency_seconds=latency
            )
        )
    return tuple(levels)


def _with_network(entries: Sequence[CatalogueEntry]) -> list[CatalogueEntry]:
    return [
        dataclasses.replace(one, network=one.network or one.node) for one in entries
    ]


def _ring_rate(rates: Sequence[Sequence[float]]) -> float:
    """Returns the bandwidth of a ring over all members, in which each uses two links.

    Rates are ``[from][to]`` with zeros on the diagonal.

    >>> _ring_rate([[0, 5, 1, 5], [5, 0, 5, 1], [1, 5, 0, 5], [5, 1, 5, 0]])
    5
    """
    if len(rates) < 2:
        return 0.0
    needed = min(2, len(rates) - 1)
    return min(sorted(row, reverse=True)[needed - 1] for row in rates)
