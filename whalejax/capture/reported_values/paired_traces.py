"""Compares two traces of one loss, with fewer and with more samples.

Comparison alone shows the effect of the number of samples: dimensions that grow with
it, and numbers that it divides. The two programs differ if the loss reads the number of
samples, as a slice of the first four samples does. Values that cannot be paired are
marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from whalejax import _compat
from whalejax.capture.rules.behaviour import Position, Value
from whalejax.capture.walk import FlatProgram
from whalejax.jaxpr.positions import program_at
from whalejax.planner.model.graph import LOOPS, Graph, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A program and the results of reading it.

    Attributes:
        program: Jaxpr of the program.
        graph: Graph of the program.
        walk: Flattened program of the graph.
        results: Results of the program, as tensors of the graph.
    """

    program: Any
    graph: Graph
    walk: FlatProgram
    results: Sequence[Value]


@dataclass(slots=True)
class Pairing:
    """Pairs of equal values in two traces with fewer and more samples.

    Attributes:
        small: Trace with fewer samples.
        large: Trace with more samples.
        times: Ratio of the large trace's samples to the small trace's.
        pairs: Tensor of the large trace for each tensor of the small one.
        torn: Tensors of the small trace that the large one computes from others.
        lost: Indices of results that are different tensors in the large trace.
        grown: Dimensions that grow with the samples, by tensor of the small trace.
        makers: For each trace, the operations that make each tensor.
        literals: For each trace, the scalar of each result; None for other results.
    """

    small: Trace
    large: Trace
    times: int
    pairs: dict[int, int] = field(default_factory=dict)
    torn: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    grown: dict[int, frozenset[int]] = field(default_factory=dict)
    makers: tuple[Mapping[int, list[int]], ...] = ()
    literals: tuple[Sequence[Any], ...] = ()
    _scalars: tuple[Mapping[Position, _BoundEquation], ...] = ()

    def run(self, wanted: Sequence[int]) -> None:
        """Pairs all values that some results depend on.

        Args:
            wanted: Indices of the results.
        """
        traces = self.small, self.large
        self.makers = tuple(_makers(trace.graph) for trace in traces)
        result = [scalars(trace.program) for trace in traces]
        self._scalars = tuple(here for here, _ in result)
        self.literals = tuple(results for _, results in result)
        backs = [_backs(trace.walk) for trace in traces]
        todo: list[tuple[Value, Value, set[int], int]] = [
            (self.small.results[n], self.large.results[n], self.lost, n) for n in wanted
        ]
        while todo:
            a, b, torn, user = todo.pop()
            if a in (None, UNKNOWN) or self.pairs.get(a) == b:
                continue
            again = a in self.pairs and self.small.graph.tensors[a].kind != "const"
            if b in (None, UNKNOWN) or again or not self._has_equal_source(a, b):
                # JAX traces no slice that takes all, so this consumer alone differs.
                torn.add(user)
                continue
            self.pairs[a] = b
            behind: list[tuple[Value, Value]] = []
            for one, other in zip(self.makers[0][a], self.makers[1][b], strict=True):
                ops = self.small.graph.ops[one], self.large.graph.ops[other]
                behind += zip(ops[0].operands, ops[1].operands, strict=True)
                behind.append((decides(traces[0], ops[0]), decides(traces[1], ops[1])))
            if a in backs[0] and b in backs[1]:
                behind.append((backs[0][a], backs[1][b]))
            todo += [(x, y, self.torn, a) for x, y in behind]

    def operands(self, op: Op) -> list[int | tuple[Any, Any]]:
        """Returns the operands: tensor ids, or scalar literals of both programs."""
        here = self._scalars[0].get(op.position)
        large = self._made_like(op)
        there = None if large is None else self._scalars[1].get(large.position)
        if here is None or there is None or op.kind in LOOPS:
            return list(op.operands)
        if not _matches(here, there, op):
            return list(op.operands)
        tensors = iter(op.operands)
        operands: list[int | tuple[Any, Any]] = []
        for a, b in zip(here.values, there.values, strict=True):
            operands.append(next(tensors) if a is None else (a, b))
        return operands

    def equation(self, op: Op) -> Any:
        """Returns an operation's equation in the smaller program, or None."""
        here = self._scalars[0].get(op.position)
        return None if here is None else here.equation

    def other_equation(self, op: Op) -> Any:
        """Returns the same operation's equation in the larger program, or None."""
        large = self._made_like(op)
        there = None if large is None else self._scalars[1].get(large.position)
        return None if there is None else there.equation

    def _made_like(self, op: Op) -> Op | None:
        for a in op.results:
            b = self.pairs.get(a)
            if b is not None:
                place = next(
                    i
                    for i, n in enumerate(self.makers[0][a])
                    if self.small.graph.ops[n] is op
                )
                return self.large.graph.ops[self.makers[1][b][place]]
        return None

    def _has_equal_source(self, a: int, b: int) -> bool:
        one, other = self.small.graph.tensors[a], self.large.graph.tensors[b]
        if (one.kind, one.dtype) != (other.kind, other.dtype):
            return False
        if len(one.shape) != len(other.shape):
            return False
        grown = set()
        for dim, (x, y) in enumerate(zip(one.shape, other.shape, strict=True)):
            if x != y and x * self.times != y:
                return False
            if x != y:
                grown.add(dim)
        self.grown[a] = frozenset(grown)
        if one.kind == "const":
            return _values_equal(_constant(self.small, a), _constant(self.large, b))
        makers = self.makers[0][a], self.makers[1][b]
        if not makers[0] and not makers[1]:
            return a == b  # Inputs, whose ids come first.
        return len(makers[0]) == len(makers[1]) and all(
            self._same_op(x, y, a, b) for x, y in zip(*makers, strict=True)
        )

    def _same_op(self, x: int, y: int, a: int, b: int) -> bool:
        one, other = self.small.graph.ops[x], self.large.graph.ops[y]
        return (
            one.kind == other.kind
            and one.results.index(a) == other.results.index(b)
            and (len(one.operands), len(one.results))
            == (len(other.operands), len(other.results))
        )


