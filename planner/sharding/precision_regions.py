"""Finds the TaskGraphs that compute in 16 bits, and the effect on the parameters.

The others keep the model's own types. The captured program has the type in which each
parameter is read; it decides the bytes that are gathered and stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import Problems
from whalejax.planner.cost_terms import ALL, Chosen
from whalejax.planner.model.expert_regions import check_task_graphs
from whalejax.planner.model.graph import LOOPS, Graph, Tensor, makes_weights
from whalejax.planner.plan_errors import PlanError


def precision_for(task_graph: str, precisions: Mapping[str, str]) -> str:
    """Returns the precision of a TaskGraph: its own, or the one for all.

    >>> precision_for("split", {"*": "bf16", "replicate": "f32"})
    'bf16'
    """
    return precisions.get(task_graph, precisions.get(ALL, "f32"))


def checked_precisions(asked: Mapping[str, str], graph: Graph) -> Chosen:
    """Returns the user's choices as (TaskGraph, precision) pairs.

    Args:
        asked: Precision by the name of a TaskGraph; ``"*"`` means all others.
        graph: Captured loss.

    Returns:
        Pairs for precisions other than ``f32``, and for exceptions from ``"*"``.

    Raises:
        PlanError: A precision or TaskGraph does not exist; the message lists all.
    """
    problems = Problems("precision", PlanError)
    given = dict(asked)
    check_task_graphs(given, graph, problems)
    for text in dict.fromkeys(repr(p) for p in given.values() if p not in PRECISIONS):
        problems.add(
            f"{text:.60} is no precision; expected one of {', '.join(PRECISIONS)}"
        )
    problems.raise_if_any()
    rest = given.pop(ALL, "f32")
    kept = [(name, precision) for name, precision in given.items() if precision != rest]
    return (*kept, *([(ALL, rest)] if rest != "f32" else []))


def read_bytes(graph: Graph, weight: Sequence[bool]) -> dict[int, float]:
    """Returns the relative size of parameters in the widest type that is read.

    Args:
        graph: Captured loss.
        weight: Whether each tensor depends on parameters alone.

    Returns:
        Multiple of the stored bytes, by tensor id; above 1 for quantised weights.
    """
    widest: dict[int, float] = {}
    for op in reversed(graph.ops):
        if op.kind in LOOPS and not op.results:
            continue  # It ties dimensions and reads nothing.
        passed = makes_weights(op, weight)
        for t in {t for t in op.operands if weight[t]}:
            own = _itemsize(graph.tensors[t])
            if passed:
                own = max((widest.get(r, 0.0) for r in op.results), default=0.0)
            widest[t] = max(widest.get(t, 0.0), own)
    return {t.id: widest.get(t.id, 0.0) / _itemsize(t) or 1.0 for t in graph.params}


def _itemsize(tensor: Tensor) -> float:
    return tensor.nbytes / max(1, math.prod(tensor.shape)) or 1.0
