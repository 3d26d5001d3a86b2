"""Bytes of parameters as they are stored, for many meshes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whalejax.planner.variants import Array


@dataclass(slots=True)
class Held:
    """Parameters of one place as they are stored; bytes on one device, all layers.

    Pairs are without and with ZeRO's shards of it.

    Attributes:
        params: stored.
        gradients, state, moved: gradients, optimizer state, and what the update moves.
        gathers, updates: (payload, times) of gathers over ``fsdp`` in a micro-batch and
            over ``data`` after the update.
        copies: casts of what is not gathered.
        gathered, fresh: largest leaf: as gathered, and its gradient.
    """

    params: Array
    gradients: list[Array]
    state: list[Array]
    moved: list[Array]
    gathers: list[Array]
    updates: list[Array]
    copies: Array
    gathered: list[Array]
    fresh: list[Array]

    @classmethod
    def empty(cls, number: int) -> Held:
        """Nothing is stored."""
        zero = np.zeros(number)
        return cls(
            params=zero,
            gradients=[zero, zero],
            state=[zero, zero],
            moved=[zero, zero],
            gathers=[zero, zero],
            updates=[zero, zero],
            copies=zero,
            gathered=[zero, zero],
            fresh=[zero, zero],
        )

    def expanded(self, index: Array) -> Held:
        """The same at other rows."""
        found: dict[str, Any] = {}
        for name in Held.__slots__:
            value = getattr(self, name)
            many = isinstance(value, list)
            found[name] = [v[index] for v in value] if many else value[index]
        return Held(**found)
