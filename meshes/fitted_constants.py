"""Fractions of the datasheets' peaks that devices reach, fitted to published runs.

There is one set of constants for each platform, fitted to training steps, and
efficiencies by kind and type, fitted to training steps or single layers. They are read
from ``fitted.toml``, where every number names its data. ``Constants.efficiency_of``
alone determines what a kind reaches in a type: the costs of one operation, of many at
once and the estimates of a table use it. The functions take floats and NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whalejax.meshes.ratings import (
    POWER,
    STANDS_IN,
    RatedDevice,
    rating_of,
    watts_ratio,
)


TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Tiles of a product that one core of a GPU computes, largest first (CUTLASS)."""


TUNED = "tuned"
"""Replaces a 16-bit type, for frameworks whose products are fitted separately."""

ASSUMED = 0.7
"""Efficiency of a family without a similar one: that of most known kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Constants of one platform. Shares are relative to the datasheet.

    Attributes:
        half_depth: Contracted size at which a product reaches half of its speed.
        half_size: ``half_depth`` for ``effective_size``.
        tile_medium, tile_small, tile_smallest: Speed of the last three of ``TILES``,
            relative to the first two.
        tile_idle: Part of the cores that the last round of tiles leaves idle.
        attention: Fraction of the peak in a fused attention kernel.
        attention_before: Factor for each generation that the kernel is older than the
            device.
        attention_half: Sequence at which such a kernel reaches half of that.
        unaligned: Speed factor of a product in an eager framework, for each halving of
            the 16 bytes that should divide its sizes.
        memory: Fraction of the memory bandwidth.
        kernel_seconds: Cost of every kernel of a compiled program.
        launch_seconds: Cost of every kernel if a host launches operations individually.
        dispatch_seconds: Host's time for one operation that it launches.
        micro_seconds: Host's time between two micro-batches that it launches.
        jitter_seconds: Delay of the slower of two hosts at a collective.
        blend: Exponent that combines the device's and the host's time: a smooth
            maximum, as both vary between operations.
        node: Fraction of the bandwidth inside a node, or of a torus, for families
            without their own.
        node_seconds: Time in which a collective inside a node reaches its bandwidth.
        network: Fraction of the bandwidth between nodes or slices.
        point: Fraction of either bandwidth between two pipeline stages.
        ring_seconds: Time of one hop of a reduce-scatter or all-gather over data ranks.
        bucket_bytes: Bytes that such a collective handles at once.
        overlap_gradients: Overlapped part of their reduction, if frameworks overlap it.
        overlap_parameters: Overlapped part of gathering parameters.
        overlap_layers: Overlapped part of collectives inside layers.
        update_bytes: Bytes that the optimizer moves for a parameter.
        step_seconds: Fixed time of every step.
        reserve_bytes: Device memory that the runtime reserves.
    """

    half_depth: float
    half_size: float
    tile_medium: float
    tile_small: float
    tile_smallest: float
    tile_idle: float
    attention: float
    attention_before: float
    attention_half: float
    unaligned: float
    memory: float
    kernel_seconds: float
    launch_seconds: float
    dispatch_seconds: float
    micro_seconds: float
    jitter_seconds: float
    blend: float
    node: float
    node_seconds: float
    network: float
    point: float
    ring_seconds: float
    bucket_bytes: float
    overlap_gradients: float
    overlap_parameters: float
    overlap_layers: float
    update_bytes: float
    step_seconds: float
    reserve_bytes: float


