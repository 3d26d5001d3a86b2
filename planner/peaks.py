"""The fullest moment of a step: what is in memory at once, from forward to backward.

While the backward pass is in a span (see ``timeline``), memory holds what the forward
pass kept for it and for all before it, the gradients of all behind it, and what the
span itself works with. The peak is the largest of these sums; between the ends of a
span they are not told apart.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost import Setting
from whalejax.planner.dimensions import Dimensions
from whalejax.planner.graph import CONVOLUTION, Graph
from whalejax.planner.layout import Table, shards
from whalejax.planner.leaves import LeafFacts, LeafLayout
from whalejax.planner.memory import Kept, kept_bytes
from whalejax.planner.plan import MemoryTerms
from whalejax.planner.terms import FETCHED
from whalejax.planner.timeline import Entry, Timeline, Works
from whalejax.planner.update import reduced_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What memory holds in each span: of the forward pass, then of the backward pass.

    Attributes:
        kinds: the different tensors.
        saved: for each span, how many of each kind are kept.
        working: for each span, what it may work with, how many of each kind: one of
            the rows at a time, before the gradients that the span itself makes.
        making: the same while it makes them.
        gradients: for each span, how many parameters of each group have their gradient.
        held: for each span and group, whether it computes with such a parameter, which
            is there whole at a time if it lies in shards.
        made: for each span and group, whether it makes such a parameter's gradient.
        turns: for each group, by how many turns of a loop its parameters are shared
            out, one part to each.
        cast: for each group, how many of its parameters are there in the type that
            they are computed with, all the time: all beside loops over layers, and
            those that checkpointed regions are given. Others are cast where they are
            read.
        waiting: how many of each kind wait in host memory.
    """

    kinds: tuple[Kept, ...]
    saved: np.ndarray
    working: tuple[np.ndarray, ...]
    making: tuple[np.ndarray, ...]
    gradients: np.ndarray
    held: np.ndarray
    made: np.ndarray
    turns: np.ndarray
    cast: np.ndarray
    waiting: np.ndarray


def moments(
    graph: Graph,
    dims: Dimensions,
    weight: Sequence[bool],
    facts: LeafFacts,
    *,
    compiler: CompilerProfile,
    waiting: Mapping[int, int] | None = None,
) -> Moments:
    """Find what memory holds.

    Args:
        graph: the captured loss.
        dims: its logical dimensions.
        weight: for every tensor, whether it depends on parameters alone.
        facts: the parameters.
        compiler: what it computes inside products, and in which type.
        waiting: copies of values that wait in host memory, by tensor.
    """
    timeline = Timeline(graph, weight, compiler, waiting)
    found = _Kinds(graph, dims)
    spans = timeline.spans
    saved = [found.count(timeline.made_before(span.end)) for span in spans]
    saved += [found.count(timeline.saved_before(span.end)) for span in spans]
    works: list[tuple[Works, Works]]
    works = [(list(timeline.ahead(span)), []) for span in spans]
    works += [timeline.behind(span) for span in spans]
    working, making = (
        [[found.count(row) for row in pair[which]] for pair in works]
        for which in (0, 1)
    )
    away = found.count(timeline.waits())
    last, users = timeline.parameters(facts)
    gradients = np.zeros((2 * len(spans), len(facts.groups)))
    for leaf, group in enumerate(facts.group_of):
        for place, span in enumerate(spans, start=len(spans)):
            gradients[place, group] += last[leaf] >= span.first
    turns = np.array(timeline.turns(facts))
    cast, looped = np.zeros(len(facts.groups)), bool((turns > 1).any())
    for leaf, group in enumerate(facts.group_of):
        given = any(graph.ops[at].remat is not None for at in users[leaf])
        cast[group] += given or looped
    held = np.zeros((2 * len(spans), len(facts.groups)))
    made = np.zeros_like(held)
    for leaf, group in enumerate(facts.group_of):
        for place, span in enumerate(spans):
            here = [graph.ops[at] for at in users[leaf] if span.first <= at < span.end]
            if here:
                held[place, group] = 1
                # Behind a product it is read again, and its gradient is made.
                if any(op.matmul is not None for op in here):
                    held[place + len(spans), group] = 1
                made[place + len(spans), group] = 1
    return Moments(
        kinds=tuple(found.kinds),
        saved=np.array([found.full(row) for row in saved]),
        working=found.tables(working),
        making=found.tables(making),
        gradients=gradients,
        held=held,
        made=made,
        turns=turns,
        cast=cast,
        waiting=found.full(away),
    )


