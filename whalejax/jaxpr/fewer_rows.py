"""Runs some equations of a program on fewer rows than traced.

The equations treat each row of a batch separately, or sort rows and restore their
order. So the results for some samples do not depend on the other samples. The program
runs equation by equation, and only parameters that contain a shape are changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.jaxpr.positions import Position


RowDims = tuple[int | None, ...]
"""Dimension of the batch's rows in each of several values, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Positions of the batch's rows in the values of a program.

    Attributes:
        samples: Number of samples of all rows.
        inputs: Row dimensions of the program's inputs.
        outputs: Row dimensions of the program's outputs.
        results: Row dimensions of each equation's results, by its position.
        sizes: Possible numbers of rows.
    """

    samples: int
    inputs: RowDims
    outputs: RowDims
    results: Mapping[Position, RowDims]
    sizes: frozenset[int]

    def shape(self, shape: Sequence[int], dim: int | None, parts: int) -> list[int]:
        """Returns the shape of a part of a value.

        Args:
            shape: Shape of the value.
            dim: Dimension of its rows.
            parts: Number of parts of the samples.
        """
        return [n // parts if d == dim else n for d, n in enumerate(shape)]


def run_fewer(
    jaxpr: Any,
    values: Sequence[Any],
    rows: BatchRows,
    parts: int,
    at: Position = (),
    given: RowDims | None = None,
) -> list[Any]:
    """Runs a program on the rows of some samples.

    Args:
        jaxpr: Program, or the body of one of its equations.
        values: Inputs for the samples of one part.
        rows: Positions of the rows.
        parts: Number of parts of the samples.
        at: Position of the jaxpr in the program.
        given: Row dimension of each input; None for the inputs of the full program.

    Raises:
        ValueError: An equation's result has another shape than that of its part.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    known = dict(zip(body.constvars, constants, strict=True))
    known.update(zip(body.invars, values, strict=True))
    inputs = rows.inputs if given is None else given
    dims: dict[Any, int | None] = dict(zip(body.invars, inputs, strict=True))
    for index, equation in enumerate(body.eqns):
        place = (*at, index)
        operands = [
            a.val if _compat.is_literal(a) else known[a] for a in equation.invars
        ]
        with _compat.equation_context(equation):
            read = _operand_dims(equation, dims)
            results = _results(equation, operands, read, rows, parts, place)
        dims.update(zip(equation.outvars, rows.results[place], strict=True))
        pairs = zip(equation.outvars, results, rows.results[place], strict=True)
        for variable, result, dim in pairs:
            wanted = rows.shape(variable.aval.shape, dim, parts)
            if [*result.shape] != wanted:
                name = equation.primitive.name
                raise ValueError(f"{name} gives {result.shape}, not {wanted}")
            known[variable] = result
    return [a.val if _compat.is_literal(a) else known[a] for a in body.outvars]


def _operand_dims(equation: Any, dims: Mapping[Any, int | None]) -> RowDims:
    return tuple(
        None if _compat.is_literal(a) else dims.get(a) for a in equation.invars
    )


def _results(
    equation: Any,
    operands: Sequence[Any],
    given: RowDims,
    rows: BatchRows,
    parts: int,
    place: Position,
) -> list[Any]:
    kind = _compat.recursion(equation)
    if kind == "inline":
        inner = _compat.inner_jaxprs(equation)[0]
        return run_fewer(inner, operands, rows, parts, (*place, 0), given)
    if kind == "opaque":
        return _ruled(equation, operands, given, rows, parts, place)
    shapes = [v.aval.shape for v in equation.outvars]
    dims = rows.results[place]
    first = rows.shape(shapes[0], dims[0], parts) if shapes else []
    changed = _sized(equation, tuple(first), operands)
    return _compat.bind(equation, operands, **changed)


_SHAPES: Final = ("shape", "new_sizes")
"""Parameters that contain the shape of a result."""


