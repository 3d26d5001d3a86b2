"""A program assembled from the equations of another, without a new trace.

Running a program equation by equation to trace it again takes about as long as the
first trace. Here unchanged equations are reused, and changed computations alone are
traced and inserted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from whalejax import _compat
from whalejax.jaxpr.rebuild import EquationReplacement


Scope = _compat.Scope | None
"""Name stacks of the calls around an equation; None outside all calls."""


Each = Callable[[Any, Scope], None]
"""Function that inserts an equation of a program, or its replacement, into a splice."""


Constant = Callable[[Any], Callable[[], Any] | None]
"""Function from an array constant to a function that makes its replacement, or to None
if the constant stays.
"""


def _itself(value: Any) -> None:
    return None


class Splice:
    """A program that is being assembled.

    Args:
        jaxpr: Open or closed program with the same inputs and results.
        constant: Function that replaces an array constant of the program; by default
            constants stay.

    Attributes:
        equations: Equations that were inserted.
    """

    def __init__(self, jaxpr: Any, constant: Constant = _itself) -> None:
        self.equations: list[Any] = []
        self._jaxpr = jaxpr
        self._constant = constant
        self._atoms: dict[Any, Any] = {}
        self._values: dict[Any, Any] = {}
        self._variables: dict[int, Any] = {}
        self._folded: dict[tuple[Any, tuple[Any, ...]], Any] = {}
        self._hold(jaxpr)

    def program(self) -> Any:
        """Returns the program; the arrays that it reads are in order of first use."""
        body, _ = _compat.open_jaxpr(self._jaxpr)
        results = [self._read(atom) for atom in body.outvars]
        held: dict[Any, Any] = {}
        for atoms in (*(e.invars for e in self.equations), results):
            for atom in atoms if self._values else ():
                if not _compat.is_literal(atom) and atom in self._values:
                    held[atom] = self._values[atom]
        return _compat.with_equations(self._jaxpr, self.equations, results, held)

    def run(self, items: Sequence[Any], each: Each, scope: Scope = None) -> None:
        """Inserts equations and ``EquationReplacement``s in order.

        Args:
            items: Equations and replacements, each after those whose results it reads.
            each: Function that inserts an equation.
            scope: Name stacks of the calls around the items; default: none.
        """
        for item in items:
            if isinstance(item, EquationReplacement):
                within = item.equation
                self.trace(item.function, item.inputs, item.outputs, within, scope)
            else:
                each(item, scope)

    def keep(self, equation: Any, scope: Scope = None) -> None:
        """Inserts an equation as traced.

        Args:
            equation: Equation to insert.
            scope: Scopes of the calls around it.
        """
        operands = [self._read(atom) for atom in equation.invars]
        renamed = any(
            a is not b for a, b in zip(operands, equation.invars, strict=True)
        )
        if renamed and all(map(_compat.is_literal, operands)):
            self._keep_literals(equation, operands, scope)
            return
        if scope is not None:
            # Each call of a program makes its own variables.
            fresh = [_compat.variable_like(v) for v in equation.outvars]
            self._atoms.update(zip(equation.outvars, fresh, strict=True))
            moved = _compat.moved_equation(equation, operands, fresh, scope)
        elif renamed:
            moved = _compat.moved_equation(equation, operands, equation.outvars)
        else:
            moved = equation
        self.equations.append(moved)

    def _keep_literals(
        self, equation: Any, operands: Sequence[Any], scope: Scope
    ) -> None:
        """Inserts an equation that reads a call's literals only, which JAX may fold."""
        given = tuple(map(_compat.literal_key, operands))
        if (equation, given) not in self._folded:

            def run() -> list[Any]:
                return _compat.bind(equation, [atom.val for atom in operands])

            traced = _compat.trace_within(equation, run, ())
            self._folded[equation, given] = traced
        self._put(self._folded[equation, given], (), equation.outvars, equation, scope)

    @contextlib.contextmanager
    def call(self, equation: Any, scope: Scope = None) -> Iterator[Scope]:
        """Enters a call, whose equations are then inserted; yields their scope.

        Args:
            equation: Call to enter.
            scope: Name stacks of the calls around the call; default: none.
        """
        (inner,) = _compat.inner_jaxprs(equation)
        operands = [self._read(atom) for atom in equation.invars]
        self._hold(inner)
        body, _ = _compat.open_jaxpr(inner)
        self._atoms.update(zip(body.invars, operands, strict=True))
        yield _compat.scope_inside(equation, scope)
        results = [self._read(atom) for atom in body.outvars]
        self._atoms.update(zip(equation.outvars, results, strict=True))

    def trace(
        self,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        equation: Any = None,
        scope: Scope = None,
    ) -> None:
        """Inserts the computation of a function.

        Args:
            function: Function from values of the inputs to values of the outputs.
            inputs: Variables and literals that the function reads.
            outputs: Variables that the function computes.
            equation: Equation in whose scopes the function runs, or None.
            scope: Name stacks of the calls around it; default: none.
        """
        avals = [self._read(atom).aval for atom in inputs]
        traced = _compat.trace_within(equation, function, avals)
        self._put(traced, inputs, outputs, equation, scope)

    def _put(
        self,
        traced: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        equation: Any,
        scope: Scope,
    ) -> None:
        if equation is not None:
            scope = _compat.scope_inside(equation, scope)
        body, _ = _compat.open_jaxpr(traced)
        given = [self._read(atom) for atom in inputs]
        self._hold(traced, replaced=False)
        self._atoms.update(zip(body.invars, given, strict=True))
        for one in body.eqns:
            self.keep(one, scope)
        results = [self._read(atom) for atom in body.outvars]
        self._atoms.update(zip(outputs, results, strict=True))

    def _hold(self, jaxpr: Any, *, replaced: bool = True) -> None:
        body, constants = _compat.open_jaxpr(jaxpr)
        for variable, value in zip(body.constvars, constants, strict=True):
            make = self._constant(value) if replaced else None
            if make is not None:
                self.trace(lambda make=make: [make()], (), (variable,))
                continue
            held = self._variables.setdefault(id(value), variable)
            self._values[held] = value
            self._atoms[variable] = held

    def _read(self, atom: Any) -> Any:
        return atom if _compat.is_literal(atom) else self._atoms.get(atom, atom)


def spliced(
    jaxpr: Any,
    change: Callable[[Any], Callable[..., Sequence[Any]] | str | None],
    *,
    items: Sequence[Any] | None = None,
    constant: Constant = _itself,
) -> Any:
    """Returns a program with some equations replaced.

    Args:
        jaxpr: Original program.
        change: Function from an equation to what takes its place: ``"inline"`` for the
            equations of a call, a function from its operands to its results, or None
            for the equation itself.
        items: Equations and ``EquationReplacement``s that take the place of all
            equations, in order; default: all equations.
        constant: Function that replaces an array constant of the program; by default
            constants stay.
    """
    splice = Splice(jaxpr, constant)

    def each(equation: Any, scope: Scope) -> None:
        other = change(equation)
        if other is None:
            splice.keep(equation, scope)
        elif isinstance(other, str):
            (inner,) = map(_compat.open_jaxpr, _compat.inner_jaxprs(equation))
            with splice.call(equation, scope) as within:
                splice.run(inner[0].eqns, each, within)
        else:
            splice.trace(other, equation.invars, equation.outvars, equation, scope)

    body, _ = _compat.open_jaxpr(jaxpr)
    splice.run(body.eqns if items is None else items, each)
    return splice.program()