WHOLE = Achieved(
    half_depth=0.0,
    half_size=0.0,
    tile_medium=1.0,
    tile_small=1.0,
    tile_smallest=1.0,
    tile_idle=0.0,
    attention=1.0,
    attention_before=1.0,
    attention_half=0.0,
    unaligned=1.0,
    memory=1.0,
    kernel_seconds=0.0,
    launch_seconds=0.0,
    dispatch_seconds=0.0,
    micro_seconds=0.0,
    jitter_seconds=0.0,
    blend=4.0,
    node=1.0,
    node_seconds=0.0,
    network=1.0,
    point=1.0,
    ring_seconds=0.0,
    bucket_bytes=1e9,
    overlap_gradients=0.0,
    overlap_parameters=0.0,
    overlap_layers=0.0,
    update_bytes=24.0,
    step_seconds=0.0,
    reserve_bytes=0.0,
)
"""Constants of a measured platform: its numbers are used unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Largest share of its peak that a kind reaches in products of a type.

    Attributes:
        share: Share of the peak.
        measured: Whether that kind itself was measured in that type.
        of: Kinds or families whose measurements determine it; empty for the default.
    """

    share: float
    measured: bool
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All fitted constants.

    Attributes:
        platforms: Constants of each platform, by name.
        efficiency: (family of kinds, type) to the largest share of the peak, from
            training steps.
        node: Family of kinds to the share that links inside a node reach, if it differs
            from the platform's.
        blocks: (kind, type) to the same share as ``efficiency``, from single layers.
        memory: Kind to the share of its memory bandwidth, if not the platform's.
        sources: Runs whose training steps were used for the fit.
    """

    platforms: Mapping[str, Achieved]
    efficiency: Mapping[tuple[str, str], float]
    node: Mapping[str, float] = dataclasses.field(default_factory=dict)
    blocks: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sources: str = ""

    def node_of(self, family: str, platform: str) -> float:
        """Returns the share that links inside a node reach: a family's, or a similar
        one's.
        """
        if family in self.node:
            return self.node[family]
        for generation in _line(_generation(family)):
            for name, share in self.node.items():
                if _generation(name) == generation:
                    return share
        return self.platforms.get(platform, WHOLE).node

    def efficiency_of(
        self, kind: RatedDevice, dtype: str, default: float | None = None
    ) -> Efficiency:
        """Returns the largest share of its peak that a kind reaches in a type.

        Measurements of the kind or its family come first. Then follow those of its
        generation, each in proportion to ``POWER`` of the watts per FLOP/s, or of its
        fallback generation.

        Args:
            kind: Kind of device.
            dtype: Type in which it multiplies, one of ``DTYPES``, or ``TUNED``.
            default: Value for a kind without a similar one; default: ``ASSUMED``.
        """
        wanted = width_of(dtype)
        near, (first, *others) = _NEAR.get(wanted, ()), (*_line(kind.generation), "")
        asked = [("", (wanted,)), (first, (wanted,)), ("", near), (first, near)]
        asked += [(generation, (wanted, *near)) for generation in others]
        for generation, widths in asked:
            for width in widths:
                efficiency = self._like(kind, generation, width)
                if efficiency is not None:
                    measured = not generation and width == wanted
                    return dataclasses.replace(efficiency, measured=measured)
        share = ASSUMED if default is None else default
        return Efficiency(share=share, measured=False, of=())

    def _like(
        self, kind: RatedDevice, generation: str, width: str
    ) -> Efficiency | None:
        """Returns the measurement in a type; for a generation, the mean of its kinds.

        Without a generation, the kind itself or its family counts.
        """
        if not generation:
            for known, name in (
                (self.blocks, kind.name),
                (self.efficiency, kind.family),
                (self.blocks, kind.family),
            ):
                if (name, width) in known:
                    return self._carry_over(kind, width, {name: known[name, width]})
            return None
        # Full training steps are more reliable than single layers.
        for known in (self.efficiency, self.blocks):
            result = {
                name: share
                for (name, dtype), share in known.items()
                if dtype == width and _generation(name) == generation
            }
            if result:
                return self._carry_over(kind, width, result)
        return None

    def _carry_over(
        self, kind: RatedDevice, width: str, shares: Mapping[str, float]
    ) -> Efficiency:
        """Returns the mean of other kinds' shares, within a generation scaled by power.

        Generations differ in efficiency per watt, so power does not compare them.
        """
        logs = []
        for name, share in shares.items():
            other = rating_of(name)
            ratio = 1.0
            if other is not None and other.generation == kind.generation:
                ratio = watts_ratio(kind, other, _TYPE.get(width, width))
            logs.append(math.log(share) + POWER * math.log(ratio))
        share = min(MOST, math.exp(math.fsum(logs) / len(logs)))
        return Efficiency(share=share, measured=False, of=tuple(shares))

    def memory_of(self, kind: RatedDevice) -> float:
        """Returns the share that a kind's memory bandwidth reaches: its own, or a
        similar kind's.
        """
        for name in (kind.name, kind.family):
            if name in self.memory:
                return self.memory[name]
        known = self.platforms.get(kind.platform, WHOLE).memory
        if any(family == kind.family for family, _ in self.efficiency):
            return known
        alike = [
            share
            for name, share in self.memory.items()
            if _generation(name) == kind.generation
        ]
        return math.prod(alike) ** (1 / len(alike)) if alike else known


MOST = 0.97
"""Upper limit of the share of the peak, regardless of power."""

_NEAR: Mapping[str, tuple[str, ...]] = {
    "bf16": (TUNED,),
    TUNED: ("bf16",),
    "f8": ("bf16", TUNED),
    "f4": ("f8", "bf16", TUNED),
    "tf32": ("bf16", TUNED),
    "f32": ("bf16", TUNED),
}
"""Types whose efficiency replaces another's on one kind."""

