"""Run a traced loss again, equation by equation, with layouts constrained.

The program is the user's own, as traced; nothing is rewritten but the layouts. Calls
are inlined, loops and checkpointed regions are rebuilt around their bodies, and what
has a derivative rule of its own is bound as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from whalejax import _compat
from whalejax.lowering.constraints import Constraints, Position
from whalejax.meshes.build import partition_spec
from whalejax.planner.layout import Spec


GATHERED = "whalejax_gathered_parameter"
"""Checkpoint name of parameters gathered for use: never kept for the backward pass."""

MOVED = "whalejax_constrained_value"
"""Checkpoint name of other constrained values: kept, or their collectives would run
again."""


def named(spec: Spec, mesh: Mesh) -> NamedSharding:
    """A plain layout on a mesh."""
    return NamedSharding(mesh, partition_spec(spec))


def keep_all_but_gathered() -> Any:
    """Checkpoint policy: keep everything except gathered parameters.

    Neither the named value nor the constraint that makes it may be kept: each is the
    whole parameter. What else is constrained is kept under its own name.
    """

    def policy(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return bool(params["name"] != GATHERED)
        return bool(primitive.name != "sharding_constraint")

    return policy


@dataclass(slots=True)
class _Scope:
    """One jaxpr being run: its position, its values, and layouts already made."""

    constraints: Constraints
    mesh: Mesh
    position: Position
    values: dict[Any, Any] = field(default_factory=dict)
    moved: dict[Any, Any] = field(default_factory=dict)

    def read(self, atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else self.values[atom]

    def operand(self, position: Position, slot: int, atom: Any) -> Any:
        value = self.read(atom)
        key = (position, slot)
        gather = self.constraints.gathers.get(key)
        specs = gather or self.constraints.operands.get(key)
        if specs is None or _compat.is_literal(atom):
            return value
        done = (atom, specs)
        if done not in self.moved:
            for spec in specs:
                sharding = named(spec, self.mesh)
                value = jax.lax.with_sharding_constraint(value, sharding)
            self.moved[done] = self.marked(value, GATHERED if gather else MOVED)
        return self.moved[done]

    def result(self, position: Position, slot: int, value: Any) -> Any:
        spec = self.constraints.results.get((position, slot))
        if spec is None:
            return value
        value = jax.lax.with_sharding_constraint(value, named(spec, self.mesh))
        return self.marked(value, MOVED)

    def marked(self, value: Any, name: str) -> Any:
        """The value under a name by which the backward pass keeps it or not."""
        return checkpoint_name(value, name) if self.constraints.regather else value


def evaluate(
    jaxpr: Any,
    arguments: Sequence[Any],
    constraints: Constraints,
    mesh: Mesh,
    position: Position = (),
) -> list[Any]:
    """Run a jaxpr with constraints.

    Args:
        jaxpr: open or closed, as captured.
        arguments: one value for each of its inputs.
        constraints: what to constrain, by position.
        mesh: the mesh of the plan.
        position: where the jaxpr stands in the outermost one.

    Returns:
        Its outputs.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    scope = _Scope(constraints, mesh, position)
    scope.values.update(zip(body.constvars, constants, strict=True))
    scope.values.update(zip(body.invars, arguments, strict=True))
    for index, equation in enumerate(body.eqns):
        _equation(scope, equation, (*position, index))
    return [scope.read(atom) for atom in body.outvars]


def _equation(scope: _Scope, equation: Any, position: Position) -> None:
    kind = _compat.recursion(equation)
    slots = _operand_slots(equation)
    values = [
        scope.operand(position, slot, atom) if slot is not None else scope.read(atom)
        for slot, atom in zip(slots, equation.invars, strict=True)
    ]
    with _compat.equation_context(equation):
        if kind == "inline":
            inner = _compat.inner_jaxprs(equation)[0]
            results = _inner(scope, inner, values, (*position, 0))
        elif kind == "remat":
            results = _remat(scope, equation, values, (*position, 0))
        elif kind == "scan":
            results = _scan(scope, equation, values, (*position, 0))
        else:
            results = _compat.bind(equation, values)
    for slot, (atom, value) in enumerate(zip(equation.outvars, results, strict=True)):
        scope.values[atom] = scope.result(position, slot, value)


def _operand_slots(equation: Any) -> list[int | None]:
    """The operand number that capture gives each input; scalar literals have none."""
    count = 0
    slots: list[int | None] = []
    for atom in equation.invars:
        if _compat.is_literal(atom) and not atom.aval.shape:
            slots.append(None)
        else:
            slots.append(count)
            count += 1
    return slots


def _inner(
    scope: _Scope, jaxpr: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    return evaluate(jaxpr, values, scope.constraints, scope.mesh, position)


def _remat(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]

    def region(*args: Any) -> list[Any]:
        return _inner(scope, inner, args, position)

    rebuilt = jax.checkpoint(
        region,
        prevent_cse=equation.params["prevent_cse"],
        policy=equation.params["policy"],
    )
    return list(rebuilt(*values))


def _scan(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]
    parts = _compat.scan_parts(equation)
    first, second = parts.num_consts, parts.num_consts + parts.num_carries
    constants = values[:first]

    def body(carry: Any, slices: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = _inner(scope, inner, (*constants, *carry, *slices), position)
        return (
            tuple(outputs[: parts.num_carries]),
            tuple(outputs[parts.num_carries :]),
        )

    if scope.constraints.regather:
        body = jax.checkpoint(body, prevent_cse=False, policy=keep_all_but_gathered())
    carry, stacked = jax.lax.scan(
        body,
        tuple(values[first:second]),
        tuple(values[second:]),
        length=parts.length,
        reverse=equation.params["reverse"],
        unroll=equation.params["unroll"],
    )
    return [*carry, *stacked]
