"""Adasum in float64 by numpy, as it is defined: what the lowering is held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from whalejax.lowering.spmd.adasum import adasum_reduce
from whalejax.planner.sharding.layout import Spec


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two tensors combined."""
    dot, one, other = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    first = 1 - (dot / (2 * one) if one else 0.0)
    second = 1 - (dot / (2 * other) if other else 0.0)
    return first * a + second * b


def scaled_pair(a: np.ndarray, b: np.ndarray, i: int, j: int) -> np.ndarray:
    """Of a·2^i and b·2^j, over the larger of both powers."""
    dot, one, other = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    first = a - (dot / (2 * other) if other else 0.0) * b
    second = b - (dot / (2 * one) if one else 0.0) * a
    # A rank that is zero has no scale.
    top = max(p for p, norm in ((i, one), (j, other), (min(i, j), 1)) if norm)
    shift = top - max(i, j)
    return np.ldexp(np.ldexp(first, i - top) + np.ldexp(second, j - top), shift)


def tree(tensors: Iterable[Any]) -> np.ndarray:
    """Tensors of ranks combined, with zeros up to the next power of two."""
    every = [np.asarray(x, np.float64) for x in tensors]
    full = 1 << (len(every) - 1).bit_length()
    every += [np.zeros_like(every[0])] * (full - len(every))
    while len(every) > 1:
        every = [pair(*every[i : i + 2]) for i in range(0, len(every), 2)]
    return every[0]


def reference(stacked: Any, slices: int = 1) -> np.ndarray:
    """A parameter of all ranks, (rank, …), combined layer by layer."""
    if slices == 1:
        return tree(stacked)
    return np.stack([tree([x[i] for x in stacked]) for i in range(slices)])


def difference(found: Any, expected: np.ndarray, slices: int = 1) -> float:
    """The largest difference of a tensor, relative to its norm."""
    cut = zip(
        np.reshape(np.asarray(found, np.float64), (slices, -1)),
        np.reshape(expected, (slices, -1)),
        strict=True,
    )
    return max(
        float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-300)) for x, y in cut
    )


def differ(array: jax.Array) -> int:
    """How many devices have other bits of a part than the first that holds it."""
    first: dict[str, bytes] = {}
    wrong = 0
    for shard in array.addressable_shards:
        own = np.asarray(shard.data).tobytes()
        wrong += first.setdefault(str(shard.index), own) != own
    return wrong


def on_devices(
    stacked: Sequence[np.ndarray],
    slices: Sequence[int],
    *,
    specs: Sequence[Spec] | None = None,
    mesh: dict[str, int] | None = None,
    weights: Sequence[float] | None = None,
    node: int = 1,
) -> list[jax.Array]:
    """What devices make of tensors, (rank, …)."""
    ranks = len(stacked[0])
    sizes = mesh or {"data": ranks}
    count = int(np.prod([*sizes.values()]))
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    kinds = (AxisType.Auto,) * len(sizes)
    there = Mesh(devices, tuple(sizes), axis_types=kinds)
    laid = specs or [((),) * (x.ndim - 1) for x in stacked]
    by = (
        np.ones(ranks, np.float32)
        if weights is None
        else np.asarray(weights, np.float32)
    )

    def run(stacked: Sequence[Any], by: Any) -> list[Any]:
        return adasum_reduce(stacked, by, laid, slices, there, node=node)

    found: list[jax.Array] = jax.jit(run)([*stacked], by)
    return found
