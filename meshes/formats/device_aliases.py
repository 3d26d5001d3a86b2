"""Maps names of devices, for instance in tables of runs, to kinds of the catalogue.

Names are matched by family and then by memory, in any case: ``a100_40gb``,
``A100-80GB-SXM`` and ``DGX-A100`` are all A100s. For devices that the catalogue lacks,
numbers are from datasheets, and links from another kind. Notes report all this.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from whalejax.meshes.catalogue import CatalogueEntry, entries
from whalejax.meshes.errors import WhaleError, quoted
from whalejax.meshes.ratings import POWER


@dataclass(frozen=True, slots=True)
class DatasheetCard:
    """Datasheet numbers of a device that the catalogue lacks, without sparsity.

    Attributes:
        words: Regular expressions that match its names.
        like: Kind of the catalogue whose efficiency, node and network are used.
        half, eight, single: TFLOP/s in 16 bits, in 8 bits (0 without support) and in
            float32.
        memory: Gigabytes, and gigabytes per second.
        cores: Streaming multiprocessors or compute units.
    """

    words: tuple[str, ...]
    like: str
    half: float
    eight: float
    single: float
    memory: tuple[int, int]
    cores: int


CARDS = (
    # Intel's white papers of Gaudi 2 (2022) and Gaudi 3 (2024).
    DatasheetCard(
        ("gaudi2", "gaudi 2", "gaudi-2"), "a100-80", 432, 865, 11, (96, 2450), 0
    ),
    DatasheetCard(
        ("gaudi3", "gaudi 3", "gaudi-3"), "h100", 1835, 1835, 14.3, (128, 3700), 0
    ),
    # Amazon's documentation of Trainium chips.
    DatasheetCard(("trainium2", "trn2"), "h100", 667, 1299, 181, (96, 2900), 0),
    DatasheetCard(("trainium", "trn1"), "a100-80", 190, 190, 47.5, (32, 820), 0),
    # Google's documentation of TPU v2 and v3: half a chip, as JAX counts them.
    DatasheetCard(("tpu-v3", "tpu ?v3", "^v3"), "v4", 61.5, 0, 61.5, (16, 450), 0),
    DatasheetCard(("tpu-v2", "tpu ?v2", "^v2"), "v4", 22.5, 0, 22.5, (8, 350), 0),
)
"""Devices for which no JAX plug-in exists, or no maintained one."""


def datasheet_card(name: str) -> DatasheetCard | None:
    """Returns the card that matches a name, or None.

    Args:
        name: Name in lower case.

    >>> card = datasheet_card("tpu v3")
    >>> card and card.memory
    (16, 450)
    """
    result = (card for card in CARDS if any(is_word(w, name) for w in card.words))
    return next(result, None)


def is_word(word: str, name: str) -> bool:
    """Whether a name contains a word, separated from letters and digits.

    A letter may follow the word.

    Args:
        word: Regular expression.
        name: Name in lower case.
    """
    return re.search(rf"(?<![a-z0-9]){word}(?![0-9])", name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasedDevice:
    """A device named in a table.

    Attributes:
        entry: Entry of the catalogue, with memory, power and link of the name.
        count: Number of devices in the name; None without one.
        notes: Notes on the mapping.
        others: Whether the name contains devices of other kinds too.
        knows_memory: Whether the catalogue or the name gives the memory.
    """

    entry: CatalogueEntry
    count: int | None = None
    notes: tuple[str, ...] = ()
    others: bool = False
    knows_memory: bool = True


_FAMILIES = (
    ("gh200", ("gh200", "gh-96", "gh96", "grace hopper", "gh-")),
    ("b200", ("b200", "a4-")),
    ("h200", ("h200", "p5e", "a3-ultra")),
    ("h100", ("h100", "h800", "a3-", "p5.")),
    ("a100", ("a100", "a800", "a2-", "p4d", "nd96asr", "nd96amsr")),
    ("v100", ("v100", "dgx-2", "dgx-1", "p3.", "p3dn")),
    ("p100", ("p100",)),
    ("titanrtx", ("titan",)),
    ("rtx3090", ("3090",)),
    ("rtx2080", ("2080",)),
    ("t4", ("t4",)),
    ("v7x", ("v7", "tpu7", "ironwood")),
    ("v6e", ("v6e", "trillium", "v6 lite")),
    ("v5e", ("v5e", "v5litepod", "v5 lite")),
    ("v5p", ("v5p", "tpu v5")),
    ("v4", ("tpu v4", "v4")),
)
"""Families of the catalogue and words that identify them in names, longest first."""

_KINDS = (
    ("gb300-nvl36", ("gb300[ -]nvl36",)),
    ("gb300", ("gb300",)),
    ("gb200-nvl36", ("gb200[ -]nvl36",)),
    ("gb200", ("gb200",)),
    ("b300", ("b300",)),
    ("b100", ("b100",)),
    ("h100-nvl", ("h100-nvl", "h100 nvl")),
    ("h20", ("h20",)),
    ("l40s", ("l40s",)),
    ("l40", ("l40",)),
    ("l4", ("l4",)),
    ("l20", ("l20",)),
    ("a10g", ("a10g", "g5")),
    ("a10", ("a10",)),
    ("a30", ("a30",)),
    ("a40", ("a40",)),
    ("rtx6000ada", ("rtx6000-ada", "rtx6000 ada", "6000-ada", "6000 ada")),
    ("a6000", ("a6000",)),
    ("rtx2080ti", ("2080-ti", "2080 ti", "2080ti")),
    ("rtx3080", ("3080",)),
    ("rtx4090", ("4090",)),
    ("rtx5090", ("5090",)),
    ("titanv", ("titan-v", "titan v")),
    ("p40", ("p40",)),
    ("v100-pcie", ("v100[ -]pcie", "v100[ -]pci-e")),
    ("mi250x", ("mi250x", "mi250")),
    ("mi210", ("mi210",)),
    ("mi300a", ("mi300a",)),
    ("mi300x", ("mi300x", "mi300")),
    ("mi325x", ("mi325x", "mi325")),
    ("mi355x", ("mi355x", "mi355")),
    ("w6800", ("w6800",)),
)
"""Other kinds of the catalogue and regular expressions that identify them, longest
first. They are searched before the families."""


_SIZES = (("p4de", 80), ("p4d", 40), ("a2-ultra", 80), ("a2-", 40))
"""Names of cloud machines with A100s, and the gigabytes of these."""

UNKNOWN = "a100-80"
"""Kind that replaces a device about which nothing else is known."""

_WATTS = {"a100": 400, "h100": 700, "h200": 700, "b200": 1000, "v100": 300, "p100": 300}
"""Board power of the catalogue's form factor (SXM)."""

