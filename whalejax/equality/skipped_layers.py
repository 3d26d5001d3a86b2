"""Finds equal layers of a Python loop, of which a reduced program runs only three.

The layers of a Python loop are consecutive equations of a traced loss. If they repeat,
only the first two layers and the last one run. Readers of a value of a skipped layer
read that of the second layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from whalejax import _compat
from whalejax.capture import Captured
from whalejax.planner.model.repeated_layers import layer_starts


MOST_LAYERS: Final = 4
"""Largest number of layers of which none is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedLayers:
    """Layers of a loop, and the equations that are skipped.

    Attributes:
        position: Position of the jaxpr of the loop.
        first: First equation of the second layer.
        period: Number of equations of a layer.
        start, end: Half-open range of the skipped equations.
        layers: Number of layers.
    """

    position: tuple[int, ...]
    first: int
    period: int
    start: int
    end: int
    layers: int

    def source(self, index: int) -> int | None:
        """Returns the equation whose results replace those of a skipped equation.

        None if the equation is not skipped.
        """
        if not self.start <= index < self.end:
            return None
        return self.first + (index - self.first) % self.period


def skipped_layers(captured: Captured) -> SkippedLayers | None:
    """Returns the layers of a traced loss that can be skipped; None if there are none.

    Args:
        captured: Traced loss.
    """
    graph = captured.graph
    starts = [graph.ops[op].position for op in layer_starts(graph)[:-1]]
    if len(starts) <= MOST_LAYERS:
        return None
    depth = next(
        (
            d
            for d, numbers in enumerate(zip(*starts, strict=False))
            if len(set(numbers)) > 1
        ),
        None,
    )
    if depth is None:
        return None
    prefix, places = starts[0][:depth], [at[depth] for at in starts]
    periods = {b - a for a, b in zip(places[1:], places[2:], strict=False)}
    if len(periods) != 1 or min(periods) < 1:
        return None
    (period,) = periods
    layers = SkippedLayers(
        position=prefix,
        first=places[1],
        period=period,
        start=places[2],
        end=places[-1],
        layers=len(places),
    )
    equations = _body(captured.jaxpr, prefix).eqns[layers.first : layers.end]
    kinds = [_kind(equation) for equation in equations]
    repeats = all(kinds[i] == kinds[i % period] for i in range(len(kinds)))
    return layers if repeats else None


def _body(jaxpr: Any, position: Sequence[int]) -> Any:
    body, _ = _compat.open_jaxpr(jaxpr)
    for index, inner in zip(position[::2], position[1::2], strict=True):
        nested = _compat.inner_jaxprs(body.eqns[index])[inner]
        body, _ = _compat.open_jaxpr(nested)
    return body


def _kind(equation: Any) -> tuple[Any, ...]:
    shapes = [
        tuple(getattr(atom.aval, "shape", ()))
        for atom in (*equation.invars, *equation.outvars)
    ]
    return equation.primitive.name, len(equation.invars), *shapes


def stand_ins(
    skipped: SkippedLayers | None, position: tuple[int, ...]
) -> Mapping[int, int]:
    """Maps each skipped equation of a jaxpr to the equation that replaces it.

    Args:
        skipped: Skipped layers, or None.
        position: Position of the jaxpr.
    """
    if skipped is None or position != skipped.position:
        return {}
    numbers = range(skipped.start, skipped.end)
    sources = ((index, skipped.source(index)) for index in numbers)
    return {index: source for index, source in sources if source is not None}
