"""Attention masks that are made outside the layers that read them.

A model may make one mask, ``[batch, 1, rows, columns]``, and pass it to each layer. In
a scan or a checkpointed region it is then a complete value from outside, and its memory
grows with the square of the sequence. Here the equations that make it (positions,
comparisons of padding or segment numbers) run again inside, where blocks can be
computed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import (
    recognised,
    trained_in,
    trained_in_scan,
)
from whalejax.capture.patterns.blockwise import operand_tags, stops_gradient
from whalejax.jaxpr import rebuild


@dataclass(frozen=True, slots=True)
class _Maker:
    sources: tuple[Any, ...]
    equations: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Region:
    """A scan or a checkpointed region; ``masks`` are inputs that attention reads for
    pairs of rows and columns.
    """

    equation: Any
    inner: Any
    trained: Sequence[bool]
    masks: set[int]
    makers: Mapping[int, _Maker]


def with_inner_masks(jaxpr: Any, trained: Sequence[bool]) -> Any:
    """Returns a program whose layers make their attention masks themselves.

    Args:
        jaxpr: Jaxpr without calls that could be inlined.
        trained: Whether each input has a gradient.
    """
    avals = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]
    # Each pass moves masks one region further in. It ends, as the sources passed in
    # place of a mask are smaller, and no smaller values make those in blocks.
    while _holds_outer_masks(jaxpr, trained):

        def once(*values: Any, program: Any = jaxpr) -> list[Any]:
            return _made_inside(program, values, trained)

        jaxpr = _compat.trace(once, avals)
    return jaxpr


def _holds_outer_masks(jaxpr: Any, trained: Sequence[bool]) -> bool:
    return any(
        region.makers or _holds_outer_masks(region.inner, region.trained)
        for region in _regions(jaxpr, trained)
    )


def _made_inside(
    jaxpr: Any, values: Sequence[Any], trained: Sequence[bool]
) -> list[Any]:
    """Evaluates a program; an outer region makes the masks of an inner one."""
    calls = {id(region.equation): _call(region) for region in _regions(jaxpr, trained)}
    body = _compat.open_jaxpr(jaxpr)[0]
    items = [calls.get(id(equation), equation) for equation in body.eqns]
    return rebuild.run(jaxpr, values, _compat.bind, items=items)


def _regions(jaxpr: Any, trained: Sequence[bool]) -> Iterator[_Region]:
    body = _compat.open_jaxpr(jaxpr)[0]
    flows = trained_in(body, trained)
    maker = {v: e for e in body.eqns for v in e.outvars}
    for equation in body.eqns:
        kind = _compat.recursion(equation)
        if kind not in ("remat", "scan"):
            continue
        flags = [not _compat.is_literal(a) and a in flows for a in equation.invars]
        inside = trained_in_scan(equation, flags) if kind == "scan" else flags
        (inner,) = _compat.inner_jaxprs(equation)
        masks = _masks(inner, inside)
        if kind == "scan":
            masks &= set(range(_compat.scan_parts(equation).num_consts))
        made = {n: _mask_maker(equation.invars[n], maker, flows) for n in sorted(masks)}
        makers = {n: one for n, one in made.items() if one is not None}
        yield _Region(equation, inner, inside, masks, makers)


def _masks(jaxpr: Any, trained: Sequence[bool]) -> set[int]:
    body = _compat.open_jaxpr(jaxpr)[0]
    read: set[Any] = set()
    flows = trained_in(body, trained)
    for one in recognised(body, flows)[0]:
        rows, column = {tag for _, tag in one.rows}, one.column[2]
        for variable, ways in zip(one.outside, one.scores.tags, strict=True):
            if any(column in tags and not rows.isdisjoint(tags) for tags in ways):
                read.add(variable)
    maker = {v: e for e in body.eqns for v in e.outvars}
    for region in _regions(jaxpr, trained):
        for number in region.masks:
            atom = region.equation.invars[number]
            if not _compat.is_literal(atom):
                # A mask that is enlarged here (for heads, say) is moved in first, and
                # its sources in the next pass.
                sources, _ = _chain(atom, maker, flows)
                read.update(s for s in sources if s.aval.size >= atom.aval.size)
    return {n for n, v in enumerate(body.invars) if v in read}


def _mask_maker(
    variable: Any, maker: Mapping[Any, Any], flows: set[Any]
) -> _Maker | None:
    """Returns the equations that make a variable from smaller ones, or None."""
    if _compat.is_literal(variable) or variable not in maker or variable in flows:
        return None
    sources, equations = _chain(variable, maker, flows)
    nbytes = sum(_compat.aval_bytes(source.aval) for source in sources)
    if nbytes >= _compat.aval_bytes(variable.aval):
        return None
    return _Maker(tuple(sources), tuple(equations))


def _chain(
    variable: Any, maker: Mapping[Any, Any], flows: set[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns sources of a variable, and the equations from them to it.

    Every equation can be computed in blocks. If a gradient enters an equation but none
    leaves its result (a comparison, a stopped gradient), the result is a source.
    """
    sources: list[Any] = []
    equations: list[Any] = []
    seen: set[Any] = set()

    def visit(variable: Any) -> None:
        if variable in seen:
            return
        seen.add(variable)
        equation = maker.get(variable)
        if (
            equation is None
            or not _in_blocks(equation)
            or stops_gradient(equation, flows)
        ):
            sources.append(variable)
            return
        for atom in equation.invars:
            if not _compat.is_literal(atom):
                visit(atom)
        equations.append(equation)

    visit(variable)
    return sources, equations


def _in_blocks(equation: Any) -> bool:
    if equation.primitive.name == "iota":
        return True
    if len(equation.outvars) != 1:
        return False
    shape = equation.outvars[0].aval.shape
    tags = tuple(None if size == 1 else dim for dim, size in enumerate(shape))
    return operand_tags(equation, tags) is not None


def _call(region: _Region) -> rebuild.EquationReplacement:
    """Returns a scan or checkpointed region that makes some of its inputs itself."""
    equation, makers = region.equation, region.makers
    sources = tuple(dict.fromkeys(s for m in makers.values() for s in m.sources))
    literals = {
        n: a.val for n, a in enumerate(equation.invars) if _compat.is_literal(a)
    }
    given = [n for n in range(len(equation.invars)) if n not in {*makers, *literals}]

    def function(*values: Any) -> list[Any]:
        known = dict(zip(sources, values, strict=False))
        operands = {**literals, **dict(zip(given, values[len(sources) :], strict=True))}
        # A scan closes over its constants; None replaces those made inside.
        whole = [operands.get(n) for n in range(len(equation.invars))]
        if _compat.recursion(equation) == "scan":
            return rebuild.scan(equation, whole, lambda xs: run_body(known, list(xs)))
        places = [n for n in range(len(whole)) if n not in makers]

        def body(xs: Sequence[Any]) -> list[Any]:
            body = dict(zip(places, xs, strict=True))
            return run_body(known, [body.get(n) for n in range(len(whole))])

        return rebuild.around(equation, [whole[n] for n in places], body)

    def run_body(known: Mapping[Any, Any], xs: list[Any]) -> list[Any]:
        for number, made in makers.items():
            mask = [equation.invars[number]]
            (xs[number],) = rebuild.compute(made.equations, known, mask)
        return _made_inside(region.inner, xs, region.trained)

    return rebuild.EquationReplacement(
        inputs=(*sources, *(equation.invars[n] for n in given)),
        outputs=tuple(equation.outvars),
        function=function,
        equation=equation,
    )
