"""Turns parts of a traced program that can be computed in blocks into named calls.

The program stays the same. The lowering may run the call in another way: attention in
blocks of scores, logits for some tokens at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import (
    equations_of,
    recognised,
    trained_in,
    trained_in_scan,
)
from whalejax.capture.patterns.logits import Logits, logits_in, logits_of
from whalejax.capture.patterns.outer_masks import with_inner_masks
from whalejax.capture.patterns.row_scales import holds_rescaled, rescaled
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.jaxpr import rebuild
from whalejax.jaxpr.splice import spliced


CALL: Final = "whalejax_attention"
"""Name of a call that is attention and nothing else."""

LOGITS: Final = "whalejax_logits_"
"""Prefix of the name of a call that makes logits and a few numbers of them for each
token; the number of leading inputs with gradients follows."""


Found = Callable[[Any, set[Any]], tuple[list[rebuild.EquationReplacement], list[str]]]
"""Function of an open jaxpr and its trained variables, which returns calls, and the
reasons against other calls."""


def is_attention(equation: Any) -> bool:
    """Returns whether an equation is a call that is attention."""
    return bool(equation.params.get("name") == CALL)


def calls_attention(jaxpr: Any) -> bool:
    """Returns whether a program contains a call that is attention."""
    equations = _compat.open_jaxpr(jaxpr)[0].eqns
    return any(
        is_attention(e) or any(map(calls_attention, _compat.inner_jaxprs(e)))
        for e in equations
    )


def makes_logits(equation: Any) -> bool:
    """Returns whether an equation is a call that makes logits."""
    return str(equation.params.get("name", "")).startswith(LOGITS)


def called_logits(equation: Any) -> Logits:
    """Returns the logits that a call makes."""
    trained = int(equation.params["name"].removeprefix(LOGITS))
    return logits_of(_compat.inner_jaxprs(equation)[0], trained)


def with_calls(jaxpr: Any, trained: Sequence[bool]) -> tuple[Any, tuple[str, ...]]:
    """Returns a program in which each attention that can run in blocks is one call.

    Args:
        jaxpr: Closed jaxpr, as captured.
        trained: Whether each input has a gradient.

    Returns:
        The program, without other calls that could be inlined, and the reason for each
        attention that was left unchanged.
    """
    return _rebuilt(jaxpr, trained, _attentions)


def with_logits(jaxpr: Any, trained: Sequence[bool]) -> Any:
    """Returns a program in which logits and their reductions are calls."""
    return _rebuilt(jaxpr, trained, _losses)[0]


def possible_calls(jaxpr: Any, trained: Sequence[bool]) -> tuple[int, int]:
    """Returns how many attentions and logits can become calls.

    Args:
        jaxpr, trained: Arguments of ``with_calls``, unchanged.
    """

    def count(program: Any, kind: Callable[[Any], bool]) -> int:
        return sum(
            1 if kind(e) else sum(count(x, kind) for x in _compat.inner_jaxprs(e))
            for e in _compat.open_jaxpr(program)[0].eqns
        )

    attention, logits = with_calls(jaxpr, trained)[0], with_logits(jaxpr, trained)
    return count(attention, is_attention), count(logits, makes_logits)


def most_tokens(jaxpr: Any) -> int:
    """Returns the most tokens whose logits one call makes; 0 if no call does.

    Args:
        jaxpr: Program, or part of one, that ``with_logits`` returned.
    """
    tokens = 0
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        if makes_logits(equation):
            one = called_logits(equation)
            shape = one.hidden.aval.shape
            tokens = max(tokens, math.prod(shape[place] for place in one.tokens))
        else:
            inner = _compat.inner_jaxprs(equation)
            tokens = max([tokens, *map(most_tokens, inner)])
    return tokens


def _rebuilt(
    jaxpr: Any, trained: Sequence[bool], find: Found
) -> tuple[Any, tuple[str, ...]]:
    flat = _flattened(jaxpr)
    if find is _attentions and holds_rescaled(flat):
        scaling = _Builder(flat, trained, lambda body, _: (rescaled(body), []))
        flat = scaling.program()
    if find is _attentions:
        flat = with_inner_masks(flat, trained)
    builder = _Builder(flat, trained, find)
    return builder.program(), tuple(dict.fromkeys(builder.reasons))


@functools.lru_cache(maxsize=2)
def _flattened(jaxpr: Any) -> Any:
    """Returns a program without its calls; cached, as attention and logits both ask."""
    if _is_flat(jaxpr):
        return jaxpr
    return spliced(jaxpr, _instead_of_calls, constant=_count)


def _instead_of_calls(equation: Any) -> Callable[..., list[Any]] | str | None:
    kind = _inner_program_kind(equation)
    if kind is None or kind == "inline":
        return kind
    (inner,) = _compat.inner_jaxprs(equation)
    if _is_flat(inner):
        return None
    return lambda *xs: rebuild.around(equation, xs, lambda ys: _inlined(inner, ys))


def _inlined(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program without its calls; loops and checkpointed regions stay."""

    def each(equation: Any, operands: Sequence[Any]) -> list[Any]:
        kind = _inner_program_kind(equation)
        if kind is None:
            return _compat.bind(equation, operands)
        inner = _compat.inner_jaxprs(equation)[0]
        if kind == "inline":
            return _inlined(inner, operands)
        return rebuild.around(equation, operands, lambda xs: _inlined(inner, xs))

    return rebuild.run(jaxpr, values, each, constant=_as_iota)


def _inner_program_kind(equation: Any) -> str | None:
    called = is_attention(equation) or makes_logits(equation) or sorts_rows(equation)
    kind = _compat.recursion(equation)
    return kind if kind in ("inline", "remat", "scan") and not called else None


