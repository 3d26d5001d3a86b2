"""Traced programs as one list of steps, any part of which can run.

A pipeline runs a model, its backward pass and its optimizer in pieces, at different
times and on different devices. A piece computes some values from others. This module
finds the steps of a piece and runs them. Calls are inlined, so that the list is as fine
as possible. Only a call with a custom rule stays one step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.planner.memory.saved_tensors import CHEAP


@dataclass(frozen=True, slots=True, eq=False)
class FixedValue:
    """An array constant of the program."""

    value: Any


Operand = int | FixedValue
"""Number of a value, or a constant of the program."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """One operation.

    Attributes:
        equation: Traced equation.
        reads: Operands of the equation.
        writes: Numbers of the results.
    """

    equation: Any
    reads: tuple[Operand, ...]
    writes: tuple[int, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that the step reads."""
        return tuple(x for x in self.reads if not isinstance(x, FixedValue))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """A program as a list of steps, with inputs and outputs by number.

    Attributes:
        steps: Operations, in order.
        inputs: Numbers of the inputs.
        outputs: Results of the program.
        avals: Shape and dtype of every value.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    avals: Mapping[int, Any]
    _makers: dict[int, Step] = field(default_factory=dict)

    def aval_of(self, operand: Operand) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of a value or constant."""
        if isinstance(operand, FixedValue):
            value = jnp.asarray(operand.value)
            return jax.ShapeDtypeStruct(value.shape, value.dtype)
        aval = self.avals[operand]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def __post_init__(self) -> None:
        for step in self.steps:
            self._makers.update(dict.fromkeys(step.writes, step))

    @classmethod
    def of(cls, jaxpr: Any) -> Steps:
        """Converts a program to steps.

        Args:
            jaxpr: Open or closed jaxpr.
        """
        return _Writer().write(jaxpr)

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a value."""
        aval = self.avals[number]
        return _compat.aval_bytes(aval)

    def maker(self, number: int) -> Step | None:
        """Returns the step that makes a value; None for an input."""
        return self._makers.get(number)

    def depending(self, numbers: Collection[int]) -> set[int]:
        """Returns some values and all values that depend on them."""
        depending = set(numbers)
        for step in self.steps:
            if not depending.isdisjoint(step.sources):
                depending.update(step.writes)
        return depending

    def needed(
        self,
        wanted: Sequence[Operand],
        given: Collection[int],
        also: Collection[Step] = (),
    ) -> tuple[list[Step], list[int]]:
        """Returns the steps that compute some values from others.

        Args:
            wanted: Operands to compute.
            given: Numbers of the available values.
            also: Steps that always run; default: none.

        Returns:
            The steps in order. Then the given values and inputs that the steps, or the
            wanted operands themselves, read.
        """
        open_ = {x for x in wanted if not isinstance(x, FixedValue)}
        chosen, read = [], set[int]()
        for step in reversed(self.steps):
            making = open_.intersection(step.writes).difference(given)
            if making or step in also:
                chosen.append(step)
                open_.update(step.sources)
        made = {n for step in chosen for n in step.writes}
        for number in open_:
            if number in given or number not in made:
                read.add(number)
        return chosen[::-1], sorted(read)

    def run(
        self,
        wanted: Sequence[Operand],
        values: Mapping[int, Any],
        also: Collection[Step] = (),
    ) -> list[Any]:
        """Computes some values from others.

        Args:
            wanted: Operands to compute.
            values: Available values, by number.
            also: Steps that always run.
        """
        known = dict(values)
        steps, _ = self.needed(wanted, values.keys(), also)
        for step in steps:
            operands = [_read(x, known) for x in step.reads]
            with _compat.equation_context(step.equation):
                results = _compat.bind(step.equation, operands)
            for number, result in zip(step.writes, results, strict=True):
                known.setdefault(number, result)
        return [_read(x, known) for x in wanted]

    def residual_numbers(
        self,
        wanted: Sequence[Operand],
        later: Collection[int],
        given: Collection[int] = (),
    ) -> list[int]:
        """Returns the values that one part of a program must save for another.

        Results of cheap operations are recomputed if that reduces the saved bytes.
        Compilers do the same inside one program.

        Args:
            wanted: Operands that the other part computes.
            later: Values that only the other part can compute or receive.
            given: Numbers of the inputs of both parts; they are not recomputed.
                Default: none.
        """
        inputs = {*self.inputs}
        _, read = self.needed(wanted, self.avals.keys() - set(later))
        direct = [n for n in read if n not in later and n not in inputs]
        behind = {n: self._behind(n, inputs, given) for n in direct}
        residual_numbers: set[int] = set()
        for together in _group_by_shared_sources(behind):
            sources = set[int]().union(*(behind[n] for n in together))
            less = sum(map(self.nbytes, sources)) < sum(map(self.nbytes, together))
            residual_numbers |= sources if less else set(together)
        for step in reversed(self.steps):
            for number in residual_numbers.intersection(step.writes):
                if self._is_recomputable(step, residual_numbers - {number}, inputs):
                    residual_numbers.discard(number)
        return sorted(residual_numbers)

    def _behind(
        self, number: int, inputs: Collection[int], given: Collection[int]
    ) -> frozenset[int]:
        behind, seen, open_ = set[int](), set[int](), [number]
        while open_:
            n = open_.pop()
            if n in seen or n in inputs:
                continue
            seen.add(n)
            step = self.maker(n)
            if step is not None and n not in given and self._cheap(step, n):
                open_ += step.sources
            else:
                behind.add(n)
        return frozenset(behind)

    def _cheap(self, step: Step, number: int) -> bool:
        cheap = step.equation.primitive.name in AGAIN
        size = math.prod(self.avals[number].shape)
        return cheap and all(
            math.prod(self.avals[n].shape) <= size for n in step.sources
        )

    def _is_recomputable(
        self, step: Step, there: Collection[int], inputs: Collection[int]
    ) -> bool:
        return step.equation.primitive.name in AGAIN and all(
            n in there or n in inputs for n in step.sources
        )


AGAIN = CHEAP | {
    *("reshape", "squeeze", "expand_dims", "transpose", "name"),
    *("div", "exp"),  # The result of the product before a softmax is saved.
}
"""Operations whose results are recomputed instead of saved."""


def _group_by_shared_sources(behind: Mapping[int, frozenset[int]]) -> list[list[int]]:
    groups: list[tuple[set[int], list[int]]] = []
    for number, sources in behind.items():
        mine, members = set(sources), [number]
        apart = []
        for others, joined in groups:
            if mine.isdisjoint(others):
                apart.append((others, joined))
            else:
                mine |= others
                members += joined
        groups = [*apart, (mine, members)]
    return [members for _, members in groups]


def _read(operand: Operand, known: Mapping[int, Any]) -> Any:
    return operand.value if isinstance(operand, FixedValue) else known[operand]


class _Writer:
    def __init__(self) -> None:
        self.avals: dict[int, Any] = {}
        self.steps: list[Step] = []

    def write(self, jaxpr: Any) -> Steps:
        body, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Operand] = {
            v: FixedValue(x) for v, x in zip(body.constvars, constants, strict=True)
        }
        inputs = tuple(self._new(v) for v in body.invars)
        env.update(zip(body.invars, inputs, strict=True))
        outputs = self._body(body, env)
        return Steps(
            steps=tuple(self.steps), inputs=inputs, outputs=outputs, avals=self.avals
        )

    def _new(self, variable: Any) -> int:
        number = len(self.avals)
        self.avals[number] = variable.aval
        return number

    def _body(self, body: Any, env: dict[Any, Operand]) -> tuple[Operand, ...]:
        def operand(atom: Any) -> Operand:
            return FixedValue(atom.val) if _compat.is_literal(atom) else env[atom]

        for equation in body.eqns:
            reads = tuple(map(operand, equation.invars))
            if _compat.recursion(equation) == "inline":
                inner, constants = _compat.open_jaxpr(_compat.inner_jaxprs(equation)[0])
                fixed = map(FixedValue, constants)
                inside: dict[Any, Operand] = dict(
                    zip(inner.constvars, fixed, strict=True)
                )
                inside.update(zip(inner.invars, reads, strict=True))
                env.update(
                    zip(equation.outvars, self._body(inner, inside), strict=True)
                )
                continue
            writes = tuple(self._new(v) for v in equation.outvars)
            env.update(zip(equation.outvars, writes, strict=True))
            self.steps.append(Step(equation=equation, reads=reads, writes=writes))
        return tuple(map(operand, body.outvars))
