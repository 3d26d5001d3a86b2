"""Puts regions of a traced program into ``jax.checkpoint``.

The equations do not change, they move into ``jax.checkpoint``. So capture, lowering and
compilers see only what a user's model may contain.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture.patterns.named_calls import makes_logits
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.jaxpr.splice import Scope, Splice
from whalejax.planner.model.graph import CONVOLUTION
from whalejax.planner.sharding.program_regions import Region
from whalejax.planner.step_options import named_in


Position = tuple[int, ...]


def checkpoint_names(jaxpr: Any) -> tuple[str, ...]:
    """Returns the distinct names that a program gives to values for checkpointing.

    Args:
        jaxpr: Open or closed jaxpr.
    """
    names: dict[str, None] = {}
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        name = _compat.checkpoint_name_of(equation)
        if name is not None:
            names[name] = None
        for inner in _compat.inner_jaxprs(equation):
            names.update(dict.fromkeys(checkpoint_names(inner)))
    return tuple(names)


def policy_of(policy: str, names: Sequence[str]) -> Any:
    """Returns a policy of ``jax.checkpoint`` by its name in this library.

    Args:
        policy: ``"dots"``, ``"named"``, ``"named:a,b"`` or ``"full"``.
        names: Names of the values that ``"named"`` saves.

    Returns:
        The policy; None saves nothing.
    """
    if policy == "full":
        return None
    if policy == "dots":
        return _products
    return jax.checkpoint_policies.save_only_these_names(*(named_in(policy) or names))


_PRODUCTS: Final = (CONVOLUTION, "ragged_dot_general", "ragged_dot")
"""Products with weights that the policies of JAX do not count as such."""


def _products(primitive: Any, *avals: Any, **params: Any) -> bool:
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name in _PRODUCTS or bool(dots(primitive, *avals, **params))


def applicable(jaxpr: Any, regions: Sequence[Region]) -> list[Region]:
    """Returns the regions that a checkpoint can enclose.

    Left out are regions in calls that run unchanged, such as branches and functions
    with their own derivatives, and regions whose effects JAX does not repeat.

    Args:
        jaxpr: Closed jaxpr of the loss.
        regions: Regions of the jaxpr.
    """
    result = []
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
                result.append(region)
    return result


def recomputed(jaxpr: Any, regions: Sequence[Region]) -> Any:
    """Returns a program with a checkpoint around each region.

    Args:
        jaxpr: Closed jaxpr of the loss.
        regions: Regions of the jaxpr, in program order.
    """
    builder = _Builder(
        {(r.prefix, r.first): r for r in regions}, checkpoint_names(jaxpr)
    )
    return builder.program(jaxpr, (), looped=False)


class _Builder:
    """Builds a program with checkpoints.

    The keys of ``regions`` are the prefix and number of a region's first equation.
    """

    def __init__(
        self, regions: dict[tuple[Position, int], Region], names: Sequence[str]
    ) -> None:
        self.regions = regions
        self.names = names
        self.inside = {r.prefix[:n] for r in regions.values() for n in _lengths(r)}
        self.checkpoint = functools.cache(self._checkpoint)

    def program(self, jaxpr: Any, prefix: Position, *, looped: bool) -> Any:
        splice = Splice(jaxpr)
        body, _ = _compat.open_jaxpr(jaxpr)
        self._put(splice, body, prefix, None, looped=looped)
        return splice.program()

    def _put(
        self, splice: Splice, body: Any, prefix: Position, scope: Scope, *, looped: bool
    ) -> None:
        last = _last_readers(body)
        index = 0
        while index < len(body.eqns):
            region = self.regions.get((prefix, index))
            if region is None:
                equation, at = body.eqns[index], (*prefix, index)
                self._equation(splice, equation, at, scope, looped=looped)
                index += 1
            else:
                equations = body.eqns[region.first : region.end]
                made = dict.fromkeys(v for e in equations for v in e.outvars)
                read = dict.fromkeys(_variables(e.invars for e in equations))
                checkpoint = _compat.checkpointed(
                    equations,
                    [v for v in read if v not in made],
                    [v for v in made if last.get(v, -1) >= region.end],
                    # Inside a loop, CSE cannot merge values of forward and backward.
                    self.checkpoint(region.policy, prevent_cse=not looped),
                )
                splice.keep(checkpoint, scope)
                index = region.end

    def _equation(
        self,
        splice: Splice,
        equation: Any,
        position: Position,
        scope: Scope,
        *,
        looped: bool,
    ) -> None:
        kind = _compat.recursion(equation) if position in self.inside else None
        at = (*position, 0)
        if kind == "inline":
            (inner,) = map(_compat.open_jaxpr, _compat.inner_jaxprs(equation))
            with splice.call(equation, scope) as within:
                self._put(splice, inner[0], at, within, looped=looped)
        elif kind == "scan":
            (turn,) = _compat.inner_jaxprs(equation)
            inside = self.program(turn, at, looped=True)
            splice.keep(_compat.with_inner(equation, inside), scope)
        else:
            splice.keep(equation, scope)

    def _checkpoint(self, policy: str, *, prevent_cse: bool) -> Any:
        return _compat.checkpoint_equation(
            policy_of(policy, self.names), prevent_cse=prevent_cse
        )


def _lengths(region: Region) -> range:
    return range(1, len(region.prefix), 2)


def _last_readers(body: Any) -> dict[Any, int]:
    """Returns the index of the last equation that reads each variable.

    For results of the body, it is ``sys.maxsize``.
    """
    readers = {
        atom: index
        for index, equation in enumerate(body.eqns)
        for atom in _variables([equation.invars])
    }
    return readers | dict.fromkeys(_variables([body.outvars]), sys.maxsize)


def _variables(several: Any) -> list[Any]:
    return [a for atoms in several for a in atoms if not _compat.is_literal(a)]