def _sized(
    equation: Any, shape: tuple[int, ...], operands: Sequence[Any]
) -> dict[str, Any]:
    params = equation.params
    changed: dict[str, Any] = {name: shape for name in _SHAPES if name in params}
    if equation.primitive.name == "slice":
        changed["limit_indices"] = _bounds(equation, operands, "limit_indices")
    elif equation.primitive.name in ("gather", "dynamic_slice"):
        changed["slice_sizes"] = _bounds(equation, operands, "slice_sizes")
    return changed


def _bounds(equation: Any, operands: Sequence[Any], name: str) -> tuple[int, ...]:
    before, now = equation.invars[0].aval.shape, operands[0].shape
    ends = zip(equation.params[name], before, now, strict=True)
    return tuple(n if end == size else end for end, size, n in ends)


def _ruled(
    equation: Any,
    operands: Sequence[Any],
    given: RowDims,
    rows: BatchRows,
    parts: int,
    place: Position,
) -> list[Any]:
    (inner,) = _compat.inner_jaxprs(equation)
    avals = [v.aval for v in equation.invars]

    def pushed(*arguments: Any) -> Any:
        def run(*values: Any) -> tuple[Any, ...]:
            return tuple(_compat.bind(equation, values))

        half = len(avals)
        return jax.tree.leaves(jax.jvp(run, arguments[:half], arguments[half:]))

    @jax.custom_jvp
    def call(*values: Any) -> tuple[Any, ...]:
        return tuple(run_fewer(inner, values, rows, parts, (*place, 0), given))

    @call.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        both = _compat.trace(pushed, [*avals, *avals])
        inside = infer_rows(both, (*given, *given), rows)
        rule = run_fewer(both, [*primals, *tangents], inside, parts)
        return tuple(rule[: len(rule) // 2]), tuple(rule[len(rule) // 2 :])

    return list(call(*operands))


def takes_fewer(equation: Any) -> bool:
    """Returns whether an equation can run on fewer rows."""
    kind = _compat.recursion(equation)
    if kind == "opaque":
        floats = all(_compat.is_inexact(v.aval.dtype) for v in equation.invars)
        return equation.primitive.name == "custom_jvp_call" and floats
    if kind == "inline":
        body, _ = _compat.open_jaxpr(_compat.inner_jaxprs(equation)[0])
        return all(map(takes_fewer, body.eqns))
    placed = any(
        equation.params.get(n) is not None for n in ("sharding", "out_sharding")
    )
    return kind is None and not (equation.effects or placed)


def infer_rows(jaxpr: Any, given: RowDims, rows: BatchRows) -> BatchRows:
    """Infers the row dimensions of a program that treats each row separately.

    Args:
        jaxpr: Program whose row dimensions are inferred.
        given: Row dimension of each input; None for an input without rows.
        rows: Row dimensions of the program around it.

    Raises:
        ValueError: Row dimensions are unknown; see ``add_inferred_rows``.
    """
    results: dict[Position, RowDims] = {}
    outputs = add_inferred_rows(jaxpr, given, rows.sizes, (), results)
    return replace(rows, inputs=given, outputs=outputs, results=results)


def add_inferred_rows(
    jaxpr: Any,
    given: RowDims,
    sizes: frozenset[int],
    at: Position,
    results: dict[Position, RowDims],
) -> RowDims:
    """Infers the row dimensions of a program and of all programs that it calls.

    A result has no rows if it has operands and none of them has rows. Any other value
    has its rows in the first dimension whose length is a possible number of rows. If
    that is wrong, shapes disagree when the program runs on fewer rows.

    Args:
        jaxpr: Program whose row dimensions are inferred.
        given: Row dimension of each input; None for an input without rows.
        sizes: Possible numbers of rows.
        at: Position of the program.
        results: Mapping that receives row dimensions, by position.

    Returns:
        Row dimension of each output.

    Raises:
        ValueError: Rows disappear. Or a value without operands is used otherwise than
            as one value per row, so it may have no rows, as a constant array that is
            summed.
    """
    body, _ = _compat.open_jaxpr(jaxpr)
    known: dict[Any, int | None] = dict(zip(body.invars, given, strict=True))
    of_nothing: set[Any] = set()
    for index, equation in enumerate(body.eqns):
        read = _operand_dims(equation, known)
        with_rows = [
            a for a, dim in zip(equation.invars, read, strict=True) if dim is not None
        ]
        made = all(_compat.is_literal(a) for a in equation.invars)
        dims = _dims(equation.outvars, sizes if made or with_rows else frozenset())
        if with_rows and None in dims:
            raise ValueError(f"{equation.primitive.name} leaves no rows")
        if of_nothing.issuperset(with_rows):
            if not all(_keeps_elements(equation, a) for a in with_rows):
                raise ValueError(f"{equation.primitive.name} may read no rows")
            pairs = zip(equation.outvars, dims, strict=True)
            of_nothing.update(v for v, dim in pairs if dim is not None)
        results[*at, index] = dims
        known.update(zip(equation.outvars, dims, strict=True))
        for number, inner in enumerate(_compat.inner_jaxprs(equation)):
            inputs = _compat.open_jaxpr(inner)[0].invars
            same = len(inputs) == len(read)
            below = read if same else _dims(inputs, sizes)
            add_inferred_rows(inner, below, sizes, (*at, index, number), results)
    return tuple(None if _compat.is_literal(a) else known.get(a) for a in body.outvars)


def _keeps_elements(equation: Any, operand: Any) -> bool:
    if equation.primitive.name == "broadcast_in_dim":
        return True
    return all(v.aval.shape == operand.aval.shape for v in equation.outvars)


def _dims(variables: Sequence[Any], sizes: frozenset[int]) -> RowDims:
    return tuple(
        next((d for d, n in enumerate(v.aval.shape) if n in sizes), None)
        for v in variables
    )


def carried_over(rows: BatchRows, before: Any, after: Any) -> BatchRows | None:
    """Returns the positions of rows in a program that was traced again with more casts.

    Args:
        rows: Positions of the rows in the earlier program.
        before: Program before the new trace.
        after: Program after the new trace.

    Returns:
        Positions in ``after``; None if more than casts was added.
    """
    inputs = _compat.open_jaxpr(after)[0].invars
    known = dict(zip(inputs, rows.inputs, strict=True))
    results: dict[Position, RowDims] = {}
    if not _carry(rows, before, after, (), (), known, results):
        return None
    return replace(rows, results=results)


def _carry(
    rows: BatchRows,
    before: Any,
    after: Any,
    old: Position,
    new: Position,
    known: dict[Any, int | None],
    results: dict[Position, RowDims],
) -> bool:
    earlier, later = (_compat.open_jaxpr(x)[0].eqns for x in (before, after))
    place = 0
    for index, equation in enumerate(later):
        name = equation.primitive.name
        same = place < len(earlier) and earlier[place].primitive.name == name
        if name == "convert_element_type":
            (atom,) = equation.invars
            dims: RowDims = (known.get(atom) if not _compat.is_literal(atom) else None,)
        elif not same:
            return False
        else:
            dims = rows.results[*old, place]
        results[*new, index] = dims
        known.update(zip(equation.outvars, dims, strict=True))
        inner = _compat.inner_jaxprs(equation)
        for number, one in enumerate(inner):
            other = _compat.inner_jaxprs(earlier[place])[number]
            pairs = zip(_compat.open_jaxpr(one)[0].invars, equation.invars, strict=True)
            inside = {
                v: None if _compat.is_literal(a) else known.get(a) for v, a in pairs
            }
            there = (*old, place, number), (*new, index, number)
            if not _carry(rows, other, one, *there, inside, results):
                return False
        place += same
    return place == len(earlier)
