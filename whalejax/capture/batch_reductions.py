"""Reductions over the batch that are not the loss's own final mean.

A mean over samples may be computed in parts and added up. Batch normalisation, a
balance term of a mixture of experts or a division by the number of valid tokens may
not: computed on a part of the batch they give another result. This module finds them
by following the batch dimension forward through the operations' factors. It reads the
graph alone, and is apart from tracing because only reports and checks need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.sample_following import Follow
from whalejax.capture.trace import Captured
from whalejax.planner.model.graph import BatchReduction


def batch_reductions(captured: Captured) -> tuple[BatchReduction, ...]:
    """Find what a part of the batch would compute differently from the whole.

    Args:
        captured: a traced loss.

    Returns:
        Each place and kind once, in program order; only what the loss or the model's
        state depends on.
    """
    num_state = len(captured.adapter.rest_paths)
    first_state = len(captured.results) - num_state
    loss = [t for t in captured.results[:2] if t is not None]
    state = [t for t in captured.results[first_state:] if t is not None]
    follow = Follow(captured.graph, captured.jaxpr, [*loss, *state])
    follow.run()
    follow.finish(loss, state)
    found = [
        BatchReduction(scope=captured.graph.ops[index].scope, what=what)
        for index, what in sorted(follow.found.items())
    ]
    if follow.adds_up(captured.results[0]) and _no_mean(captured):
        found.append(BatchReduction(scope="", what="sum"))
    return tuple(dict.fromkeys(found))


def _no_mean(captured: Captured) -> bool:
    """Nowhere does a number stand by which a mean over the batch would divide."""
    size = captured.graph.batch_size
    weight = _compat.open_jaxpr(captured.jaxpr)[0].outvars[1]
    if size < 2 or not _compat.is_literal(weight) or float(weight.val) != 1.0:
        return False  # A weighted loss, that is: what it divides by is its own.
    for number in _numbers(captured.jaxpr):
        for value in (number, 1 / number if number else 0.0):
            parts = value / size
            if 0.5 < parts < math.inf and abs(parts - round(parts)) <= SAME * parts:
                return False
    return True


SAME: Final = 1e-6
"""By which part of itself a number in 32 bits may be off, and more."""

_SCALES: Final = frozenset(("div", "mul", "broadcast_in_dim"))
"""Operations in which a mean's number may stand."""


def _numbers(jaxpr: Any) -> Iterator[float]:
    """Every scalar that something may be scaled by in a program."""
    body, constants = _compat.open_jaxpr(jaxpr)
    for equation in body.eqns:
        for inner in _compat.inner_jaxprs(equation):
            yield from _numbers(inner)
        if equation.primitive.name in _SCALES:
            literals = filter(_compat.is_literal, equation.invars)
            yield from _scalars(x.val for x in literals)
    yield from _scalars(constants)


def _scalars(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if np.ndim(value) == 0 and np.issubdtype(np.result_type(value), np.number):
            yield abs(float(np.real(value)))
