"""Reads the data of the catalogue that estimate the efficiency of unmeasured kinds.

An unmeasured kind has the efficiency of measured kinds of its generation, scaled by a
power of its watts per FLOP/s. ``catalogue`` imports this module, because its kinds need
efficiencies.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from whalejax.meshes.dtypes import FALLBACKS


class RatedDevice(Protocol):
    """Fields of a device kind that determine its efficiency."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def watts(self) -> float | None: ...
    @property
    def flops_per_second(self) -> tuple[tuple[str, float], ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetRating:
    """Fields of a kind's data sheet that determine its efficiency.

    Attributes:
        name, platform, generation: Fields of ``DeviceKind``, unchanged.
        watts: Power of the board; None without a source.
        flops_per_second: (type, dense peak) pairs.
    """

    name: str
    platform: str
    generation: str
    watts: float | None
    flops_per_second: tuple[tuple[str, float], ...]

    @property
    def family(self) -> str:
        """Name without its variant: ``"a100"`` of ``"a100-80"``."""
        return self.name.partition("-")[0]


POWER = 0.4
"""Exponent of watts per FLOP/s in the ratio of two kinds' efficiencies.

Boards with little power for their peak are less efficient. For instance, the data sheet
of H100 gives 756 TFLOP/s at 350 W and 989 at 700 W. L4 and L40S, and A10G and RTX
A6000, differ in the same way.
"""

STANDS_IN: Mapping[str, str] = {
    "pascal": "volta",
    "turing": "volta",
    "ga10x": "ampere",
    "ada": "ga10x",
    "gb20x": "ada",
    "hopper": "ampere",
    "blackwell": "hopper",
    "rdna2": "ga10x",
    "cdna2": "ampere",
    "cdna3": "hopper",
    "cdna4": "hopper",
    "tpu7": "tpu6",
}
"""Generation whose measurements replace those that a generation lacks."""


def watts_ratio(one: RatedDevice, other: RatedDevice, dtype: str) -> float:
    """Returns the ratio of two kinds' watts per FLOP/s; 1 if unknown."""
    mine, theirs = (_peak(kind, dtype) for kind in (one, other))
    if not (one.watts and other.watts and mine and theirs):
        return 1.0
    return (one.watts / mine) / (other.watts / theirs)


def _peak(kind: RatedDevice, dtype: str) -> float:
    """Returns the peak in a type, or in its fallback; 0 if there is none."""
    peaks = dict(kind.flops_per_second)
    return next((peaks[d] for d in FALLBACKS.get(dtype, (dtype,)) if d in peaks), 0.0)


def rating_of(name: str) -> DatasheetRating | None:
    """Returns a kind by its name, or the first of a family; None if there is none."""
    known = ratings()
    if name in known:
        return known[name]
    return next((one for one in known.values() if one.family == name), None)


@functools.cache
def ratings() -> Mapping[str, DatasheetRating]:
    """Returns every kind of the catalogue by its name."""
    return {
        name: DatasheetRating(
            name=name,
            platform=table["platform"],
            generation=table.get("generation", ""),
            watts=float(table["watts"]) if "watts" in table else None,
            flops_per_second=tuple(table["flops_per_second"].items()),
        )
        for name, table in catalogue_data()["kinds"].items()
    }


@functools.cache
def catalogue_data() -> Mapping[str, Any]:
    """Returns the catalogue's tables."""
    return tomllib.loads(catalogue_text())


def catalogue_text() -> str:
    """Returns the catalogue as text."""
    package = importlib.resources.files("whalejax.meshes")
    return (package / "device_kinds.toml").read_text(encoding="utf-8")
