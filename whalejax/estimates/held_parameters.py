"""Parameters on the devices of a run, and the links of their collectives.

``step_model`` computes their time, for many runs at once, so sizes are arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whalejax.meshes.catalogue import CatalogueEntry


Array = np.ndarray
Axes = tuple[str, ...]
COPIES: Axes = ("context", "fsdp", "data")
SHARDS: Axes = ("context", "fsdp")
REPLICAS: Axes = ("data",)
GROUPS = (COPIES, SHARDS, REPLICAS)
"""Axes over which parameters are replicated, over which ZeRO-3 shards them, and over
which these shards are replicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameters:
    """One kind of parameters on every run's device, as used in computation.

    Attributes:
        params: Number of parameters.
        copies: Number of devices that compute with the same ones.
        shards: Number of ZeRO-3 shards of these.
        levels: Number of devices per node, and of nodes, by axes.
    """

    params: Array
    copies: Array
    shards: Array
    levels: dict[Axes, Array]

    def owners(self, zero: Array) -> Array:
        """Returns the number of devices over which ZeRO shards one copy."""
        whole = np.where(zero >= 1, self.copies, 1.0)
        owners: Array = np.where((zero >= 3) & (self.shards > 1), self.shards, whole)
        return owners


def link_waits(
    found: CatalogueEntry,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (base, hop) seconds inside a node or torus, and between them."""
    inner = found.torus.link if found.torus is not None else found.node
    outer = found.network or inner
    assert inner is not None and outer is not None
    return (
        (inner.base_seconds, inner.hop_seconds),
        (outer.base_seconds, outer.hop_seconds),
    )
