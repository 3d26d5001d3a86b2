"""Which options of frames fit in memory, so that only those are timed.

Memory does not depend on the order of the axes over links, and most options of a large
model do not fit. So frames that differ in their order alone are looked at once, and
only what fits is given back. Host memory is used only where nothing fits without, and
no more of it than is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.search.batched.mesh_grid import Frames, stacked
from whalejax.planner.search.batched.step_time import CaseCosts
from whalejax.planner.sharding.shard_counts import distinct_columns
from whalejax.planner.terms import OFFLOADS


PARAMS = 1 << OFFLOADS.index("params")
ACTIVATIONS = 1 << OFFLOADS.index("activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOptions:
    """What is weighed for every frame.

    Attributes:
        remats: combinations of policies.
        zeros: levels over ``data``.
        lightest: of these, each that computes something again, and of which no other
            computes a part.
        offloads: sets of what lies in host memory, least first; bits of ``OFFLOADS``.
    """

    remats: Sequence[int]
    lightest: Sequence[int]
    zeros: Sequence[int]
    offloads: Sequence[int]

    @property
    def corners(self) -> list[int]:
        """Sets that spare devices most.

        Parameters in host memory pass through two layers' worth of the device's.
        """
        most = self.offloads[-1]
        return sorted({most, most & ~PARAMS})


def paying(
    frames: Frames,
    least: Array,
    options: FrameOptions,
    limit: float,
    keeps: Callable[[Frames], Array],
    bound: Callable[[Frames], Array],
) -> tuple[Frames, Array]:
    """Tighter bounds on frames, with what memory makes them do.

    Where memory does not hold what the backward pass reads, some of that is computed
    again or waits in host memory, and either takes time.

    Args:
        frames: what they do already is known to be what they must.
        least: lower bounds on their step times.
        options: for each of them.
        limit: bounds above it need not be tighter.
        keeps: which frames memory of devices may hold, nothing of that done.
        bound: on the step times of frames, with what they do.

    Returns:
        The frames, and their bounds. Where there is one way that may stay within the
        limit, a frame has that way's options.
    """
    known = (frames.remat > 0) | (frames.offload > 0)
    asked = np.flatnonzero((least <= limit) & ~known)
    asked = asked[~keeps(frames.take(asked))] if len(asked) else asked
    if not len(asked):
        return frames, least
    first, *_ = options.remats
    ways = [(first, ACTIVATIONS)] * any(b & ACTIVATIONS for b in options.offloads)
    ways += [(policy, 0) for policy in options.lightest]
    if not ways:
        least[asked] = np.inf
        return frames, least
    few = frames.take(asked)
    each = np.stack([bound(few.with_options([a], [0], [bits])) for a, bits in ways])
    least[asked] = np.maximum(least[asked], each.min(axis=0))
    alone = (each <= limit).sum(axis=0) == 1
    which = np.array(ways)[each.argmin(axis=0)[alone]]
    frames.remat[asked[alone]], frames.offload[asked[alone]] = which.T
    return frames, least


def weigh_options(
    frames: Frames,
    options: FrameOptions,
    worth: Callable[[Frames], Array],
    may_fit: Callable[[Frames, bool], Array],
    weigh: Callable[[Frames], CaseCosts],
    *,
    exact: bool,
) -> Iterator[tuple[Frames, CaseCosts]]:
    """Weigh frames under the options that fit, with the least in host memory.

    Args:
        frames: nothing computed again, nothing in host memory; they may be among the
            best as they are.
        options: for each of them.
        worth: which frames may be, with what they compute again.
        may_fit: which frames memory may hold; with or without that of the hosts.
        weigh: what they cost, and which of them fit.
        exact: what may fit does.

    Yields:
        What needs least in host memory, and its cost; then what needs more.
    """
    first, inverse = alike(frames)
    start, *offloads = options.offloads
    table = frames.take(first).with_options(options.remats, options.zeros, [start])
    each = len(table) // len(first)
    like = inverse[:, None] * each + np.arange(each)
    quick = _quick(frames, options, worth)
    asked = np.unique(like[quick])
    held = np.zeros(len(table), dtype=bool)
    held[asked] = may_fit(table.take(asked), True)
    fits = held[like] & quick
    row, option = np.nonzero(fits)
    if len(row):
        cases = _cases(frames, table, like, row, option, np.full(len(row), start))
        found = weigh(cases)
        fits[row, option] = found.fits
        yield cases, found
    spared = _held(table, np.unique(like[quick & ~fits]), options, may_fit)
    if exact:
        spared = _least(spared, offloads)
    wanted = spared[:, like] & (quick & ~fits)
    which, row, option = np.nonzero(wanted)
    if len(row):
        bits = np.array(offloads)[which]
        cases = _cases(frames, table, like, row, option, bits)
        found = weigh(cases)
        wanted[which, row, option] = found.fits
        found.fits &= _least(wanted, offloads)[which, row, option]
        yield cases, found


def _quick(
    frames: Frames, options: FrameOptions, worth: Callable[[Frames], Array]
) -> Array:
    """For each frame, which policies of remat and levels may be among the best."""
    others = options.remats[1:]
    found = np.ones((len(frames), 1), dtype=bool)
    if others:
        again = worth(frames.with_options(others, [0], [0]))
        found = np.hstack([found, again.reshape(len(frames), -1)])
    return np.repeat(found, len(options.zeros), axis=1)


def _held(
    table: Frames,
    tight: Array,
    options: FrameOptions,
    may_fit: Callable[[Frames, bool], Array],
) -> Array:
    """For each further set in host memory, which tight rows may fit with it."""
    offloads = options.offloads[1:]
    held = np.zeros((len(offloads), len(table)), dtype=bool)
    if len(tight) and offloads:
        rows = table.take(tight)
        spared = stacked([_with_bits(rows, bits) for bits in options.corners])
        spare = may_fit(spared, False).reshape(-1, len(tight)).any(axis=0)
        tight = tight[spare]
    if len(tight) and offloads:
        rows = table.take(tight)
        every = stacked([_with_bits(rows, bits) for bits in offloads])
        held[:, tight] = may_fit(every, True).reshape(-1, len(tight))
    return held


def _least(held: Array, offloads: Sequence[int]) -> Array:
    """What fits with less in host memory is not weighed with more."""
    found: Array = held.copy()
    for place, bits in enumerate(offloads):
        for other, less in enumerate(offloads):
            if less != bits and less & bits == less:
                found[place] &= ~held[other]
    return found


def alike(frames: Frames) -> tuple[Array, Array]:
    """Frames that memory holds alike: the first of each, and which each is like."""
    return distinct_columns(
        [
            frames.cell,
            frames.stage,
            frames.data,
            frames.fsdp,
            frames.micro_batches,
            frames.schedule,
            frames.chunks,
        ]
    )


def _cases(
    frames: Frames, table: Frames, like: Array, row: Array, option: Array, bits: Array
) -> Frames:
    """Some frames, each with some option."""
    rows = like[row, option]
    return replace(
        frames.take(row), remat=table.remat[rows], zero=table.zero[rows], offload=bits
    )


def _with_bits(frames: Frames, bits: int) -> Frames:
    return replace(frames, offload=np.full(len(frames), bits, dtype=np.int64))
