"""The catalogue of device kinds, read from ``device_kinds.toml``.

This module finds a kind by its name in a cluster's text or by JAX's name of a device.
It has the default node and network of each kind. For a kind without measurements, a
note in plans names the generation whose measurements are used, and the possible error.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.checks import short_repr
from whalejax.meshes.device_kinds import DeviceKind, Source
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import constants
from whalejax.meshes.ratings import catalogue_data, rating_of
from whalejax.meshes.ratings import catalogue_text as catalogue_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between devices at one level, per device and in one direction.

    Attributes:
        name: Name such as ``"nvlink"``.
        bandwidth_bytes_per_second: Rate of one device, or of one link of a torus.
        hop_seconds: Latency of one step of a collective.
        base_seconds: Time to start a collective.
        peers: Number of other devices to which each device has a direct link. The
            bandwidth is then the sum over these links. 0 if all devices are joined by a
            switch, through which each reaches any other at full bandwidth.
    """

    name: str
    bandwidth_bytes_per_second: float
    hop_seconds: float
    base_seconds: float
    peers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """Torus of the chips of one kind.

    Attributes:
        link: One link of the torus.
        dims: Number of dimensions.
        wrap_multiple: An axis wraps if its length is a multiple of this number.
        wrap_needs_all: Whether axes wrap only if all of them do.
        max_chips: Largest number of chips in one slice.
        slices: Lengths of the axes of each offered slice, in order. Empty if slices
            consist of full cubes with the edge ``wrap_multiple``, or are part of one.
    """

    link: Link
    dims: int
    wrap_multiple: int
    wrap_needs_all: bool
    max_chips: int
    slices: tuple[tuple[int, ...], ...] = ()

    def wraps(self, lengths: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns whether each axis of a slice of these lengths is a ring."""
        each = tuple(length % self.wrap_multiple == 0 for length in lengths)
        if self.wrap_needs_all:
            return (all(each) and len(lengths) == self.dims,) * len(lengths)
        return each

    def has_slice(self, lengths: tuple[int, ...]) -> bool:
        """Returns whether the vendor offers slices of these lengths.

        >>> torus = entry("v5p").torus
        >>> torus.has_slice((2, 2, 4)), torus.has_slice((3, 5, 7))
        (True, False)
        """
        lengths = tuple(sorted((*lengths, *[1] * (self.dims - len(lengths)))))
        if self.slices:
            return lengths in self.slices
        edge = self.wrap_multiple
        is_part = all(length <= edge and edge % length == 0 for length in lengths)
        return is_part or all(length % edge == 0 for length in lengths)

    def near_slices(self, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the offered slices nearest to these lengths.

        One has at most as many chips, and one has more.

        >>> entry("v5e").torus.near_slices((3, 5))
        [(2, 4), (4, 4)]
        >>> entry("v5p").torus.near_slices((3, 5, 7))
        [(4, 4, 4), (4, 4, 8)]
        """
        chips = math.prod(lengths)
        offered = [s for s in self._offered() if math.prod(s) <= self.max_chips]
        # Of slices with equally many chips, prefer the one closest to a cube.
        sizes = [(math.prod(lengths), sum(lengths), lengths) for lengths in offered]
        below = [(-size, edges, s) for size, edges, s in sizes if size <= chips]
        above = [each for each in sizes if each[0] > chips]
        return [min(each)[-1] for each in (below, above) if each]

    def _offered(self) -> Iterable[tuple[int, ...]]:
        if self.slices:
            return self.slices
        edge = self.wrap_multiple
        parts = [n for n in range(1, edge) if edge % n == 0] + [edge]
        cubes = range(edge, self.max_chips // edge ** (self.dims - 1) + 1, edge)
        return (
            lengths
            for each in (parts, cubes)
            for lengths in itertools.combinations_with_replacement(each, self.dims)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A kind of device in the catalogue, with its default node and network.

    Attributes:
        kind: Kind of device.
        aliases: Other names of the kind in a cluster's text.
        jax_names: Values of ``jax.Device.device_kind`` for the kind.
        node: Link inside a node, None for a torus.
        node_devices: Largest number of devices of a node.
        chip: Link between the devices of a chip; None if a chip is one device.
        chip_devices: Number of devices of a chip.
        torus: Torus of the chips; None for kinds in nodes.
        network: Link between nodes or slices; None if unknown.
        domain: Link between the nodes of a group that is joined by one switch; None
            without such groups.
        domain_devices: Number of devices of a group.
        sources: Sources of the numbers of node and network; those of the device are in
            ``kind.sources``.
    """

    kind: DeviceKind
    aliases: tuple[str, ...]
    jax_names: tuple[str, ...]
    node: Link | None
    node_devices: int
    chip: Link | None
    chip_devices: int
    torus: Torus | None
    network: Link | None
    domain: Link | None
    domain_devices: int
    sources: tuple[Source, ...]


def kind_names() -> tuple[str, ...]:
    """Returns the names of all kinds, without their aliases.

    Example:
        >>> "h100" in kind_names()
        True
    """
    return tuple(entries())


def device_kind(name: str) -> DeviceKind:
    """Returns one kind by its name or alias, ignoring case.

    Raises:
        WhaleError: The name is unknown; lists the nearest names.

    Example:
        >>> device_kind("A100").name
        'a100-80'
    """
    return entry(name).kind


def entry(name: str) -> CatalogueEntry:
    """Returns one entry by its kind's name or alias, ignoring case.

    Raises:
        WhaleError: The name is unknown; lists the nearest names.
    """
    known = _by_name() if isinstance(name, str) else {}
    result = known.get(name.strip().lower()) if known else None
    if result is None:
        text = name if isinstance(name, str) else short_repr(name)
        known_kinds = f"Known: {', '.join(kind_names())}. "
        raise WhaleError(f"{unknown_kind(text)}{known_kinds}{DESCRIBE_IN_TOML}")
    return result


DESCRIBE_IN_TOML = "Any other kind can be described in a TOML file"


def is_kind(name: str) -> bool:
    """Whether the catalogue has a kind of this name or alias."""
    return name.strip().lower() in _by_name()


def unknown_kind(name: str) -> str:
    """Returns the hint on an unknown kind: the nearest names, with a trailing space."""
    known = tuple(_by_name())
    near = difflib.get_close_matches(name.strip().lower(), known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"unknown device kind {short_repr(name.strip())}. {hint}"


def entry_of_device(device_kind_text: str) -> CatalogueEntry | None:
    """Returns the entry of a device by its name in JAX; None if there is none.

    Example:
        >>> entry_of_device("TPU v5 lite").kind.name
        'v5e'
    """
    wanted = device_kind_text.strip().lower()
    for candidate in entries().values():
        if wanted in (name.lower() for name in candidate.jax_names):
            return candidate
    return None


@functools.cache
def entries() -> Mapping[str, CatalogueEntry]:
    """Returns every entry by its kind's name, in the order of the file."""
    data = catalogue_data()
    return {
        name: _entry(name, table, data["sources"])
        for name, table in data["kinds"].items()
    }


@functools.cache
def _by_name() -> Mapping[str, CatalogueEntry]:
    names = {name: one for name, one in entries().items()}
    for one in entries().values():
        names.update({alias: one for alias in one.aliases})
    return names


def _entry(
    name: str, table: dict[str, Any], documents: dict[str, Any]
) -> CatalogueEntry:
    links = {
        key: _link(table[key])
        for key in ("node", "chip", "torus", "network", "domain")
        if key in table
    }
    sources = _sources(table, documents)
    torus = None
    if "torus" in table:
        shape = table["torus"]
        torus = Torus(
            link=links["torus"],
            dims=shape["dims"],
            wrap_multiple=shape["wrap_multiple"],
            wrap_needs_all=shape["wrap_needs_all"],
            max_chips=shape["max_chips"],
            slices=tuple(map(tuple, shape.get("slices", ()))),
        )
    own = tuple(s for s in sources if s.field.partition(".")[0] not in links)
    return CatalogueEntry(
        kind=_kind(name, table, own),
        aliases=tuple(table.get("aliases", ())),
        jax_names=tuple(table["jax_names"]),
        node=links.get("node"),
        node_devices=table.get("node", {}).get("devices", 1),
        chip=links.get("chip"),
        chip_devices=table.get("chip", {}).get("devices", 1),
        torus=torus,
        network=links.get("network"),
        domain=links.get("domain"),
        domain_devices=table.get("domain", {}).get("devices", 1),
        sources=sources,
    )


def _kind(name: str, table: dict[str, Any], sources: tuple[Source, ...]) -> DeviceKind:
    rated = rating_of(name)
    assert rated is not None
    return DeviceKind(
        name=name,
        label=table["label"],
        platform=table["platform"],
        memory_bytes=table["memory_bytes"],
        memory_bytes_per_second=table["memory_bytes_per_second"],
        flops_per_second=tuple(table["flops_per_second"].items()),
        host_memory_bytes=table.get("host_memory_bytes"),
        host_link_bytes_per_second=table.get("host_link_bytes_per_second"),
        op_overhead_seconds=table["op_overhead_seconds"],
        efficiency=table.get("efficiency")
        or constants().efficiency_of(rated, "bf16").share,
        curve="" if "efficiency" in table else table["platform"],
        transcendentals_per_second=table.get("transcendentals_per_second"),
        cores=table.get("cores", 0),
        generation=rated.generation,
        watts=rated.watts,
        sources=sources,
    )


def _link(table: dict[str, Any]) -> Link:
    return Link(
        name=table["name"],
        bandwidth_bytes_per_second=table["bandwidth_bytes_per_second"],
        hop_seconds=table["hop_seconds"],
        base_seconds=table["base_seconds"],
        peers=table.get("peers", 0),
    )


def number_paths(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted path of every number in a kind's table."""
    paths: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            paths += number_paths(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            paths.append(prefix + key)
    return paths


def _sources(table: dict[str, Any], documents: dict[str, Any]) -> tuple[Source, ...]:
    """Returns the source of each number, which the longest matching path names."""
    given: dict[str, str] = table["sources"]
    numbers = number_paths({k: v for k, v in table.items() if k != "sources"})
    sources = []
    for path in numbers:
        parts = path.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
        document = documents[next(given[p] for p in above if p in given)]
        sources.append(Source(field=path, **document))
    return tuple(sources)


SAME = 0.2
"""Possible relative error of an efficiency that a kind takes from its generation.

It is twice the median error of ``scripts/bench_kinds.py``, which predicts each measured
kind from the others.
"""

OTHER = 0.4
"""Possible relative error if the efficiency is that of another generation."""


def efficiency_notes(kinds: Sequence[DeviceKind], dtype: str) -> tuple[str, ...]:
    """Returns a note for each kind on which products in a type were not measured.

    Args:
        kinds: Kinds of devices.
        dtype: Type in which the model computes.

    >>> from whalejax.meshes import device_kind
    >>> efficiency_notes([device_kind("a100-80")], "bf16")
    ()
    >>> print(*efficiency_notes([device_kind("a30")], "bf16"))  # doctest: +ELLIPSIS
    A30 was not measured in bf16: the plan assumes 109 of 165 TFLOP/s (87.1 to 131), ...
    """
    notes = []
    for kind in dict.fromkeys(kinds):
        runs_in = kind.multiplies_in(dtype)
        if kind.curve != "gpu" or kind.was_measured(runs_in):
            continue
        known = kind.efficiency_in(runs_in)
        if known.measured:
            continue
        peak = kind.peak_flops(runs_in) / 1e12
        named = [rating_of(name) for name in known.of]
        same = bool(named) and all(r and r.generation == kind.generation for r in named)
        off = SAME if same else OTHER
        rate = peak * known.share
        whose = f", as measured on {' and '.join(known.of)}" if known.of else ""
        if {kind.name, kind.family} & {*known.of}:
            whose = ", as measured in another type"
        elif same and kind.watts and all(r and r.watts for r in named):
            whose += ", by its power"
        low, high = rate * (1 - off), min(peak, rate * (1 + off))
        notes.append(
            f"{kind.display_name()} was not measured in {runs_in}: the plan assumes "
            f"{_teraflops_text(rate)} of {_teraflops_text(peak)} TFLOP/s "
            f"({_teraflops_text(low)} to {_teraflops_text(high)}){whose}"
        )
    return tuple(notes)


def _teraflops_text(tera: float) -> str:
    return f"{tera:.0f}" if tera >= 100 else f"{tera:.3g}"