_CARDS = {"a100": 300, "h100": 350, "v100": 250, "p100": 250}
"""Board power of PCIe cards with the same chips, which have no NVLink switch."""

_PCIE = {"h200": 63e9, "h100": 63e9, "a100": 31.5e9}
_CARD_MEMORY = {"h100": 2039e9, "a100": 1935e9}
"""Memory bandwidth of PCIe cards in bytes per second, where it is lower."""

_SLOW_NVLINK = {"a800": ("a100", 200e9), "h800": ("h100", 200e9)}
"""Variants of chips with 400 GB/s of NVLink in both directions together."""


def read_device(text: str, *, guess: bool = False) -> AliasedDevice:
    """Returns the device of a name; for several kinds, the slowest.

    Args:
        text: Name such as ``"A100-80GB-SXM"``, ``"a100_40gb"``, ``"DGX-H100"``, ``"TPU
            v5e"`` or ``"4xV100-16+4xT4"``.
        guess: Whether to replace an unknown family by ``UNKNOWN``, with a note.

    Raises:
        WhaleError: No family of the catalogue matches, and ``guess`` is False.

    >>> read_device("a100_40gb").entry.kind.name
    'a100-40'
    """
    parts = [_one_device(part, guess) for part in text.split("+")]
    slowest = min(parts, key=lambda d: d.entry.kind.peak_flops("bf16"))
    several = len({part.entry.kind.name for part in parts}) > 1
    return dataclasses.replace(slowest, others=several)


def _one_device(text: str, guess: bool) -> AliasedDevice:
    lowered = text.strip().lower().replace("_", "-")
    counted = re.match(r"([0-9]{1,9})\s*x\s*(.+)", lowered)
    count = int(counted[1]) if counted else None
    name = re.sub(r"\b([rg]tx)(?=a?\d)", r"\1 ", counted[2] if counted else lowered)
    named = next((k for k, words in _KINDS if any(is_word(w, name) for w in words)), "")
    if named:
        return _as_listed(entries()[named], name, count)
    card = datasheet_card(name)
    if card is not None:
        return _by_datasheet(text.strip(), name, count, card)
    family = next(
        (f for f, words in _FAMILIES if any(_means(w, name) for w in words)), None
    )
    if family is None:
        return _unknown(text.strip(), name, count, guess)
    apart = dict(_KINDS)
    kinds = [
        one
        for name, one in entries().items()
        if one.kind.family == family and name not in apart
    ]
    notes: list[str] = []
    memory = _memory_of(name, bare=kinds[0].torus is None)
    result = max(kinds, key=lambda one: one.kind.memory_bytes)
    if memory is not None:
        result = _with_memory(kinds, result, memory, notes)
    result = _with_power(result, family, name, notes)
    for word, (of, bandwidth) in _SLOW_NVLINK.items():
        if word in name:
            result = _with_link(result, bandwidth)
            notes.append(f"{word.upper()} is {of.upper()} with 400 GB/s of NVLink")
    return AliasedDevice(entry=result, count=count, notes=tuple(notes))


def _as_listed(found: CatalogueEntry, name: str, count: int | None) -> AliasedDevice:
    """Returns a kind of the catalogue, with the memory of the name if it differs."""
    notes: list[str] = []
    memory = _memory_of(name)
    if memory is not None:
        found = _with_memory([found], found, memory, notes)
    return AliasedDevice(entry=found, count=count, notes=tuple(notes))


