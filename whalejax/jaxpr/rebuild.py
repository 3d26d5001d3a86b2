"""Loops, branches and checkpointed regions of a traced program, around other bodies.

Whoever runs a jaxpr equation by equation and changes something inside has to build
these anew. The lowering does, to constrain layouts; so does what takes fused
dimensions apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from whalejax import _compat


Body = Callable[[Sequence[Any]], Sequence[Any]]
"""From the inputs of an inner jaxpr to its outputs."""


Each = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""From an equation and its operands to its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationReplacement:
    """Replacement of some equations of a program.

    Attributes:
        inputs, outputs: Variables of the program.
        function: From values of the inputs to values of the outputs.
        equation: Equation whose scopes it runs in; None where it opens them itself.
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
    """A program, equation by equation, every one in the scopes that it was traced in.

    Args:
        jaxpr: Open or closed.
        values: Its inputs.
        each: Runs one equation.
        items: Equations and ``EquationReplacement``s, in order, that run in place of
            all equations.
        constant: Function that replaces an array that the program holds.
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
    """Values of some variables, by equations outside the scopes of their program.

    Args:
        equations: Equations in an order in which they can run.
        known: Values of the variables that they read and do not make.
        wanted: Variables that they make, or that are known.
    """
    env = dict(known)
    for equation in equations:
        env.update(results_of(equation, env))
    return [env[variable] for variable in wanted]


def results_of(equation: Any, known: Mapping[Any, Any]) -> dict[Any, Any]:
    """Computes an equation's results, by variable, from the values that it reads."""
    operands = [a.val if _compat.is_literal(a) else known[a] for a in equation.invars]
    return dict(zip(equation.outvars, _compat.bind(equation, operands), strict=True))


def arranged(jaxpr: Any, calls: Sequence[EquationReplacement]) -> list[Any]:
    """The equations of a program that are needed beside some calls, and the calls.

    Args:
        jaxpr: Open.
        calls: Calls that replace equations.

    Returns:
        All in an order in which they can run.

    Raises:
        ValueError: There is none, since calls need what each other give.
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
    """A loop or a checkpointed region with its own policy, around another body.

    Args:
        equation: A scan or a checkpointed region as traced.
        values: Its operands.
        body: Function that runs inside.
    """
    if _compat.recursion(equation) == "scan":
        return scan(equation, values, body)
    return remat(equation, values, body, equation.params["policy"])


def remat(equation: Any, values: Sequence[Any], body: Body, policy: Any) -> list[Any]:
    """A checkpointed region.

    Args:
        equation: The region as traced.
        values: Its operands.
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
    """A scan.

    Args:
        equation: The loop as traced.
        values: Its operands: constants, carries, stacks.
        body: One turn, from constants, carries and slices to carries and slices.
        length: Number of iterations, where the stacks are shorter than as traced.
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
    """A choice among branches.

    What goes in and comes out is held by a barrier: a layout may be said of either
    inside, and the compiler takes no branches that end, forwards or backwards, in
    layouts of their own.

    Args:
        values: Its operands, of which the first is the number of the branch.
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
    """Values behind a barrier, forwards and backwards.

    Unlike JAX's own barrier it makes no tangent of what has none: a function that is
    called in a branch may close over that, and have no derivative for it.
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
