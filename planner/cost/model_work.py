"""Computes the size of a model and the work of one of its steps, before sharding.

These are the usual figures for a model. They follow from the captured loss alone, so
all plans of a model have the same.

The FLOPs of a step are defined as for "model FLOPs utilization" (Chowdhery et al.,
"PaLM", 2022, appendix B). They are the matrix products of one forward and one backward
pass. Scores of masked positions count, recomputation does not.

Experts are stacks of matrices, which products read as a batch, by group, or one after
the other in a loop. A token uses the experts that its router chooses. Some models
compute every expert for each token and drop the results of the others, so each token
uses all experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from whalejax.meshes.dtypes import dtype_name
from whalejax.planner.model.graph import ATTENTION, CONVOLUTION, RAGGED, Graph, Op
from whalejax.planner.plan_entries import ModelWork


def active_parameters(
    graph: Graph, products: Sequence[Op], rows: int
) -> tuple[int, int]:
    """Counts the parameters that a token uses: as computed, and as its router chooses.

    Args:
        graph: Captured loss.
        products: Products of the loss.
        rows: Number of rows of the products with most of the work with weights.
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
    """Returns two fractions of each stack of matrices that one product reads.

    The first is the fraction that a token is multiplied by. The second is the fraction
    that its router chooses.
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
        if taken and met < rows:  # If not, each expert computes every token.
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
    """Returns the fractions of ``_batched_shares`` for stacks that a loop reads.

    A loop over experts slices the router's result in each iteration. A loop over layers
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
    """Returns the used fraction of each stack whose matrices tokens gather."""
    found: dict[int, float] = {}
    tensors = graph.tensors
    params = {t.id for t in graph.params}
    for op in graph.ops:
        if op.kind != "gather" or op.operands[0] not in params:
            continue
        stack, picked = tensors[op.operands[0]], tensors[op.results[0]]
        if len(stack.shape) < 3 or weight[op.results[0]]:
            continue  # The parameter has vectors, or matrices that no token chooses.
        taken = math.prod(picked.shape) * op.trip / max(1, rows)
        share = min(1.0, taken / math.prod(stack.shape))
        found[stack.id] = max(found.get(stack.id, 0.0), share)
    return found


def _choices(graph: Graph, experts: int) -> int:
    """Returns the number of experts that a token chooses, or 0 if no choice is found.

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
    parameter = {t.id: t.id for t in graph.params}
    for op in graph.ops:
        origins = {parameter[t] for t in op.operands if t in parameter}
        for slot, result in enumerate(op.results):
            if not weight[result]:
                continue
            if len(origins) == 1:
                parameter[result] = next(iter(origins))
            elif slot < len(op.operands) and op.operands[slot] in parameter:
                # The results of a loop have the parameters of its inputs, in pairs.
                parameter[result] = parameter[op.operands[slot]]
    return parameter


TOKEN_NAMES = ("tokens", "token_ids", "input_ids", "input_tokens", "inputs")
"""Names of batch leaves whose integers are tokens, the most reliable first."""


def model_work(graph: Graph, samples: int) -> ModelWork:
    """Returns the size of a captured loss, and the work of a step on a global batch.

    Args:
        graph: Captured loss, for any number of samples.
        samples: Number of samples of the global batch.
    """
    products = _in_one_branch(graph, [op for op in graph.ops if op.flops])
    rows = _common_rows(graph, products)
    weight = graph.weight_tensors()
    # Work is proportional to the samples, so that of the graph's samples is scaled.
    scale = samples / max(1, graph.batch_size)
    params = graph.params
    active, chosen = active_parameters(graph, products, rows)
    return ModelWork(
        parameters=sum(math.prod(t.shape) for t in params),
        trained=sum(math.prod(t.shape) for t in params if not t.frozen),
        active=active,
        chosen=chosen,
        samples=samples,
        tokens=round(_tokens(graph, rows) * scale),
        step_flops=round(
            sum(
                _both_passes(graph, op)
                * (1 if all(weight[t] for t in op.operands) else scale)
                for op in products
            )
        ),
        dtype=_product_dtype(graph, products),
    )


def _in_one_branch(graph: Graph, products: Sequence[Op]) -> list[Op]:
    """Returns the products without those in branches other than the largest.

    The branch of a ``lax.cond`` that a step runs is unknown. So the branch with most
    FLOPs counts, and work per second is an upper bound.
    """
    kept = [*products]
    choices = sorted({op.position for op in graph.ops if op.kind == "cond"}, key=len)
    for choice in reversed(choices):  # from the innermost to the outermost
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


def _both_passes(graph: Graph, op: Op) -> int:
    gradients = sum(graph.tensors[t].differentiable for t in op.operands)
    # Attention has three operands, but each of its two products has two gradients.
    behind = min(2, gradients)
    # The FLOPs of transposed convolutions include the zeros between elements.
    spread = math.prod(window.spread for window in op.windows)
    return op.flops * op.trip * (1 + behind) // spread


def _product_dtype(graph: Graph, products: Sequence[Op]) -> str:
    work: dict[str, int] = {}
    for op in products:
        name = graph.tensors[op.operands[0]].dtype
        work[name] = work.get(name, 0) + op.flops * op.trip
    return dtype_name(max(work, key=lambda name: work[name], default="float32"))


def _common_rows(graph: Graph, products: Sequence[Op]) -> int:
    """Returns the number of rows with most of the work with weights; 0 without any."""
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

    If a leaf has one of ``TOKEN_NAMES``, its integers are tokens. So are those of
    leaves that have the same name or index the same table. If no leaf has such a name,
    tokens are the integers whose embeddings are multiplied by weights in a large part
    of the work.
    """
    leaves = [
        (tensor.path.rpartition(".")[2].partition("[")[0], tensor)
        for tensor in graph.tensors
        if tensor.kind == "batch"
        and tensor.dtype.startswith(("int", "uint"))
        and not tensor.dtype.endswith("int8")  # Images have this dtype.
        and len(tensor.shape) <= 2
        and math.prod(tensor.shape) > graph.batch_size
    ]
    lookups = _lookups(graph)
    ids = {name: [t.id for key, t in leaves if key == name] for name, _ in leaves}
    same = next((ids[name] for name in TOKEN_NAMES if name in ids), None)
    if same is None:
        read_by = {t.id: lookups[t.id] for _, t in leaves if t.id in lookups}
        return _multiplied_rows(graph, read_by)
    named, *others = same
    count = math.prod(graph.tensors[named].shape)
    # The last token of a sample is often only a target.
    read = rows if 0 <= count - rows <= graph.batch_size else count
    words = lookups[named].words if named in lookups else None
    return read + sum(
        lookup.rows
        for leaf, lookup in lookups.items()
        if leaf != named and (lookup.words == words or leaf in others)
    )


