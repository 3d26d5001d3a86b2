"""Fractions of the datasheets' peaks that devices reach, fitted to published runs.

Each platform has a set of constants that were fitted to training steps. Efficiencies by
kind and type were fitted to training steps or to single layers. All are read from
``fitted.toml``, which names the data of every number. ``Constants.efficiency_of``
returns the efficiency of a kind in a type. Functions take floats and NumPy arrays.
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
"""Name of 16-bit types for frameworks whose products were fitted separately."""

ASSUMED = 0.7
"""Efficiency of a kind without measured kinds that resemble it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Constants of one platform. Shares are relative to the datasheet.

    Attributes:
        half_depth: Contracted size at which a product reaches half of its speed.
        half_size: Value of ``effective_size`` at which a product reaches half of its
            speed.
        tile_medium, tile_small, tile_smallest: Speed of the last three of ``TILES``,
            relative to the first two.
        tile_idle: Fraction of the cores without a tile in the last round that are idle.
        attention: Fraction of the peak that a fused attention kernel reaches.
        attention_before: Speed factor for each generation by which the attention kernel
            is older than the device.
        attention_half: Sequence length at which an attention kernel reaches half of
            ``attention``.
        unaligned: Speed factor of a product in an eager framework. It applies once for
            each halving of the 16 bytes by which its sizes should be divisible.
        memory: Fraction of the memory bandwidth.
        kernel_seconds: Fixed time of each kernel of a compiled program.
        launch_seconds: Fixed time of each kernel in an eager framework.
        dispatch_seconds: Host time to launch an operation in an eager framework.
        micro_seconds: Host time between two micro-batches in an eager framework.
        jitter_seconds: Delay of the slower of two hosts at a collective.
        blend: Exponent of the smooth maximum of device time and host time.
        node: Fraction of the bandwidth inside a node, or of a torus, for families
            that are not in ``Constants.node``.
        node_seconds: Time in which a collective inside a node reaches its bandwidth.
        network: Fraction of the bandwidth between nodes or slices.
        point: Fraction of the bandwidth, inside or between nodes, that transfers
            between pipeline stages reach.
        ring_seconds: Time of one hop of a reduce-scatter or all-gather over data ranks.
        bucket_bytes: Bytes that one collective over data ranks handles.
        overlap_gradients: Overlapped fraction of the reduction of gradients, if the
            framework overlaps it.
        overlap_parameters: Overlapped fraction of the gathering of parameters.
        overlap_layers: Overlapped fraction of collectives inside layers.
        update_bytes: Bytes that the optimizer moves per parameter.
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
"""Constants that leave the numbers of a measured kind unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Largest share of its peak that a kind reaches in products of a type.

    Attributes:
        share: Share of the peak, from 0 to 1.
        measured: Whether this kind was measured in this type.
        of: Kinds or families whose measurements determine ``share``; empty if it is the
            default.
    """

    share: float
    measured: bool
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All fitted constants.

    Attributes:
        platforms: Constants of each platform, by name.
        efficiency: Largest share of the peak by (family of kinds, type), fitted to
            training steps.
        node: Share of the bandwidth inside a node by family of kinds, where it differs
            from that of the platform.
        blocks: Largest share of the peak by (kind, type), fitted to single layers.
        memory: Share of the memory bandwidth by kind, where it differs from that of the
            platform.
        sources: Names of the runs whose training steps were used for the fit.
    """

    platforms: Mapping[str, Achieved]
    efficiency: Mapping[tuple[str, str], float]
    node: Mapping[str, float] = dataclasses.field(default_factory=dict)
    blocks: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sources: str = ""

    def node_of(self, family: str, platform: str) -> float:
        """Returns the share of the bandwidth that a family reaches inside a node.

        A family without measurements has the share of a similar one.
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

        Measurements of the kind or its family count first. Otherwise it is the mean
        over measured kinds of the same generation, scaled by the power ``POWER`` of
        watts per FLOP/s; or the mean of the fallback generation.

        Args:
            kind: Kind of device.
            dtype: Type in which the kind multiplies: one of ``DTYPES``, or ``TUNED``.
            default: Share if no measured kind is similar; default: ``ASSUMED``.
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
        """Returns the efficiency from measurements of the kind, or of a generation."""
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
        """Returns the mean share of other kinds.

        Shares of the same generation are scaled by power. Generations differ in
        efficiency per watt, so shares of other generations are not.
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
        """Returns the share of its memory bandwidth that a kind reaches.

        A kind without measurements has the share of a similar one.
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
"""Upper limit of the share of the peak after scaling by power."""

_NEAR: Mapping[str, tuple[str, ...]] = {
    "bf16": (TUNED,),
    TUNED: ("bf16",),
    "f8": ("bf16", TUNED),
    "f4": ("f8", "bf16", TUNED),
    "tf32": ("bf16", TUNED),
    "f32": ("bf16", TUNED),
}
"""Types whose efficiency a kind has in a type without measurements."""

_TYPE = {TUNED: "bf16"}


def _generation(name: str) -> str:
    generation = rating_of(name)
    return generation.generation if generation is not None else ""


def _line(generation: str) -> Iterator[str]:
    while generation:
        yield generation
        generation = STANDS_IN.get(generation, "")


def width_of(dtype: str) -> str:
    """Returns the type under which efficiencies are recorded, such as bf16 for f16."""
    wide = {"f32": "f32", "f64": "f32"}
    kept = ("tf32", "f8", "f4", TUNED)
    return wide.get(dtype, dtype if dtype in kept else "bf16")


@functools.cache
def constants() -> Constants:
    """Returns the constants of ``fitted.toml``."""
    return read(tomllib.loads(_text()))


def _text() -> str:
    package = importlib.resources.files("whalejax.meshes")
    return (package / "fitted.toml").read_text(encoding="utf-8")


def read(data: Mapping[str, Any]) -> Constants:
    """Returns the constants in the data of a TOML file."""
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
"""FLOP/s of one core of an A100 in 16 bits, for which sizes were fitted."""


def pace_of(peak_flops: Any, cores: Any) -> Any:
    """Returns the speed of a core relative to the core for which sizes were fitted.

    A tile has fixed times at its start and end, so a faster core needs longer products
    to reach the same share of its peak.

    Args:
        peak_flops: Peak FLOP/s of the device in one type.
        cores: Number of cores of the device.
    """
    return np.where(cores > 0, peak_flops / np.maximum(1.0, cores) / CORE, 1.0)


def shape_share(
    m: Any, k: Any, n: Any, batch: Any, cores: Any, curve: Any, pace: Any = 1.0
) -> Any:
    """Returns the share of the largest speed that a product of this shape reaches.

    Args:
        m, k, n: Sizes of an (m, k) times (k, n) product.
        batch: Number of products in one operation.
        cores: Number of cores that compute tiles; 0 if tiles do not matter.
        curve: ``Achieved`` of the platform, or an object with arrays as its fields.
        pace: Relative speed of a core; see ``pace_of``.
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

    A product is divided into tiles, and a core computes one tile at a time. In the last
    round some cores have no tile. Smaller tiles leave fewer cores idle, but run slower.

    Args:
        m, n, batch: Rows, columns and count of the products.
        cores: Streaming multiprocessors of the device.
        small, smaller, smallest: Speed of the last three of ``TILES``.
        idle: Fraction of the cores without a tile in the last round that are idle;
            other operations and splits of long products use the others.
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
    """Writes constants to a TOML file for ``read``.

    Args:
        found: Fitted constants.
        path: Path of the file.
        sources: Names of the runs that were used for the fit.
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
