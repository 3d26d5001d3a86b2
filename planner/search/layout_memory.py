"""Memory of layouts by term, for every search: liveness, batch and host memory.

A single plan and a search over arrays use the same code, with one case or many. So both
predict the same memory for the same layout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whalejax.planner.cost.operation_cost import CostSetting
from whalejax.planner.cost_terms import MemoryTerms
from whalejax.planner.memory.live_sets import SpanLiveSets, StepLiveness, moments
from whalejax.planner.memory.peak import WHOLE_PROGRAM, PeakMemory, StageShare, peak_of
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.stage_graph import HANDED
from whalejax.planner.search.analysis_cache import AnalysedProgram
from whalejax.planner.search.host_offload import HostMemoryLimits
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.leaf_shard_counts import (
    LeafShardCounts,
)
from whalejax.planner.sharding.parameter_layout import LeafFacts, batch_homes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Layouts with their step options; arrays hold one number for each case.

    Attributes:
        tables: Compute table of each TaskGraph, the same in all cases.
        cuts: Shard counts of each parameter group.
        accumulates: Whether gradients of several micro-batches are summed, by case.
        offload: Names of the offloaded memory terms, the same in all cases.
        in_flight: Number of micro-batches whose activations are saved at once.
        gathered: Bytes of the largest value that is gathered along the sequence.
        postpones: Whether the compiler postpones products of weights' gradients.
        stage: Share of the program that a device stores.
    """

    tables: Mapping[int, Table]
    cuts: Sequence[LeafShardCounts]
    accumulates: np.ndarray
    offload: tuple[str, ...] = ()
    in_flight: Any = 1.0
    gathered: Any = 0.0
    postpones: bool = False
    stage: StageShare = WHOLE_PROGRAM

    def take(self, rows: np.ndarray) -> StepLayout:
        """Selects some of the cases."""

        def some(value: Any) -> Any:
            return value[..., rows] if isinstance(value, np.ndarray) else value

        return dataclasses.replace(
            self,
            cuts=[cut.take(rows) for cut in self.cuts],
            accumulates=self.accumulates[rows],
            in_flight=some(self.in_flight),
            gathered=some(self.gathered),
            stage=self.stage.take(rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """``MemoryTerms`` of many cases, in whole bytes.

    Attributes:
        terms: Bytes of each term on a device, by term name and case.
        host: Bytes in host memory, by case.
    """

    terms: Mapping[str, np.ndarray]
    host: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Bytes of all terms on a device, by case."""
        return sum(self.terms.values(), np.zeros(len(self.host)))

    def take(self, rows: np.ndarray) -> MemoryColumns:
        """Selects some of the cases."""
        terms = {name: values[rows] for name, values in self.terms.items()}
        return MemoryColumns(terms=terms, host=self.host[rows])

    def with_rows(self, rows: np.ndarray, other: MemoryColumns) -> MemoryColumns:
        """Returns a copy whose given rows come from ``other``."""

        def mixed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            result = before.copy()
            result[rows] = after
            return result

        names = {**self.terms, **other.terms}
        nothing = np.zeros(len(self.host))
        return MemoryColumns(
            terms={
                name: mixed(self.terms.get(name, nothing), other.terms[name])
                for name in names
            },
            host=mixed(self.host, other.host),
        )

    def at(self, index: int) -> MemoryTerms:
        """Returns the memory terms of one case."""
        result = {f"{name}_bytes": int(v[index]) for name, v in self.terms.items()}
        return MemoryTerms(**result, host_bytes=int(self.host[index]))


@dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Memory of the layouts of one program.

    Attributes:
        graph: Captured loss.
        program: Analysed operations of the loss.
        facts: Parameters of the model, in groups of equal ones.
        hosting: Host-memory limits of the search.
        dims: Logical dimensions of the loss.
    """

    graph: Graph
    program: AnalysedProgram
    facts: LeafFacts
    hosting: HostMemoryLimits
    dims: Dimensions
    _found: dict[StepLiveness, SpanLiveSets] = field(default_factory=dict, init=False)

    @functools.cached_property
    def homes(self) -> tuple[tuple[int, int | None], ...]:
        """Leaves of the batch, and the TaskGraph that reads each first."""
        return batch_homes(self.graph)

    def of(self, one: StepLayout, s: CostSetting) -> MemoryColumns:
        """Computes the peak memory of a step.

        Args:
            one: Layouts of the cases.
            s: Mesh sizes and micro-batches of the cases.

        Returns:
            Bytes of each memory term, by case.
        """
        number = len(one.accumulates)
        gathers = np.full(number, "params" in one.offload)
        for cut in one.cuts if self.program.regathered else ():
            gathers = gathers | cut.is_gathered
        names = [f.name for f in dataclasses.fields(PeakMemory)]
        result = {name: np.zeros(number) for name in names}
        for regathers in (False, True):
            rows = np.flatnonzero(gathers == regathers)
            if not len(rows):
                continue
            alone = len(rows) == number
            some = one if alone else one.take(rows)
            here = self._peaks(some, s if alone else s.take(rows), regathers=regathers)
            for name in names:
                result[name][rows] = getattr(here, name)
        shares = None if one.stage is WHOLE_PROGRAM else one.stage.group_shares
        moved = np.floor(self.hosting.state_bytes(one.cuts, one.offload, shares))
        host = result.pop("host") + moved
        result["optimizer"] = result["optimizer"] - moved
        if "gradients" in one.offload:
            host = host + result["gradients"]
            result["gradients"] = np.zeros(number)
        result["state"] = np.full(number, float(self.hosting.request.state_bytes))
        result["batch"] = self._batch_bytes(one.tables, s) + np.zeros(number)
        by_leaf = self._batch_bytes(one.tables, s, only_gradients=True)
        result["gradients"] = result["gradients"] + one.accumulates * by_leaf
        return MemoryColumns(terms=result, host=host)

    def least(self, cuts: Sequence[LeafShardCounts], offload: tuple[str, ...]) -> Any:
        """Returns the bytes of parameters and other permanent state, by case.

        Args:
            cuts: Shard counts of each parameter group.
            offload: Names of the offloaded memory terms.
        """
        result: Any = self.hosting.request.state_bytes
        away = self.hosting.host_param_counts(cuts, offload)
        for (group, count), cut, hosted in zip(
            self.facts.groups, cuts, away, strict=True
        ):
            result = result + (count - hosted) * group.nbytes / cut.param.num_shards
            result = result + count * group.optimizer_bytes / cut.optimizer.num_shards
        return result - self.hosting.state_bytes(cuts, offload)

    def _peaks(self, one: StepLayout, s: CostSetting, *, regathers: bool) -> PeakMemory:
        number = len(one.accumulates)
        away = np.zeros((len(one.cuts), number))
        for row, count in zip(
            away, self.hosting.host_param_counts(one.cuts, one.offload), strict=True
        ):
            row[:] = count
        return peak_of(
            self.facts,
            one.cuts,
            self.moments("activations" in one.offload, regathers),
            one.tables,
            s,
            cast_bytes=self.hosting.request.cast_bytes,
            accumulates=one.accumulates,
            away=away,
            in_flight=one.in_flight,
            gathered=one.gathered,
            postpones=one.postpones,
            stage=one.stage,
        )

    def moments(self, apart: bool, regathers: bool) -> SpanLiveSets:
        """Returns the live tensors of each span.

        Args:
            apart: Whether activations are in host memory.
            regathers: Whether products gather their weights again backward.
        """
        course = self.program.course(apart=apart, regathers=regathers)
        if course not in self._found:
            self._found[course] = moments(self.graph, self.facts, course)
        return self._found[course]

    def _batch_bytes(
        self,
        tables: Mapping[int, Table],
        s: CostSetting,
        *,
        only_gradients: bool = False,
    ) -> Any:
        """Returns the bytes of a device's part of the batch.

        With ``only_gradients``, only leaves count whose gradients a step returns; with
        several micro-batches these are as large.
        """
        given = self.hosting.request.batch_bytes
        if not given:
            return 0
        first = next(iter(tables))
        batch_bytes: Any = 0
        for nbytes, (tensor, home) in zip(given, self.homes, strict=True):
            leaf = self.graph.tensors[tensor]
            is_read = leaf.differentiable and not leaf.path.startswith(HANDED)
            if only_gradients and not is_read:
                continue
            table = tables[first if home is None else home]
            cut = s.shard_counts(
                self.dims.layouts[tensor], self.dims.sizes[tensor], table
            )
            batch_bytes = batch_bytes + nbytes // cut.num_shards
        return batch_bytes
