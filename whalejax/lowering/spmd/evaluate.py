"""Evaluates a traced loss, equation by equation, with layouts constrained.

The program is the user's traced loss. Evaluation adds layouts and nothing else.

The module is long because each kind of inner program has its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from whalejax import _compat
from whalejax.capture.named_axes import only_fixes_layout
from whalejax.capture.patterns.named_calls import called_logits, makes_logits
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.jaxpr import rebuild
from whalejax.lowering.pipeline_spmd.stage_ops import in_stages
from whalejax.lowering.spmd.chunked_loss import chunked
from whalejax.lowering.spmd.constraints import Constraints, Position
from whalejax.lowering.spmd.gather_scatter import in_whole
from whalejax.lowering.spmd.grouped_conv import grouped, is_grouped
from whalejax.lowering.spmd.label_lookup import picked, picks_from_rows
from whalejax.lowering.spmd.local_sorted_rows import COPYING, on_own_rows
from whalejax.lowering.spmd.loop_weights import (
    Place,
    loop_weights,
    operand_slots,
    recomputes,
)
from whalejax.lowering.spmd.opaque_kernels import runs_whole
from whalejax.lowering.spmd.parameter_offload import HostParameter, settled, viewed
from whalejax.lowering.spmd.ring_attention import attend
from whalejax.lowering.spmd.spatial_windows import in_slabs, shared_windows
from whalejax.lowering.spmd.strided_slices import is_strided, strided
from whalejax.meshes.jax_mesh import has_manual_axes, partition_spec
from whalejax.planner.sharding.layout import Spec


GATHERED = "whalejax_gathered_parameter"
"""Checkpoint name of gathered parameters, which are never saved for backward."""

MOVED = "whalejax_constrained_value"
"""Checkpoint name of other constrained values, by which a policy may save them."""


WAITING = "whalejax_waiting_value"
"""Checkpoint name of values that are offloaded until the backward pass."""

HOST_MEMORY = "pinned_host"
"""JAX's name of the host memory that devices can access."""


def named_sharding(spec: Spec, mesh: Mesh, *, host: bool = False) -> NamedSharding:
    """Returns a spec's sharding on a mesh, in device memory or host memory."""
    kind = {"memory_kind": HOST_MEMORY} if host else {}
    return NamedSharding(mesh, partition_spec(spec), **kind)


def but_for_gathered(policy: Any) -> Any:
    """Returns a checkpoint policy like ``policy`` that saves no gathered parameters.

    A gathered parameter is the named value, and also the result of the constraint or
    transfer that produces it. None of them may be saved. Other constrained values have
    another name.

    Args:
        policy: Policy of the user; None saves nothing.
    """
    if policy is None:
        return None

    def is_saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] == GATHERED:
            return False
        if primitive.name in ("sharding_constraint", "device_put"):
            return False
        return policy(primitive, *avals, **params)

    return is_saveable


def with_waiting(policy: Any) -> Any:
    """Returns a checkpoint policy that offloads named values to host memory.

    Other policies cannot save a named value on the device, as operations read the value
    under its name.

    Args:
        policy: Policy of all other values; None saves nothing.
    """
    moves = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[WAITING],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )

    def is_saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "name" and params["name"] == WAITING:
            return moves(primitive, *avals, **params)
        return policy is not None and policy(primitive, *avals, **params)

    return is_saveable


class ScanReplacement(Protocol):
    """Replacement of a scan over layers, which runs only some of the layers."""

    @property
    def position(self) -> Position:
        """Position of the scan."""
        ...

    def through(
        self, equation: Any, values: Sequence[Any], body: rebuild.Body
    ) -> list[Any]:
        """Returns the results of the scan.

        Args:
            equation: The scan as traced.
            values: Operands of the scan.
            body: Function of one iteration.
        """
        ...

    def after_scan(self, value: Any) -> Any:
        """Returns a value in the form that equations after the scan expect."""
        ...


