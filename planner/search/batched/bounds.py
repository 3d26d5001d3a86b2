"""Lower bounds on frames (a mesh with its schedule), by step time and by memory.

A frame's bound is refined in steps: first for any order of axes and any schedule, then
for its own. It includes what memory makes necessary: where activations do not stay on
the device, they are computed again or moved, and both take time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from whalejax.planner.search.batched.cases import Cases, Model, Placement
from whalejax.planner.search.batched.fits import (
    ACTIVATIONS,
    FrameOptions,
    alike,
    paying,
)
from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import CHUNKS, Frames
from whalejax.planner.search.batched.partition import cut_layers
from whalejax.planner.search.batched.peak import fits_of, keeps_of, may_hold_residents
from whalejax.planner.search.batched.replicas import ReplicaCases
from whalejax.planner.search.batched.step_time import least_step
from whalejax.planner.search.ranking import Tally


SAMPLE, WORTH = 64, 0.8
"""Of so many frames at least this part stays where a sieve is not worth its time."""


class Sieve:
    """What no plan with a frame can beat, and whether memory may hold it.

    Attributes:
        model: of one search.
        ideal: the same, were all links as the fastest.
        options: what every frame is weighed with.
        tally: of the search.
        slack: by which part cases may be slower than the best, and count.
    """

    def __init__(
        self,
        model: Model,
        ideal: Model,
        options: FrameOptions,
        tally: Tally,
        slack: float,
    ) -> None:
        self.model, self.ideal = model, ideal
        self.options, self.tally, self.slack = options, tally, slack

    @property
    def limit(self) -> float:
        """Step time above which a case is not among the best."""
        return self.tally.best * (1 + self.slack)

    def refined(
        self, placement: Placement, frames: Frames, least: Array
    ) -> tuple[Frames, Array]:
        """Frames and tighter bounds on them; infinite where memory never holds one.

        They hold for every order of axes, every schedule and all options.
        """

        def bound(some: Frames) -> Array:
            return self.least_step(placement, some, self.ideal, any_schedule=True)

        least = np.maximum(least, bound(frames))
        if self.model.exact is not None:  # It is asked of those that are fast enough.
            return frames, least
        quick = np.flatnonzero(least <= self.limit)
        least[quick[~self._spared(placement, frames.take(quick))]] = np.inf
        keeps = functools.partial(self._keeps, placement)
        return paying(frames, least, self.options, self.limit, keeps, bound)

    def _spared(self, placement: Placement, frames: Frames) -> Array:
        """Which frames memory may hold, under the options that spare most of it.

        Where a sample says that it holds most of them, the rest is not looked at.
        """
        # Sharded optimizer state never takes more; sharded gradients may, a little.
        zeros, corners = self.options.zeros[-2:], self.options.corners

        def spared(some: Frames) -> Array:
            corner = some.with_options([0], zeros, corners)
            fits = self.may_fit(placement, corner, any_cut=True, any_policy=True)
            return np.asarray(fits.reshape(len(some), -1).any(axis=1))

        if not len(frames):
            return np.zeros(0, dtype=bool)
        each = len(frames) // SAMPLE
        if each > 1:
            some = frames.take(np.arange(0, len(frames), each))
            if spared(some).mean() >= WORTH:
                return np.ones(len(frames), dtype=bool)
        return spared(frames)

    def _keeps(self, placement: Placement, frames: Frames) -> Array:
        """Which frames memory may hold with nothing computed again or moved.

        What the backward pass does not read may lie in host memory.
        """
        options = self.options
        first, *_ = options.remats
        stay = self.may_fit(
            placement, frames.with_options([first], [0], [0]), alone=True
        )
        others = sorted({bits & ~ACTIVATIONS for bits in options.corners})
        kept = frames.take(stay).with_options([first], options.zeros[-2:], others)
        if len(kept):
            fits = self.may_fit(placement, kept, any_cut=True)
            stay[stay] = fits.reshape(stay.sum(), -1).any(axis=1)
        return stay

    def scheduled(
        self, placement: Placement, frames: Frames, least: Array
    ) -> tuple[Frames, Array]:
        """Frames with their orders and schedules, and tighter bounds on them."""
        if self.model.exact is not None:
            return frames, least
        first = self.options.remats[:1]

        def bound(some: Frames) -> Array:
            return self.least_step(placement, some, self.model)

        def keeps(some: Frames) -> Array:
            unlike, inverse = alike(some)
            one = some.take(unlike).with_options(first, [0], [0])
            found: Array = self.may_fit(placement, one, alone=True)[inverse]
            return found

        return paying(frames, least, self.options, self.limit, keeps, bound)

    def least_step(
        self,
        placement: Placement,
        frames: Frames,
        model: Model,
        *,
        any_schedule: bool = False,
    ) -> Array:
        """A lower bound on the step time of frames, whatever their options.

        Args:
            placement: kinds of devices.
            frames: nothing computed again, nothing in host memory.
            model: with ``self.ideal`` it holds for every order of axes.
            any_schedule: it holds for every schedule and for both kinds of attention.
        """
        self.tally.weighed += len(frames)
        chunks = frames.chunks
        if any_schedule:
            frames = dataclasses.replace(frames, ring=np.ones_like(frames.ring))
            most = np.minimum(max(CHUNKS), self.model.layers // frames.stage)
            if placement.by == "all":
                chunks = np.maximum(1, most)
        if placement.by == "replicas":
            return ReplicaCases(model, frames, placement).least_step(self.options.zeros)
        cases = Cases(model, frames, placement, None)
        cut_layers(cases)
        return least_step(
            cases,
            chunks,
            self.options.zeros,
            frames.micro_batches,
            scheduled=not any_schedule,
        )

    def may_fit(
        self,
        placement: Placement,
        some: Frames,
        *,
        hosts: bool = False,
        any_cut: bool = False,
        any_policy: bool = False,
        alone: bool = False,
    ) -> Array:
        """Which frames memory holds; of replicas, with one micro-batch each.

        Args:
            placement: kinds of devices.
            some: frames.
            hosts: that of hosts too.
            any_cut, any_policy: as for ``fits_of``.
            alone: were activations all.
        """
        kinds: Sequence[int | None] = (None,)
        parts = some.micro_batches
        if placement.by == "replicas":
            kinds, parts = placement.kinds, np.ones_like(parts)
        fits = np.ones(len(some), dtype=bool)
        for kind in kinds:
            cases = Cases(self.model, some, placement, kind)
            if self.model.exact is not None:
                fits &= may_hold_residents(cases)
                continue
            if alone:
                fits &= keeps_of(cases, parts)
                continue
            fits &= fits_of(cases, parts, hosts, any_cut=any_cut, any_policy=any_policy)
        return fits