def power_of(a: Any, b: Any, times: int) -> int | None:
    """Returns the power of the number of samples to which a scalar is proportional.

    Args:
        a: The scalar with fewer samples.
        b: The scalar with more samples.
        times: Ratio of the numbers of samples.

    Returns:
        The power; None for zero, which is proportional to every power.

    Raises:
        ValueError: The scalar is proportional to no power.

    >>> power_of(4, 16, 4), power_of(0.5, 0.25, 2), power_of(3, 3, 8)
    (1, -1, 0)
    """
    if bool(a == b) or (a != a and b != b):
        return None if bool(a == 0) else 0
    if not (a and b) or isinstance(a, bool | np.bool_):
        raise ValueError
    ratio = abs(complex(b) / complex(a))
    power = round(math.log(ratio, times)) if 0 < ratio < math.inf else 0
    if not math.isclose(ratio, float(times) ** power, rel_tol=1e-5):
        raise ValueError
    return power


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundEquation:
    """An equation, and the values of the operands that are constants of the program."""

    equation: Any
    values: tuple[Any, ...]


def scalars(program: Any) -> tuple[dict[Position, _BoundEquation], list[Any]]:
    """Returns every equation by position, with the scalars among its operands.

    Returns:
        The equations, and for each result its scalar; None for other results.
    """
    result: dict[Position, _BoundEquation] = {}
    return result, _scalars_of(program, (), {}, result)


UNKNOWN: Final = -1
"""Stands for a tensor that was not found."""


