"""Measured errors of the memory prediction against compiled programs.

A band is a range of ratios of compiled to predicted peak memory. It covers about nine
in ten of the programs that ``scripts/bench_verify.py`` compares, apart from programs
that only test the bands. CPUs have no band, as they use host memory, which compilers do
not limit. Programs with sorts, loops over time or mostly tables contain parts that no
compared program had. The error of their prediction is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from whalejax.planner.model.graph import CONVOLUTION, Graph, rereads
from whalejax.planner.sharding.parameter_layout import are_most, looked_up_tables


_BY_KIND: Final = {
    "sort": "sorts",
    "top_k": "sorts",
    "approx_top_k": "sorts",
    "ragged_dot_general": "ragged products",
    "while": "while loops",
    "fft": "Fourier transforms",
    **dict.fromkeys(
        "cholesky lu qr svd eigh eig triangular_solve schur".split(), "linear algebra"
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), "running sums"
    ),
}
"""Names of patterns by kind of operation."""

MEASURED: Final = frozenset(("2-D convolutions", "3-D convolutions"))
"""Patterns of compared programs; programs without patterns were compared too."""


def patterns(graph: Graph) -> frozenset[str]:
    """Returns the names of the unusual parts of a program, its patterns.

    Args:
        graph: Captured loss.

    Returns:
        Names such as ``"2-D convolutions"`` or ``"sorts"``; empty for programs of
        products, attention and elementwise operations.
    """
    result = {_BY_KIND[op.kind] for op in graph.ops if op.kind in _BY_KIND}
    for op in graph.ops:
        if op.kind == CONVOLUTION:
            rank = len(graph.tensors[op.operands[0]].shape) - 2
            result.add(f"{rank}-D convolutions")
    result |= {f"{name} (which has no rule)" for name in graph.unknown_primitives}
    times = rereads(graph, graph.weight_tensors())
    products = (n for op, n in zip(graph.ops, times, strict=True) if op.matmul)
    if any(n > 1 for n in products):
        result.add("weights that every turn of a loop reads")
    if are_most(looked_up_tables(graph), graph.params):
        result.add("tables that hold most parameters")
    return frozenset(result)


def unmeasured(graph: Graph) -> tuple[str, ...]:
    """Returns the sorted patterns of a program that no compared program had."""
    return tuple(sorted(patterns(graph) - MEASURED))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBand:
    """Range of a compiled program's memory, as fractions of the predicted memory.

    Attributes:
        low: Lower end of the range.
        high: Upper end of the range; a plan leaves its excess over 1 free.
        unmeasured: Patterns of the program that no compared program had.
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
"""Bands by platform, and by whether the layers are in a loop. The band of GPUs without
a loop excludes one program, which needs 36% more than predicted. XLA's GPU scheduler
recomputes early if memory is free, and three quarters were free for this program.
"""

_FOREIGN: Final = {
    "tpu": MemoryBand(low=0.77, high=1.25),
    "gpu": MemoryBand(low=0.77, high=1.36),
}
"""Bands by platform for programs with unmeasured patterns. They include the worst of
all compared programs, and on TPUs a quarter more than predicted.
"""


def memory_band(platform: str, graph: Graph) -> MemoryBand:
    """Returns the band for a loss on a platform.

    Args:
        platform: Name of the platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        graph: Captured loss.
    """
    return band_of(
        platform, in_a_loop=graph.layers_in_a_loop, unmeasured=unmeasured(graph)
    )


def band_of(
    platform: str, *, in_a_loop: bool, unmeasured: tuple[str, ...] = ()
) -> MemoryBand:
    """Returns the band of a platform.

    Args:
        platform: Name of the platform, as in ``memory_band``.
        in_a_loop: Whether the layers are in a loop, instead of unrolled.
        unmeasured: Patterns of the program that no compared program had; default: none.
    """
    if unmeasured and platform in _FOREIGN:
        return replace(_FOREIGN[platform], unmeasured=unmeasured)
    return _BANDS.get((platform, in_a_loop), _CERTAIN)
