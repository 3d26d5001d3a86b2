"""Rates of links under many meshes, each worked out once in a search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import Spans, spans_of
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import ORDERS
from whalejax.planner.sharding.layout import GRID_AXES


_INNERMOST = np.array([[GRID_AXES.index(a) for a in reversed(o)] for o in ORDERS])
"""For each order, its axes innermost first, as indices into ``GRID_AXES``."""

Rates = tuple[Array, Array]
"""Seconds for each payload byte and for each time, of every mesh."""


class Wires:
    """What collectives take on the meshes of one cluster that were asked about.

    Args:
        cluster: the machine.
        like: of another one, whose meshes are likely to be asked about.
    """

    def __init__(self, cluster: Cluster, like: Wires | None = None) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, ...], int] = {}
        self._sizes = np.zeros((len(GRID_AXES), 0), dtype=np.int64)
        self._orders = np.zeros(0, dtype=np.int64)
        if like is not None:
            self._known = dict(like._known)
            self._sizes, self._orders = like._sizes, like._orders
        self._rates: dict[tuple[str, tuple[str, ...]], Rates] = {}

    def places(self, sizes: Array, orders: Array) -> Array:
        """Where meshes stand among those that are known; from now on they are.

        Args:
            sizes: (axis, mesh), axes as in ``GRID_AXES``; no mesh twice.
            orders: indices into ``ORDERS``.
        """
        known, before = self._known, len(self._known)
        keys = zip(*sizes.tolist(), orders.tolist(), strict=True)
        found = np.array([known.setdefault(k, len(known)) for k in keys], dtype=int)
        new = found >= before
        if new.any():
            self._sizes = np.concatenate([self._sizes, sizes[:, new]], axis=1)
            self._orders = np.concatenate([self._orders, orders[new]])
        return found

    def rates(
        self, kind: str, axes: tuple[str, ...], priced: Callable[[Spans], Rates]
    ) -> Rates:
        """Seconds for each byte and for each time, on every mesh that is known.

        Args:
            kind: of collective.
            axes: of the mesh; some.
            priced: what it costs from the spans of the axes.
        """
        found = self._rates.get((kind, axes))
        start = 0 if found is None else len(found[0])
        if found is None or start < len(self._orders):
            spans = spans_of(axes, self._ordered(start), GRID_AXES, self._cluster)
            more = priced(spans)
            if found is not None:
                byte, time = (np.concatenate(p) for p in zip(found, more, strict=True))
                more = byte, time
            self._rates[kind, axes] = found = more
        return found

    def _ordered(self, start: int) -> list[tuple[Array, Array]]:
        """Axes of meshes innermost first, and their sizes."""
        sizes = self._sizes[:, start:]
        each = np.arange(sizes.shape[1])
        return [(a, sizes[a, each]) for a in _INNERMOST[self._orders[start:]].T]
