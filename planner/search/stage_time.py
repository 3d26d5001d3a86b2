"""Time of one micro-batch on a pipeline stage, from the predicted time of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    as_run,
    row_ahead,
    row_hits,
)
from whalejax.planner.model.analysis import GraphAnalysis
from whalejax.planner.model.dimensions import roles_of
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.combined_steps import MicroBatchCost, micro_batch_cost
from whalejax.planner.pipeline.layer_stack import STAGE
from whalejax.planner.plan_entries import Collective
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import LayoutCandidate
from whalejax.planner.sharding.layout import shards, spec_of
from whalejax.planner.sharding.operation_rows import Row


def turn_of(
    search: Search, scored: LayoutCandidate, ahead_rows: Sequence[Row] | None = None
) -> MicroBatchCost:
    """Returns the costs of one micro-batch on a stage.

    Args:
        search: Search of the stage's model.
        scored: Layout of the stage.
        ahead_rows: Cost rows of the forward pass; default: all rows of the model.
    """
    time, count = scored.time, scored.num_micro_batches
    s = search.setting(scored.mesh, count)
    costs = [
        row_ahead(row, row_hits(row, scored.tables[row.task_graph], s), s)
        for row in (search.rows.ops if ahead_rows is None else ahead_rows)
    ]
    return micro_batch_cost(
        time,
        count,
        forward={
            "compute_seconds": float(sum(cost[0] for cost in costs)),
            "launch_seconds": float(sum(cost[1] for cost in costs))
            * search.cluster.slowest.launch_seconds,
        },
        forward_shares=_sent_ahead(scored.collectives, s),
        weight_share=_weight_share(search.graph),
    )


_TERMS = {  # Time term of a collective, by the purpose of the collective.
    "gradient": "gradient_seconds",
    "parameter": "parameter_seconds",
    "activation": "activation_seconds",
    "ring": "activation_seconds",
    "border": "border_seconds",
    "halo": "border_seconds",
}


def _sent_ahead(collectives: Sequence[Collective], s: CostSetting) -> dict[str, float]:
    """Returns the forward pass's part of each communication term, by name.

    Collectives are assumed to overlap with computation equally in both passes. So each
    term is divided in proportion to the time of the collectives without overlap.
    """
    whole: dict[str, float] = defaultdict(float)
    ahead: dict[str, float] = defaultdict(float)
    for c in collectives:
        if c.phase in ("forward", "backward"):
            term = _TERMS[c.what]
            _, seconds = as_run(c, s)
            whole[term] += seconds
            ahead[term] += seconds * (c.phase == "forward")
    return {term: ahead[term] / seconds for term, seconds in whole.items() if seconds}


def _weight_share(graph: Graph) -> float:
    """Returns the fraction of the backward pass's products that can be postponed.

    They are products of weights' gradients outside loops and checkpointed regions. The
    backward pass of a loop or region is one operation.
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
    """Returns the bytes of some values of one micro-batch, on one device of a stage.

    Args:
        analysed: Model that computes or reads the values.
        scored: Layout of the model.
        tensors: Ids of the values.
        parts: Number of micro-batches that the captured batch stands for.
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
    """Returns the seconds of a transfer between neighbouring stages.

    Args:
        nbytes: Bytes that each device transfers.
        mesh: Axis sizes, including ``stage``.
        cluster: Devices and links of the cluster.
    """
    parts = axis_parts((STAGE,), mesh, cluster)
    return float(collective_seconds("collective-permute", int(nbytes), parts))
