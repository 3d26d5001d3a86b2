"""Peak memory of a step, over the forward and the backward pass.

While the backward pass is in a span (see ``liveness``), memory holds the temporaries of
this span. It also holds the residuals of this and earlier spans, and the gradients of
later spans. The peak is the largest sum. Each span has two moments: before its own
gradients are computed, and while they are computed.

Live sets do not depend on the layout, so the bytes of many layouts are products of the
same matrices. All arrays have one column per case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.topology import CompilerProfile
from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.cost.optimizer_step import reduced_whole
from whalejax.planner.cost_terms import FETCHED
from whalejax.planner.memory.live_sets import SpanLiveSets
from whalejax.planner.memory.looked_up_tables import tables_of
from whalejax.planner.memory.saved_tensors import kept_bytes
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.parameter_layout import LeafFacts
from whalejax.planner.sharding.shard_counts import (
    LeafShardCounts,
    reduces_gradient,
)


GATHER_COPIES = 2
"""Number of further copies of a gathered value on CPU, as its readers need other
layouts. The gathered logits of a BERT with tensor ranks have two, in addition to the
two copies that other terms count.
"""


LOOP_COPIES = 3
"""Number of copies for a weight that is gathered before a loop. Two are of this weight,
as gathered and as the loop's products read it. One is of the next loop's weight, which
is gathered meanwhile (libtpu 0.0.42, v5e, three LSTMs of 3072).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak memory of a step on one device, in whole bytes by case.

    Attributes:
        params, gradients, optimizer, activations, working: Terms of ``MemoryTerms``.
        host: Bytes in host memory, except optimizer state.
    """

    params: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray
    working: np.ndarray
    host: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Part of a program on one device: everything, or the part of a pipeline stage.

    A stage runs the spans of its own parts of the program. For layers in a loop, it
    saves one iteration per layer, and has the temporaries of one layer at a time.

    Attributes:
        task_graph_shares: Fraction of each TaskGraph's tensors that the stage computes,
            by case; None if it computes all.
        group_shares: Fraction of each group of parameters on the stage, by case.
    """

    task_graph_shares: Mapping[int, Any] | None = None
    group_shares: Any = 1.0

    def take(self, rows: np.ndarray) -> StageShare:
        """Returns the shares of some of the cases."""
        if self.task_graph_shares is None:
            return self
        task_graph_shares = {
            home: share[rows] for home, share in self.task_graph_shares.items()
        }
        return StageShare(
            task_graph_shares=task_graph_shares, group_shares=self.group_shares[:, rows]
        )

    def tensor_shares(self, found: SpanLiveSets) -> Any:
        """Returns the stage's fraction of each kind of tensor, by case."""
        if self.task_graph_shares is None:
            return 1.0
        return np.array(
            [self.task_graph_shares[kind.task_graph] for kind in found.kinds]
        )


WHOLE_PROGRAM: Final = StageShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterBytes:
    """Bytes of parameters, gradients and optimizer state on one device, by case.

    Attributes:
        params, state: Bytes of all parameters and of the optimizer state, as stored.
        casts: Bytes of the parameters' copies in the compute dtype.
        summed: Bytes of all accumulated gradients.
        gradients: Bytes of one gradient of each group until the update; 0 for
            parameters that are not trained.
        gathered: Bytes of one gathered parameter of each group, or of its slice in a
            loop over layers; 0 if it is not gathered.
        fresh: Bytes of one gradient of each group before it is reduce-scattered.
        summing: Bytes of one gradient of each group while a loop's iterations sum it.
        host: Bytes of all parameters in host memory.
        fetched: Bytes of each group that are fetched from host memory, for two layers.
        updating: Bytes of all gradients while parameters in host memory are updated.
        reduced: Bytes of all gradients before their reduction, and after it. Both are 0
            if the compiler reduces each gradient at once.
    """

    params: np.ndarray
    state: np.ndarray
    casts: np.ndarray
    summed: np.ndarray
    gradients: np.ndarray
    gathered: np.ndarray
    fresh: np.ndarray
    summing: np.ndarray
    host: np.ndarray
    fetched: np.ndarray
    updating: np.ndarray
    reduced: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeakInputs:
    """Program and cases that the functions of this module read.

    ``away`` is the number of parameters in host memory, by group and case.
    """

    facts: LeafFacts
    cuts: Sequence[LeafShardCounts]
    found: SpanLiveSets
    tables: Mapping[int, Table]
    s: CostSetting
    stage: StageShare
    away: np.ndarray
    number: int

    def rows(self, values: Iterable[Any]) -> np.ndarray:
        listed = list(values)
        table = np.empty((len(listed), self.number))
        for row, value in zip(table, listed, strict=True):
            row[:] = value
        return table

    def of_groups(self, name: str) -> np.ndarray:
        result = np.array([float(getattr(g, name)) for g, _ in self.facts.groups])
        return result[:, None]

    @property
    def counts(self) -> np.ndarray:
        return np.array([float(count) for _, count in self.facts.groups])[:, None]

    @property
    def once(self) -> np.ndarray:
        once: np.ndarray = self.found.turns[:, None] == 1
        return once


