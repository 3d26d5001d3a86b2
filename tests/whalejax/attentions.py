"""Runs the attention of a program in blocks without a plan, to test its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import attention_of
from whalejax.capture.patterns.named_calls import is_attention
from whalejax.jaxpr import rebuild
from whalejax.lowering.spmd.ring_attention import attend


def in_blocks(program: Any, mesh: Mesh, *, rows: bool = True) -> Callable[..., Any]:
    """The program with its attention in blocks, over an axis ``context``.

    Args:
        program: with calls.
        mesh: the devices.
        rows: queries are sharded, beside keys and values.
    """

    def each(equation: Any, values: Any) -> Any:
        if not is_attention(equation):
            return _compat.bind(equation, values)
        inner = equation.params["jaxpr"]
        one = attention_of(inner)
        longest = max(one.rows, key=lambda row: one.query.aval.shape[row[0]])[0]
        places = {
            one.query: longest if rows else -1,
            one.key: one.column[0],
            one.value: one.column[1],
        }
        specs = [
            tuple(
                (("context",) if d == places.get(v) else ())
                for d in range(len(v.aval.shape))
            )
            for v in inner.jaxpr.invars
        ]
        return [attend(equation, values, specs, mesh)]

    return lambda *xs: rebuild.run(program, xs, each)[0]


def context_mesh(size: int) -> Mesh:
    return jax.make_mesh(
        (size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )
