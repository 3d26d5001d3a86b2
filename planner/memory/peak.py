"""The fullest moment of a step: what is in memory at once, from forward to backward.

While the backward pass is in a span (see ``liveness``), memory holds what the forward
pass kept for it and for all before it, the gradients of all behind it, and what the
span itself works with. The peak is the largest of these sums; between the ends of a
span they are not told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.operation_cost import Setting
from whalejax.planner.cost.optimizer_step import reduced_whole
from whalejax.planner.entries import Collective
from whalejax.planner.memory.live_sets import Moments
from whalejax.planner.memory.looked_up_tables import tables_of
from whalejax.planner.memory.saved_tensors import kept_bytes
from whalejax.planner.sharding.layout import Table, shards
from whalejax.planner.sharding.parameter_layout import (
    LeafFacts,
    LeafLayout,
    summed_over,
)
from whalejax.planner.terms import FETCHED, MemoryTerms


GATHER_COPIES = 2
"""Copies of a gathered value that stand beside it on CPU, whose readers want it lying
otherwise: of logits that a BERT's tensor ranks gather, two beside the two priced
anyway."""


LOOP_COPIES = 3
"""Forms of a weight that is gathered before a loop: as it comes, as the loop's products
read it, and that of the next loop, which comes meanwhile (libtpu 0.0.42, v5e, three
LSTMs of 3072)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """Bytes of the parameters on one device, and of what follows them.

    Attributes:
        params, state: of all of them and of the optimizer's state, as stored.
        casts: of those that are there in the type in which they are computed with.
        summed: of all gradients, as accumulated.
        gradients: for each group, of one gradient as it waits for the optimizer; 0 of
            what is not trained.
        gathered: for each group, of one parameter that is put together.
        fresh: for each group, of one gradient that is there before it is scattered.
        summing: for each group, of one gradient as the turns of a loop add it up.
        host: of all parameters that lie in host memory.
        fetched: for each group, of what comes from there for a layer and the next.
        updating: of all gradients while the optimizer updates what lies there.
        reduced: of all gradients before they are reduced, and after; zero where the
            compiler does not wait for all of them.
    """

    params: float
    state: float
    casts: float
    summed: float
    gradients: np.ndarray
    gathered: np.ndarray
    fresh: np.ndarray
    summing: np.ndarray
    host: float
    fetched: np.ndarray
    updating: float
    reduced: tuple[float, float]


def _leaves(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    found: Moments,
    tables: Mapping[int, Table],
    s: Setting,
    cast_bytes: float,
    away: Sequence[int],
) -> _Leaves:
    params = state = casts = summed = host = updating = 0.0
    gradients, gathered, fresh, summing, fetched = (
        np.zeros(len(layouts)) for _ in range(5)
    )
    turns = found.turns
    unrolled = bool((turns == 1).all())
    for place, ((group, count), layout) in enumerate(
        zip(facts.groups, layouts, strict=True)
    ):
        share = float(found.shares[place])
        here, gone = share * count, share * away[place]
        nbytes, whole = group.nbytes, shards(layout.compute, s.mesh)
        stored = nbytes / shards(layout.param, s.mesh)
        narrow = 1.0 if s.cluster.compiler.widens else cast_bytes * group.narrowed
        params += (here - gone) * stored
        host += gone * stored
        fetched[place] = FETCHED * away[place] * stored / turns[place]
        state += here * group.optimizer_bytes / shards(layout.optimizer, s.mesh)
        gradient = group.gradient_bytes
        summed += here * gradient / shards(layout.gradient, s.mesh)
        if narrow < 1.0:  # What is quantised is widened where it is read.
            casts += max(0.0, found.cast[place] - gone) * stored * narrow
        kept = layout.gradient
        table = tables[group.home]
        if unrolled and reduced_whole(group, layout, table, s, cast_bytes):
            kept = layout.compute  # It is cut where the optimizer reads it.
        gradients[place] = gradient * narrow / shards(kept, s.mesh)
        updating += (here - gone) * gradients[place]
        updating += gone * gradient / shards(layout.optimizer, s.mesh)
        one = nbytes * narrow / whole / turns[place]
        if layout.compute != layout.param and nbytes:
            moved = group.moved_bytes(s.cluster.compiler, layout.compute)
            gathered[place] = one * moved / nbytes
        if group.trained:
            summing[place] = one
        if layout.compute != kept and group.trained:
            fresh[place] = nbytes / whole if group.chunked else one
    return _Leaves(
        params=params,
        state=state,
        casts=casts,
        summed=summed,
        gradients=gradients,
        gathered=gathered,
        fresh=fresh,
        summing=summing,
        host=host,
        fetched=fetched,
        updating=updating,
        reduced=_reduced(facts, layouts, found, tables, s),
    )


