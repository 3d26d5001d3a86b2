"""The size of a model and the work of one of its steps, before sharding.

These are the figures that people quote for a model and divide throughput by. They
follow from the captured loss alone, so they are the same for all its plans.

The FLOPs of a step are those of the "model FLOPs utilization" of Chowdhery et al.,
"PaLM" (2022, appendix B): matrix products of one forward and one backward pass, scores
of masked positions included, and no recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.meshes.dtypes import dtype_name
from whalejax.planner.model.graph import ATTENTION, CONVOLUTION, RAGGED, Graph, Op
from whalejax.planner.plan_entries import ModelWork


TOKEN_NAMES = ("tokens", "token_ids", "input_ids", "input_tokens", "inputs")
"""Names of a batch leaf whose integers are tokens, the most reliable first."""


def model_work(graph: Graph, samples: int) -> ModelWork:
    """Returns the size of a captured loss, and its work on a global batch.

    Args:
        graph: Captured loss, on any number of samples.
        samples: Samples of the global batch.
    """
    products = _in_one_branch(graph, [op for op in graph.ops if op.flops])
    rows = _common_rows(graph, products)
    weight = graph.weight_tensors()
    # Work is proportional to the samples: a few suffice.
    scale = samples / max(1, graph.batch_size)
    params = graph.params
    return ModelWork(
        parameters=sum(math.prod(t.shape) for t in params),
        trained=sum(math.prod(t.shape) for t in params if not t.frozen),
        active=_active_parameters(graph, products, rows),
        samples=samples,
        tokens=round(_tokens(graph, rows) * scale),
        step_flops=round(
            sum(
                _both_passes(graph, op) * (1 if _of_weights(weight, op) else scale)
                for op in products
            )
        ),
        dtype=_product_dtype(graph, products),
    )


def _in_one_branch(graph: Graph, products: Sequence[Op]) -> list[Op]:
    """Returns the products without those in branches other than the largest.

    A step takes one unknown branch of a ``lax.cond``. So the one with the most FLOPs
    counts, and work per second is an upper bound.
    """
    kept = [*products]
    choices = sorted({op.position for op in graph.ops if op.kind == "cond"}, key=len)
    for choice in reversed(choices):  # inner ones first
        depth = len(choice)
        by_branch: dict[int, int] = {}
        for op in kept:
            if op.position[:depth] == choice and len(op.position) > depth:
                branch = op.position[depth]
                work = _both_passes(graph, op)
                by_branch[branch] = by_branch.get(branch, 0) + work
        largest = max(by_branch, key=lambda branch: by_branch[branch], default=None)
        kept = [
            op
            for op in kept
            if op.position[:depth] != choice
            or len(op.position) <= depth
            or op.position[depth] == largest
        ]
    return kept


def _of_weights(weight: Sequence[bool], op: Op) -> bool:
    """Returns whether an operation reads only weights, so that the number of samples is
    irrelevant.
    """
    return all(weight[t] for t in op.operands)


def _both_passes(graph: Graph, op: Op) -> int:
    """Returns the FLOPs of an operation and of the gradients of its operands."""
    gradients = sum(graph.tensors[t].differentiable for t in op.operands)
    # Attention is two products, of which each has two gradients.
    behind = min(2, gradients)
    # The FLOPs of transposed convolutions include the zeros between samples.
    spread = math.prod(window.spread for window in op.windows)
    return op.flops * op.trip * (1 + behind) // spread


def _product_dtype(graph: Graph, products: Sequence[Op]) -> str:
    work: dict[str, int] = {}
    for op in products:
        name = graph.tensors[op.operands[0]].dtype
        work[name] = work.get(name, 0) + op.flops * op.trip
    return dtype_name(max(work, key=lambda name: work[name], default="float32"))


def _common_rows(graph: Graph, products: Sequence[Op]) -> int:
    """Returns the rows of most of the work with weights: tokens, if there are any.

    Returns:
        Number of rows; 0 without products of weights.
    """
    weight = graph.weight_tensors()
    work: dict[int, int] = {}
    for op in products:
        if op.matmul is None or op.kind in (CONVOLUTION, ATTENTION, *RAGGED):
            continue
        m, _, n, batch = op.matmul
        left, right = (weight[t] for t in op.operands[:2])
        if left != right and batch == 1:
            rows = n if left else m
            work[rows] = work.get(rows, 0) + op.flops * op.trip
    return max(work, key=lambda rows: work[rows], default=0)


def _tokens(graph: Graph, rows: int) -> int:
    """Returns the number of tokens of the traced batch.

    They are the integers of a leaf with one of ``TOKEN_NAMES``, or else of one whose
    embeddings are the rows of most of the work with weights.
    """
    leaves = [
        (tensor.path.rpartition(".")[2].partition("[")[0], tensor)
        for tensor in graph.tensors
        if tensor.kind == "batch"
        and tensor.dtype.startswith(("int", "uint"))
        and not tensor.dtype.endswith("int8")  # Images have this type.
        and len(tensor.shape) <= 2
        and math.prod(tensor.shape) > graph.batch_size
    ]
    lookups, by_name = _lookups(graph), {name: leaf.id for name, leaf in leaves}
    named = next((by_name[name] for name in TOKEN_NAMES if name in by_name), None)
    if named is not None:
        count = math.prod(graph.tensors[named].shape)
        # The last token of a sample is often only a target.
        read = rows if 0 <= count - rows <= graph.batch_size else count
    else:
        # Other leaves may be candidates or negatives of the same table.
        read_rows = {lookups[t.id].rows for _, t in leaves if t.id in lookups}
        is_read = rows in read_rows and rows > graph.batch_size
        return rows if is_read else 0  # Work may be proportional to samples.
    words = lookups[named].words if named in lookups else None
    return read + sum(
        lookup.rows
        for leaf, lookup in lookups.items()
        if leaf != named and lookup.words == words
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """Reads of tables of parameters by one leaf of the batch.

    Attributes:
        words: Rows of the largest table.
        rows: Number of rows that are read.
    """

    words: int
    rows: int


def _lookups(graph: Graph) -> dict[int, _Lookup]:
    """Returns the reads of tables by each leaf of the batch that indexes some.

    Targets are compared, not looked up.
    """
    weight = graph.weight_tensors()
    leaf_of = {t.id: t.id for t in graph.tensors if t.kind == "batch"}
    lookups: dict[int, _Lookup] = {}
    for op in graph.ops:
        leaves = {leaf_of[t] for t in op.operands if t in leaf_of}
        if len(leaves) != 1:
            continue
        (leaf,) = leaves
        table = op.operands[0]
        if op.kind == "gather" and weight[table] and table not in leaf_of:
            before = lookups.get(leaf, _Lookup(words=0, rows=0))
            result = graph.tensors[op.results[0]]
            lookups[leaf] = _Lookup(
                words=max(before.words, graph.tensors[table].shape[0]),
                rows=max(before.rows, math.prod(result.shape[:-1]) * op.trip),
            )
        else:
            leaf_of |= dict.fromkeys(op.results, leaf)
    return lookups


def _active_parameters(graph: Graph, products: Sequence[Op], rows: int) -> int:
    """Returns the elements of parameters that a token uses."""
    shares = _expert_shares(graph, products, rows)
    return round(sum(math.prod(t.shape) * shares.get(t.id, 1.0) for t in graph.params))


def _expert_shares(
    graph: Graph, products: Sequence[Op], rows: int
) -> Mapping[int, float]:
    """Returns the used fractions of parameters that a token uses in part, by tensor."""
    weight = graph.weight_tensors()
    origin = _parameter_of(graph, weight)
    expert_shares = _gathered_shares(graph, weight, rows)
    for op in products:
        if op.matmul is None or op.kind == ATTENTION:
            continue
        sides = [weight[t] for t in op.operands[:2]]
        experts = _experts(graph, op)
        if sum(sides) != 1 or experts == 1:
            continue
        param = origin.get(op.operands[sides.index(True)])
        if param is None:
            continue
        m, _, n, _ = op.matmul
        met = n if sides[0] else m
        if op.kind in RAGGED:
            met //= experts
        taken = _choices(graph, experts)
        share = met / max(1, rows)
        if taken and met < rows:  # Otherwise each expert computes every token.
            share = taken / experts
        expert_shares[param] = min(1.0, max(expert_shares.get(param, 0.0), share))
    return expert_shares


def _gathered_shares(
    graph: Graph, weight: Sequence[bool], rows: int
) -> dict[int, float]:
    """Returns the used fractions of stacks of matrices from which each token gathers
    its own.
    """
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
    """Returns the number of matrices of a product, each for some rows."""
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