_TOKEN_WORK: Final = 0.25
"""Smallest fraction of the work with weights at which looked-up rows are tokens."""


def _multiplied_rows(graph: Graph, lookups: Mapping[int, _Lookup]) -> int:
    """Returns the number of rows that lookups read and products multiply by weights.

    Leaves of equal lengths whose embeddings are added or concatenated count once.
    Candidates and negatives do not count, as they are only compared.
    """
    weight = graph.weight_tensors()
    carried = {t: frozenset((leaf,)) for leaf, x in lookups.items() for t in x.results}
    group = {leaf: leaf for leaf in lookups}
    multiplied = set[int]()
    token_work = work = 0
    for op in graph.ops:
        leaves = frozenset[int]().union(*(carried.get(t, ()) for t in op.operands))
        if op.matmul is not None:
            if sum(weight[t] for t in op.operands[:2]) != 1 or op.kind == ATTENTION:
                continue
            m, _, n, _ = op.matmul
            sizes = {size * trip for size in (m, n) for trip in (1, op.trip)}
            met = {x for x in leaves if lookups[x].rows in sizes}
            met = {x for x in met if lookups[x].rows > graph.batch_size}
            multiplied |= met
            work += op.flops * op.trip
            token_work += op.flops * op.trip * bool(met)
        for first, second in itertools.combinations(sorted(leaves), 2):
            if lookups[first].rows == lookups[second].rows:
                old, new = group[second], group[first]
                group = {leaf: new if g == old else g for leaf, g in group.items()}
        if leaves:
            for result in op.results:
                carried[result] = carried.get(result, frozenset()) | leaves
    if not work:  # The model has only lookups.
        read = [x.rows for x in lookups.values() if x.rows > graph.batch_size]
        return max(read, default=0)
    if token_work < _TOKEN_WORK * work:
        return 0  # Most work is not on looked-up rows, so these are no tokens.
    return sum(
        lookups[leaf].rows for leaf in {group[x]: x for x in multiplied}.values()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """Reads of parameter tables at the integers of one batch leaf.

    Attributes:
        words: Number of rows of the largest table.
        rows: Number of rows that are read.
        results: Ids of the tensors with these rows.
    """

    words: int
    rows: int
    results: tuple[int, ...] = ()


def _lookups(graph: Graph) -> dict[int, _Lookup]:
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
                results=(*before.results, result.id),
            )
        else:
            leaf_of |= dict.fromkeys(op.results, leaf)
    return lookups