def _reduced(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    found: Moments,
    tables: Mapping[int, Table],
    s: Setting,
) -> tuple[float, float]:
    """See ``_Leaves.reduced``.

    What is cut into shards after it is reduced comes alone, for each parameter; what is
    cut in a loop, for each of its turns.
    """
    before = whole = largest = 0.0
    if not s.cluster.compiler.reduces_at_end:
        return before, whole
    groups = zip(facts.groups, layouts, found.turns, found.shares, strict=True)
    for (group, every), layout, times, share in groups:
        count = every * float(share)
        table = tables[group.home]
        if summed_over(group, layout, table, s.mesh, facts.common):
            one = group.uses * group.nbytes / shards(layout.compute, s.mesh)
            if layout.compute != layout.gradient:
                one /= times
            before += count * one
            if layout.compute == layout.optimizer:
                whole += count * one
            elif share:
                largest = max(largest, one)
    return before, whole + largest


def _kept(
    found: Moments,
    leaves: _Leaves,
    kinds: np.ndarray,
    in_flight: float,
    postpones: bool,
) -> tuple[np.ndarray, _Leaves]:
    """Bytes of what is kept in each span, and parameters with gradients as they wait.

    Gradients whose products are put off are made when nothing else is left.
    """
    if not found.kinds:
        return np.zeros(len(found.saved)), leaves
    saved: np.ndarray = found.saved @ kinds
    saved += (in_flight - 1.0) * saved.max(initial=0.0)
    if not postpones:
        return saved, leaves
    there = leaves.gradients * (found.turns > 1)
    waiting = dataclasses.replace(leaves, gradients=there)
    return saved + found.postponed @ kinds, waiting


