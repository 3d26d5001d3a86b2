"""Finds the bounds of a batch's integers, such as tokens or classes, in a traced loss.

An index of a lookup is below the length of the table. An integer that is compared with
an iota along a dimension is below the length of the dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from whalejax import _compat


_PASSING: Final = frozenset(
    "convert_element_type reshape broadcast_in_dim squeeze expand_dims slice transpose "
    "concatenate pad rev select_n add sub max min clamp dynamic_slice copy gather rem "
    "reduce_max reduce_min stop_gradient sort".split()
)
"""Primitives whose results have the bounds of their operands."""

Inputs = frozenset[int]
_NOTHING: Final[Inputs] = frozenset()


def index_bounds(jaxpr: Any) -> dict[int, int]:
    """Returns the exclusive upper bound of each integer input, by input number.

    Args:
        jaxpr: Jaxpr of the flat loss, at its final sizes.

    Returns:
        Bounds of the inputs that are used as indices.
    """
    bounds = _Bounds()
    body, _ = _compat.open_jaxpr(jaxpr)
    given = [
        (frozenset((i,)) if not _compat.is_inexact(v.aval.dtype) else _NOTHING, 0)
        for i, v in enumerate(body.invars)
    ]
    bounds.body(jaxpr, given)
    return bounds.least


Known = tuple[Inputs, int]
"""Numbers of the inputs from which a value is taken, and its length if an iota."""


class _Bounds:
    def __init__(self) -> None:
        self.least: dict[int, int] = {}

    def body(self, jaxpr: Any, given: Sequence[Known]) -> list[Known]:
        inner, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Known] = {v: (_NOTHING, 0) for v in inner.constvars}
        env.update(zip(inner.invars, given, strict=True))
        del constants

        def read(atom: Any) -> Known:
            return (_NOTHING, 0) if _compat.is_literal(atom) else env[atom]

        for equation in inner.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = self._equation(equation, operands)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _equation(self, equation: Any, given: Sequence[Known]) -> list[Known]:
        kind, count = _compat.recursion(equation), len(equation.outvars)
        inner = _compat.inner_jaxprs(equation)
        if kind in ("inline", "opaque", "remat"):
            return self.body(inner[0], given)
        if kind == "scan":
            return self.body(inner[0], given)
        if kind == "cond":
            return [self.body(branch, given[1:]) for branch in inner][0]
        if kind == "while":
            return [(_NOTHING, 0)] * count
        self._note(equation, given)
        name = equation.primitive.name
        if name == "iota":
            return [(_NOTHING, int(equation.params["shape"][_dimension(equation)]))]
        if name not in _PASSING:
            return [(_NOTHING, 0)] * count
        # A lookup returns integers of the table, not of the index.
        read = given[:1] if name in ("gather", "dynamic_slice") else given
        inputs = frozenset[int]().union(*(known[0] for known in read))
        counts = max((known[1] for known in read), default=0)
        return [(inputs, counts)] * count

    def _note(self, equation: Any, given: Sequence[Known]) -> None:
        name, params = equation.primitive.name, equation.params
        if name == "gather":
            shape = equation.invars[0].aval.shape
            numbers = params["dimension_numbers"].start_index_map
            sizes = params["slice_sizes"]
            self._below(given[1][0], [shape[d] - sizes[d] + 1 for d in numbers])
        elif name.startswith("scatter"):
            shape = equation.invars[0].aval.shape
            numbers = params["dimension_numbers"].scatter_dims_to_operand_dims
            self._below(given[1][0], [shape[d] for d in numbers])
        elif name in ("dynamic_slice", "dynamic_update_slice"):
            first = 1 if name == "dynamic_slice" else 2
            shape = equation.invars[0].aval.shape
            for known, size in zip(given[first:], shape, strict=False):
                self._below(known[0], [size])
        elif name in ("eq", "ne"):
            for one, other in (given, given[::-1]):
                if other[1]:
                    self._below(one[0], [other[1]])

    def _below(self, inputs: Inputs, sizes: Sequence[int]) -> None:
        for number in inputs:
            least = min(sizes, default=1)
            self.least[number] = max(1, min(self.least.get(number, least), least))


def _dimension(equation: Any) -> int:
    return int(equation.params["dimension"])


def batch_bounds(captured: Any) -> Mapping[int, int]:
    """Returns the bounds of each batch leaf, by leaf number."""
    tensors = captured.graph.tensors
    first = next((t.id for t in tensors if t.kind == "batch"), len(tensors))
    bounds = index_bounds(captured.jaxpr)
    return {
        number - first: bound for number, bound in bounds.items() if number >= first
    }
