"""On which kinds of devices the stages or replicas of many cases lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whalejax.planner.search.batched.layout_variants import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which kinds of devices stages or replicas lie on.

    Attributes:
        by: ``"all"`` (every share is alike; the slowest kind sets the pace),
            ``"stages"`` or ``"replicas"``.
        kinds: indices into the cluster's kinds, in the order of stages or replicas.
        counts: devices of each.
    """

    by: str
    kinds: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(slots=True)
class Group:
    """Stages of one kind of device that are alike, for every case.

    Attributes:
        kind: index into the cluster's kinds.
        count: how many; 0 where a case has none.
        index: the first of them along the pipeline.
        first, last: it holds that end of the model.
        layers: of its fullest stage.
        most: of each stage, before what is left over is taken from the first stages.
        rank: stages before it that have layers.
        together: of all its stages.
    """

    kind: int
    count: Array
    index: Array
    first: Array
    last: Array
    layers: Array = field(default_factory=lambda: np.zeros(0))
    most: Array = field(default_factory=lambda: np.zeros(0))
    rank: Array = field(default_factory=lambda: np.zeros(0))
    together: Array = field(default_factory=lambda: np.zeros(0))
