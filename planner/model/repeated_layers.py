"""Finds the repeated layers of a model, without marks.

Layers are the body of a scan with most of the work, or parameters with equal shapes
whose paths differ in one number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from whalejax.planner.model.graph import LOOPS, Graph


_NUMBER = re.compile(r"^(.*?)(\d+)(?=\.|$)(.*)$")


def layer_starts(graph: Graph) -> tuple[int, ...]:
    """Returns the first operation of each layer of an unrolled model, and the end of
    the last layer.

    Args:
        graph: The captured loss.

    Returns:
        For each layer, the index of the first operation that reads its weights; then
        the index after the last such operation. Empty if no layers were found.
    """
    layers = _by_use(graph, graph.weight_tensors(), _numbered(graph))
    order = list(layers.values())
    if len(set(order)) < 2 or order != sorted(order):
        # No layers, or a model that uses its layers more than once.
        return ()
    first = {layer: index for index, layer in reversed(layers.items())}
    return (*sorted(first.values()), max(layers) + 1)


def stacked_loop(graph: Graph) -> tuple[int, ...] | None:
    """Returns the position of the scan over slices of weights with most work, or None.

    Args:
        graph: The captured loss.
    """
    return next(iter(stacked_loops(graph)), None)


def stacked_loops(graph: Graph) -> list[tuple[int, ...]]:
    """Returns the positions of the scans over slices of weights, that with most work
    first.

    A few layers below a large vocabulary have less than half of the parameters, but are
    still layers.

    Args:
        graph: The captured loss.
    """
    weight = graph.weight_tensors()
    slicing: set[tuple[int, ...]] = set()
    for op in graph.ops:
        if op.kind == "scan" and op.trip == 1 and len(op.operands) == 1:
            stack, one = op.operands[0], op.results
            if weight[stack] and one and weight[one[0]]:
                before, after = graph.tensors[stack].shape, graph.tensors[one[0]].shape
                if len(before) == len(after) + 1 and before[1:] == after:
                    slicing.add(op.position)
    work: Counter[tuple[int, ...]] = Counter()
    for op in graph.ops:
        for place in range(1, len(op.position), 2):
            if op.position[:place] in slicing:
                work[op.position[:place]] += op.flops * op.trip
    return [position for position, _ in work.most_common()]


def sliced_params(graph: Graph) -> frozenset[int]:
    """Returns the ids of parameters that loops slice, through casts and the like."""
    tensors = graph.tensors
    same = {t.id: t.id for t in graph.params}
    sliced: set[int] = set()
    for op in graph.ops:
        if len(op.operands) != 1 or len(op.results) != 1:
            continue
        leaf, before = same.get(op.operands[0]), tensors[op.operands[0]].shape
        after = tensors[op.results[0]].shape
        slices = len(before) == len(after) + 1 and after == before[1:]
        if leaf is not None and op.kind in LOOPS and slices:
            sliced.add(leaf)
        elif leaf is not None and (op.elementwise or op.reshape):
            if after[:1] == before[:1]:
                same[op.results[0]] = leaf
    return frozenset(sliced)


def _by_use(
    graph: Graph, weight: Sequence[bool], numbered: Mapping[int, int]
) -> dict[int, int]:
    """Returns the layers of operations that read their weights, by the first use."""
    of_tensor = dict(numbered)
    reads: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        known = [of_tensor[t] for t in op.operands if t in of_tensor]
        if known and all(weight[t] for t in op.results):
            of_tensor.update(dict.fromkeys(op.results, known[0]))
        elif known:
            reads[index] = known[-1]
    place = {number: i for i, number in enumerate(dict.fromkeys(reads.values()))}
    return {index: place[number] for index, number in reads.items()}


def _numbered(graph: Graph) -> dict[int, int]:
    families: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for t in graph.params:
        match = _NUMBER.match(t.path)
        if match:
            before, number, rest = match.groups()
            families[before][int(number)].append((rest, t.id))
    best: dict[int, int] = {}
    most = 0
    for members in families.values():
        kinds = {
            tuple(sorted((r, graph.tensors[i].shape) for r, i in leaves))
            for leaves in members.values()
        }
        nbytes = sum(graph.tensors[i].nbytes for v in members.values() for _, i in v)
        if len(kinds) == 1 and len(members) > 1 and nbytes > most:
            most = nbytes
            order = {number: place for place, number in enumerate(sorted(members))}
            best = {i: order[n] for n, v in members.items() for _, i in v}
    return best
