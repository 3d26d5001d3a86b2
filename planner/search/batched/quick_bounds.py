"""Cheap lower bounds on the step time of frames (a mesh with its schedule).

The wide search takes frames in the order of these bounds, so that a good plan comes
early and what can no longer be better is never looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.pipeline.simulate import any_cut_share
from whalejax.planner.search.batched.cases import PHASES, PLACES, Model, Placement
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import CHUNKS, Frames


def promise(
    model: Model, ideal: Cluster, placement: Placement, frames: Frames, batch: int
) -> Array:
    """A lower bound on the step time of frames, whatever their options; seconds.

    Args:
        model: priced cells.
        ideal: the cluster, were all links the fastest.
        placement: kinds of devices.
        frames: of any options.
        batch: samples of a step.
    """
    cells = model.cells
    speed = np.zeros(len(cells[Column("samples")]))
    wire = _wire_seconds(model, ideal)
    for kind, number in _devices(model.cluster, placement):
        seconds = wire.copy()
        for home, place in itertools.product(model.policies[0], PLACES):
            for phase in (*PHASES, *_again(model, home)):
                seconds = seconds + cells.get(Column(phase, home, place, kind), 0.0)
            launches = cells.get(Column("launches", home, place), 0.0)
            launch = model.cluster.kinds[kind].launch_seconds
            seconds = seconds + launches * launch
        speed = speed + number / seconds
    inner = cells[Column("tensor")] * cells[Column("context")]
    found: Array = (batch * inner / cells[Column("samples")] / speed)[frames.cell]
    if placement.by == "all":
        parts, stages = frames.micro_batches, frames.stage
        most = np.clip(model.layers // stages, 1, max(CHUNKS))
        found = found * stages / parts * any_cut_share(parts, stages, most)
    return found


def _again(model: Model, home: int) -> list[str]:
    """What a TaskGraph computes again under every policy there is."""
    first, *others = model.policies
    again = {"full": ["forward"], "named": ["forward"], "dots": ["again"]}
    return [] if others else again.get(first[home], [])


def _devices(cluster: Cluster, placement: Placement) -> Iterator[tuple[int, int]]:
    """Kinds that work, and how many devices of each."""
    if placement.by == "all":
        yield cluster.kinds.index(cluster.slowest), sum(placement.counts)
    else:
        yield from zip(placement.kinds, placement.counts, strict=True)


def _wire_seconds(model: Model, ideal: Cluster) -> Array:
    """Seconds of the collectives inside a stage, were all links the fastest."""
    cells = model.cells
    (fastest,) = (v.bandwidth_bytes_per_second for v in ideal.levels)
    found = np.zeros(len(cells[Column("samples")]))
    for column, nbytes in cells.items():
        if column.what == "bytes" and "tensor" in column.axes[:1]:
            size = cells[Column("tensor")]
            rounds = 2 if column.collective == "all-reduce" else 1
            found = found + rounds * nbytes * (size - 1) / size / fastest
    return found
