"""Finds attention that can run blockwise (ring), and checks requests for it.

Otherwise keys and values of a sharded sequence are gathered, and all scores of a
device's rows are in memory at once. Blockwise, keys and values go round a ring of
devices, and one block of scores is in memory at a time; the backward pass recomputes
the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import ALL, Chosen
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.dimensions import roles_of
from whalejax.planner.model.expert_regions import check_task_graphs
from whalejax.planner.model.graph import ATTENTION, Graph
from whalejax.planner.plan_errors import PlanError


KINDS = ("gather", "ring")
"""Kinds of attention: as the model computes it, or blockwise."""


def checked_attention(
    asked: str | Mapping[str, str] | None, graph: Graph
) -> Chosen | None:
    """Returns the user's choices as (TaskGraph, kind) pairs; None if there are none.

    Args:
        asked: Kind for all TaskGraphs, or kinds by the name of a TaskGraph.
        graph: Captured loss.

    Raises:
        PlanError: A kind or TaskGraph does not exist; the message lists all.
    """
    if asked is None:
        return None
    problems = Problems("attention", PlanError)
    if not isinstance(asked, str | Mapping):
        problems.add(f"{asked!r:.60} is neither a kind nor one for each TaskGraph")
        asked = {}
    given = {ALL: asked} if isinstance(asked, str) else dict(asked)
    check_task_graphs(given, graph, problems)
    for kind in given.values():
        if kind not in KINDS:
            problems.add(f"{kind!r:.60} is no kind; expected one of {', '.join(KINDS)}")
    problems.raise_if_any()
    rest = given.pop(ALL, "gather")
    kept = [(name, kind) for name, kind in given.items() if kind != rest]
    return (*kept, *([(ALL, rest)] if rest != "gather" else []))


def check_rings(
    graph: Graph,
    attention: Chosen,
    reasons: Sequence[str],
    everywhere: Callable[[], Graph],
) -> None:
    """Checks that some attention can run blockwise if the user asked for it.

    Args:
        graph: Loss with the requested attention in blocks where that is possible.
        attention: Choices of the user.
        reasons: Reasons why other attention cannot run blockwise.
        everywhere: Function that returns the loss with all possible attention in
            blocks, whether requested or not.

    Raises:
        PlanError: No attention runs blockwise.
    """
    if "ring" not in dict(attention).values():
        return
    if any(op.kind == ATTENTION for op in graph.ops):
        return
    ops, regions = everywhere().ops, graph.task_graphs
    where = {regions[op.task_graph].name for op in ops if op.kind == ATTENTION}
    if where:
        asked = ", ".join(name for name, kind in attention if kind == "ring")
        raise PlanError(
            f"attention: ring was asked for in {asked}, where no attention can run in "
            f"blocks. Some that can stands in {', '.join(sorted(where))}: name that, "
            "or '*' for all"
        )
    why = "; ".join(reasons) or (
        "no softmax between two products was found, whose queries and keys are of one "
        "sequence. Call wh.attention, or jax.nn.dot_product_attention, where the model "
        "attends"
    )
    raise PlanError(
        f"attention: ring was asked for, and no attention can run in blocks: {why}. "
        "Or drop attention="
    )


def ringed(graph: Graph, kinds: Mapping[str, str]) -> frozenset[tuple[int, ...]]:
    """Returns the positions of the attention that runs blockwise.

    Attention runs blockwise if this is chosen for its TaskGraph, its queries and keys
    belong to one sequence, and no operand depends on parameters alone.

    Args:
        graph: Captured loss with each attention as one operation.
        kinds: Kinds of ``KINDS``, by the name of a TaskGraph or ``"*"``.
    """
    analysed = analyse_graph(graph)
    graph, dims = analysed.graph, analysed.dims
    weight = graph.weight_tensors()
    result = set()
    for index, op in enumerate(graph.ops):
        if op.kind != ATTENTION or any(weight[t] for t in op.operands):
            continue
        name = graph.task_graphs[op.task_graph].name
        layouts = [
            dims.seen.get((index, slot), dims.layouts[t])
            for slot, t in enumerate(op.operands)
        ]
        column = {*layouts[1][op.column]}
        alike = column and column <= roles_of(layouts[0])
        if alike and kinds.get(name, kinds.get(ALL, "gather")) == "ring":
            result.add(op.position)
    return frozenset(result)