def _parameter_bytes(c: _PeakInputs, cast_bytes: float) -> _ParameterBytes:
    compiler = c.s.cluster.compiler
    compute, param, gradient, optimizer = (
        c.rows(getattr(cut, name).num_shards for cut in c.cuts)
        for name in ("compute", "param", "gradient", "optimizer")
    )
    share, turns = c.stage.group_shares, c.found.turns[:, None]
    here, gone = share * c.counts, share * c.away
    nbytes, made = c.of_groups("nbytes"), c.of_groups("gradient_bytes")
    trained = c.of_groups("trained") > 0
    narrow = np.ones_like(nbytes)
    if not compiler.widens:
        narrow = cast_bytes * c.of_groups("narrowed")
    stored = nbytes / param
    cast = np.maximum(0.0, c.found.cast[:, None] * share - gone) * stored * narrow
    kept = gradient
    if (turns == 1).all():  # Gradients are sharded as the optimizer reads them.
        whole = c.rows(
            reduced_whole(group, cut, c.tables[group.home], c.s, cast_bytes)
            for (group, _), cut in zip(c.facts.groups, c.cuts, strict=True)
        )
        kept = np.where(whole > 0, compute, gradient)
    waiting = made * narrow / kept
    one = nbytes * narrow / compute / turns
    moved = c.rows(
        group.moved_bytes(compiler, cut.has_sharded_rows) / max(1, group.nbytes)
        for (group, _), cut in zip(c.facts.groups, c.cuts, strict=True)
    )
    chunked = c.of_groups("chunked") > 0
    fresh = np.where(chunked, nbytes / compute, one)
    return _ParameterBytes(
        params=((here - gone) * stored).sum(0),
        state=(here * c.of_groups("optimizer_bytes") / optimizer).sum(0),
        # Quantised parameters are converted to the wider dtype when they are read.
        casts=np.where(narrow < 1.0, cast, 0.0).sum(0),
        summed=(here * made / gradient).sum(0),
        gradients=waiting,
        gathered=np.where(compute != param, one * moved, 0.0),
        fresh=np.where(trained & (compute != kept), fresh, 0.0),
        summing=np.where(trained, one, 0.0),
        host=(gone * stored).sum(0) + np.zeros(c.number),
        fetched=FETCHED * c.away * stored / turns,
        updating=((here - gone) * waiting + gone * made / optimizer).sum(0),
        reduced=_reduced_gradients(c),
    )