def _fuller(
    found: Moments, leaves: _Leaves, working: np.ndarray, making: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients and what works in each span, before it makes its own or meanwhile.

    What a span makes is not there yet while it works with what follows; loops hold all
    of theirs from the start.
    """
    born = found.gradients @ leaves.gradients
    alone = found.gradients @ (leaves.gradients * (found.turns == 1))
    before, half = born - alone, len(born) // 2
    before[half:-1] += alone[half + 1 :]
    earlier = working + before > making + born
    return np.where(earlier, before, born), np.where(earlier, working, making)


def _before_loops(
    found: Moments, leaves: _Leaves, compiler: CompilerProfile
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stands in memory for loops whose turns read the same weights.

    Returns:
        For each span and group, 0.0 for such a loop with such weights, else 1.0; for
        each span, the weights that were gathered before its loop, with copies, and sums
        of gradients, which a compiler that reduces them after loops makes room for
        before the first loop that runs backward. Without one, nothing is apart.
    """
    reread = found.reread * compiler.merge_partials
    half = len(reread) // 2
    waiting = np.cumsum(reread[half:], axis=0)
    summing = np.append(np.zeros(half), waiting @ leaves.summing)
    return 1.0 * (reread == 0), reread @ (LOOP_COPIES * leaves.gathered), summing


def _lookups(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    found: Moments,
    leaves: _Leaves,
    away: Sequence[int],
    s: Setting,
) -> list[tuple[float, float, float]]:
    """What is kept, gradients and the rest while tables are looked up, and behind."""
    counts = np.array([count for _, count in facts.groups]) - np.array(away)
    there = counts * found.shares
    tables = tables_of(facts, layouts, there, leaves.gathered, leaves.summing, s)
    if not tables.largest and not tables.gradients:
        return []
    # The backward pass ends in the first span.
    others = np.where(tables.groups, 0.0, leaves.gradients)
    born = float(found.gradients[len(found.gradients) // 2] @ others)
    return [
        (0.0, 0.0, tables.gathered),
        (0.0, born, tables.gradients + tables.largest),
        (0.0, born, tables.updated),
    ]


def _gathered_first(
    facts: LeafFacts,
    leaves: _Leaves,
    found: Moments,
    away: Sequence[int],
    compiler: CompilerProfile,
) -> tuple[np.ndarray, np.ndarray]:
    """What is gathered before anything is computed with it, outside loops.

    Returns:
        For each group, bytes of one parameter in one form; and of all of them what
        waits for the backward pass in each span, and last what there is at first.
    """
    one = leaves.gathered * (found.turns == 1) * compiler.gathers_first
    forms = np.array([group.gathers for group, _ in facts.groups])
    here = np.array([count for _, count in facts.groups]) - np.array(away)
    here = here * found.shares
    waiting = np.maximum(0.0, here - found.gradients) @ (one * (forms > 1))
    return one, np.append(waiting, here @ (one * forms))


def _then(*rows: np.ndarray, last: Sequence[float]) -> tuple[np.ndarray, ...]:
    """The rows with one more moment each."""
    return tuple(np.append(row, end) for row, end in zip(rows, last, strict=True))


def largest_gather(collectives: Iterable[Collective]) -> float:
    """Bytes of the largest value that is gathered on its way to its readers."""
    found = (c for c in collectives if c.what == "border" and c.kind == "all-gather")
    sizes = (float(c.payload_bytes) for c in found)
    return max(sizes, default=0.0)


def peak_of(
    facts: LeafFacts,
    layouts: Sequence[LeafLayout],
    found: Moments,
    tables: Mapping[int, Table],
    s: Setting,
    *,
    state_bytes: int,
    cast_bytes: float,
    accumulates: bool,
    away: Sequence[int],
    in_flight: float = 1.0,
    gathered: float = 0.0,
    postpones: bool = False,
) -> MemoryTerms:
    """Memory on one device at the fullest moment of a step.

    Args:
        facts: the parameters.
        layouts: of each of their groups.
        found: what memory holds when.
        tables: compute table of each TaskGraph.
        s: mesh and micro-batches.
        state_bytes: bytes of what is not trained.
        cast_bytes: bytes of a parameter as computed with, over its stored bytes.
        accumulates: gradients of several micro-batches are summed.
        away: of each group, how many lie in host memory.
        in_flight: micro-batches whose activations are kept at once.
        gathered: bytes of the largest value that is gathered along the sequence.
        postpones: products of weights' gradients are put off, loops' excepted.
    """
    leaves = _leaves(facts, layouts, found, tables, s, cast_bytes, away)
    kinds = np.array(kept_bytes(found.kinds, tables, s) or [0.0])
    saved, leaves = _kept(found, leaves, kinds, in_flight, postpones)
    working, making = (
        np.array([(rows @ kinds).max() if found.kinds else 0.0 for rows in several])
        for several in (found.working, found.making)
    )
    compiler = s.cluster.compiler
    gathered_first, ready = _gathered_first(facts, leaves, found, away, compiler)
    alone, whole, summing = _before_loops(found, leaves, compiler)
    held = alone * found.held * (leaves.gathered - gathered_first)
    fetched = found.held @ leaves.fetched + whole
    made = held + alone * found.made * leaves.fresh
    working += held.max(axis=1, initial=0.0) + fetched
    making += made.max(axis=1, initial=0.0) + fetched + summing
    born, working = _fuller(found, leaves, working, making)
    working += leaves.casts
    if gathered_first.any():
        # As many as have no gradient yet wait for the backward pass.
        working += ready[:-1]
        saved, born, working = _then(saved, born, working, last=(0.0, 0.0, ready[-1]))
    for moment in _lookups(facts, layouts, found, leaves, away, s):
        saved, born, working = _then(saved, born, working, last=moment)
    if compiler.reduces_at_end:
        working += GATHER_COPIES * gathered
    if accumulates:
        working, born = working + born, np.full(len(born), leaves.summed)
    if any(away):
        # The update: what passes through the device in pieces takes wide gradients.
        updating = 0.0, leaves.updating, 0.0
        saved, born, working = _then(saved, born, working, last=updating)
    going, coming = leaves.reduced
    if going:
        going += leaves.summed if accumulates else 0.0
        saved, born, working = _then(saved, born, working, last=(0.0, going, coming))
    fullest = int(np.argmax(saved + born + working))
    return MemoryTerms(
        params_bytes=int(leaves.params),
        gradients_bytes=int(born[fullest]),
        optimizer_bytes=int(leaves.state) + facts.optimizer_other_bytes,
        state_bytes=state_bytes,
        activations_bytes=int(saved[fullest]),
        working_bytes=int(working[fullest]),
        host_bytes=int(leaves.host + (found.waiting @ kinds if found.kinds else 0)),
    )
