"""Fused dimensions taken apart: ``[embed, 3 · heads]`` seen as ``[embed, 3, heads]``.

A kernel that makes query, key and value in one product holds the heads as the minor
part of a dimension, and so does every value on the way to where the three part. No
``PartitionSpec`` can name it there. The program is run again with such parameters
reshaped, and every operation that can carries the parts along as a dimension of their
own; what cannot gets the value as it was. Nothing is computed that was not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax import lax

from whalejax import _compat, rebuild
from whalejax.capture.rules_elementwise import SAME_SHAPE


Shape = tuple[int, ...]
Cuts = Mapping[int, int]
"""Dimension to the number of equal parts that it is cut into."""

_PLACING: Final = ("sharding", "out_sharding")
"""Parameters by which the user places a result, in the dimensions that it has."""


@dataclass(frozen=True, slots=True)
class View:
    """A value with some of its dimensions cut in two.

    Attributes:
        value: the array; a cut dimension of it is two: the parts, then one part.
        shape: as the program has it.
        cuts: which dimensions of ``shape`` are cut.
    """

    value: Any
    shape: Shape
    cuts: Cuts

    @property
    def flat(self) -> Any:
        """The array as the program has it."""
        return lax.reshape(self.value, self.shape)

    @property
    def places(self) -> list[Shape]:
        """For each dimension of ``shape``, those of ``value``."""
        found: list[Shape] = []
        first = 0
        for dim in range(len(self.shape)):
            count = 2 if dim in self.cuts else 1
            found.append(tuple(range(first, first + count)))
            first += count
        return found

    def inside(self) -> View:
        """How a loop's body sees one slice of this stack; its value is not used."""
        return View(None, self.shape[1:], {d - 1: n for d, n in self.cuts.items()})


def taken_apart(jaxpr: Any, fused: Mapping[int, Cuts]) -> Any:
    """A program whose fused parameters are reshaped first.

    Args:
        jaxpr: closed, as traced.
        fused: number of an input to its cuts.
    """
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]

    def program(*leaves: Any) -> list[Any]:
        values = [
            _cut(leaf, fused[i]) if i in fused else leaf
            for i, leaf in enumerate(leaves)
        ]
        return [_flat(v) for v in _run(jaxpr, values)]

    return _compat.trace(program, avals)


def _cut(value: Any, cuts: Cuts) -> View:
    shape = tuple(value.shape)
    return View(lax.reshape(value, _expanded(shape, cuts)), shape, cuts)


