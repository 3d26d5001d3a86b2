"""Rebuilds loops, branches and checkpointed regions of a traced program.

Code that runs a jaxpr equation by equation, with changes, has to rebuild them around
the changed bodies. The lowering does so to constrain layouts, and ``split_dims`` to
divide fused dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from whalejax import _compat


Body = Callable[[Sequence[Any]], Sequence[Any]]
"""Function from the inputs of an inner jaxpr to its outputs."""


Each = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Function from an equation and its operands to its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationReplacement:
    """Replacement of some equations of a program.

    Attributes:
        inputs: Variables of the program that it reads.
        outputs: Variables of the program that it computes.
        function: Function from values of the inputs to values of the outputs.
        equation: Equation in whose scopes the function runs; None if the function opens
            its scopes itself.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: Callable[..., Sequence[Any]]
    equation: Any


def run(
    jaxpr: Any,
    values: Sequence[Any],
    each: Each,
    *,
    items: Sequence[Any] | None = None,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Runs a program, with every equation in its traced scopes.

    Args:
        jaxpr: Open or closed jaxpr.
        values: Inputs of the program.
        each: Function that runs one equation.
        items: Equations and ``EquationReplacement``s that run in place of all
            equations, in order; default: all equations.
        constant: Function that replaces an array constant of the program; by default
            constants stay.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(
        zip(body.constvars, map(constant, constants), strict=True)
    )
    env.update(zip(body.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for item in body.eqns if items is None else items:
        if isinstance(item, EquationReplacement):
            scope = item.equation
            opened = scope is None
            with nullcontext() if opened else _compat.equation_context(scope):
                results = item.function(*map(read, item.inputs))
            env.update(zip(item.outputs, results, strict=True))
        else:
            with _compat.equation_context(item):
                results = each(item, [read(atom) for atom in item.invars])
            env.update(zip(item.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def compute(
    equations: Sequence[Any], known: Mapping[Any, Any], wanted: Sequence[Any]
) -> list[Any]:
    """Computes some variables, outside the scopes of their program.

    Args:
        equations: Equations in a possible order of execution.
        known: Values of the variables that the equations read and do not make.
        wanted: Variables to return; equations make them, or they are known.
    """
    env = dict(known)
    for equation in equations:
        env.update(results_of(equation, env))
    return [env[variable] for variable in wanted]


def results_of(equation: Any, known: Mapping[Any, Any]) -> dict[Any, Any]:
    """Computes an equation's results from known operands.

    Returns:
        Values of the results, by variable.
    """
    operands = [a.val if _compat.is_literal(a) else known[a] for a in equation.invars]
    return dict(zip(equation.outvars, _compat.bind(equation, operands), strict=True))


def arranged(jaxpr: Any, calls: Sequence[EquationReplacement]) -> list[Any]:
    """Returns some calls, and the other equations that a program needs, in order.

    Args:
        jaxpr: Open jaxpr.
        calls: Calls that replace equations.

    Returns:
        Equations and calls in a possible order of execution.

    Raises:
        ValueError: There is no such order, as calls need each other's results.
    """
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    made_by.update((v, call) for call in calls for v in call.outputs)

    known: dict[int, list[Any]] = {}

    def read(item: Any) -> list[Any]:
        result = known.get(id(item))
        if result is None:
            atoms = (
                item.inputs if isinstance(item, EquationReplacement) else item.invars
            )
            variables = [a for a in atoms if not _compat.is_literal(a)]
            result = [made_by[v] for v in variables if v in made_by]
            known[id(item)] = result
        return result

    ends = (v for v in jaxpr.outvars if not _compat.is_literal(v))
    wanted = [made_by[v] for v in ends if v in made_by]
    wanted += [equation for equation in jaxpr.eqns if equation.effects]
    live: set[int] = set()
    while wanted:
        item = wanted.pop()
        if id(item) not in live:
            live.add(id(item))
            wanted += read(item)
    order: list[Any] = []
    done: dict[int, bool] = {}

    def add(item: Any) -> None:
        if not done.setdefault(id(item), False):
            for other in read(item):
                if done.get(id(other)) is False:
                    raise ValueError("calls need what each other give")
                add(other)
            done[id(item)] = True
            order.append(item)

    for equation in jaxpr.eqns:
        for item in [made_by[v] for v in equation.outvars] or [equation]:
            if id(item) in live:
                add(item)
    return order


def around(equation: Any, values: Sequence[Any], body: Body) -> list[Any]:
    """Rebuilds a loop, or a checkpointed region with its own policy, around a body.

    Args:
        equation: Traced scan or checkpointed region.
        values: Operands of the equation.
        body: Function that runs inside.
    """
    if _compat.recursion(equation) == "scan":
        return scan(equation, values, body)
    return remat(equation, values, body, equation.params["policy"])


def remat(equation: Any, values: Sequence[Any], body: Body, policy: Any) -> list[Any]:
    """Rebuilds a checkpointed region.

    Args:
        equation: Traced region.
        values: Operands of the region.
        body: Function that runs inside.
        policy: Policy of the values that are saved for the backward pass.
    """

    def region(*arguments: Any) -> list[Any]:
        return list(body(arguments))

    rebuilt = jax.checkpoint(
        region, prevent_cse=equation.params["prevent_cse"], policy=policy
    )
    return list(rebuilt(*values))


def scan(
    equation: Any, values: Sequence[Any], body: Body, length: int | None = None
) -> list[Any]:
    """Rebuilds a scan.

    Args:
        equation: Traced loop.
        values: Operands: constants, carries, stacks.
        body: One iteration, from constants, carries and slices to carries and slices.
        length: Number of iterations, if the stacks are shorter than traced.
        length: Number of iterations; default: the traced one.
    """
    parts = _compat.scan_parts(equation)
    first, second = parts.num_consts, parts.num_consts + parts.num_carries
    constants = values[:first]

    def turn(carry: Any, slices: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = tuple(body((*constants, *carry, *slices)))
        return outputs[: parts.num_carries], outputs[parts.num_carries :]

    carry, stacked = jax.lax.scan(
        turn,
        tuple(values[first:second]),
        tuple(values[second:]),
        length=parts.length if length is None else length,
        reverse=equation.params["reverse"],
        unroll=equation.params["unroll"],
    )
    return [*carry, *stacked]


def cond(values: Sequence[Any], branches: Sequence[Body]) -> list[Any]:
    """Rebuilds a conditional, with a barrier around its inputs and outputs.

    A layout may be constrained inside a branch. The compiler refuses branches whose
    results have different layouts, in the forward or backward pass. The barrier keeps
    these layouts inside.

    Args:
        values: Operands; the first is the index of the branch.
        branches: Function of each branch.
    """
    index, *operands = values

    def wrap_branch(branch: Body) -> Callable[..., list[Any]]:
        def run(*arguments: Any) -> list[Any]:
            return list(_with_barrier(*branch(_with_barrier(*arguments))))

        return run

    return list(jax.lax.switch(index, [wrap_branch(b) for b in branches], *operands))


@jax.custom_jvp
def _with_barrier(*values: Any) -> tuple[Any, ...]:
    """Puts values behind a barrier, forward and backward.

    JAX's own barrier makes a tangent for every value. This barrier makes none for
    values without a tangent, so a function called in a branch may close over them.
    """
    barrier: tuple[Any, ...] = jax.lax.optimization_barrier(values)
    return barrier


def _held_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    zero = jax.custom_derivatives.SymbolicZero
    places = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, zero)]
    held = _with_barrier(*(tangents[i] for i in places)) if places else ()
    held_tangents = list(tangents)
    for place, tangent in zip(places, held, strict=True):
        held_tangents[place] = tangent
    return _with_barrier(*primals), tuple(held_tangents)


_with_barrier.defjvp(_held_tangents, symbolic_zeros=True)
