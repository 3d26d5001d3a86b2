"""State that does not depend on samples: step counts, and counters of random streams.

A loss is traced for one micro-batch. A module that counts its calls would therefore
count micro-batches. So each micro-batch reads such state as it was at the beginning of
the step, and leaves it unchanged. The state advances once, at the end of the step, and
is then equal for every number of micro-batches and every plan.

Streams of random numbers count their calls too. Micro-batch m adds m times the
increment to the counter that it reads. So stages need not pass counters on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.adapters.leaves import is_key


_SAME = ("copy", "copy_p", "convert_element_type", "reshape")


def advances(rest: Any, jaxpr: Any, first: int) -> tuple[int | None, ...]:
    """Returns the increment of each non-trainable leaf in one micro-batch.

    Args:
        rest: Non-trainable state.
        jaxpr: The traced loss; its last outputs are the leaves after the micro-batch.
        first: Index of the input that is the first leaf.

    Returns:
        The increment of each leaf: 0 for random keys and for leaves that do not change,
        None for changes other than a constant integer increment.
    """
    leaves = jax.tree.leaves(rest)
    count = len(leaves)
    old = jaxpr.invars[first : first + count]
    new = jaxpr.outvars[len(jaxpr.outvars) - count :]
    result: list[int | None] = []
    for leaf, before, after in zip(leaves, old, new, strict=True):
        if after is before or is_key(leaf):
            result.append(0)
            continue
        way = None if _compat.is_inexact(before.aval.dtype) else _added(jaxpr, after)
        same = way is not None and jaxpr.invars[way[0]] is before
        result.append(way[1] if way is not None and same else None)
    return tuple(result)


def _added(jaxpr: Any, atom: Any) -> tuple[int, int] | None:
    """Returns the index of an input and the increment whose sum is the value."""
    body, _ = _compat.open_jaxpr(jaxpr)
    made = {v: (e, slot) for e in body.eqns for slot, v in enumerate(e.outvars)}
    inputs = {v: place for place, v in enumerate(body.invars)}
    total = 0
    while not _compat.is_literal(atom) and atom not in inputs:
        if atom not in made:
            return None
        step = _before(*made[atom])
        if step is None:
            return None
        atom, more = step
        total += more
    return None if _compat.is_literal(atom) else (inputs[atom], total)


def _before(equation: Any, slot: int) -> tuple[Any, int] | None:
    """Returns the operand and the increment whose sum is the result."""
    name = equation.primitive.name
    if (
        name in _SAME
        and equation.invars[0].aval.shape == equation.outvars[0].aval.shape
    ):
        return equation.invars[0], 0
    if name == "add":
        return _sum(*equation.invars)
    kind = _compat.recursion(equation)
    if kind not in ("inline", "remat", "scan"):
        return None
    (inner,) = _compat.inner_jaxprs(equation)
    way = _added(inner, _compat.open_jaxpr(inner)[0].outvars[slot])
    if way is None:
        return None
    place, more = way
    if kind == "scan":
        parts = _compat.scan_parts(equation)
        if slot < parts.num_carries:
            same = place == parts.num_consts + slot
            return (equation.invars[place], more * parts.length) if same else None
        if place < parts.num_consts + parts.num_carries:
            return None
    return equation.invars[place], more


def _sum(one: Any, other: Any) -> tuple[Any, int] | None:
    if _compat.is_literal(one):
        one, other = other, one
    if _compat.is_literal(one) or not _compat.is_literal(other):
        return None
    return (one, int(other.val)) if not other.aval.shape else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIndependentState:
    """State that changes once a step, and the function that advances it.

    Attributes:
        leaves: Indices of this state among the non-trained leaves.
        advance: Function from all inputs of the loss to the values after the step; it
            reads parameters and this state alone.
        avals: Abstract values of the inputs of the loss.
        reads: For each leaf, indices of the inputs that it depends on, except itself.
    """

    leaves: tuple[int, ...] = ()
    advance: Callable[..., list[Any]] | None = None
    avals: tuple[Any, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()

    def homes(self, params: Sequence[int]) -> dict[int, int]:
        """Returns the owner of each leaf: that of the first parameter it depends on.

        Args:
            params: Owner of each parameter.

        Returns:
            Owner by index of the leaf. Scalars and leaves that depend on no parameter
            have none.
        """
        homes = {}
        for number, reads in zip(self.leaves, self.reads, strict=True):
            made_of = [params[i] for i in reads if i < len(params)]
            if made_of and self.avals[len(params) + number].shape:
                homes[number] = made_of[0]
        return homes

    def after(self, params: Sequence[Any], before: Any, rest: Any) -> Any:
        """Returns the non-trainable state at the end of a step.

        Args:
            params: Flat parameters at the beginning of the step.
            before: Non-trainable state before the step.
            rest: Non-trainable state after the step's micro-batches.
        """
        if self.advance is None:
            return rest
        given = [*params, *jax.tree.leaves(before)]
        others = [_nothing(aval) for aval in self.avals[len(given) :]]
        structure: Any = jax.tree.structure(rest)
        leaves = jax.tree.leaves(rest)
        fresh = self.advance(*given, *others)
        for number, value in zip(self.leaves, fresh, strict=True):
            leaves[number] = value
        return structure.unflatten(leaves)


def held_back(
    jaxpr: Any, rest: Any, first: int, size: int, resized: Callable[[], Any]
) -> tuple[Any, BatchIndependentState, tuple[int, ...]]:
    """Returns a traced loss that does not change the state that advances once a step.

    Args:
        jaxpr: The traced loss; its last outputs are the leaves after the micro-batch.
        rest: Non-trainable state.
        first: Index of the input that is the first leaf of ``rest``.
        size: Number of samples of the traced micro-batch.
        resized: Function that traces the loss with twice as many samples.

    Returns:
        The loss, the state that it does not change, and the indices of the leaves that
        change with every micro-batch.
    """
    body, _ = _compat.open_jaxpr(jaxpr)
    leaves = jax.tree.leaves(rest)
    start = len(body.outvars) - len(leaves)
    changed = [
        i
        for i, leaf in enumerate(leaves)
        if body.outvars[start + i] is not body.invars[first + i] and not is_key(leaf)
    ]
    varying = _varying(jaxpr, leaves, first) if changed else set[int]()
    steady = [i for i in changed if i not in varying]
    steady = _of_any_size(jaxpr, steady, start, size, resized)
    others = tuple(i for i in changed if i not in steady)
    if not steady:
        return jaxpr, BatchIndependentState(), others
    places = [start + i for i in steady]
    small = _compat.needed_jaxpr(jaxpr, places)
    reads = [_compat.read_inputs(small, n) for n in range(len(steady))]
    back = BatchIndependentState(
        leaves=tuple(steady),
        advance=_compat.needed(jaxpr, places),
        avals=tuple(v.aval for v in body.invars),
        reads=tuple(
            tuple(n for n in numbers if n != first + i)
            for i, numbers in zip(steady, reads, strict=True)
        ),
    )
    return left_alone(jaxpr, steady, first, len(leaves)), back, others


def left_alone(jaxpr: Any, steady: Sequence[int], first: int, count: int) -> Any:
    """Returns a traced loss that passes some leaves on unchanged.

    Args:
        jaxpr: The traced loss; its last outputs are the leaves after the micro-batch.
        steady: Indices of the leaves to pass on, among the non-trained leaves.
        first: Index of the input that is the first non-trained leaf.
        count: Number of non-trained leaves.
    """
    start = len(_compat.open_jaxpr(jaxpr)[0].outvars) - count
    same = {start + i: first + i for i in steady}
    # Pruning removes inputs that only the replaced outputs depended on.
    return _compat.pruned(_compat.passing_on(jaxpr, same)) if same else jaxpr


def _varying(jaxpr: Any, leaves: Sequence[Any], first: int) -> set[int]:
    """Returns indices of leaves that depend on samples or keys, or on such leaves."""
    count = len(_compat.open_jaxpr(jaxpr)[0].invars)
    flags = [not first <= i < first + len(leaves) for i in range(count)]
    flags[:first] = [False] * first
    for i, leaf in enumerate(leaves):
        flags[first + i] = is_key(leaf)
    while True:
        after = _compat.depending(jaxpr, flags)[-len(leaves) :]
        more = [i for i, flag in enumerate(after) if flag and not flags[first + i]]
        if not more:
            return {i for i in range(len(leaves)) if flags[first + i]}
        for i in more:
            flags[first + i] = True


def _of_any_size(
    jaxpr: Any,
    steady: list[int],
    start: int,
    size: int,
    resized: Callable[[], Any],
) -> list[int]:
    places = [start + i for i in steady]
    if not steady or not _may_hold(_compat.needed_jaxpr(jaxpr, places), size):
        return steady
    try:
        other = resized()
    except Exception:  # A model that takes no other batch may count its samples.
        return []
    return [
        i
        for i in steady
        if str(_compat.needed_jaxpr(jaxpr, [start + i]).eqns)
        == str(_compat.needed_jaxpr(other, [start + i]).eqns)
    ]


def _may_hold(jaxpr: Any, size: int) -> bool:
    return any(number and number % size == 0 for number in _numbers(jaxpr))


def _numbers(jaxpr: Any) -> Iterator[float]:
    body, _ = _compat.open_jaxpr(jaxpr)
    for equation in body.eqns:
        for inner in _compat.inner_jaxprs(equation):
            yield from _numbers(inner)
        for atom in (*equation.invars, *equation.outvars):
            yield from getattr(atom.aval, "shape", ())
        for atom in filter(_compat.is_literal, equation.invars):
            value = np.asarray(atom.val)
            if value.ndim == 0 and np.issubdtype(value.dtype, np.number):
                yield from (float(value), 1 / float(value) if value else 0.0)


def _nothing(aval: Any) -> Any:
    if _compat.is_key_dtype(aval.dtype):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
