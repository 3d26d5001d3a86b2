"""Finds reads of rows that a table does not have, such as positions of long sequences.

JAX raises no error for an index outside an array. A gather clamps the index or returns
NaN, so a position table that is too short for the sequence goes unnoticed.

An index that depends only on positions and constants is known while tracing. Its bounds
are computed like those of attention masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.patterns.score_bounds import ANY, Interval, equation_interval


BEYOND: Final = "reads beyond a table: "
"""Beginning of each note."""

_LARGEST_CONSTANT: Final = 2**20

_PASSING_ON: Final = frozenset(("convert_element_type", "copy", "reshape"))


def short_table_notes(program: Any, paths: Sequence[str]) -> list[str]:
    """Returns a note for each table of which rows beyond its end are read.

    Args:
        program: Traced loss, whose first inputs are the parameters.
        paths: Path of each parameter.
    """
    body, _ = _compat.open_jaxpr(program)
    names = dict(zip(body.invars, paths, strict=False))
    return list(dict.fromkeys(_notes(program, names, {})))


def _notes(
    program: Any, names: Mapping[Any, str], given: Mapping[Any, Interval]
) -> Iterator[str]:
    body, constants = _compat.open_jaxpr(program)
    names, known = dict(names), dict(given)
    for variable, value in zip(body.constvars, constants, strict=True):
        if getattr(value, "size", 1) <= _LARGEST_CONSTANT:
            known[variable] = _constant(value)
    for equation in body.eqns:
        operands = [_bounds(atom, known) for atom in equation.invars]
        if equation.primitive.name == "gather":
            yield from _gather_note(equation, operands[1], names)
        elif inner := _compat.inner_jaxprs(equation):
            yield from _inner_notes(equation, inner, operands, names)
        passes_on = equation.primitive.name in _PASSING_ON
        if passes_on and (path := _path(equation.invars[0], names)):
            names[equation.outvars[0]] = path
        known |= _result_bounds(equation, operands)


def _bounds(atom: Any, known: Mapping[Any, Interval]) -> Interval:
    return _constant(atom.val) if _compat.is_literal(atom) else known.get(atom, ANY)


def _constant(value: Any) -> Interval:
    dtype = getattr(value, "dtype", None)
    is_elsewhere = not getattr(value, "is_fully_addressable", True)
    if is_elsewhere or (dtype is not None and not _is_integer_dtype(dtype)):
        return ANY
    array = np.asarray(value) if dtype is not None else np.asarray([value])
    if array.dtype.kind not in "iub" or not array.size:
        return ANY
    return float(array.min()), float(array.max())


def _path(atom: Any, names: Mapping[Any, str]) -> str | None:
    return None if _compat.is_literal(atom) else names.get(atom)


def _result_bounds(equation: Any, operands: list[Interval]) -> dict[Any, Interval]:
    inner = _compat.inner_jaxprs(equation)
    if inner and len(inner) == 1 and equation.primitive.name != "scan":
        body, _ = _compat.open_jaxpr(inner[0])
        if len(body.invars) != len(operands):
            return {}
        known = dict(zip(body.invars, operands, strict=True))
        for each in body.eqns:
            known |= _result_bounds(each, [_bounds(x, known) for x in each.invars])
        results = [_bounds(atom, known) for atom in body.outvars]
        pairs = zip(equation.outvars, results, strict=True)
        return {variable: bounds for variable, bounds in pairs if bounds != ANY}
    if inner or len(equation.outvars) != 1 or not _is_integer(equation.outvars[0]):
        return {}
    if equation.primitive.name != "iota" and ANY in operands:
        return {}
    if equation.primitive.name == "select_n" and operands[0][0] != operands[0][1]:
        return {}  # The chosen values are unknown, and so is the largest of them.
    if equation.primitive.name == "mul" and all(low != high for low, high in operands):
        return {}  # A mask may be 0 where the other factor is large.
    low, high = equation_interval(equation, operands)
    finite = np.isfinite(low) and np.isfinite(high)
    return {equation.outvars[0]: (float(low), float(high))} if finite else {}


def _is_integer(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and _is_integer_dtype(dtype)


def _is_integer_dtype(dtype: Any) -> bool:
    return not _compat.is_key_dtype(dtype) and np.dtype(dtype).kind in "iub"


def _inner_notes(
    equation: Any,
    inner: Sequence[Any],
    operands: Sequence[Interval],
    names: Mapping[Any, str],
) -> Iterator[str]:
    if equation.primitive.name == "cond":
        return  # A branch may run only where its indices are valid.
    for program in inner:
        body, _ = _compat.open_jaxpr(program)
        if len(equation.invars) != len(body.invars):
            continue  # For instance a loop whose length is computed.
        carried: range | tuple[()] = ()
        if equation.primitive.name == "scan":
            parts = _compat.scan_parts(equation)
            carried = range(parts.num_consts, parts.num_consts + parts.num_carries)
        pairs = list(zip(body.invars, equation.invars, operands, strict=True))
        given = {
            variable: bounds
            for index, (variable, _, bounds) in enumerate(pairs)
            if bounds != ANY and index not in carried
        }
        inside = {v: path for v, atom, _ in pairs if (path := _path(atom, names))}
        yield from _notes(program, inside, given)


def _gather_note(
    equation: Any, indices: Interval, names: Mapping[Any, str]
) -> Iterator[str]:
    numbers = equation.params["dimension_numbers"]
    if len(numbers.start_index_map) != 1 or "CLIP" in str(equation.params["mode"]):
        return  # The user clips the indices on purpose.
    dim = numbers.start_index_map[0]
    rows = equation.invars[0].aval.shape[dim]
    last = float(indices[1]) + equation.params["slice_sizes"][dim]
    if not np.isfinite(last) or last <= rows:
        return
    table = _path(equation.invars[0], names) or "a table of the loss"
    fills = "FILL" in str(equation.params["mode"])
    yield (
        f"{BEYOND}{table} has {rows:,} rows, and row {int(last) - 1:,} is read, "
        f"counted from 0. JAX returns {'NaN' if fills else 'the last row'} and raises "
        "no error. Make the table long enough for sequences of this length"
    )
