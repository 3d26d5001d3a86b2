"""Data-parallel replicas on unlike devices: who takes how many micro-batches.

Every replica is weighed as if all were of its kind; the shares are the integers with
which the last replica's micro-batches are done as early as can be. They are the most
that a replica of a kind takes: where they do not add up, some take one less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whalejax.planner.balance.shares import pieces_at, smallest_pace
from whalejax.planner.search.batched.cases import Cases, Model, Placement
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import Frames
from whalejax.planner.search.batched.partition import pace_of
from whalejax.planner.search.batched.step_time import (
    CaseCosts,
    least_after,
    least_fill,
    settle,
    weigh,
)


class ReplicaCases:
    """Cases whose replicas lie on unlike devices and take unlike shares.

    Attributes:
        kinds: the cases, as if all replicas were of one kind.
        numbers: replicas of each kind.
        seconds: of a micro-batch on one of each kind, at its slowest stage.
        shares: micro-batches of one replica of each kind, such that the last one is
            done as early as can be.
    """

    def __init__(self, model: Model, frames: Frames, placement: Placement) -> None:
        self.frames = frames
        self.kinds = [Cases(model, frames, placement, k) for k in placement.kinds]
        each = frames.stage * frames.fsdp
        for axis in ("expert", "context", "tensor"):
            each = each * self.kinds[0].mesh[axis]
        self.seconds = seconds = [pace_of(cases) for cases in self.kinds]
        self.numbers = numbers = [n / each for n in placement.counts]
        none = [np.zeros(len(frames))] * len(seconds)
        total = frames.micro_batches
        self.makespan = smallest_pace(numbers, seconds, none, total)
        self.shares, _ = pieces_at(self.makespan, numbers, seconds, none)

    def least_step(self, zeros: Sequence[int]) -> Array:
        """A lower bound: the best shares, the end of a pipeline and an update for each.

        Options make no pace shorter, and longer paces end no split earlier.
        """
        one, total = np.ones(len(self.frames)), self.frames.micro_batches
        pairs = zip(self.kinds, self.seconds, strict=True)
        fixed = [
            least_fill(cases, pace, total) + least_after(cases, zeros, one)
            for cases, pace in pairs
        ]
        return smallest_pace(self.numbers, self.seconds, fixed, total)

    def weigh(self, *, exact: bool = False) -> CaseCosts:
        """The slowest kind's time, the fullest kind's memory, and whether all fit."""
        parts = []
        for cases, share in zip(self.kinds, self.shares, strict=True):
            counts = np.maximum(1.0, share)
            parts.append(weigh(cases, counts))
            if exact:
                settle(cases, parts[-1], np.arange(len(self.frames)), counts)
        slowest = np.stack([w.step for w in parts]).argmax(axis=0)
        fullest = np.stack([w.memory_bytes for w in parts]).argmax(axis=0)
        column = np.arange(len(self.frames))

        def pick(values: list[Array], chosen: Array) -> Array:
            found: Array = np.stack(values)[chosen, column]
            return found

        names = parts[0].time, parts[0].memory
        return CaseCosts(
            pace=pick([w.pace for w in parts], slowest),
            pipeline=pick([w.pipeline for w in parts], slowest),
            after=pick([w.after for w in parts], slowest),
            time={n: pick([w.time[n] for w in parts], slowest) for n in names[0]},
            memory={n: pick([w.memory[n] for w in parts], fullest) for n in names[1]},
            fits=np.stack([w.fits for w in parts]).all(axis=0)
            & (np.stack(self.shares).min(axis=0) >= 1),
            wire=sum((w.wire for w in parts), np.zeros(1)),
            host=pick([w.host for w in parts], fullest),
        )

    def counts(self) -> list[tuple[int, ...]]:
        """Micro-batches of one replica of each kind, for every case."""
        return [tuple(int(k[i]) for k in self.shares) for i in range(len(self.frames))]