class PartialProgram(Protocol):
    """Equations of a program that run on some devices, while others run the rest."""

    def runs(self, position: Position) -> bool:
        """Returns whether an equation runs on these devices."""
        ...

    def imported_value(self, position: Position, slot: int) -> Any:
        """Returns a result of an equation that runs on other devices."""
        ...

    def record_result(self, position: Position, slot: int, value: Any) -> None:
        """Records a result of an equation that runs on these devices."""
        ...


@dataclass(slots=True)
class _Scope:
    """A jaxpr that is evaluated: its position, its values, and cached reshards."""

    constraints: Constraints
    mesh: Mesh
    position: Position
    part: ScanReplacement | None = None
    here: PartialProgram | None = None
    looped: bool = False
    recomputed: bool = False
    ready: Mapping[Place, Any] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    moved: dict[Any, Any] = field(default_factory=dict)

    def read(self, atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else self.values[atom]

    def operand(self, position: Position, slot: int, atom: Any) -> Any:
        value = self.read(atom)
        specs = self.constraints.operands.get((position, slot))
        if specs is None or _compat.is_literal(atom):
            return value
        return self.once(atom, value, specs)

    def once(
        self, atom: Any, value: Any, specs: tuple[Spec, ...], name: str = MOVED
    ) -> Any:
        done = (atom, specs)
        if done not in self.moved:
            self.moved[done] = self.passed(value, specs, name)
        return self.moved[done]

    def result(self, position: Position, slot: int, value: Any) -> Any:
        return self.passed(value, self.constraints.results.get((position, slot), ()))

    def passed(self, value: Any, specs: Sequence[Spec], name: str = MOVED) -> Any:
        if isinstance(value, HostParameter) and specs:
            # A slice has the spec of the stack without the first dimension.
            return value.then(
                lambda x, sliced: self.passed(x, [s[sliced:] for s in specs], name),
                keeps=value.host.ndim,
            )
        for spec in specs:
            value = jax.lax.with_sharding_constraint(
                value, named_sharding(spec, self.mesh)
            )
        return checkpoint_name(value, name) if specs else value


def evaluate(
    jaxpr: Any,
    arguments: Sequence[Any],
    constraints: Constraints,
    mesh: Mesh,
    position: Position = (),
    *,
    looped: bool = False,
    recomputed: bool = False,
    part: ScanReplacement | None = None,
    here: PartialProgram | None = None,
    ready: Mapping[Place, Any] | None = None,
) -> list[Any]:
    """Runs a jaxpr with constraints.

    Args:
        jaxpr: Open or closed jaxpr of the loss, or of a call in it.
        arguments: Values of its inputs.
        constraints: Constraints by position.
        mesh: Mesh of the plan.
        position: Position of the jaxpr within the outermost one; default: outermost.
        looped: Whether the jaxpr is in a loop; default False.
        recomputed: Whether the jaxpr is in a checkpointed region of the user; default
            False.
        part: Replacement of the scan over layers; default: all layers run.
        here: Equations that run; default: all run.
        ready: Weights that were gathered before an outer loop; default: none.

    Returns:
        Outputs of the jaxpr.
    """
    body, constants = _compat.open_jaxpr(jaxpr)
    scope = _Scope(
        constraints, mesh, position, part, here, looped, recomputed, ready or {}
    )
    scope.values.update(zip(body.constvars, constants, strict=True))
    scope.values.update(zip(body.invars, arguments, strict=True))
    for index, equation in enumerate(body.eqns):
        _equation(scope, equation, (*position, index))
    return settled([scope.read(atom) for atom in body.outvars])


def _equation(scope: _Scope, equation: Any, position: Position) -> None:
    kind, here = _compat.recursion(equation), scope.here
    inlined = kind == "inline" and not sorts_rows(equation)
    if here is not None and not inlined and not here.runs(position):
        for slot, atom in enumerate(equation.outvars):
            scope.values[atom] = here.imported_value(position, slot)
        return
    slots = operand_slots(equation)
    values = [
        scope.operand(position, slot, atom) if slot is not None else scope.read(atom)
        for slot, atom in zip(slots, equation.invars, strict=True)
    ]
    with _compat.equation_context(equation):
        if position in scope.constraints.rings:
            specs = scope.constraints.rings[position]
            results = [attend(equation, settled(values), specs, scope.mesh)]
        elif scope.constraints.chunks > 1 and makes_logits(equation):
            results = _logits(scope, equation, settled(values), position)
        elif position in scope.constraints.sorted_rows:
            results = _sorted_rows(scope, equation, settled(values), position)
        elif only_fixes_layout(equation):
            results = values
        elif kind == "inline":
            inner = _compat.inner_jaxprs(equation)[0]
            within = here if inlined else None
            results = _inner(scope, inner, values, (*position, 0), here=within)
        elif kind == "remat":
            results = _remat(scope, equation, values, (*position, 0))
        elif kind == "scan":
            results = _scan(scope, equation, values, (*position, 0))
        elif kind == "cond":
            results = _cond(scope, equation, values, position)
        else:
            results = _bound(scope, equation, values, slots, position)
    waits = scope.constraints.waiting.get(position, ()) if kind is None else ()
    for slot, (atom, value) in enumerate(zip(equation.outvars, results, strict=True)):
        result = scope.result(position, slot, value)
        if here is not None and not inlined:
            here.record_result(position, slot, result)
        scope.values[atom] = (
            checkpoint_name(result, WAITING) if slot in waits else result
        )


def _bound(
    scope: _Scope,
    equation: Any,
    values: Sequence[Any],
    slots: Sequence[int | None],
    position: Position,
) -> list[Any]:
    """Runs an operation with its parameters gathered from their shards.

    The backward pass of a product needs the full parameter. Saving it would undo the
    sharding, so the backward pass gathers it again. The exception is an operation in a
    checkpointed region of the user, which gathers all when it is recomputed.
    """
    gathers = scope.constraints.gathers
    places = [(position, -1 if s is None else s) for s in slots]
    wanted = [() if p in scope.ready else gathers.get(p, ()) for p in places]
    values = [
        scope.passed(scope.ready[p], gathers[p][-1:], GATHERED)
        if p in scope.ready
        else v
        for p, v in zip(places, values, strict=True)
    ]
    if any(isinstance(v, HostParameter) for v in values):
        if len(values) == 1:
            seen = viewed(equation, scope.passed(values[0], wanted[0], GATHERED))
            if seen is not None:
                return [seen]
        return _fetching(scope, equation, values, wanted, slots, position)
    regathers = position in scope.constraints.regathers and any(wanted)
    if scope.recomputed or not regathers:
        name = GATHERED if scope.recomputed else MOVED
        atoms = zip(equation.invars, values, wanted, strict=True)
        whole = [scope.once(a, v, specs, name) if specs else v for a, v, specs in atoms]
        return _as_it_is(scope, equation, whole, slots, position)

    def run(*operands: Any) -> list[Any]:
        pairs = zip(operands, wanted, strict=True)
        whole = [scope.passed(operand, specs, GATHERED) for operand, specs in pairs]
        return _as_it_is(scope, equation, whole, slots, position)

    # In a loop, CSE cannot merge the two gathers.
    again = jax.checkpoint(run, prevent_cse=not scope.looped)
    # Before an all-to-all the spec is also set outside. Otherwise the compiler gives
    # the inner spec to the region's input, and reshards twice.
    atoms = zip(equation.invars, values, wanted, strict=True)
    stored = [
        scope.once(a, v, specs[:1]) if _exchanges(specs) else v for a, v, specs in atoms
    ]
    return list(again(*stored))


def _as_it_is(
    scope: _Scope,
    equation: Any,
    values: Sequence[Any],
    slots: Sequence[int | None],
    position: Position,
) -> list[Any]:
    laid = scope.constraints.lookups.get(position, ())
    specs = [laid[s] if s is not None and laid else () for s in slots]
    windows = shared_windows(equation, specs)
    if windows:
        return in_slabs(equation, values, specs, windows, scope.mesh)
    if is_grouped(equation) and laid:
        return grouped(equation, values, specs, scope.mesh)
    flows = scope.constraints.flows.get(position)
    if scope.mesh.size > 1 and runs_whole(equation, flows):
        return in_whole(equation, values, scope.mesh)
    if scope.constraints.carried or has_manual_axes(scope.mesh):
        it_is = in_stages(equation, values, specs, scope.mesh, flows)
        if it_is is not None:
            return it_is
    if equation.primitive.name == "gather" and picks_from_rows(equation):
        return picked(equation, values)
    if scope.mesh.size > 1 and is_strided(equation):
        return [strided(equation, *values)]
    return _compat.bind(equation, values)


def _fetching(
    scope: _Scope,
    equation: Any,
    values: Sequence[Any],
    wanted: Sequence[Any],
    slots: Sequence[int | None],
    position: Position,
) -> list[Any]:
    def run(*operands: Any) -> list[Any]:
        there = [
            checkpoint_name(x, GATHERED) if isinstance(given, HostParameter) else x
            for x, given in zip(settled(operands), operands, strict=True)
        ]
        pairs = zip(there, wanted, strict=True)
        whole = [scope.passed(x, specs, GATHERED) for x, specs in pairs]
        return _as_it_is(scope, equation, whole, slots, position)

    if scope.recomputed:
        return run(*values)
    return list(jax.checkpoint(run, prevent_cse=not scope.looped)(*values))


def _logits(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    one = called_logits(equation)
    body = _compat.open_jaxpr(_compat.inner_jaxprs(equation)[0])[0]
    place = next(i for i, e in enumerate(body.eqns) if e is one.product)
    product, constraints = (*position, 0, place), scope.constraints
    hidden, kernel = (1, 0) if one.turned else (0, 1)
    moved = constraints.operands.get((product, hidden), ())
    gathers = constraints.gathers.get((product, kernel), ())
    order = [body.invars.index(v) for v in one.inputs]
    first, *rest = (values[i] for i in order)
    return chunked(
        one,
        [scope.passed(first, moved), *rest],
        constraints.chunks,
        constraints.results[product, 0][-1],
        scope.mesh,
        used=lambda stored: scope.passed(stored, gathers, GATHERED),
        constrained=lambda x, spec: scope.passed(x, (spec,)),
    )


def _sorted_rows(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    """Runs a call that sorts rows, on each device for its own samples.

    Weights are gathered before the call. If the backward pass of any operation gathers
    its weights again, all weights are gathered again.
    """
    rows, axes = scope.constraints.sorted_rows[position]
    inner = _compat.inner_jaxprs(equation)[0]
    if has_manual_axes(scope.mesh):
        return _inner(scope, inner, values, (*position, 0))
    body, gathers = _compat.open_jaxpr(inner)[0], scope.constraints.gathers
    ways: dict[int, tuple[Spec, ...]] = {}
    given = list(values)
    again = False
    for index, one in enumerate(body.eqns):
        place = (*position, 0, index)
        for slot, atom in zip(operand_slots(one), one.invars, strict=True):
            read = place, -1 if slot is None else slot
            if read in gathers and atom in body.invars:
                number = body.invars.index(atom)
                ways[number] = gathers[read]
                if read in scope.ready:
                    given[number], ways[number] = scope.ready[read], gathers[read][-1:]
                again |= place in scope.constraints.regathers

    def run(*operands: Any) -> list[Any]:
        whole = [
            scope.passed(x, ways.get(i, ()), GATHERED) for i, x in enumerate(operands)
        ]
        return on_own_rows(inner, whole, rows, axes, scope.mesh)

    if scope.recomputed or not again:
        return run(*given)
    saved = but_for_gathered(jax.checkpoint_policies.everything_saveable)

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        # Copies of a weight on each device are full weights, so they are not saved.
        copied = primitive.name in COPYING
        return not copied and bool(saved(primitive, *avals, **params))

    region = jax.checkpoint(run, prevent_cse=not scope.looped, policy=policy)
    return list(region(*given))


def _exchanges(specs: Sequence[Spec]) -> bool:
    if not specs:
        return False
    first, last = (
        {axis: dim for dim, axes in enumerate(spec) for axis in axes}
        for spec in (specs[0], specs[-1])
    )
    return any(last.get(axis, dim) != dim for axis, dim in first.items())


def _inner(
    scope: _Scope,
    jaxpr: Any,
    values: Sequence[Any],
    position: Position,
    *,
    looped: bool = False,
    recomputed: bool = False,
    here: PartialProgram | None = None,
) -> list[Any]:
    return evaluate(
        jaxpr,
        values,
        scope.constraints,
        scope.mesh,
        position,
        looped=looped or scope.looped,
        recomputed=recomputed or scope.recomputed,
        here=here,
        ready=scope.ready,
    )


def _remat(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]
    # A nested region offloads nothing, as the outer region recomputes all of it.
    waiting = {} if scope.recomputed else scope.constraints.waiting
    within = replace(scope, constraints=replace(scope.constraints, waiting=waiting))
    waits = waiting.get(position[:-1], ())

    def region(arguments: Sequence[Any]) -> list[Any]:
        given = [
            checkpoint_name(x, WAITING) if place in waits else x
            for place, x in enumerate(arguments)
        ]
        return _inner(within, inner, given, position, recomputed=True)

    policy = but_for_gathered(equation.params["policy"])
    if waiting:
        policy = with_waiting(policy)
    return rebuild.remat(equation, values, region, policy)


def _scan(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]
    # Parameters in host memory can be sliced before a cast, but not after a reshape.
    values = [
        v.fetched() if isinstance(v, HostParameter) and not v.sliceable else v
        for v in values
    ]

    part = scope.part
    if part is None or part.position != position[:-1]:
        return _over_time(scope, equation, values, position)

    def body(arguments: Sequence[Any]) -> list[Any]:
        return _inner(scope, inner, arguments, position, looped=True)

    results = part.through(equation, values, body)
    scope.values = {
        atom: part.after_scan(value) for atom, value in scope.values.items()
    }
    scope.moved.clear()
    return results


def _over_time(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    """Runs a scan, after it gathered the loop-invariant weights.

    If the backward pass reads them too, they are gathered again before the backward
    loop, and all other residuals are saved. This is not done if the body has a
    checkpointed region of the user, which has its own policy.
    """
    inner = _compat.inner_jaxprs(equation)[0]
    constraints, ready = scope.constraints, scope.ready
    parts = _compat.scan_parts(equation)
    constants, carries = parts.num_consts, parts.num_consts + parts.num_carries
    moved = any(isinstance(v, HostParameter) for v in values[:constants])
    result = {} if moved else loop_weights(equation, values, constraints, position)
    result = {place: made for place, made in result.items() if place not in ready}
    stored = {place: made() for place, made in result.items()}
    ways = {place: constraints.gathers[place] for place in result}
    once = {(id(stored[place]), way): place for place, way in ways.items()}

    def run(*given: Any) -> list[Any]:
        weights = dict(zip(once, given[len(values) :], strict=True))
        whole = {
            key: scope.passed(weight, key[1], GATHERED)
            for key, weight in weights.items()
        }
        here = {p: whole[id(stored[p]), way] for p, way in ways.items()}
        within = replace(scope, ready={**ready, **here})

        def body(arguments: Sequence[Any]) -> list[Any]:
            # Carries get a name to be saved, as unnamed ones would be recomputed.
            named = [
                checkpoint_name(value, MOVED) if constants <= i < carries else value
                for i, value in enumerate(arguments)
            ]
            return _inner(
                within, inner, named if here else arguments, position, looped=True
            )

        return rebuild.scan(equation, given[: len(values)], body)

    # A constraint outside too, as the compiler would otherwise spread the gathered
    # spec.
    given = (*values, *(scope.passed(stored[p], ways[p][:1]) for p in once.values()))
    again = any(at in constraints.regathers for at, _ in result)
    if scope.recomputed or not again or recomputes(inner):
        return run(*given)
    policy = but_for_gathered(jax.checkpoint_policies.everything_saveable)
    region = jax.checkpoint(run, prevent_cse=not scope.looped, policy=policy)
    return list(region(*given))


def _cond(
    scope: _Scope, equation: Any, values: Sequence[Any], position: Position
) -> list[Any]:
    def branch(number: int, inner: Any) -> rebuild.Body:
        return lambda arguments: _inner(scope, inner, arguments, (*position, number))

    bodies = _compat.inner_jaxprs(equation)
    return rebuild.cond(values, [branch(i, inner) for i, inner in enumerate(bodies)])
