"""Measured errors of the memory prediction against compiled programs.

Ratios of compiled to predicted peak memory, of the programs that
``scripts/bench_verify.py`` compares and that are no judges: the edges leave out about
one in twenty on each side. CPUs have no edges: their memory is the host's, which no
compiler refuses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from whalejax.planner.memory.program_patterns import unmeasured
from whalejax.planner.model.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBand:
    """Range of a compiled program's memory, as fractions of the predicted memory.

    Attributes:
        low: Lower end.
        high: Upper end; the excess over 1 is the margin that a plan leaves free.
        unmeasured: Names of the program's patterns that no compiled program had.
    """

    low: float
    high: float
    unmeasured: tuple[str, ...] = ()


_CERTAIN: Final = MemoryBand(low=1.0, high=1.0)
_BANDS: Final = {
    ("tpu", True): MemoryBand(low=0.92, high=1.10),
    ("tpu", False): MemoryBand(low=0.86, high=1.13),
    ("gpu", True): MemoryBand(low=0.94, high=1.10),
    ("gpu", False): MemoryBand(low=0.95, high=1.15),
}
"""By platform, and whether the layers are in a loop. Of GPUs without a loop one program
is left out, with 36 % more than predicted: XLA's scheduler for GPUs computes again
ahead of time where memory is free, and here three quarters of it were."""

_FOREIGN: Final = {
    "tpu": MemoryBand(low=0.77, high=1.25),
    "gpu": MemoryBand(low=0.77, high=1.36),
}
"""By platform, of programs with patterns that none had: as far off as the worst of any
kind that was compiled, and on TPUs no less than by a quarter."""


def memory_band(platform: str, graph: Graph) -> MemoryBand:
    """The band for a loss on a platform.

    Args:
        platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        graph: The captured loss.
    """
    return band_of(
        platform, in_a_loop=graph.layers_in_a_loop, unmeasured=unmeasured(graph)
    )


def band_of(
    platform: str, *, in_a_loop: bool, unmeasured: tuple[str, ...] = ()
) -> MemoryBand:
    """The band of a platform.

    Args:
        platform: Name of the platform, as in ``memory_band``.
        in_a_loop: Layers are computed by a loop, not written out one by one.
        unmeasured: Patterns of the program that no compiled one had.
    """
    if unmeasured and platform in _FOREIGN:
        return replace(_FOREIGN[platform], unmeasured=unmeasured)
    return _BANDS.get((platform, in_a_loop), _CERTAIN)
