"""Counts the parameters that a token uses in a model with experts.

Experts are stacks of matrices. Products read them as a batch, by group, or one after
the other in a loop. A token uses the experts that its router chooses. Some models
compute every expert for each token and drop the unchosen results; then a token uses all
experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from whalejax.planner.model.graph import ATTENTION, RAGGED, Graph, Op


def active_parameters(
    graph: Graph, products: Sequence[Op], rows: int
) -> tuple[int, int]:
    """Counts the parameters that compute a token: all, and without unchosen experts.

    Args:
        graph: Captured loss.
        products: Products of the loss.
        rows: Number of rows in most of the work with weights.
    """
    weight = graph.weight_tensors()
    origin = _parameter_of(graph, weight)
    computed = _gathered_shares(graph, weight, rows)
    chosen = dict(computed)
    batched = _batched_shares(graph, products, rows, origin)
    looped = {} if batched else _looped_shares(graph, products, origin)
    for param, (met, taken) in (batched or looped).items():
        computed[param] = min(1.0, max(computed.get(param, 0.0), met))
        chosen[param] = min(1.0, max(chosen.get(param, 0.0), taken))
    sizes = [(t.id, math.prod(t.shape)) for t in graph.params]
    active, least = (
        round(sum(size * shares.get(t, 1.0) for t, size in sizes))
        for shares in (computed, chosen)
    )
    return active, min(active, least)


def _batched_shares(
    graph: Graph, products: Sequence[Op], rows: int, origin: Mapping[int, int]
) -> dict[int, tuple[float, float]]:
    """Returns two fractions of each stack that one product reads.

    The first computes a token; the second is the part that its router chooses.
    """
    weight = graph.weight_tensors()
    shares: dict[int, tuple[float, float]] = {}
    counts: dict[int, float] = {}
    stacks: dict[int, int] = {}
    for op in products:
        if op.matmul is None or op.kind == ATTENTION:
            continue
        sides = [weight[t] for t in op.operands[:2]]
        experts = _experts(graph, op)
        if sum(sides) != 1:
            continue
        matrix = op.operands[sides.index(True)]
        param = origin.get(matrix)
        if param is None:
            continue
        if experts == 1:
            shape = graph.tensors[matrix].shape
            stacks[param] = shape[0] if len(shape) > 2 else 1
            continue
        m, _, n, _ = op.matmul
        met = n if sides[0] else m
        if op.kind in RAGGED:
            met //= experts
        taken = _choices(graph, experts)
        share = met / max(1, rows)
        if taken and met < rows:  # Otherwise each expert computes every token.
            share = taken / experts
        before = shares.get(param, (0.0, 0.0))
        new = share, taken / experts if taken else share
        shares[param] = max(before[0], new[0]), max(before[1], new[1])
        counts.setdefault(experts, new[1])
    # One product may multiply each token by the matrices of all experts.
    for param, experts in stacks.items():
        if experts in counts:
            shares.setdefault(param, (1.0, counts[experts]))
    return shares


def _looped_shares(
    graph: Graph, products: Sequence[Op], origin: Mapping[int, int]
) -> dict[int, tuple[float, float]]:
    """Returns the same fractions for stacks whose matrices are read in a loop.

    A loop over experts slices the router's result in each iteration; a loop over layers
    does not.
    """
    weight = graph.weight_tensors()
    taken = {size: _choices(graph, size) for size in _routed_sizes(graph)}
    routed = _routed_loops(graph, weight)
    scans = {op.position: op for op in graph.ops if op.kind == "scan"}
    work: dict[int, int] = {}
    experts: dict[int, int] = {}
    for op in products:
        if op.matmul is None or op.kind == ATTENTION or op.matmul[3] > 1:
            continue
        sides = [weight[t] for t in op.operands[:2]]
        if sum(sides) != 1:
            continue
        matrix = op.operands[sides.index(True)]
        param = origin.get(matrix)
        if param is None:
            continue
        stack = graph.tensors[param].shape[:-2]
        inside = [p for p in scans if op.position[: len(p)] == p]
        counts = {n for p, n in routed.items() if p in inside} if inside else {*taken}
        looped = [n for n in stack if taken.get(n) and n in counts]
        if looped and graph.tensors[matrix].size < graph.tensors[param].size:
            m, k, n, _ = op.matmul
            work[param] = work.get(param, 0) + m * k * n * op.trip
            experts[param] = looped[0]
    return {
        param: (
            done / (_routed_rows(graph, experts[param]) * graph.tensors[param].size),
            taken[experts[param]] / experts[param],
        )
        for param, done in work.items()
    }


def _routed_sizes(graph: Graph) -> set[int]:
    kinds = ("top_k", "approx_top_k", "argmax")
    choices = [op.operands[0] for op in graph.ops if op.kind in kinds]
    shapes = [graph.tensors[t].shape for t in choices]
    return {shape[-1] for shape in shapes if shape and shape[-1] > 1}


def _routed_rows(graph: Graph, experts: int) -> int:
    rows = 1
    for op in graph.ops:
        if op.matmul is not None and op.matmul[3] == 1 and experts in op.matmul[:3:2]:
            m, _, n, _ = op.matmul
            rows = max(rows, m if n == experts else n)
    return rows


def _routed_loops(graph: Graph, weight: Sequence[bool]) -> dict[tuple[int, ...], int]:
    """Returns the lengths of scans that slice values of the batch, by position."""
    lengths: dict[tuple[int, ...], int] = {}
    for op in graph.ops:
        if op.kind != "scan" or len(op.operands) != 1 or not op.results:
            continue
        whole, part = (graph.tensors[t].shape for t in (op.operands[0], op.results[0]))
        if not weight[op.operands[0]] and whole[1:] == part and len(whole) > 1:
            lengths[op.position] = whole[0]
    return lengths


def _gathered_shares(
    graph: Graph, weight: Sequence[bool], rows: int
) -> dict[int, float]:
    """Returns the used fraction of each stack from which tokens gather matrices."""
    found: dict[int, float] = {}
    tensors = graph.tensors
    params = {t.id for t in graph.params}
    for op in graph.ops:
        if op.kind != "gather" or op.operands[0] not in params:
            continue
        stack, picked = tensors[op.operands[0]], tensors[op.results[0]]
        if len(stack.shape) < 3 or weight[op.results[0]]:
            continue  # A table of vectors, or matrices that no token chooses.
        taken = math.prod(picked.shape) * op.trip / max(1, rows)
        share = min(1.0, taken / math.prod(stack.shape))
        found[stack.id] = max(found.get(stack.id, 0.0), share)
    return found


def _choices(graph: Graph, experts: int) -> int:
    """Returns the number of experts that a token chooses; 0 if no choice is found.

    A choice is a ``top_k`` over the experts, or several ``argmax`` per product that
    scores every expert.
    """
    argmax = routers = 0
    for op in graph.ops:
        shape = graph.tensors[op.operands[0]].shape if op.operands else ()
        if op.kind in ("top_k", "approx_top_k") and shape[-1:] == (experts,):
            return graph.tensors[op.results[0]].shape[-1]
        if op.kind == "argmax" and shape[-1:] == (experts,):
            argmax += op.trip
        if op.matmul is not None and op.matmul[3] == 1 and experts in op.matmul[:3:2]:
            routers += op.trip
    return argmax // routers if routers else 0


def _experts(graph: Graph, op: Op) -> int:
    if op.kind in RAGGED:
        return graph.tensors[op.operands[2]].shape[-1]
    assert op.matmul is not None
    return op.matmul[3]


def _parameter_of(graph: Graph, weight: Sequence[bool]) -> dict[int, int]:
    """Returns the parameter of each tensor that depends on one parameter alone."""
    parameter = {t.id: t.id for t in graph.params}
    for op in graph.ops:
        origins = {parameter[t] for t in op.operands if t in parameter}
        for slot, result in enumerate(op.results):
            if not weight[result]:
                continue
            if len(origins) == 1:
                parameter[result] = next(iter(origins))
            elif slot < len(op.operands) and op.operands[slot] in parameter:
                # A loop ties its results to its inputs, pair by pair.
                parameter[result] = parameter[op.operands[slot]]
    return parameter
