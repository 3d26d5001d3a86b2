"""Loops, branches and checkpointed regions of a traced program, around other bodies.

Whoever runs a jaxpr equation by equation and changes something inside has to build
these anew. The lowering does, to constrain layouts; so does what takes fused
dimensions apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from whalejax import _compat


Body = Callable[[Sequence[Any]], Sequence[Any]]
"""From the inputs of an inner jaxpr to its outputs."""


Each = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""From an equation and its operands to its results."""

Instead = Callable[[Any], tuple[Sequence[Any], Any] | None]
"""From an equation to the variables and the function that give its results."""


def run(
    jaxpr: Any,
    values: Sequence[Any],
    each: Each,
    *,
    instead: Instead = lambda equation: None,
    alive: set[int] | None = None,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """A program, equation by equation, every one in the scopes that it was traced in.

    Args:
        jaxpr: open or closed.
        values: its inputs.
        each: runs one equation.
        instead: what runs in place of one, and on which variables.
        alive: ids of the equations that run; all where left out.
        constant: what stands for an array that the program holds.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(
        zip(body.constvars, map(constant, constants), strict=True)
    )
    env.update(zip(body.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for equation in body.eqns:
        if alive is not None and id(equation) not in alive:
            continue
        other = instead(equation)
        with _compat.equation_context(equation):
            if other is None:
                results = each(equation, [read(atom) for atom in equation.invars])
            else:
                variables, function = other
                results = function(*map(read, variables))
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def around(equation: Any, values: Sequence[Any], body: Body) -> list[Any]:
    """A loop or a checkpointed region with its own policy, around another body.

    Args:
        equation: a scan or a checkpointed region as traced.
        values: its operands.
        body: what runs inside.
    """
    if _compat.recursion(equation) == "scan":
        return scan(equation, values, body)
    return remat(equation, values, body, equation.params["policy"])


def remat(equation: Any, values: Sequence[Any], body: Body, policy: Any) -> list[Any]:
    """A checkpointed region.

    Args:
        equation: the region as traced.
        values: its operands.
        body: what runs inside.
        policy: what is kept for the backward pass.
    """

    def region(*arguments: Any) -> list[Any]:
        return list(body(arguments))

    rebuilt = jax.checkpoint(
        region, prevent_cse=equation.params["prevent_cse"], policy=policy
    )
    return list(rebuilt(*values))


def scan(equation: Any, values: Sequence[Any], body: Body) -> list[Any]:
    """A scan.

    Args:
        equation: the loop as traced.
        values: its operands: constants, carries, stacks.
        body: one turn, from constants, carries and slices to carries and slices.
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
        length=parts.length,
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
        values: its operands, of which the first is the number of the branch.
        branches: what runs in each.
    """
    index, *operands = values

    def inside(branch: Body) -> Callable[..., list[Any]]:
        def run(*arguments: Any) -> list[Any]:
            held = jax.lax.optimization_barrier(arguments)
            return list(jax.lax.optimization_barrier(tuple(branch(held))))

        return run

    return list(jax.lax.switch(index, [inside(b) for b in branches], *operands))