def _expanded(shape: Shape, cuts: Cuts) -> Shape:
    """A shape with its cut dimensions in two; those of size 1 are 1 and 1."""
    found: list[int] = []
    for dim, size in enumerate(shape):
        if dim not in cuts:
            found.append(size)
        else:
            parts = 1 if size == 1 else cuts[dim]
            found += [parts, size // parts]
    return tuple(found)


def _flat(value: Any) -> Any:
    return value.flat if isinstance(value, View) else value


def _array(value: Any) -> Any:
    return value.value if isinstance(value, View) else value


def _like(value: Any, pattern: Any) -> Any:
    """An array as the view that a pattern says it is."""
    if not isinstance(pattern, View):
        return value
    return View(value, pattern.shape, pattern.cuts)


# Running a program.


def _run(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    body, constants = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
    env.update(zip(body.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for equation in body.eqns:
        operands = [read(atom) for atom in equation.invars]
        with _compat.equation_context(equation):
            results = _step(equation, operands)
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def _step(equation: Any, operands: list[Any]) -> list[Any]:
    if not any(isinstance(v, View) for v in operands):
        return _compat.bind(equation, operands)
    kind = _compat.recursion(equation)
    if kind == "inline":
        return _run(_compat.inner_jaxprs(equation)[0], operands)
    if kind == "remat":
        return _remat(equation, operands)
    if kind == "scan":
        return _scan(equation, operands)
    placed = any(equation.params.get(n) is not None for n in _PLACING)
    rule = None if placed else _RULES.get(equation.primitive.name)
    carried = rule(equation, operands) if rule else None
    if carried is None:
        return _compat.bind(equation, [_flat(v) for v in operands])
    return carried


def _remat(equation: Any, operands: list[Any]) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]
    outside: list[Any] = []

    def region(arguments: Sequence[Any]) -> list[Any]:
        results = _run(inner, [*map(_like, arguments, operands)])
        outside[:] = results
        return [_array(v) for v in results]

    arrays = [_array(v) for v in operands]
    results = rebuild.remat(equation, arrays, region, equation.params["policy"])
    return [*map(_like, results, outside)]


def _scan(equation: Any, operands: list[Any]) -> list[Any]:
    inner = _compat.inner_jaxprs(equation)[0]
    parts = _compat.scan_parts(equation)
    last = parts.num_consts + parts.num_carries
    patterns: list[Any] = []
    arrays: list[Any] = []
    for place, value in enumerate(operands):
        carry = parts.num_consts <= place < last
        if not isinstance(value, View) or carry or (place >= last and 0 in value.cuts):
            patterns.append(None)
            arrays.append(_flat(value))
        else:
            patterns.append(value.inside() if place >= last else value)
            arrays.append(value.value)

    def body(arguments: Sequence[Any]) -> list[Any]:
        return [_flat(v) for v in _run(inner, [*map(_like, arguments, patterns)])]

    return rebuild.scan(equation, arrays, body)


# What carries parts along: each gives the results, or None where it cannot.

_Rule = Callable[[Any, list[Any]], "list[Any] | None"]


def _views(operands: Sequence[Any]) -> list[View]:
    return [v for v in operands if isinstance(v, View)]


def _elementwise(equation: Any, operands: list[Any]) -> list[Any] | None:
    out = tuple(equation.outvars[0].aval.shape)
    cuts: dict[int, int] = {}
    for view in _views(operands):
        if any(cuts.get(d, n) != n for d, n in view.cuts.items()):
            return None
        cuts.update(view.cuts)
    arrays = []
    for value in operands:
        shape = value.shape if isinstance(value, View) else np.shape(value)
        if len(shape) not in (0, len(out)):
            return None
        same = isinstance(value, View) and value.cuts == cuts
        scalar = not shape
        arrays.append(
            _array(value)
            if same or scalar
            else lax.reshape(_flat(value), _expanded(shape, cuts))
        )
    (result,) = _compat.bind(equation, arrays)
    return [View(result, out, cuts)]


def _dot_general(equation: Any, operands: list[Any]) -> list[Any] | None:
    (left_in, right_in), (left_batch, right_batch) = equation.params[
        "dimension_numbers"
    ]
    sides = []
    parts: list[int] = []
    for value, inside, batch in (
        (operands[0], left_in, left_batch),
        (operands[1], right_in, right_batch),
    ):
        taken = {*inside, *batch}
        view = value if isinstance(value, View) else View(value, np.shape(value), {})
        if taken & set(view.cuts):
            view = View(view.flat, view.shape, {})
        sides.append(view)
        for dim in range(len(view.shape)):
            if dim not in taken:
                parts.append(view.cuts.get(dim, 1))
    left, right = sides
    if not left.cuts and not right.cuts:
        return None
    numbers = tuple(
        tuple(
            tuple(side.places[d][0] for d in dims)
            for side, dims in zip(sides, pair, strict=True)
        )
        for pair in ((left_in, right_in), (left_batch, right_batch))
    )
    (result,) = _compat.bind(
        equation, [left.value, right.value], dimension_numbers=numbers
    )
    shape = tuple(equation.outvars[0].aval.shape)
    first = len(left_batch)
    cuts = {first + i: n for i, n in enumerate(parts) if n > 1}
    return [View(result, shape, cuts)]


def _broadcast(equation: Any, operands: list[Any]) -> list[Any] | None:
    if len(operands) != 1:
        return None
    (view,) = operands
    shape, onto = equation.params["shape"], equation.params["broadcast_dimensions"]
    cuts = {onto[d]: n for d, n in view.cuts.items()}
    target = View(None, tuple(shape), cuts)
    dims = [place for d in range(len(view.shape)) for place in target.places[onto[d]]]
    value = lax.broadcast_in_dim(view.value, _expanded(target.shape, cuts), dims)
    return [View(value, target.shape, cuts)]


def _transpose(equation: Any, operands: list[Any]) -> list[Any]:
    (view,) = operands
    order = equation.params["permutation"]
    places = view.places
    value = lax.transpose(view.value, [p for d in order for p in places[d]])
    shape = tuple(view.shape[d] for d in order)
    cuts = {new: view.cuts[d] for new, d in enumerate(order) if d in view.cuts}
    return [View(value, shape, cuts)]


def _reshape(equation: Any, operands: list[Any]) -> list[Any] | None:
    turned = equation.params.get("dimensions") is not None
    return None if turned else _regrouped(equation, operands)


def _regrouped(equation: Any, operands: list[Any]) -> list[Any]:
    """Any regrouping serves; dimensions that it leaves alone stay cut."""
    (view,) = operands
    shape = tuple(equation.outvars[0].aval.shape)
    after = {(n, math.prod(shape[d + 1 :])): d for d, n in enumerate(shape)}
    cuts = {}
    for dim, parts in view.cuts.items():
        key = (view.shape[dim], math.prod(view.shape[dim + 1 :]))
        if key in after:
            cuts[after[key]] = parts
    value = lax.reshape(view.value, _expanded(shape, cuts))
    return [View(value, shape, cuts) if cuts else value]


def _split(equation: Any, operands: list[Any]) -> list[Any] | None:
    (view,) = operands
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    place = view.places[axis][0]
    if axis not in view.cuts:
        values = lax.split(view.value, sizes, axis=place)
        shapes = [_with(view.shape, axis, size) for size in sizes]
        return [View(v, s, view.cuts) for v, s in zip(values, shapes, strict=True)]
    if len(sizes) != view.cuts[axis] or len(set(sizes)) > 1:
        return None
    values = lax.split(view.value, (1,) * len(sizes), axis=place)
    cuts = {d: n for d, n in view.cuts.items() if d != axis}
    shape = _with(view.shape, axis, sizes[0])
    results = [lax.squeeze(v, (place,)) for v in values]
    return [View(v, shape, cuts) if cuts else v for v in results]


def _slice(equation: Any, operands: list[Any]) -> list[Any] | None:
    (view,) = operands
    if any(step != 1 for step in equation.params["strides"] or ()):
        return None
    starts: list[int] = []
    limits: list[int] = []
    cuts: dict[int, int] = {}
    bounds = zip(
        equation.params["start_indices"], equation.params["limit_indices"], strict=True
    )
    for dim, (start, limit) in enumerate(bounds):
        if dim not in view.cuts:
            starts.append(start)
            limits.append(limit)
            continue
        part = view.shape[dim] // view.cuts[dim]
        if start % part or limit % part:
            return None
        starts += [start // part, 0]
        limits += [limit // part, part]
        if limit - start > part:
            cuts[dim] = (limit - start) // part
    value = lax.slice(view.value, starts, limits)
    shape = tuple(equation.outvars[0].aval.shape)
    value = lax.reshape(value, _expanded(shape, cuts))
    return [View(value, shape, cuts) if cuts else value]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(SAME_SHAPE, _elementwise),
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _regrouped,
    "slice": _slice,
    "split": _split,
}
