"""A traced program in which every attention is one call.

The equations of an attention become the body of a call named ``CALL``. That is the same
program still; the lowering may run the call in another way, in blocks of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat, rebuild
from whalejax.capture.attention import (
    Attention,
    equations_of,
    recognised,
    trained_in,
)


CALL: Final = "whalejax_attention"
"""Name of a call that is attention and nothing else."""


def is_attention(equation: Any) -> bool:
    """Whether an equation is a call that is attention."""
    return bool(equation.params.get("name") == CALL)


def with_calls(jaxpr: Any, trained: Sequence[bool]) -> tuple[Any, tuple[str, ...]]:
    """A program in which every attention that can be cut up is one call.

    Args:
        jaxpr: closed, as captured.
        trained: of its inputs, those with gradients.

    Returns:
        The program, without other calls that could be inlined; and for each attention
        that was left as it is the reason.
    """
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]
    flat = _compat.trace(lambda *xs: _inlined(jaxpr, xs), avals)
    builder = _Builder()
    program = _compat.trace(lambda *xs: builder.run(flat, xs, trained), avals)
    return program, tuple(dict.fromkeys(builder.reasons))


def _inlined(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Run a program without its calls; loops and checkpointed regions stay."""

    def each(equation: Any, operands: Sequence[Any]) -> list[Any]:
        kind = _compat.recursion(equation)
        if kind not in ("inline", "remat", "scan"):
            return _compat.bind(equation, operands)
        inner = _compat.inner_jaxprs(equation)[0]
        if kind == "inline":
            return _inlined(inner, operands)
        return rebuild.around(equation, operands, lambda xs: _inlined(inner, xs))

    return rebuild.run(jaxpr, values, each, constant=_counted)


def _counted(value: Any) -> Any:
    """Positions that a program holds as an array, counted instead."""
    shape: Any = getattr(value, "shape", ())
    dtype: Any = getattr(value, "dtype", None)
    known = _compat.is_concrete(value) or isinstance(value, np.ndarray)
    if not known or len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
        return value
    same = np.array_equal(np.asarray(value), np.arange(shape[0]))
    return jax.lax.iota(dtype, shape[0]) if same else value


class _Builder:
    """Runs a program anew with its attentions as calls; remembers why some are none."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def run(
        self, jaxpr: Any, values: Sequence[Any], trained: Sequence[bool]
    ) -> list[Any]:
        """One jaxpr, of whose inputs some have gradients."""
        body = _compat.open_jaxpr(jaxpr)[0]
        flows = trained_in(body, trained)
        found, reasons = recognised(body, flows)
        self.reasons += reasons
        maker = {v: e for e in body.eqns for v in e.outvars}
        ends = {id(one.second): one for one in found}
        alive = _alive(body, ends)

        def each(equation: Any, operands: Sequence[Any]) -> list[Any]:
            flags = [not _compat.is_literal(a) and a in flows for a in equation.invars]
            kind = _compat.recursion(equation)
            if kind in ("remat", "scan"):
                inner = _compat.inner_jaxprs(equation)[0]
                return rebuild.around(
                    equation, operands, lambda xs: self.run(inner, xs, flags)
                )
            return _compat.bind(equation, operands)

        def instead(equation: Any) -> tuple[tuple[Any, ...], Any] | None:
            one = ends.get(id(equation))
            return None if one is None else (one.inputs, _call(one, maker))

        return rebuild.run(jaxpr, values, each, instead=instead, alive=alive)


def _alive(body: Any, ends: Mapping[int, Attention]) -> set[int]:
    """Equations that something still needs once attentions are calls."""
    needed = {v for v in body.outvars if not _compat.is_literal(v)}
    found: set[int] = set()
    for equation in reversed(body.eqns):
        one = ends.get(id(equation))
        if any(v in needed for v in equation.outvars) or equation.effects:
            found.add(id(equation))
            inputs = equation.invars if one is None else one.inputs
            needed.update(a for a in inputs if not _compat.is_literal(a))
    return found


def _call(one: Attention, maker: Mapping[Any, Any]) -> Any:
    equations = equations_of(one, maker)

    def whalejax_attention(*values: Any) -> Any:
        env = dict(zip(one.inputs, values, strict=True))
        for equation in equations:
            operands = [
                a.val if _compat.is_literal(a) else env[a] for a in equation.invars
            ]
            results = _compat.bind(equation, operands)
            env.update(zip(equation.outvars, results, strict=True))
        return [env[one.output]]

    return jax.jit(whalejax_attention)


def keeping(scan: Any, calls: set[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A scan whose attention keeps for its backward pass what it does in blocks.

    That is queries, keys and values as they are dealt out, and the output.

    Args:
        scan: as traced.
        calls: ids of the calls in it that run in blocks.
    """

    def each(equation: Any, operands: Sequence[Any]) -> list[Any]:
        if id(equation) in calls:
            return [_keeping(equation)(*operands)]
        if _compat.recursion(equation) not in ("remat", "scan"):
            return _compat.bind(equation, operands)
        inner = _compat.inner_jaxprs(equation)[0]
        return rebuild.around(
            equation, operands, lambda xs: rebuild.run(inner, xs, each)
        )

    return lambda values: each(scan, values)


def _keeping(equation: Any) -> Any:
    @jax.custom_vjp
    def attention(*values: Any) -> Any:
        return _compat.bind(equation, values)[0]

    def forward(*values: Any) -> Any:
        output = attention(*values)
        return output, (output, *map(jnp.copy, values[:3]), values[3:])

    def backward(kept: Any, cotangent: Any) -> Any:
        # Only what is kept is looked at.
        return tuple(jnp.zeros_like(x) for x in (*kept[1:4], *kept[4]))

    attention.defvjp(forward, backward)
    return attention