def _reduced_gradients(c: _PeakInputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``_ParameterBytes.reduced``.

    Gradients that are sharded after their reduction are reduced one at a time, and in a
    loop for one iteration at a time.
    """
    before, whole, largest = (np.zeros(c.number) for _ in range(3))
    if not c.s.cluster.compiler.reduces_at_end:
        return before, whole
    shares = c.rows(np.broadcast_to(c.stage.group_shares, (len(c.cuts), c.number)))
    groups = zip(c.facts.groups, c.cuts, c.found.turns, shares, strict=True)
    for (group, every), cut, times, share in groups:
        table = c.tables[group.home]
        given = group, cut.compute, table, c.s.mesh, c.facts.common
        summed = reduces_gradient(*given)
        one = group.uses * group.nbytes / cut.compute.num_shards
        one = np.where(
            cut.compute.num_shards != cut.gradient.num_shards, one / times, one
        )
        one = np.where(summed, one, 0.0)
        stays = cut.compute.num_shards == cut.optimizer.num_shards
        before = before + every * share * one
        whole = whole + np.where(stays, every * share * one, 0.0)
        alone = np.where(stays | (share == 0), 0.0, one)
        largest = np.maximum(largest, alone)
    return before, whole + largest


def _saved_bytes(
    c: _PeakInputs,
    leaves: _ParameterBytes,
    kinds: np.ndarray,
    in_flight: Any,
    *,
    postpones: bool,
) -> tuple[np.ndarray, _ParameterBytes]:
    """Returns the saved bytes of each span, and the parameters with live gradients.

    Postponed products compute their gradients at the end of the backward pass.
    """
    here = kinds * c.stage.tensor_shares(c.found)
    saved: np.ndarray = c.found.saved @ here
    saved += (in_flight - 1.0) * saved.max(axis=0, initial=0.0)
    if not postpones:
        return saved, leaves
    waiting = dataclasses.replace(
        leaves, gradients=np.where(c.once, 0.0, leaves.gradients)
    )
    return saved + c.found.postponed @ here, waiting


def _fuller_moment(
    c: _PeakInputs, leaves: _ParameterBytes, working: np.ndarray, making: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns gradients and temporaries at the fuller of each span's two moments.

    Before a span computes its own gradients, they are in memory only if it is a loop.
    """
    waiting = leaves.gradients * c.stage.group_shares
    born = c.found.gradients @ waiting
    alone = c.found.gradients @ np.where(c.once, waiting, 0.0)
    before, half = born - alone, len(born) // 2
    before[half:-1] += alone[half + 1 :]
    earlier = working + before > making + born
    return np.where(earlier, before, born), np.where(earlier, working, making)


def _gathered_weight_bytes(
    c: _PeakInputs, leaves: _ParameterBytes, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of weights before and while each span computes gradients.

    Weights that all iterations of a loop read are gathered before the loop, with
    copies. Compilers that reduce gradients after loops allocate the sums before the
    first loop of the backward pass. ``first`` has the bytes of one parameter of each
    group that is gathered before all computation, or 0.
    """
    result = c.found
    reread = result.reread * c.s.cluster.compiler.merge_partials
    half, there = len(reread) // 2, np.asarray(c.stage.group_shares) > 0
    rest = (leaves.gathered - first) * there
    fresh = leaves.fresh * there
    held, made = (np.zeros((len(reread), c.number)) for _ in range(2))
    apart = reread == 0
    for place in range(len(c.cuts)):
        one = (apart[:, place] * result.held[:, place])[:, None] * rest[place]
        np.maximum(held, one, out=held)
        new = (apart[:, place] * result.made[:, place])[:, None] * fresh[place]
        np.maximum(made, one + new, out=made)
    fetched = result.held @ (leaves.fetched * there)
    if reread.any():
        fetched = fetched + reread @ (
            LOOP_COPIES * leaves.gathered * c.stage.group_shares
        )
        waiting = np.cumsum(reread[half:], axis=0) @ (
            leaves.summing * c.stage.group_shares
        )
        made[half:] += waiting
    return held + fetched, made + fetched


def _table_moments(
    c: _PeakInputs, leaves: _ParameterBytes
) -> list[tuple[Any, Any, Any]]:
    """Returns saved bytes, gradients and temporaries during and after table lookups."""
    if c.s.cluster.compiler.lanes == 1:
        return []
    there = (c.counts - c.away) * c.stage.group_shares
    tables = tables_of(c.facts, c.cuts, there, leaves.gathered, leaves.summing, c.s)
    if tables is None:
        return []
    # The backward pass ends in the span in which the forward pass begins.
    others = np.where(tables.groups, 0.0, leaves.gradients) * c.stage.group_shares
    born = c.found.gradients[len(c.found.gradients) // 2] @ others
    born = np.where(tables.largest + tables.gradients > 0, born, 0.0)
    return [
        (0.0, 0.0, tables.gathered),
        (0.0, born, tables.gradients + tables.largest),
        (0.0, born, tables.updated),
    ]


def _gathered_first(
    c: _PeakInputs, leaves: _ParameterBytes, compiler: CompilerProfile
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of weights outside loops that are gathered at the start.

    The first array has the bytes of one parameter of each group in one form. The second
    has the bytes of all parameters that stay until the backward pass, by span. Its last
    row has the bytes of all forms at the start.
    """
    one = np.where(c.once, leaves.gathered, 0.0) * compiler.gathers_first
    gradients = c.found.gradients
    waiting = np.zeros((len(gradients) + 1, c.number))
    if not one.any():
        return one, waiting
    forms = c.of_groups("gathers")
    here = (c.counts - c.away) * c.stage.group_shares * np.ones(c.number)
    shares = np.broadcast_to(c.stage.group_shares, here.shape)
    for place in np.flatnonzero((forms[:, 0] > 1) & one.any(axis=1)):
        behind = gradients[:, place : place + 1] * shares[place]
        waiting[:-1] += np.maximum(0.0, here[place] - behind) * one[place]
    waiting[-1] = (here * one * forms).sum(0)
    return one, waiting


def peak_of(
    facts: LeafFacts,
    cuts: Sequence[LeafShardCounts],
    found: SpanLiveSets,
    tables: Mapping[int, Table],
    s: CostSetting,
    *,
    cast_bytes: float,
    accumulates: np.ndarray,
    away: np.ndarray,
    in_flight: Any = 1.0,
    gathered: Any = 0.0,
    postpones: bool = False,
    stage: StageShare = WHOLE_PROGRAM,
) -> PeakMemory:
    """Returns the peak memory of a step on one device.

    Args:
        facts: Parameters of the model, in groups of equal ones.
        cuts: Shard counts of each group of parameters.
        found: Live tensors of each span.
        tables: Compute table of each TaskGraph, which all cases share.
        s: Mesh sizes and numbers of micro-batches of the cases.
        cast_bytes: Bytes of a parameter in its compute dtype, over its stored bytes.
        accumulates: Whether gradients of several micro-batches are summed, by case.
        away: Number of parameters in host memory, by group and case.
        in_flight: Number of micro-batches whose activations are saved at a time.
        gathered: Bytes of the largest value that is gathered along the sequence.
        postpones: Whether products of weights' gradients outside loops are postponed.
        stage: Part of the program on the device; default: all of it.

    Returns:
        Bytes of each memory term, by case.
    """
    c = _PeakInputs(
        facts=facts,
        cuts=cuts,
        found=found,
        tables=tables,
        s=s,
        stage=stage,
        away=away,
        number=len(accumulates),
    )
    leaves = _parameter_bytes(c, cast_bytes)
    kinds = c.rows(kept_bytes(found.kinds, tables, s))
    moments = _span_moments(c, leaves, kinds, in_flight, gathered, postpones=postpones)
    saved, born, working = _with_update_moments(c, leaves, moments, accumulates)
    fullest = np.argmax(saved + born + working, axis=0)
    column = np.arange(c.number)
    waiting = found.waiting @ (kinds * stage.tensor_shares(found))
    return PeakMemory(
        params=np.floor(leaves.params),
        gradients=np.floor(born[fullest, column]),
        optimizer=np.floor(leaves.state) + facts.optimizer_other_bytes,
        activations=np.floor(saved[fullest, column]),
        working=np.floor(working[fullest, column]),
        host=np.floor(leaves.host + waiting),
    )


_MomentBytes = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Bytes of residuals, gradients and temporaries, by moment and case."""


def _span_moments(
    c: _PeakInputs,
    leaves: _ParameterBytes,
    kinds: np.ndarray,
    in_flight: Any,
    gathered: Any,
    *,
    postpones: bool,
) -> tuple[_ParameterBytes, _MomentBytes]:
    """Returns the parameters with live gradients, and the bytes of all moments.

    The moments are those of each span, and those before and after all spans.
    """
    result, compiler = c.found, c.s.cluster.compiler
    saved, leaves = _saved_bytes(c, leaves, kinds, in_flight, postpones=postpones)
    worked = kinds * (np.asarray(c.stage.tensor_shares(result)) > 0)
    working, making = (
        np.maximum.reduceat(rows @ worked, starts, axis=0)
        for rows, starts in zip(
            (result.working, result.making), result.starts, strict=True
        )
    )
    first, ready = _gathered_first(c, leaves, compiler)
    held, made = _gathered_weight_bytes(c, leaves, first)
    born, working = _fuller_moment(c, leaves, working + held, making + made)
    working = working + leaves.casts
    if first.any():
        # Gathered weights without a gradient so far are used in the backward pass.
        working = working + ready[:-1]
        saved, born, working = _append_moment(
            (saved, born, working), (0.0, 0.0, ready[-1])
        )
    for moment in _table_moments(c, leaves):
        saved, born, working = _append_moment((saved, born, working), moment)
    if compiler.reduces_at_end:
        working = working + GATHER_COPIES * gathered
    return leaves, (saved, born, working)


def _with_update_moments(
    c: _PeakInputs,
    leaves: _ParameterBytes,
    moments: tuple[_ParameterBytes, _MomentBytes],
    accumulates: np.ndarray,
) -> _MomentBytes:
    """Returns the moments with accumulated gradients, and the moments of the update."""
    saved, born, working = moments[1]
    working = np.where(accumulates, working + born, working)
    born = np.where(accumulates, leaves.summed, born)
    if c.away.any():
        # An update in chunks reads gradients in the wide dtype.
        updating = np.where(c.away.any(axis=0), leaves.updating, 0.0)
        saved, born, working = _append_moment(
            (saved, born, working), (0.0, updating, 0.0)
        )
    going, coming = leaves.reduced
    if going.any():
        there = going > 0
        going = going + np.where(accumulates & there, leaves.summed, 0.0)
        coming = np.where(there, coming, 0.0)
        saved, born, working = _append_moment(
            (saved, born, working), (0.0, going, coming)
        )
    return saved, born, working


def _append_moment(moments: _MomentBytes, last: tuple[Any, Any, Any]) -> _MomentBytes:
    saved, born, working = (
        np.concatenate([rows, np.broadcast_to(end, (1, rows.shape[1]))])
        for rows, end in zip(moments, last, strict=True)
    )
    return saved, born, working