_TYPE = {TUNED: "bf16"}


def _generation(name: str) -> str:
    generation = rating_of(name)
    return generation.generation if generation is not None else ""


def _line(generation: str) -> Iterator[str]:
    while generation:
        yield generation
        generation = STANDS_IN.get(generation, "")


def width_of(dtype: str) -> str:
    """Returns the type of a recorded efficiency: bf16 for 16 bits, f32 for f64."""
    wide = {"f32": "f32", "f64": "f32"}
    kept = ("tf32", "f8", "f4", TUNED)
    return wide.get(dtype, dtype if dtype in kept else "bf16")


@functools.cache
def constants() -> Constants:
    """Returns the constants of this version."""
    return read(tomllib.loads(_text()))


def _text() -> str:
    package = importlib.resources.files("whalejax.meshes")
    return (package / "fitted.toml").read_text(encoding="utf-8")


def read(data: Mapping[str, Any]) -> Constants:
    """Returns constants from the tables of a TOML file."""
    names = [field.name for field in dataclasses.fields(Achieved)]
    return Constants(
        platforms={
            platform: Achieved(**{name: float(table[name]) for name in names})
            for platform, table in data["platforms"].items()
        },
        efficiency=_by_type(data["efficiency"]),
        node=data.get("node", {}),
        blocks=_by_type(data.get("blocks", {})),
        memory=data.get("memory", {}),
        sources=data.get("sources", ""),
    )


def _by_type(tables: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (name, dtype): float(share)
        for name, table in tables.items()
        for dtype, share in table.items()
    }


CORE = 312e12 / 108
"""FLOP/s of one core to which the sizes refer: an A100's in 16 bits."""


def pace_of(peak_flops: Any, cores: Any) -> Any:
    """Returns the speed of one core relative to that of the fitted curve.

    The waits at the start of a tile and the writes at its end do not get faster, so a
    faster core needs longer products for the same share.

    Args:
        peak_flops: Peak of the device, in one type.
        cores: Number of cores, as in ``shape_share``.
    """
    return np.where(cores > 0, peak_flops / np.maximum(1.0, cores) / CORE, 1.0)


