"""Metadata with fewer names than a weight has dimensions: finds the unnamed dimension.

``nnx.vmap`` adds a dimension to all variables that it makes, but to their metadata only
if it is given the name. Metadata alone would assign the first names to the first
dimensions. The program shows the dimension of the layers: it reads them one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from whalejax.meshes.errors import Problems
from whalejax.planner.model.graph import LOOPS, Graph, Op


Shape = tuple[int, ...]
Texts = tuple[str | None, ...]

_INDEXING = ("slice", "dynamic_slice", "split")


def aligned(graph: Graph, short: Mapping[str, int]) -> tuple[Graph, list[str]]:
    """Returns the graph with the names moved to the dimensions that they describe.

    Args:
        graph: The captured loss, whose names are at the first dimensions.
        short: Number of missing names, by the paths of weights whose metadata does not
            name all dimensions.

    Returns:
        The graph, and notes for the user.

    Raises:
        WhaleError: Nothing shows which dimensions have no name; lists all such weights.
    """
    if not short:
        return graph, []
    problems, notes = Problems("model"), list[str]()
    looped, indexed = _taken_singly(graph)
    tensors = list(graph.tensors)
    for t in graph.params:
        missing = short.get(t.path, 0)
        if not missing:
            continue
        said = (
            f"{t.path}: its metadata names {len(t.shape) - missing} of its "
            f"{len(t.shape)} dimensions {t.shape}"
        )
        stacks = (looped[t.id], looped[t.id] | indexed[t.id])
        result = next((dims for dims in stacks if len(dims) == missing), None)
        if result is None:
            problems.add(
                f"{said}, and nothing says which of them has no name, as after "
                "nnx.vmap without a name for its dimension. Name each dimension, with "
                "None for one that has no name, or give "
                "transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap"
            )
            continue
        tensors[t.id] = replace(
            t,
            names=_align_to_unstacked_dims(result, t.names),
            pinned=_align_to_unstacked_dims(result, t.pinned),
            called=_align_to_unstacked_dims(result, t.called),
        )
        notes.append(
            f"{said}: they are taken for those beside dimension "
            f"{' and '.join(map(str, sorted(result)))}, which the model takes one by "
            "one as layers; name it, or say that it has no name, with "
            "transform_metadata={nnx.PARTITION_NAME: None}"
        )
    problems.raise_if_any()
    return replace(graph, tensors=tuple(tensors)), notes


def _align_to_unstacked_dims(stacks: Collection[int], texts: Texts) -> Texts:
    own = iter(texts)
    return tuple(None if d in stacks else next(own) for d in range(len(texts)))


def _taken_singly(
    graph: Graph,
) -> tuple[defaultdict[int, set[int]], defaultdict[int, set[int]]]:
    """Returns dimensions of parameters that a loop, or an index, reads one by one.

    They are followed through casts and transpositions.
    """
    # The parameter's dimension at each dimension of a value; -1 where there is none.
    origin = {t.id: (t.id, tuple(range(len(t.shape)))) for t in graph.params}
    looped, indexed = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for op in graph.ops:
        if not op.operands or not op.results or op.operands[0] not in origin:
            continue
        leaf, dims = origin[op.operands[0]]
        before = graph.tensors[op.operands[0]].shape
        after = graph.tensors[op.results[0]].shape
        single = len(op.operands) == len(op.results) == 1
        if single and op.kind in LOOPS and after == before[1:]:
            looped[leaf].add(dims[0])
            origin[op.results[0]] = leaf, dims[1:]
        elif op.kind in _INDEXING:
            indexed[leaf] |= {dims[d] for d in _indexed(before, after)}
        elif single and sorted(before) == sorted(after):
            origin[op.results[0]] = leaf, _through(op, dims)
    for result in (*looped.values(), *indexed.values()):
        result.discard(-1)
    return looped, indexed


def _indexed(before: Shape, after: Shape) -> list[int]:
    """Returns the dimension that a slice cuts to one element, if it cuts no other."""
    if len(before) != len(after):
        return []
    cut = [
        d
        for d, sizes in enumerate(zip(before, after, strict=True))
        if len({*sizes}) > 1
    ]
    return cut if len(cut) == 1 and after[cut[0]] == 1 else []


def _through(op: Op, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the positions of dimensions after an operation that only permutes."""
    result = [-1] * len(dims)
    for factor in op.factors:
        ends = dict(factor.members)
        if factor.kind == "linked" and ends.keys() == {0, 1}:
            result[ends[1]] = dims[ends[0]]
    return tuple(result)