@dataclass
class _Kinds:
    """Different kinds of tensors, in order of appearance."""

    graph: Graph
    dims: Dimensions
    kinds: list[Kept] = field(default_factory=list)
    places: dict[Any, int] = field(default_factory=dict)

    @functools.cached_property
    def ends(self) -> bool:
        """Convolutions decide the layouts: batch or channels lie in lanes."""
        return any(op.kind == CONVOLUTION for op in self.graph.ops)

    def count(self, entries: Mapping[Entry, float]) -> dict[int, float]:
        """How many of each kind."""
        found: dict[int, float] = {}
        for (tensor, nbytes, home), times in entries.items():
            key = self.dims.layouts[tensor], self.dims.sizes[tensor], nbytes, home
            if key not in self.places:
                self.places[key] = len(self.kinds)
                self.kinds.append(
                    Kept(
                        layout=key[0],
                        sizes=key[1],
                        nbytes=nbytes,
                        task_graph=home,
                        count=1,
                        ends=self.ends,
                    )
                )
            place = self.places[key]
            found[place] = found.get(place, 0.0) + times
        return found

    def full(self, row: Mapping[int, float]) -> np.ndarray:
        """The same with a place for every kind."""
        found = np.zeros(len(self.kinds))
        for place, times in row.items():
            found[place] = times
        return found

    def tables(
        self, rows: Sequence[Sequence[Mapping[int, float]]]
    ) -> tuple[np.ndarray, ...]:
        """Rows of several spans, one table for each."""
        return tuple(
            np.array([self.full(row) for row in table] or [self.full({})])
            for table in rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """Bytes of the parameters on one device, and of what follows them.

    Attributes:
        params, state: of all of them and of the optimizer's state, as stored.
        casts: of those that are there in the type in which they are computed with.
        summed: of all gradients, as accumulated.
        gradients: for each group, of one gradient as it waits for the optimizer.
        gathered: for each group, of one parameter that is put together.
        fresh: for each group, of one gradient that is there before it is scattered.
        host: of all parameters that lie in host memory.
        fetched: for each group, of what comes from there for a layer and the next.
        updating: of all gradients while the optimizer updates what lies there.
    """

    params: float
    state: float
    casts: float
    summed: float
    gradients: np.ndarray
    gathered: np.ndarray
    fresh: np.ndarray
    host: float
    fetched: np.ndarray
    updating: float


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
    gradients, gathered, fresh, fetched = (np.zeros(len(layouts)) for _ in range(4))
    turns = found.turns
    unrolled = bool((turns == 1).all())
    for place, ((group, count), layout) in enumerate(
        zip(facts.groups, layouts, strict=True)
    ):
        nbytes, whole = group.nbytes, shards(layout.compute, s.mesh)
        stored = nbytes / shards(layout.param, s.mesh)
        narrow = 1.0 if s.cluster.compiler.widens else cast_bytes * group.narrowed
        params += (count - away[place]) * stored
        host += away[place] * stored
        fetched[place] = FETCHED * away[place] * stored / turns[place]
        state += count * group.optimizer_bytes / shards(layout.optimizer, s.mesh)
        summed += count * nbytes / shards(layout.gradient, s.mesh)
        if narrow != 1.0:
            casts += max(0.0, found.cast[place] - away[place]) * stored * narrow
        kept = layout.gradient
        table = tables[group.home]
        if unrolled and reduced_whole(group, layout, table, s, cast_bytes):
            kept = layout.compute  # It is cut where the optimizer reads it.
        gradients[place] = nbytes * narrow / shards(kept, s.mesh)
        updating += (count - away[place]) * gradients[place]
        updating += away[place] * nbytes / shards(layout.optimizer, s.mesh)
        one = nbytes * narrow / whole / turns[place]
        if layout.compute != layout.param and nbytes:
            gathered[place] = one * group.moved_bytes(s.cluster.compiler) / nbytes
        if layout.compute != kept:
            fresh[place] = one
    return _Leaves(
        params=params,
        state=state,
        casts=casts,
        summed=summed,
        gradients=gradients,
        gathered=gathered,
        fresh=fresh,
        host=host,
        fetched=fetched,
        updating=updating,
    )


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
    """
    leaves = _leaves(facts, layouts, found, tables, s, cast_bytes, away)
    kinds = np.array(kept_bytes(found.kinds, tables, s) or [0.0])
    saved = found.saved @ kinds if found.kinds else np.zeros(len(found.saved))
    saved = saved + (in_flight - 1.0) * saved.max(initial=0.0)
    working, making = (
        np.array([(rows @ kinds).max() if found.kinds else 0.0 for rows in several])
        for several in (found.working, found.making)
    )
    held = found.held * leaves.gathered
    fetched = found.held @ leaves.fetched
    working += held.max(axis=1, initial=0.0) + fetched
    making += (held + found.made * leaves.fresh).max(axis=1, initial=0.0) + fetched
    # What a span makes is not there yet while it works with what follows; loops hold
    # all of theirs from the start.
    born = found.gradients @ leaves.gradients
    alone = found.gradients @ (leaves.gradients * (found.turns == 1))
    before, half = born - alone, len(born) // 2
    before[half:-1] += alone[half + 1 :]
    earlier = working + before > making + born
    born = np.where(earlier, before, born)
    working = np.where(earlier, working, making) + leaves.casts
    if accumulates:
        working, born = working + born, np.full(len(born), leaves.summed)
    if any(away):
        # The update: what passes through the device in pieces takes wide gradients.
        saved, born, working = (
            np.append(row, last)
            for row, last in ((saved, 0.0), (born, leaves.updating), (working, 0.0))
        )
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
