"""Metadata with fewer names than a weight has dimensions: which of them has none.

Flax NNX adds a dimension to all that ``nnx.vmap`` makes, and to its metadata only where
it is told the name. A reader of the metadata alone would take the first names for the
first dimensions; the program says which dimension is that of the layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whalejax.meshes.problems import Problems
from whalejax.planner.graph import Graph, Op, Tensor
from whalejax.planner.layers import sliced_params


def aligned(graph: Graph, short: Collection[str]) -> tuple[Graph, list[str]]:
    """The graph with such names at the dimensions that they are of.

    Args:
        graph: the captured loss, whose names stand at the first dimensions.
        short: paths of weights whose metadata names all dimensions but one.

    Returns:
        The graph, and what a user should know.

    Raises:
        WhaleError: nothing tells which dimension has no name; every such weight.
    """
    if not short:
        return graph, []
    problems, notes = Problems("model"), list[str]()
    sliced = sliced_params(graph) | _indexed(graph)
    several = _batched(graph)
    tensors = list(graph.tensors)
    for t in graph.params:
        if t.path not in short:
            continue
        said = (
            f"{t.path}: its metadata names {len(t.shape) - 1} of its {len(t.shape)} "
            f"dimensions {t.shape}"
        )
        if t.id in sliced:
            tensors[t.id] = replace(
                t,
                names=_behind(t.names),
                pinned=_behind(t.pinned),
                called=_behind(t.called),
            )
            notes.append(
                f"{said}: they are taken for the last, because layers are slices of "
                "the first; name it, or say that it has no name, with "
                "transform_metadata={nnx.PARTITION_NAME: None}"
            )
        elif t.id in several:
            problems.add(
                f"{said}, and nothing says which of them has no name, as after "
                "nnx.vmap without a name for its dimension. Name each dimension, or "
                "give transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap"
            )
    problems.raise_if_any()
    return replace(graph, tensors=tuple(tensors)), notes


def _behind(texts: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return (None, *texts[:-1]) if texts else texts


def _indexed(graph: Graph) -> frozenset[int]:
    """Parameters of which operations read one slice along the first dimension."""
    return frozenset(
        op.operands[0]
        for op in graph.ops
        if op.kind in ("slice", "dynamic_slice")
        and _one_of_many(graph.tensors[op.operands[0]], graph.tensors[op.results[0]])
    )


def _one_of_many(before: Tensor, after: Tensor) -> bool:
    return before.shape[:1] != after.shape[:1] == (1,) and (
        before.shape[1:] == after.shape[1:]
    )


def _batched(graph: Graph) -> frozenset[int]:
    """Parameters whose first dimension products do not sum over, but share."""
    return frozenset(
        op.operands[slot]
        for op in graph.ops
        if op.matmul is not None
        for slot in (0, 1)
        if slot < len(op.operands) and _shares(op, slot)
    )


def _shares(op: Op, slot: int) -> bool:
    """An operand's first dimension is one of the other's and of the result's."""
    slots = [{s for s, _ in f.members} for f in op.factors if (slot, 0) in f.members]
    return any(len(found) == 3 for found in slots)