def decides(trace: Trace, op: Op) -> Value:
    """Returns the tensor that ends a loop or selects a branch.

    Returns:
        The tensor. None for other operations, or if a literal of the program decides;
        ``UNKNOWN`` if the tensor is not found.
    """
    if op.kind not in ("while", "cond"):
        return None
    body, prefix = program_at(trace.program, op.position), op.position[:-1]
    equation = body.eqns[op.position[-1]]
    atom = equation.invars[0]
    if op.kind == "while":
        body, _ = _compat.open_jaxpr(_compat.inner_jaxprs(equation)[0])
        prefix, atom = (*op.position, 0), body.outvars[0]
    while not _compat.is_literal(atom):
        for number, one in enumerate(body.eqns):
            if atom in one.outvars:
                result = trace.walk.outputs[*prefix, number]
                return result[list(one.outvars).index(atom)]
        if not prefix:
            inputs = list(body.invars)
            return inputs.index(atom) if atom in inputs else UNKNOWN
        outer, around = program_at(trace.program, prefix[:-1]), prefix[:-2]
        call = outer.eqns[prefix[-2]]
        if _compat.recursion(call) not in ("inline", "remat", "opaque"):
            return UNKNOWN
        inputs = list(body.invars)
        if atom not in inputs:
            return UNKNOWN
        atom, body, prefix = call.invars[inputs.index(atom)], outer, around
    return None


def _scalars_of(
    jaxpr: Any,
    prefix: Position,
    given: Mapping[Any, Any],
    found: dict[Any, _BoundEquation],
) -> list[Any]:
    body, _ = _compat.open_jaxpr(jaxpr)
    env = dict(given)

    def value(atom: Any) -> Any:
        if not _compat.is_literal(atom):
            return env.get(atom)
        return None if atom.aval.shape else atom.val

    for index, equation in enumerate(body.eqns):
        position = (*prefix, index)
        values = tuple(map(value, equation.invars))
        found[position] = _BoundEquation(equation=equation, values=values)
        for place, inner in enumerate(_compat.inner_jaxprs(equation)):
            variables = _compat.open_jaxpr(inner)[0].invars
            inside = _inner_inputs(equation, values, place, len(variables))
            known = {
                v: x for v, x in zip(variables, inside, strict=True) if x is not None
            }
            results = _scalars_of(inner, (*position, place), known, found)
            if _compat.recursion(equation) in ("inline", "remat", "opaque"):
                pairs = zip(equation.outvars, results, strict=True)
                env.update((v, x) for v, x in pairs if x is not None)
    return [value(atom) for atom in body.outvars]


def _inner_inputs(
    equation: Any, values: tuple[Any, ...], place: int, count: int
) -> tuple[Any, ...]:
    kind = _compat.recursion(equation)
    if kind == "cond":
        return values[1:]
    if kind == "scan":
        consts = _compat.scan_parts(equation).num_consts
        return (*values[:consts], *[None] * (count - consts))
    if kind == "while":
        first, second = _compat.while_parts(equation)
        own = values[:first] if place == 0 else values[first : first + second]
        return (*own, *[None] * (count - len(own)))
    return values


def _matches(here: _BoundEquation, there: _BoundEquation, op: Op) -> bool:
    holes = [[v is None for v in one.values] for one in (here, there)]
    return holes[0] == holes[1] and sum(holes[0]) == len(op.operands)


def _makers(graph: Graph) -> dict[int, list[int]]:
    makers: dict[int, list[int]] = {t.id: [] for t in graph.tensors}
    for index, op in enumerate(graph.ops):
        for t in op.results:
            makers[t].append(index)
    return makers


def _backs(walk: FlatProgram) -> dict[int, int]:
    return {back: out for out, back in walk.loops}


def _constant(trace: Trace, tensor: int) -> Any:
    return trace.walk.constant(tensor)


def _values_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=False))
    except Exception:  # Arrays of other processes, or types that cannot be compared.
        return False


def avals(trace: Trace) -> list[Any]:
    """Returns the abstract value of every result of a program."""
    return [atom.aval for atom in _compat.open_jaxpr(trace.program)[0].outvars]
