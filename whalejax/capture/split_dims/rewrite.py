"""Splits fused dimensions: ``[embed, 3 · heads]`` becomes ``[embed, 3, heads]``.

A kernel that makes query, key and value in one product has the heads as the minor part
of a dimension. So do all values before the three are separated. If a program reshapes
``[batch, heads, ...]`` into ``[batch · heads, ...]``, or rows of a time-major batch
into one dimension, the following values have a minor part too. No ``PartitionSpec`` can
name a minor part. So the program is evaluated again, with such parameters reshaped and
such reshapes postponed. Operations keep the parts as separate dimensions if they can.
Other operations read the original value. The computation stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from whalejax import _compat
from whalejax.capture.sorted_rows import sorts_rows
from whalejax.capture.split_dims.rules import (
    RULES,
    View,
    array_of,
    flat_of,
    like,
    merge_dims,
    pattern_of,
    recut,
    spread,
)
from whalejax.jaxpr import rebuild


Position = tuple[int, ...]

_PLACING: Final = ("sharding", "out_sharding")
"""Parameters by which the user shards a result, in terms of its original dimensions."""


def taken_apart(
    jaxpr: Any,
    fused: Mapping[int, Mapping[int, int]],
    merges: frozenset[Position] = frozenset(),
) -> Any:
    """Returns a program that first reshapes fused parameters and postpones reshapes.

    Args:
        jaxpr: Closed jaxpr, as traced.
        fused: Number of parts by dimension, for each input to cut, by its index.
        merges: Positions of reshapes whose results keep the merged dimensions separate.
    """
    body, _ = _compat.open_jaxpr(jaxpr)
    avals = [v.aval for v in body.invars]
    # Inputs that the program returns unchanged must stay the same variables.
    numbers = {v: i for i, v in enumerate(body.invars)}
    own = [None if _compat.is_literal(v) else numbers.get(v) for v in body.outvars]
    runner = _Runner(merges)

    def program(*leaves: Any) -> list[Any]:
        values = [
            _cut(leaf, fused[i]) if i in fused else leaf
            for i, leaf in enumerate(leaves)
        ]
        results = runner.run(jaxpr, values, ())
        pairs = zip(results, own, strict=True)
        return [flat_of(v) if i is None else leaves[i] for v, i in pairs]

    return _compat.pruned(_compat.trace(program, avals))


def _cut(value: Any, parts: Mapping[int, int]) -> View:
    shape = tuple(value.shape)
    cuts = {d: (n, shape[d] // n) for d, n in parts.items()}
    return recut(value, shape, cuts)


@dataclass(frozen=True, slots=True)
class _Runner:
    merges: frozenset[Position]

    def run(self, jaxpr: Any, values: Sequence[Any], prefix: Position) -> list[Any]:
        body, constants = _compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
        env.update(zip(body.invars, values, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        for index, equation in enumerate(body.eqns):
            operands = [read(atom) for atom in equation.invars]
            with _compat.equation_context(equation):
                results = self._step(equation, operands, (*prefix, index))
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def _step(
        self, equation: Any, operands: list[Any], position: Position
    ) -> list[Any]:
        carrying = any(isinstance(v, View) for v in operands)
        if carrying or self._merges_inside(position):
            kind = _compat.recursion(equation)
            if kind == "inline" and not sorts_rows(equation):
                inner = _compat.inner_jaxprs(equation)[0]
                return self.run(inner, operands, (*position, 0))
            if kind == "remat":
                return self._remat(equation, operands, position)
            if kind == "scan":
                return self._scan(equation, operands, position)
            if equation.primitive.name == "custom_jvp_call" and carrying:
                return self._with_rule(equation, operands)
        name = equation.primitive.name
        result: list[Any] | None = None
        if position in self.merges:
            result = merge_dims(equation, operands)
        elif not carrying:
            result = spread(equation, operands)
        elif all(equation.params.get(n) is None for n in _PLACING) and name in RULES:
            result = RULES[name](equation, operands)
        if result is None:
            return _compat.bind(equation, [flat_of(v) for v in operands])
        return result

    def _merges_inside(self, position: Position) -> bool:
        depth = len(position)
        return any(len(m) > depth and m[:depth] == position for m in self.merges)

    def _remat(
        self, equation: Any, operands: list[Any], position: Position
    ) -> list[Any]:
        inner = _compat.inner_jaxprs(equation)[0]
        outside: list[Any] = []

        def region(arguments: Sequence[Any]) -> list[Any]:
            values = [*map(like, arguments, operands)]
            region = self.run(inner, values, (*position, 0))
            outside[:] = map(pattern_of, region)
            return [array_of(v) for v in region]

        arrays = [array_of(v) for v in operands]
        results = rebuild.remat(equation, arrays, region, equation.params["policy"])
        return [*map(like, results, outside)]

    def _scan(
        self, equation: Any, operands: list[Any], position: Position
    ) -> list[Any]:
        inner = _compat.inner_jaxprs(equation)[0]
        parts = _compat.scan_parts(equation)
        first, last = parts.num_consts, parts.num_consts + parts.num_carries
        patterns: list[Any] = []
        arrays: list[Any] = []
        for place, value in enumerate(operands):
            stacked = place >= last
            if not isinstance(value, View) or (stacked and 0 in value.cuts):
                patterns.append(None)
                arrays.append(flat_of(value))
            else:
                patterns.append(value.slice_view() if stacked else value)
                arrays.append(value.value)
        carried = patterns[first:last]
        outside: list[Any] = []

        def body(arguments: Sequence[Any]) -> list[Any]:
            values = [*map(like, arguments, patterns)]
            body = self.run(inner, values, (*position, 0))
            stacked = body[len(carried) :]
            outside[:] = map(pattern_of, stacked)
            return [*map(_as_carried, body, carried), *map(array_of, stacked)]

        results = rebuild.scan(equation, arrays, body)
        turned = [*map(like, results, carried)]
        for value, pattern in zip(results[len(carried) :], outside, strict=True):
            turned.append(value if pattern is None else pattern.outside(value))
        return turned

    def _with_rule(self, equation: Any, operands: list[Any]) -> list[Any]:
        """Evaluates a call with its own tangent rule, which receives views too."""
        if not all(_compat.is_inexact(v.aval.dtype) for v in equation.invars):
            return _compat.bind(equation, [flat_of(v) for v in operands])
        inner = _compat.inner_jaxprs(equation)[0]
        avals = [v.aval for v in equation.invars]
        outside: list[Any] = []
        plain = _Runner(frozenset())

        def ruled(*arguments: Any) -> Any:
            def run(*values: Any) -> tuple[Any, ...]:
                return tuple(_compat.bind(equation, values))

            half = len(avals)
            result = jax.jvp(run, arguments[:half], arguments[half:])
            return jax.tree.leaves(result)

        @jax.custom_jvp
        def call(*arrays: Any) -> tuple[Any, ...]:
            call = plain.run(inner, [*map(like, arrays, operands)], ())
            outside[:] = map(pattern_of, call)
            return tuple(map(array_of, call))

        @call.defjvp
        def _rule(primals: Any, tangents: Any) -> Any:
            both = _compat.trace(ruled, [*avals, *avals])
            values = [*map(like, primals, operands), *map(like, tangents, operands)]
            result = plain.run(both, values, ())
            made = [*map(_as_carried, result, [*outside, *outside])]
            return tuple(made[: len(outside)]), tuple(made[len(outside) :])

        results = call(*map(array_of, operands))
        return [*map(like, results, outside)]


def _as_carried(value: Any, pattern: Any) -> Any:
    if not isinstance(pattern, View):
        return flat_of(value)
    if isinstance(value, View) and value.cuts == pattern.cuts:
        return value.value
    return recut(flat_of(value), pattern.shape, pattern.cuts).value
