"""The catalogue of device kinds, read from ``device_kinds.toml``.

The numbers stand in a file and not in code, so that they can be checked against their
sources by someone who reads no Python. This module finds a kind by its name in a
cluster's text or by the name that JAX shows for a device, and knows what a node and a
network of that kind look like where the user does not say.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
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
        bandwidth_bytes_per_second: Rate of one device; of one link of a torus.
        hop_seconds: Latency of one step of a collective.
        base_seconds: Cost of starting a collective.
        peers: Number of other devices to which each has a link of its own, the
            bandwidth being that of all these links; 0 where a switch gives it all to
            any of them.
    """

    name: str
    bandwidth_bytes_per_second: float
    hop_seconds: float
    base_seconds: float
    peers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """The torus that one kind's chips form.

    Attributes:
        link: One of its links.
        dims: Number of dimensions.
        wrap_multiple: An axis wraps where its length is a multiple of this.
        wrap_needs_all: No axis wraps unless all do.
        max_chips: Largest number of chips in one slice.
    """

    link: Link
    dims: int
    wrap_multiple: int
    wrap_needs_all: bool
    max_chips: int

    def wraps(self, lengths: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns which axes of a slice of these lengths are rings rather
        than lines.
        """
        each = tuple(length % self.wrap_multiple == 0 for length in lengths)
        if self.wrap_needs_all:
            return (all(each) and len(lengths) == self.dims,) * len(lengths)
        return each


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One kind of the catalogue and what it is built into by default.

    Attributes:
        kind: The device.
        aliases: Other names for it in a cluster's text.
        jax_names: Values of ``jax.Device.device_kind`` for it.
        node: Link inside a node, None for a torus.
        node_devices: Largest number of devices of a node.
        chip: Link between the devices of one chip, where a chip is several.
        chip_devices: Number of devices of a chip.
        torus: None for kinds that are joined in nodes.
        network: Link between nodes or slices; None where nothing is known.
        domain: Link between the nodes that one switch joins, where there is one beyond
            a node.
        domain_devices: Number of devices that such nodes hold together.
        sources: Sources of every number of this entry; ``kind.sources`` has the
            device's.
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
    """The names of all kinds, without their aliases.

    Example:
        >>> "h100" in kind_names()
        True
    """
    return tuple(entries())


def device_kind(name: str) -> DeviceKind:
    """One kind by its name or alias, in any case of letters.

    Raises:
        WhaleError: An unknown name; the message gives the nearest ones.

    Example:
        >>> device_kind("A100").name
        'a100-80'
    """
    return entry(name).kind


def entry(name: str) -> CatalogueEntry:
    """One entry by its kind's name or alias, in any case of letters.

    Raises:
        WhaleError: An unknown name; the message gives the nearest ones.
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
    """Returns the hint on an unknown kind: the nearest names, with a space last."""
    known = tuple(_by_name())
    near = difflib.get_close_matches(name.strip().lower(), known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"unknown device kind {short_repr(name.strip())}. {hint}"


def entry_of_device(device_kind_text: str) -> CatalogueEntry | None:
    """The entry for a device by what JAX calls it; None if the catalogue lacks it.

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
    """Every entry by its kind's name, in the order of the file."""
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
    """The dotted path of every number in a kind's table."""
    paths: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            paths += number_paths(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            paths.append(prefix + key)
    return paths


def _sources(table: dict[str, Any], documents: dict[str, Any]) -> tuple[Source, ...]:
    """One source for every number: that of the longest path which contains it."""
    given: dict[str, str] = table["sources"]
    numbers = number_paths({k: v for k, v in table.items() if k != "sources"})
    sources = []
    for path in numbers:
        parts = path.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
        document = documents[next(given[p] for p in above if p in given)]
        sources.append(Source(field=path, **document))
    return tuple(sources)
