"""The model of one pipeline stage: a part of the full model, with received inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.pipeline.program_cut import Division, Units, Value


HANDED = "handed."
"""Beginning of the paths of values that a stage receives from others."""


def stage_graph(
    graph: Graph, dims: Dimensions, division: Division, places: Sequence[int]
) -> Graph:
    """Returns the model of one stage, in which received values are inputs.

    Args:
        graph: The captured loss.
        dims: Logical dimensions of the loss.
        division: Division of the model into parts.
        places: Indices of the parts that the stage runs.
    """
    units = division.units
    inside = {index for place in places for index in division.parts[place].units}
    ops = tuple(op for op in graph.ops if units.unit_at(op.position) in inside)
    made = {t for op in ops for t in op.results}
    handed = tensors_of(units, handed_to(division, places))
    sent = tensors_of(
        units, [v for place in places for v in division.parts[place].exports]
    )
    read = {t for op in ops for t in op.operands}
    # Values that are only reported have no operation that reads them.
    read |= {n for place in places for n in division.parts[place].inputs}
    # Inputs that no stage reads are stored on the first stage.
    everywhere = {n for part in division.parts for n in part.inputs}
    unread = {t.id for t in graph.params} - everywhere if 0 in places else set()
    batch = {role.index for role in dims.batch}
    tensors = []
    for t in graph.tensors:
        if t.id in handed:
            t = replace(t, kind="batch", path=f"{HANDED}{t.id}")
        elif t.kind in ("param", "batch") and t.id not in {*read, *unread}:
            t = replace(t, kind="const", differentiable=False)
        tensors.append(t)
    carried = [
        (t, dim)
        for t in handed
        for dim, atoms in enumerate(dims.layouts[t])
        if atoms and atoms[0] in batch
    ]
    first = [(t, dim) for t, dim in graph.batch_dims if t in read]
    return replace(
        graph,
        tensors=tuple(tensors),
        ops=ops,
        loss=graph.loss if graph.loss in made else max(sent, default=graph.loss),
        batch_dims=(*first, *carried) or graph.batch_dims,
        whole=tuple(t for t in graph.whole if t in made),
        stacked=tuple(s for s in graph.stacked if s.tensor in made),
    )


def handed_to(division: Division, places: Sequence[int]) -> list[Value]:
    """Returns the values that one stage receives from others, in the order of these."""
    return sorted(
        {
            v
            for place in places
            for v in division.parts[place].imports
            if division.made_at[v] not in places
        }
    )


def tensors_of(units: Units, values: Sequence[Value]) -> list[int]:
    """Returns the ids of values in the graph, in order; scalar constants have none."""
    tensors = set()
    for value in values:
        unit = units.units[units.makers[value]]
        tensors.add(unit.tensors[unit.writes.index(value)])
    return sorted(t for t in tensors if t is not None)


def places_of(stage: int, stages: int, chunks: int) -> tuple[int, ...]:
    """Returns the indices of the parts of a model that a stage runs."""
    return tuple(range(stage, stages * chunks, stages))
