"""Rules for reductions, scans along a dimension, windows and sorting."""

from __future__ import annotations

from numbers import Integral
from typing import Final

from whalejax.capture.rules.behaviour import (
    Behaviour,
    Equation,
    FactorBuilder,
    Rule,
    unknown,
)
from whalejax.capture.rules.window_geometry import pooled, windows_of_pooling


def _reduce(equation: Equation, axes: tuple[int, ...], count: int) -> FactorBuilder:
    """Links kept dimensions and contracts reduced ones, for ``count`` operands."""
    letters = FactorBuilder(equation)
    first = len(equation.inputs)
    kept = 0
    for dim in range(len(equation.inputs[0])):
        members = [(slot, dim) for slot in range(count)]
        if dim not in axes:
            members += [(first + slot, kept) for slot in range(len(equation.outputs))]
            kept += 1
        letters.link(*members)
    return letters


def _reduction(*saves: tuple[int, int], flat: bool = False) -> Rule:
    def rule(equation: Equation) -> Behaviour:
        letters = _reduce(equation, tuple(equation.params["axes"]), 1)
        return Behaviour(factors=letters.factors, saves=saves, stops_gradient=flat)

    return rule


def _general_reduce(equation: Equation) -> Behaviour:
    """Returns the behaviour of ``lax.reduce``: operands, then as many start values."""
    count = len(equation.outputs)
    letters = _reduce(equation, tuple(equation.params["dimensions"]), count)
    slots = range(count)
    return Behaviour(
        factors=letters.factors, saves=tuple((s, w) for s in slots for w in slots)
    )


def _over_places(*saves: tuple[int, int]) -> Rule:
    """Returns the rule for a collective over dimensions, as ``vmap`` makes it.

    Each operand has a result of its own; a named axis has no rule.
    """

    def rule(equation: Equation) -> Behaviour:
        axes, count = equation.params["axes"], len(equation.inputs)
        groups = equation.params.get("axis_index_groups")
        if groups is not None or not all(isinstance(a, Integral) for a in axes):
            return unknown(equation)
        letters = FactorBuilder(equation)
        for slot, shape in enumerate(equation.inputs):
            kept = iter(range(len(shape)))
            for dim in range(len(shape)):
                members = [(slot, dim)]
                if dim not in axes:
                    members.append((count + slot, next(kept)))
                letters.link(*members)
        each = tuple((count * side + n, n) for n in range(count) for side, _ in saves)
        return Behaviour(factors=letters.factors, saves=each)

    return rule


def _along(*saves: tuple[int, int]) -> Rule:
    """Returns the rule for running sums, products or maxima, unsharded on the axis."""

    def rule(equation: Equation) -> Behaviour:
        letters = FactorBuilder(equation)
        for dim in range(len(equation.inputs[0])):
            here = dim == equation.params["axis"]
            letters.link((0, dim), (1, dim), kind="unshardable" if here else "linked")
        return Behaviour(factors=letters.factors, saves=saves)

    return rule


def _sort(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    count = len(equation.inputs)
    slots = range(2 * count)
    for dim in range(len(equation.inputs[0])):
        here = dim == equation.params["dimension"]
        letters.link(
            *((slot, dim) for slot in slots),
            kind="unshardable" if here else "linked",
        )
    return Behaviour(
        factors=letters.factors, saves=tuple((slot, slot) for slot in range(count))
    )


def _top_k(equation: Equation) -> Behaviour:
    letters = FactorBuilder(equation)
    rank = len(equation.inputs[0])
    along = equation.params.get("axis", equation.params.get("reduction_dimension", -1))
    along %= rank
    for dim in range(rank):
        if dim == along:
            letters.require_whole((0, dim))
            letters.link((1, dim), (2, dim))
        else:
            letters.link((0, dim), (1, dim), (2, dim))
    return Behaviour(factors=letters.factors, saves=((2, 0),))


def _reduce_window(equation: Equation) -> Behaviour:
    """Returns the behaviour of pooling; only dimensions with a window of one pass."""
    letters = FactorBuilder(equation)
    windows, strides, padding, dilation, _ = pooled(equation)
    result = len(equation.inputs)
    for dim in range(len(equation.inputs[0])):
        unchanged = tuple(padding[dim]) == (0, 0) and dilation[dim] == 1
        if unchanged and windows[dim] == strides[dim] == 1:
            letters.link((0, dim), (result, dim))
        else:
            letters.link((0, dim), kind="halo")
            letters.link((result, dim), kind="halo")
    linear = equation.name == "reduce_window_sum"
    return Behaviour(
        factors=letters.factors,
        saves=() if linear else ((0, 0), (result, 0)),
        windows=windows_of_pooling(equation),
    )


def _batched(last: int) -> Rule:
    """Returns the rule for linear algebra on the last dimensions; leading ones pass."""

    def rule(equation: Equation) -> Behaviour:
        letters = FactorBuilder(equation)
        slots = range(len(equation.inputs) + len(equation.outputs))
        front = len(equation.inputs[0]) - last
        for dim in range(front):
            size = equation.inputs[0][dim]
            letters.link(
                *(
                    (slot, dim)
                    for slot in slots
                    if len(equation.shape(slot)) > dim
                    and equation.shape(slot)[dim] == size
                )
            )
        letters.each_whole(
            (slot, dim)
            for slot in slots
            for dim in range(front, len(equation.shape(slot)))
        )
        return Behaviour(
            factors=letters.factors,
            saves=tuple(
                (slot, w) for slot in slots for w in range(len(equation.inputs))
            ),
        )

    return rule


def _fft(equation: Equation) -> Behaviour:
    rule = _batched(len(equation.params["fft_lengths"]))
    return Behaviour(factors=rule(equation).factors)


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("reduce_sum", "reduce_xor"), _reduction()),
    **dict.fromkeys(("reduce_max", "reduce_min"), _reduction((0, 0), (1, 0))),
    "reduce_prod": _reduction((0, 0), (1, 0)),
    **dict.fromkeys(
        ("reduce_and", "reduce_or", "argmax", "argmin"), _reduction(flat=True)
    ),
    "psum": _over_places(),
    **dict.fromkeys(("pmax", "pmin"), _over_places((0, 0), (1, 0))),
    "reduce": _general_reduce,
    "cumsum": _along(),
    **dict.fromkeys(
        ("cumprod", "cummax", "cummin", "cumlogsumexp"), _along((0, 0), (1, 0))
    ),
    "sort": _sort,
    **dict.fromkeys(("top_k", "approx_top_k"), _top_k),
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
        ),
        _reduce_window,
    ),
    **dict.fromkeys(
        ("cholesky", "qr", "lu", "eigh", "svd", "triangular_solve"), _batched(2)
    ),
    "fft": _fft,
}
