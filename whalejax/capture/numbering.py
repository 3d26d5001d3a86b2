"""Finds batch arrays that hold indices of samples, such as the edges of a graph.

Every micro-batch gets such an array whole, with a part of the samples that its numbers
are of, and no program can tell what that means: plans keep to one, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whalejax import _compat
from whalejax.capture.batch import TracedLeaf


def numbering_leaves(jaxpr: Any, leaves: Sequence[TracedLeaf]) -> tuple[str, ...]:
    """Paths of whole numbers without samples, where samples are looked up by number.

    Args:
        jaxpr: the traced loss.
        leaves: of the batch.
    """
    found = tuple(
        leaf.path
        for leaf in leaves
        if leaf.axis is None and leaf.shape and np.issubdtype(leaf.dtype, np.integer)
    )
    sizes = {leaf.micro_shape[leaf.axis] for leaf in leaves if leaf.axis is not None}
    return found if found and sizes & set(_looked_up(jaxpr)) else ()


def _looked_up(jaxpr: Any) -> Iterator[int]:
    """Sizes of the dimensions along which elements are taken or added by number."""
    body, _ = _compat.open_jaxpr(jaxpr)
    for equation in body.eqns:
        for inner in _compat.inner_jaxprs(equation):
            yield from _looked_up(inner)
        numbers = equation.params.get("dimension_numbers")
        for name in ("start_index_map", "scatter_dims_to_operand_dims"):
            for dim in getattr(numbers, name, ()):
                yield equation.invars[0].aval.shape[dim]
