"""Puts regions of a traced program into ``jax.checkpoint``.

Nothing is computed otherwise: the same equations stand inside ``jax.checkpoint``, so
that whatever reads the program afterwards (capture, the lowering, the compilers) meets
nothing that it does not know from models that do this themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture.patterns.calls import makes_logits
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.jaxpr import rebuild
from whalejax.planner.model.graph import CONVOLUTION
from whalejax.planner.sharding.remat import Region, named_in


Position = tuple[int, ...]


def checkpoint_names(jaxpr: Any) -> tuple[str, ...]:
    """The names that a program gives to values for checkpointing, each once.

    Args:
        jaxpr: open or closed.
    """
    found: dict[str, None] = {}
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        name = _compat.checkpoint_name_of(equation)
        if name is not None:
            found[name] = None
        for inner in _compat.inner_jaxprs(equation):
            found.update(dict.fromkeys(checkpoint_names(inner)))
    return tuple(found)


def policy_of(policy: str, names: Sequence[str]) -> Any:
    """A policy of ``jax.checkpoint`` by its name here.

    Args:
        policy: ``"dots"``, ``"named"``, ``"named:a,b"`` or ``"full"``.
        names: what ``"named"`` keeps.

    Returns:
        The policy; None keeps nothing.
    """
    if policy == "full":
        return None
    if policy == "dots":
        return _products
    return jax.checkpoint_policies.save_only_these_names(*(named_in(policy) or names))


_PRODUCTS: Final = (CONVOLUTION, "ragged_dot_general", "ragged_dot")
"""Products with weights of which JAX's own policy does not know."""


def _products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keep results of products with weights, convolutions among them."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name in _PRODUCTS or bool(dots(primitive, *avals, **params))


def applicable(jaxpr: Any, regions: Sequence[Region]) -> list[Region]:
    """The regions that a checkpoint can go around.

    Left out are those inside calls that are bound as they are (with derivatives of
    their own, in branches), and those with an effect that JAX does not compute again.

    Args:
        jaxpr: closed, as captured.
        regions: equations of it.
    """
    found = []
    for region in regions:
        body: Any = _compat.open_jaxpr(jaxpr)[0]
        for index in region.prefix[::2]:
            equation = body.eqns[index]
            kind = _compat.recursion(equation)
            called = makes_logits(equation) or sorts_rows(equation)
            if kind not in ("inline", "scan") or called:
                break
            body = _compat.open_jaxpr(_compat.inner_jaxprs(equation)[0])[0]
        else:
            equations = body.eqns[region.first : region.end]
            if all(map(_compat.runs_twice, equations)):
                found.append(region)
    return found


def recomputed(jaxpr: Any, regions: Sequence[Region]) -> Any:
    """A program with a checkpoint around each region.

    Args:
        jaxpr: closed, as captured.
        regions: equations of it, in program order.
    """
    names = checkpoint_names(jaxpr)
    builder = _Builder({(r.prefix, r.first): r for r in regions}, names)
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]

    def program(*leaves: Any) -> list[Any]:
        return builder.run(jaxpr, leaves, (), looped=False)

    return _compat.trace(program, avals)


class _Builder:
    """Runs a program anew, with checkpoints.

    Args:
        regions: by the prefix and number of their first equation.
        names: checkpoint names in the program.
    """

    def __init__(
        self, regions: dict[tuple[Position, int], Region], names: Sequence[str]
    ) -> None:
        self.regions = regions
        self.names = names
        self.inside = {r.prefix[:n] for r in regions.values() for n in _lengths(r)}

    def run(
        self, jaxpr: Any, values: Sequence[Any], prefix: Position, *, looped: bool
    ) -> list[Any]:
        """One jaxpr at a position; ``looped`` if it is the body of a loop."""
        body, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
        env.update(zip(body.invars, values, strict=True))
        index = 0
        while index < len(body.eqns):
            region = self.regions.get((prefix, index))
            if region is None:
                self._equation(body.eqns[index], env, (*prefix, index), looped=looped)
                index += 1
            else:
                self._region(body, region, env, looped=looped)
                index = region.end
        return [_read(atom, env) for atom in body.outvars]

    def _equation(
        self, equation: Any, env: dict[Any, Any], position: Position, *, looped: bool
    ) -> None:
        values = [_read(atom, env) for atom in equation.invars]
        kind = _compat.recursion(equation) if position in self.inside else None
        with _compat.equation_context(equation):
            if kind == "inline":
                inner = _compat.inner_jaxprs(equation)[0]
                results = self.run(inner, values, (*position, 0), looped=looped)
            elif kind == "scan":
                inner = _compat.inner_jaxprs(equation)[0]
                results = rebuild.scan(
                    equation,
                    values,
                    lambda turn: self.run(inner, turn, (*position, 0), looped=True),
                )
            else:
                results = _compat.bind(equation, values)
        env.update(zip(equation.outvars, results, strict=True))

    def _region(
        self, body: Any, region: Region, env: dict[Any, Any], *, looped: bool
    ) -> None:
        equations = body.eqns[region.first : region.end]
        made = {v for e in equations for v in e.outvars}
        read = dict.fromkeys(_variables(e.invars for e in equations))
        given = [v for v in read if v not in made]
        later = [e.invars for e in body.eqns[region.end :]]
        wanted = {*_variables(later), *_variables([body.outvars])}
        taken = [v for e in equations for v in e.outvars if v in wanted]

        def inside(*values: Any) -> list[Any]:
            local = dict(zip(given, values, strict=True))
            for equation in equations:
                operands = [_read(atom, local) for atom in equation.invars]
                with _compat.equation_context(equation, skip=depth):
                    results = _compat.bind(equation, operands)
                local.update(zip(equation.outvars, results, strict=True))
            return [local[v] for v in taken]

        again = jax.checkpoint(
            inside,
            # In a loop nothing can take the first pass's value for the second's.
            prevent_cse=not looped,
            policy=policy_of(region.policy, self.names),
        )
        # A mark around all of it stays around it, one instance for all regions.
        with _compat.scopes_context(equations) as depth:
            results = again(*(env[v] for v in given))
        env.update(zip(taken, results, strict=True))


def _lengths(region: Region) -> range:
    """Lengths of the positions of the calls around a region."""
    return range(1, len(region.prefix), 2)


def _variables(several: Any) -> list[Any]:
    return [a for atoms in several for a in atoms if not _compat.is_literal(a)]


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if _compat.is_literal(atom) else env[atom]