def shape_share(
    m: Any, k: Any, n: Any, batch: Any, cores: Any, curve: Any, pace: Any = 1.0
) -> Any:
    """Returns the share of the largest speed that a product of this shape reaches.

    Args:
        m, k, n: An (m, k) matrix times a (k, n) matrix.
        batch: Number of products in one operation.
        cores: Number of cores that compute its tiles in turn; 0 if tiles do not matter.
        curve: ``Achieved`` of the platform, or an object with arrays as its fields.
        pace: From ``pace_of``.
    """
    busy = tile_share(
        m,
        n,
        batch,
        np.maximum(1.0, cores),
        curve.tile_medium,
        curve.tile_small,
        curve.tile_smallest,
        curve.tile_idle,
    )
    size = 3.0 / (1.0 / m + 1.0 / k + 1.0 / n)
    share = size / (size + pace * curve.half_size) * k / (k + pace * curve.half_depth)
    return np.maximum(np.where(cores > 0, busy, 1.0) * share, 1e-4)


def tile_share(
    m: Any,
    n: Any,
    batch: Any,
    cores: Any,
    small: Any,
    smaller: Any,
    smallest: Any,
    idle: Any = 1.0,
) -> Any:
    """Returns the fraction of a GPU's cores that a product of this shape keeps busy.

    A product is divided into tiles, one for a core at a time, so the last round of
    tiles leaves cores idle; smaller tiles leave fewer idle but run slower.

    Args:
        m, n, batch: Rows, columns and count of the products.
        cores: Streaming multiprocessors of the device.
        small, smaller, smallest: Speed of the last three of ``TILES``.
        idle: Part of the last round's idle cores that stays idle; other operations and
            splits of long products use the rest.
    """
    best: Any = 0.0
    for (rows, columns), speed in zip(
        TILES, (1.0, 1.0, small, smaller, smallest), strict=True
    ):
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        whole = np.ceil(tiles / cores)
        rounds = np.maximum(1.0, tiles / cores)
        rounds = rounds + idle * (whole - rounds)
        done = m * n * batch / (rounds * cores * rows * columns)
        best = np.maximum(best, done * speed)
    return best


def write(found: Constants, path: str | os.PathLike[str], sources: str) -> None:
    """Writes constants as the TOML that ``read`` reads.

    Args:
        found: Fitted constants.
        path: Path of the file.
        sources: Names of the runs used for the fit.
    """
    lines = [
        "# What devices deliver of their datasheets' peaks. Written by",
        "#     python scripts/bench_accuracy.py --tables DIR --fit meshes/fitted.toml",
        "# and fitted to measured training steps of these sources:",
        f'sources = "{sources}"',
        "# fitted_constants.py says what each number is; shares are of datasheets.",
        "",
    ]
    for platform, achieved in found.platforms.items():
        lines.append(f"[platforms.{platform}]")
        lines += [
            f"{field.name} = {getattr(achieved, field.name):.4g}"
            for field in dataclasses.fields(achieved)
        ]
        lines.append("")
    lines.append("# What links inside a node deliver.")
    lines.append("[node]")
    lines += [f"{name} = {share:.4g}" for name, share in found.node.items()]
    lines.append("")
    lines.append("# Largest share of the peak that products of a type reach.")
    lines.append("[efficiency]")
    lines += _tables(found.efficiency)
    lines += ["", *_BLOCKS, "[blocks]", *_tables(found.blocks)]
    lines += ["", "# What memory delivers, of the same layers.", "[memory]"]
    lines += [f"{name} = {share:.4g}" for name, share in found.memory.items()]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


_BLOCKS = (
    "# The same share as single layers have it, kernels alone. Written by",
    "#     python scripts/bench_kinds.py --tables DIR --fit meshes/fitted.toml",
    "# and fitted to zorse-profile (github.com/benson-guo/zorse, 2fd6330, 2025).",
)


def _tables(shares: Mapping[tuple[str, str], float]) -> list[str]:
    families: dict[str, list[str]] = {}
    for (family, dtype), share in shares.items():
        families.setdefault(family, []).append(f"{dtype} = {share:.4g}")
    return [f"{name} = {{ {', '.join(v)} }}" for name, v in families.items()]