def _is_flat(jaxpr: Any) -> bool:
    body, constants = _compat.open_jaxpr(jaxpr)
    if any(_count(value) is not None for value in constants):
        return False
    kinds = [(equation, _inner_program_kind(equation)) for equation in body.eqns]
    return all(
        kind is None or kind != "inline" and _is_flat(_compat.inner_jaxprs(equation)[0])
        for equation, kind in kinds
    )


def _as_iota(value: Any) -> Any:
    count = _count(value)
    return value if count is None else count()


def _count(value: Any) -> Callable[[], Any] | None:
    """Returns a function that makes positions 0, 1, … by ``iota``; else None."""
    shape: Any = getattr(value, "shape", ())
    dtype: Any = getattr(value, "dtype", None)
    known = _compat.is_concrete(value) or isinstance(value, np.ndarray)
    if not known or len(shape) != 1 or not jnp.issubdtype(dtype, jnp.integer):
        return None
    same = np.array_equal(np.asarray(value), np.arange(shape[0]))
    return (lambda: jax.lax.iota(dtype, shape[0])) if same else None


@dataclass(frozen=True, slots=True)
class _Arranged:
    items: list[Any]
    inside: dict[int, _Arranged]
    calls: bool
    same: bool


class _Builder:
    def __init__(self, flat: Any, trained: Sequence[bool], find: Found) -> None:
        self.flat = flat
        self.find = find
        self.reasons: list[str] = []
        self.arranged = self._arranged(flat, trained)

    def program(self) -> Any:
        if not self.arranged.calls:
            return self.flat
        return spliced(self.flat, self._changed, items=self.arranged.items)

    def _changed(self, equation: Any) -> Callable[..., list[Any]] | None:
        within = self.arranged.inside.get(id(equation))
        if within is None or within.same:
            return None
        (inner,) = _compat.inner_jaxprs(equation)
        return lambda *xs: rebuild.around(
            equation, xs, lambda ys: _run(inner, ys, within)
        )

    def _arranged(self, jaxpr: Any, trained: Sequence[bool]) -> _Arranged:
        body = _compat.open_jaxpr(jaxpr)[0]
        flows = trained_in(body, trained)
        calls, reasons = self.find(body, flows)
        self.reasons += reasons
        items = rebuild.arranged(body, calls)
        inside: dict[int, _Arranged] = {}
        for equation in items:
            if isinstance(equation, rebuild.EquationReplacement):
                continue
            kind = _compat.recursion(equation)
            if kind in ("remat", "scan"):
                flags = [
                    not _compat.is_literal(a) and a in flows for a in equation.invars
                ]
                inner = _compat.inner_jaxprs(equation)[0]
                if kind == "scan":
                    flags = trained_in_scan(equation, flags)
                inside[id(equation)] = self._arranged(inner, flags)
        some = bool(calls) or any(one.calls for one in inside.values())
        same = (
            not calls
            and len(items) == len(body.eqns)
            and all(one.same for one in inside.values())
        )
        return _Arranged(items, inside, some, same)


def _run(jaxpr: Any, values: Sequence[Any], arranged: _Arranged) -> list[Any]:
    def each(equation: Any, operands: Sequence[Any]) -> list[Any]:
        within = arranged.inside.get(id(equation))
        if within is None:
            return _compat.bind(equation, operands)
        inner = _compat.inner_jaxprs(equation)[0]
        return rebuild.around(equation, operands, lambda xs: _run(inner, xs, within))

    return rebuild.run(jaxpr, values, each, items=arranged.items)


def _attentions(
    body: Any, trained: set[Any]
) -> tuple[list[rebuild.EquationReplacement], list[str]]:
    result, reasons = recognised(body, trained)
    maker = {v: e for e in body.eqns for v in e.outvars}
    calls = [
        _call(CALL, one.inputs, (one.output,), equations_of(one, maker), one.second)
        for one in result
    ]
    return calls, reasons


def _losses(
    body: Any, trained: set[Any]
) -> tuple[list[rebuild.EquationReplacement], list[str]]:
    calls = [
        _call(
            f"{LOGITS}{2 + sum(one.trained)}",
            one.inputs,
            one.exits,
            _behind(body, one),
            one.product,
        )
        for one in logits_in(body, trained)
    ]
    return calls, []


def _behind(body: Any, one: Logits) -> list[Any]:
    """Returns equations from the inputs of logits to the exits, in program order."""
    needed, given = set(one.exits), set(one.inputs)
    behind = []
    for equation in reversed(body.eqns):
        if any(v in needed and v not in given for v in equation.outvars):
            behind.append(equation)
            needed.update(a for a in equation.invars if not _compat.is_literal(a))
    return behind[::-1]


def _call(
    name: str,
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
    equations: Sequence[Any],
    scope: Any,
) -> rebuild.EquationReplacement:
    def body(*values: Any) -> list[Any]:
        known = dict(zip(inputs, values, strict=True))
        return rebuild.compute(equations, known, outputs)

    body.__name__ = name
    return rebuild.EquationReplacement(
        inputs=inputs, outputs=outputs, function=jax.jit(body), equation=scope
    )


def keeping(scan: Any, calls: set[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that runs a scan and saves what attention in blocks saves.

    These are queries, keys and values in the ring's order, and the output.

    Args:
        scan: Scan as it was traced.
        calls: Ids of its calls that run in blocks.
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
        # Only the saved residuals are inspected.
        return tuple(jnp.zeros_like(x) for x in (*kept[1:4], *kept[4]))

    attention.defvjp(forward, backward)
    return attention
