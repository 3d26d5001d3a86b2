"""Divides a traced loss into units, which a pipeline assigns to stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whalejax import _compat
from whalejax.capture.batch_independent_state import advances
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.planner.pipeline.program_cut import Position, Unit, Units, Value


if TYPE_CHECKING:
    from whalejax.capture.trace import Captured


COSTLY = frozenset(
    "dot_general ragged_dot_general conv_general_dilated sort top_k pallas_call".split()
)
"""Operations that a single stage may do; loops and branches belong to them too."""


def units_of(captured: Captured) -> Units:
    """Returns the units of a traced loss.

    Args:
        captured: The traced loss.
    """
    units: list[Unit] = []
    acting: set[Position] = set()
    body, _ = _compat.open_jaxpr(captured.jaxpr)
    env: dict[Any, Value | None] = dict.fromkeys(body.constvars)
    env.update((v, ((), i)) for i, v in enumerate(body.invars))
    _walk(captured.jaxpr, env, (), captured.outputs, units, acting)
    outputs = [None if _compat.is_literal(v) else env[v] for v in body.outvars]
    adapter = captured.adapter
    first = len(adapter.param_paths)
    added = advances(adapter.rest, body, first)
    count = len(outputs) - len(added)
    fresh = {
        first + i: value
        for i, (more, value) in enumerate(zip(added, outputs[count:], strict=True))
        if value is not None and more is None
    }
    return Units(
        units=_live(units, [*outputs[:count], *fresh.values()], acting),
        params=adapter.param_paths,
        others=adapter.rest_paths,
        frozen=frozenset(first + i for i in captured.frozen),
        counters={first + i: more for i, more in enumerate(added) if more},
        results=tuple(outputs[:count]),
        fresh=fresh,
    )


def avals_of(captured: Captured) -> dict[Value, Any]:
    """Returns shape and dtype of every value of a traced loss."""
    body, _ = _compat.open_jaxpr(captured.jaxpr)
    avals: dict[Value, Any] = {((), i): v.aval for i, v in enumerate(body.invars)}

    def walk(jaxpr: Any, prefix: Position) -> None:
        for index, equation in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
            position = (*prefix, index)
            if _compat.recursion(equation) == "inline" and not sorts_rows(equation):
                walk(_compat.inner_jaxprs(equation)[0], (*position, 0))
            for slot, variable in enumerate(equation.outvars):
                avals[position, slot] = variable.aval

    walk(captured.jaxpr, ())
    return avals


def _walk(
    jaxpr: Any,
    env: dict[Any, Value | None],
    prefix: Position,
    tensors: Mapping[Position, Sequence[int | None]],
    found: list[Unit],
    acting: set[Position],
) -> None:
    body, _ = _compat.open_jaxpr(jaxpr)
    for index, equation in enumerate(body.eqns):
        position = (*prefix, index)
        given = [None if _compat.is_literal(v) else env[v] for v in equation.invars]
        if _compat.recursion(equation) == "inline" and not sorts_rows(equation):
            (inner,) = _compat.inner_jaxprs(equation)
            within, _ = _compat.open_jaxpr(inner)
            inside: dict[Any, Value | None] = dict.fromkeys(within.constvars)
            inside.update(zip(within.invars, given, strict=True))
            _walk(inner, inside, (*position, 0), tensors, found, acting)
            for own, outer in zip(within.outvars, equation.outvars, strict=True):
                env[outer] = None if _compat.is_literal(own) else inside[own]
            continue
        writes = tuple((position, slot) for slot in range(len(equation.outvars)))
        env.update(zip(equation.outvars, writes, strict=True))
        avals = [v.aval for v in equation.outvars]
        if equation.effects:
            acting.add(position)
        found.append(
            Unit(
                position=position,
                reads=tuple(dict.fromkeys(v for v in given if v is not None)),
                writes=writes,
                tensors=tuple(tensors.get(position) or (None,) * len(writes)),
                sizes=tuple(map(_compat.aval_bytes, avals)),
                cheap=not equation.effects and _cheap(equation),
                line=_compat.line_text(equation),
                kind=equation.primitive.name,
            )
        )


def _cheap(equation: Any) -> bool:
    if _compat.recursion(equation) not in (None, "opaque", "inline"):
        return False
    inner = (_compat.open_jaxpr(x)[0] for x in _compat.inner_jaxprs(equation))
    return equation.primitive.name not in COSTLY and all(
        _cheap(e) for body in inner for e in body.eqns
    )


def _live(
    units: Sequence[Unit], ends: Sequence[Value | None], acting: Collection[Position]
) -> tuple[Unit, ...]:
    wanted = set(ends)
    live = []
    for unit in reversed(units):
        if not wanted.isdisjoint(unit.writes) or unit.position in acting:
            wanted.update(unit.reads)
            live.append(unit)
    return tuple(reversed(live))
