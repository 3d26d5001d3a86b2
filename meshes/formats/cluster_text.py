"""Parses short texts of clusters such as ``h100:4x8``, and adds links.

The links come from the catalogue, for texts and for files without levels.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.meshes.catalogue import (
    DESCRIBE_IN_TOML,
    CatalogueEntry,
    Link,
    Torus,
    entries,
    entry,
    is_kind,
    kind_names,
    unknown_kind,
)
from whalejax.meshes.cluster_data import COMPILERS, ClusterData, Level, Node
from whalejax.meshes.errors import Problems, WhaleError, quoted, warn
from whalejax.meshes.fitted_constants import WHOLE, Achieved, constants
from whalejax.meshes.formats.device_aliases import datasheet_card, read_device
from whalejax.meshes.units import count_text


MAX_DEVICES = 2**20

MOST_TEXT = 1000
"""Maximum number of characters of a cluster's text."""

_PART = re.compile(r"([a-z][a-z0-9-]*):([0-9]+(?:x[0-9]+)*)")


def grammar() -> str:
    """Returns the grammar of clusters, with the names of kinds from the catalogue."""
    return f"""\
A cluster is written as one of
  KIND:N          one node of N devices                   h100:8
  KIND:MxN        M nodes of N devices                    h100:4x8
  KIND:AxBxC      a TPU torus of 2 or 3 dimensions; one   v5p:4x4x4
                  number more, in front, counts slices    v5e:2x16x16
  PART+PART       nodes of several kinds                  v100-32:8+p100-16:8
  FILE.toml       a description in a file                 mixed.toml
  FILE.json       one of PaddlePaddle's                   cluster.json
  local           the devices of this process, measured
KIND is one of {", ".join(kind_names())}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    entry: CatalogueEntry
    groups: int
    lengths: tuple[int, ...]

    @property
    def per_group(self) -> int:
        return math.prod(self.lengths) * self.entry.chip_devices

    @property
    def total(self) -> int:
        return self.groups * self.per_group


def parse(text: str) -> ClusterData:
    """Returns the cluster that a text such as ``h100:4x8`` describes.

    Raises:
        WhaleError: The text is invalid or too long. The message lists every problem and
            shows the grammar.
    """
    stripped = text.strip()
    problems = Problems(f"cluster {quoted(text)}")
    if len(stripped) > MOST_TEXT:
        raise WhaleError(
            f"cluster {quoted(text)}: expected at most {MOST_TEXT} characters. "
            "Describe a large cluster in a TOML file"
        )
    terms = stripped.lower().split("+")
    parts = [part for term in terms if (part := _part(term, problems)) is not None]
    _check_together(parts, problems)
    if problems:
        raise WhaleError(f"{problems.text()}\n{grammar()}")
    nodes = tuple(
        Node(kind=part.entry.kind, count=part.per_group)
        for part in parts
        for _ in range(part.groups)
    )
    platform = parts[0].entry.kind.platform
    torus = parts[0].entry.torus
    if torus is not None:
        levels = torus_levels(parts[0].entry, torus, parts[0].lengths, parts[0].groups)
    else:
        counts = [node.count for node in nodes]
        levels = node_levels([part.entry for part in parts], counts)
    return ClusterData(nodes=nodes, levels=levels, compiler=COMPILERS[platform])


def _part(term: str, problems: Problems) -> _Part | None:
    term = term.strip()
    match = _PART.fullmatch(term)
    if match is None:
        problems.add(_malformed(term))
        return None
    part = _entry(match[1])
    if part is None:
        problems.add(
            f"{term!r}: local means all devices of this machine; write it without a "
            "number"
            if match[1].strip() == "local"
            else f"{unknown_kind(match[1])}{DESCRIBE_IN_TOML}"
        )
        return None
    digits = match[2].split("x")
    if max(map(len, digits)) > len(str(MAX_DEVICES)):
        problems.add(f"{term!r}: expected at most {MAX_DEVICES} devices")
        return None
    numbers = [int(n) for n in digits]
    if 0 in numbers:
        problems.add(f"{term!r} has a 0, expected numbers of at least 1")
        return None
    if math.prod(numbers) > MAX_DEVICES:
        problems.add(
            f"{term!r} has {count_text(math.prod(numbers), 'device')}, expected at "
            f"most {MAX_DEVICES}"
        )
        return None
    if part.torus is not None:
        return _torus_part(term, part, part.torus, numbers, problems)
    return _node_part(term, part, numbers, problems)


def _entry(name: str) -> CatalogueEntry | None:
    """Returns the entry of a kind of the catalogue or of a ``DatasheetCard``, or None.

    A card has the links of another kind, which a warning tells.
    """
    if is_kind(name):
        return entry(name)
    if datasheet_card(name) is None:
        return None
    device = read_device(name)
    warn(
        f"cluster {quoted(name)}: {'; '.join(device.notes)}, and with its links. To "
        "describe other links, write a TOML file with [[levels]]"
    )
    return device.entry


def _suggested_text(term: str) -> str:
    """Rewrites texts such as ``"h100-8"`` or ``"8xh100"``; empty for other texts.

    >>> [_suggested_text(word) for word in ("h100x8", "8 x h100", "tpu-v5litepod-16")]
    ['h100:8', 'h100:8', 'v5e:16']
    """
    if is_kind(term):  # The number of a100-80 is no count.
        return ""
    bare = term.removeprefix("tpu-").removeprefix("nvidia-")
    match = re.fullmatch(r"([a-z][a-z0-9-]*?)(?: *x *|[-_ ]+)(\d+)", bare)
    name, count = (match[1], match[2]) if match else ("", "")
    if not match:
        turned = re.fullmatch(r"(\d+)(?: *[x×*] *|[-_ ]+)([a-z][a-z0-9-]*)", bare)
        name, count = (turned[2], turned[1]) if turned else ("", "")
    if not name or not is_kind(name):
        return ""
    kind, number = entry(name).kind.name, int(count)
    if kind in ("v4", "v5p") and number >= 8:  # Google counts two cores per chip.
        number //= 2
    return f"{kind}:{number}"


def _malformed(term: str) -> str:
    if not term:
        return "an empty part, expected KIND:N on both sides of every +"
    name, colon, rest = term.partition(":")
    meant = _suggested_text(term)
    if meant:
        return f"{term!r} has no colon. Write {meant}"
    if term == "local":
        return (
            "'local' cannot be combined with +. To add other devices to those of this "
            "machine, describe all of them in one file (whalejax calibrate --append)"
        )
    if re.fullmatch(r"[a-z0-9-]+", name) and not is_kind(name):
        return f"{unknown_kind(name)}{DESCRIBE_IN_TOML}"
    if not colon and re.fullmatch(r"[a-z0-9 -]+", name):
        return (
            f"{term!r} does not say how many devices. Write {name.strip()}:8 for one "
            f"node of 8, {name.strip()}:4x8 for four nodes of 8"
        )
    if not colon:
        return (
            f"{term!r} is no KIND:N, no file that ends in .toml or .json, and not "
            "'local'"
        )
    if "," in term:
        return (
            f"{term!r} has a comma. Write + between nodes of several kinds, and "
            "several clusters as separate texts"
        )
    return (
        f"{term!r}: expected numbers joined by x after {name.strip()}:, such as 8 or "
        f"4x8, got {rest.strip()!r}"
    )


def _node_part(
    term: str, found: CatalogueEntry, numbers: list[int], problems: Problems
) -> _Part | None:
    name, most = found.kind.name, found.node_devices
    if len(numbers) > 2:
        problems.add(
            f"{term!r} has {len(numbers)} numbers; {name} is joined in nodes, expected "
            f"{name}:N or {name}:MxN"
        )
        return None
    groups, per_node = (1, *numbers)[-2:]
    if most < per_node <= found.domain_devices and per_node % most == 0:
        # More devices than a host has may still be joined by one switch.
        groups, per_node = groups * (per_node // most), most
    if per_node > most:
        whole = -(-groups * per_node // most)
        problems.add(
            f"{term!r} puts {count_text(per_node, 'device')} into one node; a node of "
            f"{name} holds {most}. Write {name}:{whole}x{most}, or describe the node "
            "in a TOML file"
        )
        return None
    if groups > 1 and found.network is None:
        problems.add(
            f"{term!r} has {count_text(groups, 'node')}; the catalogue knows no "
            f"network for {name}. Describe the cluster in a TOML file with [[levels]]"
        )
        return None
    return _Part(entry=found, groups=groups, lengths=(per_node,))


def _torus_part(
    term: str,
    found: CatalogueEntry,
    torus: Torus,
    numbers: list[int],
    problems: Problems,
) -> _Part | None:
    name, dims = found.kind.name, torus.dims
    if len(numbers) > dims + 1:
        problems.add(
            f"{term!r} has {len(numbers)} numbers; {name} forms a torus of {dims} "
            f"dimensions, expected at most {dims}, or {dims + 1} with slices in front"
        )
        return None
    groups = numbers.pop(0) if len(numbers) == dims + 1 else 1
    lengths = tuple(numbers)
    # A kind from a datasheet has the torus of another kind, whose slices do not count.
    is_listed = name in entries()
    if len(numbers) == 1 and not is_listed:
        lengths = near_cube(numbers[0], dims)
    elif len(numbers) == 1:
        offered = torus.near_slices(lengths)[0]
        is_offered = math.prod(offered) == numbers[0]
        lengths = offered if is_offered else near_cube(numbers[0], dims)
    chips = math.prod(lengths)
    if chips > torus.max_chips:
        problems.add(
            f"{term!r} has {chips} chips in one slice; a slice of {name} has at most "
            f"{torus.max_chips}. Put the number of slices in front, as in "
            f"{name}:2x{'x'.join('4' * dims)}"
        )
        return None
    if is_listed and len(numbers) > 1 and not torus.has_slice(lengths):
        before = (groups,) if groups > 1 else ()
        near = [
            f"{name}:{'x'.join(map(str, before + shape))}"
            for shape in torus.near_slices(lengths)
        ]
        problems.add(
            f"{term!r} has slices of {'×'.join(map(str, lengths))} chips, but "
            f"{_slice_rule(name, torus)}. Nearest: {' or '.join(near)}. Describe "
            "another torus in a TOML file"
        )
        return None
    return _Part(entry=found, groups=groups, lengths=lengths)


def _slice_rule(name: str, torus: Torus) -> str:
    if torus.slices:
        shapes = ["×".join(map(str, shape)) for shape in torus.slices]
        return f"slices of {name} are {', '.join(shapes[:-1])} or {shapes[-1]}"
    edge = torus.wrap_multiple
    parts = [str(n) for n in range(1, edge) if edge % n == 0]
    return (
        f"the lengths of a slice of {name} are {', '.join(parts)} or {edge} each, or "
        f"all multiples of {edge}"
    )


def _check_together(parts: list[_Part], problems: Problems) -> None:
    total = sum(part.total for part in parts)
    if total > MAX_DEVICES and not problems:
        problems.add(f"{total} devices in all, expected at most {MAX_DEVICES}")
    if len(parts) < 2:
        return
    for part in parts:
        if part.entry.torus is not None:
            name = part.entry.kind.name
            problems.add(
                f"{name} cannot be joined with other parts by +: one program runs on "
                f"one slice, or on slices alike, as in {name}:2x"
                f"{'x'.join(map(str, part.lengths))}"
            )
        elif part.entry.network is None:
            problems.add(
                f"{part.entry.kind.name} cannot be joined with other parts by +: the "
                f"catalogue knows no network for it. Describe the cluster in a TOML "
                f"file"
            )


def levels_of_kind(cluster: ClusterData, kind: str) -> tuple[Level, ...] | None:
    """Returns the levels that the nodes of one kind have without the other nodes.

    Links of mixed nodes are as slow as their slowest. Returns None if the links are not
    those of the catalogue, which then cannot be known for one kind.

    Args:
        cluster: Devices of several kinds.
        kind: Name of a kind in the cluster.

    >>> mixed = parse("h100:8+t4:8")
    >>> mixed.levels[0].name, levels_of_kind(mixed, "h100")[0].name
    ('nvlink/pcie', 'nvlink')
    """
    groups = [
        (name, count, len([*nodes]))
        for (name, count), nodes in itertools.groupby(
            cluster.nodes, key=lambda node: (node.kind.name, node.count)
        )
    ]
    own = [group for group in groups if group[0] == kind]
    whole, alone = (
        "+".join(f"{name}:{number}x{count}" for name, count, number in some)
        for some in (groups, own)
    )
    with contextlib.suppress(WhaleError):
        if parse(whole).levels == cluster.levels:
            return parse(alone).levels
    return None


def near_cube(chips: int, dims: int) -> tuple[int, ...]:
    """Returns the lengths of a torus closest to a cube, in ascending order.

    Example:
        >>> near_cube(8, 2), near_cube(16, 3)
        ((2, 4), (2, 2, 4))
    """
    if dims == 1:
        return (chips,)
    best = (1,) * (dims - 1) + (chips,)
    for first in range(1, round(chips ** (1 / dims)) + 2):
        if chips % first == 0:
            rest = near_cube(chips // first, dims - 1)
            candidate = tuple(sorted((first, *rest)))
            if sum(candidate) < sum(best):
                best = candidate
    return best


def node_levels(
    found: Sequence[CatalogueEntry], counts: Sequence[int]
) -> tuple[Level, ...]:
    """Returns the levels of nodes that a network joins.

    If kinds differ, the slower link counts. If nodes differ in size, the inner level
    has the greatest common divisor of their sizes, and all other links have the speed
    of the network, which is pessimistic.
    """
    inner = math.gcd(*counts)
    outer = sum(counts) // inner
    levels = []
    if inner > 1 or outer == 1:
        known = constants()
        links = [
            (one.node, known.node_of(one.kind.family, one.kind.platform))
            for one in found
            if one.node is not None
        ]
        wait = max(_delivered(one).node_seconds for one in found)
        levels.append(_merge_links(links, inner, inner - 1, wait))
    joined = _domain(found, inner, outer)
    if joined > 1:
        links = [
            (x.domain, constants().node_of(x.kind.family, x.kind.platform))
            for x in found
            if x.domain is not None
        ]
        levels.append(_merge_links(links, joined, joined - 1))
    outer //= joined
    if outer > 1:
        links = [(x.network, _delivered(x).network) for x in found if x.network]
        # NCCL uses trees between nodes, so the latency grows with the tree's depth.
        levels.append(_merge_links(links, outer, math.ceil(math.log2(outer))))
    return tuple(levels)


def _domain(found: Sequence[CatalogueEntry], inner: int, outer: int) -> int:
    """Returns the number of nodes that one switch joins, a divisor of ``outer``."""
    if any(one.domain is None for one in found):
        return 1
    room = min(one.domain_devices for one in found) // inner
    return next(n for n in range(max(1, min(room, outer)), 0, -1) if outer % n == 0)


def _delivered(found: CatalogueEntry) -> Achieved:
    platforms = constants().platforms
    return platforms.get(found.kind.platform, WHOLE)


def _merge_links(
    delivered: Sequence[tuple[Link, float]], size: int, hops: int, wait: float = 0.0
) -> Level:
    """Returns a level as slow as the slowest of some links.

    Each link comes with the share of its bandwidth that it reaches. ``wait`` is added
    to the latency.
    """
    links = [link for link, _ in delivered]
    names = dict.fromkeys(link.name for link in links)
    peers = max(link.peers for link in links)
    return Level(
        name="/".join(names),
        size=size,
        bandwidth_bytes_per_second=min(
            share * link.bandwidth_bytes_per_second for link, share in delivered
        ),
        latency_seconds=wait
        + max(x.base_seconds + hops * x.hop_seconds for x in links),
        # Direct links do not join groups of this size.
        peers=peers if peers >= size - 1 else 0,
    )


def torus_levels(
    found: CatalogueEntry,
    torus: Torus,
    lengths: tuple[int, ...],
    slices: int,
    names: str = "xyz",
) -> tuple[Level, ...]:
    """Returns the levels of cores in a chip, axes of a torus, and network of slices.

    An axis that wraps is a ring with twice the bandwidth and half the hops.

    Args:
        found: Entry of the kind.
        torus: Torus of the kind.
        lengths: Lengths of the axes, outermost first.
        slices: Number of tori that the network joins.
        names: Names of the axes, one letter each, outermost first.
    """
    levels = []
    delivered = _delivered(found)
    if found.chip is not None:
        levels.append(
            _merge_links([(found.chip, delivered.node)], found.chip_devices, 1)
        )
    axes = list(zip(names, lengths, torus.wraps(lengths), strict=False))
    levels += [
        _axis_level(torus.link, axis, length, ring, delivered.node)
        for axis, length, ring in reversed(axes)
        if length > 1
    ]
    if slices > 1 and found.network is not None:
        hops = math.ceil(math.log2(slices))
        levels.append(_merge_links([(found.network, delivered.network)], slices, hops))
    return tuple(levels or [_merge_links([(torus.link, delivered.node)], 1, 0)])


def _axis_level(link: Link, axis: str, length: int, ring: bool, share: float) -> Level:
    hops = length // 2 if ring else length - 1
    return Level(
        name=f"{link.name}-{axis}",
        size=length,
        bandwidth_bytes_per_second=share * link.bandwidth_bytes_per_second * (1 + ring),
        latency_seconds=link.base_seconds + hops * link.hop_seconds,
        torus=True,
    )
