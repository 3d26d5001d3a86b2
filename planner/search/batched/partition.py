"""Equal layers cut into the stages of many cases at once.

The cut is exact: the smallest pace at which all layers find a stage, by counting; see
``shares.smallest_pace``. It is apart from ``step_time`` because memory can be judged by
it without timing anything.
"""

from __future__ import annotations

import numpy as np

from whalejax.planner.balance.shares import pieces_at, smallest_pace
from whalejax.planner.model.layer_chain import FIRST, LAST, LAYER
from whalejax.planner.search.batched.cases import PHASES, PLACES, Cases, Group
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import CHUNKS


def pace_of(cases: Cases) -> Array:
    """Cut the layers into stages; seconds of the slowest for one micro-batch."""
    cut_layers(cases)
    return stage_pace(cases)[0]


def ends(cases: Cases, group: Group) -> tuple[Array, Array]:
    """Seconds of one layer on a stage of a group, and of all that is not layers."""
    alone = cases.stage_seconds(group, cases.zeros)
    layer = sum(
        (cases.place_seconds(group.kind, LAYER, p) for p in PHASES), cases.zeros
    )
    return np.maximum(layer, 1e-30), alone


def cut_layers(cases: Cases) -> None:
    """Layers of every group: the most of a stage, and all of its stages' together.

    By computation alone, so that all options of a frame agree in it and its bounds
    hold for them.
    """
    f, total = cases.frames, cases.model.layers
    counts = [g.count * 1.0 for g in cases.groups]
    bare = {
        (kind, place): cases.bare_seconds(kind, place)
        for kind in {g.kind for g in cases.groups}
        for place in PLACES
    }
    seconds = [np.maximum(bare[g.kind, LAYER], 1e-30) for g in cases.groups]
    fixed = [
        g.first * bare[g.kind, FIRST] + g.last * bare[g.kind, LAST]
        for g in cases.groups
    ]
    pace = smallest_pace(counts, seconds, fixed, total)
    most, together = pieces_at(pace, counts, seconds, fixed)
    # What is left over is taken from the first stages that have layers, one from each.
    cases.over = together - total
    slots = f.stage * f.chunks
    even, left = total // slots, total % slots
    rank = cases.zeros
    for g, each in zip(cases.groups, most, strict=True):
        g.most, g.rank = each, rank
        less = np.clip(cases.over - rank, 0.0, g.count) * (each > 0)
        shares = f.chunks * even + -(-np.maximum(0, left - g.index) // f.stage)
        g.layers = np.where(f.chunks > 1, shares, each - (less >= g.count))
        g.layers = np.where(g.count > 0, g.layers, 0.0)
        g.together = np.where(f.chunks > 1, 0.0, g.count * each - less)
        rank = rank + g.count * (each > 0)


def fewest_layers(cases: Cases, group: Group) -> Array:
    """Layers of a group's fullest stage, were they interleaved as suits it best."""
    f, total = cases.frames, cases.model.layers
    found = np.full(cases.number, np.inf)
    for chunks in CHUNKS:
        slots = f.stage * chunks
        shares = chunks * (total // slots) + -(
            -np.maximum(0, total % slots - group.index) // f.stage
        )
        found = np.where(slots <= total, np.minimum(found, shares), found)
    return found


def stage_pace(cases: Cases) -> tuple[Array, Array]:
    """Time of the slowest stage, and the index of its group."""
    times = []
    for g in cases.groups:
        whole = cases.stage_seconds(g, g.layers)
        times.append(np.where(g.count > 0, whole, -1.0))
    table = np.stack(times)
    return table.max(axis=0), table.argmax(axis=0)


def stage_layers(cases: Cases, rows: Array) -> Array:
    """Layers of every part along the pipelines of some cases: (part, case).

    Args:
        cases: the cases, cut.
        rows: indices of cases that agree in stages and chunks.
    """
    f = cases.frames
    stages, chunks = int(f.stage[rows[0]]), int(f.chunks[rows[0]])
    total = cases.model.layers
    if chunks > 1:
        even, left = divmod(total, stages * chunks)
        parts = np.array([even + (part < left) for part in range(stages * chunks)])
        return np.repeat(parts[:, None] * 1.0, len(rows), axis=1)
    found = np.zeros((stages, len(rows)))
    for stage in range(stages):
        for g in cases.groups:
            index, count = g.index[rows], g.count[rows]
            inside = (index <= stage) & (stage < index + count)
            rank = g.rank[rows] + stage - index
            less = (rank < cases.over[rows]) & (g.most[rows] > 0)
            found[stage] += inside * (g.most[rows] - less)
    return found