def _unknown(text: str, name: str, count: int | None, guess: bool) -> AliasedDevice:
    if not guess:
        raise WhaleError(
            f"device {quoted(text)} names no family of the catalogue; it has "
            f"{', '.join(f for f, _ in _FAMILIES)}"
        )
    unknown, notes = (
        entries()[UNKNOWN],
        [f"device {quoted(text)} is unknown: as {UNKNOWN}"],
    )
    memory = _memory_of(name)
    if memory is not None:
        unknown = _with_memory([unknown], unknown, memory, notes)
    return AliasedDevice(
        entry=unknown, count=count, notes=tuple(notes), knows_memory=memory is not None
    )


def _by_datasheet(
    text: str, name: str, count: int | None, card: DatasheetCard
) -> AliasedDevice:
    base = entries()[card.like]
    memory = _memory_of(name, bare=base.torus is None) or card.memory[0]
    # TensorFloat-32, if available, has half the speed of 16 bits.
    peaks = {"f32": card.single, "tf32": max(card.single, card.half / 2)}
    peaks |= {"bf16": card.half, "f16": card.half}
    peaks |= {"f8": card.eight} if card.eight else {}
    kind = dataclasses.replace(
        base.kind,
        name=f"{base.kind.family}-{card.words[0].removeprefix(base.kind.family + '-')}",
        label=text,
        memory_bytes=memory * 2**30,
        memory_bytes_per_second=card.memory[1] * 1e9,
        flops_per_second=tuple((t, peak * 1e12) for t, peak in peaks.items()),
        cores=card.cores,
        watts=None,
        sources=(),
    )
    note = f"{text} by its datasheet, as efficient as {base.kind.display_name()}"
    entry = dataclasses.replace(base, kind=kind)
    return AliasedDevice(entry=entry, count=count, notes=(note,))


def _means(word: str, name: str) -> bool:
    """Whether a name contains a word that no further zero follows."""
    return (
        re.search(re.escape(word) + (r"(?!0(?!\d))" * word[-1].isdigit()), name)
        is not None
    )


def _memory_of(name: str, *, bare: bool = True) -> int | None:
    """Returns the gigabytes that a name contains or implies, or None.

    A number without a unit counts only if ``bare``; for a TPU it is a count.
    """
    for word, size in _SIZES:
        if word in name:
            return size
    # The name A10G contains no gigabytes.
    match = re.search(r"(?<![\d.])(?<!\ba)(\d{2,3})\s*(?:gb(?!/s|ps|it)|gib|g\b)", name)
    if bare:
        match = match or re.search(r"[a-z]\d*[ -](\d{2,3})(?![\dw.])\b", name)
    size = int(match[1]) if match else 0
    return size if 8 <= size <= 288 else None


def _with_memory(
    kinds: list[CatalogueEntry], largest: CatalogueEntry, memory: int, notes: list[str]
) -> CatalogueEntry:
    """Returns the kind with this memory, or the largest one with changed memory."""

    def gap(one: CatalogueEntry) -> float:
        return abs(one.kind.memory_bytes / 2**30 - memory)

    nearest = min(kinds, key=gap)
    # Datasheets count gigabytes in powers of ten, drivers in powers of two.
    if gap(nearest) <= 0.08 * memory:
        return nearest
    notes.append(f"{largest.kind.display_name()} with {memory} GB of memory")
    kind = dataclasses.replace(largest.kind, memory_bytes=memory * 2**30, sources=())
    return dataclasses.replace(largest, kind=kind)


def _with_power(
    found: CatalogueEntry, family: str, name: str, notes: list[str]
) -> CatalogueEntry:
    """Reduces the speed of cards with less power; PCIe cards get the link of PCIe."""
    card = "pcie" in name or "pci-e" in name
    stated = re.search(r"(\d{2,4})\s*w\b", name)
    usual = _WATTS.get(family)
    if usual is None or not (card or stated):
        return found
    watts = int(stated[1]) if stated else _CARDS.get(family, usual)
    if card:
        found = _with_link(found, _PCIE.get(family, 15.75e9))
        speed = found.kind.memory_bytes_per_second
        speed = min(speed, _CARD_MEMORY.get(family, speed))
        kind = dataclasses.replace(found.kind, memory_bytes_per_second=speed)
        found = dataclasses.replace(found, kind=kind)
        notes.append(f"{found.kind.display_name()} as a PCIe card")
    if watts >= usual:
        return found
    share = (watts / usual) ** POWER
    notes.append(f"{watts} of {usual} W: products at {share:.2f} of their speed")
    kind = dataclasses.replace(found.kind, watts=float(watts), sources=())
    return dataclasses.replace(found, kind=kind)


def _with_link(found: CatalogueEntry, bandwidth: float) -> CatalogueEntry:
    if found.node is None:
        return found
    link = dataclasses.replace(found.node, bandwidth_bytes_per_second=bandwidth)
    return dataclasses.replace(found, node=link)
