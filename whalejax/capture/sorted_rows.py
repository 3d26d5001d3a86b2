"""Finds rows that are sorted across the batch and put back, such as experts' tokens.

A mixture of experts sorts tokens by expert, multiplies them by the expert's matrices,
and restores their order. Taken literally, the sort mixes all samples, and every device
would need the rows of all others. ``separability`` proves that each restored row
depends on its own sample alone. Such equations become one call, and each device may
sort its own rows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture.rules.behaviour import Position
from whalejax.capture.separability.interpret import Interpreter
from whalejax.capture.separability.values import (
    Along,
    Dependence,
    Dim,
    IdCounts,
    Order,
    Places,
    Sorted,
    Value,
)
from whalejax.jaxpr import rebuild
from whalejax.jaxpr.fewer_rows import (
    BatchRows,
    RowDims,
    add_inferred_rows,
    carried_over,
    run_fewer,
    takes_fewer,
)
from whalejax.user_code.annotations import parse_scope


CALL: Final = "whalejax_sorted_rows_"
"""Prefix of the name of a call that sorts rows of samples and restores their order. The
number of the call in the program follows."""

_BOUND: Final = (Order, Sorted, IdCounts, Places)
"""Facts about values that change if only some of the samples are computed."""


def sorts_rows(equation: Any) -> bool:
    """Returns whether an equation is a call that sorts rows."""
    return str(equation.params.get("name", "")).startswith(CALL)


def with_sorted_rows(
    jaxpr: Any, other: Any, inputs: Sequence[Value], sizes: tuple[int, int]
) -> tuple[Any, dict[str, BatchRows]]:
    """Returns the program with one call for each group of equations on sorted rows.

    Args:
        jaxpr: Closed jaxpr of the loss.
        other: The same loss with more samples.
        inputs: Facts about the inputs in both programs.
        sizes: Number of samples in each program.

    Returns:
        The program, and the positions of rows in each call by the call's name. A
        program without such rows is returned unchanged.
    """
    seen: dict[Position, Mapping[Any, Value]] = {}
    follower = Interpreter(share=sizes[0] / sizes[1], seen=seen)
    follower.run(jaxpr, other, inputs)
    builder = _Builder(seen, sizes[0])
    if not builder.sorts_inside(()):
        return jaxpr, {}
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]
    program = _compat.trace(lambda *xs: builder.run(jaxpr, xs, ()), avals)
    return (program, builder.found) if builder.found else (jaxpr, {})


def holds_sort(jaxpr: Any) -> bool:
    """Returns whether a program sorts anything."""
    return any(
        e.primitive.name == "sort" or any(map(holds_sort, _compat.inner_jaxprs(e)))
        for e in _compat.open_jaxpr(jaxpr)[0].eqns
    )


def rows_after(
    rows: Mapping[str, BatchRows], before: Any, after: Any
) -> dict[str, BatchRows]:
    """Returns the positions of rows in the calls of a program that was traced again.

    Args:
        rows: Positions of the rows in each call, by the call's name.
        before: Program before the new trace.
        after: Program after the new trace.

    Returns:
        The positions; calls for which they are no longer known are missing.
    """
    if not rows:
        return {}
    earlier, later = (dict(_called(program)) for program in (before, after))
    result = {
        name: carried_over(one, earlier[name], later[name])
        for name, one in rows.items()
        if name in later
    }
    return {name: one for name, one in result.items() if one is not None}


def _called(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        for inner in _compat.inner_jaxprs(equation):
            if sorts_rows(equation):
                yield equation.params["name"], inner
            else:
                yield from _called(inner)


@dataclass(slots=True)
class _Builder:
    """Evaluates a program again, with groups of its equations as calls."""

    seen: Mapping[Position, Mapping[Any, Value]]
    samples: int
    found: dict[str, BatchRows] = field(default_factory=dict)

    def run(self, jaxpr: Any, values: Sequence[Any], at: Position) -> list[Any]:
        body, _ = _compat.open_jaxpr(jaxpr)
        number = {id(equation): i for i, equation in enumerate(body.eqns)}
        calls = list(self._calls(body, at))

        def each(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
            inside = (*at, number[id(equation)], 0)
            if not self.sorts_inside(inside):
                return _compat.bind(equation, operands)
            inner = _compat.inner_jaxprs(equation)[0]
            if _compat.recursion(equation) == "inline":
                return self.run(inner, operands, inside)
            if _compat.recursion(equation) not in ("remat", "scan"):
                return _compat.bind(equation, operands)
            return rebuild.around(
                equation, operands, lambda xs: self.run(inner, xs, inside)
            )

        items = rebuild.arranged(body, calls)
        return rebuild.run(jaxpr, values, each, items=items)

    def sorts_inside(self, at: Position) -> bool:
        return any(
            place[: len(at)] == at and any(map(_is_bound, known.values()))
            for place, known in self.seen.items()
        )

    def _calls(self, body: Any, at: Position) -> Iterator[rebuild.EquationReplacement]:
        known = self.seen.get(at, {})
        replacements: list[rebuild.EquationReplacement] = []
        for group in _groups(body, known):
            name = f"{CALL}{len(self.found)}"
            made = self._call(body, group, known, at, name)
            if made is None or not _can_be_ordered(body, [*replacements, made[0]]):
                continue
            call, self.found[name] = made
            replacements.append(call)
            yield call

    def _call(
        self,
        body: Any,
        group: list[int],
        known: Mapping[Any, Value],
        at: Position,
        name: str,
    ) -> tuple[rebuild.EquationReplacement, BatchRows] | None:
        equations = [body.eqns[i] for i in group]
        made = {v for e in equations for v in e.outvars}
        read = dict.fromkeys(_variables(a for e in equations for a in e.invars))
        inputs = tuple(v for v in read if v not in made)
        others = [e for i, e in enumerate(body.eqns) if i not in {*group}]
        later = {*_variables(a for e in others for a in e.invars)}
        later |= {*_variables(body.outvars)}
        outputs = tuple(
            v for e in equations for v in e.outvars if v in later and _returns(known[v])
        )
        given = all(_is_sample_independent(known[v]) for v in inputs)
        if not (outputs and given and all(map(takes_fewer, equations))):
            return None
        if _depends(body, {*outputs}, {*inputs}, {*group}):
            return None

        run = _scoped_function(equations, inputs, outputs, name)
        rows = self._rows(equations, inputs, outputs, group, at)
        if run is None or rows is None or not _runs(run, inputs, rows):
            return None
        jitted = jax.jit(run)

        def scoped(*values: Any) -> Any:
            with _compat.scopes_context(equations):
                return jitted(*values)

        call = rebuild.EquationReplacement(
            inputs=inputs, outputs=outputs, function=scoped, equation=None
        )
        return call, rows

    def _rows(
        self,
        equations: Sequence[Any],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        group: Sequence[int],
        at: Position,
    ) -> BatchRows | None:
        """Returns the positions of rows in a call; None unless they are dimension 0."""
        known = self.seen[at]
        ends = [_row_dims(several, known) for several in (inputs, outputs)]
        if None in ends or any(d for dims in ends for d in dims or ()):
            return None
        sizes = frozenset(
            v.aval.shape[0]
            for several, dims in zip((inputs, outputs), ends, strict=True)
            for v, d in zip(several, dims or (), strict=True)
            if d is not None
        )
        results: dict[Position, RowDims] = {}
        for place, (number, equation) in enumerate(zip(group, equations, strict=True)):
            if not self._add(equation, (*at, number), (place,), known, sizes, results):
                return None
        given, rows = ends
        assert given is not None and rows is not None
        return BatchRows(
            samples=self.samples,
            inputs=given,
            outputs=rows,
            results=results,
            sizes=sizes,
        )

    def _add(
        self,
        equation: Any,
        at: Position,
        place: Position,
        known: Mapping[Any, Value],
        sizes: frozenset[int],
        results: dict[Position, RowDims],
    ) -> bool:
        """Records rows in an equation's results; returns False if they are unknown.

        ``sizes`` are possible numbers of rows, if nothing is known.
        """
        dims = _row_dims(equation.outvars, known)
        if dims is None:
            return False
        results[place] = dims
        for number, inner in enumerate(_compat.inner_jaxprs(equation)):
            inside = self.seen.get((*at, number))
            if inside is None:
                given = _operand_dims(equation, known)
                if given is None:
                    return False
                try:
                    add_inferred_rows(inner, given, sizes, (*place, number), results)
                except ValueError:
                    return False
                continue
            for index, one in enumerate(_compat.open_jaxpr(inner)[0].eqns):
                there = (*at, number, index), (*place, number, index)
                if not self._add(one, *there, inside, sizes, results):
                    return False
        return True


def _variables(atoms: Any) -> list[Any]:
    return [a for a in atoms if not _compat.is_literal(a)]


def _is_bound(value: Value) -> bool:
    return isinstance(value.fact, Order | Sorted)


def _returns(value: Value) -> bool:
    return value.kind is Dependence.SAMPLE and not isinstance(value.fact, _BOUND)


def _is_sample_independent(value: Value) -> bool:
    if _returns(value):
        return True
    fixed = value.kind is Dependence.FIXED and not isinstance(value.fact, _BOUND)
    growing = (a for dim in value.dims for a in dim if a.grows)
    return fixed and all(a.along is Along.EQUAL for a in growing)


def _row_dims(variables: Sequence[Any], known: Mapping[Any, Value]) -> RowDims | None:
    """Returns the row dimensions; None unless they are outermost in their dimension."""
    row_dims: list[int | None] = []
    for variable in variables:
        dims = known[variable].dims
        rows = [d for d, dim in enumerate(dims) if any(a.grows for a in dim)]
        if len(rows) > 1 or not all(_leads(dims[d]) for d in rows):
            return None
        row_dims.append(rows[0] if rows else None)
    return tuple(row_dims)


def _operand_dims(equation: Any, known: Mapping[Any, Value]) -> RowDims | None:
    operand_dims = [
        (None,) if _compat.is_literal(a) else _row_dims((a,), known)
        for a in equation.invars
    ]
    if None in operand_dims:
        return None
    return tuple(dim for dims in operand_dims for dim in dims or ())


def _leads(dim: Dim) -> bool:
    return dim[0].grows and not any(a.grows for a in dim[1:])


def _groups(body: Any, known: Mapping[Any, Value]) -> list[list[int]]:
    """Returns groups of connected equations that handle rows in another order.

    They include equations that count rows or compute positions for them.
    """
    maker = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
    group: dict[int, int] = {}

    def bound(atom: Any, kinds: tuple[type, ...]) -> bool:
        return not _compat.is_literal(atom) and isinstance(known[atom].fact, kinds)

    def join(a: int, b: int) -> None:
        one, other = group.setdefault(a, a), group.setdefault(b, b)
        for i, g in group.items():
            if g == other:
                group[i] = one

    for i, equation in enumerate(body.eqns):
        atoms = (*equation.invars, *equation.outvars)
        if any(bound(a, (Order, Sorted)) for a in atoms):
            group.setdefault(i, i)
    waiting = list(group)
    while waiting:
        i = waiting.pop()
        for atom in body.eqns[i].invars:
            if bound(atom, _BOUND) and atom in maker:
                if maker[atom] not in group:
                    waiting.append(maker[atom])
                join(i, maker[atom])
    groups: dict[int, list[int]] = {}
    for i in sorted(group):
        groups.setdefault(group[i], []).append(i)
    return list(groups.values())


def _can_be_ordered(body: Any, calls: Sequence[rebuild.EquationReplacement]) -> bool:
    try:
        rebuild.arranged(body, calls)
    except ValueError:
        return False
    return True


def _scoped_function(
    equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], name: str
) -> Callable[..., list[Any]] | None:
    """Returns a function of this name that runs equations inside their scopes.

    None if an annotation covers only some of them: they belong to several TaskGraphs.
    """
    with _compat.scopes_context(equations) as depth:
        behind = (_compat.scope_text(e).split("/")[depth:] for e in equations)
        if any(
            parse_scope(scope) is not None for several in behind for scope in several
        ):
            return None

    def run(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        for equation in equations:
            with _compat.equation_context(equation, skip=depth):
                env.update(rebuild.results_of(equation, env))
        return [env[v] for v in outputs]

    run.__name__ = name
    return run


def _depends(body: Any, outputs: set[Any], inputs: set[Any], group: set[int]) -> bool:
    behind = set(outputs)
    for i, equation in enumerate(body.eqns):
        if i not in group and behind.intersection(_variables(equation.invars)):
            behind.update(equation.outvars)
    return bool(behind & inputs)


def _runs(run: Any, inputs: Sequence[Any], rows: BatchRows) -> bool:
    """Returns whether a call runs for one sample with the same number of equations."""
    whole = _compat.trace(run, [v.aval for v in inputs])
    count = len({place[0] for place in rows.results})
    if len(_compat.open_jaxpr(whole)[0].eqns) != count:
        return False
    part = [
        _compat.abstract(
            tuple(rows.shape(v.aval.shape, dim, rows.samples)), v.aval.dtype
        )
        for v, dim in zip(inputs, rows.inputs, strict=True)
    ]
    floats = [k for k, v in enumerate(inputs) if _compat.is_inexact(v.aval.dtype)]

    def pushed(*xs: Any) -> Any:
        def of(*changed: Any) -> list[Any]:
            given = dict(zip(floats, changed, strict=True))
            values = [given.get(k, x) for k, x in enumerate(xs)]
            return run_fewer(whole, values, rows, rows.samples)

        some = [xs[k] for k in floats]
        return jax.jvp(of, some, some)

    try:
        _compat.trace(pushed, part)
    except (TypeError, ValueError):
        return False
    return True
