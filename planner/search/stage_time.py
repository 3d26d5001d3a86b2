"""Seconds that a pipeline stage takes for one micro-batch, from the cost of a step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    row_ahead,
    row_hits,
)
from whalejax.planner.cost_terms import TimeTerms
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import roles_of
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.plan_entries import Collective
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate
from whalejax.planner.sharding.layout import shards, spec_of
from whalejax.planner.sharding.operation_rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCost:
    """One micro-batch, and what is done once in a step.

    Attributes:
        ahead: Its forward pass.
        both: Forward and backward.
        once: The update.
        weight_share: Part of the backward pass that makes gradients of parameters and
            can be put off.
    """

    ahead: TimeTerms
    both: TimeTerms
    once: TimeTerms
    weight_share: float

    def measured(self, ratio: float) -> MicroBatchCost:
        """The same where a micro-batch took so many times what is predicted."""
        ahead, both = times(self.ahead, ratio), times(self.both, ratio)
        return replace(self, ahead=ahead, both=both)


def turn_of(
    search: Search, scored: LayoutCandidate, ahead_rows: Sequence[Row] | None = None
) -> MicroBatchCost:
    """Returns the costs of a micro-batch on a stage.

    Args:
        search: Search of its model.
        scored: Its layout.
        ahead_rows: Rows of its forward pass; default: all of the model.
    """
    time, count = scored.time, scored.num_micro_batches
    s = search.setting(scored.mesh, count)
    costs = [
        row_ahead(row, row_hits(row, scored.tables[row.task_graph], s), s)
        for row in (search.rows.ops if ahead_rows is None else ahead_rows)
    ]
    ahead = TimeTerms(
        compute_seconds=float(sum(cost[0] for cost in costs)),
        launch_seconds=float(sum(cost[1] for cost in costs))
        * search.cluster.slowest.launch_seconds,
    )
    once = TimeTerms(
        update_seconds=time.update_seconds,
        allocation_seconds=time.allocation_seconds,
        offload_seconds=time.offload_seconds,
    )
    both = times(less(time, once), 1 / count)
    return MicroBatchCost(
        ahead=replace(ahead, **_sent_ahead(scored.collectives, both, s)),
        both=both,
        once=once,
        weight_share=_weight_share(search.graph),
    )


_TERMS = {  # What a collective is for, and the term that its seconds count in.
    "gradient": "gradient_seconds",
    "parameter": "parameter_seconds",
    "activation": "activation_seconds",
    "ring": "activation_seconds",
    "border": "border_seconds",
    "halo": "border_seconds",
}


def _sent_ahead(
    collectives: Sequence[Collective], both: TimeTerms, s: CostSetting
) -> dict[str, float]:
    """The forward pass's part of each term of communication, by name.

    What is hidden behind computation is hidden in either pass alike, so each term is
    dealt out by what the collectives of the passes take by themselves.
    """
    whole: dict[str, float] = defaultdict(float)
    ahead: dict[str, float] = defaultdict(float)
    for c in collectives:
        if c.phase in ("forward", "backward"):
            term = _TERMS[c.what]
            _, seconds = as_run(c, s)
            whole[term] += seconds
            ahead[term] += seconds * (c.phase == "forward")
    return {
        term: getattr(both, term) * ahead[term] / seconds
        for term, seconds in whole.items()
        if seconds
    }


def _weight_share(graph: Graph) -> float:
    """Returns the fraction of the backward pass's products that can be postponed.

    Those are products of values with weights, but in loops and in regions that are
    computed again, whose backward pass is one operation.
    """
    weight = graph.weight_tensors()
    late = whole = 0
    for op in graph.ops:
        if op.matmul is None:
            continue
        flows = sum(graph.tensors[t].differentiable for t in op.operands[:2])
        whole += op.flops * op.trip * flows
        alone = op.trip == 1 and op.remat is None
        if alone and flows > 1 and any(weight[t] for t in op.operands[:2]):
            late += op.flops
    return late / whole if whole else 0.0


def handed_bytes(
    analysed: GraphAnalysis, scored: LayoutCandidate, tensors: Sequence[int], parts: int
) -> float:
    """Returns the bytes of some values of a micro-batch on a device of a stage.

    Args:
        analysed: The model that makes or reads them.
        scored: Its layout.
        tensors: Their ids.
        parts: Micro-batches in what the model was captured with.
    """
    graph, dims, mesh = analysed.graph, analysed.dims, scored.mesh
    homes = graph.homes() if tensors else {}
    batch, result = {role.index for role in dims.batch}, 0.0
    for t in tensors:
        table = scored.tables[homes.get(t, 0)]
        spec = spec_of(dims.layouts[t], dims.sizes[t], table, mesh)
        cut = roles_of(dims.layouts[t]) & batch
        result += graph.tensors[t].nbytes // shards(spec, mesh) // (parts if cut else 1)
    return result


def handed_seconds(nbytes: float, mesh: Mapping[str, int], cluster: Cluster) -> float:
    """Returns the seconds of a transfer from the devices of one stage to the next.

    Args:
        nbytes: Bytes that each of them transfers.
        mesh: Axis sizes, with that of the stages.
        cluster: The machine.
    """
    parts = axis_parts((STAGE,), mesh, cluster)
    return float(collective_seconds("collective-permute", int(nbytes), parts))


def times(terms: TimeTerms, number: float) -> TimeTerms:
    """Every term so many times."""
    return TimeTerms(
        **{f.name: getattr(terms, f.name) * number for f in dataclasses.fields(terms)}
    )


def less(terms: TimeTerms, other: TimeTerms) -> TimeTerms:
    """Every term less another's."""
    return terms + times(other, -1)
