"""A loop over layers whose number of iterations is known only at run time.

Stages with unequal numbers of layers run one program. Each stage runs one iteration per
layer. JAX has no reverse-mode derivative of such a loop, so the loop here has its own
rule. The forward pass saves the residuals of every iteration, and the backward pass
runs the iterations in reverse. The buffers have room for the layers of the stage with
the most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.jaxpr.rebuild import Body


Operands = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLoop:
    """A loop over layers.

    Attributes:
        body: One iteration: function from constants, carries and slices to carries and
            further results.
        num_consts: Number of loop-invariant operands, which come first.
        num_carries: Number of carried operands, which come next. All others are
            stacked.
        most: Number of slices of a stack, the largest number of iterations.
        masked: Whether ``most`` iterations run in any case, of which surplus ones
            change nothing. Devices that share collectives in the body must run equal
            numbers of iterations. Default False.
    """

    body: Body
    num_consts: int
    num_carries: int
    most: int
    masked: bool = False

    @property
    def carries(self) -> slice:
        """Position of the carries among the operands."""
        return slice(self.num_consts, self.num_consts + self.num_carries)

    def iterations_run(self, count: Any) -> Any:
        """Returns the number of iterations that run."""
        return self.most if self.masked else count

    def chosen(self, here: Any, fresh: Any, before: Any) -> Any:
        """Returns the carry after an iteration, or the old carry if it is surplus."""
        if not self.masked:
            return fresh
        return jax.tree.map(lambda x, y: jnp.where(here, x, y), fresh, before)

    def iteration_inputs(
        self, operands: Operands, carry: Operands, index: Any
    ) -> Operands:
        """Returns the operands of one iteration."""
        slices = (_at(x, index) for x in operands[self.carries.stop :])
        return (*operands[: self.num_consts], *carry, *slices)


def run_dynamic_loop(turns: DynamicLoop, count: Any, operands: Operands) -> Operands:
    """Runs a loop.

    Args:
        turns: Loop to run.
        count: Number of iterations, an int32 scalar of at most ``turns.most``.
        operands: Constants, floating-point carries, and stacks, in this order.

    Returns:
        The carries after ``count`` iterations.
    >>> turns = DynamicLoop(
    ...     body=lambda x: [x[0] * x[1]], num_consts=0, num_carries=1, most=3
    ... )
    >>> stack = jnp.asarray([2.0, 3.0, 5.0])
    >>> jax.grad(lambda x: run_dynamic_loop(turns, 2, (x, stack))[0])(1.0)
    Array(6., dtype=float32, weak_type=True)
    """
    dynamic_loop: Operands = _run_dynamic_loop(turns, count, operands)
    return dynamic_loop


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_dynamic_loop(turns: DynamicLoop, count: Any, operands: Operands) -> Operands:
    def turn(index: Any, carry: Operands) -> Operands:
        results = turns.body(turns.iteration_inputs(operands, carry, index))
        fresh = tuple(results[: turns.num_carries])
        chosen: Operands = turns.chosen(index < count, fresh, carry)
        return chosen

    dynamic_loop: Operands = jax.lax.fori_loop(
        0, turns.iterations_run(count), turn, tuple(operands[turns.carries])
    )
    return dynamic_loop


OWN, ONCE = -1, -2
"""Sources of residuals: each iteration computes its own, or all have the same."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["backward", "count", "operands"],
    meta_fields=["sliced", "flows"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopResiduals:
    """Residuals of a loop for its backward pass.

    ``sliced`` tells of which leaves of ``backward`` each iteration has a slice.
    ``flows`` tells through which operands a gradient flows.
    """

    backward: Any
    sliced: tuple[bool, ...]
    flows: tuple[bool, ...]
    count: Any
    operands: Operands

    def of_turn(self, index: Any) -> Any:
        leaves = jax.tree.leaves(self.backward)
        structure: Any = jax.tree.structure(self.backward)
        pairs = zip(leaves, self.sliced, strict=True)
        return structure.unflatten([_at(x, index) if cut else x for x, cut in pairs])


def _differentiated(
    turns: DynamicLoop, given: Sequence[Any], flows: Sequence[bool]
) -> tuple[Operands, Any]:
    places = [i for i, flowing in enumerate(flows) if flowing]

    def layer(*floats: Any) -> Operands:
        operands = list(given)
        for place, x in zip(places, floats, strict=True):
            operands[place] = x
        return tuple(turns.body(operands)[: turns.num_carries])

    result: tuple[Operands, Any] = jax.vjp(layer, *(given[i] for i in places))
    return result


def _sources(
    turns: DynamicLoop, given: Operands, flows: Sequence[bool]
) -> tuple[list[int], list[Any]]:
    """Returns the source of each leaf of an iteration's derivative, and the leaves.

    A source is the index of the operand that the leaf equals, ``OWN`` or ``ONCE``. The
    leaves are abstract.
    """

    def leaves(*given: Any) -> list[Any]:
        return jax.tree.leaves(_differentiated(turns, given, flows)[1])

    jaxpr, _ = _compat.open_jaxpr(jax.make_jaxpr(leaves)(*given))
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    varying = set(jaxpr.invars[turns.num_consts :])
    for equation in jaxpr.eqns:
        read = (v for v in equation.invars if not _compat.is_literal(v))
        if not varying.isdisjoint(read):
            varying.update(equation.outvars)
    sources = []
    for atom in jaxpr.outvars:
        place = ONCE if _compat.is_literal(atom) else places.get(atom, ONCE)
        carried = turns.carries.start <= place < turns.carries.stop
        own = place == ONCE and not _compat.is_literal(atom) and atom in varying
        sources.append(OWN if own or carried else place)
    return sources, [v.aval for v in jaxpr.outvars]


def _forward(
    turns: DynamicLoop, primals: Any, given: Any
) -> tuple[Operands, _LoopResiduals]:
    count, operands = primals.value, tuple(x.value for x in given)
    # Carries may become differentiable in later iterations. Operands without a gradient
    # are excluded, as there may be no derivative by them.
    carried = range(len(operands))[turns.carries]
    flows = tuple(
        _inexact(x.value) and (x.perturbed or i in carried) for i, x in enumerate(given)
    )
    start = tuple(operands[turns.carries])
    first = turns.iteration_inputs(operands, start, 0)
    sources, shapes = _sources(turns, first, flows)
    # This extra iteration gives the structure; the compiler removes unused values.
    _, derivative = _differentiated(turns, first, flows)
    leaves = jax.tree.leaves(derivative)
    structure: Any = jax.tree.structure(derivative)
    own = [i for i, source in enumerate(sources) if source == OWN]
    kept = [
        jax.lax.full((turns.most, *shapes[i].shape), 0, shapes[i].dtype) for i in own
    ]

    def turn(index: Any, state: Any) -> Any:
        carry, kept = state
        results, derivative = _differentiated(
            turns, turns.iteration_inputs(operands, carry, index), flows
        )
        fresh = jax.tree.leaves(derivative)
        kept = [_put(k, fresh[i], index) for k, i in zip(kept, own, strict=True)]
        return turns.chosen(index < count, results, carry), kept

    carry, kept = jax.lax.fori_loop(0, turns.iterations_run(count), turn, (start, kept))
    for place, stack in zip(own, kept, strict=True):
        leaves[place] = stack
    for place, source in enumerate(sources):
        if source >= 0:
            leaves[place] = operands[source]
    sliced = tuple(s == OWN or s >= turns.carries.stop for s in sources)
    return carry, _LoopResiduals(
        backward=structure.unflatten(leaves),
        sliced=sliced,
        flows=flows,
        count=count,
        operands=operands,
    )


def _backward(
    turns: DynamicLoop, kept: _LoopResiduals, cotangents: Operands
) -> tuple[None, tuple[Any, ...]]:
    operands, end = kept.operands, turns.carries.stop
    taken = turns.iterations_run(kept.count)
    gradients = [
        jnp.zeros_like(x) if flowing else None
        for x, flowing in zip(operands, kept.flows, strict=True)
    ]
    cotangents = tuple(map(_compat.instantiated, cotangents))

    def turn(done: Any, state: Any) -> Any:
        carry, constants, stacks = state
        index = taken - 1 - done
        here = index < kept.count
        result = iter(kept.of_turn(index)(carry))
        added = [None if x is None else next(result) for x in constants]
        before = tuple(next(result) for _ in carry)
        slices = [None if x is None else next(result) for x in stacks]
        nothing = jax.tree.map(jnp.zeros_like, (added, slices))
        added, slices = turns.chosen(here, (added, slices), nothing)
        return (
            turns.chosen(here, before, carry),
            jax.tree.map(jnp.add, constants, added),
            jax.tree.map(lambda x, y: _put(x, y, index), stacks, slices),
        )

    state = tuple(cotangents), gradients[: turns.num_consts], gradients[end:]
    carry, constants, stacks = jax.lax.fori_loop(0, taken, turn, state)
    return None, (*constants, *carry, *stacks)


_run_dynamic_loop.defvjp(_forward, _backward, symbolic_zeros=True)


def _inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _at(stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _put(stack: Any, value: Any, index: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, axis=0)
